// What follows for a row, or a column, from its (max, sum, moment): the largest base-2 logit of its
// negatives, the sum of 2^(logit - max) over them, and that of 2^(logit - max) logit (0: not wanted).
//
// All kernels take it from here: vectors.cu, fused.cu, naive.cu, and the elementwise kernels of
// kernels/gpu/vectors.py. The latter are compiled with the text of this file alone, so it includes
// nothing.
//
// The counterpart in Python is kernels/conclude.py:
//
//     here                    kernels/conclude.py
//     merge                   Vectors.merge
//     softplus2               softplus2                     log(1 + 2^x), natural units
//     sigmoid2                sigmoid2                      1 / (1 + 2^-x); there 2^(x - log2(1 + 2^x))
//     gap                     conclude: gap                 (max - positive) + log2(sum)
//     loss                    conclude: softplus2(gap)
//     negative_probability    conclude: sigmoid2(gap)
//     lse2                    conclude: top + log2(total)   positive + log2(1 + 2^gap)
//     log_scale_grad          conclude: log_scale_grad      sigmoid2(gap) (moment / sum - positive), natural
//
// In Python, the gradient's exponents are taken off `reference`, which is at most the log-sum-exp, and
// `reference_probability` is what remains, 2^(reference - lse2). On a GPU they are lse2 and 1.
//
// `decoupled`: the positive is no part of the softmax. Then gap is the loss, and negative_probability is 1.
//
// All of this is float64. Without negatives (max, sum, moment) is (-inf, 0, 0): loss,
// negative_probability and log_scale_grad are 0. Without a positive its logit is -inf: lse2 is that of
// the negatives. NaN stays NaN.
#pragma once

constexpr double LOG2_E = 1.4426950408889634;
constexpr double LN_2 = 0.6931471805599453;

struct Sum {
  double max, sum, moment;
};

// The sum of both. Of two empty sums, no difference of infinities is taken. `exp2_of` is 2^x in
// the precision that the caller wants. With d the difference of the maxima, 2^d may underflow in
// float, and still count: sums are as large as 2^127. So it is computed as (2^(d/2))^2.
template <class Exp2>
__device__ __forceinline__ Sum merge(Sum a, Sum b, Exp2 exp2_of) {
  if (b.max > a.max) {
    const Sum t = a;
    a = b;
    b = t;
  }
  if (b.max != a.max) {
    const double half = exp2_of(0.5 * (b.max - a.max));
    b.sum *= half * half;
    b.moment *= half * half;
  }
  a.sum += b.sum;
  a.moment += b.moment;
  return a;
}

// log1p keeps all digits of a small loss. No exponent is above 0: nothing overflows.
__device__ __forceinline__ double softplus2(double x) {
  return LN_2 * fmax(x, 0.0) + log1p(exp2(-fabs(x)));
}
__device__ __forceinline__ double sigmoid2(double x) {
  const double e = exp2(-fabs(x));
  return (x < 0 ? e : 1.0) / (1.0 + e);
}

struct Direction {
  double gap;                   // log-sum-exp of the negatives, base 2, less the positive's logit
  double loss;                  // natural units
  double negative_probability;  // of all negatives in the softmax
  double lse2;                  // log-sum-exp of all logits, base 2
  double log_scale_grad;        // d loss / d log(scale)
};

__device__ __forceinline__ bool is_nothing(double logit) {  // -inf
  return logit < -0x1.fffffffffffffp1023;
}

// `mean`: the share-weighted mean of the positives' logits, if there are several; else `positive`.
__device__ __forceinline__ Direction conclude_direction(Sum negatives, double positive,
                                                        bool decoupled, double mean) {
  Direction d;
  d.gap = (negatives.max - positive) + log2(negatives.sum);
  d.loss = decoupled ? LN_2 * d.gap : softplus2(d.gap);
  d.negative_probability = decoupled ? 1 : sigmoid2(d.gap);
  const bool alone = decoupled || is_nothing(positive);
  d.lse2 = alone ? negatives.max + log2(negatives.sum) : positive + LOG2_E * d.loss;
  const bool none = negatives.sum == 0;
  const double negative_mean = none && decoupled ? 0 : negatives.moment / negatives.sum;
  d.log_scale_grad = none && !decoupled ? LN_2 * d.negative_probability
                                        : LN_2 * d.negative_probability * (negative_mean - mean);
  return d;
}

__device__ __forceinline__ Direction conclude_direction(Sum negatives, double positive,
                                                        bool decoupled = false) {
  return conclude_direction(negatives, positive, decoupled, positive);
}

// Of a row without a positive: no loss, and the log-sum-exp of the others.
__device__ __forceinline__ Direction without_positive(Sum negatives) {
  const double lse2 = negatives.max + log2(negatives.sum);
  return {log2(0.0), 0, 0, lse2, 0};
}
