"""The sums of a tile with a teacher's logits, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..cpu.loops import tile_ops as tile
from ..epilogues import Sums
from ..problem import Array
from .problem import TaughtStatistics


def statistics(
    stats: TaughtStatistics, x: Array, t: Array, c: float, teacher_c: float, rows: slice,
    columns: slice,
) -> Callable[[], None]:  # fmt: skip
    """Sum the exponentials of a tile, of the student's logits and of the teacher's, with moments.

    Returns a function that merges these sums into `stats`: a `Worker` calls it in the order of the
    row blocks, or at once if columns have no sums. x and t are dot products of the student and of
    the teacher; c x and `teacher_c` t are their base-2 logits. Both models go through the same
    loops, so that equal logits have equal sums.

    The moments of both models are sums of the student's logits c x_ij, times the exponentials of
    the model: of the student for the gradient of the scale, of the teacher for the mean of the
    student's logits under the teacher's probabilities, which the loss contains.
    """
    parts: list[tuple[Sums, Sums]] = []
    m, n = x.shape
    for values, factor, row_sums, column_sums in (
        (x, c, stats.rows, stats.columns), (t, teacher_c, stats.teacher_rows, stats.teacher_columns)
    ):  # fmt: skip
        assert row_sums is not None
        part_sums = [Sums(*np.empty((3, m)))]
        if column_sums is None:
            tile.row_statistics(values, factor, *part_sums[0].arrays, moment_logits=x)
        else:
            part_sums.append(Sums(*np.empty((3, n))))
            memory = np.empty((2, n), x.dtype)
            tile.row_and_column_statistics(
                values, factor, *part_sums[0].arrays, *part_sums[1].arrays, *memory, moment_logits=x
            )
            parts.append((column_sums.part(columns), part_sums[1]))
        parts.append((row_sums.part(rows), part_sums[0]))
        # The loops multiply the moments of x by `factor`. Base-2 logits of the student are c x
        for part in part_sums:
            part.moment *= c / factor

    def merge() -> None:
        for total, part in parts:
            tile.merge(*total.arrays, *part.arrays)

    return merge
