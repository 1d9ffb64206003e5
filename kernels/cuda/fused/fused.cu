// method="fused": loss and gradient of a small or medium batch in one cooperative launch: up to 2^18 logits, 2048
// queries, 2048 keys, and 2^28 multiply-adds of the logits, or any batch for which the caller asks. It takes no option
// but `ids`: all other calls go elsewhere (`choose_method` in kernels/gpu/schedule/method.py). fused/fused.cuh has the
// structures, fused/logits.cuh phases 0 and 1, fused/losses.cuh phases 2 and 3.
//
// The products x_ij = q_i . k_j are computed once, and stay in the workspace (and the L2 cache). All thread
// blocks go through the same phases. A barrier over the grid separates the phases, with two exceptions:
//   - Without NORMALIZE, phase 0 comes after phase 1, and no barrier is between them.
//   - If columns have no softmax and queries are not the keys, no barrier is between phases 2 and 3.
// Two phases may have a barrier within: phase 2, after the parts of x are added up (TWO_SIDED), and phase 4, after the
// products of columns with their gradients (NORMALIZE).
//
//     0  norms of rows; NaN flags of rows with features that are not finite
//     1  x, by tiles of 64 x 64. If x is symmetric, one triangle of the tiles. If there are fewer tiles than
//        thread blocks, the features are divided into parts, and each tile is the sum of the products of all parts
//     2  for each row and column: the log-sum-exp n of its negatives, and the gap n - p to the logit p of its positive
//     3  for each row: loss = softplus(gap), P = dL/dx, sum_j P_ij x_ij
//     4  dQ = P K and dK = P' Q, by tiles of 64 rows x 64 features; sums over all rows, in a fixed order
//
// The products of phases 1 and 4 go step by step through their depth (features, or rows of the other side): a step
// copies CHUNK elements of each row of a tile to shared memory. Each of four groups of 64 threads multiplies a quarter
// of them, and a thread has 8 x 8 results of the tile. 16 numbers from shared memory serve 64 multiply-adds. With
// smaller tiles, a thread would read longer than it computes.
//
// The formulas are those of tiled/lse.cu, tiled/gradient.cu, tiled/sigmoid.cu and direction_losses.cuh. Products
// and exponentials are float32 (float64 for float64 features), and sums over a row or a column are float64.
#include "fused/logits.cuh"
#include "fused/losses.cuh"

// --- phase 4 -----------------------------------------------------------------------------------------------

