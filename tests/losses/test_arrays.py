"""Other libraries' arrays: the same results, as arrays of the caller's kind, without copies."""

import functools
import sys
import weakref
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from judge import LOSSES, arguments, pairs

import infonce
from infonce import arrays
from infonce.training.capture import Captured

pytestmark = pytest.mark.extras


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


DTYPES = ["float64", "float32", "float16", "bfloat16"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_storages_can_be_resized_after_calls(torch: Any, loss: str, dtype: str) -> None:
    """Those of features and of arrays of the caller's for gradients; a second call has a template
    of the first."""
    pair = pairs("partly aligned", 20, 20, 5, np.float64, 0)
    features = [torch.tensor(z).to(getattr(torch, dtype)) for z in arguments(loss, *pair)]
    scale = torch.tensor(5.0, requires_grad=True)
    out = [torch.empty_like(z) for z in features[: 1 if loss == "lit" else None]]
    function = getattr(infonce, f"{loss}_loss_and_grad")
    function(*features, scale=scale.detach(), out=out)
    leaves = [z.clone().requires_grad_() for z in features]
    for _ in range(2):
        getattr(infonce.torch, f"{loss}_loss")(*leaves, scale=scale).backward()
    for z in (*features, *out, *leaves, scale):
        z.untyped_storage().resize_(0)


def test_storages_of_options_can_be_resized_after_a_call(torch: Any) -> None:
    z = torch.randn(6, 4, requires_grad=True)
    ids, weights, labels = torch.arange(6), torch.ones(6), torch.arange(6).flip(0)
    own, guide = torch.randn(6, 2, 4, requires_grad=True), torch.randn(6, 3)
    mask, key_bias = torch.ones(6, 2, dtype=torch.bool), torch.zeros(6)
    upstream = torch.ones(6)
    loss = infonce.torch.info_nce_loss(
        z, z, labels, scale=2.0, ids=ids, weights=weights, own=own, own_mask=mask,
        key_bias=key_bias, guide=(guide, guide), reduction="none",
    )  # fmt: skip
    loss.backward(upstream)
    teacher = torch.randn(6, 3)
    infonce.torch.distill_loss(z, z, teacher, teacher, scale=2.0).backward()
    for tensor in (z, ids, weights, labels, own, guide, mask, key_bias, upstream, teacher):
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "dtype",
    [*DTYPES, "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"],
)
@pytest.mark.parametrize("rows", [0, 4])
def test_views_of_tensors_are_those_of_numpy(torch: Any, dtype: str, rows: int) -> None:
    """In value, dtype, strides and memory, which the array keeps alive."""
    tensor = torch.arange(8 * rows * 3).reshape(3, 4 * rows, 2).to(getattr(torch, dtype))
    for view in (tensor, tensor[1], tensor[:, ::3], tensor.transpose(0, 2), tensor[0, :, 1]):
        got, want = arrays.native(view), view.double().numpy()
        assert got.flags.writeable
        assert got.dtype.name == dtype
        assert got.strides == tuple(n * got.itemsize for n in view.stride()) or not view.numel()
        np.testing.assert_array_equal(got.astype(np.float64), want)
    array, want = arrays.native(tensor), tensor.double().numpy().copy()
    alive = weakref.ref(tensor)
    del tensor, view
    assert alive() is not None or not rows
    np.testing.assert_array_equal(array.astype(np.float64), want)
    del array, got
    assert alive() is None


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Losses that have warned, as in a new process."""
    names: set[str] = set()
    monkeypatch.setattr(arrays, "_warned", names)
    return names


@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_that_gets_lost_is_told_once(torch: Any, loss: str, warned: set[str]) -> None:
    args = arguments(loss, *pairs("random", 6, 6, 4, np.float32, 0))
    tensors = [torch.from_numpy(z) for z in args]
    watched = tensors[-1].clone().requires_grad_()
    name = {"info_nce": "key", "nt_xent": "features", "lit": "image"}.get(loss, "text")
    function = getattr(infonce, f"{loss}_loss")
    want = function(*tensors, scale=2.0)
    with torch.no_grad():
        assert function(*tensors[:-1], watched, scale=2.0) == want
    getattr(infonce, f"{loss}_loss_and_grad")(*tensors[:-1], watched, scale=2.0)
    assert not warned
    with pytest.warns(UserWarning, match=f"reach {name}, .*infonce.torch.{loss}_loss") as caught:
        again = [function(*tensors[:-1], watched, scale=2.0) for _ in range(2)]
    assert again == [want, want]
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("name", ["scale", "temperature", "bias"])
def test_scalars_lose_their_gradients_too(torch: Any, name: str, warned: set[str]) -> None:
    tensors = [torch.from_numpy(z) for z in pairs("random", 6, 6, 4, np.float32, 0)]
    value = torch.tensor(2.0, requires_grad=True)
    infonce.siglip_loss(*(z.numpy() for z in tensors), **{name: value})  # an array has no graph
    with pytest.warns(UserWarning, match=f"no gradient will reach {name}, "):
        infonce.siglip_loss(*tensors, **{name: value})


def test_prefixes_lose_their_gradients_too(torch: Any, warned: set[str]) -> None:
    image, text = (torch.from_numpy(z) for z in pairs("random", 6, 6, 4, np.float32, 0))
    with pytest.warns(UserWarning, match="no gradient will reach text, ") as caught:
        infonce.clip_loss(image, text.requires_grad_(), scale=2.0, normalize=True, dims=[2, 4])
    assert [warning.filename for warning in caught] == [__file__]


def test_autograd_s_own_functions_lose_none(torch: Any, warned: set[str]) -> None:
    import infonce.torch

    image = torch.ones(6, 4, requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    for reduction in ("mean", "none"):
        infonce.torch.clip_loss(image, image, scale=scale, reduction=reduction).sum().backward()
    assert not warned


UNREADABLE = {
    "sparse": lambda torch, z: z.to_sparse(),
    "meta": lambda torch, z: z.to("meta"),
    "conjugate": lambda torch, z: z.to(torch.complex64).conj(),
    "negative": lambda torch, z: z.to(torch.complex64).conj().imag,
    "float8": lambda torch, z: z.to(torch.float8_e4m3fn),
    "freed": lambda torch, z: without_memory(z.clone()),
}


def without_memory(tensor: Any) -> Any:
    """The tensor, after its storage was freed, as `fully_shard` frees those of parameters."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("kind", UNREADABLE)
