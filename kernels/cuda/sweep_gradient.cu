// Gradient fold as a sweep (sweep.cuh): the panel of P = dL/dx that gradient.cu computes, from the
// same factors, at the speed of the tensor cores.
//
// Heights here are c R / c = R rounded, so that c x_ij - R_i is one instruction (Factors of
// vectors.cu with `scaled`).
#include "sweep_logits.cuh"
#include "sweep_panel.cuh"

#ifndef COLUMNS
#define COLUMNS 1
#endif

struct Factors {
  const float *row_height, *a, *u;  // [rows]
  const float *column_height, *v;   // [columns]
  const i64* shared;
};

struct Gradient {
  static constexpr bool SUMS = false, PUBLISHES = COLUMNS;
  struct Team {
    Columns columns;
    // The columns of a thread's slice lie beside each other
    alignas(16) float v[COLUMNS ? TILE_COLUMNS : 4], height[COLUMNS ? TILE_COLUMNS : 4];
  };
  struct Group {
    PanelStrip::Shared strips;
  };

  const Block& b;
  const Lane& lane;
  Team& team;
  const Factors& factors;
  PanelStrip out;
  float c;
  bool one_exponential;

  Work work;
  Rows rows;
  float height[2], a[2], u[2];

  __device__ __forceinline__ void begin_panel(const Work& w) {
    work = w;
    rows.load(b, w.panel, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = (i64)w.panel * PANEL_ROWS + lane.row() + 8 * h;
      const bool inside = row < b.q.rows;
      height[h] = inside ? factors.row_height[row] : 0;
      a[h] = inside ? factors.a[row] : 0;
      u[h] = COLUMNS && inside ? factors.u[row] : 0;
    }
  }

  __device__ __forceinline__ void publish(int t) {
    team.columns.publish(b, t, lane);
    if (!COLUMNS) return;
    const int i = lane.thread % 16;  // of a slice: 8 j + 2 t + e -> 4 t + 2 j + e
    const int to = lane.thread - i + i % 8 / 2 * 4 + i / 8 * 2 + i % 2;
    const i64 at = (i64)t * TILE_COLUMNS + lane.thread;
    const bool inside = at < b.k.rows;
    if (lane.half == 0) team.v[to] = inside ? factors.v[at] : 0;
    if (lane.half == HALVES - 1 && !one_exponential)
      team.height[to] = inside ? factors.column_height[at] : 0;
  }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, team.columns, b, work.panel, t, lane, [](int, float) {});
    if (one_exponential) write<true>(x, t);
    else write<false>(x, t);
  }
  template <bool ONE>
  __device__ __forceinline__ void write(float (&x)[64], int t) {
    const int row = work.panel * PANEL_ROWS + lane.row() - lane.g;
    float4 v = of_slice(team.v, 0);
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      values<ONE>(x, s, v, of_slice(team.height, ONE ? -1 : s));
      if (s + 1 < SLICES) v = of_slice(team.v, s + 1);  // ahead of the stores, which take long
      out.store(x, s, row, t * TILE_COLUMNS, b, lane);
    }
  }
  // This thread's four columns of a slice.
  __device__ __forceinline__ float4 of_slice(const float* of_columns, int s) const {
    if (!COLUMNS || s < 0) return make_float4(0, 0, 0, 0);
    return *(const float4*)(of_columns + 16 * s + 4 * lane.t);
  }

  // x = P.
  template <bool ONE>
  __device__ __forceinline__ void values(float (&x)[64], int s, const float4& vs,
                                         const float4& owns) {
#pragma unroll
    for (int j = 2 * s; j < 2 * s + 2; ++j) {
      const float2 v = j % 2 ? make_float2(vs.z, vs.w) : make_float2(vs.x, vs.y);
      const float2 own = j % 2 ? make_float2(owns.z, owns.w) : make_float2(owns.x, owns.y);
      float2 f = make_float2(1, 1);
#if FACTORS
      f = *(const float2*)&team.columns.factor[8 * j + 2 * lane.t];
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

  __device__ __forceinline__ void end_tile(int) {}
  __device__ __forceinline__ void end_panel(const Work&) { out.end(lane); }
};

extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(BLOCKS, 1, 1)
#endif
sweep_gradient(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
               const __grid_constant__ Block block, i64 segments,
               const __grid_constant__ Factors factors, const __grid_constant__ Panel panel,
               const __grid_constant__ TensorMap panel_map) {
  SweepShared<Gradient>& shared = sweep_shared<Gradient>();
  const Lane lane;
  Gradient::Group& group = shared.group[lane.warpgroup % WARPGROUPS];
  Gradient gradient{block, lane, shared.team[lane.team & 1], factors,
                    PanelStrip(panel_map, panel, group.strips, lane),
                    (float)(block.scale.get() * LOG2_E), !COLUMNS || *factors.shared};
  sweep(shared, q, k, block, (int)segments, gradient, lane);
}
