// Sums of rows and columns, in the order of a call: `begin` sets them to sums of nothing, merge_partial_sums adds the
// partial sums of each block, `finalize` computes losses and the factors of the gradient pass from complete sums, and
// `totals` adds up the losses. Logits are in base 2 here, x2 = c x.
#pragma once
#include "vectors/factors.cuh"
#include "vectors/reduction.cuh"
#include "vectors/running_sums.cuh"

#ifndef LABEL_WEIGHTS
#define LABEL_WEIGHTS 0  // 1: positives of a row have weights (`finalize` and `end_online` only)
#endif

// --- partial sums ------------------------------------------------------------------------------------------

constexpr int MERGE_THREADS = 128;
constexpr int MERGE_ROW_THREADS = 4;  // threads that share the slots of a row
constexpr int MERGE_SLOTS = 8;  // slots that a thread reads at once
constexpr int MAX_SWEEP_BLOCKS = 512;  // thread blocks of a sweep, at most (asserted in kernels/gpu/tiled/lse.py)

// The sums of logits c x, from sums of exponents c' x. Kernels round c to c' = (Real)c, which changes all logits by one
// factor. So the log-sum-exp is that of the exponents times c / c', but for c / c' - 1 times the entropy of the softmax,
// which is negligible. `reference` (factors.cuh) multiplies it by c' / c, so that the gradient pass subtracts the
// log-sum-exp of its exponents. The maximum is an exponent, or with `is_product` a product.
__device__ __forceinline__ Sum to_logits(Sum s, double c, bool is_product = false) {
  double change = c / (double)(Real)c - 1;
  // A c outside of the range of Real has another c'. Then all logits are negligible, or they are not finite
  if (!(fabs(change) <= 0x1p-24)) change = 0;
  const double factor = s.sum > 0 && s.sum < INFINITY_ ? 1 + change * (double)logf((float)s.sum) : 1;
  return {s.max * (is_product ? c : 1 + change), s.sum * factor, s.moment * factor};
}

// Lists in `writers` the thread blocks of a sweep that have written sums of the columns of tile `tile`, in ascending
// order, and returns their number. written_tiles [blocks, 32] has one bit for each of MAX_WRITTEN_TILES tiles. If a
// sweep has more tiles, each thread block first writes empty sums for all columns, and then sets all bits (`begin` in
// sm90/sweep_lse.cu). All lanes of a warp call this.
__device__ __forceinline__ int find_writers(const u32* written_tiles, int blocks, i64 tile, int lane,
                                            int* writers) {
  int count = 0;
#pragma unroll 8
  for (int first = 0; first < blocks; first += 32) {
    const int block = first + lane;
    const bool here = block < blocks && written_tiles[block * 32 + tile % MAX_WRITTEN_TILES / 32] >> tile % 32 & 1;
    const u32 all = __ballot_sync(ALL_LANES, here);  // bit l: block first + l has written
    if (here) writers[count + __popc(all & ((1u << lane) - 1))] = block;
    count += __popc(all);
  }
  return count;
}

// The partial sums that a block of logits leaves for one of its sides, n rows or n columns, and the sums to which they
// are added.
//   - A slot is one partial sum of a row: (max, sum), and a moment unless `moments` is null. `pairs` and `moments` are
//     [slots, stride], with one slot for each row.
//   - If `written_tiles` is not null, the sums belong to columns of a sweep (sm90/sweep_lse.cu). Each thread block of
//     the sweep has two slots, one for each group of 64 rows of its query tiles. The slots are valid for the columns of
//     the tiles in the block's bits of `written_tiles`.
struct PartialSums {
  const Real2* pairs;
  const Real* moments;
  i64 slots, stride, n;
  const u32* written_tiles;
  Sums sums;
};

