"""Calls by plan against the same calls without one: the same launches, so the same bits."""

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from gpu_problems import BFLOAT16, MISSING, dtype_of, gpu_only
from judge import LOSSES

import infonce

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels import blocks, gpu, gpu_plan

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
    found = [z for z in (out.loss, *lse, *out.grads) if z is not None]
    return [cupy.asnumpy(array) for array in found]


def compare(monkeypatch: Any, loss: str, args: list[Any], gradient: bool, **options: Any) -> int:
    """How many plans there are after the call."""
    got = results(loss, args, gradient, **options)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_plan, "pays", lambda *_: False)
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
        {"grad_out": cupy.array(2.0)}, {"grad_out": 3.0},
    ]  # fmt: skip
    for i, options in enumerate(cases):
        count = compare(monkeypatch, loss, args, True, **known, **options)
        assert count == i + 1, options
    turned = [cupy.asfortranarray(z) for z in args]
    assert compare(monkeypatch, loss, turned, True, **known) == len(cases) + 1
    shifted = [cupy.concatenate([z.ravel(), z.ravel()[:3]])[3:].reshape(z.shape) for z in args]
    assert compare(monkeypatch, loss, shifted, True, **known) == len(cases) + 2
    bad = [z.copy() for z in args]
    bad[0][7, 3] = np.nan
    compare(monkeypatch, loss, bad, True, **known)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_has_none(loss: str) -> None:
    """What a plan does not know is computed without one."""
    args = features(loss, 600, 64, np.float32, 0)
    if loss != "siglip":
        results(loss, args, True, scale=14.0, method="tiled", metrics=True)
    results(loss, args, True, scale=14.0, method="tiled", progress=lambda *_: None)
    results(loss, args, True, scale=14.0, method="tiled", workspace=2**18)
    assert not gpu_plan._plans


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
        if own and loss == "info_nce":
            continue  # keys may be several queries' positives: no plan
        symmetric = own and loss == "nt_xent"
        query = features("nt_xent", m, d, dtype_of(dtype), 1)[0]
        key = query if symmetric else features("nt_xent", n, d, dtype_of(dtype), 2)[0]
        positives = (np.arange(m) + m // 2 * symmetric) % m if own else np.full(m, -1)
        problem = blocks.Problem(
            query=query, key=key, scale=14.0, upstream=cupy.full(m, 1 / m),
            positives=cupy.asarray(positives), column_weight=0.5 * pairs,
            bias=-10.0 if sigmoid else None, symmetric=symmetric, part=not own, apart=not own,
            compute=precision,
        )  # fmt: skip
        assert gpu_plan.pays(problem, blocks.Gradients())

        def numbers(count: int, low: float = 0.0) -> Any:
            return cupy.asarray(rng.uniform(low, 1, count))

        rows, columns = numbers(m), numbers(n) if pairs or symmetric else None
        before = [numbers(m), numbers(m, 0.5), numbers(n), numbers(n, 0.5), numbers(m)]
        gathered = [numbers(m * d).reshape(m, d), numbers(n * d).reshape(n, d)]

        def fold(gradient: bool, order: Any = (problem, symmetric, before, gathered, rows, columns),
                 ) -> list[Any]:  # fmt: skip
            problem, symmetric, before, gathered, rows, columns = order
            of_rows = blocks.Sums(before[0].copy(), before[1].copy())
            of_columns = of_rows if symmetric else blocks.Sums(before[2].copy(), before[3].copy())
            dq, dk = (z.astype(real) for z in gathered)
            vectors = [cupy.zeros(m) for _ in range(4)]
            epilogue: Any = blocks.Statistics(
                of_rows, of_columns if columns is not None else None, before[4].copy()
            )
            if sigmoid:
                epilogue = blocks.Sigmoid(rows, *vectors[:3])
            elif gradient:
                share = None if columns is None else 0.5 * columns
                epilogue = blocks.SoftmaxGradient(4 + rows, rows, columns, share, -rows)
            gradients = None
            if gradient:
                gradients = blocks.Gradients(dq, dk, vectors[3], want_key=not symmetric,
                                             add_query=True)  # fmt: skip
            triangle = symmetric and not gradient and not sigmoid
            poison = gpu.fold_block(problem, triangle, epilogue, gradients)
            made = [*vectors, dq, dk, *vars(of_rows).values(), *vars(of_columns).values(), poison]
            return [z.get() for z in made if z is not None]

        for gradient in (False, True):
            found = fold(gradient)
            assert len(gpu_plan._plans) == 1
            again = fold(gradient)
            with monkeypatch.context() as patch:
                patch.setattr(gpu_plan, "pays", lambda *_: False)
                wanted = fold(gradient)
            for got, repeated, want in zip(found, again, wanted, strict=True):
                assert np.array_equal(got, want, equal_nan=True)
                assert np.array_equal(repeated, want, equal_nan=True)
            gpu_plan.forget()


def test_nothing_is_kept_on_the_device() -> None:
    args = features("clip", 700, 64, BFLOAT16, 0)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    for _ in range(3):
        results("clip", args, True, scale=14.0, method="tiled")
    assert gpu_plan._plans
    assert pool.used_bytes() == before


def test_a_loss_that_is_kept_is_small() -> None:
    """Losses of many steps may be kept: none holds the vectors of its step."""
    args = features("clip", 3000, 64, BFLOAT16, 0)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    kept = [infonce.clip_loss_and_grad(*args, scale=14.0, method="tiled").loss for _ in range(20)]
    assert pool.used_bytes() - before <= 512 * len(kept)


def test_as_few_plans_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plan, "MOST_PLANS", 3)
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
