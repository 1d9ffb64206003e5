// The gradient of a table whose rows are own negatives (own.cuh). A use of row t of the table is a pair (i, j) whose own
// negative o_ij is row t. With the sums over all uses of row t,
//
//     du_t = sum g_ij u_qi       <du_t, u_t> = sum g_ij x_ij
//
// the gradient with respect to row t is du_t, or (du_t - u_t <du_t, u_t>) / |o_t| if rows are normalised.
//
// kernels/gpu/own.py sorts the uses by their rows of the table, and launches find_starts, own_pieces, own_long_pieces
// and own_table. The uses of one row keep their order, and there are no atomics, so that the bits are the same in every
// run. A query is read once for each use, and a gradient is written once: the kernels take the time of these bytes.
//
// Most rows have few uses. So a group of lanes has several neighbouring rows: it waits for memory once for all of their
// uses, and its lanes compute the factors of so many uses at once. A few rows may have most uses, and be neighbours, as
// the frequent words of a vocabulary are. So many groups of lanes share the uses of a long row, in pieces.
#include "own.cuh"
#include "sorted.cuh"

// Uses in a piece, and in a long piece (also in kernels/gpu/config/workspace.py)
constexpr int PIECE_USES = 32, LONG_PIECE_USES = 1024;

// Sums over pieces of the order of uses. A piece begins at a multiple of its number of uses. Only pieces with uses of one
// row have sums.
struct Pieces {
  Real* sums;      // [pieces, d] of g_ij u_qi
  double* along;   // [pieces] of g_ij x_ij
  i64* known_use;  // [pieces] a use that counts, so that its factors are known; -1: none
};

// All uses i k + j, in the order of their rows of the table.
struct TableUses {
  const i64 *sorted, *order;  // [m k] the row of the table (or another index, of no row) and the use at each position
  i64* starts;                // the position of the first use of rows 0, group_rows, 2 group_rows .. and the table's end
  Pieces pieces, long_pieces;
};

// starts[t]: the number of uses of rows before row t group_rows. The last one, of uses before the end of the table, ends
// the last group of rows.
extern "C" __global__ void find_starts(const __grid_constant__ TableUses uses, i64 n, i64 table_rows, i64 group_rows) {
  const i64 start = blockIdx.x * (i64)blockDim.x + threadIdx.x, row = min(start * group_rows, table_rows);
  if (start <= (table_rows + group_rows - 1) / group_rows) uses.starts[start] = count_before(uses.sorted, 0, n, row, 0);
}

// Sums over uses of one row, in each lane of a group.
struct RowSums {
  Real sum[LANE_FEATURES] = {0, 0, 0, 0, 0, 0, 0, 0};  // of g_ij u_qi, for features from `column` on
  double along = 0;                                    // of g_ij x_ij, if rows are normalised
  i64 known_use = -1;
};

// Adds the uses at positions [begin, end) of `order`, at most a whole group of lanes, to `sums`. Before each use, calls
// begin_use(its position - begin).
template <class F>
__device__ __forceinline__ void add_uses(RowSums& sums, const OwnNegatives& a, const Group& group, const i64* order,
                                         i64 begin, i64 end, const double* row_factors, const double* references,
                                         i64 column, F begin_use) {
  // Each lane finds the factor of one use, then all lanes read the query of each
  const double c = a.exponent_factor();
  const i64 at = begin + group.lane;
  Real lane_factor = 0;
  double lane_along = 0;
  i64 lane_row = 0, lane_use = -1;  // -1: a use that does not count
  int lane_exponent = 0;
  if (at < end) {
    const i64 use = order[at];
    const double product = a.products[use];
    if (!is_nothing(product)) {
      lane_use = use, lane_row = use / a.k;
      const double exponent = add_own_bias(a, use, c * product) - references[lane_row];
      lane_factor = (Real)(row_factors[lane_row] * exp2_((Real)fmin(exponent, 0.0)));
      if (NORM_FACTORS) {
        lane_along = lane_factor * product;
        lane_factor *= a.query_factors[lane_row], lane_exponent = a.query_exponents[lane_row];
      }
    }
  }
  const int count = (int)(end - begin);
  for (int next = 0; next < count; next += BATCH) {
    Arriving arriving[BATCH];
    Real factors[BATCH];
    i64 rows[BATCH];
    int exponents[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {  // BATCH divides the number of lanes. Lanes after the last use have factor 0
      factors[b] = group.get(lane_factor, next + b), rows[b] = group.get(lane_row, next + b);
      exponents[b] = NORM_FACTORS ? group.get(lane_exponent, next + b) : 0;
      if (column < a.d && factors[b] != 0) arriving[b].load(a.query, rows[b], column);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      if (next + b < count) begin_use(next + b);
      if (NORM_FACTORS) {
        sums.along += group.get(lane_along, next + b);
        const i64 use = group.get(lane_use, next + b);
        if (use >= 0) sums.known_use = use;
      }
      if (column >= a.d || factors[b] == 0) continue;
      Real x[LANE_FEATURES];
      if (NORM_FACTORS && exponents[b]) get_row(x, a.query, rows[b], column, a.d - column, exponents[b]);
      else arriving[b].get(x, a.query, rows[b], column, a.d - column);
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f) sums.sum[f] += factors[b] * x[f];
    }
  }
}

