// The layout of a sweep (sweep/sweep.cuh): sizes, barriers, shared memory, and which thread has which rows.
#pragma once
#include "block/options.cuh"
#include "sm90/reference_exponents.cuh"

// IN_REGISTERS, WIDE: see sweep.cuh
#ifndef IN_REGISTERS
#define IN_REGISTERS 0
#endif
#ifndef K_SLICES
#define K_SLICES 8  // K-slices of a row: ceil(width / K_SLICE), for each part
#endif
#ifndef STAGES
#define STAGES 5  // of the ring in shared memory
#endif
#ifndef WIDE
#define WIDE 0
#endif
#ifndef TEACHER_SLICES
#define TEACHER_SLICES 0  // K-slices of a row of the teacher, if a tile has a second product, of its features
#endif
// Whether each column of a tile has numbers in shared memory, in every epilogue.
#define HAS_COLUMN_NUMBERS (FACTORS || !__is_empty(Options::ColumnNumbers<1>))
#ifndef SHARED
#define SHARED 232448  // bytes that a launch gives
#endif
constexpr int QUERY_TILE_ROWS = WIDE ? 256 : IN_REGISTERS || TEACHER_SLICES ? 64 : 128;
constexpr int BLOCKS = WIDE ? 2 : 1;  // thread blocks of a cluster, which share a query tile
constexpr int TILES = WIDE ? 2 : 1;   // tiles of TILE_COLUMNS keys that are multiplied at once: a key tile
#define STREAMED (WIDE || PRECISION == FP16X3)         // rows of Q come with the keys
constexpr int STRIPS = QUERY_TILE_ROWS / 64 / BLOCKS;  // strips of 64 rows that a thread block has of its query tile
constexpr int HALVES = STREAMED ? 1 : STRIPS;          // warpgroups of a consumer, which have 64 rows each
constexpr int WARPGROUPS = 2 * HALVES;                 // warpgroups of both consumers
constexpr int OWN_ROWS = QUERY_TILE_ROWS / BLOCKS;     // rows of the query tile that a thread block has
constexpr int SLICES = 8;  // slices of a tile, which have 16 columns each: epilogues compute slice by slice
constexpr int SWEEP_THREADS = 128 * WARPGROUPS + 128;

// Named barriers. Numbers 1 .. WARPGROUPS belong to a warpgroup each.
//
// PING_PONG + c: consumer c waits here for its turn at the tensor cores. The other consumer arrives,
// without waiting, when it has issued its products. If warpgroups are not in step, each half of the
// query tile has two such barriers, PING_PONG + 2 half + c.
//
// NEW_QUERY_TILE: all consumer warpgroups have ended the last query tile. Tiles alternate between consumers over
// all query tiles, so in a new query tile a consumer may get a key tile that the other one had before. It then
// reads the column pairs that the other one wrote: both keep them at one place in `column_pairs`, one
// for each strip of 64 rows (sweep_lse.cu). NEW_QUERY_TILE also separates two uses of GRADIENT_WRITTEN.
//
// GRADIENT_WRITTEN: consumer 0 has written its gradients of the query tile, to which consumer 1 adds its own
// (sweep_narrow.cu).
constexpr int PING_PONG = 1 + WARPGROUPS;
constexpr int NEW_QUERY_TILE = PING_PONG + 2 * HALVES;
constexpr int GRADIENT_WRITTEN = NEW_QUERY_TILE + 1;

constexpr int K_SLICE_TILE_BYTES = TILE_COLUMNS * K_SLICE;
constexpr int STAGE_ROWS_BYTES = STREAMED ? OWN_ROWS * K_SLICE : 0;  // rows of Q, before the keys
constexpr int STAGE_BYTES = STAGE_ROWS_BYTES + TILES * K_SLICE_TILE_BYTES;
constexpr int ROW_SLOTS = STREAMED ? 1 : 2;  // sums that a segment leaves for each row, one a consumer
constexpr int K_SLICE_ELEMENTS = K_SLICE / 2;
constexpr int FEATURE_SLICES = K_SLICES / PARTS;  // K-slices of one part
// Stages that a key tile passes through. Small parts meet large ones in K-slices of their own (WIDE).
constexpr int TILE_STAGES = WIDE && PARTS == 2 ? 3 * FEATURE_SLICES : K_SLICES + TEACHER_SLICES;
enum : int { RESIDENT_SLICES = K_SLICES + TEACHER_SLICES };  // of a query tile that stays in shared memory
// Warps that read a stage: those of one consumer, or (STREAMED) of all, in all blocks of the cluster
constexpr int READERS = 4 * BLOCKS * (STREAMED ? WARPGROUPS : HALVES);
// WIDE: query tiles that meet the same keys at about the same time, so that the keys come from the L2 cache
constexpr int QUERY_TILES_AT_ONCE = 8;

// A query tile, and the key tiles that it meets in one segment: first .. last. In a triangle they go
// on from the last key tile to key tile 0.
struct Work {
  int query_tile, segment, first, last;
};

