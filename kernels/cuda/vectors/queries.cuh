// Which queries belong to a key: the inverse of `positives` [m], which has the key of each query, or -1. The queries of
// key j become order[begin[j] .. end[j]), for struct Positives of finish.cu. The four kernels run in the order of this
// file. With several positives of a query, "query" means an index in `positives`.
//
// The position of a key's range in `order` varies from run to run, but the queries in it and their order do not.
#pragma once
#include "common.cuh"

// end[j] += the number of queries whose positive is key j. `end` is 0 before.
extern "C" __global__ void count_queries(const i64* positives, i64 m, u64* end) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m && positives[i] >= 0) atomicAdd(end + positives[i], 1ull);
}

// Gives each key j a range of `order`, with room for the number of queries in end[j]: begin[j] and end[j] become the
// first position of the range. `taken`, which is 0 before, counts the positions that keys have. One atomic addition
// serves the keys of a warp.
extern "C" __global__ void place_queries(i64 n, u64* begin, u64* end, u64* taken) {
  const i64 j = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  const int lane = threadIdx.x % 32;
  const u64 count = j < n ? end[j] : 0;
  u64 upto = count;  // sum of the counts of this lane and of the lanes before it
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const u64 before = __shfl_up_sync(ALL_LANES, upto, by);
    if (lane >= by) upto += before;
  }
  u64 first = lane == 31 && upto ? atomicAdd(taken, upto) : 0;
  first = __shfl_sync(ALL_LANES, first, 31);
  if (j < n) begin[j] = end[j] = first + upto - count;
}

// Writes the queries of each key to the range of the key, in any order. end[j] moves to the end of the range.
extern "C" __global__ void list_queries(const i64* positives, i64 m, u64* end, i64* order) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m && positives[i] >= 0) order[atomicAdd(end + positives[i], 1ull)] = i;
}

// Sorts the queries of each key in ascending order (Shell's sort), so that sums over them are the same in every run.
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
