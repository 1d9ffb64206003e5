// Own negatives (own.cuh). Before the losses are known, own_products computes their products with the query of their
// row, and own_sums adds these to the sums of the row. own_gradients computes their gradients afterwards:
//
//     do_ij = g_ij u_qi       dq_i += sum_j g_ij u_oij       (gradients with respect to the rows u)
//
// The gradient with respect to z is (du - u <du, u>) / |z|. Here <do_ij, u_oij> = g_ij x_ij, and <dq_i, u_qi> is the sum
// of these. own_products keeps the products and norms, so own_gradients reads each own negative once, and writes its
// gradient. Both kernels take the time of these bytes. If own negatives are rows of a table, own_table.cu computes their
// gradients.
//
// `parts` groups of lanes of one thread block share the own negatives of a row, BATCH of them at a time: all loads of a
// batch are under way at once. own_sums is a kernel of its own, because its steps wait for each other: so it waits once
// for all rows.
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

// Whether all features of row `row` of z are finite.
__device__ __noinline__ bool is_finite_row(const Matrix& z, i64 row, i64 d, const Group& group) {
  float zero_sum = 0;  // of features times 0
  for (i64 k = group.lane; k < d; k += group.lanes) zero_sum += (float)(z.get(row, k) * 0);
  return group.sum(zero_sum) == 0;  // NaN == 0 is false
}

// Writes the products x_ij of own negatives, and their units. `mask` [m, k] tells which count (null: all), unless an
// option leaves them out. x_ij is -inf for own negatives that do not count, and NaN if a feature of one that counts is not
// finite, or if its index is beyond the table.
extern "C" __global__ void __launch_bounds__(OWN_THREADS, NORM_FACTORS || sizeof(Real) == 8 || WORDS == 2 ? 4 : 6)
own_products(const __grid_constant__ OwnNegatives a, const char* mask, i64 mask_row_stride, i64 mask_stride) {
  const Group group(a.d, a.parts);
  if (group.row >= a.m) return;
  const i64 i = group.row, step = group.lanes * LANE_FEATURES, first_column = group.lane * LANE_FEATURES;
  const Matrix own = a.own.of(i);
  prefetch_batch(a, own, group.part * BATCH, -1, group);
  prefetch_row(a.query, i, a.d, group.lane, group.lanes);
  if (mask) mask += i * mask_row_stride;
  const i64 begin = group.part * BATCH;
  Unit query = {1, 0};
  Real query_square = 0;
  for (i64 first = begin; first < a.k; first += a.parts * BATCH) {
    prefetch_batch(a, own, first + a.parts * BATCH, -1, group);
    bool counts[BATCH], beyond[BATCH];  // beyond: an index beyond the table
    i64 own_rows[BATCH];
    Real products[BATCH], squares[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      counts[b] = first + b < a.k && (!mask || mask[(first + b) * mask_stride]);
      own_rows[b] = own_row(a, i, first + b);
      beyond[b] = counts[b] && own_rows[b] >= 0 && !is_own_row(a, own_rows[b]);
      counts[b] = counts[b] && is_own_row(a, own_rows[b]);
      products[b] = squares[b] = 0;
    }
#pragma unroll 2
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
        if (group.lane == 0) {
          a.products[at] = beyond[b] ? (Real)NAN_ : (Real)-INFINITY_;
          if (NORM_FACTORS) a.factors[at] = 0, a.exponents[at] = 0;
        }
        continue;
      }
      Real product = group.sum(products[b]);
      if (NORM_FACTORS) {
        const Unit unit = find_unit(group.sum(squares[b]), own, own_rows[b], a.d, group);
        if (query.exponent || unit.exponent)
          product = multiply_scaled(a.query, i, query.exponent, own, own_rows[b], unit.exponent, a.d, group);
        product = product * query.factor * unit.factor;
        if (unit.factor == 0) product = 0;  // a row of zeros has no direction
        if (group.lane == 0) a.factors[at] = unit.factor, a.exponents[at] = unit.exponent;
      }
      // The product of a feature that is infinite may be -inf
      if (!NORM_FACTORS && !isfinite(product) && !is_finite_row(own, own_rows[b], a.d, group)) product = (Real)NAN_;
      const Pair<OwnNegatives, OwnNegatives> pair{{}, a, a, (int)i, 0};
      if (group.lane == 0) a.products[at] = Options::excluded(product, pair) ? (Real)-INFINITY_ : product;
    }
  }
}

