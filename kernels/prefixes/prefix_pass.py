"""A pass whose tiles have the logits of one prefix after another.

The products of a prefix are the products of the prefix before it, plus the products of the further
features. dL/dx adds up in the opposite direction: the gradients of features get the dL/dx of all
prefixes that have these features.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cpu.loops import tile_ops as tile
from ..cpu.loops.compilation import compiled
from ..cpu.loops.elementary import wide_vectors
from ..cpu.resources import BLAS
from ..cpu.sums import sum_tile
from ..cpu.tiled_pass import VECTORS, TiledPass
from ..epilogues import Sums
from ..problem import Array
from .problem import PrefixGradient, PrefixStatistics
from .sides import PrefixSide


class PrefixPass(TiledPass):
    """One pass over all prefixes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        query, key = self.call_state.query, self.call_state.key
        assert isinstance(query, PrefixSide)
        assert isinstance(key, PrefixSide)
        self.query, self.key, self.ranges = query, key, query.ranges
        self.tiles: list[Array] = []  # of each prefix: products, then dL/dx

    def further_tile(self, number: int, m: int, n: int) -> Array:
        """[m, n] memory for the products of a prefix, in addition to the tile of all features."""
        return self.further_tiles[number, : m * n].reshape(m, n)

    def tile_products(self, row_block: int, column_block: int, q: Array, k: Array) -> Array:
        """See `TiledPass`. In the gradient pass, `tiles` gets the products of all prefixes: those
        of the last prefix may have been kept, those of the others are computed again."""
        if isinstance(self.epilogue, PrefixGradient):
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
        BLAS.matmul(q[:, features], k[:, features].T, out=x)
        if before is not None:
            np.add(x, before, out=x)

    def compute_products(self, x: Array, q: Array, k: Array, rows: slice, columns: slice) -> None:
        """Compute the products of the last prefix into x, from those of the prefix before it.

        In the log-sum-exp pass, also sum each prefix while its products are there: two tiles in
        turns have the products of a prefix and of the next one.
        """
        last = len(self.ranges) - 1
        if isinstance(self.epilogue, PrefixGradient):
            self.add_range(x, q, k, last, self.tiles[last - 1])
            return
        before: Array | None = None
        for prefix in range(last + 1):
            y = x if prefix == last else self.further_tile(prefix % 2, *x.shape)
            self.add_range(y, q, k, prefix, before)
            self.sum_prefix(y, rows, columns, prefix)
            before = y

    def sum_prefix(self, x: Array, rows: slice, columns: slice, prefix: int) -> None:
        """Add the exponentials of a prefix to its sums, from its products x."""
        epilogue = self.epilogue
        assert isinstance(epilogue, PrefixStatistics)
        stats = epilogue.prefixes[prefix]
        y = x if prefix == len(self.ranges) - 1 else self.unit_products(x, rows, columns, prefix)
        positives = self.problem.positives[rows][:, None]
        positive_products = np.full(positives.shape, np.nan)
        tile.set_aside_positives(y, positives, columns.start, 1.0, positive_products, False)
        logits = stats.positive_logits[rows]
        np.multiply(
            positive_products[:, 0],
            self.positive_scale,
            out=logits,
            where=~np.isnan(positive_products[:, 0]),
        )
        row_sums, column_sums = (np.empty((3, n)) for n in x.shape)
        has_columns = stats.columns is not None
        sum_tile(y, y, self.exponent_scale, row_sums, column_sums if has_columns else None)
        VECTORS.merge(stats.rows.part(rows), Sums(*row_sums))
        if stats.columns is not None:
            VECTORS.merge(stats.columns.part(columns), Sums(*column_sums))
        if y is x:  # x has -inf at positives now, and the next prefix adds to x: restore them
            tile.insert_positives(x, positives, columns.start, positive_products.astype(x.dtype))

    def unit_products(self, x: Array, rows: slice, columns: slice, prefix: int) -> Array:
        """The products of unit vectors; x itself if no features are normalised."""
        if self.query.ratios is None:
            return x
        y = self.further_tile(len(self.further_tiles) - 1, *x.shape)
        np.multiply(x, self.query.ratios[prefix, rows, None], out=y)
        y *= self.key.ratios[prefix, columns]
        return y

    def apply_epilogue(self, x: Array, rows: slice, columns: slice, diagonal: bool) -> None:
        """See `TiledPass`. In the gradient pass, `tiles` become sums of dL/dx, from the last prefix
        to the first, and dots of unit vectors are added up: the first tile of a row, and the first
        row block of a column, overwrites them."""
        epilogue = self.epilogue
        if isinstance(epilogue, PrefixGradient):
            positives, wider = self.problem.positives[rows][:, None], None
            column_dots = np.zeros((len(self.tiles), len(x.T)), x.dtype)
            for prefix in reversed(range(len(self.tiles))):
                x = self.tiles[prefix]
                g = self.unit_products(x, rows, columns, prefix)
                factors, positive_gradient = epilogue.prefixes[prefix]
                factors.write_gradient(g, rows, columns)
                values = positive_gradient[rows][:, None]
                tile.insert_positives(g, positives, columns.start, values)
                if g is not x:
                    dots = self.query.dots[prefix, rows]
                    if columns.start == self.grid.columns[0].start:
                        dots[:] = 0
                    ratios = self.query.ratios[prefix, rows], self.key.ratios[prefix, columns]
                    chain(g, x, *ratios, dots, column_dots[prefix])
                if wider is not None:
                    np.add(x, wider, out=x)
                wider = x
            if self.key.dots is not None:
                of_keys = self.key.dots[:, columns]
                of_keys[:] = column_dots + (of_keys if rows.start else 0)

    def multiply_gradient(
        self, x: Array, features: Array, out: Array, transposed: bool = False
    ) -> None:
        for dx, columns in zip(self.tiles, self.ranges, strict=True):
            left = dx.T if transposed else dx
            BLAS.matmul(left, features[:, columns], out=out[:, columns])


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
