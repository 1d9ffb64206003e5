// Own negatives of rows: what own.cu and own_table.cu have in common. Row i has k keys of its own, o_i1 .. o_ik. With
// u = z / |z| if rows are normalised, else u = z (rows.cuh), x_ij the product of the rows u of q_i and o_ij, and b_ij
// the bias of o_ij, the base-2 exponent of o_ij is c x_ij + log2(e) b_ij. r_i and a_i are the reference exponent and the
// factor of row i (SoftmaxGradient in kernels/epilogues.py):
//
//     g_ij = a_i 2^(c x_ij + log2(e) b_ij - r_i)
//
// 16 or 32 lanes (count_lanes) read a row of features.
//
// WORDS: words of 16 bytes in LANE_FEATURES features, 1 or 2, if they may be read so: features are contiguous, each row
// of them begins at a multiple of 16 bytes, and d is a multiple of LANE_FEATURES. Else 0. The features are those of own
// negatives in own.cu, and those of queries in own_table.cu.
// OUT_WORDS: the same of the gradients of own negatives, which are written so if WORDS is not 0.
// NORM_FACTORS: rows are normalised.
// OWN_INDICES: own negatives are rows of a table (0: each row has own negatives in memory of its own).
// OWN_BIAS: own negatives have biases.
#pragma once
#include "block/options.cuh"
#include "rows.cuh"

#ifndef WORDS
#define WORDS 0
#endif
#ifndef OUT_WORDS
#define OUT_WORDS 1
#endif
#ifndef OWN_INDICES
#define OWN_INDICES 0
#endif
#ifndef OWN_BIAS
#define OWN_BIAS 0
#endif

constexpr int BATCH = WORDS ? 4 : 1;
constexpr int OWN_THREADS = 128;  // of a thread block
constexpr int MAX_GROUPS = OWN_THREADS / 16;  // groups of lanes in a thread block, at most

// The own negatives of all rows, or their gradients, [rows, k, d], in the caller's memory. Of a table or its gradient,
// [rows of the table, d], all rows have the same own negatives: row_stride is 0.
struct OwnFeatures {
  char* data;                                      // null: not wanted
  i64 row_stride, negative_stride, column_stride;  // in elements
  i64 dtype;                                       // DTYPE_FLOAT64 ...

  // The own negatives of row i, [k, d].
  __device__ __forceinline__ Matrix of(i64 i) const {
    const int size = dtype == DTYPE_FLOAT64 ? 8 : dtype == DTYPE_FLOAT32 ? 4 : 2;
    return {data + i * row_stride * size, negative_stride, column_stride, dtype};
  }
};

struct PlainOwnNegatives {
  Matrix query;
  OwnFeatures own;
  i64 m, k, d, parts;
  Scale scale;      // of logits
  double hardness;  // is added to the scale in exponents
  Real* products;   // [m, k]: x_ij; -inf for own negatives that are left out
  // u = factor 2^-exponent z; null unless rows are normalised
  Real *query_factors, *factors;     // [m], [m, k]
  int *query_exponents, *exponents;  // likewise
#if OWN_INDICES
  const i64* indices;  // [m, k] rows of the table; negative for none
  i64 table_rows;
#endif
#if OWN_BIAS
  const double* bias;  // [m, k] natural units
#endif

  // c: base-2 exponents are c times products.
  __device__ __forceinline__ double exponent_factor() const { return (scale.bare() + hardness) * LOG2_E; }
};
// With the vectors [m] of options that compare products. These are the dot products of the rows u, and the unit of the
// vectors.
struct OwnNegatives : PairVectors<PlainOwnNegatives, double> {
};

// The row of own negative j of row i in the memory that OwnFeatures::of(i) returns; out of its bounds for none.
__device__ __forceinline__ i64 own_row(const OwnNegatives& a, i64 i, i64 j) {
#if OWN_INDICES
  return j < a.k ? a.indices[i * a.k + j] : -1;
#else
  return j;
#endif
}
// Whether `row` of that memory is an own negative. A table has bounds.
__device__ __forceinline__ bool is_own_row(const OwnNegatives& a, i64 row) {
#if OWN_INDICES
  return row >= 0 && row < a.table_rows;
#else
  return true;
#endif
}
// The base-2 exponent of own negative `at` of [m, k], from its base-2 `logit` without a bias. The bias of an own negative
// that does not count, whose logit is -inf, may be NaN.
__device__ __forceinline__ double add_own_bias(const OwnNegatives& a, i64 at, double logit) {
#if OWN_BIAS
  return is_nothing(logit) ? logit : logit + LOG2_E * a.bias[at];
#else
  return logit;
#endif
}

// The threads of a row: `lanes` of a group read its features, and `parts` groups share its own negatives. `chunks`
// such sets of groups share the features of a row.
struct Group {
  int lanes, lane, index;  // index: of the group in the thread block
  int part, chunk;
  i64 row;

