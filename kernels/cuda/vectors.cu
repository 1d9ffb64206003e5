// Work on vectors of length M or N between the tiled kernels.
#include "heights.cuh"

// --- log-sum-exp -----------------------------------------------------------------------------------------

#define MERGE_THREADS 128
#define MERGE_PARTS 4  // threads that share a row
#define TILE_COLUMNS 128  // of a sweep
#define MOST_SWEEPERS 512  // blocks of one

struct Sum {
  double max, sum;  // of 2^x, base 2
};

// A part (-inf, 0) is empty; two empty parts make no difference of infinities. A NaN sum stays.
// Sweeps' sums may be as large as 2^127, and as small: the factor has to reach further than a float.
__device__ __forceinline__ Sum merge(Sum a, Sum b) {
  if (b.max > a.max) {
    const Sum t = a;
    a = b;
    b = t;
  }
  if (b.max != a.max) {
    const double half = exp2_((Real)(0.5 * (b.max - a.max)));
    b.sum *= half * half;
  }
  a.sum += b.sum;
  return a;
}

// Which of a sweep's blocks have met a tile, in their order; returns how many. By a warp.
__device__ __forceinline__ int find_met(const u32* marks, int blocks, i64 tile, int lane, int* met) {
  int found = 0;
#pragma unroll 8
  for (int first = 0; first < blocks; first += 32) {
    const int block = first + lane;
    const bool here = block < blocks && marks[block * 32 + tile / 32 % 32] >> tile % 32 & 1;
    const u32 all = __ballot_sync(ALL_LANES, here);
    if (here) met[found + __popc(all & ((1u << lane) - 1))] = block;
    found += __popc(all);
  }
  return found;
}

// (max, sum) of each row <- itself + pairs[0 .. slots), always in the same order. Pairs hold raw
// products, or with `scale` ln 2 logits in base 2, and their sums; what is gathered is float64 in
// base 2. A block has 32 rows, whose slots it deals to MERGE_PARTS threads each. `marks` (or null) tell
// which columns' pairs a sweep has left (sweep_lse.cu), of its blocks, with 2^strips slots each.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge_pairs(const Real2* pairs, i64 slots, i64 stride, i64 n,
            const __grid_constant__ Scale scale, double* max, double* sum, const u32* marks,
            i64 strips) {
  __shared__ Sum parts[MERGE_PARTS][32];
  __shared__ int met[MOST_SWEEPERS], count;  // blocks that have left pairs of this tile
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const i64 i = blockIdx.x * (i64)32 + lane;
  if (marks) {
    if (part == 0) {
      const int found = find_met(marks, (int)(slots >> strips), i / TILE_COLUMNS, lane, met);
      if (lane == 0) count = found;
    }
    __syncthreads();  // the list is there
    slots = (i64)count << strips;
  }
  const double c = scale.get() * LOG2_E;
  Sum mine = {-INFINITY_, 0};
  if (i < n) {
#pragma unroll 4
    for (i64 s = part; s < slots; s += MERGE_PARTS) {
      const i64 slot = marks ? ((i64)met[s >> strips] << strips) + (s & strips) : s;
      const Real2 pair = pairs[slot * stride + i];
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

// --- before and after the log-sum-exps -------------------------------------------------------------------

// problems.spelled_out: positives by the loss's rule, what is upstream of each row. (Null: given.)
struct Spelling {
  i64* positives;
  double *upstream, value;
  i64 symmetric;

  __device__ __forceinline__ void write(i64 i, i64 m) const {
    if (positives) positives[i] = symmetric ? (i + m / 2) % m : i;
    if (upstream) upstream[i] = value;
  }
};

struct Sums {
  double *max, *sum;
};

// The fold's identity: sums (-inf, 0), no positives yet. Columns may have none (null), as `any`.
extern "C" __global__ void begin(const __grid_constant__ Sums rows,
                                 const __grid_constant__ Sums columns, double* positive, i64 m,
                                 i64 n, const __grid_constant__ Spelling spelling, double* any) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m) {
    rows.max[i] = -INFINITY_, rows.sum[i] = 0, positive[i] = NAN_;
    spelling.write(i, m);
  }
  if (columns.max && i < n) columns.max[i] = -INFINITY_, columns.sum[i] = 0;
  if (any && i == 0) *any = 0;
}

// What follows for one row, or column, from its sums over the negatives and its positive.
struct Direction {
  double loss, lse2, share;  // natural units, base 2, what the negatives hold of the softmax
  __device__ __forceinline__ Direction(const Sums& s, i64 i, double positive) {
    const double negatives = s.max[i] + log2(s.sum[i]), gap = negatives - positive;
    const double softplus = fmax(gap, 0.0) + log1p(exp2(-fabs(gap))) * LOG2_E;
    const bool usable = gap == gap;
    loss = LN_2 * (usable ? softplus : gap);
    lse2 = usable ? positive + softplus : gap;
    share = isinf(gap) ? gap > 0 : exp2(gap - softplus);
  }
};

struct Concluding {
  Sums rows, columns;
  double* positive;
  const i64* positives;
  const double* upstream;
  const double *bad, *any;  // NaN for a row that is not finite (or null); for any
  double row_weight, column_weight;
  Scale scale;
  i64 m, symmetric, triangle, two_sided, lse_is_float;
  // results
  double *losses, *row_loss, *row_lse2, *column_loss, *column_lse2, *a, *b, *at_positive;
  void *row_lse, *column_lse;
};

__device__ __forceinline__ void put_lse(const Concluding& f, void* to, i64 i, double lse2) {
  if (f.lse_is_float) ((float*)to)[i] = (float)(LN_2 * lse2);
  else ((double*)to)[i] = LN_2 * lse2;
}

// blocks.Vectors.conclude, a row a thread.
extern "C" __global__ void conclude(const __grid_constant__ Concluding f) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= f.m) return;
  const double scale = f.scale.bare(), upstream = f.upstream[i];
  const i64 partner = f.positives[i];
  double positive = f.positive[i];
  // A triangle met the pair once, from its lower row
  if (f.triangle && partner >= 0 && partner < i) f.positive[i] = positive = f.positive[partner];
  const Direction row(f.rows, i, positive);
  const double a = upstream * (f.row_weight * scale);
  double loss = f.row_weight * row.loss, at_positive = a * row.share;
  if (f.symmetric && partner >= 0)
    at_positive += f.upstream[partner] * (f.row_weight * scale) *
                   Direction(f.rows, partner, positive).share;
  if (f.two_sided) {
    const Direction column(f.columns, i, positive);
    const double b = upstream * (f.column_weight * scale);
    loss += f.column_weight * column.loss;
    at_positive += b * column.share;
    f.b[i] = b;
    f.column_loss[i] = column.loss;
    f.column_lse2[i] = column.lse2;
    put_lse(f, f.column_lse, i, column.lse2);
  }
  f.losses[i] = loss + *f.any + (f.bad ? f.bad[i] : 0);
  f.row_loss[i] = row.loss;
  f.row_lse2[i] = row.lse2;
  put_lse(f, f.row_lse, i, row.lse2);
  f.a[i] = a;
  f.at_positive[i] = -at_positive;
}

