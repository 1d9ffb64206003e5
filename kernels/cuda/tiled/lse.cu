// Log-sum-exp fold: what a tile of logits adds to the sums of its rows and columns.
//
// With c = scale log2 e and x = q . k, a tile yields for each of its rows, and with COLUMNS for each
// of its columns, pairs (m, sum 2^(c (x - m))) over the negatives; positives' logits are recorded and
// stay out of the sums. Pairs of different tiles are merged by another kernel in a fixed order: no
// atomics, the same bits from run to run.
//
// One exponential a logit serves both directions: all rows and columns of a warp's strip, 64 x WARP_N
// logits, share m, the strip's maximum. A row or a column far below it can lose all its digits that
// way. Its sum is then below MIN_EXACT_SUM, and the strip is summed again with maxima of each row and
// column. This is fast almost always, and right always.
#include "tiled/tile.cuh"

#ifndef COLUMNS
#define COLUMNS 1
#endif

// What underflow takes from a sum is below 64 * 2^-126: nothing beside a sum of 2^-80. No sum of terms
// up to 1 is as large as the other bound, which is for features that are not finite.
constexpr Real MIN_EXACT_SUM = (Real)0x1p-80, MAX_EXACT_SUM = (Real)0x1p80;

struct Pairs {
  Real2 of_row[WARPS_N][BLOCK_M], of_column[WARPS_M][BLOCK_N];
};

// (m, sum) + (m, sum), identity (-inf, 0). A NaN sum stays.
__device__ __forceinline__ Real2 merge(Real2 a, Real2 b, Real c) {
  const Real top = max_(a.x, b.x);
  if (top == LOW) return real2(LOW, a.y + b.y);
  return real2(top, a.y * exp2_(c * (a.x - top)) + b.y * exp2_(c * (b.x - top)));
}

__device__ __forceinline__ bool is_exact(Real sum) {
  return sum >= MIN_EXACT_SUM && sum <= MAX_EXACT_SUM;
}

// Sums of a strip around its maximum. False if one of them is not exact.
__device__ __forceinline__ bool sum_strip(const Products& x, Real c, Pairs& out,
                                          const Position& p) {
  Real top = LOW;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) top = max_(top, x[i][j]);
  top = column_max(row_max(top));
  // c (x - top) = (c x - reference) + rest: one instruction a logit, and no rounding lost
  const Real reference = c * top, rest = exp2_(-fma(c, top, -reference));

  bool exact = true;
  Real of_column[LANE_N / 8][8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Real sum = 0;
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) {
      const Real e = exp2_(fma(c, x[i][j], -reference));
      sum += e;
      if (COLUMNS) of_column[j / 8][j % 8] += e;
    }
    sum = row_sum(sum) * rest;
    exact &= is_exact(sum);
    if (p.t == 0) out.of_row[p.warp_n][p.row(i)] = real2(top, sum);
  }
  if (COLUMNS)
#pragma unroll
    for (int j = 0; j < LANE_N / 8; ++j) {
      const Real sum = join_columns(of_column[j], p.lane, Plus()) * rest;
      exact &= is_exact(sum);
      out.of_column[p.warp_m][p.column(8 * j + p.g)] = real2(top, sum);
    }
  return __all_sync(ALL_LANES, exact);
}

// The same with a maximum for each row and column.
__device__ __forceinline__ void sum_strip_by_own_maxima(const Products& x, Real c, Pairs& out,
                                                        const Position& p) {
  __syncwarp();  // the writes of sum_strip come before those below
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Real top = LOW, sum = 0;
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) top = max_(top, x[i][j]);
    top = row_max(top);
    const Real shift = top == LOW ? 0 : top;  // 2^(-inf - 0) adds nothing
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) sum += exp2_(c * (x[i][j] - shift));
    sum = row_sum(sum);
    if (p.t == 0) out.of_row[p.warp_n][p.row(i)] = real2(top, sum);
  }
  if (!COLUMNS) return;
#pragma unroll
  for (int j = 0; j < LANE_N; ++j) {
    Real top = LOW, sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = max_(top, x[i][j]);
    top = column_max(top);
    const Real shift = top == LOW ? 0 : top;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += exp2_(c * (x[i][j] - shift));
    sum = column_sum(sum);
    if (p.g == 0) out.of_column[p.warp_m][p.column(j)] = real2(top, sum);
  }
}

// row_pairs [column tiles, row_stride], column_pairs [row tiles, column_stride]. In a triangle both
// are the same array: row r of row tile a fills slots b >= a as a row and a' < a as a column.
__device__ __forceinline__ void store_pairs(const Pairs& pairs, const Block& b, const Tile& t, Real c,
                                            Real2* row_pairs, i64 row_stride,
                                            Real2* column_pairs, i64 column_stride) {
  for (int r = threadIdx.x; r < BLOCK_M; r += TILED_THREADS) {
    if (t.row + r >= b.q.rows) break;
    Real2 pair = pairs.of_row[0][r];
#pragma unroll
    for (int w = 1; w < WARPS_N; ++w) pair = merge(pair, pairs.of_row[w][r], c);
    row_pairs[t.column / BLOCK_N * row_stride + t.row + r] = pair;
  }
  // A tile on the diagonal of a triangle holds both (i, j) and (j, i)
  if (!COLUMNS || (b.triangle && t.row == t.column)) return;
  for (int j = threadIdx.x; j < BLOCK_N; j += TILED_THREADS) {
    if (t.column + j >= b.k.rows) break;
    Real2 pair = pairs.of_column[0][j];
#pragma unroll
    for (int w = 1; w < WARPS_M; ++w) pair = merge(pair, pairs.of_column[w][j], c);
    column_pairs[t.row / BLOCK_M * column_stride + t.column + j] = pair;
  }
}

extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
lse(const __grid_constant__ Block block, double* positive, Real2* row_pairs, i64 row_stride,
    Real2* column_pairs, i64 column_stride) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TileShared shared;
  __shared__ Pairs pairs;
  const Position p;
  const double scale = block.scale.get() * LOG2_E;
  const Real c = (Real)scale;
  Pipeline pipeline(block, stages);
  for (Tile tile = find_tile(block, blockIdx.x); tile.exists; tile = next_tile(block, tile)) {
    prepare(shared, block, tile);
    Products x;
    tile_product(x, pipeline, p);
    apply_factors(x, shared, p);
    at_positives(x, shared, block, tile, p, LOW, [&](int row, Real value) {
      positive[tile.row + row] = scale * (double)value;
    });
    exclude(x, shared, block, tile, p);
    if (!sum_strip(x, c, pairs, p)) sum_strip_by_own_maxima(x, c, pairs, p);
    __syncthreads();  // the writes of all strips' pairs come before their reads
    store_pairs(pairs, block, tile, c, row_pairs, row_stride, column_pairs, column_stride);
  }
}
