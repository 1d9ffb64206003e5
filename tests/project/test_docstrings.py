"""Docstrings of the losses begin with a sentence and have an example that runs."""

import importlib
import re

import numpy as np
import pytest

import infonce
from infonce.spec import LOSSES

RNG = np.random.default_rng(0)
ARRAYS = {
    name: RNG.standard_normal((8, 4), np.float32)
    for name in ("image", "text", "query", "key", "features")
}
NAMES = [f"{loss}_loss{end}" for loss in LOSSES for end in ("", "_and_grad")]


def example(module: str, name: str) -> str:
    """The example of a docstring, whose first line is a sentence."""
    doc = getattr(importlib.import_module(module), name).__doc__
    first, second = doc.split("\n")[:2]
    assert re.fullmatch(r"[A-Z].{20,78}\.", first)
    assert not second
    lines = re.findall(r"^>>> (.*)", doc, re.M)
    assert f" = {module}.{name}(" in lines[0]
    return "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str) -> None:
    """Those over ranks are the same."""
    pytest.importorskip("infonce.distributed")
    text = example("infonce", name)
    over_ranks = example("infonce.distributed", name)
    assert over_ranks.replace("infonce.distributed.", "infonce.") == text
    names = {"infonce": infonce, "labels": np.arange(8) % 3, **ARRAYS}
    first, *others = text.splitlines()
    exec(first, names)
    if name.endswith("_and_grad"):  # the others return the loss
        results = eval(others[0], names)
        assert len(results) > 2
        assert all(np.isfinite(result).all() for result in results)
    else:
        assert np.isfinite(names["loss"])


@pytest.mark.extras
@pytest.mark.parametrize("name", [f"{loss}_loss" for loss in LOSSES])
def test_examples_of_jax_run(name: str) -> None:
    pytest.importorskip("jax")
    names = {"infonce": infonce, "labels": np.arange(8) % 3, **ARRAYS}
    exec(example("infonce.jax", name), names)
    assert np.isfinite(names["loss"])


@pytest.mark.extras
@pytest.mark.parametrize("name", [
    *(f"{loss}_loss" for loss in LOSSES), "InfoNCELoss", "NTXentLoss", "CLIPLoss", "LiTLoss",
    "SigLIPLoss", "SupConLoss", "GTELoss",
])  # fmt: skip
def test_examples_of_torch_run(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = {n: torch.from_numpy(z.copy()).requires_grad_() for n, z in ARRAYS.items()}
    names = {"infonce": infonce, "labels": torch.arange(8) % 3, **tensors}
    exec(example("infonce.torch", name), names)
    assert torch.isfinite(names["loss"])
    if name.endswith("_loss"):  # the example calls backward
        assert any(z.grad is not None for z in tensors.values())
