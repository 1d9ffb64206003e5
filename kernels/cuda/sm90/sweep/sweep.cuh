// A sweep over a block of logits on Hopper: the main loop of sweep_lse.cu, sweep_gradient.cu,
// sweep_online.cu, sweep_sigmoid.cu, sweep_narrow.cu, sweep_guide.cu and sweep_distill.cu.
// Sizes, barriers and threads are in sweep/layout.cuh. What epilogues share is in sweep/logits.cuh.
//
//              key tiles, 128 rows of K each, streamed one K-slice (64 elements of D) at a time
//             +----+----+----+----+----+----+- - -
//   128 rows  |  0 |  1 |  2 |  3 |  4 |  5 |          a query tile: its rows of Q stay in shared
//    of Q     +----+----+----+----+----+----+- - -     memory while all key tiles pass by
//
//   consumer 0      products of tile 0 | epilogue of tile 0 | products of tile 2 | epilogue of tile 2
//   consumer 1                         | products of tile 1 | epilogue of tile 1 | products of tile 3
//   producer warp   loads K-slices by TMA into a ring of STAGES, as stages become empty
//
// This is the last of three steps: naive/naive.cu, tiled/product.cuh, sm90/sweep/sweep.cuh. It differs from
// tiled/product.cuh in four ways: wgmma instead of mma.sync, TMA instead of cp.async, a producer warp that only
// loads, and epilogues that run while the other consumer multiplies.
//
// The grid is persistent: each multiprocessor has one thread block, which computes one query tile after another.
// A consumer is two warpgroups, and each warpgroup has 64 rows of the query tile. The two consumers take turns
// (ping-pong): while one uses the tensor cores, the other runs the epilogue of its last tile. If the epilogue of a
// tile is shorter than its products, exponentials cost no time.
//
// Two parts (BF16X3 and FP16X3; float32 is FP16X3): a row has the large parts of its features, and then their small
// parts. A K-slice of the keys' small parts is multiplied by the queries' large parts, and a K-slice of the keys' large
// parts by both parts of the queries. The product of two small parts is below rounding, and is left out.
//
// STREAMED (WIDE or FP16X3): rows of Q do not stay in shared memory. Each K-slice of the queries is loaded together
// with a K-slice of the keys, and consumers take no turns (sweep/streamed.cuh).
//
// IN_REGISTERS (rows of up to 256 bytes): dL/dx of a tile is multiplied by the tile's keys at once, and dQ
// accumulates in registers (sweep_narrow.cu). A query tile has 64 rows, and a consumer is one warpgroup. In its turn,
// a consumer issues two products: dL/dx of its last tile times the keys of that tile, and the logits of its next
// tile. The keys of a tile stay in their stages until both products with them are complete.
//
// TEACHER_SLICES (sweep_distill.cu): a tile has two products, of the student's features and then of the teacher's.
// A query tile has 64 rows of both models. A consumer is one warpgroup, with accumulators for both products.
//
// A class Epilogue is the rest of a kernel. It has these functions, which the consumers call in this order:
//     begin_query_tile(work)     before the first tile of a query tile
//     publish(tile)              writes values of the tile's columns to shared memory, while the products run
//     tile(x, tile)              computes with the products x; with a teacher: tile(x, y, tile), y of the teacher
//     end_tile(tile)             after `tile`; if Epilogue::SUMS, after a barrier of the warpgroup
//     end_query_tile(work)       after the last tile of a query tile
//     end()                      after the last query tile, if Epilogue::SUMS
// The parameter `tile` is the number of a tile of 128 columns of the block. Two constants say what a class needs:
//     SUMS                       `tile` writes sums of columns, which `end_tile` reads: a barrier is between them
//     PUBLISHES                  `publish` writes more than the values of HAS_COLUMN_VALUES
// IN_REGISTERS, `multiply_by_keys(keys)` starts the product of the last tile's dL/dx with its keys.
#pragma once
#include "sm90/sweep/layout.cuh"

// Tensor maps of a teacher's features (TEACHER_SLICES); null without a teacher. Functions take the struct by value: a
// reference changes the machine code of sweeps without a teacher.
struct TeacherMaps {
  const TensorMap *q, *k;
};

