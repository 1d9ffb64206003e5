// Integers in ascending order.
#pragma once
#include "common.cuh"

// The number of integers in sorted[begin .. end) that are less than `number` (`equal` is 0), or at most `number` (1).
// The integers are in ascending order.
__device__ __forceinline__ i64 count_before(const i64* sorted, i64 begin, i64 end, i64 number, i64 equal) {
  i64 low = begin, high = end;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (sorted[middle] < number || (equal && sorted[middle] == number)) low = middle + 1;
    else high = middle;
  }
  return low - begin;
}
