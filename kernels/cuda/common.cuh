// Types and small functions that every kernel uses. (naive/naive.cu has other symbols: its x are logits.)
//
// Symbols of all kernels: x_ij = q_i . k_j is the product of query i and key j, c = scale log2(e), and c x_ij is the
// logit in base 2, without a bias. dL/dx is the derivative with respect to the product, so it contains the scale.
#pragma once
#include "direction_losses.cuh"
#include "ptx.cuh"

// Precisions of matrix products: -DPRECISION=BF16 and so on. The order of the numbers counts: from TF32 on, tensor
// cores multiply; from BF16X3 on, operands have 16-bit elements. BF16X3, FP16X3: an operand is the sum of two parts,
// and three products of parts make one product (the fourth, of two small parts, is below rounding).
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

// The parts of an operand's element: 16-bit numbers whose sum is the element. A row holds the large parts of all
// features, then the small parts of all features.
#define PARTS (PRECISION == BF16X3 || PRECISION == FP16X3 ? 2 : 1)
#define IS_FLOAT16 (PRECISION == FP16 || PRECISION == FP16X3)  // parts are float16

// Real: the type of products, of their exponentials, and of sums within a tile
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
#define LOW ((Real)-INFINITY_)  // the maximum of no products
#ifndef MOMENTS
#define MOMENTS 0  // 1: each sum of 2^(c x) has a first moment, the sum of 2^(c x) x, for the gradient of the scale
#endif
#ifndef SETS
#define SETS 0  // 1: a row has several positives, `set_size` of them
#endif
// Replaces the product of an excluded pair. The pair adds nothing to a sum, because 2^(c EXCLUDED) is 0. With
// MOMENTS, EXCLUDED is finite, so that the pair's first moment, 0 times EXCLUDED, is 0 and not NaN.
#if MOMENTS
constexpr Real EXCLUDED = sizeof(Real) == 8 ? -0x1.fffffffffffffp1023 : -0x1.fffffep127f;
#else
#define EXCLUDED LOW
#endif
constexpr u32 ALL_LANES = 0xffffffffu;
// Small parts of float16 gradient blocks are multiplied by this factor, so that they do not underflow. The matrix
// products that read small parts divide by it (kernels/gpu/schedule/matrix_products.py).
constexpr int SMALL_PART_FACTOR = 2048;
constexpr int TILE_COLUMNS = 128;  // keys of one tile of a sweep, on Hopper
// Bits of a thread block in `written_tiles`: one for each tile whose column sums sm90/sweep_lse.cu has written. They
// are 32 words of 32 bits. vectors/sums.cuh reads them
#define MAX_WRITTEN_TILES (32 * 32)

// Whether two lists of N numbers have the same number at one of the places.
template <int N>
__device__ __forceinline__ bool any_equal(const i64* a, const i64* b) {
  bool any = false;
#pragma unroll
  for (int k = 0; k < N; ++k) any |= a[k] == b[k];
  return any;
}

__device__ __forceinline__ Real2 real2(Real x, Real y) {
  Real2 r;
  r.x = x;
  r.y = y;
  return r;
}

// A scale or bias. `bare` is the caller's number. `get` also corrects the products that a kernel multiplies by it.
struct Scalar {
  double value;           // the number, if `pointer` is null
  const double* pointer;  // the number in device memory, or null
  double factor;          // 1 + the relative amount by which tensor cores truncate a product; 1 for a bias
  const double* feature_divisors;  // product of the feature divisors of both sides (rows.cu); null: 1
  __device__ double bare() const { return pointer ? *pointer : value; }
  __device__ double get() const { return bare() * factor * (feature_divisors ? *feature_divisors : 1); }
};

// The scale of the logits. A scale in device memory has not been checked: out of range (kernels/problem.py: SCALES),
// it becomes NaN, which makes the loss NaN. `get` is repeated, because Scalar::get calls Scalar::bare.
struct Scale : Scalar {
  __device__ double bare() const {
    const double s = Scalar::bare(), least = sizeof(Real) == 8 ? 0x1p-511 : 0x1p-63,
                 most = sizeof(Real) == 8 ? 0x1p53 : 0x1p24;
    return s >= least && s <= most ? s : NAN_;
  }
  __device__ double get() const { return bare() * factor * (feature_divisors ? *feature_divisors : 1); }
};

// The maximum `largest` of products; LOW if all of these products are excluded.
__device__ __forceinline__ Real or_low(Real largest) {
  return MOMENTS && largest == EXCLUDED ? LOW : largest;
}

