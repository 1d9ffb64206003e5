// Gradient pass of a block whose exponentials are cached: they become the gradient block P = dL/dx, in place and
// without matrix products. This is no sweep: each thread block visits its exponentials once.
//
// The cache holds e = 2^(c x_ij - h), as sweep_lse.cu wrote it, with one reference exponent h for 16 rows and 128
// columns. R_i and C_j are the log-sum-exps of row i and column j in base 2, rounded; a, u and v are the factors of
// rows (a, u) and columns (v) of struct Factors, whose equations are in tiled/gradient.cu:
//
//   - If one exponential serves both directions (`one_exponential`): P_ij = e 2^(h - R_i) (a_i + u_i v_j)
//   - Otherwise, for R and C of any range: P_ij = e (a_i 2^(h - R_i) + v_j 2^(h - C_j))
//
// P_ij is also multiplied by the norm factors of row i and column j, if there are any. Query tiles without a cache
// (`uncached_tiles`) get arbitrary values here. The caller computes them again by sweep_gradient.cu, which overwrites
// these values.
#include "block/block.cuh"

constexpr int STRIP = 16;  // rows with one reference exponent; a thread computes all of them
constexpr int GROUP = 8;   // columns of a thread, which are 16 bytes in each part
constexpr int CACHED_THREADS = 128;
constexpr int AT_ONCE = 4 / PARTS;  // rows that a thread loads before it computes the first of them

// A thread block has a strip of 16 rows, and CACHED_THREADS * GROUP columns. `references`
// [strips, reference_stride]: h for each strip and 128 columns. `strips` is the number of strips of the block.
extern "C" __global__ void __launch_bounds__(CACHED_THREADS)
cached_gradient(const __grid_constant__ PlainBlock b, const __grid_constant__ Factors f,
              const __grid_constant__ GradientBlock gradient_block, const float* references,
              i64 reference_stride, i64 strips) {
  const i64 strip = blockIdx.x % strips, first_row = strip * STRIP;
  const i64 column = (blockIdx.x / strips * CACHED_THREADS + threadIdx.x) * GROUP;
  if (column >= b.k.rows) return;
  const float h = references[strip * reference_stride + column / TILE_COLUMNS];
  const bool one_exponential = !COLUMNS || *f.one_exponential;
  // Of the thread's columns: v_j, times 2^(h - C_j) unless one exponential serves both sides; and norm factors
  float column_weight[GROUP], column_factor[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const i64 j = column + i;
    const bool inside = j < b.k.rows;
    column_weight[i] = COLUMNS && inside ? f.v[j] * (one_exponential ? 1 : exp2_(h - f.column_reference[j])) : 0;
    column_factor[i] = b.k.factor && inside ? b.k.factor[j] : 1;
  }
  // A uint4 has GROUP elements of one part. The thread's first one, and the steps to the next row and to the next part
  uint4* at = (uint4*)(gradient_block.data + first_row * gradient_block.stride + column);
  const i64 row_step = gradient_block.stride / GROUP, part_step = gradient_block.part / GROUP;
  const int rows = (int)min((i64)STRIP, b.q.rows - first_row);
#pragma unroll
  for (int first = 0; first < STRIP; first += AT_ONCE) {
    uint4 e[AT_ONCE][PARTS];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        if (first + i < rows) e[i][part] = at[(first + i) * row_step + part * part_step];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i >= rows) continue;
      const i64 row = first_row + first + i;  // in the block
      float row_scale = exp2_(h - f.row_reference[row]);
      if (b.q.factor) row_scale *= b.q.factor[row];
      // P = e (a + u column_weight) column_factor, with the row's norm factor in a and u
      const float a = f.a[row] * row_scale;
      const float u = !COLUMNS ? 0 : one_exponential ? f.u[row] * row_scale : b.q.factor ? b.q.factor[row] : 1;
#pragma unroll
      for (int k = 0; k < GROUP / 2; ++k) {  // two neighbouring columns
        // One part: a word has two bfloat16 numbers. Two parts: a word of each part is a float32 number
        u32 &word = ((u32*)&e[i][0])[k], &other = ((u32*)&e[i][PARTS - 1])[k];
        float x0 = __uint_as_float(PARTS == 2 ? word : word << 16);
        float x1 = __uint_as_float(PARTS == 2 ? other : word & 0xffff0000u);
        x0 *= fmaf(u, column_weight[2 * k], a) * column_factor[2 * k];
        x1 *= fmaf(u, column_weight[2 * k + 1], a) * column_factor[2 * k + 1];
        word = round_pair(x0, x1);
        if (PARTS == 2) other = round_pair(x0, x1);
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part) at[(first + i) * row_step + part * part_step] = e[i][part];
    }
  }
}
