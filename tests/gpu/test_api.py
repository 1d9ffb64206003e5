"""The public functions on arrays of a GPU: same answers, same kind of array, same errors."""

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, fewer, find_dtype, smaller
from infonce.kernels.gpu.schedule import Call
from infonce.kernels.problem import SCALES
from judge import (
    LOSSES,
    arguments,
    assert_grad,
    assert_loss,
    judged,
    largest_logit,
    pairs,
)

import infonce

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy

METHODS = ["auto", "naive", "fused", "tiled"]


def call(loss: str, *args: Any, **options: Any) -> infonce.LossAndGrad:
    return getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)


@pytest.mark.parametrize("method", METHODS)
def test_results_are_arrays_of_the_device(method: str) -> None:
    """Gradients have the dtype of features. (tests/matrix has the numbers.)"""
    z = [cupy.asarray(side) for side in pairs("random", 20, 20, 8, np.float16, 0)]
    out = call("clip", *z, scale=6.0, method=method)
    assert isinstance(out.loss, cupy.ndarray)
    assert out.loss.shape == infonce.clip_loss(*z, scale=6.0, method=method).shape == ()
    for gradient in out.grads[:2]:
        assert isinstance(gradient, cupy.ndarray)
        assert gradient.dtype == np.float16


@pytest.mark.parametrize("rows", [64, 33])  # halves of gte's gradients: aligned, and copied
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("loss", [*LOSSES, "gte", "sup_con"])
def test_explained_is_the_call_that_runs(
    loss: str, dtype: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    make_call = Call.from_problem
    monkeypatch.setattr(
        Call, "from_problem", lambda *args: calls.append(make_call(*args)) or calls[-1]
    )
    z = pairs("random", rows, rows, 8, dtype, 2)
    args = [cupy.asarray(side) for side in (z[:1] if loss == "sup_con" else arguments(loss, *z))]
    labels = [cupy.arange(rows) // 4] if loss == "sup_con" else []
    call(loss, *args, *labels, scale=5.0, method="tiled")
    explained = infonce.explain(loss, len(args[0]), 8, dtype=dtype).schedule.call
    want = replace(calls[0], method="auto", max_class_sums=explained.max_class_sums)
    for name in ("query", "key", "query_gradient", "key_gradient"):  # offsets are of an allocator
        assert getattr(want, name) == getattr(explained, name), name
    assert want == explained


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_scales_at_the_ends(loss: str, method: str, dtype: str) -> None:
    """A number out of range is refused; of an array, which is not looked at, the loss is NaN.
    Within, results are right to the rounding of the logits, and probabilities sum to 1."""
    least, most = SCALES["fp64" if dtype == "float64" else "fp32"]
    n = smaller(150, 70)
    host = arguments(loss, *pairs("random", n, n, 64, find_dtype(dtype), 3))
    args = [cupy.asarray(z) for z in host]
    function = getattr(infonce, f"{loss}_loss")
    for scale in (0.0, -1.0, 0.99 * least, 1.01 * most, np.inf, np.nan):
        with pytest.raises(ValueError, match="scale: expected"):
            function(*args, scale=scale, method=method)
        assert bool(cupy.isnan(function(*args, scale=cupy.array(scale), method=method)))
        with np.errstate(divide="ignore"):
            temperature = cupy.array(1.0 / np.float64(scale))
        out = call(loss, *args, temperature=temperature, method=method)
        assert bool(cupy.isnan(out.loss))
    for scale in fewer((least, 1e-3, 1e3, 0.01 * most, most), 3):
        ref = judged(loss, host, scale=scale)
        for number in (scale, cupy.array(scale)):
            out = call(loss, *args, scale=number, method=method, grad_dtype=np.float64)
            logit = largest_logit(scale, host[0], host[-1])
            assert_loss(float(out.loss), ref.loss, dtype, logit)
            pairs_each = n if loss == "siglip" else 1
            for name, want in ref.grads.items():
                if isinstance(want, np.ndarray):
                    got = getattr(out.grads, name).get()
                    assert np.linalg.norm(got) <= 5 * scale * pairs_each
                    assert_grad(got, want, dtype, logit, np.linalg.norm(want) + scale * pairs_each)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_least_workspace(loss: str) -> None:
    n = smaller(700, 24)
    args = arguments(loss, *pairs("partly aligned", n, n, 40, np.float32, 0))
    arrays = [cupy.asarray(z) for z in args]
    with pytest.raises(ValueError, match="workspace: expected at least") as refused:
        call(loss, *arrays, scale=5.0, method="tiled", workspace=1)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    want = call(loss, *arrays, scale=5.0, method="tiled")
    got = call(loss, *arrays, scale=5.0, method="tiled", workspace=least)
    assert abs(float(got.loss - want.loss)) <= 1e-6 * float(want.loss)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        call(loss, *arrays, scale=5.0, method="tiled", workspace=least // 2)


@pytest.mark.parametrize("method", METHODS)
def test_torch(method: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    image, text = pairs("partly aligned", 64, 64, 16, np.float32, 2)
    ref = judged("clip", (image, text), scale=6.0)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.from_numpy(z).cuda().to(dtype) for z in (image, text)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = [t * 1.0 for t in tensors]
            out = call("clip", *late, scale=6.0, method=method)
            loss = out.loss + 0
        stream.synchronize()
        assert out.grads.image.dtype == dtype
        assert out.grads.image.is_cuda
        assert abs(float(loss) - ref.loss) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    image, text = pairs("partly aligned", 64, 64, 16, np.float32, 2)
    ref = judged("clip", (image, text), scale=6.0)
    out = call("clip", jax.numpy.asarray(image), jax.numpy.asarray(text), scale=6.0)
    assert isinstance(out.grads.image, jax.Array)
    assert abs(float(out.loss) - ref.loss) < 1e-5 * ref.loss


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_label_spoils_its_row(method: str) -> None:
    """The host does not read labels on the device."""
    query, key = map(cupy.asarray, pairs("partly aligned", 50, 80, 8, np.float32, 3))
    labels = np.random.default_rng(0).permutation(80)[:50]
    labels[3] = 80
    arrays = query, key, cupy.asarray(labels)
    rows = infonce.info_nce_loss(*arrays, scale=6.0, method=method, reduction="none")
    assert np.flatnonzero(np.isnan(rows.get())).tolist() == [3]
    mean = call("info_nce", *arrays, scale=6.0, method=method)
    assert np.isnan([float(mean.loss), float(mean.grads.scale)]).all()
    assert all(np.isfinite(cupy.asnumpy(z)).all() for z in mean.grads[:2])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poisoned", ["query", "key", "guide query", "guide key", "no guide"])
def test_gradients_of_numbers_are_nan_where_the_loss_is(poisoned: str, method: str) -> None:
    """Also if ids exclude all negatives, or no row has a positive, and if all logits that are not
    finite are -inf."""
    rng = np.random.default_rng(0)
    sides = {
        name: rng.standard_normal((40, 8)) for name in ("query", "key", "guide query", "guide key")
    }
    if poisoned == "no guide":
        image, text = np.abs(sides["query"]), np.abs(sides["key"])
        text[1] = -np.inf
        out = call("siglip", *map(cupy.asarray, (image, text)), method=method)
        assert np.isnan([float(z) for z in (out.loss, out.grads.scale, out.grads.bias)]).all()
        return
    sides[poisoned][1] = np.nan
    query, key, *guide = map(cupy.asarray, sides.values())
    options: dict[str, Any] = {"ids": cupy.zeros(40, int), "guide": tuple(guide)}
    for labels in (cupy.full(40, -1), cupy.arange(40)):
        for wrt in (None, ["scale"]):
            out = call("info_nce", query, key, labels, scale=2.0, wrt=wrt, method=method, **options)
            assert np.isnan([float(out.loss), float(out.grads.scale)]).all()


def test_fused_counts_no_ranks() -> None:
    image, text = map(cupy.asarray, pairs("random", 8, 8, 4, np.float32, 4))
    with pytest.raises(ValueError, match=r'^method: "fused" counts no ranks on a GPU; expected'):
        call("clip", image, text, scale=1.0, method="fused", metrics=True)


def test_gradients_that_overlap_themselves_are_refused() -> None:
    image, text = map(cupy.asarray, pairs("random", 6, 6, 4, np.float32, 4))
    for out in (
        cupy.broadcast_to(cupy.zeros(4, np.float32), (6, 4)),
        cupy.lib.stride_tricks.as_strided(cupy.zeros(100, np.float32), (6, 4), (12, 4)),
    ):
        with pytest.raises(ValueError, match=r"out\['text'\]: expected elements that do not over"):
            call("clip", image, text, scale=1.0, out={"text": out})


def test_mixed_places() -> None:
    image, text = pairs("random", 8, 8, 4, np.float32, 4)
    with pytest.raises(ValueError, match="text: expected an array on GPU 0 like image, got one on"):
        infonce.clip_loss(cupy.asarray(image), text, scale=1.0)
    with pytest.raises(ValueError, match="text: expected an array on the host like image"):
        infonce.clip_loss(image, cupy.asarray(text), scale=1.0)
    with pytest.raises(TypeError, match="on the GPU"):
        infonce.clip_loss_and_grad(
            cupy.asarray(image), cupy.asarray(text), scale=1.0, out={"image": image.copy()}
        )
    text[5, 2] = np.nan
    on_device = cupy.asarray(image), cupy.asarray(text)
    with pytest.raises(ValueError, match=r"text: expected finite values.* row 5"):
        infonce.clip_loss(*on_device, scale=1.0, check_finite=True)


def test_naive_hands_out_the_logits() -> None:
    image, text = pairs("partly aligned", 50, 50, 8, np.float32, 3)
    ids = np.arange(50) // 2
    got = call("clip", cupy.asarray(image), cupy.asarray(text), scale=6.0, ids=ids, method="naive",
               return_logits=True)  # fmt: skip
    want = 6.0 * image.astype(np.float64) @ text.astype(np.float64).T
    same = (ids[:, None] == ids[None, :]) & ~np.eye(50, dtype=bool)
    assert got.logits is not None
    logits = got.logits.get()
    assert np.array_equal(np.isneginf(logits), same)
    np.testing.assert_allclose(logits[~same], want[~same], rtol=1e-5, atol=1e-5)


def test_naive_that_does_not_fit() -> None:
    z = cupy.zeros((10**6, 2), np.float32)
    with pytest.raises(MemoryError, match=r'1000000 x 1000000 logits.*free; use method="tiled"'):
        infonce.clip_loss(z, z, scale=1.0, method="naive")


@pytest.mark.parametrize("method", METHODS)
def test_no_memory_left(method: str) -> None:
    """An allocation that fails half-way leaves the device usable and nothing behind. Where the
    gradients themselves have no room, nothing that the caller could set would help."""
    n, most = smaller((600, 2**23), (150, 2**20))
    z = [cupy.asarray(a) for a in pairs("random", n, n, 64, np.float32, 1)]
    want = call("clip", *z, scale=5.0, method=method)
    pool = cupy.cuda.MemoryPool()
    failed: list[tuple[int, str]] = []
    for limit in range(2**14, most, smaller(2**15, 2**16)):
        pool.set_limit(size=limit)
        with cupy.cuda.using_allocator(pool.malloc):
            try:
                call("clip", *z, scale=5.0, method=method)
            except MemoryError as error:
                failed.append((limit, str(error)))
        assert pool.used_bytes() == 0
    assert len(failed) > 3
    advice = 'method="tiled"' if method == "naive" else "a workspace below"
    gradients = 2 * n * 64 * 4
    within_the_backend = [message for limit, message in failed if limit > gradients]
    assert within_the_backend or method in ("auto", "fused")
    assert all(f"; use {advice}" in message for message in within_the_backend)
    again = call("clip", *z, scale=5.0, method=method)
    assert float(again.loss) == float(want.loss)
    assert bool((again.grads.image == want.grads.image).all())


def test_no_memory_left_for_exponentials() -> None:
    """A call without a workspace caches exponentials of wide rows if the GPU has room for them."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("for Hopper")
    dtype = find_dtype("bfloat16")
    z = [cupy.asarray(a) for a in pairs("random", 16384, 16384, 520, dtype, 1)]
    pool = cupy.cuda.MemoryPool()

    def peak(limit: int, **options: Any) -> tuple[int, Any]:
        pool.free_all_blocks()
        pool.set_limit(size=limit)
        with cupy.cuda.using_allocator(pool.malloc):
            out = call("clip", *z, scale=5.0, **options)
        return pool.total_bytes(), out

    taken, _ = peak(0)
    assert taken > 2**29
    taken, out = peak(2**29)
    assert taken < 2**29
    _, want = peak(0, workspace=2**28)
    assert float(out.loss) == float(want.loss)
    assert bool((out.grads.text == want.grads.text).all())


def test_a_kernel_that_does_not_compile(tmp_path: Any, monkeypatch: Any) -> None:
    from infonce.kernels.gpu.device import compiler

    z = [cupy.asarray(a) for a in pairs("random", 20, 20, 8, np.float32, 1)]
    want = call("clip", *z, scale=5.0, method="naive")
    with monkeypatch.context() as broken:
        shutil.copytree(compiler.SOURCES, tmp_path, dirs_exist_ok=True)
        source = tmp_path / "naive" / "naive.cu"
        text = source.read_text(encoding="utf-8") + "\nthis is no kernel;\n"
        source.write_text(text, encoding="utf-8")
        line = text.count("\n")
        broken.setattr(compiler, "SOURCES", tmp_path)
        broken.setattr(compiler, "_functions", {})
        broken.setattr(compiler, "_modules", {})
        with pytest.raises(RuntimeError, match=rf"naive/naive.cu\({line}\)"):
            call("clip", *z, scale=5.0, method="naive")
    assert float(call("clip", *z, scale=5.0, method="naive").loss) == float(want.loss)


def test_several_devices() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU alone")
    image, text = pairs("random", 130, 130, 16, np.float32, 4)
    losses = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            z = cupy.asarray(image), cupy.asarray(text)
        for method in METHODS:  # called with device 0 current
            out = call("clip", *z, scale=5.0, method=method)
            assert out.grads.image.device.id == device
            losses.append((method, float(out.loss)))
    assert losses[:4] == losses[4:]
    with cupy.cuda.Device(0):
        here = cupy.asarray(image)
    with pytest.raises(ValueError, match="text: expected an array on GPU 0 like image"):
        infonce.clip_loss(here, z[1], scale=1.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_capture(loss: str, method: str) -> None:
    n = smaller(300, 100)
    first = [cupy.asarray(z) for z in arguments(loss, *pairs("random", n, n, 24, np.float32, 0))]
    second = arguments(loss, *pairs("partly aligned", n, n, 24, np.float32, 1))
    scale = cupy.asarray(4.0)
    step = infonce.capture(getattr(infonce, f"{loss}_loss_and_grad"), *first, scale=scale,
                           method=method)  # fmt: skip
    for values, s in ((second, 9.0), ([z.get() for z in first], 2.0)):
        want = call(loss, *map(cupy.asarray, values), scale=cupy.asarray(s), method=method)
        for array, value in zip(first, values, strict=True):
            array.set(value)
        scale.fill(s)
        got = step()
        assert float(got.loss) == float(want.loss)
        for a, b in zip(got.grads, want.grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or bool((a == b).all())
    alone = infonce.capture(getattr(infonce, f"{loss}_loss"), *first, scale=2.0, method=method)
    assert float(alone()) == pytest.approx(float(got.loss), rel=1e-6)


class ForeignArray:
    """An array of a library that does not know of CuPy's streams."""

    def __init__(self, array: Any, is_read: Any, freed: list[bool]) -> None:
        self.array, self.is_read, self.freed = array, is_read, freed

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data, typestr = (self.array.data.ptr, False), self.array.dtype.str
        return {"shape": self.array.shape, "typestr": typestr, "data": data, "version": 3}

    def __del__(self) -> None:
        self.freed.append(self.is_read())


def test_arrays_of_other_libraries_stay_until_they_are_read() -> None:
    image, text = map(cupy.asarray, pairs("random", 40, 40, 24, np.float32, 0))
    want = infonce.clip_loss(image, text, scale=4.0)
    stream, freed = cupy.cuda.Stream(non_blocking=True), list[bool]()
    cupy.cuda.Device().synchronize()
    functions = (
        lambda z, **more: infonce.clip_loss(*z, scale=4.0, **more),
        lambda z, **more: infonce.clip_loss_and_grad(*z, scale=4.0, **more).loss,
    )
    for function, options in itertools.product(functions, ({}, {"dims": (24,)})):
        for _ in range(4):
            ends: list[Any] = []  # an event after the call, once it has returned

            def is_read(ends: list[Any] = ends) -> bool:
                return bool(ends[0].done if ends else stream.done)

            with stream:
                loss = function([ForeignArray(z, is_read, freed) for z in (image, text)], **options)
                ends.append(stream.record())
                assert float(loss) == pytest.approx(float(want), rel=1e-6)
    assert len(freed) >= 2 * 4 * 4 - 2  # all but those of the last call
    assert all(freed)


def test_kernels_by_themselves() -> None:
    """The example of docs/api/kernels.md computes the loss."""
    page = Path(__file__).parents[2] / "docs" / "api" / "kernels.md"
    example, raw = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(example, names)
    query, key = names["query"].get(), names["key"].get()
    want = infonce.info_nce_loss(query.astype(np.float64), key.astype(np.float64), scale=0.1)
    assert_loss(names["side"]["loss"].mean(), want, "float32", largest_logit(0.1, query, key))
    exec(raw, {})


def test_many_calls_leak_nothing() -> None:
    args = [cupy.asarray(z) for z in pairs("random", 64, 64, 32, np.float32, 0)]
    for method in METHODS:
        call("clip", *args, scale=10.0, method=method)
    pool = cupy.get_default_memory_pool()
    used, total = pool.used_bytes(), pool.total_bytes()
    for i in range(smaller(1000, 30)):
        call("clip", *args, scale=10.0, method=METHODS[i % 4])
        with pytest.raises(ValueError, match="workspace"):
            call("clip", *args, scale=10.0, method="tiled", workspace=10)
    assert pool.used_bytes() <= used + 4096
    assert pool.total_bytes() <= total + 2**20


def test_options_that_are_refused() -> None:
    z = cupy.ones((4, 2))
    with pytest.raises(ValueError, match=r'"fused" keeps the 4 x 4 logits within workspace = 100 '):
        infonce.clip_loss(z, z, scale=1.0, margin=0.1, method="fused", workspace=100)
    labels = cupy.zeros((4, 2), int)
    with pytest.raises(ValueError, match="metrics: expected one positive a row"):
        infonce.info_nce_loss_and_grad(z, z, labels, scale=1.0, metrics=True)
    with pytest.raises(ValueError, match="metrics: expected False with key_bias, got True"):
        infonce.clip_loss_and_grad(z, z, scale=1.0, key_bias=cupy.zeros(4), metrics=True)
