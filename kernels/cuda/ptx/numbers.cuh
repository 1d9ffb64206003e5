// Numbers: arithmetic, conversions, and registers that the compiler leaves as they are.
#pragma once

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
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return (u32)to_fp16(low) | (u32)to_fp16(high) << 16;
#endif
}

// The lesser of both; NaN if one is.
__device__ __forceinline__ float min_or_nan(float x, float y) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
}

// sum += e, unless x is above the limit.
__device__ __forceinline__ void add_up_to(float& sum, float e, float x, float limit) {
  // One instruction after the comparison. The compiler would choose e or 0, and add that
  asm("{ .reg .pred in; setp.leu.ftz.f32 in, %2, %3; @in add.ftz.f32 %0, %0, %1; }"
      : "+f"(sum) : "f"(e), "f"(x), "f"(limit));
}

// x in another register.
__device__ __forceinline__ float copied(float x) {
  float y;
  asm volatile("mov.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The compiler does not compute x and y again: they stay in their registers.
__device__ __forceinline__ void keep(int& x, int& y) { asm volatile("" : "+r"(x), "+r"(y)); }
