// The pairwise sigmoid before and after its pass, on vectors of length M.
#pragma once
#include "vectors/sums.cuh"

// The sigmoid pass's beginning: upstream times the scale, sums of nothing, no positives yet.
extern "C" __global__ void begin_sigmoid(i64 m, const double* upstream,
                                         const __grid_constant__ Scale scale, double* row_factor,
                                         double* losses, double* bias_grad,
                                         double* log_scale_grad, double* positive,
                                         const __grid_constant__ DefaultVectors defaults,
                                         double* any_key_not_finite) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i == 0) *any_key_not_finite = 0;
  if (i >= m) return;
  defaults.write(i, m);
  row_factor[i] = upstream[i] * scale.bare();
  losses[i] = bias_grad[i] = 0;
  if (log_scale_grad) log_scale_grad[i] = 0;
  positive[i] = NAN_;
}

// Losses of rows that depend on a feature that is not finite become NaN (the kernel `finalize` does so itself).
extern "C" __global__ void mark_not_finite(i64 m, double* losses, const double* row_nans,
                                           const double* any_key_not_finite) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m) losses[i] += *any_key_not_finite + (row_nans ? row_nans[i] : 0);
}

// From positives' logits without the bias: out = -a sigmoid(-z). To the sums over the negatives, a positive adds
// softplus(-z), out, and out times the product of the features. A row whose positive is not among these keys adds
// nothing.
extern "C" __global__ void sigmoid_positives(const double* logits, const double* a,
                                             const i64* positives, i64 n,
                                             const __grid_constant__ Scalar bias,
                                             const __grid_constant__ Scale scale, double* out,
                                             double* losses, double* bias_grad,
                                             double* log_scale_grad) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (positives[i] < 0) {
    out[i] = 0;
    return;
  }
  const double gap = -LOG2_E * (logits[i] + bias.get());
  losses[i] += softplus2(gap);
  const double positive_gradient = -a[i] * sigmoid2(gap);
  out[i] = positive_gradient;
  bias_grad[i] += positive_gradient;
  if (log_scale_grad) log_scale_grad[i] += positive_gradient * (logits[i] / scale.bare());
}