// `factor`, by which products become logits. With MOMENTS, it is at least `least`, so that 2^(factor EXCLUDED) is 0.
// Products of float16 are below 2^60, so with a factor below `least`, all logits are negligible relative to 1 anyway.
// NaN stays NaN.
__device__ __forceinline__ double logit_factor(double factor) {
  const double least = sizeof(Real) == 8 ? 0x1p-1000 : 0x1p-100;
  return MOMENTS && factor < least ? least : factor;
}

// Element types of the caller's arrays: Matrix::dtype, and -DDTYPE of fused/fused.cu.
#define DTYPE_FLOAT64 0
#define DTYPE_FLOAT32 1
#define DTYPE_BFLOAT16 2
#define DTYPE_FLOAT16 3

// A matrix [rows, d] of features or gradients in the caller's memory, with any strides.
struct Matrix {
  char* data;                     // null: the caller wants no such matrix
  i64 row_stride, column_stride;  // in elements
  i64 dtype;                      // DTYPE_FLOAT64 ...
  __device__ double get(i64 row, i64 column) const {
    const i64 at = row * row_stride + column * column_stride;
    if (dtype == DTYPE_FLOAT64) return ((const double*)data)[at];
    if (dtype == DTYPE_FLOAT32) return ((const float*)data)[at];
    if (dtype == DTYPE_BFLOAT16) return from_bf16(((const unsigned short*)data)[at]);
    return from_fp16(((const unsigned short*)data)[at]);
  }
  // The element as a float: float64 is rounded.
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

// The exponent e of a row whose largest absolute value is `largest`: 2^(e - 1) <= largest < 2^e; 0 if `largest` is 0
// or not finite. Kernels divide rows of float64 by 2^e, exactly, before they square the elements. Squares of other
// dtypes neither over- nor underflow in float64.
__device__ __forceinline__ int find_exponent(double largest) {
  int e = 0;
  if (largest > 0 && largest < INFINITY_) frexp(largest, &e);
  return e;
}

// --- elementary functions ------------------------------------------------------------------------------

// Of a NaN and a number: the number. So a maximum may hide a NaN, and the kernels find features that are not finite
// separately (not_finite in rows.cu).
__device__ __forceinline__ Real max_(Real a, Real b) { return fmax(a, b); }

// For e = exp(-|x|): sigmoid(|x|) = 1 / (1 + e), and log(1 + e), both to relative accuracy, by one division.
// log(1 + e) = 2 atanh(s) with s = e / (2 + e) in [0, 1/3], and 2 atanh(s) = s (2 + z p(z)) with z = s^2. p is a
// polynomial with coefficients near those of the series, 2/3, 2/5, 2/7, ...
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
// Joins x over the THREADS threads of a thread block, all of which call this and get the result. `memory` is shared
// memory with one number for each warp.
template <int THREADS, class F>
__device__ __forceinline__ double block_reduce(double x, double* memory, F join) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, lanes));
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();  // every warp's write to memory[] comes before the reads below
  x = memory[0];
#pragma unroll
  for (int w = 1; w < THREADS / 32; ++w) x = join(x, memory[w]);
  __syncthreads();  // all reads of memory[] come before the next call's writes
  return x;
}

struct Plus {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const { return x + y; }
};
struct Larger {
  __device__ __forceinline__ float operator()(float x, float y) const { return fmaxf(x, y); }
  __device__ __forceinline__ double operator()(double x, double y) const { return fmax(x, y); }
};

// Joins each of the N numbers x over a thread block of 1024 threads, which all call this. Thread 0 gets the results.
template <int N, class F>
__device__ __forceinline__ void reduce_to_thread_0(double (&x)[N], double (&memory)[N][32], F join) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 0; step < 2; ++step) {  // over the lanes of a warp, then over the warps
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) x[n] = join(x[n], __shfl_xor_sync(ALL_LANES, x[n], lanes));
    if (step == 1) return;
    if (lane == 0)
#pragma unroll
      for (int n = 0; n < N; ++n) memory[n][warp] = x[n];
    __syncthreads();  // the writes of memory[] come before the reads
    if (warp != 0) return;
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = memory[n][lane];
  }
}

// Column results from the accumulators of tensor cores. Lanes t, t + 4, ... t + 28 share columns, so value v[g] of
// these eight lanes is joined. Lane 4 g + t returns the result of v[g]. Each of three steps halves the number of
// values that a lane has: a lane keeps one half, and gives the other half to the lane 16, 8 or 4 away.
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
