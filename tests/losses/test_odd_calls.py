"""Odd values for every argument of every loss: refused by name or taken, and nothing else."""

import decimal
import fractions
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge import LOSSES, arguments, pairs

import infonce
from infonce.checks import call as checks

Z = pairs("random", 6, 6, 4, np.float64, 0)
METHODS = ["naive", "fused", "tiled"]
FUNCTIONS = [f"{loss}_loss{end}" for loss in LOSSES for end in ("", "_and_grad")]


class Plain(np.ndarray):
    """A subclass that computes as arrays do."""


class Mute:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class NoArray:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")


def as_matrix(z: np.ndarray) -> Any:
    with pytest.warns(PendingDeprecationWarning, match="matrix"):
        return np.asmatrix(z)


TWINS: list[list[Any]] = [  # equal, and of one hash
    [True, 1, 1.0, np.True_, np.int64(1), np.float64(1), fractions.Fraction(1), decimal.Decimal(1)],
    [False, 0, 0.0, -0.0, np.False_, np.uint8(0), np.float32(0)],
    ["mean", np.str_("mean")],
    ["tiled", np.str_("tiled")],
    ["scale", np.str_("scale")],
]
ODD: list[Any] = [
    *(value for twins in TWINS for value in twins),
    None, -1, 2**31, 10**30, 10**400, 10**5000, -(10**5000), 2.5, -2.5, np.nan, np.inf, 1j,
    np.float16(3), np.longdouble(2), np.complex64(1), np.datetime64(3, "s"), np.timedelta64(3, "s"),
    fractions.Fraction(10**400, 3), decimal.Decimal(3), "", "x", "False", "1GiB", b"tiled",
    b"image", [], [1], [1, 2], [[1], [1, 2]], [None], [[]], (None, np.arange(6)), {}, {"image": 1},
    {1: 2}, set(), frozenset({1}), range(6), slice(3), object(), Mute(), NoArray(), np.ndarray,
    np.float32, np.array(2.0), np.array(2.0, object), np.array(3, "m8[s]"), np.array(True),
    np.zeros((), [("a", float)]), np.zeros(0), np.zeros(6), np.zeros(6, bool), np.arange(6),
    np.arange(6)[:, None], np.array([True, False]), np.array(["image"]), np.array([None] * 6),
    np.full(6, 2**64 - 1, np.uint64), Z[0].tolist(), Z[0].astype(object), Z[0].astype(str),
    Z[0].astype("m8[s]"), Z[0].astype(complex), Z[0].astype(np.longdouble), Z[0].astype(int),
    Z[0].view([("a", float)]), Z[0].view(np.recarray), Z[0].view(Plain), Z[0][:2, :3], Z[0][None],
    np.ma.masked, np.ma.masked_array(np.arange(6), mask=np.eye(6)[0]), np.ma.masked_array(Z[0]),
    [np.zeros((6, 4)), np.zeros((6, 4))], [np.zeros((6, 4)), np.zeros((6, 4), int)],
    {"image": np.broadcast_to(np.zeros(4), (6, 4))},
]  # fmt: skip


def call(function: str, argument: str, value: Any) -> Any:
    """The function as it is mostly called, but for one argument."""
    loss = function.partition("_loss")[0]
    names = [p for p in inspect.signature(getattr(infonce, function)).parameters]
    features = arguments(loss, *(z.copy() for z in Z))
    keywords: dict[str, Any] = dict(zip(names, features, strict=False))
    keywords |= {} if argument == "temperature" else {"scale": 2.0}
    return getattr(infonce, function)(**{**keywords, argument: value})


def outcome(function: str, argument: str, value: Any) -> str | None:
    """The message of the error, which begins with the caller's words, or None without an error."""
    try:
        call(function, argument, value)
    except (TypeError, ValueError) as error:
        message = str(error)
    else:
        return None
    features = ("image", "text", "query", "key", "features")
    names = features if argument in features else (argument, "temperature, scale", f"{function}()")
    assert message.startswith(names), message
    assert "\n" not in message
    assert len(message) < 500, message
    return message