// Adds the own negatives of each row to its sums. `lanes`, a power of two, share a row.
//   - references null: `rows` are complete sums of base-2 exponents, to which the own negatives are added.
//   - else, in one pass (vectors/online.cuh), before its first block: own negatives are the first terms of the sums.
//     references[i] becomes 0, or their largest exponent if that is far from 0; rows.sum[i] their sum against it, and
//     rows.moment[i] the sum of exponentials times products. The pass multiplies its products by pass_scale, rounded.
//   - ranks [m] (null: not wanted) gain the number of own negatives above the positive. The logits of positives have
//     the scale of logits, plus positive_hardness.
//   - row_nans[i]: NaN if a product is NaN, else known_row_nans[i] (null: 0). A bias that is NaN or +inf makes the sum NaN.
extern "C" __global__ void __launch_bounds__(OWN_THREADS)
own_sums(const __grid_constant__ OwnNegatives a, i64 lanes, const __grid_constant__ Sums rows, Real* references,
         const __grid_constant__ Scale pass_scale, const double* positive_logits, double positive_hardness,
         i64* ranks, const double* known_row_nans, double* row_nans) {
  const i64 thread = blockIdx.x * (i64)OWN_THREADS + threadIdx.x, i = thread / lanes;
  const int lane = thread % lanes;
  const bool has_row = i < a.m;
  const i64 count = has_row ? a.k : 0;
  const auto over_lanes = [&](auto x, auto join) {
    for (int by = (int)lanes / 2; by > 0; by /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, by));
    return x;
  };
  const auto add = [](auto x, auto y) { return x + y; };

  const Real* products = a.products + i * a.k;
  const double c = a.exponent_factor();
#if OWN_BIAS
  double top = -INFINITY_;
  for (i64 j = lane; j < count; j += lanes) top = fmax(top, add_own_bias(a, i * a.k + j, c * products[j]));
  top = over_lanes(top, [](double x, double y) { return fmax(x, y); });
#else
  Real largest = (Real)-INFINITY_;
  for (i64 j = lane; j < count; j += lanes) largest = max_(largest, products[j]);
  const double top = c * over_lanes(largest, max_);
#endif
  const double positive = ranks && has_row ? positive_logits[i] : 0;
  const double rank_factor = (a.scale.bare() + positive_hardness) * LOG2_E;
  Real sum = 0, above = 0, nans = 0;
  double moment = 0;
  for (i64 j = lane; j < count; j += lanes) {
    nans += isnan(products[j]);
    const double logit = c * products[j], exponent = add_own_bias(a, i * a.k + j, logit);
    if (is_nothing(exponent)) continue;
    const Real e = exp2_((Real)(exponent - top));
    sum += e;
    moment += e * logit;
    above += ranks && rank_factor * products[j] > positive;
  }
  sum = over_lanes(sum, add);
  if (rows.moment) moment = over_lanes(moment, add);
  if (ranks) above = over_lanes(above, add);
  nans = over_lanes(nans, add);
  if (lane != 0 || !has_row) return;
  row_nans[i] = nans != 0 ? NAN_ : known_row_nans ? known_row_nans[i] : 0;
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

// What the lanes of a group know of own negatives, one each: own_gradients reads it once for all features.
struct OwnFactor {
  Real product = (Real)-INFINITY_, g = 0, unit_factor = 1;
  int exponent = 0;
  double along = 0;  // g x_ij

  // Own negative j of row `row`; nothing if there is none.
  __device__ __forceinline__ void find(const OwnNegatives& a, i64 row, int j, double factor, double reference) {
    *this = OwnFactor();
    if (j >= a.k) return;
    const i64 at = row * a.k + j;
    product = a.products[at];
    if (NORM_FACTORS) unit_factor = a.factors[at], exponent = a.exponents[at];
    if (is_nothing(product)) return;
    // The reference is at least the largest exponent, but for rounding
    const double exponent2 = add_own_bias(a, at, a.exponent_factor() * product);
    const double exact = factor * exp2_((Real)fmin(exponent2 - reference, 0.0));
    g = (Real)exact, along = exact * product;
  }
};