#define TOTALS_THREADS 1024

// The sum of x (null: 0), by all threads of the only block; the first has it.
__device__ __forceinline__ double add_up(const double* x, i64 n) {
  __shared__ double memory[TOTALS_THREADS / 32];
  double sum = 0;
  if (x)
#pragma unroll 8  // one multiprocessor has to have much under way
    for (i64 i = threadIdx.x; i < n; i += TOTALS_THREADS) sum += x[i];
  return block_reduce<TOTALS_THREADS>(sum, memory, [](double a, double b) { return a + b; });
}

// out[0] = share * sum of losses, out[1] = sum of dots / (halves scale), out[2] = sum of of_bias /
// scale; null: 0.
extern "C" __global__ void __launch_bounds__(TOTALS_THREADS)
totals(const double* losses, i64 m, double share, const double* dots, i64 count, double halves,
       const double* of_bias, const __grid_constant__ Scale scale, void* out, i64 is_float) {
  const double sums[3] = {share * add_up(losses, m), add_up(dots, count) / (halves * scale.bare()),
                          add_up(of_bias, m) / scale.bare()};
  if (threadIdx.x) return;
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (is_float) ((float*)out)[i] = (float)sums[i];
    else ((double*)out)[i] = sums[i];
}

// --- one pass: sums against given heights (heights.cuh) ----------------------------------------------------

#define PANEL_ROWS 128  // of a sweep, and of a block of threads here
#define PANEL_PARTS 4   // threads that share a row
#define PANEL_THREADS (PANEL_PARTS * PANEL_ROWS)

// What a row's slots hold together.
struct Found {
  double sum;
  Real high, most;  // the largest product, if it was looked for; the largest of the slots' sums

  __device__ __forceinline__ void add(const Found& f) {
    sum += f.sum;
    high = max_(high, f.high);
    most = max_(most, f.most);
  }
};

// By all threads of a block, always in the same order; the first PANEL_ROWS have the result.
__device__ __forceinline__ Found find(const Real2* pairs, i64 slots, i64 n) {
  __shared__ Found parts[PANEL_PARTS][PANEL_ROWS];
  const int row = threadIdx.x % PANEL_ROWS, part = threadIdx.x / PANEL_ROWS;
  const i64 i = blockIdx.x * (i64)PANEL_ROWS + row;
  Found all = {0, (Real)-INFINITY_, 0};
  if (i < n)
#pragma unroll 4
    for (i64 s = part; s < slots; s += PANEL_PARTS) {
      const Real2 pair = pairs[s * n + i];
      all.add(Found{(double)pair.y, pair.x, pair.y});
    }
  parts[part][row] = all;
  __syncthreads();  // all parts are there
  if (part == 0)
#pragma unroll
    for (int p = 1; p < PANEL_PARTS; ++p) all.add(parts[p][row]);
  return all;
}

