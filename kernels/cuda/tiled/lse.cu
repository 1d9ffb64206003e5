// Log-sum-exp pass, portable: the partial sums of each tile of logits. On Hopper, sm90/sweep_lse.cu computes them.
//
// With c = scale log2 e and x = q . k, a tile yields for each of its rows, and with COLUMNS for each of its columns, a
// pair (m, sum of 2^(c (x - m))) over the negatives. m is at least the largest x, so no exponent is above 0. With
// MOMENTS, the first moment, the sum of 2^(c (x - m)) x, goes with each pair. The logits of positives are recorded, and
// stay out of the sums. Another kernel, merge_partial_sums (vectors/sums.cuh), merges the pairs of all tiles in a fixed
// order, without atomics, so that the bits are the same in every run. Options (block/options.cuh) may leave pairs out,
// or replace x in the exponent. Moments keep x.
//
// One exponential of a logit serves both directions, because all rows and columns of a strip, the 64 x WARP_N logits of
// a warp, share one m, the maximum of the strip. A row or a column whose logits are all far below m can lose all its
// digits. The sum of such a row or column is below MIN_EXACT_SUM, and then the strip is summed again, with a maximum
// for each row and column. The same happens if a row or column has no pair in the strip, because its sum is 0: at the
// padding after the last row or column of a block, or if options leave all its pairs out.
#include "tiled/tile.cuh"

#ifndef MAXIMA
#define MAXIMA 0  // 1: m is the largest x of its row or column, because the caller wants maxima
#endif

// Bounds of a sum that is exact up to rounding. A strip has at most 64 terms in a row or column. Underflow takes less
// than 64 * 2^-126 from their sum, which is negligible relative to 2^-80. Terms are at most 1, so only features that
// are not finite lead to a sum above 2^80.
constexpr Real MIN_EXACT_SUM = (Real)0x1p-80, MAX_EXACT_SUM = (Real)0x1p80;

// (m, sum of 2^(c (x - m))), and with MOMENTS the sum of 2^(c (x - m)) x; `top` is m, -inf for a sum of nothing.
struct Partial {
  Real top, sum, moment;
};

// The partial sums over two sets of logits together. A sum that is NaN stays NaN.
__device__ __forceinline__ Partial merge(const Partial& a, const Partial& b, Real c) {
  const Real top = max_(a.top, b.top);
  if (top == LOW) return {LOW, a.sum + b.sum, 0};
  const Real a_weight = exp2_(c * (a.top - top)), b_weight = exp2_(c * (b.top - top));
  return {top, a.sum * a_weight + b.sum * b_weight, MOMENTS ? a.moment * a_weight + b.moment * b_weight : 0};
}

// Partial sums of several rows or columns in memory: pairs (m, sum), and with MOMENTS also moments.
struct Partials {
  Real2* pairs;
  Real* moments;

  __device__ __forceinline__ Partial get(i64 i) const {
    return {pairs[i].x, pairs[i].y, MOMENTS ? moments[i] : 0};
  }
  __device__ __forceinline__ void set(i64 i, const Partial& p) const {
    pairs[i] = real2(p.top, p.sum);
    if (MOMENTS) moments[i] = p.moment;
  }
};

// The partial sums of all strips of a tile: of a row in each of WARPS_N strips, of a column in each of WARPS_M strips.
struct StripSums {
  Real2 row_partials[WARPS_N][BLOCK_M], column_partials[WARPS_M][BLOCK_N];
#if MOMENTS
  Real row_moments[WARPS_N][BLOCK_M], column_moments[WARPS_M][BLOCK_N];
  __device__ __forceinline__ Partials rows(int warp) { return {row_partials[warp], row_moments[warp]}; }
  __device__ __forceinline__ Partials columns(int warp) {
    return {column_partials[warp], column_moments[warp]};
  }
#else
  __device__ __forceinline__ Partials rows(int warp) { return {row_partials[warp], nullptr}; }
  __device__ __forceinline__ Partials columns(int warp) { return {column_partials[warp], nullptr}; }
#endif
};