// The gradients of own negatives, from the factor a_i and the reference exponent r_i of each row. chunk_groups groups of
// lanes (or sets of `parts`) share the features of a row.
//   - own_gradient (without data: not wanted) gets the gradients of own negatives that are in no table.
//   - query_gradient (likewise) gets dq, or with `add` its sum with the contents of query_gradient.
//   - log_scale_grad[i] (null: not wanted) gets the sum of g_ij x_ij, or with add_log_scale_grad its sum with
//     log_scale_grad[i].
extern "C" __global__ void __launch_bounds__(OWN_THREADS, NORM_FACTORS || sizeof(Real) == 8 || WORDS == 2 ? 4 : 5)
own_gradients(const __grid_constant__ OwnNegatives a, i64 chunk_groups, const double* factors, const double* references,
              const __grid_constant__ Matrix query_gradient, i64 add,
              const __grid_constant__ OwnFeatures own_gradient, double* log_scale_grad, i64 add_log_scale_grad) {
  __shared__ Real sums[OWN_THREADS][LANE_FEATURES];
  __shared__ double along_parts[MAX_GROUPS];
  const Group group(a.d, a.parts, (int)chunk_groups);
  const i64 i = group.row;
  const int k = (int)a.k, parts = (int)a.parts, width = group.lanes * LANE_FEATURES;
  const bool inside = i < a.m, wants_query = query_gradient.data, reads = inside && (wants_query || NORM_FACTORS);
  const Matrix own = a.own.of(i), gradient = own_gradient.data ? own_gradient.of(i) : Matrix{nullptr, 0, 0, 0};
  const int prefetched_chunk = chunk_groups == 1 ? -1 : group.chunk;
  if (reads) prefetch_batch(a, own, group.part * BATCH, prefetched_chunk, group);
  if (inside && group.part == 0 && chunk_groups == 1) {
    prefetch_row(a.query, i, a.d, group.lane, group.lanes);
    if (wants_query && add) prefetch_row(query_gradient, i, a.d, group.lane, group.lanes);
  }
  double factor = 0, reference = 0, along = 0;  // along: <dq_i, u_qi>
  Unit query = {1, 0};
  if (inside) {
    factor = factors[i], reference = references[i];
    if (NORM_FACTORS) query = {a.query_factors[i], a.query_exponents[i]};
  }
  // Own negative `at` of this group is own negative get_own(at) of the row: the groups have batches in turns
  const auto get_own = [&](int at) { return (at / BATCH * parts + group.part) * BATCH + at % BATCH; };
  const bool in_one_round = get_own(group.lanes) >= k;
  OwnFactor mine;
  if (inside) mine.find(a, i, get_own(group.lane), factor, reference);

  for (i64 begin = 0; begin < a.d; begin += chunk_groups * width) {
    const i64 column = begin + group.chunk * width + group.lane * LANE_FEATURES, n = inside ? a.d - column : 0;
    Real u[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0}, dq[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (n > 0 && (wants_query || own_gradient.data)) {
      get_row(u, a.query, i, column, n, query.exponent);
      if (NORM_FACTORS)
#pragma unroll
        for (int f = 0; f < LANE_FEATURES; ++f) u[f] *= query.factor;
    }
    for (int first = 0; inside && get_own(first) < k; first += group.lanes) {
      if (!in_one_round && (first > 0 || begin > 0)) mine.find(a, i, get_own(first + group.lane), factor, reference);
      if (begin == 0) along += mine.along;
      for (int next = 0; next < group.lanes && get_own(first + next) < k; next += BATCH) {  // BATCH divides `lanes`
        const int batch = get_own(first + next);
        if (reads && begin == 0) prefetch_batch(a, own, batch + parts * BATCH, prefetched_chunk, group);
        Arriving arriving[BATCH];
        i64 rows[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
          rows[b] = own_row(a, i, batch + b);
          if (reads && n > 0 && batch + b < k && is_own_row(a, rows[b])) arriving[b].load(own, rows[b], column);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
          const Real product = group.get(mine.product, next + b), g = group.get(mine.g, next + b);
          const Real unit_factor = NORM_FACTORS ? group.get(mine.unit_factor, next + b) : 1;
          int exponent = NORM_FACTORS ? group.get(mine.exponent, next + b) : 0;
          if (batch + b >= k || n <= 0) continue;
          Real out[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
          if (is_nothing(product)) {
            exponent = 0;
          } else {
            Real x[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
            const bool has_features = reads && is_own_row(a, rows[b]);
            if (has_features && NORM_FACTORS && exponent) get_row(x, own, rows[b], column, n, exponent);
            else if (has_features) arriving[b].get(x, own, rows[b], column, n);
#pragma unroll
            for (int f = 0; f < LANE_FEATURES; ++f) {
              const Real unit = unit_factor * x[f];
              dq[f] += g * unit;
              out[f] = NORM_FACTORS ? g * unit_factor * (u[f] - product * unit) : g * u[f];
            }
          }
          if (gradient.data) set_own(out, gradient, batch + b, column, n, exponent);
        }
      }
    }
    if (begin == 0 && (NORM_FACTORS || log_scale_grad)) along = group.sum(along);
    if (parts > 1) {  // adds the parts, in their order
      if (begin > 0) __syncthreads();  // the reads of sums[] for the last features come before these writes
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f) sums[threadIdx.x][f] = dq[f];
      if (begin == 0 && group.lane == 0) along_parts[group.index] = along;
      __syncthreads();  // the writes of sums[] and along_parts[] come before the reads below
      for (int part = 1; group.part == 0 && part < parts; ++part) {
        if (begin == 0) along += along_parts[group.index + part];
#pragma unroll
        for (int f = 0; f < LANE_FEATURES; ++f) dq[f] += sums[threadIdx.x + part * group.lanes][f];
      }
    }
    if (group.part != 0 || n <= 0 || !wants_query) continue;
    if (NORM_FACTORS)
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f) dq[f] = (dq[f] - (Real)along * u[f]) * query.factor;
    set_row(dq, query_gradient, i, column, n, query.exponent, add);
  }
  if (inside && log_scale_grad && group.part == 0 && group.chunk == 0 && group.lane == 0)
    log_scale_grad[i] = along + (add_log_scale_grad ? log_scale_grad[i] : 0);
}