// A panel of rows within the bounds: sums gain what the slots hold. One with a row outside of them is
// `wanted` once more: such rows get new heights, and what was gathered under the old ones, sums and
// the gradient `acc` [n, acc_stride] (null: nothing yet), is brought to these. One block a panel.
extern "C" __global__ void __launch_bounds__(PANEL_THREADS)
check_heights(const Real2* pairs, i64 slots, i64 n, const __grid_constant__ Scale scale,
              Real* height, double* sum, Real* acc, i64 acc_stride, i64 d, int* wanted) {
  __shared__ Real factor[PANEL_ROWS];
  const i64 first = blockIdx.x * (i64)PANEL_ROWS, i = first + threadIdx.x;
  const Found f = find(pairs, slots, n);
  const bool mine = threadIdx.x < PANEL_ROWS && i < n;
  bool outside = false;
  if (mine)
    outside = f.most > SHARERS * MOST || (sum[i] + f.sum < LEAST && f.high > (Real)-INFINITY_);
  const bool again = __syncthreads_or(outside);
  if (threadIdx.x == 0) wanted[blockIdx.x] = again;
  if (!again) {
    if (mine) sum[i] += f.sum;
    return;
  }
  if (threadIdx.x < PANEL_ROWS) factor[threadIdx.x] = 1;
  if (outside) {
    const Real now = (Real)(scale.get() * LOG2_E) * f.high;
    if (sum[i] > 0) {
      const Real by = exp2_(height[i] - now);
      factor[threadIdx.x] = by;
      sum[i] *= by;
    }
    height[i] = now;
  }
  if (!acc) return;
  __syncthreads();  // all factors are there
  for (int row = threadIdx.x / 32; row < PANEL_ROWS; row += PANEL_THREADS / 32)
    if (factor[row] != 1)
      for (i64 k = threadIdx.x % 32; k < d; k += 32)
        acc[(first + row) * acc_stride + k] *= factor[row];
}

// The sums of panels that were swept once more.
extern "C" __global__ void __launch_bounds__(PANEL_THREADS)
add_wanted(const Real2* pairs, i64 slots, i64 n, double* sum, const int* wanted) {
  if (!wanted[blockIdx.x]) return;
  const i64 i = blockIdx.x * (i64)PANEL_ROWS + threadIdx.x;
  const Found f = find(pairs, slots, n);
  if (threadIdx.x < PANEL_ROWS && i < n) sum[i] += f.sum;
}

// Rows have met all columns: their maxima, as the sums are against them; the unit of their gradients,
// a 2^(height - log-sum-exp), with the row's own factor where normalised; dL/dx at the positive.
extern "C" __global__ void end_online(const Real* height, const __grid_constant__ Sums rows,
                                      const double* positive, const double* upstream,
                                      const Real* factor, i64 n, double row_weight,
                                      const __grid_constant__ Scale scale, double* unit,
                                      double* at_positive) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  const double c = scale.get() * LOG2_E;
  rows.max[i] = (double)height[i] * (c / (double)(Real)c);  // c is rounded in the logits
  const Direction row(rows, i, positive[i]);
  const double a = upstream[i] * (row_weight * scale.bare());
  unit[i] = rows.sum[i] == 0 ? 0 : a * exp2(rows.max[i] - row.lse2) * (factor ? factor[i] : 1);
  at_positive[i] = -(a * row.share);
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
#pragma unroll 4  // as in `totals`
  for (i64 i = threadIdx.x; i < m; i += RANGE_THREADS) {
    if (f.row_lse) {
      high = fmax(high, f.row_lse[i]);
      low = fmin(low, f.row_lse[i]);
    }
    bound = fmax(bound, fabs(f.a[i]) * (f.at_positive ? LEAST : 1));
    if (f.at_positive) bound = fmax(bound, 2 * fabs(f.at_positive[i]));
  }
  if (f.column_lse)
#pragma unroll 4
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
                                   const __grid_constant__ Scale scale, const Ranges* ranges,
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

// The sigmoid fold's beginning: upstream with the scale folded in, sums of nothing, no positives yet.
extern "C" __global__ void begin_sigmoid(i64 m, const double* upstream,
                                         const __grid_constant__ Scale scale, double* row_factor,
                                         double* losses, double* bias_grad, double* positive,
                                         const __grid_constant__ Spelling spelling, double* any) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i == 0) *any = 0;
  if (i >= m) return;
  spelling.write(i, m);
  row_factor[i] = upstream[i] * scale.bare();
  losses[i] = bias_grad[i] = 0;
  positive[i] = NAN_;
}

// Losses of rows that depend on a feature that is not finite become NaN (conclude does so itself).
extern "C" __global__ void poison(i64 m, double* losses, const double* bad, const double* any) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < m) losses[i] += *any + (bad ? bad[i] : 0);
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
                                       const __grid_constant__ Scale scale, Real* out) {
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
