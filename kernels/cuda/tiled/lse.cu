// Log-sum-exp fold: what a tile of logits adds to the sums of its rows and columns.
//
// With c = scale log2 e and x = q . k, a tile yields for each of its rows, and with COLUMNS for each
// of its columns, the pair (max x, sum 2^(c (x - max))) over the negatives; positives' logits are
// recorded and stay out of the sums. Pairs of different tiles are merged by another kernel in a
// fixed order: no atomics, the same bits from run to run.
//
// One exponential a logit serves both directions. e_ij = 2^(c (x_ij - r_i)) is exact for row i, whose
// own maximum in the warp's 64 x 32 strip is r_i. Columns take e_ij 2^(c (r_i - top)), where `top` is the
// strip's maximum. A column far below its rows' maxima can lose all its digits that way. Its sum is then
// below MIN_EXACT_SUM, and the strip's columns are summed again with maxima of their own. This is fast
// almost always, and right always.
#include "tiled/tile.cuh"

#ifndef COLUMNS
#define COLUMNS 1
#endif

// What underflow takes from a sum is below 64 * 2^-126: nothing beside a sum of 2^-80.
constexpr Real MIN_EXACT_SUM = (Real)0x1p-80;

struct Pairs {
  Real2 of_row[WARPS_N][BLOCK_M], of_column[WARPS_M][BLOCK_N];
};

// (max, sum) + (max, sum), identity (-inf, 0). A NaN sum stays.
__device__ __forceinline__ Real2 merge(Real2 a, Real2 b, Real c) {
  const Real top = max_(a.x, b.x);
  if (top == LOW) return real2(LOW, a.y + b.y);
  return real2(top, a.y * exp2_(c * (a.x - top)) + b.y * exp2_(c * (b.x - top)));
}

// The columns of a strip with maxima of their own.
__device__ __forceinline__ Real2 own_maxima(const Real (&x)[8][8], Real c, int g) {
  Real2 mine = real2(LOW, 0);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    Real top = LOW;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = max_(top, x[i][j]);
    top = column_max(top);
    const Real shift = top == LOW ? 0 : top;
    Real sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += exp2_(c * (x[i][j] - shift));
    sum = column_sum(sum);
    if (j == g) mine = real2(top, sum);
  }
  return mine;
}

__device__ __forceinline__ void strip_statistics(Real (&x)[8][8], Real c, Pairs& out,
                                                 const Position& p) {
  Real high[8], top = LOW;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    high[i] = x[i][0];
#pragma unroll
    for (int j = 1; j < 8; ++j) high[i] = max_(high[i], x[i][j]);
    high[i] = row_max(high[i]);
    top = max_(top, high[i]);
  }
  top = column_max(top);

  Real of_column[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Real shift = high[i] == LOW ? 0 : high[i];  // 2^(-inf - 0) adds nothing
    const Real weight = high[i] == LOW ? 0 : exp2_(c * (high[i] - top));
    Real sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const Real e = exp2_(c * (x[i][j] - shift));
      sum += e;
      if (COLUMNS) of_column[j] += e * weight;
    }
    sum = row_sum(sum);
    if (p.t == 0) out.of_row[p.warp_n][p.row(i)] = real2(high[i], sum);
  }
  if (!COLUMNS) return;
  Real2 pair = real2(top, join_columns(of_column, p.lane, Plus()));
  if (__any_sync(ALL_LANES, pair.y < MIN_EXACT_SUM)) pair = own_maxima(x, c, p.g);
  out.of_column[p.warp_m][p.column(p.g)] = pair;
}

// row_pairs [column tiles, row_stride], column_pairs [row tiles, column_stride]. In a triangle both
// are the same array: row r of tile row a fills slots b >= a as a row and a' < a as a column.
extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
lse(const __grid_constant__ Block block, double* positive, Real2* row_pairs, i64 row_stride,
    Real2* column_pairs, i64 column_stride) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TileShared shared;
  const Tile tile = locate(block);
  if (block.triangle && tile.n < tile.m) return;
  const Position p;
  const bool has_positives = prepare(shared, block, tile);

  Real x[8][8];
  tile_product(x, block.q, block.k, tile.row, tile.column, block.width, stages, p);
  apply_factors(x, shared, block, p);
  const double scale = block.scale.get() * LOG2_E;
  const Real c = (Real)scale;
  if (has_positives)
    at_positives(x, shared, p, [&](int row, Real value) {
      positive[tile.row + row] = scale * (double)value;
      return LOW;
    });
  exclude(x, shared, block, tile, p);

  Pairs& pairs = *(Pairs*)stages;
  strip_statistics(x, c, pairs, p);
  __syncthreads();  // the writes of all strips' pairs come before the reads below

  for (int r = threadIdx.x; r < BLOCK_M; r += TILED_THREADS) {
    if (tile.row + r >= block.q.rows) break;
    Real2 pair = pairs.of_row[0][r];
#pragma unroll
    for (int w = 1; w < WARPS_N; ++w) pair = merge(pair, pairs.of_row[w][r], c);
    row_pairs[tile.n * row_stride + tile.row + r] = pair;
  }
  // A tile on the diagonal of a triangle holds both (i, j) and (j, i)
  if (!COLUMNS || (block.triangle && tile.m == tile.n)) return;
  for (int j = threadIdx.x; j < BLOCK_N; j += TILED_THREADS) {
    if (tile.column + j >= block.k.rows) break;
    Real2 pair = pairs.of_column[0][j];
#pragma unroll
    for (int w = 1; w < WARPS_M; ++w) pair = merge(pair, pairs.of_column[w][j], c);
    column_pairs[tile.m * column_stride + tile.column + j] = pair;
  }
}
