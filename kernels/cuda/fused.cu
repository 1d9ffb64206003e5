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
// In a product, four groups of 64 threads share the steps' depth; a thread has 8 x 8 results of the
// tile. Sixteen numbers from shared memory serve 64 multiply-adds: fewer, and reading would take
// longer than computing.
//
// Formulas are those of lse.cu, gradient.cu and sigmoid.cu, in float32 (float64) throughout.
#include "fused_product.cuh"

// --- phase 0 -----------------------------------------------------------------------------------------------

__device__ void inspect(const Matrix& z, i64 rows, i64 d, double* inverse, double* bad,
                        double* memory) {
  const Team team(rows, memory);
  for (i64 row = team.row; row < rows; row += team.step) {
    double squares = 0, nothing = 0;
#pragma unroll 8
    for (i64 k = team.lane; k < d; k += team.lanes) {
      const double x = number(*address(z, row, k));
      squares += x * x;
      nothing += x * 0.0;
    }
    squares = team.sum(squares);
    nothing = team.sum(nothing);
    if (team.lane == 0) {
      inverse[row] = squares == 0 ? 0 : 1 / sqrt(squares);
      bad[row] = nothing;
    }
  }
}

// --- phase 1 -----------------------------------------------------------------------------------------------

__device__ void logits_tile(const Fused& f, i64 row0, i64 column0, i64 part_of_d,
                            Shared& shared) {
  const i64 each = (f.d + f.parts * CHUNK - 1) / (f.parts * CHUNK) * CHUNK;
  const i64 begin = part_of_d * each, end = begin + each < f.d ? begin + each : f.d;
  Real* out = f.x + part_of_d * f.m * f.n;
  constexpr int STEP = FUSED_THREADS / CHUNK;
  const int row = threadIdx.x / CHUNK, column = threadIdx.x % CHUNK;
  const int qs = at_most_tile(f.m - row0 - row);  // rows from this thread's first on
  const int ks = at_most_tile(f.n - column0 - row);
  const double* qi = NORMALIZE ? f.row_inverse + row0 + row : nullptr;
  const double* ki = NORMALIZE ? f.column_inverse + column0 + row : nullptr;
  const Place at = place();
  Element q[SHARE], k[SHARE];
  const auto fetch_step = [&](i64 k0) {
    const bool inside = k0 + column < end;
    fetch<STEP>(q, address(f.q, row0 + row, k0 + column), f.q.row_stride, inside ? qs : 0);
    fetch<STEP>(k, address(f.k, column0 + row, k0 + column), f.k.row_stride, inside ? ks : 0);
  };
  fetch_step(begin);
  Real x[8][8] = {};
  int buffer = 0;
  for (i64 k0 = begin; k0 < end; k0 += CHUNK, buffer ^= 1) {
    Chunks& s = shared.chunks[buffer];
#pragma unroll
    for (int e = 0; e < SHARE; ++e) {
      s.q[row + e * STEP][column] = feature<STEP>(q, e, qs, qi);
      s.k[row + e * STEP][column] = feature<STEP>(k, e, ks, ki);
    }
    // The chunk is complete; and whoever comes here has done with the other buffer, refilled next
    __syncthreads();
    if (k0 + CHUNK < end) fetch_step(k0 + CHUNK);
#pragma unroll
    for (int w = 0; w < DEPTH; w += WIDE) {
      Vector a[8];
#pragma unroll
      for (int h = 0; h < 8; ++h)
        a[h].bits = *(const uint4*)&s.q[at.r + 8 * h][at.group * DEPTH + w];
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        Vector b;
        b.bits = *(const uint4*)&s.k[column_of<false>(at.c, v)][at.group * DEPTH + w];
#pragma unroll
        for (int e = 0; e < WIDE; ++e)
#pragma unroll
          for (int h = 0; h < 8; ++h) x[h][v] += a[h].z[e] * b.z[e];
      }
    }
  }
  add_groups<false>(x, at, shared.sums);
  for (int t = threadIdx.x; t < TILE * TILE; t += FUSED_THREADS) {
    const i64 i = row0 + t / TILE, j = column0 + t % TILE;
    if (i < f.m && j < f.n) out[i * f.n + j] = total(shared.sums, t / TILE, t % TILE);
  }
  if (SYMMETRIC && row0 != column0)  // the same tile on the other side of the diagonal
    for (int t = threadIdx.x; t < TILE * TILE; t += FUSED_THREADS) {
      const i64 i = column0 + t / TILE, j = row0 + t % TILE;
      if (i < f.m && j < f.n) out[i * f.n + j] = total(shared.sums, t % TILE, t / TILE);
    }
  __syncthreads();  // shared memory is free for the next tile
}

