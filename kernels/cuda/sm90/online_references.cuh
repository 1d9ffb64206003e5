// Reference exponents of losses with one softmax in one pass: bounds that sweep_online.cu and the kernels that check
// its sums (vectors/online.cuh) share. A row is summed against a reference exponent r_i that is chosen before the
// logits are known: sum_j 2^(c x_ij - r_i).
//
// r_i need not be the maximum, because elements of gradient blocks have the exponent range of float32. r_i serves as
// long as the row's sum stays within these bounds: nothing overflows, and terms down to 2^-30 of the sum are far from
// underflow. If a sum leaves the bounds, the sweep looks for the row's largest exponent, in the unit of products: the
// largest x_ij, or of the number that an option puts in place of x_ij. The row's next r_i is c times this number.
#pragma once
#include "common.cuh"

constexpr Real MAX_REFERENCED_SUM = (Real)0x1p64;   // of one thread's terms of a row, over its tiles so far
constexpr Real MIN_REFERENCED_SUM = (Real)0x1p-60;  // of all terms of a row so far
constexpr int SWEEP_ROW_THREADS = 4;  // threads that share a row in a sweep
// Rows with one number in a list of query tiles that a sweep visits (`visited_tiles`, sweep/layout.cuh). In one pass, a
// sweep computes all these rows again if the sum of one of them is out of bounds
constexpr int VISITED_TILE_ROWS = 128;
