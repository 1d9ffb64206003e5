// Log-sum-exp pass as a sweep (sweep/sweep.cuh). It computes the sums of tiled/lse.cu at the speed of the tensor
// cores.
// Rows. A row keeps a running pair (r, sum 2^(c x - r)) in registers, with c = scale log2 e and a reference exponent
// r. Each segment leaves one such pair for each row and consumer.
// Columns. The columns of a tile are summed over the 64 rows of a warpgroup, in strips of 16 rows for each warp. The
// sums are merged into a pair in memory, which the thread block keeps for each column and strip of 64 rows. So a
// thread block has two pairs for each column, for any number of rows. Each lane keeps a bitmask of the tiles whose
// pairs the block has written, for the kernel that merges them.
//
// One exponential e_ij = 2^(c x_ij - r) of a logit serves both directions: it is added to the sum of the row and to
// the sum of the column, because all 16 rows of a strip share r. r need not be a maximum. As long as each sum is
// within float32's range, a term that is lost would not change the sum, and c x - r is as exact as c x. So r is a
// multiple of 32, 0 at first, and the same for almost all strips and tiles. While r stays the same, new terms are
// added without a new factor.
// The sum of a row may be too large, or the sum of a row or column so small that terms may have been lost
// (sum_with_shared_reference). Then the tile is summed again with a reference exponent for each row
// (sum_with_own_references), and the largest of these becomes the strip's. Columns
// whose sums are still too small are summed once more with their own reference exponents. This happens rarely, and the
// result is right in each case.
//
// MOMENTS: each sum of 2^(c x - r) has a sum of 2^(c x - r) x, in another array.
//
// Options (block/options.cuh): a pair may be in the sum of its row and not in the sum of its column, or the other way
// round. A reference exponent has to serve only the pairs in a sum. A sum without pairs is 0, and every reference
// exponent serves it. An option may replace x in the exponent. Moments keep x.
//
// MAXIMA: the reference exponent of a row is its maximum in every tile, because the caller wants maxima.
//
// CACHE: the exponentials are written to the memory of the gradient block, and the reference exponents of all strips
// and tiles to an array. The gradient pass then needs no products for these logits (cached_gradient.cu). Cached
// exponentials are rounded to bfloat16. If gradient blocks have two parts, exponentials are float32: the words of the
// first part have the even columns, and the words of the second part the odd columns. If the logits of a tile lie too
// far apart for one reference exponent, its query tile has no cache (`uncached_tiles`), and the gradient pass computes
// its logits again.
#include "sm90/sweep/columns.cuh"
#include "sm90/sweep/strip.cuh"

#ifndef MAXIMA
#define MAXIMA 0
#endif

#ifndef CACHE
#define CACHE 0
#endif

#ifndef MAX_WRITTEN_TILES
#define MAX_WRITTEN_TILES 1024  // bits of `written_tiles`: 32 a lane
#endif

// In a cached tile, the reference exponents of rows are at most this far from the reference exponent of their strip.
// Terms of a row that underflow are then negligible relative to the row's largest term.
constexpr float MAX_CACHED_DISTANCE = 64;

// The reference exponents of cached exponentials, and the query tiles without a cache.
struct CachedExponentials {
  float* references;    // [strips of 16 rows, stride]: a reference exponent for each strip and tile
  i64 stride;
  int* uncached_tiles;  // [query tiles of ONLINE_TILE_ROWS rows]: 1 if the gradient pass computes the logits again
};

struct Lse {
  static constexpr bool SUMS = COLUMNS, PUBLISHES = false;
  struct ConsumerShared {
    Columns columns;
  };
  struct WarpgroupShared {
#if CACHE
    alignas(1024) GradientStrip::Shared pieces;
#endif
    StripSums<COLUMNS ? 4 : 1> strips;
  };

