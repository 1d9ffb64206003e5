// MaxSim: maxima of products of tokens, and gradients of tokens from their winners. With q_ia the tokens of query i,
// d_jb those of key j, s_ij their score and G = scale dL/ds, divided by the number of the query's tokens if s is a mean,
//
//     s_ij = sum_a max_b q_ia . d_jb        winner b*(i, a, j): the first b with the maximum
//     dq_ia = sum_j G_ij d_{j, b*}          dd_jb = sum_ij G_ij sum over a with b* = b of q_ia
//
// Rows of tokens have one stride: token a of query i is query token i query_tokens + a. Only the first `counts` of a
// key count (null: all). Queries with a mask are packed: the tokens of query i that count are those from starts[i] to
// starts[i + 1] - 1 (null: they are not packed). Arrays of packed tokens have room for all tokens, because only the
// device knows how many count. Winners are [keys][query tokens]. Sums have a fixed order.
#include "maxsim/types.cuh"
#include "rows.cuh"

typedef unsigned char Flag;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROWS_PER_BLOCK = 32;  // query tokens of a thread block of take_maxima

// The tokens of rows that have a mask, [rows][tokens]: those that count come first, in their order, then the others.
// order[i][c] = the place of the c-th token of row i, and counts[i] = how many count. A warp computes a row.
extern "C" __global__ void __launch_bounds__(THREADS)
order_tokens(const Flag* mask, i64 rows, i64 tokens, int* order, i64* counts) {
  const i64 row = lanes_row(32);
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  int counted = 0;
  for (int others = 0; others < 2; ++others) {
    for (i64 first = 0; first < tokens; first += 32) {
      const i64 a = first + lane;
      const bool is_mine = a < tokens && (mask[row * tokens + a] != 0) == !others;
      const u32 lanes = __ballot_sync(ALL_LANES, is_mine);
      if (is_mine) order[row * tokens + counted + __popc(lanes & ((1u << lane) - 1))] = (int)a;
      counted += __popc(lanes);
    }
    if (!others && lane == 0) counts[row] = counted;
  }
}

// starts[i] = the sum of the counts before row i; starts[rows], of all counts. One thread block computes them.
extern "C" __global__ void __launch_bounds__(THREADS)
add_counts(const i64* counts, i64 rows, i64* starts) {
  __shared__ i64 sums[THREADS];
  const i64 begin = rows * threadIdx.x / THREADS, end = rows * (threadIdx.x + 1) / THREADS;
  i64 sum = 0;
  for (i64 i = begin; i < end; ++i) sum += counts[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  i64 start = 0;
  for (int t = 0; t < (int)threadIdx.x; ++t) start += sums[t];
  for (i64 i = begin; i < end; ++i) starts[i] = start, start += counts[i];
  if (threadIdx.x == THREADS - 1) starts[rows] = start;
}

// Tokens as operands [rows * tokens][d]: z, or z / |z| if z has norms. With an order (null: none), those that count come
// first in each row, and zeros replace the others. With `starts`, they are packed, zeros follow them, and token_rows
// [rows * tokens] has their rows. Half a warp, or a warp, computes a token.
extern "C" __global__ void __launch_bounds__(THREADS)
stage_tokens(const __grid_constant__ Rows z, const int* order, const i64* counts, const i64* starts, i64 rows,
             i64 tokens, i64 d, const __grid_constant__ Matrix operands, int* token_rows) {
  const int lanes = count_lanes(d), lane = threadIdx.x % lanes;
  const i64 token = lanes_row(lanes);
  if (token >= rows * tokens) return;
  const i64 row = token / tokens;
  const bool counts_here = !counts || token % tokens < counts[row];
  const i64 source = order ? row * tokens + order[token] : token;
  i64 to = token;
  if (starts) to = counts_here ? starts[row] + token % tokens : starts[rows] + token - starts[row + 1];
  if (starts && counts_here && lane == 0) token_rows[to] = (int)row;
  const Real inverse = counts_here ? (Real)z.inverse(source) : 0;
  for (i64 column = lane * LANE_FEATURES; column < d; column += lanes * LANE_FEATURES) {
    Real x[LANE_FEATURES] = {};
    if (counts_here) get_group(x, z.z, source, column, d - column);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i)
      if (z.factor) x[i] *= inverse;
    set_group(x, operands, to, column, d - column);
  }
}

