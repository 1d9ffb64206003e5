// Portable kernels, second part: the products of one tile, x = Q_tile K_tile', in registers. This is the main loop of
// every kernel in tiled/.
//
// A thread block computes BLOCK_M x BLOCK_N products, and a warp 64 x WARP_N of them. Lane l = 4 g + t of a warp holds
// 8 x LANE_N: x[i][j] is at row 8 i + g and column 8 (j / 2) + 2 t + j % 2 of the warp's products. That is the
// accumulator layout of the tensor cores' m16n8 products. The plain multiply-adds of float32 and float64 use the same
// layout, so that one epilogue serves all precisions.
//
// Tensor cores take their operands from registers. A warp loads 32 bytes of each of its rows from shared memory, a
// step, while it multiplies the step before. Shared memory delivers 128 bytes a clock. For the same number of products,
// warps of 64 x 64 products load two thirds of the bytes that warps of 64 x 32 load.
//
// With LEVELS 2, sums are taken in two levels: first over one or two K-slices (PROMOTE), then over these sums.
// One level would lose digits, which a scale of 200 makes visible: tensor cores cut off bits when they add, and long
// sums in float32 round often. The second level needs as many registers as the first, so WARP_N is 32. LEVELS is 2 for
// FP32, FP16X3 and BF16X3, and for TF32, BF16 and FP16 above 1024 features (`tile_for` in kernels/gpu/config/tile.py).
//
// BF16X3, FP16X3: an operand is a sum of two parts, adjacent 16-bit matrices. The product is a sum over three times as
// many K-slices: one visit of the K-slices for each pair of parts that is not lost in rounding, small terms first.
//
// This is the second of three steps. It adds to naive/naive.cu: logits stay in registers, products use the
// tensor cores, and loads overlap with them. The last step, sm90/sweep/sweep.cuh, adds wgmma, TMA, and
// epilogues that overlap with products.
#pragma once
#include "tiled/pipeline.cuh"

#ifndef LEVELS
#define LEVELS 2  // 2: sums in two levels; 1: one sum over all K-slices
#endif
#define TENSOR_CORES (PRECISION >= TF32)
constexpr int LANE_N = WARP_N / 4;  // columns in which a lane has products
constexpr int PROMOTE = PRECISION == FP32 ? 1 : 2;  // K-slices of a sum of the first level

typedef Real Products[8][LANE_N];  // the products of a lane

struct Position {  // the row of product x[i][j] of this thread in the tile, row(i), and its column, column(j)
  int lane, g, t, warp_m, warp_n;
  __device__ Position() {
    lane = threadIdx.x % 32;
    g = lane / 4;
    t = lane % 4;
    warp_m = threadIdx.x / 32 / WARPS_N;
    warp_n = threadIdx.x / 32 % WARPS_N;
  }
  __device__ __forceinline__ int row(int i) const { return warp_m * WARP_M + i * 8 + g; }
  __device__ __forceinline__ int column(int j) const {
    return warp_n * WARP_N + j / 2 * 8 + 2 * t + j % 2;
  }
};

__device__ __forceinline__ void clear(Products& x) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) x[i][j] = 0;
}

#if TENSOR_CORES

constexpr int STEPS = K_SLICE / 32;  // steps of 32 bytes in a K-slice

// d += a b' for 16 rows of a and 8 rows of b, 32 bytes of each row, by one warp
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

// One step of a warp's queries (a) and keys (b) in registers: four registers of each lane have 16 rows.
struct Fragments {
  u32 a[WARP_M / 16][4], b[WARP_N / 16][4];

  __device__ __forceinline__ void load(const char* stage, int step, const Position& p) {
    // Step s is chunks 2 s and 2 s + 1. Its address is the address of step 0 with s << 5 flipped: see find_chunk
    const int q_row = p.warp_m * WARP_M + p.lane % 16, q_chunk = p.lane / 16;
    const int k_row = p.warp_n * WARP_N + p.lane / 16 * 8 + p.lane % 8, k_chunk = p.lane / 8 % 2;
    const char* q = stage + (find_chunk(q_row, q_chunk) ^ step << 5);
    const char* k = stage + (find_chunk(BLOCK_M + k_row, k_chunk) ^ step << 5);
#pragma unroll
    for (int n = 0; n < WARP_N / 16; ++n) ldmatrix_x4(b[n], k + n * 16 * K_SLICE);
#pragma unroll
    for (int m = 0; m < WARP_M / 16; ++m) ldmatrix_x4(a[m], q + m * 16 * K_SLICE);
  }

