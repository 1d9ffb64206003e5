// Pairwise sigmoid as a sweep (sweep/sweep.cuh): the losses and the gradient block P of tiled/sigmoid.cu, which has the
// equations, at the speed of the tensor cores. There is one pass; cuBLAS multiplies P by features afterwards.
#include "sm90/sweep/logits.cuh"
#include "sm90/sweep/strip.cuh"

// A pair of base-2 logit z has the loss log(1 + e) and the gradient a e / (1 + e), with e = 2^z. Most logits are far
// below 0, so that e is small. A warp has 16 rows of each tile, and chooses one formula for all pairs of these rows:
//   - SHORT_SERIES: all logits are below MAX_SHORT_SERIES_LOGIT, and USES_SHORT_SERIES. Series in e up to e^2 replace
//     the division and the logarithm. Their relative error is at most 3e-7 for the loss and 1e-6 for P.
//   - SERIES: all logits are below MAX_SERIES_LOGIT. Series in e up to e^5 replace the division and the logarithm.
//   - DIVISION: logits have any size.
//   - WITH_POSITIVES (POSITIVE_IDS): logits have any size, and some of the pairs are positives by their ids.
enum { DIVISION, SERIES, SHORT_SERIES, WITH_POSITIVES };
constexpr float MAX_SERIES_LOGIT = -5.0f;
constexpr float MAX_SHORT_SERIES_LOGIT = -10.0f;
// BF16, FP16: an element of P is one 16-bit number, whose rounding is larger than the error of the short series.
// BF16X3, FP16X3: an element of P is the sum of two 16-bit numbers, and warps use no short series.
constexpr bool USES_SHORT_SERIES = PARTS == 1;

// Sums of a row, over the columns of one thread: of the losses, of P, and of P x (MOMENTS).
struct RowSums {
  float loss, gradient, moment;
};

struct SigmoidLoss {
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
  const float* row_factor;  // [rows]: a_i
  double* positive_logits;  // these four: see the kernel
  float2* row_sums;
  float* row_moments;
  i64 row_stride;
  GradientStrip out;  // writes to the gradient block
  double scale;
  float c, bias;  // base-2 logits are z = c x + bias

  Work work;  // the query tile
  Rows rows;
  float a[2];            // a_i of this thread's two rows
  RowSums sums[2];       // of the two rows, over the query tile so far
  RowSums tile_sums[2];  // of the two rows, over the current tile; its moments are added to `sums` at once

  __device__ __forceinline__ void begin_query_tile(const Work& w) {
    work = w;
    rows.load(b, w.query_tile, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(w.query_tile, h);
      a[h] = row < b.q.rows ? row_factor[row] : 0;
      sums[h] = RowSums{};
    }
  }

  __device__ __forceinline__ void publish(int t) { consumer.columns.publish(b, t, lane); }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [&](i64 index, float product) {
      positive_logits[index] = scale * (double)product;
    });
#pragma unroll
    for (int h = 0; h < 2; ++h) tile_sums[h] = RowSums{};
    float largest_logit = x[0];
#pragma unroll
    for (int i = 1; i < 64; ++i) largest_logit = fmaxf(largest_logit, x[i]);
    largest_logit = fmaf(c, largest_logit, bias);
#if POSITIVE_IDS
    if (__any_sync(ALL_LANES, may_have_equal_ids(t))) {
      const Positives positives(*this);
      bool any = false;
#pragma unroll
      for (int i = 0; i < 64; ++i) any |= positives.have(i);
      if (__any_sync(ALL_LANES, any)) {
        differentiate<WITH_POSITIVES>(x, t);
        return;
      }
    }
#endif
    if (USES_SHORT_SERIES && __all_sync(ALL_LANES, largest_logit < MAX_SHORT_SERIES_LOGIT))
      differentiate<SHORT_SERIES>(x, t);
    else if (__all_sync(ALL_LANES, largest_logit < MAX_SERIES_LOGIT)) differentiate<SERIES>(x, t);
    else differentiate<DIVISION>(x, t);
  }

