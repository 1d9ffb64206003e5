// Sums of rows or columns over the logits so far, for the kernels of vectors.cu and own.cu.
#pragma once
#include "common.cuh"

// The sums over two sets of logits together, with exponentials in the precision of products.
__device__ __forceinline__ Sum merge(Sum a, Sum b) {
  return merge(a, b, [](double x) { return (double)exp2_((Real)x); });
}

// The sums of rows over the columns so far, or of columns over the rows so far, as struct Sum has them: the largest
// base-2 logit, the sum of 2^(x2 - max), and the first moment (null: not wanted).
struct Sums {
  double *max, *sum, *moment;

  __device__ __forceinline__ Sum get(i64 i) const { return {max[i], sum[i], moment ? moment[i] : 0}; }
  __device__ __forceinline__ void set(i64 i, const Sum& s) const {
    max[i] = s.max, sum[i] = s.sum;
    if (moment) moment[i] = s.moment;
  }
};
