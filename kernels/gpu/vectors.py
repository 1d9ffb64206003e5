"""Steps on vectors of length M and N on a GPU: before, between and after the passes.

`ElementwiseVectors` serves operations on arrays, and `TiledVectors` the method tiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from .. import solve as two_passes
from ..between_passes import Finalized
from ..direction_losses import DirectionLosses
from ..epilogues import OnlineSoftmax, Sigmoid, Statistics, Sums
from ..linear import LinearTerm
from ..problem import Array, NotFinite, Problem, fast_replace
from . import config, linear
from .device import compiler
from .device.arguments import Fields, address, matrix, scalar, sums_fields
from .device.launcher import Launcher, device_properties
from .device.launches import Queue
from .gradient_factors import LARGEST_ELEMENT, allocate_ranges, range_sources
from .own import OwnNegativesByKernels
from .schedule import is_computed_by_kernels_only

# struct DefaultVectors if the kernel has no default vectors to write
NO_DEFAULTS: Fields = {
    "positives": 0, "upstream": 0, "value": 0.0, "upstream_ranges": 0, "largest_element": 1.0,
    "symmetric": False,
}  # fmt: skip

_DIRECTION_LOSSES = compiler.flatten("direction_losses.cuh")  # merge, finalize_direction

# The identity of the log-sum-exp pass: (max, sum) = (-inf, 0)
_empty_sums = cupy.ElementwiseKernel(
    "", "float64 max, float64 sum",
    "max = __longlong_as_double(0xfff0000000000000LL); sum = 0;", "infonce_empty_sums",
)  # fmt: skip
# Merge sums in place (solve.Vectors.merge), without and with moments. `_within` gives the position
# of a positive in a range of keys, or -1 (solve.Vectors.positives_in_block)
_merge_sums = cupy.ElementwiseKernel(
    "float64 other_max, float64 other_sum", "float64 max, float64 sum",
    """
    const Sum both = merge(Sum{max, sum}, Sum{other_max, other_sum}, [](double x) {
      return exp2(x);
    });
    max = both.max, sum = both.sum;
    """,
    "infonce_merge_sums", preamble=_DIRECTION_LOSSES,
)  # fmt: skip
_merge_moments = cupy.ElementwiseKernel(
    "float64 other_max, float64 other_sum, float64 other_moment",
    "float64 max, float64 sum, float64 moment",
    """
    const Sum other = {other_max, other_sum, other_moment};
    const Sum both = merge(Sum{max, sum, moment}, other, [](double x) { return exp2(x); });
    max = both.max, sum = both.sum, moment = both.moment;
    """,
    "infonce_merge_moments", preamble=_DIRECTION_LOSSES,
)  # fmt: skip
_within = cupy.ElementwiseKernel(
    "int64 positive, int64 start, int64 stop, int64 total", "int64 index",
    """
    const long long at = positive - start + (positive < start ? total : 0);
    index = positive >= 0 && at >= 0 && at < stop - start ? at : -1;
    """,
    "infonce_within",
)  # fmt: skip
# solve.Vectors.sum_over_ranks
_sum_over_ranks = cupy.ElementwiseKernel(
    "raw float64 numbers, int64 ranks, int64 k", "float64 total",
    "total = 0; for (long long r = 0; r < ranks; ++r) total += numbers[r * k + i];",
    "infonce_sum_over_ranks",
)  # fmt: skip
# finalize_direction of direction_losses.cuh. (CuPy's logaddexp2 would round small losses to 0.) The
# log-sum-exp of no logits is -inf; its reference is 0, because a difference of infinities is NaN
_finalize_direction = cupy.ElementwiseKernel(
    "float64 max, float64 sum, float64 moment, float64 positive, float64 mean, bool decoupled",
    "float64 loss, float64 lse, float64 probability, float64 reference, float64 log_scale_grad",
    """
    const DirectionLosses d = finalize_direction(Sum{max, sum, moment}, positive, decoupled, mean);
    loss = d.loss, lse = LN_2 * d.lse2, reference = is_nothing(d.lse2) ? 0 : d.lse2;
    probability = d.negative_probability, log_scale_grad = d.log_scale_grad;
    """,
    "infonce_finalize_direction", preamble=_DIRECTION_LOSSES,
)  # fmt: skip


class ElementwiseVectors(two_passes.Vectors):
    """`solve.Vectors` by operations on CuPy's arrays, with a kernel for each merge of sums."""

    def __init__(self) -> None:
        super().__init__(cupy, passes_on_gpu=True)

    def identity(self, n: int, moments: bool) -> Sums:
        """Sums of nothing for n rows or columns."""
        maxima, totals = _empty_sums(size=n)
        return Sums(maxima, totals, cupy.zeros(n) if moments else None)

    def merge(self, sums: Sums, other: Sums) -> None:
        if sums.moment is None:
            _merge_sums(other.max, other.sum, sums.max, sums.sum)
        else:
            _merge_moments(*other.arrays, *sums.arrays)

    def own_negatives(self, problem: Problem) -> OwnNegativesByKernels:
        return OwnNegativesByKernels(problem)

    def positives_in_block(self, positives: Array, keys: slice, total: int = 0) -> Array:
        return _within(positives, keys.start, keys.stop, total)

    def sum_over_ranks(self, numbers: Array, divisors: Sequence[float], dtype: Any) -> Array:
        total = _sum_over_ranks(numbers, *numbers.shape, size=len(divisors))
        return (total / cupy.array(divisors)).astype(dtype, copy=False)

    def direction(
        self, sums: Sums, positive: Array, decoupled: bool = False,
        mean: Array | None = None,
    ) -> DirectionLosses:  # fmt: skip
        moment = 0.0 if sums.moment is None else sums.moment
        mean = positive if mean is None else mean
        loss, lse, probability, reference, log_scale_grad = _finalize_direction(
            sums.max, sums.sum, moment, positive, mean, decoupled
        )
        return DirectionLosses(
            loss, lse, probability, reference, reference_probability=1.0,
            log_scale_grad=None if sums.moment is None else log_scale_grad,
        )  # fmt: skip