// Tile t of the logits: row by row; where x is symmetric, those on the diagonal and beyond.
__device__ __forceinline__ void tile_of(const Fused& f, i64 t, i64 across, i64& row, i64& column) {
  row = SYMMETRIC ? 0 : t / across;
  column = SYMMETRIC ? t : t % across;
  if (SYMMETRIC)
    for (; column >= across; column += ++row) column -= across;
}

// Parts of logits to their sum. A team takes the rows that it will read again in phase 2, so that
// no barrier is needed for rows.
__device__ void add_parts(const Fused& f, double* memory) {
  const i64 size = f.m * f.n;
  const Team team(f.m, memory);
  for (i64 i = team.row; i < f.m; i += team.step)
    for (i64 j = team.lane; j < f.n; j += team.lanes) {
      Real* x = f.x + i * f.n + j;
      Real part[MOST_PARTS];  // all on their way at once
#pragma unroll
      for (int p = 0; p < MOST_PARTS; ++p) part[p] = p < f.parts ? x[p * size] : 0;
#pragma unroll
      for (int p = 1; p < MOST_PARTS; ++p) part[0] += part[p];
      *x = part[0];
    }
  team.sync();  // one thread reads the positive's logit, which another has summed
}

// --- phase 2 -----------------------------------------------------------------------------------------------

