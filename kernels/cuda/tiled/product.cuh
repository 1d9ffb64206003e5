// The product of one tile, x = Q_tile K_tile', in registers: the main loop of every tiled kernel.
//
// A block of warps computes BLOCK_M x BLOCK_N products. Both operands lie row by row in memory, the
// features of a row one after another, so both are cut into K-slices of 128 bytes a row and brought to
// shared memory by a pipeline of STAGES K-slices. A warp computes 64 x 32 products. Lane
// l = 4 g + t of it holds 8 x 8 of them: rows 8 i + g and columns 8 (j / 2) + 2 t + j % 2. That is
// the accumulator layout of the tensor cores' m16n8 products, and the plain FMA path of the other
// precisions keeps to it, so what follows a product is written once.
//
// With LEVELS 2, sums are taken in two levels, one or two K-slices at a time and then these: tensor
// cores cut off bits when they add, and a long sum in float32 loses digits that a scale of 200
// multiplies. It costs as many registers again, so that only one block fits a multiprocessor.
//
// bf16x3, fp16x3: an operand is a sum of two parts, 16-bit matrices beside each other. The product is a
// sum over three times as many K-slices, one pass for each pair of parts that is not lost in rounding,
// small terms first.
//
// This is the second of three steps. It adds to naive/naive.cu: logits stay in registers, products use the
// tensor cores, and loads overlap with them. The last step, sm90/sweep/sweep.cuh, adds wgmma, TMA, and
// epilogues that overlap with products.
#pragma once
#include "block.cuh"

constexpr int BLOCK_M = 128;
#ifndef BLOCK_N
#define BLOCK_N 128
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
#ifndef LEVELS
#define LEVELS 2
#endif
constexpr int PASSES = PARTS == 2 ? 3 : 1;  // over parts 1 0, 0 1, 0 0
constexpr int PROMOTE = PRECISION == FP32 ? 1 : 2;  // K-slices summed before they are added to the rest
constexpr int WARPS_M = BLOCK_M / 64;
constexpr int WARPS_N = BLOCK_N / 32;
constexpr int TILED_THREADS = WARPS_M * WARPS_N * 32;
constexpr int STAGE_BYTES = (BLOCK_M + BLOCK_N) * K_SLICE;
constexpr int PRODUCT_BYTES = STAGES * STAGE_BYTES;

struct Position {  // where this thread's products are in the tile
  int lane, g, t, warp_m, warp_n;
  __device__ Position() {
    lane = threadIdx.x % 32;
    g = lane / 4;
    t = lane % 4;
    warp_m = threadIdx.x / 32 / WARPS_N;
    warp_n = threadIdx.x / 32 % WARPS_N;
  }
  __device__ __forceinline__ int row(int i) const { return warp_m * 64 + i * 8 + g; }
  __device__ __forceinline__ int column(int j) const {
    return warp_n * 32 + j / 2 * 8 + 2 * t + j % 2;
  }
};

// Where the 16 bytes `chunk` of a row lie in a stage. Eight rows' chunks of one number are spread
// over all banks.
__device__ __forceinline__ int at_chunk(int row, int chunk) {
  return row * K_SLICE + ((chunk ^ (row & 7)) << 4);
}

// --- loading -------------------------------------------------------------------------------------------

// Start copying one K-slice of `count` rows of one operand; what lies outside the matrix becomes zero.
template <int ROWS>
__device__ __forceinline__ void load_k_slice(char* to, const Operand& z, i64 first, i64 part,
                                          i64 offset, i64 width) {
  const int chunk = threadIdx.x % 8, row = threadIdx.x / 8;
  const bool in_row = offset + chunk * 16 < width;
  const char* from = z.data + (first + row) * z.stride + part + offset + chunk * 16;
  to += at_chunk(row, chunk);  // TILED_THREADS / 8 is a multiple of 8: further rows keep the pattern
#pragma unroll
  for (int r = 0; r < ROWS; r += TILED_THREADS / 8) {
    const bool inside = in_row && first + row + r < z.rows;
    cp_async_16(to + r * K_SLICE, inside ? from : z.data, inside ? 16 : 0);
    from += TILED_THREADS / 8 * z.stride;
  }
}

// K-slice s of both operands.
__device__ __forceinline__ void load_stage(char* stage, const Operand& q, const Operand& k,
                                           i64 row, i64 column, i64 width, int s, int k_slices) {
  i64 q_part = 0, k_part = 0;
#if PARTS > 1
  const int pass = s / k_slices;
  s -= pass * k_slices;
  if (pass == 0) q_part = q.part;
  if (pass == 1) k_part = k.part;
#endif
  load_k_slice<BLOCK_M>(stage, q, row, q_part, (i64)s * K_SLICE, width);
  load_k_slice<BLOCK_N>(stage + BLOCK_M * K_SLICE, k, column, k_part, (i64)s * K_SLICE, width);
}

