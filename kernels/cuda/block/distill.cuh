// Distillation: the terms of a pair, from the logits of a student and of a teacher (tiled/distill.cu,
// sm90/sweep_distill.cu).
#pragma once
#include "block/block.cuh"

// A product that the compiler does not join with a sum. So the probabilities of equal logits cancel to 0.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The probability of a pair in the softmax of its row, and in that of its column.
struct Probabilities {
  Real in_row, in_column;
};

// The factors of a row and of a column. All terms of a gradient are made of them (tiled/gradient.cu), with factors
// of losses that are 1.
struct RowFactors {
  Real reference, a, u;
};
struct ColumnFactors {
  Real reference, v;
};

// Of the product x of one model. ONE: one exponential serves row and column.
template <bool ONE>
__device__ __forceinline__ Probabilities probabilities(Real x, Real c, const RowFactors& row,
                                                       const ColumnFactors& column) {
  const Real e = exp2_(fma(c, x, -row.reference));
  Probabilities p = {rounded_product(e, row.a), 0};
  if (COLUMNS && ONE) p.in_column = rounded_product(e, row.u * column.v);
  if (COLUMNS && !ONE) p.in_column = rounded_product(exp2_(fma(c, x, -column.reference)), column.v);
  return p;
}

// Sums of a row over its pairs, or of a column, for the loss and the gradient of the scale: of the teacher's
// probabilities times the student's products, and of the differences of probabilities times these products.
struct DistillSums {
  Real target, excess;
  __device__ __forceinline__ void add(Real probability, Real teacher_probability, Real x) {
    target = fma(teacher_probability, x, target);
    excess = fma(probability - teacher_probability, x, excess);
  }
};
