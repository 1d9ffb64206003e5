"""Calls by plan against the same calls without one: the same launches, so the same bits."""

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_problems import (
    BFLOAT16,
    MISSING,
    PRECISIONS,
    features,
    fewer,
    find_dtype,
    gpu_only,
    smaller,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from judge import LOSSES
from reference_problems import each_once

import infonce

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels.gpu import plan as gpu_plan
    from infonce.kernels.gpu import recorded
    from infonce.kernels.gpu import select as gpu_select
    from infonce.kernels.gpu.device import compiler, recorder


ROWS = smaller(514, 140)


@pytest.fixture(autouse=True)
def no_plans() -> None:
    gpu_plan.forget()


def results(loss: str, args: list[Any], gradient: bool, **options: Any) -> list[Any]:
    """Everything that a call hands out, on the host."""
    if not gradient:
        return [getattr(infonce, f"{loss}_loss")(*args, **options).get()]
    out = getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)
    lse = out.lse if isinstance(out.lse, tuple) else (out.lse,)
    metrics = [] if out.metrics is None else vars(out.metrics).values()
    arrays = [z for z in (out.loss, *lse, *out.grads, *metrics) if z is not None]
    return [cupy.asnumpy(array) for array in arrays]


def compare(monkeypatch: Any, loss: str, args: list[Any], gradient: bool, **options: Any) -> int:
    """How many plans there are after the call."""
    got = results(loss, args, gradient, **options)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_select, "has_plan", lambda *_: False)
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
    shapes = smaller(((300, 64), (514, 40), (1030, 513)), ((140, 64), (260, 40), (300, 513)))
    for i, (n, d) in fewer(enumerate(shapes), 2):
        before = len(gpu_plan._plans)
        for seed, scale in ((2 * i, 14.0), (2 * i + 1, 3.5)):
            args = features(loss, n, d, find_dtype(dtype), seed)
            options: Any = {"precision": precision, "method": "tiled", "normalize": i == 1,
                            "workspace": n * n if i == 2 else 2**28}  # fmt: skip
            compare(monkeypatch, loss, args, gradient, scale=scale, **options)
            on_device = cupy.array(scale, np.float32)
            count = compare(monkeypatch, loss, args, gradient, scale=on_device, **options)
            assert count == before + 2


@pytest.mark.parametrize("loss", LOSSES)
def test_options(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that change what is launched make plans of their own."""
    rows = smaller(300, 140)
    args = features(loss, rows, 64, BFLOAT16, 0)
    ids = cupy.arange(rows) // 3
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
    args = features(loss, smaller(600, 200), 64, np.float32, 0)
    reports: list[str] = []
    monkeypatch.setattr(recorded, "_compiled", set())
    for known in ("_modules", "_functions", "_started"):
        monkeypatch.setattr(compiler, known, {})
    for _ in range(2):
        results(
            loss,
            args,
            True,
            scale=14.0,
            method="tiled",
            progress=lambda *args: reports.append(args[0]),
        )
    assert not gpu_plan._plans
    assert reports[0] == "compiling kernels"  # side by side, before anything runs, and only once
    assert reports.count("compiling kernels") == len(compiler._modules)
    monkeypatch.setattr(recorder, "MAX_STEPS", 40)
    for _ in range(2):
        compare(
            monkeypatch,
            loss,
            args,
            True,
            scale=14.0,
            method="tiled",
            workspace=smaller(2**18, 2**16),
        )
    assert not any(isinstance(plan, gpu_plan.Plan) for plan in gpu_plan._plans.values())
    compare(monkeypatch, loss, args, True, scale=14.0, method="tiled")
    assert sum(isinstance(plan, gpu_plan.Plan) for plan in gpu_plan._plans.values()) == 1


@settings(max_examples=smaller(60, 12))
@given(
    m=st.integers(1, smaller(700, 200)), n=st.integers(1, smaller(3000, 400)),
    d=st.integers(1, smaller(300, 140)),
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
    args = [features("nt_xent", rows, d, find_dtype(dtype), seed + i)[0]
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


def test_memory_that_comes_again_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan knows the arguments of several sets of arrays, and no more than it may."""
    monkeypatch.setattr(gpu_plan, "MAX_BOUND_STEPS", 3)
    rows = smaller(300, 140)
    sets = [features("clip", rows, 64, BFLOAT16, i) for i in range(5)]
    wants = [results("clip", z, True, scale=14.0, method="tiled") for z in sets]
    for _ in range(2):
        for z, want in zip(sets, wants, strict=True):
            for a, b in zip(
                results("clip", z, True, scale=14.0, method="tiled"), want, strict=True
            ):
                assert np.array_equal(a, b)
    (plan,) = gpu_plan._plans.values()
    assert 1 <= len(plan.bound_steps) <= 3


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
    args = features("clip", smaller(3000, 200), 64, BFLOAT16, 0)
    pool = cupy.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    kept = [infonce.clip_loss_and_grad(*args, scale=14.0, method="tiled").loss for _ in range(20)]
    assert pool.used_bytes() - before <= 512 * len(kept)


def test_as_few_plans_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plan, "MAX_PLANS", 3)
    for n in range(*smaller((300, 308), (140, 145))):
        args = features("clip", n, 16, np.float32, n)
        assert compare(monkeypatch, "clip", args, True, scale=5.0, method="tiled") <= 3


