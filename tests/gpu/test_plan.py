"""Calls by plan against the same calls without one: the same launches, so the same bits."""

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from gpu_problems import BFLOAT16, MISSING, dtype_of, gpu_only
from hypothesis import given, settings
from hypothesis import strategies as st
from judge import LOSSES

import infonce

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels import problem as problems
    from infonce.kernels.gpu import plan as gpu_plan
    from infonce.kernels.gpu import select as gpu_select
    from infonce.kernels.gpu import shard as gpu_ranks
    from infonce.kernels.gpu.device import recorder
    from infonce.kernels.gpu.vectors import ElementwiseVectors

PRECISIONS = [
    ("float64", "fp64"), ("float32", "fp32"), ("float32", "tf32"), ("float32", "bf16x3"),
    ("bfloat16", "bf16"), ("float16", "fp16"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_plans() -> None:
    gpu_plan.forget()


def features(loss: str, n: int, d: int, dtype: Any, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((2, n, d))
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    return [cupy.asarray(side.astype(dtype)) for side in z[: 1 if loss == "nt_xent" else 2]]


def results(loss: str, args: list[Any], gradient: bool, **options: Any) -> list[Any]:
    """Everything that a call hands out, on the host."""
    if not gradient:
        return [getattr(infonce, f"{loss}_loss")(*args, **options).get()]
    out = getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)
    lse = out.lse if isinstance(out.lse, tuple) else (out.lse,)
    metrics = [] if out.metrics is None else vars(out.metrics).values()
    found = [z for z in (out.loss, *lse, *out.grads, *metrics) if z is not None]
    return [cupy.asnumpy(array) for array in found]


def compare(monkeypatch: Any, loss: str, args: list[Any], gradient: bool, **options: Any) -> int:
    """How many plans there are after the call."""
    got = results(loss, args, gradient, **options)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_select, "planned", lambda *_: False)
        want = results(loss, args, gradient, **options)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b, equal_nan=True)
    return len(gpu_plan._plans)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_as_without_a_plan(
    loss: str, dtype: str, precision: str, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets of features by one plan; scales from host and device; blocks that do not fit at
    once; widths that are staged."""
    for i, (n, d) in enumerate(((300, 64), (514, 40), (1030, 513))):
        before = len(gpu_plan._plans)
        for seed, scale in ((2 * i, 14.0), (2 * i + 1, 3.5)):
            args = features(loss, n, d, dtype_of(dtype), seed)
            options: Any = {"precision": precision, "method": "tiled", "normalize": i == 1,
                            "workspace": n * n if i == 2 else 2**28}  # fmt: skip
            compare(monkeypatch, loss, args, gradient, scale=scale, **options)
            on_device = cupy.array(scale, np.float32)
            count = compare(monkeypatch, loss, args, gradient, scale=on_device, **options)
            assert count == before + 2


@pytest.mark.parametrize("loss", LOSSES)
def test_options(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that change what is launched make plans of their own."""
    args = features(loss, 300, 64, BFLOAT16, 0)
    ids = cupy.arange(300) // 3
    n = len(args[0])
    known: Any = {"method": "tiled", "scale": 14.0}
    cases: list[Any] = [
        {}, {"reduction": "sum"}, {"reduction": "none"}, {"ids": ids[:n]},
        {"grad_dtype": "float32"}, {"normalize": True}, {"workspace": 2**20},
        {"grad_out": cupy.array(2.0)},
    ]  # fmt: skip
    for i, options in enumerate(cases):
        count = compare(monkeypatch, loss, args, True, **known, **options)
        assert count == i + 1, options
    assert compare(monkeypatch, loss, args, True, **known, grad_out=3.0) == len(cases)  # a number
    turned = [cupy.asfortranarray(z) for z in args]
    assert compare(monkeypatch, loss, turned, True, **known) == len(cases) + 1
    shifted = [cupy.concatenate([z.ravel(), z.ravel()[:3]])[3:].reshape(z.shape) for z in args]
    assert compare(monkeypatch, loss, shifted, True, **known) == len(cases) + 2
    bad = [z.copy() for z in args]
    bad[0][7, 3] = np.nan
    compare(monkeypatch, loss, bad, True, **known)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_has_none(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that show their progress, and calls of more steps than a plan records."""
    args = features(loss, 600, 64, np.float32, 0)
    results(loss, args, True, scale=14.0, method="tiled", progress=lambda *_: None)
    assert not gpu_plan._plans
    monkeypatch.setattr(recorder, "MAX_STEPS", 40)
    for _ in range(2):
        compare(monkeypatch, loss, args, True, scale=14.0, method="tiled", workspace=2**18)
    assert not any(isinstance(plan, gpu_plan.Plan) for plan in gpu_plan._plans.values())
    compare(monkeypatch, loss, args, True, scale=14.0, method="tiled")
    assert sum(isinstance(plan, gpu_plan.Plan) for plan in gpu_plan._plans.values()) == 1


@settings(max_examples=60)
@given(
    m=st.integers(1, 700), n=st.integers(1, 3000), d=st.integers(1, 300),
    precision=st.sampled_from(PRECISIONS), labelled=st.sampled_from(["no", "one", "few", "any"]),
    ids=st.booleans(), wrt=st.sampled_from([None, ("query",), ("key",), ("scale",)]),
    workspace=st.sampled_from([2**20, 2**22, 2**28]), normalize=st.booleans(),
    metrics=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_rectangle(
    m: int, n: int, d: int, precision: tuple[str, str], labelled: str, ids: bool, wrt: Any,
    workspace: int, normalize: bool, metrics: bool, seed: int,
) -> None:  # fmt: skip
    """Queries against any number of keys: labels of one key, of few, of any; pairs excluded."""
    rng = np.random.default_rng(seed)
    n = n if labelled != "no" else max(m, n)
    dtype, compute = precision
    args = [features("nt_xent", rows, d, dtype_of(dtype), seed + i)[0]
            for i, rows in enumerate((m, n))]  # fmt: skip
    if labelled != "no":
        most = {"one": 1, "few": min(n, 3), "any": n}[labelled]
        args.append(cupy.asarray(rng.integers(0, n, most)[rng.integers(0, most, m)]))
    options: Any = {"wrt": wrt} if wrt else {}
    if ids:
        options["ids"] = tuple(cupy.asarray(rng.integers(0, n, rows)) for rows in (m, n))
    with pytest.MonkeyPatch.context() as patch:
        compare(
            patch, "info_nce", args, True, scale=9.0, precision=compute, method="tiled",
            workspace=workspace, normalize=normalize, metrics=metrics, **options,
        )  # fmt: skip
    assert gpu_plan._plans


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "clip", "siglip"])
def test_blocks_of_many_ranks(
    loss: str, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a ring folds: a rank's own keys, and keys that are nobody's positives here."""
    rng = np.random.default_rng(0)
    m, d = 300, 64
    real = np.dtype(np.float64 if precision == "fp64" else np.float32)
    sigmoid, pairs = loss == "siglip", loss in ("clip", "nt_xent")
    for own, n in ((True, m), (False, 270)):
        symmetric = own and loss == "nt_xent"
        query = features("nt_xent", m, d, dtype_of(dtype), 1)[0]
        key = query if symmetric else features("nt_xent", n, d, dtype_of(dtype), 2)[0]
        positives = (np.arange(m) + m // 2 * symmetric) % m if own else np.full(m, -1)
        problem = problems.Problem(
            query=query, key=key, scale=14.0, upstream=cupy.full(m, 1 / m),
            positives=cupy.asarray(positives), column_weight=0.5 * pairs,
            bias=-10.0 if sigmoid else None, symmetric=symmetric, key_shard=not own,
            no_local_positives=not own,
            compute=precision,
        )  # fmt: skip
        assert gpu_select.planned(problem)

        def numbers(count: int, low: float = 0.0) -> Any:
            return cupy.asarray(rng.uniform(low, 1, count))

        rows, columns = numbers(m), numbers(n) if pairs or symmetric else None
        before = [numbers(m), numbers(m, 0.5), numbers(n), numbers(n, 0.5), numbers(m)]
        gathered = [numbers(m * d).reshape(m, d), numbers(n * d).reshape(n, d)]

        def fold(gradient: bool, order: Any = (problem, symmetric, before, gathered, rows, columns),
                 ) -> list[Any]:  # fmt: skip
            problem, symmetric, before, gathered, rows, columns = order
            of_rows = problems.Sums(before[0].copy(), before[1].copy())
            of_columns = of_rows if symmetric else problems.Sums(before[2].copy(), before[3].copy())
            dq, dk = (z.astype(real) for z in gathered)
            vectors = [cupy.zeros(m) for _ in range(4)]
            epilogue: Any = problems.Statistics(
                of_rows, of_columns if columns is not None else None, before[4].copy()
            )
            if sigmoid:
                epilogue = problems.Sigmoid(rows, *vectors[:3])
            elif gradient:
                share = None if columns is None else 0.5 * columns
                epilogue = problems.SoftmaxGradient(4 + rows, rows, columns, share, -rows)
            gradients = None
            if gradient:
                gradients = problems.Gradients(dq, dk, vectors[3], want_key=not symmetric,
                                             add_query=True)  # fmt: skip
            triangle = symmetric and not gradient and not sigmoid
            statistics = isinstance(epilogue, problems.Statistics)
            to_clear = None
            if statistics and columns is not None and not symmetric:
                to_clear = of_columns
            bad = cupy.zeros(m + 1)
            marks = problems.NotFinite(bad[:m], bad[m:]) if statistics or sigmoid else None
            gpu_ranks.fold_block(problem, triangle, epilogue, gradients, marks, to_clear)
            made = [*vectors, dq, dk, *vars(of_rows).values(), *vars(of_columns).values(), bad]
            return [z.get() for z in made]

        for gradient in (False, True):
            found = fold(gradient)
            assert len(gpu_plan._plans) == 1
            again = fold(gradient)
            with monkeypatch.context() as patch:
                patch.setattr(gpu_select, "planned", lambda *_: False)
                wanted = fold(gradient)
            for got, repeated, want in zip(found, again, wanted, strict=True):
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
        positives=cupy.full(m, -1), column_weight=0.5, key_shard=True, no_local_positives=True,
        compute="bf16",
    )  # fmt: skip
    vectors = ElementwiseVectors()
    rows = vectors.identity(m)
    columns = problems.Sums(cupy.full(n, 77.0), cupy.full(n, np.nan))
    if not clear:
        columns = vectors.identity(n)
    found = cupy.zeros(m + 1)
    stats = problems.Statistics(rows, columns, cupy.full(m, np.nan))
    bad = problems.NotFinite(found[:m], found[m:], checked)
    gpu_ranks.fold_block(problem, False, stats, None, bad, columns if clear else None)
    return columns.max.get(), columns.sum.get(), np.isnan(found.get())


@pytest.mark.parametrize("planned", [True, False])
def test_sums_that_hold_nothing_yet(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not planned:
        monkeypatch.setattr(gpu_select, "planned", lambda *_: False)
    made, want = (statistics_block(300, 270, None, clear) for clear in (True, False))
    assert np.isfinite(want[:2]).all()
    for a, b in zip(made, want, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("planned", [True, False])
def test_what_is_not_finite_in_a_block(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are everybody's trouble, queries their own; these need to be looked at once."""
    if not planned:
        monkeypatch.setattr(gpu_select, "planned", lambda *_: False)
    for infinite, checked, where in (
        (None, False, []), ("key", False, [300]), ("query", False, [150]), ("query", True, []),
        ("key", True, [300]),
    ):  # fmt: skip
        bad = statistics_block(300, 270, infinite, True, checked)[2]
        assert np.flatnonzero(bad).tolist() == where


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "clip", "siglip"])
def test_vectors_over_ranks(loss: str, dtype: str, precision: str) -> None:
    """A step of the mathematics on vectors by plan is what it is without."""
    m, rng = 300, np.random.default_rng(3)
    query, key = (features("nt_xent", m, 24, dtype_of(dtype), seed)[0] for seed in (1, 2))
    problem = problems.Problem(
        query=query, key=query if loss == "nt_xent" else key, scale=cupy.array(14.0),
        upstream=cupy.asarray(rng.uniform(0, 1, m)), reduction_weight=0.25 / m,
        positives=cupy.asarray((np.arange(m) + m // 2 * (loss == "nt_xent")) % m) + 7 * m,
        row_weight=0.5 if loss == "clip" else 1.0, column_weight=0.5 * (loss == "clip"),
        bias=-10.0 if loss == "siglip" else None, symmetric=loss == "nt_xent", compute=precision,
    )  # fmt: skip

    class Ring:
        not_finite = problems.NotFinite(cupy.zeros(m), cupy.zeros(1))

        def not_finite_marks(self, problem: Any) -> Any:
            return self.not_finite.rows + self.not_finite.any_key

        def take_at_positives(self, problem: Any, per_key: Any) -> Any:
            return per_key[problem.positives - 7 * m]

    one = Ring()
    one.not_finite.rows[5] = np.nan
    dots, of_bias, losses = (cupy.asarray(rng.standard_normal(m)) for _ in range(3))
    gradients = problems.Gradients(dots=dots)
    found: list[list[Any]] = []
    for steps in (gpu_ranks.VectorsOverRanks(), ElementwiseVectors()):
        made: list[Any] = []
        for upstream in (problem.upstream, 0.5 / m):
            given = problems.fast_replace(problem, upstream=upstream)
            if loss != "siglip":
                spelled, stats = steps.statistics(given)
                assert (stats.columns is None) == (loss == "info_nce")
                assert (stats.columns is stats.rows) == (loss == "nt_xent")
                made += [spelled.upstream, stats.rows.max, stats.rows.sum, stats.positive_logits]
                numbers = np.random.default_rng(4)
                for vector in (stats.rows.max, stats.positive_logits, stats.rows.sum):
                    vector[:] = cupy.asarray(numbers.uniform(1, 9, m))
                if loss == "clip":
                    assert (stats.columns.max == -np.inf).all()
                    assert not stats.columns.sum.any()
                    stats.columns.max[:] = stats.rows.sum
                    stats.columns.sum[:] = stats.positive_logits
                end = steps.conclude(spelled, stats, False, True, one)
                assert (end.columns is None) == (loss != "clip")
                made += [end.losses, end.row_factor, end.column_factor, end.positive_gradient]
                for of in (end.rows, end.columns):
                    made += [] if of is None else [of.loss, of.lse, of.reference]
            loss_sum, scale_grad, bias_grad = steps.totals(given, losses, gradients, of_bias)
            if isinstance(steps, gpu_ranks.VectorsOverRanks):
                assert abs(float(loss_sum) - float(losses.sum())) < 1e-11
            made += [scale_grad, bias_grad]
        found.append([z.get() for z in made if z is not None])
    assert gpu_plan._plans
    lse = 1e-13 if precision == "fp64" or dtype == "float64" else 1e-6
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=lse, atol=1e-13)


def test_memory_that_comes_again_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan knows the arguments of several sets of arrays, and no more than it may."""
    monkeypatch.setattr(gpu_plan, "MAX_ARGUMENTS", 3)
    sets = [features("clip", 300, 64, BFLOAT16, i) for i in range(5)]
    wants = [results("clip", z, True, scale=14.0, method="tiled") for z in sets]
    for _ in range(2):
        for z, want in zip(sets, wants, strict=True):
            for a, b in zip(
                results("clip", z, True, scale=14.0, method="tiled"), want, strict=True
            ):
                assert np.array_equal(a, b)
    (plan,) = gpu_plan._plans.values()
    assert 1 <= len(plan.known) <= 3


def test_nothing_is_kept_on_the_device() -> None:
    args = features("clip", 700, 64, BFLOAT16, 0)
    pool = cupy.get_default_memory_pool()
    gc.collect()  # or what earlier tests left is freed meanwhile
    before = pool.used_bytes()
    for _ in range(3):
        results("clip", args, True, scale=14.0, method="tiled")
    assert gpu_plan._plans
    assert pool.used_bytes() == before


def test_a_loss_that_is_kept_is_small() -> None:
    """Losses of many steps may be kept: none holds the vectors of its step."""
    args = features("clip", 3000, 64, BFLOAT16, 0)
    pool = cupy.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    kept = [infonce.clip_loss_and_grad(*args, scale=14.0, method="tiled").loss for _ in range(20)]
    assert pool.used_bytes() - before <= 512 * len(kept)


def test_as_few_plans_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plan, "MAX_PLANS", 3)
    for n in range(300, 308):
        args = features("clip", n, 16, np.float32, n)
        assert compare(monkeypatch, "clip", args, True, scale=5.0, method="tiled") <= 3


def test_threads_and_streams() -> None:
    """One plan in several threads at once, each on a stream of its own."""
    sets = [features("clip", 1000, 128, BFLOAT16, i) for i in range(4)]
    wants = [results("clip", z, True, scale=14.0, method="tiled") for z in sets]
    wrong: list[Any] = []
    ready = threading.Barrier(4)
    cupy.cuda.Device().synchronize()

    def work(i: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            ready.wait()
            for _ in range(30):
                got = results("clip", sets[i], True, scale=14.0, method="tiled")
                if not all(map(np.array_equal, got, wants[i])):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(gpu_plan._plans) == 1


def test_captured() -> None:
    """A plan's launches under stream capture, the first call of its kind or not."""
    for first, loss in itertools.product((True, False), LOSSES):
        gpu_plan.forget()
        args = features(loss, 500, 64, BFLOAT16, 0)
        function = getattr(infonce, f"{loss}_loss_and_grad")
        if not first:
            function(*args, scale=14.0, method="tiled")
        step = infonce.capture(function, *args, scale=14.0, method="tiled")
        new = features(loss, 500, 64, BFLOAT16, 1)
        for a, b in zip(args, new, strict=True):
            a[...] = b
        out = step()
        want = function(*new, scale=14.0, method="tiled")
        assert np.array_equal(out.loss.get(), want.loss.get())
        assert np.array_equal(cupy.asnumpy(out.grads[0]), cupy.asnumpy(want.grads[0]))
