// Loss and gradient of a small or medium batch in one cooperative launch.
//
// The logits are computed once, x_ij = q_i . k_j, and stay in the workspace (and the L2 cache). All
// blocks go through the same phases, with a barrier over the grid between them:
//
//     0  norms; which rows have features that are not finite
//     1  x, by tiles of 64 x 64 (one triangle of them where x is symmetric), and by parts of the
//        features where tiles alone are too few
//     2  per row and per column: log-sum-exp n of the negatives, gap n - p to the positive's logit
//     3  per row: loss = softplus(gap), P = dL/dx, sum_j P_ij x_ij
//     4  dQ = P K and dK = P' Q, by tiles of 64 rows x 64 features; sums over all rows, in a fixed
//        order
//
// In a product, a thread has 4 x 4 results of a tile, 16 apart: eight numbers read from shared
// memory serve sixteen multiply-adds.
//
// Formulas are those of lse.cu, gradient.cu and sigmoid.cu, in float32 (float64) throughout.
#include "common.cuh"

#define FUSED_THREADS 256
#define WARPS (FUSED_THREADS / 32)
#define LOW ((Real)-INFINITY_)
#define WIDE (16 / (int)sizeof(Real))      // numbers in 16 bytes
#define TILE 64                            // rows and columns of a tile
#define CHUNK (128 / (int)sizeof(Real))    // of a row, in one step of a product
#define CHUNK_STRIDE (CHUNK + WIDE)        // eight rows lie in different banks
#define SHARE (TILE * CHUNK / FUSED_THREADS)  // of a thread, when a chunk is fetched

struct Fused {
  Matrix q, k, dq, dk;  // dq, dk: data null where not wanted
  i64 m, n, d;
  Scalar scale, bias;
  double row_weight, column_weight;
  double row_share;           // weight of a row in the reduced loss
  double upstream;            // of all rows, unless each has its own
  const double* upstreams;    // [M] or null
  const i64* positives;       // [M], or null: the other view of a sample, or i for i
  const i64 *query_ids, *key_ids;
  i64 symmetric, two_sided, sigmoid, normalize, gradient;
  i64 parts;                                     // of the features in phase 1
  Real* x;                                       // [max(parts, 2), M, N]: logits, then P
  double *row_inverse, *column_inverse;          // 1 / |z|
  double *row_bad, *column_bad;                  // 0 or NaN
  double *row_gap, *column_gap;
  double *row_dot, *column_dot, *row_sum;
  Real *losses, *row_lse, *column_lse;           // out
  Real *loss, *scale_grad, *bias_grad;           // out
  Real *row_height, *row_factor, *column_height, *column_factor;
  u32* barrier;  // [2], zeros before and after
};

union Vector {
  uint4 bits;
  Real z[WIDE];
};

// All blocks of the grid have come here, and see what the others wrote before.
__device__ __forceinline__ void grid_barrier(u32* arrived, u32& target) {
  target += gridDim.x;
  __syncthreads();  // the whole block is done before its first thread reports that
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
    while (*(volatile u32*)arrived < target) {
    }
    __threadfence();
  }
  __syncthreads();  // nobody goes on before the first thread has seen all others
}

__device__ __forceinline__ bool excluded(const Fused& f, i64 i, i64 j) {
  return (f.symmetric && i == j) || (f.query_ids && f.query_ids[i] == f.key_ids[j]);
}

__device__ __forceinline__ i64 positive_of(const Fused& f, i64 i) {
  if (f.positives) return f.positives[i];
  return !f.symmetric ? i : i < f.m / 2 ? i + f.m / 2 : i - f.m / 2;
}
__device__ __forceinline__ double upstream_of(const Fused& f, i64 i) {
  return f.upstreams ? f.upstreams[i] : f.upstream;
}

// log2 of 2^a + 1, where a may be infinite
__device__ __forceinline__ double softplus2(double a) {
  return fmax(a, 0.0) + log1p(exp2(-fabs(a))) * LOG2_E;
}

// --- phase 0 -----------------------------------------------------------------------------------------------

