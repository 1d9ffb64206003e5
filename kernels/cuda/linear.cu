// Terms of a loss that are linear in the logits, such as label smoothing (formulas: kernels/linear.py). A segment is a
// set of rows whose features are summed: all rows, or the rows of a class. kernels/gpu/linear.py launches
// segment_pieces and join_pieces for the sums, then segment_products for the loss. finish.cu, or subtract_linear, adds
// the gradients.
//
// A sum has a fixed order, without atomics, so that its bits are the same in every run.
#include "rows.cuh"

// The segments of n rows, and an order of the rows in which each segment is contiguous.
struct Segments {
  const i64* segment;  // segment of each row, -1 for none; null: all rows are in segment 0
  const i64* order;    // the row at each position of the order; null: row 0, row 1, ...

  __device__ __forceinline__ i64 row(i64 at) const { return order ? order[at] : at; }
  __device__ __forceinline__ i64 get_segment(i64 row) const { return segment ? segment[row] : 0; }
};

// --- sums of segments ------------------------------------------------------------------------------------
//
// A place is PLACE_ROWS neighbouring rows of the order (the last place may have fewer), and place p has the positions
// from p PLACE_ROWS on. A segment may lie in one place or in several. The rows of a segment in one place are a piece.
// segment_pieces adds up the rows of each piece. Then join_pieces adds up the pieces of each segment that has several.
// So many threads share a long segment.

constexpr int PLACE_ROWS = 64;
constexpr int ROWS_AT_ONCE = 4;  // rows that a thread loads before it adds the first of them

// For each segment with rows in a place, sums weight[i] u_i (weight null: 1) over these rows. A thread has one place
// and eight features.
//   - The sum of a segment that lies within the place goes to out[segment] ([segments, d]): it is complete.
//   - The piece of a segment that begins before the place goes to pieces[place, 0] ([places, 2, d]).
//   - The piece of another segment that continues after the place goes to pieces[place, 1].
extern "C" __global__ void segment_pieces(const __grid_constant__ Rows rows, i64 n, i64 d,
                                          const __grid_constant__ Segments segments,
                                          const double* weight, Real* out, double* pieces) {
  const i64 across = (d + LANE_FEATURES - 1) / LANE_FEATURES;
  const i64 thread = blockIdx.x * (i64)blockDim.x + threadIdx.x, place = thread / across;
  const i64 column = thread % across * LANE_FEATURES, features = d - column;
  const i64 begin = place * PLACE_ROWS, end = min(begin + PLACE_ROWS, n);
  if (begin >= n) return;
  i64 current = segments.get_segment(segments.row(begin));  // the segment of `sum`
  bool began_before = begin > 0 && segments.get_segment(segments.row(begin - 1)) == current;
  double sum[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
  // Writes `sum`, to `out` or to `pieces`. `goes_on`: the segment `current` continues after the place.
  const auto put = [&](bool goes_on) {
    if (current < 0) return;
    const bool has_other_pieces = began_before || goes_on;  // false: the whole segment lies in this place
    double* to = pieces + (place * 2 + !began_before) * d + column;
#pragma unroll
    for (int k = 0; k < LANE_FEATURES; ++k)
      if (k < features) {
        if (has_other_pieces) to[k] = sum[k];
        else out[current * d + column + k] = (Real)sum[k];
      }
  };
  for (i64 at = begin; at < end; at += ROWS_AT_ONCE) {  // loads first: they need not wait for one another
    i64 row_segments[ROWS_AT_ONCE];
    double by[ROWS_AT_ONCE];
    Real x[ROWS_AT_ONCE][LANE_FEATURES];
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; ++r) {
      const i64 row = segments.row(min(at + r, end - 1));
      row_segments[r] = segments.get_segment(row);
      by[r] = at + r < end ? rows.inverse(row) * (weight ? weight[row] : 1) : 0;
      get_group(x[r], rows.z, row, column, features);
    }
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; ++r) {
      if (row_segments[r] != current) {
        put(false);
        current = row_segments[r], began_before = false;
#pragma unroll
        for (int k = 0; k < LANE_FEATURES; ++k) sum[k] = 0;
      }
      if (at + r < end)
#pragma unroll
        for (int k = 0; k < LANE_FEATURES; ++k) sum[k] += by[r] * x[r][k];
    }
  }
  put(end < n && segments.get_segment(segments.row(end)) == current);
}

// A thread block has JOIN_FEATURES features of a segment; JOIN_PARTS threads share the pieces of a feature
constexpr int JOIN_FEATURES = 64, JOIN_PARTS = 4;

