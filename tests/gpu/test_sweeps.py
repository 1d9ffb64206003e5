"""Sweeps, what Hopper has instead of tiles, against the float64 references."""

import itertools
from typing import Any

import numpy as np
import pytest
from gpu_problems import (
    BFLOAT16,
    EMULATED,
    MISSING,
    check,
    fewer,
    find_dtype,
    gpu_only,
    host,
    run,
    smaller,
)
from host_device import room
from infonce.kernels.epilogues import Sums
from infonce.kernels.gpu import config
from infonce.kernels.problem import LN_2, LOG2_E, SCALES
from judge import (
    KINDS,
    LOSSES,
    arguments,
    judged,
    pairs,
)

import infonce

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels.gpu import recorded
    from infonce.kernels.gpu.device import launcher, recorder
    from infonce.kernels.gpu.device.arguments import NATURAL, sums_fields
    from infonce.kernels.gpu.device.launches import Queue
    from infonce.kernels.gpu.tiled import buffers, lse
    from infonce.kernels.gpu.tiled import gradient as gpu_gradients


SWEEPS = [
    ("float32", "fp32"), ("float32", "tf32"), ("float32", "bf16x3"), ("bfloat16", "bf16"),
    ("float16", "fp16"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "precision"), SWEEPS)
@pytest.mark.parametrize("loss", LOSSES)
def test_widths(loss: str, dtype: str, precision: str) -> None:
    """Rows of one K-slice and of many; query tiles of one thread block and of a cluster,
    whose tiles have 256 rows and columns."""
    widths = (63, 64, 65, 192, 256, 264, 509, 512, 513, 768, 1024, 1025, 1152, 2056)
    for i, d in fewer(enumerate(widths), 4):
        n = smaller(300, 140) if d < 500 else (127, 129, 255, 256, 257, 384, 385, 513)[i % 8]
        args = arguments(loss, *pairs(KINDS[i % 3], n, n, d, find_dtype(dtype), i))
        ref = judged(loss, args, scale=20.0)
        check(run(loss, args, precision, 20.0), ref, args, precision, 20.0)


