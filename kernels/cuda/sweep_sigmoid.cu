// Pairwise sigmoid as a sweep (sweep.cuh): what sigmoid.cu computes, at the speed of the tensor cores.
#include "sweep.cuh"

#ifndef PANEL
#define PANEL 1
#endif

struct SigmoidLoss {
  struct Shared {  // of a warpgroup
    Columns columns;
  };

  const Block& b;
  const Lane& lane;
  Shared& shared;
  const float* row_factor;
  double* positive;
  float2* row_sums;
  i64 row_stride;
  const Panel& panel;
  double scale;
  float c, bias;  // in base 2

  Work work;
  Rows rows;
  float a[2];
  float2 sums[2];   // (loss in base 2, sum of P) of the panel so far; this thread's columns
  float2 of_tile[2];
  PanelRows out;
  Column column;
  int buffer;

  __device__ __forceinline__ i64 slot() const {
    return WIDE ? 2 * work.segment + lane.warpgroup : work.segment;
  }

  __device__ __forceinline__ void begin_panel(const Work& w) {
    work = w;
    rows.load(b, w.panel, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = (i64)w.panel * PANEL_ROWS + lane.row() + 8 * h;
      a[h] = rows.inside[h] ? row_factor[row] : 0;
      sums[h] = make_float2(0, 0);
    }
  }

  __device__ __forceinline__ void fetch(int tile, int) {
    column.fetch(b, (i64)tile * TILE_COLUMNS + lane.thread);
  }
  __device__ __forceinline__ void publish(int buffer) {
    column.publish(shared.columns, buffer, lane.thread);
  }

  __device__ __forceinline__ void begin_tile(float (&x)[64], int t, int which) {
    buffer = which;
    prepare(x, rows, shared.columns, which, b, work.panel, t, lane, [&](int half, float value) {
      positive[(i64)work.panel * PANEL_ROWS + lane.row() + 8 * half] = scale * (double)value;
    });
    const i64 row = (i64)work.panel * PANEL_ROWS + lane.row();
    if (PANEL) out.begin(panel, rows, row, (i64)t * TILE_COLUMNS, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) of_tile[h] = make_float2(0, 0);
  }

  __device__ __forceinline__ void slice(float (&x)[64], int s) {
#pragma unroll
    for (int i = 8 * s; i < 8 * s + 8; ++i) {
      const int h = i / 2 % 2;
      const float z = fmaf(c, x[i], bias), e = exp2_(-fabsf(z));
      float share, log1p;
      sigmoid_parts(e, share, log1p);
      of_tile[h].x += fmaf(fmaxf(z, 0), (float)LN_2, log1p);
      const float g = (z < 0 ? e * share : share) * a[h];
      of_tile[h].y += g;
      x[i] = g;
#if FACTORS
      x[i] *= rows.factor[h] * shared.columns.factor[buffer][column_of(i, lane)];
#endif
    }
    if (PANEL) out.store_slice(x, s, lane);
  }

  __device__ __forceinline__ void end_tile(int, int) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h].x += of_tile[h].x;
      sums[h].y += of_tile[h].y;
    }
  }

  __device__ __forceinline__ void end_panel(const Work& w) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        sums[h].x += __shfl_xor_sync(ALL_LANES, sums[h].x, lanes);
        sums[h].y += __shfl_xor_sync(ALL_LANES, sums[h].y, lanes);
      }
      const i64 row = (i64)w.panel * PANEL_ROWS + lane.row() + 8 * h;
      if (lane.t == 0 && rows.inside[h]) row_sums[slot() * row_stride + row] = sums[h];
    }
  }
};

// positive [rows]: logits without the bias; row_sums [slots, row_stride].
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(BLOCKS, 1, 1)
#endif
sweep_sigmoid(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
              const __grid_constant__ Block block, i64 segments,
              const __grid_constant__ Scalar bias, const float* row_factor, double* positive,
              float2* row_sums, i64 row_stride, const __grid_constant__ Panel panel) {
  SweepShared<SigmoidLoss>& shared = sweep_shared<SigmoidLoss>();
  const Lane lane;
  const double scale = block.scale.get();
  SigmoidLoss loss{block, lane, shared.epilogue[lane.warpgroup & 1], row_factor, positive,
                   row_sums, row_stride, panel, scale, (float)(scale * LOG2_E),
                   (float)(bias.get() * LOG2_E)};
  sweep(shared, q, k, block, (int)segments, loss, lane);
}
