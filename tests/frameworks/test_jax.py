"""infonce.jax against the published formulas, written out in JAX."""

import functools
import re
from typing import Any

import numpy as np
import pytest
from bad_calls import NUMERIC

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from judge import judged  # noqa: E402

import infonce  # noqa: E402
import infonce.jax as ij  # noqa: E402
from infonce import spec  # noqa: E402

pytestmark = pytest.mark.extras
LOSSES = ["clip", "info_nce", "lit", "nt_xent", "siglip"]


def features(loss: str, rows: int = 12, dim: int = 5, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(rows)
    sides = [rng.standard_normal((rows, dim)) for _ in range(1 if loss == "nt_xent" else 2)]
    return [jnp.asarray(z / np.linalg.norm(z, axis=1, keepdims=True), dtype) for z in sides]


def cross_entropy(x: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(x, axis=1), y[:, None], axis=1).mean()


def formula(loss: str, z: Any, scale: Any, bias: Any = -10.0) -> Any:
    x = scale * z[0] @ z[-1].T
    n = len(x)
    y = jnp.arange(n)
    if loss == "nt_xent":
        return cross_entropy(jnp.where(jnp.eye(n, dtype=bool), -jnp.inf, x), (y + n // 2) % n)
    if loss == "siglip":
        return -jax.nn.log_sigmoid((2 * jnp.eye(n) - 1) * (x + bias)).sum() / n
    if loss == "clip":
        return (cross_entropy(x, y) + cross_entropy(x.T, y)) / 2
    return cross_entropy(x, y)


def call(loss: str, z: Any, scale: Any = None, bias: Any = None, **options: Any) -> Any:
    given = {"bias": bias} if bias is not None else {}
    return getattr(ij, f"{loss}_loss")(*z, scale=scale, **given, **options)


def close(got: Any, want: Any, tolerance: float) -> None:
    """Relative to the largest number; NaN fails."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        error = np.abs(np.asarray(g, np.float64) - np.asarray(w, np.float64)).max()
        assert error <= tolerance * np.abs(np.asarray(w, np.float64)).max()


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients(loss: str, jitted: bool) -> None:
    with jax.enable_x64(True):
        z = features(loss, dtype=np.float64)
        given = (z, jnp.asarray(7.0), jnp.asarray(-3.0) if loss == "siglip" else None)
        ours, theirs = (
            jax.value_and_grad(lambda *a, of=of: 3 * of(loss, *a), (0, 1, 2))
            for of in (call, formula)
        )
        got, grads = (jax.jit(ours) if jitted else ours)(*given)
        want, wanted = theirs(*given)
        assert got.dtype == jnp.float64
        close(got, want, 1e-12)
        if loss == "lit":
            wanted[0][1] = jnp.zeros_like(z[1])  # the locked tower
            assert not grads[0][1].any()
            grads, wanted = (grads[0][0], grads[1]), (wanted[0][0], wanted[1])
        close(grads, wanted, 1e-11)


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


def test_per_row_losses() -> None:
    z = features("info_nce")
    weights = jnp.arange(12.0)

    def ours(*z: Any) -> Any:
        return (weights * call("info_nce", z, 4.0, reduction="none")).sum()

    def theirs(*z: Any) -> Any:
        return -(weights * jnp.diag(jax.nn.log_softmax(4.0 * z[0] @ z[1].T, axis=1))).sum()

    for transform in (ours, jax.jit(ours)):
        got, want = (jax.value_and_grad(f, (0, 1))(*z) for f in (transform, theirs))
        close(got, want, 1e-5)


def test_labels_ids_and_temperature() -> None:
    query, key = features("info_nce")
    labels = np.random.default_rng(0).permutation(12)
    ids = jnp.arange(12) // 2
    key = key[labels]

    def theirs(query: Any, temperature: Any) -> Any:
        x = query @ key.T / temperature
        # a key with the query's id that is not its positive does not count
        same = (ids[:, None] == ids[labels][None]) & (labels[None] != jnp.arange(12)[:, None])
        return cross_entropy(jnp.where(same, -jnp.inf, x), jnp.argsort(labels))

    def ours(query: Any, temperature: Any) -> Any:
        return ij.info_nce_loss(
            query, key, jnp.argsort(labels), temperature=temperature, ids=(ids, ids[labels])
        )

    got, want = (jax.value_and_grad(f, (0, 1))(query, 0.3) for f in (jax.jit(ours), theirs))
    close(got, want, 1e-5)


def test_vmap() -> None:
    image, text = (jnp.stack([z, z[::-1] ** 2, 2 * z]) for z in features("clip"))
    got = jax.vmap(jax.grad(lambda a, b: call("clip", (a, b), 3.0)))(image, text)
    want = jax.vmap(jax.grad(lambda a, b: formula("clip", (a, b), 3.0)))(image, text)
    close(got, want, 1e-5)


def test_inside_a_scan_and_checkpoint() -> None:
    image, text = features("clip")

    def trained(of: Any) -> Any:
        def step(image: Any, _: Any) -> Any:
            value, gradient = jax.value_and_grad(
                jax.checkpoint(lambda z: of("clip", (jnp.tanh(z), text), 3.0))
            )(image)
            return image - gradient, value

        return jax.lax.scan(step, image, None, length=5)

    close(jax.jit(trained, static_argnums=0)(call), trained(formula), 1e-5)


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


def test_no_second_derivative() -> None:
    image, text = features("clip")
    first = jax.grad(lambda z: call("clip", (z, text), 2.0))
    second = jax.grad(lambda z: first(z).sum())
    hessian = jax.hessian(lambda z: call("clip", (z, text), 2.0))
    for transform in (second, jax.jit(second), hessian, jax.jit(hessian)):
        with pytest.raises(TypeError, match=r"clip_loss: gradients.*cannot be differentiated"):
            transform(image)


def test_no_forward_mode() -> None:
    image, text = features("clip")

    def loss(image: Any) -> Any:
        return call("clip", (image, text), 2.0)

    for forward in (lambda f: jax.jvp(f, (image,), (image,)), lambda f: jax.jacfwd(f)(image),
                    lambda f: jax.linearize(f, image)[1](image)):  # fmt: skip
        for function in (loss, jax.jit(loss)):
            with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
                forward(function)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("loss", "args", "options", "error", "words"), NUMERIC)
def test_bad_calls_are_those_of_arrays(
    loss: str, args: Any, options: dict[str, Any], error: type[Exception], words: list[str],
    jitted: bool,
) -> None:  # fmt: skip
    """While JAX traces, but for a workspace that the computation finds too small."""
    options = {"scale": 2.0, **options}
    taken = {"scale", "temperature", "ids", "metrics", *spec.COMPILED}
    if spec.DEFAULTS.keys() & options.keys() - taken:
        error, words = TypeError, ["unexpected keyword argument"]
    function = functools.partial(getattr(ij, f"{loss}_loss"), **options)
    with jax.enable_x64(True):
        given = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
        leaves = [i for i, z in enumerate(given) if isinstance(z, jax.Array)]

        def traced(*arrays: Any) -> Any:
            mixed = list(given)
            for i, z in zip(leaves, arrays, strict=True):
                mixed[i] = z
            return function(*mixed)

        if options.keys() & {"workspace"} and error is ValueError and options["workspace"]:
            traced, error = jax.grad(traced), jax.errors.JaxRuntimeError
        with pytest.raises(error) as caught:
            jax.block_until_ready((jax.jit(traced) if jitted else traced)(
                *[given[i] for i in leaves]))  # fmt: skip
    message = str(caught.value)
    if error is jax.errors.JaxRuntimeError:
        message = message.splitlines()[-1].removeprefix("ValueError: ")
    for word in words:
        assert word.replace("an array", "a JAX array") in message
    assert "\n" not in message


LABELS = np.arange(12) + 1
VALUES: list[tuple[str, str, dict[str, Any]]] = [
    ("info_nce", "labels: expected values in [0, 12), or negative ones for none, got 12 at "
                 "position 11", {"labels": LABELS}),
    ("clip", "scale: expected a positive number, got -1.0", {"scale": -1.0}),
    ("clip", "scale: expected a finite number, got nan", {"scale": np.nan}),
    ("siglip", "bias: expected a finite number, got inf", {"bias": np.inf}),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "message", "bad"), VALUES)
def test_bad_values(loss: str, message: str, bad: dict[str, Any]) -> None:
    """The error of arrays where JAX knows them while it traces; else at the end of its own."""
    z = features(loss)
    bad = {name: jnp.asarray(value) for name, value in bad.items()}

    def step(z: Any, given: Any) -> Any:
        return getattr(ij, f"{loss}_loss")(*z, **{"scale": 2.0, **given})

    def known(z: Any) -> Any:
        return step(z, bad)

    for function in (known, jax.grad(known), jax.jit(known), jax.jit(jax.grad(known))):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            function(z)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(step)(z, bad))
    assert str(caught.value).endswith(f"\nValueError: {message}")


def test_errors() -> None:
    image, text = features("clip")
    with pytest.raises(TypeError, match="text: expected a JAX array, got list"):
        ij.clip_loss(image, [1.0], scale=1.0)
    with pytest.raises(TypeError, match=r"image: expected dtype float64.*got int32"):
        ij.clip_loss(image.astype(int), text, scale=1.0)
    with pytest.raises(ValueError, match=r"text: expected 12 rows like image, got shape \(3, 5\)"):
        jax.jit(lambda z: ij.clip_loss(z, z[:3], scale=1.0))(image)
    with pytest.raises(ValueError, match="temperature, scale: expected one of them, got both"):
        ij.clip_loss(image, text, scale=jnp.asarray(1.0), temperature=1.0)
    for value, error, match in (
        (jnp.ones(2), TypeError, r"expected a number or 0-d array, got .* shape \(2,\)"),
        (jnp.asarray(True), TypeError, "expected a number or 0-d array, got bool True"),
        (jnp.asarray(1j), TypeError, "expected a number or 0-d array, got complex"),
        ("1", TypeError, "expected a number or 0-d array, got '1'"),
    ):
        for name in ("scale", "temperature"):
            with pytest.raises(error, match=f"^{name}: {match}"):
                ij.clip_loss(image, text, **{name: value})
            if isinstance(value, jax.Array):
                with pytest.raises(error, match=f"^{name}: expected a number or 0-d array"):
                    jax.jit(lambda v, name=name: ij.clip_loss(image, text, **{name: v}))(value)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'normalise'.*'normalize'"):
        ij.clip_loss(image, text, scale=1.0, normalise=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'grad_out'; beside"):
        ij.clip_loss(image, text, scale=1.0, grad_out=2.0)
    with pytest.raises(TypeError, match="labels: expected integers, got dtype <U3"):
        ij.info_nce_loss(image, text, "abc", scale=1.0)


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
        truth = judged(loss, [np.asarray(side) for side in z], scale=8.0)
        given = [jax.device_put(side, gpu) for side in z]
        scale = jax.device_put(jnp.float32(8.0), gpu)
        ours = jax.value_and_grad(lambda z, scale: call(loss, z, scale), (0, 1))
        got, (grads, dscale) = (jax.jit(ours) if jitted else ours)(given, scale)
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