// Item `item` of the work of a sweep: a query tile and a segment. A cluster of thread blocks takes every n-th item, of n
// clusters (sweep in sweep.cuh).
//   - In a triangle, a query tile meets the tiles from the diagonal on and half way round, so that each pair of query
//     tiles meets once and all query tiles have the same work.
//   - If `skips_query_tiles` (the caller has a list of visited tiles), the segments of a query tile go to different thread blocks.
//   - If rows of Q do not stay in shared memory (WIDE), a few query tiles and a few segments are in work at a time, so
//     that their rows and keys stay in the L2 cache.
__device__ __forceinline__ Work get_work(const Block& b, int segments, int item,
                                         bool skips_query_tiles) {
  const int query_tiles = (int)b.row_tiles, tiles = (int)b.column_tiles;
  Work w;
  int first = 0, together = query_tiles;
  if (WIDE && !skips_query_tiles) {
    first = item / (QUERY_TILES_AT_ONCE * segments) * QUERY_TILES_AT_ONCE;
    together = min(QUERY_TILES_AT_ONCE, query_tiles - first);
    item -= first * segments;
  }
  w.query_tile = skips_query_tiles ? item / segments : first + item % together;
  w.segment = skips_query_tiles ? item % segments : item / together;
  int start = 0, count = tiles;
  if (b.triangle) {
    start = w.query_tile;
    count = tiles / 2 + (tiles % 2 || w.query_tile < tiles / 2);
  }
  w.first = start + (int)((i64)count * w.segment / segments);
  w.last = start + (int)((i64)count * (w.segment + 1) / segments);
  return w;
}

// Whether a sweep visits a query tile. `visited_tiles` has a number for each ONLINE_TILE_ROWS rows, 0 for no visit.
__device__ __forceinline__ bool is_visited(const int* visited_tiles, const Block& b, int query_tile) {
  constexpr int EACH = (QUERY_TILE_ROWS + ONLINE_TILE_ROWS - 1) / ONLINE_TILE_ROWS;
  bool any = false;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const i64 at = (i64)query_tile * EACH + i;
    any |= at * ONLINE_TILE_ROWS < b.q.rows && visited_tiles[at];
  }
  return any;
}

template <class Epilogue>
struct SweepShared {  // TMA boxes begin at multiples of 1024 bytes, as all sizes before them are
#if !STREAMED
  alignas(16) char q[RESIDENT_SLICES][OWN_ROWS * K_SLICE];
#endif
  alignas(16) char k[STAGES][STAGE_BYTES];
  typename Epilogue::WarpgroupShared group[WARPGROUPS];  // what a warpgroup writes of a tile
  typename Epilogue::ConsumerShared consumer[2];         // the columns of a consumer's tile
  // mbarriers: TMA has written a stage; consumers have read it. The same for the query tile's rows of Q
  alignas(8) u64 full[STAGES], empty[STAGES];
  u64 queries_full, queries_empty;
};

// A number that is the same in all lanes of the warp. After the shuffle, the compiler does not compute it
// again at every use.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(ALL_LANES, x, 0); }

// Which part of the work is this thread's: its warpgroup and consumer, and its rows and columns in the
// accumulator fragments.
struct Lane {
  int warpgroup, consumer, half, thread, warp, lane, g, t;
  __device__ Lane() {
    warpgroup = warp_uniform(threadIdx.x / 128);
    consumer = warpgroup / HALVES;
    half = warpgroup % HALVES;
    thread = threadIdx.x % 128;
    lane = threadIdx.x % 32;
    // Reading threadIdx takes long: the compiler must not read it again
    keep(thread, lane);
    warp = thread / 32;
    g = lane / 4;
    t = lane % 4;
  }
  // Which 64 of the block's rows are this warpgroup's.
  __device__ int strip() const { return STREAMED ? consumer : half; }
  // Which of a segment's ROW_SLOTS sums is this consumer's.
  __device__ int slot() const { return STREAMED ? 0 : consumer; }
  // The first of this thread's two rows in the query tile; the other is eight below.
  __device__ int row() const {
    return (BLOCKS > 1 ? (int)cluster_rank() * OWN_ROWS : 0) + strip() * 64 + warp * 16 + g;
  }
  // This thread's first row (h = 0) or second row (h = 1) of a query tile, as a row of the block.
  __device__ i64 get_row(int query_tile, int h) const { return (i64)query_tile * QUERY_TILE_ROWS + row() + 8 * h; }
  __device__ void sync_warpgroup() const { named_barrier_sync(1 + warpgroup, 128); }
  // All warpgroups of the consumer meet at the named barrier of the first of them. That warpgroup may use the same
  // barrier for sync_warpgroup: between any two uses, the whole consumer meets at PING_PONG.
  __device__ void sync_consumer() const { named_barrier_sync(1 + consumer * HALVES, 128 * HALVES); }
};

// The stage of the next K-slice in the ring of stages, and the phase of the stage's barriers: the parity of the
// number of times that the ring has wrapped around.
struct PipelineState {
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip_tile() {
    stage += RESIDENT_SLICES % STAGES;
    phase ^= RESIDENT_SLICES / STAGES & 1;
    if (stage >= STAGES) stage -= STAGES, phase ^= 1;
  }
};

// The K-slice of the keys that a tile loads as number i. K-slices of small parts come first, and so are summed
// first: the small parts of all features, or (FP16X3) of the same 64 features.
__device__ __forceinline__ int find_key_slice(int i) {
  if (PRECISION == FP16X3) return (PARTS - 1 - i % PARTS) * FEATURE_SLICES + i / PARTS;
  if (WIDE && i >= K_SLICES) return i - K_SLICES;  // large parts once more
  return (i + K_SLICES - FEATURE_SLICES) % K_SLICES;
}
// The K-slice of the rows of Q that is loaded with it (STREAMED). WIDE: small parts of keys meet large parts of rows;
// then large parts of keys meet small parts of rows, and at last large parts of rows.
__device__ __forceinline__ int find_row_slice(int i) {
  if (WIDE && PARTS == 2) return i < K_SLICES ? i : i - K_SLICES;
  return find_key_slice(i);
}