// --- multiplying -----------------------------------------------------------------------------------------

#if PRECISION >= TF32  // tensor cores: 64 bytes of each row are two steps of 32 bytes

__device__ __forceinline__ void multiply(float& d0, float& d1, float& d2, float& d3,
                                         const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
#if PRECISION == TF32
  mma_tf32(d0, d1, d2, d3, a, b0, b1);
#elif IS_FLOAT16
  mma_fp16(d0, d1, d2, d3, a, b0, b1);
#else
  mma_bf16(d0, d1, d2, d3, a, b0, b1);
#endif
#endif
}

__device__ __forceinline__ void round_operand(u32 (&r)[4]) {
#if PRECISION == TF32
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = to_tf32(r[i]);
#endif
}

// d += products of one K-slice
__device__ __forceinline__ void multiply_k_slice(float (&d)[8][8], const char* stage,
                                              const Position& p) {
  const int q_row = p.warp_m * 64 + p.lane % 16, k_row = BLOCK_M + p.warp_n * 32 + p.lane % 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 b[4][4];  // [column group][two steps x two words]
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      ldmatrix_x4(b[n], stage + at_chunk(k_row + n * 8, half * 4 + p.lane / 8));
      round_operand(b[n]);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        u32 a[4];
        ldmatrix_x4(a, stage + at_chunk(q_row + m * 16, half * 4 + step * 2 + p.lane / 16));
        round_operand(a);
#pragma unroll
        for (int n = 0; n < 4; ++n)
          multiply(d[2 * m][2 * n], d[2 * m][2 * n + 1], d[2 * m + 1][2 * n],
                   d[2 * m + 1][2 * n + 1], a, b[n][2 * step], b[n][2 * step + 1]);
      }
  }
}

#else  // plain multiply-adds, 16 bytes of each row at a time

__device__ __forceinline__ void multiply_k_slice(Real (&d)[8][8], const char* stage,
                                              const Position& p) {
  constexpr int VECTOR_WIDTH = 16 / sizeof(Real);
  union Vector {
    uint4 bits;
    Real z[VECTOR_WIDTH];
  };
#pragma unroll 1
  for (int chunk = 0; chunk < K_SLICE / 16; ++chunk) {
    Vector b[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      b[j].bits = *(const uint4*)(stage + at_chunk(BLOCK_M + p.column(j), chunk));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Vector a;
      a.bits = *(const uint4*)(stage + at_chunk(p.row(i), chunk));
#pragma unroll
      for (int e = 0; e < VECTOR_WIDTH; ++e)
#pragma unroll
        for (int j = 0; j < 8; ++j) d[i][j] += a.z[e] * b[j].z[e];
    }
  }
}

#endif

__device__ __forceinline__ void clear(Real (&x)[8][8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) x[i][j] = 0;
}

// x = products of rows row.. of q with rows column.. of k. `stages` is PRODUCT_BYTES of shared
// memory, free for other use afterwards.
__device__ __forceinline__ void tile_product(Real (&x)[8][8], const Operand& q, const Operand& k,
                                             i64 row, i64 column, i64 width, char* stages,
                                             const Position& p) {
  clear(x);
#if LEVELS == 2
  Real part[8][8];
  clear(part);
#endif

  const int k_slices = (int)((width + K_SLICE - 1) / K_SLICE);
  const int steps = PASSES * k_slices;
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < steps) load_stage(stages + s * STAGE_BYTES, q, k, row, column, width, s, k_slices);
    cp_async_commit();
  }
  int stage = 0;
  for (int s = 0; s < steps; ++s) {
    cp_async_wait<STAGES - 2>();
    // All threads' copies of K-slice s come before its reads. All reads of K-slice s - 1 come before the
    // copies that refill its stage
    __syncthreads();
    const int next = s + STAGES - 1;
    if (next < steps) {
      const int free = stage == 0 ? STAGES - 1 : stage - 1;
      load_stage(stages + free * STAGE_BYTES, q, k, row, column, width, next, k_slices);
    }
    cp_async_commit();
#if LEVELS == 2
    multiply_k_slice(part, stages + stage * STAGE_BYTES, p);
    if ((s + 1) % PROMOTE == 0 || s + 1 == steps) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] += part[i][j];
      clear(part);
    }
#else
    multiply_k_slice(x, stages + stage * STAGE_BYTES, p);
#endif
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  // All reads of K-slices come before the epilogue's writes to the same memory
  __syncthreads();
}
