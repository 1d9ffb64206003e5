// Distillation: the terms of a pair, from the logits of a student and of a teacher (tiled/distill.cu,
// sm90/sweep_distill.cu).
#pragma once
#include "block/block.cuh"

// A product that the compiler does not join with a sum. So the probabilities of equal logits cancel to 0.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The product of a pair outside of the matrix. Its logit c x is finite, and far below all others.
__device__ __forceinline__ Real outside_product(Real c) { return -fmin((Real)0x1p126, (Real)0x1p100 / c); }

// The factors of a row and of a column, as tiled/gradient.cu has them for losses with the weight 1.
struct RowFactors {
  Real reference, a, u;
};
struct ColumnFactors {
  Real reference, v;
};

// Of a pair and one model: the probabilities in the softmax of the row and in that of the column, and the exponents
// c x - reference, which are the logarithms of these probabilities but for corrections by `a` and `v`.
struct Probabilities {
  Real in_row, in_column, row_exponent, column_exponent;
};

// From the product x. ONE: one exponential serves row and column.
template <bool ONE>
__device__ __forceinline__ Probabilities probabilities(Real x, Real c, const RowFactors& row,
                                                       const ColumnFactors& column) {
  Probabilities p = {};
  p.row_exponent = fma(c, x, -row.reference);
  const Real e = exp2_(p.row_exponent);
  p.in_row = rounded_product(e, row.a);
  if (!COLUMNS) return p;
  p.column_exponent = fma(c, x, -column.reference);
  p.in_column = ONE ? rounded_product(e, row.u * column.v) : rounded_product(exp2_(p.column_exponent), column.v);
  return p;
}

// Sums of a row over its pairs, or of a column. With p and q the probabilities of student and teacher and y the
// student's exponent: q y, for the loss; (p - q) y, for the gradient of the scale. An error of q has little weight in
// both where y is small, as it is for probable pairs.
struct DistillSums {
  Real target, excess;
  __device__ __forceinline__ void add(Real p, Real q, Real y) {
    target = fma(q, y, target);
    excess = fma(p - q, y, excess);
  }
};
