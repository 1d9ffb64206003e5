// Distillation: the terms of a pair, from the logits of a student and of a teacher (tiled/distill.cu,
// sm90/sweep_distill.cu).
#pragma once
#include "block/block.cuh"

// A product that the compiler does not join with a sum. So the terms of equal logits cancel to 0.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The product of a pair outside of the matrix. Its logit c x is finite, and far below all others.
__device__ __forceinline__ Real outside_product(Real c) { return -fmin((Real)0x1p126, (Real)0x1p100 / c); }

// The factors of a row and of a column for one model, as tiled/gradient.cu has them for losses with the weight 1. The
// probabilities are a e and v e', with e and e' of `Exponentials`. `weight` is that factor times the weight of the loss.
struct RowFactors {
  Real reference, a, u, weight;
};
struct ColumnFactors {
  Real reference, v, weight;
};

// The numbers of a pair for one model: e and e', their exponents without u, and the model's term in dL/dx.
struct Exponentials {
  Real in_row, in_column, row_exponent, column_exponent, gradient;
};

// From the product x. ONE: one exponential serves row and column, e' = u e.
template <bool ONE>
__device__ __forceinline__ Exponentials exponentials(Real x, Real c, const RowFactors& row,
                                                     const ColumnFactors& column) {
  Exponentials result = {};
  result.row_exponent = fma(c, x, -row.reference);
  result.in_row = exp2_(result.row_exponent);
  if (!COLUMNS) {
    result.gradient = rounded_product(result.in_row, row.weight);
    return result;
  }
  result.column_exponent = fma(c, x, -column.reference);
  result.in_column = ONE ? result.in_row * row.u : exp2_(result.column_exponent);
  result.gradient = ONE ? rounded_product(result.in_row, fma(row.u, column.weight, row.weight))
                    : fma(result.in_column, column.weight, rounded_product(result.in_row, row.weight));
  return result;
}

// Sums over the pairs of a row, or of a column, with the probabilities p of the student and q of the teacher, and the
// student's exponent y:
//   - target: q y, for the loss. The kernels multiply the complete sum by the teacher's factor a or v of q.
//   - excess (MOMENTS): (p - q) y, for the gradient of the scale.
// y is near 0 for probable pairs, so that an error of q has little weight in both sums.
struct DistillSums {
  Real target, excess;
  __device__ __forceinline__ void add(Real e, Real factor, Real teacher_e, Real teacher_factor, Real y) {
    target = fma(teacher_e, y, target);
    if (MOMENTS) excess = fma(rounded_product(e, factor) - rounded_product(teacher_e, teacher_factor), y, excess);
  }
};
