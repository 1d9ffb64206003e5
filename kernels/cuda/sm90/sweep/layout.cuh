// The layout of a sweep (sweep/sweep.cuh): sizes, barriers, shared memory, and which thread has which rows and columns.
#pragma once
#include "block/options.cuh"
#include "sm90/online_references.cuh"

// --- rows, columns and threads: kernels/gpu/config/sweep.py computes the -D options ---------------------------------

#ifndef IN_REGISTERS
#define IN_REGISTERS 0  // 1: dL/dx of narrow rows stays in registers (sweep_narrow.cu)
#endif
#ifndef K_SLICES
#define K_SLICES 8  // K-slices of a row: ceil(bytes of a part / K_SLICE), times PARTS
#endif
#ifndef STAGES
#define STAGES 5  // stages of the ring in shared memory; each holds one K-slice of a key tile
#endif
#ifndef WIDE
#define WIDE 0  // 1: wide rows, of more than 1024 bytes (sweep/streamed.cuh)
#endif
#ifndef TEACHER_SLICES
#define TEACHER_SLICES 0  // K-slices of a teacher's row (sweep_distill.cu); 0: a tile has one product
#endif
#ifndef SHARED
#define SHARED 232448  // bytes of shared memory that a launch gives to a thread block
#endif
// Whether epilogues read values of each column of a tile from shared memory: norm factors, or values of options.
#define HAS_COLUMN_VALUES (NORM_FACTORS || !__is_empty(Options::ColumnValues<1>))
// Whether K-slices of queries are loaded together with K-slices of keys, because queries do not stay in shared memory.
// WIDE: they are too long. FP16X3: sums in two levels take registers, so a consumer is one warpgroup with 64 rows,
// which multiplies all key tiles (sweep/streamed.cuh).
#define STREAMED (WIDE || PRECISION == FP16X3)

// WIDE: 256, so that each key is loaded once for 256 rows. IN_REGISTERS and TEACHER_SLICES: 64, so that a consumer is
// one warpgroup, whose threads have registers for a second set of accumulators (dQ, or the teacher's products).
constexpr int QUERY_TILE_ROWS = WIDE ? 256 : IN_REGISTERS || TEACHER_SLICES ? 64 : 128;
constexpr int CLUSTER_BLOCKS = WIDE ? 2 : 1;  // thread blocks of a cluster: they divide a query tile, and share keys
// A key tile has one or two tiles. A tile has TILE_COLUMNS (128) keys, and an epilogue computes one tile at a time.
// WIDE: two tiles, because products of 128 rows x 128 keys would read more than shared memory delivers
// (sweep/streamed.cuh).
constexpr int TILES_PER_KEY_TILE = WIDE ? 2 : 1;
// Groups of 64 rows of the query tile that a thread block has, since a warpgroup multiplies 64 rows
constexpr int ROW_GROUPS = QUERY_TILE_ROWS / 64 / CLUSTER_BLOCKS;
// Warpgroups of a consumer. A consumer has all rows of the query tile, 64 in each warpgroup. If STREAMED, a consumer is
// one warpgroup, and has half of the thread block's rows.
constexpr int CONSUMER_WARPGROUPS = STREAMED ? 1 : ROW_GROUPS;
constexpr int WARPGROUPS = 2 * CONSUMER_WARPGROUPS;         // of both consumers
constexpr int OWN_ROWS = QUERY_TILE_ROWS / CLUSTER_BLOCKS;  // rows of the query tile that a thread block has
constexpr int TILE_SLICES = 8;  // slices of 16 columns, one after the other, in which an epilogue computes a tile
constexpr int SWEEP_THREADS = 128 * WARPGROUPS + 128;  // the last warpgroup has the producer

// --- named barriers ---------------------------------------------------------------------------------------------
//
// Numbers 1 .. WARPGROUPS: one for each warpgroup (Lane::sync_warpgroup).
//
// PING_PONG + c: consumer c waits here for its turn at the tensor cores. The other consumer arrives,
// without waiting, when it has issued its products. If the warpgroups of a consumer are not in step (IN_STEP in
// sweep.cuh), each half of the query tile has two such barriers, PING_PONG + 2 half + c.
//
// NEW_QUERY_TILE: all consumer warpgroups have ended the last query tile. Tiles alternate between consumers over
// all query tiles, so in a new query tile a consumer may get a key tile that the other consumer had before. It then
// reads the column sums that the other consumer wrote: both consumers keep the sums of 64 rows in the same place in
// `column_partials` (sweep_lse.cu). NEW_QUERY_TILE also separates two uses of GRADIENT_WRITTEN.
//
// GRADIENT_WRITTEN: consumer 0 has written its gradients of the query tile, to which consumer 1 adds its own
// (sweep_narrow.cu).
constexpr int PING_PONG = 1 + WARPGROUPS;
constexpr int NEW_QUERY_TILE = PING_PONG + 2 * CONSUMER_WARPGROUPS;
constexpr int GRADIENT_WRITTEN = NEW_QUERY_TILE + 1;

// --- bytes and K-slices ----------------------------------------------------------------------------------------------

