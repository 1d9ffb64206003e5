// Marks the pairs that a guide leaves out, as tiled/guide.cu does, as a sweep (sweep/sweep.cuh) at the speed of the
// tensor cores. Queries and keys are here the guide's features, and the limits (block/options.cuh) are limits of the
// guide's products. The kernels of the loss read the marks afterwards (`Rows::load_marks`).
//
// A mark is a bit of a word. A thread has 32 columns of a tile in each of its two rows: all bits of one word of each
// row.
#include "sm90/sweep/logits.cuh"

static_assert(TILE_COLUMNS == MARKED_COLUMNS, "a tile is a group of marked columns");

struct Guide {
  static constexpr bool SUMS = false, PUBLISHES = false;
  struct ConsumerShared {
    Columns columns;
  };
  struct WarpgroupShared {};

  const Block& b;
  const Lane& lane;
  ConsumerShared& consumer;
  u32 *row_marks, *column_marks;  // words of the block's pairs (`mark_word`); column_marks only with LIMITS == 2
  i64 mark_rows;                  // rows that have marks

  Work work;
  Rows rows;

  __device__ __forceinline__ void begin_query_tile(const Work& w) {
    work = w;
    rows.load(b, w.query_tile, lane);
  }
  __device__ __forceinline__ void publish(int t) { consumer.columns.publish(b, t, lane); }

  __device__ __forceinline__ void tile(float (&x)[64], int t) {
    apply_norm_factors(x, rows, consumer.columns, lane);
    u32 row_word[2] = {0, 0}, column_word[2] = {0, 0};  // the words of this thread's two rows
#pragma unroll
    for (int s = 0; s < TILE_SLICES; ++s) {
      const SliceColumns columns(consumer.columns, s, lane);
#pragma unroll
      for (int i = 8 * s; i < 8 * s + 8; ++i) {
        const auto pair = get_pair(i, rows, columns);
        const int bit = mark_bit(i / 4 * 8 + i % 2);  // the same for all lanes
        // With LIMITS == 1, columns have no limits, and `excluded` compares with the row's limit
        const bool above_row_limit = LIMITS == 2 ? !Limits::in_row(x[i], pair) : Limits::excluded(x[i], pair);
        row_word[pair.row] |= (u32)above_row_limit << bit;
        column_word[pair.row] |= (u32)!Limits::in_column(x[i], pair) << bit;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(work.query_tile, h);
      if (row >= b.q.rows) continue;
      const i64 word = mark_word(mark_rows, row, (i64)t * TILE_COLUMNS + 2 * lane.t);
      row_marks[word] = row_word[h];
      if (LIMITS == 2) column_marks[word] = column_word[h];
    }
  }
  __device__ __forceinline__ void end_tile(int) {}
  __device__ __forceinline__ void end_query_tile(const Work&) {}
};

// `row_marks` and `column_marks`: see struct Guide. column_marks may be null unless LIMITS is 2.
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
#if WIDE
__cluster_dims__(CLUSTER_BLOCKS, 1, 1)
#endif
sweep_guide(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
            const __grid_constant__ Block block, i64 segments, u32* row_marks, u32* column_marks,
            i64 mark_rows) {
  SweepShared<Guide>& shared = sweep_shared<Guide>();
  const Lane lane;
  Guide guide{block, lane, shared.consumer[lane.consumer & 1], row_marks, column_marks, mark_rows};
  sweep(shared, q, k, block, (int)segments, guide, lane);
}