  const Block& b;
  const Lane& lane;
  ConsumerShared& consumer;
  WarpgroupShared& group;
  double* positive;
  Partials row_partials;  // [slots, row_stride]
  i64 row_stride;
  Partials column_partials;  // of this warpgroup, from this thread's column of tile 0 on
  u32* written_tiles;    // [blocks, 32]
  float c;
  const CachedExponentials& cached;
  const GradientStrip* out;  // CACHE
  u32 visited_tiles;  // bit i of lane l: tile 32 l + i has column pairs; all bits, if there are too many tiles

  Work work;
  Rows rows;
  Partial row_sum[2];  // sums of this thread's two rows so far; four threads share a row's sum
  float reference;     // reference exponent of the strip
  bool steady;         // whether the sums of all rows have the reference exponent of the strip
  Partial column_sum;  // sum of this thread's column over all query tiles so far
  Partial strip_sum;   // sum of this thread's column over this warp's strip of the tile (KEEPS_OWN_STRIP)

  __device__ __forceinline__ i64 row(int h) const {  // of this thread's two
    return lane.get_row(work.query_tile, h);
  }

  __device__ __forceinline__ void begin_query_tile(const Work& w) {
    work = w;
    rows.load(b, w.query_tile, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[h] = Partial::empty();
    steady = false;
  }

  __device__ __forceinline__ void publish(int t) {
    consumer.columns.publish(b, t, lane);
    rows.load_marks(b, work.query_tile, t, lane);
    if (!COLUMNS) return;
    // While the last products run, in time for end_tile
    column_sum = Partial::empty();
    if (has_pairs(t) && inside(t)) column_sum = column_partials.get(t * TILE_COLUMNS);
  }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [&](i64 pair, float value) {
      const double logit = b.scale.get() * LOG2_E * (double)value;
      positive[pair] = logit;
      // In a triangle the pair is met once, and its other row is this column
      if (b.triangle) positive[b.positives[pair] - b.first_column] = logit;
    });
    bool good = true;
    if (MAXIMA || !sum_with_shared_reference(x, t)) {
      if (CACHE) out->wait_for_writes(lane);
      good = sum_with_own_references(x, t);
    }
    if (!CACHE) return;
    if (lane.lane == 0 && first_row() < b.q.rows) {
      if (good) cached.references[first_row() / 16 * cached.stride + t] = reference;
      else cached.uncached_tiles[first_row() / ONLINE_TILE_ROWS] = 1;
    }
  }

  __device__ __forceinline__ int first_row() const {  // of this warp's strip
    return work.query_tile * QUERY_TILE_ROWS + lane.row() - lane.g;
  }

  // This thread's column of a tile: of the warp's 32, the one whose sums `join_columns` leaves to it.
  __device__ __forceinline__ static int column(const Lane& lane) {
    return lane.warp * 32 + lane.g / 2 * 8 + 2 * lane.t + lane.g % 2;
  }
  __device__ __forceinline__ bool inside(int t) const {
    return t * TILE_COLUMNS + column(lane) < (int)b.k.rows;
  }
  __device__ __forceinline__ bool has_pairs(int t) const {
    return __shfl_sync(ALL_LANES, visited_tiles, t / 32) >> t % 32 & 1;
  }
  // Key tiles first .. last have them.
  __device__ __forceinline__ void mark(int first, int last) {
    first *= TILES;
    last *= TILES;
    const auto below = [](int n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; };
    visited_tiles |= below(last - 32 * lane.lane) & ~below(first - 32 * lane.lane);
  }

  // Sums against the strip's reference exponent. Returns false, and changes nothing, if this exponent does not serve.
  __device__ __forceinline__ bool sum_with_shared_reference(const float (&x)[64], int t) {
    const float shift[2] = {reference, reference};
    Partial tile_sums[2] = {{reference}, {reference}};
    bool good = sums<false>(x, t, shift, nullptr, reference, tile_sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (tile_sums[h].sum > MAX_TILE_SUM) good = false;
      if (MOMENTS && fabsf(tile_sums[h].moment) > MAX_TILE_MOMENT) good = false;
    }
    if (__any_sync(ALL_LANES, !good)) return false;
    if (steady) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sum[h].sum += tile_sums[h].sum;
        if (MOMENTS) row_sum[h].moment += tile_sums[h].moment;
      }
      return true;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (Options::SPARSE && tile_sums[h].sum == 0 && largest(x, h, rows, consumer.columns, lane) == LOW) {
        tile_sums[h] = row_sum[h];
        continue;
      }
      tile_sums[h].add(row_sum[h]);
      const bool small = tile_sums[h].reference == reference && tile_sums[h].sum < MIN_EXACT_SUM;
      if (small && row(h) < b.q.rows) good = false;
    }
    if (__any_sync(ALL_LANES, !good)) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[h] = tile_sums[h];
    steady = __all_sync(ALL_LANES, row_sum[0].reference == reference && row_sum[1].reference == reference);
    return true;
  }

  // Sums against a reference exponent of each row. The highest of these becomes the reference exponent of the strip.
  // Returns whether it is near enough to those of all rows for all exponentials of the tile.
  __device__ __forceinline__ bool sum_with_own_references(const float (&x)[64], int t) {
    float own[2], shift[2], weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float high = largest(x, h, rows, consumer.columns, lane);
      high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 1));
      high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 2));
      own[h] = MAXIMA ? c * high : choose_reference(high, c);
      shift[h] = own[h] == LOW ? 0 : own[h];  // 2^(-inf - 0) adds nothing
    }
    float top = fmaxf(own[0], own[1]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, lanes));
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] = own[h] == LOW ? 0 : exp2_(own[h] - top);
    Partial tile_sums[2] = {{own[0]}, {own[1]}};
    bool good = sums<true>(x, t, shift, weight, top, tile_sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_sum[h].add(tile_sums[h]);
      good = good && (own[h] == LOW || own[h] >= top - MAX_CACHED_DISTANCE);
    }
    steady = false;
    if (fabsf(top) < (float)INFINITY_) reference = top;
    return __all_sync(ALL_LANES, good && reference == top);
  }

  // Rows' and columns' sums; false if one of the latter is too small, which is put right if OWN. CACHE
  // stores the exponentials, in pieces, so that each is on its way while the next is computed.
  template <bool OWN>
  __device__ __forceinline__ bool sums(const float (&x)[64], int t, const float (&shift)[2],
                                       const float* weight, float top, Partial (&tile_sums)[2]) {
    bool good = true, small[SLICES / 2];
    const TileColumns tile_columns{x, rows, consumer.columns, lane, c};
#if CACHE
    u32 words[PIECE / 4 * PARTS];
#endif
    SliceColumns columns(consumer.columns, 0, lane);
#pragma unroll
    for (int s = 0; s < SLICES / 2; ++s) {  // 32 columns
      float eight[8], moments[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int i = 16 * s + k / 2 * 4 + k % 2;
        if (k == 4) columns = SliceColumns(consumer.columns, 2 * s + 1, lane);
        const auto pair0 = get_pair(i, rows, columns), pair1 = get_pair(i + 2, rows, columns);
        const float y0 = Options::exponent(x[i], pair0), y1 = Options::exponent(x[i + 2], pair1);
        const float e0 = exp2_(fmaf(y0, c, -shift[0])), e1 = exp2_(fmaf(y1, c, -shift[1]));
        Options::add_to_row(tile_sums[0].sum, e0, x[i], pair0);
        Options::add_to_row(tile_sums[1].sum, e1, x[i + 2], pair1);
        if (COLUMNS)
          eight[k] = OWN ? fmaf(e0, weight[0], e1 * weight[1])
                         : Options::column_sum(e0, x[i], pair0, e1, x[i + 2], pair1);
        if (MOMENTS) {
          const float row0 = Options::in_row(x[i], pair0) ? e0 : 0, row1 = Options::in_row(x[i + 2], pair1) ? e1 : 0;
          const float column0 = Options::in_column(x[i], pair0) ? e0 : 0;
          const float column1 = Options::in_column(x[i + 2], pair1) ? e1 : 0;
          tile_sums[0].moment = fmaf(row0, x[i], tile_sums[0].moment);
          tile_sums[1].moment = fmaf(row1, x[i + 2], tile_sums[1].moment);
          const float w0 = OWN ? column0 * weight[0] : column0, w1 = OWN ? column1 * weight[1] : column1;
          moments[k] = fmaf(w0, x[i], w1 * x[i + 2]);
        }
#if CACHE
        const float cached0 = OWN ? e0 * weight[0] : e0, cached1 = OWN ? e1 * weight[1] : e1;
        u32 *word = words + i % (PIECE / 2) / 2 * PARTS, *below = word + PARTS;  // 8 rows below
        if (PARTS == 2) {
          word[k % 2] = __float_as_uint(cached0);
          below[k % 2] = __float_as_uint(cached1);
        } else if (k % 2 == 0) {
          *word = __float_as_uint(cached0);
          *below = __float_as_uint(cached1);
        } else {
          *word = to_bf16x2(__uint_as_float(*word), cached0);
          *below = to_bf16x2(__uint_as_float(*below), cached1);
        }
#endif
      }
#if CACHE
      if (32 * (s + 1) % PIECE == 0)
        out->store_piece(words, first_row(), t * TILE_COLUMNS + 32 * (s + 1) - PIECE, lane);
#endif
      // Ahead of the writes of sums, which reads of shared memory cannot pass
      if (s + 1 < SLICES / 2) columns = SliceColumns(consumer.columns, 2 * s + 2, lane);
      if (!COLUMNS) continue;
      Partial slice_sums = {top, join_columns(eight, lane.lane, Plus()), 0};
      if (MOMENTS) slice_sums.moment = join_columns(moments, lane.lane, Plus());
      if constexpr (Options::SPLITS) {
        // A column may have pairs above the reference exponents of their rows
        if (OWN) slice_sums = tile_columns.own_sums(s);
        if (slice_sums.sum > MAX_TILE_SUM || (MOMENTS && fabsf(slice_sums.moment) > MAX_TILE_MOMENT)) good = false;
        small[s] = slice_sums.sum < MIN_EXACT_SUM;
      } else {
        // A column beyond the matrix has no terms to lose
        const bool beyond = CACHE && t * TILE_COLUMNS + 32 * (s - lane.warp) + column(lane) >= (int)b.k.rows;
        if (slice_sums.sum < MIN_EXACT_SUM && !beyond) good = false;
        if (OWN && __any_sync(ALL_LANES, slice_sums.sum < MIN_EXACT_SUM)) slice_sums = tile_columns.own_sums(s);
      }
      if (KEEPS_OWN_STRIP && s == lane.warp) strip_sum = slice_sums;
      else group.strips.get_partials(s, s ^ lane.warp).set(lane.lane, slice_sums);
    }
    if constexpr (Options::SPLITS && COLUMNS && !OWN) tile_columns.require_empty(small, good);
    return good;
  }

  __device__ __forceinline__ void end_tile(int t) {
    if (!COLUMNS) {
      __syncwarp();  // else the compiler takes part of this tile into the next, short of registers
      return;
    }
    // A tile on the diagonal of a triangle holds both (i, j) and (j, i)
    if (inside(t) && !(b.triangle && t / TILES == work.query_tile)) {
      Partial strip[4];
      bool same = true;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const bool own = KEEPS_OWN_STRIP && w == 0;
        strip[w] = own ? strip_sum : group.strips.get_partials(lane.warp, w).get(lane.lane);
        const bool nothing = Options::SPLITS && strip[w].sum == 0;
        same = same && (nothing || strip[w].reference == column_sum.reference);
      }
      if (same) {
        column_sum.sum += (strip[0].sum + strip[1].sum) + (strip[2].sum + strip[3].sum);
        if (MOMENTS)
          column_sum.moment += (strip[0].moment + strip[1].moment) + (strip[2].moment + strip[3].moment);
      } else
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (!(Options::SPLITS && strip[w].sum == 0)) column_sum.add(strip[w]);
      column_partials.set(t * TILE_COLUMNS, column_sum);
    }
  }

  __device__ __forceinline__ void end_query_tile(const Work& w) {
    if (CACHE) out->end(lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Partial all = row_sum[h];
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        Partial other = {LOW, __shfl_xor_sync(ALL_LANES, all.sum, lanes), 0};
        if (MOMENTS) other.moment = __shfl_xor_sync(ALL_LANES, all.moment, lanes);
        if constexpr (Options::SPARSE) {
          other.reference = __shfl_xor_sync(ALL_LANES, all.reference, lanes);
          all.add(other);
        } else {  // threads that share a row have one reference exponent
          all.sum += other.sum;
          if (MOMENTS) all.moment += other.moment;
        }
      }
      if (all.sum == 0) all.reference = LOW;
      if (lane.t == 0 && row(h) < b.q.rows)
        row_partials.set((ROW_SLOTS * w.segment + lane.slot()) * row_stride + row(h), all);
    }
    if (!COLUMNS) return;
    // Of a triangle's tiles on the diagonal, rows' sums are all
    const int tiles = (int)b.column_tiles, first = w.first + (b.triangle && w.first == w.query_tile);
    mark(first, min(w.last, tiles));
    mark(max(first - tiles, 0), w.last - tiles);
  }

  // Before the sweep's first barrier, if there are too many tiles to be remembered: all have pairs.
  __device__ __forceinline__ void begin() {
    visited_tiles = ~0u;
    if (lane.warpgroup < WARPGROUPS)
      for (int t = 0; inside(t); ++t) column_partials.set(t * TILE_COLUMNS, Partial::empty());
  }

  // After the last query tile.
  __device__ __forceinline__ void end() {
    if (lane.warpgroup == 0 && lane.warp == 0) written_tiles[blockIdx.x * 32 + lane.lane] = visited_tiles;
  }
};

