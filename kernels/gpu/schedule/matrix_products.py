"""cuBLAS products of a gradient block P with features: dQ += P K and dK += P' Q.

A product is divided twice: `divide_keys` divides the keys of the block, and `divide_terms` the
terms of a sum. tiled/gradient.py launches the products; passes.py has the accumulators.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from .. import config

# cuBLAS has fast kernels if sizes along contiguous memory are multiples of 16 bytes. This includes
# the keys of a row of the gradient block. In a block of at least LARGE_PRODUCT multiply-adds for
# dQ, a separate product for the keys after the last such multiple saves time
WHOLE_BYTES = 16
LARGE_PRODUCT = 2**30
# By number of parts (OPERAND_PARTS): the pairs (part of the gradient block, part of the features)
# that are multiplied, small terms first. Part 0 is the large part of a number, part 1 its rounding
# error. The product of both small parts is below float32's rounding
PART_PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}
# small parts of gradient blocks are multiplied by this: SMALL_PART_FACTOR of common.cuh
SMALL_PART_FACTOR = {"fp16x3": 2048.0}
# Tensor cores truncate sums, so sums are too small. The relative correction of a sum of large parts
# is `truncation_bias` times SUM_BIAS_FACTOR. `truncation_bias` was measured in sums of 32 terms.
# Longer sums lose more. The longest have 512 terms (MAX_SUM_TERMS, fp16x3). In units of 2^-24:
#
#     lost by cuBLAS, 512 terms of one sign       47   (benchmarks/NOTES.md)
#     lost by cuBLAS, 512 terms of mixed signs     9
#     correction, about halfway                   27
#     `truncation_bias` of 512 terms              19.2   so the factor is 27 / 19.2
SUM_BIAS_FACTOR = 1.4


class ProductBatch(NamedTuple):
    """A call of cuBLAS: one or more products of parts of a gradient block and of features.

    The products of a batch have successive terms, and add to successive copies of the accumulator.
    """

    gradient_part: int  # part of the gradient block: 0 large, 1 small
    feature_part: int  # part of the features
    start: int  # first term of the first product
    terms: int  # terms of each sum
    batch: int  # number of products
    dq_copy: int  # the copy of the accumulator to which the first product adds
    factor: float  # multiplies all products
    overwrites: bool  # the products replace the numbers in the accumulators


def divide_keys(rows: int, keys: int, width: int, precision: str, border: int = 0) -> list[slice]:
    """The keys of a block in up to three ranges, each of which gets its own products:

    1. The keys before `border`, whose accumulator of dK overlays the destination. (0: none.)
    2. As many of the other keys as fill multiples of `WHOLE_BYTES`.
    3. The rest, for large products only. Otherwise range 2 has all keys from `border` on.

    `width`: features of a row (`Operands.gradient_features`).
    """
    rest = 0
    border = min(max(border, 0), keys)
    if rows * keys * width >= LARGE_PRODUCT:
        rest = (keys - border) % (WHOLE_BYTES // config.element_bytes(precision))
    return [slice(i, j) for i, j in pairwise((0, border, keys - rest, keys)) if i < j]


def divide_terms(
    precision: str, terms: int, dq_copies: int, overwrites: bool
) -> Iterator[ProductBatch]:
    """Divide sums of `terms` terms into products, in the order in which they are added.

    The terms are keys for dQ and queries for dK. There are products for each pair of parts. A sum
    has at most MAX_SUM_TERMS terms, for float32's accuracy. `dq_copies` products run at once, each
    into its own copy of the accumulator (`config.choose_dq_copies`; 1 for dK). `overwrites`: the
    first product of each copy replaces the numbers in the copy, and all other products are added.
    """
    item, max_terms = config.element_bytes(precision), config.MAX_SUM_TERMS.get(precision, terms)
    pairs = PART_PAIRS[config.OPERAND_PARTS.get(precision, 1)]
    for pair_number, (gradient_part, feature_part) in enumerate(pairs):
        both_large = gradient_part == feature_part == 0
        factor = 1 / SMALL_PART_FACTOR.get(precision, 1.0) if gradient_part else 1.0
        # The truncation of sums with a small part is negligible, so one sum may have all terms. But
        # with several copies it is divided: the first products must overwrite each of the copies
        sum_terms = max_terms if both_large or dq_copies > 1 else terms
        for start, batch_terms, batch in _batches(terms, sum_terms, dq_copies):
            if both_large and precision in config.MAX_SUM_TERMS:
                factor = 1 + SUM_BIAS_FACTOR * config.truncation_bias(precision, batch_terms * item)
            sum_number = start // sum_terms
            is_first = pair_number == 0 and sum_number < dq_copies  # the first product of its copy
            yield ProductBatch(gradient_part, feature_part, start, batch_terms, batch,
                               sum_number % dq_copies, factor, overwrites and is_first)  # fmt: skip


def _batches(terms: int, sum_terms: int, max_batch: int) -> Iterator[tuple[int, int, int]]:
    """Batches (first term, terms of a sum, number of sums) that cover `terms` terms.

    Sums have `sum_terms` terms; the last one may have fewer, and is a batch by itself. A batch has
    up to `max_batch` sums.
    """
    whole_sums = terms // sum_terms
    for i in range(0, whole_sums, max_batch):
        yield i * sum_terms, sum_terms, min(max_batch, whole_sums - i)
    if terms % sum_terms:
        yield whole_sums * sum_terms, terms % sum_terms, 1


def count_first_block_sums(precision: str, keys: int, max_columns: int) -> int:
    """The number of sums into which the first block of a row of blocks divides its `keys`.

    The products of the first block overwrite the copies of the accumulator of dQ, so there must not
    be more copies than sums. Keys after the last multiple of `WHOLE_BYTES` have separate products,
    which overwrite nothing, and do not count. `max_columns`: the columns of the largest block.
    """
    keys -= keys % (WHOLE_BYTES // config.element_bytes(precision))
    return max(1, -(-keys // config.MAX_SUM_TERMS.get(precision, max_columns)))
