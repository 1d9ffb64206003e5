// Sums of rows and columns: how the sums of tiles are merged, and the loss of a row from its complete sums.
#pragma once
#include "common.cuh"

// --- sums of tiles -----------------------------------------------------------------------------------------

constexpr int MERGE_THREADS = 128;
constexpr int MERGE_ROW_THREADS = 4;  // threads that share a row
constexpr int MAX_SWEEP_BLOCKS = 512;
constexpr int TILE_BITS = 32 * 32;  // of a thread block of a sweep: 32 words

// With exponentials in the products' precision.
__device__ __forceinline__ Sum merge(Sum a, Sum b) {
  return merge(a, b, [](double x) { return (double)exp2_((Real)x); });
}

// Lists in `writers` the thread blocks of a sweep that have written sums of a tile's columns, in ascending order, and
// returns their number. A block has one bit for each of TILE_BITS tiles; a sweep of more tiles has set all bits
// (sweep_lse.cu). All lanes of a warp call it.
__device__ __forceinline__ int find_writers(const u32* written_tiles, int blocks, i64 tile, int lane,
                                            int* writers) {
  int count = 0;
#pragma unroll 8
  for (int first = 0; first < blocks; first += 32) {
    const int block = first + lane;
    const bool here = block < blocks && written_tiles[block * 32 + tile % TILE_BITS / 32] >> tile % 32 & 1;
    const u32 all = __ballot_sync(ALL_LANES, here);
    if (here) writers[count + __popc(all & ((1u << lane) - 1))] = block;
    count += __popc(all);
  }
  return count;
}

// Rows' sums over a part of their columns: float64, base 2. Moments may be null.
struct Sums {
  double *max, *sum, *moment;

  __device__ __forceinline__ Sum get(i64 i) const { return {max[i], sum[i], moment ? moment[i] : 0}; }
  __device__ __forceinline__ void set(i64 i, const Sum& s) const {
    max[i] = s.max, sum[i] = s.sum;
    if (moment) moment[i] = s.moment;
  }
};

// Adds partial sums of rows, or of columns, to their sums, always in one order.
//   - A slot is one partial sum of a row: (max, sum), and a moment unless `moments` is null. `partial_sums` and
//     `moments` have `slots` slots for each row.
//   - The maxima are raw products; c = scale log2(e) makes base-2 logits of them. A sweep's maxima are such
//     logits already, so the caller passes scale = ln 2. `logit_scale` makes logits of the products in moments.
//   - A thread block has 32 rows. MERGE_ROW_THREADS threads share the slots of a row.
//   - If `written_tiles` is not null, the sums belong to columns of a sweep (sweep_lse.cu). Each thread block of the
//     sweep has two slots for the columns of the tiles that it has visited, and `written_tiles` has these tiles.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge_partial_sums(const Real2* partial_sums, i64 slots, i64 stride, i64 n,
            const __grid_constant__ Scale scale, const __grid_constant__ Sums sums,
            const u32* written_tiles,
            const Real* moments, const __grid_constant__ Scale logit_scale) {
  __shared__ Sum parts[MERGE_ROW_THREADS][32];
  __shared__ int writers[MAX_SWEEP_BLOCKS], writer_count;  // blocks of the sweep that have written sums of this tile
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const i64 i = blockIdx.x * (i64)32 + lane;
  if (written_tiles) {
    if (part == 0) {
      const int count = find_writers(written_tiles, (int)(slots / 2), i / TILE_COLUMNS, lane, writers);
      if (lane == 0) writer_count = count;
    }
    __syncthreads();  // the writes of writers[] and writer_count come before their reads
    slots = (i64)writer_count * 2;
  }
  const double c = scale.get() * LOG2_E, c_moments = moments ? logit_scale.get() * LOG2_E : 0;
  Sum own_slots = {-INFINITY_, 0, 0};
  if (i < n) {
#pragma unroll 4
    for (i64 s = part; s < slots; s += MERGE_ROW_THREADS) {
      const i64 slot = written_tiles ? (i64)writers[s / 2] * 2 + s % 2 : s;
      const Real2 partial = partial_sums[slot * stride + i];
      const double moment = moments ? c_moments * (double)moments[slot * stride + i] : 0;
      own_slots = merge(own_slots, Sum{c * (double)partial.x, (double)partial.y, moment});
    }
  }
  parts[part][lane] = own_slots;
  __syncthreads();  // the writes of parts[] come before the reads below
  if (part != 0 || i >= n) return;
  Sum total = sums.get(i);
#pragma unroll
  for (int p = 0; p < MERGE_ROW_THREADS; ++p) total = merge(total, parts[p][lane]);
  sums.set(i, total);
}

