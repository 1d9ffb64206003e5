"""Plans of what a ring passes: blocks of a rank's rows with others' keys, and steps on vectors."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import BFLOAT16, MISSING, PRECISIONS, features, find_dtype, gpu_only
from infonce.kernels.solve import Vectors

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels import epilogues
    from infonce.kernels import problem as problems
    from infonce.kernels.gpu import plan as gpu_plan
    from infonce.kernels.gpu import select as gpu_select
    from infonce.kernels.gpu import shard as gpu_ranks
    from infonce.kernels.gpu.device.launches import Queue
    from infonce.kernels.gpu.vectors import ElementwiseVectors


@pytest.fixture(autouse=True)
def no_plans() -> None:
    gpu_plan.forget()


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "clip", "siglip"])
def test_blocks_of_many_ranks(
    loss: str, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring passes a rank's own keys, and keys that hold no positives of the rank."""
    rng = np.random.default_rng(0)
    m, d = 300, 64
    real = np.dtype(np.float64 if precision == "fp64" else np.float32)
    sigmoid, pairs = loss == "siglip", loss in ("clip", "nt_xent")
    for own, n in ((True, m), (False, 270)):
        symmetric = own and loss == "nt_xent"
        query = features("nt_xent", m, d, find_dtype(dtype), 1)[0]
        key = query if symmetric else features("nt_xent", n, d, find_dtype(dtype), 2)[0]
        positives = (np.arange(m) + m // 2 * symmetric) % m if own else np.full(m, -1)
        problem = problems.Problem(
            query=query, key=key, scale=14.0, upstream=cupy.full(m, 1 / m),
            positives=cupy.asarray(positives), column_direction_weight=0.5 * pairs,
            bias=-10.0 if sigmoid else None, symmetric=symmetric, key_shard=not own,
            lacks_positives=not own,
            compute_precision=precision, scalar_grads=True, moments=True,
        )  # fmt: skip

        def numbers(count: int, low: float = 0.0) -> Any:
            return cupy.asarray(rng.uniform(low, 1, count))

        rows, columns = numbers(m), numbers(n) if pairs or symmetric else None
        before = [*(numbers(k, low) for k in (m, n) for low in (0.0, 0.5, 0.0)), numbers(m)]
        gathered = [numbers(m * d).reshape(m, d), numbers(n * d).reshape(n, d)]

        def run_pass(
            gradient: bool, order: Any = (problem, symmetric, before, gathered, rows, columns)
        ) -> list[Any]:
            problem, symmetric, before, gathered, rows, columns = order
            row_sums = epilogues.Sums(*(z.copy() for z in before[:3]))
            column_sums = row_sums
            if not symmetric:
                column_sums = epilogues.Sums(*(z.copy() for z in before[3:6]))
            dq, dk = (z.astype(real) for z in gathered)
            vectors = [cupy.zeros(m) for _ in range(5)]  # of the sigmoid's pass, and dots
            epilogue: Any = epilogues.Statistics(
                row_sums, column_sums if columns is not None else None, before[6].copy()
            )
            if sigmoid:
                epilogue = epilogues.Sigmoid(rows, *vectors[:4])
            elif gradient:
                share = None if columns is None else 0.5 * columns
                epilogue = epilogues.SoftmaxGradient(4 + rows, rows, columns, share, -rows)
            gradients = None
            if gradient:
                gradients = problems.Gradients(
                    dq, dk, vectors[4], want_key=not symmetric, add_query=True
                )
            triangle = symmetric and not gradient and not sigmoid
            statistics = isinstance(epilogue, epilogues.Statistics)
            to_clear = None
            if statistics and columns is not None and not symmetric:
                to_clear = column_sums
            bad = cupy.zeros(m + 1)
            marks = problems.NotFinite(bad[:m], bad[m:]) if statistics or sigmoid else None
            gpu_ranks.run_block_pass(problem, triangle, epilogue, gradients, marks, to_clear)
            outputs = [*vectors, dq, dk, *row_sums.arrays, *column_sums.arrays, bad]
            return [z.get() for z in outputs]

        for gradient in (False, True):
            planned = run_pass(gradient)
            assert len(gpu_plan._plans) == 1
            again = run_pass(gradient)
            with monkeypatch.context() as patch:
                patch.setattr(gpu_select, "has_plan", lambda *_: False)
                wanted = run_pass(gradient)
            for got, repeated, want in zip(planned, again, wanted, strict=True):
                assert np.array_equal(got, want, equal_nan=True)
                assert np.array_equal(repeated, want, equal_nan=True)
            gpu_plan.forget()


def statistics_block(m: int, n: int, infinite: Any, clear: bool, checked: bool = False) -> Any:
    """Sums of the columns of a block of other ranks' keys, one of which may be infinite."""
    query, key = (features("nt_xent", rows, 64, BFLOAT16, rows)[0] for rows in (m, n))
    key[n // 2, 3] = np.inf if infinite == "key" else 0
    query[m // 2, 3] = np.inf if infinite == "query" else 0
    problem = problems.Problem(
        query=query, key=key, scale=14.0, upstream=cupy.full(m, 1 / m),
        positives=cupy.full(m, -1), column_direction_weight=0.5, key_shard=True,
        lacks_positives=True,
        compute_precision="bf16", scalar_grads=True, moments=True,
    )  # fmt: skip
    vectors = ElementwiseVectors()
    rows = vectors.identity(m, True)
    columns = epilogues.Sums(cupy.full(n, 77.0), cupy.full(n, np.nan), cupy.full(n, np.nan))
    if not clear:
        columns = vectors.identity(n, True)
    not_finite = cupy.zeros(m + 1)
    stats = epilogues.Statistics(rows, columns, cupy.full(m, np.nan))
    bad = problems.NotFinite(not_finite[:m], not_finite[m:], checked)
    gpu_ranks.run_block_pass(problem, False, stats, None, bad, columns if clear else None)
    return *(z.get() for z in columns.arrays), np.isnan(not_finite.get())


@pytest.mark.parametrize("planned", [True, False])
def test_sums_that_hold_nothing_yet(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not planned:
        monkeypatch.setattr(gpu_select, "has_plan", lambda *_: False)
    got, want = (statistics_block(300, 270, None, clear) for clear in (True, False))
    assert np.isfinite(want[:3]).all()
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("planned", [True, False])
def test_what_is_not_finite_in_a_block(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are everybody's trouble, queries their own; these need to be looked at once."""
    if not planned:
        monkeypatch.setattr(gpu_select, "has_plan", lambda *_: False)
    for infinite, checked, where in (
        (None, False, []), ("key", False, [300]), ("query", False, [150]), ("query", True, []),
        ("key", True, [300]),
    ):  # fmt: skip
        bad = statistics_block(300, 270, infinite, True, checked)[-1]
        assert np.flatnonzero(bad).tolist() == where


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "clip", "siglip"])
def test_vectors_over_ranks(loss: str, dtype: str, precision: str) -> None:
    """A step of the mathematics on vectors by plan is what it is without."""
    m, rng = 300, np.random.default_rng(3)
    query, key = (features("nt_xent", m, 24, find_dtype(dtype), seed)[0] for seed in (1, 2))
    problem = problems.Problem(
        query=query, key=query if loss == "nt_xent" else key, scale=cupy.array(14.0),
        upstream=cupy.asarray(rng.uniform(0, 1, m)), common_share=0.25 / m,
        positives=cupy.asarray((np.arange(m) + m // 2 * (loss == "nt_xent")) % m) + 7 * m,
        row_direction_weight=0.5 if loss == "clip" else 1.0,
        column_direction_weight=0.5 * (loss == "clip"),
        bias=-10.0 if loss == "siglip" else None, symmetric=loss == "nt_xent",
        compute_precision=precision, scalar_grads=True, moments=True,
    )  # fmt: skip

    class Ring:
        not_finite = problems.NotFinite(cupy.zeros(m), cupy.zeros(1))

        def row_nans(self, problem: Any) -> Any:
            return self.not_finite.rows + self.not_finite.any_key

        def take_at_positives(self, problem: Any, per_key: Any) -> Any:
            return per_key[problem.positives - 7 * m]

    one = Ring()
    one.not_finite.rows[5] = np.nan
    log_scale_grad, dots, bias_grad, losses = (
        cupy.asarray(rng.standard_normal(m)) for _ in range(4)
    )
    results: list[list[Any]] = []
    for steps in (gpu_ranks.VectorsOverRanks(), ElementwiseVectors()):
        outputs: list[Any] = []
        for upstream in (problem.upstream, 0.5 / m):
            weighted = problems.fast_replace(problem, upstream=upstream)
            if loss != "siglip":
                spelled, stats = steps.statistics(weighted)
                assert (stats.columns is None) == (loss == "info_nce")
                assert (stats.columns is stats.rows) == (loss == "nt_xent")
                outputs += [spelled.upstream, *stats.rows.arrays, stats.positive_logits]
                numbers = np.random.default_rng(4)
                for vector in (stats.rows.max, stats.positive_logits, *stats.rows.arrays[1:]):
                    vector[:] = cupy.asarray(numbers.uniform(1, 9, m))
                if loss == "clip":
                    assert (stats.columns.max == -np.inf).all()
                    assert not stats.columns.sum.any()
                    assert not stats.columns.moment.any()
                    stats.columns.max[:] = stats.rows.sum
                    stats.columns.sum[:] = stats.positive_logits
                    stats.columns.moment[:] = stats.rows.max
                end = steps.finalize(spelled, stats, False, True, one)
                assert (end.columns is None) == (loss != "clip")
                outputs += [end.losses, end.row_factor, end.column_factor, end.positive_gradient]
                outputs += [end.log_scale_grad]
                for direction in (end.rows, end.columns):
                    outputs += (
                        []
                        if direction is None
                        else [direction.loss, direction.lse, direction.reference]
                    )
            loss_sum, *scalar_totals = steps.totals(
                weighted, losses, log_scale_grad, dots, bias_grad
            )
            if isinstance(steps, gpu_ranks.VectorsOverRanks):
                assert abs(float(loss_sum) - float(losses.sum())) < 1e-11
            outputs += scalar_totals
        results.append([z.get() for z in outputs if z is not None])
    assert gpu_plan._plans
    lse = 1e-13 if precision == "fp64" or dtype == "float64" else 1e-6
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=lse, atol=1e-13)


def test_sums_over_ranks_have_the_same_bits() -> None:
    """A rank with a plan and a rank without one compute the same bits."""
    z = features("nt_xent", 8, 64, np.dtype("float32"), 1)[0]
    by_plan = gpu_ranks.QueuedVectors(problems.Problem(z, z, 1.0, 1.0), Queue())
    for ranks, k in ((1, 1), (2, 1), (5, 3), (1024, 2)):
        numbers = np.random.default_rng(ranks).standard_normal((ranks, k)) ** 5
        divisors = [3.0, 1.0, 7.0][:k]
        for dtype in ("float32", "float64"):
            want = Vectors(np).sum_over_ranks(numbers, divisors, dtype)
            for vectors in (by_plan, ElementwiseVectors()):
                got = vectors.sum_over_ranks(cupy.asarray(numbers), divisors, dtype)
                assert got.dtype == dtype
                np.testing.assert_array_equal(got.get(), want)
