// Factors of gradient blocks: numbers of each row and each column, from which a block of dL/dx is computed.
#pragma once
#include "common.cuh"

// Numbers that follow from the ranges of factors and log-sum-exps.
struct Ranges {
  double gradient_divisor;  // gradient blocks hold P = (dL/dx) / gradient_divisor, to fit their element type
  double middle;            // of the log-sum-exps
  i64 one_exponential;  // 1 if one exponential serves both directions
};

struct FactorSources {
  const double *row_reference, *row_factor;                      // [M]
  const double* positive_gradient;                               // [M, set_size]
  const double *column_reference, *column_factor;                // [N] or null
  const double* column_positive_gradient;                        // [N] or null: at the columns' own positives
};

constexpr int RANGE_THREADS = 1024;
constexpr double SPREAD = 40;  // base 2, of log-sum-exps that share exponentials
// A positive bounds the gradients of its row, so the row's factor is not needed for the bound. But the divisor is at
// least this share of the factor, because factors are divided by it, and larger quotients overflow float32.
constexpr double MIN_DIVISOR_SHARE = 0x1p-60;

// One thread block reads M + N numbers once. An element of dL/dx is at most the sum of its row's and its
// column's gradients. The gradient at the positive bounds each of the two. In two cases the factors bound them
// instead: with `by_factor` (several positives, or linear terms), and without log-sum-exps (sigmoid).
extern "C" __global__ void __launch_bounds__(RANGE_THREADS)
ranges(const __grid_constant__ FactorSources f, i64 m, i64 n, i64 set_size, i64 by_factor,
       double largest_element, Ranges* out) {
  __shared__ double parts[4][RANGE_THREADS];
  double high = -INFINITY_, low = INFINITY_, least = INFINITY_, bound = 0;
#pragma unroll 4  // as in `totals`
  for (i64 i = threadIdx.x; i < m; i += RANGE_THREADS) {
    if (f.row_reference) {
      high = fmax(high, f.row_reference[i]);
      low = fmin(low, f.row_reference[i]);
    }
    const double share = by_factor ? 2 : f.positive_gradient ? MIN_DIVISOR_SHARE : 1;
    bound = fmax(bound, fabs(f.row_factor[i]) * share);
    if (f.positive_gradient) bound = fmax(bound, 2 * fabs(f.positive_gradient[i]));
  }
  if (f.positive_gradient)  // the other positives of sets
    for (i64 pair = m + threadIdx.x; pair < m * set_size; pair += RANGE_THREADS)
      bound = fmax(bound, 2 * fabs(f.positive_gradient[pair]));
  if (f.column_reference)
#pragma unroll 4
    for (i64 j = threadIdx.x; j < n; j += RANGE_THREADS) {
      least = fmin(least, f.column_reference[j]);
      if (by_factor) bound = fmax(bound, 2 * fabs(f.column_factor[j]));
      if (f.column_positive_gradient) bound = fmax(bound, 2 * fabs(f.column_positive_gradient[j]));
    }
  const int t = threadIdx.x;
  parts[0][t] = high, parts[1][t] = low, parts[2][t] = least, parts[3][t] = bound;
  for (int half = RANGE_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();  // the writes of the upper half come before the reads below
    if (t < half) {
      parts[0][t] = fmax(parts[0][t], parts[0][t + half]);
      parts[1][t] = fmin(parts[1][t], parts[1][t + half]);
      parts[2][t] = fmin(parts[2][t], parts[2][t + half]);
      parts[3][t] = fmax(parts[3][t], parts[3][t + half]);
    }
  }
  if (t != 0) return;
  bound = parts[3][0];
  const bool usable = bound > 1e-300 && bound < INFINITY_;
  out->gradient_divisor = usable ? bound / largest_element : 1.0;
  out->middle = 0.5 * (parts[0][0] + parts[2][0]);
  out->one_exponential = f.column_reference && parts[0][0] - parts[2][0] < SPREAD && parts[0][0] - parts[1][0] < 80;
}

// Factors as the gradient kernels read them. tiled/gradient.cu has the equations of a, u and v.
struct FactorTargets {
  Real *row_reference, *a, *u;  // [M]
  Real *column_reference, *v;   // [N]
};

// The reference exponent h that kernels subtract from the logits c x, for a log-sum-exp. Kernels round c to
// the products' precision, so h is the log-sum-exp times the same rounding. Returns h without that rounding.
__device__ __forceinline__ double reference(double lse, double c, Real& h) {
  const double rounded = (double)(Real)c, exact = lse * (rounded / c);
  h = isfinite(exact) ? (Real)exact : 0;
  return (double)h * (c / rounded);
}

extern "C" __global__ void factors(const __grid_constant__ FactorSources f, i64 m, i64 n,
                                   const __grid_constant__ Scale scale, const Ranges* ranges,
                                   const __grid_constant__ FactorTargets out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  const double c = scale.get() * LOG2_E, inverse_divisor = 1 / ranges->gradient_divisor;
  if (i < m) {
    Real h;
    const double rest = reference(f.row_reference[i], c, h);
    out.row_reference[i] = h;
    out.a[i] = (Real)(f.row_factor[i] * exp2(rest - f.row_reference[i]) * inverse_divisor);
    if (f.column_reference) out.u[i] = ranges->one_exponential ? (Real)exp2(rest - ranges->middle) : 0;
  }
  if (f.column_reference && i < n) {
    Real h;
    const double lse = f.column_reference[i], rest = reference(lse, c, h);
    out.column_reference[i] = h;
    out.v[i] = (Real)(f.column_factor[i] * exp2((ranges->one_exponential ? ranges->middle : rest) - lse) * inverse_divisor);
  }
}

// out = x / gradient_divisor, rounded: the factors of a sigmoid's gradient blocks.
extern "C" __global__ void divide_factors(const double* x, i64 n, const Ranges* ranges, Real* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = (Real)(x[i] / ranges->gradient_divisor);
}

// The products whose logits are `values` times *value_scale, as kernels compute these products, bit for bit.
extern "C" __global__ void to_products(const double* values, const __grid_constant__ Scale value_scale, i64 n,
                                       const __grid_constant__ Scale scale, Real* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = (Real)(values[i] * (value_scale.bare() * LOG2_E) / (scale.get() * LOG2_E));
}

// One exponential cannot serve rows and columns if pairs are left out and the log-sum-exps lie too far apart:
// the exponential of a pair that its row leaves out may exceed the row's log-sum-exp. One thread block.
extern "C" __global__ void __launch_bounds__(RANGE_THREADS)
check_spread(const double* row_reference, const double* column_reference, i64 m, i64 n, Ranges* out) {
  __shared__ double column_memory[RANGE_THREADS / 32], row_memory[RANGE_THREADS / 32];
  double high = -INFINITY_, low = INFINITY_;
  for (i64 j = threadIdx.x; j < n; j += RANGE_THREADS) high = fmax(high, column_reference[j]);
  for (i64 i = threadIdx.x; i < m; i += RANGE_THREADS) low = fmin(low, row_reference[i]);
  const auto larger = [](double a, double b) { return fmax(a, b); };
  const auto smaller = [](double a, double b) { return fmin(a, b); };
  high = block_reduce<RANGE_THREADS>(high, column_memory, larger);
  low = block_reduce<RANGE_THREADS>(low, row_memory, smaller);
  if (threadIdx.x == 0 && !(high - low < SPREAD)) out->one_exponential = 0;
}
