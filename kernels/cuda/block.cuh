// The block of the logit matrix that one launch covers, as Python hands it over.
#pragma once
#include "common.cuh"

#define SLAB 128  // bytes of a row that a stage of a pipeline holds
// One side of the products: rows of `width` bytes, 16-byte aligned.
struct Operand {
  const char* data;
  i64 stride;          // bytes from row to row
  i64 part;            // bytes from part to part of a row (bf16x3, bf16x6)
  i64 rows;
  const Real* factor;  // [rows] or null: x_ij is multiplied by both sides' factors
};

#define LOW ((Real)-INFINITY_)  // an excluded pair's logit

// The block of the logit matrix that one launch covers, and the data of its loss.
struct Block {
  Operand q, k;
  i64 width;                   // bytes of features in a row
  i64 first_row, first_column;  // of the block, in the whole matrix
  i64 row_tiles, column_tiles;
  const i64* positives;  // [rows of the block] key of each row's positive, in the whole matrix
  const i64* query_ids;  // [rows] or null
  const i64* key_ids;    // [columns]
  i64 symmetric;         // i = j is excluded
  i64 triangle;          // only tiles on and above the diagonal
  Scalar scale;
};

// Elements of P: the type of the products' operands.
#if PRECISION == FP64
typedef double Element;
#elif PRECISION == FP32 || PRECISION == TF32
typedef float Element;
#else
typedef unsigned short Element;
#endif

struct Panel {
  Element* data;  // [rows, stride]
  i64 stride;     // elements, a multiple of 8
  i64 part;       // elements of a row that belong to one part (bf16x3, bf16x6)
};
