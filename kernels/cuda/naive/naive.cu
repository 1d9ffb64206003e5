// The method naive computes the whole logit matrix. Each formula has one kernel, as in a textbook.
//
// kernels/gpu/naive.py launches the kernels that a loss needs, in this order:
//
//     unit_rows          U: the features Z converted to Real and, if `normalize`, divided by their norms
//     similarity         X = scale U V'; logits of excluded pairs are -inf
//     logits_of_scores   instead of both: X from MaxSim scores (kernels/maxsim)
//     row_losses         for each row: loss, log-sum-exp, retrieval rank
//     column_losses      for each column (CLIP): loss, log-sum-exp, retrieval rank
//     sigmoid_losses     for each row (SigLIP): the losses of its pairs, each a sigmoid
//     logit_gradient     G = dL/dX
//     feature_gradient   dU = scale G V, dV = scale G' U, or scale (G + G') U if the queries are the keys
//     to_features        dZ from dU: the normalisation is differentiated
//
// M queries and N keys of D features: X and G are [m, n], U is [m, d], V is [n, d]. One thread block computes one row,
// and neighbouring threads read neighbouring elements. The order of each sum is fixed. Positives are kept out of the
// sums: with n the log-sum-exp of the negatives and p the logit of the positive, loss = softplus(n - p), and
// dloss/dp = -sigmoid(n - p). Only logits are subtracted from each other.
//
// Unlike in all other kernels, x is a logit, with the scale, in natural units. The functions of direction_losses.cuh
// take logits in base 2: log2(e) x.
//
// This is the first of three steps. Here the whole logit matrix is in memory, and products are plain
// multiply-adds. The second step, tiled/product.cuh, keeps a tile of logits in registers and uses the tensor
// cores. The third step, sm90/sweep/sweep.cuh, is for Hopper.
#include "common.cuh"

#ifndef IDS
#define IDS 1  // columns of ids, if there are ids
#endif
constexpr int NAIVE_THREADS = 256;
constexpr int NAIVE_TILE = 32;  // rows and columns of a product's tile

// The positives, and the pairs that are excluded.
struct Pairs {
  const i64* positives;               // [M] the key that is the positive of row i; -1 for none, and upstream[i] is 0
  const i64 *query_ids, *key_ids;     // [M, IDS], [N, IDS] or null: ids that are equal in any column are excluded
  i64 symmetric;                      // the queries are the keys: i = j is excluded
  __device__ bool excluded(i64 i, i64 j) const {
    if (j == positives[i]) return false;
    return (symmetric && i == j) || (query_ids && any_equal<IDS>(query_ids + i * IDS, key_ids + j * IDS));
  }
};

// Functions of logits in natural units.
__device__ __forceinline__ double softplus(double x) { return softplus2(LOG2_E * x); }
__device__ __forceinline__ double logistic(double x) { return sigmoid2(LOG2_E * x); }
__device__ __forceinline__ Real exp_(Real x) { return exp2_(x * (Real)LOG2_E); }

// The sum, or the maximum, of x over the thread block, in each thread.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double memory[NAIVE_THREADS / 32];
  return block_reduce<NAIVE_THREADS>(x, memory, [](double a, double b) { return a + b; });
}
__device__ __forceinline__ double block_max(double x) {
  __shared__ double memory[NAIVE_THREADS / 32];
  return block_reduce<NAIVE_THREADS>(x, memory, [](double a, double b) { return b > a ? b : a; });
}

// --- features ---------------------------------------------------------------------------------------------

// One thread block computes one row u of U. inverse[row] is u / z: 1 / |z| (0 for a row of zeros), or 1 without
// `normalize`. row_nans[row] is NaN if a feature of the row is not finite, else 0.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
unit_rows(const __grid_constant__ Matrix z, i64 d, i64 normalize, Real* u, double* inverse,
          double* row_nans) {
  const i64 row = blockIdx.x;
  int exponent = 0;
  if (normalize && z.dtype == DTYPE_FLOAT64) {
    double largest = 0;
    for (i64 k = threadIdx.x; k < d; k += NAIVE_THREADS) largest = fmax(largest, fabs(z.get(row, k)));
    exponent = find_exponent(block_max(largest));
  }
  double square_sum = 0, zero_sum = 0;  // zero_sum: of features times 0, which is NaN if a feature is not finite
  for (i64 k = threadIdx.x; k < d; k += NAIVE_THREADS) {
    const double x = ldexp(z.get(row, k), -exponent);
    square_sum += x * x;
    zero_sum += x * 0.0;
  }
  square_sum = block_sum(square_sum);
  zero_sum = block_sum(zero_sum);
  double factor = 1;
  if (normalize) factor = square_sum == 0 ? 0 : ldexp(1 / sqrt(square_sum), -exponent);  // zeros have no direction
  if (threadIdx.x == 0) {
    inverse[row] = factor;
    row_nans[row] = zero_sum;
  }
  for (i64 k = threadIdx.x; k < d; k += NAIVE_THREADS) u[row * d + k] = (Real)(z.get(row, k) * factor);
}

