"""Numbers at the ends of their range: scales, features, upstream gradients, workspaces. Right
within the bounds that all results are held to, or refused by name; and never a warning (which is an
error in these tests)."""

import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.kernels.cpu.loops.tile_ops import softmax_gradient
from infonce.kernels.grid import has_few_blocks, least_block_side
from infonce.kernels.problem import SCALES
from judge import (
    DTYPES,
    GRAD_BOUND,
    LOSS_BOUND,
    LOSSES,
    ROUNDOFF,
    arguments,
    assert_grad,
    assert_loss,
    judged,
    largest_logit,
    pairs,
)

import infonce
from infonce import reference

METHODS = ["naive", "fused", "tiled"]


def call(loss: str, *args: Any, **options: Any) -> infonce.LossAndGrad:
    return getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)


def hot(dtype: Any, size: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Rows with one feature, a power of two: products are exact, and many are ties."""
    rows = np.eye(4)[[0, 1, 2, 3, 0, 1]] * size
    return rows.astype(dtype), rows[::-1].astype(dtype)


# --- scales ---------------------------------------------------------------------------------------

RUNGS = [-320, -308, *range(-300, -20, 40), *range(-20, 20, 2), 1, *range(20, 301, 40), 308]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_temperature_is_right_or_refused(loss: str, method: str, dtype: Any) -> None:
    wide = "fp64" if dtype is np.float64 else "fp32"
    least, most = SCALES[wide]
    name = np.dtype(dtype).name
    right = 0
    for kind in ("random", "aligned", "identical rows", "hot"):
        args = arguments(loss, *(hot(dtype) if kind == "hot" else pairs(kind, 6, 6, 5, dtype, 1)))
        longest = max(np.linalg.norm(z.astype(np.float64), axis=1).max() for z in args)
        for k in RUNGS:
            temperature = float(f"1e{k}")
            scale = 1 / temperature
            options: dict[str, Any] = {"method": method, "reduction": "sum",
                                       "grad_dtype": np.float64}  # fmt: skip
            if not least <= scale <= most:
                with pytest.raises(ValueError, match=r"^temperature: expected a number") as refused:
                    call(loss, *args, temperature=temperature, **options)
                assert f"[{1 / most!r}, {1 / least!r}]" in str(refused.value)
                assert f"got {temperature!r}" in str(refused.value)
                continue
            out = call(loss, *args, temperature=temperature, **options)
            right += 1
            ref = judged(loss, args, scale=scale, weights=np.ones(len(args[0])))
            # logits of exact products have no rounding that matters, whatever their size
            logit = 1.0 if kind == "hot" else largest_logit(scale, args[0], args[-1])
            assert_loss(out.loss, ref.loss, name, logit)
            terms = len(args[0]) ** (1 + (loss == "siglip"))
            for field, got in out.grads._asdict().items():
                want = ref.grads[field]
                if want is None:
                    continue
                factor = 1.0 if field in ("scale", "bias") else scale
                # probabilities sum to 1, and so do those of positives
                most_of_it = 4 * terms * factor * (1.0 if field == "bias" else longest**2)
                assert np.abs(got).max() <= most_of_it
                exact = "float32" if dtype is not np.float64 else "float64"
                size = None if kind == "hot" else np.linalg.norm(want) + 0.1 * most_of_it
                assert_grad(got, want, exact, logit, size)
    assert right > 4 * 10


@pytest.mark.parametrize("name", ["scale", "temperature"])
@pytest.mark.parametrize("compute", ["fp32", "fp64"])
def test_both_ends_of_the_scales(compute: str, name: str) -> None:
    args = hot(np.float32)
    for end, beyond in zip(SCALES[compute], (0.999, 1.001), strict=True):
        for method in METHODS:
            given_, outside = end, end * beyond
            if name == "temperature":
                given_, outside = 1 / given_, 1 / outside
            options: dict[str, Any] = {"precision": compute, "method": method}
            out = infonce.clip_loss_and_grad(*args, **{name: given_}, **options)
            assert np.isfinite(out.loss)
            assert np.isfinite(out.grads.image).all()
            kind = {"fp32": "float32", "fp64": "float64"}[compute]
            for value in (outside, np.float64(outside), np.array(outside)):
                with pytest.raises(
                    ValueError, match=rf"^{name}: expected a number in .* {kind}, got"
                ):
                    infonce.clip_loss(*args, **{name: value}, **options)


def test_the_reference_is_right_at_scales_that_others_refuse() -> None:
    """Against the softmax of exact products: an argmax, shared by ties."""
    query, key = hot(np.float64)
    x = query @ key.T
    top = x == x.max(axis=1, keepdims=True)
    p = top / top.sum(axis=1, keepdims=True)
    for scale in (1e3, 1e18, 1e100, 1e300):
        out = reference.info_nce(query, key, scale=scale)
        want = np.log(top.sum(axis=1)) + scale * (x.max(axis=1) - np.diagonal(x))
        np.testing.assert_allclose(out.losses, want, rtol=1e-15)
        dx = (p - np.eye(6)) / 6
        np.testing.assert_allclose(out.grads["query"], scale * (dx @ key), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_of_any_size(loss: str, method: str, dtype: Any, tile_sides: Any) -> None:
    """The features are long instead: the same exponents, and no scale to refuse. Of products that
    are exact the results have all their digits; of others, the largest are the same."""
    tile_sides(4, 4)
    name = np.dtype(dtype).name
    for power in (-20, 0, 10, 13, 20, 27, 40, 55, 62, 200, 500)[: 9 if dtype is np.float32 else 11]:
        for scale in (1.0, 3.0):
            for kind, rows in (("hot", hot(dtype)), ("random", pairs("random", 6, 6, 4, dtype, 1))):
                args = arguments(loss, *(z * dtype(2.0**power) for z in rows))
                ref = judged(loss, args, scale=scale)
                out = call(loss, *args, scale=scale, method=method)
                np.testing.assert_allclose(out.loss, ref.loss, rtol=20 * LOSS_BOUND[name])
                for field, got in out.grads._asdict().items():
                    want = np.asarray(ref.grads[field])
                    if ref.grads[field] is None or (kind == "random" and 0 < power < 40):
                        continue  # neither a softmax nor yet an argmax: what rounding makes of it
                    size = np.abs(want).max() or 1.0
                    error = np.abs(got / size - want / size).max()
                    assert error <= 20 * GRAD_BOUND[name], (power, scale, kind, field)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_probability_is_no_subnormal_number(dtype: Any) -> None:
    """BLAS takes a hundred times as long over those."""
    x = np.linspace(-2000, 0, 4001).astype(dtype).reshape(1, -1)
    p = x.copy()
    factor = np.full(1, 2.0**-20, dtype)
    softmax_gradient(p, 1.0, np.zeros(1, dtype), factor, np.zeros(1, np.int64))
    assert ((p == 0) | (p >= np.finfo(dtype).tiny)).all()
    large = x > -100
    want = np.exp2(x[large].astype(np.float64)) * 2.0**-20
    np.testing.assert_allclose(p[large], want, rtol=2e-7)
    assert (p[x < -1900] == 0).all()


# --- nothing but values and errors ----------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_warning_leaves(loss: str, dtype: Any, method: str, tile_sides: Any) -> None:
    tile_sides(8, 8)
    largest = float(ml_dtypes.finfo(dtype).max)
    for size in (largest, largest**0.5, largest**-0.5, np.inf, np.nan):
        args = arguments(loss, *pairs("random", 40, 40, 3, dtype, 0))
        with np.errstate(over="ignore"):
            args = tuple(z * np.asarray(size, dtype) for z in args)
        refused = dtype is np.float64 and 1e100 < size < np.inf  # such logits are no numbers
        for normalize in (True,) if refused else (False, True):
            for grad_out in (1.0, 1e300, -1e-300, np.array(3e38)):
                for grad_dtype in (None, np.float16):
                    call(loss, *args, scale=1e5, method=method, normalize=normalize,
                         grad_out=grad_out, grad_dtype=grad_dtype)  # fmt: skip
        if refused:
            with pytest.raises(ValueError, match=r"normalize=True, rows may have any norm$"):
                call(loss, *args, scale=1.0, method=method)
        elif loss == "siglip":
            for bias in (1e308, -1e308, 1e-308, -3e38):
                call(loss, *args, bias, scale=1e-10, method=method)
        else:
            call(loss, *args, scale=3.0, method=method, metrics=True)
        judged(loss, args, scale=1e300, normalize=True)
    call(loss, *args, scale=2.0, method=method, reduction="none", grad_out=np.full(
        len(args[0]), 1e308))  # fmt: skip


def test_the_callers_settings_of_warnings_stay() -> None:
    args = pairs("random", 6, 6, 3, np.float32, 0)
    with np.errstate(over="raise", invalid="print"):
        before = np.geterr()
        infonce.clip_loss_and_grad(*args, scale=3.0)
        with pytest.raises(ValueError, match="scale"):
            infonce.clip_loss(*args, scale=1e30)
        assert np.geterr() == before


# --- threads that take subnormal numbers for 0, as JAX's do ---------------------------------------

NONE = np.full(6, -1)
WITHOUT_POSITIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "other classes": ("sup_con", {"labels": np.arange(6)}),
    "no classes": ("sup_con", {"labels": NONE}),
    "decoupled": ("sup_con", {"labels": NONE, "decoupled": True}),
    "no labels": ("info_nce", {"labels": NONE}),
    "no labels of sets": ("info_nce", {"labels": np.full((6, 2), -1)}),
    "weighted": ("info_nce", {"labels": NONE, "weights": np.ones(6)}),
    "weights only of rows without positives": (
        "info_nce", {"labels": np.array([-1, 1, 2, 3, 4, 5]), "weights": np.eye(6)[0]},
    ),
}  # fmt: skip


@pytest.fixture
def flushed() -> Iterator[Any]:
    """torch, in whose thread numbers below the normal ones are 0."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot take subnormal numbers for 0")
    yield torch
    torch.set_flush_denormal(False)