// Computes rows row0 .. row0 + 63 and features k0 .. k0 + 63 of dQ (KEYS 0) or dK (KEYS 1). `own` are the rows that get
// the gradient, which is a sum over `other`, the rows of the other side.
template <int KEYS>
__device__ void gradient_tile(const Fused& f, i64 row0, i64 k0, Shared& shared) {
  const Matrix& own = KEYS ? f.k : f.q;
  const Matrix& other = KEYS ? f.q : f.k;
  const Matrix& out = KEYS ? f.dk : f.dq;
  const double* own_inverse = NORMALIZE ? (KEYS ? f.column_inverse : f.row_inverse) : nullptr;
  const i64 rows = KEYS ? f.n : f.m, others = KEYS ? f.m : f.n;
  const Real* derivatives = f.x + f.m * f.n;  // P [M, N]
  const Place at = place();
  Real g[8][8] = {};

  // This thread's elements of a step: SHARE elements of a column of P, from (p_row, p_column) on and P_STEP rows apart;
  // SHARE elements of one feature of `other`, Z_STEP rows apart. Neighbouring threads read neighbouring addresses
  constexpr int P_WIDTH = KEYS ? FUSED_TILE : CHUNK, P_STEP = FUSED_THREADS / P_WIDTH;
  constexpr int Z_STEP = FUSED_THREADS / FUSED_TILE;
  const int p_row = threadIdx.x / P_WIDTH, p_column = threadIdx.x % P_WIDTH;
  const int z_row = threadIdx.x / FUSED_TILE, z_column = threadIdx.x % FUSED_TILE;
  Real p[SHARE];
  Element z[SHARE];
  const auto fetch_step = [&](i64 o0) {  // the step from row o0 of `other` on
    const i64 i = (KEYS ? o0 : row0) + p_row, j = (KEYS ? row0 : o0) + p_column;
    fetch<P_STEP>(p, derivatives + i * f.n + j, f.n, j < f.n ? at_most_tile(f.m - i) : 0);
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
      s.z[z_row + e * Z_STEP][z_column] =
          feature<Z_STEP>(z, e, at_most_tile(others - o0 - z_row), inverse);
    }
    // All writes of this chunk come before its reads. All reads of the other buffer, in the step before,
    // come before the writes of the next step
    __syncthreads();
    if (o0 + CHUNK < others) fetch_step(o0 + CHUNK);
#pragma unroll
    for (int o = 0; o < DEPTH; o += VECTOR_WIDTH) {
      Vector ps[8];
#pragma unroll
      for (int h = 0; h < 8; ++h)
        ps[h].bits = *(const uint4*)&s.p[at.r + 8 * h][at.group * DEPTH + o];
#pragma unroll
      for (int w = 0; w < VECTOR_WIDTH; ++w)
#pragma unroll
        for (int v = 0; v < 8; v += VECTOR_WIDTH) {
          Vector zs;
          zs.bits = *(const uint4*)&s.z[at.group * DEPTH + o + w][get_column<true>(at.c, v)];
#pragma unroll
          for (int e = 0; e < VECTOR_WIDTH; ++e)
#pragma unroll
            for (int h = 0; h < 8; ++h) g[h][v + e] += ps[h].z[w] * zs.z[e];
        }
    }
  }
  add_groups<true>(g, at, shared.sums);
  for (int t = threadIdx.x; t < FUSED_TILE * FUSED_TILE; t += FUSED_THREADS) {
    const i64 row = row0 + t / FUSED_TILE, k = k0 + t % FUSED_TILE;
    if (row >= rows || k >= f.d) continue;
    double value = total(shared.sums, t / FUSED_TILE, t % FUSED_TILE);
    if (own_inverse) {  // dz = (dU - u <dU, u>) / |z|; value is dU, and the dot is <dU, u>
      const double dot = KEYS ? f.column_dot[row] : f.row_dot[row];
      const double u = (double)number(*address(own, row, k)) * own_inverse[row];
      value = (value - u * dot) * own_inverse[row];
    }
    out.set(row, k, value);
  }
  __syncthreads();  // the reads of sums come before the next tile's writes, to the same memory
}

// The sum of v[0 .. n), each times its weight (`weights` null: 1), by one warp.
template <class T>
__device__ double sum_vector(const T* v, i64 n, const double* weights = nullptr) {
  double sum = 0;
  for (i64 i = threadIdx.x % 32; i < n; i += 32) sum += weights ? weights[i] * v[i] : v[i];
  return warp_sum(sum);
}

