// Reference exponents of the log-sum-exp pass (sweep_lse.cu): bounds within which one serves, and sums of a tile's
// columns for which the rows' reference exponent does not serve.
#pragma once
#include "sm90/sweep/logits.cuh"
#include "sm90/sweep/partial.cuh"

// A reference exponent serves a row or column if the sum over a tile's terms 2^(c x - r) is within these bounds. Up to
// MAX_TILE_SUM, the sum over all tiles stays below 2^127, so float32 does not overflow. Terms below 2^-126 are lost,
// which is negligible relative to a sum of MIN_EXACT_SUM or more.
constexpr float MAX_TILE_SUM = 0x1p80f;
constexpr float MIN_EXACT_SUM = 0x1p-80f;
constexpr float MAX_TILE_MOMENT = 0x1p100f;  // moments over all tiles stay below 2^127, too
constexpr int REFERENCE_STEP = 32;  // reference exponents are multiples of this, so most rows and tiles share one

// The reference exponent of terms whose largest product is x. It is 16 to 48 below c x. So the largest term is 2^16 to
// 2^48, for which float32 has room, and small terms have more room than below a largest term of 1.
__device__ __forceinline__ float choose_reference(float x, float c) {
  return REFERENCE_STEP * (rintf(x * c / REFERENCE_STEP) - 1);
}

// The columns of a tile, over this warp's strip of 16 rows. Group `s` is columns 32 s .. 32 s + 31, one for each lane
// (`join_columns`).
struct TileColumns {
  const float (&x)[64];  // products
  const Rows& rows;
  const Columns& columns;
  const Lane& lane;
  float c;

  // The exponent of x[i], in the unit of products; EXCLUDED if the column's softmax does not have the pair.
  __device__ __forceinline__ float get_exponent(int i) const {
    const SliceColumns slice(columns, i / 8, lane);
    const auto pair = get_pair(i, rows, slice);
    return Options::in_column(x[i], pair) ? Options::exponent(x[i], pair) : EXCLUDED;
  }
  // The largest exponent in this lane's column of group s; LOW if the column's softmax has no pair in the strip.
  __device__ __forceinline__ float find_largest_exponents(int s) const {
    float largest[8];  // of this thread's two rows, in its eight columns of the group
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 16 * s + k / 2 * 4 + k % 2;  // the column's index in x for the first row; i + 2 for the second
      largest[k] = fmaxf(get_exponent(i), get_exponent(i + 2));
    }
    return or_low(join_columns(largest, lane.lane, Larger()));
  }

  // For options that SPLIT, whose sums may have no terms: a small sum without terms is right. `good` becomes false if a
  // column whose sum is small has a pair in the strip. small[s]: the sum of this lane's column of group s is small.
  __device__ __forceinline__ void require_empty(const bool (&small)[TILE_SLICES / 2], bool& good) const {
    if (__any_sync(ALL_LANES, small[0] | small[1] | small[2] | small[3]))
#pragma unroll
      for (int s = 0; s < TILE_SLICES / 2; ++s)
        if (find_largest_exponents(s) != LOW && small[s]) good = false;
  }

  // The sum of this lane's column of group s, with a reference exponent of its own.
  __device__ __forceinline__ Partial sum_with_own_references(int s) const {
    float column_sums[8], moments[8];  // as `largest` above
    const float own = choose_reference(find_largest_exponents(s), c);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 16 * s + k / 2 * 4 + k % 2;
      float shift = __shfl_sync(ALL_LANES, own, k * 4 + lane.t);  // of column k, which lane 4 k + t has
      if (shift == LOW) shift = 0;
      const float e0 = exp2_(fmaf(get_exponent(i), c, -shift)), e1 = exp2_(fmaf(get_exponent(i + 2), c, -shift));
      column_sums[k] = e0 + e1;
      if (MOMENTS) moments[k] = fmaf(e0, x[i], e1 * x[i + 2]);
    }
    Partial sums = {own, join_columns(column_sums, lane.lane, Plus()), 0};
    if (MOMENTS) sums.moment = join_columns(moments, lane.lane, Plus());
    return sums;
  }
};
