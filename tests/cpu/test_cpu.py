"""The CPU backend: threads of products, memory, reproducibility, progress, interruption."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from infonce.kernels.cpu import resources, schedule, tiled_pass
from infonce.kernels.cpu.loops import compilation, elementary
from infonce.kernels.cpu.loops import tile_ops as tile
from judge import LOSSES, arguments, judged, pairs, peak_memory
from threadpoolctl import threadpool_limits

import infonce


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, tile_sides: Any) -> None:
    """Several row blocks, and products in several threads, at test sizes."""
    tile_sides(32, 48)
    monkeypatch.setattr(resources, "ALWAYS_SINGLE", 0)
    monkeypatch.setattr(resources, "SINGLE", 2**12)


def bits(out: infonce.LossAndGrad) -> list[bytes]:
    return [np.asarray(v).tobytes() for v in (out.loss, *out.grads) if v is not None]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bitwise_the_same_from_run_to_run(
    loss: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(loss, *pairs("partly aligned", 211, 211, 16, dtype, 0))
    function = getattr(infonce, f"{loss}_loss_and_grad")
    for threads in ("1", "2", "3", "5"):
        monkeypatch.setenv("INFONCE_NUM_THREADS", threads)
        results = [bits(function(*args, temperature=0.05, method="tiled")) for _ in range(6)]
        assert all(r == results[0] for r in results)
    ref = judged(loss, args, scale=20.0)
    got = np.frombuffer(results[0][0], np.float32)[0]
    assert abs(got - ref.loss) < 1e-5 * ref.loss


@pytest.mark.usefixtures("small_tiles")
def test_calls_from_several_threads() -> None:
    args = pairs("partly aligned", 150, 150, 64, np.float64, 1)  # products in two threads
    with threadpool_limits(2), ThreadPoolExecutor(6) as threads:
        before = resources.BLAS.threads()
        call = partial(infonce.clip_loss_and_grad, *args, scale=9.0, method="tiled")
        results = list(threads.map(lambda _: bits(call()), range(60)))
        assert all(r == bits(call()) for r in results)
        assert resources.BLAS.threads() == before


@pytest.mark.parametrize(
    ("multiply_adds", "limit", "threads"),
    [
        (2**18, "", None), (2**20, "", 1), (2**22, "", 1), (2**22 + 2**12, "", 8),
        (2**24, "", None), (2**24, "3", 3), (2**20, "3", 1), (2**24, "99", 32),
    ],
)  # fmt: skip
def test_threads_of_a_product(
    multiply_adds: int, limit: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They follow from the size of the product; None: the number of the caller stays."""
    monkeypatch.setenv("INFONCE_NUM_THREADS", limit)
    numbers: list[int] = []
    blas, current = resources._Blas(), [16]
    blas._functions = (lambda: current[0]), lambda number: (
        numbers.append(number), current.__setitem__(0, number)
    )[0]  # fmt: skip
    left = np.ones((multiply_adds // 2**12, 2**6), np.float32)
    right = np.ones((2**6, 2**6), np.float32)
    assert (blas.matmul(left, right) == 2**6).all()
    assert numbers == ([] if threads is None else [threads, 16])


@pytest.mark.parametrize("loss", LOSSES)
def test_loops_in_threads_have_the_same_bits(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take chunks of rows in any order."""
    args = arguments(loss, *pairs("partly aligned", 700, 700, 16, np.float32, 0))
    function = getattr(infonce, f"{loss}_loss_and_grad")
    options: dict[str, Any] = {"scale": 20.0, "method": "tiled"}
    want = bits(function(*args, **options))
    monkeypatch.setattr(resources, "THREADED", 0)
    monkeypatch.setattr(resources, "thread_count", lambda: 8)
    for _ in range(5):
        assert bits(function(*args, **options)) == want
    assert any(t.name.startswith("infonce") for t in threading.enumerate())


def test_a_loop_does_not_wait_for_threads_that_have_not_begun() -> None:
    began, stays = threading.Semaphore(0), threading.Event()
    was_told: list[bool] = []

    def work() -> None:
        began.release()
        was_told.append(stays.wait(5))  # False: the loop has waited for this thread

    busy = resources.THREADS.submit(resources.MOST_LOOPS - 1, work, ())
    for _ in busy:
        began.acquire()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "THREADED", 0)
        patch.setattr(resources, "thread_count", lambda: 8)
        x = np.zeros((300, 4), np.float32)
        vectors = np.zeros(300, np.float32), np.ones(300, np.float32)
        resources.run_loop(tile.softmax_gradient, x, 1.0, *vectors)
    stays.set()
    for future in busy:
        future.result()
    assert was_told == [True] * len(busy)
    assert (x == 1).all()


def test_threads_of_a_product_that_fails_are_set_back() -> None:
    before = resources.BLAS.threads()
    with pytest.raises(ValueError, match="matmul"):
        resources.BLAS.matmul(np.ones((2**10, 2**5)), np.ones((2**6, 2**6)))
    assert resources.BLAS.threads() == before


@pytest.mark.parametrize(
    ("loss", "dtype"), [*((loss, np.float16) for loss in LOSSES), ("clip", np.float32)]
)
def test_memory_stays_within_the_workspace(loss: str, dtype: Any) -> None:
    n, d, workspace = 2500, 512, 2**21  # the float32 logits would be 25 MB, dK in float32 5 MB
    args = arguments(loss, *pairs("random", n // 2, n // 2, d, dtype, 2))
    function = getattr(infonce, f"{loss}_loss_and_grad")
    out = {name: np.empty_like(args[0]) for name in function(
        args[0][:4], *[z[:4] for z in args[1:]], scale=5.0)
        .grads._fields if name in ("query", "key", "features", "image", "text")}  # fmt: skip
    if loss == "lit":
        del out["image"]
    call = partial(function, *args, scale=5.0, method="tiled", workspace=workspace, out=out)
    call()  # compiles
    peak = peak_memory(call)
    vectors = 60 * 8 * n  # float64 vectors of length M or N, and conversions of blocks for norms
    assert peak < workspace + vectors + 2**20
    assert peak > 2**17  # it is memory of this kind that is counted


def test_memory_of_groups_of_unequal_sizes_stays_within_the_workspace() -> None:
    """The first tiles are small, others as large as the workspace allows."""
    n, workspace = 2000, 2**23
    args = pairs("random", n, n, 64, np.float32, 2)
    out = {name: np.empty_like(args[0]) for name in ("image", "text")}
    call = partial(
        infonce.clip_loss_and_grad, *args, method="tiled", scale=5.0, workspace=workspace, out=out,
        groups=np.minimum(np.arange(n) // 150, 1),
    )  # fmt: skip
    call()  # compiles
    peak = peak_memory(call)
    assert workspace / 2 < peak < workspace + 60 * 8 * n + 2**19


@pytest.mark.parametrize("metrics", [False, True])
def test_logits_that_fit_are_not_computed_twice(
    metrics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"scale": 3.0, "method": "tiled", "metrics": metrics}
    monkeypatch.setattr(schedule, "TILE", (32, 32))
    args = pairs("random", 96, 96, 8, np.float32, 3)
    counts = {}
    matmul = np.matmul
    results = []
    for workspace in (2**20, 2**15, 2**13):
        calls = 0

        def counted(*a: Any, **k: Any) -> Any:
            nonlocal calls
            calls += 1
            return matmul(*a, **k)

        monkeypatch.setattr(np, "matmul", counted)
        out = infonce.clip_loss_and_grad(*args, workspace=workspace, **options)
        results.append(bits(out))
        monkeypatch.setattr(np, "matmul", matmul)
        counts[workspace] = calls
    assert counts[2**20] == 3 * 9  # 3 products a tile, 9 tiles
    assert 3 * 9 < counts[2**15] < 4 * 9
    assert counts[2**13] == 4 * 9  # no room but for one tile
    assert results[0] == results[1] == results[2]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("loss", LOSSES)
def test_progress(loss: str) -> None:
    args = arguments(loss, *pairs("random", 100, 100, 8, np.float64, 4))
    seen: list[tuple[str, int, int]] = []
    here = threading.get_ident()

    def progress(phase: str, done: int, total: int) -> None:
        assert threading.get_ident() == here
        seen.append((phase, done, total))

    getattr(infonce, f"{loss}_loss_and_grad")(
        *args, scale=3.0, method="tiled", progress=progress, workspace=2**17
    )
    assert len({phase for phase, _, _ in seen}) == (
        2 if loss in ("nt_xent", "clip", "info_nce") else 1
    )
    for phase in {phase for phase, _, _ in seen}:
        steps = [(done, total) for p, done, total in seen if p == phase]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 0


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("threads", ["1", "3"])
def test_an_exception_in_the_callback_stops_the_work(
    threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFONCE_NUM_THREADS", threads)
    before = resources.BLAS.threads()

    def stop(*_: Any) -> None:
        raise RuntimeError("enough")

    args = pairs("random", 300, 300, 8, np.float64, 5)
    with pytest.raises(RuntimeError, match="enough"):
        infonce.clip_loss_and_grad(*args, scale=3.0, method="tiled", progress=stop)
    assert resources.BLAS.threads() == before
    assert np.isfinite(infonce.clip_loss(*args, scale=3.0, method="tiled"))


def test_ctrl_c_ends_a_long_run() -> None:
    code = """
import numpy as np, infonce
z = np.random.default_rng(0).standard_normal((60000, 64), dtype=np.float32)
infonce.clip_loss_and_grad(z[:64], z[:64], scale=1.0, method='tiled')
print('ready', flush=True)
infonce.clip_loss_and_grad(z, z, scale=1.0, method='tiled')
print('finished', flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "finished" not in out
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_bad_thread_count(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFONCE_NUM_THREADS", value)
    args = pairs("random", 600, 600, 16, np.float64, 5)
    for method in ("tiled", "auto"):
        with pytest.raises(ValueError, match=r"INFONCE_NUM_THREADS.*positive integer"):
            infonce.clip_loss(*args, scale=3.0, method=method)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1.2e-7), (np.float64, 4e-16)])
def test_exp2_and_log1p(dtype: Any, bound: float) -> None:
    from mpmath import mp

    def exp2_of(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            out[i] = elementary.exp2(x[i])

    def log1p_of(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            out[i] = elementary.log1p(x[i])

    compiled_exp2, compiled_log1p = map(compilation.compiled, (exp2_of, log1p_of))
    low = -126 if dtype == np.float32 else -1022
    x = np.concatenate([np.linspace(low, 1, 3001), np.linspace(-2, 0, 2001)]).astype(dtype)
    out = np.empty_like(x)
    compiled_exp2(x, out)
    with mp.workdps(40):
        for got, a in zip(out, x, strict=True):
            assert abs(mp.mpf(float(got)) / mp.mpf(2) ** mp.mpf(float(a)) - 1) <= bound
        e = np.concatenate([np.linspace(0, 1, 1001)[1:], np.logspace(-30, 0, 500)]).astype(dtype)
        out = np.empty_like(e)
        compiled_log1p(e, out)
        for got, a in zip(out, e, strict=True):
            assert abs(mp.mpf(float(got)) / mp.log1p(mp.mpf(float(a))) - 1) <= 2 * bound
    special = np.array([0.0, -np.inf, np.nan, 10 * low], dtype)
    out = np.empty_like(special)
    compiled_exp2(special, out)
    assert out[0] == 1.0
    assert out[1] == out[3] == 2.0**low
    assert np.isnan(out[2])


def test_temporary_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = resources.BufferPool(200_000)
    monkeypatch.setattr(tiled_pass, "BUFFER_POOL", pool)
    first = pool.take(20_000, np.dtype(np.float64))
    address = first.ctypes.data
    pool.give(first)
    assert pool.take(8500, np.dtype(np.float64)).ctypes.data != address  # less than half of it
    again = pool.take(30_000, np.dtype(np.float32))
    assert again.ctypes.data == address
    assert again.shape == (30_000,)
    assert again.dtype == np.float32
    for size in (180_000, 180_000, 70_000):
        pool.give(np.empty(size, np.uint8))
        assert pool._buffers
        assert sum(b.nbytes for b in pool._buffers) <= 200_000
    args = pairs("partly aligned", 300, 300, 8, np.float32, 6)
    want = bits(infonce.clip_loss_and_grad(*args, scale=9.0))
    assert bits(infonce.clip_loss_and_grad(*args, scale=9.0)) == want
