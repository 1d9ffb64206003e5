// Vectors and sums of one rank, if the rows of a batch are spread over ranks. kernels/gpu/shard.py launches them.
#pragma once
#include "vectors/sums.cuh"

// positives[i] = start + i: the positives of a shard whose row i belongs to key i, as indices in the whole batch.
extern "C" __global__ void shard_positives(i64 start, i64 m, i64* positives) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m) positives[i] = start + i;
}

// From indices of the whole batch to indices of a shard, which has the keys start .. stop - 1: out[i] is
// positives[i] - start, or -1 if the positive is not in the shard. `stop` may exceed the number `total` of all keys:
// after the last key comes key 0. Each row has a positive (>= 0), because only plans with `shard_positives` launch this
// kernel.
extern "C" __global__ void positives_in_block(const i64* positives, i64 n, i64 start, i64 stop, i64 total,
                                              i64* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  const i64 at = positives[i] - start + (positives[i] < start ? total : 0);
  out[i] = at >= 0 && at < stop - start ? at : -1;
}

// Merges `other`, the sums of the same n rows over other keys, into `sums`.
extern "C" __global__ void merge_sums(const __grid_constant__ Sums sums,
                                      const __grid_constant__ Sums other, i64 n) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  sums.set(i, merge(sums.get(i), other.get(i), [](double x) { return exp2(x); }));
}

// *out = sum of numbers[stride r] over the ranks r, in their order, divided by `divisor`. One thread.
extern "C" __global__ void sum_over_ranks(const double* numbers, i64 ranks, i64 stride, double divisor,
                                          i64 is_float, void* out) {
  if (threadIdx.x) return;
  double total = 0;
  for (i64 r = 0; r < ranks; ++r) total += numbers[stride * r];
  if (is_float) *(float*)out = (float)(total / divisor);
  else *(double*)out = total / divisor;
}

// sums += other: n numbers, float (`is_float` 1) or double (0).
extern "C" __global__ void add(void* sums, const void* other, i64 n, i64 is_float) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (is_float) ((float*)sums)[i] += ((const float*)other)[i];
  else ((double*)sums)[i] += ((const double*)other)[i];
}
