// Options of a loss that change single pairs: they leave a pair out of a softmax, or change its exponent. Each option
// is a struct here, derived from `Option`. The portable kernels (tiled/tile.cuh) and the sweeps (sm90/sweep/logits.cuh)
// use the same structs, and own.cu those that compare products. `Options`, at the end, is all of them together. Options
// that change only the loss of a row from its sums are in RowOptions (vectors/sums.cuh).
//
// A new option is one more struct, its -D option below, its name in `Options`, and its vectors in PairVectors. The host
// sets the -D options of a call in `scheduled_kernel` (kernels/gpu/schedule/passes.py): IDS and NORM_FACTORS there, and
// all others by `Call.pair_defines` (kernels/gpu/schedule/call.py). CONTRIBUTING.md lists the other files of an option.
#pragma once
#include "block/block.cuh"

#ifndef NORM_FACTORS
#define NORM_FACTORS 0  // 1: rows are normalised by factors (rows.cuh)
#endif
#ifndef IDS
#define IDS 0  // columns of ids: pairs whose ids are equal in any of them are left out
#endif
#ifndef GROUPS
#define GROUPS 0  // 1: pairs of different groups are left out
#endif
#ifndef POSITIVE_IDS
#define POSITIVE_IDS 0  // 1: pairs of equal positive ids are positives, which ids and groups do not leave out
#endif
#ifndef PAIR_WEIGHTS
#define PAIR_WEIGHTS 0  // 1: these positives are those of a sigmoid, and have weights
#endif
#ifndef LIMITS
#define LIMITS 0  // 1: negatives above the limit of their row are left out; 2: each column has a limit, too
#endif
#ifndef GUIDE
#define GUIDE 0  // 1: pairs that a guide marks for their row are left out; 2: each pair has a mark for its column, too
#endif
#ifndef BIAS
#define BIAS 0  // 1: keys have biases; 2: queries have biases, too, because queries are keys
#endif

// A structure with the vectors of its options beside it (ids are in PlainBlock). Limits and biases are in the unit of
// products: times c they are base-2 logits.
template <class Plain, class Number>
struct PairVectors : Plain {
#if GROUPS
  const i64 *query_groups, *key_groups;  // [rows], [columns]
#endif
#if POSITIVE_IDS
  const i64 *query_positive_ids, *key_positive_ids;  // [rows], [columns]
#endif
#if PAIR_WEIGHTS
  const Number *query_pair_weights, *key_pair_weights;  // [rows], [columns]: a positive pair's weight is their sum
  const char* positive_tiles;  // a bit for each tile of the matrix (block/positive_tiles.cu), or null
  i64 positive_tiles_bytes;    // bytes of a query tile in `positive_tiles`
#endif
#if LIMITS
  const Number *row_limits, *column_limits;  // [rows], [columns] or null
#endif
#if GUIDE
  const u32 *row_marks, *column_marks;  // words of marks (`mark_word`) from the block on; column_marks may be null
  i64 mark_rows;                        // rows that have marks: those of the block, or all rows of the call
#endif
#if BIAS
  const Number *row_bias, *column_bias;  // [rows] or null, [columns]
#endif
};
struct Block : PairVectors<PlainBlock, Real> {
};

enum : int { POSITIVE_TILE = 128 };  // rows, and columns, of the tiles of `positive_tiles`

// Marks of a guide, which tiled/guide.cu and sm90/sweep_guide.cu write. The mark of a pair is a bit: 1 if the product
// of the guide's features is above the limit, so that the pair is left out. Columns are in groups of MARKED_COLUMNS.
// Each row has four words of 32 marks for each group: the mark of column c of the group is bit `mark_bit(c)` of word
// c / 2 % 4. In this order, all columns of a row that one thread has in its accumulators are in one word: lane t of
// four has columns 8 k + 2 t and 8 k + 2 t + 1, which are bits 2 k and 2 k + 1 of word t. Words of row_marks decide for
// the softmax of the row, and words of column_marks, in the same layout, for the softmax of the column.
enum : int { MARKED_COLUMNS = 128 };
__device__ __forceinline__ int mark_bit(int column) { return column / 8 * 2 + column % 2; }
// The index of the word with the mark of a pair, among the words of `rows` rows.
__device__ __forceinline__ i64 mark_word(i64 rows, i64 row, i64 column) {
  return (column / MARKED_COLUMNS * rows + row) * 4 + column / 2 % 4;
}
// Takes the place of a word of column_marks if columns have no softmax: then `excluded` depends on the mark of the row
// alone.
enum : u32 { ALL_MARKED = ~0u };

// Whether a guide leaves a pair out of the softmax of its row, and of its column: bit `bit` of two words of marks.
struct Marks {
#if GUIDE
  bool left_out_of_row, left_out_of_column;
  __device__ __forceinline__ Marks(u32 row_word, u32 column_word, int bit)
      : left_out_of_row(row_word >> bit & 1), left_out_of_column(column_word >> bit & 1) {}
#endif
};

