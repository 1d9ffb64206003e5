// Structures and functions for all phases of fused.cu: the arguments, teams of threads, and barriers over the grid.
#pragma once
#include "common.cuh"

constexpr int FUSED_THREADS = 256;
constexpr int FUSED_WARPS = FUSED_THREADS / 32;
constexpr int VECTOR_WIDTH = 16 / (int)sizeof(Real);  // numbers in 16 bytes
constexpr int FUSED_TILE = 64;  // rows and columns of a tile
constexpr int CHUNK = 128 / (int)sizeof(Real);  // depth of one step of a product, in elements: 128 bytes of a row
constexpr int MAX_FEATURE_PARTS = 16;  // phase 1 divides the features into at most this many parts
constexpr int CHUNK_STRIDE = CHUNK + VECTOR_WIDTH;  // with this padding, eight rows lie in different banks
constexpr int SHARE = FUSED_TILE * CHUNK / FUSED_THREADS;  // elements of each operand that a thread copies in a step

// Each combination of these options has its own kernel (-DSYMMETRIC=1 and so on). A kernel with branches would
// also fetch the instructions that it skips, and that takes a notable part of so short a launch.
//     SYMMETRIC   queries are the keys (NT-Xent)
//     TWO_SIDED   columns have a softmax of their own (CLIP)
//     SIGMOID     the loss is a pairwise sigmoid (SigLIP)
//     NORMALIZE   rows are normalised
//     IDS         columns of ids: pairs whose ids are equal in any of them are excluded
//     DTYPE       type of the features (common.cuh)
#if DTYPE == DTYPE_FLOAT64
typedef double Element;
#elif DTYPE == DTYPE_FLOAT32
typedef float Element;
#else
typedef unsigned short Element;
#endif

// A feature as a number of the products' type.
__device__ __forceinline__ Real number(Element x) {
#if DTYPE == DTYPE_BFLOAT16
  return from_bf16(x);
#elif DTYPE == DTYPE_FLOAT16
  return from_fp16(x);
#else
  return (Real)x;
#endif
}
__device__ __forceinline__ const Element* address(const Matrix& z, i64 row, i64 column) {
  return (const Element*)z.data + row * z.row_stride + column * z.column_stride;
}

// All arguments of the launch: M queries, N keys, D features (m, n, d).
struct Fused {
  Matrix q, k, dq, dk;  // data of dq or dk is null if the gradient is not wanted
  i64 m, n, d;
  Scale scale;
  Scalar bias;
  double row_direction_weight, column_direction_weight;
  double common_share;        // factor of all losses in the reduced loss
  const double* row_shares;   // [M] factors of rows, which multiply common_share, or null
  double upstream;            // upstream gradient of all rows; unused if there are `upstreams`
  const double* upstreams;    // [M] upstream gradient of each row, or null
  const i64* positives;       // [M], or null: the other view of a sample if SYMMETRIC, else key i for query i
  const double* known_row_nans;  // [M] or null, added to losses: NaN for labels out of range, else 0
  const i64 *query_ids, *key_ids;
  i64 gradient;                                  // whether gradients are wanted
  i64 parts;                                     // number of parts of the features in phase 1
  Real* x;                                       // [max(parts, 2), M, N]: products of each part; later x and P
  double *row_inverse, *column_inverse;          // 1 / |z|
  double *row_nans, *column_nans;                // NaN if a feature of the row is not finite, else 0
  double *row_gap, *column_gap;                  // DirectionLosses::gap, base 2
  double *row_dot, *column_dot, *row_sum;        // sum_j P_ij x_ij, sum_i P_ij x_ij, sum_j P_ij
  Real *losses, *row_lse, *column_lse;           // out, natural units
  Real *loss, *scale_grad, *bias_grad;           // out, scalars
  Real *row_reference, *row_factor, *column_reference, *column_factor;  // of dL/dx: `finalize` in losses.cuh
  u32* barrier;  // [2] arrivals at barriers over the grid, and thread blocks that have left; 0 before and after
};

// 16 bytes of shared memory, read at once.
union Vector {
  uint4 bits;
  Real z[VECTOR_WIDTH];
};

// A barrier over the grid: all writes before the barrier come before all reads after it, in all thread blocks. They all
// run at once, because the launch is cooperative; otherwise the barrier could wait for a thread block that never
// starts. `arrived` counts the arrivals at all barriers so far, and `target` becomes the count at the end of this one.
__device__ __forceinline__ void grid_barrier(u32* arrived, u32& target) {
  target += gridDim.x;
  __syncthreads();  // all writes of this block come before its first thread's add_release
  if (threadIdx.x == 0) {
    add_release(arrived, 1);
    while (load_acquire(arrived) < target) {
    }
  }
  __syncthreads();  // no thread continues before the first thread has seen all blocks arrive
}

// Whether query i and key j are an excluded pair, or (SYMMETRIC) the same row. fused/losses.cuh skips such pairs.
__device__ __forceinline__ bool excluded(const Fused& f, i64 i, i64 j) {
  return (SYMMETRIC && i == j) || any_equal<IDS>(f.query_ids + i * IDS, f.key_ids + j * IDS);
}

// The positive of row i; -1 for a row without a positive, whose upstream gradient is 0.
__device__ __forceinline__ i64 get_positive(const Fused& f, i64 i) {
  if (f.positives) return f.positives[i];
  return !SYMMETRIC ? i : i < f.m / 2 ? i + f.m / 2 : i - f.m / 2;
}
__device__ __forceinline__ double get_upstream(const Fused& f, i64 i) {
  return f.upstreams ? f.upstreams[i] : f.upstream;
}

// A team is the threads that work on one row at a time: one warp, or several warps of a thread block if there are few
// rows. It works on rows `row`, `row + step`, `row + 2 step`, ...
struct Team {
  i64 row, step;     // this team's first row, and the distance to its next row
  int lane, lanes;   // index of this thread in the team, and the number of threads of the team
  int index;         // of the team in its thread block
  double* memory;    // [FUSED_WARPS], shared; one number for each warp

  __device__ Team(i64 rows, double* memory) : memory(memory) {
    lanes = FUSED_THREADS;
    while (lanes > 32 && gridDim.x * (FUSED_THREADS / lanes) < rows) lanes /= 2;
    const int teams = FUSED_THREADS / lanes;
    index = threadIdx.x / lanes;
    lane = threadIdx.x % lanes;
    row = (i64)blockIdx.x * teams + index;
    step = (i64)gridDim.x * teams;
  }
  __device__ void sync() const {
    if (lanes == 32) __syncwarp();
    else named_barrier_sync(1 + index, lanes);
  }
  __device__ double sum(double x) const {
    return reduce(x, [](double a, double b) { return a + b; });
  }
  __device__ double max(double x) const {  // NaN if a number is NaN
    return reduce(x, [](double a, double b) { return a > b || b != b ? a : b; });
  }
  // Joins x over the threads of the team, which all call this and get the result.
  template <class F>
  __device__ double reduce(double x, F join) const {
#pragma unroll
    for (int l = 16; l > 0; l /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, l));
    if (lanes == 32) return x;
    const int first = index * (lanes / 32);
    if (lane % 32 == 0) memory[first + lane / 32] = x;
    sync();  // every warp's write to memory[] comes before the reads below
    x = memory[first];
    for (int w = 1; w < lanes / 32; ++w) x = join(x, memory[first + w]);
    sync();  // all reads of memory[] come before the next call's writes
    return x;
  }
};
