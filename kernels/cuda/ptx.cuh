// Instructions that CUDA C++ does not spell, one function each.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// --- between threads --------------------------------------------------------------------------------

// A barrier for some of a block's warps, `threads` in all. Barrier 0 is __syncthreads.
__device__ __forceinline__ void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- between blocks ---------------------------------------------------------------------------------

// Adds to a counter what others may see only after all that this block has written before.
__device__ __forceinline__ void add_release(u32* counter, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}
// Reads a counter; what others had written before they added to it is seen from here on.
__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

// --- arithmetic -------------------------------------------------------------------------------------

// 2^x, relative error 2^-22; 2^-inf = 0, NaN stays.
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_(double x) { return exp2(x); }

// Rounded to nearest: the tensor cores would cut the low bits off instead, a bias.
__device__ __forceinline__ u32 to_tf32(u32 x) {
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
  return y;
#else
  return (x + 0x1000u) & ~0x1fffu;
#endif
}

// bfloat16 is the upper half of a float.
__device__ __forceinline__ float from_bf16(unsigned short x) {
  return __uint_as_float((u32)x << 16);
}
__device__ __forceinline__ unsigned short to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);  // to nearest, ties even
}
__device__ __forceinline__ float from_fp16(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ unsigned short to_fp16(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
// Two at once; `low` is the first in memory.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return (u32)to_bf16(low) | (u32)to_bf16(high) << 16;
#endif
}
__device__ __forceinline__ u32 to_fp16x2(float low, float high) {
  return (u32)to_fp16(low) | (u32)to_fp16(high) << 16;
}

// --- copies from global to shared memory -------------------------------------------------------------

// 16 bytes, of which the last 16 - bytes are zeros; asynchronous where the chip can.
__device__ __forceinline__ void copy16(void* to, const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#else
  *(uint4*)to = bytes ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the last N groups of this thread's copies have arrived.
template <int N>
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// --- tensor cores ------------------------------------------------------------------------------------

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8 and receives, of
// each, the four bytes at row l / 4, column l % 4.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row))
               : "memory");
}

#define MMA(name, shape)                                                                      \
  __device__ __forceinline__ void name(float& d0, float& d1, float& d2, float& d3,            \
                                       const u32 (&a)[4], u32 b0, u32 b1) {                   \
    asm("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "           \
        "{%0, %1, %2, %3};"                                                                   \
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                      \
  }
#if __CUDA_ARCH__ >= 800
MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA(mma_fp16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#endif
#undef MMA
