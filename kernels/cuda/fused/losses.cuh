// Phases 2 and 3 of fused.cu: log-sum-exps of rows and columns, then losses and dL/dx of each row. fused/logits.cuh
// comes before, and the gradients of features, in fused.cu, come after.
#pragma once
#include "fused/fused.cuh"

// --- phase 2 -----------------------------------------------------------------------------------------------

// Computes the gap, log-sum-exp (natural units), reference and factor of a row or a column. Its negatives have the
// largest product `max`, and `sum` is the sum of 2^(c (x - max)). `positive_product` is the product of its positive
// (null: none). `weight` is the upstream gradient times the weight of the direction and the scale. dL/dx of a negative
// is factor 2^(c (x - reference)): reference is the log-sum-exp in the unit of products, rounded, and factor is
// `weight`, corrected for this rounding.
__device__ __noinline__ void finalize(double c, double max, double sum, const Real* positive_product,
                                      double weight, double* gap, Real* lse, Real* reference,
                                      Real* factor) {
  const Sum negatives = {c * max, sum};
  const DirectionLosses d = positive_product ? finalize_direction(negatives, c * (double)*positive_product)
                                              : without_positive(negatives);
  *gap = d.gap;
  *lse = (Real)(LN_2 * d.lse2);
  const double exact = d.lse2 / c;
  const Real h = isfinite(exact) ? (Real)exact : 0;
  *reference = h;
  *factor = is_nothing(d.lse2) ? 0 : (Real)(weight * exp2(c * (double)h - d.lse2));
}

// Phase 2 for rows: two reads of a row, for its maximum and for its sum.
__device__ void row_log_sum_exp(const Fused& f, double scale, double* memory) {
  const double c2 = scale * LOG2_E;
  const Real c = (Real)c2;
  const Team team(f.m, memory);
  for (i64 i = team.row; i < f.m; i += team.step) {
    const Real* x = f.x + i * f.n;
    const i64 positive = get_positive(f, i);
    Real top = LOW;
#pragma unroll 4
    for (i64 j = team.lane; j < f.n; j += team.lanes)
      if (j != positive && !excluded(f, i, j)) top = max_(top, x[j]);
    top = (Real)team.max(top);
    const Real shift = top == LOW ? 0 : top;
    double sum = 0;
#pragma unroll 4
    for (i64 j = team.lane; j < f.n; j += team.lanes)
      if (j != positive && !excluded(f, i, j)) sum += exp2_(c * (x[j] - shift));
    sum = team.sum(sum);
    if (team.lane == 0)
      finalize(c2, top, sum, positive < 0 ? nullptr : x + positive,
               get_upstream(f, i) * f.row_direction_weight * scale, f.row_gap + i,
               f.row_lse + i, f.row_reference + i, f.row_factor + i);
  }
}

// Phase 2 for columns. A thread block computes 32 columns at a time. Lane l has column l, and warp w has every eighth
// row. Key j is the positive of query j.
__device__ void column_log_sum_exp(const Fused& f, double scale) {
  __shared__ Real tops[FUSED_WARPS][32];
  __shared__ double sums[FUSED_WARPS][32];
  const double c2 = scale * LOG2_E;
  const Real c = (Real)c2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (i64 j0 = blockIdx.x * 32; j0 < f.n; j0 += gridDim.x * 32) {
    const i64 j = j0 + lane;
    Real top = LOW;
    if (j < f.n)
#pragma unroll 4
      for (i64 i = warp; i < f.m; i += FUSED_WARPS)
        if (j != get_positive(f, i) && !excluded(f, i, j)) top = max_(top, f.x[i * f.n + j]);
    tops[warp][lane] = top;
    __syncthreads();  // the writes of tops[] come before the reads below
#pragma unroll
    for (int w = 0; w < FUSED_WARPS; ++w) top = max_(top, tops[w][lane]);
    const Real shift = top == LOW ? 0 : top;
    double sum = 0;
    if (j < f.n)
#pragma unroll 4
      for (i64 i = warp; i < f.m; i += FUSED_WARPS)
        if (j != get_positive(f, i) && !excluded(f, i, j)) sum += exp2_(c * (f.x[i * f.n + j] - shift));
    sums[warp][lane] = sum;
    // The writes of sums[] come before their reads, and the reads of tops[] come before the writes of the next 32
    // columns. (The reads of sums[] come before the next writes of sums[] by the first barrier of the loop.)
    __syncthreads();
    if (warp == 0 && j < f.n) {
      sum = 0;
#pragma unroll
      for (int w = 0; w < FUSED_WARPS; ++w) sum += sums[w][lane];
      finalize(c2, top, sum, f.x + j * f.n + j, get_upstream(f, j) * f.column_direction_weight * scale,
               f.column_gap + j, f.column_lse + j, f.column_reference + j, f.column_factor + j);
    }
  }
}

// --- dL/dx --------------------------------------------------------------------------------------------------

// Numbers of `slope` that all pairs share: c = scale log2(e), scale, bias, in the type of products.
struct Slope {
  Real c, scale, bias;
};

