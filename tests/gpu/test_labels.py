"""Classes, sums over their rows, and shares of weights on a GPU; and what is asked without waiting
for the device."""

import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, find_dtype, smaller
from infonce.kernels.linear import Classes, Segments, partners

import infonce

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy
    from infonce.kernels.gpu import labels as gpu_labels
    from infonce.kernels.gpu.linear import GPURows

# one sorted run of 2048 labels, two, an odd number of them, many
SIZES = [1, 2, 65, 2048, 2049, 5000, 20000]
LABELS: dict[str, Callable[[Any, int], Any]] = {
    "few classes": lambda rng, n: rng.integers(0, 3, n),
    "one class": lambda rng, n: np.full(n, 7),
    "all apart": lambda rng, n: rng.permutation(n),
    "pairs": lambda rng, n: rng.permutation(n) // 2,
    "of none to six": lambda rng, n: rng.integers(-n // 10 - 1, n // 3 + 1, n),
    "any integers": lambda rng, n: rng.choice([-(2**63), -1, 0, 5, 2**63 - 1], n),
}


def make_labels(kind: str, n: int) -> Any:
    return LABELS[kind](np.random.default_rng(n), n)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", LABELS)
def test_classes(kind: str, n: int, decoupled: bool) -> None:
    labels, own, least = make_labels(kind, n), np.arange(n), 2 if decoupled else 3
    got, positives, present = gpu_labels.classes(cupy.asarray(labels), decoupled)
    ids = np.where(labels < 0, -1 - own, labels)
    classes = Classes(ids, ids)
    members = classes.members(np, own)
    want, has_positive = partners(np, classes, members, own, decoupled)
    if kind != "any integers":  # there, a label is what a row without a class has as its id
        np.testing.assert_array_equal(positives.get(), want)
        assert present is not None
        np.testing.assert_array_equal(present.get(), has_positive)
    np.testing.assert_array_equal(got.rows.get(), ids)
    place, order = got.in_sums.rows.get(), got.in_sums.row_order.get()
    in_sums = members[0] >= least
    np.testing.assert_array_equal(place >= 0, in_sums)
    np.testing.assert_array_equal(got.positive_count.get(), np.where(in_sums, members[0] - 1, 0))
    assert place.max() < got.in_sums.count <= -(-n // least)
    assert len(set(zip(place[in_sums], ids[in_sums], strict=True))) == len(set(place[in_sums]))
    assert len(set(place[in_sums])) == len(set(ids[in_sums]))
    np.testing.assert_array_equal(order, np.argsort(ids, kind="stable"))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (65, 30), (2049, 5000), (20000, 2048)])
@pytest.mark.parametrize("kind", LABELS)
def test_classes_of_pairs(kind: str, m: int, n: int, shared: bool, decoupled: bool) -> None:
    """Classes of queries and of other keys, or of pairs whose ids both sides share."""
    rows, keys = make_labels(kind, m), make_labels(kind, n)
    if shared:
        keys = rows
    device_rows = cupy.asarray(rows)
    device_keys = device_rows if shared else cupy.asarray(keys)
    got, positives, present = gpu_labels.pair_classes(device_rows, device_keys, decoupled)
    classes = Classes(rows, keys)
    members = classes.members(np, np.arange(len(keys)))
    want, has_positive = partners(np, classes, members, None, decoupled)
    np.testing.assert_array_equal(positives.get(), want)
    assert (present is None) == (has_positive is None) == shared
    if present is not None:
        np.testing.assert_array_equal(present.get(), has_positive)
    in_sums = members[0] >= (1 if decoupled else 2)
    np.testing.assert_array_equal(got.positive_count.get(), np.where(in_sums, members[0], 0))
    place, key_place = got.in_sums.rows.get(), got.in_sums.columns.get()
    np.testing.assert_array_equal(place >= 0, in_sums)
    np.testing.assert_array_equal(key_place >= 0, np.isin(keys, rows[in_sums]))
    assert max(place.max(), key_place.max()) < got.in_sums.count
    # a segment for each class, of rows and of keys
    both = np.concatenate([place, key_place]), np.concatenate([rows, keys])
    pairs = {(s, label) for s, label in zip(*both, strict=True) if s >= 0}
    assert len(pairs) == len({s for s, _ in pairs}) == len({label for _, label in pairs})
    for order, labels in ((got.in_sums.row_order, rows), (got.in_sums.column_order, keys)):
        np.testing.assert_array_equal(order.get(), np.argsort(labels, kind="stable"))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("n", [65, smaller(5000, 200)])
