// Portable kernels, third part: functions for epilogues, which turn the products of a tile into sums or a gradient
// block. Vectors of the tile's rows and columns, excluded pairs, positives, sums over lanes, and the writing of
// gradient blocks.
#pragma once
#include "tiled/product.cuh"

// Values of the tile's rows and columns in shared memory, which `prepare` copies.
struct TileShared {
  i64 positive[BLOCK_M];  // key of the row's positive, in the whole matrix; unused with SETS
  Real row_factor[BLOCK_M], column_factor[BLOCK_N];  // NORM_FACTORS: factors that normalise rows (rows.cuh)
  Options::RowValues<BLOCK_M> rows;
  Options::ColumnValues<BLOCK_N> columns;
#if GUIDE
  u32 row_marks[4 * BLOCK_M];  // four words of each row: the marks of the group of columns that the tile lies in
  int first_marked;            // the tile's first column, from the first column of this group on
  u32 column_marks[GUIDE == 2 ? 4 * BLOCK_M : 1];
#endif

  // The pair of a row and a column of the tile, as options take it.
  __device__ __forceinline__ auto pair(int row, int column) const {
    return Pair<Options::RowValues<BLOCK_M>, Options::ColumnValues<BLOCK_N>>{marks(row, column), rows,
                                                                               columns, row, column};
  }
  __device__ __forceinline__ Marks marks(int row, int column) const {
#if GUIDE
    const int word = 4 * row + column / 2 % 4, bit = mark_bit((BLOCK_N == MARKED_COLUMNS ? 0 : first_marked) + column);
    return Marks(row_marks[word], GUIDE == 2 ? column_marks[word] : ALL_MARKED, bit);
#else
    return {};
#endif
  }
};

// Starts to copy the values of N rows or columns, of which the first `existing` exist; zeros stand for the others.
template <int N, class T>
__device__ __forceinline__ void fetch(T (&to)[N], const T* from, i64 existing) {
  for (int i = threadIdx.x; i < N; i += TILED_THREADS)
    cp_async_number(&to[i], i < existing ? from + i : from, i < existing);
}

// Starts to copy the values that the epilogue of tile t needs. They arrive while the tile is multiplied: tile_product
// waits for them.
__device__ __forceinline__ void prepare(TileShared& s, const Block& b, const Tile& t) {
  __syncthreads();  // all epilogues have read the values of the last tile before these copies
  const i64 rows = b.q.rows - t.row, columns = b.k.rows - t.column;  // of the block, from this tile on
  if (!SETS) fetch(s.positive, b.positives + t.row, rows);
  if (NORM_FACTORS) {
    fetch(s.row_factor, b.q.factor + t.row, rows);
    fetch(s.column_factor, b.k.factor + t.column, columns);
  }
  Options::copy_rows(s.rows, b, [&](auto& to, auto from) {
    constexpr int each = sizeof(to) / sizeof(to[0]) / BLOCK_M;  // values of a row
    fetch(to, from + t.row * each, rows * each);
  });
  Options::copy_columns(s.columns, b, [&](auto& to, auto from) {
    constexpr int each = sizeof(to) / sizeof(to[0]) / BLOCK_N;
    fetch(to, from + t.column * each, columns * each);
  });
#if GUIDE
  const i64 word = mark_word(b.mark_rows, t.row, t.column);
  s.first_marked = (int)(t.column % MARKED_COLUMNS);
  fetch(s.row_marks, b.row_marks + word, 4 * rows);
  if (GUIDE == 2) fetch(s.column_marks, b.column_marks + word, 4 * rows);
#endif
}

