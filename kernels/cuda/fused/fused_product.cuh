// The matrix products of fused.cu, which phases 1 and 4 share: copies of a step from global to shared memory, the
// groups of threads that compute a tile together, and the sums of their results.
#pragma once
#include "fused/fused.cuh"

// The operands of one step of phase 1: CHUNK features of the rows of a tile.
struct Chunks {
  alignas(16) Real q[FUSED_TILE][CHUNK_STRIDE], k[FUSED_TILE][CHUNK_STRIDE];
};

// Loads this thread's elements of a step from global memory to registers: element s is in row s STEP of the column at
// `from`, whose rows are `stride` elements apart. Only `rows` rows exist there; zeros stand for the others.
template <int STEP, class T>
__device__ __forceinline__ void fetch(T (&to)[SHARE], const T* from, i64 stride, int rows) {
  const i64 step = STEP * stride;
#pragma unroll
  for (int s = 0; s < SHARE; ++s, from += step) to[s] = s * STEP < rows ? *from : T(0);
}
// The number of rows, but at most FUSED_TILE.
__device__ __forceinline__ int at_most_tile(i64 rows) {
  return rows < FUSED_TILE ? (int)rows : FUSED_TILE;
}
// The value of element s that `fetch` has loaded, times the inverse norm of its row. `inverse` has the inverse norms of
// `rows` rows, from the row of element 0 on; null: rows are not normalised.
template <int STEP>
__device__ __forceinline__ Real feature(const Element (&z)[SHARE], int s, int rows,
                                        const double* inverse) {
  if (!inverse) return number(z[s]);
  return s * STEP < rows ? (Real)((double)number(z[s]) * inverse[s * STEP]) : 0;
}

// Threads are in groups. Each group multiplies DEPTH of the CHUNK elements of a step, for the whole tile. A thread has
// 8 x 8 results of its group.
constexpr int GROUP_THREADS = 64;
constexpr int GROUPS = FUSED_THREADS / GROUP_THREADS;
constexpr int DEPTH = CHUNK / GROUPS;

// The group of a thread, and the positions of its results in a tile: result (h, v) is in row r + 8 h and column
// get_column(c, v).
struct Place {
  int group, r, c;
};
__device__ __forceinline__ Place place() {
  const int at = threadIdx.x % GROUP_THREADS;
  return {(int)threadIdx.x / GROUP_THREADS, at / 8, at % 8};
}
// Column v of the eight columns of a thread: every eighth column, or (ALONG) runs of 16 bytes, each read at once.
template <bool ALONG>
__device__ __forceinline__ int get_column(int c, int v) {
  return ALONG ? (c + v / VECTOR_WIDTH * 8) * VECTOR_WIDTH + v % VECTOR_WIDTH : c + 8 * v;
}

// Results of a tile in shared memory, with padding against bank conflicts
typedef Real SumTile[FUSED_TILE][FUSED_TILE + VECTOR_WIDTH];
constexpr int SUM_TILES = PRECISION == FP64 ? 1 : 2;  // tiles of results for which shared memory has room

// Adds up the results x of all groups in `tiles`, in rounds: in each round, one group writes or adds to each tile.
// `total` then adds the tiles.
template <bool ALONG>
__device__ __forceinline__ void add_groups(const Real (&x)[8][8], const Place& at,
                                           SumTile (&tiles)[SUM_TILES]) {
  constexpr int TOGETHER = ALONG ? VECTOR_WIDTH : 1;
  SumTile& tile = tiles[at.group % SUM_TILES];
  for (int round = 0; round < GROUPS / SUM_TILES; ++round) {
    // Round 0: all reads of the operands, which share this memory, come before the writes of sums. Later rounds:
    // the writes of the round before come before the reads of this round
    __syncthreads();
    if (at.group / SUM_TILES != round) continue;
#pragma unroll
    for (int h = 0; h < 8; ++h)
#pragma unroll
      for (int v = 0; v < 8; v += TOGETHER) {
        Real* here = &tile[at.r + 8 * h][get_column<ALONG>(at.c, v)];
        Vector sum;
        if (round > 0) {
          if (ALONG) sum.bits = *(const uint4*)here;
          else sum.z[0] = *here;
        }
#pragma unroll
        for (int e = 0; e < TOGETHER; ++e) sum.z[e] = round > 0 ? sum.z[e] + x[h][v + e] : x[h][v + e];
        if (ALONG) *(uint4*)here = sum.bits;
        else *here = sum.z[0];
      }
  }
  __syncthreads();  // the writes of sums come before their reads by `total`
}
// The sum of the results of all groups, at one position of the tile.
__device__ __forceinline__ Real total(const SumTile (&tiles)[SUM_TILES], int row, int column) {
  const Real first = tiles[0][row][column];
  return SUM_TILES == 1 ? first : first + tiles[SUM_TILES - 1][row][column];
}

// The operands of one step of phase 4: CHUNK rows of the other side.
struct Product {
  alignas(16) Real p[FUSED_TILE][CHUNK_STRIDE];  // P: rows that get the gradient x rows of the other side
  alignas(16) Real z[CHUNK][FUSED_TILE];         // features of the rows of the other side
};

// Shared memory of a tile. Steps alternate between two buffers; sums come after the last step.
union Shared {
  Chunks chunks[2];
  Product products[2];
  SumTile sums[SUM_TILES];
};
