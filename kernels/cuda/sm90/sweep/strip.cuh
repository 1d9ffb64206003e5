// Gradient blocks, dL/dx, as sweeps write them: a strip of rows at a time.
#pragma once
#include "sm90/sweep/sweep.cuh"

// A warp's strip of a tile of the gradient block, 16 rows. The warp writes a piece of the strip, 128 bytes of each
// row, to shared memory, and a TMA store copies the piece to the gradient block. Shared memory limits the speed of
// stores. Of all ways to store a strip, this one reads and writes shared memory least often.
constexpr int PIECE = 64;  // columns of a piece

struct GradientStrip {
  struct Shared {
    alignas(16) Element piece[4][16 * PIECE];  // one a warp; TMA boxes, as in SweepShared
  };
  const TensorMap& map;
  const GradientBlock& gradient_block;
  Element* piece;
  int own_offset;  // of this lane's eight elements in `piece`

  __device__ __forceinline__ GradientStrip(const TensorMap& map, const GradientBlock& gradient_block,
                                                Shared& shared, const Lane& lane)
      : map(map), gradient_block(gradient_block), piece(shared.piece[lane.warp]) {
    const int row = lane.lane % 16;  // a box with 128-byte swizzle, as shared_descriptor has it
    own_offset = row * PIECE + (lane.lane / 16 ^ row % 8) * 8;
  }
  // Slice s of the strip from row `row` and column `column` of the gradient block on.
  __device__ __forceinline__ void store(float (&x)[64], int s, int row, int column, const Block&,
                                        const Lane& lane) const {
    const int first = 16 * s % PIECE;
    if (first == 0) wait_for_reads(lane);
    write(x, s);
    if (first + 16 < PIECE) return;
    column += 16 * (s + 1) - PIECE;
    send(row, column, lane);
#pragma unroll
    for (int part = 1; part < PARTS; ++part) {
      wait_for_reads(lane);
#pragma unroll
      for (int back = PIECE / 16 - 1; back >= 0; --back) write(x, s - back);
      send(row, column + part * (int)gradient_block.part, lane);
    }
  }
  // Store a piece whose words the caller has packed: for each pair of columns, one word for each part.
  __device__ __forceinline__ void store_piece(const u32 (&words)[PIECE / 4 * PARTS], int row, int column,
                                              const Lane& lane) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      wait_for_reads(lane);
#pragma unroll
      for (int k = 0; k < PIECE / 4; k += 4)
        stmatrix_x4(piece + (own_offset ^ 4 * k), words[PARTS * k + part], words[PARTS * (k + 1) + part],
                    words[PARTS * (k + 2) + part], words[PARTS * (k + 3) + part]);
      send(row, column + part * (int)gradient_block.part, lane);
    }
  }
  // Wait until the warp's TMA stores have written their memory. Else later stores to the same memory could come
  // before them.
  __device__ __forceinline__ void wait_for_writes(const Lane& lane) const {
    if (lane.lane == 0) tma_stores_written();
    __syncwarp();
  }
  // Wait until the TMA store has read the piece, before the warp writes to the piece again.
  __device__ __forceinline__ void wait_for_reads(const Lane& lane) const {
    if (lane.lane == 0) tma_stores_wait();
    __syncwarp();
  }
  // Round slice s into the piece. x becomes what rounding leaves, which is the next part.
  __device__ __forceinline__ void write(float (&x)[64], int s) const {
    u32 w[4];  // rows above and below of the first eight columns, then of the others
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = round_pair(x[8 * s + 2 * i], x[8 * s + 2 * i + 1]);
    stmatrix_x4(piece + (own_offset ^ 16 * s % PIECE), w[0], w[1], w[2], w[3]);
  }
  __device__ __forceinline__ void send(int row, int column, const Lane& lane) const {
    fence_before_tma_store();
    __syncwarp();  // all lanes' writes, and their fences, come before the TMA store's reads
    if (lane.lane == 0) tma_store(map, piece, column, row);
  }
  __device__ __forceinline__ void end(const Lane& lane) const {
    if (lane.lane == 0) tma_stores_wait();  // TMA's reads come before the block ends, and its memory with it
  }
};
