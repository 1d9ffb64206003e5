// Which logits of a sweep's tile are in the sums: all but positives, padding, the diagonal of one set of
// rows, pairs of equal ids, and those above a limit; and their biases. tiled/tile.cuh does the same for tiled
// kernels.
#pragma once
#include "sm90/sweep/sweep.cuh"

// What a thread knows of its two rows of a query panel.
struct Rows {
  int positive[2];  // column of the positive in the block, or -1; of SETS, `at_positives` looks them up
  int diagonal;     // of one set of rows: the panel's first row as a column of the block; else far away
  int end;          // all columns before this one are inside for all rows; 0 if some rows are outside
#if IDS
  i64 id[2];
#endif
#if FACTORS
  float factor[2];
#endif
#if LIMITS
  float limit[2];
#endif
#if BIAS == 2
  float bias[2];
#endif
  __device__ __forceinline__ void load(const Block& b, int panel, const Lane& lane) {
    const i64 itself = b.first_row + (i64)panel * PANEL_ROWS - b.first_column;
    const int far = 1 << 30;
    diagonal = warp_uniform(b.symmetric && itself > -far && itself < far ? (int)itself : far);
    end = warp_uniform((i64)(panel + 1) * PANEL_ROWS <= b.q.rows ? (int)b.k.rows : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.row_of(panel, h);
      const bool inside = row < b.q.rows;
      positive[h] = inside && !SETS ? column(b, b.positives[row]) : -1;
#if IDS
      id[h] = inside ? b.query_ids[row] : 0;
#endif
#if FACTORS
      factor[h] = inside ? b.q.factor[row] : 0;
#endif
#if LIMITS
      limit[h] = inside ? b.row_limits[row] : 0;
#endif
#if BIAS == 2
      bias[h] = inside ? b.row_bias[row] : 0;
#endif
    }
  }
  // Of a positive in the block, or -1.
  __device__ __forceinline__ static int column(const Block& b, i64 key) {
    const i64 at = key - b.first_column;
    return at >= 0 && at < b.k.rows ? (int)at : -1;
  }
};

// Where a column's number lies among those of a tile so that those of a thread's slice lie beside each other.
__device__ __forceinline__ int in_slices(int column) {
  const int i = column % 16;  // 8 j + 2 t + e -> 4 t + 2 j + e
  return column - i + i % 8 / 2 * 4 + i / 8 * 2 + i % 2;
}

struct Columns {  // what a consumer knows of its tile's columns, in shared memory
#if IDS
  i64 id[TILE_COLUMNS];
#endif
#if FACTORS
  alignas(8) float factor[TILE_COLUMNS];
#endif
#if LIMITS == 2
  alignas(16) float limit[TILE_COLUMNS];  // as `in_slices` says
#endif
#if BIAS
  alignas(16) float bias[TILE_COLUMNS];
#endif
  // By one of the consumer's warpgroups.
  __device__ __forceinline__ void publish(const Block& b, i64 tile, const Lane& lane) {
    if (lane.half != 0) return;
    const i64 column = tile * TILE_COLUMNS + lane.thread;
#if IDS
    id[lane.thread] = column < b.k.rows ? b.key_ids[column] : 0;
#endif
#if FACTORS
    factor[lane.thread] = column < b.k.rows ? b.k.factor[column] : 0;
#endif
#if LIMITS == 2
    limit[in_slices(lane.thread)] = column < b.k.rows ? b.column_limits[column] : 0;
#endif
#if BIAS
    bias[in_slices(lane.thread)] = column < b.k.rows ? b.column_bias[column] : 0;
#endif
  }
};

// Column of x[4 j + e] in the tile.
__device__ __forceinline__ int column_of(int i, const Lane& lane) {
  return i / 4 * 8 + 2 * lane.t + i % 2;
}

// This thread's four columns of a slice.
struct SliceColumns {
  float limit[4], bias[4];

  __device__ __forceinline__ SliceColumns(const Columns& columns, int s, const Lane& lane) {
#if LIMITS == 2
    *(float4*)limit = *(const float4*)(columns.limit + 16 * s + 4 * lane.t);
#endif
#if BIAS
    *(float4*)bias = *(const float4*)(columns.bias + 16 * s + 4 * lane.t);
#endif
  }
};

// Of x[i] in a slice: whether the softmax of its row, and of its column, has the pair; and the product with the
// biases of the pair. (With LIMITS 1, `prepare` has excluded what the rows do not have.)
__device__ __forceinline__ bool in_row(float x, int i, const Rows& rows) {
#if LIMITS == 2
  return !(x > rows.limit[i / 2 % 2]);
#else
  return true;
#endif
}
__device__ __forceinline__ bool in_column(float x, int i, const SliceColumns& columns) {
#if LIMITS == 2
  return !(x > columns.limit[i / 4 % 2 * 2 + i % 2]);
#else
  return true;
#endif
}
__device__ __forceinline__ float biased(float x, int i, const Rows& rows, const SliceColumns& columns) {
#if BIAS == 2
  return x + (rows.bias[i / 2 % 2] + columns.bias[i / 4 % 2 * 2 + i % 2]);
#elif BIAS
  return x + columns.bias[i / 4 % 2 * 2 + i % 2];
#else
  return x;
#endif
}