def test_tensors_that_cannot_be_read(torch: Any, kind: str) -> None:
    tensor = torch.ones(6, 4)
    bad = UNREADABLE[kind](torch, tensor)
    message = "text: expected an array that can be read, got Tensor: "
    with pytest.raises(TypeError, match=message):
        infonce.clip_loss(tensor, bad, scale=1.0)
    if kind in ("negative", "freed"):
        infonce.torch.clip_loss(tensor, tensor, scale=1.0)  # a repeated call has its own way
        with pytest.raises(TypeError, match=message):
            infonce.torch.clip_loss(tensor, bad, scale=1.0)


def test_tensors_under_a_transformation_cannot_be_read(torch: Any) -> None:
    tensor = torch.ones(6, 4)
    loss = torch.func.grad(lambda z: infonce.clip_loss(z, tensor, scale=1.0))
    with pytest.raises(TypeError, match="image: expected an array that can be read, got Tensor: "):
        loss(tensor)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_records_no_constant(torch: Any, mode: str) -> None:
    """Also for a repeated call, which has its own way."""
    from torch.fx.experimental.proxy_tensor import make_fx

    z = torch.ones(6, 4)
    for loss in (infonce.clip_loss, infonce.clip_loss_and_grad, infonce.torch.clip_loss):
        call = functools.partial(loss, text=z, scale=1.0)
        call(z)
        with pytest.raises(TypeError, match=r"image: .* make_fx would record the loss as a const"):
            make_fx(lambda image: call(image), tracing_mode=mode)(z)  # noqa: B023
    eye, module = torch.eye(6, 4), infonce.torch.CLIPLoss(scale=1.0)
    graph = make_fx(torch.export.export(module, (z, eye)).module())(z, eye)
    torch.testing.assert_close(graph(eye, z), module(eye, z))


@pytest.mark.parametrize("argument", ["query", "key", "labels", "ids", "scale", "grad_out"])
def test_traced_arrays_of_jax_name_the_adapter(argument: str) -> None:
    jax = pytest.importorskip("jax")
    options = {"query": np.eye(6, dtype="f"), "key": np.eye(6, dtype="f"), "scale": 2.0}
    value = np.arange(6.0) if argument in ("labels", "ids") else options.get(argument, 1.0)

    def traced(z: Any) -> Any:
        given_ = {**options, argument: z}
        if argument == "grad_out":
            return infonce.info_nce_loss_and_grad(**given_).loss
        return infonce.info_nce_loss(**given_)

    match = f"^{argument}: expected an array that can be read, got .*: infonce.jax has the losses"
    value = jax.numpy.asarray(value)
    for transformed in (jax.jit(traced), jax.grad(traced)):
        with pytest.raises(TypeError, match=match):
            transformed(value)
    with pytest.raises(TypeError, match=match):
        jax.vmap(traced)(value[None])


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


def test_a_captured_call_keeps_the_arrays_of_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph reads a 0-d scale at every launch, also if the caller has dropped the array."""
    monkeypatch.setitem(sys.modules, "cupy", MagicMock())
    scale = np.array(2.0)
    kept = weakref.ref(scale)
    step = Captured(lambda *features, **options: None, (np.eye(2),), {"scale": scale})
    del scale
    assert kept() is not None
    step()
