// The logits of a sweep's tile that are in the sums: all but positives, padding, the diagonal if queries are keys,
// and pairs that options leave out. tiled/tile.cuh does the same for tiled kernels.
#pragma once
#include "sm90/sweep/sweep.cuh"

// The numbers of a thread's two rows of a query tile.
struct Rows : Options::RowNumbers<2> {
  int positive[2];  // column of the positive in the block, or -1; with SETS, `prepare` looks up all positives
  int diagonal;     // if queries are keys, the column of the query tile's first row; else a number far away
  int end;          // number of columns of the block; 0 if rows of the query tile are outside of the block
#if FACTORS
  float factor[2];
#endif
#if GUIDE
  u32 row_marks[2], column_marks[2];  // words of the current tile
#endif
  __device__ __forceinline__ void load(const Block& b, int query_tile, const Lane& lane) {
    const i64 own_column = b.first_row + (i64)query_tile * QUERY_TILE_ROWS - b.first_column;
    const int far = 1 << 30;  // beyond all columns of a block
    diagonal = warp_uniform(b.symmetric && own_column > -far && own_column < far ? (int)own_column : far);
    end = warp_uniform((i64)(query_tile + 1) * QUERY_TILE_ROWS <= b.q.rows ? (int)b.k.rows : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(query_tile, h);
      const bool inside = row < b.q.rows;
      positive[h] = inside && !SETS ? column(b, b.positives[row]) : -1;
#if FACTORS
      factor[h] = inside ? b.q.factor[row] : 0;
#endif
      Options::copy_rows(*this, b, [&](auto& to, auto from) { to[h] = inside ? from[row] : 0; });
    }
  }
  // Loads the marks of a guide for a tile.
  __device__ __forceinline__ void load_marks(const Block& b, int query_tile, int tile, const Lane& lane) {
#if GUIDE
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(query_tile, h);
      const i64 word = mark_word(b.q.rows, row, (i64)tile * TILE_COLUMNS + 2 * lane.t);
      row_marks[h] = row < b.q.rows ? b.row_marks[word] : 0;
      column_marks[h] = GUIDE == 1 ? ALL_MARKED : row < b.q.rows ? b.column_marks[word] : 0;
    }
#endif
  }
  // The marks of the pair of x[i], in the tile that `load_marks` has loaded.
  __device__ __forceinline__ Marks marks(int i) const {
#if GUIDE
    const int h = i / 2 % 2;
    return Marks(row_marks[h], column_marks[h], mark_bit(i / 4 * 8 + i % 2));
#else
    return {};
#endif
  }
  // The column of a key in the block, or -1.
  __device__ __forceinline__ static int column(const Block& b, i64 key) {
    const i64 at = key - b.first_column;
    return at >= 0 && at < b.k.rows ? (int)at : -1;
  }
};

// Position of a column's number in shared memory. The order makes the numbers of a thread's slice contiguous.
__device__ __forceinline__ int in_slices(int column) {
  const int i = column % 16;  // 8 j + 2 t + e -> 4 t + 2 j + e
  return column - i + i % 8 / 2 * 4 + i / 8 * 2 + i % 2;
}

// The numbers of the columns of a consumer's tile, in shared memory. Those of 8 bytes, which masks have, are in
// the order of the columns. Those of 4 bytes are in the order of `in_slices`.
struct Columns : Options::ColumnNumbers<TILE_COLUMNS> {
#if FACTORS
  alignas(8) float factor[TILE_COLUMNS];
#endif
  // By one of the consumer's warpgroups.
  __device__ __forceinline__ void publish(const Block& b, i64 tile, const Lane& lane) {
    if (lane.half != 0) return;
    const i64 column = tile * TILE_COLUMNS + lane.thread;
    const bool inside = column < b.k.rows;
#if FACTORS
    factor[lane.thread] = inside ? b.k.factor[column] : 0;
#endif
    Options::copy_columns(*this, b, [&](auto& to, auto from) {
      to[sizeof(to[0]) == 8 ? lane.thread : in_slices(lane.thread)] = inside ? from[column] : 0;
    });
  }
};

// The column of x[i] in the tile.
__device__ __forceinline__ int get_column(int i, const Lane& lane) {
  return i / 4 * 8 + 2 * lane.t + i % 2;
}

// The numbers of this thread's four columns of a slice.
struct SliceColumns : Options::ColumnNumbers<4> {
  __device__ __forceinline__ SliceColumns(const Columns& columns, int s, const Lane& lane) {
    Options::copy_columns(*this, columns, [&](auto& to, auto& from) {
#pragma unroll
      for (int i = 0; i < sizeof(to) / 16; ++i)
        ((float4*)to)[i] = ((const float4*)(from + 16 * s + 4 * lane.t))[i];
    });
  }
};

