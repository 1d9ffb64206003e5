// Portable kernels, first part: which tiles a thread block computes, and the pipeline that brings their rows to shared
// memory. tiled/product.cuh multiplies them, and tiled/tile.cuh has the functions of epilogues.
//
// A launch has as many thread blocks as run at once, and each takes every gridDim.x-th tile. In both operands the
// features of a row are contiguous, so both are cut into K-slices of 128 bytes of each row. Shared memory has STAGES
// stages of one K-slice each, and copies run STAGES - 1 K-slices ahead of the products. After the last K-slice of a
// tile come the K-slices of the next tile, so they arrive during the epilogue.
#pragma once
#include "block/options.cuh"

// Shape of a tile (chosen by kernels/gpu/config/tile.py): BLOCK_M queries x BLOCK_N keys. A warp has WARP_M x WARP_N
constexpr int BLOCK_M = 128;
#ifndef BLOCK_N
#define BLOCK_N 128
#endif
#ifndef WARP_N
#define WARP_N 32
#endif
#ifndef STAGES
#define STAGES 3  // K-slices in shared memory
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1  // thread blocks that share a multiprocessor, which limits the registers of a thread
#endif
#ifndef TEACHER
#define TEACHER 0  // 1: a tile has two products, one of a student's features and one of a teacher's
#endif
constexpr int WARP_M = 64;
constexpr int WARPS_M = BLOCK_M / WARP_M;  // warps in a column of warps of a tile
constexpr int WARPS_N = BLOCK_N / WARP_N;  // warps in a row of warps of a tile
constexpr int TILED_THREADS = WARPS_M * WARPS_N * 32;
constexpr int STAGE_BYTES = (BLOCK_M + BLOCK_N) * K_SLICE;
// Products of parts of a row, each of which visits the K-slices of the row. With two PARTS: small parts of queries with
// large parts of keys, large with small, large with large
constexpr int PART_PRODUCTS = PARTS == 2 ? 3 : 1;

// --- tiles -----------------------------------------------------------------------------------------------

struct Tile {
  int index;        // number of the tile in the order of visits, over all thread blocks
  i64 row, column;  // the first row and column of the tile, in the block
  bool exists;      // false after the last tile: zeros are copied in its place, and nobody multiplies them
};

// The first tile of this thread block from number `index` on. Numbers go down 16 row tiles and then to the next column,
// so tiles that are computed at the same time have the same few rows and columns, which thread blocks then read from
// the L2 cache. In a triangle, tiles below the diagonal are skipped.
__device__ __forceinline__ Tile find_tile(const Block& b, int index) {
  constexpr int ROW_TILES = 16;
  const int rows = (int)b.row_tiles, columns = (int)b.column_tiles;
  Tile t = {};
  for (;; index += gridDim.x) {
    t.index = index;
    t.exists = index < rows * columns;
    if (!t.exists) return t;
    const int group = index / (ROW_TILES * columns), rest = index % (ROW_TILES * columns);
    const int rows_here = min(ROW_TILES, rows - group * ROW_TILES);
    t.row = (i64)(group * ROW_TILES + rest % rows_here) * BLOCK_M;
    t.column = (i64)(rest / rows_here) * BLOCK_N;
    if (!b.triangle || t.column >= t.row) return t;
  }
}

__device__ __forceinline__ Tile next_tile(const Block& b, const Tile& t) {
  return find_tile(b, t.index + gridDim.x);
}

// --- K-slices --------------------------------------------------------------------------------------------

// The offset in a stage, in bytes, of chunk `chunk` (0 .. 7) of a row: 16 of the 128 bytes. The order of the chunks
// differs from row to row (swizzle), so that chunks of one number in eight consecutive rows lie in different banks.
__device__ __forceinline__ int find_chunk(int row, int chunk) {
  return row * K_SLICE + ((chunk ^ (row & 7)) << 4);
}

// The part of one operand that a thread copies: the same chunk of every ROW_STEP-th row of a tile.
struct Share {
  static constexpr int ROW_STEP = TILED_THREADS / 8;  // a multiple of 8, so that all rows of a thread have one swizzle
  const char* from;  // this thread's chunk of K-slice 0, in the first of its rows
  int rows;          // existing rows of the tile from that row on; 0 or less: none

  // Begins a tile whose first row is row `first` of z.
  __device__ __forceinline__ void begin(const Operand& z, i64 first, bool exists) {
    const int row = threadIdx.x / 8;
    const i64 left = exists ? z.rows - first - row : 0;
    from = z.data + (first + row) * z.stride + threadIdx.x % 8 * 16;
    rows = left < BLOCK_M ? (int)left : BLOCK_M;
  }