// A pair of a row and a column: `rows` and `columns` have the values that options need, of several rows and columns,
// and `row` and `column` are the indices of this pair in them.
template <class Rows, class Columns>
struct Pair : Marks {  // without a guide, Marks has no members and takes no memory
  const Rows& rows;
  const Columns& columns;
  int row, column;
};

// The base of all options, which changes nothing. An option replaces some of its members. Functions get the product x
// of a pair p. If an option is not compiled (its -D option is 0), its struct is empty and changes nothing.
template <class Self>  // gives each option a base of its own: two bases of one type would take memory
struct Option {
  enum : bool {  // constants that need no memory
    MASKS = false,    // each pair is in the softmax of its row and of its column, or in neither: `excluded`
    SPLITS = false,   // a pair may be in one of the two softmaxes and not in the other: `in_row` and `in_column`
    SHIFTS = false,   // `exponent` may differ from x
    SPARSE = false,   // a row of a tile often has no pair in a softmax: sweep_lse.cu then leaves the row's sum as it is
    // The value of the product decides. If queries are the keys, one pass may compute x_ij and another x_ji, and both
    // passes have to leave out the same pairs: so x_ij and x_ji have to be the same number
    COMPARES = false
  };

  // The values that the option needs of N rows and of N columns, by the names that their vectors have in `Block`. An
  // array has N values, or several for each row or column (EqualIds).
  // Arrays of columns are aligned to 16 bytes, because sweeps read four values of 4 bytes at once (SliceColumns).
  // Sweeps keep elements of 8 bytes, such as ids, in another order than those of 4 bytes (`Columns` in
  // sm90/sweep/logits.cuh).
  template <int N>
  struct RowValues {};
  template <int N>
  struct ColumnValues {};
  // Calls `copy` with each array in `to` and the array in `from` that has its name.
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_rows(To&, const From&, Copy) {}
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_columns(To&, const From&, Copy) {}

  // Whether the pair is in no softmax, neither of its row nor of its column.
  template <class Pair>
  __device__ __forceinline__ static bool excluded(Real, const Pair&) { return false; }
  // Whether the pair is a positive, which no option excludes.
  template <class Pair>
  __device__ __forceinline__ static bool is_positive(const Pair&) { return false; }
  // SPLITS: whether the pair is in the softmax of its row, or of its column.
  template <class Pair>
  __device__ __forceinline__ static bool in_row(Real, const Pair&) { return true; }
  template <class Pair>
  __device__ __forceinline__ static bool in_column(Real, const Pair&) { return true; }
  // SPLITS: adds the exponential e to `sum` if the pair is in the softmax of its row, or of its column.
  template <class Pair>
  __device__ __forceinline__ static void add_to_row(float&, float, float, const Pair&) {}
  template <class Pair>
  __device__ __forceinline__ static void add_to_column(float&, float, float, const Pair&) {}
  // The number that replaces x in the exponent.
  template <class Pair>
  __device__ __forceinline__ static Real exponent(Real x, const Pair&) { return x; }
};

// Pairs of ids that are equal in any column are left out: ids. A row or column of the matrix has IDS values, which follow
// one another: the value of column c of element i is at [i * IDS + c].
struct EqualIds : Option<EqualIds> {
#if IDS
  enum : bool { MASKS = true };
  template <int N>
  struct RowValues { i64 query_ids[N * IDS]; };
  template <int N>
  struct ColumnValues { i64 key_ids[N * IDS]; };
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_rows(To& to, const From& from, Copy copy) {
    copy(to.query_ids, from.query_ids);
  }
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_columns(To& to, const From& from, Copy copy) {
    copy(to.key_ids, from.key_ids);
  }
  template <class Pair>
  __device__ __forceinline__ static bool excluded(Real, const Pair& p) {
    return any_equal<IDS>(p.rows.query_ids + p.row * IDS, p.columns.key_ids + p.column * IDS);
  }
#endif
};

// Pairs of different groups are left out: groups.
struct OtherGroups : Option<OtherGroups> {
#if GROUPS
  enum : bool { MASKS = true, SPARSE = true };
  template <int N>
  struct RowValues { i64 query_groups[N]; };
  template <int N>
  struct ColumnValues { alignas(16) i64 key_groups[N]; };
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_rows(To& to, const From& from, Copy copy) {
    copy(to.query_groups, from.query_groups);
  }
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_columns(To& to, const From& from, Copy copy) {
    copy(to.key_groups, from.key_groups);
  }
  template <class Pair>
  __device__ __forceinline__ static bool excluded(Real, const Pair& p) {
    return p.rows.query_groups[p.row] != p.columns.key_groups[p.column];
  }
#endif
};

