// Gradient pass as a sweep (sweep/sweep.cuh): the gradient block P = dL/dx that tiled/gradient.cu computes, from
// the same factors, at the speed of the tensor cores. The log-sum-exp pass (sweep_lse.cu) comes before; cuBLAS
// multiplies P by features afterwards. For narrow rows, sweep_narrow.cu does both.
#include "sm90/sweep/gradient.cuh"
#include "sm90/sweep/strip.cuh"

struct Gradient : LogitGradient {
  struct WarpgroupShared {
    GradientStrip::Shared strips;
  };

  GradientStrip out;  // writes to the gradient block

  // Computes P of tile t, and stores it.
  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [](i64, float) {});
    if (one_exponential) differentiate_and_store<true>(x, t);
    else differentiate_and_store<false>(x, t);
  }
  template <bool ONE>
  __device__ __forceinline__ void differentiate_and_store(float (&x)[64], int t) {
    const int strip_row = work.query_tile * QUERY_TILE_ROWS + lane.row() - lane.g;  // the first row of the warp's strip
    float4 v = load_slice(consumer.v, 0);
    SliceColumns columns(consumer.columns, 0, lane);
#pragma unroll
    for (int s = 0; s < TILE_SLICES; ++s) {
      differentiate<ONE>(x, s, v, columns, ONE ? make_float4(0, 0, 0, 0) : load_references(t, s));
      if (s + 1 < TILE_SLICES) {  // the next slice's numbers are loaded ahead of the stores, which take long
        v = load_slice(consumer.v, s + 1);
        columns = SliceColumns(consumer.columns, s + 1, lane);
      }
      out.store(x, s, strip_row, t * TILE_COLUMNS, b, lane);
    }
  }
  __device__ __forceinline__ void end_tile(int) {}
  __device__ __forceinline__ void end_query_tile(const Work&) { out.end(lane); }
};

// `factors`: a, u, v and reference exponents of the block's rows and columns. `gradient_map`: the tensor map of
// `gradient_block`. `visited_tiles`: the query tiles that the sweep visits, which are those without cached exponentials
// (`is_visited`); null: all.
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(CLUSTER_BLOCKS, 1, 1)
#endif
sweep_gradient(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
               const __grid_constant__ Block block, i64 segments,
               const __grid_constant__ Factors factors, const __grid_constant__ GradientBlock gradient_block,
               const __grid_constant__ TensorMap gradient_map, const int* visited_tiles) {
  SweepShared<Gradient>& shared = sweep_shared<Gradient>();
  const Lane lane;
  Gradient::WarpgroupShared& group = shared.group[lane.warpgroup % WARPGROUPS];
  Gradient gradient{{block, lane, shared.consumer[lane.consumer & 1], factors,
                     (float)(block.scale.get() * LOG2_E), !COLUMNS || *factors.one_exponential},
                    GradientStrip(gradient_map, gradient_block, group.strips, lane)};
  sweep(shared, q, k, block, (int)segments, gradient, lane, visited_tiles);
}