// One thread block computes one row: dz = (g - u <g, u>) / |z| with g = dL/du, or dz = g without `normalize`.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
to_features(const Real* g, const Real* u, i64 d, i64 normalize, const double* inverse,
            const __grid_constant__ Matrix out) {
  const i64 row = blockIdx.x;
  double dot = 0;
  if (normalize) {
    for (i64 k = threadIdx.x; k < d; k += NAIVE_THREADS)
      dot += (double)g[row * d + k] * (double)u[row * d + k];
    dot = block_sum(dot);
  }
  for (i64 k = threadIdx.x; k < d; k += NAIVE_THREADS)
    out.set(row, k, ((double)g[row * d + k] - dot * (double)u[row * d + k]) * inverse[row]);
}

// --- products ---------------------------------------------------------------------------------------------

// The product of a tile of 32 x 32 elements, from row i0 and column j0 on. Thread (x, y) of a block computes four:
//     sum[h] += sum_k a(i0 + y + 8 h, k) b(j0 + x, k)
// The functions a and b read the operands, which are copied to shared memory, 32 x 32 elements at a time. A_ALONG tells
// how neighbouring threads read `a`: true for neighbouring k, false for neighbouring i, whichever are neighbours in
// memory. B_ALONG tells the same of b, with j.
template <bool A_ALONG, bool B_ALONG, class A, class B>
__device__ __forceinline__ void multiply(double (&sum)[4], i64 i0, i64 rows, i64 j0, i64 columns,
                                         i64 depth, A a, B b) {
  // With one more column, the 32 elements of a column lie in 32 banks
  __shared__ Real as[NAIVE_TILE][NAIVE_TILE + 1], bs[NAIVE_TILE][NAIVE_TILE + 1];
  const int x = threadIdx.x % NAIVE_TILE, y = threadIdx.x / NAIVE_TILE;
  for (i64 k0 = 0; k0 < depth; k0 += NAIVE_TILE) {
    __syncthreads();  // the reads of the operands of the step before come before the writes of this step
#pragma unroll
    for (int h = 0; h < NAIVE_TILE; h += NAIVE_THREADS / NAIVE_TILE) {
      const int ai = A_ALONG ? y + h : x, ak = A_ALONG ? x : y + h;
      const int bj = B_ALONG ? y + h : x, bk = B_ALONG ? x : y + h;
      as[ai][ak] = i0 + ai < rows && k0 + ak < depth ? a(i0 + ai, k0 + ak) : 0;
      bs[bj][bk] = j0 + bj < columns && k0 + bk < depth ? b(j0 + bj, k0 + bk) : 0;
    }
    __syncthreads();  // the writes of the operands come before their reads
    Real part[4] = {};
#pragma unroll
    for (int k = 0; k < NAIVE_TILE; ++k)
#pragma unroll
      for (int h = 0; h < 4; ++h) part[h] += as[y + 8 * h][k] * bs[x][k];
#pragma unroll
    for (int h = 0; h < 4; ++h) sum[h] += part[h];  // in float64: fewer digits are lost than in one long sum of Real
  }
}

// One thread block computes a tile of X.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
similarity(const Real* u, const Real* v, i64 m, i64 n, i64 d, const __grid_constant__ Scale scale,
           const __grid_constant__ Pairs pairs, Real* x) {
  const i64 across = (n + NAIVE_TILE - 1) / NAIVE_TILE;
  const i64 i0 = blockIdx.x / across * NAIVE_TILE, j0 = blockIdx.x % across * NAIVE_TILE;
  double sum[4] = {};
  multiply<true, true>(sum, i0, m, j0, n, d, [=](i64 i, i64 k) { return u[i * d + k]; },
                       [=](i64 j, i64 k) { return v[j * d + k]; });
  const i64 j = j0 + threadIdx.x % NAIVE_TILE;
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    const i64 i = i0 + threadIdx.x / NAIVE_TILE + 8 * h;
    if (i < m && j < n)
      x[i * n + j] = pairs.excluded(i, j) ? (Real)-INFINITY_ : (Real)(scale.get() * sum[h]);
  }
}

