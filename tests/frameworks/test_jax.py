"""infonce.jax against the published formulas, written out in JAX."""

import functools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from judge import judged  # noqa: E402

import infonce  # noqa: E402
import infonce.jax as ij  # noqa: E402
from infonce import spec  # noqa: E402

pytestmark = pytest.mark.extras
LOSSES = ["clip", "gte", "info_nce", "lit", "nt_xent", "siglip", "sup_con"]


def features(loss: str, rows: int = 12, dim: int = 5, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(rows)
    sides = [rng.standard_normal((rows, dim)) for _ in spec.LOSSES[loss].arguments]
    return [jnp.asarray(z / np.linalg.norm(z, axis=1, keepdims=True), dtype) for z in sides]


def cross_entropy(x: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(x, axis=1), y[:, None], axis=1).mean()


def classes(rows: int) -> np.ndarray:
    """Labels of sup_con: of four classes, and of none. The last row is alone."""
    labels = np.arange(rows) % 5 - 1
    labels[-1] = 99
    return labels


def formula(loss: str, z: Any, scale: Any, bias: Any = -10.0) -> Any:
    if loss == "gte":
        z = [jnp.concatenate(z), jnp.concatenate(z)]
    x = scale * z[0] @ z[-1].T
    n = len(x)
    y = jnp.arange(n)
    if loss in ("nt_xent", "sup_con", "gte"):
        x = jnp.where(jnp.eye(n, dtype=bool), -jnp.inf, x)
    if loss == "nt_xent":
        return cross_entropy(x, (y + n // 2) % n)
    lse = jax.nn.logsumexp
    if loss == "sup_con":
        labels = classes(n)
        same = (labels[:, None] == labels) & (labels >= 0) & ~np.eye(n, dtype=bool)
        positive = jnp.where(same, x, 0).sum(1) / same.sum(1).clip(1)
        return (lse(x, axis=1) - positive)[same.any(1)].mean()
    if loss == "gte":  # both rows of a pair have one softmax, with their product in it once
        half = n // 2
        positive = jnp.diagonal(x, half)
        negatives = lse(jnp.where(abs(y[:, None] - y) == half, -jnp.inf, x), axis=1)
        every = jnp.stack([positive, negatives[:half], negatives[half:]])
        return (lse(every, axis=0) - positive).mean()
    if loss == "siglip":
        return -jax.nn.log_sigmoid((2 * jnp.eye(n) - 1) * (x + bias)).sum() / n
    if loss == "clip":
        return (cross_entropy(x, y) + cross_entropy(x.T, y)) / 2
    return cross_entropy(x, y)


def call(loss: str, z: Any, scale: Any = None, bias: Any = None, **options: Any) -> Any:
    keywords = {"bias": bias} if bias is not None else {}
    if loss == "sup_con":
        keywords["labels"] = classes(len(z[0]))
    return getattr(ij, f"{loss}_loss")(*z, scale=scale, **keywords, **options)


def close(got: Any, want: Any, tolerance: float) -> None:
    """Relative to the largest number; NaN fails."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        error = np.abs(np.asarray(g, np.float64) - np.asarray(w, np.float64)).max()
        assert error <= tolerance * np.abs(np.asarray(w, np.float64)).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype: Any) -> None:
    z = features("clip", 40, 16, dtype)
    got, grads = jax.jit(jax.value_and_grad(lambda *z: call("clip", z, 5.0), (0, 1)))(*z)
    assert got.dtype == jnp.float32
    assert {g.dtype for g in grads} == {jnp.dtype(dtype)}
    wide = [t.astype(jnp.float32) for t in z]
    want, wanted = jax.value_and_grad(lambda *z: formula("clip", z, 5.0), (0, 1))(*wide)
    close(got, want, 1e-5)
    close(grads, wanted, {jnp.float32: 1e-5, jnp.bfloat16: 1e-2, jnp.float16: 2e-3}[dtype])


def test_what_is_not_differentiated_costs_nothing(monkeypatch: Any) -> None:
    from infonce import dispatch

    asked: list[set[str]] = []
    real = dispatch.loss_and_grad
    monkeypatch.setattr(
        dispatch, "loss_and_grad", lambda *a: asked.append(set(a[4]["wrt"])) or real(*a)
    )
    image, text = features("clip")
    calls = [
        call("clip", (image, text), 2.0),
        jax.grad(lambda image: call("clip", (image, text), 2.0))(image),
        jax.jit(jax.grad(lambda s: call("clip", (image, text), s)))(2.0),
        jax.grad(lambda image, text: call("lit", (image, text), 2.0), (0, 1))(image, text),
    ]
    jax.block_until_ready(calls)
    assert asked == [set(), {"image"}, {"scale"}, {"text"}]


@pytest.mark.parametrize("name", spec.VECTOR_OPTIONS)
def test_vectors_get_no_gradient(name: str) -> None:
    query, key = features("info_nce")
    own = {"own": query[:, None]} if name == "own_bias" else {}
    vector = jnp.ones((12, 1) if own else 12)

    def loss(vector: Any, wrap: Any = lambda v: v) -> Any:
        return ij.info_nce_loss(query, key, scale=2.0, **own, **{name: wrap(vector)})

    for derivative in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        with pytest.raises(ValueError, match=f"^{name}: expected an array that is not diff"):
            derivative(vector)
    still = functools.partial(loss, wrap=jax.lax.stop_gradient)
    for derivative in (jax.grad(still), jax.jit(jax.grad(still)), jax.grad(jax.checkpoint(still))):
        assert not derivative(vector).any()


HASHES = [np.arange(12) % 5 << 32, (np.arange(12) % 5).astype(np.uint64) << 61]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("hashes", HASHES, ids=["int64", "uint64"])
def test_integers_of_64_bits_are_not_cut(hashes: np.ndarray, jitted: bool) -> None:
    """Ids that differ only in their upper 32 bits stay different without x64."""
    assert not jax.config.jax_enable_x64

    def close_to(want: Any, function: Any, *z: Any) -> None:
        for reduction in ("mean", "none"):

            def loss(*z: Any, reduction: str = reduction) -> Any:
                return function(*z, scale=4.0, reduction=reduction).mean()

            run = jax.value_and_grad(loss)
            got = (jax.jit(run) if jitted else run)(*z)
            close(got, (want.loss, want.grads[0]), 1e-5)

    query, key = features("info_nce")
    z, other = np.asarray(query), np.asarray(key)
    want = infonce.clip_loss_and_grad(z, other, scale=4.0, ids=np.arange(12) % 5)
    close_to(want, functools.partial(ij.clip_loss, ids=hashes), query, key)
    pair = hashes, hashes[::-1]
    want = infonce.info_nce_loss_and_grad(z, other, scale=4.0, ids=pair)
    close_to(want, functools.partial(ij.info_nce_loss, ids=pair), query, key)
    mixed = (np.arange(12) % 5, jnp.arange(12) % 7)
    want = infonce.info_nce_loss_and_grad(z, other, scale=4.0, ids=tuple(map(np.asarray, mixed)))
    close_to(want, functools.partial(ij.info_nce_loss, ids=mixed), query, key)
    sets = np.stack([np.arange(12), np.where(np.arange(12) % 2, -(2**40), 11 - np.arange(12))], 1)
    want = infonce.info_nce_loss_and_grad(z, other, sets, scale=4.0)
    close_to(want, lambda q, k, **o: ij.info_nce_loss(q, k, sets, **o), query, key)
    if jitted:
        return
    wide = infonce.sup_con_loss_and_grad(z, hashes, scale=4.0)
    assert wide.loss == infonce.sup_con_loss(z, np.arange(12) % 5, scale=4.0)
    got = jax.value_and_grad(lambda z: ij.sup_con_loss(z, hashes, scale=4.0))(query)
    close(got, (wide.loss, wide.grads.features), 1e-5)
    with pytest.raises(
        ValueError, match=r"labels: expected values in \[0, 12\), .* got 4294967296"
    ):
        ij.info_nce_loss(query, key, np.arange(12) << 32, scale=4.0)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("loss", "labels"),
    [("sup_con", range(12)), ("sup_con", [-1] * 12), ("info_nce", [-1] * 12)],
    ids=["classes", "no classes", "no keys"],
)
def test_no_positive_is_a_loss_of_zero(loss: str, labels: Any, jitted: bool) -> None:
    """JAX's threads, which call back, take subnormal numbers for 0."""

    def total(z: Any, scale: Any) -> Any:
        return getattr(ij, f"{loss}_loss")(*z, labels=jnp.asarray(labels), scale=scale)

    ours = jax.value_and_grad(total, (0, 1))
    out = (jax.jit(ours) if jitted else ours)(features(loss), jnp.float32(3.0))
    for number in jax.tree.leaves(out):
        assert not np.asarray(number).any()


def test_metrics() -> None:
    image, text = features("clip", 30)
    x = np.asarray(image @ text.T)

    @jax.jit
    def step(image: Any, text: Any) -> Any:
        def loss(image: Any) -> Any:
            value, metrics = ij.clip_loss(image, text, scale=3.0, metrics=True)
            top = (metrics.row_rank == 0).mean(), (metrics.column_rank == 0).mean()
            return value, (top, metrics.hardest_negative, metrics.positive)

        return jax.value_and_grad(loss, has_aux=True)(image)

    (_, (top, hardest, positive)), gradient = step(image, text)
    assert float(top[0]) == pytest.approx((x.argmax(1) == np.arange(30)).mean())
    assert float(top[1]) == pytest.approx((x.argmax(0) == np.arange(30)).mean())
    close(positive, 3 * np.diag(x), 1e-5)
    close(hardest, 3 * np.where(np.eye(30), -np.inf, x).max(1), 1e-5)
    close(gradient, jax.grad(lambda z: formula("clip", (z, text), 3.0))(image), 1e-5)
    _, same = ij.clip_loss(image, text, scale=3.0, hardness=2.0, margin=0.1, metrics=True)
    close(same.hardest_negative, hardest, 1e-6)
    for loss in ("info_nce", "lit", "nt_xent"):
        value, metrics = call(loss, features(loss), 3.0, metrics=True)
        assert metrics.column_rank is None
        assert float(metrics.row_loss) == pytest.approx(float(value), rel=1e-6)


def test_closed_forms() -> None:
    """2n collinear rows: log(2n - 1). Orthogonal pairs: known by hand."""
    rows = jnp.ones((10, 4)) / 2
    assert float(ij.nt_xent_loss(rows, temperature=0.5)) == pytest.approx(np.log(9), rel=1e-6)
    eye = jnp.eye(6)
    want = np.log1p(5 * np.exp(-2.0))
    assert float(ij.clip_loss(eye, eye, scale=2.0)) == pytest.approx(want, rel=1e-6)
    assert float(ij.clip_loss(3 * eye, 5 * eye, scale=2.0, normalize=True)) == pytest.approx(
        want, rel=1e-6
    )


def test_import_alone_needs_no_jax() -> None:
    assert "jax" not in infonce.__all__


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Any:
    pytest.importorskip("cupy")
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_on_a_gpu(gpu: Any, loss: str, jitted: bool, dtype: str) -> None:
    """The program's own buffers, small and large batches, against float64 on the same inputs."""
    for rows in (12, 1500):
        z = features(loss, rows, 64, jnp.dtype(dtype))
        labels = {"labels": classes(rows)} if loss == "sup_con" else {}
        truth = judged(loss, [np.asarray(side) for side in z], scale=8.0, **labels)
        sides = [jax.device_put(side, gpu) for side in z]
        scale = jax.device_put(jnp.float32(8.0), gpu)
        ours = jax.value_and_grad(lambda z, scale: call(loss, z, scale), (0, 1))
        got, (grads, dscale) = (jax.jit(ours) if jitted else ours)(sides, scale)
        for array in (got, dscale, *grads):
            assert array.devices() == {gpu}
        close([got, dscale], [np.asarray(truth.loss), np.asarray(truth.grads["scale"])], 1e-3)
        bound = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
        names = [name for name in truth.grads if name not in ("scale", "bias")]
        for name, g in zip(names, grads, strict=True):
            w = truth.grads[name]
            close(g, np.zeros_like(z[1]) if w is None else w, bound)


@pytest.mark.gpu
def test_on_the_programs_stream(gpu: Any) -> None:
    """The call waits for what the program computes before it, and the program for the call."""
    with jax.default_device(gpu):
        image, text = features("clip", 2000, 256)

        @jax.jit
        def step(image: Any, text: Any) -> Any:
            def loss(image: Any) -> Any:
                for _ in range(20):  # long enough to be noticed if nobody waited
                    image = jnp.sin(image + 1e-3 * image[::-1])
                unit = image / jnp.linalg.norm(image, axis=1, keepdims=True)
                return call("clip", (unit, text), 8.0)

            return jax.lax.scan(lambda z, _: (z - 10 * jax.grad(loss)(z), loss(z)), image, None, 8)

        first, losses = step(image, text)
        for _ in range(3):
            close(step(image, text), (first, losses), 1e-5)
        assert float(losses[-1]) < float(losses[0])
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = features("clip", 2000, 256)
        unit = on_cpu[0]
        for _ in range(20):
            unit = jnp.sin(unit + 1e-3 * unit[::-1])
        unit = unit / jnp.linalg.norm(unit, axis=1, keepdims=True)
        close(losses[0], call("clip", (unit, on_cpu[1]), 8.0), 1e-5)
