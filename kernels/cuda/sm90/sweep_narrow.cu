// Gradient pass of narrow rows, of up to 256 bytes, as a sweep (sweep/sweep.cuh, IN_REGISTERS). P = dL/dx, divided by
// the gradient divisor, stays in registers, and dQ += P K is accumulated at once. For rows this short, it would take
// longer to write P and to read it twice than to compute the products. There is no dK: the caller uses this kernel if
// queries are the keys, so that dQ has both gradients. It visits all pairs: a triangle would need dK for its columns.
#include "sm90/sweep/gradient.cuh"

constexpr int WIDTH = 64 * K_SLICES;  // elements of a row, with padding

struct Narrow : LogitGradient {
  struct WarpgroupShared {};

  float* out;  // [rows of the block, stride]: dQ, in float32
  i64 stride;  // elements from row to row of `out`
  int feature_count;  // features of a row, up to WIDTH
  bool add;  // whether dQ is added to the numbers in `out`; otherwise it overwrites them

  u32 p[TILE_SLICES][4];  // P of this consumer's last tile, as an operand of wgmma
  float sum[WIDTH / 2];   // dQ of the query tile, over this consumer's tiles so far, in the layout of wgmma

  __device__ __forceinline__ void begin_query_tile(const Work& w) {
    LogitGradient::begin_query_tile(w);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0;
  }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [](i64, float) {});
    if (one_exponential) differentiate_and_round<true>(x, t);
    else differentiate_and_round<false>(x, t);
  }
  // p <- P of tile t, rounded to 16 bits.
  template <bool ONE>
  __device__ __forceinline__ void differentiate_and_round(float (&x)[64], int t) {
#pragma unroll
    for (int s = 0; s < TILE_SLICES; ++s) {
      differentiate<ONE>(x, s, load_slice(consumer.v, s), SliceColumns(consumer.columns, s, lane),
                  ONE ? make_float4(0, 0, 0, 0) : load_references(t, s));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#if IS_FLOAT16
        p[s][i] = to_fp16x2(x[8 * s + 2 * i], x[8 * s + 2 * i + 1]);
#else
        p[s][i] = to_bf16x2(x[8 * s + 2 * i], x[8 * s + 2 * i + 1]);
#endif
    }
  }

  // Starts the product sum += p K, with the keys of the tile of p at `keys`, an address in shared memory. The caller
  // waits for the product.
  __device__ __forceinline__ void multiply_by_keys(u32 keys) {
    warpgroup_arrive();
#pragma unroll
    for (int s = 0; s < TILE_SLICES; ++s) {
      const u32 key_rows = transposed_descriptor(keys, K_SLICE_TILE_BYTES) + s * (16 * K_SLICE / 16);  // 16 keys
#if IS_FLOAT16
      wgmma_rows_fp16(sum, p[s], key_rows);
#else
      wgmma_rows_bf16(sum, p[s], key_rows);
#endif
    }
    warpgroup_commit();
  }

  __device__ __forceinline__ void end_tile(int) {}

  // Each consumer has dQ over every other key tile. Consumer 0 writes its dQ, and then consumer 1 adds its own.
  // Consumer 1 waits at GRADIENT_WRITTEN until consumer 0 has written. Consumer 0 arrives there without waiting. Each
  // consumer uses the barrier once in a query tile, and both meet at NEW_QUERY_TILE before its next use, so no arrival
  // counts for another query tile. Lanes of a warp have to be together at the barrier (__syncwarp), because bar.sync
  // and bar.arrive count all threads of a warp at once.
  __device__ __forceinline__ void end_query_tile(const Work& w) {
    fence_accumulators(sum);
    __syncwarp();
    if (lane.consumer == 1) named_barrier_sync(GRADIENT_WRITTEN, 128 * WARPGROUPS);
    const bool adds = add || lane.consumer == 1;
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
          if (column < feature_count) to[column] = sum[4 * j + 2 * h + e] + (adds ? to[column] : 0);
        }
    }
    __syncwarp();
    if (lane.consumer == 0) named_barrier_arrive(GRADIENT_WRITTEN, 128 * WARPGROUPS);
  }
};

// `factors`: as in sweep_gradient.cu. `out`, `stride`, `feature_count` and `add`: see struct Narrow. `segments` is 1,
// because one thread block adds up a query tile's gradients.
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
sweep_narrow(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ Block block, i64 segments,
             const __grid_constant__ Factors factors, float* out, i64 stride, i64 feature_count, i64 add) {
  static_assert(STAGES % K_SLICES == 0, "K-slices of a tile are adjacent");
  SweepShared<Narrow>& shared = sweep_shared<Narrow>();
  const Lane lane;
  Narrow narrow{{block, lane, shared.consumer[lane.consumer & 1], factors,
                 (float)(block.scale.get() * LOG2_E), !COLUMNS || *factors.one_exponential},
                out, stride, (int)feature_count, add != 0};
  sweep(shared, q, k, block, (int)segments, narrow, lane);
}
