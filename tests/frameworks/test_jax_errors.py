"""What infonce.jax does not take: bad calls, and derivatives that there are none of."""

import functools
import re
from typing import Any

import numpy as np
import pytest
from bad_calls import NUMERIC
from judge import pairs

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import infonce.jax as ij  # noqa: E402
from infonce import spec  # noqa: E402

pytestmark = pytest.mark.extras


def features() -> list[Any]:
    return list(map(jnp.asarray, pairs("random", 12, 12, 5, np.float32, 0)))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("loss", "args", "options", "error", "words"), NUMERIC)
def test_bad_calls_are_those_of_arrays(
    loss: str, args: Any, options: dict[str, Any], error: type[Exception], words: list[str],
    jitted: bool,
) -> None:  # fmt: skip
    """While JAX traces, but for a workspace that the computation finds too small."""
    options = {"scale": 2.0, **options}
    taken = {
        "scale",
        "temperature",
        "own",
        "metrics",
        *spec.INTEGER_OPTIONS,
        *spec.ARRAY_OPTIONS,
        *spec.COMPILED_OPTIONS,
        *spec.PREFIX_OPTIONS,
    }
    if spec.DEFAULTS.keys() & options.keys() - taken:
        error, words = TypeError, ["unexpected keyword argument"]
    function = functools.partial(getattr(ij, f"{loss}_loss"), **options)
    with jax.enable_x64(True):
        arguments = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
        leaves = [i for i, z in enumerate(arguments) if isinstance(z, jax.Array)]

        def traced(*arrays: Any) -> Any:
            mixed = list(arguments)
            for i, z in zip(leaves, arrays, strict=True):
                mixed[i] = z
            return function(*mixed)

        if (
            options.keys() & {"workspace"}
            and error is ValueError
            and options["workspace"] in (8, 400)
        ):
            traced, error = jax.grad(traced), jax.errors.JaxRuntimeError
        if jitted and words[0].startswith("label_weights: expected finite"):
            error = jax.errors.JaxRuntimeError  # which of them count is known with the labels
        with pytest.raises(error) as caught:
            jax.block_until_ready((jax.jit(traced) if jitted else traced)(
                *[arguments[i] for i in leaves]))  # fmt: skip
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
    ("gte", "weights: expected numbers that are not negative, got -1.0 at position 0",
     {"weights": np.linspace(-1, 1, 12)}),
    ("lit", "key_bias: expected finite numbers, got nan at position 11",
     {"key_bias": np.where(LABELS == 12, np.nan, 0.0)}),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "message", "bad"), VALUES)
def test_bad_values(loss: str, message: str, bad: dict[str, Any]) -> None:
    """The error of arrays where JAX knows them while it traces; else at the end of its own."""
    z = features()
    bad = {name: jnp.asarray(value) for name, value in bad.items()}

    def step(z: Any, options: Any) -> Any:
        return getattr(ij, f"{loss}_loss")(*z, **{"scale": 2.0, **options})

    def known(z: Any) -> Any:
        return step(z, bad)

    for function in (known, jax.grad(known), jax.jit(known), jax.jit(jax.grad(known))):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            function(z)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(step)(z, bad))
    assert str(caught.value).endswith(f"\nValueError: {message}")


def test_errors() -> None:
    image, text = features()
    with pytest.raises(ValueError, match=r"text: expected 12 rows like image, got shape \(3, 5\)"):
        jax.jit(lambda z: ij.clip_loss(z, z[:3], scale=1.0))(image)
    with pytest.raises(ValueError, match="temperature, scale: expected one of them, got both"):
        ij.clip_loss(image, text, scale=jnp.asarray(1.0), temperature=1.0)
    for value, error, match in (
        (jnp.ones(2), TypeError, r"number or an array of one number, got .* shape \(2,\)"),
        (jnp.asarray(True), TypeError, "number or an array of one number, got bool True"),
        (jnp.asarray(1j), TypeError, "number or an array of one number, got complex"),
        ("1", TypeError, "number or an array of one number, got '1'"),
    ):
        for name in ("scale", "temperature"):
            with pytest.raises(error, match=f"^{name}: expected a {match}"):
                ij.clip_loss(image, text, **{name: value})
            if isinstance(value, jax.Array):
                with pytest.raises(error, match=f"^{name}: expected a number or an array"):
                    jax.jit(lambda v, name=name: ij.clip_loss(image, text, **{name: v}))(value)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'normalise'.*'normalize'"):
        ij.clip_loss(image, text, scale=1.0, normalise=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'grad_out' \(expected one"):
        ij.clip_loss(image, text, scale=1.0, grad_out=2.0)
    with pytest.raises(TypeError, match="labels: expected integers, got 'abc'"):
        ij.info_nce_loss(image, text, "abc", scale=1.0)


def test_no_second_derivative() -> None:
    image, text = features()
    first = jax.grad(lambda z: ij.clip_loss(z, text, scale=2.0))
    second = jax.grad(lambda z: first(z).sum())
    hessian = jax.hessian(lambda z: ij.clip_loss(z, text, scale=2.0))
    for transform in (second, jax.jit(second), hessian, jax.jit(hessian)):
        with pytest.raises(TypeError, match=r"clip_loss: gradients.*cannot be differentiated"):
            transform(image)


def test_no_forward_mode() -> None:
    image, text = features()

    def loss(image: Any) -> Any:
        return ij.clip_loss(image, text, scale=2.0)

    for forward in (lambda f: jax.jvp(f, (image,), (image,)), lambda f: jax.jacfwd(f)(image),
                    lambda f: jax.linearize(f, image)[1](image)):  # fmt: skip
        for function in (loss, jax.jit(loss)):
            with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
                forward(function)
