// Rows of features before the matrix products. In the order of a call: row_norms, if rows are normalised;
// find_largest and find_feature_divisors, for float16 operands of other features; stage, if operands are copies;
// not_finite. A warp, or half of a warp, computes a row. finish.cu is the counterpart after the products.
#include "rows.cuh"

// Computes the factor and the exponent of each of n rows of d features: z_i 2^-exponent[i] factor[i] has norm 1
// (rows.cuh). A row of zeros has factor 0, and a row whose norm is not finite has factor NaN.
extern "C" __global__ void row_norms(const __grid_constant__ Matrix z, i64 n, i64 d, Real* factor,
                                     int* exponent) {
  const i64 row = lanes_row(32);
  if (row >= n) return;
  int feature_exponent = 0, norm_exponent = 0;  // features are divided by 2^feature_exponent before the squares
  if (z.dtype == DTYPE_FLOAT64) {  // squares of other dtypes neither overflow nor underflow in double
    double largest = 0;
    for (i64 k = threadIdx.x % 32; k < d; k += 32) largest = fmax(largest, fabs(z.get(row, k)));
    feature_exponent = find_exponent(warp_max(largest));
  }
  double square_sum = 0;
  for (i64 k = threadIdx.x % 32; k < d; k += 32) {
    const double feature = feature_exponent ? ldexp(z.get(row, k), -feature_exponent) : z.get(row, k);
    square_sum += feature * feature;
  }
  square_sum = warp_sum(square_sum);
  if (threadIdx.x % 32) return;
  // usable: the norm is neither 0 nor infinite nor NaN. norm = mantissa 2^norm_exponent, mantissa in [1/2, 1)
  const bool usable = square_sum > 0 && square_sum < INFINITY_;
  const double mantissa = usable ? frexp(sqrt(square_sum), &norm_exponent) : 1;
  factor[row] = square_sum == 0 ? 0 : usable ? (Real)(1 / mantissa) : (Real)NAN_;
  exponent[row] = usable ? norm_exponent + feature_exponent : 0;
}

// Whether a feature in 16 bytes of a row is not finite: all bits of its exponent are 1.
__device__ __forceinline__ bool any_not_finite(const uint4& bytes, int dtype) {
  const u32 exponent = dtype == DTYPE_FLOAT32 ? 0x7f800000 : dtype == DTYPE_BFLOAT16 ? 0x7f80 : 0x7c00;
  const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  bool any = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    any |= (words[i] & exponent) == exponent;
    if (dtype != DTYPE_FLOAT32) any |= (words[i] >> 16 & exponent) == exponent;
  }
  return any;
}

// Finds features that are not finite, because the losses that depend on them must be NaN. A NaN flag is a number that
// is added to a loss: NaN or 0. out[row] is NaN if a feature of query `row` is not finite, else known_row_nans[row]
// (null: 0). *any_key_not_finite, which is added to all losses, becomes NaN if a feature of a key is not finite, and
// otherwise keeps its value. Several warps may write this NaN. There are n keys, then m queries; m is 0 if queries are
// keys. Rows of up to 256 features have 8 lanes each, of up to 512 features 16 lanes, longer rows a warp: a lane reads
// several times 16 bytes, and these loads are on their way together.
extern "C" __global__ void not_finite(const __grid_constant__ Matrix keys, i64 n,
                                      const __grid_constant__ Matrix queries, i64 m, i64 d,
                                      const double* known_row_nans, double* out,
                                      double* any_key_not_finite) {
  const int lanes = d <= 256 ? 8 : d <= 512 ? 16 : 32, lane = threadIdx.x % lanes;
  const bool is_query = lanes_row(lanes) >= n;
  const i64 row = lanes_row(lanes) - (is_query ? n : 0);
  const bool inside = !is_query || row < m;
  const Matrix& z = is_query ? queries : keys;
  const int size = z.dtype == DTYPE_FLOAT64 ? 8 : z.dtype == DTYPE_FLOAT32 ? 4 : 2, each = 16 / size;
  const char* from = z.data + row * z.row_stride * size;
  bool any = false;
  if (inside && size < 8 && z.column_stride == 1 && (((u64)from | (u64)(d * size)) & 15) == 0) {  // whole 16 bytes
#pragma unroll 4
    for (i64 k = lane * each; k < d; k += lanes * each)
      any |= any_not_finite(*(const uint4*)(from + k * size), z.dtype);
  } else {
    for (i64 k = lane; inside && k < d; k += lanes) any |= !isfinite(z.get(row, k));
  }
  const u32 lanes_of_warp = __ballot_sync(ALL_LANES, any) >> (threadIdx.x % 32 - lane);
  const bool is_not_finite = lanes_of_warp & (lanes == 32 ? ALL_LANES : (1u << lanes) - 1);
  if (lane || !inside) return;
  if (is_query) out[row] = is_not_finite ? NAN_ : known_row_nans ? known_row_nans[row] : 0;
  else if (is_not_finite) *any_key_not_finite = NAN_;
}

