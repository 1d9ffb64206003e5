"""Encoders by chunks against one pass over the batch."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import infonce


class Linear:
    """tanh(x w), its rows independent of each other."""

    def __init__(self, seed: int) -> None:
        self.w = np.random.default_rng(seed).standard_normal((7, 5))
        self.gradient = np.zeros_like(self.w)
        self.largest = 0

    def encode(self, x: np.ndarray) -> np.ndarray:
        self.largest = max(self.largest, len(x))
        return np.tanh(x @ self.w)

    def backward(self, x: np.ndarray, g: np.ndarray) -> None:
        self.largest = max(self.largest, len(x))
        self.gradient += x.T @ (g * (1 - np.tanh(x @ self.w) ** 2))


def test_locked_encoders_have_no_backward() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 6, 7))
    text, image = Linear(1), Linear(2)
    infonce.grad_cache(
        infonce.lit_loss_and_grad, (x, y), [text.encode, image.encode],
        [text.backward, image.backward], 4, scale=2.0,
    )  # fmt: skip
    assert np.any(text.gradient)
    assert not np.any(image.gradient)


@pytest.mark.parametrize("chunk", [2, 6])
@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.extras)])
def test_an_encoder_may_return_the_same_memory(library: str, chunk: int) -> None:
    """For each chunk, and for both inputs. (With JAX no array changes.)"""
    xp: Any = pytest.importorskip(library)
    x, y = (xp.asarray(z) for z in np.random.default_rng(0).standard_normal((2, 6, 7)))
    memory = xp.empty((chunk, 7), dtype=xp.float64)

    def encode(z: Any) -> Any:
        memory[:] = 2 * z
        return memory

    got: list[Any] = []
    out = infonce.grad_cache(
        infonce.clip_loss_and_grad, (x, y), encode, lambda z, g: got.append(g), chunk, scale=2.0
    )
    want = infonce.clip_loss_and_grad(2 * x, 2 * y, scale=2.0)
    assert out.loss == want.loss
    got = [np.concatenate(side) for side in np.split(np.stack(got), 2)]
    for side, gradient in zip(got, want.grads[:2], strict=True):
        np.testing.assert_array_equal(side, gradient)


@pytest.mark.parametrize("change", [lambda z: z[:, :1], lambda z: z.astype(np.float32)])
def test_chunks_of_another_width_or_dtype(change: Any) -> None:
    x = np.ones((3, 7))
    words = r"encode: expected the same width and dtype of all chunks, got .* \(2, 7\) .* \(1, "
    with pytest.raises(ValueError, match=words):
        infonce.grad_cache(
            infonce.clip_loss_and_grad, (x, x), lambda z: change(z) if len(z) == 1 else z,
            no_encoder, 2, scale=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"encode": lambda z: z[1:]},
            ValueError,
            "encode: expected features of 2 rows, got ndarray of shape (1, 7)",
        ),
        (
            {"encode": [lambda z: z, lambda z: z[[0, 1, 0]]]},
            ValueError,
            "encode[1]: expected features of 2 rows, got ndarray of shape (3, 7)",
        ),
        (
            {"encode": lambda z: np.float64(3.0)},
            ValueError,
            "encode: expected features of 2 rows, got float64",
        ),
        (
            {"encode": lambda z: {"features": z}},
            ValueError,
            "encode: expected features of 2 rows, got dict",
        ),
        (
            {"inputs": [np.ones((4, 7)), {"a": np.ones((4, 7)), "b": np.ones(3)}]},
            ValueError,
            "inputs: expected the same number of rows in each of inputs[1], got [4, 3]",
        ),
        (
            {"inputs": {"query": {}, "key": np.ones(3)}},
            ValueError,
            "inputs: expected the same number of rows in each of inputs['query'], got []",
        ),
        (
            {"inputs": [3, np.ones(3)]},
            TypeError,
            "inputs: expected objects with length and slices in inputs[0], got int 3",
        ),
        ({"inputs": {}}, TypeError, "inputs: expected a list, tuple or mapping"),
        ({"loss_and_grad": infonce.clip_loss}, TypeError, "loss_and_grad: expected a function X_l"),
        (
            {"loss_and_grad": partial(infonce.clip_loss, scale=1.0)},
            TypeError,
            "loss_and_grad: expected a function X_loss_and_grad of infonce or infonce.distributed, "
            "got clip_loss",
        ),
        ({"loss_and_grad": 3}, TypeError, "loss_and_grad: expected a function X_loss_and_grad"),
        ({"chunk": 0}, ValueError, "chunk: expected at least 1, got 0"),
        ({"chunk": 2.0}, TypeError, "chunk: expected an integer, got float 2.0"),
        ({"inputs": np.ones((2, 3))}, TypeError, "inputs: expected a list, tuple or mapping"),
        ({"encode": [len]}, ValueError, "encode: expected one callable or 2 of them, got 1"),
        ({"encode": None}, TypeError, "encode: expected a callable, got NoneType None"),
        ({"backward": "x"}, TypeError, "backward: expected a callable, got str"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    x = np.ones((4, 7))
    arguments = {"loss_and_grad": infonce.clip_loss_and_grad, "inputs": (x, x),
                 "encode": no_encoder, "backward": lambda z, g: None, "chunk": 2}  # fmt: skip
    with pytest.raises(error) as caught:
        infonce.grad_cache(**{**arguments, **change}, scale=1.0)
    assert words in str(caught.value)


def no_encoder(*_: Any) -> Any:
    raise AssertionError("an error comes before any work")


def test_a_function_without_gradients() -> None:
    x = np.eye(4)
    with pytest.raises(
        TypeError, match=r"loss_and_grad: .*, got one that returns ndarray of shape"
    ):
        infonce.grad_cache(
            lambda *z, **o: infonce.clip_loss(*z, **o), (x, x), lambda z: z, no_encoder, 2, scale=1
        )


@pytest.mark.extras
def test_torch_arguments_that_get_no_gradient() -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch as it

    z = torch.eye(4)
    for loss in (it.CLIPLoss(scale=1.0), it.clip_loss, partial(it.clip_loss, scale=1.0)):
        with pytest.raises(TypeError, match=r"^loss_and_grad: expected a function X_loss_and_grad"):
            infonce.grad_cache(loss, (z, z), no_encoder, no_encoder, 2)
    learnt = torch.tensor(2.0, requires_grad=True)
    for function, name, words in (
        (infonce.clip_loss_and_grad, "scale", r"scale\.detach\(\).*out\.grads\.scale is"),
        (infonce.clip_loss_and_grad, "temperature", r"temperature\.detach.*out\.grads\.scale is"),
        (infonce.siglip_loss_and_grad, "bias", r"bias\.detach\(\).*out\.grads\.bias is"),
        (infonce.clip_loss_and_grad, "weights", r"weights\.detach\(\) makes one$"),
    ):
        value = learnt * torch.ones(4) if name == "weights" else learnt
        with pytest.raises(
            ValueError, match=f"^{name}: expected a tensor that requires no .*{words}"
        ):
            infonce.grad_cache(function, (z, z), no_encoder, no_encoder, 2, **{name: value})
    out = infonce.grad_cache(
        infonce.clip_loss_and_grad, (z, z), lambda z: z, lambda z, g: None, 2,
        scale=learnt.detach(),
    )  # fmt: skip
    learnt.backward(out.grads.scale)
    want = torch.autograd.grad(it.clip_loss(z, z, scale=learnt), learnt)[0]
    torch.testing.assert_close(learnt.grad, want)
