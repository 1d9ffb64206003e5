"""Retrieval ranks of a tile: how many logits exceed a threshold, which is about the logit of the
positive (`operands.rank_thresholds`)."""

from __future__ import annotations

from .elementary import compiled, wide_vectors


@compiled
def count_above(x, c, row_threshold, row_rank):  # type: ignore[no-untyped-def]
    """row_rank[i] += how many logits c x_ij of row i exceed row_threshold[i]."""
    wide_vectors()
    for i in range(x.shape[0]):
        row = x[i]
        threshold = x.dtype.type(row_threshold[i] / c)
        count = 0
        for j in range(row.size):
            count += row[j] > threshold
        row_rank[i] += count


@compiled
def count_above_columns(x, c, column_threshold, column_rank):  # type: ignore[no-untyped-def]
    """column_rank[j] += how many logits c x_ij of column j exceed column_threshold[j]."""
    wide_vectors()
    threshold = (column_threshold / c).astype(x.dtype)
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(row.size):
            column_rank[j] += row[j] > threshold[j]