// Adds the partial sums of one block of logits to the sums of its rows and of its columns, always in one order.
//   - The maxima of tiled/lse.cu are products (`maxima_are_products`), and the maxima of a sweep are exponents: products
//     times exponent_scale log2(e), rounded. `to_logits` makes sums of base-2 logits of them.
//   - A moment is a sum of exponentials times products. exponent_scale log2(e) turns the products into base-2 logits.
//   - A thread block has 32 rows, or 32 columns. MERGE_ROW_THREADS threads share the slots of a row.
//   - `same_rows`: the queries are the keys, the block is on the diagonal, and both sides add to the same sums. Then the
//     thread block of a row adds up the slots of both.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge_partial_sums(const __grid_constant__ PartialSums rows, const __grid_constant__ PartialSums columns,
                   i64 same_rows, i64 maxima_are_products, const __grid_constant__ Scale exponent_scale) {
  __shared__ Sum parts[MERGE_ROW_THREADS][32];
  __shared__ int writers[MAX_SWEEP_BLOCKS], writer_count;  // blocks of the sweep that have written sums of this tile
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const i64 row_blocks = (rows.n + 31) / 32;
  const bool is_column = blockIdx.x >= row_blocks;
  const i64 i = (blockIdx.x - (is_column ? row_blocks : 0)) * (i64)32 + lane;
  const double c = exponent_scale.get() * LOG2_E;
  Sum own_slots = {-INFINITY_, 0, 0};
  for (int side = is_column; side < (same_rows ? 2 : is_column + 1); ++side) {
    const PartialSums& p = side ? columns : rows;
    i64 slots = p.slots;
    if (p.written_tiles) {
      if (part == 0) {
        const int count = find_writers(p.written_tiles, (int)(slots / 2), i / TILE_COLUMNS, lane, writers);
        if (lane == 0) writer_count = count;
      }
      __syncthreads();  // the writes of writers[] and writer_count come before their reads
      slots = (i64)writer_count * 2;
    }
    if (i >= p.n) continue;
    // Slots that follow one another mostly have one maximum: the reference exponents of a sweep are few. Their sums are
    // added as they are, and `run` becomes a sum of logits when the maximum changes. Several slots are read at once
    Sum run = {-INFINITY_, 0, 0};
    for (i64 first = part; first < slots; first += MERGE_SLOTS * MERGE_ROW_THREADS) {
      Real2 pairs[MERGE_SLOTS];
      Real moments[MERGE_SLOTS];
#pragma unroll
      for (int k = 0; k < MERGE_SLOTS; ++k) {
        const i64 s = first + k * MERGE_ROW_THREADS;
        pairs[k].x = -INFINITY_, pairs[k].y = moments[k] = 0;  // a sum of nothing
        if (s >= slots) continue;
        const i64 slot = p.written_tiles ? (i64)writers[s / 2] * 2 + s % 2 : s;
        pairs[k] = p.pairs[slot * p.stride + i];
        if (p.moments) moments[k] = p.moments[slot * p.stride + i];
      }
#pragma unroll
      for (int k = 0; k < MERGE_SLOTS; ++k) {
        if (pairs[k].y == 0) continue;
        if (pairs[k].x != (Real)run.max) {
          if (run.sum != 0) own_slots = merge(own_slots, to_logits(run, c, maxima_are_products));
          run = {(double)pairs[k].x, 0, 0};
        }
        run.sum += (double)pairs[k].y, run.moment += c * (double)moments[k];
      }
    }
    if (run.sum != 0) own_slots = merge(own_slots, to_logits(run, c, maxima_are_products));
  }
  parts[part][lane] = own_slots;
  __syncthreads();  // the writes of parts[] come before the reads below
  const PartialSums& p = is_column ? columns : rows;
  if (part != 0 || i >= p.n) return;
  Sum total = p.sums.get(i);
#pragma unroll
  for (int other = 0; other < MERGE_ROW_THREADS; ++other) total = merge(total, parts[other][lane]);
  p.sums.set(i, total);
}

