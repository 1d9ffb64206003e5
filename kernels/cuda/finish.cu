// The last step of a gradient: dQ or dK from the sums over gradient blocks. Adds positives and linear terms, and
// differentiates through the normalisation. A warp, or half of a warp, computes a row.
//
// rows.cuh defines the factor f, the exponent e and s = 2^-e z of a row z, whose normalised row is u = f s. With
// P_ij = dL/dx_ij, the gradient with respect to u_i is dU_i = sum_j P_ij u_j. A gradient block has P_ij f_i f_j, so its
// product with the rows s_j is
//
//     g_i = sum_j P_ij f_i f_j s_j = f_i sum_j P_ij u_j = f_i dU_i.
//
// The gradient with respect to the features z is
//
//     dz = (dU - u <dU, u>) / |z| = 2^-e (g - f^2 s <g, s>),     <dU, u> = <g, s>.
//
// A row of zeros has zero gradient.
//
// NORM_FACTORS: rows are normalised, so they have factors and exponents. Without NORM_FACTORS, z = s = u and g = dU,
// and a thread needs fewer registers, so that more rows are in flight.
#include "rows.cuh"

#ifndef NORM_FACTORS
#define NORM_FACTORS 0
#endif
#ifndef LINEAR
#define LINEAR 0  // 1: the loss has terms that are linear in the logits (kernels/linear.py)
#endif
#ifndef BOTH_SIDES
#define BOTH_SIDES 0  // 1: one launch serves queries and keys; fewer rows of a large batch are in flight then
#endif

// The positives of the rows that are completed. A positive is a pair of such a row and its partner, a row of the other
// side. Gradient blocks do not contain the pair's dL/dx.
//   - Rows are queries, or query i and key i are partners (`begin` is null): entries[i * set_size + s] is the partner
//     of row i in its positive s, and entries are in the order of `gradient`.
//   - Rows are keys (`begin` is not null): entries[begin[j] .. end[j]) are the pairs of key j. A pair is an index in
//     `gradient`. Without SETS this index is the query; with SETS it is query * set_size + s.
struct Positives {
  const double* gradient;  // [queries, set_size] dL/dx at the positives
  const i64* entries;      // partners (-1 for none) or pairs, see above; null: row i has the partner i
  const i64 *begin, *end;  // [keys], or null
  i64 set_size;            // positives of a query; 1 without SETS
  i64 others;              // number of rows of the other side; row i >= others has no partner i
  Matrix z;                // features of the partners
  const Real* factor;      // of the partners, like `exponent`
  const int* exponent;

  // Adds dL/dx times the partner's row, for each positive of row `row`, to the eight numbers g of the row's gradient,
  // from feature `column` on. The row has n features from there on.
  template <class T>
  __device__ __forceinline__ void add(T (&g)[LANE_FEATURES], i64 row, i64 column, i64 n,
                                      double own_factor) const {
    const i64 positive_count = SETS ? set_size : 1;  // positives of a query
    const i64 stop = begin ? end[row] : (row + 1) * positive_count;  // one past the row's last entry
    for (i64 at = begin ? begin[row] : row * positive_count; at < stop; ++at) {
      const i64 entry = entries ? entries[at] : at;
      const i64 pair = begin ? entry : at;
      const i64 partner = SETS && begin ? entry / positive_count : entry;
      if (partner < 0 || partner >= others) continue;
      double weight = gradient[pair];
      if (NORM_FACTORS) weight *= own_factor * factor[partner];
      T x[LANE_FEATURES];
      get_group(x, z, partner, column, n);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i)
        g[i] += (T)weight * (NORM_FACTORS ? (T)ldexp((double)x[i], -exponent[partner]) : x[i]);
    }
  }
};

#if LINEAR
// A linear term t_i, which is subtracted from dL/du_i (kernels/linear.py):
//     t_i = factor[i] (sums[segment_i] - own_count u_i) + weighted[segment_i]
struct LinearGradient {
  const i64* segment;           // segment of each row, -1 if the row has no linear term; null: 0 for all rows
  const double* factor;         // factor of each row; null: 0 for all rows
  const Real *sums, *weighted;  // [segments, d] sums of the other side's rows, without and with factors; null: 0
  double own_count;  // 2 if queries are keys, because `sums` and `weighted` contain u_i, which must not count; else 0

