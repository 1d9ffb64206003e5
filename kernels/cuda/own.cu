// Own negatives (own.cuh): own_sums adds them to the sums of the row, before the losses are known, and own_gradients
// computes their gradients afterwards:
//
//     do_ij = g_ij u_qi       dq_i += sum_j g_ij u_oij       (gradients with respect to the rows u)
//
// The gradient with respect to z is (du - u <du, u>) / |z|. Here <do_ij, u_oij> = g_ij x_ij, and <dq_i, u_qi> is the sum
// of these. own_sums keeps the products and norms, so own_gradients reads each own negative once, and writes its
// gradient. Both kernels take the time of these bytes. If own negatives are rows of a table, own_table.cu computes their
// gradients.
//
// `parts` groups of lanes of one thread block share the own negatives of a row, BATCH of them at a time: all loads of a
// batch are under way at once.
#include "own.cuh"
#include "vectors/running_sums.cuh"

// Squares of a norm between these are neither rounded to 0 nor infinite, and have all their digits
constexpr Real LEAST_SQUARE = sizeof(Real) == 8 ? 0x1p-800 : 0x1p-80, MOST_SQUARE = 1 / LEAST_SQUARE;

// In one pass, a row has the reference exponent 0 unless its largest exponent of own negatives is this far from 0. Their
// sum is then within the bounds of online_references.cuh, and so are most sums over the batch
constexpr double FAR = 32;

// The lanes of a group ask for a batch of own negatives in the L2 cache: for their features of a chunk, or for all
// (`chunk` -1). A loop that reads them afterwards waits less.
__device__ __forceinline__ void prefetch_batch(const OwnNegatives& a, const Matrix& own, i64 first, int chunk,
                                               const Group& group) {
#if WORDS
  constexpr int LINE = 128, SIZE = 2 * WORDS;
  const i64 d = a.d;
  const i64 begin = chunk < 0 ? 0 : chunk * (i64)(group.lanes * LANE_FEATURES);
  const i64 end = chunk < 0 || begin + group.lanes * LANE_FEATURES > d ? d : begin + group.lanes * LANE_FEATURES;
  for (int b = 0; b < BATCH && first + b < a.k; ++b) {
    const i64 at = own_row(a, group.row, first + b);
    if (!is_own_row(a, at)) continue;
    const char* row = own.data + (at * own.row_stride + begin) * SIZE;
    for (i64 byte = group.lane * LINE; byte < (end - begin) * SIZE; byte += group.lanes * LINE) prefetch_line(row + byte);
  }
#endif
}

// u = factor 2^-exponent z. The exponent is 0 unless the squares of z are out of the range of Real.
struct Unit {
  Real factor;
  int exponent;
};

// The unit of any row.
__device__ __noinline__ Unit find_any_unit(const Matrix& z, i64 row, i64 d, const Group& group) {
  double largest = 0, scaled_square = 0;
  for (i64 k = group.lane; k < d; k += group.lanes) largest = fmax(largest, fabs(z.get(row, k)));
  const int exponent = find_exponent(group.max(largest));
  for (i64 k = group.lane; k < d; k += group.lanes) {
    const double x = ldexp(z.get(row, k), -exponent);
    scaled_square += x * x;
  }
  scaled_square = group.sum(scaled_square);
  if (scaled_square == 0) return {0, 0};
  if (!(scaled_square < INFINITY_)) return {(Real)NAN_, 0};
  return {(Real)(1 / sqrt(scaled_square)), exponent};
}

// The unit of a row with the sum of squares `square`, which may be infinite, 0 or NaN.
__device__ __forceinline__ Unit find_unit(Real square, const Matrix& z, i64 row, i64 d, const Group& group) {
  if (square >= LEAST_SQUARE && square <= MOST_SQUARE) return {1 / sqrt(square), 0};
  return find_any_unit(z, row, d, group);
}

// The product of 2^-q_exponent q and 2^-z_exponent z.
__device__ __noinline__ Real multiply_scaled(const Matrix& q, i64 q_row, int q_exponent, const Matrix& z, i64 z_row,
                                             int z_exponent, i64 d, const Group& group) {
  double product = 0;
  for (i64 k = group.lane; k < d; k += group.lanes)
    product += ldexp(q.get(q_row, k), -q_exponent) * ldexp(z.get(z_row, k), -z_exponent);
  return (Real)group.sum(product);
}

