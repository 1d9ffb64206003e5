// The pairwise sigmoid (SigLIP): what happens to vectors of M rows before and after its pass, which is tiled/sigmoid.cu
// or sm90/sweep_sigmoid.cu.
#pragma once
#include "vectors/sums.cuh"

// Before the pass: row_factor[i] is the upstream gradient times the scale, sums are 0, and logits of positives are NaN,
// until the pass finds them.
extern "C" __global__ void begin_sigmoid(i64 m, const double* upstream,
                                         const __grid_constant__ Scale scale, double* row_factor,
                                         double* losses, double* bias_grad,
                                         double* log_scale_grad, double* positive_logits,
                                         const __grid_constant__ DefaultVectors defaults,
                                         double* any_key_not_finite, u32* arrived) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i == 0) *any_key_not_finite = 0, *arrived = 0;
  if (i >= m) return;
  defaults.write(i, m, scale.bare());
  row_factor[i] = upstream[i] * scale.bare();
  losses[i] = bias_grad[i] = 0;
  if (log_scale_grad) log_scale_grad[i] = 0;
  positive_logits[i] = NAN_;
}

// After the pass: the loss of a row becomes NaN if a feature of the row, or of any key, is not finite. (For losses with
// a softmax, the kernel `finalize` does this.)
extern "C" __global__ void mark_not_finite(i64 m, double* losses, const double* row_nans,
                                           const double* any_key_not_finite) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m) losses[i] += *any_key_not_finite + (row_nans ? row_nans[i] : 0);
}

// After the pass: adds the positives of n rows to the sums over the negatives. x is the product of a row and its
// positive, logits[i] = scale x, and z = logits[i] + bias.
//     out[i] = -a[i] sigmoid(-z), which is dL/dx at the positive, with a = row_factor = upstream scale
//     losses[i] += softplus(-z), bias_grad[i] += out[i], log_scale_grad[i] += out[i] x
// If the positive is not among these keys (positives[i] is -1), out[i] is 0, and nothing is added.
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
