// The block of the logit matrix that one launch computes: structures that Python fills (kernels/gpu/tiled).
#pragma once
#include "common.cuh"

#ifndef COLUMNS
#define COLUMNS 1  // columns have a softmax, too
#endif
#ifndef GRADIENT
#define GRADIENT 1  // kernels that add up losses also write the gradient block
#endif
constexpr int K_SLICE = 128;  // bytes of a row that a stage of a pipeline holds
// One side of the products: rows of `width` bytes, 16-byte aligned.
struct Operand {
  const char* data;
  i64 stride;          // bytes from row to row
  i64 part;            // bytes from part to part of a row (bf16x3, fp16x3)
  i64 rows;
  const Real* factor;  // [rows] or null: x_ij is multiplied by both sides' factors
};

// The block of the logit matrix that one launch computes, and the data of its loss. block/options.cuh adds options.
struct PlainBlock {
  Operand q, k;
  i64 width;                   // bytes of features in a row
  i64 first_row, first_column;  // of the block, in the whole matrix
  i64 row_tiles, column_tiles;
  const i64* positives;  // [rows of the block, set_size] keys of each row's positives, in the whole matrix
  i64 set_size;          // 1 without SETS
  const i64* query_ids;  // [rows] or null
  const i64* key_ids;    // [columns]
  i64 symmetric;         // queries are keys: i = j is excluded
  i64 triangle;          // only tiles on and above the diagonal
  Scale scale;

  __device__ __forceinline__ i64 positives_of_row() const { return SETS ? set_size : 1; }
};

// Elements of a gradient block P have the type of the products' operands.
#if PRECISION == FP64
typedef double Element;
#elif PRECISION == FP32 || PRECISION == TF32
typedef float Element;
#else
typedef unsigned short Element;
#endif

#if PRECISION >= BF16X3
// Two elements of a part of P, the first in the lower half. x0 and x1 become the remainders for the next part.
__device__ __forceinline__ u32 round_pair(float& x0, float& x1) {
#if IS_FLOAT16
  const u32 w = to_fp16x2(x0, x1);
  if (PARTS > 1) {
    x0 = (x0 - from_fp16((unsigned short)w)) * SMALL_PART_FACTOR;
    x1 = (x1 - from_fp16((unsigned short)(w >> 16))) * SMALL_PART_FACTOR;
  }
#else
  const u32 w = to_bf16x2(x0, x1);
  if (PARTS > 1) {
    x0 -= __uint_as_float(w << 16);
    x1 -= __uint_as_float(w & 0xffff0000u);
  }
#endif
  return w;
}
#endif

struct GradientBlock {
  Element* data;  // [rows, stride]
  i64 stride;     // elements, a multiple of 8
  i64 part;       // elements of a row that belong to one part (bf16x3, fp16x3)
};

// Factors of gradient blocks, as in the equations of tiled/gradient.cu.
struct Factors {
  const Real *row_reference, *a, *u;   // [rows]
  const Real *column_reference, *v;    // [columns]
  const i64* one_exponential;  // 1 if one exponential serves both directions
};
