// Partial sums of rows and columns in the log-sum-exp pass (sweep_lse.cu): how they are added, and kept in memory.
#pragma once
#include "common.cuh"

// A partial sum of a row or column, with a reference exponent r of its own: (r, sum 2^(c x - r)), and with MOMENTS the
// sum of 2^(c x - r) x. An empty sum has r = -inf.
struct Partial {
  float reference, sum, moment;

  __device__ __forceinline__ static Partial empty() { return {LOW, 0, 0}; }

  // Multiplies the sums by 2^exponent, for exponent <= 0. In two steps: 2^exponent may be too small for a float.
  __device__ __forceinline__ void scale_down(float exponent) {
    const float root = exp2_(0.5f * exponent);
    sum = sum * root * root;
    if (MOMENTS) moment = moment * root * root;
  }
  // Adds another sum of the same row or column. The result has the larger reference exponent.
  __device__ __forceinline__ void add(Partial other) {
    if (reference != other.reference) {
      const float larger = fmaxf(reference, other.reference);
      scale_down(reference - larger);
      other.scale_down(other.reference - larger);
      reference = larger;
    }
    sum += other.sum;
    if (MOMENTS) moment += other.moment;
  }
};

// The memory of partial sums, in global or shared memory. An index belongs to a row or a column.
struct Partials {
  float2* pairs;   // (r, sum)
  float* moments;  // MOMENTS; otherwise null

  // The partial sums from index `first` on.
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

// Columns are summed in two steps. Each warp sums all 128 columns of a tile over its strip of 16 rows. Then each warp
// adds up the sums of 32 columns over the strips of all four warps of the warpgroup.
//
// Whether a warp keeps the first step's sums of its own 32 columns in registers: with moments, shared memory has no
// room for them.
constexpr bool KEEPS_OWN_STRIP = MOMENTS;

// The sums between the two steps, in shared memory. Each of WARPS warps adds up 32 columns (WARPS is 4, or 1 if columns
// are not summed).
template <int WARPS>
struct StripSums {
  static constexpr int STRIPS = KEEPS_OWN_STRIP ? 3 : 4;
  float2 pairs[WARPS][STRIPS][32];
#if MOMENTS
  float moments[WARPS][STRIPS][32];
#endif

  // The sums of the 32 columns that warp `adder` adds up, over the strip of warp `adder ^ distance`. So distance 0 is
  // the adder's own strip, which has no memory if KEEPS_OWN_STRIP.
  __device__ __forceinline__ Partials get_partials(int adder, int distance) {
#if MOMENTS
    return {pairs[adder][distance - 1], moments[adder][distance - 1]};
#else
    return {pairs[adder][distance], nullptr};
#endif
  }
};
