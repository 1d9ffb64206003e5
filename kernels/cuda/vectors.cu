// Kernels on vectors, which have one number for each of M rows or N columns. They run before, between and after the
// kernels on tiles, and are compiled together. kernels/gpu/vectors.py launches most of them.
//
//     vectors/sums.cuh      sums of rows and columns, and the losses from them: begin, merge_partial_sums,
//                           add_partial_sums, add_dq_copies, limits, add_bias, raise_scale, finalize, totals
//     vectors/linear.cuh    label smoothing, class means, joint losses: join_rows, finalize_linear
//     vectors/online.cuh    losses in one pass: check_references, add_repeated, end_online
//     vectors/factors.cuh   factors of gradient blocks: ranges, check_spread, factors, divide_factors, to_products
//     vectors/sigmoid.cuh   the pairwise sigmoid: begin_sigmoid, sigmoid_positives, mark_not_finite
//     vectors/queries.cuh   queries by key: count_queries, place_queries, list_queries, sort_queries
//     vectors/reduction.cuh sums and maxima over all thread blocks, for finalize and totals
//     vectors/shards.cuh    ranks: shard_positives, positives_in_block, merge_sums, sum_over_ranks, add
#include "vectors/factors.cuh"
#include "vectors/linear.cuh"
#include "vectors/online.cuh"
#include "vectors/queries.cuh"
#include "vectors/shards.cuh"
#include "vectors/sigmoid.cuh"
#include "vectors/sums.cuh"
