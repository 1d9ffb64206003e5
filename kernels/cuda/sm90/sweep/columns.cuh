// Columns' sums of a tile: whether small ones are empty, and sums against reference exponents of their own.
#pragma once
#include "sm90/sweep/logits.cuh"
#include "sm90/sweep/partial.cuh"

// A row's sum in a tile may be this: sums over all strips and query tiles stay below 2^127. What a row or a
// column has lost is below 2^-126 a term, negligible relative to a sum of 2^-80.
constexpr float MAX_TILE_SUM = 0x1p80f;
constexpr float MIN_EXACT_SUM = 0x1p-80f;
constexpr float MAX_TILE_MOMENT = 0x1p100f;  // sums stay below 2^127, as above
constexpr int REFERENCE_STEP = 32;  // between reference exponents

// The reference exponent of terms whose largest product is x. It is 16 to 48 below c x: float32 has more room above a
// reference exponent than the largest term needs.
__device__ __forceinline__ float choose_reference(float x, float c) {
  return REFERENCE_STEP * (rintf(x * c / REFERENCE_STEP) - 1);
}

// The products of a tile as the softmaxes of its columns have them.
struct TileColumns {
  const float (&x)[64];
  const Rows& rows;
  const Columns& columns;
  const Lane& lane;
  float c;

  // The exponent of x[i]; EXCLUDED if the column's softmax does not have the pair.
  __device__ __forceinline__ float get(int i) const {
    const SliceColumns slice(columns, i / 8, lane);
    const auto pair = get_pair(i, rows, slice);
    return Options::in_column(x[i], pair) ? Options::exponent(x[i], pair) : EXCLUDED;
  }
  // The largest of these in each of 32 columns, one a lane; LOW if there is none.
  __device__ __forceinline__ float largest(int s) const {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 16 * s + k / 2 * 4 + k % 2;
      v[k] = fmaxf(get(i), get(i + 2));
    }
    return or_low(join_columns(v, lane.lane, Larger()));
  }

  // `good` becomes false if a column whose sum is small has a pair in the strip. `small` has a value for each 32
  // columns: whether the sum of this lane's column is small.
  __device__ __forceinline__ void require_empty(const bool (&small)[SLICES / 2], bool& good) const {
    if (__any_sync(ALL_LANES, small[0] | small[1] | small[2] | small[3]))
#pragma unroll
      for (int s = 0; s < SLICES / 2; ++s)
        if (largest(s) != LOW && small[s]) good = false;
  }

  // Sums of 32 columns, each with a reference exponent of its own.
  __device__ __forceinline__ Partial own_sums(int s) const {
    float v[8], moments[8];
    const float own = choose_reference(largest(s), c);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 16 * s + k / 2 * 4 + k % 2;
      float shift = __shfl_sync(ALL_LANES, own, k * 4 + lane.t);
      if (shift == LOW) shift = 0;
      const float e0 = exp2_(fmaf(get(i), c, -shift)), e1 = exp2_(fmaf(get(i + 2), c, -shift));
      v[k] = e0 + e1;
      if (MOMENTS) moments[k] = fmaf(e0, x[i], e1 * x[i + 2]);
    }
    Partial sums = {own, join_columns(v, lane.lane, Plus()), 0};
    if (MOMENTS) sums.moment = join_columns(moments, lane.lane, Plus());
    return sums;
  }
};
