// MaxSim: gradients of tokens from winners (maxsim/tokens.cu has the equations). Operands are contiguous rows of d
// elements in the precision of the products. Query tokens are packed if there are `starts` and `token_rows`, else null.
//
// -DALIGNED=1: rows have a multiple of 16 bytes.
#include "maxsim/types.cuh"

#ifndef ALIGNED
#define ALIGNED 0
#endif
#ifndef TOKENS
#define TOKENS 96  // key tokens of a thread block of key_gradient
#endif
#ifndef WARPS
#define WARPS 16  // of a thread block of key_gradient
#endif
#ifndef CHUNK
#define CHUNK 2048  // query tokens that key_gradient sorts at a time
#endif

constexpr int WIDTH = 16 / sizeof(Element);     // features that a lane of query_gradient reads at a time: 16 bytes
constexpr int QUERY_FEATURES = 16 * WIDTH;      // of half a warp
constexpr int QUERY_THREADS = 64, ROWS = 8;     // half a warp of query_gradient has ROWS query tokens
constexpr int LANE_WIDTH = 16 / sizeof(Real), FEATURES = 32 * LANE_WIDTH;  // of key_gradient
constexpr int BATCH = 8;                        // rows that a warp of key_gradient loads at a time

__device__ __forceinline__ Real as_real(Element x) {
#if PRECISION == BF16
  return from_bf16(x);
#elif PRECISION == FP16
  return from_fp16(x);
#else
  return x;
#endif
}

// N features of a lane as they are in memory, so that features of 16 bits take half of the registers until their use.
template <int N>
struct Packed {
  union {
    Element elements[N];
    u32 words[N * sizeof(Element) / 4];
  };

  // Of a row of operands, of which `left` features are left; zeros stand for missing ones.
  __device__ __forceinline__ void load(const Element* from, i64 left) {
#if ALIGNED
    constexpr int BYTES = N * sizeof(Element);
    if (left <= 0) {
#pragma unroll
      for (int i = 0; i < BYTES / 4; ++i) words[i] = 0;
    } else if (BYTES == 16) {
      const uint4 four = __ldg((const uint4*)from);
      words[0] = four.x, words[1] = four.y, words[BYTES / 4 - 2] = four.z, words[BYTES / 4 - 1] = four.w;
    } else {
      const uint2 two = __ldg((const uint2*)from);
      words[0] = two.x, words[1] = two.y;
    }
#else
#pragma unroll
    for (int i = 0; i < N; ++i) elements[i] = i < left ? from[i] : (Element)0;
#endif
  }
  __device__ __forceinline__ Real get(int i) const {
#if PRECISION == BF16
    return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
#else
    return as_real(elements[i]);
#endif
  }
};

// out[segment][a] = the part of dq of query token a that a segment of the keys has, or `add`: adds it. Blocks of a
// segment are consecutive.
extern "C" __global__ void __launch_bounds__(QUERY_THREADS, 8)
query_gradient(const Real* g, const Winner* winners, const Element* key, i64 queries, i64 keys, i64 query_tokens,
               i64 key_tokens, i64 d, const i64* starts, const int* token_rows, i64 segments, i64 add, Real* out) {
  const int lane = threadIdx.x % 32, half = lane / 16;
  const i64 tokens = queries * query_tokens, blocks = gridDim.x / segments, segment = blockIdx.x / blocks;
  const i64 first = (blockIdx.x % blocks * QUERY_THREADS + threadIdx.x) / 32 * (2 * ROWS);
  const i64 counted = starts ? starts[queries] : tokens;
  if (first >= counted) return;
  const i64 begin = keys * segment / segments, end = keys * (segment + 1) / segments;
  // lane r looks up what concerns token r of the warp
  const i64 mine = min(first + lane % 16, counted - 1);
  const i64 query = token_rows ? token_rows[mine] : (u32)mine / (u32)query_tokens;
  for (i64 column = lane % 16 * WIDTH; column - lane % 16 * WIDTH < d; column += QUERY_FEATURES) {
    Real sum[ROWS][WIDTH] = {};
    if (add) {
      const Real* from = out + (first + half * ROWS) * d + column;  // of one segment
#pragma unroll
      for (int r = 0; r < ROWS; ++r, from += d)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
          if (first + half * ROWS + r < counted && column + i < d) sum[r][i] = from[i];
    }
    int next = begin < end ? winners[begin * tokens + mine] : 0;
    for (i64 j = begin; j < end; ++j) {
      const int winner = next;
      if (j + 1 < end) next = winners[(j + 1) * tokens + mine];
      const Real factor = g[query * keys + j];
      const Element* row = key + j * key_tokens * d + column;
      Packed<WIDTH> x[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        x[r].load(row + (u32)__shfl_sync(ALL_LANES, winner, r + half * ROWS) * (u32)d, d - column);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const Real f = __shfl_sync(ALL_LANES, factor, r + half * ROWS);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[r][i] += f * x[r].get(i);
      }
    }
    Real* to = out + (segment * tokens + first + half * ROWS) * d + column;
#pragma unroll
    for (int r = 0; r < ROWS; ++r, to += d) {
      if (first + half * ROWS + r >= counted) break;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i)
        if (column + i < d) to[i] = sum[r][i];
    }
  }
}

