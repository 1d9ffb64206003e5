// Log-sum-exp fold as a sweep (sweep.cuh): what lse.cu computes, at the speed of the tensor cores.
//
// A panel's rows keep a running (max x, sum 2^(c (x - max))) in registers, c = scale log2 e, and
// leave one pair a segment and team. A tile's columns are summed over the warpgroup's 64 rows, in
// strips of 16 rows a warp, and merged into the pair that this block keeps for the column and the half
// of its panels in memory: whatever the number of rows, there are two pairs a column and block.
//
// One exponential a logit serves both directions: e_ij = 2^(c (x_ij - h_i)); rows sum e_ij, columns
// e_ij 2^(c (h_i - top)), `top` being the strip's highest h. Any h_i near the row's maximum will do,
// so it is the maximum that the row had in some tile before: finding it costs as much as the sums. A
// row's sum that comes out large, or a column's that comes out so small that it may have lost terms,
// says that the guess was bad: then the tile is summed again with its own maxima, which are the next
// guess. Columns that are too small even so are summed once more with maxima of their own. Fast
// almost always, right always.
//
// c h_i is rounded once, so that x_ij c - (c h_i) is one instruction; what the rounding leaves is the
// same for the whole row and goes into the factors.
#include "sweep_logits.cuh"

#ifndef COLUMNS
#define COLUMNS 1
#endif

// A row's sum may be this. What a column has lost is then below 16 * 2^20 * 2^-126 for each warp:
// nothing beside a sum of 2^-60.
#define MOST 1048576.0f
#define ENOUGH 8.673617379884035e-19f

struct Lse {
  static constexpr bool SUMS = COLUMNS, PUBLISHES = false;
  struct Team {
    Columns columns;
  };
  struct Group {
    float2 strips[COLUMNS ? 4 : 1][COLUMNS ? TILE_COLUMNS : 1];  // a strip's (max, sum) of columns
  };

  const Block& b;
  const Lane& lane;
  Team& team;
  Group& group;
  double* positive;
  float2 *row_pairs, *column_pairs;  // [slots, row_stride]; column_pairs of this warpgroup
  i64 row_stride;
  double scale;
  float c;

  Work work;
  Rows rows;
  float row_max[2], row_sum[2];  // so far; sums are this thread's, of four that share a row
  bool guess;                    // heights are known from a tile before
  float height[2], shift[2], rest[2], weight[2], top;
  // of the tile
  float sum[2];
  float2 column_pair;  // of this thread's column, of all panels so far

  __device__ __forceinline__ i64 row(int h) const {  // of this thread's two
    return (i64)work.panel * PANEL_ROWS + lane.row() + 8 * h;
  }

  __device__ __forceinline__ void begin_panel(const Work& w) {
    work = w;
    rows.load(b, w.panel, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) row_max[h] = LOW, row_sum[h] = 0;
    guess = false;
  }

  __device__ __forceinline__ void publish(int t) { team.columns.publish(b, t, lane); }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, team.columns, b, work.panel, t, lane, [&](int half, float value) {
      positive[row(half)] = scale * (double)value;
      // In a triangle the pair is met once, and its other row is this column
      if (b.triangle) positive[b.positives[row(half)] - b.first_column] = scale * (double)value;
    });
    const i64 at = (i64)t * TILE_COLUMNS + lane.thread;
    if (COLUMNS && at < b.k.rows) column_pair = column_pairs[at];  // in time for end_tile
    if (guess && sums(x, false)) return;
    find_heights(x);
    sums(x, true);
  }

  // The rows' maxima in this tile.
  __device__ __forceinline__ void find_heights(const float (&x)[64]) {
    guess = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float high = largest(x, h);
      high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 1));
      high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 2));
      if (high == LOW && row(h) < b.q.rows) guess = false;  // no guess for the next tile
      height[h] = high;
      const float finite = high == LOW ? 0 : high;  // 2^(-inf - 0) adds nothing
      shift[h] = c * finite;
      rest[h] = fmaf(c, finite, -shift[h]);  // 2^(c (x - height)) = 2^(c x - shift) 2^-rest
    }
    guess = __all_sync(ALL_LANES, guess);
    top = fmaxf(height[0], height[1]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, lanes));
