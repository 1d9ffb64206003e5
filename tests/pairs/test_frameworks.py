"""Guides in PyTorch and JAX: the numbers of NumPy, no gradient, errors."""

from typing import Any

import numpy as np
import pytest

import infonce

pytestmark = pytest.mark.extras
RNG = np.random.default_rng(0)
Z, GUIDE = RNG.standard_normal((2, 12, 4)), RNG.standard_normal((2, 12, 3))
OPTIONS: dict[str, Any] = {"scale": 3.0, "guide_margin": 0.1}


def arguments(name: str, convert: Any) -> tuple[list[Any], Any]:
    """Features and the guide of a call, as arrays of a library."""
    if name == "nt_xent":
        return [convert(Z[0])], convert(GUIDE[0])
    return [convert(z) for z in Z], tuple(convert(z) for z in GUIDE)


def test_torch_refuses_guides_that_want_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch as losses

    features, guide = arguments("clip", torch.tensor)
    guide[1].requires_grad_()
    with pytest.raises(ValueError, match="guide: expected a tensor that requires no gradient"):
        losses.clip_loss(*features, guide=guide, scale=1.0)
    with pytest.raises(TypeError, match="guide: expected a pair"):
        losses.clip_loss(*features, guide=guide[0], scale=1.0)


def test_jax_refuses_guides_that_are_differentiated() -> None:
    jax = pytest.importorskip("jax")
    import infonce.jax as losses

    features, guide = arguments("clip", jax.numpy.asarray)

    def value(guide: Any) -> Any:
        return losses.clip_loss(*features, guide=guide, scale=1.0)

    with pytest.raises(ValueError, match="guide: expected an array that is not differentiated"):
        jax.grad(value)(guide)
    with pytest.raises(ValueError, match=r"guide\[1\]: expected shape \(12, 3\)"):
        losses.clip_loss(*features, guide=(guide[0], guide[1][:3]), scale=1.0)


def test_distillation_of_float16_features_keeps_small_gradients() -> None:
    """Gradients stay float32 until a GradScaler's factor arrives. In float16 they would be 0."""
    torch = pytest.importorskip("torch")
    import infonce.torch as losses

    query, key = (z.astype(np.float16) for z in Z)
    teacher = [1.02 * z.astype(np.float64) for z in (query, key)]  # nearly the same logits
    factor = 2.0**24
    want = infonce.distill_loss_and_grad(
        query.astype(np.float64), key.astype(np.float64), *teacher, scale=1e-3
    )
    assert 0 < np.abs(want.grads.query).max() < 2.0**-25
    tensors = [torch.tensor(query, requires_grad=True), torch.tensor(key, requires_grad=True)]
    others = [torch.tensor(z, dtype=torch.float32) for z in teacher]
    (factor * losses.distill_loss(*tensors, *others, scale=1e-3)).backward()
    for z, gradient in zip(tensors, want.grads[:2], strict=True):
        assert z.grad.dtype == torch.float16
        # float16 rounds by 2^-11. An element of dL/dx, about scale / 144, is the difference of two
        # probabilities rounded to float32: 2^-24, times 12 keys of norm 4 and times 2^24
        np.testing.assert_allclose(z.grad, factor * gradient, rtol=2.0**-11, atol=12 * 4e-3 / 144)
        assert abs(z.grad).max() > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler reads it
def test_distillation_breaks_a_compiled_graph() -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch as losses

    query, *others = [torch.tensor(z) for z in (*Z, *GUIDE)]
    query.requires_grad_()

    def loss(query: Any) -> Any:
        return 2 * losses.distill_loss(query, *others, scale=3.0, normalize=True)

    value, want = torch.compile(loss, backend="aot_eager")(query), loss(query)
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, query) for each in (value, want)))


def test_bad_distillation_in_torch() -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch as losses

    z = torch.eye(3)
    with pytest.raises(TypeError, match="teacher_key: expected a tensor, got"):
        losses.distill_loss(z, z, z, np.eye(3), scale=1.0)
    with pytest.raises(ValueError, match="temperature, scale: expected one of them, got neither"):
        losses.distill_loss(z, z, z, z)
    with pytest.raises(ValueError, match=r"teacher_key: expected shape \(3, 3\), got \(2, 3\)"):
        losses.distill_loss(z, z, z, z[:2], scale=1.0)


def test_bad_distillation_in_jax() -> None:
    jax = pytest.importorskip("jax")
    import infonce.jax as losses

    query, key, *teacher = (jax.numpy.asarray(z) for z in (*Z, *GUIDE))
    for bad, words in (
        ({"axis_name": "x"}, "axis_name: expected the name of an axis"),
        ({"teacher_key": teacher[1][:3]}, r"teacher_key: expected shape \(12, 3\), got \(3, 3\)"),
        ({"teacher_scale": -1.0}, "teacher_scale: expected a positive"),
        ({"guide": tuple(teacher)}, "guide: expected None for distill"),
        ({"dims": (2, 4)}, "dims: expected None for distill"),
    ):
        arguments = dict(zip(("teacher_query", "teacher_key"), teacher, strict=True)) | bad
        with pytest.raises(ValueError, match=words):
            losses.distill_loss(query, key, **arguments, scale=1.0)
    with pytest.raises(TypeError, match="teacher_query: expected a JAX array, got list"):
        losses.distill_loss(query, key, [1.0], teacher[1], scale=1.0)
    with pytest.raises(ValueError, match="teacher_key: expected an array that is not differ"):
        jax.grad(lambda z: losses.distill_loss(query, key, teacher[0], z, scale=1.0))(teacher[1])
