// A sweep over a block of logits on Hopper: the main loop of sweep_lse.cu, sweep_gradient.cu and
// sweep_sigmoid.cu.
//
//              key tiles, 128 rows of K each, streamed slab by slab
//             +----+----+----+----+----+----+- - -
//   128 rows  |  0 |  1 |  2 |  3 |  4 |  5 |          a panel: its rows of Q stay in shared memory
//    of Q     +----+----+----+----+----+----+- - -     while all key tiles pass by
//
//   warp 0        copies slabs (128 rows, 128 bytes of each) into a ring of STAGES, as stages free up
//   warpgroup 1   rows  0 ..  63:  products of tile t | meanwhile, logits of tile t - 1 become
//   warpgroup 2   rows 64 .. 127:  products of tile t | sums, or dL/dx: the epilogue
//
// There is one block of threads a multiprocessor, and it takes one panel after another. Tensor cores
// work asynchronously: a warpgroup starts the products of a slab, and while they run it turns one
// slice of the tile before, which lies finished in a second set of registers, into what is wanted.
// Exponentials so cost no time of their own as long as they are fewer than the products' clocks.
//
// WIDE: rows too long for 128 of them to stay. A panel is shared by a cluster of two blocks, each
// with 64 rows in its memory; every key slab is fetched once for both, each block copying half of it
// into the memory of both. Within a block the warpgroups take turns: tile t and tile t + 1.
//
// What becomes of logits is the epilogue's:
//     begin_panel(work)     a new panel of rows
//     fetch(tile, buffer)          start loading what is known of the tile's columns
//     publish(buffer)              ... and share it with the warpgroup, in one of two buffers
//     begin_tile(x, tile, buffer)  the tile's products are complete
//     slice(x, s)                  16 of its columns, s = 0 .. 7
//     end_tile(tile, buffer)       after a barrier of the warpgroup
//     end_panel(work)
#pragma once
#include "block.cuh"

#define PANEL_ROWS 128
#define TILE_COLUMNS 128
#ifndef SLABS
#define SLABS 8  // of a row: ceil(width / SLAB)
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
#define BLOCKS (WIDE ? 2 : 1)  // that share a panel
#define OWN_ROWS (PANEL_ROWS / BLOCKS)
#define TURN 3  // barriers 3 and 4: whose products come next
#define SLICES 8
#define SWEEP_THREADS 384
#define STAGE_BYTES (TILE_COLUMNS * SLAB)
#define SLAB_ELEMENTS (SLAB / (PRECISION == TF32 ? 4 : 2))

// A panel of rows, and the tiles of columns that it meets in one go: first .. last, which in a
// triangle go on from the last tile to tile 0.
struct Work {
  int panel, segment, first, last;
};