def in_threads(work: Callable[[int], None]) -> None:
    """work(0), ..., work(3) at once."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_and_streams() -> None:
    """One plan in several threads at once, each on a stream of its own."""
    rows, turns = smaller((1000, 30), (140, 4))
    sets = [features("clip", rows, 128, BFLOAT16, i) for i in range(4)]
    wants = [results("clip", z, True, scale=14.0, method="tiled") for z in sets]
    wrong: list[Any] = []
    ready = threading.Barrier(4)
    cupy.cuda.Device().synchronize()

    def work(i: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            ready.wait()
            for _ in range(turns):
                got = results("clip", sets[i], True, scale=14.0, method="tiled")
                if not all(map(np.array_equal, got, wants[i])):
                    wrong.append(i)

    in_threads(work)
    assert not wrong
    assert len(gpu_plan._plans) == 1


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_graphs(
    loss: str, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A call that comes again at the same addresses is one graph, with the bits of its launches."""
    shape = smaller((514, 513), (140, 129))
    sets = [features(loss, *shape, find_dtype(dtype), i) for i in range(2)]
    options: Any = {"scale": cupy.array(14.0), "precision": precision, "method": "tiled"}
    assert asked_again(monkeypatch, loss, sets, **options) >= 3
    (plan,) = gpu_plan._plans.values()
    assert len(plan.bound_steps) <= 3


def asked_again(monkeypatch: Any, loss: str, sets: list[list[Any]], **options: Any) -> int:
    """How many graphs are launched where calls get the contents of two sets of arrays in turn, at
    the same addresses. Each gives the bits of a call without a plan."""
    with monkeypatch.context() as patch:
        patch.setattr(gpu_select, "has_plan", lambda *_: False)
        wants = [results(loss, z, True, **options) for z in sets]
    launched, launch = [0], cupy.cuda.runtime.graphLaunch

    def graph_launch(*args: Any) -> None:
        launched[0] += 1
        launch(*args)

    # Pools take some calls to hand out the same memory again. The pool is new, because the pool of
    # other tests has blocks that they have left, of odd sizes
    turns = smaller(4, 2) * (0, 0, 1, 1, 0, 1)
    new_pool = cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc)
    with new_pool, monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "graphLaunch", graph_launch)
        arrays = [z.copy() for z in sets[0]]
        for i in turns:
            for to, z in zip(arrays, sets[i], strict=True):
                to[...] = z
            for a, b in zip(results(loss, arrays, True, **options), wants[i], strict=True):
                assert np.array_equal(a, b)
    return launched[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_of_options(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels among the contents that change, and options whose arrays do."""
    rng = np.random.default_rng(0)

    def labels(most: int) -> list[Any]:
        return [cupy.asarray(rng.integers(-1, most, ROWS)) for _ in range(2)]

    sets = [cupy.asarray(each_once(rng.integers(-1, ROWS, (ROWS, 3)))) for _ in range(2)]
    numbers = {"margin": 0.1, "hardness": 2.0}
    vectors = {
        "weights": cupy.asarray(rng.random(ROWS)),
        "key_bias": cupy.asarray(rng.random(ROWS)),
    }
    for loss, row_options, options in fewer((
        ("sup_con", labels(90), {}), ("sup_con", labels(3), {"decoupled": True}),
        ("gte", None, {}), ("info_nce", labels(ROWS), {}), ("info_nce", sets, {}),
        ("clip", None, numbers), ("clip", None, vectors), ("clip", None, {"label_smoothing": 0.1}),
        ("info_nce", None, vectors | numbers), ("nt_xent", None, {"false_negative_margin": 0.1}),
    ), 4):  # fmt: skip
        kind = {"sup_con": "nt_xent", "gte": "clip"}.get(loss, loss)
        arguments = [features(kind, ROWS, 72, find_dtype(dtype), i) for i in range(2)]
        for i, more in enumerate(row_options or []):
            arguments[i].append(more)
        known: Any = {"scale": 14.0, "method": "tiled", **options}
        assert asked_again(monkeypatch, loss, arguments, **known) >= 3, (loss, options)


def test_a_full_device_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go on without graphs if products in graphs have no memory."""
    monkeypatch.setattr(gpu_plan, "workspace", lambda stream: 0)
    sets = [features("clip", ROWS, 64, BFLOAT16, i) for i in range(2)]
    assert asked_again(monkeypatch, "clip", sets, scale=14.0, method="tiled") == 0


def test_threads_that_share_a_stream() -> None:
    """Graphs of one plan, captured and launched by several threads on one stream."""
    sets = [features("clip", ROWS, 64, BFLOAT16, i) for i in range(4)]
    wants = [results("clip", z, True, scale=14.0, method="tiled") for z in sets]
    wrong: list[Any] = []
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def work(i: int) -> None:
        with stream:
            for _ in range(smaller(40, 4)):
                got = results("clip", sets[i], True, scale=14.0, method="tiled")
                if not all(map(np.array_equal, got, wants[i])):
                    wrong.append(i)

    in_threads(work)
    assert not wrong


def test_captured() -> None:
    """A plan's launches under stream capture, the first call of its kind or not."""
    for first, loss in itertools.product((True, False), LOSSES):
        gpu_plan.forget()
        args = features(loss, ROWS, 64, BFLOAT16, 0)
        function = getattr(infonce, f"{loss}_loss_and_grad")
        if not first:
            function(*args, scale=14.0, method="tiled")
        step = infonce.capture(function, *args, scale=14.0, method="tiled")
        new = features(loss, ROWS, 64, BFLOAT16, 1)
        for a, b in zip(args, new, strict=True):
            a[...] = b
        out = step()
        want = function(*new, scale=14.0, method="tiled")
        assert np.array_equal(out.loss.get(), want.loss.get())
        assert np.array_equal(cupy.asnumpy(out.grads[0]), cupy.asnumpy(want.grads[0]))
