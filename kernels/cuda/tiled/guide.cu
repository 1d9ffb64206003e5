// Marks the pairs of a block that a guide leaves out. A pair has a mark for its row (row_marks) if the product of its
// guide's features is above the limit of its row (block/guide_rows.cu), and a mark for its column (column_marks) if the
// product is above the limit of its column. On Hopper, sm90/sweep_guide.cu does this.
//
// The queries and keys of this launch are the guide's features, and LIMITS is 1, or 2 if columns have a softmax. The
// kernels of the loss read the marks as an option of pairs (GuideMarks in block/options.cuh). The first pass
// makes all marks if the workspace has room for them: of `mark_rows` rows. Otherwise it has the marks of one block, and
// the caller launches this kernel before each block of each pass. The marks are equal in all passes, because this
// kernel adds up a product in one fixed order.
#include "tiled/tile.cuh"

#if WARP_N == 64
typedef unsigned short MarksOfLane;  // the marks of a lane in one row: a bit for each of LANE_N columns
#else
typedef unsigned char MarksOfLane;
#endif
static_assert(LANE_N == 8 * sizeof(MarksOfLane), "a lane has whole bytes of a word");
static_assert(MARKED_COLUMNS % BLOCK_N == 0, "a tile lies in one group of marked columns");

extern "C" __global__ void __launch_bounds__(TILED_THREADS, MIN_BLOCKS)
guide(const __grid_constant__ Block block, u32* row_marks, u32* column_marks, i64 mark_rows) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TileShared shared;
  const Position p;
  Pipeline pipeline(block, stages);
  for (Tile tile = find_tile(block, blockIdx.x); tile.exists; tile = next_tile(block, tile)) {
    prepare(shared, block, tile);
    Products x;
    tile_product(x, pipeline, p);
    apply_norm_factors(x, shared, p);
    const i64 first = tile.column + p.warp_n * WARP_N;  // first column of this warp
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      u32 row_bits = 0, column_bits = 0;  // marks for the row and for the columns; bit j belongs to x[i][j]
#pragma unroll
      for (int j = 0; j < LANE_N; ++j) {
        const auto pair = shared.pair(p.row(i), p.column(j));
        row_bits |= (u32)(x[i][j] > pair.rows.row_limits[pair.row]) << j;
#if LIMITS == 2
        column_bits |= (u32)(x[i][j] > pair.columns.column_limits[pair.column]) << j;
#endif
      }
      const i64 row = tile.row + p.row(i);
      if (row >= block.q.rows) continue;
      // A word (mark_word) has 32 / LANE_N pieces of LANE_N bits. Each warp in a row of warps writes one piece
      const i64 word = mark_word(mark_rows, row, first + 2 * p.t);
      const i64 piece = word * (32 / LANE_N) + first % MARKED_COLUMNS / WARP_N;
      ((MarksOfLane*)row_marks)[piece] = (MarksOfLane)row_bits;
      if (LIMITS == 2) ((MarksOfLane*)column_marks)[piece] = (MarksOfLane)column_bits;
    }
  }
}
