// Which queries belong to a key: the inverse of `positives`. A query with -1 belongs to none of the
// keys. Key j's queries are order[begin[j] .. end[j]); where they lie in `order` varies from run to run.
#pragma once
#include "common.cuh"

// end[j] = how many queries have key j as their positive; it starts as zeros.
extern "C" __global__ void count_queries(const i64* positives, i64 m, u64* end) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m && positives[i] >= 0) atomicAdd(end + positives[i], 1ull);
}

// Room in `order` for as many: begin[j] and, as nothing is listed yet, end[j]. `taken` starts as 0. One
// addition a warp.
extern "C" __global__ void place_queries(i64 n, u64* begin, u64* end, u64* taken) {
  const i64 j = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  const int lane = threadIdx.x % 32;
  const u64 count = j < n ? end[j] : 0;
  u64 upto = count;  // sum over this lane and the lanes before it
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const u64 before = __shfl_up_sync(ALL_LANES, upto, by);
    if (lane >= by) upto += before;
  }
  u64 first = lane == 31 && upto ? atomicAdd(taken, upto) : 0;
  first = __shfl_sync(ALL_LANES, first, 31);
  if (j < n) begin[j] = end[j] = first + upto - count;
}

// The queries of key j, in whatever order.
extern "C" __global__ void list_queries(const i64* positives, i64 m, u64* end, i64* order) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m && positives[i] >= 0) order[atomicAdd(end + positives[i], 1ull)] = i;
}

// The same in ascending order (Shell's sort), so that sums over them are the same from run to run.
extern "C" __global__ void sort_queries(const i64* begin, const i64* end, i64 n, i64* order) {
  const i64 j = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (j >= n) return;
  i64* list = order + begin[j];
  const i64 length = end[j] - begin[j];
  for (i64 gap = length / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11)
    for (i64 at = gap; at < length; ++at) {
      const i64 moved = list[at];
      i64 to = at;
      for (; to >= gap && list[to - gap] > moved; to -= gap) list[to] = list[to - gap];
      list[to] = moved;
    }
}