@pytest.mark.extras
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("method", [*METHODS, "auto"])
@pytest.mark.parametrize("name", WITHOUT_POSITIVES)
def test_no_positive_is_a_loss_of_zero(
    flushed: Any, name: str, method: str, reduction: str
) -> None:
    loss, options = WITHOUT_POSITIVES[name]
    args = pairs("random", 6, 6, 4, np.float32, 0)[: 1 + (loss == "info_nce")]
    got = call(loss, *args, scale=3.0, method=method, reduction=reduction, **options)
    for number in (got.loss, *got.grads):
        assert not number.any()


@pytest.mark.extras
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e-20, 0.0])
@pytest.mark.parametrize("method", [*METHODS, "auto"])
@pytest.mark.parametrize("loss", [*LOSSES, "sup_con", "gte", "distill"])
def test_subnormal_numbers_may_be_zeros(
    flushed: Any, loss: str, method: str, size: float, normalize: bool
) -> None:
    """Sums that underflow, and rows of zeros: no more than subnormal numbers is lost."""
    args = [z * np.float32(size) for z in pairs("random", 6, 6, 4, np.float32, 0)]
    args[0][2] = 0
    if loss == "distill":
        args = [*args, *args[::-1]]
    elif loss == "sup_con":
        args = [args[0], np.arange(6) // 2]
    elif loss != "gte":
        args = list(arguments(loss, *args))
    results = []
    for flushes in (True, False):
        flushed.set_flush_denormal(flushes)
        results.append(call(loss, *args, scale=3.0, method=method, normalize=normalize))
    rounding = {"rtol": 8 * ROUNDOFF["float32"], "atol": 64 * float(np.finfo(np.float32).tiny)}
    for got, want in zip(*((each.loss, *each.grads) for each in results), strict=True):
        if want is not None:
            assert np.isfinite(want).all()
            np.testing.assert_allclose(got, want, **rounding)


@pytest.mark.extras
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_subnormal_weights_are_zeros_or_refused(flushed: Any, loss: str, method: str) -> None:
    args = arguments(loss, *pairs("random", 6, 6, 4, np.float32, 0))
    weights = np.full(len(args[0]), 5e-324)
    with pytest.raises(ValueError, match=r"^weights: expected a positive sum, got only zeros$"):
        call(loss, *args, scale=3.0, method=method, weights=weights)
    weights[0] = 1.0
    got = call(loss, *args, scale=3.0, method=method, weights=weights)
    want = call(loss, *args, scale=3.0, method=method, weights=weights.round())
    np.testing.assert_array_equal(got.loss, want.loss)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("loss", LOSSES)
@given(
    m=st.sampled_from([1, 2, 9, 100, 700]), n=st.sampled_from([1, 2, 30, 1500]),
    d=st.sampled_from([1, 16, 200]), normalize=st.booleans(), threads=st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=25)
def test_a_workspace_is_refused_with_the_least(
    loss: str, dtype: Any, m: int, n: int, d: int, normalize: bool, threads: int,
) -> None:  # fmt: skip
    """The least has few blocks, and what it gives is right; it is the same for any threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFONCE_NUM_THREADS", str(threads))
        m, n = (m, n) if loss == "info_nce" and m <= n else (min(m, n),) * 2
        args = arguments(loss, *pairs("partly aligned", m, n, d, dtype, 0))
        options: dict[str, Any] = {"scale": 5.0, "normalize": normalize, "method": "tiled"}
        with pytest.raises(ValueError, match="workspace: expected at least") as refused:
            call(loss, *args, workspace=1, **options)
        match = re.search(
            r"at least (\d+) bytes for (\d+) x (\d+) logits.*got 1$", str(refused.value)
        )
        assert match is not None
        least, rows, columns = map(int, match.groups())
        assert (rows, columns) == (len(args[0]), len(args[-1]))
        blocks: dict[str, int] = {}
        got = call(loss, *args, workspace=least, **options,
                   progress=lambda phase, done, total: blocks.update({phase: total}))  # fmt: skip
        assert max(blocks.values()) <= 2 * 4 * math.sqrt(rows * columns) + 2
        want = call(loss, *args, **options)
        tolerance = {"rtol": 2e-6 if dtype is np.float16 else 1e-12}
        np.testing.assert_allclose(got.loss, want.loss, **tolerance)
        if least > 1:
            with pytest.raises(ValueError, match=f"at least {least} bytes"):
                call(loss, *args, workspace=least // 2, **options)


def test_what_few_blocks_are() -> None:
    for m, n in ((1, 1), (1, 10**6), (1500, 1500), (10**6, 10**6), (7, 0)):
        side = least_block_side(m, n)
        assert has_few_blocks(m, n, side, side)
        assert side == 1 or not has_few_blocks(m, n, side - 1, side - 1)
    assert has_few_blocks(100, 100, 5, 5)
    assert not has_few_blocks(100, 100, 4, 5)  # 500 blocks
    assert not has_few_blocks(1, 100, 1, 1)  # 100, of a 10 x 10 matrix that has 20 rows and columns


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_no_memory_says_what_to_do() -> None:
    code = (
        "import resource, numpy as np, infonce\n"
        "z = np.full((20_000, 8), 0.35, np.float32)\n"
        "infonce.clip_loss_and_grad(z[:9], z[:9], scale=1.0, method='tiled')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))\n"
        "for method, size in (('tiled', 2**31), ('auto', 2**31), ('naive', 2**28)):\n"
        "    try:\n"
        "        infonce.clip_loss_and_grad(z, z, scale=1.0, method=method, workspace=size)\n"
        "    except MemoryError as error:\n"
        "        print(method, error)\n"
        "infonce.clip_loss_and_grad(z[:2000], z[:2000], scale=1.0, workspace=2**24)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert not done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for method in ("tiled", "auto"):
        assert lines[method].endswith("; use a workspace below 2147483648 bytes")
    assert lines["naive"].endswith('; use method="tiled"')


# --- anything at once -----------------------------------------------------------------------------

magnitudes = st.one_of(
    st.sampled_from([0.0, 1.0, 1e-300, 1e300]),
    st.integers(-300, 300).map(lambda k: float(f"1e{k}")),
    st.floats(-3.0, 3.0).map(lambda k: 10.0**k),
)
numbers = st.builds(lambda size, sign: size * sign, magnitudes, st.sampled_from([1.0, -1.0]))


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=150)
@given(
    method=st.sampled_from(["auto", *METHODS]), dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 40), d=st.integers(1, 9), size=magnitudes, scale=numbers,
    temperature=st.booleans(), bias=numbers, grad_out=numbers, normalize=st.booleans(),
    grad_dtype=st.sampled_from([None, *DTYPES]), reduction=st.sampled_from(["mean", "sum", "none"]),
    workspace=st.one_of(st.integers(1, 2**18), st.just(2**28)), zeros=st.booleans(),
    threads=st.sampled_from(["1", "3"]),
)  # fmt: skip
def test_anything_is_a_value_or_an_error_of_ours(
    loss: str, method: str, dtype: Any, rows: int, d: int, size: float, scale: float,
    temperature: bool, bias: float, grad_out: float, normalize: bool, grad_dtype: Any,
    reduction: str, workspace: int, zeros: bool, threads: str, tile_sides: Any,
) -> None:  # fmt: skip
    tile_sides(16, 8)
    args = arguments(loss, *pairs("partly aligned", rows, rows, d, np.float64, rows))
    with np.errstate(over="ignore", under="ignore"):
        args = tuple((z * size).astype(dtype) for z in args)
    if zeros:
        args[0][rows // 2] = 0.0
    options: dict[str, Any] = {
        "temperature" if temperature else "scale": scale, "method": method, "normalize": normalize,
        "grad_out": grad_out, "grad_dtype": grad_dtype, "reduction": reduction,
        "workspace": workspace,
    }  # fmt: skip
    more = (bias,) if loss == "siglip" else ()
    refused = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFONCE_NUM_THREADS", threads)
        try:
            out = call(loss, *args, *more, **options)
        except ValueError as error:
            refused = str(error)
    if refused:
        too_large = dtype is np.float64 and size > 1e100 and not normalize
        ours = rf"(scale|temperature|workspace|method{'|image|text|query|features' * too_large}): "
        assert re.match(ours, refused), refused
        return
    assert out.loss.shape == ((len(args[0]),) if reduction == "none" else ())
    if all(1e-3 < abs(number) < 1e3 for number in (size, scale, bias)):
        assert np.isfinite(out.loss).all()


def test_calls_in_threads_are_silent_too() -> None:
    args = tuple(z * np.float32(1e30) for z in pairs("random", 50, 50, 4, np.float32, 0))
    caught: list[BaseException] = []

    def work() -> None:
        try:
            infonce.clip_loss_and_grad(*args, scale=1e5, normalize=True, grad_out=1e300)
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not caught
