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
  if (group.row < a.m) {
    const char* row_mask = mask ? mask + group.row * mask_row_stride : nullptr;
    const double limit = limits ? limits[group.row] : INFINITY_;
    const float sum = group.sum(multiply_own(a, group, row_mask, mask_stride, limit));
    if (group.lane == 0) zero_sums[group.index] = sum;
  }
  __syncthreads();  // the writes of zero_sums[] and of products come before the reads below

  // float64 operations take as long for one lane as for all. So a warp has as many rows as there are lanes for their
  // products
  const int rows_per_block = OWN_THREADS / (group.lanes * (int)a.parts);
  int lanes = group.lanes;  // of a row; so many rows of `lanes` fit the block
  while (lanes / 2 >= a.k) lanes /= 2;
  const int row = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  if (threadIdx.x / 32 * 32 >= rows_per_block * lanes) return;  // a whole warp
  const i64 i = blockIdx.x * (i64)rows_per_block + row;
  const bool has_row = row < rows_per_block && i < a.m;
  const i64 count = has_row ? a.k : 0;
  const auto over_lanes = [&](auto x, auto join) {
    for (int by = lanes / 2; by > 0; by /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, by));
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
  Real sum = 0, above = 0;
  double moment = 0;
  for (i64 j = lane; j < count; j += lanes) {
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
  if (lane != 0 || !has_row) return;
  float zero_sum = 0;
  for (int part = 0; part < a.parts; ++part) zero_sum += zero_sums[row * a.parts + part];
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
// on. `u` are the features of the unit query. Returns <dq, u> of the group's own negatives, in parts that the lanes add
// up. All lanes of the group call this; those without features (`column` is d or more) read and write none.
__device__ __forceinline__ double differentiate_own(const OwnNegatives& a, const Group& group, double factor,
                                                    double reference, const Matrix& gradient, bool wants_query,
                                                    const Real (&u)[LANE_FEATURES], i64 column,
                                                    Real (&dq)[LANE_FEATURES]) {
  const i64 n = a.d - column, row = group.row * a.k;
  const Matrix own = a.own.of(group.row);
  const double c = a.exponent_factor();
  const bool reads = (wants_query || NORM_FACTORS) && n > 0;
  double along = 0;
  // Own negative `at` of this group is own negative get_own(at) of the row: the groups have batches in turns
  const int k = (int)a.k, parts = (int)a.parts;
  const auto get_own = [&](int at) { return (at / BATCH * parts + group.part) * BATCH + at % BATCH; };
  for (int first = 0; get_own(first) < k; first += group.lanes) {
    // Each lane finds the factor of one own negative, then all lanes read the features of each
    const int j = get_own(first + group.lane);
    Real lane_product = (Real)-INFINITY_, lane_g = 0, lane_factor = 1;
    int lane_exponent = 0;
    if (j < k) {
      lane_product = a.products[row + j];
      if (!is_nothing(lane_product)) {
        // The reference is at least the largest exponent, but for rounding
        const double exponent2 = add_own_bias(a, row + j, c * lane_product);
        const double g = factor * exp2_((Real)fmin(exponent2 - reference, 0.0));
        lane_g = (Real)g, along += g * lane_product;
      }
      if (NORM_FACTORS) lane_factor = a.factors[row + j], lane_exponent = a.exponents[row + j];
    }
    for (int next = 0; next < group.lanes && get_own(first + next) < k; next += BATCH) {  // BATCH divides `lanes`
      const int batch = get_own(first + next);
      if (reads) prefetch_batch(a, own, batch + parts * BATCH, group.chunk, group);
      Arriving arriving[BATCH];
      i64 rows[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        rows[b] = own_row(a, group.row, batch + b);
        if (reads && batch + b < k && is_own_row(a, rows[b])) arriving[b].load(own, rows[b], column);
      }
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const Real product = group.get(lane_product, next + b), g = group.get(lane_g, next + b);
        const Real unit_factor = NORM_FACTORS ? group.get(lane_factor, next + b) : 1;
        int exponent = NORM_FACTORS ? group.get(lane_exponent, next + b) : 0;
        if (batch + b >= k || n <= 0) continue;
        Real out[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (is_nothing(product)) {
          exponent = 0;
        } else {
          Real x[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
          if (reads && NORM_FACTORS && exponent) get_row(x, own, rows[b], column, n, exponent);
          else if (reads) arriving[b].get(x, own, rows[b], column, n);
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
  return along;
}

// The gradients of own negatives, from the factor a_i and the reference exponent r_i of each row.
//   - own_gradient (without data: not wanted) gets the gradients of own negatives that are in no table.
//   - query_gradient (likewise) gets dq, or with `add` its sum with the contents of query_gradient.
//   - log_scale_grad[i] (null: not wanted) gets the sum of g_ij x_ij, or with add_log_scale_grad its sum with
//     log_scale_grad[i].
extern "C" __global__ void __launch_bounds__(OWN_THREADS, NORM_FACTORS || sizeof(Real) == 8 || WORDS == 2 ? 4 : 5)
own_gradients(const __grid_constant__ OwnNegatives a, const double* factors, const double* references,
              const __grid_constant__ Matrix query_gradient, i64 add,
              const __grid_constant__ OwnFeatures own_gradient, double* log_scale_grad, i64 add_log_scale_grad) {
  __shared__ Real sums[OWN_THREADS][LANE_FEATURES];
  __shared__ double along_parts[MAX_GROUPS];
  const int chunks = (int)((a.d + LANE_FEATURES * count_lanes(a.d) - 1) / (LANE_FEATURES * count_lanes(a.d)));
  const Group group(a.d, a.parts, chunks);
  const i64 i = group.row, column = group.chunk * (i64)(group.lanes * LANE_FEATURES) + group.lane * LANE_FEATURES;
  const bool inside = i < a.m, has_features = inside && column < a.d, wants_query = query_gradient.data;
  const bool wants_along = NORM_FACTORS || (log_scale_grad && group.chunk == 0);
  double factor = 0, reference = 0, along = 0;  // along: <dq_i, u_qi>
  Unit query = {1, 0};
  if (inside) {
    if (NORM_FACTORS || wants_query) prefetch_batch(a, a.own.of(i), group.part * BATCH, group.chunk, group);
    factor = factors[i], reference = references[i];
    if (NORM_FACTORS) query = {a.query_factors[i], a.query_exponents[i]};
  }
  Real u[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0}, dq[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (has_features && (wants_query || own_gradient.data)) {
    get_row(u, a.query, i, column, a.d - column, query.exponent);
    if (NORM_FACTORS)
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f) u[f] *= query.factor;
  }
  if (inside) {
    const Matrix gradient = own_gradient.data ? own_gradient.of(i) : Matrix{nullptr, 0, 0, 0};
    along = differentiate_own(a, group, factor, reference, gradient, wants_query, u, column, dq);
    if (wants_along) along = group.sum(along);
  }
  if (a.parts > 1) {  // adds the parts, in their order
#pragma unroll
    for (int f = 0; f < LANE_FEATURES; ++f) sums[threadIdx.x][f] = dq[f];
    if (group.lane == 0) along_parts[group.index] = along;
    __syncthreads();  // the writes of sums[] and along_parts[] come before the reads below
    for (int part = 1; group.part == 0 && part < a.parts; ++part) {
      along += along_parts[group.index + part];
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f) dq[f] += sums[threadIdx.x + part * group.lanes][f];
    }
  }
  if (group.part != 0 || !inside) return;
  if (log_scale_grad && group.chunk == 0 && group.lane == 0)
    log_scale_grad[i] = along + (add_log_scale_grad ? log_scale_grad[i] : 0);
  if (!wants_query || !has_features) return;
  if (NORM_FACTORS)
#pragma unroll
    for (int f = 0; f < LANE_FEATURES; ++f) dq[f] = (dq[f] - (Real)along * u[f]) * query.factor;
  set_row(dq, query_gradient, i, column, a.d - column, query.exponent, add);
}
