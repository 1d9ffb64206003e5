// Work on rows of features: norms, operands, finished gradients. One warp a row, any strides.
//
// Normalisation, u = z / |z|. Features are brought near unit length by a power of two, which is
// exact, s = 2^-e z, and the rest is a factor of the logits: u = f s, f = 2^e / |z| in (1, 2]. So
// 16-bit features are never rounded again. With P_ij f_i f_j in the panels, the products give
// g_i = f_i dU_i, and the gradient with respect to the rows as they came is
//
//     dz = (dU - u <dU, u>) / |z| = 2^-e (g - f^2 s <g, s>),     <dU, u> = <g, s>.
//
// A row of zeros has no direction: it stays zero (f = 0), with zero gradient.
#include "common.cuh"

constexpr int ROWS_THREADS = 256;

__device__ __forceinline__ i64 warp_row() {
  return (blockIdx.x * (i64)ROWS_THREADS + threadIdx.x) / 32;
}

// Half a warp takes a row of up to so many features: twice as many rows are under way.
constexpr int HALF_WARP_ROW = 128;
__device__ __forceinline__ double lanes_sum(double x, int lanes) {
  const u32 these = lanes == 32 ? ALL_LANES : 0xffffu << (threadIdx.x & 16);
  if (lanes == 32) x += __shfl_xor_sync(ALL_LANES, x, 16);
#pragma unroll
  for (int by = 8; by > 0; by /= 2) x += __shfl_xor_sync(these, x, by);
  return x;
}

// 16 bytes of memory, at once or, where rows begin anywhere, in four pieces.
__device__ __forceinline__ uint4 get_16_bytes(const char* from) {
  if ((u64)from % 16 == 0) return *(const uint4*)from;
  const u32* words = (const u32*)from;
  return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void set_16_bytes(char* to, uint4 x) {
  u32* words = (u32*)to;
  if ((u64)to % 16 == 0) *(uint4*)to = x;
  else words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}

// Eight features of a row at once, from `column` on, of which `n` there are; zeros beyond.
constexpr int LANE_FEATURES = 8;
template <class T>
__device__ __forceinline__ void get_group(T (&x)[LANE_FEATURES], const Matrix& z, i64 row, i64 column,
                                          i64 n) {
  const i64 at = row * z.row_stride + column * z.column_stride;
  const int size = z.dtype == DTYPE_FLOAT64 ? 8 : z.dtype == DTYPE_FLOAT32 ? 4 : 2;
  const char* from = z.data + at * size;
  const bool whole = n >= LANE_FEATURES && z.column_stride == 1 && (u64)from % 4 == 0;
  if (whole && size == 2) {
    const uint4 words = get_16_bytes(from);
    const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) {
      const unsigned short half = (unsigned short)(w[i / 2] >> i % 2 * 16);
      x[i] = z.dtype == DTYPE_BFLOAT16 ? from_bf16(half) : from_fp16(half);
    }
  } else if (whole && size == 4) {
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; i += 4) {
      const uint4 four = get_16_bytes(from + i * 4);
      x[i] = __uint_as_float(four.x), x[i + 1] = __uint_as_float(four.y);
      x[i + 2] = __uint_as_float(four.z), x[i + 3] = __uint_as_float(four.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) x[i] = i < n ? (T)z.get(row, column + i) : (T)0;
  }
}
template <class T>
__device__ __forceinline__ void set_group(const T (&x)[LANE_FEATURES], const Matrix& z, i64 row,
                                          i64 column, i64 n) {
  const i64 at = row * z.row_stride + column * z.column_stride;
  const int size = z.dtype == DTYPE_FLOAT64 ? 8 : z.dtype == DTYPE_FLOAT32 ? 4 : 2;
  char* to = z.data + at * size;
  const bool whole = n >= LANE_FEATURES && z.column_stride == 1 && (u64)to % 4 == 0;
  if (whole && size == 2) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = (float)x[2 * i], high = (float)x[2 * i + 1];
      w[i] = z.dtype == DTYPE_BFLOAT16 ? to_bf16x2(low, high) : to_fp16x2(low, high);
    }
    set_16_bytes(to, make_uint4(w[0], w[1], w[2], w[3]));
  } else if (whole && size == 4) {
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; i += 4)
      set_16_bytes(to + i * 4, make_uint4(__float_as_uint((float)x[i]), __float_as_uint((float)x[i + 1]),
                                          __float_as_uint((float)x[i + 2]),
                                          __float_as_uint((float)x[i + 3])));
  } else {
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i)
      if (i < n) z.set(row, column + i, x[i]);
  }
}

