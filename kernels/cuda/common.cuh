// Types and small functions that every kernel uses.
#pragma once
#include "direction_losses.cuh"
#include "ptx.cuh"

// Precisions of products and exponentials: -DPRECISION=BF16 and so on.
#define FP64 0
#define FP32 1
#define TF32 2
#define BF16X3 3
#define BF16 4
#define FP16 5
#define FP16X3 6
#ifndef PRECISION
#define PRECISION FP32
#endif

// An element of an operand is a sum of PARTS 16-bit numbers. A row holds the large parts of all features,
// then their small parts.
#define PARTS (PRECISION == BF16X3 || PRECISION == FP16X3 ? 2 : 1)
#define IS_FLOAT16 (PRECISION == FP16 || PRECISION == FP16X3)  // parts are float16

#if PRECISION == FP64
typedef double Real;
typedef double2 Real2;
#else
typedef float Real;
typedef float2 Real2;
#endif

// Macros: without <limits>, NVRTC has no constant expression for these.
#define INFINITY_ __longlong_as_double(0x7ff0000000000000LL)
#define NAN_ __longlong_as_double(0x7ff8000000000000LL)
#define LOW ((Real)-INFINITY_)  // less than all logits
#ifndef MOMENTS
#define MOMENTS 0  // sums of 2^x come with sums of 2^x x, from which the gradient of the scale follows
#endif
#ifndef SETS
#define SETS 0  // rows have several positives
#endif
// The product of an excluded pair. It adds nothing to a sum, because 2^(c EXCLUDED) is 0. With moments,
// EXCLUDED is finite, so that 0 times it is 0, too.
#if MOMENTS
constexpr Real EXCLUDED = sizeof(Real) == 8 ? -0x1.fffffffffffffp1023 : -0x1.fffffep127f;
#else
#define EXCLUDED LOW
#endif
constexpr u32 ALL_LANES = 0xffffffffu;
// Small parts of float16 gradient blocks are multiplied by this factor, so that they do not underflow.
constexpr int SMALL_PART_FACTOR = 2048;
constexpr int TILE_COLUMNS = 128;  // keys of a sweep's tile

__device__ __forceinline__ Real2 real2(Real x, Real y) {
  Real2 r;
  r.x = x;
  r.y = y;
  return r;
}

// A factor of products: a number by value or in device memory, times two corrections.
struct Scalar {
  double value;
  const double* pointer;
  double factor;
  const double* feature_divisors;  // product of the two sides' feature divisors (rows.cu); null: 1
  __device__ double bare() const { return pointer ? *pointer : value; }
  __device__ double get() const { return bare() * factor * (feature_divisors ? *feature_divisors : 1); }
};

// The scale of the logits. The host has not checked a scale in device memory. A scale out of range
// (problem.SCALES) becomes NaN, which makes the loss NaN.
struct Scale : Scalar {
  __device__ double bare() const {
    const double s = Scalar::bare(), least = sizeof(Real) == 8 ? 0x1p-511 : 0x1p-63,
                 most = sizeof(Real) == 8 ? 0x1p53 : 0x1p24;
    return s >= least && s <= most ? s : NAN_;
  }
  __device__ double get() const { return bare() * factor * (feature_divisors ? *feature_divisors : 1); }
};

// A maximum of products; LOW if all of them are excluded.
__device__ __forceinline__ Real or_low(Real largest) {
  return MOMENTS && largest == EXCLUDED ? LOW : largest;
}

// The factor that makes products logits, but not less than a lower bound for which 2^(factor EXCLUDED) is
// 0. Products of float16 are below 2^60, so a smaller factor makes all logits negligible relative to 1. NaN stays
// NaN.
__device__ __forceinline__ double logit_factor(double factor) {
  const double least = sizeof(Real) == 8 ? 0x1p-1000 : 0x1p-100;
  return MOMENTS && factor < least ? least : factor;
}

// Element types of the caller's arrays.
#define DTYPE_FLOAT64 0
#define DTYPE_FLOAT32 1
#define DTYPE_BFLOAT16 2
#define DTYPE_FLOAT16 3

