"""Features in host memory, computed on a device chunk by chunk. Where there is no GPU, the device
is a part of the host."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gpu_problems import smaller
from host_device import close, on_host, room
from hypothesis import given
from hypothesis import strategies as st
from infonce.kernels.gpu import config
from infonce.kernels.grid import has_few_blocks, least_block_side
from infonce.kernels.offload import layout
from infonce.kernels.problem import Gradients, Problem
from judge import BFLOAT16, DTYPES, LOSSES, arguments, assert_grad, assert_loss, judged, pairs

import infonce
from infonce.checks import validation


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("rows", "wave"), [(60, 60), (60, 10), (20, 60)])
def test_what_stays(loss: str, rows: int, wave: int) -> None:
    """All features, those of one side in all passes, or a part of them."""
    args = arguments(loss, *pairs("random", 60, 60, 30, np.float64, 0))
    options: dict[str, Any] = {"scale": 4.0, "workspace": room(rows, 30, 60, 60)}
    with mock.patch.multiple(layout, WAVE_ROWS=wave, MOST_WAVES=1):
        got, device = on_host(loss, args, **options)
    close(got, getattr(infonce, f"{loss}_loss_and_grad")(*args, **options))
    if rows == wave:
        del options["workspace"]  # also by default
        close(on_host(loss, args, **options)[0], got)
    little_to_hide = rows == wave or (rows > wave and loss in ("nt_xent", "lit"))
    assert device.whole == little_to_hide
    assert device.whole or device.blocks >= 9


@pytest.mark.parametrize("row", [2, 57])
@pytest.mark.parametrize("loss", LOSSES)
def test_not_a_number_stays_one(loss: str, row: int) -> None:
    """An infinite feature makes NaN, also if its logits are all -inf, as excluded pairs are."""
    args = arguments(loss, *pairs("random", 60, 60, 30, np.float64, 0))
    for z in args:
        z[:, 3] = -1.0
    args[-1][row, 3] = np.inf
    options = {"scale": 4.0, "reduction": "none"}
    got, device = on_host(loss, args, workspace=room(16, 30, 60, 60), **options)
    assert device.blocks > 4
    want = getattr(infonce, f"{loss}_loss")(*args, **options)
    assert np.isnan(want).any()
    np.testing.assert_array_equal(np.isnan(got.loss), np.isnan(want))


def test_progress_and_memory_too_small() -> None:
    args = arguments("clip", *pairs("random", 60, 60, 30, np.float64, 0))
    reports: list[tuple[str, int, int]] = []

    def rooms(rows: int) -> int:
        return room(rows, 30, 60, 60)

    def steps(phase: str, n: int) -> list[tuple[str, int, int]]:
        return [(phase, i + 1, n) for i in range(n)]

    options = {"scale": 1.0, "progress": lambda *step: reports.append(step)}
    on_host("clip", args, workspace=rooms(20), **options)
    # the first of three chunks meets three pieces, the others meet all keys; dQ, then dK
    assert reports == steps("log-sum-exp", 5) + 2 * steps("gradient", 9)
    reports.clear()
    with mock.patch.multiple(layout, WAVE_ROWS=10, MOST_WAVES=1):
        on_host("clip", args, workspace=rooms(60), **options)
    # six chunks: the last meets one at a time, the others meet two, but one on the diagonal
    assert reports == steps("log-sum-exp", 6 + 5) + steps("gradient", 5 * 4 + 6)
    # 15 x 15 chunks of 4 rows: two for each row and column
    with pytest.raises(ValueError, match=f"workspace: expected at least {rooms(4)} bytes"):
        on_host("clip", args, scale=1.0, workspace=rooms(4) - 1)
    on_host("clip", args, scale=1.0, workspace=rooms(4))


@given(
    m=st.integers(1, 10**6), n=st.integers(1, 10**6), d=st.integers(1, 2048),
    dtype=st.sampled_from([np.float64, np.float32, np.float16]), gradient=st.booleans(),
    workspace=st.integers(10, 36),
)  # fmt: skip
def test_layout(m: int, n: int, d: int, dtype: Any, gradient: bool, workspace: int) -> None:
    """The arrays of a pass fit the workspace, and blocks are few."""
    query, key = (np.broadcast_to(dtype(0), (rows, d)) for rows in (m, n))
    compute = "fp64" if dtype is np.float64 else "fp32"
    problem = Problem(query, key, 1.0, 1.0, compute_precision=compute, workspace=2**workspace)
    gradients = Gradients(query, key) if gradient else None
    row = layout.row_bytes(problem, gradients)
    try:
        blocks = layout.layout(problem, gradients)
    except ValueError:
        assert 2**workspace < layout.least_workspace(least_block_side(m, n), row)
        return
    assert blocks.block_bytes >= blocks.chunk_rows * row.block
    with_gradient = blocks.staying_rows * row.staying_bytes + blocks.chunk_rows * row.streamed_bytes
    assert blocks.chunk_rows <= blocks.staying_rows_without_gradients
    without = blocks.staying_rows_without_gradients * row.feature + 2 * blocks.chunk_rows * (
        row.feature + row.leaving
    )
    assert max(with_gradient, without) <= 2**workspace - blocks.block_bytes
    assert blocks.smaller_side_stays == (blocks.staying_rows == min(m, n))
    assert blocks.smaller_side_stays or blocks.staying_rows % blocks.chunk_rows == 0
    assert blocks.chunk_rows >= min(n, m) or has_few_blocks(
        m, n, blocks.chunk_rows, blocks.chunk_rows
    )


def test_memory_mapped_on_the_cpu(tmp_path: Any) -> None:
    """The CPU backend reads and writes files that are mapped, a block at a time, without being
    asked to."""
    args = pairs("random", 300, 300, 20, np.float32, 0)
    mapped, out = [], []
    for name, z in zip(("image", "text"), args, strict=True):
        np.save(tmp_path / name, z)
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
        out.append(np.lib.format.open_memmap(tmp_path / f"d{name}.npy", "w+", z.dtype, z.shape))
    want = infonce.clip_loss_and_grad(*args, scale=9.0)
    got = infonce.clip_loss_and_grad(*mapped, scale=9.0, out=out)
    assert got.loss == want.loss
    for name, w in zip(("image", "text"), want.grads, strict=False):
        np.testing.assert_array_equal(np.load(tmp_path / f"d{name}.npy"), w)


def test_bad_input() -> None:
    z = np.ones((4, 3), np.float32)
    with pytest.raises(ValueError, match='method: expected "auto" or "tiled" with offload'):
        infonce.clip_loss(z, z, scale=1.0, offload=True, method="fused")


def test_without_a_gpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(validation, "gpu_missing", lambda: "no driver")
    z = np.ones((4, 3), np.float32)
    with pytest.raises(ValueError, match=r"offload: expected a GPU to compute on.*no driver"):
        infonce.clip_loss(z, z, scale=1.0, offload=True)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def cupy() -> Any:
    module = pytest.importorskip("cupy")
    if missing := infonce.arrays.gpu_missing():
        pytest.skip(missing)
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("loss", LOSSES)
def test_on_the_gpu(cupy: Any, loss: str, dtype: Any) -> None:
    """Against float64, and bitwise the same from run to run, whatever stays."""
    d, scale = 64, 8.0
    m, n, rows = smaller((1500, 1700, 256), (100, 120, 40))
    args = arguments(loss, *pairs("partly aligned", m, n, d, dtype, 0))
    truth = judged(loss, args, scale=scale, normalize=True)
    name, logit = np.dtype(dtype).name, 8.0
    for workspace, wave in ((room(rows, d, m, n), 2000), (2**28, rows), (2**28, 2000)):
        options = {"scale": scale, "normalize": True, "offload": True, "workspace": workspace}
        call = partial(getattr(infonce, f"{loss}_loss_and_grad"), *args, **options)
        with mock.patch.multiple(layout, WAVE_ROWS=wave, MOST_WAVES=1):
            got, again = call(), call()
        assert isinstance(got.loss, np.ndarray)
        assert_loss(got.loss, truth.loss, name, logit)
        for field in got.grads._fields:
            g, w = getattr(got.grads, field), truth.grads[field]
            if w is None:
                continue
            assert g.tobytes() == getattr(again.grads, field).tobytes()
            if field not in ("scale", "bias"):
                assert isinstance(g, np.ndarray)
                assert g.dtype == dtype
                assert_grad(g, w, name, logit)


@pytest.mark.gpu
@pytest.mark.parametrize(("loss", "rows", "d", "times", "options"), [
    ("siglip", 61, 300, 1, {"bias": -3.0, "precision": "fp32", "wrt": ["text", "scale"]}),
    ("clip", 256, 103, 10, {"grad_dtype": np.float32}),
], ids=["the least workspace", "ranges of keys"])  # fmt: skip
def test_gradients_that_are_longer_than_features(
    cupy: Any, loss: str, rows: int, d: int, times: int, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The workspace that an error names has room for gradient chunks, and for rows of dK, which
    accumulate in ranges of keys."""
    monkeypatch.setattr(config.precision, "PORTABLE", times > 1)
    args = pairs("random", rows, rows, d, BFLOAT16, 0)
    call = partial(getattr(infonce, f"{loss}_loss_and_grad"), *args, scale=8.0, offload=True)
    with pytest.raises(ValueError, match="workspace: expected at least") as error:
        call(workspace=1, **options)
    least = int(str(error.value).split("at least ")[1].split()[0])
    got = call(workspace=times * least, **options)
    bias = {"bias": options["bias"]} if "bias" in options else {}
    want = judged(loss, args, scale=8.0, **bias)
    assert_loss(got.loss, want.loss, "bfloat16", 11.0)
    assert_grad(got.grads.text, want.grads["text"], "bfloat16", 8.0)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["clip", "sup_con"])
