// Kernels on vectors of length M or N, between the kernels on tiles. They are compiled together.
//
//     vectors/sums.cuh      merge_partial_sums, add_partial_sums, add_copies, begin, finalize, totals
//     vectors/linear.cuh    join_rows, finalize_linear
//     vectors/online.cuh    check_references, add_repeated, end_online
//     vectors/factors.cuh   ranges, factors, divide_factors, to_products
//     vectors/sigmoid.cuh   begin_sigmoid, mark_not_finite, sigmoid_positives
//     vectors/queries.cuh   count_queries, place_queries, list_queries, sort_queries
//     vectors/shards.cuh    shard_positives, local_positives, merge_sums, sum_over_ranks, add
#include "vectors/factors.cuh"
#include "vectors/linear.cuh"
#include "vectors/online.cuh"
#include "vectors/queries.cuh"
#include "vectors/shards.cuh"
#include "vectors/sigmoid.cuh"
#include "vectors/sums.cuh"
