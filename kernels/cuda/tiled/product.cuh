// The product of one tile, x = Q_tile K_tile', in registers: the main loop of every tiled kernel.
//
// A block of warps computes BLOCK_M x BLOCK_N products, and a warp 64 x WARP_N of them. Lane l = 4 g + t
// holds 8 x LANE_N: rows 8 i + g and columns 8 (j / 2) + 2 t + j % 2. That is the accumulator layout of
// the tensor cores' m16n8 products, and the plain FMA path of the other precisions keeps to it, so what
// follows a product is written once.
//
// Tensor cores take their operands from registers. A warp reads 32 bytes of each of its rows (a step)
// while it multiplies those of the step before. Shared memory delivers 128 bytes a clock, and 64 x 64
// products a warp need two thirds of what 64 x 32 need.
//
// With LEVELS 2, sums are taken in two levels, one or two K-slices at a time and then these: tensor
// cores cut off bits when they add, and a long sum in float32 loses digits that a scale of 200
// multiplies. It costs as many registers again: WARP_N is 32 then.
//
// bf16x3, fp16x3: an operand is a sum of two parts, adjacent 16-bit matrices. The product is a
// sum over three times as many K-slices, one pass for each pair of parts that is not lost in rounding,
// small terms first.
//
// This is the second of three steps. It adds to naive/naive.cu: logits stay in registers, products use the
// tensor cores, and loads overlap with them. The last step, sm90/sweep/sweep.cuh, adds wgmma, TMA, and
// epilogues that overlap with products.
#pragma once
#include "tiled/pipeline.cuh"

#ifndef LEVELS
#define LEVELS 2
#endif
#define TENSOR_CORES (PRECISION >= TF32)
constexpr int LANE_N = WARP_N / 4;  // columns of a lane's products
constexpr int PROMOTE = PRECISION == FP32 ? 1 : 2;  // K-slices summed before they are added to the rest

typedef Real Products[8][LANE_N];  // of a lane

struct Position {  // the rows and columns of this thread's products in the tile
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

constexpr int STEPS = K_SLICE / 32;  // of a K-slice

// d += a b' for 16 rows of a and 8 of b, 32 bytes of each
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

// One step of a warp's rows, 16 rows in four registers.
struct Fragments {
  u32 a[WARP_M / 16][4], b[WARP_N / 16][4];

  __device__ __forceinline__ void load(const char* stage, int step, const Position& p) {
    // chunks 2 step and 2 step + 1: `step` flips bits of the first step's address
    const int q_row = p.warp_m * WARP_M + p.lane % 16, q_chunk = p.lane / 16;
    const int k_row = p.warp_n * WARP_N + p.lane / 16 * 8 + p.lane % 8, k_chunk = p.lane / 8 % 2;
    const char* q = stage + (find_chunk(q_row, q_chunk) ^ step << 5);
    const char* k = stage + (find_chunk(BLOCK_M + k_row, k_chunk) ^ step << 5);
#pragma unroll
    for (int n = 0; n < WARP_N / 16; ++n) ldmatrix_x4(b[n], k + n * 16 * K_SLICE);
#pragma unroll
    for (int m = 0; m < WARP_M / 16; ++m) ldmatrix_x4(a[m], q + m * 16 * K_SLICE);
  }

  // Round the operands to the precision of the products.
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

  // x += products FIRST to LAST of this step. The first four already use all fragments.
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

#else  // plain multiply-adds, 16 bytes of each row at a time

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

// x = products of the pipeline's next tile, or with TEACHER of the next model. When this returns, all copies that
// threads have started so far have arrived.
__device__ __forceinline__ void tile_product(Products& x, Pipeline& pipeline, const Position& p,
                                             bool is_teacher = false) {
  clear(x);
#if LEVELS == 2
  Products sum;  // of the last K-slices
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
      now.multiply_add<0, 4>(sum);  // waits for `now`, and so not later for `next` as well
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
