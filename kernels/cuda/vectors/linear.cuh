// Two kinds of losses that need more than the sums of one row: a softmax that two rows share (GTE), before `finalize`
// of vectors/sums.cuh; and terms that are linear in the logits (label smoothing, class means), after `finalize`.
// kernels/between_passes.py has the formulas.
#pragma once
#include "vectors/sums.cuh"

// A joint loss: rows i and i + n of 2n rows share one softmax. So both rows get the merged sum of both, and the
// upstream gradient of their common loss. `upstream` is [n], `sums`, `joined` and `joined_upstream` are [2n].
extern "C" __global__ void join_rows(const __grid_constant__ Sums sums, const double* upstream, i64 n,
                                     const __grid_constant__ Sums joined, double* joined_upstream) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  const Sum both = merge(sums.get(i), sums.get(i + n), [](double x) { return exp2(x); });
  joined.set(i, both), joined.set(i + n, both);
  joined_upstream[i] = joined_upstream[i + n] = upstream[i];
}

// The factors of the linear terms of a row or column, from its factor a (`row_factor`, `column_factor`): label smoothing
// over n keys, and the mean of the `in_class` positives of its class (0: the class has no sum).
__device__ __forceinline__ double smoothing_factor(double smoothing, double a, i64 n) { return smoothing * a / n; }
__device__ __forceinline__ double class_factor(double smoothing, double a, i64 in_class) {
  return in_class ? (1 - smoothing) * a / in_class : 0;
}

// For one pass: the factors of linear terms, before the log-sum-exps are known. Pointers may be null, as in
// LinearFinalizeArguments.
extern "C" __global__ void begin_linear(const double* upstream, i64 m, double row_direction_weight,
                                        const __grid_constant__ Scale scale, double label_smoothing, i64 row_keys,
                                        const i64* positive_count, double* row_linear, double* class_linear) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= m) return;
  const double a = upstream[i] * (row_direction_weight * scale.bare());
  if (row_linear) row_linear[i] = smoothing_factor(label_smoothing, a, row_keys);
  if (class_linear) class_linear[i] = class_factor(label_smoothing, a, positive_count[i]);
}

struct LinearFinalizeArguments {
  FinalizeArguments f;  // of `finalize`, whose results this kernel changes
  double label_smoothing;
  i64 joint;                                     // 1: rows i and i + m / 2 share one softmax
  i64 row_keys, column_queries;                  // number of keys of a row, and of queries of a column
  const double *row_products, *column_products;  // query i times the sum of its keys; key i times the sum of its
                                                 // queries; null without label smoothing
  // Positives of row i, and of column i, in a class with a sum; 0 if the class has no sum. Row i times the sum of its
  // positives, and column i times the sum of its positives. Null without classes, or if columns have no softmax
  const i64* positive_count;
  const double *class_products, *column_class_products;
  // out: factors of linear terms (struct LinearGradient); or null
  double *row_linear, *column_linear, *class_linear, *column_class_linear;
};

// Adds the terms of label smoothing and of class means to the results of `finalize`. A thread computes row i, and
// column i if the loss has two directions.
//
// Label smoothing e: the target of a row has 1 - e at its positives, and e / n at each of its n keys. So the loss
// changes by e (mean logit of the positives - mean logit of all n keys), and dL/dx by row_factor e / count at each of
// the `count` positives, and by -row_factor e / n at each key. The latter is a linear term. The change of the loss is a
// multiple of the scale, so it is also the change of the derivative by log(scale).
// Class means (SupCon, positive ids): positives are in the sum of the row, or of the column, and the loss is the
// log-sum-exp minus their mean logit.
extern "C" __global__ void finalize_linear(const __grid_constant__ LinearFinalizeArguments g) {
  const FinalizeArguments& f = g.f;
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x, set_size = f.set_size;
  if (i >= f.m) return;
  const double scale = f.options.scale.bare(), smoothing = g.label_smoothing, row_factor = f.row_factor[i];
  const i64* keys = f.positives + i * set_size;
  double mean = 0;  // of the logits of the row's positives
  i64 count = 0;
  for (i64 s = 0; s < set_size; ++s)
    if (keys[s] >= 0) mean += LN_2 * f.options.logit(f.positive_logits[i * set_size + s]), ++count;
  if (count) mean /= count;
  double column_mean = mean;  // the same for the column, whose positive is that of the row
  // Changes of the losses of row and column and of their derivatives by log(scale), and of the sum of -dL/dx at the
  // positives
  double loss = 0, column_loss = 0, log_scale_grad = 0, column_scale_grad = 0, at_positives = 0;
  const i64 in_class = g.class_products ? g.positive_count[i] : 0;
  if (in_class) {
    const auto use_class_mean = [](Sum sum, double class_mean, double& change, double& scale_grad) {
      change = LN_2 * (sum.max + log2(sum.sum)) - class_mean;
      scale_grad = (sum.sum == 0 ? 0 : LN_2 * sum.moment / sum.sum) - class_mean;
    };
    mean = scale * g.class_products[i] / in_class;
    use_class_mean(f.rows.get(i), mean, loss, log_scale_grad);
    if (f.two_sided) {
      column_mean = scale * g.column_class_products[i] / in_class;
      use_class_mean(f.columns.get(i), column_mean, column_loss, column_scale_grad);
    }
  }
  if (g.class_linear) g.class_linear[i] = class_factor(smoothing, row_factor, in_class);
  if (g.column_class_linear) g.column_class_linear[i] = class_factor(smoothing, f.column_factor[i], in_class);
  if (g.row_products) {
    const bool any = count || in_class;
    const double margins = scale * f.options.margin * count;
    i64 n = g.row_keys;
    double total = scale * g.row_products[i] - margins;  // sum of the logits of all n keys
    if (g.joint) {  // the keys of both rows, of which the positive is in both sums and counts once
      total += scale * g.row_products[keys[0]] - margins - mean;
      n = 2 * n - 1;
    }
    const double row_term = any ? smoothing * (mean - total / n) : 0;
    loss += row_term, log_scale_grad += row_term;
    g.row_linear[i] = smoothing_factor(smoothing, row_factor, n);
    at_positives = count ? smoothing * row_factor * ((double)count / n - 1) : 0;
    double gradient_change = smoothing * row_factor / (count ? count : 1);  // of dL/dx at each positive
    if (g.joint) gradient_change += smoothing * row_factor / n;  // the linear term counts this pair twice
    // Row i is the positive of its own positive, so the row of its positive changes dL/dx of the pair, too
    else if (f.symmetric && count) gradient_change += smoothing * f.row_factor[keys[0]];
    if (f.two_sided) {
      const double column_factor = f.column_factor[i];
      const double column_term =
          any ? smoothing * (column_mean - (scale * g.column_products[i] - margins) / g.column_queries) : 0;
      column_loss += column_term, column_scale_grad += column_term;
      gradient_change += smoothing * column_factor;
      at_positives += smoothing * column_factor * (1.0 / g.column_queries - 1);
      g.column_linear[i] = smoothing_factor(smoothing, column_factor, g.column_queries);
    }
    for (i64 s = 0; s < set_size; ++s)
      if (keys[s] >= 0) f.positive_gradient[i * set_size + s] += gradient_change;
  }
  f.row_loss[i] += loss;
  if (f.two_sided) f.column_loss[i] += column_loss;
  f.losses[i] += f.row_direction_weight * loss + f.column_direction_weight * column_loss;
  if (f.log_scale_grad)
    f.log_scale_grad[i] += log_scale_gradient(
        f, i, f.row_direction_weight * log_scale_grad + f.column_direction_weight * column_scale_grad, at_positives);
}
