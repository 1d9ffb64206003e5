// Products of fused.cu: copies of steps from global to shared memory, the groups of threads that compute a tile
// together, and the sums of their results.
#pragma once
#include "fused/fused.cuh"

struct Chunks {
  alignas(16) Real q[FUSED_TILE][CHUNK_STRIDE], k[FUSED_TILE][CHUNK_STRIDE];
};

// Load this thread's elements of the next step from global memory: of one column, STEP rows apart, without rows
// past the end.
template <int STEP, class T>
__device__ __forceinline__ void fetch(T (&to)[SHARE], const T* from, i64 stride, int rows) {
  const i64 step = STEP * stride;
#pragma unroll
  for (int s = 0; s < SHARE; ++s, from += step) to[s] = s * STEP < rows ? *from : T(0);
}
// The number of rows, at most those of a tile.
__device__ __forceinline__ int at_most_tile(i64 rows) {
  return rows < FUSED_TILE ? (int)rows : FUSED_TILE;
}
// Element s of the elements that `fetch` has loaded, as a number, times the inverse norm of its row. `inverse`
// begins at this thread's first row; null: rows are not normalised.
template <int STEP>
__device__ __forceinline__ Real feature(const Element (&z)[SHARE], int s, int rows,
                                        const double* inverse) {
  if (!inverse) return number(z[s]);
  return s * STEP < rows ? (Real)((double)number(z[s]) * inverse[s * STEP]) : 0;
}

// The groups of threads, each of which multiplies a part of a step's depth, and a thread's 8 x 8 results.
constexpr int GROUP_THREADS = 64;
constexpr int GROUPS = FUSED_THREADS / GROUP_THREADS;
constexpr int DEPTH = CHUNK / GROUPS;  // of a step, for each group

struct Place {
  int group, r, c;  // rows r + 8 h
};
__device__ __forceinline__ Place place() {
  const int at = threadIdx.x % GROUP_THREADS;
  return {(int)threadIdx.x / GROUP_THREADS, at / 8, at % 8};
}
// Column v of this thread's eight columns: 8 apart, or (ALONG) in runs of 16 bytes.
template <bool ALONG>
__device__ __forceinline__ int column_of(int c, int v) {
  return ALONG ? (c + v / VECTOR_WIDTH * 8) * VECTOR_WIDTH + v % VECTOR_WIDTH : c + 8 * v;
}

typedef Real SumTile[FUSED_TILE][FUSED_TILE + VECTOR_WIDTH];
constexpr int SUM_TILES = PRECISION == FP64 ? 1 : 2;  // tiles that have room in shared memory

// Add the results of all groups, in `tiles`.
template <bool ALONG>
__device__ __forceinline__ void add_groups(const Real (&x)[8][8], const Place& at,
                                           SumTile (&tiles)[SUM_TILES]) {
  constexpr int TOGETHER = ALONG ? VECTOR_WIDTH : 1;
  SumTile& tile = tiles[at.group % SUM_TILES];
  for (int round = 0; round < GROUPS / SUM_TILES; ++round) {
    // Round 0: all reads of the chunks, which share this memory, come before the writes of sums. Later:
    // the last round's writes come before this round's reads
    __syncthreads();
    if (at.group / SUM_TILES != round) continue;
#pragma unroll
    for (int h = 0; h < 8; ++h)
#pragma unroll
      for (int v = 0; v < 8; v += TOGETHER) {
        Real* here = &tile[at.r + 8 * h][column_of<ALONG>(at.c, v)];
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
__device__ __forceinline__ Real total(const SumTile (&tiles)[SUM_TILES], int row, int column) {
  const Real first = tiles[0][row][column];
  return SUM_TILES == 1 ? first : first + tiles[SUM_TILES - 1][row][column];
}

struct Product {
  alignas(16) Real p[FUSED_TILE][CHUNK_STRIDE];  // P, own rows x others
  alignas(16) Real z[CHUNK][FUSED_TILE];         // the others' features
};

union Shared {
  Chunks chunks[2];
  Product products[2];
  SumTile sums[SUM_TILES];
};