// Finds the largest finite absolute value of all features, for the feature divisor. *largest_bits, which the caller
// sets to 0, gets the bits of this float. There are few warps, and each reads many rows and then *largest_bits once.
extern "C" __global__ void find_largest(const __grid_constant__ Matrix z, i64 n, i64 d, u32* largest_bits) {
  const int lanes = count_lanes(d);
  u32 largest = 0;  // bits of a float; as integers, bits of positive floats have the order of the floats
  for (i64 row = lanes_row(lanes); row < n; row += gridDim.x * (i64)ROWS_THREADS / lanes)
    for (i64 k = threadIdx.x % lanes * LANE_FEATURES; k < d; k += lanes * LANE_FEATURES) {
      float x[LANE_FEATURES];
      get_group(x, z, row, k, d - k);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; ++i) {
        const u32 bits = __float_as_uint(fabsf(x[i]));
        if (bits < 0x7f800000) largest = max(largest, bits);
      }
    }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, by));
  if (threadIdx.x % 32 == 0 && largest > *(volatile u32*)largest_bits) atomicMax(largest_bits, largest);
}

// Chooses the feature divisors, by which `stage` divides features so that they neither overflow nor underflow as
// float16: [0] of queries, [1] of keys, and [2] the product of both, by which products of divided features are
// multiplied. A divisor is the power of two that brings the largest feature to [2^14, 2^15); the largest float16 number
// is 65504. `largest_query` and `largest_key` come from find_largest; 0 gives the divisor 1. One thread.
constexpr int FP16_EXPONENT = 14;
extern "C" __global__ void find_feature_divisors(const u32* largest_query, const u32* largest_key,
                                                 double* feature_divisors) {
  const u32 largest[2] = {*largest_query, *largest_key};
  for (int side = 0; side < 2; ++side) {
    const int exponent = ilogb((double)__uint_as_float(largest[side])) - FP16_EXPONENT;
    feature_divisors[side] = largest[side] ? ldexp(1.0, exponent) : 1;
  }
  feature_divisors[2] = feature_divisors[0] * feature_divisors[1];
}

// Copies n rows of d features to `out`, in the form of operands: `stride` elements a row. With two PARTS, a row is the
// large parts of all features, `part` elements, and then the small parts. Elements after feature d are zeros.
//   - A row is divided by 2^exponent[row], if rows are normalised (else `exponent` is null).
//   - 16-bit elements are also divided by *feature_divisor (null: 1), and, if `weight` is not null, multiplied by
//     weight[row] / *gradient_divisor (for dK in one pass: sm90/sweep_online.cu).
extern "C" __global__ void stage(const __grid_constant__ Matrix z, i64 n, i64 d,
                                 const int* exponent, const double* feature_divisor,
                                 const double* weight, const double* gradient_divisor, char* out,
                                 i64 stride, i64 part) {
  const i64 elements = PARTS > 1 ? part : stride;  // of one part, with padding
  const int lanes = count_lanes(elements), lane = threadIdx.x % lanes;
  const i64 row = lanes_row(lanes);
  if (row >= n) return;
  const double factor =
      (feature_divisor ? 1 / *feature_divisor : 1) * (weight ? weight[row] / *gradient_divisor : 1);
#if PRECISION >= BF16X3  // elements have 16 bits, and eight of them fill 16 bytes
  for (i64 k = lane * LANE_FEATURES; k < elements; k += lanes * LANE_FEATURES) {
    double numbers[LANE_FEATURES];
    float x[LANE_FEATURES];
    get_group(numbers, z, row, k, d - k);
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; ++i)
      x[i] = (float)((exponent ? ldexp(numbers[i], -exponent[row]) : numbers[i]) * factor);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      u32 w[LANE_FEATURES / 2];
#pragma unroll
      for (int i = 0; i < LANE_FEATURES / 2; ++i) {
        // Two features fill a word. What this part rounds off stays in x, for the next part
        float &first = x[2 * i], &second = x[2 * i + 1];
        w[i] = IS_FLOAT16 ? to_fp16x2(first, second) : to_bf16x2(first, second);
        const unsigned short first_bits = (unsigned short)w[i], second_bits = (unsigned short)(w[i] >> 16);
        first -= IS_FLOAT16 ? from_fp16(first_bits) : from_bf16(first_bits);
        second -= IS_FLOAT16 ? from_fp16(second_bits) : from_bf16(second_bits);
      }
      *(uint4*)(out + (row * stride + p * part + k) * 2) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
#else
  for (i64 k = lane; k < elements; k += lanes) {
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