// P_ij = dL/dx_ij of a negative with the product x. Factors contain the upstream gradient and the scale.
__device__ __forceinline__ Real slope(const Fused& f, const Slope& s, i64 i, i64 j, Real x) {
  if (SIGMOID) {
    const Real z = s.scale * x + s.bias, e = exp2_(-fabs(z) * (Real)LOG2_E);
    Real sigmoid_of_abs, log1p;
    sigmoid_parts(e, sigmoid_of_abs, log1p);
    return (z < 0 ? e * sigmoid_of_abs : sigmoid_of_abs) * f.row_factor[i];
  }
  Real p = f.row_factor[i] * exp2_(s.c * (x - f.row_reference[i]));
  if (SYMMETRIC || TWO_SIDED) p += f.column_factor[j] * exp2_(s.c * (x - f.column_reference[j]));
  return p;
}

// --- phase 3 -----------------------------------------------------------------------------------------------

struct GapResult {
  double loss, negative_probability;
};
// Loss and negative probability of a row or column with this gap (direction_losses.cuh). The function is not inlined,
// so that this short launch fetches its instructions once.
__device__ __noinline__ GapResult gap_result(double gap) { return {softplus2(gap), sigmoid2(gap)}; }

// Phase 3: the loss of each row, P in the second matrix of f.x, and the sums of P_ij x_ij and of P_ij over each row. At
// a positive, P is -(upstream gradient) weight scale sigmoid(gap) of the row, plus the same of the column (TWO_SIDED)
// or of the partner's row (SYMMETRIC). Of a sigmoid, gap is -(logit + bias) and the weight is 1.
__device__ void compute_row_losses(const Fused& f, const Slope& s, double scale, double bias,
                               double* memory) {
  const Team team(f.m, memory);
  for (i64 i = team.row; i < f.m; i += team.step) {
    const Real* x = f.x + i * f.n;
    const i64 positive = get_positive(f, i);
    double row_nan = 0;  // NaN if a feature of the row or of any key is not finite
    for (i64 j = team.lane; j < f.n; j += team.lanes) row_nan += f.column_nans[j];
    row_nan = team.sum(row_nan) + f.row_nans[i];
    if (f.known_row_nans) row_nan += f.known_row_nans[i];

    // at_positive: dL/dx at the positive. dot, total: sums of P_ij x_ij and of P_ij
    double loss = 0, dot = 0, total = 0, at_positive;
    if (SIGMOID) {
      const GapResult pair = gap_result(-LOG2_E * (scale * (double)x[positive] + bias));
      at_positive = -get_upstream(f, i) * scale * pair.negative_probability;
      for (i64 j = team.lane; j < f.n; j += team.lanes) {
        if (j == positive || excluded(f, i, j)) continue;
        const Real t = s.scale * x[j] + s.bias;
        Real sigmoid_of_abs, log1p;
        sigmoid_parts(exp2_(-fabs(t) * (Real)LOG2_E), sigmoid_of_abs, log1p);
        loss += max_(t, 0) + log1p;
      }
      loss = team.sum(loss) + pair.loss;
    } else {
      const GapResult row = gap_result(f.row_gap[i]);
      loss = f.row_direction_weight * row.loss;
      at_positive = -get_upstream(f, i) * f.row_direction_weight * scale * row.negative_probability;
      if (TWO_SIDED) {
        const GapResult column = gap_result(f.column_gap[i]);
        loss += f.column_direction_weight * column.loss;
        at_positive -= get_upstream(f, i) * f.column_direction_weight * scale * column.negative_probability;
      }
      if (SYMMETRIC)  // the pair counts for both its rows
        at_positive -= get_upstream(f, positive) * f.row_direction_weight * scale *
                       gap_result(f.row_gap[positive]).negative_probability;
    }
    if (team.lane == 0) f.losses[i] = (Real)(loss + row_nan);
    if (!f.gradient) continue;
    Real* out = f.x + (f.m + i) * f.n;  // row i of P
    for (i64 j = team.lane; j < f.n; j += team.lanes) {
      const Real p = j == positive ? (Real)at_positive : excluded(f, i, j) ? 0 : slope(f, s, i, j, x[j]);
      out[j] = p;
      if (j == positive || p == 0) continue;
      dot += (double)p * (double)x[j];
      total += p;
    }
    dot = team.sum(dot) + (positive < 0 ? 0 : at_positive * (double)x[positive]);
    total = team.sum(total) + at_positive;
    if (team.lane == 0) {
      f.row_dot[i] = dot;
      f.row_sum[i] = total;
    }
  }
}

// column_dot[j] = sum_i P_ij x_ij, which is <dU_j, u_j> of key j: the gradient of normalised keys needs it.
__device__ void column_dots(const Fused& f, double* memory) {
  const Team team(f.n, memory);
  for (i64 j = team.row; j < f.n; j += team.step) {
    double dot = 0;
#pragma unroll 4
    for (i64 i = team.lane; i < f.m; i += team.lanes) {
      const Real p = f.x[(f.m + i) * f.n + j];
      if (p != 0) dot += (double)p * (double)f.x[i * f.n + j];
    }
    dot = team.sum(dot);
    if (team.lane == 0) f.column_dot[j] = dot;
  }
}
