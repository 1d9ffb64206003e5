// Distillation as a sweep (sweep/sweep.cuh, TEACHER_SLICES): the gradient block P and the sums of losses that
// tiled/distill.cu computes, from the same factors, at the speed of the tensor cores. The log-sum-exps of student and
// teacher are known (sweep_lse.cu). block/distill.cuh has the equations, and the terms of a pair.
#include "block/distill.cuh"
#include "sm90/sweep/logits.cuh"
#include "sm90/sweep/strip.cuh"

// The numbers of one model, student or teacher, for the columns of a tile, in shared memory. v_j, v_j times the weight
// of the column's loss, and the reference exponents are in the order of `find_slice_position`.
struct ModelColumns {
  Columns columns;
  alignas(16) float v[COLUMNS ? TILE_COLUMNS : 4], weight[COLUMNS ? TILE_COLUMNS : 4],
      reference[COLUMNS ? TILE_COLUMNS : 4];

  __device__ __forceinline__ void publish(const Block& b, const Factors& f, const float* column_weight, int t,
                                          const Lane& lane) {
    columns.publish(b, t, lane);
    if (!COLUMNS) return;
    const i64 column = (i64)t * TILE_COLUMNS + lane.thread;
    const int position = find_slice_position(lane.thread);
    const bool inside = column < b.k.rows;
    v[position] = inside ? f.v[column] : 0;
    weight[position] = inside ? f.v[column] * column_weight[column] : 0;
    reference[position] = inside ? f.column_reference[column] : 0;
  }
};

// The numbers of one model for this thread's two rows, in registers.
struct ModelRows {
  Rows rows;
  RowFactors factors[2];

  __device__ __forceinline__ void load(const Block& b, const Factors& f, const float* row_weight, int query_tile,
                                       const Lane& lane) {
    rows.load(b, query_tile, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(query_tile, h);
      factors[h] = {};
      if (row < b.q.rows)
        factors[h] = {f.row_reference[row], f.a[row], COLUMNS ? f.u[row] : 0, f.a[row] * row_weight[row]};
    }
  }
};

// The numbers of one model for this thread's four columns of slice `s`, in registers. The compiler loads only those
// that are used.
struct ModelSlice {
  ColumnFactors factors[4];
  __device__ __forceinline__ ModelSlice(const ModelColumns& columns, int s, const Lane& lane) : factors{} {
    if (!COLUMNS) return;
    const int first = 16 * s + 4 * lane.t;
    const float4 v = *(const float4*)(columns.v + first), weight = *(const float4*)(columns.weight + first),
                 reference = *(const float4*)(columns.reference + first);
    factors[0] = {reference.x, v.x, weight.x};
    factors[1] = {reference.y, v.y, weight.y};
    factors[2] = {reference.z, v.z, weight.z};
    factors[3] = {reference.w, v.w, weight.w};
  }
};

struct Distillation {
  static constexpr bool SUMS = COLUMNS, PUBLISHES = COLUMNS;
  struct ConsumerShared {
    ModelColumns student, teacher;
  };
  struct WarpgroupShared {
    GradientStrip::Shared strips;
    float2 column_sums[COLUMNS ? 4 : 1][TILE_COLUMNS];  // (target, excess) of each column over the strip of each warp
  };

  const Block &b, &teacher;  // the logits of the student and of the teacher
  const Lane& lane;
  ConsumerShared& consumer;
  WarpgroupShared& group;
  const Factors &factors, &teacher_factors;
  const float *row_weight, *column_weight;  // [rows], [columns]: weights of the losses
  float2 *row_sums, *column_sums;           // see the kernel
  GradientStrip out;                        // writes to the gradient block
  float c, teacher_c;                       // scale log2 e
  bool one_exponential;                     // whether one exponential serves row and column, for both models

  Work work;  // the query tile
  ModelRows student_rows, teacher_rows;
  // Sums of this thread's two rows over its columns of the query tile so far (DistillSums in block/distill.cuh)
  double target[2], excess[2];