// --- the producer warp ---------------------------------------------------------------------------------

// Run by one thread of the producer warp, the first of the last warpgroup (`sweep`, below): loads the query tiles and
// key tiles of this thread block, in the order in which `consume` multiplies them.
template <class Epilogue>
__device__ __forceinline__ void produce(SweepShared<Epilogue>& s, const TensorMap& q,
                                        const TensorMap& k, const Block& b, int segments,
                                        const int* visited_tiles, TeacherMaps teacher) {
  const int tiles = (int)b.column_tiles, items = (int)b.row_tiles * segments;
  const u32 rank = CLUSTER_BLOCKS > 1 ? cluster_rank() : 0;
  PipelineState pipe;
  u32 query_tiles = 0;  // loaded so far; its parity is the phase of queries_full and queries_empty
  for (int item = blockIdx.x / CLUSTER_BLOCKS; item < items; item += gridDim.x / CLUSTER_BLOCKS) {
    const Work w = get_work(b, segments, item, visited_tiles);
    if (visited_tiles && !is_visited(visited_tiles, b, w.query_tile)) continue;
    const int row = w.query_tile * QUERY_TILE_ROWS + rank * OWN_ROWS;
#if !STREAMED
    // All consumers have read the rows of the last query tile before these loads. For the first query tile, and below
    // for the first use of each stage, this thread waits for the phase of parity 1. For a new mbarrier, that phase
    // counts as complete, so the wait ends at once
    barrier_wait(s.queries_empty, (query_tiles & 1) ^ 1);
    barrier_expect(s.queries_full, sizeof s.q);
    for (int i = 0; i < K_SLICES; ++i)
      tma_load(s.q[i], q, s.queries_full, i * K_SLICE_ELEMENTS, row);
    for (int i = 0; i < TEACHER_SLICES; ++i)
      tma_load(s.q[K_SLICES + i], *teacher.q, s.queries_full, i * K_SLICE_ELEMENTS, row);
#endif
    for (int t = w.first; t < w.end; ++t) {
      const int column = (t < tiles ? t : t - tiles) * TILES_PER_KEY_TILE * TILE_COLUMNS;
      for (int i = 0; i < TILE_STAGES; ++i, pipe.next()) {
        u64& full = s.full[pipe.stage];
        char *rows = s.k[pipe.stage], *keys = rows + STAGE_ROWS_BYTES;
        // All READERS (warps, each by `release_stage`) have read the K-slice in this stage before the loads refill it
        barrier_wait(s.empty[pipe.stage], pipe.phase ^ 1);
        barrier_expect(full, STAGE_BYTES);
        const int feature = find_key_slice(i) * K_SLICE_ELEMENTS;
        if (STREAMED) tma_load(rows, q, full, find_row_slice(i) * K_SLICE_ELEMENTS, row);
        if (CLUSTER_BLOCKS > 1)  // each block of the cluster loads one of the key tile's two tiles, for both blocks
          tma_load_multicast(keys + rank * K_SLICE_TILE_BYTES, k, full, feature,
                             column + rank * TILE_COLUMNS, 3);
        else if (i < TILE_STAGES - TEACHER_SLICES) tma_load(keys, k, full, feature, column);
        else tma_load(keys, *teacher.k, full, (i - K_SLICES) * K_SLICE_ELEMENTS, column);
      }
    }
    ++query_tiles;
  }
}

// --- a consumer warpgroup -----------------------------------------------------------------------------------------

// Called by each warp after its last read of a stage. It lets TMA refill the stage: the warp arrives at `empty` of
// all thread blocks whose producers fill this stage.
template <class Epilogue>
__device__ __forceinline__ void release_stage(SweepShared<Epilogue>& s, u32 stage,
                                              const Lane& lane) {
  if (CLUSTER_BLOCKS == 1 && lane.lane == 0) barrier_arrive(s.empty[stage]);
  if (CLUSTER_BLOCKS > 1 && lane.lane < CLUSTER_BLOCKS) barrier_arrive_at(s.empty[stage], lane.lane);
}

