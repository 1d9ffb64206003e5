// How sweeps write a gradient block, dL/dx, or cached exponentials in its place: by epilogues, a piece at a time.
#pragma once
#include "sm90/sweep/sweep.cuh"

// A strip is the 16 rows of a warp in a tile. The warp writes a piece of the strip, 128 bytes of each row, to shared
// memory, and a TMA store copies the piece to the gradient block. Shared memory limits the speed of stores. Of all
// ways to store a strip, this one reads and writes shared memory least often.
constexpr int PIECE = 64;  // columns of a piece

struct GradientStrip {
  struct Shared {
    alignas(16) Element piece[4][16 * PIECE];  // one piece for each warp; TMA boxes, as in SweepShared
  };
  const TensorMap& map;                 // of the gradient block, in boxes of 16 rows and PIECE columns
  const GradientBlock& gradient_block;
  Element* piece;  // of this warp
  int own_offset;  // in `piece`, in elements: the eight elements whose address this lane passes to `stmatrix_x4`

  __device__ __forceinline__ GradientStrip(const TensorMap& map, const GradientBlock& gradient_block,
                                                Shared& shared, const Lane& lane)
      : map(map), gradient_block(gradient_block), piece(shared.piece[lane.warp]) {
    // In a box with 128-byte swizzle, 16 bytes of a row are at index `chunk ^ row % 8`
    const int row = lane.lane % 16;
    own_offset = row * PIECE + (lane.lane / 16 ^ row % 8) * 8;
  }
  // Writes slice s of a tile to the piece. The tile's strip begins at row `row` and column `column` of the gradient
  // block. The last slice of a piece also starts the piece's TMA store, one for each part. With two parts, x changes.
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
  // Stores a piece that begins at row `row` and column `column` of the gradient block. The caller has packed the piece
  // in words, in the order of x: one word for each part of two neighbouring columns.
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
  // Waits until the warp's TMA stores have written the gradient block. Without the wait, later stores to the same
  // place could be overwritten by these.
  __device__ __forceinline__ void wait_for_writes(const Lane& lane) const {
    if (lane.lane == 0) tma_stores_written();
    __syncwarp();
  }
  // Waits until the TMA store has read the piece, before the warp writes to the piece again.
  __device__ __forceinline__ void wait_for_reads(const Lane& lane) const {
    if (lane.lane == 0) tma_stores_wait();
    __syncwarp();
  }
  // Rounds slice s to a part, and writes it to the piece. x becomes the remainder, which is the next part.
  __device__ __forceinline__ void write(float (&x)[64], int s) const {
    u32 words[4];  // the first eight columns in the thread's first row and second row, then the other eight columns
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = round_pair(x[8 * s + 2 * i], x[8 * s + 2 * i + 1]);
    stmatrix_x4(piece + (own_offset ^ 16 * s % PIECE), words[0], words[1], words[2], words[3]);
  }
  // Starts the TMA store of the piece to row `row` and column `column` of the gradient block.
  __device__ __forceinline__ void send(int row, int column, const Lane& lane) const {
    fence_before_tma_store();
    __syncwarp();  // all lanes' writes, and their fences, come before the TMA store's reads
    if (lane.lane == 0) tma_store(map, piece, column, row);
  }
  // After the last store of a query tile: TMA has read the piece before the thread block ends.
  __device__ __forceinline__ void end(const Lane& lane) const {
    if (lane.lane == 0) tma_stores_wait();
  }
};
