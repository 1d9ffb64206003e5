// Log-sum-exp fold as a sweep (sweep.cuh): what lse.cu computes, at the speed of the tensor cores.
//
// A panel's rows keep a running (max x, sum 2^(c (x - max))) in registers, c = scale log2 e, and
// leave one pair a segment. A tile's columns are summed over the warpgroup's 64 rows, in strips of 16
// rows a warp, and merged into the pair that this warpgroup keeps for the column in memory: whatever
// the number of rows, there are as many pairs a column as there are warpgroups on the device.
//
// One exponential a logit serves both directions, as in lse.cu: e_ij = 2^(c (x_ij - r_i)) with the
// row's maximum r_i in the tile; columns take e_ij 2^(c (r_i - top)), `top` being the strip's
// maximum. Where a column's sum comes out so small that it may have lost terms, the strip's columns
// are summed again with maxima of their own.
//
// c r_i is rounded once, so that x_ij c - (c r_i) is one instruction; what the rounding leaves is the
// same for the whole row and goes into the factors.
#include "sweep.cuh"

#ifndef COLUMNS
#define COLUMNS 1
#endif

// What was lost is below 16 * 2^-126: nothing beside a sum of 2^-80.
#define ENOUGH 8.271806125530277e-25f

struct Sum {
  __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
};
struct Max {
  __device__ __forceinline__ float operator()(float x, float y) const { return fmaxf(x, y); }
};

struct Lse {
  struct Shared {  // of a warpgroup
    Columns columns;
    float2 strips[COLUMNS ? 2 : 1][4][TILE_COLUMNS];  // a strip's (max, sum) of each column
  };

  const Block& b;
  const Lane& lane;
  Shared& shared;
  double* positive;
  float2 *row_pairs, *column_pairs;  // [segments, row_stride]; column_pairs of this warpgroup
  i64 row_stride;
  double scale;
  float c;

  Work work;
  Rows rows;
  Column column;
  float row_max[2], row_sum[2];  // of the panel so far; sums are this thread's, of four that share a row
  // of the tile
  float2 column_pair;  // of this thread's column, of all panels so far
  float high[2], shift[2], rest[2], weight[2], sum[2], top, eight[8];
  float2 (*strip)[TILE_COLUMNS];

  // Where rows' sums go: warpgroups that share rows have places of their own.
  __device__ __forceinline__ i64 slot() const {
    return WIDE ? 2 * work.segment + lane.warpgroup : work.segment;
  }

  __device__ __forceinline__ void begin_panel(const Work& w) {
    work = w;
    rows.load(b, w.panel, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) row_max[h] = LOW, row_sum[h] = 0;
  }

  __device__ __forceinline__ void fetch(int tile, int) {
    column.fetch(b, (i64)tile * TILE_COLUMNS + lane.thread);
  }
  __device__ __forceinline__ void publish(int buffer) {
    column.publish(shared.columns, buffer, lane.thread);
  }

  __device__ __forceinline__ void begin_tile(float (&x)[64], int tile, int buffer) {
    prepare(x, rows, shared.columns, buffer, b, work.panel, tile, lane, [&](int half, float value) {
      const i64 row = (i64)work.panel * PANEL_ROWS + lane.row() + 8 * half;
      positive[row] = scale * (double)value;
      // In a triangle the pair is met once, and its other row is this column
      if (b.triangle) positive[b.positives[row] - b.first_column] = scale * (double)value;
    });
    strip = &shared.strips[buffer][lane.warp];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      high[h] = x[2 * h];
#pragma unroll
      for (int i = 1; i < 32; ++i) high[h] = fmaxf(high[h], x[i / 2 * 4 + 2 * h + i % 2]);
      high[h] = fmaxf(high[h], __shfl_xor_sync(ALL_LANES, high[h], 1));
      high[h] = fmaxf(high[h], __shfl_xor_sync(ALL_LANES, high[h], 2));
      const float finite = high[h] == LOW ? 0 : high[h];  // 2^(-inf - 0) adds nothing
      shift[h] = c * finite;
      rest[h] = fmaf(c, finite, -shift[h]);  // 2^(c (x - max)) = 2^(c x - shift) 2^-rest
      sum[h] = 0;
    }
    if (!COLUMNS) return;
    const i64 at = (i64)tile * TILE_COLUMNS + lane.thread;
    if (at < b.k.rows) column_pair = column_pairs[at];  // in time for end_tile
    top = fmaxf(high[0], high[1]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, lanes));