// `release_stage` for all stages of a tile (IN_REGISTERS), which are consecutive from `first` on.
template <class Epilogue>
__device__ __forceinline__ void release_tile_stages(SweepShared<Epilogue>& s, u32 first,
                                                       const Lane& lane) {
#pragma unroll
  for (int i = 0; i < K_SLICES; ++i) release_stage(s, first + i, lane);
}

constexpr int K_SLICE_STEPS = K_SLICE / 32;  // one wgmma multiplies 32 bytes of each row

// x += products of a K-slice of 64 query rows and a K-slice of a key tile, in the steps FIRST .. END - 1. `rows` and
// `keys` are the descriptors of the K-slices (`shared_descriptor`). If `overwrites`, x = products.
template <int FIRST = 0, int END = K_SLICE_STEPS>
__device__ __forceinline__ void multiply_k_slice(float (&x)[64], u32 rows, u32 keys, bool overwrites) {
#pragma unroll
  for (int step = FIRST; step < END; ++step) {
    const int add = !overwrites || step > FIRST;
#if IS_FLOAT16
    wgmma_fp16(x, rows + 2 * step, keys + 2 * step, add);
#else
    wgmma_bf16(x, rows + 2 * step, keys + 2 * step, add);
#endif
  }
}

// Called when the products of a key tile's K-slice `number`, in the stage of `pipe`, have been issued. Commits these
// products, waits for those of the previous K-slice, and releases the previous K-slice's stage, `previous_stage`.
// Advances `previous_stage` and `pipe`. IN_REGISTERS, no stage is released here, because the keys are read once more.
template <class Epilogue>
__device__ __forceinline__ void commit_k_slice(SweepShared<Epilogue>& s, int number, u32& previous_stage,
                                               PipelineState& pipe, const Lane& lane) {
  warpgroup_commit();
  if (number > 0 && !IN_REGISTERS) {
    warpgroup_wait<1>();  // the products of the previous K-slice are done
    release_stage(s, previous_stage, lane);
  }
  previous_stage = pipe.stage;
  pipe.next();
}

// x = products of 64 query rows, with the descriptor `rows`, and a key tile. The function waits for each stage, and
// releases each stage but the last. On return, the products of the last K-slice are still in flight.
template <class Epilogue>
__device__ __forceinline__ void issue_products(float (&x)[64], SweepShared<Epilogue>& s, u32 rows,
                                               PipelineState& pipe, const Lane& lane) {
  u32 previous_stage = 0;
#pragma unroll
  for (int i = 0; i < K_SLICES; ++i) {
    barrier_wait(s.full[pipe.stage], pipe.phase);  // the stage's TMA writes come before the reads of wgmma
    const int slice_distance = OWN_ROWS * K_SLICE / 16;  // between K-slices of the rows, in units of descriptors
    const u32 large_parts = rows + i % (K_SLICES / PARTS) * slice_distance;
    const u32 keys = shared_descriptor(shared_address(s.k[pipe.stage]));
    warpgroup_arrive();
    // With two parts, small parts of keys come first, then large parts, which also meet small parts of rows
    if (i >= K_SLICES / PARTS) multiply_k_slice(x, large_parts + K_SLICES / PARTS * slice_distance, keys, false);
    multiply_k_slice(x, large_parts, keys, i == 0);
    commit_k_slice(s, i, previous_stage, pipe, lane);
  }
}

// As `issue_products`, for two models: x = products of the student's features, y = products of the teacher's features.
template <class Epilogue>
__device__ __forceinline__ void issue_both_products(float (&x)[64], float (&y)[64], SweepShared<Epilogue>& s,
                                                    u32 rows, PipelineState& pipe, const Lane& lane) {
  u32 previous_stage = 0;
#pragma unroll
  for (int i = 0; i < RESIDENT_SLICES; ++i) {
    barrier_wait(s.full[pipe.stage], pipe.phase);  // the stage's TMA writes come before the reads of wgmma
    const u32 row_slice = rows + i * (OWN_ROWS * K_SLICE / 16);
    const u32 keys = shared_descriptor(shared_address(s.k[pipe.stage]));
    warpgroup_arrive();
    if (i < K_SLICES) multiply_k_slice(x, row_slice, keys, i == 0);
    else multiply_k_slice(y, row_slice, keys, i == K_SLICES);
    commit_k_slice(s, i, previous_stage, pipe, lane);
  }
}

