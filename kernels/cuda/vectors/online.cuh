// Losses in one pass (sm90/sweep_online.cu): row sums against reference exponents that were chosen before the logits
// were known (sm90/online_references.cuh). After the sweep of a block of keys come check_references, the sweep again
// for query tiles whose reference exponents did not serve, and add_repeated. end_online comes after the last block.
#pragma once
#include "sm90/online_references.cuh"
#include "vectors/sums.cuh"

constexpr int ONLINE_ROW_THREADS = 4;  // threads that share the slots of a row
constexpr int ONLINE_THREADS = ONLINE_ROW_THREADS * VISITED_TILE_ROWS;

// Sums over the slots of a row. A slot has the sums that one segment and consumer of the sweep leave for the row.
struct SlotSums {
  double sum, moment;  // of 2^(c x - reference), and of 2^(c x - reference) x
  Real high;           // the largest exponent, in the unit of products; -inf if the sweep did not look for it
  Real most;           // the largest sum of one slot

  __device__ __forceinline__ void add(const SlotSums& f) {
    sum += f.sum;
    moment += f.moment;
    high = max_(high, f.high);
    most = max_(most, f.most);
  }
};

// Adds up the slots of the rows of query tile blockIdx.x, in a fixed order. All threads of the block call this. Each of
// the first VISITED_TILE_ROWS threads returns the sums of one row. `pairs` [slots, n] are (`high`, sum).
__device__ __forceinline__ SlotSums add_slots(const Real2* pairs, const Real* moments, i64 slots, i64 n) {
  __shared__ SlotSums parts[ONLINE_ROW_THREADS][VISITED_TILE_ROWS];
  const int row = threadIdx.x % VISITED_TILE_ROWS, part = threadIdx.x / VISITED_TILE_ROWS;
  const i64 i = blockIdx.x * (i64)VISITED_TILE_ROWS + row;
  SlotSums all = {0, 0, (Real)-INFINITY_, 0};
  if (i < n)
#pragma unroll 4
    for (i64 s = part; s < slots; s += ONLINE_ROW_THREADS) {
      const Real2 pair = pairs[s * n + i];
      const double moment = moments ? (double)moments[s * n + i] : 0;
      all.add(SlotSums{(double)pair.y, moment, pair.x, pair.y});
    }
  parts[part][row] = all;
  __syncthreads();  // the writes of parts[] come before the reads below
  if (part == 0)
#pragma unroll
    for (int p = 1; p < ONLINE_ROW_THREADS; ++p) all.add(parts[p][row]);
  return all;
}

// Checks the reference exponents of a query tile, by one thread block. If the sums of all its rows are within the
// bounds, the slots are added to sum[i] and moment[i] (`moment` null: not wanted), and repeated_tiles[query tile] is 0.
// Otherwise it is 1, the slots are discarded, and the sweep computes the query tile again. Rows outside the bounds get
// new reference exponents. The sums and gradients of such rows over earlier blocks, in `sum`, `moment` and
// `acc` [n, acc_stride] (null: no gradient), are scaled to the new reference exponents.
extern "C" __global__ void __launch_bounds__(ONLINE_THREADS)
check_references(const Real2* pairs, const Real* moments, i64 slots, i64 n,
              const __grid_constant__ Scale scale, Real* reference, double* sum, double* moment,
              Real* acc, i64 acc_stride, i64 d, int* repeated_tiles) {
  __shared__ Real factor[VISITED_TILE_ROWS];  // 2^(old reference - new reference) of each row
  const i64 first = blockIdx.x * (i64)VISITED_TILE_ROWS, i = first + threadIdx.x;
  const SlotSums f = add_slots(pairs, moments, slots, n);
  const bool has_row = threadIdx.x < VISITED_TILE_ROWS && i < n;
  // Whether the sum of this thread's row is outside the bounds:
  //   - A slot is too large. It has the sums of SWEEP_ROW_THREADS threads, each of which has the bound.
  //   - Or the sum of all slots and earlier blocks is too small, and the sweep has found the largest exponent, from
  //     which a new reference exponent follows. (A row without pairs has none, and its sum 0 is right.)
  bool outside = false;
  if (has_row)
    outside = f.most > SWEEP_ROW_THREADS * MAX_REFERENCED_SUM ||
              (sum[i] + f.sum < MIN_REFERENCED_SUM && f.high > (Real)-INFINITY_);
  const bool again = __syncthreads_or(outside);
  if (threadIdx.x == 0) repeated_tiles[blockIdx.x] = again;
  if (!again) {
    if (has_row) sum[i] += f.sum;
    if (has_row && moment) moment[i] += f.moment;
    return;
  }
  if (threadIdx.x < VISITED_TILE_ROWS) factor[threadIdx.x] = 1;
  if (outside) {
    const Real now = (Real)(scale.get() * LOG2_E) * f.high;
    if (sum[i] > 0) {
      const Real by = exp2_(reference[i] - now);
      factor[threadIdx.x] = by;
      sum[i] *= by;
      if (moment) moment[i] *= by;
    }
    reference[i] = now;
  }
  if (!acc) return;
  __syncthreads();  // the writes of factor[] come before the reads below
  for (int row = threadIdx.x / 32; row < VISITED_TILE_ROWS; row += ONLINE_THREADS / 32)
    if (factor[row] != 1)
      for (i64 k = threadIdx.x % 32; k < d; k += 32)
        acc[(first + row) * acc_stride + k] *= factor[row];
}

