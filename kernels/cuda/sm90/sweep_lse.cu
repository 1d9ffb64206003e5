// Log-sum-exp pass as a sweep (sweep/sweep.cuh). It computes the sums of tiled/lse.cu at the speed of the tensor cores.
// Afterwards, merge_partial_sums (vectors/sums.cuh) merges the sums of all segments and thread blocks.
//
// Rows. A row keeps a running pair (r, sum 2^(c x - r)) in registers, with c = scale log2 e and a reference exponent r.
// Each segment leaves one pair for each row and consumer.
// Columns. Each warp sums the columns of a tile over its strip of 16 rows, and the sums of a warpgroup's four strips
// are added to a pair in memory. A thread block has one pair for each column and each of its ROW_GROUPS groups of 64
// rows, for all its query tiles. Each lane keeps a bitmask of the tiles whose pairs the block has written, for the
// kernel that merges them.
// Reference exponents. One exponential e_ij = 2^(c x_ij - r) serves both directions: it is added to the sum of the row
// and to the sum of the column, because all 16 rows of a strip share r. r need not be a maximum. As long as each sum is
// within the bounds of sweep/columns.cuh, terms that underflow are negligible relative to the sum, and c x - r is as
// exact as c x. So r is a multiple of 32, 0 at first, and the same for almost all strips and tiles. While r stays the
// same, new terms are added without a new factor.
// If the sum of a row is too large, or the sum of a row or column so small that terms may have been lost, r does not
// serve (sum_with_shared_reference). Then the tile is summed again with a reference exponent for each row
// (sum_with_own_references), and the largest of these becomes the strip's r. Columns whose sums are still too small are
// summed once more with their own reference exponents. This happens rarely, and the result is right in each case.
//
// MOMENTS: each sum of 2^(c x - r) has a sum of 2^(c x - r) x, in another array.
// Options (block/options.cuh). SPLITS: a pair may be in the sum of its row and not of its column, or the other way
// round. SPARSE: a row of a tile often has no pair in its sum. A reference exponent has to serve only the pairs in a
// sum. A sum without pairs is 0, and every reference exponent serves it. An option may replace x in the exponent.
// Moments keep x.
// CACHE: the exponentials are written to the memory of the gradient block, and the reference exponents of all strips
// and tiles to an array. The gradient pass then needs no products for these logits (cached_gradient.cu). Cached
// exponentials are rounded to bfloat16. If gradient blocks have two parts, exponentials are float32: the words of the
// first part have the even columns, and the words of the second part the odd columns. If the logits of a tile lie too
// far apart for one reference exponent, its query tile has no cache (`uncached_tiles`), and the gradient pass computes
// its logits again.
#include "sm90/sweep/columns.cuh"
#include "sm90/sweep/strip.cuh"

#ifndef MAXIMA
#define MAXIMA 0  // 1: the reference exponent of a row is its maximum in every tile, because the caller wants maxima
#endif
#ifndef CACHE
#define CACHE 0  // 1: exponentials are cached, see above
#endif

// In a cached tile, the reference exponents of rows are at most this far below the reference exponent of their strip.
// Terms of a row that underflow are then negligible relative to the row's largest term.
constexpr float MAX_CACHED_DISTANCE = 64;

// The reference exponents of cached exponentials, and the query tiles without a cache.
struct CachedExponentials {
  float* references;    // [strips of 16 rows, stride]: a reference exponent for each strip and tile
  i64 stride;
  int* uncached_tiles;  // [query tiles of VISITED_TILE_ROWS rows]: 1 if the gradient pass computes the logits again
};

struct Lse {
  static constexpr bool SUMS = COLUMNS, PUBLISHES = false;
  struct ConsumerShared {
    Columns columns;
  };
  struct WarpgroupShared {
#if CACHE
    alignas(1024) GradientStrip::Shared pieces;  // of cached exponentials
#endif
    StripSums<COLUMNS ? 4 : 1> strips;  // column sums of the four warps' strips
  };

  const Block& b;
  const Lane& lane;
  ConsumerShared& consumer;
  WarpgroupShared& group;
  double* positive_logits;  // [rows]: base-2 logits of positives
  Partials row_partials;    // [ROW_SLOTS segments, row_stride]
  i64 row_stride;
  Partials column_partials;  // of this warpgroup's 64 rows, from this thread's column of tile 0 on
  u32* written_tiles;        // [thread blocks, 32]: `tiles_with_sums` of the block's first warp
  float c;                   // scale log2 e
  const CachedExponentials& cached;
  const GradientStrip* out;  // writes cached exponentials; null without CACHE
  u32 tiles_with_sums;  // bit i of lane l: tile 32 l + i has column sums in memory; all bits, if tiles are too many

