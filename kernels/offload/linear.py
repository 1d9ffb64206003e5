"""Linear terms of features in host memory: chunks of rows are copied to the device, one by one."""

from __future__ import annotations

from collections.abc import Iterator

from ..grid import slices
from ..linear import SegmentedRows
from ..problem import Array, Problem
from .chunks import Arrivals
from .device import HostCopies, OffloadDevice


class StreamedRows:
    """The rows of queries or of keys on the host: see `infonce.kernels.linear.SegmentedRows`."""

    def __init__(
        self, device: OffloadDevice, copies: HostCopies, features: Array, problem: Problem,
        chunk_rows: int,
    ) -> None:  # fmt: skip
        self.device, self.copies, self.problem = device, copies, problem
        self.features, self.slices = features, slices(len(features), chunk_rows)

    def chunks(self) -> Iterator[tuple[slice, SegmentedRows]]:
        """Each chunk on the device: (its rows, its features), while the next one is copied."""
        arrivals = Arrivals(self.device.xp, self.copies, [self.features], self.slices)
        for rows in self.slices:
            yield rows, self.device.rows(arrivals.take()[0], self.problem)

    def sums(
        self, segment: Array, count: int, factor: Array | None = None, order: Array | None = None
    ) -> Array:
        total = None
        for rows, features in self.chunks():
            chunk_sums = features.sums(
                segment[rows], count, None if factor is None else factor[rows]
            )
            total = chunk_sums if total is None else total + chunk_sums
        return total

    def products(self, segment: Array, sums: Array, own_count: float) -> Array:
        out = self.device.vectors.zero_vector(len(segment))
        for rows, features in self.chunks():
            out[rows] = features.products(segment[rows], sums, own_count)
        return out