class Scalars:
    """The scale, the scale of exponents (with `hardness`) and the bias, as fields of struct Scalar.

    The fields may point to arrays, which this object keeps alive.
    """

    def __init__(self, launcher: Launcher, problem: Problem) -> None:
        self.scale, self._scale = scalar(problem.scale)
        self.exponent_scale = self.scale
        self.bias, self._bias = scalar(0.0 if problem.bias is None else problem.bias)
        if problem.hardness:
            self._raised = cupy.empty(1)
            self.exponent_scale, _ = scalar(self._raised)
            launcher.launch_vectors(
                "raise_scale", 1, scale=self.scale, by=problem.hardness, out=self._raised
            )

    def row_options(self, problem: Problem) -> Fields:
        """The fields of struct RowOptions."""
        return {"scale": self.scale, "exponent_scale": self.exponent_scale,
                "margin": problem.margin, "decoupled": problem.decoupled,
                "key_bias": problem.key_bias}  # fmt: skip


@dataclass(frozen=True)
class Conclusion:
    """What the last thread block of `finalize` computes from the results of all rows, so that no
    launch of a single thread block follows: the ranges of the gradient pass, and perhaps the
    scalars of the result (struct Conclusion of vectors/sums.cuh)."""

    largest_element: float  # see `range_sources`
    has_totals: bool


