// MaxSim on Hopper: products of tokens in tensor cores, and their maxima in registers. Products are never in memory.
// maxsim/tokens.cu has the equations, and the portable kernels.
//
//   thread block   ROWS query tokens stay in shared memory; tiles of KEY_TILE key tokens pass by. A key begins with a new
//                  tile, and its last tile may read on into the next key: these columns are masked.
//   warp           16 query tokens, a unit. A unit never spans two queries, unless they are packed.
//   thread         rows g and g + 8 of its warp's 16, two columns of each eight.
//
// While a thread takes the maxima of one tile, the products of the next tile are under way in other warpgroups.
//
// A winner costs two instructions a product, not three: the number of its eight columns replaces the low INDEX_BITS of
// the product, and so moves along with the maximum. Winners are maxima up to a relative difference of 2^-19, and the
// maximum is known to 2^-20. Maxima are taken of bits as integers, of three numbers in one instruction.
//
// Options: KEY_TILE, STAGES tiles in shared memory, SLICES of 64 features, WINNERS: whether winners are written.
// PACKED: query tokens that count have no gaps between them, and only the device knows how many there are.
#ifndef KEY_TILE
#define KEY_TILE 152
#endif
#include "maxsim/types.cuh"

#ifndef STAGES
#define STAGES 4
#endif
#ifndef SLICES
#define SLICES 2
#endif
#ifndef WINNERS
#define WINNERS 0
#endif
#ifndef PACKED
#define PACKED 0
#endif

constexpr int GROUPS = 3;         // warpgroups that multiply; one more loads
constexpr int UNIT = 16;          // query tokens of a warp
constexpr int UNITS = 4 * GROUPS; // of a thread block
constexpr int ROW = 128;          // bytes of a row of a slice
constexpr int QUERY_BLOCK = 64 * ROW;  // bytes of a slice of a warpgroup's query tokens
constexpr int KEY_SLICE = KEY_TILE * ROW, STAGE = SLICES * KEY_SLICE;
constexpr u32 INDEX_BITS = 31;
constexpr int NOTHING = 0x80000000;  // bits of the maximum of no products: less than those of any product but -0

struct Shared {
  char query[GROUPS][SLICES][QUERY_BLOCK];
  char key[STAGES][STAGE];
  u64 full[STAGES], empty[STAGES], query_full, query_empty;
};

struct Pipe {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ int bits_of(float x) { return __float_as_int(x); }
__device__ __forceinline__ float from_bits(int x) { return __int_as_float(x); }

// max(x, y, z), as integers.
__device__ __forceinline__ float max3(float x, float y, float z) {
#ifdef __CUDACC__
  return from_bits(__vimax3_s32(bits_of(x), bits_of(y), bits_of(z)));
#else  // the emulator
  return from_bits(max(max(bits_of(x), bits_of(y)), bits_of(z)));
#endif
}

// Maxima of the columns 8 j of a tile, from FIRST to END - 1 of j: x[4 j + e] is in row g + 8 (e / 2) and column
// 8 j + 2 t + e % 2. There are four maxima, one of each e. `valid`: columns of the key, from column 2 t on.
// INTEGER: of the bits as integers; if all of them are negative, the maximum is another negative number.
template <bool INTEGER, bool MASKED, int FIRST, int END>
__device__ __forceinline__ void maxima(const float (&x)[KEY_TILE / 2], int valid, float (&top)[4], u32 index_mask) {
  const auto value = [&](int j, int e) {
    const float y = x[4 * j + e];
    if (!WINNERS) return y;
    return __uint_as_float((__float_as_uint(y) & index_mask) | (INDEX_BITS - j));
  };
  if (INTEGER && !MASKED) {
#pragma unroll
    for (int j = FIRST; j < END; j += 2)
#pragma unroll
      for (int e = 0; e < 4; ++e) top[e] = max3(top[e], value(j, e), j + 1 < END ? value(j + 1, e) : top[e]);
    return;
  }
#pragma unroll
  for (int j = FIRST; j < END; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!MASKED || 8 * j + e % 2 < valid)
        top[e] = INTEGER ? max3(top[e], value(j, e), top[e]) : fmaxf(top[e], value(j, e));
}

// The columns from 8 FIRST on, a quarter of the tile at a time. `left`: columns of the key.
template <bool INTEGER, int FIRST = 0>
__device__ __forceinline__ void maxima_of_quarters(const float (&x)[KEY_TILE / 2], int left, int t, float (&top)[4],
                                                   u32 index_mask) {
  constexpr int EIGHTS = KEY_TILE / 8, QUARTER = (EIGHTS + 3) / 4, END = FIRST + QUARTER < EIGHTS ? FIRST + QUARTER : EIGHTS;
  if (left >= 8 * END) maxima<INTEGER, false, FIRST, END>(x, 0, top, index_mask);
  else if (left > 8 * FIRST) maxima<INTEGER, true, FIRST, END>(x, left - 2 * t, top, index_mask);
  if constexpr (END < EIGHTS) maxima_of_quarters<INTEGER, END>(x, left, t, top, index_mask);
}

// Joins a tile to the running maxima of a key, `best`, and the first columns of their tiles, `at`.
__device__ __forceinline__ void join_tile(const float (&x)[KEY_TILE / 2], int length, int first, int t, float (&best)[4],
                                          int (&at)[4], u32 index_mask) {
  float top[4] = {(float)LOW, (float)LOW, (float)LOW, (float)LOW}, positive[4];
  // Integers have the order of floats, unless both are negative. A thread without a positive number for one of its
  // rows makes its warp compare floats
#pragma unroll
  for (int e = 0; e < 4; ++e) positive[e] = from_bits(NOTHING);
  maxima_of_quarters<true>(x, length - first, t, positive, index_mask);
  bool is_negative = false;
#pragma unroll
  for (int h = 0; h < 4; h += 2)
    is_negative |= (bits_of(positive[h]) & bits_of(positive[h + 1]) & bits_of(best[h]) & bits_of(best[h + 1])) < 0;
  if (__any_sync(ALL_LANES, is_negative)) maxima_of_quarters<false>(x, length - first, t, top, index_mask);
  else {
#pragma unroll
    for (int e = 0; e < 4; ++e) top[e] = bits_of(positive[e]) < 0 ? (float)LOW : positive[e];  // no maximum of a row
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const bool wins = top[e] > best[e];
    best[e] = wins ? top[e] : best[e];
    at[e] = wins ? first : at[e];
  }
}

// The column of a running maximum, without 2 t + e % 2; and the maximum without its index.
__device__ __forceinline__ int find_column(float best, int at) {
  return at + 8 * (int)(INDEX_BITS - (__float_as_uint(best) & INDEX_BITS));
}
__device__ __forceinline__ float without_index(float x) {
  return WINNERS ? __uint_as_float((__float_as_uint(x) & ~INDEX_BITS) | (INDEX_BITS / 2 + 1)) : x;
}

// Combines two running maxima of a row: the lower column wins among equal ones.
__device__ __forceinline__ void combine(float& top, int& column, float other, int other_column) {
  const bool wins = WINNERS ? other > top || (other == top && other_column < column) : other > top;
  top = wins ? other : top;
  column = wins ? other_column : column;
}

// x = the products of a warpgroup's 64 query tokens and the tile of a stage.
__device__ __forceinline__ void multiply(float (&x)[KEY_TILE / 2], u32 rows, u32 columns) {
  warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 4 * SLICES; ++k) {
    const u32 a = rows + k / 4 * (QUERY_BLOCK / 16) + k % 4 * 2, b = columns + k / 4 * (KEY_SLICE / 16) + k % 4 * 2;
#if IS_FLOAT16
    wgmma_tile_fp16(x, a, b, k > 0);
#else
    wgmma_tile_bf16(x, a, b, k > 0);
#endif
  }
  warpgroup_commit();
}

