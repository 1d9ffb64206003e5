// Work on vectors of length M or N between the tiled kernels.
#include "common.cuh"

// --- log-sum-exp -----------------------------------------------------------------------------------------

#define MERGE_THREADS 128
#define MERGE_PARTS 4  // threads that share a row

struct Sum {
  double max, sum;  // of 2^x, base 2
};

// A part (-inf, 0) is empty; two empty parts make no difference of infinities. A NaN sum stays.
__device__ __forceinline__ Sum merge(Sum a, Sum b) {
  if (b.max > a.max) {
    const Sum t = a;
    a = b;
    b = t;
  }
  a.sum += b.sum * (b.max == -INFINITY_ ? 1.0 : (double)exp2_((Real)(b.max - a.max)));
  return a;
}

// (max, sum) of each row <- itself + pairs[0 .. slots), always in the same order. Pairs hold raw
// products and their sums; what is gathered is float64 in base 2. A block has 32 rows, whose slots
// it deals to MERGE_PARTS threads each.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge_pairs(const Real2* pairs, i64 slots, i64 stride, i64 n,
            const __grid_constant__ Scalar scale, double* max, double* sum) {
  __shared__ Sum parts[MERGE_PARTS][32];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const i64 i = blockIdx.x * (i64)32 + lane;
  const double c = scale.get() * LOG2_E;
  Sum mine = {-INFINITY_, 0};
  if (i < n) {
#pragma unroll 4
    for (i64 s = part; s < slots; s += MERGE_PARTS) {
      const Real2 pair = pairs[s * stride + i];
      mine = merge(mine, Sum{c * (double)pair.x, (double)pair.y});
    }
  }
  parts[part][lane] = mine;
  __syncthreads();  // all parts are there
  if (part != 0 || i >= n) return;
  Sum total = {max[i], sum[i]};
#pragma unroll
  for (int p = 0; p < MERGE_PARTS; ++p) total = merge(total, parts[p][lane]);
  max[i] = total.max;
  sum[i] = total.sum;
}

extern "C" __global__ void empty_pairs(Real2* pairs, i64 n) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) pairs[i] = real2((Real)-INFINITY_, 0);
}

// a[i] += sum over slots of pairs.x, b[i] += unit * that of pairs.y
extern "C" __global__ void add_pairs(const Real2* pairs, i64 slots, i64 stride, i64 n,
                                     const double* unit, double* a, double* b) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  double x = 0, y = 0;
#pragma unroll 4
  for (i64 s = 0; s < slots; ++s) {
    const Real2 pair = pairs[s * stride + i];
    x += pair.x;
    y += pair.y;
  }
  a[i] += x;
  b[i] += *unit * y;
}

// --- factors of the gradient -------------------------------------------------------------------------------

// What the factors' ranges decide.
struct Ranges {
  double unit;    // in which P is written
  double middle;  // of the log-sum-exps
  i64 shared;     // one exponential serves both directions
};

struct FactorSources {
  const double *row_lse, *a, *at_positive;  // [M]
  const double *column_lse, *b;             // [N] or null
  const double* column_positive;            // [N] or null: at the columns' own positives
};

#define RANGE_THREADS 1024
#define LEAST 0x1p-60  // of the factors: with factors / unit beyond this, float32 would overflow

// One block: M + N numbers are read once. A panel's elements are bounded by what its row and its
// column hold together, and each of these by the gradient at its positive; without log-sum-exps
// (sigmoid), by the factors.
extern "C" __global__ void __launch_bounds__(RANGE_THREADS)
ranges(const __grid_constant__ FactorSources f, i64 m, i64 n, double largest_element,
       Ranges* out) {
  __shared__ double parts[4][RANGE_THREADS];
  double high = -INFINITY_, low = INFINITY_, least = INFINITY_, bound = 0;
  for (i64 i = threadIdx.x; i < m; i += RANGE_THREADS) {
    if (f.row_lse) {
      high = fmax(high, f.row_lse[i]);
      low = fmin(low, f.row_lse[i]);
    }
    bound = fmax(bound, fabs(f.a[i]) * (f.at_positive ? LEAST : 1));
    if (f.at_positive) bound = fmax(bound, 2 * fabs(f.at_positive[i]));
  }
  if (f.column_lse)
    for (i64 j = threadIdx.x; j < n; j += RANGE_THREADS) {
      least = fmin(least, f.column_lse[j]);
      if (f.column_positive) bound = fmax(bound, 2 * fabs(f.column_positive[j]));
    }
  const int t = threadIdx.x;
  parts[0][t] = high, parts[1][t] = low, parts[2][t] = least, parts[3][t] = bound;
  for (int half = RANGE_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();  // the upper half is written before it is folded into the lower
    if (t < half) {
      parts[0][t] = fmax(parts[0][t], parts[0][t + half]);
      parts[1][t] = fmin(parts[1][t], parts[1][t + half]);
      parts[2][t] = fmin(parts[2][t], parts[2][t + half]);
      parts[3][t] = fmax(parts[3][t], parts[3][t + half]);
    }
  }
  if (t != 0) return;
  bound = parts[3][0];
  const bool usable = bound > 1e-300 && bound < INFINITY_;
  out->unit = usable ? bound / largest_element : 1.0;
  out->middle = 0.5 * (parts[0][0] + parts[2][0]);
  out->shared = f.column_lse && parts[0][0] - parts[2][0] < 40 && parts[0][0] - parts[1][0] < 80;
}