// For passes that add up losses (sigmoid, distillation): adds the slots of row i to the sums of row i. A slot has two
// partial sums (x, y), and a moment unless `moment_sums` is null:
//     first_sums[i] += sum of x
//     second_sums[i] += gradient_divisor * (sum of y)
//     moment_sums[i] += gradient_divisor * (scale.get() / scale.bare()) * (sum of moments)
// For a sigmoid, x are losses and y are elements of the gradient block, dL/dx / gradient_divisor. The total of dL/dx is
// the gradient of the bias times the scale. For distillation, x and y are the two sums of block/distill.cuh, and
// *gradient_divisor is 1. scale.get() / scale.bare() corrects the kernel's products (struct Scalar).
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

// Adds up `dq_copies` vectors of n numbers, which follow one another in `sums`, into the first vector: accumulators of
// dQ, if its long sums over keys are computed as several shorter sums (kernels/gpu/schedule/matrix_products.py).
extern "C" __global__ void add_dq_copies(Real* sums, i64 n, i64 dq_copies) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  Real sum = sums[i];
#pragma unroll 8
  for (i64 copy = 1; copy < dq_copies; ++copy) sum += sums[copy * n + i];
  sums[i] = sum;
}

// --- before and after the log-sum-exps -------------------------------------------------------------------

// Vectors that the caller of a loss has not given, and that kernels write (TiledVectors.materialize_vectors): the
// positives by the rule of the loss, and one upstream gradient for all rows. A pointer is null if the caller has given
// this vector.
struct DefaultVectors {
  i64* positives;           // [m]
  double *upstream, value;  // [m], and the number for all its elements
  Ranges* upstream_ranges;  // of a pass whose row factors are upstream gradients; null like `upstream`
  double largest_element;   // for them, see RangeSources
  i64 symmetric;            // 1: the positive of row i is its other view, row i + m / 2 modulo m; 0: it is key i

  // Writes row i. Row factors are upstream gradients times `factor`.
  __device__ __forceinline__ void write(i64 i, i64 m, double factor = 1) const {
    if (positives) positives[i] = symmetric ? (i + m / 2) % m : i;
    if (upstream) upstream[i] = value;
    if (upstream && i == 0) *upstream_ranges = {find_divisor(fabs(value * factor), largest_element), 0, 0};
  }
};

// Before a log-sum-exp pass: sums of m rows and n columns become (-inf, 0, 0), and logits of positives [m, set_size]
// become NaN, until the pass finds them. Pointers of `columns`, `any_key_not_finite` and `arrived` may be null.
extern "C" __global__ void begin(const __grid_constant__ Sums rows,
                                 const __grid_constant__ Sums columns, double* positive_logits,
                                 i64 set_size, i64 m, i64 n,
                                 const __grid_constant__ DefaultVectors defaults,
                                 double* any_key_not_finite, u32* arrived) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m) {
    rows.set(i, {-INFINITY_, 0, 0});
    for (i64 pair = i * set_size; pair < (i + 1) * set_size; ++pair) positive_logits[pair] = NAN_;
    defaults.write(i, m);
  }
  if (columns.max && i < n) columns.set(i, {-INFINITY_, 0, 0});
  if (any_key_not_finite && i == 0) *any_key_not_finite = 0;
  if (arrived && i == 0) *arrived = 0;
}

// *out = scale + by: the scale of exponents with `hardness`, where by is the hardness.
extern "C" __global__ void raise_scale(const __grid_constant__ Scale scale, double by, double* out) {
  if (threadIdx.x == 0) *out = scale.bare() + by;
}

// Options of the softmax that change how the loss of a row follows from its complete sums (infonce/spec.py: OPTIONS).
// With `hardness`, the passes multiply all products by a larger scale, the scale of exponents. Otherwise exponent_scale
// is the scale. Their `bare` values are without the feature divisors (struct Scale in common.cuh).
struct RowOptions {
  Scale scale, exponent_scale;
  double margin;           // is subtracted from the positive's product
  i64 decoupled;           // 1: the softmax leaves out the positive
  const double* key_bias;  // [keys] natural units, or null