// positive [rows], base-2 logits; row_pairs [ROW_SLOTS segments, row_stride]; column_pairs
// [STRIPS blocks, column_stride], of which a block's `written_tiles` [32] tell where they are: bit i of number
// l for tile 32 l + i, or all. CACHE: `cached`, and the exponentials in `gradient_block`. MOMENTS: row_moments and
// column_moments, like the pairs; of raw products.
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(BLOCKS, 1, 1)
#endif
sweep_lse(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
          const __grid_constant__ Block block, i64 segments, double* positive, float2* row_pairs,
          i64 row_stride, float2* column_pairs, i64 column_stride, u32* written_tiles,
          const __grid_constant__ CachedExponentials cached, const __grid_constant__ GradientBlock gradient_block,
          const __grid_constant__ TensorMap gradient_map, float* row_moments, float* column_moments) {
  SweepShared<Lse>& shared = sweep_shared<Lse>();
  const Lane lane;
  Lse::WarpgroupShared& group = shared.group[lane.warpgroup % WARPGROUPS];
  const GradientStrip* out = nullptr;
#if CACHE
  const GradientStrip strip(gradient_map, gradient_block, group.pieces, lane);
  out = &strip;
#endif
  const i64 first = (STRIPS * (i64)blockIdx.x + lane.strip()) * column_stride + Lse::column(lane);
  Lse lse{block, lane, shared.consumer[lane.consumer & 1], group, positive,
          Partials{row_pairs, row_moments}, row_stride,
          Partials{column_pairs, column_moments}.from(first), written_tiles,
          (float)logit_factor(block.scale.get() * LOG2_E), cached, out};
  if (COLUMNS && block.column_tiles * TILES > MAX_WRITTEN_TILES) lse.begin();
  sweep(shared, q, k, block, (int)segments, lse, lane);
  if (COLUMNS && lane.warpgroup < WARPGROUPS) lse.end();
}
