// Distillation, portable: the gradient block and the sums of the losses, once the log-sum-exps of student and teacher
// are known (each from its own log-sum-exp pass). On Hopper, sm90/sweep_distill.cu computes the same.
//
// In the softmax of row i, p is the probability of the student and q the probability of the teacher; in the softmax of
// column j they are p' and q'. w and w' are the weights of the losses of rows and columns:
//
//     P_ij = w_i (p_ij - q_ij) + w'_j (p'_ij - q'_ij)
//     loss of row i = -sum_j q_ij log p_ij
//
// A tile yields the sums of block/distill.cuh for each of its rows, and with COLUMNS for each of its columns. The
// kernel add_partial_sums (vectors/sums.cuh) adds these sums in a fixed order. A tile has two products, one after the
// other: first of the student's features, then of the teacher's.
#define TEACHER 1
#include "tiled/tile.cuh"
#include "block/distill.cuh"

// Numbers of a tile's rows and columns for one model, student or teacher.
struct ModelShared {
  TileShared tile;
  FactorsShared factors;
};

// Starts to copy these numbers, for tile t.
__device__ __forceinline__ void prepare(ModelShared& s, const Factors& f, const Block& b, const Tile& t) {
  prepare(s.tile, b, t);
  prepare(s.factors, f, b, t);
}

// The weights of the losses of a tile's rows and columns, and the sums of its strips. Real2 is (target, excess).
struct LossShared {
  Real row_weight[BLOCK_M], column_weight[BLOCK_N];  // w and w'
  Real2 row_sums[WARPS_N][BLOCK_M], column_sums[WARPS_M][BLOCK_N];
};

// The factors of a row and of a column of the tile for one model. `weight` is the weight of its loss.
__device__ __forceinline__ RowFactors row_factors(const FactorsShared& f, int row, Real weight) {
  return {f.row_reference[row], f.a[row], COLUMNS ? f.u[row] : 0, f.a[row] * weight};
}
__device__ __forceinline__ ColumnFactors column_factors(const FactorsShared& f, int column, Real weight) {
  if (!COLUMNS) return {};
  return {f.column_reference[column], f.v[column], f.v[column] * weight};
}

// Turns the products x of the student into P, with the products t of the teacher, and writes the sums of the strip's
// rows and columns to s. `c` and `teacher_c` make base-2 logits of products. ONE: e' is u e (block/distill.cuh).
template <bool ONE>
__device__ __forceinline__ void distill_strip(Products& x, const Products& t, LossShared& s,
                                              const FactorsShared& student, const FactorsShared& teacher, Real c,
                                              Real teacher_c, const Position& p) {
  DistillSums strip_column_sums[LANE_N] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = p.row(i);
    const RowFactors row = row_factors(student, r, s.row_weight[r]);
    const RowFactors teacher_row = row_factors(teacher, r, s.row_weight[r]);
    DistillSums strip_row_sums = {};
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) {
      const int at = p.column(j);
      const ColumnFactors column = column_factors(student, at, s.column_weight[at]);
      const ColumnFactors teacher_column = column_factors(teacher, at, s.column_weight[at]);
      const Exponentials student_terms = exponentials<ONE>(x[i][j], c, row, column);
      const Exponentials teacher_terms = exponentials<ONE>(t[i][j], teacher_c, teacher_row, teacher_column);
      strip_row_sums.add(student_terms.in_row, row.a, teacher_terms.in_row, teacher_row.a, student_terms.row_exponent);
      if (COLUMNS)
        strip_column_sums[j].add(student_terms.in_column, column.v, teacher_terms.in_column, teacher_column.v,
                                 student_terms.column_exponent);
      x[i][j] = student_terms.gradient - teacher_terms.gradient;
    }
    const Real target = row_sum(strip_row_sums.target) * teacher_row.a;
    const Real excess = MOMENTS ? row_sum(strip_row_sums.excess) : 0;
    if (p.t == 0) s.row_sums[p.warp_n][r] = real2(target, excess);
  }
  if (!COLUMNS) return;
