// Sweeps whose queries do not stay in shared memory: a stage holds a K-slice of queries and a K-slice of keys.
// Included by sweep.cuh, whose `produce` fills the stages; this file has the consumers.
//
// A consumer is one warpgroup with 64 rows of the query tile, and multiplies all key tiles. Consumers take no turns.
// They drift apart by up to the STAGES of the ring, so that one runs its epilogue while the other multiplies.
//
// WIDE (rows of more than 1024 bytes): a thread block multiplies 128 rows with 256 keys. Shared memory delivers 128
// bytes a clock, and products of 128 x 128 would read more. A cluster of two thread blocks divides a query tile of 256
// rows and shares its keys: each block fetches half of the keys, for both, so that each key is loaded once for 256
// rows. The query tile has as many rows as a key tile has keys, so that a triangle can be visited. With BF16X3, the
// three products of parts come one after another, with K-slices of their own. Products with a small part come first.
//
// FP16X3: sums are taken in two levels, because tensor cores truncate when they add. The first level adds up half a
// K-slice, products with a small part first. The second level adds these sums by additions that round.
#pragma once

#if WIDE
// x = products of this warpgroup's 64 rows with a key tile, one x[i] for each tile of 128 keys.
template <class Epilogue>
__device__ __forceinline__ void streamed_products(float (&x)[TILES_PER_KEY_TILE][64], SweepShared<Epilogue>& s,
                                                  PipelineState& pipe, const Lane& lane) {
  u32 previous_stage = 0;
#pragma unroll 1
  for (int i = 0; i < TILE_STAGES; ++i) {
    const u32 rows = shared_descriptor(shared_address(s.k[pipe.stage]) + lane.row_group() * 64 * K_SLICE);
    const u32 keys = shared_descriptor(shared_address(s.k[pipe.stage]) + STAGE_ROWS_BYTES);
    barrier_wait(s.full[pipe.stage], pipe.phase);  // the stage's TMA writes come before the reads of wgmma
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < K_SLICE_STEPS; ++step) {
#if IS_FLOAT16
      wgmma_fp16(x[0], x[1], rows + 2 * step, keys + 2 * step, i > 0 || step > 0);
#else
      wgmma_bf16(x[0], x[1], rows + 2 * step, keys + 2 * step, i > 0 || step > 0);
#endif
    }
    commit_k_slice(s, i, previous_stage, pipe, lane);
  }
  warpgroup_wait<0>();
  release_stage(s, previous_stage, lane);
#pragma unroll
  for (int i = 0; i < TILES_PER_KEY_TILE; ++i) fence_accumulators(x[i]);
}
#else
// products[0] = products of this warpgroup's 64 rows with a key tile (FP16X3), added up in two levels.
template <class Epilogue>
__device__ __forceinline__ void streamed_products(float (&products)[TILES_PER_KEY_TILE][64], SweepShared<Epilogue>& s,
                                                  PipelineState& pipe, const Lane& lane) {
  float(&x)[64] = products[0];
  // The small and the large part of the same 64 features are in two adjacent stages, in this order
  static_assert(STAGES % PARTS == 0, "parts of the same features are adjacent");
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] = 0;
#pragma unroll 1
  for (int slice = 0; slice < FEATURE_SLICES; ++slice) {
    const u32 small_stage = pipe.stage;  // a stage has a K-slice of queries, and STAGE_ROWS_BYTES later one of keys
    const u32 small_keys = shared_descriptor(shared_address(s.k[small_stage]) + STAGE_ROWS_BYTES);
    const u32 small_rows = shared_descriptor(shared_address(s.k[small_stage]) + lane.row_group() * 64 * K_SLICE);
    const int to_large = STAGE_BYTES / 16;  // from a small part to its large part, in units of descriptors (16 bytes)
    // The TMA writes to both stages come before the reads of wgmma
    for (int p = 0; p < PARTS; ++p, pipe.next()) barrier_wait(s.full[pipe.stage], pipe.phase);
    // A long sum has a larger relative truncation bias than a short one, above all if most terms have one sign. So
    // products of large parts are summed half a K-slice at a time
    float first_half[64], second_half[64];
    warpgroup_arrive();
    multiply_k_slice(first_half, small_rows, small_keys + to_large, true);
    multiply_k_slice(first_half, small_rows + to_large, small_keys, false);
    warpgroup_commit();
    multiply_k_slice<0, K_SLICE_STEPS / 2>(first_half, small_rows + to_large, small_keys + to_large, false);
    multiply_k_slice<K_SLICE_STEPS / 2>(second_half, small_rows + to_large, small_keys + to_large, true);
    warpgroup_commit();
    warpgroup_wait<1>();  // products with a small part are done
    release_stage(s, small_stage, lane);
    warpgroup_wait<0>();
    release_stage(s, small_stage + 1, lane);
    fence_accumulators(first_half);
    fence_accumulators(second_half);
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] += first_half[i] + second_half[i];
  }
}
#endif

// The query tiles and key tiles of this thread block, by one consumer warpgroup.
template <class Epilogue>
__device__ __forceinline__ void consume(SweepShared<Epilogue>& s, const Block& b, int segments,
                                        Epilogue& epilogue, const Lane& lane, const int* visited_tiles) {
  const int tiles = (int)b.column_tiles, items = (int)b.row_tiles * segments;
  PipelineState pipe;
  for (int item = blockIdx.x / CLUSTER_BLOCKS; item < items; item += gridDim.x / CLUSTER_BLOCKS) {
    const Work w = get_work(b, segments, item, visited_tiles);
    if (visited_tiles && !is_visited(visited_tiles, b, w.query_tile)) continue;
    epilogue.begin_query_tile(w);
    for (int t = w.first; t < w.end; ++t) {
      const int first_tile = (t < tiles ? t : t - tiles) * TILES_PER_KEY_TILE;
      float x[TILES_PER_KEY_TILE][64];
      streamed_products(x, s, pipe, lane);
#pragma unroll
      for (int i = 0; i < TILES_PER_KEY_TILE; ++i) {
        const int tile = first_tile + i;
        if (TILES_PER_KEY_TILE > 1 && (i64)tile * TILE_COLUMNS >= b.k.rows) break;  // no keys in the second half
        lane.sync_warpgroup();  // the last tile's column values are read before `publish` overwrites them
        epilogue.publish(tile);
        lane.sync_warpgroup();  // the writes of `publish` come before the reads of `tile`
        epilogue.tile(x[i], tile);
        if (Epilogue::SUMS) lane.sync_warpgroup();  // all warps' sums are written before end_tile reads them
        epilogue.end_tile(tile);
      }
    }
    epilogue.end_query_tile(w);
  }
}
