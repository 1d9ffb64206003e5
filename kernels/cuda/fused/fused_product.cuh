// Products of fused.cu: steps from global to shared memory, the groups of threads that share a tile,
// and where their results meet.
#pragma once
#include "fused/fused.cuh"

struct Chunks {
  alignas(16) Real q[TILE][CHUNK_STRIDE], k[TILE][CHUNK_STRIDE];
};

// This thread's share of the next step, on its way from global memory: elements STEP rows apart of
// one column, as far as there are rows.
template <int STEP, class T>
__device__ __forceinline__ void fetch(T (&to)[SHARE], const T* from, i64 stride, int rows) {
  const i64 step = STEP * stride;
#pragma unroll
  for (int s = 0; s < SHARE; ++s, from += step) to[s] = s * STEP < rows ? *from : T(0);
}
// How many rows there are, as far as a tile is concerned.
__device__ __forceinline__ int at_most_tile(i64 rows) { return rows < TILE ? (int)rows : TILE; }
// The same as numbers, of unit norm where `inverse` (of this thread's first row) is given.
template <int STEP>
__device__ __forceinline__ Real feature(const Element (&z)[SHARE], int s, int rows,
                                        const double* inverse) {
  if (!inverse) return number(z[s]);
  return s * STEP < rows ? (Real)((double)number(z[s]) * inverse[s * STEP]) : 0;
}

// The groups of threads that share the depth of a product, and a thread's 8 x 8 results.
#define GROUP 64
#define GROUPS (FUSED_THREADS / GROUP)
#define DEPTH (CHUNK / GROUPS)  // of a step, for each group
struct Place {
  int group, r, c;  // rows r + 8 h
};
__device__ __forceinline__ Place place() {
  const int at = threadIdx.x % GROUP;
  return {(int)threadIdx.x / GROUP, at / 8, at % 8};
}
// Column v of this thread's eight: single ones, or (ALONG) as many as fit 16 bytes together.
template <bool ALONG>
__device__ __forceinline__ int column_of(int c, int v) {
  return ALONG ? (c + v / WIDE * 8) * WIDE + v % WIDE : c + 8 * v;
}

typedef Real Tile[TILE][TILE + WIDE];
#define SUMS (PRECISION == FP64 ? 1 : 2)  // tiles that have room in shared memory

// All groups' results to sums in `tiles`.
template <bool ALONG>
__device__ __forceinline__ void add_groups(const Real (&x)[8][8], const Place& at,
                                           Tile (&tiles)[SUMS]) {
  constexpr int TOGETHER = ALONG ? WIDE : 1;
  Tile& tile = tiles[at.group % SUMS];
  for (int round = 0; round < GROUPS / SUMS; ++round) {
    __syncthreads();  // tiles are free, and then the last round's sums are there
    if (at.group / SUMS != round) continue;
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
  __syncthreads();
}
__device__ __forceinline__ Real total(const Tile (&tiles)[SUMS], int row, int column) {
  return SUMS == 1 ? tiles[0][row][column] : tiles[0][row][column] + tiles[SUMS - 1][row][column];
}

struct Product {
  alignas(16) Real p[TILE][CHUNK_STRIDE];  // P, own rows x others
  alignas(16) Real z[CHUNK][TILE];         // the others' features
};

union Shared {
  Chunks chunks[2];
  Product products[2];
  Tile sums[SUMS];
};
