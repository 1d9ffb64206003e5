// The layout of a sweep (sweep.cuh): sizes, barriers, shared memory, and which rows and columns are whose.
#pragma once
#include "block.cuh"

#ifndef NARROW
#define NARROW 0
#endif
constexpr int PANEL_ROWS = NARROW ? 64 : 128;
#ifndef SLABS
#define SLABS 8  // of a row: ceil(width / SLAB), for each part
#endif
#ifndef STAGES
#define STAGES 5
#endif
#ifndef WIDE
#define WIDE 0
#endif
#ifndef IDS
#define IDS 0
#endif
#ifndef FACTORS
#define FACTORS 0
#endif
#ifndef SHARED
#define SHARED 232448  // bytes that a launch gives
#endif
constexpr int BLOCKS = WIDE ? 2 : 1;  // that share a panel
#define STREAMED (PRECISION == FP16X3)  // rows do not stay
constexpr int STRIPS = PANEL_ROWS / 64 / BLOCKS;  // of 64 rows, that a block has of its panel
constexpr int HALVES = STREAMED ? 1 : STRIPS;  // warpgroups of a team
constexpr int WARPGROUPS = 2 * HALVES;
constexpr int OWN_ROWS = PANEL_ROWS / BLOCKS;
constexpr int SLICES = 8;  // of 16 columns: what epilogues do at once
constexpr int SWEEP_THREADS = 128 * WARPGROUPS + 128;
// Barriers, besides one a warpgroup
constexpr int TURN = 1 + WARPGROUPS;  // and the next, two a half: whose products come next
constexpr int NEW_PANEL = TURN + 2 * HALVES;  // all epilogues of the panel before have ended
constexpr int PANEL_WRITTEN = NEW_PANEL + 1;  // the first team's gradients of the panel are in memory
constexpr int SLAB_BYTES = TILE_COLUMNS * SLAB;
constexpr int STAGE_BYTES = (STREAMED ? 2 : 1) * SLAB_BYTES;  // keys, or rows and keys
constexpr int ROW_SLOTS = STREAMED ? 1 : 2;  // sums that a segment leaves for each row: a team each
constexpr int SLAB_ELEMENTS = SLAB / 2;

// A panel of rows, and the tiles of columns that it meets in one go: first .. last, which in a
// triangle go on from the last tile to tile 0.
struct Work {
  int panel, segment, first, last;
};

// In a triangle a panel meets the tiles from the diagonal on and half way round, so that each pair of
// panels meets once and all panels have the same work. Of panels of which only some are wanted, the
// segments go to different blocks of threads.
__device__ __forceinline__ Work get_work(const Block& b, int segments, int item, bool some) {
  const int panels = (int)b.row_tiles, tiles = (int)b.column_tiles;
  Work w;
  w.panel = some ? item / segments : item % panels;
  w.segment = some ? item % segments : item / panels;
  int start = 0, count = tiles;
  if (b.triangle) {
    start = w.panel;
    count = tiles / 2 + (tiles % 2 || w.panel < tiles / 2);
  }
  w.first = start + (int)((i64)count * w.segment / segments);
  w.last = start + (int)((i64)count * (w.segment + 1) / segments);
  return w;
}

template <class Epilogue>
struct SweepShared {  // boxes begin at multiples of 1024 bytes, which all sizes before them are
#if !STREAMED
  alignas(16) char q[SLABS][OWN_ROWS * SLAB];
#endif
  alignas(16) char k[STAGES][STAGE_BYTES];
  typename Epilogue::Group group[WARPGROUPS];  // what a warpgroup makes of a tile
  typename Epilogue::Team team[2];             // what a team knows of its tile's columns
  alignas(8) u64 full[STAGES], empty[STAGES];  // stages hold a slab; stages may be filled
  u64 panel_full, panel_empty;
};

// What is the same in the whole warp, computed once: the compiler computes the like again wherever it
// is needed.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(ALL_LANES, x, 0); }

// Where a thread's products are.
struct Lane {
  int warpgroup, team, half, thread, warp, lane, g, t;
  __device__ Lane() {
    warpgroup = of_warp(threadIdx.x / 128);
    team = warpgroup / HALVES;
    half = warpgroup % HALVES;
    thread = threadIdx.x % 128;
    lane = threadIdx.x % 32;
    // Asking for the number of a thread takes long: not again and again
    asm volatile("" : "+r"(thread), "+r"(lane));
    warp = thread / 32;
    g = lane / 4;
    t = lane % 4;
  }
  // Which 64 of the block's rows are this warpgroup's.
  __device__ int strip() const { return STREAMED ? team : half; }
  // Which of a segment's ROW_SLOTS sums are this team's.
  __device__ int slot() const { return STREAMED ? 0 : team; }
  // The first of this thread's two rows in the panel; the other is eight below.
  __device__ int row() const {
    return (WIDE ? (int)cluster_rank() : strip()) * 64 + warp * 16 + g;
  }
  // The first or the second of them, in the block.
  __device__ i64 row_of(int panel, int h) const { return (i64)panel * PANEL_ROWS + row() + 8 * h; }
  __device__ void sync_warpgroup() const { sync_some(1 + warpgroup, 128); }
  __device__ void sync_team() const { sync_some(1 + team * HALVES, 128 * HALVES); }
};

// Where the next slab is in the ring of stages, and the parity of the phase that it fills.
struct Place {
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip_tile() {
    stage += SLABS % STAGES;
    phase ^= SLABS / STAGES & 1;
    if (stage >= STAGES) stage -= STAGES, phase ^= 1;
  }
};

// Which slab comes as number i. Small parts come first, and are summed first: of all features, or
// of a slab's.
__device__ __forceinline__ int slab_number(int i) {
  if (STREAMED) return (PARTS - 1 - i % PARTS) * (SLABS / PARTS) + i / PARTS;
  return (i + SLABS - SLABS / PARTS) % SLABS;
}