// sum += e, if the softmax of the row has x[i].
__device__ __forceinline__ void add_to_row(float& sum, float e, float x, int i, const Rows& rows) {
#if LIMITS == 2
  add_up_to(sum, e, x, rows.limit[i / 2 % 2]);
#else
  sum += e;
#endif
}
// What the softmax of their column has of two pairs: e0 of x0 = x[i], e1 of x1 eight rows below.
__device__ __forceinline__ float sum_of_column(float e0, float e1, float x0, float x1, int i,
                                               const SliceColumns& columns) {
#if LIMITS == 2
  const float limit = columns.limit[i / 4 % 2 * 2 + i % 2];
  float sum = 0;
  add_up_to(sum, e0, x0, limit);
  add_up_to(sum, e1, x1, limit);
  return sum;
#else
  return e0 + e1;
#endif
}

// The largest of this thread's products in the first or the second of its rows, with biases; LOW if the row's
// softmax has none of them.
__device__ __forceinline__ float largest(const float (&x)[64], int h, const Rows& rows, const Columns& columns,
                                         const Lane& lane) {
  float high = LOW;
#pragma unroll
  for (int s = 0; s < SLICES; ++s) {
    const SliceColumns slice(columns, s, lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = 8 * s + k / 2 * 4 + 2 * h + k % 2;
      const float y = in_row(x[i], i, rows) ? biased(x[i], i, rows, slice) : EXCLUDED;
      high = i == 2 * h ? y : fmaxf(high, y);
    }
  }
  return or_low(high);
}

// The products of positives in columns `at` of the tile, of this thread's two rows, become EXCLUDED. They
// are handed to `take(h, x)`, where h is 0 or 1 for its first or second row.
template <class Take>
__device__ __forceinline__ void set_aside(float (&x)[64], const int (&at)[2], const Lane& lane, Take take) {
  const bool met[2] = {(u32)at[0] < TILE_COLUMNS, (u32)at[1] < TILE_COLUMNS};
  if (!__any_sync(ALL_LANES, met[0] || met[1])) return;
  float value[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (column_of(i, lane) == at[i / 2 % 2]) {
      value[i / 2 % 2] = x[i];
      x[i] = EXCLUDED;
    }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (met[h] && at[h] % 8 / 2 == lane.t) take(h, value[h]);
}

// Raw products of a tile become products of unit rows. A positive's product is handed to `take(number of
// the pair in b.positives, x)`. It becomes EXCLUDED then, like everything that is not in the sums: padding,
// i = j where symmetric, equal ids, above the only limit.
template <class Take>
__device__ __forceinline__ void prepare(float (&x)[64], const Rows& rows, const Columns& columns,
                                        const Block& b, int panel, int tile, const Lane& lane,
                                        Take take) {
#if FACTORS
#pragma unroll
  for (int i = 0; i < 64; ++i)
    x[i] *= rows.factor[i / 2 % 2] * columns.factor[column_of(i, lane)];
#endif
  const int first = tile * TILE_COLUMNS;
  const i64 each = b.positives_of_row();
  for (i64 number = 0; number < each; ++number) {
    int at[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.row_of(panel, h);
      at[h] = rows.positive[h] - first;
      if (SETS && row < b.q.rows) at[h] = Rows::column(b, b.positives[row * each + number]) - first;
    }
    set_aside(x, at, lane, [&](int h, float value) {
      take(lane.row_of(panel, h) * each + number, value);
    });
  }
#if IDS
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (rows.id[i / 2 % 2] == columns.id[column_of(i, lane)]) x[i] = EXCLUDED;
#endif
#if LIMITS == 1
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (x[i] > rows.limit[i / 2 % 2]) x[i] = EXCLUDED;
#endif
  const int diagonal = rows.diagonal - first;
  const bool crossed = diagonal > -PANEL_ROWS && diagonal < TILE_COLUMNS;
  if (!crossed && first + TILE_COLUMNS <= rows.end) return;
  int end[2], itself[2];  // columns from `end` on are outside
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool inside = lane.row_of(panel, h) < b.q.rows;
    end[h] = inside ? (int)min(b.k.rows - first, (i64)TILE_COLUMNS) : 0;
    itself[h] = crossed ? diagonal + lane.row() + 8 * h : -1;
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int column = column_of(i, lane);
    if (column >= end[i / 2 % 2] || column == itself[i / 2 % 2]) x[i] = EXCLUDED;
  }
}
