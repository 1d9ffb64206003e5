// Gradient fold: a panel of P = dL/dx, which plain matrix products turn into dQ and dK.
//
// With c = scale log2 e, x = q . k, R and C the log-sum-exps in base 2 of rows and columns:
//
//     P_ij = a_i 2^(c x_ij - R_i) + b_j 2^(c x_ij - C_j)        negatives
//     P_ij = 0                                                  positives
//
// in units of a power of two that fits the element type. h_i = R_i / c is rounded, and what the
// rounding leaves is in the factors, so that differences are taken before they are scaled:
//
//     P_ij = e a_i + e u_i v_j,  e = 2^(c (x_ij - h_i))         `shared`: one exponential
//     P_ij = e a_i + 2^(c (x_ij - h'_j)) v_j                    whatever the range of R and C
//
// Positives weigh most, and their rounding would not average out: what they add to a gradient is
// one row times one number, added in full precision when the products are complete. Features that
// stand for unit rows (factors f) get P_ij f_i f_j, so that both products use the features as they are.
#include "tiled/tile.cuh"

#ifndef COLUMNS
#define COLUMNS 1
#endif

struct FactorsShared {
  Real row_reference[BLOCK_M], a[BLOCK_M], u[BLOCK_M];
  Real column_reference[BLOCK_N], v[BLOCK_N];
};

__device__ __forceinline__ void fetch(FactorsShared& s, const Factors& f, const Block& b,
                                      const Tile& t) {
  for (int r = threadIdx.x; r < BLOCK_M; r += TILED_THREADS) {
    const bool inside = t.row + r < b.q.rows;
    s.row_reference[r] = inside ? f.row_reference[t.row + r] : 0;
    s.a[r] = inside ? f.a[t.row + r] : 0;
    if (COLUMNS) s.u[r] = inside ? f.u[t.row + r] : 0;
  }
  if (!COLUMNS) return;
  for (int c = threadIdx.x; c < BLOCK_N; c += TILED_THREADS) {
    const bool inside = t.column + c < b.k.rows;
    s.column_reference[c] = inside ? f.column_reference[t.column + c] : 0;
    s.v[c] = inside ? f.v[t.column + c] : 0;
  }
}

extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
gradient(const __grid_constant__ Block block, const __grid_constant__ Factors factors,
         const __grid_constant__ GradientPanel panel) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TileShared shared;
  __shared__ FactorsShared f;
  const Tile tile = locate(block);
  const Position p;
  fetch(f, factors, block, tile);
  const bool has_positives = prepare(shared, block, tile);  // ends with a barrier: f is there too

  Real x[8][8];
  tile_product(x, block.q, block.k, tile.row, tile.column, block.width, stages, p);
  apply_factors(x, shared, block, p);
  const Real c = (Real)(block.scale.get() * LOG2_E);
  exclude(x, shared, block, tile, p);

  const bool one_exponential = !COLUMNS || *factors.shared;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = p.row(i);
    const Real reference = f.row_reference[r], a = f.a[r], u = COLUMNS ? f.u[r] : 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int k = p.column(j);
      const Real e = exp2_(c * (x[i][j] - reference));
      if (!COLUMNS) x[i][j] = e * a;
      else if (one_exponential) x[i][j] = e * (a + u * f.v[k]);
      else x[i][j] = e * a + exp2_(c * (x[i][j] - f.column_reference[k])) * f.v[k];
    }
  }
  if (has_positives) at_positives(x, shared, p, [](int, Real) { return (Real)0; });
  apply_factors(x, shared, block, p);
  store_gradient_panel(x, panel, block, tile, p);
}