struct FactorTargets {
  Real *row_height, *a, *u;  // [M]
  Real *column_height, *v;   // [N]
};

// A log-sum-exp as kernels take it off the logits, in the products' precision: h = lse / c, or with
// `scaled` lse as c x comes out, c being rounded there. Returns what is thus taken off.
__device__ __forceinline__ double height(double lse, double c, bool scaled, Real& h) {
  const double rounded = (double)(Real)c, exact = scaled ? lse * (rounded / c) : lse / c;
  h = isfinite(exact) ? (Real)exact : 0;
  return scaled ? (double)h * (c / rounded) : c * (double)h;
}

extern "C" __global__ void factors(const __grid_constant__ FactorSources f, i64 m, i64 n,
                                   const __grid_constant__ Scalar scale, const Ranges* ranges,
                                   const __grid_constant__ FactorTargets out, i64 scaled) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  const double c = scale.get() * LOG2_E, per_unit = 1 / ranges->unit;
  if (i < m) {
    Real h;
    const double rest = height(f.row_lse[i], c, scaled, h);
    out.row_height[i] = h;
    out.a[i] = (Real)(f.a[i] * exp2(rest - f.row_lse[i]) * per_unit);
    if (f.column_lse) out.u[i] = ranges->shared ? (Real)exp2(rest - ranges->middle) : 0;
  }
  if (f.column_lse && i < n) {
    Real h;
    const double lse = f.column_lse[i], rest = height(lse, c, scaled, h);
    out.column_height[i] = h;
    out.v[i] = (Real)(f.b[i] * exp2((ranges->shared ? ranges->middle : rest) - lse) * per_unit);
  }
}

// From positives' logits without the bias: out = -a sigmoid(-z), and what positives add to the sums
// over the negatives. Rows whose positive is not among these keys have none.
extern "C" __global__ void sigmoid_positives(const double* logits, const double* a,
                                             const i64* positives, i64 n,
                                             const __grid_constant__ Scalar bias, double* out,
                                             double* losses, double* bias_grad) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = 0;
  if (positives[i] < 0) return;
  const double z = logits[i] + bias.get(), e = exp(-fabs(z));
  out[i] = -a[i] * (z >= 0 ? e : 1.0) / (1.0 + e);
  losses[i] += fmax(-z, 0.0) + log1p(e);
  bias_grad[i] += out[i];
}

// out = x / unit, rounded: the sigmoid's factors.
extern "C" __global__ void per_unit(const double* x, i64 n, const Ranges* ranges, Real* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = (Real)(x[i] / ranges->unit);
}

// Base-2 logits back to the products that they came from, bit for bit.
extern "C" __global__ void to_products(const double* logits, i64 n,
                                       const __grid_constant__ Scalar scale, Real* out) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) out[i] = (Real)(logits[i] / (scale.get() * LOG2_E));
}

// --- which queries belong to a key (-1: to none of these) ---------------------------------------------------------------------------

// count[1 + j] = how many queries have key j as their positive; count starts as zeros.
extern "C" __global__ void count_queries(const i64* positives, i64 m, u64* count) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m && positives[i] >= 0) atomicAdd(count + 1 + positives[i], 1ull);
}

// order[start[j] .. start[j + 1]) = the queries of key j, in whatever order; `taken` starts as start.
extern "C" __global__ void list_queries(const i64* positives, i64 m, u64* taken, i64* order) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m && positives[i] >= 0) order[atomicAdd(taken + positives[i], 1ull)] = i;
}

// The same in ascending order (Shell's sort), so that sums over them are the same from run to run.
extern "C" __global__ void sort_queries(const i64* start, i64 n, i64* order) {
  const i64 j = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (j >= n) return;
  i64* list = order + start[j];
  const i64 length = start[j + 1] - start[j];
  for (i64 gap = length / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11)
    for (i64 at = gap; at < length; ++at) {
      const i64 moved = list[at];
      i64 to = at;
      for (; to >= gap && list[to - gap] > moved; to -= gap) list[to] = list[to - gap];
      list[to] = moved;
    }
}