#pragma unroll
  for (int j = 0; j < LANE_N; ++j) {
    const Real target = column_sum(strip_column_sums[j].target) * teacher.v[p.column(j)];
    const Real excess = MOMENTS ? column_sum(strip_column_sums[j].excess) : 0;
    if (p.g == 0) s.column_sums[p.warp_m][p.column(j)] = real2(target, excess);
  }
}

// Replaces the products of a tile outside of the matrix by `instead`. The matrix has `rows` rows and `columns` columns
// from the first of the tile on.
__device__ __forceinline__ void leave_out(Products& x, Real instead, i64 rows, i64 columns, const Position& p) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < LANE_N; ++j)
      if (p.row(i) >= rows || p.column(j) >= columns) x[i][j] = instead;
}

// Writes to out[i] the sum over `strips` of row or column i, for the first `existing` of N.
template <int STRIPS, int N>
__device__ __forceinline__ void store_sums(const Real2 (&strips)[STRIPS][N], Real2* out, i64 existing) {
  for (int i = threadIdx.x; i < N && i < existing; i += TILED_THREADS) {
    Real2 sums = strips[0][i];
#pragma unroll
    for (int w = 1; w < STRIPS; ++w) sums = real2(sums.x + strips[w][i].x, sums.y + strips[w][i].y);
    out[i] = sums;
  }
}

// Writes the gradient block, if GRADIENT, and the sums of each tile: row_sums [column tiles, rows] and column_sums
// [row tiles, columns]. `factors` are those of a loss with weight 1, and row_weight and column_weight are w and w'.
extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
distill(const __grid_constant__ Block block, const __grid_constant__ Block teacher,
        const __grid_constant__ Factors factors, const __grid_constant__ Factors teacher_factors,
        const Real* row_weight, const Real* column_weight, Real2* row_sums, Real2* column_sums,
        const __grid_constant__ GradientBlock gradient_block) {
  extern __shared__ __align__(128) char stages[];
  __shared__ ModelShared student_shared, teacher_shared;
  __shared__ LossShared loss_shared;
  const Position p;
  const Real c = (Real)(block.scale.get() * LOG2_E), teacher_c = (Real)(teacher.scale.get() * LOG2_E);
  // Whether one exponential serves rows and columns, for both models
  const bool one_exponential = !COLUMNS || (*factors.one_exponential && *teacher_factors.one_exponential);
  const i64 rows = block.q.rows, columns = block.k.rows;
  Pipeline pipeline(block, stages, &teacher);
  for (Tile tile = find_tile(block, blockIdx.x); tile.exists; tile = next_tile(block, tile)) {
    const i64 rows_here = rows - tile.row, columns_here = columns - tile.column;
    prepare(student_shared, factors, block, tile);
    prepare(teacher_shared, teacher_factors, teacher, tile);
    fetch(loss_shared.row_weight, row_weight + tile.row, rows_here);
    if (COLUMNS) fetch(loss_shared.column_weight, column_weight + tile.column, columns_here);
    Products x, t;  // of the student, of the teacher
    tile_product(x, pipeline, p);
    tile_product(t, pipeline, p, true);
    apply_norm_factors(x, student_shared.tile, p);
    apply_norm_factors(t, teacher_shared.tile, p);
    if (rows_here < BLOCK_M || columns_here < BLOCK_N) {
      leave_out(x, outside_product(c), rows_here, columns_here, p);
      leave_out(t, outside_product(teacher_c), rows_here, columns_here, p);
    }
    if (one_exponential)
      distill_strip<true>(x, t, loss_shared, student_shared.factors, teacher_shared.factors, c, teacher_c, p);
    else distill_strip<false>(x, t, loss_shared, student_shared.factors, teacher_shared.factors, c, teacher_c, p);
    __syncthreads();  // the writes of all strips' sums come before their reads
    store_sums(loss_shared.row_sums, row_sums + tile.column / BLOCK_N * rows + tile.row, rows_here);
    if (COLUMNS)
      store_sums(loss_shared.column_sums, column_sums + tile.row / BLOCK_M * columns + tile.column, columns_here);
    if (!GRADIENT) continue;
    apply_norm_factors(x, student_shared.tile, p);  // P_ij becomes P_ij f_i f_j
    store_gradient_block(x, gradient_block, block, tile, p);
  }
}
