// Partial sums of a row or a column, against a reference exponent: how they are added, and kept in memory.
#pragma once
#include "common.cuh"

// (r, sum 2^(c x - r)), and the sum of 2^(c x - r) x (MOMENTS). An empty sum has r = -inf.
struct Partial {
  float reference, sum, moment;

  __device__ __forceinline__ static Partial empty() { return {LOW, 0, 0}; }

  // Multiply by 2^by for by <= 0, in two steps: 2^by itself may be too small for a float.
  __device__ __forceinline__ void lower(float by) {
    const float half = exp2_(0.5f * by);
    sum = sum * half * half;
    if (MOMENTS) moment = moment * half * half;
  }
  __device__ __forceinline__ void add(Partial other) {
    if (reference != other.reference) {
      const float most = fmaxf(reference, other.reference);
      lower(reference - most);
      other.lower(other.reference - most);
      reference = most;
    }
    sum += other.sum;
    if (MOMENTS) moment += other.moment;
  }
};

// The memory of partial sums: pairs (r, sum), and with MOMENTS also moments.
struct Partials {
  float2* pairs;
  float* moments;

  __device__ __forceinline__ Partials from(i64 first) const {
    return {pairs + first, MOMENTS ? moments + first : nullptr};
  }
  __device__ __forceinline__ Partial get(i64 i) const {
    const float2 pair = pairs[i];
    return {pair.x, pair.y, MOMENTS ? moments[i] : 0};
  }
  __device__ __forceinline__ void set(i64 i, const Partial& p) const {
    pairs[i] = make_float2(p.reference, p.sum);
    if (MOMENTS) moments[i] = p.moment;
  }
};

// Each warp sums all columns of a tile over its strip, and later adds up the four strips' sums of its own 32 columns.
// With moments, shared memory has no room for a warp's sums of its own columns, which stay in registers.
constexpr bool KEEPS_OWN_STRIP = MOMENTS;

// The sums of the columns of a tile over the strips of four warps. Each of WARPS warps adds up the sums of 32 columns.
template <int WARPS>
struct StripSums {
  static constexpr int STRIPS = KEEPS_OWN_STRIP ? 3 : 4;
  float2 pairs[WARPS][STRIPS][32];
#if MOMENTS
  float moments[WARPS][STRIPS][32];
#endif

  // The sums over the strip of warp `warp ^ other`, of the columns that warp `warp` adds up.
  __device__ __forceinline__ Partials get_partials(int warp, int other) {
#if MOMENTS
    return {pairs[warp][other - 1], moments[warp][other - 1]};
#else
    return {pairs[warp][other], nullptr};
#endif
  }
};
