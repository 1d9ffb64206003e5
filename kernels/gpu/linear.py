"""Linear terms on a GPU: sums over segments of rows. See `infonce.kernels.linear`."""

from __future__ import annotations

import cupy

from ..linear import LinearTerm, Segments
from ..problem import Array, Gradients, Problem
from .device.arguments import address, matrix
from .tiled.context import Context
from .tiled.operands import Side

FEATURES = 32  # of a block of linear.cu's segment_sums
MOST_WARPS = 32


class Linear:
    """Of the features of one call."""

    def __init__(self, context: Context) -> None:
        self.context, self.launcher = context, context.launcher
        self.inverse = [_inverse_norms(side) for side in (context.query, context.key)]

    def segment_products(
        self, segments: Segments, columns: bool, symmetric: bool
    ) -> tuple[Array, Array | None]:
        """[M] the sum of q_i . k_j over the keys of row i's segment; and, of `columns`, [N] the sum
        over the rows of key j's. A symmetric problem leaves out i = j."""
        assert segments.count is not None
        of_keys = self._sums(1, segments.columns, segments.count)
        rows = self._products(0, segments.rows, of_keys, float(symmetric))
        if not columns:
            return rows, None
        of_queries = self._sums(0, segments.rows, segments.count)
        return rows, self._products(1, segments.columns, of_queries, 0.0)

    def positive_products(self, positives: Array) -> Array:
        """[M] or [M, P] float64: u_i . v_j for the positives j of row i; 0 in place of none."""
        query, key = self._side(0), self._side(1)
        n, out = positives.size, cupy.empty(positives.shape)
        self.launcher.rows(
            "positive_products", n, file="linear.cu", query=matrix(query.features),
            key=matrix(key.features), n=n, d=query.features.shape[1],
            each=n // max(1, len(positives)), query_inverse=self.inverse[0],
            key_inverse=self.inverse[1], positives=positives, out=out,
        )  # fmt: skip
        return out

    def subtract(
        self, term: LinearTerm, problem: Problem, gradients: Gradients, keys: slice
    ) -> None:
        """Add the term's gradients to complete dQ, and to complete dK of these keys."""
        segments = term.segments.numbered(cupy)
        if gradients.want_query:
            their_factor = term.row_factor if problem.symmetric else term.column_factor
            self._subtract(
                0, segments, term.row_factor, their_factor, 2.0 * problem.symmetric,
                gradients.query, slice(0, problem.shape[0]),
            )  # fmt: skip
        if gradients.want_key and not problem.symmetric:
            self._subtract(
                1, segments, term.column_factor, term.row_factor, 0.0, gradients.key, keys
            )

    def _subtract(
        self, of: int, segments: Segments, factor: Array | None, their_factor: Array | None,
        itself: float, out: Array, rows: slice,
    ) -> None:  # fmt: skip
        """The gradient of the queries (`of` is 0) or of the keys (1)."""
        side, count = self._side(of), segments.count
        assert count is not None
        mine, others = segments.rows, segments.columns
        if of == 1:
            mine, others = others, mine
        zeros = cupy.zeros(max(len(mine), len(others)))
        weight = zeros[: len(others)] if their_factor is None else their_factor
        factor = zeros if factor is None else factor
        self.launcher.rows(
            "subtract_linear", rows.stop - rows.start, file="linear.cu",
            z=matrix(side.features, rows.start), n=rows.stop - rows.start,
            d=side.features.shape[1], normalize=side.factor is not None,
            inverse=address(self.inverse[of], rows.start), segment=address(mine, rows.start),
            factor=address(factor, rows.start), sums=self._sums(1 - of, others, count),
            weighted=self._sums(1 - of, others, count, weight), itself=itself,
            g=matrix(out, rows.start),
        )  # fmt: skip

    def _side(self, of: int) -> Side:
        return self.context.key if of else self.context.query

    def _sums(self, of: int, segment: Array, count: int, factor: Array | None = None) -> Array:
        """[count, D] float64: the sum of factor_i u_i over the rows of each segment."""
        side = self._side(of)
        n, d = side.features.shape
        order = cupy.argsort(segment, kind="stable")
        begin = cupy.searchsorted(segment[order], cupy.arange(count + 1))
        weight = self.inverse[of] if factor is None else self.inverse[of] * factor
        out = cupy.empty((count, d))
        warps = min(max(1, n // (4 * count)), MOST_WARPS)
        self.launcher.launch(
            "linear.cu", "segment_sums", count * -(-d // FEATURES), 32 * warps,
            {"z": matrix(side.features), "d": d, "order": order, "begin": begin,
             "factor": weight, "out": out},
        )  # fmt: skip
        return out

    def _products(self, of: int, segment: Array, sums: Array, itself: float) -> Array:
        """[n] float64: u_i . (the sum of its segment, less u_i where asked for)."""
        side = self._side(of)
        n, d = side.features.shape
        out = cupy.empty(n)
        self.launcher.rows(
            "segment_products", n, file="linear.cu", z=matrix(side.features), n=n, d=d,
            inverse=self.inverse[of], segment=segment, sums=sums, itself=itself, out=out,
        )  # fmt: skip
        return out


def _inverse_norms(side: Side) -> Array:
    """[n] float64: 1 / |z_i|, 0 of a row of zeros; 1 without normalisation."""
    if side.factor is None or side.exponent is None:
        return cupy.ones(len(side.features))
    return cupy.ldexp(side.factor.astype(cupy.float64), -side.exponent)
