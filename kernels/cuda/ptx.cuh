// Instructions that CUDA C++ does not spell, one function each, by family. No other file has inline PTX, or
// includes one of these.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/barriers.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
