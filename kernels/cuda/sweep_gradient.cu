// Gradient fold as a sweep (sweep.cuh): the panel of P = dL/dx that gradient.cu computes, from the
// same factors, at the speed of the tensor cores.
//
// Heights here are c R / c = R rounded, so that c x_ij - R_i is one instruction (Factors of
// vectors.cu with `scaled`).
#include "sweep.cuh"

#ifndef COLUMNS
#define COLUMNS 1
#endif

struct Factors {
  const float *row_height, *a, *u;  // [rows]
  const float *column_height, *v;   // [columns]
  const i64* shared;
};

struct Gradient {
  struct Shared {  // of a warpgroup
    Columns columns;
    alignas(8) float height[2][COLUMNS ? TILE_COLUMNS : 2], v[2][COLUMNS ? TILE_COLUMNS : 2];
  };

  const Block& b;
  const Lane& lane;
  Shared& shared;
  const Factors& factors;
  const Panel& panel;
  float c;
  bool one_exponential;

  Work work;
  Rows rows;
  float height[2], a[2], u[2];
  PanelRows out;
  Column column;    // of the tile that comes next
  float next_height, next_v;
  int buffer;

  __device__ __forceinline__ void begin_panel(const Work& w) {
    work = w;
    rows.load(b, w.panel, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = (i64)w.panel * PANEL_ROWS + lane.row() + 8 * h;
      height[h] = rows.inside[h] ? factors.row_height[row] : 0;
      a[h] = rows.inside[h] ? factors.a[row] : 0;
      u[h] = COLUMNS && rows.inside[h] ? factors.u[row] : 0;
    }
  }

  __device__ __forceinline__ void fetch(int tile, int) {
    const i64 at = (i64)tile * TILE_COLUMNS + lane.thread;
    column.fetch(b, at);
    if (!COLUMNS) return;
    const bool inside = at < b.k.rows;
    next_height = inside && !one_exponential ? factors.column_height[at] : 0;
    next_v = inside ? factors.v[at] : 0;
  }
  __device__ __forceinline__ void publish(int buffer) {
    column.publish(shared.columns, buffer, lane.thread);
    if (!COLUMNS) return;
    shared.height[buffer][lane.thread] = next_height;
    shared.v[buffer][lane.thread] = next_v;
  }

  __device__ __forceinline__ void begin_tile(float (&x)[64], int t, int which) {
    buffer = which;
    prepare(x, rows, shared.columns, which, b, work.panel, t, lane, [](int, float) {});
    out.begin(panel, rows, (i64)work.panel * PANEL_ROWS + lane.row(), (i64)t * TILE_COLUMNS, lane);
  }

  __device__ __forceinline__ void slice(float (&x)[64], int s) {
    if (one_exponential) values<true>(x, s);
    else values<false>(x, s);
    out.store_slice(x, s, lane);
  }

  // x = P.
  template <bool ONE>
  __device__ __forceinline__ void values(float (&x)[64], int s) {
#pragma unroll
    for (int j = 2 * s; j < 2 * s + 2; ++j) {
      const int column = 8 * j + 2 * lane.t;
      float2 v = make_float2(0, 0), own = v, f = make_float2(1, 1);
      if (COLUMNS) v = *(const float2*)&shared.v[buffer][column];
      if (COLUMNS && !ONE) own = *(const float2*)&shared.height[buffer][column];
#if FACTORS
      f = *(const float2*)&shared.columns.factor[buffer][column];
#endif
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float &x0 = x[4 * j + 2 * h], &x1 = x[4 * j + 2 * h + 1];
        const float e0 = exp2_(fmaf(x0, c, -height[h])), e1 = exp2_(fmaf(x1, c, -height[h]));
        if (!COLUMNS) {
          x0 = e0 * a[h];
          x1 = e1 * a[h];
        } else if (ONE) {
          x0 = e0 * fmaf(u[h], v.x, a[h]);
          x1 = e1 * fmaf(u[h], v.y, a[h]);
        } else {
          x0 = fmaf(e0, a[h], exp2_(fmaf(x0, c, -own.x)) * v.x);
          x1 = fmaf(e1, a[h], exp2_(fmaf(x1, c, -own.y)) * v.y);
        }
        if (FACTORS) {
          x0 *= factor(h) * f.x;
          x1 *= factor(h) * f.y;
        }
      }
    }
  }
  __device__ __forceinline__ float factor(int h) const {
#if FACTORS
    return rows.factor[h];
#else
    return 1;
#endif
  }

  __device__ __forceinline__ void end_tile(int, int) {}
  __device__ __forceinline__ void end_panel(const Work&) {}
};

extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(BLOCKS, 1, 1)
#endif
sweep_gradient(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
               const __grid_constant__ Block block, i64 segments,
               const __grid_constant__ Factors factors, const __grid_constant__ Panel panel) {
  SweepShared<Gradient>& shared = sweep_shared<Gradient>();
  const Lane lane;
  Gradient gradient{block, lane, shared.epilogue[lane.warpgroup & 1], factors, panel,
                    (float)(block.scale.get() * LOG2_E), !COLUMNS || *factors.shared};
  sweep(shared, q, k, block, (int)segments, gradient, lane);
}