#if STREAMED
#include "sm90/sweep/streamed.cuh"
#else
// The query tiles and key tiles of this thread block, by one consumer warpgroup. Each consumer takes every other key
// tile.
template <class Epilogue>
__device__ __forceinline__ void consume(SweepShared<Epilogue>& s, const Block& b, int segments,
                                        Epilogue& epilogue, const Lane& lane, const int* visited_tiles) {
  const int tiles = (int)b.column_tiles, items = (int)b.row_tiles * segments;
  const u32 rows = shared_descriptor(shared_address(s.q) + lane.half * 64 * K_SLICE);
  PipelineState pipe;
  u32 query_tiles = 0;  // begun so far
  // The two warpgroups of a consumer are in step, and take one turn together, in two cases:
  //   - They share values of columns in shared memory, such as norm factors.
  //   - The ring has stages for at most two key tiles. With so few stages, no warpgroup can run ahead of the other.
  // Otherwise rows are narrow, and epilogues take longer than products. Then each half of the query tile has a
  // ping-pong of its own: one half may multiply while both warpgroups of the other half run epilogues.
  constexpr bool IN_STEP = Epilogue::PUBLISHES || HAS_COLUMN_VALUES || 2 * K_SLICES >= STAGES;
  const int ping_pong = PING_PONG + (IN_STEP ? 0 : 2 * lane.half);
  // Threads of both consumers that meet at a ping-pong barrier
  const int ping_pong_threads = 2 * 128 * (IN_STEP ? CONSUMER_WARPGROUPS : 1);
  bool has_turn = lane.consumer == 0;  // a consumer takes every other tile, over all query tiles
  int last_tile_stage = -1;  // IN_REGISTERS: first stage of this consumer's last tile; -1: its keys are released
  if (!has_turn) named_barrier_arrive(ping_pong, ping_pong_threads);  // lets consumer 0 begin
  for (int item = blockIdx.x / CLUSTER_BLOCKS; item < items; item += gridDim.x / CLUSTER_BLOCKS) {
    const Work w = get_work(b, segments, item, visited_tiles);
    if (visited_tiles && !is_visited(visited_tiles, b, w.query_tile)) continue;
    if (query_tiles > 0) named_barrier_sync(NEW_QUERY_TILE, 128 * WARPGROUPS);  // why: see NEW_QUERY_TILE
    epilogue.begin_query_tile(w);
    barrier_wait(s.queries_full, query_tiles & 1);  // the TMA writes of the rows come before the reads of wgmma
    for (int t = w.first; t < w.end; ++t, has_turn = !has_turn) {
      // A consumer arrives at queries_empty when its last products of the query tile are done. Its last tile is one of
      // the last two
      const bool is_last = t + 2 >= w.end;
      if (!has_turn) {
        pipe.skip_tile();
        if (is_last && t == w.first && t + 1 == w.end) {
          // The query tile has one tile, which the other consumer computes. This consumer arrives without products.
          // `__syncwarp`: first, all lanes have ended their wait for queries_full. Otherwise the next query tile could
          // complete another phase of queries_full, and a lane that still waits would wait forever
          __syncwarp();
          if (lane.lane == 0) barrier_arrive(s.queries_empty);
        }
        continue;
      }
      const int tile = t < tiles ? t : t - tiles;
      float x[64], y[TEACHER_SLICES ? 64 : 1];
      named_barrier_sync(ping_pong + lane.consumer, ping_pong_threads);
      const int first_stage = pipe.stage;
#if IN_REGISTERS
      if (last_tile_stage >= 0) epilogue.multiply_by_keys(shared_address(s.k[last_tile_stage]));
#endif
      if constexpr (TEACHER_SLICES) issue_both_products(x, y, s, rows, pipe, lane);
      else issue_products(x, s, rows, pipe, lane);
      // The turn passes to the other consumer, whose products run after these
      named_barrier_arrive(ping_pong + (lane.consumer ^ 1), ping_pong_threads);
      // This consumer has read the column values of its last tile before `publish` overwrites them: all its warpgroups
      // that share these values have met at its ping-pong barrier after they read them
      epilogue.publish(tile);
      warpgroup_wait<0>();
      if (!IN_REGISTERS) release_stage(s, pipe.stage == 0 ? STAGES - 1 : pipe.stage - 1, lane);
      else if (last_tile_stage >= 0) release_tile_stages(s, last_tile_stage, lane);
      last_tile_stage = first_stage;
      if (is_last && lane.lane == 0) barrier_arrive(s.queries_empty);
      fence_accumulators(x);
      if (TEACHER_SLICES) fence_accumulators(y);
      // The writes of `publish` come before the reads of `tile`
      if (Epilogue::PUBLISHES || HAS_COLUMN_VALUES) lane.sync_consumer();
      if constexpr (TEACHER_SLICES) epilogue.tile(x, y, tile);
      else epilogue.tile(x, tile);
      if (Epilogue::SUMS) lane.sync_warpgroup();  // all warps' sums are written before end_tile reads them
      epilogue.end_tile(tile);
    }
#if IN_REGISTERS
    if (last_tile_stage >= 0) {  // the last tile of the query tile
      epilogue.multiply_by_keys(shared_address(s.k[last_tile_stage]));
      warpgroup_wait<0>();
      release_tile_stages(s, last_tile_stage, lane);
      last_tile_stage = -1;
    }
#endif
    epilogue.end_query_tile(w);
    ++query_tiles;
  }
}
#endif