// x [m, n] are logits of scores [m, n] that other kernels have computed; they may be in the same memory.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
logits_of_scores(const Real* scores, i64 m, i64 n, const __grid_constant__ Scale scale,
                 const __grid_constant__ Pairs pairs, Real* x) {
  const i64 at = (i64)blockIdx.x * NAIVE_THREADS + threadIdx.x;
  if (at < m * n) x[at] = pairs.excluded(at / n, at % n) ? (Real)-INFINITY_ : (Real)(scale.get() * scores[at]);
}

// One thread block computes a tile of out [rows, d], which is the scale times
//     QUERY_GRADIENT    sum_j G_ij v_j
//     KEY_GRADIENT      sum_i G_ij u_i
//     BOTH_GRADIENTS    sum_j (G_ij + G_ji) u_j, if the queries are the keys
enum { QUERY_GRADIENT, KEY_GRADIENT, BOTH_GRADIENTS };
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
feature_gradient(const Real* g, const Real* z, i64 m, i64 n, i64 d, i64 which,
                 const __grid_constant__ Scale scale, Real* out) {
  const i64 rows = which == KEY_GRADIENT ? n : m, across = (d + NAIVE_TILE - 1) / NAIVE_TILE;
  const i64 i0 = blockIdx.x / across * NAIVE_TILE, j0 = blockIdx.x % across * NAIVE_TILE;
  const auto features = [=](i64 j, i64 k) { return z[k * d + j]; };  // feature j of row k of the other side
  double sum[4] = {};
  if (which != KEY_GRADIENT)
    multiply<true, false>(sum, i0, rows, j0, d, n, [=](i64 i, i64 k) { return g[i * n + k]; },
                          features);
  if (which != QUERY_GRADIENT)
    multiply<false, false>(sum, i0, rows, j0, d, m, [=](i64 i, i64 k) { return g[k * n + i]; },
                           features);
  const i64 j = j0 + threadIdx.x % NAIVE_TILE;
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    const i64 i = i0 + threadIdx.x / NAIVE_TILE + 8 * h;
    if (i < rows && j < d) out[i * d + j] = (Real)(scale.get() * sum[h]);
  }
}

// --- losses -----------------------------------------------------------------------------------------------

// Numbers of each row, or of each column, that follow from its logits.
struct DirectionResults {
  double *gap, *lse;   // gap n - p in base 2; log-sum-exp of all logits, natural units
  double *loss, *top;  // natural units; `top` is the largest logit of the negatives, written for rows only
  i64* rank;           // how many negatives have a larger logit than the positive
};

// Writes the loss, the log-sum-exp and the gap of a row or column to element i of `side`. `top` is the largest logit of
// its negatives, and `sum` the sum of their e^(x - top).
__device__ __forceinline__ void put(const DirectionResults& side, i64 i, double top, double sum, double positive,
                                    bool has_positive = true) {
  const Sum negatives = {LOG2_E * top, sum};
  const DirectionLosses d = has_positive ? finalize_direction(negatives, LOG2_E * positive)
                                   : without_positive(negatives);
  side.gap[i] = d.gap;
  side.lse[i] = has_positive ? positive + d.loss : LN_2 * d.lse2;
  side.loss[i] = d.loss;
}

// One thread block computes row i, whose positive is key y. Also writes positive[i], the logit of the positive.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
row_losses(const Real* x, i64 n, const __grid_constant__ Pairs pairs,
           const __grid_constant__ DirectionResults side, double* positive) {
  const i64 i = blockIdx.x, y = pairs.positives[i];
  const Real *row = x + i * n, p = y < 0 ? (Real)-INFINITY_ : row[y];
  double top = -INFINITY_, above = 0;
  for (i64 j = threadIdx.x; j < n; j += NAIVE_THREADS)
    if (j != y) {
      top = max_(row[j], (Real)top);
      above += row[j] > p;
    }
  top = block_max(top);
  above = block_sum(above);
  double sum = 0;
  for (i64 j = threadIdx.x; j < n; j += NAIVE_THREADS)
    if (j != y && row[j] != (Real)-INFINITY_) sum += exp_(row[j] - (Real)top);
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  positive[i] = p;
  put(side, i, top, sum, p, y >= 0);
  side.top[i] = top;
  side.rank[i] = (i64)above;
}

