// Gradient pass of a block whose exponentials are cached (sweep_lse.cu): they become the gradient block
// P = dL/dx, in place and without products.
//
// The cache holds e = 2^(c x_ij - r), as sweep_lse.cu wrote it, with one reference exponent r for 16 rows and
// 128 columns. With the factors of sweep/gradient.cuh and s_i = 2^(r - R_i),
//
//     P_ij = e (a_i s_i + u_i s_i v_j)              `one_exponential` for both directions
//     P_ij = e (a_i s_i + v_j 2^(r - C_j))          whatever the range of R and C
//
// Query tiles without a cache (`uncached_tiles`) get arbitrary values here; the sweep overwrites them.
#include "block/block.cuh"

constexpr int STRIP = 16;      // rows with one reference exponent, all by one thread
constexpr int GROUP = 8;       // columns of a thread: 16 bytes
constexpr int CACHED_THREADS = 128;
constexpr int AT_ONCE = 4 / PARTS;  // rows whose loads are in flight together

// A block of threads has 16 rows of CACHED_THREADS * GROUP columns.
extern "C" __global__ void __launch_bounds__(CACHED_THREADS)
cached_gradient(const __grid_constant__ PlainBlock b, const __grid_constant__ Factors f,
              const __grid_constant__ GradientBlock gradient_block, const float* references,
              i64 reference_stride, i64 strips) {
  const i64 strip = blockIdx.x % strips, row0 = strip * STRIP;
  const i64 column = (blockIdx.x / strips * CACHED_THREADS + threadIdx.x) * GROUP;
  if (column >= b.k.rows) return;
  const float r = references[strip * reference_stride + column / TILE_COLUMNS];
  const bool one = !COLUMNS || *f.one_exponential;
  float w[GROUP], factor[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const i64 j = column + i;
    const bool inside = j < b.k.rows;
    w[i] = COLUMNS && inside ? f.v[j] * (one ? 1 : exp2_(r - f.column_reference[j])) : 0;
    factor[i] = b.k.factor && inside ? b.k.factor[j] : 1;
  }
  uint4* at = (uint4*)(gradient_block.data + row0 * gradient_block.stride + column);
  const i64 step = gradient_block.stride / GROUP, part_step = gradient_block.part / GROUP;
  const int rows = (int)min((i64)STRIP, b.q.rows - row0);
#pragma unroll
  for (int first = 0; first < STRIP; first += AT_ONCE) {
    uint4 e[AT_ONCE][PARTS];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        if (first + i < rows) e[i][part] = at[(first + i) * step + part * part_step];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i >= rows) continue;
      const i64 row = row0 + first + i;
      float s = exp2_(r - f.row_reference[row]);
      if (b.q.factor) s *= b.q.factor[row];
      const float a = f.a[row] * s;
      const float u = !COLUMNS ? 0 : one ? f.u[row] * s : b.q.factor ? b.q.factor[row] : 1;
#pragma unroll
      for (int k = 0; k < GROUP / 2; ++k) {
        u32 &word = ((u32*)&e[i][0])[k], &other = ((u32*)&e[i][PARTS - 1])[k];
        float x0 = __uint_as_float(PARTS == 2 ? word : word << 16);
        float x1 = __uint_as_float(PARTS == 2 ? other : word & 0xffff0000u);
        x0 *= fmaf(u, w[2 * k], a) * factor[2 * k];
        x1 *= fmaf(u, w[2 * k + 1], a) * factor[2 * k + 1];
        word = round_pair(x0, x1);
        if (PARTS == 2) other = round_pair(x0, x1);
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part) at[(first + i) * step + part * part_step] = e[i][part];
    }
  }
}