// The first of this lane's features in a row of `chunks` chunks.
__device__ __forceinline__ i64 first_feature(const Group& group) {
  return (group.chunk * (i64)group.lanes + group.lane) * LANE_FEATURES;
}
__device__ __forceinline__ int count_chunks(i64 d) {
  const int features = LANE_FEATURES * count_lanes(d);
  return (int)((d + features - 1) / features);
}
// Whether the uses at positions [begin, begin + piece) are a piece of one row.
__device__ __forceinline__ bool is_piece(const TableUses& uses, i64 begin, int piece, i64 end) {
  return begin % piece == 0 && begin + piece <= end && uses.sorted[begin] == uses.sorted[begin + piece - 1];
}
// The number of neighbouring pieces from position `begin` on that have uses of its row, at most one for each lane.
__device__ __forceinline__ int count_pieces(const TableUses& uses, i64 begin, int piece, i64 end, const Group& group) {
  const i64 at = begin + group.lane * piece;
  const bool is_same = is_piece(uses, at, piece, end) && uses.sorted[at] == uses.sorted[begin];
  return group.join(is_same ? group.lanes : group.lane, [](int a, int b) { return min(a, b); });
}

// Adds `count` pieces from piece `first` on to `sums`. Several are read at once.
__device__ __forceinline__ void add_pieces(RowSums& sums, const Pieces& pieces, i64 first, int count, i64 column, i64 d) {
  constexpr int AT_ONCE = 4;
  for (int next = 0; next < count; next += AT_ONCE) {
    Real x[AT_ONCE][LANE_FEATURES];
#pragma unroll
    for (int p = 0; p < AT_ONCE; ++p)
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f)
        x[p][f] = next + p < count && column + f < d ? pieces.sums[(first + next + p) * d + column + f] : 0;
#pragma unroll
    for (int p = 0; p < AT_ONCE; ++p)
#pragma unroll
      for (int f = 0; f < LANE_FEATURES; ++f) sums.sum[f] += x[p][f];
  }
  if (NORM_FACTORS)
#pragma unroll 4
    for (i64 piece = first; piece < first + count; ++piece)
      sums.along += pieces.along[piece], sums.known_use = max(sums.known_use, pieces.known_use[piece]);
}
// Writes the sums of a piece, from the group of lanes of each chunk of its features.
__device__ __forceinline__ void put_piece(const Pieces& pieces, const RowSums& sums, const Group& group, i64 column, i64 d) {
  for (int f = 0; f < LANE_FEATURES && column + f < d; ++f) pieces.sums[group.row * d + column + f] = sums.sum[f];
  if (NORM_FACTORS && group.chunk == 0 && group.lane == 0)
    pieces.along[group.row] = sums.along, pieces.known_use[group.row] = sums.known_use;
}