// A matrix [rows, d] of the caller, with any strides.
struct Matrix {
  char* data;
  i64 row_stride, column_stride;  // in elements
  i64 dtype;
  __device__ double get(i64 row, i64 column) const {
    const i64 at = row * row_stride + column * column_stride;
    if (dtype == DTYPE_FLOAT64) return ((const double*)data)[at];
    if (dtype == DTYPE_FLOAT32) return ((const float*)data)[at];
    if (dtype == DTYPE_BFLOAT16) return from_bf16(((const unsigned short*)data)[at]);
    return from_fp16(((const unsigned short*)data)[at]);
  }
  // The same in single precision: float64 input is rounded.
  __device__ float get_float(i64 row, i64 column) const {
    const i64 at = row * row_stride + column * column_stride;
    if (dtype == DTYPE_FLOAT32) return ((const float*)data)[at];
    if (dtype == DTYPE_BFLOAT16) return from_bf16(((const unsigned short*)data)[at]);
    if (dtype == DTYPE_FLOAT16) return from_fp16(((const unsigned short*)data)[at]);
    return (float)((const double*)data)[at];
  }
  __device__ void set(i64 row, i64 column, double x) const {
    const i64 at = row * row_stride + column * column_stride;
    if (dtype == DTYPE_FLOAT64) ((double*)data)[at] = x;
    else if (dtype == DTYPE_FLOAT32) ((float*)data)[at] = (float)x;
    else if (dtype == DTYPE_BFLOAT16) ((unsigned short*)data)[at] = to_bf16((float)x);
    else ((unsigned short*)data)[at] = to_fp16((float)x);
  }
};

// The exponent of a row's largest size: rows of float64 are divided by 2^exponent, exactly, before they are
// squared. Squares of other dtypes neither over- nor underflow in float64.
__device__ __forceinline__ int find_exponent(double largest) {
  int e = 0;
  if (largest > 0 && largest < INFINITY_) frexp(largest, &e);
  return e;
}

// --- elementary functions ------------------------------------------------------------------------------

__device__ __forceinline__ Real max_(Real a, Real b) { return fmax(a, b); }  // ignores one NaN

// 1 / (1 + e), which is sigmoid(|x|) for e = exp(-|x|), and log(1 + e), to relative accuracy, by one division:
// log(1 + e) = 2 atanh(s) = s p(s^2) with s = e / (2 + e) in [0, 1/3].
__device__ __forceinline__ void sigmoid_parts(float e, float& sigmoid_of_abs, float& log1p) {
  const float one = 1.0f + e, two = 2.0f + e, both = __fdividef(1.0f, one * two);
  const float s = e * (one * both), z = s * s;
  float p = 0x1.f39656p-3f;
  p = fmaf(p, z, 0x1.b63e16p-3f);
  p = fmaf(p, z, 0x1.251228p-2f);
  p = fmaf(p, z, 0x1.999638p-2f);
  p = fmaf(p, z, 0x1.55555ap-1f);
  log1p = s * fmaf(p, z, 2.0f);
  sigmoid_of_abs = two * both;
}
__device__ __forceinline__ void sigmoid_parts(double e, double& sigmoid_of_abs, double& log1p) {
  sigmoid_of_abs = 1 / (1 + e);
  log1p = ::log1p(e);
}

// --- reductions over a warp or a block, in one fixed order ----------------------------------------------

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
  return x;
}
__device__ __forceinline__ double warp_max(double x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmax(x, __shfl_xor_sync(ALL_LANES, x, lanes));
  return x;
}
// Over a block of THREADS. `memory` is shared and has one number for each warp.
template <int THREADS, class F>
__device__ __forceinline__ double block_reduce(double x, double* memory, F join) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, lanes));
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();  // every warp's write to memory[] comes before the reads below
  x = memory[0];
#pragma unroll
  for (int w = 1; w < THREADS / 32; ++w) x = join(x, memory[w]);
  __syncthreads();  // these reads come before the next call's writes
  return x;
}

struct Plus {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const { return x + y; }
};
struct Larger {
  __device__ __forceinline__ float operator()(float x, float y) const { return fmaxf(x, y); }
};

// Each lane has eight values. They are joined over the eight lanes l, l + 4, .. l + 28, which share
// columns in the tensor cores' accumulator layout. Each step halves the values that a lane has. Lane
// 4 g + t ends with the result for value g.
template <class T, class Join>
__device__ __forceinline__ T join_columns(const T (&v)[8], int lane, Join join) {
  const bool b4 = lane & 16, b3 = lane & 8, b2 = lane & 4;
  T w[4], y[2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = join(b4 ? v[i + 4] : v[i], __shfl_xor_sync(ALL_LANES, b4 ? v[i] : v[i + 4], 16));
#pragma unroll
  for (int i = 0; i < 2; ++i)
    y[i] = join(b3 ? w[i + 2] : w[i], __shfl_xor_sync(ALL_LANES, b3 ? w[i] : w[i + 2], 8));
  return join(b2 ? y[1] : y[0], __shfl_xor_sync(ALL_LANES, b2 ? y[0] : y[1], 4));
}