constexpr int K_SLICE_TILE_BYTES = TILE_COLUMNS * K_SLICE;  // a K-slice of 128 keys
constexpr int STAGE_ROWS_BYTES = STREAMED ? OWN_ROWS * K_SLICE : 0;  // a K-slice of queries, before the keys
constexpr int STAGE_BYTES = STAGE_ROWS_BYTES + TILES_PER_KEY_TILE * K_SLICE_TILE_BYTES;
// Partial sums of a row in a segment: one from each consumer that has the row
constexpr int ROW_SLOTS = STREAMED ? 1 : 2;
constexpr int K_SLICE_ELEMENTS = K_SLICE / 2;
constexpr int FEATURE_SLICES = K_SLICES / PARTS;  // K-slices of one part of a row
// Stages that a key tile passes through. If queries stay in shared memory (not STREAMED): RESIDENT_SLICES, one for each
// K-slice. If WIDE, the large parts of keys come twice, because a stage holds one part of the queries (find_row_slice).
constexpr int TILE_STAGES = WIDE && PARTS == 2 ? 3 * FEATURE_SLICES : K_SLICES + TEACHER_SLICES;
enum : int { RESIDENT_SLICES = K_SLICES + TEACHER_SLICES };  // K-slices of a query tile that stays in shared memory
// Warps that read a stage: the warps of one consumer, or (STREAMED) of both consumers in all blocks of the cluster
constexpr int READERS = 4 * CLUSTER_BLOCKS * (STREAMED ? WARPGROUPS : CONSUMER_WARPGROUPS);
// WIDE: query tiles that meet the same keys at about the same time, so that the keys come from the L2 cache
constexpr int QUERY_TILES_AT_ONCE = 8;

// --- the order of the work ------------------------------------------------------------------------------------------

// A query tile, and its segment of the keys: key tiles first .. end - 1. In a triangle, key tiles wrap around: number
// b.column_tiles + t is key tile t.
struct Work {
  int query_tile, segment, first, end;
};

// Item `item` of the work of a sweep: a query tile and a segment. Each of n clusters of thread blocks takes every n-th
// item (`produce` and `consume` in sweep.cuh). Items are in this order:
//   - With `skips_query_tiles` (the caller has a list of visited tiles): all segments of a query tile, then of the next
//     one. So the segments of the few visited query tiles go to different thread blocks.
//   - Otherwise, with WIDE: QUERY_TILES_AT_ONCE query tiles, then the next ones. Of these query tiles, first all first
//     segments, then all second segments. Their features do not stay in shared memory. But few query tiles and few
//     segments are in work at a time, so their features stay in the L2 cache.
//   - Otherwise, the first segment of all query tiles, then the second.
// In a triangle, a query tile meets the key tiles from the diagonal on and half way round. So each pair of query tiles
// meets once, and the work of query tiles differs by one key tile at most: if the number of tiles is even, tiles t and
// t + tiles / 2 are half way round from each other, and the first of them has the pair.
__device__ __forceinline__ Work get_work(const Block& b, int segments, int item,
                                         bool skips_query_tiles) {
  const int query_tiles = (int)b.row_tiles, tiles = (int)b.column_tiles;
  Work w;
  int first_query_tile = 0, tiles_at_once = query_tiles;
  if (WIDE && !skips_query_tiles) {
    first_query_tile = item / (QUERY_TILES_AT_ONCE * segments) * QUERY_TILES_AT_ONCE;
    tiles_at_once = min(QUERY_TILES_AT_ONCE, query_tiles - first_query_tile);
    item -= first_query_tile * segments;
  }
  w.query_tile = skips_query_tiles ? item / segments : first_query_tile + item % tiles_at_once;
  w.segment = skips_query_tiles ? item % segments : item / tiles_at_once;
  int first_key_tile = 0, count = tiles;  // the key tiles of all segments
  if (b.triangle) {
    first_key_tile = w.query_tile;
    count = tiles / 2 + (tiles % 2 || w.query_tile < tiles / 2);
  }
  w.first = first_key_tile + (int)((i64)count * w.segment / segments);
  w.end = first_key_tile + (int)((i64)count * (w.segment + 1) / segments);
  return w;
}

// Whether a sweep visits a query tile. `visited_tiles` has a number for each VISITED_TILE_ROWS (128) rows, 0 for no
// visit. Two launches have this list: sweep_gradient.cu visits query tiles without cached exponentials, and a repeated
// sweep_online.cu visits query tiles whose reference exponents did not serve. All other launches visit all query tiles.
__device__ __forceinline__ bool is_visited(const int* visited_tiles, const Block& b, int query_tile) {
  constexpr int COUNT = (QUERY_TILE_ROWS + VISITED_TILE_ROWS - 1) / VISITED_TILE_ROWS;  // numbers of a query tile
  bool any = false;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const i64 at = (i64)query_tile * COUNT + i;
    any |= at * VISITED_TILE_ROWS < b.q.rows && visited_tiles[at];
  }
  return any;
}

// --- shared memory and threads --------------------------------------------------------------------------------------

