"""The warnings of `infonce loss`: a loss that no features could change, equal rows, and norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..reference import normalize
from ..result import LossAndGrad
from ..spec import Loss

UNIT_NORMS = 0.95, 1.05  # least and largest norm of rows that count as normalized
SAMPLE = 256  # the most rows whose norms are computed, in even steps over all rows
CHUNK = 1024  # rows that are compared at a time


def find_constant(
    kind: Loss, features: Mapping[str, Any], options: Mapping[str, Any], result: LossAndGrad,
    names_in_errors: Mapping[str, str],
) -> list[str]:  # fmt: skip
    """Why the loss has one value for all features of these shapes; and arrays of equal rows."""
    hints = []
    if not _has_positives(kind, options):
        hints.append("no row has a positive: the loss is 0 for any features")
    elif not _has_negatives(kind, features, options, result):
        hints.append("no row has a negative: the loss is 0 for any features")
    for name, z in features.items():
        if len(z) > 1 and _rows_are_equal(z):
            hints.append(
                f"all rows of {names_in_errors[name]} are equal: the loss cannot tell them apart"
            )
    return hints


def _has_positives(kind: Loss, options: Mapping[str, Any]) -> bool:
    """Whether any row has a positive, by its labels and their weights, or by positive ids."""
    labels, positive_ids = options.get("labels"), options.get("positive_ids")
    if isinstance(positive_ids, tuple) and not kind.sigmoid:
        return bool(np.isin(*positive_ids).any())
    if labels is None:
        return True
    known = labels[labels >= 0]
    if kind.classes:  # another row of its class
        return len(known) > len(np.unique(known))
    if (weights := options.get("label_weights")) is not None:
        return bool((weights[labels >= 0] > 0).any())
    return len(known) > 0


def _has_negatives(
    kind: Loss, features: Mapping[str, Any], options: Mapping[str, Any], result: LossAndGrad
) -> bool:
    """Whether any row has a negative. If options exclude pairs, only metrics tell."""
    if kind.sigmoid or options.get("own") is not None:
        return True
    if result.metrics is not None and np.isneginf(result.metrics.hardest_negative).all():
        return False
    keys = len([*features.values()][kind.key_argument])
    one_sample = 2 if len(kind.arguments) == 1 and not kind.classes else 1  # of two views
    return keys > one_sample


def _rows_are_equal(z: Any) -> bool:
    """Whether all rows are equal. Reading ends at the first chunk that has another row."""
    starts = range(0, len(z), CHUNK)
    return all((z[i : i + CHUNK] == z[:1]).all() for i in starts)


def find_norms(features: Mapping[str, Any], names_in_errors: Mapping[str, str]) -> list[str]:
    """A hint if rows that are not zero have no unit norm."""
    ranges = []
    for name, z in features.items():
        sample = z[:: -(-len(z) // SAMPLE)].reshape(-1, z.shape[-1]).astype(np.float64)
        _, row_norms = normalize(sample)
        row_norms = row_norms[row_norms > 0]
        low, high = UNIT_NORMS
        if len(row_norms) and not low <= row_norms.min() <= row_norms.max() <= high:
            norm_range = f"{row_norms.min():.3g} to {row_norms.max():.3g}"
            ranges.append(f"{norm_range} in {names_in_errors[name]}")
    if not ranges:
        return []
    return [f"norms of rows are {', '.join(ranges)}, expected about 1: --normalize divides by them"]
