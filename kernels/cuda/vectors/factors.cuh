// Factors of gradient blocks: numbers of each row and each column, from which the gradient pass computes blocks of
// dL/dx (equations: tiled/gradient.cu). After the log-sum-exps are known, `ranges` and perhaps check_spread choose the
// numbers of struct Ranges, and then `factors`, or divide_factors for a sigmoid, writes the factors.
#pragma once
#include "common.cuh"

// Numbers that all rows and columns share. They follow from the ranges of the vectors in FactorSources: from the
// largest absolute gradients and factors, and from the largest and least log-sum-exps of rows and of columns.
struct Ranges {
  double gradient_divisor;  // gradient blocks hold P = (dL/dx) / gradient_divisor, to fit their element type
  double middle;            // halfway between the largest log-sum-exp of rows and the least of columns, base 2
  // 1 if one exponential serves both directions; 0: kernels compute an exponential for each direction. Kernels without
  // COLUMNS do not read it, because rows need one exponential anyway
  i64 one_exponential;
};

// The results of the log-sum-exp pass, from which factors follow. References are log-sum-exps, base 2. A factor is the
// upstream gradient of a row, or of a column, times the weight of its direction and the scale.
struct FactorSources {
  const double *row_reference, *row_factor;        // [M]; references are null for a sigmoid
  const double* positive_gradient;                 // [M, set_size] dL/dx at the positives, or null
  const double *column_reference, *column_factor;  // [N], or null if columns have no softmax
  const double* column_positive_gradient;          // [N] dL/dx at the positives of the columns, or null
};

// The gradient divisor for a bound of dL/dx.
__device__ __forceinline__ double find_divisor(double bound, double largest_element) {
  return bound > 1e-300 && bound < INFINITY_ ? bound / largest_element : 1.0;
}

constexpr int RANGE_THREADS = 1024;
// One exponential serves both directions if the largest log-sum-exp of a row is less than SPREAD (base 2) above the
// least of a column. The factors u, and v without column_factor, are then below 2^(SPREAD / 2), because each has half
// of the difference (`middle`). With a larger difference, u and v could overflow float32.
constexpr double SPREAD = 40;
// One exponential also needs that the largest and the least log-sum-exp of rows are less than ROW_SPREAD apart. Then no
// factor u underflows float32.
constexpr double ROW_SPREAD = 80;
// In a softmax, the bound of dL/dx is at least this share of each row's factor. Factors are divided by the gradient
// divisor, which is proportional to the bound. With a smaller bound, the quotients would overflow float32.
constexpr double MIN_BOUND_SHARE = 0x1p-60;

// How struct Ranges follows from FactorSources. The gradient divisor is `bound`, the largest possible size of dL/dx,
// divided by `largest_element`, the size that the largest element of a gradient block should have.
//
// The bound is the largest of all rows (and columns) i of
//   - a softmax: 2 |dL/dx at a positive of i|, and, for a row, MIN_BOUND_SHARE |factor_i|. dL/dx_ij is the sum of a
//     term of row i and a term of column j, and the terms of a row are at most as large as dL/dx at its positive.
//   - a softmax with several positives or linear terms (`by_factor`): also 2 |factor_i|, which bounds all terms.
//   - a sigmoid (no `positive_gradient`): |factor_i|. Columns have no terms.
// If the bound is 1e-300 or less, or not finite, the divisor is 1.
// `largest_element` is 8192 if elements are float16, else 1: two norm factors, of at most 2 each, may multiply an
// element, and 8192 x 2 x 2 = 32768 is below the largest float16 number, 65504.
struct RangeSources {
  FactorSources f;
  i64 m, n, set_size, by_factor;
  double largest_element;

  // Adds row i, one of its pairs, or column j to the maxima x: of the log-sum-exps of rows, of these times -1, of those of
  // columns times -1, and of the bound. Of the least, the largest negative: all four are maxima.
  __device__ __forceinline__ void add_row(double* x, i64 i) const {
    if (f.row_reference) {
      x[0] = fmax(x[0], f.row_reference[i]);
      x[1] = fmax(x[1], -f.row_reference[i]);
    }
    x[3] = fmax(x[3], fabs(f.row_factor[i]) * (by_factor ? 2 : f.positive_gradient ? MIN_BOUND_SHARE : 1));
  }
  __device__ __forceinline__ void add_pair(double* x, i64 pair) const {
    if (f.positive_gradient) x[3] = fmax(x[3], 2 * fabs(f.positive_gradient[pair]));
  }
  __device__ __forceinline__ void add_column(double* x, i64 j) const {
    if (!f.column_reference) return;
    x[2] = fmax(x[2], -f.column_reference[j]);
    if (by_factor) x[3] = fmax(x[3], 2 * fabs(f.column_factor[j]));
    if (f.column_positive_gradient) x[3] = fmax(x[3], 2 * fabs(f.column_positive_gradient[j]));
  }
  // The numbers, from the maxima of all rows and columns.
  __device__ __forceinline__ Ranges find(const double* x) const {
    const double high = x[0], minus_low = x[1], minus_least = x[2], bound = x[3];
    return {find_divisor(bound, largest_element), 0.5 * (high - minus_least),
            f.column_reference && high + minus_least < SPREAD && high + minus_low < ROW_SPREAD};
  }
};