extern "C" __global__ void row_norms(const __grid_constant__ Matrix z, i64 n, i64 d, Real* factor,
                                     int* exponent) {
  const i64 row = warp_row();
  if (row >= n) return;
  double sum = 0;
  for (i64 k = threadIdx.x % 32; k < d; k += 32) {
    const double x = z.get(row, k);
    sum += x * x;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32) return;
  int e = 0;
  const bool usable = sum > 0 && sum < INFINITY_;
  const double m = usable ? frexp(sqrt(sum), &e) : 1;
  factor[row] = sum == 0 ? 0 : usable ? (Real)(1 / m) : (Real)NAN_;
  exponent[row] = e;
}

// `any_key_not_finite` becomes NaN if a feature of any of n keys is not finite (all rows that write it
// write the same). out[row] is NaN if a feature of query `row` is not finite, else 0.
extern "C" __global__ void not_finite(const __grid_constant__ Matrix keys, i64 n,
                                      const __grid_constant__ Matrix queries, i64 m, i64 d,
                                      double* out, double* any_key_not_finite) {
  const bool of_query = warp_row() >= n;
  const i64 row = of_query ? warp_row() - n : warp_row();
  if (of_query && row >= m) return;
  const Matrix& z = of_query ? queries : keys;
  float sum = 0;  // 0 x is NaN for an x that is not finite
  for (i64 k = threadIdx.x % 32 * LANE_FEATURES; k < d; k += 32 * LANE_FEATURES) {
    Real x[LANE_FEATURES];
    get_group(x, z, row, k, d - k);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) sum += (float)(x[i] * 0);
  }
  const bool bad = __any_sync(ALL_LANES, sum != 0);
  if (threadIdx.x % 32) return;
  if (of_query) out[row] = bad ? NAN_ : 0;
  else if (bad) *any_key_not_finite = NAN_;
}

// The bits of the largest finite size among n rows' features; `found` starts as 0.
extern "C" __global__ void find_largest(const __grid_constant__ Matrix z, i64 n, i64 d, u32* found) {
  const i64 row = warp_row();
  if (row >= n) return;
  u32 largest = 0;  // sizes are in the order of their bits
  for (i64 k = threadIdx.x % 32 * LANE_FEATURES; k < d; k += 32 * LANE_FEATURES) {
    float x[LANE_FEATURES];
    get_group(x, z, row, k, d - k);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) {
      const u32 size = __float_as_uint(fabsf(x[i]));
      if (size < 0x7f800000) largest = max(largest, size);
    }
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, by));
  if (threadIdx.x % 32 == 0 && largest > *(volatile u32*)found) atomicMax(found, largest);
}

// Powers of two by which features are divided, so that the largest lies in [2^14, 2^15): float16's
// largest number is 65504. shifts[0] is for queries, shifts[1] for keys, and products are multiplied by shifts[2]. The
// arguments come from find_largest; 0: features are taken as they are.
constexpr int FP16_EXPONENT = 14;
extern "C" __global__ void find_shifts(const u32* of_queries, const u32* of_keys, double* shifts) {
  const u32 largest[2] = {*of_queries, *of_keys};
  for (int side = 0; side < 2; ++side) {
    const int exponent = ilogb((double)__uint_as_float(largest[side])) - FP16_EXPONENT;
    shifts[side] = largest[side] ? ldexp(1.0, exponent) : 1;
  }
  shifts[2] = shifts[0] * shifts[1];
}