__device__ void inspect(const Matrix& z, i64 rows, i64 d, double* inverse, double* bad) {
  for (i64 row = blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += gridDim.x * WARPS) {
    double squares = 0, nothing = 0;
    for (i64 k = threadIdx.x % 32; k < d; k += 32) {
      const double x = z.get(row, k);
      squares += x * x;
      nothing += x * 0.0;
    }
    squares = warp_sum(squares);
    nothing = warp_sum(nothing);
    if (threadIdx.x % 32 == 0) {
      inverse[row] = squares == 0 ? 0 : 1 / sqrt(squares);
      bad[row] = nothing;
    }
  }
}

__device__ __forceinline__ Real feature(const Matrix& z, i64 row, i64 k, const double* inverse) {
  if (inverse) return (Real)(z.get(row, k) * inverse[row]);
#if PRECISION == FP64
  return z.get(row, k);
#else
  return z.get_float(row, k);
#endif
}

// --- phase 1 -----------------------------------------------------------------------------------------------

struct Chunks {
  alignas(16) Real q[TILE][CHUNK_STRIDE], k[TILE][CHUNK_STRIDE];
};

// This thread's share of the next chunk, on its way from global memory.
__device__ __forceinline__ void fetch(Real (&to)[SHARE], const Matrix& z, i64 first, i64 rows,
                                      i64 k0, i64 d, const double* inverse) {
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int at = s * FUSED_THREADS + threadIdx.x;
    const i64 row = first + at / CHUNK, k = k0 + at % CHUNK;
    to[s] = row < rows && k < d ? feature(z, row, k, inverse) : 0;
  }
}
__device__ __forceinline__ void put(Real (&to)[TILE][CHUNK_STRIDE], const Real (&from)[SHARE]) {
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int at = s * FUSED_THREADS + threadIdx.x;
    to[at / CHUNK][at % CHUNK] = from[s];
  }
}

// Where this thread's results lie in a tile: rows r + 16 h, columns c + 16 h. Lanes of a warp read
// eight rows and four of the other side at a time.
struct Place {
  int r, c;
};
__device__ __forceinline__ Place place() {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return {warp / 2 * 4 + lane / 8, warp % 2 * 8 + lane % 8};
}

__device__ void logits_tile(const Fused& f, i64 row0, i64 column0, i64 part_of_d,
                            Chunks (&chunks)[2]) {
  const i64 each = (f.d + f.parts * CHUNK - 1) / (f.parts * CHUNK) * CHUNK;
  const i64 begin = part_of_d * each, end = begin + each < f.d ? begin + each : f.d;
  Real* out = f.x + part_of_d * f.m * f.n;
  const double* qi = f.normalize ? f.row_inverse : nullptr;
  const double* ki = f.normalize ? f.column_inverse : nullptr;
  const Place at = place();
  Real q[SHARE], k[SHARE];
  fetch(q, f.q, row0, f.m, begin, end, qi);
  fetch(k, f.k, column0, f.n, begin, end, ki);
  Real x[4][4] = {};
  int buffer = 0;
  for (i64 k0 = begin; k0 < end; k0 += CHUNK, buffer ^= 1) {
    Chunks& s = chunks[buffer];
    put(s.q, q);
    put(s.k, k);
    // The chunk is complete; and whoever comes here has done with the other buffer, refilled next
    __syncthreads();
    if (k0 + CHUNK < end) {
      fetch(q, f.q, row0, f.m, k0 + CHUNK, end, qi);
      fetch(k, f.k, column0, f.n, k0 + CHUNK, end, ki);
    }
    Real part[4][4] = {};  // sums of sums: fewer digits are lost
#pragma unroll
    for (int w = 0; w < CHUNK; w += WIDE) {
      Vector a[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) a[h].bits = *(const uint4*)&s.q[at.r + 16 * h][w];
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        Vector b;
        b.bits = *(const uint4*)&s.k[at.c + 16 * v][w];
#pragma unroll
        for (int e = 0; e < WIDE; ++e)
#pragma unroll
          for (int h = 0; h < 4; ++h) part[h][v] += a[h].z[e] * b.z[e];
      }
    }
#pragma unroll
    for (int h = 0; h < 16; ++h) x[h / 4][h % 4] += part[h / 4][h % 4];
  }
