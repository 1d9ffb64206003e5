// One-sided losses in one pass, as a sweep (sweep/sweep.cuh): the gradient block e_ij = 2^(c x_ij - r_i), and
// the sum of each of its rows. dQ takes nothing but E K, in float32, and one factor u_i for each row, which
// follows from the log-sum-exps that are known at the end. Then dK takes E' (u Q).
//
// The caller chooses the reference exponents r_i (reference_exponents.cuh), so this kernel finds no maximum. If a
// sum is outside its bounds, r_i does not serve. From that tile on, the kernel searches the tiles of the query tile
// for the largest product of each row. The caller sets new reference exponents from these products, and launches the
// kernel again for such query tiles (`visited_tiles`). The largest product of all may lie in an earlier tile, in
// which the sum was still within its bounds. That tile is within the bounds of the new r_i, too.
//
// MOMENTS: also sums of e_ij x_ij.
#include "sm90/reference_exponents.cuh"
#include "sm90/sweep/logits.cuh"
#include "sm90/sweep/strip.cuh"

static_assert(QUERY_TILE_ROWS % ONLINE_TILE_ROWS == 0, "check_references tells which query tiles are computed again");

struct Online {
  static constexpr bool SUMS = false, PUBLISHES = false;
  struct ConsumerShared {
    Columns columns;
  };
  struct WarpgroupShared {
    GradientStrip::Shared strips;
  };

  const Block& b;
  const Lane& lane;
  ConsumerShared& consumer;
  const float* references;
  const double* before;  // rows' sums over the blocks before
  double* positive;
  float2* row_pairs;  // [slots, row_stride]
  i64 row_stride;
  float* row_moments;  // like the pairs (MOMENTS)
  GradientStrip out;
  double scale;
  float c;

  Work work;
  Rows rows;
  float reference[2], least;
  float sum[2], high[2], moment[2];  // so far; this thread's, of four that share a row

  __device__ __forceinline__ i64 row(int h) const {  // of this thread's two
    return lane.get_row(work.query_tile, h);
  }

  __device__ __forceinline__ void begin_query_tile(const Work& w) {
    work = w;
    rows.load(b, w.query_tile, lane);
    least = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool inside = row(h) < b.q.rows;
      reference[h] = inside ? references[row(h)] : 0;
      sum[h] = inside ? 0 : 1;  // padding is within the bounds
      high[h] = LOW;
      moment[h] = 0;
      // With terms from before, a row may have none in this block
      if (inside && before[row(h)] == 0) least = MIN_REFERENCED_SUM;
    }
  }

  __device__ __forceinline__ void publish(int t) {
    consumer.columns.publish(b, t, lane);
    rows.load_marks(b, work.query_tile, t, lane);
  }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [&](i64 pair, float value) {
      positive[pair] = scale * (double)value;
    });
    const int first_row = work.query_tile * QUERY_TILE_ROWS + lane.row() - lane.g;
    float e[64], tile_sum[2] = {0, 0};
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      const SliceColumns columns(consumer.columns, s, lane);
#pragma unroll
      for (int i = 8 * s; i < 8 * s + 8; ++i) {
        const int h = i / 2 % 2;
        e[i] = exp2_(fmaf(Options::exponent(x[i], get_pair(i, rows, columns)), c, -reference[h]));
        tile_sum[h] += e[i];
        if (MOMENTS) moment[h] = fmaf(e[i], x[i], moment[h]);
#if FACTORS
        e[i] *= consumer.columns.factor[get_column(i, lane)];  // the row's is taken at the end
#endif
      }
      out.store(e, s, first_row, t * TILE_COLUMNS, b, lane);
    }
    sum[0] += tile_sum[0];
    sum[1] += tile_sum[1];
    const bool good = fmaxf(sum[0], sum[1]) <= MAX_REFERENCED_SUM && fminf(sum[0], sum[1]) >= least;
    if (__all_sync(ALL_LANES, good)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) high[h] = fmaxf(high[h], largest(x, h, rows, consumer.columns, lane));
  }

  __device__ __forceinline__ void end_tile(int) {}

  __device__ __forceinline__ void end_query_tile(const Work& w) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int lanes = 1; lanes < SHARERS; lanes *= 2) {
        high[h] = fmaxf(high[h], __shfl_xor_sync(ALL_LANES, high[h], lanes));
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], lanes);
        if (MOMENTS) moment[h] += __shfl_xor_sync(ALL_LANES, moment[h], lanes);
      }
      const i64 at = (ROW_SLOTS * w.segment + lane.slot()) * row_stride + row(h);
      if (lane.t == 0 && row(h) < b.q.rows) {
        row_pairs[at] = make_float2(high[h], sum[h]);
        if (MOMENTS) row_moments[at] = moment[h];
      }
    }
    out.end(lane);
  }
};

//   - positive [rows]: base-2 logits of positives
//   - row_pairs [ROW_SLOTS segments, row_stride]: (largest product, if it was searched; sum)
//   - row_moments (MOMENTS): moments, in the layout of row_pairs
//   - visited_tiles: see `sweep`
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(BLOCKS, 1, 1)
#endif
sweep_online(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ Block block, i64 segments, const float* references,
             const double* before, double* positive, float2* row_pairs, i64 row_stride,
             const int* visited_tiles, const __grid_constant__ GradientBlock gradient_block,
             const __grid_constant__ TensorMap gradient_map, float* row_moments) {
  SweepShared<Online>& shared = sweep_shared<Online>();
  const Lane lane;
  Online::WarpgroupShared& group = shared.group[lane.warpgroup % WARPGROUPS];
  const double scale = block.scale.get() * LOG2_E;
  Online online{block, lane, shared.consumer[lane.consumer & 1], references, before, positive,
                row_pairs, row_stride, row_moments, GradientStrip(gradient_map, gradient_block, group.strips, lane),
                scale,
                (float)scale};
  sweep(shared, q, k, block, (int)segments, online, lane, visited_tiles);
}