// The gradient with respect to z, from that with respect to the operands, `g` [rows * tokens][d]: written to `out`, or
// added if `add`. Tokens that do not count have gradient 0. Half a warp, or a warp, computes a token.
extern "C" __global__ void __launch_bounds__(THREADS)
finish_tokens(const __grid_constant__ Rows z, const Real* g, const int* order, const i64* counts, const i64* starts,
              i64 rows, i64 tokens, i64 d, const __grid_constant__ Matrix out, i64 add) {
  const int lanes = count_lanes(d), lane = threadIdx.x % lanes;
  const i64 token = lanes_row(lanes);
  const bool exists = token < rows * tokens;
  const i64 row = token / tokens;
  const bool counts_here = exists && (!counts || token % tokens < counts[row]);
  const i64 place = order && exists ? row * tokens + order[token] : token;
  if (starts && exists) g += (starts[row] - row * tokens) * d;  // the row's first token is there
  double along = 0, inverse = 1;
  if (z.factor) {  // u = z / |z|: dz = (g - u <g, u>) / |z|
    for (i64 column = lane * LANE_FEATURES; counts_here && column < d; column += lanes * LANE_FEATURES) {
      double x[LANE_FEATURES], y[LANE_FEATURES];
      get_group(x, z.z, place, column, d - column);
      get_reals(y, g + token * d + column, d - column);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) along += x[i] * y[i];
    }
    along = lanes_sum(along, lanes);
    if (counts_here) inverse = z.inverse(place);
  }
  for (i64 column = lane * LANE_FEATURES; exists && column < d; column += lanes * LANE_FEATURES) {
    double x[LANE_FEATURES], y[LANE_FEATURES] = {}, before[LANE_FEATURES] = {};
    if (counts_here) get_reals(y, g + token * d + column, d - column);
    if (counts_here && z.factor) {
      get_group(x, z.z, place, column, d - column);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) y[i] = (y[i] - x[i] * inverse * (along * inverse)) * inverse;
    }
    if (add) get_group(before, out, place, column, d - column);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) y[i] += before[i];
    set_group(y, out, place, column, d - column);
  }
}

// nans[i] = NaN if a feature of a token of row i that counts is not finite, or if `wants_tokens` and the row has none;
// else 0. A thread block computes a row.
extern "C" __global__ void __launch_bounds__(THREADS)
tokens_not_finite(const __grid_constant__ Matrix z, const Flag* mask, i64 tokens, i64 d, i64 wants_tokens, double* nans) {
  const i64 row = blockIdx.x;
  float sum = 0;  // of features times 0: 0, or NaN
  int counted = 0;
  for (i64 at = threadIdx.x * (i64)LANE_FEATURES; at < tokens * d; at += THREADS * LANE_FEATURES)
    for (i64 k = at; k < at + LANE_FEATURES && k < tokens * d;) {
      const i64 token = k / d, column = k % d, n = min(min(d - column, tokens * d - k), at + LANE_FEATURES - k);
      if (!mask || mask[row * tokens + token]) {
        Real x[LANE_FEATURES];
        get_group(x, z, row * tokens + token, column, n);
#pragma unroll
        for (int i = 0; i < LANE_FEATURES; ++i) sum += (float)(x[i] * 0);
        counted = 1;
      }
      k += n;
    }
  const bool is_bad = __syncthreads_or(sum != 0), has_tokens = __syncthreads_or(counted);
  if (threadIdx.x == 0) nans[row] = is_bad || (wants_tokens && !has_tokens) ? NAN_ : 0.0;
}

// best[j][a] = the largest product of query token a with the tokens of key j; NaN if one of them is not finite.
// `products` [rows][stride] are those of a tile: `rows` query tokens and `keys` keys, each of `key_tokens` columns.
// winners[j][a] (null: not wanted): the column of the maximum. Rows of best and winners have `best_stride` elements.
extern "C" __global__ void __launch_bounds__(THREADS)
take_maxima(const Real* products, i64 stride, i64 rows, i64 keys, i64 key_tokens, const i64* counts, Real* best,
            Winner* winners, i64 best_stride) {
  const i64 groups = (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
  const i64 key = blockIdx.x / groups, group = blockIdx.x % groups;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 count = counts ? counts[key] : key_tokens;
  for (int r = warp; r < ROWS_PER_BLOCK; r += WARPS) {
    const i64 row = group * ROWS_PER_BLOCK + r;
    if (row >= rows) return;
    const Real* from = products + row * stride + key * key_tokens;
    Real top = LOW, zero = 0;
    int winner = 0x7fffffff;
    for (int b = lane; b < count; b += 32) {
      const Real x = from[b];
      zero += x * 0;  // NaN if x is not finite
      if (x > top) top = x, winner = b;
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
      const Real other = __shfl_xor_sync(ALL_LANES, top, by);
      const int other_winner = __shfl_xor_sync(ALL_LANES, winner, by);
      zero += __shfl_xor_sync(ALL_LANES, zero, by);
      if (other > top || (other == top && other_winner < winner)) top = other, winner = other_winner;
    }
    if (lane) continue;
    const i64 at = key * best_stride + row;
    best[at] = zero == 0 ? top : (Real)NAN_;
    if (winners) winners[at] = winner < count ? winner : 0;
  }
}

// scores[i][j] = weights[i] (null: 1) times the sum of best[j][a] over the tokens a of query i.
extern "C" __global__ void __launch_bounds__(THREADS)
add_tokens(const Real* best, i64 queries, i64 keys, i64 query_tokens, const i64* starts, const Real* weights,
           Real* scores) {
  const i64 at = blockIdx.x * (i64)THREADS + threadIdx.x;
  if (at >= queries * keys) return;
  const i64 key = at / queries, query = at % queries;
  const i64 begin = starts ? starts[query] : query * query_tokens;
  const i64 end = starts ? starts[query + 1] : begin + query_tokens;
  double sum = 0;
  for (i64 a = begin; a < end; ++a) sum += best[key * queries * query_tokens + a];
  scores[query * keys + key] = (Real)(weights ? sum * weights[query] : sum);
}