  // Starts to copy this thread's chunks of a tile of ROWS rows, `offset` bytes after K-slice 0, to `to`, the operand's
  // part of a stage. Zeros stand for rows outside of the matrix, and for a chunk after the end of a row (`in_row` is
  // false).
  template <int ROWS>
  __device__ __forceinline__ void start(char* to, i64 stride, i64 offset, bool in_row) const {
    const int existing = in_row ? rows : 0;
    const char* source = from + offset;
    to += find_chunk(threadIdx.x / 8, threadIdx.x % 8);
#pragma unroll
    for (int r = 0; r < ROWS; r += ROW_STEP) {
      cp_async_16(to + r * K_SLICE, source, r < existing ? 16 : 0);
      source += ROW_STEP * stride;
    }
  }
};

// The K-slices of this thread block's tiles, tile after tile. All threads of the block call `start_queries` and
// `start_keys` once, and `next` once, for each K-slice.
struct Pipeline {
  const Block& block;
  char* const stages;    // STAGES * STAGE_BYTES of shared memory
  const int row_slices;  // K-slices of a row, for one part
  const Block* const teacher;  // with TEACHER: the same rows and columns with the features of the teacher; else null
  const int teacher_slices;    // K-slices of a row of the teacher
  bool copies_teacher = false;  // the K-slices of the teacher's features are being copied, after those of the student
  Tile ahead;            // the tile whose K-slices are being copied
  Share q, k;            // this thread's part of the queries and of the keys of that tile
  int slice = 0;                      // the K-slice of `ahead` to be copied next
  int filled = 0, read = STAGES - 1;  // the stage to be filled next, and the stage that is being multiplied

  __device__ __forceinline__ Pipeline(const Block& b, char* memory, const Block* second = nullptr)
      : block(b), stages(memory), row_slices((int)((b.width + K_SLICE - 1) / K_SLICE)), teacher(second),
        teacher_slices(TEACHER ? (int)((second->width + K_SLICE - 1) / K_SLICE) : 0) {
    begin(find_tile(b, blockIdx.x));
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
      start_queries();
      start_keys();
    }
  }

  __device__ __forceinline__ int count_row_slices(bool is_teacher) const {
    return TEACHER && is_teacher ? teacher_slices : row_slices;
  }
  // Number of K-slices of a tile, over all pairs of parts.
  __device__ __forceinline__ int slices(bool is_teacher) const { return PART_PRODUCTS * count_row_slices(is_teacher); }
  // The block, of student or teacher, whose K-slices are being copied.
  __device__ __forceinline__ const Block& copied() const { return TEACHER && copies_teacher ? *teacher : block; }

  // Begins to copy tile t.
  __device__ __forceinline__ void begin(const Tile& t) {
    ahead = t;
    q.begin(copied().q, t.row, t.exists);
    k.begin(copied().k, t.column, t.exists);
  }

  // Start the copies of the next K-slice: first of queries, then of keys. `start_keys` also moves on by a K-slice.
  __device__ __forceinline__ void start_queries() { start<0, BLOCK_M>(q, copied().q); }
  __device__ __forceinline__ void start_keys() {
    start<1, BLOCK_N>(k, copied().k);
    cp_async_commit();
    filled = filled == STAGES - 1 ? 0 : filled + 1;
    if (++slice < slices(copies_teacher)) return;
    slice = 0;
    copies_teacher = TEACHER && !copies_teacher;
    begin(copies_teacher ? ahead : next_tile(block, ahead));
  }

  // SIDE: 0 for queries, 1 for keys, whose rows come after the queries in a stage.
  template <int SIDE, int ROWS>
  __device__ __forceinline__ void start(const Share& share, const Operand& z) {
    const int slices_per_row = count_row_slices(copies_teacher);
    const int part_product = PART_PRODUCTS > 1 ? slice / slices_per_row : 0;
    const int offset = (slice - part_product * slices_per_row) * K_SLICE;
    const i64 part = PART_PRODUCTS > 1 && part_product == SIDE ? z.part : 0;
    const bool in_row = offset + (int)(threadIdx.x % 8) * 16 < (int)copied().width;
    char* to = stages + filled * STAGE_BYTES + SIDE * BLOCK_M * K_SLICE;
    share.start<ROWS>(to, z.stride, part + offset, in_row);
  }

  // Waits until all threads have copied the next K-slice, and returns its stage. The barrier also separates all reads
  // of the K-slice before from the copies that refill the stage of that K-slice.
  __device__ __forceinline__ const char* next() {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    read = read == STAGES - 1 ? 0 : read + 1;
    return stages + read * STAGE_BYTES;
  }
};
