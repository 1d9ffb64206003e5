"""The modules of infonce.torch, and both adapters with numbers at the ends of their range."""

import numpy as np
import pytest
from judge import pairs

torch = pytest.importorskip("torch")
from torch_problems import LOSSES, MODULES, arguments, call, features  # noqa: E402

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
