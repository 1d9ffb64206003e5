// Types that the kernels of MaxSim share.
#pragma once
#include "common.cuh"

#ifndef WIDE_WINNERS
#define WIDE_WINNERS 0  // 1: rows may have more than 2^16 tokens
#endif

// An operand of the products.
#if PRECISION == FP64
typedef double Element;
#elif PRECISION == BF16 || PRECISION == FP16
typedef unsigned short Element;
#else
typedef float Element;
#endif

// The place of a token in its row.
#if WIDE_WINNERS
typedef int Winner;
#else
typedef unsigned short Winner;
#endif
