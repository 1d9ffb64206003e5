"""Encoders by chunks against one pass over the batch."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
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


def test_one_encoder_for_all_inputs() -> None:
    x = np.random.default_rng(0).standard_normal((8, 7))
    shared = Linear(1)
    out = infonce.grad_cache(
        infonce.nt_xent_loss_and_grad, [x], shared.encode, shared.backward, 3, scale=2.0
    )
    encoder = Linear(1)
    encoder.backward(x, out.grads.features)
    np.testing.assert_allclose(shared.gradient, encoder.gradient, rtol=1e-12)


@pytest.mark.extras
def test_torch_modules() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(7, 5).double(), *torch.randn(2, 9, 7).double()

    def encode(chunk: Any) -> Any:
        with torch.no_grad():
            return model(chunk)

    def backward(chunk: Any, gradient: Any) -> None:
        model(chunk).backward(gradient)

    out = infonce.grad_cache(
        infonce.clip_loss_and_grad, (x, y), encode, backward, 4, temperature=0.5
    )
    got = model.weight.grad.clone()
    model.zero_grad()
    logits = model(x) @ model(y).T / 0.5
    target = torch.arange(9)
    cross_entropy = torch.nn.functional.cross_entropy
    loss = (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2
    loss.backward()
    np.testing.assert_allclose(float(out.loss), loss.item(), rtol=1e-12)
    np.testing.assert_allclose(got.numpy(), model.weight.grad.numpy(), rtol=1e-10, atol=1e-13)


class Tokens(Linear):
    """`Linear` for a mapping of two arrays, whose sum it encodes."""

    def encode(self, x: Any) -> np.ndarray:
        return super().encode(x["tokens"] + x["mask"])

    def backward(self, x: Any, g: np.ndarray) -> None:
        super().backward(x["tokens"] + x["mask"], g)


def test_inputs_by_name_and_mappings_of_arrays() -> None:
    """Mappings in the caller's order; an entry may be a mapping of arrays. One encoder has fewer
    inputs than the loss has arrays."""
    rng = np.random.default_rng(0)
    x, y, mask = rng.standard_normal((3, 10, 7))
    own = rng.standard_normal((10, 3, 7))
    want_encoders, encoders = ([Linear(1), Tokens(2), Linear(3)] for _ in range(2))
    inputs = {"own": own, "key": {"tokens": y, "mask": mask}, "query": x}
    by_name = dict(zip(("query", "key", "own"), want_encoders, strict=True))
    want = infonce.info_nce_loss_and_grad(
        **{name: by_name[name].encode(z) for name, z in inputs.items()}, scale=2.0
    )
    for name in ("query", "key"):
        by_name[name].backward(inputs[name], getattr(want.grads, name))
    ordered = encoders[::-1]
    out = infonce.grad_cache(
        infonce.info_nce_loss_and_grad, inputs, [e.encode for e in ordered],
        [None, *(e.backward for e in ordered[1:])], 4, scale=2.0,
    )  # fmt: skip
    np.testing.assert_allclose(out.loss, want.loss, rtol=1e-13)
    for got, unchunked in zip(encoders, want_encoders, strict=True):
        np.testing.assert_allclose(got.gradient, unchunked.gradient, rtol=1e-11, atol=1e-14)
        assert got.largest == 4
    assert np.any(encoders[1].gradient)


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


@pytest.mark.extras
def test_large_batch_benchmark(tmp_path: Path) -> None:
    """large_batch.py at a CPU's size: trains, and says what the full matrix does."""
    pytest.importorskip("torch")
    script = Path(__file__).parents[2] / "benchmarks" / "frameworks" / "large_batch.py"
    output = tmp_path / "row.json"
    size = ["--rows", "500", "--dim", "16", "--steps", "4", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, str(script), *size, "--output", str(output)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = json.loads(output.read_text())["results"][0]
    assert row["losses"][-1] < 0.9 * row["losses"][0]
    assert row["full matrix"] == "completes"
    assert "500 pairs" in done.stdout
