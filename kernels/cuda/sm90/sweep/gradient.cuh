// dL/dx of a sweep's tiles (sweep/sweep.cuh). With the reference exponents r of rows and columns, and the factors a, u
// and v of struct Factors:
//     dL/dx_ij = a_i 2^(c x_ij - r_i) + v_j 2^(c x_ij - r_j), or, if one exponential serves both sides,
//     dL/dx_ij = 2^(c x_ij - r_i) (a_i + u_i v_j).
// FACTORS is something else: with it, dL/dx_ij is also multiplied by the norm factors of row i and column j.
#pragma once
#include "sm90/sweep/logits.cuh"

// Numbers of options take the place of columns' reference exponents in shared memory. The reference exponents
// are then read from global memory, if one exponential does not serve both sides.
constexpr bool KEEPS_REFERENCES = COLUMNS && !Options::SPLITS && !Options::SHIFTS;

struct LogitGradient {
  static constexpr bool SUMS = false, PUBLISHES = COLUMNS;
  struct ConsumerShared {
    Columns columns;
    // The columns of a thread's slice are adjacent
    alignas(16) float v[COLUMNS ? TILE_COLUMNS : 4], reference[KEEPS_REFERENCES ? TILE_COLUMNS : 4];
  };
  const Block& b;
  const Lane& lane;
  ConsumerShared& consumer;
  const Factors& factors;
  float c;
  bool one_exponential;

  Work work;
  Rows rows;
  float reference[2], a[2], u[2];

  __device__ __forceinline__ void begin_query_tile(const Work& w) {
    work = w;
    rows.load(b, w.query_tile, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = lane.get_row(w.query_tile, h);
      const bool inside = row < b.q.rows;
      reference[h] = inside ? factors.row_reference[row] : 0;
      a[h] = inside ? factors.a[row] : 0;
      u[h] = COLUMNS && inside ? factors.u[row] : 0;
    }
  }

  __device__ __forceinline__ void publish(int t) {
    consumer.columns.publish(b, t, lane);
    rows.load_marks(b, work.query_tile, t, lane);
    if (!COLUMNS) return;
    const int to = in_slices(lane.thread);
    const i64 at = (i64)t * TILE_COLUMNS + lane.thread;
    const bool inside = at < b.k.rows;
    if (lane.half == 0) consumer.v[to] = inside ? factors.v[at] : 0;
    if (KEEPS_REFERENCES && lane.half == HALVES - 1 && !one_exponential)
      consumer.reference[to] = inside ? factors.column_reference[at] : 0;
  }

  // This thread's four columns of a slice.
  __device__ __forceinline__ float4 load_slice(const float* numbers, int s) const {
    if (!COLUMNS || s < 0) return make_float4(0, 0, 0, 0);
    return *(const float4*)(numbers + 16 * s + 4 * lane.t);
  }

  // The reference exponents of these columns, in tile t.
  __device__ __forceinline__ float4 references(int t, int s) const {
    if (KEEPS_REFERENCES) return load_slice(consumer.reference, s);
    const i64 first = (i64)t * TILE_COLUMNS + 16 * s + 2 * lane.t;
    const auto get_reference = [&](i64 at) { return COLUMNS && at < b.k.rows ? factors.column_reference[at] : 0; };
    return make_float4(get_reference(first), get_reference(first + 1), get_reference(first + 8),
                       get_reference(first + 9));
  }

  // x <- P in slice s, from v and the reference exponents of this thread's four columns. ONE: one exponential serves
  // row and column, and `slice_references` is not read.
  template <bool ONE>
  __device__ __forceinline__ void values(float (&x)[64], int s, const float4& slice_v, const SliceColumns& columns,
                                         const float4& slice_references) {
#pragma unroll
    for (int j = 2 * s; j < 2 * s + 2; ++j) {
      const float2 v = j % 2 ? make_float2(slice_v.z, slice_v.w) : make_float2(slice_v.x, slice_v.y);
      const float2 own = j % 2 ? make_float2(slice_references.z, slice_references.w)
                               : make_float2(slice_references.x, slice_references.y);
      float2 f = make_float2(1, 1);
#if FACTORS
      f = *(const float2*)&consumer.columns.factor[8 * j + 2 * lane.t];
#endif
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 4 * j + 2 * h;
        float &x0 = x[i], &x1 = x[i + 1];
        const auto pair0 = get_pair(i, rows, columns), pair1 = get_pair(i + 1, rows, columns);
        const float y0 = Options::exponent(x0, pair0), y1 = Options::exponent(x1, pair1);
        const float e0 = exp2_(finite(fmaf(y0, c, -reference[h]))), e1 = exp2_(finite(fmaf(y1, c, -reference[h])));
        const float a0 = Options::in_row(x0, pair0) ? a[h] : 0, a1 = Options::in_row(x1, pair1) ? a[h] : 0;
        const float v0 = Options::in_column(x0, pair0) ? v.x : 0, v1 = Options::in_column(x1, pair1) ? v.y : 0;
        if (!COLUMNS) {
          x0 = e0 * a[h];
          x1 = e1 * a[h];
        } else if (ONE) {
          x0 = e0 * fmaf(u[h], v0, a0);
          x1 = e1 * fmaf(u[h], v1, a1);
        } else {
          x0 = fmaf(e0, a0, exp2_(finite(fmaf(y0, c, -own.x))) * v0);
          x1 = fmaf(e1, a1, exp2_(finite(fmaf(y1, c, -own.y))) * v1);
        }
        if (FACTORS) {
          x0 *= factor(h) * f.x;
          x1 *= factor(h) * f.y;
        }
      }
    }
  }
  // The exponential of a pair that a softmax does not have is multiplied by 0, so it has to be finite. NaN stays.
  __device__ __forceinline__ static float finite(float exponent) {
    return Options::SPLITS ? min_or_nan(exponent, 126.0f) : exponent;
  }
  __device__ __forceinline__ float factor(int h) const {
#if FACTORS
    return rows.factor[h];
#else
    return 1;
#endif
  }
};