  // TF32: rounds the operands. Tensor cores would cut off the low bits of float32.
  __device__ __forceinline__ void round() {
#if PRECISION == TF32
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < WARP_N / 16; ++n) b[n][i] = to_tf32(b[n][i]);
#pragma unroll
      for (int m = 0; m < WARP_M / 16; ++m) a[m][i] = to_tf32(a[m][i]);
    }
#endif
  }

  // x += products FIRST .. LAST - 1 of the PRODUCTS products of 16 x 8 in this step. The first four use all fragments.
  static constexpr int PRODUCTS = WARP_M / 16 * (WARP_N / 8);
  template <int FIRST, int LAST>
  __device__ __forceinline__ void multiply_add(Products& x) {
#pragma unroll
    for (int i = FIRST; i < LAST; ++i) {
      const int m = i % (WARP_M / 16), n = (i / (WARP_M / 16) + 2 * m) % (WARP_N / 8);
      multiply(x[2 * m][2 * n], x[2 * m][2 * n + 1], x[2 * m + 1][2 * n], x[2 * m + 1][2 * n + 1],
               a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
};

#else  // plain multiply-adds

// d += the products of one K-slice, 16 bytes of each row at a time.
__device__ __forceinline__ void multiply_k_slice(Products& d, const char* stage,
                                                 const Position& p) {
  constexpr int VECTOR_WIDTH = 16 / sizeof(Real);
  union Vector {
    uint4 bits;
    Real z[VECTOR_WIDTH];
  };
#pragma unroll 1
  for (int chunk = 0; chunk < K_SLICE / 16; ++chunk) {
    Vector b[LANE_N];
#pragma unroll
    for (int j = 0; j < LANE_N; ++j)
      b[j].bits = *(const uint4*)(stage + find_chunk(BLOCK_M + p.column(j), chunk));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Vector a;
      a.bits = *(const uint4*)(stage + find_chunk(p.row(i), chunk));
#pragma unroll
      for (int e = 0; e < VECTOR_WIDTH; ++e)
#pragma unroll
        for (int j = 0; j < LANE_N; ++j) d[i][j] += a.z[e] * b[j].z[e];
    }
  }
}

#endif

// x = the products of the pipeline's next tile. With TEACHER, a tile has two calls: first with the student's features
// (`is_teacher` false), then with the teacher's. When this returns, all copies that threads have started so far have
// arrived, including the vectors of `prepare` (tiled/tile.cuh).
__device__ __forceinline__ void tile_product(Products& x, Pipeline& pipeline, const Position& p,
                                             bool is_teacher = false) {
  clear(x);
#if LEVELS == 2
  Products sum;  // of up to PROMOTE K-slices
  clear(sum);
#else
  Products& sum = x;
#endif
  const int slices = pipeline.slices(is_teacher);
  const char* stage = pipeline.next();
#if TENSOR_CORES
  Fragments fragments[2];
  fragments[0].load(stage, 0, p);
#endif
#pragma unroll 1
  for (int s = 0; s < slices; ++s) {
    const bool last = s + 1 == slices;
#if TENSOR_CORES
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      Fragments &now = fragments[step % 2], &next = fragments[(step + 1) % 2];
      now.round();
      now.multiply_add<0, 4>(sum);  // waits for the loads of `now`, before the loads of `next` start
      if (step + 1 < STEPS) {
        next.load(stage, step + 1, p);
      } else if (!last) {
        stage = pipeline.next();
        next.load(stage, 0, p);
      }
      if (step == 0) pipeline.start_queries();
      if (step == 1) pipeline.start_keys();
      now.multiply_add<4, Fragments::PRODUCTS>(sum);
    }
#else
    pipeline.start_queries();
    pipeline.start_keys();
    multiply_k_slice(sum, stage, p);
    if (!last) stage = pipeline.next();
#endif
#if LEVELS == 2
    if ((s + 1) % PROMOTE == 0 || last) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < LANE_N; ++j) x[i][j] += sum[i][j];
      clear(sum);
    }
#endif
  }
  cp_async_wait<0>();
  __syncthreads();
}
