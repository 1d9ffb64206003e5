"""A worker whose tiles have the logits of one prefix after another.

The products of a prefix are the products of the prefix before it, plus the products of the further
features. dL/dx adds up in the opposite direction: the gradients of features get the dL/dx of all
prefixes that have these features.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..cpu.loops import tile_ops as tile
from ..cpu.loops.elementary import compiled, wide_vectors
from ..cpu.pass_state import PassState
from ..cpu.worker import Worker
from ..epilogues import Sums
from ..problem import Array
from .problem import PrefixGradient, PrefixStatistics
from .sides import PrefixSide


class PrefixWorker(Worker):
    """One thread of a pass over all prefixes."""

    def __init__(self, state: PassState, first_row_block: int) -> None:
        super().__init__(state, first_row_block)
        call_state, (bm, bn) = state.call_state, state.grid.largest
        assert isinstance(call_state.query, PrefixSide)
        assert isinstance(call_state.key, PrefixSide)
        self.query, self.key, self.ranges = (
            call_state.query,
            call_state.key,
            call_state.query.ranges,
        )
        count = call_state.schedule.memory.further_tiles
        self.further = self.memory[-count * bm * bn :].reshape(count, bm * bn)
        self.tiles: list[Array] = []  # of each prefix: products, then dL/dx
        self.merges: list[Callable[[], None] | None] = []

    def further_tile(self, number: int, m: int, n: int) -> Array:
        """[m, n] memory for the products of a prefix, in addition to the tile of all features."""
        return self.further[number, : m * n].reshape(m, n)

    def tile_products(self, row_block: int, column_block: int, q: Array, k: Array) -> Array:
        """See `Worker`. In the gradient pass, `tiles` gets the products of all prefixes: those of
        the last prefix may have been kept, those of the others are computed again."""
        if isinstance(self.state.epilogue, PrefixGradient):
            shape = len(q), len(k)
            self.tiles = [self.further_tile(p, *shape) for p in range(len(self.ranges) - 1)]
            for prefix, x in enumerate(self.tiles):
                self.add_range(x, q, k, prefix, self.tiles[prefix - 1] if prefix else None)
        x = super().tile_products(row_block, column_block, q, k)
        self.tiles.append(x)
        return x

    def add_range(self, x: Array, q: Array, k: Array, prefix: int, before: Array | None) -> None:
        """x = the products of a prefix. `before` has those of the prefix before it, if any."""
        features = self.ranges[prefix]
        np.matmul(q[:, features], k[:, features].T, out=x)
        if before is not None:
            np.add(x, before, out=x)

    def compute_products(self, x: Array, q: Array, k: Array, rows: slice, columns: slice) -> None:
        """Compute the products of the last prefix into x, from those of the prefix before it.

        In the log-sum-exp pass, also sum each prefix while its products are there: two tiles in
        turns have the products of a prefix and of the next one. `apply_epilogue` returns `merges`.
        """
        last = len(self.ranges) - 1
        if isinstance(self.state.epilogue, PrefixGradient):
            self.add_range(x, q, k, last, self.tiles[last - 1])
            return
        self.merges = []
        before: Array | None = None
        for prefix in range(last + 1):
            y = x if prefix == last else self.further_tile(prefix % 2, *x.shape)
            self.add_range(y, q, k, prefix, before)
            self.merges.append(self.prefix_statistics(y, rows, columns, prefix))
            before = y

    def prefix_statistics(
        self, x: Array, rows: slice, columns: slice, prefix: int
    ) -> Callable[[], None] | None:
        """The sums of a prefix, from its products x. See `Worker.apply_epilogue`."""
        state, epilogue = self.state, self.state.epilogue
        assert isinstance(epilogue, PrefixStatistics)
        stats = epilogue.prefixes[prefix]
        y = x if prefix == len(self.ranges) - 1 else self.unit_products(x, rows, columns, prefix)
        positives = state.problem.positives[rows][:, None]
        positive_products = np.full(positives.shape, np.nan)
        tile.set_aside_positives(y, positives, columns.start, 1.0, positive_products)
        logits = stats.positive_logits[rows]
        np.multiply(
            positive_products[:, 0],
            state.positive_scale,
            out=logits,
            where=~np.isnan(positive_products[:, 0]),
        )
        # new memory for each prefix: the sums of all prefixes are merged after the last
        sizes = 1 + (2 if state.problem.moments else 1)
        self.tile_rows, self.tile_columns = (Sums(*np.empty((sizes, n))) for n in x.shape)
        merge = self.statistics(stats, y, rows, columns, False)
        if y is x:  # x has -inf at positives now, and the next prefix adds to x: restore them
            tile.insert_positives(x, positives, columns.start, positive_products.astype(x.dtype))
        return merge

    def unit_products(self, x: Array, rows: slice, columns: slice, prefix: int) -> Array:
        """The products of unit vectors; x itself if no features are normalised."""
        if self.query.ratios is None:
            return x
        y = self.further_tile(len(self.further) - 1, *x.shape)
        multiply_by_ratios(x, self.query.ratios[prefix, rows], self.key.ratios[prefix, columns], y)
        return y

    def apply_epilogue(
        self, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> Callable[[], None] | None:
        """See `Worker`. In the gradient pass, `tiles` become sums of dL/dx, from the last prefix to
        the first, and dots of unit vectors are added up: the first tile of a row, and the first row
        block of a column, overwrites them."""
        state, epilogue = self.state, self.state.epilogue
        if isinstance(epilogue, PrefixGradient):
            positives, wider = state.problem.positives[rows][:, None], None
            column_dots = np.zeros((len(self.tiles), len(x.T)), x.dtype)
            for prefix in reversed(range(len(self.tiles))):
                x = self.tiles[prefix]
                g = self.unit_products(x, rows, columns, prefix)
                factors, positive_gradient = epilogue.prefixes[prefix]
                plain = (None, None), (None, None), None  # no biases, limits and guide
                factors.write_gradient(g, rows, columns, *plain)
                values = positive_gradient[rows][:, None]
                tile.insert_positives(g, positives, columns.start, values)
                if g is not x:
                    dots = self.query.dots[prefix, rows]
                    if columns.start == state.grid.columns[0].start:
                        dots[:] = 0
                    ratios = self.query.ratios[prefix, rows], self.key.ratios[prefix, columns]
                    chain(g, x, *ratios, dots, column_dots[prefix])
                if wider is not None:
                    np.add(x, wider, out=x)
                wider = x
            if self.key.dots is None:
                return None

            def add_dots() -> None:
                of_keys = self.key.dots[:, columns]
                of_keys[:] = column_dots + (of_keys if rows.start else 0)

            return add_dots

        merges = [merge for merge in self.merges if merge is not None]

        def merge_tile() -> None:
            for merge in merges:
                merge()

        return merge_tile if merges else None

    def multiply_gradient(
        self, x: Array, features: Array, out: Array, transposed: bool = False
    ) -> None:
        for dx, columns in zip(self.tiles, self.ranges, strict=True):
            np.matmul(dx.T if transposed else dx, features[:, columns], out=out[:, columns])


@compiled
def multiply_by_ratios(x, row_ratio, column_ratio, out):  # type: ignore[no-untyped-def]
    """out_ij = x_ij row_ratio_i column_ratio_j: from products of rows to those of unit prefixes."""
    wide_vectors()
    for i in range(x.shape[0]):
        row, to, ratio = x[i], out[i], row_ratio[i]
        for j in range(row.size):
            to[j] = row[j] * (ratio * column_ratio[j])


@compiled
def chain(g, x, row_ratio, column_ratio, row_dots, column_dots):  # type: ignore[no-untyped-def]
    """The chain rule of y = x times the ratios: g is dL/dy, and dL/dx overwrites x. Adds g y to the
    dots of rows and of columns."""
    wide_vectors()
    for i in range(x.shape[0]):
        row, gi, ratio = x[i], g[i], row_ratio[i]
        total = x.dtype.type(0)
        for j in range(row.size):
            scaled = gi[j] * (ratio * column_ratio[j])
            dot = scaled * row[j]
            total += dot
            column_dots[j] += dot
            row[j] = scaled
        row_dots[i] += total