__device__ __forceinline__ bool is_exact(Real sum) {
  return sum >= MIN_EXACT_SUM && sum <= MAX_EXACT_SUM;
}

// The partial sums of a strip with its maximum as m. Returns false, in all lanes, if a sum of the strip is not exact.
__device__ __forceinline__ bool sum_strip(const Products& x, Real c, StripSums& out,
                                          const TileShared& s, const Position& p) {
  Real top = LOW;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) top = max_(top, Options::exponent(x[i][j], s.pair(p.row(i), p.column(j))));
  top = or_low(column_max(row_max(top)));
  // c (x - top) = (c x - reference) + (reference - c top), with reference = c top rounded. So the exponent of a logit
  // takes one fma, and `rest`, 2^(reference - c top), corrects the rounding in the complete sums
  const Real reference = c * top, rest = exp2_(-fma(c, top, -reference));

  bool exact = true;
  Real column_sum[LANE_N / 8][8] = {}, column_moment[LANE_N / 8][8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Real sum = 0, moment = 0;
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) {
      const auto pair = s.pair(p.row(i), p.column(j));
      const Real e = exp2_(fma(c, Options::exponent(x[i][j], pair), -reference));
      const Real row_term = Options::in_row(x[i][j], pair) ? e : 0;
      const Real column_term = Options::in_column(x[i][j], pair) ? e : 0;
      sum += row_term;
      if (COLUMNS) column_sum[j / 8][j % 8] += column_term;
      if (MOMENTS) {
        moment = fma(row_term, x[i][j], moment);
        if (COLUMNS) column_moment[j / 8][j % 8] = fma(column_term, x[i][j], column_moment[j / 8][j % 8]);
      }
    }
    sum = row_sum(sum) * rest;
    if (MOMENTS) moment = row_sum(moment) * rest;
    exact &= is_exact(sum);
    if (p.t == 0) out.rows(p.warp_n).set(p.row(i), {top, sum, moment});
  }
  if (COLUMNS)
#pragma unroll
    for (int j = 0; j < LANE_N / 8; ++j) {
      const Real sum = join_columns(column_sum[j], p.lane, Plus()) * rest;
      const Real moment = MOMENTS ? join_columns(column_moment[j], p.lane, Plus()) * rest : 0;
      exact &= is_exact(sum);
      out.columns(p.warp_m).set(p.column(8 * j + p.g), {top, sum, moment});
    }
  return __all_sync(ALL_LANES, exact);
}

// The partial sums of a strip with a maximum of each row, and of each column, as m.
__device__ __forceinline__ void sum_strip_by_own_maxima(const Products& x, Real c, StripSums& out,
                                                        const TileShared& s, const Position& p) {
  __syncwarp();  // the writes of sum_strip to `out` come before the writes below
  // The product in the exponent of the row's, or the column's, term; EXCLUDED if that softmax has no such pair
  const auto row_product = [&](int i, int j) {
    const auto pair = s.pair(p.row(i), p.column(j));
    return Options::in_row(x[i][j], pair) ? Options::exponent(x[i][j], pair) : EXCLUDED;
  };
  const auto column_product = [&](int i, int j) {
    const auto pair = s.pair(p.row(i), p.column(j));
    return Options::in_column(x[i][j], pair) ? Options::exponent(x[i][j], pair) : EXCLUDED;
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Real top = LOW, sum = 0, moment = 0;
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) top = max_(top, row_product(i, j));
    top = or_low(row_max(top));
    const Real shift = top == LOW ? 0 : top;  // without pairs, terms are 2^(-inf - 0) = 0, and -inf - -inf would be NaN
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) {
      const Real e = exp2_(c * (row_product(i, j) - shift));
      sum += e;
      if (MOMENTS) moment = fma(e, x[i][j], moment);
    }
    sum = row_sum(sum);
    if (MOMENTS) moment = row_sum(moment);
    if (p.t == 0) out.rows(p.warp_n).set(p.row(i), {top, sum, moment});
  }
  if (!COLUMNS) return;