// Adds up the slots of row i, each with two partial sums (x, y), and a moment unless `moment_sums` is null:
//     first_sums[i] += sum of x
//     second_sums[i] += gradient_divisor * (sum of y)
//     moment_sums[i] += gradient_divisor * correction * (sum of moments).
// For a sigmoid, x is of losses and y of dL/dx, whose total is the gradient of the bias. For distillation, x and y are
// the two sums of block/distill.cuh, without a divisor.
// `correction` is the factor of `scale` that makes the kernel's products products of features.
extern "C" __global__ void add_partial_sums(const Real2* partial_sums, const Real* moments, i64 slots,
                                            i64 stride, i64 n, const double* gradient_divisor,
                                            const __grid_constant__ Scale scale, double* first_sums,
                                            double* second_sums, double* moment_sums) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  double x = 0, y = 0, moment = 0;
#pragma unroll 4
  for (i64 s = 0; s < slots; ++s) {
    const Real2 partial = partial_sums[s * stride + i];
    x += partial.x;
    y += partial.y;
    if (moment_sums) moment += moments[s * stride + i];
  }
  first_sums[i] += x;
  second_sums[i] += *gradient_divisor * y;
  if (moment_sums) moment_sums[i] += *gradient_divisor * (scale.get() / scale.bare()) * moment;
}

// The sum of `copies` vectors of n numbers, one after another, to the first.
extern "C" __global__ void add_copies(Real* sums, i64 n, i64 copies) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  Real sum = sums[i];
#pragma unroll 8
  for (i64 copy = 1; copy < copies; ++copy) sum += sums[copy * n + i];
  sums[i] = sum;
}

// --- before and after the log-sum-exps -------------------------------------------------------------------

// Vectors that follow from the loss (problem.materialize_vectors): positives by the loss's rule, and one upstream
// gradient for all rows. A pointer is null if the caller of the loss gives this vector.
struct DefaultVectors {
  i64* positives;
  double *upstream, value;
  i64 symmetric;

  __device__ __forceinline__ void write(i64 i, i64 m) const {
    if (positives) positives[i] = symmetric ? (i + m / 2) % m : i;
    if (upstream) upstream[i] = value;
  }
};

// Initial values of a log-sum-exp pass: sums are (-inf, 0, 0), and logits of positives [m, set_size] are NaN.
// `columns` and `any_key_not_finite` may be null.
extern "C" __global__ void begin(const __grid_constant__ Sums rows,
                                 const __grid_constant__ Sums columns, double* positive,
                                 i64 set_size, i64 m, i64 n,
                                 const __grid_constant__ DefaultVectors defaults,
                                 double* any_key_not_finite) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m) {
    rows.set(i, {-INFINITY_, 0, 0});
    for (i64 pair = i * set_size; pair < (i + 1) * set_size; ++pair) positive[pair] = NAN_;
    defaults.write(i, m);
  }
  if (columns.max && i < n) columns.set(i, {-INFINITY_, 0, 0});
  if (any_key_not_finite && i == 0) *any_key_not_finite = 0;
}

// The scale of exponents, for `hardness`.
extern "C" __global__ void raise_scale(const __grid_constant__ Scale scale, double by, double* out) {
  if (threadIdx.x == 0) *out = scale.bare() + by;
}

// Options of the softmax that change only numbers of a row: see spec.OPTIONS.
struct RowOptions {
  Scale scale, exponent_scale;  // the passes take all logits in the scale of exponents
  double margin;
  i64 decoupled;
  const double* key_bias;  // of all keys; or null

  __device__ __forceinline__ double to_logits() const { return scale.bare() / exponent_scale.bare(); }
  // The base-2 logit of a positive, from its logit in the scale of exponents.
  __device__ __forceinline__ double logit(double exponent) const {
    return exponent * to_logits() - scale.bare() * margin * LOG2_E;
  }
  // The bias of a row's logits with this key, base 2. Logits of columns have none.
  __device__ __forceinline__ double bias(i64 key) const {
    return key_bias && key >= 0 ? LOG2_E * key_bias[key] : 0;
  }
  // `negatives` are sums of exponents.
  __device__ __forceinline__ Direction finalize(Sum negatives, double logit, double mean) const {
    negatives.moment *= to_logits();
    return finalize_direction(negatives, logit, decoupled, mean);
  }
  // The positive is key `partner` (-1: none), whose logit has a bias. The bias does not depend on the scale, so it has
  // no part in the derivative by log(scale).
  __device__ __forceinline__ Direction finalize_one(Sum negatives, double positive, i64 partner,
                                              double bias = 0) const {
    if (partner < 0) return without_positive(negatives);
    return finalize(negatives, logit(positive) + bias, logit(positive));
  }
};