// key_gradient sorts the winners of CHUNK query tokens by key token, in order. The sorted list is divided evenly among
// the warps, whatever tokens win most. A warp sums the query tokens of each key token in registers. The first key token
// of its part may have begun in the part before: its sum waits in `heads`, and is added after the others, in the order
// of the warps.
struct Sorted {
  Real sums[TOKENS][FEATURES];
  Real heads[WARPS][FEATURES];
  int head_tokens[WARPS];
  struct Entry {
    u32 at;  // TOKEN_BITS of the key token, from the first of this block on; the others: of the query token
    Real factor;
  } list[CHUNK];
  unsigned short counts[WARPS][TOKENS];
  int begins[TOKENS + 1], warp_sums[WARPS];
};
static_assert(TOKENS <= 32 * WARPS && CHUNK % (32 * WARPS) == 0, "");
constexpr int PER_THREAD = CHUNK / (32 * WARPS);
constexpr int TOKEN_BITS = 10;
static_assert(TOKENS <= 1 << TOKEN_BITS && CHUNK <= 1 << (32 - TOKEN_BITS), "");

// The lanes that have the same number.
__device__ __forceinline__ u32 same_lanes(u32 x) {
#ifdef __CUDACC__
  return __match_any_sync(ALL_LANES, x);
#else  // the emulator
  u32 same = 0;
  for (int i = 0; i < 32; ++i) same |= (u32)(__shfl_sync(ALL_LANES, x, i) == x) << i;
  return same;
#endif
}