// What follows from the log-sum-exp of a row's negatives (max, sum) and its positive's product.
__device__ __noinline__ void conclude(double c, double max, double sum, double positive,
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

__device__ void row_log_sum_exp(const Fused& f, double scale, double* memory) {
  const double c2 = scale * LOG2_E;
  const Real c = (Real)c2;
  const Team team(f.m, memory);
  for (i64 i = team.row; i < f.m; i += team.step) {
    const Real* x = f.x + i * f.n;
    const i64 y = positive_of(f, i);
    Real top = LOW;
#pragma unroll 4
    for (i64 j = team.lane; j < f.n; j += team.lanes)
      if (j != y && !excluded(f, i, j)) top = max_(top, x[j]);
    top = (Real)team.max(top);
    const Real shift = top == LOW ? 0 : top;
    double sum = 0;
#pragma unroll 4
    for (i64 j = team.lane; j < f.n; j += team.lanes)
      if (j != y && !excluded(f, i, j)) sum += exp2_(c * (x[j] - shift));
    sum = team.sum(sum);
    if (team.lane == 0)
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
#pragma unroll 4
      for (i64 i = warp; i < f.m; i += WARPS)
        if (j != positive_of(f, i) && !excluded(f, i, j)) top = max_(top, f.x[i * f.n + j]);
    tops[warp][lane] = top;
    __syncthreads();  // all warps' maxima are there
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = max_(top, tops[w][lane]);
    const Real shift = top == LOW ? 0 : top;
    double sum = 0;
    if (j < f.n)
#pragma unroll 4
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
  if (SIGMOID) {
    const Real z = s.scale * x + s.bias, e = exp2_(-fabs(z) * (Real)LOG2_E);
    Real share, log1p;
    sigmoid_parts(e, share, log1p);
    return (z < 0 ? e * share : share) * f.row_factor[i];
  }
  Real p = f.row_factor[i] * exp2_(s.c * (x - f.row_height[i]));
  if (SYMMETRIC || TWO_SIDED) p += f.column_factor[j] * exp2_(s.c * (x - f.column_height[j]));
  return p;
}

// --- phase 3 -----------------------------------------------------------------------------------------------

__device__ void rows_of_losses(const Fused& f, const Slope& s, double scale, double bias,
                               double* memory) {
  const Team team(f.m, memory);
  for (i64 i = team.row; i < f.m; i += team.step) {
    const Real* x = f.x + i * f.n;
    const i64 y = positive_of(f, i);
    double bad = 0;
    for (i64 j = team.lane; j < f.n; j += team.lanes) bad += f.column_bad[j];
    bad = team.sum(bad) + f.row_bad[i];

    double loss = 0, dot = 0, total = 0, here;  // `here`: dL/dx at the positive
    if (SIGMOID) {
      const double z = scale * (double)x[y] + bias, e = exp(-fabs(z));
      here = -upstream_of(f, i) * scale * (z >= 0 ? e : 1.0) / (1.0 + e);
      for (i64 j = team.lane; j < f.n; j += team.lanes) {
        if (j == y || excluded(f, i, j)) continue;
        const Real t = s.scale * x[j] + s.bias;
        Real share, log1p;
        sigmoid_parts(exp2_(-fabs(t) * (Real)LOG2_E), share, log1p);
        loss += max_(t, 0) + log1p;
      }
      loss = team.sum(loss) + fmax(-z, 0.0) + log1p(e);
    } else {
      const double gap = f.row_gap[i];
      loss = f.row_weight * LN_2 * softplus2(gap);
      here = -upstream_of(f, i) * f.row_weight * scale * sigmoid2(gap);
      if (TWO_SIDED) {
        const double other = f.column_gap[i];
        loss += f.column_weight * LN_2 * softplus2(other);
        here -= upstream_of(f, i) * f.column_weight * scale * sigmoid2(other);
      }
      if (SYMMETRIC) {  // the pair counts for both its rows
        const double other = f.row_gap[y];
        here -= upstream_of(f, y) * f.row_weight * scale * sigmoid2(other);
      }
    }
    if (team.lane == 0) f.losses[i] = (Real)(loss + bad);
    if (!f.gradient) continue;
    Real* out = f.x + (f.m + i) * f.n;
    for (i64 j = team.lane; j < f.n; j += team.lanes) {
      const Real p = j == y ? (Real)here : excluded(f, i, j) ? 0 : slope(f, s, i, j, x[j]);
      out[j] = p;
      if (j == y || p == 0) continue;
      dot += (double)p * (double)x[j];
      total += p;
    }
    dot = team.sum(dot) + here * (double)x[y];
    total = team.sum(total) + here;
    if (team.lane == 0) {
      f.row_dot[i] = dot;
      f.row_sum[i] = total;
    }
  }
}

// sum_i P_ij x_ij for the columns' normalisation.
__device__ void column_dots(const Fused& f, double* memory) {
  const Team team(f.n, memory);
  for (i64 j = team.row; j < f.n; j += team.step) {
    double dot = 0;
#pragma unroll 4
    for (i64 i = team.lane; i < f.m; i += team.lanes) {
      const Real p = f.x[(f.m + i) * f.n + j];
      if (p != 0) dot += (double)p * (double)f.x[i * f.n + j];
    }
    dot = team.sum(dot);
    if (team.lane == 0) f.column_dot[j] = dot;
  }
}

// --- phase 4 -----------------------------------------------------------------------------------------------

// 64 rows x 64 features of dQ (KEYS 0) or dK (KEYS 1).
template <int KEYS>
__device__ void gradient_tile(const Fused& f, i64 row0, i64 k0, Shared& shared) {
  const Matrix& own = KEYS ? f.k : f.q;
  const Matrix& other = KEYS ? f.q : f.k;
  const Matrix& out = KEYS ? f.dk : f.dq;
  const double* own_inverse = NORMALIZE ? (KEYS ? f.column_inverse : f.row_inverse) : nullptr;
  const i64 rows = KEYS ? f.n : f.m, others = KEYS ? f.m : f.n;
  const Real* panel = f.x + f.m * f.n;
  const Place at = place();
  Real g[8][8] = {};

  // This thread's share of a step: P along its rows, features along theirs
  constexpr int P_WIDTH = KEYS ? TILE : CHUNK, P_STEP = FUSED_THREADS / P_WIDTH;
  constexpr int Z_STEP = FUSED_THREADS / TILE;
  const int p_row = threadIdx.x / P_WIDTH, p_column = threadIdx.x % P_WIDTH;
  const int z_row = threadIdx.x / TILE, z_column = threadIdx.x % TILE;
  Real p[SHARE];
  Element z[SHARE];
  const auto fetch_step = [&](i64 o0) {
    const i64 i = (KEYS ? o0 : row0) + p_row, j = (KEYS ? row0 : o0) + p_column;
    fetch<P_STEP>(p, panel + i * f.n + j, f.n, j < f.n ? at_most_tile(f.m - i) : 0);
    fetch<Z_STEP>(z, address(other, o0 + z_row, k0 + z_column), other.row_stride,
                  k0 + z_column < f.d ? at_most_tile(others - o0 - z_row) : 0);
  };
  fetch_step(0);
  int buffer = 0;
  for (i64 o0 = 0; o0 < others; o0 += CHUNK, buffer ^= 1) {
    Product& s = shared.products[buffer];
    const double* inverse = nullptr;
    if (NORMALIZE) inverse = (KEYS ? f.row_inverse : f.column_inverse) + o0 + z_row;
#pragma unroll
    for (int e = 0; e < SHARE; ++e) {
      const int t = p_row + e * P_STEP;
      if (KEYS) s.p[p_column][t] = p[e];
      else s.p[t][p_column] = p[e];
      s.z[z_row + e * Z_STEP][z_column] = feature<Z_STEP>(z, e, at_most_tile(others - o0 - z_row), inverse);
    }
    __syncthreads();  // as in logits_tile
    if (o0 + CHUNK < others) fetch_step(o0 + CHUNK);
#pragma unroll
    for (int o = 0; o < DEPTH; o += WIDE) {
      Vector ps[8];
#pragma unroll
      for (int h = 0; h < 8; ++h)
        ps[h].bits = *(const uint4*)&s.p[at.r + 8 * h][at.group * DEPTH + o];
#pragma unroll
      for (int w = 0; w < WIDE; ++w)
#pragma unroll
        for (int v = 0; v < 8; v += WIDE) {
          Vector zs;
          zs.bits = *(const uint4*)&s.z[at.group * DEPTH + o + w][column_of<true>(at.c, v)];
#pragma unroll
          for (int e = 0; e < WIDE; ++e)
#pragma unroll
            for (int h = 0; h < 8; ++h) g[h][v + e] += ps[h].z[w] * zs.z[e];
        }
    }
  }
  add_groups<true>(g, at, shared.sums);
  for (int t = threadIdx.x; t < TILE * TILE; t += FUSED_THREADS) {
    const i64 row = row0 + t / TILE, k = k0 + t % TILE;
    if (row >= rows || k >= f.d) continue;
    double value = total(shared.sums, t / TILE, t % TILE);
    if (own_inverse) {  // dz = (dU - u <dU, u>) / |z|
      const double dot = KEYS ? f.column_dot[row] : f.row_dot[row];
      const double u = (double)number(*address(own, row, k)) * own_inverse[row];
      value = (value - u * dot) * own_inverse[row];
    }
    out.set(row, k, value);
  }
  __syncthreads();  // shared memory is free for the next tile
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
  __shared__ Shared shared;
  __shared__ double memory[WARPS];
  u32 target = 0;
  const auto inspect_all = [&] {
    inspect(f.q, f.m, f.d, f.row_inverse, f.row_bad, memory);
    if (!SYMMETRIC) inspect(f.k, f.n, f.d, f.column_inverse, f.column_bad, memory);
  };
  if (NORMALIZE) {
    inspect_all();
    grid_barrier(f.barrier, target);
  }

  const i64 down = (f.m + TILE - 1) / TILE, across = (f.n + TILE - 1) / TILE;
  const i64 tiles = SYMMETRIC ? across * (across + 1) / 2 : down * across;
  for (i64 t = blockIdx.x; t < tiles * f.parts; t += gridDim.x) {
    i64 row, column;
    tile_of(f, t % tiles, across, row, column);
    logits_tile(f, row * TILE, column * TILE, t / tiles, shared);
  }
  if (!NORMALIZE) inspect_all();  // by now the features are in the cache
  grid_barrier(f.barrier, target);

  const double scale = f.scale.get(), bias = f.bias.get();
  const Slope s = {(Real)(scale * LOG2_E), (Real)scale, (Real)bias};
  if (f.parts > 1) {
    add_parts(f, memory);
    if (TWO_SIDED) grid_barrier(f.barrier, target);
  }
  const Team team(f.m, memory);
  if (SIGMOID) {
    for (i64 i = team.row; i < f.m; i += team.step)
      if (team.lane == 0) f.row_factor[i] = (Real)(upstream_of(f, i) * scale);
  } else {
    row_log_sum_exp(f, scale, memory);
    if (TWO_SIDED) column_log_sum_exp(f, scale);
  }
  // Where other rows' log-sum-exps count, those have to be there; a row's own team knows its own
  if (SYMMETRIC || TWO_SIDED) grid_barrier(f.barrier, target);
  else team.sync();

  rows_of_losses(f, s, scale, bias, memory);
  grid_barrier(f.barrier, target);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
    const double loss = sum_of(f.losses, f.m);
    if (threadIdx.x == 0) *f.loss = (Real)(f.row_share * loss);
  }
  if (f.gradient) {
    if (NORMALIZE && f.dk.data) {
      column_dots(f, memory);
      grid_barrier(f.barrier, target);
    }
    const i64 wide = (f.d + TILE - 1) / TILE;
    const i64 of_queries = f.dq.data ? down * wide : 0;
    const i64 of_keys = !SYMMETRIC && f.dk.data ? across * wide : 0;
    for (i64 t = blockIdx.x; t < of_queries + of_keys; t += gridDim.x) {
      if (SYMMETRIC || t < of_queries)
        gradient_tile<0>(f, t / wide * TILE, t % wide * TILE, shared);
      else
        gradient_tile<1>(f, (t - of_queries) / wide * TILE, (t - of_queries) % wide * TILE,
                         shared);
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
      const double dots = sum_of(f.row_dot, f.m), sums = sum_of(f.row_sum, f.m);
      if (threadIdx.x == 0) {
        *f.scale_grad = (Real)(dots / ((SYMMETRIC ? 2 : 1) * scale));
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