  Work work;  // the query tile
  Rows rows;
  Partial row_sum[2];  // sums of this thread's two rows so far, over its columns; four threads share a row
  float reference;     // reference exponent of the strip
  bool steady;         // whether the sums of all rows of the strip have the reference exponent of the strip
  Partial column_sum;  // sum of this thread's column over all query tiles so far
  Partial strip_sum;   // sum of this thread's column over this warp's strip (if KEEPS_OWN_STRIP: sweep/partial.cuh)

  // This thread's row h, in the block.
  __device__ __forceinline__ i64 row(int h) const { return lane.get_row(work.query_tile, h); }

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
    // `end_tile` needs the column's sum so far. It is loaded here, while the products run
    column_sum = Partial::empty();
    if (has_column_sums(t) && inside(t)) column_sum = column_partials.get(t * TILE_COLUMNS);
  }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    prepare(x, rows, consumer.columns, b, work.query_tile, t, lane, [&](i64 index, float product) {
      const double logit = b.scale.get() * LOG2_E * (double)product;
      positive_logits[index] = logit;
      // A triangle visits a pair once. The pair is also the positive of the row whose number is this column
      if (b.triangle) positive_logits[b.positives[index] - b.first_column] = logit;
    });
    bool fits_cache = true;
    if (MAXIMA || !sum_with_shared_reference(x, t)) {
      if (CACHE) out->wait_for_writes(lane);  // of exponentials with the shared reference, which are overwritten
      fits_cache = sum_with_own_references(x, t);
    }
    if (!CACHE) return;
    if (lane.lane == 0 && first_row() < b.q.rows) {
      if (fits_cache) cached.references[first_row() / 16 * cached.stride + t] = reference;
      else cached.uncached_tiles[first_row() / VISITED_TILE_ROWS] = 1;
    }
  }

  // The first row of this warp's strip, in the block.
  __device__ __forceinline__ int first_row() const { return work.query_tile * QUERY_TILE_ROWS + lane.row() - lane.g; }

  // This thread's column of a tile: the warp adds up 32 columns, of which `join_columns` leaves one to each lane.
  __device__ __forceinline__ static int column(const Lane& lane) {
    return lane.warp * 32 + lane.g / 2 * 8 + 2 * lane.t + lane.g % 2;
  }
  // Whether this thread's column of tile t is inside the block.
  __device__ __forceinline__ bool inside(int t) const { return t * TILE_COLUMNS + column(lane) < (int)b.k.rows; }
  // Whether the columns of tile t have sums in memory, from an earlier query tile.
  __device__ __forceinline__ bool has_column_sums(int t) const {
    return __shfl_sync(ALL_LANES, tiles_with_sums, t / 32) >> t % 32 & 1;
  }
  // From now on, the columns of key tiles first .. end - 1 have sums in memory.
  __device__ __forceinline__ void record_column_sums(int first, int end) {
    first *= TILES_PER_KEY_TILE;
    end *= TILES_PER_KEY_TILE;
    const auto below = [](int n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; };  // bits 0 .. n - 1
    tiles_with_sums |= below(end - 32 * lane.lane) & ~below(first - 32 * lane.lane);
  }

  // Adds tile t with the strip's reference exponent. Returns false, and changes no sum of a row, if it does not serve.
  __device__ __forceinline__ bool sum_with_shared_reference(const float (&x)[64], int t) {
    const float shift[2] = {reference, reference};
    Partial tile_sums[2] = {{reference}, {reference}};  // of the two rows
    bool good = sum_tile<false>(x, t, shift, nullptr, reference, tile_sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (tile_sums[h].sum > MAX_TILE_SUM) good = false;
      if (MOMENTS && fabsf(tile_sums[h].moment) > MAX_TILE_MOMENT) good = false;
    }
    if (__any_sync(ALL_LANES, !good)) return false;
    if (steady) {  // the usual case: sums of equal reference exponents
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sum[h].sum += tile_sums[h].sum;
        if (MOMENTS) row_sum[h].moment += tile_sums[h].moment;
      }
      return true;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A row without pairs in the tile keeps its sum, and the reference exponent serves it
      if (Options::SPARSE && tile_sums[h].sum == 0 &&
          find_largest_exponent(x, h, rows, consumer.columns, lane) == LOW) {
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

  // Adds tile t with a reference exponent for each row. The largest of these becomes the strip's. Returns whether the
  // exponentials can be cached: the strip's reference exponent is at most MAX_CACHED_DISTANCE above those of all rows.
  __device__ __forceinline__ bool sum_with_own_references(const float (&x)[64], int t) {
    float own[2], shift[2];  // reference exponents of this thread's two rows; if a row has no pairs: LOW and 0
    float weight[2];  // 2^(own - top): exponentials of the row, times this, have the reference exponent of the strip
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float high = find_largest_exponent(x, h, rows, consumer.columns, lane);
      high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 1));
      high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 2));
      own[h] = MAXIMA ? c * high : choose_reference(high, c);
      shift[h] = own[h] == LOW ? 0 : own[h];  // 2^(-inf - 0) adds nothing
    }
    float top = fmaxf(own[0], own[1]);  // the largest of the strip
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, lanes));
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] = own[h] == LOW ? 0 : exp2_(own[h] - top);
    Partial tile_sums[2] = {{own[0]}, {own[1]}};
    bool fits_cache = sum_tile<true>(x, t, shift, weight, top, tile_sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_sum[h].add(tile_sums[h]);
      fits_cache = fits_cache && (own[h] == LOW || own[h] >= top - MAX_CACHED_DISTANCE);
    }
    steady = false;
    if (fabsf(top) < (float)INFINITY_) reference = top;
    // If `top` is not finite (no pairs, or a NaN or infinity), exponentials do not have the strip's `reference`
    return __all_sync(ALL_LANES, fits_cache && reference == top);
  }

  // Sums tile t: rows to `tile_sums`, and columns over the strip to shared memory, for `end_tile`. Returns false if
  // the sum of a column is outside its bounds. `shift` has the reference exponents of this thread's two rows.
  //   - Without OWN, both are `top`, and `weight` is not read.
  //   - With OWN, exponentials times `weight` have the reference exponent `top`, for the sums of columns and for the
  //     cache. Columns whose sums are too small get reference exponents of their own.
  // CACHE: the exponentials are stored in pieces, so that one piece is on its way while the next is computed.
  template <bool OWN>
  __device__ __forceinline__ bool sum_tile(const float (&x)[64], int t, const float (&shift)[2],
                                       const float* weight, float top, Partial (&tile_sums)[2]) {
    bool good = true, small[TILE_SLICES / 2];  // SPLITS: whether this lane's sum of group s is below MIN_EXACT_SUM
    const TileColumns tile_columns{x, rows, consumer.columns, lane, c};
#if CACHE
    u32 words[PIECE / 4 * PARTS];
#endif
    SliceColumns columns(consumer.columns, 0, lane);
#pragma unroll
    for (int s = 0; s < TILE_SLICES / 2; ++s) {  // group s of 32 columns, two slices
      float thread_sums[8], moments[8];  // of this thread's eight columns of the group, over its two rows
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
          thread_sums[k] = OWN ? fmaf(e0, weight[0], e1 * weight[1])
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
        u32 *word = words + i % (PIECE / 2) / 2 * PARTS, *below = word + PARTS;  // of the row, and of that 8 rows below
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
      // The next slice's values are loaded before the sums are written: reads of shared memory do not pass writes
      if (s + 1 < TILE_SLICES / 2) columns = SliceColumns(consumer.columns, 2 * s + 2, lane);
      if (!COLUMNS) continue;
      // The sum of this lane's column of the group over the strip
      Partial strip_column = {top, join_columns(thread_sums, lane.lane, Plus()), 0};
      if (MOMENTS) strip_column.moment = join_columns(moments, lane.lane, Plus());
      if constexpr (Options::SPLITS) {
        // A pair that is only in the column's sum may be far above the row's reference exponent: columns get their own
        if (OWN) strip_column = tile_columns.sum_with_own_references(s);
        if (strip_column.sum > MAX_TILE_SUM || (MOMENTS && fabsf(strip_column.moment) > MAX_TILE_MOMENT)) good = false;
        small[s] = strip_column.sum < MIN_EXACT_SUM;
      } else {
        // Columns and strips of rows beyond the matrix have no terms to lose
        const auto has_terms = [&] {
          return t * TILE_COLUMNS + 32 * (s - lane.warp) + column(lane) < (int)b.k.rows && first_row() < b.q.rows;
        };
        const bool is_small = strip_column.sum < MIN_EXACT_SUM && has_terms();
        if (is_small) good = false;
        if (OWN && __any_sync(ALL_LANES, is_small))
          strip_column = tile_columns.sum_with_own_references(s);
      }
      if (KEEPS_OWN_STRIP && s == lane.warp) strip_sum = strip_column;
      else group.strips.get_partials(s, s ^ lane.warp).set(lane.lane, strip_column);
    }
    if constexpr (Options::SPLITS && COLUMNS && !OWN) tile_columns.require_empty(small, good);
    return good;
  }

  // Adds the column sums of the warpgroup's four strips to the column's pair in memory.
  __device__ __forceinline__ void end_tile(int t) {
    if (!COLUMNS) {
      __syncwarp();  // else the compiler moves part of this tile's work into the next tile, and has too few registers
      return;
    }
    // A tile on the diagonal of a triangle holds both (i, j) and (j, i), so its rows' sums suffice
    if (inside(t) && !(b.triangle && t / TILES_PER_KEY_TILE == work.query_tile)) {
      Partial strips[4];  // sums of this thread's column over the strips of the four warps
      bool same = true;  // all sums have the reference exponent of the sum so far
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const bool in_register = KEEPS_OWN_STRIP && w == 0;
        strips[w] = in_register ? strip_sum : group.strips.get_partials(lane.warp, w).get(lane.lane);
        const bool no_pairs = Options::SPLITS && strips[w].sum == 0;
        same = same && (no_pairs || strips[w].reference == column_sum.reference);
      }
      if (same) {
        column_sum.sum += (strips[0].sum + strips[1].sum) + (strips[2].sum + strips[3].sum);
        if (MOMENTS)
          column_sum.moment += (strips[0].moment + strips[1].moment) + (strips[2].moment + strips[3].moment);
      } else
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (!(Options::SPLITS && strips[w].sum == 0)) column_sum.add(strips[w]);
      column_partials.set(t * TILE_COLUMNS, column_sum);
    }
  }

  // Stores the rows' sums of the segment in `row_partials`.
  __device__ __forceinline__ void end_query_tile(const Work& w) {
    if (CACHE) out->end(lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Partial all = row_sum[h];  // over the four threads of the row
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
    // In a triangle, `end_tile` stores no column sums of the tile on the diagonal
    const int tiles = (int)b.column_tiles, first = w.first + (b.triangle && w.first == w.query_tile);
    record_column_sums(first, min(w.end, tiles));
    record_column_sums(max(first - tiles, 0), w.end - tiles);  // key tiles beyond the last one (Work)
  }

  // Before `sweep`, if there are too many tiles for the bitmask: all columns get empty sums, and all bits are set.
  __device__ __forceinline__ void begin() {
    tiles_with_sums = ~0u;
    if (lane.warpgroup < WARPGROUPS)
      for (int t = 0; inside(t); ++t) column_partials.set(t * TILE_COLUMNS, Partial::empty());
  }

  // After the last query tile.
  __device__ __forceinline__ void end() {
    if (lane.warpgroup == 0 && lane.warp == 0) written_tiles[blockIdx.x * 32 + lane.lane] = tiles_with_sums;
  }
};