#pragma unroll
  for (int h = 0; h < 16; ++h) {
    const i64 i = row0 + at.r + h / 4 * 16, j = column0 + at.c + h % 4 * 16;
    if (i >= f.m || j >= f.n) continue;
    out[i * f.n + j] = x[h / 4][h % 4];
    if (f.symmetric && row0 != column0) out[j * f.n + i] = x[h / 4][h % 4];
  }
  __syncthreads();  // buffers are free for the next tile
}

// Tile t of the logits: row by row; where x is symmetric, those on the diagonal and beyond.
__device__ __forceinline__ void tile_of(const Fused& f, i64 t, i64 across, i64& row, i64& column) {
  row = f.symmetric ? 0 : t / across;
  column = f.symmetric ? t : t % across;
  if (f.symmetric)
    for (; column >= across; column += ++row) column -= across;
}

// Parts of logits to their sum. A warp takes the rows that it will read again in phase 2, each lane
// the same columns, so that no barrier is needed for rows.
__device__ void add_parts(const Fused& f) {
  const i64 size = f.m * f.n;
  for (i64 i = blockIdx.x * WARPS + threadIdx.x / 32; i < f.m; i += gridDim.x * WARPS)
    for (i64 j = threadIdx.x % 32; j < f.n; j += 32) {
      Real* x = f.x + i * f.n + j;
      Real sum = *x;
      for (i64 p = 1; p < f.parts; ++p) sum += x[p * size];
      *x = sum;
    }
  __syncwarp();  // lane 0 reads the positive's logit, which another lane has summed
}

// --- phase 2 -----------------------------------------------------------------------------------------------

// What follows from the log-sum-exp of a row's negatives (max, sum) and its positive's product.
__device__ __forceinline__ void conclude(double c, double max, double sum, double positive,
                                         double weight, double* gap, Real* lse, Real* height,
                                         Real* factor) {
  const double n = sum > 0 || sum != sum ? c * max + log2(sum) : -INFINITY_, p = c * positive;
  *gap = n - p;
  const double both = p + softplus2(n - p);
  *lse = (Real)(LN_2 * both);
  const double exact = both / c;
  const Real h = isfinite(exact) ? (Real)exact : 0;
  *height = h;
  *factor = (Real)(weight * exp2(c * (double)h - both));
}

__device__ void row_log_sum_exp(const Fused& f, double scale) {
  const double c2 = scale * LOG2_E;
  const Real c = (Real)c2;
  const int lane = threadIdx.x % 32;
  for (i64 i = blockIdx.x * WARPS + threadIdx.x / 32; i < f.m; i += gridDim.x * WARPS) {
    const Real* x = f.x + i * f.n;
    const i64 y = positive_of(f, i);
    Real top = LOW;
    for (i64 j = lane; j < f.n; j += 32)
      if (j != y && !excluded(f, i, j)) top = max_(top, x[j]);
#pragma unroll
    for (int l = 16; l > 0; l /= 2) top = max_(top, __shfl_xor_sync(ALL_LANES, top, l));
    const Real shift = top == LOW ? 0 : top;
    double sum = 0;
    for (i64 j = lane; j < f.n; j += 32)
      if (j != y && !excluded(f, i, j)) sum += exp2_(c * (x[j] - shift));
    sum = warp_sum(sum);
    if (lane == 0)
      conclude(c2, top, sum, x[y], upstream_of(f, i) * f.row_weight * scale, f.row_gap + i,
               f.row_lse + i, f.row_height + i, f.row_factor + i);
  }
}