#pragma unroll
    for (int h = 0; h < 2; ++h)
      weight[h] = high[h] == LOW ? 0 : exp2_(c * (high[h] - top) - rest[h]);
  }

  __device__ __forceinline__ void slice(float (&x)[64], int s) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * (2 * s + j) + e;
        const float e0 = exp2_(fmaf(x[i], c, -shift[0])), e1 = exp2_(fmaf(x[i + 2], c, -shift[1]));
        sum[0] += e0;
        sum[1] += e1;
        if (COLUMNS) eight[s % 2 * 4 + 2 * j + e] = fmaf(e0, weight[0], e1 * weight[1]);
      }
    if (!COLUMNS || s % 2 == 0) return;
    float2 pair = make_float2(top, join_columns(eight, lane, Sum()));
    if (__any_sync(ALL_LANES, pair.y < ENOUGH)) pair = own_maxima(x, s);
    (*strip)[(s - 1) * 16 + lane.g / 2 * 8 + 2 * lane.t + lane.g % 2] = pair;
  }

  // The 32 columns that end with slice s, with maxima of their own.
  __device__ __forceinline__ float2 own_maxima(const float (&x)[64], int s) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 4 * (2 * (s - 1) + k / 2) + k % 2;
      v[k] = fmaxf(x[i], x[i + 2]);
    }
    const float most = join_columns(v, lane, Max());
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 4 * (2 * (s - 1) + k / 2) + k % 2;
      float shift = __shfl_sync(ALL_LANES, most, k * 4 + lane.t);
      if (shift == LOW) shift = 0;
      v[k] = exp2_(c * (x[i] - shift)) + exp2_(c * (x[i + 2] - shift));
    }
    return make_float2(most, join_columns(v, lane, Sum()));
  }

  // (max, sum) + (max, sum) where the second's terms are 2^-rest too large.
  __device__ __forceinline__ void add(float& max, float& sum, float other_max, float other_sum,
                                      float other_rest) {
    const float most = fmaxf(max, other_max), finite = most == LOW ? 0 : most;
    sum = sum * exp2_(c * (max - finite)) + other_sum * exp2_(c * (other_max - finite) - other_rest);
    max = most;
  }

  __device__ __forceinline__ void end_tile(int tile, int buffer) {
#pragma unroll
    for (int h = 0; h < 2; ++h) add(row_max[h], row_sum[h], high[h], sum[h], rest[h]);
    if (!COLUMNS) return;
    const i64 at = (i64)tile * TILE_COLUMNS + lane.thread;
    // A tile on the diagonal of a triangle holds both (i, j) and (j, i)
    if (at < b.k.rows && !(b.triangle && tile == work.panel)) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = shared.strips[buffer][w][lane.thread];
        add(column_pair.x, column_pair.y, pair.x, pair.y, 0);
      }
      column_pairs[at] = column_pair;
    }
  }

  __device__ __forceinline__ void end_panel(const Work& w) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_sum[h] += __shfl_xor_sync(ALL_LANES, row_sum[h], 1);
      row_sum[h] += __shfl_xor_sync(ALL_LANES, row_sum[h], 2);
      const i64 row = (i64)w.panel * PANEL_ROWS + lane.row() + 8 * h;
      if (lane.t == 0 && rows.inside[h])
        row_pairs[slot() * row_stride + row] = make_float2(row_max[h], row_sum[h]);
    }
  }
};

// positive [rows], base-2 logits; row_pairs [slots, row_stride]; column_pairs
// [2 * blocks, column_stride], which start as (-inf, 0).
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
  Lse lse{block, lane, shared.epilogue[lane.warpgroup & 1], positive, row_pairs,
          column_pairs + (2 * blockIdx.x + lane.warpgroup) * column_stride, row_stride, scale,
          (float)scale};
  sweep(shared, q, k, block, (int)segments, lse, lane);
}