//   - positive_logits [rows]: base-2 logits of positives
//   - row_partials [ROW_SLOTS segments, row_stride]: pairs (r, sum)
//   - column_partials [ROW_GROUPS thread blocks, column_stride]: pairs (r, sum), undefined in tiles without a bit
//   - written_tiles [thread blocks, 32]: bit i of word l says whether the block has written the pairs of tile 32 l + i
//   - row_moments, column_moments (MOMENTS): sums of 2^(c x - r) x in the layout of the pairs, x a product and no logit
//   - cached, gradient_block, gradient_map (CACHE): exponentials are written to `gradient_block`
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(CLUSTER_BLOCKS, 1, 1)
#endif
sweep_lse(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
          const __grid_constant__ Block block, i64 segments, double* positive_logits, float2* row_partials,
          i64 row_stride, float2* column_partials, i64 column_stride, u32* written_tiles,
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
  const i64 own_pairs = (ROW_GROUPS * (i64)blockIdx.x + lane.row_group()) * column_stride + Lse::column(lane);
  Lse lse{block, lane, shared.consumer[lane.consumer & 1], group, positive_logits,
          Partials{row_partials, row_moments}, row_stride,
          Partials{column_partials, column_moments}.from(own_pairs), written_tiles,
          (float)logit_factor(block.scale.get() * LOG2_E), cached, out};
  if (COLUMNS && block.column_tiles * TILES_PER_KEY_TILE > MAX_WRITTEN_TILES) lse.begin();
  sweep(shared, q, k, block, (int)segments, lse, lane);
}