// One thread block computes 32 columns: lane l has column l, and warp w has every eighth row, so that a warp reads 32
// neighbouring elements at a time. Key j is the positive of query j.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
column_losses(const Real* x, i64 m, i64 n, const __grid_constant__ DirectionResults side) {
  __shared__ double memory[NAIVE_THREADS / 32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 j = blockIdx.x * 32 + lane;
  const bool inside = j < n;
  // Joins the values of a column over all warps; each warp gets the result
  const auto over_warps = [&](double value, auto join) {
    memory[warp][lane] = value;
    __syncthreads();  // every warp's write to memory[] comes before the reads below
    value = memory[0][lane];
    for (int w = 1; w < NAIVE_THREADS / 32; ++w) value = join(value, memory[w][lane]);
    __syncthreads();  // all reads of memory[] come before the next call's writes
    return value;
  };
  const auto add = [](double a, double b) { return a + b; };
  const Real p = inside ? x[j * n + j] : 0;
  double top = -INFINITY_, above = 0, sum = 0;
  for (i64 i = warp; inside && i < m; i += NAIVE_THREADS / 32)
    if (i != j) {
      top = max_(x[i * n + j], (Real)top);
      above += x[i * n + j] > p;
    }
  top = over_warps(top, [](double a, double b) { return b > a ? b : a; });
  above = over_warps(above, add);
  for (i64 i = warp; inside && i < m; i += NAIVE_THREADS / 32)
    if (i != j && x[i * n + j] != (Real)-INFINITY_) sum += exp_(x[i * n + j] - (Real)top);
  sum = over_warps(sum, add);
  if (warp != 0 || !inside) return;
  put(side, j, top, sum, p);
  side.rank[j] = (i64)above;
}

// One thread block computes row i: the loss of a pair is softplus(x + b) for a negative, and softplus(-x - b) for the
// positive, with the bias b.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
sigmoid_losses(const Real* x, i64 n, const __grid_constant__ Pairs pairs,
               const __grid_constant__ Scalar bias, double* loss) {
  const i64 i = blockIdx.x, y = pairs.positives[i];
  double sum = 0;
  for (i64 j = threadIdx.x; j < n; j += NAIVE_THREADS) {
    const double z = (double)x[i * n + j] + bias.get();
    sum += softplus(j == y ? -z : z);  // an excluded pair has x = -inf, and adds 0
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) loss[i] = sum;
}

// One thread block computes row i of G = dL/dX, dots[i] = sum_j G_ij x_ij for the gradient of the scale, and
// sums[i] = sum_j G_ij for the gradient of the bias. Both are NaN if the loss of the row is NaN. `column_lse` is null if
// columns have no softmax. G may be in the memory of X.
extern "C" __global__ void __launch_bounds__(NAIVE_THREADS)
logit_gradient(const Real* x, i64 n, const __grid_constant__ Pairs pairs,
               const double* losses, const double* upstream, double row_direction_weight,
               double column_direction_weight, const double* row_lse, const double* row_gap, const double* column_lse,
               const double* column_gap, i64 sigmoid, const __grid_constant__ Scalar bias, Real* g,
               double* dots, double* sums) {
  const i64 i = blockIdx.x, y = pairs.positives[i];
  double dot = 0, total = 0;
  for (i64 j = threadIdx.x; j < n; j += NAIVE_THREADS) {
    const Real logit = x[i * n + j];
    double value;
    if (logit == (Real)-INFINITY_) {  // an excluded pair
      value = 0;
    } else if (sigmoid) {
      const double z = (double)logit + bias.get();
      value = upstream[i] * logistic(j == y ? -z : z);
    } else if (j == y) {
      value = upstream[i] * row_direction_weight * sigmoid2(row_gap[i]);
      if (column_lse) value += upstream[j] * column_direction_weight * sigmoid2(column_gap[j]);
    } else {
      value = upstream[i] * row_direction_weight * exp_((Real)((double)logit - row_lse[i]));
      if (column_lse)
        value += upstream[j] * column_direction_weight * exp_((Real)((double)logit - column_lse[j]));
    }
    if (j == y) value = -value;  // the loss falls if the logit of the positive grows
    g[i * n + j] = (Real)value;
    if (value != 0) dot += value * (double)logit;
    total += value;
  }
  dot = block_sum(dot);
  total = block_sum(total);
  if (threadIdx.x == 0) {
    const double nan = isnan(losses[i]) ? NAN_ : 0;
    dots[i] = dot + nan;
    sums[i] = total + nan;
  }
}
