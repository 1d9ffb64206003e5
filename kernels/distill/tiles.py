"""The sums of a tile with a teacher's logits, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..cpu import tile_ops as tile
from ..problem import Array, Sums
from .problem import TaughtStatistics


def statistics(
    stats: TaughtStatistics, x: Array, t: Array, c: float, teacher_c: float, rows: slice,
    columns: slice,
) -> Callable[[], None]:  # fmt: skip
    """What adds the sums of a tile to `stats`: x and t are raw products of the student and of the
    teacher. Both go through the same loops, so that of equal logits the sums are equal."""
    parts: list[tuple[Sums, Sums]] = []
    for values, factor, row_sums, column_sums in (
        (x, c, stats.rows, stats.columns), (t, teacher_c, stats.teacher_rows, stats.teacher_columns)
    ):  # fmt: skip
        for sums, of, sums_of in (
            (row_sums, rows, tile.row_statistics), (column_sums, columns, tile.column_statistics)
        ):  # fmt: skip
            if sums is not None:
                part = Sums(*np.empty((3, of.stop - of.start)))
                sums_of(values, factor, *part.arrays, None, None, None, x)
                part.moment *= c / factor
                parts.append((sums.part(of), part))

    def merge() -> None:
        for total, part in parts:
            tile.merge(*total.arrays, *part.arrays)

    return merge