  // Subtracts own_factor t_i from g. g and u are eight numbers of the row's gradient and of u_i, from feature `column`
  // on. `own_factor` is f_i, which g contains.
  template <class T>
  __device__ __forceinline__ void subtract(T (&g)[LANE_FEATURES], const T (&u)[LANE_FEATURES], i64 row,
                                           i64 column, i64 d, double own_factor) const {
    const i64 row_segment = segment ? segment[row] : 0;
    if (row_segment < 0) return;
    T x[LANE_FEATURES];
    if (factor) {
      const T term_factor = (T)(own_factor * factor[row]);
      get_reals(x, sums + row_segment * d + column, d - column);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) g[i] -= term_factor * (x[i] - (T)own_count * u[i]);
    }
    if (weighted) {
      get_reals(x, weighted + row_segment * d + column, d - column);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) g[i] -= (T)own_factor * x[i];
    }
  }
};

struct LinearGradients {
  LinearGradient first, second;  // of label smoothing, of classes; if there is one term, `second` is all null
};
#else
struct LinearGradients {};
#endif

// The square root of the absolute value of divisor * other, with the sign of the divisor. A sum is multiplied by |root|
// and by root, not by the product, which may be too small for a float. Roots of float64 numbers take a hundred
// instructions, and are left to products that are far from the range of floats.
__device__ __forceinline__ Real signed_root(double divisor, double other) {
  const double size = fabs(divisor) * other;
  if (sizeof(Real) == 4 && size > 0x1p-100 && size < 0x1p100)
    return copysignf(sqrtf((float)size), divisor < 0 ? -1.0f : 1.0f);
  return (Real)copysign(sqrt(fabs(divisor)) * sqrt(other), divisor);
}

// Eight features of a row, from `column` on, and the same features of its gradient with positives and linear terms,
// before the normalisation is differentiated. T is the type of the computation.
template <class T>
struct Finished {
  T g[LANE_FEATURES];  // the gradient g of the opening comment
  T x[LANE_FEATURES];  // the row s of the opening comment; not set if `with_row` is false

  // `sum` is the row of the accumulator. The row is multiplied by `divisor`, the gradient divisor, and by the feature
  // divisor of the other side. Memory is read before the first number is waited for.
  __device__ __forceinline__ Finished(const Real* sum, double divisor, double feature_divisor, const Positives& positives,
                                      const LinearGradients& linear, const Matrix& z, i64 row, i64 column,
                                      i64 d, double factor, int exponent, bool with_row = true) {
    const i64 n = d - column;
    T sums[LANE_FEATURES];
    get_reals(sums, sum + column, n);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) g[i] = 0;
    positives.add(g, row, column, n, factor);
    const Real root = signed_root(divisor, feature_divisor);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) g[i] += sums[i] * (T)fabs(root) * (T)root;
    if (!with_row) return;
    get_group(x, z, row, column, n);
    if (NORM_FACTORS)
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) x[i] = (T)ldexp((double)x[i], -exponent);
#if LINEAR
    T u[LANE_FEATURES];  // the normalised row
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) u[i] = NORM_FACTORS ? (T)(factor * x[i]) : x[i];
    const double own_factor = NORM_FACTORS ? factor : 1;
    linear.first.subtract(g, u, row, column, d, own_factor);
    linear.second.subtract(g, u, row, column, d, own_factor);
#endif
  }
  // This lane's part of <g, s>.
  __device__ __forceinline__ double dot() const {
    T sum = 0;
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) sum += g[i] * x[i];
    return sum;
  }
};

// The gradients of n rows of one side, queries or keys, from row `first` on.
//   - `acc` [n, acc_stride] has the sums over gradient blocks; its first row is row `first`. Gradient blocks were
//     divided by gradient_divisor[0] (`divisor_step` 0), or by gradient_divisor[row] (`divisor_step` 1). The sums are
//     multiplied by that divisor.
//   - The features of the other side were divided by *feature_divisor (null: by 1). The sums are multiplied by it.
//   - `z`, `factor` and `exponent` belong to the side that is completed, and `positives` has the other side.
//   - The gradients are written to `out`, or added to `out` if `add` is 1. If the data of `out` is null, they are
//     not written.
//   - <g, s> of each row, which is the sum of P_ij x_ij over the row, is written to `dots` (null: not wanted). Without
//     moments, the gradient of the scale is the sum of these numbers divided by the scale.
struct Side {
  const Real* acc;
  i64 acc_stride, first, n;
  Matrix z;
  const Real* factor;
  const int* exponent;
  Positives positives;
  const double* gradient_divisor;
  i64 divisor_step;
  const double* feature_divisor;
  double* dots;
  Matrix out;
  i64 add;
#if LINEAR
  LinearGradients linear;
#endif
};

