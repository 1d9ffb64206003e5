"""Linear terms (label smoothing, classes) on a GPU, by kernels/cuda/linear.cu.

kernels/linear.py has the mathematics; `LinearTerms.finalize` runs between the passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy
import numpy as np

from ..linear import LinearGradient, LinearTerm, Segments
from ..problem import Array, Problem
from . import config
from .device.arguments import Fields, address, matrix
from .device.launcher import Launcher, device_properties
from .device.launches import Queue
from .labels import order_by_segment
from .tiled.operands import Features

# As in linear.cu: features of a thread, threads of a block. Small blocks spread few rows over more
# multiprocessors
LANE_FEATURES, PIECE_THREADS = 8, 64
JOIN_FEATURES, JOIN_THREADS = 64, 256


class GPURows:
    """`infonce.kernels.linear.SegmentedRows` on a GPU: the rows of one side, queries or keys.

    Sums of rows have the dtype of accumulators: float64 for fp64, otherwise float32.
    """

    def __init__(self, launcher: Launcher, side: Features) -> None:
        self.launcher, self.side, self.features = launcher, side, side.features
        self.real = np.dtype(np.float64 if launcher.precision == "fp64" else np.float32)

    @staticmethod
    def from_features(features: Array, problem: Problem) -> GPURows:
        """The rows [n, d] of an array on the current device, outside of a pass."""
        device = cupy.cuda.Device()
        precision = config.fastest_operand_precision(
            problem.compute_precision, device_properties(device.id)
        )
        launcher = Launcher(device, precision, Queue())
        real = np.dtype(np.float64 if precision == "fp64" else np.float32)
        return GPURows(launcher, Features(launcher, problem.normalize, real, features))

    def fields(self, first: int = 0) -> Fields:
        """The fields of struct Rows, from row `first` on."""
        side = self.side
        return {"z": matrix(self.features, first), "factor": address(side.factor, first),
                "exponent": address(side.exponent, first)}  # fmt: skip

    def sums(
        self, segment: Array, count: int, factor: Array | None = None, order: Array | None = None
    ) -> Array:
        """[count, d] sums of the rows of each segment, each row times its `factor` (None: 1).

        `segment` [n]: the segment of each row, or -1; None: all rows are one segment. `order` [n]:
        rows sorted by segment; None: they are sorted here.
        """
        n, d = self.features.shape
        if order is None and segment is not None:  # a segment may have no rows
            out = cupy.zeros((count, d), self.real)
            if n == 0:
                return out
            order = order_by_segment(segment)
        else:
            out = cupy.empty((count, d), self.real)
        # A place is PLACE_ROWS rows in the order of segments. segment_pieces completes the sum of a
        # segment in one place. join_pieces adds up the pieces of a segment in several places
        segments, place_count = {"segment": segment, "order": order}, -(-n // config.PLACE_ROWS)
        pieces = cupy.empty((place_count, 2, d))
        self.launcher.launch(
            "linear.cu", "segment_pieces",
            -(-place_count * -(-d // LANE_FEATURES) // PIECE_THREADS), PIECE_THREADS,
            {"rows": self.fields(), "n": n, "d": d, "segments": segments, "weight": factor,
             "out": out, "pieces": pieces},
        )  # fmt: skip
        if place_count > 1:
            self.launcher.launch(
                "linear.cu", "join_pieces", place_count * -(-d // JOIN_FEATURES), JOIN_THREADS,
                {"n": n, "d": d, "segments": segments, "pieces": pieces, "out": out},
            )  # fmt: skip
        return out

    def products(self, segment: Array, sums: Array, own_count: float) -> Array:
        """[n] float64 products of rows with the sums [count, d] of their segments.

        `own_count` is 1.0 if a row is left out of the sum of its own segment, otherwise 0.0.
        """
        n, d = self.features.shape
        out = cupy.empty(n)
        self.launcher.launch_rows(
            "segment_products", n, d, file="linear.cu", rows=self.fields(), n=n, d=d,
            segment=segment, sums=sums, own_count=own_count, out=out,
        )  # fmt: skip
        return out

    def positive_products(self, key: GPURows, positives: Array) -> Array:
        """[M] or [M, P] float64: row i times `key` row j, for the positives j; 0 without one."""
        n, out = positives.size, cupy.empty(positives.shape)
        self.launcher.launch_rows(
            "positive_products", n, file="linear.cu", query=self.fields(), key=key.fields(), n=n,
            d=self.features.shape[1], set_size=n // max(1, len(positives)), positives=positives,
            out=out,
        )  # fmt: skip
        return out

    def subtract(
        self, term: LinearGradient, gradient: Array, dots: Array | None = None, first: int = 0
    ) -> None:
        """Subtract a linear term's gradient from complete gradients, and from `Gradients.dots`.

        `gradient` [n, d] has the rows from `first` on. The term is differentiated through the
        normalisation.
        """
        n, d = gradient.shape
        self.launcher.launch_rows(
            "subtract_linear", n, file="linear.cu", rows=self.fields(first), n=n, d=d,
            g=matrix(gradient), dots=dots, **_fields(term),
        )  # fmt: skip


def _fields(term: LinearGradient | None) -> Fields:
    """The fields of struct LinearGradient of finish.cu; zeros for None."""
    names = "segment", "factor", "sums", "weighted"
    values: Fields = {name: getattr(term, name, None) for name in names}
    return {**values, "own_count": 0.0 if term is None else term.own_count}


def linear_gradients(
    terms: Sequence[LinearTerm], query: GPURows, key: GPURows, is_key_side: bool, symmetric: bool
) -> Fields:
    """The fields of struct LinearGradients: gradients of one or two linear terms for one side."""
    gradients = [LinearGradient(cupy, query, key, term, is_key_side, symmetric) for term in terms]
    first, second = gradients if len(gradients) == 2 else (*gradients, None)
    return {"first": _fields(first), "second": _fields(second)}


class LinearTerms:
    """The linear terms of a call, and the vectors of LinearFinalizeArguments by name."""

    def __init__(self, problem: Problem, rows: Sequence[GPURows]) -> None:
        """Sum the keys, and the queries of columns, and multiply rows by the sums. `rows` are
        queries and keys. The factors of the terms are not known yet."""
        query, key = rows
        m, n, _ = problem.shape
        # 1: a row is left out of the sum over all keys, because it is no negative of itself
        own_count = float(problem.symmetric)
        vectors: Fields = dict.fromkeys(
            ("row_products", "column_products", "class_products", "column_class_products",
             "positive_count", "row_linear", "column_linear", "class_linear",
             "column_class_linear")
        )  # fmt: skip
        terms = []
        if problem.label_smoothing:
            query_sums, key_sums = None, key.sums(None, 1)
            vectors["row_products"] = query.products(None, key_sums, own_count)
            vectors["row_linear"] = cupy.empty(m)
            if problem.two_sided:
                query_sums = query.sums(None, 1)
                vectors["column_products"] = key.products(None, query_sums, 0.0)
                vectors["column_linear"] = cupy.empty(n)
            factors = vectors["row_linear"], vectors["column_linear"]
            terms.append(LinearTerm(Segments(None, None, 1), *factors, query_sums, key_sums))
        if problem.classes is not None:
            classes = problem.classes.in_sums
            key_sums = key.sums(classes.columns, classes.count, order=classes.column_order)
            query_sums = key_sums if problem.symmetric else None
            vectors["class_products"] = query.products(classes.rows, key_sums, own_count)
            vectors["class_linear"] = cupy.empty(m)
            vectors["positive_count"] = problem.classes.positive_count
            if problem.two_sided:
                query_sums = query.sums(classes.rows, classes.count, order=classes.row_order)
                vectors["column_class_products"] = key.products(classes.columns, query_sums, 0.0)
                vectors["column_class_linear"] = cupy.empty(n)
            factors = vectors["class_linear"], vectors["column_class_linear"]
            terms.append(LinearTerm(classes, *factors, query_sums, key_sums))
        self.terms, self.vectors = terms, vectors
        self.smoothing: Fields = {
            "label_smoothing": problem.label_smoothing, "row_keys": max(1, n - problem.symmetric)
        }  # fmt: skip

    def begin(self, launcher: Launcher, problem: Problem, scale: Fields) -> None:
        """Write the factors of the terms before the log-sum-exps are known, for one pass."""
        names = "positive_count", "row_linear", "class_linear"
        launcher.launch_vectors(
            "begin_linear", len(problem.query), upstream=problem.upstream, m=len(problem.query),
            row_direction_weight=problem.row_direction_weight, scale=scale, **self.smoothing,
            **{name: self.vectors[name] for name in names},
        )  # fmt: skip

    def finalize(self, launcher: Launcher, problem: Problem, finalize_arguments: Fields) -> None:
        """Add label smoothing and class means to the results of the kernel `finalize`, and write
        the factors of the terms, whose gradients the gradient pass subtracts.

        `TiledVectors.finalize` calls this after the launch of `finalize` with
        `finalize_arguments`.
        """
        launcher.launch_vectors(
            "finalize_linear", len(problem.query),
            g={"f": finalize_arguments, "joint": problem.joint,
               "column_queries": len(problem.query), **self.smoothing, **self.vectors},
        )  # fmt: skip