  // A logit in the scale of exponents, times this, is the logit
  __device__ __forceinline__ double to_logits() const { return scale.bare() / exponent_scale.bare(); }
  // The base-2 logit of a positive with its margin, without its bias, from its base-2 logit in the scale of exponents.
  __device__ __forceinline__ double logit(double exponent) const {
    return exponent * to_logits() - scale.bare() * margin * LOG2_E;
  }
  // The bias of this key, base 2; 0 for key -1. It is added to logits of rows; in the softmax of a column it cancels.
  __device__ __forceinline__ double bias(i64 key) const {
    return key_bias && key >= 0 ? LOG2_E * key_bias[key] : 0;
  }
  // The direction of a row with this positive `logit`. `negatives` are sums over logits in the scale of exponents.
  // `mean`: see `finalize_direction`.
  __device__ __forceinline__ DirectionLosses direction(Sum negatives, double logit, double mean) const {
    negatives.moment *= to_logits();
    return finalize_direction(negatives, logit, decoupled, mean);
  }
  // The same for one positive, key `partner` (-1: none), whose base-2 logit in the scale of exponents is `positive`,
  // without its `bias`. The bias does not depend on the scale, so it is not in `mean`, from which the derivative by
  // log(scale) follows.
  __device__ __forceinline__ DirectionLosses direction_of_one(Sum negatives, double positive, i64 partner,
                                                  double bias = 0) const {
    if (partner < 0) return without_positive(negatives);
    return direction(negatives, logit(positive) + bias, logit(positive));
  }
};

// The positives of a row, if rows have several. All act as one positive, whose logit is their log-sum-exp L. With N the
// log-sum-exp of the negatives, f_s the share of positive s in the softmax over the positives, w_s its weight and
// `weights` their sum: loss = softplus(N - L) + (L - weighted mean of their logits), and -dL/dx at positive s is
// a (f_s sigmoid(N - L) + w_s / weights - f_s). (More: kernels/targets.py)
struct PositiveSet {
  const i64* keys;          // [size], -1 for none
  const double* exponents;  // [size] base-2 logits in the scale of exponents
  i64 size;
#if LABEL_WEIGHTS
  const double* weights;  // [size]
#endif

  // Without weights the integer 1, so that sums of weights count positives
  __device__ __forceinline__ auto weight(i64 s) const {
#if LABEL_WEIGHTS
    return weights[s];
#else
    return (i64)1;
#endif
  }

  // The direction of the row, from the sums over its negatives. Writes dL/dx at the positives to `gradient` [size]; a is
  // the upstream gradient times the weight of rows and the scale.
  __device__ __forceinline__ DirectionLosses direction(const RowOptions& options, Sum negatives, double a,
                                                       double* gradient) const {
    // The base-2 logit of positive s, with margin and bias
    const auto biased = [&](i64 s) { return options.logit(exponents[s]) + options.bias(keys[s]); };
    // `below` = logit - top, at most 0. `scaled_part` = `below` without the bias: only this part depends on the scale.
    // total = sum of 2^below, sum = sum of w `below`, unbiased = sum of w scaled_part, weighted = sum of 2^below scaled_part
    double top = -INFINITY_, total = 0, sum = 0, unbiased = 0, weighted = 0;
    decltype(weight(0)) all_weights = 0;
    for (i64 s = 0; s < size; ++s)
      if (keys[s] >= 0) top = fmax(top, biased(s)), all_weights += weight(s);
    for (i64 s = 0; s < size; ++s) {
      if (keys[s] < 0) continue;
      const double below = biased(s) - top, power = exp2(below), scaled_part = below - options.bias(keys[s]);
      total += power, weighted += power * scaled_part;
      sum += weight(s) * below, unbiased += weight(s) * scaled_part;
    }
    DirectionLosses row = without_positive(negatives);
    if (all_weights) {
      const double positive_mean = weighted / total;  // mean of scaled_part under the softmax over the positives
      row = options.direction(negatives, top + log2(total), top + positive_mean);
      row.loss += LN_2 * (log2(total) - sum / all_weights);
      row.log_scale_grad += LN_2 * (positive_mean - unbiased / all_weights);
    }
    for (i64 s = 0; s < size; ++s) {
      const double fraction = exp2(biased(s) - top) / total;  // probability in the softmax over the positives
      gradient[s] = keys[s] < 0 ? 0 : -a * (fraction * row.negative_probability +
                                            (weight(s) * (1.0 / all_weights) - fraction));
    }
    return row;
  }
};

