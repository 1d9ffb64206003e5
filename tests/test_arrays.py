"""Other libraries' arrays: the same results, as arrays of the caller's kind, without copies."""

from typing import Any

import numpy as np
import pytest
from judge import LOSSES, arguments, pairs

import infonce
from infonce import arrays


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_torch_on_the_cpu(torch: Any, loss: str, dtype: str) -> None:
    args = arguments(loss, *pairs("partly aligned", 20, 20, 5, np.float64, 0))
    tensors = [torch.from_numpy(z).to(getattr(torch, dtype)) for z in args]
    same = [arrays.native(t) for t in tensors]
    function = getattr(infonce, f"{loss}_loss_and_grad")
    want = function(*same, scale=torch.tensor(5.0))
    got = function(*tensors, scale=5.0)
    assert got.loss.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert got.loss.shape == ()
    assert float(got.loss) == float(want.loss)
    for g, w in zip(got.grads, want.grads, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            assert isinstance(g, torch.Tensor)
            if g.ndim == 2:
                assert g.dtype == tensors[0].dtype
            np.testing.assert_array_equal(g.double().numpy(), w.astype(np.float64))
    out = [torch.empty_like(t) for t in tensors[: 1 if loss in ("nt_xent", "lit") else 2]]
    again = function(*tensors, scale=5.0, out=out)
    assert again.grads[0] is out[0]
    assert torch.equal(out[0], got.grads[0])


def test_torch_memory_is_shared(torch: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.ones(3, 2, dtype=dtype, requires_grad=True)
        assert arrays.native(tensor).ctypes.data == tensor.data_ptr()


def test_anything_with_dlpack() -> None:
    class Wrapped:
        def __init__(self, z: np.ndarray) -> None:
            self.z = z

        def __dlpack__(self, **options: Any) -> Any:
            return self.z.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.z.__dlpack_device__()

    image, text = pairs("random", 9, 9, 4, np.float32, 1)
    got = infonce.clip_loss(Wrapped(image), Wrapped(text), scale=3.0)
    assert got == infonce.clip_loss(image, text, scale=3.0)


def test_jax_on_the_cpu() -> None:
    jax = pytest.importorskip("jax")
    image, text = pairs("random", 9, 9, 4, np.float32, 1)
    got = infonce.clip_loss_and_grad(jax.numpy.asarray(image), jax.numpy.asarray(text), scale=3.0)
    want = infonce.clip_loss_and_grad(image, text, scale=3.0)
    assert isinstance(got.grads.image, jax.Array)
    np.testing.assert_array_equal(np.asarray(got.grads.image), want.grads.image)
