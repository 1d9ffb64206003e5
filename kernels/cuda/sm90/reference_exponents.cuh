// Reference exponents of one-sided losses in one pass (sweep_online.cu). A row is summed against a
// reference exponent r_i that is given before the logits are known: sum_j 2^(c x_ij - r_i).
//
// Elements have the exponents of float32, so r_i need not be the maximum. r_i serves as long as the row's
// sum stays within these bounds: nothing overflows, and terms down to 2^-30 of the sum are far from
// underflow. If a sum leaves the bounds, the sweep looks for the row's largest product, from which the
// row's next reference exponent follows.
#pragma once
#include "common.cuh"

constexpr Real MAX_REFERENCED_SUM = (Real)0x1p64;   // sum of the terms of one thread
constexpr Real MIN_REFERENCED_SUM = (Real)0x1p-60;  // sum of all terms of a row so far
constexpr int SHARERS = 4;  // threads that share a row
constexpr int ONLINE_TILE_ROWS = 128;  // rows that are swept again together