#pragma unroll
  for (int j = 0; j < LANE_N; ++j) {
    Real top = LOW, sum = 0, moment = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = max_(top, column_product(i, j));
    top = or_low(column_max(top));
    const Real shift = top == LOW ? 0 : top;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Real e = exp2_(c * (column_product(i, j) - shift));
      sum += e;
      if (MOMENTS) moment = fma(e, x[i][j], moment);
    }
    sum = column_sum(sum);
    if (MOMENTS) moment = column_sum(moment);
    if (p.g == 0) out.columns(p.warp_m).set(p.column(j), {top, sum, moment});
  }
}

// Merges the partial sums of a tile's strips, and writes them to `rows` [column tiles, row_stride] and `columns`
// [row tiles, column_stride]. A row has a slot for each column tile, and a column has a slot for each row tile. In a
// triangle, `rows` and `columns` are the same arrays, and row r of row tile a gets all its slots: tile (a, b) writes
// slot b for b >= a, from row r of the tile, and tile (b, a) writes slot b for b < a, from column r of the tile.
__device__ __forceinline__ void store_sums(StripSums& sums, const Block& b, const Tile& t, Real c,
                                           const Partials& rows, i64 row_stride,
                                           const Partials& columns, i64 column_stride) {
  for (int r = threadIdx.x; r < BLOCK_M; r += TILED_THREADS) {
    if (t.row + r >= b.q.rows) break;
    Partial all = sums.rows(0).get(r);
#pragma unroll
    for (int w = 1; w < WARPS_N; ++w) all = merge(all, sums.rows(w).get(r), c);
    rows.set(t.column / BLOCK_N * row_stride + t.row + r, all);
  }
  // A tile on the diagonal of a triangle has both (i, j) and (j, i), so its rows are complete without its columns
  if (!COLUMNS || (b.triangle && t.row == t.column)) return;
  for (int j = threadIdx.x; j < BLOCK_N; j += TILED_THREADS) {
    if (t.column + j >= b.k.rows) break;
    Partial all = sums.columns(0).get(j);
#pragma unroll
    for (int w = 1; w < WARPS_M; ++w) all = merge(all, sums.columns(w).get(j), c);
    columns.set(t.row / BLOCK_M * column_stride + t.column + j, all);
  }
}

// Writes the partial sums of all tiles of the block (store_sums), and to `positive` [rows, set_size] the base-2 logits
// of the positives in the block.
extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
lse(const __grid_constant__ Block block, double* positive_logits, Real2* row_partials, i64 row_stride,
    Real2* column_partials, i64 column_stride, Real* row_moments, Real* column_moments) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TileShared shared;
  __shared__ StripSums sums;
  const Position p;
  const double scale = block.scale.get() * LOG2_E;
  const Real c = (Real)logit_factor(scale);
  Pipeline pipeline(block, stages);
  for (Tile tile = find_tile(block, blockIdx.x); tile.exists; tile = next_tile(block, tile)) {
    prepare(shared, block, tile);
    Products x;
    tile_product(x, pipeline, p);
    apply_norm_factors(x, shared, p);
    set_aside_positives(x, shared, block, tile, p, EXCLUDED, [&](i64 pair, Real value) {
      positive_logits[pair] = scale * (double)value;
    });
    exclude_pairs(x, shared, block, tile, p);
    if (MAXIMA || !sum_strip(x, c, sums, shared, p)) sum_strip_by_own_maxima(x, c, sums, shared, p);
    __syncthreads();  // the writes of all strips' sums come before their reads
    store_sums(sums, block, tile, c, Partials{row_partials, row_moments}, row_stride,
               Partials{column_partials, column_moments}, column_stride);
  }
}