@pytest.mark.parametrize(("dtype", "precision", "bound"), [
    ("bfloat16", "bf16", 3e-6), ("float16", "fp16", 5e-6), ("float32", "fp32", 5e-7),
])  # fmt: skip
def test_what_tensor_cores_cut_off(dtype: str, precision: str, bound: float) -> None:
    """Positives of cosine 0.7 among random negatives: a sum of 512 products that is short by a
    share of itself moves the loss by that times the logit."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal((1500, 512))
    text = image + rng.standard_normal(image.shape)
    args = tuple((z / np.linalg.norm(z, axis=1, keepdims=True)).astype(find_dtype(dtype))
                 for z in (image, text))  # fmt: skip
    ref = judged("clip", args, scale=1 / 0.07)
    assert run("clip", args, precision, 1 / 0.07).loss == pytest.approx(ref.loss, rel=bound)


@pytest.mark.parametrize(
    ("name", "offload"), [("nt_xent", False), ("clip", False), ("gte", False), ("nt_xent", True)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_thread_blocks_of_one_launch_add_to_different_sums(
    name: str, dtype: str, offload: bool, no_few_logits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If queries are the keys, the sums of columns are those of rows. On a GPU, thread blocks that
    add to the same sums at the same time lose terms."""
    merges = []
    launch_merge = lse.StatisticsRun.launch_merge

    def spy(run: Any, rows: Any, columns: Any, same_rows: bool = False) -> None:
        if not isinstance(run.launcher.queue, recorder.Recorder):  # which has other addresses
            begins = [int(side["sums"]["max"]) // 8 for side in (rows, columns)]
            ends = [begin + side["n"] for begin, side in zip(begins, (rows, columns), strict=True)]
            common = max(0, min(ends) - max(begins)) if columns["n"] else 0
            merges.append(common == rows["n"] == columns["n"] if same_rows else common == 0)
        launch_merge(run, rows, columns, same_rows)

    monkeypatch.setattr(lse.StatisticsRun, "launch_merge", spy)
    rng, n = np.random.default_rng(0), 300
    z = [rng.standard_normal((n, 40)).astype(find_dtype(dtype)) for _ in range(2)]
    getattr(infonce, f"{name}_loss_and_grad")(
        *(z[:1] if name == "nt_xent" else z) if offload else
        map(cupy.asarray, z[:1] if name == "nt_xent" else z),
        scale=9.0, normalize=True, method="auto" if offload else "tiled", offload=offload,
        progress=lambda *_: None,  # without a plan
        workspace=room(64, 40, 2 * n, 2 * n, z[0].itemsize, 4) if offload else 2**20,
    )  # fmt: skip
    assert merges
    assert all(merges)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize(
    "scale", [178.34133533383346, 179.06426606651664]
)  # c - float32(c) > 0, < 0
def test_sums_are_of_logits_although_kernels_round_their_factor(
    scale: float, products: bool
) -> None:
    """A sum may be far from 1, 2^75 here, of exponents that are products times a rounded factor.

    The log-sum-exp of the logits follows, but for the rounding of the sum in float32, and the
    rounding of the factor times the entropy of the softmax: log2(5) at most.
    """
    rng, n = np.random.default_rng(0), 40
    c = scale * LOG2_E
    rounded = float(np.float32(c))
    x = rng.uniform(0.6, 1.0, (n, 5))
    # references in the unit of products, which 2^-12 divides, or multiples of 32 in base 2
    reference = np.full(n, 0.75) if products else np.full(n, 192.0)
    exponents = rounded * x - (rounded * reference if products else reference)[:, None]
    moments = np.exp2(exponents) * x
    partials = np.stack([reference, np.exp2(exponents).sum(axis=1)], axis=1)
    sums = Sums(cupy.full(n, -np.inf), cupy.zeros(n), cupy.zeros(n))
    rows = {
        "pairs": cupy.asarray(partials.astype(np.float32)),
        "moments": cupy.asarray(moments.sum(axis=1).astype(np.float32)),
        "slots": 1, "stride": n, "n": n, "written_tiles": None, "sums": sums_fields(sums),
    }  # fmt: skip
    launcher.Launcher(cupy.cuda.Device(), "fp32", Queue()).launch(
        "vectors.cu", "merge_partial_sums", -(-n // 32), 128,
        {"rows": rows, "columns": rows | {"n": 0}, "same_rows": False,
         "maxima_are_products": products, "exponent_scale": {**NATURAL, "value": scale}},
    )  # fmt: skip
    got, exact = sums.max.get() + np.log2(sums.sum.get()), np.exp2(c * x)
    bound = 2.0**-24 * (1 / LN_2 + np.log2(5))
    np.testing.assert_allclose(got, np.log2(exact.sum(axis=1)), rtol=0, atol=bound)
    mean = (exact * c * x).sum(axis=1) / exact.sum(axis=1)
    np.testing.assert_allclose(sums.moment.get() / sums.sum.get(), mean, rtol=4e-7)


@pytest.mark.parametrize(("dtype", "precision"), [
    ("float32", "fp32"), ("float32", "tf32"), ("bfloat16", "fp32"), ("float64", "fp32"),
])  # fmt: skip
@pytest.mark.parametrize("loss", LOSSES)
def test_features_of_any_size(loss: str, dtype: str, precision: str) -> None:
    """Operands are of float16, which has five bits of exponent: features far from 1 (as far as
    scales go along), those of queries otherwise than those of keys, rows of many sizes, and nothing
    but zeros."""
    n = smaller(300, 140)
    for i, (query_exponent, key_exponent, rows) in fewer(enumerate((
        (-9, -10, 0), (30, 28, 0), (60, -50, 0), (-3, 7, 9), (0, 0, 14)
    )), 3):  # fmt: skip
        image, text = pairs(KINDS[i % 3], n, n, 96, np.float64, i)
        image *= 2.0 ** (query_exponent - np.arange(n) % (rows + 1))[:, None]
        args = arguments(loss, image, text * 2.0**key_exponent)
        args = tuple(z.astype(find_dtype(dtype)) for z in args)
        both = 2 * query_exponent if loss == "nt_xent" else query_exponent + key_exponent
        scale = 20.0 * 2.0**-both
        if not SCALES["fp32"][0] <= scale <= SCALES["fp32"][1]:  # the loss is NaN, as it says
            assert loss == "nt_xent"  # whose scale undoes the size of queries twice: 2^-120
            continue
        ref = judged(loss, args, scale=scale)
        check(run(loss, args, precision, scale), ref, args, precision, scale)
    zeros = tuple(np.zeros_like(z) for z in args)
    assert run(loss, zeros, precision, 20.0).loss == pytest.approx(
        judged(loss, zeros, scale=20.0).loss, rel=1e-6
    )


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_rows_that_are_not_finite_leave_others_alone(precision: str) -> None:
    """An infinite or NaN query does not decide the power of two that brings others into float16's
    range."""
    image, text = pairs("random", 200, 300, 64, np.float32, 0)
    ref = judged("info_nce", (image, text), scale=20.0)
    image[3, 5], image[77, 0] = np.inf, np.nan
    losses = run("info_nce", (image, text), precision, 20.0, gradient=False).losses
    assert np.isnan(losses[[3, 77]]).all()
    rest = np.delete(np.arange(200), [3, 77])
    bound = 20 * {"fp32": 2.0**-20, "tf32": 2.0**-11}[precision]  # of one row: nothing averages out
    assert losses[rest] == pytest.approx(ref.losses[rest], abs=bound)


@pytest.mark.parametrize("d", [40, 520])
@pytest.mark.parametrize(("dtype", "precision"), SWEEPS)
@pytest.mark.parametrize("loss", LOSSES)
def test_few_multiprocessors(
    loss: str, dtype: str, precision: str, d: int, device_with: Any
) -> None:
    """Many query tiles for each thread block, as in a large batch."""
    for multiprocessors, n in smaller(((2, 700), (6, 1500), (8, 1281)), ((2, 390), (4, 300))):
        device_with(multiprocessors=multiprocessors)
        args = arguments(loss, *pairs("partly aligned", n, n, d, find_dtype(dtype), n))
        ref = judged(loss, args, scale=30.0)
        for workspace in (2**28, 2**22):
            out = run(loss, args, precision, 30.0, workspace=workspace)
            check(out, ref, args, precision, 30.0)


@pytest.mark.parametrize("loss", ["info_nce", "clip"])
def test_sums_of_few_queries_run_at_once(
    loss: str, device: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Products with float32 have short sums. Several run at once, each with a copy of dQ."""
    monkeypatch.setitem(config.MAX_SUM_TERMS, "fp16x3", 64)
    request.addfinalizer(config.choose_dq_copies.cache_clear)
    m, n, d = (130, 700, 72) if loss == "info_nce" else (130, 130, 72)
    assert config.choose_dq_copies((m, n, d), "fp16x3", device.multiprocessors, 2**28) > 1
    args = arguments(loss, *pairs("partly aligned", m, n, d, np.float32, 1))
    ref = judged(loss, args, scale=14.0)
    check(run(loss, args, "fp32", 14.0), ref, args, "fp32", 14.0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_narrow_rows(
    dtype: str,
    precision: str,
    normalize: bool,
    hopper: None,
    device_with: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NT-Xent whose dL/dx stays in registers: widths of one and two K-slices, sizes around the
    edges of query tiles, few and many query tiles for each thread block, gradients of keys that
    several blocks add to, ids."""
    passes: list[int] = []
    block = gpu_gradients.SoftmaxRun.add_in_registers

    def counted(self: Any, *args: Any) -> None:
        passes.append(1)
        block(self, *args)

    monkeypatch.setattr(gpu_gradients.SoftmaxRun, "add_in_registers", counted)
    cases = itertools.product((1, 8, 63, 64, 65, 127, 128), ((2, 130), (3, 257), (8, 1281)))
    for i, (d, (multiprocessors, n)) in fewer(enumerate(cases), 2):
        n = min(n, smaller(n, 300))
        device_with(multiprocessors=multiprocessors)
        (z,) = arguments("nt_xent", *pairs(KINDS[i % 4], n, n, d, find_dtype(dtype), i))
        ids = np.random.default_rng(i).integers(0, n // 2, 2 * n) if i % 3 == 0 else None
        options: Any = {"normalize": normalize, "ids": ids}
        ref = judged("nt_xent", (z,), scale=14.0, **options)
        for workspace, grad_dtype in ((2**28, None), (2**28, np.float32), (2**18, None)):
            passes.clear()
            out = run("nt_xent", (z,), precision, 14.0, workspace=workspace,
                      grad_dtype=grad_dtype, **options)  # fmt: skip
            assert passes
            if not normalize:
                check(out, ref, (z,), precision, 14.0)
            else:
                assert out.loss == pytest.approx(ref.loss, rel=1e-4)
            again = run("nt_xent", (z,), precision, 14.0, workspace=workspace,
                        grad_dtype=grad_dtype, **options)  # fmt: skip
            assert np.array_equal(out.grads["features"], again.grads["features"])


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), [*SWEEPS, ("float64", "fp64")])
@pytest.mark.parametrize("loss", ["clip", "nt_xent"])
def test_hardest_negatives(
    loss: str, dtype: str, precision: str, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics want rows' maxima, wherever in a row they are; sums alone would do with less."""
    monkeypatch.setattr(config.precision, "PORTABLE", portable)
    n, scale = smaller(900, 300), 14.0
    image, text = pairs("random", n, n, 64, np.float64, 3)
    text = text + np.arange(n)[:, None] / n * image[0]  # higher from tile to tile
    args = arguments(loss, image.astype(find_dtype(dtype)), text.astype(find_dtype(dtype)))
    stats = run(loss, args, precision, scale, ranks=True, gradient=False).solution.statistics
    x = scale * args[0].astype(np.float64) @ args[-1].astype(np.float64).T
    m = len(x)
    if loss == "nt_xent":
        np.fill_diagonal(x, -np.inf)
    x[np.arange(m), (np.arange(m) + m // 2) % m if loss == "nt_xent" else np.arange(m)] = -np.inf
    tolerance = 2e-3 if precision == "tf32" else 1e-4
    np.testing.assert_allclose(LN_2 * host(stats.rows.max), x.max(1), rtol=0,
                               atol=tolerance * np.abs(x[np.isfinite(x)]).max())  # fmt: skip


def test_more_tiles_than_lanes_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 1024 tiles of columns in one launch."""
    args = arguments("clip", *pairs("partly aligned", 131300, 131300, 16, BFLOAT16, 0))
    out = run("clip", args, "bf16", 5.0, gradient=False, workspace=2**30)
    monkeypatch.setattr(config.precision, "PORTABLE", True)
    ref = run("clip", args, "bf16", 5.0, gradient=False, workspace=2**30)
    np.testing.assert_allclose(out.losses, ref.losses, rtol=1e-5, atol=1e-5)
    assert out.loss == pytest.approx(ref.loss, rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("portable", "d"), [(False, 64), (False, 600), (True, 64)])
def test_logits_far_apart(
    loss: str, portable: bool, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile's rows or columns lie hundreds of powers of 2 from those of the tile before, from each
    other's, and from what was expected of them."""
    monkeypatch.setattr(config.precision, "PORTABLE", portable)
    rng = np.random.default_rng(0)
    n = smaller(900, 390)
    for kind in ("rising", "one high", "lengths"):
        image, text = pairs("random", n, n, d, np.float64, 1)
        if kind == "rising":  # every tile is above the ones before
            text = text + image.mean(0) + np.arange(n)[:, None] / n * image[0]
            image = image + image[0]
        elif kind == "one high":  # rows with copies of themselves among the others
            text[rng.integers(0, n, 9)] = image[rng.integers(0, n, 9)]
        else:
            image = image * np.exp(rng.standard_normal((n, 1)))
            text = text * np.exp(rng.standard_normal((n, 1)))
        args = arguments(loss, image.astype(BFLOAT16), text.astype(BFLOAT16))
        for scale in fewer((1.0, 100.0, 200.0), 2):
            ref = judged(loss, args, scale=scale)
            check(run(loss, args, "bf16", scale), ref, args, "bf16", scale)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_portable_kernels(loss: str, multiprocessors: int, device_with: Any) -> None:
    """The tiled kernels of other cards, where sweeps would run: a thread block has several tiles,
    or one."""
    device_with(multiprocessors=multiprocessors, portable=True)
    for (dtype, precision), (m, n, d) in fewer(
        itertools.product(SWEEPS, ((129, 257, 16), (300, 300, 70))), 4
    ):
        args = arguments(loss, *pairs("random", m, n, d, find_dtype(dtype), 0))
        ref = judged(loss, args, scale=20.0)
        check(run(loss, args, precision, 20.0), ref, args, precision, 20.0)


@pytest.mark.parametrize(
    ("loss", "dtype", "precision", "wrt"),
    [
        *itertools.product(["clip", "info_nce"], ["bfloat16"], ["bf16"], [None]),
        *itertools.product(["clip", "info_nce"], ["float32"], ["fp16x3"], [None]),
        ("info_nce", "float32", "fp16x3", ("query",)),  # with bf16, one pass computes dQ
    ],
)
@pytest.mark.parametrize("kind", ["random", "rising", "lengths"])
def test_cached_exponentials(
    loss: str, kind: str, dtype: str, precision: str, wrt: tuple[str] | None, hopper: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Cached exponentials: of all logits in one block, of all on either side of the
    border of accumulators that overlay their destination, of the first columns. Query tiles
    whose logits lie too far apart are computed again."""
    calls: list[Any] = []
    make = buffers.Buffers.__init__

    def noted(self: Any, *args: Any) -> None:
        make(self, *args)
        calls.append(self)

    monkeypatch.setattr(buffers.Buffers, "__init__", noted)
    monkeypatch.setattr(recorded, "compile_kernels", lambda *_: None)  # which makes them too
    monkeypatch.setattr(config.workspace, "MIN_CACHED_COLUMNS", 256)
    asked = {"fp16x3": "fp32"}.get(precision, precision)
    monkeypatch.setattr(config, "block_sizes_for_all_keys", lambda *_: None)  # two passes
    uncached_tiles = 0
    # from the least number of features that has a cache, which is larger if dK is not wanted
    shapes = ((128, 128, 640 if wrt else 520), (258, 386, 1024), (700, 1301, 640 if wrt else 600))
    if EMULATED:
        shapes = ((258, 386, 1024 if precision == "bf16" else 640 if wrt else 330),)
    for i, (m, n, d) in enumerate(shapes):
        if loss == "clip":
            m = n
        image, text = pairs("random", m, n, d, np.float64, i)
        if kind == "rising":  # every tile is above the ones before
            text = text + np.arange(n)[:, None] / n * image[0]
            image = image + image[0]
        elif kind == "lengths":
            image = image * np.exp(np.random.default_rng(i).standard_normal((m, 1)))
        args = arguments(loss, image.astype(find_dtype(dtype)), text.astype(find_dtype(dtype)))
        for scale in fewer((1.0, 14.0, 200.0) if kind == "random" else (200.0, 14.0, 1.0), 1):
            ref = judged(loss, args, scale=scale)
            kept: set[tuple[int, bool]] = set()  # columns, and whether accumulators are overlaid
            workspace = 2**28
            while True:
                calls.clear()
                out = run(loss, args, asked, scale, workspace=workspace, wrt=wrt)
                check(out, ref, args, asked, scale)
                (call,) = calls
                assert call.precision == precision
                if call.cached is None:
                    break
                uncached = int(call.cached.uncached_tiles.sum())
                if kind == "random" and scale == 1:  # no logits lie far apart
                    assert uncached == 0
                uncached_tiles += uncached
                dk = call.schedule.passes[-1].dk_accumulator
                kept.add((call.cached.columns, dk is not None and dk.overlaid > 0))
                workspace = min(workspace, call.schedule.workspace) * 9 // 10
            columns = {cached_columns for cached_columns, _ in kept}
            assert max(columns) == n
            assert min(columns) < n or n < 1301
            assert (precision == "bf16" and n >= 256) == ((n, True) in kept)
    if kind == "lengths":
        assert uncached_tiles > 0