#if POSITIVE_IDS
  // Which pairs of this thread in a tile are positives, by equal positive ids, and their weights. The numbers of rows
  // are loaded only for tiles that may have such pairs: the accumulators leave too few registers to keep these numbers.
  struct Positives {
    const SigmoidLoss& loss;
    i64 ids[2];        // query_positive_ids of this thread's two rows
    float weights[2];  // query_pair_weights of the two rows

    __device__ __forceinline__ Positives(const SigmoidLoss& sigmoid) : loss(sigmoid) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i64 row = min(sigmoid.lane.get_row(sigmoid.work.query_tile, h), sigmoid.b.q.rows - 1);
        ids[h] = sigmoid.b.query_positive_ids[row], weights[h] = sigmoid.b.query_pair_weights[row];
      }
    }
    // Whether the positive ids of the pair of x[i] are equal.
    __device__ __forceinline__ bool have(int i) const {
      return ids[i / 2 % 2] == loss.consumer.columns.key_positive_ids[get_column(i, loss.lane)];
    }
    // The weight of the pair of x[i], if it is a positive. Columns' ids are in the order of the columns, but their real
    // numbers are in the order of `find_slice_position`.
    __device__ __forceinline__ float weight(int i) const {
      return weights[i / 2 % 2] + loss.consumer.columns.key_pair_weights[find_slice_position(get_column(i, loss.lane))];
    }
  };
  // Whether tile t may have pairs of equal positive ids, by its bit in `positive_tiles`. Without `positive_tiles`, each
  // tile may: the caller passes null if the block does not begin at a tile of the matrix.
  __device__ __forceinline__ bool may_have_equal_ids(int t) const {
    if (!b.positive_tiles) return true;
    const i64 query_tile = (u64)(b.first_row + lane.get_row(work.query_tile, 0)) / POSITIVE_TILE;
    const i64 key_tile = (u64)b.first_column / POSITIVE_TILE + t;
    return b.positive_tiles[query_tile * b.positive_tiles_bytes + (u64)key_tile / 8] >> key_tile % 8 & 1;
  }