// In a triangle a panel meets the tiles from the diagonal on and half way round, so that each pair of
// panels meets once and all panels have the same work.
__device__ __forceinline__ Work get_work(const Block& b, int segments, int item) {
  const int panels = (int)b.row_tiles, tiles = (int)b.column_tiles;
  Work w;
  w.panel = item % panels;
  w.segment = item / panels;
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
struct SweepShared {
  alignas(1024) char q[SLABS][OWN_ROWS * SLAB];
  alignas(1024) char k[STAGES][STAGE_BYTES];
  typename Epilogue::Shared epilogue[2];
  alignas(8) u64 full[STAGES], empty[STAGES];  // stages hold a slab; stages may be filled
  u64 panel_full, panel_empty;
};

// Where a thread's products are.
struct Lane {
  int warpgroup, thread, warp, lane, g, t;
  __device__ Lane() {
    warpgroup = threadIdx.x / 128 - 1;
    thread = threadIdx.x % 128;
    warp = thread / 32;
    lane = threadIdx.x % 32;
    g = lane / 4;
    t = lane % 4;
  }
  // The first of this thread's two rows in the panel; the other is eight below.
  __device__ int row() const {
    return (WIDE ? (int)cluster_rank() : warpgroup) * 64 + warp * 16 + g;
  }
  __device__ void sync_warpgroup() const { sync_some(1 + warpgroup, 128); }
};

// --- the copying warp ---------------------------------------------------------------------------------

template <class Epilogue>
__device__ __forceinline__ void copy_everything(SweepShared<Epilogue>& s, const TensorMap& q,
                                                const TensorMap& k, const Block& b, int segments) {
  const int tiles = (int)b.column_tiles, items = (int)b.row_tiles * segments;
  const u32 rank = WIDE ? cluster_rank() : 0;
  u32 n = 0, panels = 0;
  for (int item = blockIdx.x / BLOCKS; item < items; item += gridDim.x / BLOCKS, ++panels) {
    const Work w = get_work(b, segments, item);
    barrier_wait(s.panel_empty, (panels & 1) ^ 1);
    barrier_expect(s.panel_full, sizeof s.q);
    for (int i = 0; i < SLABS; ++i)
      copy_box(s.q[i], q, s.panel_full, i * SLAB_ELEMENTS, w.panel * PANEL_ROWS + rank * OWN_ROWS);
    for (int t = w.first; t < w.last; ++t) {
      const int column = (t < tiles ? t : t - tiles) * TILE_COLUMNS;
      for (int i = 0; i < SLABS; ++i, ++n) {
        const u32 stage = n % STAGES;
        barrier_wait(s.empty[stage], (n / STAGES & 1) ^ 1);
        barrier_expect(s.full[stage], STAGE_BYTES);
#if WIDE
        const int half = TILE_COLUMNS / 2;
        copy_box_to(s.k[stage] + rank * half * SLAB, k, s.full[stage], i * SLAB_ELEMENTS,
                    column + rank * half, 3);
#else
        copy_box(s.k[stage], k, s.full[stage], i * SLAB_ELEMENTS, column);
#endif
      }
    }
  }
}

// --- a warpgroup -----------------------------------------------------------------------------------------

template <class Epilogue>
struct Consumer {
  SweepShared<Epilogue>& s;
  Epilogue& epilogue;
  const Lane& lane;
  int tiles;
  u32 own_rows;  // where this warpgroup's rows of the panel begin
  u32 n;         // the slab that comes next, of all slabs that this block gets
  int buffer;  // of two, in which the epilogue keeps what belongs to the tile that comes next

  __device__ __forceinline__ int column_tile(int t) const { return t < tiles ? t : t - tiles; }

  // The stage that `slab` lies in is read: it may be filled again.
  __device__ __forceinline__ void release(u32 slab) {
    u64& barrier = s.empty[slab % STAGES];
#if WIDE
    if (lane.lane < BLOCKS) barrier_arrive_at(barrier, lane.lane);
#else
    if (lane.lane == 0) barrier_arrive(barrier);
#endif
  }
  // The panel's rows are not read any more.
  __device__ __forceinline__ void release_panel() {
    if (lane.lane == 0) barrier_arrive(s.panel_empty);
  }

  // Start the products of a tile's slab i, which is the one that comes next.
  __device__ __forceinline__ void start(float (&x)[64], int i) {
    const u32 stage = n % STAGES;
    barrier_wait(s.full[stage], n / STAGES & 1);
    u32 rows = own_rows;
    asm volatile("" : "+r"(rows));  // or the compiler would keep 32 sums of it in registers
    const u32 a = rows + i * (OWN_ROWS * SLAB / 16);
    const u32 b = matrix_start(shared_address(s.k[stage]));
    products_begin();
#pragma unroll
    for (int step = 0; step < SLAB / 32; ++step) {
#if PRECISION == BF16
      wgmma_bf16(x, a + 2 * step, b + 2 * step, i | step);
#elif PRECISION == FP16
      wgmma_fp16(x, a + 2 * step, b + 2 * step, i | step);
#else
      wgmma_tf32(x, a + 2 * step, b + 2 * step, i | step);
#endif
    }
    products_commit();
  }

#if WIDE
  // Every other tile: while one warpgroup has its epilogue, the other has its products. They take
  // turns strictly, so that neither falls back by more than one phase of a barrier.
  __device__ __forceinline__ void panel(const Work& w) {
    float x[64];
    int t = w.first + ((n / SLABS ^ lane.warpgroup) & 1);
    n += (t - w.first) * SLABS;
    if (t >= w.last) release_panel();
    for (; t < w.last; t += 2) {
      epilogue.fetch(column_tile(t), buffer);
      sync_some(TURN + lane.warpgroup, 256);
#pragma unroll 4
      for (int i = 0; i < SLABS; ++i, ++n) {
        start(x, i);
        if (i == 0) continue;
        products_wait<1>();
        release(n - 1);
      }
      arrive_some(TURN + (lane.warpgroup ^ 1), 256);  // the other's turn
      products_wait<0>();
      release(n - 1);
      n += SLABS;  // the other warpgroup's tile
      if (t + 2 >= w.last) release_panel();
      epilogue.publish(buffer);
      lane.sync_warpgroup();  // what the epilogue needs is there
      arrived(x);
      epilogue_of(x, t);
    }
  }
#else
  // Products of tile t into x; meanwhile, with AFTER, the epilogue of the tile before, `done`.
  template <bool AFTER>
  __device__ __forceinline__ void product(float (&x)[64], float (&done)[64], int t) {
    epilogue.fetch(column_tile(t), buffer);
#pragma unroll
    for (int i = 0; i < SLABS; ++i, ++n) {
      start(x, i);
      if (AFTER || i > 0) {
        products_wait<1>();  // what was started before this slab is complete
        release(n - 1);
      }
      if (!AFTER) continue;
      if (i == 0) {
        arrived(done);
        epilogue.begin_tile(done, column_tile(t - 1), buffer ^ 1);
      }
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice)
        if (slice * SLABS / SLICES == i) epilogue.slice(done, slice);
    }
    epilogue.publish(buffer);
    lane.sync_warpgroup();  // what the next epilogue needs is there, and so are this one's sums
    if (AFTER) epilogue.end_tile(column_tile(t - 1), buffer ^ 1);
    buffer ^= 1;
  }
  __device__ __forceinline__ void panel(const Work& w) {
    float x[64], y[64];
    product<false>(x, y, w.first);
    for (int t = w.first + 1;; t += 2) {
      if (t == w.last) return last(x, t - 1);
      product<true>(y, x, t);
      if (t + 1 == w.last) return last(y, t);
      product<true>(x, y, t + 1);
    }
  }
  __device__ __forceinline__ void last(float (&x)[64], int t) {
    products_wait<0>();
    release(n - 1);
    release_panel();
    arrived(x);
    buffer ^= 1;
    epilogue_of(x, t);
  }
#endif

  // The whole epilogue of tile t at once.
  __device__ __forceinline__ void epilogue_of(float (&x)[64], int t) {
    epilogue.begin_tile(x, column_tile(t), buffer);
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) epilogue.slice(x, slice);
    lane.sync_warpgroup();  // sums of all warps are there
    epilogue.end_tile(column_tile(t), buffer);
    buffer ^= 1;
  }

  __device__ __forceinline__ void run(const Block& b, int segments) {
    const int items = (int)b.row_tiles * segments;
    u32 panels = 0, slabs = 0;
    if (WIDE && lane.warpgroup == 1) arrive_some(TURN + 0, 256);
    for (int item = blockIdx.x / BLOCKS; item < items; item += gridDim.x / BLOCKS, ++panels) {
      const Work w = get_work(b, segments, item);
      epilogue.begin_panel(w);
      barrier_wait(s.panel_full, panels & 1);
      n = slabs;
      slabs += (w.last - w.first) * SLABS;
      panel(w);
      epilogue.end_panel(w);
    }
  }
};

