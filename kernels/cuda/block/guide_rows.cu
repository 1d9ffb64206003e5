// Rows of a guide's features: limits of rows, and features that are not finite. After this, tiled/guide.cu or
// sm90/sweep_guide.cu marks the pairs above these limits.
#include "rows.cuh"

// Writes three results. A warp computes one of m queries, or one of n keys. If queries are the keys, n is 0 and
// row_nans is null.
//   - limits[i]: the limit of row i, which is the largest product of query i with its positives (positives
//     [m, set_size], -1 for none), plus `margin`; infinite without a positive.
//   - row_nans[i]: NaN if a feature of query i is not finite, else known_row_nans[i] (null: 0).
//   - *any_key_not_finite becomes NaN if a feature of a key is not finite. With `two_sided`, or if queries are the
//     keys, also if a feature of a query is not finite, because the softmax of each column has all queries.
extern "C" __global__ void guide_limits(const __grid_constant__ Rows query, const __grid_constant__ Rows key, i64 m,
                                        i64 n, i64 d, const i64* positives, i64 set_size, double margin,
                                        i64 two_sided, const double* known_row_nans, double* limits, double* row_nans,
                                        double* any_key_not_finite) {
  constexpr int STEP = 32 * LANE_FEATURES;  // features of a warp at a time
  const int first = threadIdx.x % 32 * LANE_FEATURES;
  const bool is_key = lanes_row(32) >= m;
  const i64 row = lanes_row(32) - (is_key ? m : 0);
  if (is_key && row >= n) return;
  const Rows& side = is_key ? key : query;
  // The rows are on their way while positives and norms are read
  prefetch_row(side.z, row, d, threadIdx.x % 32, 32);
  const i64 first_positive = is_key ? -1 : positives[row * set_size];
  if (first_positive >= 0) prefetch_row(key.z, first_positive, d, threadIdx.x % 32, 32);
  // zero_sum is of features times 0: 0, or NaN if a feature is not finite. NaN != 0 is true
  double x[LANE_FEATURES], y[LANE_FEATURES], zero_sum = 0;
  for (i64 k = first; k < d; k += STEP) {
    get_group(x, side.z, row, k, d - k);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) zero_sum += x[i] * 0;
  }
  const bool is_not_finite = __any_sync(ALL_LANES, zero_sum != 0);
  double top = -INFINITY_;  // largest product with a positive; NaN if one is NaN
  bool has_positive = false;
  for (i64 pair = row * set_size; !is_key && pair < (row + 1) * set_size; ++pair) {
    const i64 j = positives[pair];
    if (j < 0) continue;
    const double query_inverse = query.inverse(row), key_inverse = key.inverse(j);
    double dot = 0;
    for (i64 k = first; k < d; k += STEP) {
      get_group(x, query.z, row, k, d - k);
      get_group(y, key.z, j, k, d - k);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) dot += x[i] * query_inverse * (y[i] * key_inverse);
    }
    dot = warp_sum(dot);
    top = dot > top || isnan(dot) ? dot : top;
    has_positive = true;
  }
  if (threadIdx.x % 32) return;
  if (is_not_finite && (is_key || two_sided || !row_nans)) *any_key_not_finite = NAN_;
  if (is_key) return;
  limits[row] = has_positive ? top + margin : INFINITY_;
  if (row_nans) row_nans[row] = is_not_finite ? NAN_ : known_row_nans ? known_row_nans[row] : 0;
}

// out = upstream gradients of n rows, NaN for losses that depend on a feature of the guide that is not finite: so their
// losses and gradients become NaN, although the guide's features are in no product of the loss.
extern "C" __global__ void spoil_upstream(i64 n, const double* upstream, const double* row_nans,
                                          const double* any_key_not_finite, double* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = upstream[i] + *any_key_not_finite + (row_nans ? row_nans[i] : 0);
}