// Operands of the products: rows of `stride` elements, or of parts of `part` elements each. Features beyond
// d are zeros. Rows are divided by powers of two: 2^exponent[row], or *shift for all rows, or (both null)
// not at all.
extern "C" __global__ void stage(const __grid_constant__ Matrix z, i64 n, i64 d,
                                 const int* exponent, const double* shift, char* out, i64 stride,
                                 i64 part) {
  const i64 row = warp_row();
  if (row >= n) return;
  const double by = shift ? 1 / *shift : 1;
#if PRECISION >= BF16X3  // elements have 16 bits, and eight of them fill 16 bytes
  const i64 elements = PARTS > 1 ? part : stride;
  for (i64 k = threadIdx.x % 32 * LANE_FEATURES; k < elements; k += 32 * LANE_FEATURES) {
    double whole[LANE_FEATURES];
    float x[LANE_FEATURES];
    get_group(whole, z, row, k, d - k);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i)
      x[i] = (float)(exponent ? ldexp(whole[i], -exponent[row]) : whole[i] * by);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      u32 w[LANE_FEATURES / 2];
#pragma unroll
      for (int i = 0; i < LANE_FEATURES / 2; ++i) {
        float &low = x[2 * i], &high = x[2 * i + 1];
        w[i] = IS_FLOAT16 ? to_fp16x2(low, high) : to_bf16x2(low, high);
        const unsigned short first = (unsigned short)w[i], second = (unsigned short)(w[i] >> 16);
        low -= IS_FLOAT16 ? from_fp16(first) : from_bf16(first);
        high -= IS_FLOAT16 ? from_fp16(second) : from_bf16(second);
      }
      *(uint4*)(out + (row * stride + p * part + k) * 2) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
#else
  for (i64 k = threadIdx.x % 32; k < stride; k += 32) {
    const i64 at = row * stride + k;
#if PRECISION == FP64
    double x = k < d ? z.get(row, k) : 0;
    if (exponent) x = ldexp(x, -exponent[row]);
    ((double*)out)[at] = x;
#else
    float x = 0;
    if (k < d) x = exponent ? (float)ldexp(z.get(row, k), -exponent[row]) : z.get_float(row, k);
    ((float*)out)[at] = x;
#endif
  }
#endif
}

// Positives of a row: (row, partner) pairs whose dL/dx is not in the gradient panels.
struct Positives {
  const double* gradient;  // dL/dx at the positive, by query
  const i64* partner;      // [queries] key of each query (-1: none of these); null: the same number
  const i64* start;        // not null: rows are keys, and partner[start[j] .. start[j + 1]) j's queries
  i64 by_partner;          // rows are keys: gradients go by partner
  Matrix z;                // the partners' features
  const Real* factor;
  const int* exponent;

  // Add to `g` what positives add to the gradient of row `row`, from feature `column` on.
  template <class T>
  __device__ __forceinline__ void add(T (&g)[LANE_FEATURES], i64 row, i64 column, i64 n,
                                      double own_factor) const {
    const i64 first = start ? start[row] : row, end = start ? start[row + 1] : row + 1;
    for (i64 s = first; s < end; ++s) {
      const i64 other = partner ? partner[s] : s;
      if (other < 0) continue;
      double weight = gradient[by_partner ? other : row];
      if (factor) weight *= own_factor * factor[other];
      T x[LANE_FEATURES];
      get_group(x, z, other, column, n);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i)
        g[i] += (T)weight * (factor ? (T)ldexp((double)x[i], -exponent[other]) : x[i]);
    }
  }
};

// Eight features of a row, and of its gradient.
template <class T>
struct Finished {
  T g[LANE_FEATURES];  // the gradient, without its part along the row
  T x[LANE_FEATURES];  // the row, near unit length