// Writes the products of this group's own negatives, and their units. Returns NaN (in some lanes) if a feature of an own
// negative that counts is not finite, or if its index is beyond the table, else 0.
__device__ __forceinline__ float multiply_own(const OwnNegatives& a, const Group& group, const char* mask, i64 mask_stride,
                              double limit) {
  const i64 i = group.row, step = group.lanes * LANE_FEATURES, first_column = group.lane * LANE_FEATURES;
  const Matrix own = a.own.of(i);
  prefetch_batch(a, own, group.part * BATCH, -1, group);
  const i64 begin = group.part * BATCH;
  Unit query = {1, 0};
  Real query_square = 0;
  float zero_sum = 0;  // of features times 0
  for (i64 first = begin; first < a.k; first += a.parts * BATCH) {
    prefetch_batch(a, own, first + a.parts * BATCH, -1, group);
    bool counts[BATCH];
    i64 own_rows[BATCH];
    Real products[BATCH], squares[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      counts[b] = first + b < a.k && (!mask || mask[(first + b) * mask_stride]);
      own_rows[b] = own_row(a, i, first + b);
      if (counts[b] && own_rows[b] >= 0 && !is_own_row(a, own_rows[b])) zero_sum = (float)NAN_;  // an invalid index
      counts[b] = counts[b] && is_own_row(a, own_rows[b]);
      products[b] = squares[b] = 0;
    }
#pragma unroll 1
    for (i64 column = first_column; column < a.d; column += step) {
      Arriving arriving[BATCH];
      Real q[LANE_FEATURES], x[LANE_FEATURES];
#pragma unroll
      for (int b = 0; b < BATCH; ++b)
        if (counts[b]) arriving[b].load(own, own_rows[b], column);
      get_group(q, a.query, i, column, a.d - column);
      if (NORM_FACTORS && first == begin)
#pragma unroll
        for (int f = 0; f < LANE_FEATURES; ++f) query_square += q[f] * q[f];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        if (!counts[b]) continue;
        arriving[b].get(x, own, own_rows[b], column, a.d - column);
#pragma unroll
        for (int f = 0; f < LANE_FEATURES; ++f) {
          products[b] += q[f] * x[f];
          if (NORM_FACTORS) squares[b] += x[f] * x[f];
          else zero_sum += (float)(x[f] * 0);
        }
      }
    }
    if (NORM_FACTORS && first == begin) {
      query = find_unit(group.sum(query_square), a.query, i, a.d, group);
      if (begin == 0 && group.lane == 0) a.query_factors[i] = query.factor, a.query_exponents[i] = query.exponent;
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const i64 at = i * a.k + first + b;
      if (first + b >= a.k) break;
      if (!counts[b]) {
        if (group.lane == 0) a.products[at] = (Real)-INFINITY_;
        continue;
      }
      Real product = group.sum(products[b]);
      if (NORM_FACTORS) {
        const Unit unit = find_unit(group.sum(squares[b]), own, own_rows[b], a.d, group);
        if (query.exponent || unit.exponent)
          product = multiply_scaled(a.query, i, query.exponent, own, own_rows[b], unit.exponent, a.d, group);
        product = product * query.factor * unit.factor;
        if (unit.factor == 0) product = 0;  // a row of zeros has no direction
        zero_sum += (float)(unit.factor * 0);
        if (group.lane == 0) a.factors[at] = unit.factor, a.exponents[at] = unit.exponent;
      }
      if (group.lane == 0) a.products[at] = (double)product > limit ? (Real)-INFINITY_ : product;
    }
  }
  return zero_sum;
}