// NORM_FACTORS: x_ij *= f_i f_j, so that products of rows s become products of normalised rows (rows.cuh).
__device__ __forceinline__ void apply_norm_factors(Products& x, const TileShared& s, const Position& p) {
  if (!NORM_FACTORS) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < LANE_N; ++j)
      // COMPARES: f_i f_j first, so that x_ij and x_ji are the same number
      if (Options::COMPARES) x[i][j] *= s.row_factor[p.row(i)] * s.column_factor[p.column(j)];
      // Otherwise one factor after the other: the compiler would keep all f_i f_j in registers
      else x[i][j] = x[i][j] * s.row_factor[p.row(i)] * s.column_factor[p.column(j)];
}

// For each positive in the tile: calls `take` with the index of the positive in b.positives and its product, and
// replaces the product by `instead`. Positives are kept out of sums and gradient blocks, because other kernels add them
// in full precision afterwards: `finalize` or sigmoid_positives (vectors/) to losses, and `finish` to gradients.
template <typename Take>
__device__ __forceinline__ void set_aside_positives(Products& x, const TileShared& s, const Block& b,
                                                    const Tile& t, const Position& p, Real instead,
                                                    Take take) {
  const i64 first = b.first_column + t.column, set_size = b.positives_of_row();
  for (i64 number = 0; number < set_size; ++number) {  // positive `number` of each row
    const auto pair = [&](int row) { return (t.row + row) * set_size + number; };  // its index in b.positives
    const auto column = [&](int row) {  // its column in the tile; outside of 0 .. BLOCK_N - 1 if it is in another tile
      if (!SETS) return s.positive[row] - first;
      return t.row + row < b.q.rows ? b.positives[pair(row)] - first : -1;
    };
    // Most tiles have no positive, and this test is all that they cost
    bool any = false;
#pragma unroll
    for (int r = 0; r < WARP_M; r += 32)
      any |= (u64)column(p.warp_m * WARP_M + r + p.lane) < BLOCK_N;
    if (!__any_sync(ALL_LANES, any)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const i64 at = column(p.row(i));
      if (t.row + p.row(i) >= b.q.rows || at < 0 || at >= b.k.rows - t.column || at >= BLOCK_N) continue;
      bool has_positive = false;
      Real positive = 0;
#pragma unroll
      for (int j = 0; j < LANE_N; ++j)
        if ((int)at == p.column(j)) {
          has_positive = true;
          positive = x[i][j];
          x[i][j] = instead;
        }
      if (has_positive) take(pair(p.row(i)), positive);
    }
  }
}

// Replaces the products of pairs that are in no softmax by EXCLUDED, which changes no maximum and no sum: padding after
// the last row or column, i = j if queries are keys, and pairs that options exclude.
__device__ __forceinline__ void exclude_pairs(Products& x, const TileShared& s, const Block& b, const Tile& t,
                                              const Position& p) {
  const int rows = (int)min((i64)BLOCK_M, b.q.rows - t.row);
  const int columns = (int)min((i64)BLOCK_N, b.k.rows - t.column);
  const i64 diagonal = b.first_row + t.row - b.first_column - t.column;  // column - row on the diagonal
  const bool has_diagonal = b.symmetric && diagonal > -BLOCK_M && diagonal < BLOCK_N;
  if (!Options::MASKS && !Options::SPLITS && !has_diagonal && rows == BLOCK_M && columns == BLOCK_N) return;
  // column - row of excluded pairs; BLOCK_N, which no pair has, if the tile has no diagonal
  const int excluded_distance = has_diagonal ? (int)diagonal : BLOCK_N;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) {
      const int r = p.row(i), c = p.column(j);
      if (r >= rows || c >= columns || c - r == excluded_distance) x[i][j] = EXCLUDED;
      Options::exclude_in_tile(x[i][j], s.pair(r, c));
    }
}

// --- over the 4 lanes that share a row, or the 8 lanes that share a column; each gets the result -------------

