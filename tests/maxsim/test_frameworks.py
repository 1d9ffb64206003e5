"""MaxSim scores in PyTorch and JAX, and by the command: tokens go every way that rows go."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge import assert_grad, assert_loss

import infonce
from infonce import reference
from infonce.cli import main


def draw(seed: int = 0) -> tuple[Any, Any, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    masks = {"query_mask": rng.random((6, 4)) < 0.7, "key_mask": rng.random((6, 5)) < 0.7}
    masks["key_mask"][:, 1] = True
    return rng.standard_normal((6, 4, 8)), rng.standard_normal((6, 5, 8)), masks


LOSSES = ("clip", "info_nce", "lit", "siglip")
MODULES = {"clip": "CLIPLoss", "info_nce": "InfoNCELoss", "lit": "LiTLoss", "siglip": "SigLIPLoss"}


@pytest.mark.extras
@pytest.mark.parametrize("way", ["function", "module", "compiled"])
@pytest.mark.parametrize("loss", LOSSES)
def test_torch(loss: str, way: str) -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch

    query, key, masks = draw()
    want = getattr(infonce, f"{loss}_loss_and_grad")(query, key, scale=0.8, **masks)
    tensors = [torch.tensor(z, requires_grad=True) for z in (query, key)]
    masks = {name: torch.tensor(mask) for name, mask in masks.items()}
    function: Any = getattr(infonce.torch, f"{loss}_loss")
    options: dict[str, Any] = {"scale": 0.8}
    if way != "function":
        function, options = getattr(infonce.torch, MODULES[loss])(scale=0.8), {}
    if way == "compiled":
        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the second call is one like the first
        for z in tensors:
            z.grad = None
        value = function(*tensors, **masks, **options)
        value.backward()
        assert abs(value.item() - want.loss) <= 1e-14 * abs(want.loss)
        for z, wanted in zip(tensors, want.grads, strict=False):
            if wanted is not None:
                np.testing.assert_allclose(z.grad.numpy(), wanted, rtol=0, atol=1e-14)


@pytest.mark.extras
def test_torch_second_backward_and_autocast() -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch

    query, key, masks = draw()
    q, k = (torch.tensor(z, requires_grad=True) for z in (query, key))
    masks = {name: torch.tensor(mask) for name, mask in masks.items()}
    assert torch.autograd.gradcheck(
        lambda q, k: infonce.torch.clip_loss(q, k, scale=0.8, **masks), (q, k)
    )
    q, k = (z.detach().float().requires_grad_() for z in (q, k))
    with torch.autocast("cpu", torch.bfloat16):  # products stay in float32
        single = infonce.torch.clip_loss(q, k, scale=0.8, **masks)
    single.backward()
    wide = [z.detach().double().numpy() for z in (q, k)]
    scored = reference.maxsim(*wide, **{name: mask.numpy() for name, mask in masks.items()})
    want = reference.clip(scored.scores, np.eye(6), scale=0.8)
    logit = 0.8 * np.abs(scored.scores).max()
    assert_loss(single.item(), want.loss, "float32", logit)
    wanted = reference.maxsim_gradients(want.grads["image"], scored, *wide)
    for z, gradient in zip((q, k), wanted, strict=True):
        assert z.grad.dtype == torch.float32
        assert_grad(z.grad.numpy(), gradient, "float32", logit)


@pytest.mark.extras
@pytest.mark.parametrize("way", ["eager", "jit", "vmap"])
@pytest.mark.parametrize("loss", LOSSES)
def test_jax(loss: str, way: str) -> None:
    jax = pytest.importorskip("jax")
    import infonce.jax

    query, key, masks = draw()
    query, key = query.astype(np.float32), key.astype(np.float32)
    wrt = (0,) if loss == "lit" else (0, 1)

    def value(q: Any, k: Any) -> Any:
        return getattr(infonce.jax, f"{loss}_loss")(q, k, scale=0.8, **masks)

    function: Any = jax.value_and_grad(value, wrt)
    if way == "jit":
        function = jax.jit(function)
    batch = [(query, key)]
    if way == "vmap":
        function = jax.vmap(function)
        batch += [(-query, key[::-1]), (query[:, ::-1], 0.5 * key)]
        query, key = (np.stack(side) for side in zip(*batch, strict=True))
    got, gradients = function(query, key)
    for i, sides in enumerate(batch):
        want = getattr(infonce, f"{loss}_loss_and_grad")(*sides, scale=0.8, **masks)
        at = i if way == "vmap" else ()
        np.testing.assert_allclose(got[at], want.loss, rtol=1e-6)
        for z, wanted in zip(gradients, want.grads, strict=False):
            np.testing.assert_allclose(z[at], wanted, rtol=0, atol=1e-6)


def test_command(tmp_path: Path) -> None:
    from click.testing import CliRunner

    query, key, masks = draw()
    arguments = ["loss"]
    for name, array in (("image", query), ("text", key)):
        np.save(tmp_path / f"{name}.npy", array)
        arguments.append(str(tmp_path / f"{name}.npy"))
    for name, mask in masks.items():
        np.save(tmp_path / f"{name}.npy", mask)
        arguments += [f"--{name.replace('_', '-')}", str(tmp_path / f"{name}.npy")]
    done = CliRunner().invoke(
        main,
        [
            *arguments,
            "--scale",
            "0.8",
            "--token-mean",
            "--json",
            "--grad-out",
            str(tmp_path / "out"),
        ],
    )
    assert done.exit_code == 0, done.output
    want = infonce.clip_loss_and_grad(query, key, scale=0.8, token_mean=True, **masks)
    np.testing.assert_allclose(
        np.load(tmp_path / "out" / "image.npy"), want.grads.image, atol=1e-14
    )