template <class Epilogue>
struct SweepShared {  // TMA boxes begin at multiples of 1024 bytes, because all sizes before them are such multiples
#if !STREAMED
  alignas(16) char q[RESIDENT_SLICES][OWN_ROWS * K_SLICE];  // the query tile
#endif
  alignas(16) char k[STAGES][STAGE_BYTES];               // the ring of stages
  typename Epilogue::WarpgroupShared group[WARPGROUPS];  // what a warpgroup writes of a tile
  typename Epilogue::ConsumerShared consumer[2];         // values of the columns of a consumer's tile
  // mbarriers of each stage. full: TMA has written the stage. empty: all READERS have read it
  alignas(8) u64 full[STAGES], empty[STAGES];
  u64 queries_full, queries_empty;  // the same for the query tile `q`
};

// A number that is the same in all lanes of the warp. After the shuffle, the compiler does not compute it
// again at every use.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(ALL_LANES, x, 0); }

// The place of this thread: its warpgroup and consumer, and its rows and columns in a tile.
//
// A thread has 64 of the 64 x 128 products x of its warpgroup's rows and a tile, in the layout of wgmma:
//   - A warp has 16 rows, a strip. A thread has two rows of the strip: g (h = 0) and g + 8 (h = 1).
//   - x[i] is in row h = i / 2 % 2, and in column 8 (i / 4) + 2 t + i % 2 of the tile (get_column in sweep/logits.cuh).
// So four threads share a row, and eight threads of a warp share a column.
struct Lane {
  int warpgroup;  // of the thread block; the producer's is number WARPGROUPS
  int consumer;   // 0 or 1
  int half;       // the warpgroup's number in its consumer, and its half of the query tile; 0 if it is the only one
  int thread;     // in the warpgroup
  int warp;       // in the warpgroup
  int lane;       // in the warp: 4 g + t
  int g, t;
  __device__ Lane() {
    warpgroup = warp_uniform(threadIdx.x / 128);
    consumer = warpgroup / CONSUMER_WARPGROUPS;
    half = warpgroup % CONSUMER_WARPGROUPS;
    thread = threadIdx.x % 128;
    lane = threadIdx.x % 32;
    // Reading threadIdx takes long: the compiler must not read it again
    keep(thread, lane);
    warp = thread / 32;
    g = lane / 4;
    t = lane % 4;
  }
  // The number of this warpgroup's 64 rows among the ROW_GROUPS of the thread block.
  __device__ int row_group() const { return STREAMED ? consumer : half; }
  // The number of this consumer's sum among the ROW_SLOTS sums of a row and a segment.
  __device__ int slot() const { return STREAMED ? 0 : consumer; }
  // The first of this thread's two rows in the query tile; the other row is eight below.
  __device__ int row() const {
    return (CLUSTER_BLOCKS > 1 ? (int)cluster_rank() * OWN_ROWS : 0) + row_group() * 64 + warp * 16 + g;
  }
  // This thread's first row (h = 0) or second row (h = 1) of a query tile, as a row of the block of logits.
  __device__ i64 get_row(int query_tile, int h) const { return (i64)query_tile * QUERY_TILE_ROWS + row() + 8 * h; }
  __device__ void sync_warpgroup() const { named_barrier_sync(1 + warpgroup, 128); }
  // All warpgroups of the consumer meet, at the named barrier of the first of them. That warpgroup may use the same
  // barrier for sync_warpgroup: between any two uses, the whole consumer meets at PING_PONG.
  __device__ void sync_consumer() const {
    named_barrier_sync(1 + consumer * CONSUMER_WARPGROUPS, 128 * CONSUMER_WARPGROUPS);
  }
};

// --- the order of K-slices ------------------------------------------------------------------------------------------

// The stage of the next K-slice in the ring of stages, and the phase of the stage's barriers: the parity of the
// number of times that the ring has wrapped around.
struct PipelineState {
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  // Goes past the K-slices of one key tile, which the other consumer multiplies.
  __device__ __forceinline__ void skip_tile() {
    stage += RESIDENT_SLICES % STAGES;
    phase ^= RESIDENT_SLICES / STAGES & 1;
    if (stage >= STAGES) stage -= STAGES, phase ^= 1;
  }
};

// The K-slice of the keys' rows that comes as number i of a key tile. A row has K-slices 0 .. FEATURE_SLICES - 1 of
// large parts, and then those of small parts. Small parts come first, so that small products are summed first: the
// small parts of all features, or (FP16X3) of the same 64 features.
__device__ __forceinline__ int find_key_slice(int i) {
  if (PRECISION == FP16X3) return (PARTS - 1 - i % PARTS) * FEATURE_SLICES + i / PARTS;
  if (WIDE && i >= K_SLICES) return i - K_SLICES;  // large parts once more
  return (i + K_SLICES - FEATURE_SLICES) % K_SLICES;
}
// STREAMED: the K-slice of the queries' rows that comes with find_key_slice(i). With WIDE and two parts, small parts of
// keys meet large parts of queries. Then large parts of keys meet small parts, and at last large parts, of queries.
__device__ __forceinline__ int find_row_slice(int i) {
  if (WIDE && PARTS == 2) return i < K_SLICES ? i : i - K_SLICES;
  return find_key_slice(i);
}
