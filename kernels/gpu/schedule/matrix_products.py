"""The products of cuBLAS that make dQ and dK of gradient blocks: which rows, terms and parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from .. import config

# cuBLAS has fast kernels if sizes along contiguous memory are multiples of 16 bytes, also that of a
# row of the gradient block. From LARGE_PRODUCT multiply-adds on, a product of its own for the keys
# after the last such multiple saves time
WHOLE_BYTES = 16
LARGE_PRODUCT = 2**30
# Which parts of the two operands are multiplied, small terms first. The product of both low parts
# is below float32's rounding
PART_PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}
# low parts of gradient blocks are multiplied by this: LOW_PART_FACTOR of common.cuh
LOW_PART_FACTOR = {"fp16x3": 2048.0}
# Sums of MAX_SUM_TERMS terms of the high parts are corrected by their mean truncation bias. A sum
# of 512 terms loses 47 units of 2^-24 of itself if all have one sign, and 9 if signs are mixed.
# It gets back 27, about halfway. `truncation_bias` gives 19.2 (32 steps of 0.6): the factor is the
# ratio of the two.
SUM_BIAS_FACTOR = 1.4


class Product(NamedTuple):
    """A product of some terms, or a batch of them, each with an accumulator of its own."""

    gradient_part: int
    feature_part: int
    start: int  # the first term
    terms: int
    batch: int
    copy: int  # the accumulator of the first
    factor: float
    is_first: bool  # nothing is in these accumulators


def key_ranges_of_products(
    rows: int, keys: int, width: int, precision: str, border: int = 0
) -> list[slice]:
    """A block's keys as products take them: those before the `border` between two accumulators, a
    multiple of `WHOLE_BYTES`, and the rest."""
    rest = 0
    border = min(max(border, 0), keys)
    if rows * keys * width >= LARGE_PRODUCT:
        rest = (keys - border) % (WHOLE_BYTES // config.element_bytes(precision))
    return [slice(i, j) for i, j in pairwise((0, border, keys - rest, keys)) if i < j]


def products(precision: str, k: int, copies: int, is_first: bool) -> Iterator[Product]:
    """Products of a gradient block and features that have `k` terms: of each pair of parts, in sums
    of as many terms as keep float32's accuracy, `copies` of them at once."""
    item, limit = config.element_bytes(precision), config.MAX_SUM_TERMS.get(precision, k)
    for gradient_part, feature_part in PART_PAIRS[config.OPERAND_PARTS.get(precision, 1)]:
        high = gradient_part == feature_part == 0
        factor = 1 / LOW_PART_FACTOR.get(precision, 1.0) if gradient_part else 1.0
        longest = limit if high or copies > 1 else k
        for start, terms, batch in _sums(k, longest, copies):
            if high and precision in config.MAX_SUM_TERMS:
                factor = 1 + SUM_BIAS_FACTOR * config.truncation_bias(precision, terms * item)
            new = is_first and start < copies * longest
            yield Product(gradient_part, feature_part, start, terms, batch,
                          start // longest % copies, factor, new)  # fmt: skip
        is_first = False


def _sums(k: int, longest: int, at_once: int) -> Iterator[tuple[int, int, int]]:
    """Sums over k in pieces of at most `longest` terms: where each product starts, its terms, and
    how many such sums follow one another in it."""
    whole = k // longest
    for i in range(0, whole, at_once):
        yield i * longest, longest, min(at_once, whole - i)
    if k % longest:
        yield whole * longest, k % longest, 1


def sums_of_first_block(precision: str, first: int, columns: int) -> int:
    """Sums that the first block's `first` keys are cut into, without those that are multiplied
    apart. It is the block that begins all copies of an accumulator."""
    first -= first % (WHOLE_BYTES // config.element_bytes(precision))
    return max(1, -(-first // config.MAX_SUM_TERMS.get(precision, columns)))