// The limit of each row, for `false_negative_margin`: the product above which negatives are left out. It is the largest
// product of the row with its positives, plus the margin, or infinite without a positive. `dots` [m, set_size] are the
// products with `positives` [m, set_size], which are keys, or -1 for none. (targets.find_limits in Python.)
extern "C" __global__ void limits(const double* dots, const i64* positives, i64 set_size, i64 m,
                                  double margin, double* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= m) return;
  double top = -INFINITY_;
  bool any = false;
  for (i64 pair = i * set_size; pair < (i + 1) * set_size; ++pair)
    if (positives[pair] >= 0) top = dots[pair] > top || isnan(dots[pair]) ? dots[pair] : top, any = true;
  out[i] = any ? top + margin : INFINITY_;
}

// out[i] = x[i] + by * bias[i]: x are base-2 logits or log-sum-exps, and biases are in natural units. `by` is log2 e to
// add the bias, and -log2 e to subtract it.
extern "C" __global__ void add_bias(const double* x, const double* bias, double by, i64 n, double* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + by * bias[i];
}

// The reference exponent for a log-sum-exp in base 2. Without logits it is -inf, and any finite number serves.
__device__ __forceinline__ double get_reference(double lse2) { return is_nothing(lse2) ? 0 : lse2; }

// x times its weight. With weight 0, an infinite x gives 0, and a NaN stays NaN.
__device__ __forceinline__ double weighted(double x, double weight) {
  return weight == 0 && !isnan(x) ? 0 : weight * x;
}

// The scalars of a result. log_scale_grad, dots and bias_grad may be null, and count as 0; null row_shares count as 1.
// Both gradients are NaN if a loss is NaN (`solve.find_nan` in Python).
//
//     loss:                  out[0] = common_share * sum of losses[i] * row_shares[i]
//     gradient of the scale: out[1] = (sum of log_scale_grad + sum of dots / pair_repeats) / scale
//     gradient of the bias:  out[2] = sum of bias_grad / scale
//
// `dots` are <dQ_i, q_i> of `count` rows. They contain each pair `pair_repeats` times: 2 if queries are keys, else 1.
// bias_grad has the sums of dL/dx over rows, with x a product. A logit is z = scale x + bias, so dL/dz is
// (dL/dx) / scale, and the gradient of the bias is the sum of dL/dz.
struct Totals {
  const double* losses;
  i64 m;
  double common_share;
  const double *row_shares, *log_scale_grad, *dots;
  i64 count;
  double pair_repeats;
  const double* bias_grad;
  Scale scale;
  void* out;
  i64 is_float;

  // Adds row i to the sums x of losses, log_scale_grad, dots and bias_grad.
  __device__ __forceinline__ void add(double* x, i64 i) const {
    if (i < m) {
      const double loss = losses[i], nan = isnan(loss) ? NAN_ : 0;
      x[0] += row_shares ? weighted(loss, row_shares[i]) : loss;
      x[1] += log_scale_grad ? log_scale_grad[i] + nan : nan;
      x[3] += bias_grad ? bias_grad[i] + nan : nan;
    }
    if (dots && i < count) x[2] += dots[i];
  }
  // Writes the scalars, from the sums over all rows.
  __device__ __forceinline__ void write(const double* x) const {
    const double scalars[3] = {common_share * x[0], (x[1] + x[2] / pair_repeats) / scale.bare(), x[3] / scale.bare()};
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (is_float) ((float*)out)[i] = (float)scalars[i];
      else ((double*)out)[i] = scalars[i];
  }
};

// What the last thread block of `finalize` computes from the results of all rows, so that no launch of one thread block
// follows: the ranges of the gradient pass, and the scalars (`totals`) if no later step changes them.
struct Conclusion {
  Ranges* ranges;  // null: nothing is wanted
  RangeSources sources;
  i64 has_totals;
  Totals totals;
  double* partials;  // [thread blocks, 8]
  u32* arrived;
};

