// The loss of one direction, of a row or of a column, from the sums over its negatives and the logit of its positive.
// The sums are (max, sum, moment): the largest base-2 logit, the sum of 2^(logit - max), and the first moment, the sum
// of 2^(logit - max) logit (0 if the caller wants no moment).
//
// The formulas serve vectors.cu, fused.cu, naive.cu and the elementwise kernels of kernels/gpu/vectors.py.
// The elementwise kernels are compiled with the text of this file and no other, so this file includes no file.
//
// The counterpart in Python is `finalize_direction` in kernels/direction_losses.py. A name here, and the name there or
// the formula:
//
//     merge                   Vectors.merge (kernels/solve.py)
//     softplus2               softplus2                 log(1 + 2^x), in natural units (of e, not of 2)
//     sigmoid2                sigmoid2                  1 / (1 + 2^-x); there 2^(x - log2(1 + 2^x))
//     gap                     gap                       (max - positive) + log2(sum)
//     loss                    softplus2(gap)
//     negative_probability    sigmoid2(gap)
//     lse2                    top + log2(total)         positive + log2(1 + 2^gap)
//     log_scale_grad          log_scale_grad            sigmoid2(gap) (moment / sum - positive) ln 2
//
// In Python, exponents of the gradient are logits minus `reference`, which is at most the log-sum-exp, and
// `reference_probability` is 2^(reference - lse2). On a GPU, the reference is lse2 and the probability is 1.
//
// `decoupled`: the softmax leaves out the positive. Then the loss is ln 2 times gap, and negative_probability is 1.
//
// All numbers are float64. Without negatives, (max, sum, moment) is (-inf, 0, 0), and loss, negative_probability and
// log_scale_grad are 0; if `decoupled`, the loss is -inf and log_scale_grad is -ln 2 times the positive's logit. For
// rows without a positive, callers take `without_positive`, with a loss of 0 also if `decoupled`. NaN stays NaN.
#pragma once

constexpr double LOG2_E = 1.4426950408889634;
constexpr double LN_2 = 0.6931471805599453;

struct Sum {
  double max, sum, moment;
};

// The sums over two sets of logits together. `compute_exp2` is 2^x in the precision that the caller wants. Equal maxima
// are not subtracted, because -inf - -inf, of two empty sets, is NaN. With d the difference of the maxima, 2^d may
// underflow in float although its product with a sum, of up to 2^127, would not. So 2^d is computed as (2^(d/2))^2.
template <class Exp2>
__device__ __forceinline__ Sum merge(Sum a, Sum b, Exp2 compute_exp2) {
  if (b.max > a.max) {
    const Sum t = a;
    a = b;
    b = t;
  }
  if (b.max != a.max) {
    const double half = compute_exp2(0.5 * (b.max - a.max));
    b.sum *= half * half;
    b.moment *= half * half;
  }
  a.sum += b.sum;
  a.moment += b.moment;
  return a;
}

// log1p keeps all digits of a small loss. No exponent is above 0, so nothing overflows.
__device__ __forceinline__ double softplus2(double x) {
  return LN_2 * fmax(x, 0.0) + log1p(exp2(-fabs(x)));
}
__device__ __forceinline__ double sigmoid2(double x) {
  const double e = exp2(-fabs(x));
  return (x < 0 ? e : 1.0) / (1.0 + e);
}

struct DirectionLosses {
  double gap;                   // log-sum-exp of the negatives, base 2, less the positive's logit
  double loss;                  // natural units
  double negative_probability;  // of all negatives together, in the softmax
  double lse2;                  // log-sum-exp of all logits, base 2
  double log_scale_grad;        // d loss / d log(scale)
};

// Whether a logit or log-sum-exp is -inf: that of no pairs.
__device__ __forceinline__ bool is_nothing(double logit) {
  return logit < -0x1.fffffffffffffp1023;
}

// `positive` is the base-2 logit of the positive. If a row has several positives, `positive` is their log-sum-exp, and
// `mean` is the mean of their logits, weighted by the softmax over the positives. Otherwise `mean` is `positive`.
__device__ __forceinline__ DirectionLosses finalize_direction(Sum negatives, double positive,
                                                        bool decoupled, double mean) {
  DirectionLosses d;
  d.gap = (negatives.max - positive) + log2(negatives.sum);
  d.loss = decoupled ? LN_2 * d.gap : softplus2(d.gap);
  d.negative_probability = decoupled ? 1 : sigmoid2(d.gap);
  const bool lacks_positive = decoupled || is_nothing(positive);
  d.lse2 = lacks_positive ? negatives.max + log2(negatives.sum) : positive + LOG2_E * d.loss;
  const bool no_negatives = negatives.sum == 0;
  // Without negatives, moment / sum is 0 / 0. If `decoupled`, the positive's logit remains. Otherwise the factor
  // negative_probability is 0, or NaN if the positive is NaN, and is the result
  const double negative_mean = no_negatives && decoupled ? 0 : negatives.moment / negatives.sum;
  d.log_scale_grad = no_negatives && !decoupled ? LN_2 * d.negative_probability
                                                : LN_2 * d.negative_probability * (negative_mean - mean);
  return d;
}

__device__ __forceinline__ DirectionLosses finalize_direction(Sum negatives, double positive,
                                                        bool decoupled = false) {
  return finalize_direction(negatives, positive, decoupled, positive);
}

// The direction of a row without a positive: loss 0, gap -inf, and the log-sum-exp of its negatives.
__device__ __forceinline__ DirectionLosses without_positive(Sum negatives) {
  const double lse2 = negatives.max + log2(negatives.sum);
  return {log2(0.0), 0, 0, lse2, 0};
}
