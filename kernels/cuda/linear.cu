// Terms of a loss that are linear in the logits: see kernels/linear.py. Sums over the rows of a segment
// are taken in their order, without atomics: the same bits from run to run. u = inverse[row] z, where
// `inverse` is 1 / |z|, or 1 without normalisation.
#include "rows.cuh"

constexpr int SEGMENT_FEATURES = 32, SEGMENT_WARPS = 32;

// out[s, k] = sum of factor[i] z[i, k] over the rows i = order[at], begin[s] <= at < begin[s + 1]. A block
// has a segment and 32 features. Its warps take the rows in turn.
extern "C" __global__ void segment_sums(const __grid_constant__ Matrix z, i64 d, const i64* order,
                                        const i64* begin, const double* factor, double* out) {
  __shared__ double sums[SEGMENT_WARPS][SEGMENT_FEATURES];
  const i64 across = (d + SEGMENT_FEATURES - 1) / SEGMENT_FEATURES, segment = blockIdx.x / across;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const i64 k = blockIdx.x % across * SEGMENT_FEATURES + lane, end = begin[segment + 1];
  double sum = 0;
#pragma unroll 4
  for (i64 at = begin[segment] + warp; at < end; at += warps) {
    const i64 i = order[at];
    if (k < d) sum += factor[i] * z.get(i, k);
  }
  sums[warp][lane] = sum;
  __syncthreads();  // the writes of all warps come before the reads of the first
  if (warp || k >= d) return;
  for (int w = 1; w < warps; ++w) sum += sums[w][lane];
  out[segment * d + k] = sum;
}

// out[i] = u_i . (sums[segment_i] - itself u_i). A warp a row.
extern "C" __global__ void segment_products(const __grid_constant__ Matrix z, i64 n, i64 d,
                                            const double* inverse, const i64* segment,
                                            const double* sums, double itself, double* out) {
  const i64 row = lanes_row(32);
  if (row >= n) return;
  const double* of_segment = sums + segment[row] * d;
  double dot = 0;
  for (i64 k = threadIdx.x % 32; k < d; k += 32) {
    const double u = z.get(row, k) * inverse[row];
    dot += u * (of_segment[k] - itself * u);
  }
  dot = warp_sum(dot);
  if (threadIdx.x % 32 == 0) out[row] = dot;
}

// out[i] = u_r . v_j for row r = i / each and its positive j = positives[i]; 0 if that is negative. A warp a
// positive.
extern "C" __global__ void positive_products(const __grid_constant__ Matrix query,
                                             const __grid_constant__ Matrix key, i64 n, i64 d, i64 each,
                                             const double* query_inverse, const double* key_inverse,
                                             const i64* positives, double* out) {
  const i64 i = lanes_row(32);
  if (i >= n) return;
  const i64 row = i / each, j = positives[i];
  double dot = 0;
  if (j >= 0)
    for (i64 k = threadIdx.x % 32; k < d; k += 32)
      dot += query.get(row, k) * query_inverse[row] * (key.get(j, k) * key_inverse[j]);
  dot = warp_sum(dot);
  if (threadIdx.x % 32 == 0) out[i] = dot;
}

// g_i -= t, with t = factor_i (sums[segment_i] - itself u_i) + weighted[segment_i]; through the
// normalisation, (t - u_i <t, u_i>) / |z_i|. A warp a row.
extern "C" __global__ void subtract_linear(const __grid_constant__ Matrix z, i64 n, i64 d,
                                           i64 normalize, const double* inverse,
                                           const i64* segment, const double* factor,
                                           const double* sums, const double* weighted,
                                           double itself, const __grid_constant__ Matrix g) {
  const i64 row = lanes_row(32);
  if (row >= n) return;
  const double *of_segment = sums + segment[row] * d, *of_weighted = weighted + segment[row] * d;
  const auto u = [&](i64 k) { return z.get(row, k) * inverse[row]; };
  const auto term = [&](i64 k) {
    return factor[row] * (of_segment[k] - itself * u(k)) + of_weighted[k];
  };
  double dot = 0;
  if (normalize) {
    for (i64 k = threadIdx.x % 32; k < d; k += 32) dot += term(k) * u(k);
    dot = warp_sum(dot);
  }
  for (i64 k = threadIdx.x % 32; k < d; k += 32)
    g.set(row, k, g.get(row, k) - (term(k) - dot * u(k)) * inverse[row]);
}