// Writes struct Ranges, by one thread block. `finalize` (sums.cuh) does so itself, if no step comes between.
extern "C" __global__ void __launch_bounds__(RANGE_THREADS)
ranges(const __grid_constant__ RangeSources sources, Ranges* out) {
  __shared__ double memory[4][32];
  const RangeSources& s = sources;
  double x[4] = {-INFINITY_, -INFINITY_, -INFINITY_, 0};
#pragma unroll 8  // one multiprocessor needs many loads in flight
  for (i64 i = threadIdx.x; i < s.m; i += RANGE_THREADS) s.add_row(x, i), s.add_pair(x, i);
  for (i64 pair = s.m + threadIdx.x; pair < s.m * s.set_size; pair += RANGE_THREADS) s.add_pair(x, pair);
  if (s.f.column_reference)
#pragma unroll 8
    for (i64 j = threadIdx.x; j < s.n; j += RANGE_THREADS) s.add_column(x, j);
  reduce_to_thread_0(x, memory, Larger());
  if (threadIdx.x == 0) *out = sources.find(x);
}

// Factors as the gradient kernels read them. tiled/gradient.cu has the equations of a, u and v.
struct FactorTargets {
  Real *row_reference, *a, *u;  // [M]
  Real *column_reference, *v;   // [N]
};

// The reference exponent h that kernels subtract from logits c x, for the log-sum-exp `lse`. Kernels round c to the
// type of products, which changes all logits by one factor, (Real)c / c. So h is `lse` times this factor, rounded; 0 if
// it is not finite. Returns h divided by the factor: the log-sum-exp that h stands for exactly.
__device__ __forceinline__ double reference(double lse, double c, Real& h) {
  const double rounded = (double)(Real)c, exact = lse * (rounded / c);
  h = isfinite(exact) ? (Real)exact : 0;
  return (double)h * (c / rounded);
}

// Writes the factors of m rows and n columns, after `ranges`. `represented_lse` is the log-sum-exp that the rounded
// reference exponent stands for.
//   - a and v are factors divided by the gradient divisor, times 2^(represented_lse - log-sum-exp). This power corrects
//     the rounding.
//   - If one exponential e = 2^(c x - row reference) serves both directions, u v e is the term of the column: u is
//     2^(represented_lse - middle), and v has `middle` in the place of `represented_lse`.
extern "C" __global__ void factors(const __grid_constant__ FactorSources f, i64 m, i64 n,
                                   const __grid_constant__ Scale scale, const Ranges* ranges,
                                   const __grid_constant__ FactorTargets out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  const double c = scale.get() * LOG2_E, inverse_divisor = 1 / ranges->gradient_divisor;
  if (i < m) {
    Real h;
    const double represented_lse = reference(f.row_reference[i], c, h);
    out.row_reference[i] = h;
    out.a[i] = (Real)(f.row_factor[i] * exp2(represented_lse - f.row_reference[i]) * inverse_divisor);
    if (f.column_reference) out.u[i] = ranges->one_exponential ? (Real)exp2(represented_lse - ranges->middle) : 0;
  }
  if (f.column_reference && i < n) {
    Real h;
    const double lse = f.column_reference[i], represented_lse = reference(lse, c, h);
    out.column_reference[i] = h;
    const double exponent = (ranges->one_exponential ? ranges->middle : represented_lse) - lse;
    out.v[i] = (Real)(f.column_factor[i] * exp2(exponent) * inverse_divisor);
  }
}

// out = x / gradient_divisor, rounded: the row factors of a sigmoid's gradient blocks.
extern "C" __global__ void divide_factors(const double* x, i64 n, const Ranges* ranges, Real* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = (Real)(x[i] / ranges->gradient_divisor);
}

// out = values value_scale / scale: n numbers (thresholds, limits, biases) in the unit of products, in which kernels
// compare them with products, or add them. `values` times `value_scale`, and products times `scale`, are exponents.
// If a kernel has computed values[i] from a float32 product, out[i] has the bits of this product; from a float64
// product, up to the last bit.
extern "C" __global__ void to_products(const double* values, const __grid_constant__ Scale value_scale, i64 n,
                                       const __grid_constant__ Scale scale, Real* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = (Real)(values[i] * (value_scale.bare() * LOG2_E) / (scale.get() * LOG2_E));
}

// Resets one_exponential, after `ranges`, for options that leave a pair out of the softmax of its row only (limits,
// guide). Such a pair is still in the softmax of its column, so its logit is at most the column's log-sum-exp C_j. But
// it may exceed the row's log-sum-exp R_i, by up to max C - min R. If that is SPREAD or more, one exponential cannot
// serve both. One thread block.
extern "C" __global__ void __launch_bounds__(RANGE_THREADS)
check_spread(const double* row_reference, const double* column_reference, i64 m, i64 n, Ranges* out) {
  __shared__ double memory[2][32];
  double x[2] = {-INFINITY_, -INFINITY_};  // the largest log-sum-exp of columns, minus the least of rows
  for (i64 j = threadIdx.x; j < n; j += RANGE_THREADS) x[0] = fmax(x[0], column_reference[j]);
  for (i64 i = threadIdx.x; i < m; i += RANGE_THREADS) x[1] = fmax(x[1], -row_reference[i]);
  reduce_to_thread_0(x, memory, Larger());
  if (threadIdx.x == 0 && !(x[0] + x[1] < SPREAD)) out->one_exponential = 0;
}
