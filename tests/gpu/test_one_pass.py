"""One pass over the pairs, for LiT and InfoNCE, against the float64 references."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_problems import (
    BFLOAT16,
    GRAD_BOUND,
    MISSING,
    TEMPERATURES,
    check,
    fewer,
    find_dtype,
    gpu_only,
    host,
    run,
    smaller,
)
from infonce.kernels.gpu import config
from judge import KINDS, arguments, assert_grad, assert_loss, judged, largest_logit, pairs
from reference_problems import each_once

import infonce

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels.gpu import recorded
    from infonce.kernels.gpu.tiled import one_pass

ONE_PASS = [("float32", "bf16x3"), ("bfloat16", "bf16")]
BOTH = ("query", "key")
Limit = Callable[[int, bool], None]


@pytest.fixture
def blocks_swept(hopper: None, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that gets, for each block of one pass, the query tiles that were swept twice."""
    swept: list[list[int]] = []
    compute_block = one_pass.OnlineRun.compute_block

    def watched(self: Any, rows: slice, columns: slice, a: int, b: int) -> None:
        compute_block(self, rows, columns, a, b)
        query_tiles = -(-(rows.stop - rows.start) // 128)
        swept.append(np.flatnonzero(host(self.repeated_tiles[:query_tiles])).tolist())

    monkeypatch.setattr(one_pass.OnlineRun, "compute_block", watched)
    monkeypatch.setattr(recorded, "compile_kernels", lambda *_: None)  # it records too
    return swept


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Sets how many rows blocks of all keys have at most (0: any number), and whether dK's first
    accumulators overlay it."""
    chosen: list[Any] = [0, False]
    unlimited = config.block_sizes_for_all_keys

    def blocking(shape: tuple[int, int, int], needs: config.Needs, *room: int) -> Any:
        sizes = unlimited(shape, needs, *room)
        if sizes is None or not chosen[0]:
            return sizes
        (_, n, d), (rows, overlaid) = shape, chosen
        border = needs.overlay_border(n, d) if overlaid and needs.dk_in_workspace else 0
        cut = replace(sizes[1], rows=min(sizes[1].rows, rows), overlaid=border)
        return cut, cut, sizes[2]

    def choose(rows: int, overlaid: bool) -> None:
        chosen[:] = rows, overlaid

    monkeypatch.setattr(config, "block_sizes_for_all_keys", blocking)
    return choose


def for_tensor_cores(z: np.ndarray, dtype: str) -> Any:
    """Features whose products are exact: errors are those of sums and gradient blocks."""
    return z.astype(BFLOAT16).astype(find_dtype(dtype))


def sizes(i: int, dtype: str) -> tuple[int, int, int]:
    """M, N and D of case i of 16: rows of i K-slices, sizes around the tiles' edges."""
    k_slice = 128 // find_dtype(dtype).itemsize
    d = k_slice * i + (-1, 0, -k_slice + 1)[i % 3]
    return *((127, 385), (129, 128), (300, 257), (640, 901))[i % 4], d


@pytest.mark.parametrize(("loss", "wrt"), [
    ("lit", ("text",)), ("info_nce", ("query",)), ("info_nce", BOTH), ("info_nce", ("key",)),
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "precision"), ONE_PASS)
def test_one_pass(
    dtype: str, precision: str, loss: str, wrt: tuple[str, ...], blocks_swept: list[list[int]],
    limit: Limit,
) -> None:  # fmt: skip
    """Rows of 1 to 16 K-slices, sizes around the tiles' edges, every temperature. Without dK,
    several row blocks and column blocks, and gradients that accumulate in the workspace or in
    place. With dK, one block of all keys, or several, which add to dK where it is, in the
    workspace, or in both."""
    for i in smaller(range(1, 17), (1, 6)):
        m, n, d = sizes(i, dtype)
        scale = 1 / TEMPERATURES[i % 4]
        args = pairs(KINDS[i % 4], m, n, d, np.float64, i)
        args = arguments(loss, *(for_tensor_cores(z, dtype) for z in args))
        options: Any = {}
        if loss == "info_nce":
            options["labels"] = np.random.default_rng(i).integers(0, n, m)
        ref = judged(loss, args, scale=scale, **options)
        options |= {"wrt": wrt, "grad_dtype": (None, np.float32)[i % 2]}
        for most in (0, 128, 384) if "key" in wrt else (2**28, 100_000 + 500 * d):
            blocks_swept.clear()
            if "key" in wrt:
                limit(most, i % 4 < 2)
                out = run(loss, args, precision, scale, **options)
                assert len(blocks_swept) == (-(-m // most) if most else 1)
            else:
                out = run(loss, args, precision, scale, workspace=most, **options)
                assert len(blocks_swept) > (i % 4 == 3 and most < 2**28)
            check(out, ref, args, "bf16", scale, call=f"{m, n, d} by {most}")


@pytest.mark.parametrize("options", [
    {}, {"weighted": True}, {"margin": 0.1, "hardness": 3.0, "weighted": True}, {"decoupled": True},
    {"false_negative_margin": 0.1}, {"key_bias": True, "weighted": True, "normalize": True},
    {"label_smoothing": 0.3, "single": True},
    {"label_smoothing": 0.3, "single": True, "normalize": True}, {"positive_ids": 40},
    {"positive_ids": 600}, {"positive_ids": 90, "label_smoothing": 0.3},
    {"positive_ids": 90, "normalize": True}, {"positive_ids": 90, "decoupled": True},
], ids="-".join)  # fmt: skip
@pytest.mark.parametrize("wrt", [BOTH, ("query",)])
@pytest.mark.parametrize(("dtype", "precision"), ONE_PASS)
def test_positives_and_linear_terms_in_one_pass(
    dtype: str, precision: str, wrt: tuple[str, ...], options: dict[str, Any],
    blocks_swept: list[list[int]], limit: Limit,
) -> None:  # fmt: skip
    """Rows with several positives, with one, and with none; in several blocks, too. Classes of
    a few positives, or mostly of one."""
    m, n, d, scale = 300, 520, 72, 14.0
    args = tuple(for_tensor_cores(z, dtype) for z in pairs("random", m, n, d, "f8", 3))
    rng, options = np.random.default_rng(0), dict(options)
    labels = each_once(rng.integers(-1, n, (m, 4)))
    labels[::9] = -1
    if "positive_ids" in options:
        most = options["positive_ids"]
        options["positive_ids"] = rng.integers(0, most, m), rng.integers(0, most, n)
    else:
        options["labels"] = labels[:, 0] if options.pop("single", False) else labels
    if options.pop("weighted", False):
        weights = rng.uniform(0.1, 2, labels.shape) * (rng.random(labels.shape) < 0.8)
        options["label_weights"] = weights
    if "key_bias" in options:
        options["key_bias"] = rng.uniform(-2, 2, n)
    ref = judged("info_nce", args, scale=scale, **options)
    on_device = dict(options)
    for name, value in options.items():
        if isinstance(value, np.ndarray):
            on_device[name] = cupy.asarray(value)
        elif isinstance(value, tuple):
            on_device[name] = tuple(map(cupy.asarray, value))
    for rows in (0, 128):
        limit(rows, False)
        blocks_swept.clear()
        got = infonce.info_nce_loss_and_grad(
            *map(cupy.asarray, args), scale=scale, precision=precision, wrt=(*wrt, "scale"),
            method="tiled", progress=lambda *_: None, **on_device,
        )  # fmt: skip
        assert blocks_swept
        logit = largest_logit(scale + options.get("hardness", 0.0), *args) + 3.0
        assert_loss(float(got.loss), ref.loss, "bfloat16", logit)
        for name in (*wrt, "scale"):
            assert_grad(host(getattr(got.grads, name)), ref.grads[name], "bfloat16", logit)


@pytest.mark.parametrize(("dtype", "precision"), ONE_PASS)
def test_workspace_of_one_pass_with_keys(
    dtype: str, precision: str, blocks_swept: list[list[int]]
) -> None:
    """Two blocks in 14 MiB, or in 28 of float32. Two passes in 6 MiB: blocks would have too few
    rows."""
    m, n, d = 2300, 4104, 256
    args = tuple(for_tensor_cores(z, dtype) for z in pairs("partly aligned", m, n, d, "f8", 0))
    ref = judged("info_nce", args, scale=14.0)
    arrays = [cupy.asarray(z) for z in args]
    outs = {"query": cupy.empty_like(arrays[0]), "key": cupy.empty_like(arrays[1])}
    for mib, blocks in ((7 * arrays[0].itemsize, 2), (6, 0)):
        workspace = mib * 2**20
        options: Any = {"workspace": workspace, "outs": outs}
        run("info_nce", arrays, precision, 14.0, **options)
        blocks_swept.clear()
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            out = run("info_nce", arrays, precision, 14.0, **options)
            assert pool.total_bytes() <= workspace + 64 * 8 * (m + n) + 2**20
        assert len(blocks_swept) == blocks
        check(out, ref, args, "bf16", 14.0)


@pytest.mark.parametrize("rows", [0, 128])
@pytest.mark.parametrize("normalize", [False, True])
def test_upstream_gradients_of_one_pass_with_keys(
    normalize: bool, rows: int, blocks_swept: list[list[int]], limit: Limit
) -> None:
    """Upstream gradients may have any size and sign, or be 0: dK has one unit for all rows."""
    m, n, d, scale = 300, 520, 64, 14.0
    query, key = (for_tensor_cores(z, "float32") for z in pairs("random", m, n, d, "f8", 5))
    labels = np.random.default_rng(0).integers(0, n, m)
    wide = [z.astype(np.float64) for z in (query, key)]
    length = [np.linalg.norm(z, axis=1, keepdims=True) if normalize else 1.0 for z in wide]
    unit = [z / by for z, by in zip(wide, length, strict=True)]
    x = scale * unit[0] @ unit[1].T
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(m), labels] -= 1
    rng = np.random.default_rng(1)
    limit(rows, False)
    for upstream in (np.full(m, 1e-30), np.full(m, 1e30), np.full(m, -3.0), np.zeros(m),
                     rng.standard_normal(m) * (np.arange(m) % 3 > 0),
                     10.0 ** rng.uniform(-6, 6, m)):  # fmt: skip
        out = run("info_nce", (query, key), "bf16x3", scale, labels=labels, normalize=normalize,
                  upstream=upstream, wrt=BOTH)  # fmt: skip
        g = scale * upstream[:, None] * p
        for name, z, dz in (("query", 0, g @ unit[1]), ("key", 1, g.T @ unit[0])):
            size = np.linalg.norm(dz)
            if normalize:
                dz = (dz - unit[z] * (dz * unit[z]).sum(1, keepdims=True)) / length[z]
            error = np.linalg.norm(out.grads[name].astype(np.float64) - dz)
            assert error <= GRAD_BOUND["bf16x3"] * size + 1e-38, (name, upstream[:3])
    assert len(blocks_swept) == 6 * (-(-m // rows) if rows else 1)


@pytest.mark.parametrize("wrt", [("query",), BOTH])
@pytest.mark.parametrize("kind", ["3", "30", "rising", "falling", "all low", "late"])
@pytest.mark.parametrize(("dtype", "precision"), ONE_PASS)
@pytest.mark.parametrize("d", [40, 1000])
def test_one_pass_where_heights_are_no_good(
    d: int, dtype: str, precision: str, kind: str, wrt: tuple[str, ...],
    blocks_swept: list[list[int]], limit: Limit,
) -> None:  # fmt: skip
    """Rows that leave the range of the height they were given, at first or in a later block, above
    or below: hundreds of powers of 2 from block to block."""
    if dtype == "float32" and d > 512:
        d //= 2  # as many bytes
    m, n = smaller((300, 1500), (140, 600))
    query, key = pairs("random", m, n, d, np.float64, 1)
    ids: Any = None
    if kind in ("3", "30"):
        query, key = query * float(kind), key * float(kind)
    elif kind in ("rising", "falling"):
        along = np.linspace(-1, 5, n)[:: 1 if kind == "rising" else -1]
        query, key = 0.3 * query + query[0], 0.1 * key + along[:, None] * query[0]
    elif kind == "all low":
        query, key = 0.02 * query + query[0], 0.05 * key - 2 * query[0]
    else:  # the first blocks have no pairs at all for some rows, which then begin high
        query[m // 3 :] *= 10
        ids = np.where(np.arange(m) >= 2 * m // 3, 1, 2), np.where(np.arange(n) < 4 * n // 5, 1, 3)
    labels = np.random.default_rng(0).integers(0, n, m)
    args = for_tensor_cores(query, dtype), for_tensor_cores(key, dtype)
    for i, scale in fewer(enumerate((1.0, 14.0, 100.0, 200.0)), 3):
        ref = judged("info_nce", args, scale=scale, labels=labels, ids=ids)
        for workspace in (2**28, 200_000 + 400 * d):
            if wrt == BOTH:
                limit(0 if workspace == 2**28 else 128, i % 2 > 0)
                workspace = 2**28
            blocks_swept.clear()
            guarded = cupy.full((m, d + 24), 7.0, np.float32)
            options: Any = [{}, {"grad_dtype": np.float32}, {"outs": {"query": guarded[:, 8:-16]}}]
            out = run("info_nce", args, precision, scale, labels=labels, ids=ids, wrt=wrt,
                      workspace=workspace, **options[i % 3])  # fmt: skip
            check(out, ref, args, "bf16", scale)
            assert i % 3 < 2 or bool((guarded[:, :8] == 7).all() and (guarded[:, -16:] == 7).all())
            again = [tile for tiles in blocks_swept for tile in tiles]
            assert again or scale < 200
            assert scale > 1 or kind == "30" or not again
            if workspace < 2**28 and kind == "rising" and scale == 200:  # not only at first
                assert sum(map(bool, blocks_swept)) > len(blocks_swept) // 2


@pytest.mark.parametrize("d", [40, 520])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_one_pass_with_some_query_tiles_swept_twice(
    d: int, workers: int, blocks_swept: list[list[int]], device_with: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A thread block has many query tiles, and skips those whose first sweep was good."""
    monkeypatch.setattr(config.Sweep, "blocks", lambda self, *_: workers * self.cluster)
    device_with(multiprocessors=132)  # otherwise a thread block has fewer query tiles
    n = 1500
    text, image = pairs("partly aligned", n, n, d, np.float64, 0)
    for tile in (1, 4, 5, 11):
        text[128 * tile + 3 : 128 * tile + 9] *= 60
    args = text.astype(BFLOAT16), image.astype(BFLOAT16)
    ref = judged("lit", args, scale=14.0)
    out = run("lit", args, "bf16", 14.0)
    assert blocks_swept == [[1, 4, 5, 11]]
    check(out, ref, args, "bf16", 14.0)


@pytest.mark.parametrize("wrt", [("query",), BOTH])
def test_one_pass_is_reproducible_and_sees_nan(
    wrt: tuple[str, ...], blocks_swept: list[list[int]], limit: Limit
) -> None:
    m, n = smaller((700, 900), (300, 400))
    args = tuple(z.astype(BFLOAT16) for z in pairs("long", m, n, 72, np.float64, 0))
    options: Any = {"wrt": wrt, "labels": np.arange(m)}
    if wrt == BOTH:
        limit(256, True)
    else:
        options["workspace"] = smaller(500_000, 250_000)
    first = run("info_nce", args, "bf16", 100.0, **options)
    assert any(blocks_swept)
    again = run("info_nce", args, "bf16", 100.0, **options)
    assert np.array_equal(first.losses, again.losses)
    for name, got in again.grads.items():
        assert np.array_equal(got, first.grads[name]), name
    for value in (np.nan, np.inf, -np.inf):
        query, key = (z.copy() for z in args)
        query[5, 2] = value
        out = run("info_nce", (query, key), "bf16", 100.0, **options)
        finite = np.arange(m) != 5
        assert np.isnan(out.losses[5])
        assert np.allclose(out.losses[finite], first.losses[finite], rtol=1e-5)
        assert np.isfinite(out.grads["query"][finite].astype(np.float32)).all()
        assert wrt != BOTH or np.isnan(out.grads["key"].astype(np.float32)).all()
        key[n - 100, 2] = value
        assert np.isnan(run("info_nce", (args[0], key), "bf16", 100.0, **options).losses).all()


@pytest.mark.parametrize("wrt", [("query",), BOTH])
@pytest.mark.parametrize(("dtype", "precision"), ONE_PASS)
def test_one_pass_with_ids_and_normalised(
    dtype: str, precision: str, wrt: tuple[str, ...], blocks_swept: list[list[int]], limit: Limit
) -> None:
    """Excluded pairs; rows that have no negatives; lengths that normalisation takes away."""
    m, n, d = 260, smaller(700, 400), 72
    rng = np.random.default_rng(0)
    query, key = (for_tensor_cores(z, dtype) for z in pairs("random", m, n, d, np.float64, 3))
    labels = rng.integers(0, n, m)
    ids = rng.integers(0, 9, m), rng.integers(0, 9, n)
    none = np.full(m, 7), np.full(n, 7)
    none[0][20:] = 8  # only the first rows are without negatives
    limit(128, True)
    for scale in fewer((14.0, 200.0), 1):
        for pair in (ids, none):
            ref = judged("info_nce", (query, key), scale=scale, labels=labels, ids=pair)
            for workspace in (2**28, 400_000):
                out = run("info_nce", (query, key), precision, scale, labels=labels, ids=pair,
                          wrt=wrt, workspace=workspace)  # fmt: skip
                check(out, ref, (query, key), "bf16", scale)
                if pair is none:
                    assert np.all(out.losses[:20] == 0)
                    assert np.all(out.grads["query"][:20] == 0)
        lengths = np.exp2(rng.integers(-3, 4, m))[:, None], np.exp2(rng.integers(-3, 4, n))[:, None]
        args = tuple((z.astype(np.float64) * by).astype(z.dtype)
                     for z, by in zip((query, key), lengths, strict=True))  # fmt: skip
        ref = judged("info_nce", args, scale=scale, labels=labels, normalize=True)
        for workspace in (2**28, 400_000):
            out = run("info_nce", args, precision, scale, labels=labels, normalize=True, wrt=wrt,
                      workspace=workspace, grad_dtype=np.float32)  # fmt: skip
            assert out.loss == pytest.approx(ref.loss, rel=1e-4)
            for name, z in zip(wrt, args, strict=False):
                want = ref.grads[name]
                # what remains after the part along the row is taken off is judged beside the whole
                inverse = 1 / np.linalg.norm(z.astype(np.float64), axis=1)
                size = np.linalg.norm(want) + scale * np.linalg.norm(inverse) / len(z)
                assert np.linalg.norm(out.grads[name] - want) <= GRAD_BOUND["bf16"] * size
    assert blocks_swept
