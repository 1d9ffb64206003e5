// A sweep over a block of logits on Hopper: the main loop of sweep_lse.cu, sweep_gradient.cu,
// sweep_online.cu and sweep_sigmoid.cu.
//
//              key tiles, 128 rows of K each, streamed slab by slab
//             +----+----+----+----+----+----+- - -
//   128 rows  |  0 |  1 |  2 |  3 |  4 |  5 |          a panel: its rows of Q stay in shared memory
//    of Q     +----+----+----+----+----+----+- - -     while all key tiles pass by
//
//   team 0   products of tile 0 | epilogue of tile 0 | products of tile 2 | epilogue of tile 2 ...
//   team 1                      | products of tile 1 | epilogue of tile 1 | products of tile 3 ...
//   a warp   copies slabs (128 rows, 128 bytes of each) into a ring of STAGES, as stages free up
//
// There is one block of threads a multiprocessor, and it takes one panel after another. A team is two
// warpgroups, each with 64 of the panel's rows. Teams take turns at the tensor cores: while one has
// its products, the other turns its finished logits into what is wanted. Exponentials so cost no
// time of their own as long as an epilogue is shorter than the products of a tile.
//
// WIDE: rows too long for 128 of them to stay. A panel is shared by a cluster of two blocks, each
// with 64 rows in its memory; every key slab is fetched once for both, each block copying half of it
// into the memory of both. A team is one warpgroup.
//
// BF16X3: a row is its features' high parts, then their low ones. A slab of keys' low parts meets
// the rows' high ones, a slab of high parts both; low times low would be lost in rounding.
//
// STREAMED (FP16X3): sums are taken in two levels, since tensor cores cut off bits when they add: over
// half a slab, the products with small parts first, then over slabs. Rows do not stay but
// come along with keys, a part of 128 bytes of features of both a stage. Teams, a warpgroup each, do
// not take turns: each has its 64 rows of every tile, and as they drift apart one has its epilogue, or
// adds, while the other multiplies.
//
// NARROW (rows of up to 256 bytes): what comes of a tile's logits is multiplied with its keys at once,
// and gathered in registers (sweep_narrow.cu). A panel is 64 rows, a team one warpgroup. A team's turn
// is the product of what it made of its last tile, and the logits of the next: two products, while the
// other team has its epilogue. Keys stay in their stages until then.
//
// What becomes of logits is the epilogue's:
//     begin_panel(work)     a new panel of rows
//     publish(tile)         shares with the team what is known of the tile's columns
//     tile(x, tile)         products are complete; what was published can be read
//     end_tile(tile)        after a barrier of the warpgroup, if it has SUMS of columns
//     end_panel(work)
//     end()                 if it has SUMS
#pragma once
#include "sm90/sweep_layout.cuh"

// --- the copying warp ---------------------------------------------------------------------------------

template <class Epilogue>
__device__ __forceinline__ void copy_everything(SweepShared<Epilogue>& s, const TensorMap& q,
                                                const TensorMap& k, const Block& b, int segments,
                                                const int* wanted) {
  const int tiles = (int)b.column_tiles, items = (int)b.row_tiles * segments;
  const u32 rank = WIDE ? cluster_rank() : 0;
  Place place;
  u32 panels = 0;
  for (int item = blockIdx.x / BLOCKS; item < items; item += gridDim.x / BLOCKS) {
    const Work w = get_work(b, segments, item, wanted);
    if (wanted && !wanted[w.panel]) continue;
    const int row = w.panel * PANEL_ROWS + rank * OWN_ROWS;
#if !STREAMED
    barrier_wait(s.panel_empty, (panels & 1) ^ 1);
    barrier_expect(s.panel_full, sizeof s.q);
    for (int i = 0; i < SLABS; ++i) copy_box(s.q[i], q, s.panel_full, i * SLAB_ELEMENTS, row);
#endif
    for (int t = w.first; t < w.last; ++t) {
      const int column = (t < tiles ? t : t - tiles) * TILE_COLUMNS;
      for (int i = 0; i < SLABS; ++i, place.next()) {
        u64& full = s.full[place.stage];
        char* stage = s.k[place.stage];
        barrier_wait(s.empty[place.stage], place.phase ^ 1);
        barrier_expect(full, STAGE_BYTES);
        const int feature = slab_number(i) * SLAB_ELEMENTS;
#if STREAMED
        copy_box(stage, q, full, feature, row);
        copy_box(stage + SLAB_BYTES, k, full, feature, column);
#elif WIDE
        const int half = TILE_COLUMNS / 2;
        copy_box_to(stage + rank * half * SLAB, k, full, feature, column + rank * half, 3);
#else
        copy_box(stage, k, full, feature, column);
#endif
      }
    }
    ++panels;
  }
}

// --- a warpgroup -----------------------------------------------------------------------------------------

// The stage is read: it may be filled again.
template <class Epilogue>
__device__ __forceinline__ void release(SweepShared<Epilogue>& s, u32 stage, const Lane& lane) {
#if WIDE
  if (lane.lane < BLOCKS) barrier_arrive_at(s.empty[stage], lane.lane);
#else
  if (lane.lane == 0) barrier_arrive(s.empty[stage]);
#endif
}