template <class Epilogue>
__device__ __forceinline__ SweepShared<Epilogue>& sweep_shared() {
  extern __shared__ char memory[];
  return *(SweepShared<Epilogue>*)(memory + (-shared_address(memory) & 1023));
}

// All of a kernel but its epilogue.
template <class Epilogue>
__device__ __forceinline__ void sweep(SweepShared<Epilogue>& s, const TensorMap& q,
                                      const TensorMap& k, const Block& b, int segments,
                                      Epilogue& epilogue, const Lane& lane) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(s.full[i], 1);
      barrier_init(s.empty[i], 8);  // warps that read a slab: of two warpgroups, or of two blocks
    }
    barrier_init(s.panel_full, 1);
    barrier_init(s.panel_empty, 8);
    barriers_ready();
  }
  if (WIDE) cluster_sync();
  else __syncthreads();
  if (threadIdx.x < 128) {
    fewer_registers<WIDE ? 40 : 24>();
    if (threadIdx.x == 0) copy_everything(s, q, k, b, segments);
  } else {
    more_registers<WIDE ? 232 : 240>();
    const u32 rows = shared_address(s.q) + (WIDE ? 0 : lane.warpgroup * 64 * SLAB);
    Consumer<Epilogue> consumer{s, epilogue, lane, (int)b.column_tiles, matrix_start(rows), 0, 0};
    consumer.run(b, segments);
  }
  if (WIDE) cluster_sync();  // nobody arrives at the barriers of a block that has ended
}