// targets.limits: the dot product above which a row leaves out negatives. `dots` [m, each] are the dot products of a
// row's positives.
extern "C" __global__ void limits(const double* dots, const i64* positives, i64 each, i64 m,
                                  double margin, double* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= m) return;
  double top = -INFINITY_;
  bool any = false;
  for (i64 pair = i * each; pair < (i + 1) * each; ++pair)
    if (positives[pair] >= 0) top = dots[pair] > top || isnan(dots[pair]) ? dots[pair] : top, any = true;
  out[i] = any ? top + margin : INFINITY_;
}

// out = x + by * bias: logits in base 2, and biases.
extern "C" __global__ void add_bias(const double* x, const double* bias, double by, i64 n, double* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + by * bias[i];
}

// Log-sum-exps as reference exponents: of nothing, any number.
__device__ __forceinline__ double get_reference(double lse2) { return is_nothing(lse2) ? 0 : lse2; }

struct FinalizeArguments {
  Sums rows, columns;
  double* positive;
  const i64* positives;
  i64 set_size;                      // of `positive`, `positives` and `positive_gradient`
  const double* upstream;
  const double* row_nans;                 // NaN for a row that is not finite, else 0; or null
  const double* any_key_not_finite;  // NaN or 0
  double row_direction_weight, column_direction_weight;
  RowOptions options;
  i64 m, symmetric, triangle, two_sided, lse_is_float;
  // results
  double *losses, *row_loss, *row_reference, *column_loss, *column_reference, *row_factor,
      *column_factor, *positive_gradient, *log_scale_grad, *positive_logit;  // the last two may be null
  void *row_lse, *column_lse;
};

__device__ __forceinline__ void put_lse(const FinalizeArguments& f, void* to, i64 i, double lse2) {
  if (f.lse_is_float) ((float*)to)[i] = (float)(LN_2 * lse2);
  else ((double*)to)[i] = LN_2 * lse2;
}

// Finalized.log_scale_grad of a row. With moments: `moment_gradient`, the derivative of its loss, times the
// upstream gradient. Without moments, only the margin's part: the margin times `at_positives`, the sum of
// -dL/dx at the positives, times the scale. The rest is <dQ_i, q_i>.
__device__ __forceinline__ double log_scale_gradient(const FinalizeArguments& f, i64 i, double moment_gradient,
                                               double at_positives) {
  return f.rows.moment ? f.upstream[i] * moment_gradient : f.options.margin * at_positives;
}

__device__ __forceinline__ void put_row(const FinalizeArguments& f, i64 i, const Direction& row, double a,
                                        double loss, double log_scale_grad, double at_positives) {
  f.losses[i] = loss + *f.any_key_not_finite + (f.row_nans ? f.row_nans[i] : 0);
  // NaN without help if a feature is not finite
  if (f.log_scale_grad) f.log_scale_grad[i] = log_scale_gradient(f, i, log_scale_grad, at_positives);
  f.row_loss[i] = row.loss;
  f.row_reference[i] = get_reference(row.lse2);
  put_lse(f, f.row_lse, i, row.lse2);
  f.row_factor[i] = a;
}

// A row with several positives, or none. They stand for one whose logit is their log-sum-exp: see
// kernels/targets.py, which has the formulas.
__device__ void finalize_set(const FinalizeArguments& f, i64 i) {
  const i64 each = f.set_size, *keys = f.positives + i * each;
  const double* exponents = f.positive + i * each;
  double* gradient = f.positive_gradient + i * each;
  const auto biased = [&](i64 s) { return f.options.logit(exponents[s]) + f.options.bias(keys[s]); };
  // Sums of 2^below, of `below`, and without biases of `below` and of 2^below below
  double top = -INFINITY_, total = 0, sum = 0, unbiased = 0, weighted = 0;
  i64 count = 0;
  for (i64 s = 0; s < each; ++s)
    if (keys[s] >= 0) top = fmax(top, biased(s)), ++count;
  for (i64 s = 0; s < each; ++s) {
    if (keys[s] < 0) continue;
    const double below = biased(s) - top, power = exp2(below), scaled_part = below - f.options.bias(keys[s]);
    total += power, sum += below, unbiased += scaled_part, weighted += power * scaled_part;
  }
  Direction row = without_positive(f.rows.get(i));
  if (count) {
    const double positive_mean = weighted / total;
    row = f.options.finalize(f.rows.get(i), top + log2(total), top + positive_mean);
    row.loss += LN_2 * (log2(total) - sum / count);
    row.log_scale_grad += LN_2 * (positive_mean - unbiased / count);
  }
  const double a = f.upstream[i] * (f.row_direction_weight * f.options.scale.bare());
  for (i64 s = 0; s < each; ++s) {
    const double fraction = exp2(biased(s) - top) / total;
    gradient[s] = keys[s] < 0 ? 0 : -a * (fraction * row.negative_probability + (1.0 / count - fraction));
  }
  put_row(f, i, row, a, f.row_direction_weight * row.loss, f.row_direction_weight * row.log_scale_grad,
          a * row.negative_probability);  // fractions add up to 1
}