  __device__ __forceinline__ void begin_query_tile(const Work& w) {
    work = w;
    student_rows.load(b, factors, row_weight, w.query_tile, lane);
    teacher_rows.load(teacher, teacher_factors, row_weight, w.query_tile, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) target[h] = excess[h] = 0;
  }

  __device__ __forceinline__ void publish(int t) {
    consumer.student.publish(b, factors, column_weight, t, lane);
    consumer.teacher.publish(teacher, teacher_factors, column_weight, t, lane);
  }

  // x has the products of the student, y the products of the teacher.
  __device__ __forceinline__ void tile(float (&x)[64], float (&y)[64], int t) {
    apply_norm_factors(x, student_rows.rows, consumer.student.columns, lane);
    apply_norm_factors(y, teacher_rows.rows, consumer.teacher.columns, lane);
    if (t * TILE_COLUMNS + TILE_COLUMNS > student_rows.rows.unpadded_columns) {
      fill_padding(x, outside_product(c), t);
      fill_padding(y, outside_product(teacher_c), t);
    }
    if (one_exponential) differentiate<true>(x, y, t);
    else differentiate<false>(x, y, t);
  }

  // Products of padding, outside of the matrix, become `instead`.
  __device__ __forceinline__ void fill_padding(float (&x)[64], float instead, int t) const {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (lane.get_row(work.query_tile, i / 2 % 2) >= b.q.rows ||
          (i64)t * TILE_COLUMNS + get_column(i, lane) >= b.k.rows)
        x[i] = instead;
  }

