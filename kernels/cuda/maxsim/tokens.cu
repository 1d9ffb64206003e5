// MaxSim: maxima of products of tokens, and gradients of tokens from their winners. With q_ia the tokens of query i,
// d_jb those of key j, s_ij their score and G = scale dL/ds, divided by the number of the query's tokens if s is a mean,
//
//     s_ij = sum_a max_b q_ia . d_jb        winner b*(i, a, j): the first b with the maximum
//     dq_ia = sum_j G_ij d_{j, b*}          dd_jb = sum_ij G_ij sum over a with b* = b of q_ia
//
// Rows of tokens have one stride, so query token a of query i is token i query_tokens + a. Only the first `counts` of
// a row count (null: all). Winners are [keys][query tokens]. Sums have a fixed order.
#include "rows.cuh"

#ifndef WIDE_WINNERS
#define WIDE_WINNERS 0  // 1: rows may have more than 2^16 tokens
#endif
#if WIDE_WINNERS
typedef int Winner;
#else
typedef unsigned short Winner;
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROWS_PER_BLOCK = 32;  // query tokens of a thread block of take_maxima

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
add_tokens(const Real* best, i64 queries, i64 keys, i64 query_tokens, const i64* counts, const Real* weights,
           Real* scores) {
  const i64 at = blockIdx.x * (i64)THREADS + threadIdx.x;
  if (at >= queries * keys) return;
  const i64 key = at / queries, query = at % queries, count = counts ? counts[query] : query_tokens;
  const Real* from = best + (key * queries + query) * query_tokens;
  double sum = 0;
  for (i64 a = 0; a < count; ++a) sum += from[a];
  scores[query * keys + key] = (Real)(weights ? sum * weights[query] : sum);
}

