// Loss and gradient of a small or medium batch in one cooperative launch.
//
// The logits are computed once, x_ij = q_i . k_j, and stay in the workspace (and the L2 cache). All
// blocks go through the same phases, with a barrier over the grid between them:
//
//     0  norms; which rows have features that are not finite
//     1  x, by tiles of 32 x 32, and by parts of the features where tiles alone are too few
//     2  per row and per column: log-sum-exp n of the negatives, gap n - p to the positive's logit
//     3  per row: loss = softplus(gap), P = dL/dx, sum_j P_ij x_ij
//     4  dQ = P K and dK = P' Q, by tiles of 32 rows x 64 features; sums over all rows, in a fixed
//        order
//
// Formulas are those of lse.cu, gradient.cu and sigmoid.cu, in float32 (float64) throughout.
#include "common.cuh"

#define FUSED_THREADS 256
#ifndef BLOCKS
#define BLOCKS 2  // on a multiprocessor: most of the time is waiting for memory
#endif
#define WARPS (FUSED_THREADS / 32)
#define LOW ((Real)-INFINITY_)
#define WIDE (16 / (int)sizeof(Real))      // numbers in 16 bytes
#define CHUNK (256 / (int)sizeof(Real))    // features of a row that phase 1 has in shared memory
#define CHUNK_STRIDE (CHUNK + WIDE)        // eight rows lie in different banks
#define FEATURES 64                        // of a tile of gradients

struct Fused {
  Matrix q, k, dq, dk;  // dq, dk: data null where not wanted
  i64 m, n, d;
  Scalar scale, bias;
  double row_weight, column_weight;
  const double* upstream;  // [M]
  const i64 *positives, *query_ids, *key_ids;
  i64 symmetric, two_sided, sigmoid, normalize, gradient;
  i64 parts;                                     // of the features in phase 1
  Real* x;                                       // [max(parts, 2), M, N]: logits, then P
  double *row_inverse, *column_inverse;          // 1 / |z|
  double *row_bad, *column_bad;                  // 0 or NaN
  double *row_gap, *column_gap;
  double *row_dot, *column_dot, *row_sum;
  double *losses, *row_lse, *column_lse;         // out
  double *scale_grad, *bias_grad;                // out
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
  alignas(16) Real q[32][CHUNK_STRIDE], k[32][CHUNK_STRIDE];
};

// This thread's share of the next chunk, on its way from global memory.
struct Fetched {
  Real z[32 * CHUNK / FUSED_THREADS];
};

__device__ __forceinline__ void fetch(Fetched& to, const Matrix& z, i64 first, i64 rows, i64 k0,
                                      i64 d, const double* inverse) {
#pragma unroll
  for (int s = 0; s < 32 * CHUNK / FUSED_THREADS; ++s) {
    const int at = s * FUSED_THREADS + threadIdx.x;
    const i64 row = first + at / CHUNK, k = k0 + at % CHUNK;
    to.z[s] = row < rows && k < d ? feature(z, row, k, inverse) : 0;
  }
}
__device__ __forceinline__ void put(Real (&to)[32][CHUNK_STRIDE], const Fetched& from) {
#pragma unroll
  for (int s = 0; s < 32 * CHUNK / FUSED_THREADS; ++s) {
    const int at = s * FUSED_THREADS + threadIdx.x;
    to[at / CHUNK][at % CHUNK] = from.z[s];
  }
}