// --- the kernel ------------------------------------------------------------------------------------------------------

// The dynamic shared memory of the launch.
template <class Epilogue>
__device__ __forceinline__ SweepShared<Epilogue>& sweep_shared() {
  static_assert(sizeof(SweepShared<Epilogue>) <= SHARED, "a launch gives less shared memory");
  extern __shared__ __align__(1024) char memory[];
  return *(SweepShared<Epilogue>*)memory;
}

// The rest of a kernel that has made its epilogue. `q` and `k` are the tensor maps of queries and keys, and `segments`
// the number of segments of a query tile's keys. `visited_tiles` tells which query tiles the sweep visits
// (`is_visited`); null: all.
template <class Epilogue>
__device__ __forceinline__ void sweep(SweepShared<Epilogue>& s, const TensorMap& q,
                                      const TensorMap& k, const Block& b, int segments,
                                      Epilogue& epilogue, const Lane& lane,
                                      const int* visited_tiles = nullptr,
                                      TeacherMaps teacher = {}) {
  if (visited_tiles) {  // most thread blocks have no query tile to visit, and end at once
    const int items = (int)b.row_tiles * segments, step = gridDim.x / CLUSTER_BLOCKS;
    bool any = false;
    for (int item = blockIdx.x / CLUSTER_BLOCKS + threadIdx.x * step; item < items;
         item += SWEEP_THREADS * step)
      any |= is_visited(visited_tiles, b, item / segments);
    if (!__syncthreads_or(any)) return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(s.full[i], 1);
      barrier_init(s.empty[i], READERS);
    }
    barrier_init(s.queries_full, 1);
    barrier_init(s.queries_empty, 4 * WARPGROUPS);
    fence_barrier_init();
  }
  // The mbarriers have their initial values before any thread, or TMA, uses them
  if (CLUSTER_BLOCKS > 1) cluster_sync();
  else __syncthreads();
  // Registers of a thread: consumers take those that the producer's warpgroup gives up. The sum over all warpgroups
  // stays what the launch gives: 2 x 232 + 40 = 3 x 168, or 4 x 112 + 32 = 5 x 96
  if (lane.warpgroup < WARPGROUPS) {
    warpgroup_reg_alloc<CONSUMER_WARPGROUPS == 1 ? 232 : 112>();
    consume(s, b, segments, epilogue, lane, visited_tiles);
    if constexpr (Epilogue::SUMS) epilogue.end();
  } else {
    warpgroup_reg_dealloc<CONSUMER_WARPGROUPS == 1 ? 40 : 32>();
    if (lane.thread == 0) produce(s, q, k, b, segments, visited_tiles, teacher);
  }
  if (CLUSTER_BLOCKS > 1) cluster_sync();  // no block ends while another may arrive at its barriers
}
