// Pairwise sigmoid as a sweep (sweep/sweep.cuh): what tiled/sigmoid.cu computes, at the speed of the tensor
// cores.
#include "sm90/sweep/logits.cuh"
#include "sm90/sweep/strip.cuh"


// Most tiles have no logit near 0. Where all base-2 logits z of a tile are below CALM, series in e = 2^z up
// to e^5 replace the division. Where all are below CALMER and P has 16 bits, series up to e^2 suffice: their
// error is 3e-7.
constexpr float CALM = -5.0f;
constexpr float CALMER = -10.0f;
constexpr bool HAS_CALMER = PARTS == 1;

// WITH_POSITIVES: by POSITIVE_IDS, and with logits of any size.
enum { ANY, CALM_TILE, CALMER_TILE, WITH_POSITIVES };

// Numbers of a row, or of its part in a tile.
struct RowSums {
  float loss, gradient, moment;  // sums of the losses, of P, and of P x (MOMENTS)
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
  const float* row_factor;
  double* positive;
  float2* row_sums;    // (loss, sum of P)
  float* row_moments;  // sums of P x (MOMENTS)
  i64 row_stride;
  GradientStrip out;
  double scale;
  float c, bias;  // in base 2

  Work work;
  Rows rows;
  float a[2];
  RowSums sums[2];  // of the query tile so far; this thread's columns
  RowSums tile_sums[2];

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
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [&](i64 pair, float value) {
      positive[pair] = scale * (double)value;
    });
#pragma unroll
    for (int h = 0; h < 2; ++h) tile_sums[h] = RowSums{};
    float most = x[0];
#pragma unroll
    for (int i = 1; i < 64; ++i) most = fmaxf(most, x[i]);
    most = fmaf(c, most, bias);
#if POSITIVE_IDS
    if (__any_sync(ALL_LANES, may_have_equal_ids(t))) {
      const Positives positives(*this);
      bool any = false;
#pragma unroll
      for (int i = 0; i < 64; ++i) any |= positives.have(i);
      if (__any_sync(ALL_LANES, any)) {
        slices<WITH_POSITIVES>(x, t);
        return;
      }
    }
#endif
    if (HAS_CALMER && __all_sync(ALL_LANES, most < CALMER)) slices<CALMER_TILE>(x, t);
    else if (__all_sync(ALL_LANES, most < CALM)) slices<CALM_TILE>(x, t);
    else slices<ANY>(x, t);
  }

#if POSITIVE_IDS
  // The positive pairs of a thread's rows with a tile, and their weights. Numbers of rows are loaded for those tiles that
  // may have such pairs: in registers, they would crowd out the accumulators of all other tiles.
  struct Positives {
    const SigmoidLoss& loss;
    i64 ids[2];
    float weights[2];

    __device__ __forceinline__ Positives(const SigmoidLoss& sigmoid) : loss(sigmoid) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i64 row = min(sigmoid.lane.get_row(sigmoid.work.query_tile, h), sigmoid.b.q.rows - 1);
        ids[h] = sigmoid.b.query_positive_ids[row], weights[h] = sigmoid.b.query_pair_weights[row];
      }
    }
    // Whether the ids of the pair of x[i] are equal.
    __device__ __forceinline__ bool have(int i) const {
      return ids[i / 2 % 2] == loss.consumer.columns.key_positive_ids[get_column(i, loss.lane)];
    }
    __device__ __forceinline__ float weight(int i) const {
      return weights[i / 2 % 2] + loss.consumer.columns.key_pair_weights[in_slices(get_column(i, loss.lane))];
    }
  };
  // Whether a tile may have pairs of equal ids: without `positive_tiles`, each tile may.
  __device__ __forceinline__ bool may_have_equal_ids(int t) const {
    if (!b.positive_tiles) return true;
    const i64 query_tile = (u64)(b.first_row + lane.get_row(work.query_tile, 0)) / POSITIVE_TILE;
    const i64 key_tile = (u64)b.first_column / POSITIVE_TILE + t;
    return b.positive_tiles[query_tile * b.positive_tiles_bytes + (u64)key_tile / 8] >> key_tile % 8 & 1;
  }
#endif

  template <int RANGE>
  __device__ __forceinline__ void slices(float (&x)[64], int t) {
    const int row = work.query_tile * QUERY_TILE_ROWS + lane.row() - lane.g;
#if POSITIVE_IDS
    const Positives positives(*this);  // not loaded in other ranges
#endif
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
#pragma unroll
      for (int i = 8 * s; i < 8 * s + 8; ++i) {
        const int h = i / 2 % 2;
        const float z = fmaf(c, x[i], bias);
        float product = 0;
        // P takes the place of x: without a copy, the accumulators of wgmma do not stay where they are
        if (MOMENTS) product = copied(x[i]);
        if (RANGE == CALMER_TILE) {  // log(1 + e) and e / (1 + e)
          const float e = exp2_(z), ea = e * a[h];
          tile_sums[h].loss = fmaf(fmaf(e, -0.5f, 1.0f), e, tile_sums[h].loss);
          x[i] = fmaf(-e, ea, ea);
        } else if (RANGE == CALM_TILE) {
          const float e = exp2_(z);
          float log1p = fmaf(e, 0.2f, -0.25f), g = e - 1;
          log1p = fmaf(log1p, e, 1.0f / 3);
          log1p = fmaf(log1p, e, -0.5f);
          g = fmaf(g, e, 1.0f);
          log1p = fmaf(log1p, e, 1.0f);
          g = fmaf(g, e, -1.0f);
          tile_sums[h].loss = fmaf(log1p, e, tile_sums[h].loss);
          x[i] = fmaf(g, e, 1.0f) * e * a[h];
#if POSITIVE_IDS
        } else if (RANGE == WITH_POSITIVES) {
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
#if FACTORS
        x[i] *= rows.factor[h] * consumer.columns.factor[get_column(i, lane)];
#endif
      }
      if (GRADIENT) out.store(x, s, row, t * TILE_COLUMNS, b, lane);
    }
  }

  __device__ __forceinline__ void end_tile(int) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h].loss += tile_sums[h].loss;
      sums[h].gradient += tile_sums[h].gradient;
    }
  }

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

// positive [rows]: logits without the bias; row_sums and row_moments [slots, row_stride].
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(BLOCKS, 1, 1)
#endif
sweep_sigmoid(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
              const __grid_constant__ Block block, i64 segments,
              const __grid_constant__ Scalar bias, const float* row_factor, double* positive,
              float2* row_sums, i64 row_stride, const __grid_constant__ GradientBlock gradient_block,
              const __grid_constant__ TensorMap gradient_map, float* row_moments) {
  SweepShared<SigmoidLoss>& shared = sweep_shared<SigmoidLoss>();
  const Lane lane;
  const double scale = block.scale.get();
  SigmoidLoss::WarpgroupShared& group = shared.group[lane.warpgroup % WARPGROUPS];
  SigmoidLoss loss{block, lane, shared.consumer[lane.consumer & 1], row_factor, positive, row_sums,
                   row_moments, row_stride, GradientStrip(gradient_map, gradient_block, group.strips, lane),
                   scale, (float)logit_factor(scale * LOG2_E), (float)(bias.get() * LOG2_E)};
  sweep(shared, q, k, block, (int)segments, loss, lane);
}