__device__ __forceinline__ Real row_sum(Real x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ Real row_max(Real x) {
  x = max_(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return max_(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ __forceinline__ Real column_max(Real x) {
  x = max_(x, __shfl_xor_sync(ALL_LANES, x, 4));
  x = max_(x, __shfl_xor_sync(ALL_LANES, x, 8));
  return max_(x, __shfl_xor_sync(ALL_LANES, x, 16));
}
__device__ __forceinline__ Real column_sum(Real x) {
  x += __shfl_xor_sync(ALL_LANES, x, 4);
  x += __shfl_xor_sync(ALL_LANES, x, 8);
  return x + __shfl_xor_sync(ALL_LANES, x, 16);
}

// --- gradient blocks --------------------------------------------------------------------------------------

// The factors of gradient blocks (struct Factors) for the tile's rows and columns.
struct FactorsShared {
  Real row_reference[BLOCK_M], a[BLOCK_M], u[BLOCK_M];
  Real column_reference[BLOCK_N], v[BLOCK_N];
};

__device__ __forceinline__ void prepare(FactorsShared& s, const Factors& f, const Block& b,
                                        const Tile& t) {
  const i64 rows = b.q.rows - t.row, columns = b.k.rows - t.column;
  fetch(s.row_reference, f.row_reference + t.row, rows);
  fetch(s.a, f.a + t.row, rows);
  if (!COLUMNS) return;
  fetch(s.u, f.u + t.row, rows);
  fetch(s.column_reference, f.column_reference + t.column, columns);
  fetch(s.v, f.v + t.column, columns);
}

#if PRECISION >= BF16X3
// Writes this lane's elements of a row of a gradient block, 8 bytes at a time, so that the four lanes of a row fill
// sectors of 32 bytes. A word has two 16-bit elements. Of two groups of 8 columns, two neighbouring lanes have a word
// each. They exchange words: an even lane writes two words of the first group, and an odd lane two words of the second.
__device__ __forceinline__ void store_words(Element* row, const u32 (&w)[LANE_N / 2], i64 columns,
                                            const Position& p) {
  const bool odd = p.t & 1;
#pragma unroll
  for (int n = 0; n < LANE_N / 2; n += 2) {
    const u32 received = __shfl_xor_sync(ALL_LANES, odd ? w[n] : w[n + 1], 1);
    const int column = p.warp_n * WARP_N + (n + (odd ? 1 : 0)) * 8 + (p.t & 2) * 2;
    const uint2 words = odd ? make_uint2(received, w[n + 1]) : make_uint2(w[n], received);
    if (row && column < columns) *(uint2*)(row + column) = words;
  }
}
#endif

// Writes P, the tile x, to the gradient block, rounded to the type of operands. With two PARTS, x is changed.
__device__ __forceinline__ void store_gradient_block(Products& x, const GradientBlock& out,
                                                     const Block& b, const Tile& t,
                                                     const Position& p) {
  // Columns that may be written: of the matrix, and padding up to the next part or row
  const i64 columns = (PARTS > 1 ? out.part : out.stride) - t.column;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const i64 r = t.row + p.row(i);
    Element* row = r < b.q.rows ? out.data + r * out.stride + t.column : nullptr;
#if PRECISION >= BF16X3
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      u32 w[LANE_N / 2];
#pragma unroll
      for (int n = 0; n < LANE_N / 2; ++n) {
        Real &x0 = x[i][2 * n], &x1 = x[i][2 * n + 1];
        w[n] = round_pair(x0, x1);
      }
      store_words(row ? row + part * out.part : nullptr, w, columns, p);
    }
#else
#pragma unroll
    for (int n = 0; n < LANE_N / 2; ++n) {
      Real2 pair = real2(x[i][2 * n], x[i][2 * n + 1]);
#if PRECISION == TF32
      pair.x = __uint_as_float(to_tf32(__float_as_uint(pair.x)));
      pair.y = __uint_as_float(to_tf32(__float_as_uint(pair.y)));
#endif
      if (row && p.column(2 * n) < columns) *(Real2*)(row + p.column(2 * n)) = pair;
    }
#endif
  }
}