// Adds up the pieces of each segment that lies in several places, to out[segment]. A thread block has a place. If a
// segment begins in this place and continues after it, the thread block adds up JOIN_FEATURES features of that segment.
extern "C" __global__ void __launch_bounds__(JOIN_FEATURES * JOIN_PARTS)
join_pieces(i64 n, i64 d, const __grid_constant__ Segments segments, const double* pieces, Real* out) {
  __shared__ double sums[JOIN_PARTS][JOIN_FEATURES];
  const i64 across = (d + JOIN_FEATURES - 1) / JOIN_FEATURES, place = blockIdx.x / across;
  const i64 next = (place + 1) * PLACE_ROWS;
  if (next >= n) return;
  const i64 segment = segments.get_segment(segments.row(next));
  // Whether the row at a position of the order belongs to `segment`
  const auto here = [&](i64 at) { return segments.get_segment(segments.row(at)) == segment; };
  const i64 begin = place * PLACE_ROWS;
  // This thread block has nothing to add up if one of these holds:
  //   - The row after the place belongs to no segment.
  //   - `segment` begins after the place.
  //   - `segment` begins before the place, so a thread block of an earlier place adds up its pieces.
  if (segment < 0 || !here(next - 1) || (begin > 0 && here(begin) && here(begin - 1))) return;
  // Bisection: `last` becomes the last place that the segment lies in. `beyond` is a place after the segment
  i64 last = place + 1, beyond = (n + PLACE_ROWS - 1) / PLACE_ROWS;
  while (beyond - last > 1) {
    const i64 middle = (last + beyond) / 2;
    if (here(middle * PLACE_ROWS)) last = middle;
    else beyond = middle;
  }
  const int lane = threadIdx.x % JOIN_FEATURES, part = threadIdx.x / JOIN_FEATURES;
  const i64 k = blockIdx.x % across * JOIN_FEATURES + lane;
  double sum = part == 0 && k < d ? pieces[(place * 2 + 1) * d + k] : 0;
  if (k < d)
#pragma unroll 8
    for (i64 p = place + 1 + part; p <= last; p += JOIN_PARTS) sum += pieces[p * 2 * d + k];
  sums[part][lane] = sum;
  __syncthreads();  // the writes of all parts come before the reads of the first
  if (part || k >= d) return;
#pragma unroll
  for (int p = 1; p < JOIN_PARTS; ++p) sum += sums[p][lane];
  out[segment * d + k] = (Real)sum;
}

// --- products, and gradients of rows ----------------------------------------------------------------------

// out[i] = u_i . (sums[segment_i] - own_count u_i), or 0 if row i has no segment (-1). `own_count` is 1 if `sums`
// contain u_i, which must not count, else 0. A warp, or half of a warp, computes a row.
extern "C" __global__ void segment_products(const __grid_constant__ Rows rows, i64 n, i64 d,
                                            const i64* segment, const Real* sums, double own_count,
                                            double* out) {
  const int lanes = count_lanes(d), lane = threadIdx.x % lanes;
  const i64 row = lanes_row(lanes);
  if (row >= n) return;
  const i64 row_segment = segment ? segment[row] : 0;
  double dot = 0;
  if (row_segment >= 0) {
    const double inverse = rows.inverse(row);
    for (i64 k = lane * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES) {
      Real x[LANE_FEATURES], s[LANE_FEATURES];
      get_group(x, rows.z, row, k, d - k);
      get_reals(s, sums + row_segment * d + k, d - k);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) {
        const double u = x[i] * inverse;
        dot += u * (s[i] - own_count * u);
      }
    }
  }
  dot = lanes_sum(dot, lanes);
  if (lane == 0) out[row] = dot;
}

// out[i] = u_r . v_j, the product of query r = i / set_size with its positive, key j = positives[i]; 0 if j is -1. A
// query has `set_size` positives, and n is their number over all queries. A warp computes a product.
extern "C" __global__ void positive_products(const __grid_constant__ Rows query,
                                             const __grid_constant__ Rows key, i64 n, i64 d, i64 set_size,
                                             const i64* positives, double* out) {
  const i64 i = lanes_row(32);
  if (i >= n) return;
  const i64 row = i / set_size, j = positives[i];
  double dot = 0;
  if (j >= 0) {
    const double query_inverse = query.inverse(row), key_inverse = key.inverse(j);
    for (i64 k = threadIdx.x % 32; k < d; k += 32)
      dot += query.z.get(row, k) * query_inverse * (key.z.get(j, k) * key_inverse);
  }
  dot = warp_sum(dot);
  if (threadIdx.x % 32 == 0) out[i] = dot;
}

// Subtracts a linear term from complete gradients g_i of rows z_i, if another kernel than finish.cu completed them.
// A warp computes a row. With t_i = factor_i (sums[segment_i] - own_count u_i) + weighted[segment_i] (null: 0), as in
// struct LinearGradient of finish.cu:
//
//     g_i    -= t_i, or, if rows are normalised, (t_i - u_i <t_i, u_i>) / |z_i|
//     dots_i -= <t_i, u_i>, if `dots` is not null
extern "C" __global__ void subtract_linear(const __grid_constant__ Rows rows, i64 n, i64 d,
                                           const i64* segment, const double* factor,
                                           const Real* sums, const Real* weighted, double own_count,
                                           const __grid_constant__ Matrix g, double* dots) {
  const i64 row = lanes_row(32);
  if (row >= n) return;
  const i64 row_segment = segment ? segment[row] : 0;
  if (row_segment < 0) return;
  const double inverse = rows.inverse(row);
  const auto u = [&](i64 k) { return rows.z.get(row, k) * inverse; };
  const auto term = [&](i64 k) {
    const double class_term = factor ? factor[row] * (sums[row_segment * d + k] - own_count * u(k)) : 0;
    return class_term + (weighted ? weighted[row_segment * d + k] : 0);
  };
  double dot = 0;  // <t_i, u_i>
  if (rows.factor || dots) {
    for (i64 k = threadIdx.x % 32; k < d; k += 32) dot += term(k) * u(k);
    dot = warp_sum(dot);
  }
  if (dots && threadIdx.x % 32 == 0) dots[row] -= dot;
  const double radial = rows.factor ? dot : 0;
  for (i64 k = threadIdx.x % 32; k < d; k += 32)
    g.set(row, k, g.get(row, k) - (term(k) - radial * u(k)) * inverse);
}