  __device__ __forceinline__ Group(i64 d, i64 parts, int chunks = 1) {
    lanes = count_lanes(d), lane = threadIdx.x % lanes, index = threadIdx.x / lanes;
    part = index & ((int)parts - 1);  // parts is a power of two
    const u32 set = blockIdx.x * (u32)(OWN_THREADS / lanes / (int)parts) + index / (int)parts;
    chunk = set % chunks;
    row = set / chunks;
  }
  // Joins x over the lanes, in each of them.
  template <class T, class F>
  __device__ __forceinline__ T join(T x, F join) const {
    const u32 mask = lanes == 32 ? ALL_LANES : 0xffffu << (threadIdx.x & 16);
    if (lanes == 32) x = join(x, __shfl_xor_sync(ALL_LANES, x, 16));
#pragma unroll
    for (int by = 8; by > 0; by /= 2) x = join(x, __shfl_xor_sync(mask, x, by));
    return x;
  }
  // The x of lane `from`, in all lanes.
  template <class T>
  __device__ __forceinline__ T get(T x, int from) const {
    const int half = lanes == 32 ? 0 : threadIdx.x & 16;  // first lane of the group in its warp
    return __shfl_sync(lanes == 32 ? ALL_LANES : 0xffffu << half, x, half + from);
  }
  template <class T>
  __device__ __forceinline__ T sum(T x) const { return join(x, [](T a, T b) { return a + b; }); }
  __device__ __forceinline__ double max(double x) const {
    return join(x, [](double a, double b) { return fmax(a, b); });
  }
};

// LANE_FEATURES features of one own negative on their way. With WORDS 0, `get` reads them.
struct Arriving {
#if WORDS
  uint4 words[WORDS];

  __device__ __forceinline__ void load(const Matrix& z, i64 row, i64 column) {
    const char* from = z.data + (row * z.row_stride + column) * (2 * WORDS);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = ((const uint4*)from)[i];
  }
  __device__ __forceinline__ void get(Real (&x)[LANE_FEATURES], const Matrix& z, i64, i64, i64) const {
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) {
      const uint4& four = words[WORDS == 2 ? i / 4 : 0];
      const int word = WORDS == 2 ? i % 4 : i / 2;
      const u32 bits = word == 0 ? four.x : word == 1 ? four.y : word == 2 ? four.z : four.w;
      const unsigned short half = (unsigned short)(bits >> i % 2 * 16);
      x[i] = WORDS == 2 ? __uint_as_float(bits) : z.dtype == DTYPE_BFLOAT16 ? from_bf16(half) : from_fp16(half);
    }
  }
#else
  __device__ __forceinline__ void load(const Matrix&, i64, i64) {}
  __device__ __forceinline__ void get(Real (&x)[LANE_FEATURES], const Matrix& z, i64 row, i64 column, i64 n) const {
    get_group(x, z, row, column, n);
  }
#endif
};

// Eight numbers in memory, for calls of functions that are not inlined.
struct Eight {
  Real x[LANE_FEATURES];
};

// Eight features of 2^-exponent z, as get_group reads them.
__device__ __noinline__ Eight get_any(const Matrix& z, i64 row, i64 column, i64 n, int exponent) {
  double y[LANE_FEATURES];
  Eight scaled;
  get_group(y, z, row, column, n);
#pragma unroll
  for (int i = 0; i < LANE_FEATURES; ++i) scaled.x[i] = (Real)(exponent ? ldexp(y[i], -exponent) : y[i]);
  return scaled;
}
// Writes 2^-exponent x, plus the contents if `add`.
__device__ __noinline__ void set_any(const Eight& numbers, const Matrix& z, i64 row, i64 column, i64 n, int exponent,
                                     bool add) {
  double y[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (add) get_group(y, z, row, column, n);
#pragma unroll
  for (int i = 0; i < LANE_FEATURES; ++i) y[i] += exponent ? ldexp((double)numbers.x[i], -exponent) : numbers.x[i];
  set_group(y, z, row, column, n);
}

__device__ __forceinline__ void get_row(Real (&x)[LANE_FEATURES], const Matrix& z, i64 row, i64 column, i64 n,
                                        int exponent) {
  if (!NORM_FACTORS || exponent == 0) {
    get_group(x, z, row, column, n);
    return;
  }
  const Eight any = get_any(z, row, column, n, exponent);
#pragma unroll
  for (int i = 0; i < LANE_FEATURES; ++i) x[i] = any.x[i];
}
__device__ __forceinline__ void set_row(const Real (&x)[LANE_FEATURES], const Matrix& z, i64 row, i64 column, i64 n,
                                        int exponent, bool add) {
  if (NORM_FACTORS && exponent) {
    Eight numbers;
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) numbers.x[i] = x[i];
    set_any(numbers, z, row, column, n, exponent, add);
    return;
  }
  Real y[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (add) get_group(y, z, row, column, n);
#pragma unroll
  for (int i = 0; i < LANE_FEATURES; ++i) y[i] += x[i];
  set_group(y, z, row, column, n);
}

// Writes eight features of the gradient of an own negative: in OUT_WORDS words of 16 bytes, if WORDS is not 0.
__device__ __forceinline__ void set_own(const Real (&x)[LANE_FEATURES], const Matrix& z, i64 row, i64 column, i64 n,
                                        int exponent) {
#if WORDS
  if (!NORM_FACTORS || exponent == 0) {
    uint4* to = (uint4*)(z.data + (row * z.row_stride + column) * (2 * OUT_WORDS));
    u32 words[4 * OUT_WORDS];
#pragma unroll
    for (int i = 0; i < 4 * OUT_WORDS; ++i) {
      const float low = (float)x[2 * i / OUT_WORDS], high = (float)x[(2 * i + 1) / OUT_WORDS];
      words[i] = OUT_WORDS == 2 ? __float_as_uint(low)
                 : z.dtype == DTYPE_BFLOAT16 ? to_bf16x2(low, high) : to_fp16x2(low, high);
    }
#pragma unroll
    for (int i = 0; i < OUT_WORDS; ++i)
      to[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    return;
  }
#endif
  set_row(x, z, row, column, n, exponent, false);
}