@pytest.mark.parametrize("function", FUNCTIONS)
def test_odd_values(function: str) -> None:
    usual = call(function, "reduction", "mean")
    for argument in [*inspect.signature(getattr(infonce, function)).parameters, "unheard_of"]:
        for value in ODD:
            if argument == "progress" and callable(value):
                continue
            try:
                first = outcome(function, argument, value)
                again = outcome(function, argument, value)
            except Exception as error:
                error.add_note(f"{function}({argument}={type(value)})")
                raise
            assert first == again, argument
    again = call(function, "reduction", "mean")
    assert getattr(again, "loss", again) == getattr(usual, "loss", usual)


@pytest.mark.parametrize("function", ["siglip_loss_and_grad", "info_nce_loss_and_grad"])
def test_equal_values_of_other_types_are_checked_anew(function: str) -> None:
    for argument in inspect.signature(getattr(infonce, function)).parameters:
        for twins in TWINS:
            for value in twins:
                checks._cache.clear()
                want = outcome(function, argument, value)
                for twin in twins:
                    checks._cache.clear()
                    outcome(function, argument, twin)
                    got = outcome(function, argument, value)
                    assert got == want, (argument, twin, value)


@pytest.mark.parametrize(
    "make", [as_matrix, lambda z: z.view(np.recarray), lambda z: z.view(Plain)]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_subclasses_are_arrays(loss: str, method: str, make: Callable[[Any], Any]) -> None:
    args, options = arguments(loss, *Z), {"scale": 2.0, "method": method}
    function: Any = getattr(infonce, f"{loss}_loss_and_grad")
    want = function(*args, **options)
    out = [make(np.empty_like(z)) for z in args[: 1 if loss in ("nt_xent", "lit") else 2]]
    got = function(*map(make, args), scale=make(np.array([[2.0]]))[0, 0], method=method, out=out)
    assert type(got.loss) is np.ndarray
    assert got.loss == want.loss
    for array, gradient in zip(out, want.grads, strict=False):
        np.testing.assert_array_equal(np.asarray(array), gradient)
    assert got.grads[0] is out[0]
    assert type(function(*map(make, args), **options).grads[0]) is np.ndarray


def test_one_row_of_a_matrix_does_not_end_the_process() -> None:
    """An assignment of NumPy's to a matrix, by two vectors of indices, writes where it must not:
    sooner or later the process ends."""
    code = (
        "import infonce, numpy as np, warnings; warnings.simplefilter('ignore')\n"
        "z = np.asmatrix(np.ones((1, 16), np.float32))\n"
        "print({float(infonce.lit_loss(z, z, scale=1.0, method='naive')) for _ in range(50)})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert (done.returncode, done.stdout) == (0, "{0.0}\n"), done.stderr


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("query", Z[0]), ("key", Z[1]), ("labels", np.arange(6)), ("ids", np.arange(6)),
        ("grad_out", np.ones(6)), ("scale", np.array(2.0)), ("temperature", np.array(2.0)),
    ],
)  # fmt: skip
def test_masks_are_refused(argument: str, value: Any, method: str) -> None:
    arguments = {"query": Z[0], "key": Z[1], "method": method, "reduction": "none"}
    arguments |= {} if argument == "temperature" else {"scale": 2.0}
    for mask in (False, True):
        masked = np.ma.masked_array(value, mask=mask)
        infonce.info_nce_loss_and_grad(**{**arguments, argument: value})  # static
        with pytest.raises(TypeError, match=rf"^{argument}: expected .*Masked.* \.filled\("):
            infonce.info_nce_loss_and_grad(**{**arguments, argument: masked})
    with pytest.raises(TypeError, match=r"^out\['key'\]: expected .*Masked.* \.filled\("):
        infonce.info_nce_loss_and_grad(*Z, scale=1.0, out={"key": np.ma.empty((6, 4))})


def strided(*strides: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(100), (6, 4), strides)


