// Sums and maxima over all thread blocks of a launch, of which the last one to end has the results: no further launch
// is needed for them.
#pragma once
#include "common.cuh"

// Whether this thread block is the last one of the launch to come here. All its threads call this, and then see what
// the other blocks have written before. *arrived is 0 before the launch, and after it. No block waits for another.
__device__ __forceinline__ bool is_last_block(u32* arrived) {
  __shared__ bool is_last;
  __syncthreads();  // the writes of all threads of the block come before the fence below
  if (threadIdx.x == 0) {
    __threadfence();  // they come before the addition, for threads of other blocks
    is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    if (is_last) *arrived = 0;
    __threadfence();  // the additions of other blocks come before the reads of their writes
  }
  __syncthreads();  // the write of is_last comes before the reads below
  return is_last;
}

// The sums (`x` 0 to 3) and the maxima (4 to 7) of eight numbers of each thread, over thread blocks of
// REDUCTION_THREADS threads, in one order. Thread 16 n gets the result of x[n]. A short loop: at the end of a kernel,
// instructions that are executed once take the time in which they are fetched.
constexpr int REDUCTION_THREADS = 128;
struct Reduction {
  double memory[8][REDUCTION_THREADS];

  __device__ __forceinline__ static double join(double x, double y) { return threadIdx.x < 64 ? x + y : fmax(x, y); }
  __device__ __forceinline__ static double over_16_lanes(double x) {
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, lanes));
    return x;
  }
  // Over the thread block.
  __device__ __forceinline__ double over_block(const double (&x)[8]) {
#pragma unroll
    for (int n = 0; n < 8; ++n) memory[n][threadIdx.x] = x[n];
    __syncthreads();  // the writes of memory[] come before the reads below
    const double* mine = memory[threadIdx.x / 16];
    double y = mine[threadIdx.x % 16];
#pragma unroll
    for (int at = 16; at < REDUCTION_THREADS; at += 16) y = join(y, mine[threadIdx.x % 16 + at]);
    return over_16_lanes(y);
  }
  // Over all thread blocks. `partials` [blocks, 8] gets the results of each block. Returns whether this is the last
  // block, to which alone the results belong: y[n], in all threads.
  __device__ __forceinline__ bool over_grid(const double (&x)[8], double* partials, u32* arrived, double (&y)[8]) {
    const double mine = over_block(x);
    const int n = threadIdx.x / 16;
    if (threadIdx.x % 16 == 0) partials[blockIdx.x * 8 + n] = mine;
    if (!is_last_block(arrived)) return false;
    double all = n < 4 ? 0 : -INFINITY_;
#pragma unroll 4
    for (int block = threadIdx.x % 16; block < gridDim.x; block += 16) all = join(all, partials[block * 8 + n]);
    all = over_16_lanes(all);
    if (threadIdx.x % 16 == 0) memory[n][0] = all;
    __syncthreads();  // the writes of memory[] come before the reads below
#pragma unroll
    for (int k = 0; k < 8; ++k) y[k] = memory[k][0];
    return true;
  }
};