// Adds the slots of query tiles that the sweep has computed again to `sum` and `moment`. Their reference exponents are
// not checked again: they come from the largest exponents, so they serve.
extern "C" __global__ void __launch_bounds__(ONLINE_THREADS)
add_repeated(const Real2* pairs, const Real* moments, i64 slots, i64 n, double* sum, double* moment,
             const int* repeated_tiles) {
  if (!repeated_tiles[blockIdx.x]) return;
  const i64 i = blockIdx.x * (i64)VISITED_TILE_ROWS + threadIdx.x;
  const SlotSums f = add_slots(pairs, moments, slots, n);
  if (threadIdx.x >= VISITED_TILE_ROWS || i >= n) return;
  sum[i] += f.sum;
  if (moment) moment[i] += f.moment;
}

// Ends the pass: the sums of n rows have all columns. For each row i, the kernel writes
//   - rows.max: the reference exponent of the sum, which takes the place of a maximum
//   - rows.moment: the first moment, of base-2 logits instead of products
//   - gradient_divisor: the number by which `finish` multiplies the row of dQ, a 2^(max - log-sum-exp). It is computed
//     as a negative_probability / sum, with a the upstream gradient times the weight of rows and the scale, or a / sum
//     if the sum has all positives. If rows are normalised, the number contains the row's factor.
//   - positive_gradient: dL/dx at the positives
extern "C" __global__ void end_online(const Real* reference, const __grid_constant__ Sums rows,
                                      const double* positive_logits, const i64* positives, i64 set_size,
#if LABEL_WEIGHTS
                                      const double* label_weights,
#endif
                                      const double* upstream, const Real* factor, i64 n,
                                      double row_direction_weight, double label_smoothing, i64 has_classes,
                                      const __grid_constant__ Scale scale,
                                      const __grid_constant__ RowOptions options, double* gradient_divisor,
                                      double* positive_gradient) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i >= n) return;
  const double c = scale.get() * LOG2_E, sum = rows.sum[i];  // of the exponentials that are in dQ
  rows.set(i, to_logits({(double)reference[i], sum, rows.moment ? rows.moment[i] * c : 0}, c));
  const double a = upstream[i] * (row_direction_weight * options.scale.bare());
  double negative_probability;
  if (set_size > 1) {
    PositiveSet set = {positives + i * set_size, positive_logits + i * set_size, set_size};
#if LABEL_WEIGHTS
    set.weights = label_weights + i * set_size;
#endif
    negative_probability = set.direction(options, rows.get(i), a, positive_gradient + i * set_size).negative_probability;
  } else {
    const i64 key = positives[i];
    negative_probability =
        options.direction_of_one(rows.get(i), positive_logits[i], key, options.bias(key)).negative_probability;
    positive_gradient[i] = a * (label_smoothing - negative_probability);  // see `finalize_linear`
    if (has_classes && key < 0) negative_probability = 1;  // the positives of the row's class are in the sum
  }
  gradient_divisor[i] = sum == 0 ? 0 : a * negative_probability / sum * (factor ? factor[i] : 1);
}

