// The gradient P = dL/dx of a sweep's tiles, divided by the gradient divisor. The epilogues of sweep_gradient.cu and
// sweep_narrow.cu store P, or multiply P by keys. With the reference exponents R of rows and C of columns (their
// log-sum-exps in base 2, rounded), and the factors a, u and v of struct Factors (tiled/gradient.cu has the equations):
//     P_ij = a_i 2^(c x_ij - R_i) + v_j 2^(c x_ij - C_j), or
//     P_ij = 2^(c x_ij - R_i) (a_i + u_i v_j)     if one exponential serves both sides (`one_exponential`).
// Without COLUMNS, only the term with a_i is left. The option NORM_FACTORS has nothing to do with a, u and v: with it,
// P_ij is also multiplied by the norm factors of row i and column j.
#pragma once
#include "sm90/sweep/logits.cuh"

// Whether shared memory has the reference exponents of a tile's columns. If options SPLIT or SHIFT, the options' values
// need this memory, and `load_references` reads global memory. It is called only if one exponential does not serve both
// directions.
constexpr bool KEEPS_REFERENCES = COLUMNS && !Options::SPLITS && !Options::SHIFTS;

struct LogitGradient {
  static constexpr bool SUMS = false, PUBLISHES = COLUMNS;
  struct ConsumerShared {
    Columns columns;
    // Factors v_j and reference exponents C_j of the tile's columns, in the order of `find_slice_position`
    alignas(16) float v[COLUMNS ? TILE_COLUMNS : 4], reference[KEEPS_REFERENCES ? TILE_COLUMNS : 4];
  };
  const Block& b;
  const Lane& lane;
  ConsumerShared& consumer;
  const Factors& factors;
  float c;  // scale log2 e
  bool one_exponential;

  Work work;  // the query tile
  Rows rows;
  float reference[2], a[2], u[2];  // R_i, a_i and u_i of this thread's two rows

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
    const int position = find_slice_position(lane.thread);
    const i64 column = (i64)t * TILE_COLUMNS + lane.thread;
    const bool inside = column < b.k.rows;
    // If the consumer has two warpgroups, one writes v and the other the reference exponents
    if (lane.half == 0) consumer.v[position] = inside ? factors.v[column] : 0;
    if (KEEPS_REFERENCES && lane.half == CONSUMER_WARPGROUPS - 1 && !one_exponential)
      consumer.reference[position] = inside ? factors.column_reference[column] : 0;
  }

  // The numbers of this thread's four columns of slice s, of `numbers` in shared memory.
  __device__ __forceinline__ float4 load_slice(const float* numbers, int s) const {
    if (!COLUMNS || s < 0) return make_float4(0, 0, 0, 0);
    return *(const float4*)(numbers + 16 * s + 4 * lane.t);
  }

  // The reference exponents C_j of this thread's four columns of slice s in tile t.
  __device__ __forceinline__ float4 load_references(int t, int s) const {
    if (KEEPS_REFERENCES) return load_slice(consumer.reference, s);
    const i64 first = (i64)t * TILE_COLUMNS + 16 * s + 2 * lane.t;
    const auto get_reference = [&](i64 column) {
      return COLUMNS && column < b.k.rows ? factors.column_reference[column] : 0;
    };
    return make_float4(get_reference(first), get_reference(first + 1), get_reference(first + 8),
                       get_reference(first + 9));
  }

  // x <- P in slice s, after `prepare`, from the factors v_j and the reference exponents C_j of this thread's four
  // columns. ONE: one exponential serves row and column, and `slice_references` is not read.
  template <bool ONE>
  __device__ __forceinline__ void differentiate(float (&x)[64], int s, const float4& slice_v,
                                                const SliceColumns& columns, const float4& slice_references) {
#pragma unroll
    for (int j = 2 * s; j < 2 * s + 2; ++j) {
      const float2 v = j % 2 ? make_float2(slice_v.z, slice_v.w) : make_float2(slice_v.x, slice_v.y);
      const float2 column_reference = j % 2 ? make_float2(slice_references.z, slice_references.w)
                                            : make_float2(slice_references.x, slice_references.y);
      float2 column_factor = make_float2(1, 1);  // norm factors
#if NORM_FACTORS
      column_factor = *(const float2*)&consumer.columns.factor[8 * j + 2 * lane.t];
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
          x0 = fmaf(e0, a0, exp2_(finite(fmaf(y0, c, -column_reference.x))) * v0);
          x1 = fmaf(e1, a1, exp2_(finite(fmaf(y1, c, -column_reference.y))) * v1);
        }
        if (NORM_FACTORS) {
          x0 *= row_factor(h) * column_factor.x;
          x1 *= row_factor(h) * column_factor.y;
        }
      }
    }
  }
  // With options that SPLIT, the exponential of a pair that a softmax does not have is multiplied by 0, so the
  // exponential has to be finite. NaN stays.
  __device__ __forceinline__ static float finite(float exponent) {
    return Options::SPLITS ? min_or_nan(exponent, 126.0f) : exponent;
  }
  // The norm factor of this thread's row h.
  __device__ __forceinline__ float row_factor(int h) const {
#if NORM_FACTORS
    return rows.factor[h];
#else
    return 1;
#endif
  }
};
