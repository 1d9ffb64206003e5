// Sweeps whose rows of Q do not stay in shared memory: a stage holds a K-slice of rows and one of keys.
// Included by sweep.cuh. A consumer is one warpgroup, and consumers do not ping-pong. Each has its 64
// rows of every tile; as they drift apart, one has its epilogue, or adds, while the other multiplies.
//
// WIDE (rows of more than 1024 bytes): a block multiplies 128 rows with 256 keys, since shared memory
// delivers 128 bytes a clock: a product of 128 x 128 reads more than that. A cluster of two blocks shares
// the keys: each fetches half of them, for both. Its query tile is 256 rows, so that tiles of the
// cluster are square. With BF16X3 the products of parts come one after another, small ones first, each
// with its own K-slices of rows and keys.
//
// FP16X3: sums are taken in two levels, because tensor cores truncate when they add. The first level is
// half a K-slice, with the products of small parts first; the second level adds K-slices.
#pragma once

#if WIDE
// x = products of this warpgroup's 64 rows with a key tile.
template <class Epilogue>
__device__ __forceinline__ void streamed_products(float (&x)[TILES][64], SweepShared<Epilogue>& s,
                                                  PipelineState& pipe, const Lane& lane) {
  u32 before = 0;
#pragma unroll 1
  for (int i = 0; i < TILE_STAGES; ++i) {
    const u32 rows = shared_descriptor(shared_address(s.k[pipe.stage]) + lane.strip() * 64 * K_SLICE);
    const u32 keys = shared_descriptor(shared_address(s.k[pipe.stage]) + STAGE_ROWS_BYTES);
    barrier_wait(s.full[pipe.stage], pipe.phase);  // its TMA writes come before the reads of wgmma
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < K_SLICE_STEPS; ++step) {
#if IS_FLOAT16
      wgmma_fp16(x[0], x[1], rows + 2 * step, keys + 2 * step, i > 0 || step > 0);
#else
      wgmma_bf16(x[0], x[1], rows + 2 * step, keys + 2 * step, i > 0 || step > 0);
#endif
    }
    commit_k_slice(s, i, before, pipe, lane);
  }
  warpgroup_wait<0>();
  release_stage(s, before, lane);
#pragma unroll
  for (int i = 0; i < TILES; ++i) fence_accumulators(x[i]);
}
#else
// x = products of this warpgroup's 64 rows with a key tile, added up K-slice by K-slice.
template <class Epilogue>
__device__ __forceinline__ void streamed_products(float (&products)[TILES][64], SweepShared<Epilogue>& s,
                                                  PipelineState& pipe, const Lane& lane) {
  float(&x)[64] = products[0];
  static_assert(STAGES % PARTS == 0, "parts of the same features are adjacent");
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] = 0;
#pragma unroll 1
  for (int slice = 0; slice < FEATURE_SLICES; ++slice) {
    const u32 first = pipe.stage;
    const u32 keys = shared_descriptor(shared_address(s.k[first]) + STAGE_ROWS_BYTES);
    const u32 rows = shared_descriptor(shared_address(s.k[first]) + lane.strip() * 64 * K_SLICE);
    const int part = STAGE_BYTES / 16;  // from a small part to its large part, in the 16 bytes of descriptors
    // The TMA writes to both stages come before the reads of wgmma
    for (int p = 0; p < PARTS; ++p, pipe.next()) barrier_wait(s.full[pipe.stage], pipe.phase);
    // The relative truncation bias grows with the length of a sum, and with how much its terms have
    // one sign: products of large parts are summed half a K-slice at a time
    float y[64], z[64];
    warpgroup_arrive();
    multiply_k_slice(y, rows, keys + part, true);
    multiply_k_slice(y, rows + part, keys, false);
    warpgroup_commit();
    multiply_k_slice<0, K_SLICE_STEPS / 2>(y, rows + part, keys + part, false);
    multiply_k_slice<K_SLICE_STEPS / 2>(z, rows + part, keys + part, true);
    warpgroup_commit();
    warpgroup_wait<1>();
    release_stage(s, first, lane);
    warpgroup_wait<0>();
    release_stage(s, first + 1, lane);
    fence_accumulators(y);
    fence_accumulators(z);
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] += y[i] + z[i];
  }
}
#endif

template <class Epilogue>
__device__ __forceinline__ void consume(SweepShared<Epilogue>& s, const Block& b, int segments,
                                        Epilogue& epilogue, const Lane& lane, const int* visited_tiles) {
  const int tiles = (int)b.column_tiles, items = (int)b.row_tiles * segments;
  PipelineState pipe;
  for (int item = blockIdx.x / BLOCKS; item < items; item += gridDim.x / BLOCKS) {
    const Work w = get_work(b, segments, item, visited_tiles);
    if (visited_tiles && !is_visited(visited_tiles, b, w.query_tile)) continue;
    epilogue.begin_query_tile(w);
    for (int t = w.first; t < w.last; ++t) {
      const int first = (t < tiles ? t : t - tiles) * TILES;
      float x[TILES][64];
      streamed_products(x, s, pipe, lane);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const int tile = first + i;
        if (TILES > 1 && (i64)tile * TILE_COLUMNS >= b.k.rows) break;  // a key tile's last half may be outside
        lane.sync_warpgroup();  // the reads of the last tile's columns come before the writes of publish
        epilogue.publish(tile);
        lane.sync_warpgroup();  // the writes of publish come before the reads of tile
        epilogue.tile(x[i], tile);
        if (Epilogue::SUMS) lane.sync_warpgroup();  // all warps' sums are written before end_tile reads them
        epilogue.end_tile(tile);
      }
    }
    epilogue.end_query_tile(w);
  }
}