class TiledVectors(ElementwiseVectors):
    """The steps of a call by the method tiled, each by a kernel of kernels/cuda/vectors.cu.

    The order: `statistics`, log-sum-exp pass, `finalize`, gradient pass, `totals`. A sigmoid
    has `sigmoid` and `losses_with_nans` around its only pass.
    """

    def __init__(self, launcher: Launcher, problem: Problem) -> None:
        super().__init__()
        self.launcher, self.scalars = launcher, Scalars(launcher, problem)
        # results are float64 for float64 features, else float32; the caller converts other dtypes
        self.double = problem.query.dtype == np.float64 or launcher.precision == "fp64"
        self.result_dtype = np.dtype(np.float64 if self.double else np.float32)
        # NaN flag of all losses: 0 at first (`begin`, `begin_sigmoid`), then NaN if a feature on
        # which all losses depend is not finite: of any key, or of a guide (`Guide.with_limits`)
        self.any_key = cupy.empty(1)
        self.own: OwnNegativesByKernels | None = None  # own negatives that sums contain already
        self.linear: linear.LinearTerms | None = None  # linear terms that a pass has made already
        # how many thread blocks of a launch have come to its end; None: no kernel has set it to 0
        self.arrived: Array | None = None
        # struct Ranges of a pass whose row factors are upstream gradients (of a sigmoid: times the
        # scale); None: they are no number of the host's
        self.upstream_ranges: Array | None = None
        # what `finalize` has concluded; None: nothing
        self.ranges: Array | None = None
        self.known_totals: Array | None = None

    @staticmethod
    def without_passes(problem: Problem, queue: Queue) -> TiledVectors:
        """The vectors of one rank of many. Other objects run its passes, one for each block."""
        device = cupy.cuda.Device()
        precision = config.fastest_operand_precision(
            problem.compute_precision, device_properties(device.id)
        )
        return TiledVectors(Launcher(device, precision, queue), problem)

    def materialize_vectors(self, problem: Problem) -> tuple[Problem, Fields]:
        """The problem with positives and upstream gradients as arrays, and struct DefaultVectors.

        Arrays that the caller has not passed are uninitialised: the kernel that gets the struct
        writes them.
        """
        m = problem.shape[0]
        positives, upstream = problem.positives, problem.upstream
        # the arrays that the kernel writes; None: the caller has passed them
        default_positives, default_upstream, value = None, None, 0.0
        if positives is None:
            positives = default_positives = cupy.empty(m, np.int64)
        if isinstance(upstream, float):
            value, self.upstream_ranges = upstream, allocate_ranges()
            upstream = default_upstream = cupy.empty(m)
            if problem.joint:  # a loss has two rows
                upstream = default_upstream[: m // 2]
        defaults = {
            "positives": default_positives, "upstream": default_upstream, "value": value,
            "upstream_ranges": self.upstream_ranges,
            "largest_element": LARGEST_ELEMENT.get(self.launcher.precision, 1.0),
            "symmetric": problem.symmetric,
        }  # fmt: skip
        with_arrays = fast_replace(problem, positives=positives, upstream=upstream)
        return with_arrays, defaults

    def zero_vector(self, n: int) -> Array:
        return self.launcher.queue.zeroed_array(n, np.float64)

    def dots(self, n: int) -> Array:
        return cupy.empty(n)  # the completion of gradients writes all elements

    def statistics(self, problem: Problem) -> tuple[Problem, Statistics]:
        m, n, _ = problem.shape
        two_sided, vectors = problem.two_sided, 2 + problem.moments
        pairs = m * problem.set_size
        memory = cupy.empty(vectors * m + pairs + (vectors * n if two_sided else 0))

        def sums(first: int, size: int) -> Sums:
            starts = range(first, first + vectors * size, size)
            return Sums(*(memory[start : start + size] for start in starts))

        rows, positive = sums(0, m), memory[vectors * m : vectors * m + pairs]
        columns = sums(vectors * m + pairs, n) if two_sided else None
        problem, defaults = self.materialize_vectors(problem)
        positive = positive.reshape(problem.positives.shape)
        self.arrived = cupy.empty(1, np.uint32)
        self.begin(rows, columns, positive, defaults, self.any_key, m, n, self.arrived)
        # in a triangle, rows have the sums of columns, but not the true maxima that ranks need
        if problem.symmetric and not problem.retrieval_ranks:
            columns = rows
        stats = Statistics(rows, columns, positive)
        if problem.retrieval_ranks:
            stats.row_rank = self.launcher.queue.zeroed_array(m, np.int64)
            if two_sided:
                stats.column_rank = self.launcher.queue.zeroed_array(n, np.int64)
        return problem, stats

    def clear(self, sums: Sums) -> None:
        """Set sums to the sums of nothing: maximum -inf, sum and moment 0."""
        self.begin(None, sums, None, NO_DEFAULTS, None, 0, len(sums.max))

    def begin(
        self, rows: Sums | None, columns: Sums | None, positive: Array | None,
        defaults: Fields, any_key: Array | None, m: int, n: int, arrived: Array | None = None,
    ) -> None:  # fmt: skip
        """Begin a log-sum-exp pass: set sums to sums of nothing, and write default vectors."""
        self.launcher.launch_vectors(
            "begin", max(m, n), rows=sums_fields(rows), columns=sums_fields(columns),
            positive_logits=positive, set_size=1 if positive is None else positive.size // m,
            m=m, n=n, defaults=defaults, any_key_not_finite=any_key, arrived=arrived,
        )  # fmt: skip

    def own_negatives(self, problem: Problem) -> OwnNegativesByKernels:
        return OwnNegativesByKernels(problem, self.launcher.queue, problem.hardness)

    def begin_one_pass(
        self, problem: Problem, epilogue: OnlineSoftmax, pass_scale: Fields, real: Any
    ) -> Array:
        """[M] `real`: the reference exponents with which one pass begins (vectors/online.cuh).

        0 serves rows whose sums lie between 2^-60 and 2^64. Own negatives are the first terms of
        the sums, and may lead to other reference exponents. `pass_scale` multiplies products.
        """
        m = len(problem.query)
        if problem.own is None:
            return self.launcher.queue.zeroed_array(m, real)
        references, self.own = cupy.empty(m, real), self.own_negatives(problem)
        stats = Statistics(epilogue.rows, None, epilogue.positive_logits)
        self.own.join(self, stats, references, pass_scale, problem.known_row_nans)
        return references

    def begin_linear_terms(
        self, problem: Problem, rows: Sequence[linear.GPURows]
    ) -> Sequence[LinearTerm]:
        """The linear terms of one pass, with their factors. `rows` are queries and keys."""
        if not problem.linear_terms:
            return ()
        self.linear = linear.LinearTerms(problem, rows)
        self.linear.begin(self.launcher, problem, self.scalars.scale)
        return self.linear.terms

    def find_limits(self, problem: Problem, dots: Array) -> Array:
        m = len(dots)
        out = cupy.empty(m)
        self.launcher.launch_vectors(
            "limits", m, dots=dots, positives=problem.positives, set_size=problem.set_size, m=m,
            margin=problem.false_negative_margin, out=out,
        )  # fmt: skip
        return out

    def finalize(
        self, problem: Problem, stats: Statistics, triangle: bool, gradient: bool,
        backend: Any, not_finite: NotFinite | None = None, conclusion: Conclusion | None = None,
    ) -> Finalized:  # fmt: skip
        """See `solve.Vectors.finalize`. `not_finite`: the NaN flags, if they are known already."""
        if not is_computed_by_kernels_only(problem):
            return super().finalize(problem, stats, triangle, gradient, backend)
        m, own = problem.shape[0], self.own
        if problem.own is not None and own is None:
            own = self.own_negatives(problem)
            own.join(self, stats, known_row_nans=problem.known_row_nans)
        if own is not None:
            problem = fast_replace(problem, known_row_nans=own.row_nans)
        rows, upstream, loss_rows = stats.rows, problem.upstream, slice(m)
        if problem.joint:
            rows, upstream = self.join_rows(rows, upstream)
            loss_rows = slice(m // 2)
        two_sided = problem.two_sided and stats.columns is not None
        if not_finite is None:
            not_finite = NotFinite(self.find_row_nans(problem, self.any_key), self.any_key)
        out = cupy.empty((8 if two_sided else 5, m))
        lses = cupy.empty((2, m), self.result_dtype)
        wants_log_scale_grad = problem.moments or problem.dots_lack_margin
        log_scale_grad = cupy.empty(m) if wants_log_scale_grad else None
        losses, row_loss, row_reference, row_factor, positive_gradient = out[:5]
        if problem.set_size > 1:
            positive_gradient = cupy.empty((m, problem.set_size))
        column_loss, column_reference, column_factor = out[5:] if two_sided else (None, None, None)
        # with `hardness`, positives in `stats` are exponents; metrics need them as logits
        converts_positives = problem.hardness and problem.retrieval_ranks
        positive_logits = cupy.empty(m) if converts_positives else None
        columns = stats.columns if two_sided and stats.columns is not None else rows
        finalize_arguments = {
            "rows": sums_fields(rows), "columns": sums_fields(columns),
            "positive_logits": stats.positive_logits, "positives": problem.positives,
            "set_size": problem.set_size, "upstream": upstream, "row_nans": not_finite.rows,
            "any_key_not_finite": not_finite.any_key,
            "row_direction_weight": problem.row_direction_weight,
            "column_direction_weight": problem.column_direction_weight,
            "options": self.scalars.row_options(problem), "m": m,
            "symmetric": problem.symmetric and not problem.joint,
            "triangle": triangle, "two_sided": two_sided, "lse_is_float": not self.double,
            "losses": losses, "row_loss": row_loss, "row_reference": row_reference,
            "column_loss": column_loss, "column_reference": column_reference,
            "row_factor": row_factor, "column_factor": column_factor,
            "positive_gradient": positive_gradient, "log_scale_grad": log_scale_grad,
            "metrics_positive_logits": positive_logits,
            "row_lse": lses, "column_lse": address(lses, 1),
        }  # fmt: skip
        finalize_arguments["conclusion"] = self._conclude(
            conclusion, problem, losses[loss_rows],
            None if log_scale_grad is None else log_scale_grad[loss_rows],
            {"row_reference": row_reference, "row_factor": row_factor,
             "positive_gradient": positive_gradient,
             "column_reference": row_reference if problem.symmetric else column_reference,
             "column_factor": row_factor if problem.symmetric else column_factor},
        )  # fmt: skip
        defines = None
        if problem.label_weights is not None:
            finalize_arguments["label_weights"] = problem.label_weights
            defines = {"LABEL_WEIGHTS": 1}
        self.launcher.launch_vectors("finalize", m, defines=defines, f=finalize_arguments)
        terms: Sequence[LinearTerm] = ()
        if problem.linear_terms:
            made = self.linear or linear.LinearTerms(problem, backend.linear_rows)
            made.finalize(self.launcher, problem, finalize_arguments)
            terms = made.terms
        if positive_logits is not None:
            stats.positive_logits = positive_logits
        probability = None  # only operations on arrays need it
        return Finalized(
            losses[loss_rows],
            DirectionLosses(
                row_loss[loss_rows], lses[0, loss_rows], probability, row_reference, 1.0
            ),
            DirectionLosses(column_loss, lses[1], probability, column_reference, 1.0)
            if two_sided else None,
            row_factor, column_factor, positive_gradient,
            None if log_scale_grad is None else log_scale_grad[loss_rows], terms, own,
        )  # fmt: skip

    def join_rows(self, sums: Sums, upstream: Array) -> tuple[Sums, Array]:
        """[M] sums and upstream gradients, if rows i and i + M / 2 have one softmax (`joint`).

        Both rows get the merged sums and the upstream gradient of their softmax.
        """
        m = len(sums.max)
        vectors = cupy.empty((4, m))
        joined = Sums(vectors[0], vectors[1], None if sums.moment is None else vectors[2])
        self.launcher.launch_vectors(
            "join_rows", m // 2, sums=sums_fields(sums), upstream=upstream, n=m // 2,
            joined=sums_fields(joined), joined_upstream=vectors[3],
        )  # fmt: skip
        return joined, vectors[3]

    def sigmoid(self, problem: Problem) -> tuple[Problem, Sigmoid]:
        m = problem.shape[0]
        row_factor, losses, bias_grad, positive = cupy.empty((4, m))
        log_scale_grad = cupy.empty(m) if problem.moments else None
        problem, defaults = self.materialize_vectors(problem)
        self.arrived = cupy.empty(1, np.uint32)
        self.launcher.launch_vectors(
            "begin_sigmoid", m, m=m, upstream=problem.upstream, scale=self.scalars.scale,
            row_factor=row_factor, losses=losses, bias_grad=bias_grad,
            log_scale_grad=log_scale_grad, positive_logits=positive,
            defaults=defaults, any_key_not_finite=self.any_key, arrived=self.arrived,
        )  # fmt: skip
        return problem, Sigmoid(row_factor, losses, bias_grad, log_scale_grad, positive)

    def losses_with_nans(self, problem: Problem, sigmoid: Sigmoid, backend: Any) -> Array:
        return self.find_and_add_nans(problem, sigmoid.losses, self.any_key)

    def find_and_add_nans(self, problem: Problem, losses: Array, any_key: Array) -> Array:
        """Add NaN to losses that depend on a feature that is not finite; see `find_row_nans`."""
        return self.add_nans(losses, self.find_row_nans(problem, any_key), any_key)

    def find_row_nans(
        self, problem: Problem, any_key: Array, out: Array | None = None, only_keys: bool = False
    ) -> Array | None:
        """Find the NaN flags of queries; a key that is not finite sets `any_key` [1] to NaN.

        Returns [M] flags of queries, in `out` if it is given: NaN for a feature that is not finite,
        else `Problem.known_row_nans` or 0. Returns None, and checks only keys, if queries are the
        keys, or if `only_keys` is true.
        """
        m, n, d = problem.shape
        queries = None
        if problem.symmetric or only_keys:
            m, out = 0, None
        else:
            queries, out = problem.query, cupy.empty(m) if out is None else out
        lanes = 8 if d <= 256 else 16 if d <= 512 else 32  # of a row: rows.cu
        self.launcher.launch(
            "rows.cu", "not_finite", -(-(n + m) * lanes // 256), 256,
            {
                "keys": matrix(problem.key), "n": n, "queries": matrix(queries), "m": m, "d": d,
                "known_row_nans": problem.known_row_nans, "out": out,
                "any_key_not_finite": any_key,
            },
        )  # fmt: skip
        return out

    def add_nans(self, losses: Array, row_nans: Array | None, any_key: Array) -> Array:
        """Add `row_nans` (None: 0) and `any_key` to losses."""
        m = len(losses)
        self.launcher.launch_vectors(
            "mark_not_finite", m, m=m, losses=losses, row_nans=row_nans, any_key_not_finite=any_key
        )
        return losses

    def _conclude(
        self, conclusion: Conclusion | None, problem: Problem, losses: Array,
        log_scale_grad: Array | None, factor_sources: dict[str, Array | None],
    ) -> Fields:  # fmt: skip
        """struct Conclusion, from the arrays that `finalize` writes."""
        m, n, _ = problem.shape
        has_totals = conclusion is not None and conclusion.has_totals
        totals, out = self._totals_fields(problem, losses, log_scale_grad, None, None)
        partials, largest_element = None, 1.0
        if conclusion is not None:
            self.ranges, self.known_totals = allocate_ranges(), out if has_totals else None
            partials = cupy.empty((-(-m // 128), 8))
            largest_element = conclusion.largest_element
        sources = range_sources(
            (m, n), factor_sources, largest_element, problem.set_size > 1, problem.set_size
        )
        return {"ranges": self.ranges, "sources": sources, "has_totals": has_totals,
                "totals": totals, "partials": partials, "arrived": self.arrived}  # fmt: skip

    def totals(
        self, problem: Problem, losses: Array, log_scale_grad: Array | None,
        dots: Array | None, bias_grad: Array | None,
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        out = self.known_totals
        if out is None:
            fields, out = self._totals_fields(problem, losses, log_scale_grad, dots, bias_grad)
            if self.arrived is None:
                self.arrived = self.launcher.queue.zeroed_array(1, np.uint32)
            blocks = min(512, -(-max(fields["m"], fields["count"]) // 128))
            self.launcher.launch(
                "vectors.cu", "totals", blocks, 128,
                {"t": fields, "partials": cupy.empty((blocks, 8)), "arrived": self.arrived},
            )  # fmt: skip
        return (
            None if problem.common_share is None else out[0],
            None if log_scale_grad is None and dots is None else out[1],
            None if bias_grad is None else out[2],
        )

    def _totals_fields(
        self, problem: Problem, losses: Array, log_scale_grad: Array | None, dots: Array | None,
        bias_grad: Array | None,
    ) -> tuple[Fields, Array]:  # fmt: skip
        """struct Totals, and the array to which a kernel writes the scalars."""
        out = cupy.empty(3, self.result_dtype)
        return {
            "losses": losses, "m": len(losses), "common_share": problem.common_share or 0.0,
            "row_shares": problem.row_shares, "log_scale_grad": log_scale_grad, "dots": dots,
            "count": 0 if dots is None else len(dots), "pair_repeats": problem.pair_repeats,
            "bias_grad": bias_grad, "scale": self.scalars.scale, "out": out,
            "is_float": not self.double,
        }, out  # fmt: skip