// Adds the own negatives of each row to its sums. `mask` [m, k] tells which count (null: all); `limits` [m] are products
// above which they do not count (null: none).
//   - references null: `rows` are complete sums of base-2 exponents, to which the own negatives are added.
//   - else, in one pass (vectors/online.cuh), before its first block: own negatives are the first terms of the sums.
//     references[i] becomes 0, or their largest exponent if that is far from 0; rows.sum[i] their sum against it, and
//     rows.moment[i] the sum of exponentials times products. The pass multiplies its products by pass_scale, rounded.
//   - ranks [m] (null: not wanted) gain the number of own negatives above the positive. The logits of positives have
//     the scale of logits, plus positive_hardness.
//   - row_nans[i]: NaN if a feature of an own negative that counts is not finite, or if its index is beyond the table,
//     else known_row_nans[i] (null: 0). A bias that is NaN or +inf makes the sum NaN.
extern "C" __global__ void __launch_bounds__(OWN_THREADS, NORM_FACTORS || sizeof(Real) == 8 ? 4 : 6)
own_sums(const __grid_constant__ OwnNegatives a, const char* mask, i64 mask_row_stride, i64 mask_stride,
         const double* limits, const __grid_constant__ Sums rows, Real* references,
         const __grid_constant__ Scale pass_scale, const double* positive_logits, double positive_hardness,
         i64* ranks, const double* known_row_nans, double* row_nans) {
  __shared__ float zero_sums[MAX_GROUPS];
  const Group group(a.d, a.parts);
  const i64 i = group.row;
  if (i < a.m) {
    const char* row_mask = mask ? mask + i * mask_row_stride : nullptr;
    const double limit = limits ? limits[i] : INFINITY_;
    const float sum = group.sum(multiply_own(a, group, row_mask, mask_stride, limit));
    if (group.lane == 0) zero_sums[group.index] = sum;
  }
  // The writes of zero_sums[] and of products come before the reads below
  if (a.parts > 1) __syncthreads();
  else __syncwarp();
  if (group.part != 0 || i >= a.m) return;

  const Real* products = a.products + i * a.k;
  const double c = a.exponent_factor();
#if OWN_BIAS
  double top = -INFINITY_;
  for (i64 j = group.lane; j < a.k; j += group.lanes) top = fmax(top, add_own_bias(a, i * a.k + j, c * products[j]));
  top = group.max(top);
#else
  Real largest = (Real)-INFINITY_;
  for (i64 j = group.lane; j < a.k; j += group.lanes) largest = max_(largest, products[j]);
  const double top = c * group.join(largest, max_);
#endif
  const double positive = ranks ? positive_logits[i] : 0, rank_factor = (a.scale.bare() + positive_hardness) * LOG2_E;
  Real sum = 0, above = 0;
  double moment = 0;
  for (i64 j = group.lane; j < a.k; j += group.lanes) {
    const double logit = c * products[j], exponent = add_own_bias(a, i * a.k + j, logit);
    if (is_nothing(exponent)) continue;
    const Real e = exp2_((Real)(exponent - top));
    sum += e;
    moment += e * logit;
    above += ranks && rank_factor * products[j] > positive;
  }
  sum = group.sum(sum);
  if (rows.moment) moment = group.sum(moment);
  if (ranks) above = group.sum(above);
  if (group.lane != 0) return;
  float zero_sum = 0;
  for (int part = 0; part < a.parts; ++part) zero_sum += zero_sums[group.index + part];
  row_nans[i] = zero_sum != 0 ? NAN_ : known_row_nans ? known_row_nans[i] : 0;  // NaN != 0 is true
  if (ranks) ranks[i] += (i64)above;
  if (!references) {
    rows.set(i, merge(rows.get(i), Sum{top, sum, moment}));
    return;
  }
  // to_logits (vectors/sums.cuh) undoes this rounding
  const double pass_factor = pass_scale.get() * LOG2_E, rounded = (double)(Real)pass_factor / pass_factor;
  const double change = fabs(rounded - 1) <= 0x1p-24 ? rounded : 1;
  const Real reference = is_nothing(top) || fabs(top) <= FAR ? 0 : (Real)(top * change);
  const double height = is_nothing(top) ? 0 : top * change - (double)reference, whole = rint(height);
  const double factor = ldexp((double)exp2_((Real)(height - whole)), (int)whole);
  references[i] = reference;
  rows.sum[i] = sum * factor;
  if (rows.moment) rows.moment[i] = moment * factor / pass_factor;
}