// out[j][b] = dd of token b of key j. A thread block has TOKENS tokens of a key and FEATURES features: its number is
// (j * parts + part) * chunks of features + chunk. `g` [keys][queries] is transposed.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
key_gradient(const Real* g, const Winner* winners, const Element* query, i64 queries, i64 keys, i64 query_tokens,
             i64 key_tokens, i64 d, const i64* starts, const int* token_rows, Real* out) {
  extern __shared__ __align__(16) char memory[];
  Sorted& s = *(Sorted*)memory;
  const i64 parts = (key_tokens + TOKENS - 1) / TOKENS, feature_chunks = (d + FEATURES - 1) / FEATURES;
  const i64 key = blockIdx.x / (parts * feature_chunks);
  const i64 total_tokens = starts ? starts[queries] : queries * query_tokens;
  winners += key * queries * query_tokens;
  const int first = (int)(blockIdx.x / feature_chunks % parts) * TOKENS;
  const int tokens = (int)min((i64)TOKENS, key_tokens - first);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, thread = threadIdx.x;
  const i64 column = blockIdx.x % feature_chunks * FEATURES + lane * LANE_WIDTH;
  for (int b = warp; b < tokens; b += WARPS)
#pragma unroll
    for (int i = 0; i < LANE_WIDTH; ++i) s.sums[b][lane * LANE_WIDTH + i] = 0;

  for (i64 base = 0; base < total_tokens; base += CHUNK) {
    for (int b = lane; b < TOKENS; b += 32) s.counts[warp][b] = 0;
    __syncwarp();
    u32 token[PER_THREAD], place[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
      const i64 row = base + (warp * PER_THREAD + k) * 32 + lane;
      token[k] = row < total_tokens ? (u32)winners[row] - first : ALL_LANES;
      const bool exists = token[k] < (u32)tokens;
      const u32 same = same_lanes(exists ? token[k] : TOKENS + lane);
      const int before = __popc(same & ((1u << lane) - 1));
      if (exists) place[k] = s.counts[warp][token[k]] + before;
      __syncwarp();
      if (exists && before == 0) s.counts[warp][token[k]] += __popc(same);
      __syncwarp();
    }
    __syncthreads();
    // counts become what the warps before have of a token; begins, where a token's list begins
    int total = 0;
    if (thread < tokens)
      for (int w = 0; w < WARPS; ++w) {
        const int count = s.counts[w][thread];
        s.counts[w][thread] = total;
        total += count;
      }
    int sum = total;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int below = __shfl_up_sync(ALL_LANES, sum, by);
      if (lane >= by) sum += below;
    }
    if (lane == 31) s.warp_sums[warp] = sum;
    __syncthreads();
    int begin = sum - total, all = 0;
    for (int w = 0; w < WARPS; ++w) {
      if (w < warp) begin += s.warp_sums[w];
      all += s.warp_sums[w];
    }
    if (thread < tokens) s.begins[thread] = begin;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k)
      if (token[k] < (u32)tokens) {
        const i64 row = base + (warp * PER_THREAD + k) * 32 + lane;
        Sorted::Entry& entry = s.list[s.begins[token[k]] + s.counts[warp][token[k]] + place[k]];
        entry.at = (u32)(row - base) << TOKEN_BITS | token[k];
        const u32 query_row = token_rows ? (u32)token_rows[row] : (u32)row / (u32)query_tokens;
        entry.factor = g[key * queries + query_row];
      }
    __syncthreads();
    // this warp's part of the list
    const int from = all * warp / WARPS, to = all * (warp + 1) / WARPS;
    const auto token_of = [&](int at) { return (int)(s.list[at].at & ((1u << TOKEN_BITS) - 1)); };
    int current = from < to ? token_of(from) : -1;
    bool is_head = from > 0 && from < to && token_of(from - 1) == current;
    if (lane == 0) s.head_tokens[warp] = is_head ? current : -1;
    Real own[LANE_WIDTH] = {};
    const auto flush = [&](int of) {
      Real* at = is_head ? s.heads[warp] : s.sums[of];
#pragma unroll
      for (int i = 0; i < LANE_WIDTH; ++i) {
        Real& sum_of_token = at[lane * LANE_WIDTH + i];
        sum_of_token = is_head ? own[i] : sum_of_token + own[i];
        own[i] = 0;
      }
      is_head = false;
    };
    const Element* rows = query + base * d + column;
    for (int i0 = from; i0 < to; i0 += BATCH) {
      Sorted::Entry entries[BATCH];
      Packed<LANE_WIDTH> x[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        entries[i] = s.list[min(i0 + i, to - 1)];
        x[i].load(rows + (entries[i].at >> TOKEN_BITS) * d, d - column);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (i0 + i < to) {
          const int token = (int)(entries[i].at & ((1u << TOKEN_BITS) - 1));
          if (token != current) flush(current), current = token;
#pragma unroll
          for (int f = 0; f < LANE_WIDTH; ++f) own[f] += entries[i].factor * x[i].get(f);
        }
    }
    if (from < to) flush(current);
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) {  // each token's heads, in the order of warps
      const int of = s.head_tokens[w];
      if (of >= 0 && of % WARPS == warp)
#pragma unroll
        for (int i = 0; i < LANE_WIDTH; ++i) s.sums[of][lane * LANE_WIDTH + i] += s.heads[w][lane * LANE_WIDTH + i];
    }
    __syncthreads();
  }
  for (int b = warp; b < tokens; b += WARPS)
#pragma unroll
    for (int i = 0; i < LANE_WIDTH; ++i)
      if (column + i < d) out[(key * key_tokens + first + b) * d + column + i] = s.sums[b][lane * LANE_WIDTH + i];
}