// NaN if one of v[0 .. n) is NaN, else 0, by one warp.
template <class T>
__device__ double find_nan(const T* v, i64 n) {
  bool any = false;
  for (i64 i = threadIdx.x % 32; i < n; i += 32) any |= isnan(v[i]);
  return __any_sync(ALL_LANES, any) ? NAN_ : 0;
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS)
fused(const __grid_constant__ Fused f) {
  __shared__ Shared shared;
  __shared__ double memory[FUSED_WARPS];
  u32 target = 0;  // arrivals that end the next barrier over the grid

  // Phase 0. Products need the norms, so with NORMALIZE it comes first. NaN flags can wait
  const auto inspect_all = [&] {
    inspect(f.q, f.m, f.d, f.row_inverse, f.row_nans, memory);
    if (SYMMETRIC) return;
    __syncthreads();  // teams for keys may have another size, and use the barriers and memory of the last teams
    inspect(f.k, f.n, f.d, f.column_inverse, f.column_nans, memory);
  };
  if (NORMALIZE) {
    inspect_all();
    grid_barrier(f.barrier, target);
  }

  // Phase 1
  const i64 down = (f.m + FUSED_TILE - 1) / FUSED_TILE;
  const i64 across = (f.n + FUSED_TILE - 1) / FUSED_TILE;
  const i64 tiles = SYMMETRIC ? across * (across + 1) / 2 : down * across;
  for (i64 t = blockIdx.x; t < tiles * f.parts; t += gridDim.x) {
    i64 row, column;
    find_tile(f, t % tiles, across, row, column);
    logits_tile(f, row * FUSED_TILE, column * FUSED_TILE, t / tiles, shared);
  }
  if (!NORMALIZE) inspect_all();  // by now the features are in the L2 cache
  grid_barrier(f.barrier, target);

  // Phase 2. A sigmoid has no log-sum-exp, and its row factor is the upstream gradient times the scale
  const double scale = f.scale.get(), bias = f.bias.get();
  const Slope s = {(Real)(scale * LOG2_E), (Real)scale, (Real)bias};
  if (f.parts > 1) {
    add_parts(f, memory);
    if (TWO_SIDED) grid_barrier(f.barrier, target);
  }
  const Team team(f.m, memory);
  if (SIGMOID) {
    for (i64 i = team.row; i < f.m; i += team.step)
      if (team.lane == 0) f.row_factor[i] = (Real)(get_upstream(f, i) * scale);
  } else {
    row_log_sum_exp(f, scale, memory);
    if (TWO_SIDED) column_log_sum_exp(f, scale);
  }
  // The writes of phase 2 come before the reads of phase 3. If columns have no softmax, a team reads only its own rows,
  // so no barrier over the grid is needed
  if (SYMMETRIC || TWO_SIDED) grid_barrier(f.barrier, target);
  else team.sync();

  // Phase 3
  compute_row_losses(f, s, scale, bias, memory);
  grid_barrier(f.barrier, target);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
    const double loss = sum_vector(f.losses, f.m, f.row_shares);
    if (threadIdx.x == 0) *f.loss = (Real)(f.common_share * loss);
  }
  // Phase 4
  if (f.gradient) {
    if (NORMALIZE && f.dk.data) {
      column_dots(f, memory);
      grid_barrier(f.barrier, target);
    }
    const i64 wide = (f.d + FUSED_TILE - 1) / FUSED_TILE;
    const i64 query_tiles = f.dq.data ? down * wide : 0;
    const i64 key_tiles = !SYMMETRIC && f.dk.data ? across * wide : 0;
    for (i64 t = blockIdx.x; t < query_tiles + key_tiles; t += gridDim.x) {
      if (SYMMETRIC || t < query_tiles)
        gradient_tile<0>(f, t / wide * FUSED_TILE, t % wide * FUSED_TILE, shared);
      else
        gradient_tile<1>(f, (t - query_tiles) / wide * FUSED_TILE,
                         (t - query_tiles) % wide * FUSED_TILE, shared);
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
      // z = scale x + bias, so dL/dz is P / scale: dL/dscale = sum of P x / scale, dL/dbias = sum of P / scale
      const double nan = find_nan(f.losses, f.m);
      const double dots = sum_vector(f.row_dot, f.m) + nan, sums = sum_vector(f.row_sum, f.m) + nan;
      if (threadIdx.x == 0) {
        *f.scale_grad = (Real)(dots / ((SYMMETRIC ? 2 : 1) * scale));  // SYMMETRIC: P has each pair twice
        *f.bias_grad = (Real)(sums / scale);
      }
    }
  }
  // The last thread block that leaves resets the barrier for the next launch on this stream
  if (threadIdx.x == 0 && atomicAdd(f.barrier + 1, 1) == gridDim.x - 1) {
    f.barrier[0] = 0;
    f.barrier[1] = 0;
  }
}