// Adds this group's terms to dq, and writes the gradients of its own negatives, for LANE_FEATURES features from `column`
// on. `u` are the features of the unit query.
__device__ __forceinline__ void differentiate_own(const OwnNegatives& a, const Group& group, double factor,
                                                  double reference, const Matrix& gradient, bool wants_query,
                                                  const Real (&u)[LANE_FEATURES], i64 column,
                                                  Real (&dq)[LANE_FEATURES]) {
  const i64 n = a.d - column, row = group.row * a.k;
  const Matrix own = a.own.of(group.row);
  const double c = a.exponent_factor();
  const bool reads = wants_query || NORM_FACTORS;
  for (i64 first = group.part * BATCH; first < a.k; first += a.parts * BATCH) {
    if (reads) prefetch_batch(a, own, first + a.parts * BATCH, group.chunk, group);
    Arriving arriving[BATCH];
    Real products[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      products[b] = first + b < a.k ? a.products[row + first + b] : (Real)-INFINITY_;
      const i64 at = own_row(a, group.row, first + b);
      if (reads && first + b < a.k && is_own_row(a, at)) arriving[b].load(own, at, column);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      if (first + b >= a.k) break;
      Real out[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
      int exponent = 0;
      if (!is_nothing(products[b])) {
        // The reference is at least the largest exponent, but for rounding
        const double exponent2 = add_own_bias(a, row + first + b, c * products[b]);
        const Real g = (Real)(factor * exp2_((Real)fmin(exponent2 - reference, 0.0)));
        Real x[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0}, unit_factor = 1;
        if (NORM_FACTORS) {
          unit_factor = a.factors[row + first + b];
          exponent = a.exponents[row + first + b];
        }
        const i64 at = own_row(a, group.row, first + b);
        if (reads && NORM_FACTORS && exponent) get_row(x, own, at, column, n, exponent);
        else if (reads) arriving[b].get(x, own, at, column, n);
#pragma unroll
        for (int f = 0; f < LANE_FEATURES; ++f) {
          const Real unit = unit_factor * x[f];
          dq[f] += g * unit;
          out[f] = NORM_FACTORS ? g * unit_factor * (u[f] - products[b] * unit) : g * u[f];
        }
      }
      if (gradient.data) set_own(out, gradient, first + b, column, n, exponent);
    }
  }
}

// The gradients of own negatives, from the factor a_i and the reference exponent r_i of each row.
//   - own_gradient (without data: not wanted) gets the gradients of own negatives that are in no table.
//   - query_gradient (likewise) gets dq, or with `add` its sum with the contents of query_gradient.
//   - log_scale_grad[i] (null: not wanted) gets the sum of g_ij x_ij, or with add_log_scale_grad its sum with
//     log_scale_grad[i].
extern "C" __global__ void __launch_bounds__(OWN_THREADS, NORM_FACTORS || sizeof(Real) == 8 || WORDS == 2 ? 4 : 6)
own_gradients(const __grid_constant__ OwnNegatives a, const double* factors, const double* references,
              const __grid_constant__ Matrix query_gradient, i64 add,
              const __grid_constant__ OwnFeatures own_gradient, double* log_scale_grad, i64 add_log_scale_grad) {
  __shared__ Real sums[OWN_THREADS][LANE_FEATURES];
  const int chunks = (int)((a.d + LANE_FEATURES * count_lanes(a.d) - 1) / (LANE_FEATURES * count_lanes(a.d)));
  const Group group(a.d, a.parts, chunks);
  const i64 i = group.row, column = group.chunk * (i64)(group.lanes * LANE_FEATURES) + group.lane * LANE_FEATURES;
  const bool inside = i < a.m, has_features = inside && column < a.d, wants_query = query_gradient.data;
  if (has_features && (NORM_FACTORS || wants_query))
    prefetch_batch(a, a.own.of(i), group.part * BATCH, group.chunk, group);
  double factor = 0, reference = 0, along = 0;  // along: <dq_i, u_qi>
  Unit query = {1, 0};
  if (inside) {
    factor = factors[i], reference = references[i];
    if (NORM_FACTORS) query = {a.query_factors[i], a.query_exponents[i]};
  }
  Real u[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0}, dq[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (has_features && (wants_query || own_gradient.data)) {
    get_row(u, a.query, i, column, a.d - column, query.exponent);
    if (NORM_FACTORS)
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f) u[f] *= query.factor;
    const Matrix gradient = own_gradient.data ? own_gradient.of(i) : Matrix{nullptr, 0, 0, 0};
    differentiate_own(a, group, factor, reference, gradient, wants_query, u, column, dq);
  }
  if (a.parts > 1 && wants_query) {  // adds the parts of dq, in their order
#pragma unroll
    for (int f = 0; f < LANE_FEATURES; ++f) sums[threadIdx.x][f] = dq[f];
    __syncthreads();  // the writes of sums[] come before the reads below
    for (int part = 1; group.part == 0 && part < a.parts; ++part)
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f) dq[f] += sums[threadIdx.x + part * group.lanes][f];
  }
  if (group.part != 0 || !inside) return;
  if (NORM_FACTORS || log_scale_grad && group.chunk == 0) {
    const double c = a.exponent_factor();
    for (i64 j = group.lane; j < a.k; j += group.lanes) {
      const double product = a.products[i * a.k + j];
      const double exponent = add_own_bias(a, i * a.k + j, c * product);
      if (!is_nothing(product)) along += factor * exp2_((Real)fmin(exponent - reference, 0.0)) * product;
    }
    along = group.sum(along);
    if (log_scale_grad && group.chunk == 0 && group.lane == 0)
      log_scale_grad[i] = along + (add_log_scale_grad ? log_scale_grad[i] : 0);
  }
  if (!wants_query || !has_features) return;
  if (NORM_FACTORS)
#pragma unroll
    for (int f = 0; f < LANE_FEATURES; ++f) dq[f] = (dq[f] - (Real)along * u[f]) * query.factor;
  set_row(dq, query_gradient, i, column, a.d - column, query.exponent, add);
}
