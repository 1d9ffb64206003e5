// Gradient pass, portable: the gradient block P = dL/dx, from which cuBLAS computes dQ += P K and dK += P' Q.
//
// With x = q . k, R and C the log-sum-exps in base 2 of rows and columns, and A_i (B_j) the upstream gradient of row i
// (column j) times the weight of its direction and the scale:
//
//     P_ij = A_i 2^(c x_ij - R_i) + B_j 2^(c x_ij - C_j)        negatives
//     P_ij = 0                                                  positives
//
// c = scale log2 e; with `hardness`, c = (scale + hardness) log2 e.
//
// All of P is divided by the gradient divisor. The kernel gets R, C and c rounded to the type of products. Instead of A
// and B it gets the factors a, u and v (vectors/factors.cuh), which contain the gradient divisor and correct the
// rounding:
//
//     P_ij = e a_i + e u_i v_j,  e = 2^(c x_ij - R_i)         `one_exponential`: R and C are close
//     P_ij = e a_i + 2^(c x_ij - C_j) v_j                     for any R and C
//
// Options (block/options.cuh) may replace x in the exponent, and leave out the term of a row or of a column.
//
// Positives are left out, because P is largest there, and its rounding would not average out. finish.cu adds them in
// full precision. If rows are normalised by factors f, the block has P_ij f_i f_j, so that the matrix products need no
// normalised features.
#include "tiled/tile.cuh"

// Turns the products x of a tile into P, before the factors f that normalise rows.
__device__ __forceinline__ void differentiate(Products& x, const FactorsShared& f, const TileShared& s, Real c,
                                              bool one_exponential, const Position& p) {
  Real v[LANE_N];
  if (COLUMNS)
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) v[j] = f.v[p.column(j)];
  if (one_exponential) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = p.row(i);
      const Real reference = f.row_reference[r], a = f.a[r], u = COLUMNS ? f.u[r] : 0;
#pragma unroll
      for (int j = 0; j < LANE_N; ++j) {
        const auto pair = s.pair(r, p.column(j));
        const Real e = exp2_(fma(c, Options::exponent(x[i][j], pair), -reference));
        const Real row_weight = Options::in_row(x[i][j], pair) ? a : 0;
        const Real column_weight = COLUMNS && Options::in_column(x[i][j], pair) ? v[j] : 0;
        x[i][j] = e * (COLUMNS ? fma(u, column_weight, row_weight) : row_weight);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = p.row(i);
      const Real reference = f.row_reference[r], a = f.a[r];
#pragma unroll
      for (int j = 0; j < LANE_N; ++j) {
        const auto pair = s.pair(r, p.column(j));
        const Real y = Options::exponent(x[i][j], pair);  // x, unless an option replaces it
        const Real row_term = exp2_(fma(c, y, -reference)) * a;
        const Real column_term = exp2_(fma(c, y, -f.column_reference[p.column(j)])) * v[j];
        x[i][j] = (Options::in_row(x[i][j], pair) ? row_term : 0) +
                  (Options::in_column(x[i][j], pair) ? column_term : 0);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
gradient(const __grid_constant__ Block block, const __grid_constant__ Factors factors,
         const __grid_constant__ GradientBlock gradient_block) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TileShared shared;
  __shared__ FactorsShared f;
  const Position p;
  const Real c = (Real)(block.scale.get() * LOG2_E);
  const bool one_exponential = !COLUMNS || *factors.one_exponential;
  Pipeline pipeline(block, stages);
  for (Tile tile = find_tile(block, blockIdx.x); tile.exists; tile = next_tile(block, tile)) {
    prepare(shared, block, tile);
    prepare(f, factors, block, tile);
    Products x;
    tile_product(x, pipeline, p);
    apply_norm_factors(x, shared, p);
    exclude_pairs(x, shared, block, tile, p);
    // No synchronisation is needed here, but without this barrier the compiler loads all numbers of the tile's rows and
    // columns before the code below, and runs out of registers
    if (Options::SPARSE) __syncwarp();
    differentiate(x, f, shared, c, one_exponential, p);
    set_aside_positives(x, shared, block, tile, p, 0, [](i64, Real) {});
    apply_norm_factors(x, shared, p);  // P_ij becomes P_ij f_i f_j
    store_gradient_block(x, gradient_block, block, tile, p);
  }
}
