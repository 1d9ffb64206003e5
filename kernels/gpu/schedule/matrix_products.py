"""cuBLAS products that compute dQ and dK from gradient blocks: their rows, terms and parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from .. import config

# cuBLAS has fast kernels if sizes along contiguous memory are multiples of 16 bytes. This includes
# the keys of a row of the gradient block. From LARGE_PRODUCT multiply-adds on, a separate product
# for the keys after the last such multiple saves time
WHOLE_BYTES = 16
LARGE_PRODUCT = 2**30
# Pairs (part of the gradient block, part of the features) that are multiplied, small terms first:
# 0 is the large part, 1 the small part. The product of both small parts is below float32's rounding
PART_PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}
# small parts of gradient blocks are multiplied by this: SMALL_PART_FACTOR of common.cuh
SMALL_PART_FACTOR = {"fp16x3": 2048.0}
# Products of the large parts are sums of at most MAX_SUM_TERMS terms. A factor corrects their mean
# truncation bias. In units of 2^-24 of the sum, a sum of 512 terms loses 47 if all terms have one
# sign, and 9 if signs are mixed; the correction is 27, about halfway. `truncation_bias` gives 19.2
# (32 steps of 0.6). SUM_BIAS_FACTOR is 27 / 19.2.
SUM_BIAS_FACTOR = 1.4


class Product(NamedTuple):
    """A batch of products of a gradient block and features, each with its own accumulator."""

    gradient_part: int  # of the gradient block: 0 high, 1 low
    feature_part: int  # of the features
    start: int  # first term of the first product
    terms: int  # of each product
    batch: int  # number of products
    copy: int  # the first product's accumulator, among the copies of an accumulator
    factor: float  # of all products
    is_first: bool  # the products overwrite the accumulators


def divide_keys(rows: int, keys: int, width: int, precision: str, border: int = 0) -> list[slice]:
    """The keys of a block in up to three ranges, each of which gets its own products.

    The ranges are the keys before `border`, which have another accumulator; a multiple of
    `WHOLE_BYTES`; and the rest, for large products.
    """
    rest = 0
    border = min(max(border, 0), keys)
    if rows * keys * width >= LARGE_PRODUCT:
        rest = (keys - border) % (WHOLE_BYTES // config.element_bytes(precision))
    return [slice(i, j) for i, j in pairwise((0, border, keys - rest, keys)) if i < j]


def products(precision: str, k: int, copies: int, is_first: bool) -> Iterator[Product]:
    """The products of a gradient block and features over `k` terms, for each pair of parts.

    Sums have at most as many terms as keep float32's accuracy. `copies` sums are computed at once,
    in separate accumulators (`config.sums_at_once`).
    """
    item, max_terms = config.element_bytes(precision), config.MAX_SUM_TERMS.get(precision, k)
    for gradient_part, feature_part in PART_PAIRS[config.OPERAND_PARTS.get(precision, 1)]:
        both_high = gradient_part == feature_part == 0
        factor = 1 / SMALL_PART_FACTOR.get(precision, 1.0) if gradient_part else 1.0
        sum_terms = max_terms if both_high or copies > 1 else k
        for start, terms, batch in _sums(k, sum_terms, copies):
            if both_high and precision in config.MAX_SUM_TERMS:
                factor = 1 + SUM_BIAS_FACTOR * config.truncation_bias(precision, terms * item)
            overwrites = is_first and start < copies * sum_terms
            yield Product(gradient_part, feature_part, start, terms, batch,
                          start // sum_terms % copies, factor, overwrites)  # fmt: skip
        is_first = False


def _sums(k: int, sum_terms: int, batch: int) -> Iterator[tuple[int, int, int]]:
    """Batches of up to `batch` sums of at most `sum_terms` of the k terms each.

    Each batch is (first term, terms of a sum, sums).
    """
    whole_sums = k // sum_terms
    for i in range(0, whole_sums, batch):
        yield i * sum_terms, sum_terms, min(batch, whole_sums - i)
    if k % sum_terms:
        yield whole_sums * sum_terms, k % sum_terms, 1


def count_first_block_sums(precision: str, first: int, columns: int) -> int:
    """The number of sums into which the products of the first block divide its `first` keys.

    The first block begins all copies of an accumulator, so there are at most as many copies. Keys
    after a multiple of `WHOLE_BYTES` have separate products, and do not count.
    """
    first -= first % (WHOLE_BYTES // config.element_bytes(precision))
    return max(1, -(-first // config.MAX_SUM_TERMS.get(precision, columns)))