// `finish` for row `offset` of a side.
__device__ __forceinline__ void finish_row(const Side& side, i64 offset, i64 d, int lane, int lanes) {
  if (offset >= side.n) return;
#if LINEAR
  const LinearGradients& linear = side.linear;
#else
  const LinearGradients linear = {};
#endif
  const Real* sum = side.acc + offset * side.acc_stride;
  const i64 row = side.first + offset;
  const Matrix &z = side.z, &out = side.out;
  const Positives& positives = side.positives;
  double* const dots = side.dots;
  prefetch_row(sum, d * sizeof(Real), lane, lanes);
  if (NORM_FACTORS || dots) prefetch_row(z, row, d, lane, lanes);
  if (!positives.entries && row < positives.others) prefetch_row(positives.z, row, d, lane, lanes);
  const double divisor = side.gradient_divisor[side.divisor_step * row];
  const double feature_divisor = side.feature_divisor ? *side.feature_divisor : 1.0;
  double dot = 0;
#if !NORM_FACTORS  // reads the row once, and computes in Real: float, or double for FP64
#pragma unroll 1
  for (i64 k = lane * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES) {
    Finished<Real> f(sum, divisor, feature_divisor, positives, linear, z, row, k, d, 0, 0, dots || LINEAR);
    if (dots) dot += f.dot();
    if (!out.data) continue;
    if (side.add) {
      Real before[LANE_FEATURES];
      get_group(before, out, row, k, d - k);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) f.g[i] += before[i];
    }
    set_group(f.g, out, row, k, d - k);
  }
  if (dots) dot = lanes_sum(dot, lanes);
  if (dots && lane == 0) dots[row] = dot;
#else  // reads the row twice, because all results need <g, s>; computes in float64
  const int e = side.exponent[row];
  const double f = side.factor[row];
  for (i64 k = lane * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES)
    dot += Finished<double>(sum, divisor, feature_divisor, positives, linear, z, row, k, d, f, e).dot();
  dot = lanes_sum(dot, lanes);
  if (dots && lane == 0) dots[row] = dot;
  if (!out.data) return;
  const double along = f * f * dot;  // f^2 <g, s>: how much of s is subtracted
  for (i64 k = lane * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES) {
    Finished<double> finished(sum, divisor, feature_divisor, positives, linear, z, row, k, d, f, e);
    double before[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (side.add) get_group(before, out, row, k, d - k);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i)
      finished.g[i] = ldexp(finished.g[i] - along * finished.x[i], -e) + before[i];
    set_group(finished.g, out, row, k, d - k);
  }
#endif
}

// Completes the gradients of one side; or with BOTH_SIDES of two: the first thread blocks have the rows of `one`, the
// others those of `other`. `d` is the number of features.
extern "C" __global__ void __launch_bounds__(ROWS_THREADS, sizeof(Real) == 8 || NORM_FACTORS && LINEAR ? 2 : NORM_FACTORS ? 3 : 4)
finish(const __grid_constant__ Side one, const __grid_constant__ Side other, i64 d) {
  const int lanes = count_lanes(d), lane = threadIdx.x % lanes, rows_per_block = ROWS_THREADS / lanes;
  const i64 row = lanes_row(lanes), one_rows = (one.n + rows_per_block - 1) / rows_per_block * rows_per_block;
  // Two calls, so that the addresses of a side's fields are constants
  if (!BOTH_SIDES || row < one_rows) finish_row(one, row, d, lane, lanes);
  else finish_row(other, row - one_rows, d, lane, lanes);
}

// out = sums + other (null pointers: 0), converted to the type of `out`. `sums` and `other` are contiguous [n, d]:
// parts of a rank's gradients, which are complete but for this sum.
extern "C" __global__ void assign(const Real* sums, const Real* other, i64 n, i64 d,
                                  const __grid_constant__ Matrix out) {
  const int lanes = count_lanes(d);
  const i64 row = lanes_row(lanes);
  if (row >= n) return;
  for (i64 k = threadIdx.x % lanes * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES) {
    Real x[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0}, y[LANE_FEATURES];
    if (sums) get_reals(x, sums + row * d + k, d - k);
    if (other) {
      get_reals(y, other + row * d + k, d - k);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) x[i] += y[i];
    }
    set_group(x, out, row, k, d - k);
  }
}
