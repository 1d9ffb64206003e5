"""infonce.jax: wanted gradients, integers of 64 bits, GPUs. tests/matrix has the numbers."""

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


def classes(rows: int) -> np.ndarray:
    """Labels of sup_con: of four classes, and of none. The last row is alone."""
    labels = np.arange(rows) % 5 - 1
    labels[-1] = 99
    return labels


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
    labels = jnp.arange(24).reshape(12, 2) % 12 if name == "label_weights" else None
    own = {"own": query[:, None]} if name == "own_bias" else {}
    vector = jnp.ones({"label_weights": (12, 2), "own_bias": (12, 1)}.get(name, 12))

    def loss(vector: Any, wrap: Any = lambda v: v) -> Any:
        return ij.info_nce_loss(query, key, labels, scale=2.0, **own, **{name: wrap(vector)})

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
