// From the products of a sweep's tile to the logits that are in the sums: all but positives, padding, the diagonal if
// queries are keys, and pairs that options leave out (`prepare`). tiled/tile.cuh does the same for portable kernels.
// Called by the epilogues, with `x`: this thread's 64 products of the tile (Lane in layout.cuh says which).
#pragma once
#include "sm90/sweep/sweep.cuh"

// The values of a thread's two rows of a query tile, in registers. h = 0 is the first row, h = 1 the second.
struct Rows : Options::RowValues<2> {
  int positive[2];  // column of the positive in the block, or -1; with SETS, `prepare` looks up all positives
  int diagonal;     // if queries are keys, the column of the query tile's first row; otherwise a number far away
  // Tiles that end at or before this column have no padding: the block's number of columns, or 0 if the query tile has
  // rows beyond the block
  int unpadded_columns;
#if NORM_FACTORS
  float factor[2];  // norm factors
#endif
#if GUIDE
  u32 row_marks[2], column_marks[2];  // the words of a guide's marks for this thread's columns of the current tile
#endif
  __device__ __forceinline__ void load(const Block& b, int query_tile, const Lane& lane) {
    const i64 first_own_column = b.first_row + (i64)query_tile * QUERY_TILE_ROWS - b.first_column;
    const int far = 1 << 30;  // beyond all columns of a block
    diagonal = warp_uniform(
        b.symmetric && first_own_column > -far && first_own_column < far ? (int)first_own_column : far);
    unpadded_columns = warp_uniform((i64)(query_tile + 1) * QUERY_TILE_ROWS <= b.q.rows ? (int)b.k.rows : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(query_tile, h);
      const bool inside = row < b.q.rows;
      positive[h] = inside && !SETS ? column(b, b.positives[row]) : -1;
#if NORM_FACTORS
      factor[h] = inside ? b.q.factor[row] : 0;
#endif
      Options::copy_rows(*this, b, [&](auto& to, auto from) {
        constexpr int each = sizeof(to) / sizeof(to[0]) / 2;  // values of a row
#pragma unroll
        for (int k = 0; k < each; ++k) to[h * each + k] = inside ? from[row * each + k] : 0;
      });
    }
  }
  // Loads the marks of a guide for a tile, if there is a guide.
  __device__ __forceinline__ void load_marks(const Block& b, int query_tile, int tile, const Lane& lane) {
#if GUIDE
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(query_tile, h);
      const i64 word = mark_word(b.mark_rows, row, (i64)tile * TILE_COLUMNS + 2 * lane.t);
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
  // The column of a key of the whole matrix in the block, or -1 if the block does not have the key.
  __device__ __forceinline__ static int column(const Block& b, i64 key) {
    const i64 at = key - b.first_column;
    return at >= 0 && at < b.k.rows ? (int)at : -1;
  }
};

// Where the value of a tile's column is in shared memory. In this order, the values of a thread's four columns of a
// slice are contiguous: of the 16 columns of a slice, column 8 j + 2 t + e is at position 4 t + 2 j + e.
__device__ __forceinline__ int find_slice_position(int column) {
  const int i = column % 16;
  return column - i + i % 8 / 2 * 4 + i / 8 * 2 + i % 2;
}

// The values of the columns of a consumer's tile, in shared memory. Values of 8 bytes, such as ids, and norm factors
// are in the order of the columns. Other values of 4 bytes are in the order of `find_slice_position`.
struct Columns : Options::ColumnValues<TILE_COLUMNS> {
#if NORM_FACTORS
  alignas(8) float factor[TILE_COLUMNS];  // norm factors
#endif
  // One of the consumer's warpgroups writes the values, one column for each thread. A barrier has to follow.
  __device__ __forceinline__ void publish(const Block& b, i64 tile, const Lane& lane) {
    if (lane.half != 0) return;
    const i64 column = tile * TILE_COLUMNS + lane.thread;
    const bool inside = column < b.k.rows;
#if NORM_FACTORS
    factor[lane.thread] = inside ? b.k.factor[column] : 0;
#endif
    Options::copy_columns(*this, b, [&](auto& to, auto from) {
      constexpr int each = sizeof(to) / sizeof(to[0]) / TILE_COLUMNS;  // values of a column
      const int position = sizeof(to[0]) == 8 ? lane.thread : find_slice_position(lane.thread);
#pragma unroll
      for (int k = 0; k < each; ++k) to[position * each + k] = inside ? from[column * each + k] : 0;
    });
  }
};

// The column of this thread's x[i] in the tile. Its row is number h = i / 2 % 2 of the thread's two.
__device__ __forceinline__ int get_column(int i, const Lane& lane) {
  return i / 4 * 8 + 2 * lane.t + i % 2;
}

// The values of this thread's four columns of slice `s`, in registers.
struct SliceColumns : Options::ColumnValues<4> {
  __device__ __forceinline__ SliceColumns(const Columns& columns, int s, const Lane& lane) {
    Options::copy_columns(*this, columns, [&](auto& to, auto& from) {
#pragma unroll
      for (int i = 0; i < sizeof(to) / 16; ++i)
        ((float4*)to)[i] = ((const float4*)(from + 16 * s + 4 * lane.t))[i];
    });
  }
};

// The pair of x[i], whose column is in the slice of `columns`.
__device__ __forceinline__ auto get_pair(int i, const Rows& rows, const SliceColumns& columns) {
  return Pair<Rows, SliceColumns>{rows.marks(i), rows, columns, i / 2 % 2, i / 4 % 2 * 2 + i % 2};
}

// The largest exponent of this thread's pairs in its row h, in the unit of products; LOW if the row's softmax has none
// of these pairs. The caller takes the largest over the four threads of a row.
__device__ __forceinline__ float find_largest_exponent(const float (&x)[64], int h, const Rows& rows,
                                                       const Columns& columns, const Lane& lane) {
  float high = LOW;
#pragma unroll
  for (int s = 0; s < TILE_SLICES; ++s) {
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

// Each of `sums` becomes the sum over the four lanes that share a row.
template <class... T>
__device__ __forceinline__ void add_over_lanes(T&... sums) {
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) ((sums += __shfl_xor_sync(ALL_LANES, sums, lanes)), ...);
}

// The positive of this thread's row h is in column `positive_column[h]` of the tile, or outside of the tile. In the
// thread that has its product, the product is handed to `take(h, product)`, and becomes EXCLUDED.
template <class Take>
__device__ __forceinline__ void set_aside_positives(float (&x)[64], const int (&positive_column)[2], const Lane& lane,
                                                    Take take) {
  const bool in_tile[2] = {(u32)positive_column[0] < TILE_COLUMNS, (u32)positive_column[1] < TILE_COLUMNS};
  if (!__any_sync(ALL_LANES, in_tile[0] || in_tile[1])) return;
  float product[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (get_column(i, lane) == positive_column[i / 2 % 2]) {
      product[i / 2 % 2] = x[i];
      x[i] = EXCLUDED;
    }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (in_tile[h] && positive_column[h] % 8 / 2 == lane.t) take(h, product[h]);
}

// normalize=True: products of features become products of unit rows, by the norm factors of row and column.
__device__ __forceinline__ void apply_norm_factors(float (&x)[64], const Rows& rows, const Columns& columns,
                                                   const Lane& lane) {
#if NORM_FACTORS
#pragma unroll
  for (int i = 0; i < 64; ++i)
    x[i] *= rows.factor[i / 2 % 2] * columns.factor[get_column(i, lane)];
#endif
}

// Called first by all epilogues except those of guides and of distillation. In this order:
//   1. Norm factors are applied (`apply_norm_factors`).
//   2. `take(index, product)` gets each positive of the tile, with its index in b.positives.
//   3. The products of pairs in neither softmax become EXCLUDED: positives, pairs that options mask, padding, and
//      i = j if queries are keys. Pairs that options leave out of one softmax only (SPLITS) stay.
template <class Take>
__device__ __forceinline__ void prepare(float (&x)[64], const Rows& rows, const Columns& columns,
                                        const Block& b, int query_tile, int tile, const Lane& lane,
                                        Take take) {
  apply_norm_factors(x, rows, columns, lane);
  const int first_column = tile * TILE_COLUMNS;
  const i64 set_size = b.positives_of_row();  // 1 without SETS
  for (i64 number = 0; number < set_size; ++number) {
    int positive_column[2];  // in the tile
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(query_tile, h);
      positive_column[h] = rows.positive[h] - first_column;
      if (SETS && row < b.q.rows)
        positive_column[h] = Rows::column(b, b.positives[row * set_size + number]) - first_column;
    }
    set_aside_positives(x, positive_column, lane, [&](int h, float product) {
      take(lane.get_row(query_tile, h) * set_size + number, product);
    });
  }
  if (Options::MASKS)
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      Options::exclude_in_sweep(
          x[i], Pair<Rows, Columns>{rows.marks(i), rows, columns, i / 2 % 2, get_column(i, lane)});
    }
  const int diagonal = rows.diagonal - first_column;  // of the query tile's first row, in the tile
  const bool has_diagonal = diagonal > -QUERY_TILE_ROWS && diagonal < TILE_COLUMNS;
  if (!has_diagonal && first_column + TILE_COLUMNS <= rows.unpadded_columns) return;  // as most tiles
  // For each row: columns from `end` on are padding. If queries are keys, `own_column` is the column of the row itself
  int end[2], own_column[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool inside = lane.get_row(query_tile, h) < b.q.rows;
    end[h] = inside ? (int)min(b.k.rows - first_column, (i64)TILE_COLUMNS) : 0;
    own_column[h] = has_diagonal ? diagonal + lane.row() + 8 * h : -1;
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int column = get_column(i, lane);
    if (column >= end[i / 2 % 2] || column == own_column[i / 2 % 2]) x[i] = EXCLUDED;
  }
}