def test_streamed_blocks_whose_positives_are_in_classes(cupy: Any, loss: str) -> None:
    """Without single positives, other numbers bound the elements of blocks in float16."""
    m, rng = 400, np.random.default_rng(0)
    args = pairs("random", m, m, 64, np.float32, 0)
    classes = rng.integers(0, 3, m)
    if loss == "clip":
        options: dict[str, Any] = {"positive_ids": classes}
    else:
        args, options = args[:1], {"labels": classes}
    ref = judged(loss, args, scale=100.0, **options)
    workspace = room(128, 64, m, m, item=4, real=4)
    call = partial(getattr(infonce, f"{loss}_loss_and_grad"), scale=100.0, precision="fp32")
    got = call(*args, offload=True, workspace=workspace, **options)
    assert_loss(float(got.loss), ref.loss, "float32", 150.0)
    for name in ("image", "text") if loss == "clip" else ("features",):
        assert_grad(getattr(got.grads, name), ref.grads[name], "float32", 150.0)


@pytest.mark.gpu
def test_nobody_writes_to_the_gradient_of_a_table_but_the_host(cupy: Any) -> None:
    """Memory is touched late: after the host has written the gradient of a table."""
    from infonce.kernels.offload import copies, own

    query, key = pairs("random", 40, 40, 32, np.float32, 0)
    rng, written = np.random.default_rng(1), threading.Event()
    options = {
        "own": rng.standard_normal((700, 32)).astype(np.float32),
        "own_indices": rng.integers(0, 700, (40, 4)), "wrt": "own", "scale": 3.0,
        "normalize": True, "workspace": 2**18, "offload": True,
    }  # fmt: skip
    want = infonce.info_nce_loss_and_grad(query, key, **options).grads.own

    def write(*arguments: Any) -> None:
        write_table_gradient(*arguments)
        written.set()

    def touch(array: Any) -> None:
        before = array.copy()
        written.wait(10)
        array[...] = before

    write_table_gradient = own.write_table_gradient
    patched = mock.patch.object(own, "write_table_gradient", write)
    with patched, mock.patch.object(copies, "_touch", touch):
        got = infonce.info_nce_loss_and_grad(query, key, **options).grads.own
    assert written.is_set()
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_pinned_mapped_and_strided(cupy: Any, tmp_path: Any) -> None:
    """Pinned, mapped and strided features in host memory give the same result."""
    import cupyx

    n, rows = smaller((1000, 256), (120, 40))
    plain = pairs("random", n, n, 48, np.float32, 0)
    options = {"scale": 9.0, "offload": True, "workspace": room(rows, 48, n, n, 4, 4)}
    want = infonce.clip_loss_and_grad(*plain, **options)

    def pinned(z: Any) -> Any:
        out = cupyx.empty_pinned(z.shape, z.dtype)
        out[...] = z
        return out

    def mapped(z: Any) -> Any:
        np.save(tmp_path / f"{id(z)}.npy", z)
        return np.load(tmp_path / f"{id(z)}.npy", mmap_mode="r")

    for where in (pinned, mapped, np.asfortranarray, lambda z: z.astype(">f4")):
        got = infonce.clip_loss_and_grad(*map(where, plain), **options)
        assert got.loss == want.loss
        for g, w in zip(got.grads, want.grads, strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.gpu
def test_memory_stays_within_the_workspace(cupy: Any) -> None:
    from infonce.cli.bench.gpu import _peak

    args = pairs("random", 40_000, 40_000, 128, BFLOAT16, 0)

    def call() -> None:
        infonce.clip_loss_and_grad(*args, scale=9.0, offload=True, workspace=32 * 2**20)

    call()  # what is kept for later calls
    with _peak(cupy) as peak:
        call()
    vectors = 40 * 40_000 * 8
    assert 2**20 < peak.peak < 32 * 2**20 + vectors
    assert peak.used == 0


@pytest.mark.gpu
def test_errors_leave_nothing_behind(cupy: Any) -> None:
    from infonce.cli.bench.gpu import _peak

    n, rows = smaller((3000, 256), (200, 60))
    args = pairs("random", n, n, 64, np.float32, 0)
    options = {"scale": 9.0, "offload": True, "workspace": room(rows, 64, n, n, 4, 4)}
    want = infonce.clip_loss_and_grad(*args, **options)

    def stop(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("gradient", 7):
            raise RuntimeError("enough")

    gc.collect()  # or what earlier tests left is freed meanwhile
    with _peak(cupy) as peak:
        with pytest.raises(RuntimeError, match="enough"):
            infonce.clip_loss_and_grad(*args, progress=stop, **options)
        gc.collect()
        assert peak.used == 0
    got = infonce.clip_loss_and_grad(*args, **options)
    for g, w in zip(got.grads, want.grads, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.gpu
def test_in_threads(cupy: Any) -> None:
    """Calls at the same time share the threads that copy, and get what each gets alone."""
    n, rows = smaller((2000, 256), (120, 40))
    options = {"scale": 9.0, "offload": True, "workspace": room(rows, 64, n, n, 4, 4)}

    def call(seed: int) -> list[bytes]:
        args = pairs("random", n, n, 64, np.float32, seed)
        return [g.tobytes() for g in infonce.clip_loss_and_grad(*args, **options).grads]

    alone = list(map(call, range(4)))
    with ThreadPoolExecutor(4) as threads:
        for _ in range(smaller(3, 1)):
            assert list(threads.map(call, range(4))) == alone


@pytest.mark.gpu
def test_features_on_the_gpu_are_refused(cupy: Any) -> None:
    z = cupy.ones((4, 3))
    with pytest.raises(ValueError, match="offload: expected features in host memory"):
        infonce.clip_loss(z, z, scale=1.0, offload=True)