// The same of all slabs of a tile, which lie beside each other.
template <class Epilogue>
__device__ __forceinline__ void release_tile(SweepShared<Epilogue>& s, u32 first,
                                             const Lane& lane) {
#pragma unroll
  for (int i = 0; i < SLABS; ++i) release(s, first + i, lane);
}

constexpr int SLAB_STEPS = SLAB / 32;  // products, of 32 bytes of each row

// x (+)= products of a slab of 64 rows and a slab of a tile, if not the `first`; of some of its steps.
template <int FIRST = 0, int END = SLAB_STEPS>
__device__ __forceinline__ void multiply_slab(float (&x)[64], u32 a, u32 b, bool first) {
#pragma unroll
  for (int step = FIRST; step < END; ++step) {
    const int add = !first || step > FIRST;
#if IS_FLOAT16
    wgmma_fp16(x, a + 2 * step, b + 2 * step, add);
#else
    wgmma_bf16(x, a + 2 * step, b + 2 * step, add);
#endif
  }
}

// x = products of the 64 rows at `rows` in shared memory with a tile's, of which the last slab's are
// still under way. Slabs have arrived, or will; their stages are released as they are read.
template <class Epilogue>
__device__ __forceinline__ void start_products(float (&x)[64], SweepShared<Epilogue>& s, u32 rows,
                                              Place& place, const Lane& lane) {
  u32 before = 0;
#pragma unroll
  for (int i = 0; i < SLABS; ++i) {
    barrier_wait(s.full[place.stage], place.phase);
    const int apart = OWN_ROWS * SLAB / 16;  // slabs of the rows
    const u32 a = rows + i % (SLABS / PARTS) * apart;
    const u32 b = matrix_start(shared_address(s.k[place.stage]));
    products_begin();
    if (i >= SLABS / PARTS) multiply_slab(x, a + SLABS / PARTS * apart, b, false);
    multiply_slab(x, a, b, i == 0);
    products_commit();
    if (i > 0 && !NARROW) {
      products_wait<1>();  // the slab before this one is read
      release(s, before, lane);
    }
    before = place.stage;
    place.next();
  }
}

#if STREAMED
// x = products of this warpgroup's 64 rows with a tile's.
template <class Epilogue>
__device__ __forceinline__ void streamed_products(float (&x)[64], SweepShared<Epilogue>& s,
                                                  Place& place, const Lane& lane) {
  static_assert(STAGES % PARTS == 0, "parts of the same features lie beside each other");
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] = 0;
#pragma unroll 1
  for (int slab = 0; slab < SLABS / PARTS; ++slab) {
    const u32 first = place.stage, keys = matrix_start(shared_address(s.k[first]) + SLAB_BYTES);
    const u32 rows = matrix_start(shared_address(s.k[first]) + lane.strip() * 64 * SLAB);
    const int part = STAGE_BYTES / 16;  // from the small one to the large one
    for (int p = 0; p < PARTS; ++p, place.next()) barrier_wait(s.full[place.stage], place.phase);
    // What a sum loses grows with its length, and with how much its terms have one sign: large parts
    // are summed half a slab at a time
    float y[64], z[64];
    products_begin();
    multiply_slab(y, rows, keys + part, true);
    multiply_slab(y, rows + part, keys, false);
    products_commit();
    multiply_slab<0, SLAB_STEPS / 2>(y, rows + part, keys + part, false);
    multiply_slab<SLAB_STEPS / 2>(z, rows + part, keys + part, true);
    products_commit();
    products_wait<1>();
    release(s, first, lane);
    products_wait<0>();
    release(s, first + 1, lane);
    arrived(y);
    arrived(z);
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] += y[i] + z[i];
  }
}

