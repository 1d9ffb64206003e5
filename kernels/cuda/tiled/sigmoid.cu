// Pairwise sigmoid (SigLIP), portable: loss and gradient block in one pass, because there is no log-sum-exp to wait
// for. On Hopper, sm90/sweep_sigmoid.cu computes the same.
//
// With z_ij = scale q_i . k_j + bias, t_ij = 1 at positives and -1 elsewhere, and a_i the upstream gradient times the
// scale, divided by the gradient divisor:
//
//     loss_i  = sum_j softplus(-t_ij z_ij)
//     P_ij    = -t_ij a_i sigmoid(-t_ij z_ij)
//
// A tile yields (loss, sum of P) for each of its rows, and with MOMENTS the sum of P x, over the negatives. The kernel
// add_partial_sums (vectors/sums.cuh) adds these sums in a fixed order. With GRADIENT, P is written for the matrix
// products that compute dQ and dK. The logits of positives are recorded. The kernel sigmoid_positives
// (vectors/sigmoid.cuh) adds their losses in float64, and finish.cu their gradients.
//
// With POSITIVE_IDS, rows have any number of positives, and a positive pair has a weight v_ij: its loss is
// v_ij softplus(-z_ij), and P_ij is -v_ij a_i sigmoid(-z_ij). These positives are in the sums and in P.
#include "tiled/tile.cuh"

struct SigmoidShared {
  Real a[BLOCK_M];  // row_factor of the tile's rows
  Real2 row_sums[WARPS_N][BLOCK_M];  // (loss, sum of P) of a row in each strip, which is the columns of one warp
#if MOMENTS
  Real moments[WARPS_N][BLOCK_M];    // sum of P x
#endif
};

// Turns the products x into P, and writes the sums of the strip's rows to s.
__device__ __forceinline__ void differentiate(Products& x, SigmoidShared& s, const TileShared& shared, Real scale,
                                              Real bias, const Position& p) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Real loss = 0, total = 0, moment = 0;
    const Real a = s.a[p.row(i)];
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) {
      const Real product = x[i][j];
      Real y = fma(scale, product, bias);  // -t_ij z_ij of the opening comment: the loss is softplus(y)
#if POSITIVE_IDS
      const int row = p.row(i), column = p.column(j);
      const bool positive = product != EXCLUDED && Options::is_positive(shared.pair(row, column));
      const Real weight =
          positive ? shared.rows.query_pair_weights[row] + shared.columns.key_pair_weights[column] : 1;
      if (positive) y = -y;
#endif
      const Real e = exp2_(-fabs(y) * (Real)LOG2_E);
      Real sigmoid_of_abs, log1p;
      sigmoid_parts(e, sigmoid_of_abs, log1p);
#if POSITIVE_IDS
      loss = fma(weight, max_(y, 0) + log1p, loss);
      x[i][j] = (y < 0 ? e * sigmoid_of_abs : sigmoid_of_abs) * (positive ? -weight : weight) * a;
#else
      loss += max_(y, 0) + log1p;
      x[i][j] = (y < 0 ? e * sigmoid_of_abs : sigmoid_of_abs) * a;
#endif
      total += x[i][j];
      if (MOMENTS) moment = fma(x[i][j], product, moment);
    }
    loss = row_sum(loss);
    total = row_sum(total);
    if (p.t == 0) s.row_sums[p.warp_n][p.row(i)] = real2(loss, total);
#if MOMENTS
    moment = row_sum(moment);
    if (p.t == 0) s.moments[p.warp_n][p.row(i)] = moment;
#endif
  }
}

// Writes row_sums and row_moments [column tiles, row_stride], the logits of positives without the bias, and the
// gradient block.
extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
sigmoid(const __grid_constant__ Block block, const __grid_constant__ Scalar bias,
        const Real* row_factor, double* positive_logits, Real2* row_sums, i64 row_stride,
        const __grid_constant__ GradientBlock gradient_block, Real* row_moments) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TileShared shared;
  __shared__ SigmoidShared s;
  const Position p;
  const double scale = block.scale.get();
  Pipeline pipeline(block, stages);
  for (Tile tile = find_tile(block, blockIdx.x); tile.exists; tile = next_tile(block, tile)) {
    prepare(shared, block, tile);
    fetch(s.a, row_factor + tile.row, block.q.rows - tile.row);
    Products x;
    tile_product(x, pipeline, p);
    apply_norm_factors(x, shared, p);
    set_aside_positives(x, shared, block, tile, p, EXCLUDED, [&](i64 pair, Real value) {
      positive_logits[pair] = scale * (double)value;
    });
    exclude_pairs(x, shared, block, tile, p);
    differentiate(x, s, shared, (Real)logit_factor(scale), (Real)bias.get(), p);
    __syncthreads();  // the writes of all strips' sums come before their reads
    for (int r = threadIdx.x; r < BLOCK_M; r += TILED_THREADS) {
      if (tile.row + r >= block.q.rows) break;
      Real2 pair = s.row_sums[0][r];
#pragma unroll
      for (int w = 1; w < WARPS_N; ++w)
        pair = real2(pair.x + s.row_sums[w][r].x, pair.y + s.row_sums[w][r].y);
      const i64 at = tile.column / BLOCK_N * row_stride + tile.row + r;
      row_sums[at] = pair;
#if MOMENTS
      Real moment = s.moments[0][r];
#pragma unroll
      for (int w = 1; w < WARPS_N; ++w) moment += s.moments[w][r];
      row_moments[at] = moment;
#endif
    }
    if (!GRADIENT) continue;
    apply_norm_factors(x, shared, p);  // P_ij becomes P_ij f_i f_j
    store_gradient_block(x, gradient_block, block, tile, p);
  }
}