  __device__ __forceinline__ Finished(const Real* sum, T root, const Positives& positives,
                                      const Matrix& z, i64 row, i64 column, i64 d, double factor,
                                      int exponent, bool with_row = true) {
    const i64 n = d - column;
    const bool whole = sizeof(Real) == 4 && n >= LANE_FEATURES && (u64)(sum + column) % 16 == 0;
    if (whole) {
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; i += 4) {
        const float4 four = *(const float4*)(sum + column + i);
        g[i] = four.x, g[i + 1] = four.y, g[i + 2] = four.z, g[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) g[i] = i < n ? sum[column + i] : 0;
    }
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) g[i] = g[i] * fabs(root) * root;
    positives.add(g, row, column, n, factor);
    if (!with_row) return;
    get_group(x, z, row, column, n);
    if (exponent)
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) x[i] = (T)ldexp((double)x[i], -exponent);
  }
  __device__ __forceinline__ double dot() const {
    T sum = 0;
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) sum += g[i] * x[i];
    return sum;
  }
};

// Sums are multiplied by this root and by its size, not by the unit at once: beside large sums, the unit
// may be too small for a float.
__device__ __forceinline__ double signed_root(double unit) {
  return copysign(sqrt(fabs(unit)), unit);
}

// Finish the gradients of n rows from row `first` on, whose sums are in `acc` [n, acc_stride]. Sums are in
// the gradient panels' unit; with `unit_step` 1, each row has a unit of its own. The other side's features
// were divided by `shift` (null: 1). Positives are added here. The gradients are written to `out` (data
// null: nowhere), or added to what is there, and <gradient, row> is written to `dots` (or null).
extern "C" __global__ void __launch_bounds__(ROWS_THREADS, sizeof(Real) == 4 ? 3 : 2)
finish(const Real* acc, i64 acc_stride, i64 first, i64 n, i64 d,
                                  const __grid_constant__ Matrix z, const Real* factor,
                                  const int* exponent, const __grid_constant__ Positives positives,
                                  const double* unit, i64 unit_step, const double* shift,
                                  double* dots,
                                  const __grid_constant__ Matrix out, i64 add) {
  const int lanes = d <= HALF_WARP_ROW ? 16 : 32, lane = threadIdx.x % lanes;
  const i64 of_these = (blockIdx.x * (i64)ROWS_THREADS + threadIdx.x) / lanes;
  if (of_these >= n) return;
  const Real* sum = acc + of_these * acc_stride;
  const i64 row = first + of_these;
  const double root_of_unit = signed_root(unit[unit_step * row]) * sqrt(shift ? *shift : 1.0);
  double dot = 0;
  if (!factor) {  // all at once, in the products' precision
    const Real root = (Real)root_of_unit;
#pragma unroll 1
    for (i64 k = lane * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES) {
      Finished<Real> f(sum, root, positives, z, row, k, d, 0, 0, dots);
      if (dots) dot += f.dot();
      if (!out.data) continue;
      if (add) {
        Real before[LANE_FEATURES];
        get_group(before, out, row, k, d - k);
#pragma unroll
        for (int i = 0; i < LANE_FEATURES; ++i) f.g[i] += before[i];
      }
      set_group(f.g, out, row, k, d - k);
    }
    if (dots) dot = lanes_sum(dot, lanes);
    if (dots && lane == 0) dots[row] = dot;
    return;
  }
  const int e = exponent[row];
  const double f = factor[row], root = root_of_unit;
  for (i64 k = lane * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES)
    dot += Finished<double>(sum, root, positives, z, row, k, d, f, e).dot();
  dot = lanes_sum(dot, lanes);
  if (dots && lane == 0) dots[row] = dot;
  if (!out.data) return;
  const double along = f * f * dot;
  for (i64 k = lane * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES) {
    Finished<double> row_of(sum, root, positives, z, row, k, d, f, e);
    double before[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (add) get_group(before, out, row, k, d - k);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i)
      row_of.g[i] = ldexp(row_of.g[i] - along * row_of.x[i], -e) + before[i];
    set_group(row_of.g, out, row, k, d - k);
  }
}