// --- which logits count -----------------------------------------------------------------------------------

// What a thread knows of its two rows, and a warpgroup of its columns.
struct Rows {
  int positive[2];  // column of the positive in the block, or -1
  bool inside[2];
#if IDS
  i64 id[2];
#endif
#if FACTORS
  float factor[2];
#endif
  __device__ __forceinline__ void load(const Block& b, int panel, const Lane& lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = (i64)panel * PANEL_ROWS + lane.row() + 8 * h;
      inside[h] = row < b.q.rows;
      const i64 at = inside[h] ? b.positives[row] - b.first_column : -1;
      positive[h] = at >= 0 && at < b.k.rows ? (int)at : -1;
#if IDS
      id[h] = inside[h] ? b.query_ids[row] : 0;
#endif
#if FACTORS
      factor[h] = inside[h] ? b.q.factor[row] : 0;
#endif
    }
  }
};

struct Columns {  // of a tile, in shared memory; two tiles' by turns
#if IDS
  i64 id[2][TILE_COLUMNS];
#endif
#if FACTORS
  alignas(8) float factor[2][TILE_COLUMNS];
#endif
};

// One column's values on their way to shared memory.
struct Column {
#if IDS
  i64 id;
#endif
#if FACTORS
  float factor;
#endif
  __device__ __forceinline__ void fetch(const Block& b, i64 column) {
#if IDS
    id = column < b.k.rows ? b.key_ids[column] : 0;
#endif
#if FACTORS
    factor = column < b.k.rows ? b.k.factor[column] : 0;
#endif
  }
  __device__ __forceinline__ void publish(Columns& c, int buffer, int thread) const {
#if IDS
    c.id[buffer][thread] = id;
#endif
#if FACTORS
    c.factor[buffer][thread] = factor;
#endif
  }
};

// Column of x[4 j + e] in the tile.
__device__ __forceinline__ int column_of(int i, const Lane& lane) {
  return i / 4 * 8 + 2 * lane.t + i % 2;
}

// Raw products of a tile become those of unit rows; each positive's is handed to
// `take(half, x)`, whether this thread's first or second row's it is, and becomes LOW, like
// everything that is no pair: padding, i = j where symmetric, equal ids.
template <class Take>
__device__ __forceinline__ void prepare(float (&x)[64], const Rows& rows, const Columns& columns,
                                        int buffer, const Block& b, i64 panel, i64 tile,
                                        const Lane& lane, Take take) {
#if FACTORS
#pragma unroll
  for (int i = 0; i < 64; ++i)
    x[i] *= rows.factor[i / 2 % 2] * columns.factor[buffer][column_of(i, lane)];
#endif
  const int first = (int)tile * TILE_COLUMNS;
  const int at[2] = {rows.positive[0] - first, rows.positive[1] - first};
  const bool met[2] = {(u32)at[0] < TILE_COLUMNS, (u32)at[1] < TILE_COLUMNS};
  if (__any_sync(ALL_LANES, met[0] || met[1])) {
    float value[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (column_of(i, lane) == at[i / 2 % 2]) {
        value[i / 2 % 2] = x[i];
        x[i] = LOW;
      }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (met[h] && at[h] % 8 / 2 == lane.t) take(h, value[h]);
  }
#if IDS
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (rows.id[i / 2 % 2] == columns.id[buffer][column_of(i, lane)]) x[i] = LOW;
#endif
  const i64 diagonal = b.first_row + panel * PANEL_ROWS - b.first_column - first;
  const bool crossed = b.symmetric && diagonal > -PANEL_ROWS && diagonal < TILE_COLUMNS;
  const bool ragged = (panel + 1) * PANEL_ROWS > b.q.rows || first + TILE_COLUMNS > b.k.rows;
  if (!crossed && !ragged) return;
  int end[2], itself[2];  // columns from `end` on are outside
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    end[h] = rows.inside[h] ? (int)min(b.k.rows - first, (i64)TILE_COLUMNS) : 0;
    itself[h] = crossed ? (int)diagonal + lane.row() + 8 * h : -1;
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int column = column_of(i, lane);
    if (column >= end[i / 2 % 2] || column == itself[i / 2 % 2]) x[i] = LOW;
  }
}

