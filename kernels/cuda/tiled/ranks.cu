// Retrieval ranks (`metrics`): how many negatives of a row, and with COLUMNS of a column, have a larger product than
// its positive. A launch adds the counts of its block to row_rank and column_rank.
//
// The threshold of a row is the product of its positive, from the log-sum-exp pass. A key that equals the positive:
//   - If a portable kernel ran the log-sum-exp pass, the key's product has the bits of the threshold, and is not
//     counted (PRECISION FP64: the last bit may differ).
//   - If a sweep ran that pass, bits may differ, and the key may be counted.
// Counts are integers, so atomic additions give the same result in any order.
#include "tiled/tile.cuh"

extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
ranks(const __grid_constant__ Block block, const Real* row_threshold, const Real* column_threshold,
      u64* row_rank, u64* column_rank) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TileShared shared;
  const Position p;
  Pipeline pipeline(block, stages);
  for (Tile tile = find_tile(block, blockIdx.x); tile.exists; tile = next_tile(block, tile)) {
    prepare(shared, block, tile);
    Products x;
    tile_product(x, pipeline, p);
    apply_norm_factors(x, shared, p);
    set_aside_positives(x, shared, block, tile, p, LOW, [](i64, Real) {});
    exclude_pairs(x, shared, block, tile, p);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const i64 row = tile.row + p.row(i);
      const Real threshold = row < block.q.rows ? row_threshold[row] : 0;
      int count = 0;
#pragma unroll
      for (int j = 0; j < LANE_N; ++j) count += x[i][j] > threshold;
      count += __shfl_xor_sync(ALL_LANES, count, 1);
      count += __shfl_xor_sync(ALL_LANES, count, 2);
      if (p.t == 0 && count) atomicAdd(row_rank + row, (u64)count);
    }
    if (!COLUMNS) continue;
#pragma unroll
    for (int j = 0; j < LANE_N; ++j) {
      const i64 column = tile.column + p.column(j);
      const Real threshold = column < block.k.rows ? column_threshold[column] : 0;
      int count = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) count += x[i][j] > threshold;
      count += __shfl_xor_sync(ALL_LANES, count, 4);
      count += __shfl_xor_sync(ALL_LANES, count, 8);
      count += __shfl_xor_sync(ALL_LANES, count, 16);
      if (p.g == 0 && count) atomicAdd(column_rank + column, (u64)count);
    }
  }
}
