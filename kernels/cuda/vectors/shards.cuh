// Vectors and sums of a rank's rows and keys, where a batch is spread over ranks.
#pragma once
#include "vectors/sums.cuh"

// positives[i] = start + i
extern "C" __global__ void shard_positives(i64 start, i64 m, i64* positives) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m) positives[i] = start + i;
}

// Indices of the positives among keys start .. stop - 1; -1 for positives elsewhere. After the last of
// `total` keys comes the first.
extern "C" __global__ void local_positives(const i64* positives, i64 n, i64 start, i64 stop, i64 total,
                                           i64* local) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  const i64 at = positives[i] - start + (positives[i] < start ? total : 0);
  local[i] = at >= 0 && at < stop - start ? at : -1;
}

// Merge `other` into `sums`.
extern "C" __global__ void merge_sums(const __grid_constant__ Sums sums,
                                      const __grid_constant__ Sums other, i64 n) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  sums.set(i, merge(sums.get(i), other.get(i), [](double x) { return exp2(x); }));
}

// *out: the sum of numbers[stride r] of `ranks` ranks r in their order, divided.
extern "C" __global__ void sum_over_ranks(const double* numbers, i64 ranks, i64 stride, double divisor,
                                          i64 is_float, void* out) {
  if (threadIdx.x) return;
  double total = 0;
  for (i64 r = 0; r < ranks; ++r) total += numbers[stride * r];
  if (is_float) *(float*)out = (float)(total / divisor);
  else *(double*)out = total / divisor;
}

// sums += other: n numbers of one type.
extern "C" __global__ void add(void* sums, const void* other, i64 n, i64 is_float) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (is_float) ((float*)sums)[i] += ((const float*)other)[i];
  else ((double*)sums)[i] += ((const double*)other)[i];
}
