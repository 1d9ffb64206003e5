"""The modules of infonce.torch, those in the place of other projects' losses, and both adapters
with numbers at the ends of their range."""

import numpy as np
import pytest
from judge import pairs

torch = pytest.importorskip("torch")
from torch_problems import LOSSES, MODULES, arguments, call, features, formula  # noqa: E402

import infonce.torch as it  # noqa: E402

pytestmark = pytest.mark.extras


@pytest.mark.parametrize("loss", LOSSES)
def test_a_module_is_its_function(loss: str) -> None:
    """The same arguments and defaults, and keywords at construction or at the call."""
    z = [2 * side for side in features(loss, 16)]
    given = arguments(loss, z)
    module = MODULES[loss]
    for options in ({"temperature": 0.5}, {"scale": 3.0, "normalize": True, "reduction": "sum"}):
        want = call(loss, z, **options)
        torch.testing.assert_close(module(**options)(*given), want, rtol=0, atol=0)
        torch.testing.assert_close(module()(*given, **options), want, rtol=0, atol=0)
        assert all(
            f"{name}={value!r}" in repr(module(**options)) for name, value in options.items()
        )
    torch.testing.assert_close(
        module(scale=1.0, normalize=True)(*given, scale=2.0),
        call(loss, z, scale=2.0, normalize=True), rtol=0, atol=0,
    )  # fmt: skip
    if loss == "siglip":
        assert torch.equal(module()(*z), it.siglip_loss(*z))
        assert torch.equal(module()(*z, -4.0), it.siglip_loss(*z, -4.0))
    else:
        with pytest.raises(ValueError, match="temperature, scale: expected one of them, got nei"):
            module()(*given)
    if loss == "info_nce":
        labels = torch.arange(15, -1, -1)
        assert torch.equal(module(scale=2.0)(*z, labels), it.info_nce_loss(*z, labels, scale=2.0))


def test_open_clip() -> None:
    from infonce.torch.open_clip import ClipLoss, SigLipLoss

    image, text = features("clip", 16)
    scale = torch.tensor(2.0, dtype=torch.float64).exp()
    out = ClipLoss()(image, text, scale, output_dict=True)
    torch.testing.assert_close(out["contrastive_loss"], formula("clip", [image, text], scale))
    bias = torch.tensor(-10.0, dtype=torch.float64)
    # as published: -sum(logsigmoid(labels * logits)) / N
    torch.testing.assert_close(
        SigLipLoss()(image, text, scale, bias), formula("siglip", [image, text], scale, bias)
    )
    with pytest.raises(
        ValueError, match="rank, world_size: expected 0 <= rank < world_size, got 2"
    ):
        ClipLoss(rank=2, world_size=2)
    with pytest.raises(ValueError, match="use_horovod: expected False, got True"):
        ClipLoss(use_horovod=True)
    with pytest.raises(RuntimeError, match=r"group: expected torch\.distributed to be initialised"):
        SigLipLoss(rank=0, world_size=2)(image, text, scale, bias)


def test_memory_efficient_clip() -> None:
    from infonce.torch.memory_efficient_clip import MemoryEfficientCLIPLoss, MemoryEfficientLiTLoss

    image, text = features("clip", 16)
    torch.testing.assert_close(
        MemoryEfficientCLIPLoss(temperature=0.1)(3 * image, 2 * text),
        formula("clip", [image, text], 10.0),
    )
    torch.testing.assert_close(
        MemoryEfficientLiTLoss(temperature=0.1, normalized_inputs=True)(text, image),
        formula("lit", [text, image], 10.0),
    )
    torch.testing.assert_close(
        MemoryEfficientLiTLoss()(3 * text, image), formula("lit", [text, image], 1 / 0.07)
    )


def test_inf_cl() -> None:
    from infonce.torch.inf_cl import cal_inf_loss

    image, text = features("clip", 16)
    labels = torch.arange(15, -1, -1)
    torch.testing.assert_close(
        cal_inf_loss(image, text, scale=6.0), formula("info_nce", [image, text], 6.0)
    )
    torch.testing.assert_close(
        cal_inf_loss(image, text.flip(0), labels), formula("info_nce", [image, text], 1.0)
    )


def test_infonce_cuda() -> None:
    from infonce.torch.infonce_cuda import InfoNCELoss

    z = features("nt_xent", 16)
    torch.testing.assert_close(InfoNCELoss()(z[0]), formula("nt_xent", z, 2.0))
    torch.testing.assert_close(InfoNCELoss(0.1)(z[0]), formula("nt_xent", z, 10.0))
    assert "temperature=0.5" in repr(InfoNCELoss())


def test_numbers_at_the_ends_are_silent() -> None:
    jnp = pytest.importorskip("jax.numpy")
    import jax

    import infonce.jax as ij

    z = (pairs("random", 6, 6, 3, np.float32, 0)[0] * np.float32(3e37)).astype(np.float32)
    for rows in (z, z * np.float32(1e-30), np.full_like(z, np.inf)):
        tensor = torch.tensor(rows, requires_grad=True)
        it.clip_loss(tensor, tensor, temperature=1e-3).backward()
        half = jnp.asarray(1e4, jnp.float16)  # whose gradient has no room in its dtype
        jax.value_and_grad(lambda s, a: ij.clip_loss(a, a, scale=s))(half, jnp.asarray(rows))
    with pytest.raises(ValueError, match=r"temperature: expected a number in .* got 1e-09"):
        it.clip_loss(tensor, tensor, temperature=1e-9)
    with pytest.raises(ValueError, match="temperature: expected a positive number, got 0"):
        it.clip_loss(tensor, tensor, temperature=0)
