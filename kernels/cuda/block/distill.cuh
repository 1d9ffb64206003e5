// Distillation: the terms of a pair, from the logits of a student and of a teacher. For both kernels of the gradient
// pass, tiled/distill.cu and sm90/sweep_distill.cu; the equations are in tiled/distill.cu.
#pragma once
#include "block/block.cuh"

// a b, rounded before anything is added: the compiler makes no fma of it. So the terms of student and teacher cancel to
// exactly 0 if their logits are equal.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// Replaces the product of a pair outside of the matrix. Its logit c x is -2^100, far below all others, or with a small
// c the product is -2^126. It is finite, unlike EXCLUDED, because DistillSums multiply probabilities of 0 by the
// exponent y, and 0 times an infinite y would be NaN.
__device__ __forceinline__ Real outside_product(Real c) { return -fmin((Real)0x1p126, (Real)0x1p100 / c); }

// The factors of a row and of a column for one model, student or teacher. They are the factors of tiled/gradient.cu for
// a loss with weight 1, so the probability of a pair is a e in the softmax of the row and v e' in the softmax of the
// column, with e and e' of `Exponentials`. References are log-sum-exps, rounded to Real: a and v are 1 but for the
// rounding. `weight` is a, or v, times the weight of the loss of this row or column.
struct RowFactors {
  Real reference, a, u, weight;
};
struct ColumnFactors {
  Real reference, v, weight;
};

// The numbers of a pair for one model: in_row is e, in_column is e', the exponents are base-2 logits minus the
// reference of the row or column, and `gradient` is the model's term in dL/dx, the sum of its weighted probabilities.
struct Exponentials {
  Real in_row, in_column, row_exponent, column_exponent, gradient;
};

// The numbers of a pair with the product x. ONE: one exponential serves row and column, and e' is u e.
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

// Sums over the pairs of a row, or of a column, with the probabilities p of the student and q of the teacher, and y the
// exponent of the student (`row_exponent`, the base-2 logarithm of p but for the rounding of its reference):
//   - target: q y, for the loss. The kernels multiply the complete sum by the teacher's factor a or v of q.
//   - excess (MOMENTS): (p - q) y, for the gradient of the scale: d loss / d log(scale) = sum (p - q) z, with logits z
//     in natural units. z is ln 2 times y plus a number of the row or column. This number cancels, because p and q both
//     add up to 1.
// y is near 0 for probable pairs, so an error of their q has little weight in both sums.
struct DistillSums {
  Real target, excess;
  // p is e factor, and q is teacher_e teacher_factor.
  __device__ __forceinline__ void add(Real e, Real factor, Real teacher_e, Real teacher_factor, Real y) {
    target = fma(teacher_e, y, target);
    if (MOMENTS) excess = fma(rounded_product(e, factor) - rounded_product(teacher_e, teacher_factor), y, excess);
  }
};
