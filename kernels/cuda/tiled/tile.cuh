// One tile of logits: which one a block has, and which of its pairs do not count.
#pragma once
#include "tiled/product.cuh"

struct Tile {
  i64 m, n;         // which tile
  i64 row, column;  // its first, in the block
};

// Neighbouring thread blocks take tiles from the same few row panels, so that both operands' rows
// are in the L2 cache when several want them.
__device__ __forceinline__ Tile locate(const Block& b) {
  constexpr i64 ROW_TILES = 16;
  const i64 per_group = ROW_TILES * b.column_tiles;
  const i64 group = blockIdx.x / per_group, rest = blockIdx.x % per_group;
  const i64 left = b.row_tiles - group * ROW_TILES, rows_here = left < ROW_TILES ? left : ROW_TILES;
  Tile t;
  t.m = group * ROW_TILES + rest % rows_here;
  t.n = rest / rows_here;
  t.row = t.m * BLOCK_M;
  t.column = t.n * BLOCK_N;
  return t;
}

// Shared memory beside the product's stages.
struct TileShared {
  int positive[BLOCK_M];  // column of the row's positive in this tile, or -1
  i64 row_id[BLOCK_M], column_id[BLOCK_N];
  Real row_factor[BLOCK_M], column_factor[BLOCK_N];
};

// Fetch what the epilogue will need, ahead of the product. True if the tile has positives.
__device__ __forceinline__ bool prepare(TileShared& s, const Block& b, const Tile& t) {
  bool any = false;
  for (int r = threadIdx.x; r < BLOCK_M; r += TILED_THREADS) {
    const i64 row = t.row + r;
    const bool inside = row < b.q.rows;
    i64 at = inside ? b.positives[row] - b.first_column - t.column : -1;
    if (at < 0 || at >= BLOCK_N || t.column + at >= b.k.rows) at = -1;
    s.positive[r] = (int)at;
    any |= at >= 0;
    if (b.query_ids) s.row_id[r] = inside ? b.query_ids[row] : 0;
    if (b.q.factor) s.row_factor[r] = inside ? b.q.factor[row] : 0;
  }
  for (int c = threadIdx.x; c < BLOCK_N; c += TILED_THREADS) {
    const i64 column = t.column + c;
    const bool inside = column < b.k.rows;
    if (b.key_ids) s.column_id[c] = inside ? b.key_ids[column] : 0;
    if (b.k.factor) s.column_factor[c] = inside ? b.k.factor[column] : 0;
  }
  return __syncthreads_or(any);  // also: the writes to `s` come before the epilogue's reads
}

// x_ij *= f_i f_j: raw products to products of unit rows.
__device__ __forceinline__ void apply_factors(Real (&x)[8][8], const TileShared& s, const Block& b,
                                              const Position& p) {
  if (!b.q.factor) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
      x[i][j] *= s.row_factor[p.row(i)] * s.column_factor[p.column(j)];
}

// Hand each positive's product of the tile to `take(row in the tile, x)`, whose result replaces it.
template <typename Take>
__device__ __forceinline__ void at_positives(Real (&x)[8][8], const TileShared& s,
                                             const Position& p, Take take) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = s.positive[p.row(i)];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (at == p.column(j)) x[i][j] = take(p.row(i), x[i][j]);
  }
}

// Everything that is no pair becomes `low`: padding, i = j where symmetric, equal ids. It thus enters
// no maximum and no sum.
__device__ __forceinline__ void exclude(Real (&x)[8][8], const TileShared& s, const Block& b,
                                        const Tile& t, const Position& p, Real low = LOW) {
  if (b.query_ids) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (s.row_id[p.row(i)] == s.column_id[p.column(j)]) x[i][j] = low;
  }
  const i64 rows = b.q.rows - t.row, columns = b.k.rows - t.column;
  const i64 diagonal = b.first_row + t.row - b.first_column - t.column;  // column - row there
  const bool crossed = b.symmetric && diagonal > -BLOCK_M && diagonal < BLOCK_N;
  if (!crossed && rows >= BLOCK_M && columns >= BLOCK_N) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int r = p.row(i), c = p.column(j);
      if (r >= rows || c >= columns || (crossed && c - r == diagonal)) x[i][j] = low;
    }
}

// --- over lanes that share a row (4 of them) or a column (8) --------------------------------------------

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

// --- panels of dL/dx --------------------------------------------------------------------------------------

#if PRECISION >= BF16X3
// One row's eight elements of this lane, in 8-byte pieces that fill 32-byte sectors: of two column
// groups, even lanes take both words of the first, odd lanes of the second.
__device__ __forceinline__ void store_words(Element* row, const u32 (&w)[4], i64 columns,
                                            const Position& p) {
  const bool odd = p.t & 1;
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    const u32 received = __shfl_xor_sync(ALL_LANES, odd ? w[n] : w[n + 1], 1);
    const int column = p.warp_n * 32 + (n + (odd ? 1 : 0)) * 8 + (p.t & 2) * 2;
    const uint2 words = odd ? make_uint2(received, w[n + 1]) : make_uint2(w[n], received);
    if (row && column < columns) *(uint2*)(row + column) = words;
  }
}
#endif

// Write the tile; `x` is ruined.
__device__ __forceinline__ void store_gradient_panel(Real (&x)[8][8], const GradientPanel& out,
                                                     const Block& b, const Tile& t,
                                                     const Position& p) {
  // padding up to the stride, or to the next part, may be written
  const i64 columns = (PARTS > 1 ? out.part : out.stride) - t.column;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const i64 r = t.row + p.row(i);
    Element* row = r < b.q.rows ? out.data + r * out.stride + t.column : nullptr;
#if PRECISION >= BF16X3
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      u32 w[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        Real &x0 = x[i][2 * n], &x1 = x[i][2 * n + 1];
        w[n] = round_pair(x0, x1);
      }
      store_words(row ? row + part * out.part : nullptr, w, columns, p);
    }
#else
#pragma unroll
    for (int n = 0; n < 4; ++n) {
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
