// Structures that Python fills (kernels/gpu/tiled) for kernels that compute a block of the logit matrix: tiled/ and, on
// Hopper, sm90/. block/options.cuh comes next.
#pragma once
#include "common.cuh"

#ifndef COLUMNS
#define COLUMNS 1  // 1: columns have a softmax, too
#endif
#ifndef GRADIENT
#define GRADIENT 1  // 1: kernels that add up losses (sigmoid, distillation) also write the gradient block
#endif
constexpr int K_SLICE = 128;  // bytes of a row that a stage of a pipeline holds

// The queries or the keys of a block, as an operand of the products: rows of PlainBlock::width bytes, 16-byte aligned.
struct Operand {
  const char* data;
  i64 stride;          // bytes from row to row
  i64 part;            // bytes from the large part to the small part of a row (BF16X3, FP16X3)
  i64 rows;
  const Real* factor;  // [rows] factors that normalise the rows (rows.cuh), or null. x_ij is multiplied by both factors
};

// The block of the logit matrix that one launch computes, and the data of its loss. block/options.cuh adds options.
struct PlainBlock {
  Operand q, k;
  i64 width;                   // bytes of the features in a row, of one part
  i64 first_row, first_column;  // of the block, in the whole matrix
  i64 row_tiles, column_tiles;  // tiles from the first to the last row, and from the first to the last column
  const i64* positives;  // [rows of the block, set_size] keys of each row's positives, in the whole matrix
  i64 set_size;          // 1 without SETS
  const i64* query_ids;  // [rows, IDS], or null
  const i64* key_ids;    // [columns, IDS], or null
  i64 symmetric;         // queries are keys: i = j is excluded
  i64 triangle;          // only tiles on and above the diagonal are computed
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
// Rounds two elements of P to 16 bits; x0 is in the lower half of the word. With two PARTS, the word belongs to the
// large part, and x0 and x1 become the remainders, from which a second call makes the small part.
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

// The gradient block P = dL/dx / gradient_divisor in memory. A row has the large parts of all columns, then the small
// parts.
struct GradientBlock {
  Element* data;  // [rows, stride]
  i64 stride;     // elements from row to row, a multiple of 8
  i64 part;       // elements of one part of a row (BF16X3, FP16X3)
};

// Factors of gradient blocks. tiled/gradient.cu has their equations; vectors/factors.cuh computes them.
struct Factors {
  const Real *row_reference, *a, *u;   // [rows]
  const Real *column_reference, *v;    // [columns]
  const i64* one_exponential;  // 1 if one exponential serves both directions
};
