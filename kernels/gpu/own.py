"""Own negatives on a GPU, by the kernels of kernels/cuda/own.cu; rows of a table: own_table.cu."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import cupy
import numpy as np

from ..between_passes import Finalized, OwnNegatives, own_parts
from ..epilogues import Statistics
from ..problem import Array, Gradients, Problem
from .config import LONG_PIECE_USES, OWN_BATCH, PIECE_USES, own_group_rows
from .device.arguments import (
    NATURAL,
    Fields,
    address,
    dtype_code,
    matrix,
    scalar,
    sums_fields,
    with_strides_in_whole_elements,
)
from .device.launcher import HALF_WARP_ROW, Launcher
from .device.launches import Queue
from .labels import sort_integers

THREADS = 128  # of a thread block
# Groups of lanes that occupy all multiprocessors: with fewer, several share a row's own negatives
FEW_GROUPS = 2**12
LANE_FEATURES = 8  # features that a lane reads at a time (rows.cuh)


def own_features(array: Array | None) -> Fields:
    """struct OwnFeatures for own negatives, a table, or their gradients; None: without data."""
    if array is None:
        return dict.fromkeys(("data", "row_stride", "negative_stride", "column_stride", "dtype"), 0)
    strides = array.strides if array.ndim == 3 else (0, *array.strides)  # all rows have the table
    row, negative, column = (stride // array.dtype.itemsize for stride in strides)
    return {"data": address(array), "row_stride": row, "negative_stride": negative,
            "column_stride": column, "dtype": dtype_code(array.dtype)}  # fmt: skip


def count_words(features: Array) -> int:
    """The -D option WORDS of own.cuh, for features of this layout."""
    item, (*others, column) = features.dtype.itemsize, features.strides
    aligned = not any(number % 16 for number in (features.data.ptr, *others))
    if aligned and column == item < 8 and features.shape[-1] % LANE_FEATURES == 0:
        return LANE_FEATURES * int(item) // 16
    return 0


class OwnNegativesByKernels(OwnNegatives):
    """`OwnNegatives` of arrays on a GPU. Own negatives in host memory arrive in parts.

    The products and norms of `join` are kept for `add_gradients`. Nothing waits for the device.
    `positive_hardness`: logits of positives have the scale of logits plus this number.
    """

    def __init__(
        self, problem: Problem, queue: Queue | None = None, positive_hardness: float = 0.0
    ) -> None:  # fmt: skip
        super().__init__(cupy, problem)
        precision = "fp64" if self.dtype == np.float64 else "fp32"
        # of gradients that go to the host: those of long float64 rows may underflow in float32
        wide = any(z.dtype == np.float64 for z in (problem.query, problem.own))
        self.gradient_dtype = np.dtype(np.float64) if wide else self.dtype
        self.launcher = Launcher(cupy.cuda.Device(), precision, queue or Queue())
        self.positive_hardness = positive_hardness
        m, k, d = len(problem.query), problem.own_count, problem.shape[2]
        self.parts = own_parts(problem) if problem.own_rows is not None else [slice(0, m)]
        # whether kernels read own negatives by index. If they arrive from host memory, they arrive
        # in the order of the rows
        self.in_table = problem.own_indices is not None and problem.own_rows is None
        # groups of lanes that share a row's own negatives: see own.cu
        lanes = 16 if d <= HALF_WARP_ROW else 32
        self.groups, self.groups_per_block = 1, THREADS // lanes
        while (
            self.groups < self.groups_per_block
            and self.groups * OWN_BATCH < k
            and m * self.groups < FEW_GROUPS
        ):
            self.groups *= 2
        self.chunks = -(-d // (lanes * LANE_FEATURES))
        self.row_lanes = lanes * self.groups
        # so many times `row_lanes` share the features of a row
        self.chunk_groups = 1 if m * self.groups >= FEW_GROUPS else self.chunks
        # lanes that share the sums of a row
        self.sum_lanes = min(32, 1 << (k - 1).bit_length())
        self.scale, self._scale = scalar(problem.scale)  # the second is kept alive
        self.products = cupy.empty((m, k), self.dtype)
        self.factors = self.exponents = self.query_factors = self.query_exponents = None
        if problem.normalize:
            self.factors, self.exponents = cupy.empty((m, k), self.dtype), cupy.empty((m, k), "i4")
            self.query_factors, self.query_exponents = (
                cupy.empty(m, self.dtype),
                cupy.empty(m, "i4"),
            )

    def _read(self) -> Iterator[tuple[slice, Array, Array]]:
        """Parts of the rows, each with its queries and own negatives (or the table) as kernels read
        them."""
        parts: Iterable[tuple[Array, Array]] = [(self.problem.query, self.problem.own)]
        if self.problem.own_rows is not None:
            parts = self.rows.read(self.parts)
        for rows, features in zip(self.parts, parts, strict=True):
            query, keys = map(with_strides_in_whole_elements, features)
            yield rows, query, keys

    def launch(
        self, kernel: str, lanes: int, rows: slice, query: Array, keys: Array, out: Array = None, /,
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel of own.cu for `rows`, whose features are `query` and `keys`, with `lanes`
        threads for each row. `out`: the gradient of `keys`, if the kernel writes it."""
        arguments["a"] = self._fields(rows, query, keys)
        self.launcher.launch(
            "own.cu", kernel, -(-len(query) * lanes // THREADS), THREADS, arguments,
            **self._defines(keys, out),
        )  # fmt: skip

    def _fields(self, rows: slice, query: Array, keys: Array) -> Fields:
        """struct OwnNegatives for `rows`. `keys`: their own negatives, or the table."""
        m, d = query.shape
        fields = {
            "query": matrix(query), "own": own_features(keys), "m": m,
            "k": self.problem.own_count, "d": d,
            "parts": self.groups, "scale": self.scale,
            "hardness": self.problem.hardness, "products": address(self.products, rows.start),
            "query_factors": address(self.query_factors, rows.start),
            "factors": address(self.factors, rows.start),
            "query_exponents": address(self.query_exponents, rows.start),
            "exponents": address(self.exponents, rows.start),
        }  # fmt: skip
        if self.in_table:
            fields |= {"indices": self.problem.own_indices, "table_rows": len(keys)}
        if self.problem.own_bias is not None:
            fields["bias"] = address(self.problem.own_bias, rows.start)
        for option in self.problem.pair_options.by_products:
            for pair in option.vectors:
                row, column = pair.fields
                fields |= {row: address(pair.find(self.problem)[0], rows.start), column: None}
        return fields

    def _defines(self, features: Array, out: Array) -> dict[str, int]:
        """The -D options of kernels that read `features` in words, and write `out`, unless that is
        None."""
        words = count_words(features)
        out_words = words if out is None else count_words(out)
        defines = {"WORDS": words, "OUT_WORDS": out_words} if words and out_words else {"WORDS": 0}
        options = {"OWN_INDICES": self.in_table, "OWN_BIAS": self.problem.own_bias is not None}
        defines |= {name: 1 for name, is_given in options.items() if is_given}
        defines |= {option.define: 1 for option in self.problem.pair_options.by_products}
        return {**defines, "NORM_FACTORS": int(self.problem.normalize)}

    def join(
        self, vectors: Any, stats: Statistics, references: Array = None,
        pass_scale: Fields = NATURAL, known_row_nans: Array = None,
    ) -> None:  # fmt: skip
        """See `OwnNegatives.join`. `known_row_nans` [M] are added to `row_nans`.

        `references`: one pass follows, which begins with these reference exponents and with the
        sums of own negatives. `pass_scale`: struct Scale, by which it multiplies its products.
        """
        mask = self.problem.own_mask
        self.row_nans = cupy.empty(len(self.problem.query))
        mask_strides = (0, 0) if mask is None else mask.strides
        for rows, query, keys in self._read():
            start = rows.start
            self.launch(
                "own_products", self.row_lanes, rows, query, keys, mask=address(mask, start),
                mask_row_stride=mask_strides[0], mask_stride=mask_strides[1],
            )  # fmt: skip
            self.launch(
                "own_sums", self.sum_lanes, rows, query, keys, lanes=self.sum_lanes,
                rows=sums_fields(stats.rows, start),
                references=address(references, start), pass_scale=pass_scale,
                positive_logits=address(stats.positive_logits, start),
                positive_hardness=self.positive_hardness, ranks=address(stats.row_rank, start),
                known_row_nans=address(known_row_nans, start),
                row_nans=address(self.row_nans, start),
            )  # fmt: skip

    def add_gradients(
        self, reference: Array, factor: Array, gradients: Gradients, log_scale_grad: Array = None
    ) -> Array:
        """See `OwnNegatives.add_gradients`. The products are added to `log_scale_grad`, which is
        returned; None: they go to a new array."""
        add_log_scale_grad, out = log_scale_grad is not None, log_scale_grad
        if out is None:
            out = cupy.empty(len(self.problem.query))
        wants_query = gradients.query is not None and gradients.want_query
        in_place, wants_table = self.problem.own_rows is None, gradients.own is not None
        wants_table = wants_table and self.problem.own_indices is not None
        for rows, query, keys in self._read():
            start = rows.start
            dq = gradients.query if wants_query else None
            dk = None if wants_table else gradients.own
            if not in_place:  # the parts of the gradients go to the host
                dq, dk = (
                    None if to is None else cupy.empty(z.shape, self.gradient_dtype)
                    for to, z in ((dq, query), (dk, keys))
                )
            self.launch(
                "own_gradients", self.row_lanes * self.chunk_groups, rows, query, keys, dk,
                chunk_groups=self.chunk_groups, factors=address(factor, start),
                references=address(reference, start), query_gradient=matrix(dq), add=in_place,
                own_gradient=own_features(dk), log_scale_grad=address(out, start),
                add_log_scale_grad=add_log_scale_grad,
            )  # fmt: skip
            if not in_place and dq is not None:
                self.rows.add_to_query(gradients, rows, dq)
            if not in_place and dk is not None:
                self.rows.write_own(gradients, rows, dk)
        if wants_table and in_place:
            self._write_table_gradient(reference, factor, gradients.own)
        elif wants_table:
            x2 = self.biased_exponents(self.products.astype(np.float64), slice(None))
            g = self._factors(x2, reference, factor)
            self.rows.write_table(gradients, g.astype(self.dtype))
        return out

    def _write_table_gradient(self, reference: Array, factor: Array, gradient: Array) -> None:
        """Write the gradient of the table [T, D], by the kernels of own_table.cu."""
        problem, queue = self.problem, self.launcher.queue
        query, table = map(with_strides_in_whole_elements, (problem.query, problem.own))
        indices, (table_rows, d) = problem.own_indices.reshape(-1), table.shape
        n, group_rows = len(indices), own_group_rows(table_rows)
        pieces, long_pieces = n // PIECE_USES, n // LONG_PIECE_USES
        row_groups = -(-table_rows // group_rows)
        sorted_indices, order = sort_integers(indices, queue)

        def sums_of(count: int) -> Fields:
            return {"sums": cupy.empty((count, d), self.dtype), "along": cupy.empty(count),
                    "known_use": cupy.empty(count, np.int64)}  # fmt: skip

        uses = {
            "sorted": sorted_indices, "order": order,
            "starts": cupy.empty(row_groups + 1, np.int64),
            "pieces": sums_of(pieces), "long_pieces": sums_of(long_pieces),
        }  # fmt: skip
        row_arguments = {
            "a": self._fields(slice(0, len(query)), query, table), "factors": factor,
            "references": reference,
        }  # fmt: skip

        def launch(kernel: str, per_block: int, elements: int, **arguments: Any) -> None:
            self.launcher.launch(
                "own_table.cu", kernel, -(-elements // per_block), THREADS,
                {"uses": uses, **arguments}, **self._defines(query, gradient),
            )  # fmt: skip

        groups = self.groups_per_block
        table = {"table_rows": table_rows, "group_rows": group_rows}
        launch("find_starts", THREADS, row_groups + 1, n=n, **table)
        if pieces:
            launch("own_pieces", groups, pieces * self.chunks, n=n, **row_arguments)
        if long_pieces:
            launch("own_long_pieces", groups, long_pieces * self.chunks, n=n, a=row_arguments["a"])
        launch(
            "own_table", groups, row_groups * self.chunks, gradient=matrix(gradient), **table,
            **row_arguments,
        )  # fmt: skip

    def finish(self, finalized: Finalized, gradients: Gradients) -> None:
        rows, wants_products = finalized.rows, self.problem.scale_grad_from_dots
        if not wants_products and gradients.own is None and not gradients.want_query:
            return
        products = self.add_gradients(
            rows.reference, finalized.row_factor, gradients,
            finalized.log_scale_grad if wants_products else None,
        )  # fmt: skip
        if wants_products:
            finalized.log_scale_grad = products
