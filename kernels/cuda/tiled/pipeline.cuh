// Which tiles a thread block computes, and the pipeline that brings their rows to shared memory.
//
// A launch has as many thread blocks as run at once, and each takes every gridDim.x-th tile. Both
// operands lie row by row in memory, the features of a row one after another, so both are cut into
// K-slices of 128 bytes a row. STAGES of them are in shared memory, and copies run STAGES - 1 K-slices
// ahead of the products. After the last K-slice of a tile come those of the next tile: they arrive
// during the epilogue.
#pragma once
#include "block.cuh"

constexpr int BLOCK_M = 128;
#ifndef BLOCK_N
#define BLOCK_N 128
#endif
#ifndef WARP_N
#define WARP_N 32
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
constexpr int WARP_M = 64;
constexpr int WARPS_M = BLOCK_M / WARP_M;
constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int TILED_THREADS = WARPS_M * WARPS_N * 32;
constexpr int STAGE_BYTES = (BLOCK_M + BLOCK_N) * K_SLICE;
constexpr int PASSES = PARTS == 2 ? 3 : 1;  // over parts 1 0, 0 1, 0 0

// --- tiles -----------------------------------------------------------------------------------------------

struct Tile {
  int index;        // in the order of visits
  i64 row, column;  // its first, in the block
  bool exists;
};

// The first tile of this thread block from `index` on. Tiles that are computed at the same time have the
// same few rows and columns, which are then in the L2 cache when several want them.
__device__ __forceinline__ Tile find_tile(const Block& b, int index) {
  constexpr int ROW_TILES = 16;
  const int rows = (int)b.row_tiles, columns = (int)b.column_tiles;
  Tile t;
  for (;; index += gridDim.x) {
    const int group = index / (ROW_TILES * columns), rest = index % (ROW_TILES * columns);
    const int left = rows - group * ROW_TILES, rows_here = left < ROW_TILES ? left : ROW_TILES;
    t.index = index;
    t.exists = left > 0;
    if (!t.exists) return t;
    t.row = (i64)(group * ROW_TILES + rest % rows_here) * BLOCK_M;
    t.column = (i64)(rest / rows_here) * BLOCK_N;
    if (!b.triangle || t.column + BLOCK_N > t.row) return t;
  }
}

__device__ __forceinline__ Tile next_tile(const Block& b, const Tile& t) {
  return find_tile(b, t.index + gridDim.x);
}

// --- K-slices --------------------------------------------------------------------------------------------

// Where the 16 bytes `chunk` of a row lie in a stage. Eight rows' chunks of one number are spread
// over all banks.
__device__ __forceinline__ int at_chunk(int row, int chunk) {
  return row * K_SLICE + ((chunk ^ (row & 7)) << 4);
}

// Start copying a K-slice, which begins at byte `offset`, of ROWS rows; what lies outside the matrix
// becomes zero.
template <int ROWS>
__device__ __forceinline__ void start_copies(char* to, const Operand& z, i64 first, i64 part,
                                             i64 offset, i64 width) {
  constexpr int STEP = TILED_THREADS / 8;  // a multiple of 8: further rows keep the pattern
  const int chunk = threadIdx.x % 8, row = threadIdx.x / 8;
  const i64 existing = offset + chunk * 16 < width ? z.rows - first : 0;
  const int rows = existing < ROWS ? (int)existing : ROWS;
  const char* from = z.data + (first + row) * z.stride + part + offset + chunk * 16;
  to += at_chunk(row, chunk);
#pragma unroll
  for (int r = 0; r < ROWS; r += STEP) {
    cp_async_16(to + r * K_SLICE, from, row + r < rows ? 16 : 0);
    from += STEP * z.stride;
  }
}

struct Pipeline {
  static constexpr int PIECES = 3;  // of a K-slice's copies: queries, and the keys' halves

  const Block& block;
  char* const stages;      // STAGES * STAGE_BYTES of shared memory
  const int row_slices;    // of a row
  Tile ahead;              // whose K-slices are being copied
  int slice = 0;           // the next of them
  int filled = 0, read = STAGES - 1;  // stages: the next to be filled, the one that is read

  __device__ __forceinline__ Pipeline(const Block& b, char* memory)
      : block(b), stages(memory), row_slices((int)((b.width + K_SLICE - 1) / K_SLICE)),
        ahead(find_tile(b, blockIdx.x)) {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) start(piece);
  }

  // K-slices of a tile, over all pairs of parts.
  __device__ __forceinline__ int slices() const { return PASSES * row_slices; }

  // Start the copies of a piece of the next K-slice. All pieces are started, in this order.
  __device__ __forceinline__ void start(int piece) {
    if (ahead.exists) {
      char* to = stages + filled * STAGE_BYTES;
      const int pass = PASSES > 1 ? slice / row_slices : 0;
      const i64 offset = (i64)(slice - pass * row_slices) * K_SLICE, width = block.width;
      if (piece == 0) {
        const i64 part = PASSES > 1 && pass == 0 ? block.q.part : 0;
        start_copies<BLOCK_M>(to, block.q, ahead.row, part, offset, width);
      } else {
        const i64 part = PASSES > 1 && pass == 1 ? block.k.part : 0;
        const int first = (piece - 1) * (BLOCK_N / 2);
        to += (BLOCK_M + first) * K_SLICE;
        start_copies<BLOCK_N / 2>(to, block.k, ahead.column + first, part, offset, width);
      }
    }
    if (piece + 1 < PIECES) return;
    cp_async_commit();
    filled = filled == STAGES - 1 ? 0 : filled + 1;
    if (++slice == slices()) {
      slice = 0;
      ahead = next_tile(block, ahead);
    }
  }

  // Wait for the next K-slice to be read; returns its stage. All threads' copies to it come before its
  // reads. All reads of the last one come before the copies that refill its stage.
  __device__ __forceinline__ const char* next() {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    read = read == STAGES - 1 ? 0 : read + 1;
    return stages + read * STAGE_BYTES;
  }
};