template <class Epilogue>
__device__ __forceinline__ void multiply_everything(SweepShared<Epilogue>& s, const Block& b,
                                                    int segments, Epilogue& epilogue,
                                                    const Lane& lane, const int* wanted) {
  const int tiles = (int)b.column_tiles, items = (int)b.row_tiles * segments;
  Place place;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Work w = get_work(b, segments, item, wanted);
    if (wanted && !wanted[w.panel]) continue;
    epilogue.begin_panel(w);
    for (int t = w.first; t < w.last; ++t) {
      const int tile = t < tiles ? t : t - tiles;
      float x[64];
      streamed_products(x, s, place, lane);
      lane.sync_warpgroup();  // nobody reads what belonged to the tile before
      epilogue.publish(tile);
      lane.sync_warpgroup();
      epilogue.tile(x, tile);
      if (Epilogue::SUMS) lane.sync_warpgroup();
      epilogue.end_tile(tile);
    }
    epilogue.end_panel(w);
  }
}
#else
template <class Epilogue>
__device__ __forceinline__ void multiply_everything(SweepShared<Epilogue>& s, const Block& b,
                                                    int segments, Epilogue& epilogue,
                                                    const Lane& lane, const int* wanted) {
  const int tiles = (int)b.column_tiles, items = (int)b.row_tiles * segments;
  const u32 rows = matrix_start(shared_address(s.q) + lane.half * 64 * SLAB);
  Place place;
  u32 panels = 0;
  // Halves that share what is known of their tile's columns are in step, and those whose slabs would
  // wait in memory for each other. Else each half's teams take turns for themselves: then one half's
  // products fill the time in which both teams of the other have epilogues.
  constexpr bool IN_STEP = Epilogue::PUBLISHES || IDS || FACTORS || 2 * SLABS >= STAGES;
  const int turn = TURN + (IN_STEP ? 0 : 2 * lane.half), sharers = 2 * 128 * (IN_STEP ? HALVES : 1);
  bool mine = lane.team == 0;  // teams take every other tile, over all panels
  int held = -1;               // stage of this team's last tile, while its keys are needed
  if (!mine) arrive_some(turn, sharers);  // the first turn
  for (int item = blockIdx.x / BLOCKS; item < items; item += gridDim.x / BLOCKS) {
    const Work w = get_work(b, segments, item, wanted);
    if (wanted && !wanted[w.panel]) continue;
    if (panels > 0) sync_some(NEW_PANEL, 128 * WARPGROUPS);
    epilogue.begin_panel(w);
    barrier_wait(s.panel_full, panels & 1);
    for (int t = w.first; t < w.last; ++t, mine = !mine) {
      // After this team's last products of the panel, its rows are not read any more
      const bool last = t + 2 >= w.last;
      if (!mine) {
        place.skip_tile();
        if (last && t == w.first && t + 1 == w.last && lane.lane == 0)
          barrier_arrive(s.panel_empty);
        continue;
      }
      const int tile = t < tiles ? t : t - tiles;
      float x[64];
      sync_some(turn + lane.team, sharers);
      const int first = place.stage;
#if NARROW
      if (held >= 0) epilogue.gather(shared_address(s.k[held]));
#endif
      start_products(x, s, rows, place, lane);
      // The other team may start: its products come after these
      arrive_some(turn + (lane.team ^ 1), sharers);
      // Since the turn came, nobody of this team reads what belonged to the tile before
      epilogue.publish(tile);
      products_wait<0>();
      if (!NARROW) release(s, place.stage == 0 ? STAGES - 1 : place.stage - 1, lane);
      else if (held >= 0) release_tile(s, held, lane);
      held = first;
      if (last && lane.lane == 0) barrier_arrive(s.panel_empty);
      arrived(x);
      if (Epilogue::PUBLISHES || IDS || FACTORS) lane.sync_team();  // what was published is there
      epilogue.tile(x, tile);
      if (Epilogue::SUMS) lane.sync_warpgroup();  // sums of all warps are there
      epilogue.end_tile(tile);
    }
#if NARROW
    if (held >= 0) {
      epilogue.gather(shared_address(s.k[held]));
      products_wait<0>();
      release_tile(s, held, lane);
      held = -1;
    }
#endif
    epilogue.end_panel(w);
    ++panels;
  }
}
#endif

template <class Epilogue>
__device__ __forceinline__ SweepShared<Epilogue>& sweep_shared() {
  static_assert(sizeof(SweepShared<Epilogue>) <= SHARED, "a launch gives less shared memory");
  extern __shared__ __align__(1024) char memory[];
  return *(SweepShared<Epilogue>*)memory;
}

// All of a kernel but its epilogue; over panels that are `wanted` [panels], or all (null).
template <class Epilogue>
__device__ __forceinline__ void sweep(SweepShared<Epilogue>& s, const TensorMap& q,
                                      const TensorMap& k, const Block& b, int segments,
                                      Epilogue& epilogue, const Lane& lane,
                                      const int* wanted = nullptr) {
  if (wanted) {  // mostly nothing is: then this takes no longer than a launch
    const int items = (int)b.row_tiles * segments, step = gridDim.x / BLOCKS;
    bool any = false;
    for (int item = blockIdx.x / BLOCKS + threadIdx.x * step; item < items;
         item += SWEEP_THREADS * step)
      any |= wanted[item / segments] != 0;
    if (!__syncthreads_or(any)) return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(s.full[i], 1);
      barrier_init(s.empty[i], NARROW ? 4 : 8);  // warps that read a slab: of a team, in all blocks
    }
    barrier_init(s.panel_full, 1);
    barrier_init(s.panel_empty, 4 * WARPGROUPS);
    barriers_ready();
  }
  if (WIDE) cluster_sync();
  else __syncthreads();
  if (lane.warpgroup < WARPGROUPS) {
    more_registers<HALVES == 1 ? 232 : 112>();
    multiply_everything(s, b, segments, epilogue, lane, wanted);
    if constexpr (Epilogue::SUMS) epilogue.end();
  } else {
    fewer_registers<HALVES == 1 ? 40 : 32>();
    if (lane.thread == 0) copy_everything(s, q, k, b, segments, wanted);
  }
  if (WIDE) cluster_sync();  // nobody arrives at the barriers of a block that has ended
}
