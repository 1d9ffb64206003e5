// Gradient fold of narrow rows as a sweep (sweep.cuh, NARROW): P = dL/dx never leaves the registers.
// dQ (+)= P K, in the panels' unit, comes of it at once: with rows this short, writing P and reading it
// twice would take longer than the products.
#include "sm90/sweep_gradient.cuh"

constexpr int WIDTH = 64 * SLABS;  // of rows, in elements

struct Narrow : OfLogits {
  struct Group {};

  float* out;  // [rows, stride]
  i64 stride;
  int columns;    // of the features
  bool add;       // to what is there

  u32 p[SLICES][4];      // of this team's last tile, as products take it
  float sum[WIDTH / 2];  // of its tiles so far

  __device__ __forceinline__ void begin_panel(const Work& w) {
    OfLogits::begin_panel(w);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0;
  }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, team.columns, b, work.panel, t, lane, [](int, float) {});
    if (one_exponential) round<true>(x);
    else round<false>(x);
  }
  template <bool ONE>
  __device__ __forceinline__ void round(float (&x)[64]) {
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      values<ONE>(x, s, of_slice(team.v, s), of_slice(team.height, ONE ? -1 : s));
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
    products_begin();
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      const u32 b = matrix_across(keys, SLAB_BYTES) + s * (16 * SLAB / 16);
#if IS_FLOAT16
      wgmma_rows_fp16(sum, p[s], b);
#else
      wgmma_rows_bf16(sum, p[s], b);
#endif
    }
    products_commit();
  }

  __device__ __forceinline__ void end_tile(int) {}

  // Team 0 writes, then team 1 adds. Team 1 waits at PANEL_WRITTEN so that it reads what team 0 has
  // written; team 0 arrives there without waiting. Both use the barrier once a panel, and they meet at
  // NEW_PANEL before its next use, so no arrival can count for another panel. Warps converge first: a
  // barrier of a warp counts all its threads at once, and in front of it lanes have gone separate ways.
  __device__ __forceinline__ void end_panel(const Work& w) {
    arrived(sum);
    __syncwarp();
    if (lane.team == 1) sync_some(PANEL_WRITTEN, 128 * WARPGROUPS);
    const bool there = add || lane.team == 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.row_of(w.panel, h);
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
    if (lane.team == 0) arrive_some(PANEL_WRITTEN, 128 * WARPGROUPS);
  }
};

extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
sweep_narrow(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ Block block, i64 segments,
             const __grid_constant__ Factors factors, float* out, i64 stride, i64 columns, i64 add) {
  static_assert(STAGES % SLABS == 0, "slabs of a tile lie beside each other");
  SweepShared<Narrow>& shared = sweep_shared<Narrow>();
  const Lane lane;
  Narrow narrow{{block, lane, shared.team[lane.team & 1], factors,
                 (float)(block.scale.get() * LOG2_E), !COLUMNS || *factors.shared},
                out, stride, (int)columns, add != 0};
  sweep(shared, q, k, block, (int)segments, narrow, lane);
}