// Pairs of equal positive ids are positives: positive_ids. For a sigmoid, tiled/sigmoid.cu asks `is_positive`, and
// sm90/sweep_sigmoid.cu compares the ids itself. Both multiply the losses of positives by their weights. The kernels of a
// softmax get positive ids only beside ids or groups: its positives are in the sums as negatives are.
struct PositiveIds : Option<PositiveIds> {
#if POSITIVE_IDS
  template <int N>
  struct RowValues {
    i64 query_positive_ids[N];
#if PAIR_WEIGHTS
    Real query_pair_weights[N];
#endif
  };
  template <int N>
  struct ColumnValues {
    alignas(16) i64 key_positive_ids[N];
#if PAIR_WEIGHTS
    alignas(16) Real key_pair_weights[N];
#endif
  };
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_rows(To& to, const From& from, Copy copy) {
    copy(to.query_positive_ids, from.query_positive_ids);
#if PAIR_WEIGHTS
    copy(to.query_pair_weights, from.query_pair_weights);
#endif
  }
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_columns(To& to, const From& from, Copy copy) {
    copy(to.key_positive_ids, from.key_positive_ids);
#if PAIR_WEIGHTS
    copy(to.key_pair_weights, from.key_pair_weights);
#endif
  }
  template <class Pair>
  __device__ __forceinline__ static bool is_positive(const Pair& p) {
    return p.rows.query_positive_ids[p.row] == p.columns.key_positive_ids[p.column];
  }
#endif
};

// Negatives above a limit are left out: false_negative_margin. A pair is left out of the softmax of its row if it is
// above the limit of the row, and out of the softmax of its column if it is above the limit of the column.
struct Limits : Option<Limits> {
#if LIMITS
  enum : bool { MASKS = LIMITS == 1, SPLITS = LIMITS == 2, SPARSE = true, COMPARES = true };
  template <int N>
  struct RowValues { Real row_limits[N]; };
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_rows(To& to, const From& from, Copy copy) {
    copy(to.row_limits, from.row_limits);
  }
#endif
#if LIMITS == 1
  template <class Pair>
  __device__ __forceinline__ static bool excluded(Real x, const Pair& p) {
    return x > p.rows.row_limits[p.row];
  }
#elif LIMITS == 2
  // `excluded` is for portable kernels (`exclude_in_tile`): a pair that neither softmax has. The functions after it
  // decide for one softmax.
  template <int N>
  struct ColumnValues { alignas(16) Real column_limits[N]; };
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_columns(To& to, const From& from, Copy copy) {
    copy(to.column_limits, from.column_limits);
  }
  template <class Pair>
  __device__ __forceinline__ static bool excluded(Real x, const Pair& p) {
    return x > max_(p.rows.row_limits[p.row], p.columns.column_limits[p.column]);
  }
  template <class Pair>
  __device__ __forceinline__ static bool in_row(Real x, const Pair& p) {
    return !(x > p.rows.row_limits[p.row]);
  }
  template <class Pair>
  __device__ __forceinline__ static bool in_column(Real x, const Pair& p) {
    return !(x > p.columns.column_limits[p.column]);
  }
  template <class Pair>
  __device__ __forceinline__ static void add_to_row(float& sum, float e, float x, const Pair& p) {
    add_up_to(sum, e, x, p.rows.row_limits[p.row]);
  }
  template <class Pair>
  __device__ __forceinline__ static void add_to_column(float& sum, float e, float x, const Pair& p) {
    add_up_to(sum, e, x, p.columns.column_limits[p.column]);
  }
#endif
};

// Pairs that a guide marks are left out: guide.
struct GuideMarks : Option<GuideMarks> {
#if GUIDE
  enum : bool { MASKS = GUIDE == 1, SPLITS = GUIDE == 2, SPARSE = true };
  template <class Pair>
  __device__ __forceinline__ static bool excluded(Real, const Pair& p) { return p.left_out_of_row & p.left_out_of_column; }
#endif
#if GUIDE == 2
  template <class Pair>
  __device__ __forceinline__ static bool in_row(Real, const Pair& p) { return !p.left_out_of_row; }
  template <class Pair>
  __device__ __forceinline__ static bool in_column(Real, const Pair& p) { return !p.left_out_of_column; }
  template <class Pair>
  __device__ __forceinline__ static void add_to_row(float& sum, float e, float, const Pair& p) {
    if (!p.left_out_of_row) sum += e;
  }
  template <class Pair>
  __device__ __forceinline__ static void add_to_column(float& sum, float e, float, const Pair& p) {
    if (!p.left_out_of_column) sum += e;
  }
#endif
};