#endif

  // x <- P; adds up losses, P and P x of this thread's rows, and stores P slice by slice.
  template <int FORMULA>
  __device__ __forceinline__ void differentiate(float (&x)[64], int t) {
    const int strip_row = work.query_tile * QUERY_TILE_ROWS + lane.row() - lane.g;  // the first row of the warp's strip
#if POSITIVE_IDS
    const Positives positives(*this);  // the compiler loads its numbers only with WITH_POSITIVES
#endif
#pragma unroll
    for (int s = 0; s < TILE_SLICES; ++s) {
#pragma unroll
      for (int i = 8 * s; i < 8 * s + 8; ++i) {
        const int h = i / 2 % 2;
        const float z = fmaf(c, x[i], bias);
        float product = 0;
        // P takes the place of x, which the moment needs. Without the copy, the compiler moves wgmma's accumulators
        if (MOMENTS) product = copied(x[i]);
        if (FORMULA == SHORT_SERIES) {
          const float e = exp2_(z), ea = e * a[h];
          tile_sums[h].loss = fmaf(fmaf(e, -0.5f, 1.0f), e, tile_sums[h].loss);
          x[i] = fmaf(-e, ea, ea);
        } else if (FORMULA == SERIES) {
          const float e = exp2_(z);
          // log1p_by_e * e = log(1 + e), and (1 + g * e) * e = e / (1 + e)
          float log1p_by_e = fmaf(e, 0.2f, -0.25f), g = e - 1;
          log1p_by_e = fmaf(log1p_by_e, e, 1.0f / 3);
          log1p_by_e = fmaf(log1p_by_e, e, -0.5f);
          g = fmaf(g, e, 1.0f);
          log1p_by_e = fmaf(log1p_by_e, e, 1.0f);
          g = fmaf(g, e, -1.0f);
          tile_sums[h].loss = fmaf(log1p_by_e, e, tile_sums[h].loss);
          x[i] = fmaf(g, e, 1.0f) * e * a[h];
#if POSITIVE_IDS
        } else if (FORMULA == WITH_POSITIVES) {
          const bool positive = (x[i] != EXCLUDED) & positives.have(i);
          const float weight = positive ? positives.weight(i) : 1, y = positive ? -z : z;
          const float e = exp2_(-fabsf(y));
          float sigmoid_of_abs, log1p;
          sigmoid_parts(e, sigmoid_of_abs, log1p);
          tile_sums[h].loss = fmaf(weight, fmaf(fmaxf(y, 0), (float)LN_2, log1p), tile_sums[h].loss);
          x[i] = (y < 0 ? e * sigmoid_of_abs : sigmoid_of_abs) * (positive ? -weight : weight) * a[h];
#endif
        } else {
          const float e = exp2_(-fabsf(z));
          float sigmoid_of_abs, log1p;
          sigmoid_parts(e, sigmoid_of_abs, log1p);
          tile_sums[h].loss += fmaf(fmaxf(z, 0), (float)LN_2, log1p);
          x[i] = (z < 0 ? e * sigmoid_of_abs : sigmoid_of_abs) * a[h];
        }
        tile_sums[h].gradient += x[i];
        if (MOMENTS) sums[h].moment = fmaf(x[i], product, sums[h].moment);
#if NORM_FACTORS
        x[i] *= rows.factor[h] * consumer.columns.factor[get_column(i, lane)];
#endif
      }
      if (GRADIENT) out.store(x, s, strip_row, t * TILE_COLUMNS, b, lane);
    }
  }

  __device__ __forceinline__ void end_tile(int) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h].loss += tile_sums[h].loss;
      sums[h].gradient += tile_sums[h].gradient;
    }
  }

  // Adds up the rows over the four threads of each row, and leaves the sums in memory.
  __device__ __forceinline__ void end_query_tile(const Work& w) {
    if (GRADIENT) out.end(lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (MOMENTS) add_over_lanes(sums[h].loss, sums[h].gradient, sums[h].moment);
      else add_over_lanes(sums[h].loss, sums[h].gradient);
      const i64 row = lane.get_row(w.query_tile, h);
      const i64 at = (ROW_SLOTS * w.segment + lane.slot()) * row_stride + row;
      if (lane.t == 0 && row < b.q.rows) {
        row_sums[at] = make_float2(sums[h].loss, sums[h].gradient);
        if (MOMENTS) row_moments[at] = sums[h].moment;
      }
    }
  }
};

//   - row_factor [rows]: a_i of tiled/sigmoid.cu, which is already divided by the gradient divisor
//   - positive_logits [rows]: logits of positives without the bias
//   - row_sums [ROW_SLOTS segments, row_stride]: (sum of losses, sum of P) over negatives, and with POSITIVE_IDS over
//     positives by ids, too
//   - row_moments (MOMENTS): sums of P x, in the layout of row_sums
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(CLUSTER_BLOCKS, 1, 1)
#endif
sweep_sigmoid(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
              const __grid_constant__ Block block, i64 segments,
              const __grid_constant__ Scalar bias, const float* row_factor, double* positive_logits,
              float2* row_sums, i64 row_stride, const __grid_constant__ GradientBlock gradient_block,
              const __grid_constant__ TensorMap gradient_map, float* row_moments) {
  SweepShared<SigmoidLoss>& shared = sweep_shared<SigmoidLoss>();
  const Lane lane;
  const double scale = block.scale.get();
  SigmoidLoss::WarpgroupShared& group = shared.group[lane.warpgroup % WARPGROUPS];
  SigmoidLoss loss{block, lane, shared.consumer[lane.consumer & 1], row_factor, positive_logits, row_sums,
                   row_moments, row_stride, GradientStrip(gradient_map, gradient_block, group.strips, lane),
                   scale, (float)logit_factor(scale * LOG2_E), (float)(bias.get() * LOG2_E)};
  sweep(shared, q, k, block, (int)segments, loss, lane);
}
