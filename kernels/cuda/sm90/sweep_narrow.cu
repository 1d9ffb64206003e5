// Gradient pass of narrow rows as a sweep (sweep/sweep.cuh, IN_REGISTERS). P = dL/dx stays in registers, and
// dQ += P K is accumulated at once, divided by the gradient divisor as P is. For rows this short, it would take longer
// to write P and to read it twice than to compute the products.
#include "sm90/sweep/gradient.cuh"

constexpr int WIDTH = 64 * K_SLICES;  // of rows, in elements

struct Narrow : LogitGradient {
  struct WarpgroupShared {};

  float* out;  // [rows, stride]
  i64 stride;
  int columns;    // of the features
  bool add;       // to what is there

  u32 p[SLICES][4];      // of this consumer's last tile, as products take it
  float sum[WIDTH / 2];  // of its tiles so far

  __device__ __forceinline__ void begin_query_tile(const Work& w) {
    LogitGradient::begin_query_tile(w);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0;
  }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [](i64, float) {});
    if (one_exponential) round<true>(x, t);
    else round<false>(x, t);
  }
  template <bool ONE>
  __device__ __forceinline__ void round(float (&x)[64], int t) {
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      values<ONE>(x, s, load_slice(consumer.v, s), SliceColumns(consumer.columns, s, lane),
                  ONE ? make_float4(0, 0, 0, 0) : references(t, s));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#if IS_FLOAT16
        p[s][i] = to_fp16x2(x[8 * s + 2 * i], x[8 * s + 2 * i + 1]);
#else
        p[s][i] = to_bf16x2(x[8 * s + 2 * i], x[8 * s + 2 * i + 1]);
#endif
    }
  }

  // Start sum += p times the tile's keys.
  __device__ __forceinline__ void gather(u32 keys) {
    warpgroup_arrive();
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      const u32 b = transposed_descriptor(keys, K_SLICE_TILE_BYTES) + s * (16 * K_SLICE / 16);
#if IS_FLOAT16
      wgmma_rows_fp16(sum, p[s], b);
#else
      wgmma_rows_bf16(sum, p[s], b);
#endif
    }
    warpgroup_commit();
  }

  __device__ __forceinline__ void end_tile(int) {}

  // Consumer 0 writes, then consumer 1 adds. Consumer 1 waits at GRADIENT_WRITTEN until consumer 0 has
  // written; consumer 0 arrives there without waiting. Each uses the barrier once a query tile, and they
  // meet at NEW_QUERY_TILE before its next use, so no arrival counts for another query tile. Warps converge
  // first: bar.sync and bar.arrive count all threads of a warp at once, and lanes diverge before them.
  __device__ __forceinline__ void end_query_tile(const Work& w) {
    fence_accumulators(sum);
    __syncwarp();
    if (lane.consumer == 1) named_barrier_sync(GRADIENT_WRITTEN, 128 * WARPGROUPS);
    const bool there = add || lane.consumer == 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(w.query_tile, h);
      if (row >= b.q.rows) continue;
      float* to = out + row * stride;
#pragma unroll
      for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * j + 2 * lane.t + e;
          if (column < columns) to[column] = sum[4 * j + 2 * h + e] + (there ? to[column] : 0);
        }
    }
    __syncwarp();
    if (lane.consumer == 0) named_barrier_arrive(GRADIENT_WRITTEN, 128 * WARPGROUPS);
  }
};

extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
sweep_narrow(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ Block block, i64 segments,
             const __grid_constant__ Factors factors, float* out, i64 stride, i64 columns, i64 add) {
  static_assert(STAGES % K_SLICES == 0, "K-slices of a tile are adjacent");
  SweepShared<Narrow>& shared = sweep_shared<Narrow>();
  const Lane lane;
  Narrow narrow{{block, lane, shared.consumer[lane.consumer & 1], factors,
                 (float)(block.scale.get() * LOG2_E), !COLUMNS || *factors.one_exponential},
                out, stride, (int)columns, add != 0};
  sweep(shared, q, k, block, (int)segments, narrow, lane);
}