  // x <- P, from the products x of the student and y of the teacher; P is stored. Adds up rows in `target` and
  // `excess`, and columns over the warp's strip in shared memory. ONE: one exponential serves row and column.
  template <bool ONE>
  __device__ __forceinline__ void differentiate(float (&x)[64], const float (&y)[64], int t) {
    const int strip_row = work.query_tile * QUERY_TILE_ROWS + lane.row() - lane.g;  // the first row of the warp's strip
    DistillSums tile_row_sums[2] = {};
#pragma unroll
    for (int s = 0; s < TILE_SLICES; s += 2) {  // two slices: 32 columns, one for each lane (write_column_sums)
      DistillSums tile_column_sums[8] = {};     // of this thread's eight columns, over its two rows
#pragma unroll
      for (int slice = s; slice < s + 2; ++slice) {
        const ModelSlice student_columns(consumer.student, slice, lane);
        const ModelSlice teacher_columns(consumer.teacher, slice, lane);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          // Row h, and the number of the column among this thread's four of the slice
          const int i = 8 * slice + k, h = k / 2 % 2, number = k / 4 * 2 + k % 2;
          const RowFactors &student_row = student_rows.factors[h], &teacher_row = teacher_rows.factors[h];
          const ColumnFactors& student_column = student_columns.factors[number];
          const ColumnFactors& teacher_column = teacher_columns.factors[number];
          const Exponentials student_terms = exponentials<ONE>(x[i], c, student_row, student_column);
          const Exponentials teacher_terms = exponentials<ONE>(y[i], teacher_c, teacher_row, teacher_column);
          tile_row_sums[h].add(student_terms.in_row, student_row.a, teacher_terms.in_row, teacher_row.a,
                               student_terms.row_exponent);
          if (COLUMNS)
            tile_column_sums[4 * (slice - s) + number].add(student_terms.in_column, student_column.v,
                                                           teacher_terms.in_column, teacher_column.v,
                                                           student_terms.column_exponent);
          float p = student_terms.gradient - teacher_terms.gradient;
#if NORM_FACTORS
          p *= student_rows.rows.factor[h] * consumer.student.columns.factor[get_column(i, lane)];
#endif
          x[i] = p;
        }
        if (GRADIENT) out.store(x, slice, strip_row, t * TILE_COLUMNS, b, lane);
      }
      if (COLUMNS) write_column_sums(tile_column_sums, s / 2);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      target[h] += tile_row_sums[h].target;
      if (MOMENTS) excess[h] += tile_row_sums[h].excess;
    }
  }

  // Adds up 32 columns over the warp's strip, and writes the sums to shared memory. Lane 4 g + t has columns
  // 8 (k / 2) + 2 t + k % 2 for k = 0 .. 7, and writes the column of k = g.
  __device__ __forceinline__ void write_column_sums(const DistillSums (&sums)[8], int group_of_32) {
    float targets[8], excesses[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) targets[k] = sums[k].target, excesses[k] = sums[k].excess;
    const float target = join_columns(targets, lane.lane, Plus());
    const float excess = MOMENTS ? join_columns(excesses, lane.lane, Plus()) : 0;
    const int column = 32 * group_of_32 + lane.g / 2 * 8 + 2 * lane.t + lane.g % 2;
    group.column_sums[lane.warp][column] = make_float2(target, excess);
  }

  // Adds up the tile's columns over the four strips, one column for each thread of the consumer's only warpgroup.
  __device__ __forceinline__ void end_tile(int t) {
    const i64 column = (i64)t * TILE_COLUMNS + lane.thread;
    if (!COLUMNS || column >= b.k.rows) return;
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 strip = group.column_sums[w][lane.thread];
      sums = make_float2(sums.x + strip.x, sums.y + strip.y);
    }
    sums.x *= consumer.teacher.v[find_slice_position(lane.thread)];
    column_sums[work.query_tile * b.k.rows + column] = sums;
  }

  // Adds up the rows over the four threads of each row, and leaves the sums in memory.
  __device__ __forceinline__ void end_query_tile(const Work& w) {
    if (GRADIENT) out.end(lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (MOMENTS) add_over_lanes(target[h], excess[h]);
      else add_over_lanes(target[h]);
      const i64 row = lane.get_row(w.query_tile, h), slot = ROW_SLOTS * w.segment + lane.slot();
      if (lane.t == 0 && row < b.q.rows)
        row_sums[slot * b.q.rows + row] =
            make_float2((float)target[h] * teacher_rows.factors[h].a, (float)excess[h]);
    }
  }
  __device__ __forceinline__ void end() {}
};

// q, k and teacher_q, teacher_k are the tensor maps of the features; `block` and `teacher` have the scales and norm
// factors. `row_sums` [ROW_SLOTS segments, rows] and `column_sums` [query tiles, columns] get (target, excess) of
// block/distill.cuh; excess is 0 without MOMENTS.
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)
sweep_distill(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
              const __grid_constant__ TensorMap teacher_q, const __grid_constant__ TensorMap teacher_k,
              const __grid_constant__ Block block, const __grid_constant__ Block teacher, i64 segments,
              const __grid_constant__ Factors factors, const __grid_constant__ Factors teacher_factors,
              const float* row_weight, const float* column_weight, float2* row_sums, float2* column_sums,
              const __grid_constant__ GradientBlock gradient_block, const __grid_constant__ TensorMap gradient_map) {
  SweepShared<Distillation>& shared = sweep_shared<Distillation>();
  const Lane lane;
  Distillation::WarpgroupShared& group = shared.group[lane.warpgroup % WARPGROUPS];
  Distillation epilogue{block, teacher, lane, shared.consumer[lane.consumer & 1], group, factors, teacher_factors,
                        row_weight, column_weight, row_sums, column_sums,
                        GradientStrip(gradient_map, gradient_block, group.strips, lane),
                        (float)(block.scale.get() * LOG2_E), (float)(teacher.scale.get() * LOG2_E),
                        !COLUMNS || (*factors.one_exponential && *teacher_factors.one_exponential)};
  sweep(shared, q, k, block, (int)segments, epilogue, lane, nullptr, {&teacher_q, &teacher_k});
}