#pragma unroll
    for (int h = 0; h < 2; ++h)
      weight[h] = height[h] == LOW ? 0 : exp2_(c * (height[h] - top) - rest[h]);
  }

  // Sums of rows and columns; false if the heights were no good, unless they are `own`.
  __device__ __forceinline__ bool sums(const float (&x)[64], bool own) {
    bool good = true;
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int s = 0; s < SLICES / 2; ++s) {  // 32 columns
      float eight[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int i = 16 * s + k / 2 * 4 + k % 2;
        const float e0 = exp2_(fmaf(x[i], c, -shift[0])), e1 = exp2_(fmaf(x[i + 2], c, -shift[1]));
        sum[0] += e0;
        sum[1] += e1;
        if (COLUMNS) eight[k] = fmaf(e0, weight[0], e1 * weight[1]);
      }
      if (!COLUMNS) continue;
      float2 pair = make_float2(top, join_columns(eight, lane.lane, Plus()));
      if (pair.y < ENOUGH) good = false;
      if (own && __any_sync(ALL_LANES, pair.y < ENOUGH)) pair = own_maxima(x, s);
      group.strips[lane.warp][32 * s + lane.g / 2 * 8 + 2 * lane.t + lane.g % 2] = pair;
    }
    return own || !__any_sync(ALL_LANES, !good || sum[0] > MOST || sum[1] > MOST);
  }

  // 32 columns with maxima of their own.
  __device__ __forceinline__ float2 own_maxima(const float (&x)[64], int s) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 16 * s + k / 2 * 4 + k % 2;
      v[k] = fmaxf(x[i], x[i + 2]);
    }
    const float most = join_columns(v, lane.lane, Larger());
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 16 * s + k / 2 * 4 + k % 2;
      float shift = __shfl_sync(ALL_LANES, most, k * 4 + lane.t);
      if (shift == LOW) shift = 0;
      v[k] = exp2_(c * (x[i] - shift)) + exp2_(c * (x[i + 2] - shift));
    }
    return make_float2(most, join_columns(v, lane.lane, Plus()));
  }

  // (max, sum) + (max, sum) where the second's terms are 2^rest too large, and nothing has no maximum.
  __device__ __forceinline__ void add(float& max, float& sum, float other_max, float other_sum,
                                      float other_rest) {
    if (other_sum == 0) other_max = LOW;
    const float most = fmaxf(max, other_max), finite = most == LOW ? 0 : most;
    sum = sum * exp2_(c * (max - finite)) + other_sum * exp2_(c * (other_max - finite) - other_rest);
    max = most;
  }

  __device__ __forceinline__ void end_tile(int t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) add(row_max[h], row_sum[h], height[h], sum[h], rest[h]);
    if (!COLUMNS) return;
    const i64 at = (i64)t * TILE_COLUMNS + lane.thread;
    // A tile on the diagonal of a triangle holds both (i, j) and (j, i)
    if (at < b.k.rows && !(b.triangle && t == work.panel)) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = group.strips[w][lane.thread];
        add(column_pair.x, column_pair.y, pair.x, pair.y, 0);
      }
      column_pairs[at] = column_pair;
    }
  }

  __device__ __forceinline__ void end_panel(const Work& w) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Threads that share a row have the same maxima but for those whose own sums were zero
      float most = row_max[h];
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
      float all = row_max[h] == LOW ? row_sum[h] : row_sum[h] * exp2_(c * (row_max[h] - most));
      all += __shfl_xor_sync(ALL_LANES, all, 1);
      all += __shfl_xor_sync(ALL_LANES, all, 2);
      if (lane.t == 0 && row(h) < b.q.rows)
        row_pairs[(ROW_SLOTS * w.segment + lane.slot()) * row_stride + row(h)] = make_float2(most, all);
    }
  }
};

// positive [rows], base-2 logits; row_pairs [ROW_SLOTS segments, row_stride]; column_pairs
// [STRIPS blocks, column_stride], which start as (-inf, 0).
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(BLOCKS, 1, 1)
#endif
sweep_lse(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
          const __grid_constant__ Block block, i64 segments, double* positive, float2* row_pairs,
          i64 row_stride, float2* column_pairs, i64 column_stride) {
  SweepShared<Lse>& shared = sweep_shared<Lse>();
  const Lane lane;
  const double scale = block.scale.get() * LOG2_E;
  Lse lse{block, lane, shared.team[lane.team & 1],
          shared.group[lane.warpgroup % WARPGROUPS], positive, row_pairs,
          column_pairs + (STRIPS * (i64)blockIdx.x + lane.strip()) * column_stride, row_stride, scale,
          (float)scale};
  sweep(shared, q, k, block, (int)segments, lse, lane);
}