struct FinalizeArguments {
  Sums rows, columns;                // complete; `columns` counts only if two_sided
  double* positive_logits;           // [m, set_size] base-2 logits of positives, in the scale of exponents
  const i64* positives;              // [m, set_size] keys, -1 for none
  i64 set_size;                      // positives of a row, at most
  const double* upstream;            // [m] upstream gradients of the losses
  const double* row_nans;            // [m] NaN for a row that is not finite, else 0; or null
  const double* any_key_not_finite;  // NaN if a key is not finite, else 0
  double row_direction_weight, column_direction_weight;
  RowOptions options;
  // symmetric: queries are keys. triangle: the pass has visited one triangle. lse_is_float: row_lse is float*
  i64 m, symmetric, triangle, two_sided, lse_is_float;
  // Results, [m] each; positive_gradient [m, set_size]. losses: with both directions, weighted. row_loss, column_loss:
  // of one direction. References: log-sum-exps, base 2. log_scale_grad, metrics_positive_logits: null if not wanted
  double *losses, *row_loss, *row_reference, *column_loss, *column_reference, *row_factor,
      *column_factor, *positive_gradient, *log_scale_grad, *metrics_positive_logits;
  void *row_lse, *column_lse;        // log-sum-exps, natural units: float if lse_is_float, else double
  Conclusion conclusion;
#if LABEL_WEIGHTS
  const double* label_weights;  // [m, set_size] weights of positives in the target of their row
#endif

  __device__ __forceinline__ PositiveSet positive_set(i64 i) const {
    PositiveSet set = {positives + i * set_size, positive_logits + i * set_size, set_size};
#if LABEL_WEIGHTS
    set.weights = label_weights + i * set_size;
#endif
    return set;
  }
};

// Writes to[i]: the base-2 log-sum-exp lse2 in natural units, in the type of the result.
__device__ __forceinline__ void put_lse(const FinalizeArguments& f, void* to, i64 i, double lse2) {
  if (f.lse_is_float) ((float*)to)[i] = (float)(LN_2 * lse2);
  else ((double*)to)[i] = LN_2 * lse2;
}

// log_scale_grad of row i, dL/dlog(scale). With moments it is the upstream gradient times `moment_gradient`, the
// derivative of the row's loss. Without moments, the sum of P_ij x_ij is <dQ_i, q_i>, which `finish` computes, and only
// the margin's part is left for here: the margin times `at_positives`, the sum of -dL/dx at the row's positives.
__device__ __forceinline__ double log_scale_gradient(const FinalizeArguments& f, i64 i, double moment_gradient,
                                               double at_positives) {
  return f.rows.moment ? f.upstream[i] * moment_gradient : f.options.margin * at_positives;
}

// Writes the results of row i. `a` is the row factor, `loss` has both directions, and `log_scale_grad` and
// `at_positives` are the arguments of log_scale_gradient.
__device__ __forceinline__ void put_row(const FinalizeArguments& f, i64 i, const DirectionLosses& row, double a,
                                        double loss, double log_scale_grad, double at_positives) {
  f.losses[i] = loss + *f.any_key_not_finite + (f.row_nans ? f.row_nans[i] : 0);
  // log_scale_grad gets no NaN flag: `Totals` looks at the losses
  if (f.log_scale_grad) f.log_scale_grad[i] = log_scale_gradient(f, i, log_scale_grad, at_positives);
  f.row_loss[i] = row.loss;
  f.row_reference[i] = get_reference(row.lse2);
  put_lse(f, f.row_lse, i, row.lse2);
  f.row_factor[i] = a;
}

// `finalize` for row i if rows have several positives. Columns have no softmax.
__device__ void finalize_set(const FinalizeArguments& f, i64 i) {
  const double a = f.upstream[i] * (f.row_direction_weight * f.options.scale.bare());
  const DirectionLosses row = f.positive_set(i).direction(f.options, f.rows.get(i), a, f.positive_gradient + i * f.set_size);
  put_row(f, i, row, a, f.row_direction_weight * row.loss, f.row_direction_weight * row.log_scale_grad,
          a * row.negative_probability);  // fractions add up to 1
}

