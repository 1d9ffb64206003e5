// Heights of one-sided losses in one pass (sweep_online.cu): rows are summed against a height that is
// given before the logits are known, sum_j 2^(c x_ij - height_i).
//
// Elements have the exponents of float32, so any height will do that leaves a row's sum within these
// bounds: nothing overflows, and terms down to 2^-30 of the sum are far from underflow. A row that
// leaves the bounds has its largest product looked for, which is its next height.
#pragma once
#include "common.cuh"

constexpr Real MAX_REFERENCED_SUM = (Real)0x1p64;   // of a thread's terms
constexpr Real MIN_REFERENCED_SUM = (Real)0x1p-60;  // of all of a row's terms so far
constexpr int SHARERS = 4;  // threads that share a row
constexpr int ONLINE_PANEL_ROWS = 128;  // that are swept again together