// Eight values a lane, joined over the eight lanes that share their columns; what a lane carries is
// halved each time: lane (g, t) ends with number g of its eight.
template <class Join>
__device__ __forceinline__ float join_columns(const float (&v)[8], const Lane& lane, Join join) {
  const bool b4 = lane.lane & 16, b3 = lane.lane & 8, b2 = lane.lane & 4;
  float w[4], y[2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = join(b4 ? v[i + 4] : v[i], __shfl_xor_sync(ALL_LANES, b4 ? v[i] : v[i + 4], 16));
#pragma unroll
  for (int i = 0; i < 2; ++i)
    y[i] = join(b3 ? w[i + 2] : w[i], __shfl_xor_sync(ALL_LANES, b3 ? w[i] : w[i + 2], 8));
  return join(b2 ? y[1] : y[0], __shfl_xor_sync(ALL_LANES, b2 ? y[0] : y[1], 4));
}

// --- panels of dL/dx --------------------------------------------------------------------------------------

// This thread's two rows of a tile of the panel, in pieces that fill 32-byte sectors: of two groups of
// eight columns, even lanes write the first's, odd lanes the second's.
struct PanelRows {
  Element* at[2];
  int columns[2];  // that may be written from there: up to the stride, which is padding

  __device__ __forceinline__ void begin(const Panel& panel, const Rows& rows, i64 row, i64 column,
                                        const Lane& lane) {
    column += (lane.t & 1) * 8 + (lane.t & 2) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      at[h] = panel.data + (row + 8 * h) * panel.stride + column;
      asm volatile("" : "+l"(at[h]));  // or the compiler would compute it for every slice
      columns[h] = rows.inside[h] ? (int)min(panel.stride - column, (i64)TILE_COLUMNS) : 0;
    }
  }

  __device__ __forceinline__ void store_slice(const float (&x)[64], int s, const Lane& lane) const {
    const bool odd = lane.t & 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = 8 * s + 2 * h;
#if PRECISION == TF32
      const float x0 = __shfl_xor_sync(ALL_LANES, odd ? x[i] : x[i + 4], 1);
      const float x1 = __shfl_xor_sync(ALL_LANES, odd ? x[i + 1] : x[i + 5], 1);
      const float4 four = odd ? make_float4(x0, x1, x[i + 4], x[i + 5])
                              : make_float4(x[i], x[i + 1], x0, x1);
      const uint4 words = make_uint4(
          to_tf32(__float_as_uint(four.x)), to_tf32(__float_as_uint(four.y)),
          to_tf32(__float_as_uint(four.z)), to_tf32(__float_as_uint(four.w)));
      if (16 * s < columns[h]) __stcs((uint4*)(at[h] + 16 * s), words);
#else
#if PRECISION == FP16
      const u32 w0 = to_fp16x2(x[i], x[i + 1]), w1 = to_fp16x2(x[i + 4], x[i + 5]);
#else
      const u32 w0 = to_bf16x2(x[i], x[i + 1]), w1 = to_bf16x2(x[i + 4], x[i + 5]);
#endif
      const u32 received = __shfl_xor_sync(ALL_LANES, odd ? w0 : w1, 1);
      const uint2 words = odd ? make_uint2(received, w1) : make_uint2(w0, received);
      if (16 * s < columns[h]) __stcs((uint2*)(at[h] + 16 * s), words);
#endif
    }
  }
};