// A block takes 32 columns at a time; its warps take rows in turn.
__device__ void column_log_sum_exp(const Fused& f, double scale) {
  __shared__ Real tops[WARPS][32];
  __shared__ double sums[WARPS][32];
  const double c2 = scale * LOG2_E;
  const Real c = (Real)c2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (i64 j0 = blockIdx.x * 32; j0 < f.n; j0 += gridDim.x * 32) {
    const i64 j = j0 + lane;
    Real top = LOW;
    if (j < f.n)
      for (i64 i = warp; i < f.m; i += WARPS)
        if (j != positive_of(f, i) && !excluded(f, i, j)) top = max_(top, f.x[i * f.n + j]);
    tops[warp][lane] = top;
    __syncthreads();  // all warps' maxima are there
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = max_(top, tops[w][lane]);
    const Real shift = top == LOW ? 0 : top;
    double sum = 0;
    if (j < f.n)
      for (i64 i = warp; i < f.m; i += WARPS)
        if (j != positive_of(f, i) && !excluded(f, i, j)) sum += exp2_(c * (f.x[i * f.n + j] - shift));
    sums[warp][lane] = sum;
    __syncthreads();  // all warps' sums are there, and nobody reads maxima any more
    if (warp == 0 && j < f.n) {
      sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sums[w][lane];
      conclude(c2, top, sum, f.x[j * f.n + j], upstream_of(f, j) * f.column_weight * scale,
               f.column_gap + j, f.column_lse + j, f.column_height + j, f.column_factor + j);
    }
    __syncthreads();  // sums have been read before the next columns overwrite them
  }
}

// --- dL/dx --------------------------------------------------------------------------------------------------

struct Slope {
  Real c, scale, bias;
};

// dL/dx_ij of a negative, with `scale` folded in.
__device__ __forceinline__ Real slope(const Fused& f, const Slope& s, i64 i, i64 j, Real x) {
  if (f.sigmoid) {
    const Real z = s.scale * x + s.bias, e = exp2_(-fabs(z) * (Real)LOG2_E);
    const Real share = divide((Real)1, 1 + e);
    return z != z ? z : (z >= 0 ? share : e * share) * f.row_factor[i];
  }
  Real p = f.row_factor[i] * exp2_(s.c * (x - f.row_height[i]));
  if (f.column_factor) p += f.column_factor[j] * exp2_(s.c * (x - f.column_height[j]));
  return p;
}

// --- phase 3 -----------------------------------------------------------------------------------------------

__device__ void rows_of_losses(const Fused& f, const Slope& s, double scale, double bias) {
  const int lane = threadIdx.x % 32;
  for (i64 i = blockIdx.x * WARPS + threadIdx.x / 32; i < f.m; i += gridDim.x * WARPS) {
    const Real* x = f.x + i * f.n;
    const i64 y = positive_of(f, i);
    double bad = 0;
    for (i64 j = lane; j < f.n; j += 32) bad += f.column_bad[j];
    bad = warp_sum(bad) + f.row_bad[i];

    double loss = 0, dot = 0, total = 0, here;  // `here`: dL/dx at the positive
    if (f.sigmoid) {
      const double z = scale * (double)x[y] + bias, e = exp(-fabs(z));
      here = -upstream_of(f, i) * scale * (z >= 0 ? e : 1.0) / (1.0 + e);
      for (i64 j = lane; j < f.n; j += 32) {
        if (j == y || excluded(f, i, j)) continue;
        const Real t = s.scale * x[j] + s.bias;
        loss += max_(t, 0) + log1p_(exp2_(-fabs(t) * (Real)LOG2_E));
      }
      loss = warp_sum(loss) + fmax(-z, 0.0) + log1p(e);
    } else {
      const double gap = f.row_gap[i];
      loss = f.row_weight * LN_2 * softplus2(gap);
      here = -upstream_of(f, i) * f.row_weight * scale * exp2(gap - softplus2(gap));
      if (f.two_sided) {
        const double other = f.column_gap[i];
        loss += f.column_weight * LN_2 * softplus2(other);
        here -= upstream_of(f, i) * f.column_weight * scale * exp2(other - softplus2(other));
      }
      if (f.symmetric) {  // the pair counts for both its rows
        const double other = f.row_gap[y];
        here -= upstream_of(f, y) * f.row_weight * scale * exp2(other - softplus2(other));
      }
    }
    if (lane == 0) f.losses[i] = (Real)(loss + bad);
    if (!f.gradient) continue;
    Real* out = f.x + (f.m + i) * f.n;
    for (i64 j = lane; j < f.n; j += 32) {
      const Real p = j == y ? (Real)here : excluded(f, i, j) ? 0 : slope(f, s, i, j, x[j]);
      out[j] = p;
      if (j == y || p == 0) continue;
      dot += (double)p * (double)x[j];
      total += p;
    }
    dot = warp_sum(dot) + here * (double)x[y];
    total = warp_sum(total) + here;
    if (lane == 0) {
      f.row_dot[i] = dot;
      f.row_sum[i] = total;
    }
  }
}