def test_hashes_of_64_bits(n: int, decoupled: bool) -> None:
    """Hashes may be classes, and ids of rows and columns in two dtypes, which compare by value."""
    z, y, classes = draw_features(0, n), draw_features(1, n), np.arange(n) % 9
    hashes = classes.astype(np.uint64) * np.uint64(2**61 - 1)
    options: dict[str, Any] = {"scale": 5.0, "decoupled": decoupled}
    want = infonce.sup_con_loss_and_grad(z, cupy.asarray(classes), **options)
    got = infonce.sup_con_loss_and_grad(z, cupy.asarray(hashes), **options)
    assert float(got.loss) == float(want.loss)
    assert bool((got.grads.features == want.grads.features).all())
    ids = hashes, hashes.astype(np.int64)
    same = classes, np.where(ids[1] < 0, 99, classes)
    labels = cupy.arange(n)
    got, want = (
        infonce.info_nce_loss(z, y, labels, ids=tuple(map(cupy.asarray, key_ids)), **options)
        for key_ids in (ids, same)
    )
    assert float(got) == float(want)


def test_labels_that_are_not_taken_make_the_loss_nan() -> None:
    """Labels out of range, and rows that name a key twice, make the loss NaN."""
    z, y, rows = draw_features(0), draw_features(1), np.arange(ROWS)
    sets = np.stack([rows, np.where(rows % 2, -1, (rows + 1) % ROWS)], axis=1)
    for labels in (rows, rows.astype(np.uint64), rows.astype(np.int16), sets):
        got = infonce.info_nce_loss(z, y, cupy.asarray(labels), scale=5.0)
        want = infonce.info_nce_loss(z.get(), y.get(), labels, scale=5.0)
        assert float(got) == pytest.approx(float(want), rel=1e-5)
    wrong = np.where(rows == 77, 2**64 - 1, rows.astype(np.uint64)).astype(np.uint64)
    twice = np.stack([rows, np.where(rows == 77, rows, -1)], axis=1)
    for labels in (wrong, twice, np.eye(ROWS, dtype=np.int32)):
        assert np.isnan(float(infonce.info_nce_loss(z, y, cupy.asarray(labels), scale=5.0)))
        losses = infonce.info_nce_loss(z, y, cupy.asarray(labels), scale=5.0, reduction="none")
        nan = np.flatnonzero(np.isnan(losses.get()))
        np.testing.assert_array_equal(nan, rows if labels.shape[1:] == (ROWS,) else [77])


def make_rows(z: Any, normalize: bool) -> Any:
    problem: Any = SimpleNamespace(compute_precision="fp64" if z.dtype == np.float64 else "bf16")
    problem.normalize = normalize
    return GPURows.from_features(cupy.asarray(z), problem)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("n", "width"), [(63, 5), (64, 200), (65, 8), (1000, 130), (20000, 37)])
