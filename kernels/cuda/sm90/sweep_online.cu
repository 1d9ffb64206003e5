// Losses with one softmax in one pass, as a sweep (sweep/sweep.cuh): the gradient block e_ij = 2^(c x_ij - r_i), and
// the sum of each of its rows. Row i of dL/dx is e_i times a factor u_i = a_i 2^(r_i - R_i), with R_i the row's
// log-sum-exp in base 2, and a_i the upstream gradient times the weight of rows and the scale. So u_i is known only at
// the end (`end_online` in vectors/online.cuh). cuBLAS multiplies E by keys at once, and each row of dQ gets its factor
// at the end. dK = E' (u Q) needs u before the product. So if dK is wanted, a block has all keys, and cuBLAS multiplies
// when the block has been swept.
//
// The caller chooses the reference exponents r_i (online_references.cuh), so this kernel finds no maximum. If a sum
// is outside its bounds after a tile, r_i does not serve. Then the kernel searches the tile for the largest exponent of
// each row. `check_references` (vectors/online.cuh) sets new reference exponents from these numbers, and the caller
// launches the kernel again for such query tiles (`visited_tiles`). The largest exponent of all may lie in an earlier
// tile, in which the sum was still within its bounds. That tile is within the bounds of the new r_i, too.
//
// MOMENTS: also sums of e_ij x_ij.
#include "sm90/online_references.cuh"
#include "sm90/sweep/logits.cuh"
#include "sm90/sweep/strip.cuh"

static_assert(QUERY_TILE_ROWS % VISITED_TILE_ROWS == 0, "check_references tells which query tiles are computed again");

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
  const float* references;  // [rows]: r_i
  const double* before;     // [rows]: rows' sums over earlier blocks of columns, against r_i
  double* positive_logits;  // these four: see the kernel
  float2* row_partials;
  i64 row_stride;
  float* row_moments;
  GradientStrip out;  // writes to the gradient block
  double scale;       // scale log2 e
  float c;            // the same, rounded

  Work work;  // the query tile
  Rows rows;
  float reference[2];  // r_i of this thread's two rows
  float least;         // lower bound of both sums
  // Of this thread's two rows, over its columns of the query tile so far; four threads share a row. `high` is the
  // largest exponent, in the unit of products, of the tiles that were searched; LOW (-inf) if none was
  float sum[2], high[2], moment[2];

  // This thread's row h, in the block.
  __device__ __forceinline__ i64 row(int h) const { return lane.get_row(work.query_tile, h); }

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
      // A row with terms of earlier blocks may have none in this block: then its sum has no lower bound
      if (inside && before[row(h)] == 0) least = MIN_REFERENCED_SUM;
    }
  }

  __device__ __forceinline__ void publish(int t) {
    consumer.columns.publish(b, t, lane);
    rows.load_marks(b, work.query_tile, t, lane);
  }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [&](i64 index, float product) {
      positive_logits[index] = scale * (double)product;
    });
    const int strip_row = work.query_tile * QUERY_TILE_ROWS + lane.row() - lane.g;
    float e[64], tile_sum[2] = {0, 0};
#pragma unroll
    for (int s = 0; s < TILE_SLICES; ++s) {
      const SliceColumns columns(consumer.columns, s, lane);
#pragma unroll
      for (int i = 8 * s; i < 8 * s + 8; ++i) {
        const int h = i / 2 % 2;
        e[i] = exp2_(fmaf(Options::exponent(x[i], get_pair(i, rows, columns)), c, -reference[h]));
        tile_sum[h] += e[i];
        if (MOMENTS) moment[h] = fmaf(e[i], x[i], moment[h]);
#if NORM_FACTORS
        e[i] *= consumer.columns.factor[get_column(i, lane)];  // the row's norm factor is applied to dQ
#endif
      }
      out.store(e, s, strip_row, t * TILE_COLUMNS, b, lane);
    }
    sum[0] += tile_sum[0];
    sum[1] += tile_sum[1];
    const bool good = fmaxf(sum[0], sum[1]) <= MAX_REFERENCED_SUM && fminf(sum[0], sum[1]) >= least;
    if (__all_sync(ALL_LANES, good)) return;
    // A sum of the strip is out of bounds: search the tile. A search too many costs only time, because check_references
    // decides which query tiles are computed again
#pragma unroll
    for (int h = 0; h < 2; ++h) high[h] = fmaxf(high[h], find_largest_exponent(x, h, rows, consumer.columns, lane));
  }

  __device__ __forceinline__ void end_tile(int) {}

  // Adds the sums of the four threads of each row, and leaves them in memory.
  __device__ __forceinline__ void end_query_tile(const Work& w) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int lanes = 1; lanes < SWEEP_ROW_THREADS; lanes *= 2) {
        high[h] = fmaxf(high[h], __shfl_xor_sync(ALL_LANES, high[h], lanes));
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], lanes);
        if (MOMENTS) moment[h] += __shfl_xor_sync(ALL_LANES, moment[h], lanes);
      }
      const i64 at = (ROW_SLOTS * w.segment + lane.slot()) * row_stride + row(h);
      if (lane.t == 0 && row(h) < b.q.rows) {
        row_partials[at] = make_float2(high[h], sum[h]);
        if (MOMENTS) row_moments[at] = moment[h];
      }
    }
    out.end(lane);
  }
};

//   - references [rows]: r_i. before [rows]: rows' sums over earlier blocks; 0 in the first block
//   - positive_logits [rows]: base-2 logits of positives
//   - row_partials [ROW_SLOTS segments, row_stride]: (`high`, sum), over the four threads of the row
//   - row_moments (MOMENTS): sums of e_ij x_ij, in the layout of row_partials
//   - visited_tiles: null in the first launch; then the query tiles that are computed again (`is_visited`)
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(CLUSTER_BLOCKS, 1, 1)
#endif
sweep_online(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ Block block, i64 segments, const float* references,
             const double* before, double* positive_logits, float2* row_partials, i64 row_stride,
             const int* visited_tiles, const __grid_constant__ GradientBlock gradient_block,
             const __grid_constant__ TensorMap gradient_map, float* row_moments) {
  SweepShared<Online>& shared = sweep_shared<Online>();
  const Lane lane;
  Online::WarpgroupShared& group = shared.group[lane.warpgroup % WARPGROUPS];
  const double scale = block.scale.get() * LOG2_E;
  Online online{block, lane, shared.consumer[lane.consumer & 1], references, before, positive_logits,
                row_partials, row_stride, row_moments, GradientStrip(gradient_map, gradient_block, group.strips, lane),
                scale,
                (float)scale};
  sweep(shared, q, k, block, (int)segments, online, lane, visited_tiles);
}