// sum_i P_ij x_ij for the columns' normalisation.
__device__ void column_dots(const Fused& f) {
  for (i64 j = blockIdx.x * WARPS + threadIdx.x / 32; j < f.n; j += gridDim.x * WARPS) {
    double dot = 0;
    for (i64 i = threadIdx.x % 32; i < f.m; i += 32) {
      const Real p = f.x[(f.m + i) * f.n + j];
      if (p != 0) dot += (double)p * (double)f.x[i * f.n + j];
    }
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) f.column_dot[j] = dot;
  }
}

// --- phase 4 -----------------------------------------------------------------------------------------------

struct Product {
  alignas(16) Real p[TILE][CHUNK_STRIDE];  // P, own rows x others
  alignas(16) Real z[CHUNK][TILE];         // the others' features
};

// 64 rows x 64 features of dQ (KEYS 0) or dK (KEYS 1).
template <int KEYS>
__device__ void gradient_tile(const Fused& f, i64 row0, i64 k0, Product (&products)[2]) {
  const Matrix& own = KEYS ? f.k : f.q;
  const Matrix& other = KEYS ? f.q : f.k;
  const Matrix& out = KEYS ? f.dk : f.dq;
  const double* own_inverse = f.normalize ? (KEYS ? f.column_inverse : f.row_inverse) : nullptr;
  const double* other_inverse = f.normalize ? (KEYS ? f.row_inverse : f.column_inverse) : nullptr;
  const i64 rows = KEYS ? f.n : f.m, others = KEYS ? f.m : f.n;
  const Real* panel = f.x + f.m * f.n;
  const Place at = place();
  const int r = at.r, c = at.c * 4;  // rows r + 16 h, features c..
  Real g[4][4] = {};
  Real p[SHARE], z[SHARE];  // this thread's share of the next step
  const auto fetch_step = [&](i64 o0) {
#pragma unroll
    for (int e = 0; e < SHARE; ++e) {
      const int t = e * FUSED_THREADS + threadIdx.x;  // along a row of P
      const i64 i = KEYS ? o0 + t / TILE : row0 + t / CHUNK;
      const i64 j = KEYS ? row0 + t % TILE : o0 + t % CHUNK;
      p[e] = i < f.m && j < f.n ? panel[i * f.n + j] : 0;
    }
#pragma unroll
    for (int e = 0; e < SHARE; ++e) {
      const int t = e * FUSED_THREADS + threadIdx.x;
      const i64 o = o0 + t / TILE, k = k0 + t % TILE;
      z[e] = o < others && k < f.d ? feature(other, o, k, other_inverse) : 0;
    }
  };
  fetch_step(0);
  int buffer = 0;
  for (i64 o0 = 0; o0 < others; o0 += CHUNK, buffer ^= 1) {
    Product& s = products[buffer];
#pragma unroll
    for (int e = 0; e < SHARE; ++e) {
      const int t = e * FUSED_THREADS + threadIdx.x;
      if (KEYS) s.p[t % TILE][t / TILE] = p[e];
      else s.p[t / CHUNK][t % CHUNK] = p[e];
      s.z[t / TILE][t % TILE] = z[e];
    }
    __syncthreads();  // as in logits_tile
    if (o0 + CHUNK < others) fetch_step(o0 + CHUNK);
    Real part[4][4] = {};
#pragma unroll
    for (int o = 0; o < CHUNK; o += WIDE) {
      Vector ps[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) ps[h].bits = *(const uint4*)&s.p[r + 16 * h][o];
#pragma unroll
      for (int w = 0; w < WIDE; ++w) {
        Vector zs[4 / WIDE];
#pragma unroll
        for (int v = 0; v < 4 / WIDE; ++v) zs[v].bits = *(const uint4*)&s.z[o + w][c + v * WIDE];
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int h = 0; h < 4; ++h) part[h][e] += ps[h].z[w] * zs[e / WIDE].z[e % WIDE];
      }
    }
#pragma unroll
    for (int h = 0; h < 16; ++h) g[h / 4][h % 4] += part[h / 4][h % 4];
  }
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    const i64 row = row0 + r + 16 * h;
    if (row >= rows) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const i64 k = k0 + c + e;
      if (k >= f.d) continue;
      double value = g[h][e];
      if (own_inverse) {  // dz = (dU - u <dU, u>) / |z|
        const double dot = KEYS ? f.column_dot[row] : f.row_dot[row];
        value = (value - own.get(row, k) * own_inverse[row] * dot) * own_inverse[row];
      }
      out.set(row, k, value);
    }
  }
  __syncthreads();  // buffers are free for the next tile
}