@pytest.mark.parametrize("kind", [*LABELS, None])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_sums(dtype: str, kind: str | None, n: int, width: int, normalize: bool) -> None:
    """Segments that lie in a piece of 64 rows, that cross a border, or go through many pieces."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((n, width)).astype(find_dtype(dtype))
    u, factor = z.astype(np.float64), rng.standard_normal(n)
    if normalize:
        u /= np.linalg.norm(u, axis=1, keepdims=True)
    rows, segments, ids = make_rows(z, normalize), Segments(None, None, 1), np.zeros(n, int)
    if kind is not None:
        ids = make_labels(kind, n)
        classes, _, _ = gpu_labels.classes(cupy.asarray(ids), False)
        assert classes.in_sums is not None
        segments = classes.in_sums
    place = ids if kind is None else segments.rows.get()
    bound = 1e-12 if dtype == "float64" else 1e-6
    for weight in (None, factor):
        device_weight = None if weight is None else cupy.asarray(weight)
        sums = [
            rows.sums(segments.rows, segments.count, device_weight, segments.row_order)
            for _ in range(2)
        ]
        want, size = np.zeros((2, segments.count, width))
        here = place >= 0
        terms = u if weight is None else weight[:, None] * u
        np.add.at(want, place[here], terms[here])
        np.add.at(size, place[here], abs(terms[here]))
        used, got = np.unique(place[here]), np.zeros_like(want)  # other places hold any bits
        got[used] = sums[0].get()[used]
        assert (abs(got - want)[used] <= bound * size[used]).all()
        assert bool((sums[0] == sums[1])[cupy.asarray(used)].all())  # bit for bit
    products = rows.products(segments.rows, sums[0], 1.0).get()
    row_sums = got[np.maximum(place, 0)] - u
    # a row's factor of its normalisation is rounded to the precision of sums: it comes in twice
    rounding = 1e-13 if dtype == "float64" else 2.0**-22
    error = abs(products - here * (u * row_sums).sum(axis=1))
    assert (error <= rounding * (abs(u) * (abs(row_sums) + abs(u))).sum(axis=1)).all()


@pytest.mark.parametrize("n", [1, 100, 5000])
def test_row_shares(n: int) -> None:
    weights = np.random.default_rng(n).random(n)
    got = gpu_labels.row_shares(cupy.asarray(weights)).get()
    np.testing.assert_allclose(got, weights / math.fsum(weights), rtol=1e-13)
    assert (gpu_labels.row_shares(cupy.zeros(n)).get() == 0).all()
    weights[n // 2] = np.nan
    assert np.isnan(gpu_labels.row_shares(cupy.asarray(weights)).get()).all()


ROWS = smaller(600, 200)


def draw_features(seed: int, n: int = ROWS) -> Any:
    z = np.random.default_rng(seed).standard_normal((n, 64))
    return cupy.asarray(z / np.linalg.norm(z, axis=1, keepdims=True), dtype=np.float32)


SMOOTHED = {"label_smoothing": 0.1}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "sup_con": ("sup_con", {}),
    "sup_con decoupled": ("sup_con", {"decoupled": True}),
    "sup_con smoothed": ("sup_con", SMOOTHED | {"normalize": True}),
    "clip by ids": ("clip", {"positive_ids": True}),
    "clip by ids, decoupled": ("clip", {"positive_ids": True, "decoupled": True}),
    "clip by ids, smoothed": ("clip", {"positive_ids": True} | SMOOTHED),
    "lit by ids": ("lit", {"positive_ids": True, "normalize": True}),
    "gte": ("gte", {}),
    "gte smoothed": ("gte", SMOOTHED | {"weights": True}),
    "clip smoothed": ("clip", SMOOTHED),
    "info_nce smoothed": ("info_nce", SMOOTHED),
    "weights": ("clip", {"weights": True, "method": "tiled"}),
    "biases and limits": (
        "clip",
        {"key_bias": True, "false_negative_margin": 0.1, "method": "tiled"},
    ),
}


def call(name: str, z: Any, y: Any, labels: Any, **more: Any) -> infonce.LossAndGrad:
    loss, options = CALLS[name]
    args = {"sup_con": (z, labels), "info_nce": (z, y, labels % len(y))}.get(loss, (z, y))
    for name in {"weights", "key_bias"}.intersection(options):
        options = options | {name: abs(z[:, 0])}
    if "positive_ids" in options:
        pair = labels, labels[::-1].copy()  # in lit, rows and keys have different ids
        options = options | {"positive_ids": labels if loss == "clip" else pair}
    result: infonce.LossAndGrad = getattr(infonce, f"{loss}_loss_and_grad")(
        *args, scale=20.0, **options, **more
    )
    return result


@pytest.mark.parametrize("name", CALLS)
def test_nothing_waits_for_the_device(name: str) -> None:
    """While it spins, a call returns."""
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n)'
        "{ for (long long t = clock64(); clock64() - t < n;); }", "spin",
    )  # fmt: skip
    z, y, labels = draw_features(0), draw_features(1), cupy.arange(ROWS) % 50
    for _ in range(2):
        call(name, z, y, labels)  # compiles, and has memory
    device = cupy.cuda.Device()
    device.synchronize()
    cycles = 10**9
    spin((1,), (1,), (np.int64(cycles),))
    done = cupy.cuda.Event()
    start = time.perf_counter()
    got = call(name, z, y, labels)
    done.record()
    asked = time.perf_counter() - start
    assert not done.done
    device.synchronize()
    waited = time.perf_counter() - start
    assert asked < waited / 2
    assert np.isfinite(float(got.loss))


@pytest.mark.parametrize("name", CALLS)
def test_capture(name: str) -> None:
    """A CUDA graph of a call with labels computes for other features and labels."""
    arrays = draw_features(0), draw_features(1), cupy.arange(ROWS) % 50
    step = infonce.capture(partial(call, name), *arrays)
    others = draw_features(2), draw_features(3), cupy.arange(ROWS) // 7
    want = call(name, *others)
    for array, value in zip(arrays, others, strict=True):
        array[...] = value
    got = step()
    assert float(got.loss) == float(want.loss)
    for one, other in zip(got.grads, want.grads, strict=True):
        assert (cupy.asnumpy(one) == cupy.asnumpy(other)).all()


def test_the_gradient_of_the_scale_of_many_logits(request: pytest.FixtureRequest) -> None:
    """It is right from finished gradients with linear terms, and from moments of the logits."""
    n = smaller(4400, 300)  # more than 2^24 logits
    if n < 4096:
        request.getfixturevalue("no_few_logits")
    for name in (
        "sup_con",
        "sup_con smoothed",
        "clip by ids",
        "clip by ids, smoothed",
        "gte",
        "gte smoothed",
        "clip smoothed",
    ):
        z, y, labels = draw_features(0, n), draw_features(1, n), cupy.arange(n) % 50
        got = call(name, z, y, labels)
        want = call(name, z.astype(np.float64), y.astype(np.float64), labels, wrt="scale")
        np.testing.assert_allclose(float(got.loss), float(want.loss), rtol=1e-5)
        np.testing.assert_allclose(float(got.grads.scale), float(want.grads.scale), rtol=1e-4)