// The sums of each piece of one row. A group of lanes has a chunk of features of a piece; `n` is the number of uses.
extern "C" __global__ void __launch_bounds__(OWN_THREADS)
own_pieces(const __grid_constant__ OwnNegatives a, const __grid_constant__ TableUses uses, i64 n,
           const double* factors, const double* references) {
  const Group group(a.d, 1, count_chunks(a.d));
  const i64 begin = group.row * PIECE_USES, column = first_feature(group);
  if (!is_piece(uses, begin, PIECE_USES, n) || !is_own_row(a, uses.sorted[begin])) return;
  RowSums sums;
  for (i64 at = begin; at < begin + PIECE_USES; at += group.lanes)
    add_uses(sums, a, group, uses.order, at, at + group.lanes, factors, references, column, [](int) {});
  put_piece(uses.pieces, sums, group, column, a.d);
}

// The sums of each long piece of one row, from its pieces.
extern "C" __global__ void __launch_bounds__(OWN_THREADS)
own_long_pieces(const __grid_constant__ OwnNegatives a, const __grid_constant__ TableUses uses, i64 n) {
  constexpr int COUNT = LONG_PIECE_USES / PIECE_USES;
  const Group group(a.d, 1, count_chunks(a.d));
  const i64 begin = group.row * LONG_PIECE_USES, column = first_feature(group);
  if (!is_piece(uses, begin, LONG_PIECE_USES, n) || !is_own_row(a, uses.sorted[begin])) return;
  RowSums sums;
  add_pieces(sums, uses.pieces, group.row * COUNT, COUNT, column, a.d);
  put_piece(uses.long_pieces, sums, group, column, a.d);
}

// Writes the gradient [table_rows, d]. A group of lanes has a chunk of features of group_rows rows of the table. A row
// without uses that count gets 0, and is not read.
extern "C" __global__ void __launch_bounds__(OWN_THREADS)
own_table(const __grid_constant__ OwnNegatives a, const __grid_constant__ TableUses uses, const double* factors,
          const double* references, const __grid_constant__ Matrix gradient, i64 table_rows, i64 group_rows) {
  const Group group(a.d, 1, count_chunks(a.d));
  const i64 column = first_feature(group), n = a.d - column;
  i64 row = group.row * group_rows;  // whose sums are next
  const i64 end_row = min(row + group_rows, table_rows);
  if (row >= table_rows) return;
  RowSums sums;
  const auto write_rows_before = [&](i64 next_row) {
    for (; row < next_row; ++row) {
      int exponent = 0;
      if (NORM_FACTORS && sums.known_use >= 0 && n > 0) {
        const Real factor = a.factors[sums.known_use], along = (Real)sums.along;
        exponent = a.exponents[sums.known_use];
        Real x[LANE_FEATURES];
        get_row(x, a.own.of(0), row, column, n, exponent);
#pragma unroll
        for (int f = 0; f < LANE_FEATURES; ++f) sums.sum[f] = factor * (sums.sum[f] - along * factor * x[f]);
      }
      if (n > 0) set_own(sums.sum, gradient, row, column, n, exponent);
      sums = RowSums();
    }
  };
  const i64 end = uses.starts[group.row + 1];
  for (i64 at = uses.starts[group.row], next; at < end; at = next) {
    const i64 next_piece = (at / PIECE_USES + 1) * PIECE_USES, next_long_piece = (at / LONG_PIECE_USES + 1) * LONG_PIECE_USES;
    const int long_count = count_pieces(uses, at, LONG_PIECE_USES, end, group);
    const int count = long_count ? 0 : count_pieces(uses, at, PIECE_USES, min(end, next_long_piece), group);
    if (long_count || count) {
      write_rows_before(uses.sorted[at]);
      add_pieces(sums, uses.long_pieces, at / LONG_PIECE_USES, long_count, column, a.d);
      add_pieces(sums, uses.pieces, at / PIECE_USES, count, column, a.d);
      next = at + long_count * LONG_PIECE_USES + count * PIECE_USES;
      continue;
    }
    next = min(at + group.lanes, end);
    if (next > next_piece && is_piece(uses, next_piece, PIECE_USES, end)) next = next_piece;
    const i64 lane_row = at + group.lane < next ? uses.sorted[at + group.lane] : 0;
    add_uses(sums, a, group, uses.order, at, next, factors, references, column,
             [&](int use) { write_rows_before(group.get(lane_row, use)); });
  }
  write_rows_before(end_row);
}
