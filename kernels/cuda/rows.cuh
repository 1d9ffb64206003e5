// Rows of features with any strides: which threads compute a row, and how they read it. For the kernels of rows.cu,
// finish.cu, linear.cu and block/guide_rows.cu.
//
// A row z is normalised, u = z / |z|, in two steps. The first, s = 2^-e z, is exact, and |s| is in [1/2, 1); `exponent`
// is e. The second is u = f s with f = 2^e / |z| in (1, 2]; `factor` is f. Operands are rows s, and f multiplies the
// products later. So 16-bit features are not rounded a second time, and operands and products of very long or very
// short rows neither overflow nor underflow. A row of zeros has no direction: f = 0, u = 0.
#pragma once
#include "common.cuh"

// The rows u_i of one side, queries or keys: u_i = factor[i] 2^-exponent[i] z_i = z_i / |z_i| if rows are normalised,
// else u_i = z_i.
struct Rows {
  Matrix z;
  const Real* factor;   // [rows]; null: rows are not normalised
  const int* exponent;  // [rows], or null like `factor`

  // u_i / z_i: 1 / |z_i|, or 1
  __device__ __forceinline__ double inverse(i64 i) const {
    return factor ? ldexp((double)factor[i], -exponent[i]) : 1;
  }
};

constexpr int ROWS_THREADS = 256;  // threads of a thread block of these kernels

// Half a warp computes a row of up to HALF_WARP_ROW features, so that twice as many rows are in flight. A whole warp
// computes a longer row. `lanes` is the number of threads that share a row, 16 or 32.
constexpr int HALF_WARP_ROW = 128;
__device__ __forceinline__ int count_lanes(i64 features) { return features <= HALF_WARP_ROW ? 16 : 32; }
// The row that this thread works on. `lanes` is a power of two, at most 32; a quotient would take a hundred instructions.
__device__ __forceinline__ i64 lanes_row(int lanes) {
  return (blockIdx.x * (i64)ROWS_THREADS + threadIdx.x) >> (__ffs(lanes) - 1);
}

// 16 bytes of memory, in one load if the address is a multiple of 16, else in four loads. It is a multiple of 4.
__device__ __forceinline__ uint4 get_16_bytes(const char* from) {
  if ((u64)from % 16 == 0) return *(const uint4*)from;
  const u32* words = (const u32*)from;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The lanes of a row ask for all its `bytes` bytes in the L2 cache. A loop that reads the row afterwards waits for
// memory once, not in each step.
__device__ __forceinline__ void prefetch_row(const void* row, i64 bytes, int lane, int lanes) {
  constexpr int LINE = 128;
  for (i64 at = lane * LINE; at < bytes; at += lanes * LINE)
    prefetch_line((const char*)row + at);
}
// The same for the d features of a row of z, if the features are contiguous.
__device__ __forceinline__ void prefetch_row(const Matrix& z, i64 row, i64 d, int lane, int lanes) {
  const int size = z.dtype == DTYPE_FLOAT64 ? 8 : z.dtype == DTYPE_FLOAT32 ? 4 : 2;
  if (z.column_stride == 1) prefetch_row(z.data + row * z.row_stride * size, d * size, lane, lanes);
}

// The sum of x over the lanes of a row, in each of them.
__device__ __forceinline__ double lanes_sum(double x, int lanes) {
  const u32 row_lanes = lanes == 32 ? ALL_LANES : 0xffffu << (threadIdx.x & 16);
  if (lanes == 32) x += __shfl_xor_sync(ALL_LANES, x, 16);
#pragma unroll
  for (int by = 8; by > 0; by /= 2) x += __shfl_xor_sync(row_lanes, x, by);
  return x;
}

// Features that a lane reads at a time: 16 bytes of 16-bit features.
constexpr int LANE_FEATURES = 8;
// Reads eight features of row `row` of z, from feature `column` on, into x. The row has `n` features from there on; if
// n < 8, zeros stand for the missing ones.
template <class T>
__device__ __forceinline__ void get_group(T (&x)[LANE_FEATURES], const Matrix& z, i64 row, i64 column,
                                          i64 n) {
  const i64 at = row * z.row_stride + column * z.column_stride;
  const int size = z.dtype == DTYPE_FLOAT64 ? 8 : z.dtype == DTYPE_FLOAT32 ? 4 : 2;
  const char* from = z.data + at * size;
  const bool reads_words = n >= LANE_FEATURES && z.column_stride == 1 && (u64)from % 4 == 0;
  if (reads_words && size == 2) {
    const uint4 words = get_16_bytes(from);
    const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) {
      const unsigned short half = (unsigned short)(w[i / 2] >> i % 2 * 16);
      x[i] = z.dtype == DTYPE_BFLOAT16 ? from_bf16(half) : from_fp16(half);
    }
  } else if (reads_words && size == 4) {
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

// Reads eight numbers of a row of sums (an accumulator of gradients, or a sum of a segment) into x, with `n` as above.
template <class T>
__device__ __forceinline__ void get_reals(T (&x)[LANE_FEATURES], const Real* from, i64 n) {
  const bool reads_words = sizeof(Real) == 4 && n >= LANE_FEATURES && (u64)from % 16 == 0;
  if (reads_words) {
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; i += 4) {
      const float4 four = *(const float4*)(from + i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i) x[i] = i < n ? from[i] : 0;
  }
}

// Stores 16 bytes, at once if the address is a multiple of 16, else in four stores.
__device__ __forceinline__ void set_16_bytes(char* to, uint4 x) {
  u32* words = (u32*)to;
  if ((u64)to % 16 == 0) *(uint4*)to = x;
  else words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}

// Writes the numbers x as eight features of row `row` of z, from feature `column` on. The row has `n` features from
// there on; if n < 8, the last 8 - n numbers are not written.
template <class T>
__device__ __forceinline__ void set_group(const T (&x)[LANE_FEATURES], const Matrix& z, i64 row,
                                          i64 column, i64 n) {
  const i64 at = row * z.row_stride + column * z.column_stride;
  const int size = z.dtype == DTYPE_FLOAT64 ? 8 : z.dtype == DTYPE_FLOAT32 ? 4 : 2;
  char* to = z.data + at * size;
  const bool writes_words = n >= LANE_FEATURES && z.column_stride == 1 && (u64)to % 4 == 0;
  if (writes_words && size == 2) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = (float)x[2 * i], high = (float)x[2 * i + 1];
      w[i] = z.dtype == DTYPE_BFLOAT16 ? to_bf16x2(low, high) : to_fp16x2(low, high);
    }
    set_16_bytes(to, make_uint4(w[0], w[1], w[2], w[3]));
  } else if (writes_words && size == 4) {
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
