// Work on rows of features: norms, operands, finished gradients. One warp a row, any strides.
//
// Normalisation, u = z / |z|. Features are brought near unit length by a power of two, which is
// exact, s = 2^-e z, and the rest is a factor of the logits: u = f s, f = 2^e / |z| in (1, 2]. So
// 16-bit features are never rounded again. With P_ij f_i f_j in the panels, the products give
// g_i = f_i dU_i, and the gradient with respect to the rows as they came is
//
//     dz = (dU - u <dU, u>) / |z| = 2^-e (g - f^2 s <g, s>),     <dU, u> = <g, s>.
//
// A row of zeros has no direction: it stays zero (f = 0), with zero gradient.
#include "common.cuh"

#define ROWS_THREADS 256

__device__ __forceinline__ i64 warp_row() {
  return (blockIdx.x * (i64)ROWS_THREADS + threadIdx.x) / 32;
}

extern "C" __global__ void row_norms(const __grid_constant__ Matrix z, i64 n, i64 d, Real* factor,
                                     int* exponent) {
  const i64 row = warp_row();
  if (row >= n) return;
  double sum = 0;
  for (i64 k = threadIdx.x % 32; k < d; k += 32) {
    const double x = z.get(row, k);
    sum += x * x;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32) return;
  int e = 0;
  const bool usable = sum > 0 && sum < INFINITY_;
  const double m = usable ? frexp(sqrt(sum), &e) : 1;
  factor[row] = sum == 0 ? 0 : usable ? (Real)(1 / m) : (Real)NAN_;
  exponent[row] = e;
}

// out[row] = 0, or NaN if a feature of the row is not finite.
extern "C" __global__ void not_finite(const __grid_constant__ Matrix z, i64 n, i64 d,
                                      double* out) {
  const i64 row = warp_row();
  if (row >= n) return;
  double sum = 0;
  for (i64 k = threadIdx.x % 32; k < d; k += 32) sum += z.get(row, k) * 0.0;
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) out[row] = sum;
}

// Operands of the tiled product: rows of `stride` elements, features beyond d are zeros.
extern "C" __global__ void stage(const __grid_constant__ Matrix z, i64 n, i64 d,
                                 const int* exponent, char* out, i64 stride, i64 low) {
  const i64 row = warp_row();
  if (row >= n) return;
  for (i64 k = threadIdx.x % 32; k < (low ? low : stride); k += 32) {
    const i64 at = row * stride + k;
#if PRECISION == FP64
    double x = k < d ? z.get(row, k) : 0;
    if (exponent) x = ldexp(x, -exponent[row]);
    ((double*)out)[at] = x;
#else
    float x = k < d ? (exponent ? (float)ldexp(z.get(row, k), -exponent[row])
                                : z.get_float(row, k)) : 0;
#if PRECISION == FP32 || PRECISION == TF32
    ((float*)out)[at] = x;
#elif PRECISION == FP16
    ((unsigned short*)out)[at] = to_fp16(x);
#else
    const unsigned short high = to_bf16(x);
    ((unsigned short*)out)[at] = high;
    if (low) ((unsigned short*)out)[at + low] = to_bf16(x - from_bf16(high));
#endif
#endif
  }
}

// Positives of a row: (row, partner) pairs whose dL/dx was kept out of the panels.
struct Positives {
  const double* gradient;  // dL/dx at the positive, by query
  const i64* partner;      // [queries] key of each query (-1: none of these); null: the same number
  const i64* start;        // not null: keys, and partner[start[j] .. start[j + 1]) are j's queries
  i64 by_partner;          // rows are keys: gradients go by partner
  Matrix z;                // the partners' features
  const Real* factor;
  const int* exponent;

  // What positives add to the gradient of row `row`, feature k.
  __device__ double add(i64 row, i64 k, double own_factor) const {
    const i64 first = start ? start[row] : row, end = start ? start[row + 1] : row + 1;
    double g = 0;
    for (i64 s = first; s < end; ++s) {
      const i64 other = partner ? partner[s] : s;
      if (other < 0) continue;
      const double x = z.get(other, k);
      const double weight = gradient[by_partner ? other : row];
      g += factor ? weight * own_factor * factor[other] * ldexp(x, -exponent[other]) : weight * x;
    }
    return g;
  }
};

// Gradients of rows first.. are complete in `acc` [n, acc_stride], in the panels' unit, but for the
// positives: hand them to their destination (data null: nowhere), or add them to what is there, and
// <gradient, row> to dots (or null).
extern "C" __global__ void finish(const Real* acc, i64 acc_stride, i64 first, i64 n, i64 d,
                                  const __grid_constant__ Matrix z, const Real* factor,
                                  const int* exponent, const __grid_constant__ Positives positives,
                                  const double* unit, double* dots,
                                  const __grid_constant__ Matrix out, i64 add) {
  if (warp_row() >= n) return;
  const Real* sum = acc + warp_row() * acc_stride;
  const i64 row = first + warp_row();
  const int e = exponent ? exponent[row] : 0;
  const double f = factor ? factor[row] : 0;
  double dot = 0;
  if (dots || factor) {
    for (i64 k = threadIdx.x % 32; k < d; k += 32) {
      const double x = z.get(row, k);
      dot += (sum[k] * *unit + positives.add(row, k, f)) * (e ? ldexp(x, -e) : x);
    }
    dot = warp_sum(dot);
  }
  if (dots && threadIdx.x % 32 == 0) dots[row] = dot;
  if (!out.data) return;
  const double along = f * f * dot;
  for (i64 k = threadIdx.x % 32; k < d; k += 32) {
    double g = sum[k] * *unit + positives.add(row, k, f);
    if (factor) g = ldexp(g - along * ldexp(z.get(row, k), -e), -e);
    out.set(row, k, add ? g + out.get(row, k) : g);
  }
}