__device__ void logits_tile(const Fused& f, i64 row0, i64 column0, i64 part_of_d,
                            Chunks (&chunks)[2]) {
  const i64 each = (f.d + f.parts * CHUNK - 1) / (f.parts * CHUNK) * CHUNK;
  const i64 begin = part_of_d * each, end = begin + each < f.d ? begin + each : f.d;
  Real* out = f.x + part_of_d * f.m * f.n;
  const double* qi = f.normalize ? f.row_inverse : nullptr;
  const double* ki = f.normalize ? f.column_inverse : nullptr;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = warp / 2 * 4 + lane / 8, c = warp % 2 * 8 + lane % 8;  // and 16 beyond
  Fetched q, k;
  fetch(q, f.q, row0, f.m, begin, end, qi);
  fetch(k, f.k, column0, f.n, begin, end, ki);
  Real x[2][2] = {{0, 0}, {0, 0}};
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
    Real part[2][2] = {{0, 0}, {0, 0}};  // sums of sums: fewer digits are lost
#pragma unroll
    for (int at = 0; at < CHUNK; at += WIDE) {
      Vector a[2], b[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        a[h].bits = *(const uint4*)&s.q[r + 16 * h][at];
        b[h].bits = *(const uint4*)&s.k[c + 16 * h][at];
      }
#pragma unroll
      for (int e = 0; e < WIDE; ++e)
#pragma unroll
        for (int h = 0; h < 4; ++h) part[h / 2][h % 2] += a[h / 2].z[e] * b[h % 2].z[e];
    }
#pragma unroll
    for (int h = 0; h < 4; ++h) x[h / 2][h % 2] += part[h / 2][h % 2];
  }
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    const i64 i = row0 + r + h / 2 * 16, j = column0 + c + h % 2 * 16;
    if (i < f.m && j < f.n) out[i * f.n + j] = x[h / 2][h % 2];
  }
  __syncthreads();  // buffers are free for the next tile
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
                                         double weight, double* gap, double* lse, Real* height,
                                         Real* factor) {
  const double n = sum > 0 || sum != sum ? c * max + log2(sum) : -INFINITY_, p = c * positive;
  *gap = n - p;
  const double both = p + softplus2(n - p);
  *lse = LN_2 * both;
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
    const i64 y = f.positives[i];
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
      conclude(c2, top, sum, x[y], f.upstream[i] * f.row_weight * scale, f.row_gap + i,
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
        if (j != f.positives[i] && !excluded(f, i, j)) top = max_(top, f.x[i * f.n + j]);
    tops[warp][lane] = top;
    __syncthreads();  // all warps' maxima are there
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = max_(top, tops[w][lane]);
    const Real shift = top == LOW ? 0 : top;
    double sum = 0;
    if (j < f.n)
      for (i64 i = warp; i < f.m; i += WARPS)
        if (j != f.positives[i] && !excluded(f, i, j)) sum += exp2_(c * (f.x[i * f.n + j] - shift));
    sums[warp][lane] = sum;
    __syncthreads();  // all warps' sums are there, and nobody reads maxima any more
    if (warp == 0 && j < f.n) {
      sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sums[w][lane];
      conclude(c2, top, sum, f.x[j * f.n + j], f.upstream[j] * f.column_weight * scale,
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
    const i64 y = f.positives[i];
    double bad = 0;
    for (i64 j = lane; j < f.n; j += 32) bad += f.column_bad[j];
    bad = warp_sum(bad) + f.row_bad[i];

    double loss = 0, dot = 0, total = 0, here;  // `here`: dL/dx at the positive
    if (f.sigmoid) {
      const double z = scale * (double)x[y] + bias, e = exp(-fabs(z));
      here = -f.upstream[i] * scale * (z >= 0 ? e : 1.0) / (1.0 + e);
      for (i64 j = lane; j < f.n; j += 32) {
        if (j == y || excluded(f, i, j)) continue;
        const Real t = s.scale * x[j] + s.bias;
        loss += max_(t, 0) + log1p_(exp2_(-fabs(t) * (Real)LOG2_E));
      }
      loss = warp_sum(loss) + fmax(-z, 0.0) + log1p(e);
    } else {
      const double gap = f.row_gap[i];
      loss = f.row_weight * LN_2 * softplus2(gap);
      here = -f.upstream[i] * f.row_weight * scale * exp2(gap - softplus2(gap));
      if (f.two_sided) {
        const double other = f.column_gap[i];
        loss += f.column_weight * LN_2 * softplus2(other);
        here -= f.upstream[i] * f.column_weight * scale * exp2(other - softplus2(other));
      }
      if (f.symmetric) {  // the pair counts for both its rows
        const double other = f.row_gap[y];
        here -= f.upstream[y] * f.row_weight * scale * exp2(other - softplus2(other));
      }
    }
    if (lane == 0) f.losses[i] = loss + bad;
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
  alignas(16) Real p[32][32 + WIDE];  // P, own rows x others
  alignas(16) Real z[32][FEATURES];   // the others' features
};

// 32 rows x FEATURES features of dQ (KEYS 0) or dK (KEYS 1).
template <int KEYS>
__device__ void gradient_tile(const Fused& f, i64 row0, i64 k0, Product& t) {
  const Matrix& own = KEYS ? f.k : f.q;
  const Matrix& other = KEYS ? f.q : f.k;
  const Matrix& out = KEYS ? f.dk : f.dq;
  const double* own_inverse = f.normalize ? (KEYS ? f.column_inverse : f.row_inverse) : nullptr;
  const double* other_inverse = f.normalize ? (KEYS ? f.row_inverse : f.column_inverse) : nullptr;
  const i64 rows = KEYS ? f.n : f.m, others = KEYS ? f.m : f.n;
  const Real* panel = f.x + f.m * f.n;
  const int r = threadIdx.x / 16, c = threadIdx.x % 16 * 4;  // rows r and r + 16, features c..
  Real g[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
  Real p[4], z[8];  // this thread's share of the next step
  const auto fetch_step = [&](i64 o0) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = e * FUSED_THREADS + threadIdx.x;  // along a row of P
      const i64 i = KEYS ? o0 + at / 32 : row0 + at / 32, j = KEYS ? row0 + at % 32 : o0 + at % 32;
      p[e] = i < f.m && j < f.n ? panel[i * f.n + j] : 0;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int at = e * FUSED_THREADS + threadIdx.x;
      const i64 o = o0 + at / FEATURES, k = k0 + at % FEATURES;
      z[e] = o < others && k < f.d ? feature(other, o, k, other_inverse) : 0;
    }
  };
  fetch_step(0);
  for (i64 o0 = 0; o0 < others; o0 += 32) {
    __syncthreads();  // the last step's numbers have been used
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = e * FUSED_THREADS + threadIdx.x;
      if (KEYS) t.p[at % 32][at / 32] = p[e];
      else t.p[at / 32][at % 32] = p[e];
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int at = e * FUSED_THREADS + threadIdx.x;
      t.z[at / FEATURES][at % FEATURES] = z[e];
    }
    __syncthreads();  // this step's numbers are complete
    if (o0 + 32 < others) fetch_step(o0 + 32);
    Real part[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
    for (int o = 0; o < 32; o += WIDE) {
      Vector ps[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) ps[h].bits = *(const uint4*)&t.p[r + 16 * h][o];
#pragma unroll
      for (int w = 0; w < WIDE; ++w) {
        Vector zs[4 / WIDE];
#pragma unroll
        for (int v = 0; v < 4 / WIDE; ++v)
          zs[v].bits = *(const uint4*)&t.z[o + w][c + v * WIDE];
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int h = 0; h < 2; ++h) part[h][e] += ps[h].z[w] * zs[e / WIDE].z[e % WIDE];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) g[h][e] += part[h][e];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
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
}

// Sum of v[0 .. n), by one warp.
__device__ double sum_of(const double* v, i64 n) {
  double sum = 0;
  for (i64 i = threadIdx.x % 32; i < n; i += 32) sum += v[i];
  return warp_sum(sum);
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS, BLOCKS)
fused(const __grid_constant__ Fused f) {
  __shared__ union {
    Chunks chunks[2];
    Product product;
  } shared;
  u32 target = 0;
  inspect(f.q, f.m, f.d, f.row_inverse, f.row_bad);
  if (!f.symmetric) inspect(f.k, f.n, f.d, f.column_inverse, f.column_bad);
  if (f.normalize) grid_barrier(f.barrier, target);

  const i64 across = (f.n + 31) / 32, tiles = (f.m + 31) / 32 * across;
  for (i64 t = blockIdx.x; t < tiles * f.parts; t += gridDim.x) {
    const i64 tile = t % tiles;
    logits_tile(f, tile / across * 32, tile % across * 32, t / tiles, shared.chunks);
  }
  grid_barrier(f.barrier, target);

  const double scale = f.scale.get(), bias = f.bias.get();
  const Slope s = {(Real)(scale * LOG2_E), (Real)scale, (Real)bias};
  if (f.parts > 1) {
    add_parts(f);
    if (f.two_sided) grid_barrier(f.barrier, target);
  }
  if (f.sigmoid) {
    for (i64 i = blockIdx.x * FUSED_THREADS + threadIdx.x; i < f.m;
         i += gridDim.x * FUSED_THREADS)
      f.row_factor[i] = (Real)(f.upstream[i] * scale);
  } else {
    row_log_sum_exp(f, scale);
    if (f.two_sided) column_log_sum_exp(f, scale);
  }
  grid_barrier(f.barrier, target);

  rows_of_losses(f, s, scale, bias);
  if (f.gradient) {
    grid_barrier(f.barrier, target);
    if (f.normalize && f.dk.data) {
      column_dots(f);
      grid_barrier(f.barrier, target);
    }
    const i64 wide = (f.d + FEATURES - 1) / FEATURES;
    const i64 of_queries = f.dq.data ? (f.m + 31) / 32 * wide : 0;
    const i64 of_keys = f.dk.data ? (f.n + 31) / 32 * wide : 0;
    for (i64 t = blockIdx.x; t < of_queries + of_keys; t += gridDim.x) {
      if (t < of_queries)
        gradient_tile<0>(f, t / wide * 32, t % wide * FEATURES, shared.product);
      else
        gradient_tile<1>(f, (t - of_queries) / wide * 32, (t - of_queries) % wide * FEATURES,
                         shared.product);
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
      const double dots = sum_of(f.row_dot, f.m), sums = sum_of(f.row_sum, f.m);
      if (threadIdx.x == 0) {
        *f.scale_grad = dots / ((f.symmetric ? 2 : 1) * scale);
        *f.bias_grad = sums / scale;
      }
    }
  }
  // The last block to leave puts the barrier back for the next launch on this stream
  if (threadIdx.x == 0 && atomicAdd(f.barrier + 1, 1) == gridDim.x - 1) {
    f.barrier[0] = 0;
    f.barrier[1] = 0;
  }
}