// `finalize` for row i, and for column i if the loss has two directions; key i is then the positive of query i. With a
// and b the factors of row and column, -dL/dx at the positive is a negative_probability of the row, plus b negative_probability
// of the column, plus, if queries are the keys, the row's term of the partner.
__device__ __forceinline__ void finalize_row(const FinalizeArguments& f, i64 i) {
  if (f.set_size > 1) {
    finalize_set(f, i);
    return;
  }
  const double scale = f.options.scale.bare(), upstream = f.upstream[i];
  const i64 partner = f.positives[i];
  double positive = f.positive_logits[i];
  // A triangle has found the logit of the pair (i, partner) once, for the row of lower number
  if (f.triangle && partner >= 0 && partner < i) f.positive_logits[i] = positive = f.positive_logits[partner];
  if (f.metrics_positive_logits) f.metrics_positive_logits[i] = positive * f.options.to_logits();
  const DirectionLosses row = f.options.direction_of_one(f.rows.get(i), positive, partner, f.options.bias(partner));
  const double a = upstream * (f.row_direction_weight * scale);
  double loss = f.row_direction_weight * row.loss, log_scale_grad = f.row_direction_weight * row.log_scale_grad;
  // -dL/dx at the positive: the part of this row (and its column), and the part of the row of the partner
  double at_positive = a * row.negative_probability, partner_gradient = 0;
  if (f.symmetric && partner >= 0)
    partner_gradient = f.upstream[partner] * (f.row_direction_weight * scale) *
                 f.options.direction_of_one(f.rows.get(partner), positive, i, f.options.bias(i))
                     .negative_probability;
  if (f.two_sided) {
    const DirectionLosses column = f.options.direction_of_one(f.columns.get(i), positive, partner);
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

// From complete sums to losses, and the factors of the gradient pass (solve.Vectors.finalize in Python). A thread
// computes a row.
extern "C" __global__ void __launch_bounds__(REDUCTION_THREADS)
finalize(const __grid_constant__ FinalizeArguments f) {
  __shared__ Reduction reduction;
  const i64 i = blockIdx.x * (i64)REDUCTION_THREADS + threadIdx.x;
  if (i < f.m) finalize_row(f, i);
  const Conclusion& c = f.conclusion;
  if (!c.ranges) return;
  double x[8] = {0, 0, 0, 0, -INFINITY_, -INFINITY_, -INFINITY_, 0}, all[8];
  if (c.has_totals) c.totals.add(x, i);
  if (i < c.sources.m) {
    c.sources.add_row(x + 4, i);
    for (i64 pair = i * f.set_size; pair < (i + 1) * f.set_size; ++pair) c.sources.add_pair(x + 4, pair);
  }
  if (i < c.sources.n) c.sources.add_column(x + 4, i);
  if (!reduction.over_grid(x, c.partials, c.arrived, all) || threadIdx.x != 0) return;
  if (c.has_totals) c.totals.write(all);
  *c.ranges = c.sources.find(all + 4);
}

// Writes struct Totals at the end of a call. `partials` [blocks, 8].
extern "C" __global__ void __launch_bounds__(REDUCTION_THREADS)
totals(const __grid_constant__ Totals t, double* partials, u32* arrived) {
  __shared__ Reduction reduction;
  double x[8] = {0, 0, 0, 0, 0, 0, 0, 0}, all[8];
  const i64 step = gridDim.x * (i64)REDUCTION_THREADS;
#pragma unroll 1  // mostly one row a thread
  for (i64 i = blockIdx.x * (i64)REDUCTION_THREADS + threadIdx.x; i < max(t.m, t.count); i += step) t.add(x, i);
  if (reduction.over_grid(x, partials, arrived, all) && threadIdx.x == 0) t.write(all);
}