// The pair of x[i], of which `columns` are the slice.
__device__ __forceinline__ auto get_pair(int i, const Rows& rows, const SliceColumns& columns) {
  return Pair<Rows, SliceColumns>{rows.marks(i), rows, columns, i / 2 % 2, i / 4 % 2 * 2 + i % 2};
}

// The largest of this thread's exponents in the first or the second of its rows; LOW if the row's softmax has
// none of them.
__device__ __forceinline__ float largest(const float (&x)[64], int h, const Rows& rows, const Columns& columns,
                                         const Lane& lane) {
  float high = LOW;
#pragma unroll
  for (int s = 0; s < SLICES; ++s) {
    const SliceColumns slice(columns, s, lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = 8 * s + k / 2 * 4 + 2 * h + k % 2;
      const auto pair = get_pair(i, rows, slice);
      const float y = Options::in_row(x[i], pair) ? Options::exponent(x[i], pair) : EXCLUDED;
      high = i == 2 * h ? y : fmaxf(high, y);
    }
  }
  return or_low(high);
}

// Each sum becomes the sum over the four lanes that share a row.
template <class... T>
__device__ __forceinline__ void add_over_lanes(T&... sums) {
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) ((sums += __shfl_xor_sync(ALL_LANES, sums, lanes)), ...);
}

// The products of positives in columns `at` of the tile, of this thread's two rows, become EXCLUDED. They
// are handed to `take(h, x)`, where h is 0 or 1 for its first or second row.
template <class Take>
__device__ __forceinline__ void set_aside_positives(float (&x)[64], const int (&at)[2], const Lane& lane, Take take) {
  const bool in_tile[2] = {(u32)at[0] < TILE_COLUMNS, (u32)at[1] < TILE_COLUMNS};
  if (!__any_sync(ALL_LANES, in_tile[0] || in_tile[1])) return;
  float value[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (get_column(i, lane) == at[i / 2 % 2]) {
      value[i / 2 % 2] = x[i];
      x[i] = EXCLUDED;
    }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (in_tile[h] && at[h] % 8 / 2 == lane.t) take(h, value[h]);
}

// Raw products of a tile become products of unit rows.
__device__ __forceinline__ void apply_factors(float (&x)[64], const Rows& rows, const Columns& columns,
                                              const Lane& lane) {
#if FACTORS
#pragma unroll
  for (int i = 0; i < 64; ++i)
    x[i] *= rows.factor[i / 2 % 2] * columns.factor[get_column(i, lane)];
#endif
}

// Raw products of a tile become products of unit rows. `take` gets the number of each positive in b.positives, and
// the positive's product. Then the products of positives become EXCLUDED, and so do all pairs that are in neither
// softmax: padding, i = j if queries are keys, and pairs that options mask.
template <class Take>
__device__ __forceinline__ void prepare(float (&x)[64], const Rows& rows, const Columns& columns,
                                        const Block& b, int query_tile, int tile, const Lane& lane,
                                        Take take) {
  apply_factors(x, rows, columns, lane);
  const int first = tile * TILE_COLUMNS;
  const i64 each = b.positives_of_row();
  for (i64 number = 0; number < each; ++number) {
    int at[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(query_tile, h);
      at[h] = rows.positive[h] - first;
      if (SETS && row < b.q.rows) at[h] = Rows::column(b, b.positives[row * each + number]) - first;
    }
    set_aside_positives(x, at, lane, [&](int h, float value) {
      take(lane.get_row(query_tile, h) * each + number, value);
    });
  }
  if (Options::MASKS)
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      Options::mask(x[i], Pair<Rows, Columns>{rows.marks(i), rows, columns, i / 2 % 2, get_column(i, lane)});
    }
  const int diagonal = rows.diagonal - first;
  const bool has_diagonal = diagonal > -QUERY_TILE_ROWS && diagonal < TILE_COLUMNS;
  if (!has_diagonal && first + TILE_COLUMNS <= rows.end) return;
  // Columns from `end` on are outside. If queries are keys, `own_column` is the column of the row itself
  int end[2], own_column[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool inside = lane.get_row(query_tile, h) < b.q.rows;
    end[h] = inside ? (int)min(b.k.rows - first, (i64)TILE_COLUMNS) : 0;
    own_column[h] = has_diagonal ? diagonal + lane.row() + 8 * h : -1;
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int column = get_column(i, lane);
    if (column >= end[i / 2 % 2] || column == own_column[i / 2 % 2]) x[i] = EXCLUDED;
  }
}