@pytest.mark.parametrize("out", [strided(0, 8), strided(8, 8), strided(32, 0), strided(24, 8)])
def test_gradients_that_overlap_themselves_are_refused(out: np.ndarray) -> None:
    for order in (out, out[::-1], out[:, ::-1]):
        with pytest.raises(ValueError, match=r"out\['text'\]: expected elements that do not over"):
            infonce.clip_loss_and_grad(*Z, scale=1.0, out={"text": order})
    assert not out.any()


@pytest.mark.parametrize("method", ["naive", "fused", "tiled"])
@pytest.mark.parametrize("loss", ["clip", "gte", "siglip"])
def test_out_may_be_columns_of_one_array(loss: str, method: str) -> None:
    """Also of the array of the features."""
    function = getattr(infonce, f"{loss}_loss_and_grad")
    both = np.concatenate([*Z, np.full((6, 8), np.nan)], axis=1)
    features, out = (both[:, :4], both[:, 4:8]), (both[:, 8:12], both[:, 12:])
    got = function(*features, scale=2.0, method=method, out=out)
    want = function(*Z, scale=2.0, method=method)
    for gradient, array, expected in zip(got.grads[:2], out, want.grads[:2], strict=True):
        assert gradient is array
        np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(both[:, :8], np.concatenate(Z, axis=1))
    for shared in ((both[:, 8:12], both[:, 11:15]), (both[:, 3:7], both[:, 12:])):
        with pytest.raises(ValueError, match="out: expected arrays that share no memory"):
            function(*features, scale=2.0, out=shared)


@pytest.mark.parametrize("out", [strided(32, 8), strided(8, 48), strided(40, 8), strided(64, 16)])
def test_gradients_with_gaps_are_not(out: np.ndarray) -> None:
    want = infonce.clip_loss_and_grad(*Z, scale=1.0).grads.text
    for order in (out, out[::-1], out[:, ::-1]):
        infonce.clip_loss_and_grad(*Z, scale=1.0, out={"text": order})
        np.testing.assert_array_equal(order, want)
    row = {"text": strided(0, 8)[:1]}
    assert infonce.clip_loss_and_grad(Z[0][:1], Z[1][:1], scale=1.0, out=row).loss == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("out", [">f8", ">f4"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_of_the_other_byte_order(normalize: bool, out: str, method: str) -> None:
    z, text = [x.astype(np.float32) for x in Z], np.empty((6, 4), out)
    options = {"scale": 1.0, "method": method, "normalize": normalize}
    infonce.clip_loss_and_grad(*z, **options, out={"text": text})
    native = np.empty((6, 4), text.dtype.newbyteorder("="))
    infonce.clip_loss_and_grad(*z, **options, out={"text": native})
    np.testing.assert_array_equal(text, native)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", ["info_nce", "clip", "lit"])
def test_a_weight_of_zero_leaves_out_an_infinite_loss(
    loss: str, reduction: Any, method: Any
) -> None:
    """A decoupled row without negatives has a loss of -inf. A NaN is not left out."""
    args = [z.copy() for z in Z]
    function = getattr(infonce, f"{loss}_loss")
    ids = np.array([7, 7, 0, 0, 1, 2]), np.full(6, 7)
    options: dict[str, Any] = {"scale": 2.0, "decoupled": True, "method": method, "ids": ids}
    losses = function(*args, reduction="none", **options)
    assert np.isneginf(losses).tolist() == [True, True, False, False, False, False]
    weights = np.array([0.0, 0.0, 1.0, 0.5, 0.0, 2.0])
    want = np.append([0.0, 0.0], weights[2:] * losses[2:])
    want = {"none": want, "sum": want.sum(), "mean": want.sum() / weights.sum()}[reduction]
    got = function(*args, weights=weights, reduction=reduction, **options)
    np.testing.assert_allclose(got, want, rtol=1e-14)
    args[0][0, 0] = np.nan
    assert np.isnan(function(*args, weights=weights, **options))
