// Which queries belong to a key: the inverse of `positives`. A query with -1 belongs to none of the
// keys.
#pragma once
#include "common.cuh"

// count[1 + j] = how many queries have key j as their positive; count starts as zeros.
extern "C" __global__ void count_queries(const i64* positives, i64 m, u64* count) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m && positives[i] >= 0) atomicAdd(count + 1 + positives[i], 1ull);
}

// order[start[j] .. start[j + 1]) = the queries of key j, in whatever order; `taken` starts as start.
extern "C" __global__ void list_queries(const i64* positives, i64 m, u64* taken, i64* order) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m && positives[i] >= 0) order[atomicAdd(taken + positives[i], 1ull)] = i;
}

// The same in ascending order (Shell's sort), so that sums over them are the same from run to run.
extern "C" __global__ void sort_queries(const i64* start, i64 n, i64* order) {
  const i64 j = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (j >= n) return;
  i64* list = order + start[j];
  const i64 length = start[j + 1] - start[j];
  for (i64 gap = length / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11)
    for (i64 at = gap; at < length; ++at) {
      const i64 moved = list[at];
      i64 to = at;
      for (; to >= gap && list[to - gap] > moved; to -= gap) list[to] = list[to - gap];
      list[to] = moved;
    }
}