// Biases of keys are added to logits: key_bias. All terms in the sum of a column have the bias of this column, so the
// caller subtracts it from the maximum of the complete sum (`add_bias` in vectors/sums.cuh). So one exponential, with
// the bias, may serve both directions.
struct Biases : Option<Biases> {
#if BIAS
  enum : bool { SHIFTS = true };
  template <int N>
  struct ColumnValues { alignas(16) Real column_bias[N]; };
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_columns(To& to, const From& from, Copy copy) {
    copy(to.column_bias, from.column_bias);
  }
  template <class Pair>
  __device__ __forceinline__ static Real exponent(Real x, const Pair& p) {
#if BIAS == 2
    return x + (p.rows.row_bias[p.row] + p.columns.column_bias[p.column]);
#else
    return x + p.columns.column_bias[p.column];
#endif
  }
#endif
#if BIAS == 2
  template <int N>
  struct RowValues { Real row_bias[N]; };
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_rows(To& to, const From& from, Copy copy) {
    copy(to.row_bias, from.row_bias);
  }
#endif
};

// Several options, each of which is written as if it were the only one.
template <class... Each>
struct All {
  enum : bool {
    MASKS = (Each::MASKS || ...),
    SPLITS = (Each::SPLITS || ...),
    SHIFTS = (Each::SHIFTS || ...),
    SPARSE = (Each::SPARSE || ...),
    COMPARES = (Each::COMPARES || ...)
  };

  template <int N>
  struct RowValues : Each::template RowValues<N>... {};
  template <int N>
  struct ColumnValues : Each::template ColumnValues<N>... {};
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_rows(To& to, const From& from, Copy copy) {
    (Each::copy_rows(to, from, copy), ...);
  }
  template <class To, class From, class Copy>
  __device__ __forceinline__ static void copy_columns(To& to, const From& from, Copy copy) {
    (Each::copy_columns(to, from, copy), ...);
  }

  // Called by portable kernels: x becomes EXCLUDED (common.cuh: its exponential is 0) if any option leaves the pair out
  // of both softmaxes. If an option SPLITS, these kernels also ask `in_row` and `in_column`.
  template <class Pair>
  __device__ __forceinline__ static void exclude_in_tile(Real& x, const Pair& p) {
    if (is_positive(p)) return;
    ((x = Each::excluded(x, p) ? EXCLUDED : x), ...);
  }
  // Called for own negatives (own.cu), which are no positives and have no columns.
  template <class Pair>
  __device__ __forceinline__ static bool excluded(Real x, const Pair& p) { return (Each::excluded(x, p) | ...); }
  // Called by sweeps: the same as `exclude_in_tile`, but only options that MASK are asked. For options that SPLIT, sweeps
  // ask `in_row` and `in_column` alone.
  template <class Pair>
  __device__ __forceinline__ static void exclude_in_sweep(Real& x, const Pair& p) {
    if (is_positive(p)) return;
    ((x = Each::MASKS && Each::excluded(x, p) ? EXCLUDED : x), ...);
  }
  template <class Pair>
  __device__ __forceinline__ static bool is_positive(const Pair& p) { return (Each::is_positive(p) | ...); }
  template <class Pair>
  __device__ __forceinline__ static bool in_row(Real x, const Pair& p) { return (Each::in_row(x, p) & ...); }
  template <class Pair>
  __device__ __forceinline__ static bool in_column(Real x, const Pair& p) { return (Each::in_column(x, p) & ...); }
  // If several options SPLIT, `in_row` and `in_column` decide. If one does, its own `add_to_row` and `add_to_column`
  // are faster.
  enum : bool { SEVERAL_SPLIT = (0 + ... + Each::SPLITS) > 1 };
  template <class Pair>
  __device__ __forceinline__ static void add_to_row(float& sum, float e, float x, const Pair& p) {
    if (SEVERAL_SPLIT ? in_row(x, p) : !SPLITS) sum += e;
    if (!SEVERAL_SPLIT) (Each::add_to_row(sum, e, x, p), ...);
  }
  // Adds up the exponentials of two pairs of one column. A pair counts only if the column's softmax has it.
  template <class Pair>
  __device__ __forceinline__ static float column_sum(float e0, float x0, const Pair& p0, float e1, float x1,
                                                     const Pair& p1) {
    if (!SPLITS) return e0 + e1;
    if (SEVERAL_SPLIT) return (in_column(x0, p0) ? e0 : 0) + (in_column(x1, p1) ? e1 : 0);
    float sum = 0;
    (Each::add_to_column(sum, e0, x0, p0), ...);
    (Each::add_to_column(sum, e1, x1, p1), ...);
    return sum;
  }
  template <class Pair>
  __device__ __forceinline__ static Real exponent(Real x, const Pair& p) {
    ((x = Each::exponent(x, p)), ...);
    return x;
  }
};
typedef All<EqualIds, OtherGroups, PositiveIds, Limits, GuideMarks, Biases> Options;
