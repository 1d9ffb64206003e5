// Phases 0 and 1 of fused.cu: norms and NaN flags of rows, and the products x by tiles. fused/losses.cuh comes next.
#pragma once
#include "fused/fused_product.cuh"

// --- phase 0 -----------------------------------------------------------------------------------------------

// Finds 1 / |z| (0 for a row of zeros) and the NaN flag (NaN if a feature is not finite, else 0) of each row of z.
__device__ void inspect(const Matrix& z, i64 rows, i64 d, double* inverse, double* row_nans,
                        double* memory) {
  const Team team(rows, memory);
  for (i64 row = team.row; row < rows; row += team.step) {
    int exponent = 0;
    if (NORMALIZE && DTYPE == DTYPE_FLOAT64) {
      double largest = 0;
      for (i64 k = team.lane; k < d; k += team.lanes)
        largest = fmax(largest, fabs((double)*address(z, row, k)));
      exponent = find_exponent(team.max(largest));
    }
    double square_sum = 0, zero_sum = 0;  // zero_sum: of features times 0, which is NaN if a feature is not finite
#pragma unroll 8
    for (i64 k = team.lane; k < d; k += team.lanes) {
      double x = number(*address(z, row, k));
      if (NORMALIZE && DTYPE == DTYPE_FLOAT64) x = ldexp(x, -exponent);
      square_sum += x * x;
      zero_sum += x * 0.0;
    }
    square_sum = team.sum(square_sum);
    zero_sum = team.sum(zero_sum);
    if (team.lane == 0) {
      inverse[row] = square_sum == 0 ? 0 : 1 / sqrt(square_sum);
      if (NORMALIZE && DTYPE == DTYPE_FLOAT64) inverse[row] = ldexp(inverse[row], -exponent);
      row_nans[row] = zero_sum;
    }
  }
}

// --- phase 1 -----------------------------------------------------------------------------------------------

// Computes the products of the tile of queries row0 .. row0 + 63 and keys column0 .. column0 + 63, over the features of
// part `part_of_d` only, and writes them to matrix `part_of_d` of f.x. add_parts then adds up the parts.
__device__ void logits_tile(const Fused& f, i64 row0, i64 column0, i64 part_of_d,
                            Shared& shared) {
  const i64 part_features = (f.d + f.parts * CHUNK - 1) / (f.parts * CHUNK) * CHUNK;
  const i64 begin = part_of_d * part_features, end = begin + part_features < f.d ? begin + part_features : f.d;
  Real* out = f.x + part_of_d * f.m * f.n;
  constexpr int STEP = FUSED_THREADS / CHUNK;
  const int row = threadIdx.x / CHUNK, column = threadIdx.x % CHUNK;  // this thread's first element of a step
  const int query_rows = at_most_tile(f.m - row0 - row);  // rows of Q from this thread's first row on
  const int key_rows = at_most_tile(f.n - column0 - row);  // the same for K
  // Inverse norms from this thread's first row on
  const double* query_inverse = NORMALIZE ? f.row_inverse + row0 + row : nullptr;
  const double* key_inverse = NORMALIZE ? f.column_inverse + column0 + row : nullptr;
  const Place at = place();
  Element q[SHARE], k[SHARE];
  const auto fetch_step = [&](i64 k0) {  // the step from feature k0 on
    const bool inside = k0 + column < end;
    fetch<STEP>(q, address(f.q, row0 + row, k0 + column), f.q.row_stride, inside ? query_rows : 0);
    fetch<STEP>(k, address(f.k, column0 + row, k0 + column), f.k.row_stride, inside ? key_rows : 0);
  };
  fetch_step(begin);
  Real x[8][8] = {};
  int buffer = 0;
  for (i64 k0 = begin; k0 < end; k0 += CHUNK, buffer ^= 1) {
    Chunks& s = shared.chunks[buffer];
#pragma unroll
    for (int e = 0; e < SHARE; ++e) {
      s.q[row + e * STEP][column] = feature<STEP>(q, e, query_rows, query_inverse);
      s.k[row + e * STEP][column] = feature<STEP>(k, e, key_rows, key_inverse);
    }
    // All writes of this chunk come before its reads. All reads of the other buffer, in the step before,
    // come before the writes of the next step
    __syncthreads();
    if (k0 + CHUNK < end) fetch_step(k0 + CHUNK);
#pragma unroll
    for (int w = 0; w < DEPTH; w += VECTOR_WIDTH) {
      Vector a[8];
#pragma unroll
      for (int h = 0; h < 8; ++h)
        a[h].bits = *(const uint4*)&s.q[at.r + 8 * h][at.group * DEPTH + w];
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        Vector b;
        b.bits = *(const uint4*)&s.k[get_column<false>(at.c, v)][at.group * DEPTH + w];
#pragma unroll
        for (int e = 0; e < VECTOR_WIDTH; ++e)
#pragma unroll
          for (int h = 0; h < 8; ++h) x[h][v] += a[h].z[e] * b.z[e];
      }
    }
  }
  add_groups<false>(x, at, shared.sums);
  for (int t = threadIdx.x; t < FUSED_TILE * FUSED_TILE; t += FUSED_THREADS) {
    const i64 i = row0 + t / FUSED_TILE, j = column0 + t % FUSED_TILE;
    if (i < f.m && j < f.n) out[i * f.n + j] = total(shared.sums, t / FUSED_TILE, t % FUSED_TILE);
  }
  if (SYMMETRIC && row0 != column0)  // the transposed tile, below the diagonal
    for (int t = threadIdx.x; t < FUSED_TILE * FUSED_TILE; t += FUSED_THREADS) {
      const i64 i = column0 + t / FUSED_TILE, j = row0 + t % FUSED_TILE;
      if (i < f.m && j < f.n) out[i * f.n + j] = total(shared.sums, t % FUSED_TILE, t / FUSED_TILE);
    }
  __syncthreads();  // the reads of sums come before the next tile's writes, to the same memory
}

// Row and column of tile t of the logits, in the order of rows, with `across` tiles in a row. If x is symmetric, tiles
// below the diagonal are left out.
__device__ __forceinline__ void find_tile(const Fused& f, i64 t, i64 across, i64& row, i64& column) {
  row = SYMMETRIC ? 0 : t / across;
  column = SYMMETRIC ? t : t % across;
  if (SYMMETRIC)
    for (; column >= across; column += ++row) column -= across;
}

// Adds the products of all parts of the features, into the first matrix of f.x. A team adds the rows that the same team
// reads in phase 2, so phase 2 needs no barrier over the grid for rows.
__device__ void add_parts(const Fused& f, double* memory) {
  const i64 size = f.m * f.n;
  const Team team(f.m, memory);
  for (i64 i = team.row; i < f.m; i += team.step)
    for (i64 j = team.lane; j < f.n; j += team.lanes) {
      Real* x = f.x + i * f.n + j;
      Real part[MAX_FEATURE_PARTS];  // loads first: they need not wait for one another
#pragma unroll
      for (int p = 0; p < MAX_FEATURE_PARTS; ++p) part[p] = p < f.parts ? x[p * size] : 0;
#pragma unroll
      for (int p = 1; p < MAX_FEATURE_PARTS; ++p) part[0] += part[p];
      *x = part[0];
    }
  team.sync();  // in phase 2, one thread reads the positive's product, which another thread has added
}