// solve.Vectors.finalize, a row a thread.
extern "C" __global__ void finalize(const __grid_constant__ FinalizeArguments f) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= f.m) return;
  if (f.set_size > 1) {
    finalize_set(f, i);
    return;
  }
  const double scale = f.options.scale.bare(), upstream = f.upstream[i];
  const i64 partner = f.positives[i];
  double positive = f.positive[i];
  // A triangle met the pair once, from its lower row
  if (f.triangle && partner >= 0 && partner < i) f.positive[i] = positive = f.positive[partner];
  if (f.positive_logit) f.positive_logit[i] = positive * f.options.to_logits();
  const Direction row = f.options.finalize_one(f.rows.get(i), positive, partner, f.options.bias(partner));
  const double a = upstream * (f.row_direction_weight * scale);
  double loss = f.row_direction_weight * row.loss, log_scale_grad = f.row_direction_weight * row.log_scale_grad;
  double at_positive = a * row.negative_probability, partner_gradient = 0;
  if (f.symmetric && partner >= 0)
    partner_gradient = f.upstream[partner] * (f.row_direction_weight * scale) *
                 f.options.finalize_one(f.rows.get(partner), positive, i, f.options.bias(i))
                     .negative_probability;
  if (f.two_sided) {
    const Direction column = f.options.finalize_one(f.columns.get(i), positive, partner);
    const double b = upstream * (f.column_direction_weight * scale);
    loss += f.column_direction_weight * column.loss;
    log_scale_grad += f.column_direction_weight * column.log_scale_grad;
    at_positive += b * column.negative_probability;
    f.column_factor[i] = b;
    f.column_loss[i] = column.loss;
    f.column_reference[i] = get_reference(column.lse2);
    put_lse(f, f.column_lse, i, column.lse2);
  }
  put_row(f, i, row, a, loss, log_scale_grad, at_positive);
  f.positive_gradient[i] = -(at_positive + partner_gradient);
}

constexpr int TOTALS_THREADS = 1024;

// x times its weight. A weight of 0 leaves out an infinite x; a NaN stays.
__device__ __forceinline__ double weighted(double x, double weight) {
  return weight == 0 && !isnan(x) ? 0 : weight * x;
}

// The sum of x (null: 0), each times its weight (null: 1). All threads of the only thread block add; the first thread
// gets the sum.
__device__ __forceinline__ double add_up(const double* x, i64 n, const double* weights = nullptr) {
  __shared__ double memory[TOTALS_THREADS / 32];
  double sum = 0;
  if (x)
#pragma unroll 8  // one multiprocessor needs many loads in flight
    for (i64 i = threadIdx.x; i < n; i += TOTALS_THREADS) sum += weights ? weighted(x[i], weights[i]) : x[i];
  return block_reduce<TOTALS_THREADS>(sum, memory, [](double a, double b) { return a + b; });
}

// Arrays that are null count as 0, and row_shares as 1.
//
//     out[0] = common_share * sum of losses[i] * row_shares[i]
//     out[1] = (sum of log_scale_grad + sum of dots / pair_counts) / scale
//     out[2] = sum of bias_grad / scale
extern "C" __global__ void __launch_bounds__(TOTALS_THREADS)
totals(const double* losses, i64 m, double common_share, const double* row_shares, const double* log_scale_grad,
       const double* dots, i64 count, double pair_counts, const double* bias_grad,
       const __grid_constant__ Scale scale, void* out, i64 is_float) {
  const double log_scale_sum = add_up(log_scale_grad, m) + add_up(dots, count) / pair_counts;
  const double sums[3] = {common_share * add_up(losses, m, row_shares), log_scale_sum / scale.bare(),
                          add_up(bias_grad, m) / scale.bare()};
  if (threadIdx.x) return;
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (is_float) ((float*)out)[i] = (float)sums[i];
    else ((double*)out)[i] = sums[i];
}