// Sum of v[0 .. n), by one warp.
template <class T>
__device__ double sum_of(const T* v, i64 n) {
  double sum = 0;
  for (i64 i = threadIdx.x % 32; i < n; i += 32) sum += v[i];
  return warp_sum(sum);
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS)
fused(const __grid_constant__ Fused f) {
  __shared__ union {
    Chunks chunks[2];
    Product products[2];
  } shared;
  u32 target = 0;
  inspect(f.q, f.m, f.d, f.row_inverse, f.row_bad);
  if (!f.symmetric) inspect(f.k, f.n, f.d, f.column_inverse, f.column_bad);
  if (f.normalize) grid_barrier(f.barrier, target);

  const i64 down = (f.m + TILE - 1) / TILE, across = (f.n + TILE - 1) / TILE;
  const i64 tiles = f.symmetric ? across * (across + 1) / 2 : down * across;
  for (i64 t = blockIdx.x; t < tiles * f.parts; t += gridDim.x) {
    i64 row, column;
    tile_of(f, t % tiles, across, row, column);
    logits_tile(f, row * TILE, column * TILE, t / tiles, shared.chunks);
  }
  grid_barrier(f.barrier, target);

  const double scale = f.scale.get(), bias = f.bias.get();
  const Slope s = {(Real)(scale * LOG2_E), (Real)scale, (Real)bias};
  if (f.parts > 1) {
    add_parts(f);
    if (f.two_sided) grid_barrier(f.barrier, target);
  }
  if (f.sigmoid) {
    for (i64 i = blockIdx.x * WARPS + threadIdx.x / 32; i < f.m; i += gridDim.x * WARPS)
      if (threadIdx.x % 32 == 0) f.row_factor[i] = (Real)(upstream_of(f, i) * scale);
  } else {
    row_log_sum_exp(f, scale);
    if (f.two_sided) column_log_sum_exp(f, scale);
  }
  // Where other rows' log-sum-exps count, those have to be there; a row's own warp knows its own
  if (f.symmetric || f.two_sided) grid_barrier(f.barrier, target);
  else __syncwarp();

  rows_of_losses(f, s, scale, bias);
  grid_barrier(f.barrier, target);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
    const double loss = sum_of(f.losses, f.m);
    if (threadIdx.x == 0) *f.loss = (Real)(f.row_share * loss);
  }
  if (f.gradient) {
    if (f.normalize && f.dk.data) {
      column_dots(f);
      grid_barrier(f.barrier, target);
    }
    const i64 wide = (f.d + TILE - 1) / TILE;
    const i64 of_queries = f.dq.data ? down * wide : 0;
    const i64 of_keys = f.dk.data ? across * wide : 0;
    for (i64 t = blockIdx.x; t < of_queries + of_keys; t += gridDim.x) {
      if (t < of_queries)
        gradient_tile<0>(f, t / wide * TILE, t % wide * TILE, shared.products);
      else
        gradient_tile<1>(f, (t - of_queries) / wide * TILE, (t - of_queries) % wide * TILE,
                         shared.products);
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
      const double dots = sum_of(f.row_dot, f.m), sums = sum_of(f.row_sum, f.m);
      if (threadIdx.x == 0) {
        *f.scale_grad = (Real)(dots / ((f.symmetric ? 2 : 1) * scale));
        *f.bias_grad = (Real)(sums / scale);
      }
    }
  }
  // The last block to leave puts the barrier back for the next launch on this stream
  if (threadIdx.x == 0 && atomicAdd(f.barrier + 1, 1) == gridDim.x - 1) {
    f.barrier[0] = 0;
    f.barrier[1] = 0;
  }
}