// parts[unit][j] = the sum of the maxima of a unit's tokens over the tokens of key j. winners[j][a] (WINNERS): the token
// of key j with the maximum of query token a. A query has ceil(query_tokens / UNIT) units. `key_counts` (null: all):
// tokens of a key that count. `segments` of the keys are divided among thread blocks.
// PACKED: `query_total` points to the number of query tokens (otherwise null). Units are consecutive tokens, of any queries. parts[j][a] = the
// maximum of query token a; rows of parts have queries * query_tokens elements, as those of winners.
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
maxsim(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map, const i64* query_total,
       const i64* key_counts, float* parts, Winner* winners, i64 queries, i64 query_tokens, i64 keys,
       i64 key_tokens, i64 segments) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *(Shared*)memory;
  const int warpgroup = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(s.full[i], 1), barrier_init(s.empty[i], UNITS);
    barrier_init(s.query_full, 1), barrier_init(s.query_empty, UNITS);
    fence_barrier_init();
  }
  __syncthreads();
#if PACKED
  const int all_tokens = (int)*query_total, units = (all_tokens + UNIT - 1) / UNIT;
#else
  const int units_per_query = (int)((query_tokens + UNIT - 1) / UNIT), units = (int)queries * units_per_query;
#endif
  const int row_tiles = (units + UNITS - 1) / UNITS, items = row_tiles * (int)segments;
  // a key has one token at least: a thread block would wait for the tiles of one without tokens for ever
  const auto length_of = [&](int j) { return key_counts ? max((int)key_counts[j], 1) : (int)key_tokens; };
  if (warpgroup == GROUPS) {
    warpgroup_reg_dealloc<24>();
    if (threadIdx.x != 128 * GROUPS) return;
    Pipe pipe;
    u32 count = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++count) {
      const int row_tile = item % row_tiles, segment = item / row_tiles;
      const int begin = (int)(keys * segment / segments), end = (int)(keys * (segment + 1) / segments);
      barrier_wait(s.query_empty, count & 1 ^ 1);
      barrier_expect(s.query_full, sizeof s.query);
      for (int w = 0; w < UNITS; ++w) {
        const int unit = row_tile * UNITS + w;
#if PACKED
        const int row = unit * UNIT;
#else
        const int row = unit / units_per_query * (int)query_tokens + unit % units_per_query * UNIT;
#endif
        for (int k = 0; k < SLICES; ++k)
          tma_load(s.query[w / 4][k] + w % 4 * UNIT * ROW, query_map, s.query_full, 64 * k, row);
      }
      for (int j = begin; j < end; ++j) {
        const int length = length_of(j);
        for (int first = 0; first < length; first += KEY_TILE, pipe.next()) {
          barrier_wait(s.empty[pipe.stage], pipe.phase ^ 1);
          barrier_expect(s.full[pipe.stage], STAGE);
          for (int k = 0; k < SLICES; ++k)
            tma_load(s.key[pipe.stage] + k * KEY_SLICE, key_map, s.full[pipe.stage], 64 * k, j * (int)key_tokens + first);
        }
      }
    }
    return;
  }
  warpgroup_reg_alloc<160>();
  const int lane = threadIdx.x % 32, warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0), g = lane / 4, t = lane % 4;
  const u32 rows = shared_descriptor(shared_address(s.query[warpgroup]));
  // ~INDEX_BITS. Of a number that ptxas knows, it would make two operations of (x & mask) | number
  const u32 index_mask = __ballot_sync(ALL_LANES, lane >= 5);
  Pipe pipe;  // of the product that is issued next
  u32 count = 0;
  float x[KEY_TILE / 2];
  for (int item = blockIdx.x; item < items; item += gridDim.x, ++count) {
    const int row_tile = item % row_tiles, segment = item / row_tiles;
    const int begin = (int)(keys * segment / segments), end = (int)(keys * (segment + 1) / segments);
    const int unit = row_tile * UNITS + warp;
#if PACKED
    const int first_token = unit * UNIT, tokens = all_tokens - first_token - g;  // of this unit, from row g on
#else
    const int query = min(unit, units - 1) / units_per_query, first_token = unit % units_per_query * UNIT;
    const int tokens = unit < units ? (int)query_tokens - first_token - g : 0;  // of this unit, from row g on
#endif
    barrier_wait(s.query_full, count & 1);
    barrier_wait(s.full[pipe.stage], pipe.phase);
    multiply(x, rows, shared_descriptor(shared_address(s.key[pipe.stage])));
    int length = length_of(begin), next_length = begin + 1 < end ? length_of(begin + 1) : 0;
    float best[4] = {(float)LOW, (float)LOW, (float)LOW, (float)LOW};
    int at[4] = {};
    // One iteration a tile. No product is under way from one iteration to the next: ptxas would make products wait for
    // each other (C7514). The other warpgroups' products fill the gaps
    warpgroup_wait<0>();
    fence_accumulators(x);
    for (int j = begin, first = 0;;) {
      const int stage = pipe.stage;
      const bool ends = first + KEY_TILE >= length;
      pipe.next();
      if (lane == 0) barrier_arrive(s.empty[stage]);
      join_tile(x, length, first, t, best, at, index_mask);
      if (!ends || j + 1 < end) barrier_wait(s.full[pipe.stage], pipe.phase);
      // after the last tile: nobody reads it
      multiply(x, rows, shared_descriptor(shared_address(s.key[pipe.stage])));
      first += KEY_TILE;
      if (!ends) {
        warpgroup_wait<0>();
        fence_accumulators(x);
        continue;
      }
      // the key's maxima: of two columns, of four threads of a row, of the rows of the unit
      float part = 0;
      int winner = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = best[2 * h];
        int column = find_column(top, at[2 * h]) + 2 * t;
        combine(top, column, best[2 * h + 1], find_column(best[2 * h + 1], at[2 * h + 1]) + 2 * t + 1);
#pragma unroll
        for (int k = 1; k < 4; k *= 2)
          combine(top, column, __shfl_xor_sync(ALL_LANES, top, k), WINNERS ? __shfl_xor_sync(ALL_LANES, column, k) : 0);
        if (PACKED && t == h) part = without_index(top);
        if (!PACKED && 8 * h < tokens) part += without_index(top);
        if (t == h) winner = column;
      }
#if PACKED
      const int token = first_token + 8 * t + g;  // whose maximum and winner this thread writes
      if (t < 2 && 8 * t < tokens) {
        const i64 to = j * queries * query_tokens + token;
        parts[to] = part;
        if (WINNERS) winners[to] = (Winner)min(winner, length - 1);
      }
#else
#pragma unroll
      for (int k = 4; k < 32; k *= 2) part += __shfl_xor_sync(ALL_LANES, part, k);
      if (unit < units && lane == 0) parts[unit * keys + j] = part;
      const int token = first_token + 8 * t + g;  // of the query, whose winner this thread writes
      if (WINNERS && t < 2 && unit < units && token < query_tokens)
        winners[(j * queries + query) * query_tokens + token] = (Winner)min(winner, length - 1);
#endif
      if (++j == end) break;
      length = next_length, next_length = j + 1 < end ? length_of(j + 1) : 0, first = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) best[e] = (float)LOW, at[e] = 0;
      warpgroup_wait<0>();
      fence_accumulators(x);
    }
    warpgroup_wait<0>();
    fence_accumulators(x);
    __syncwarp();
    if (lane == 0) barrier_arrive(s.query_empty);
  }
}
