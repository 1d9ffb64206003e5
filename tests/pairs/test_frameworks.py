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


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-14)


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


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_distillation_in_torch(dtype: str, two_sided: bool) -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch as losses

    arrays = [z.astype(dtype) for z in (*Z, *GUIDE)]
    options: dict[str, Any] = {"teacher_scale": 2.0, "normalize": True, "two_sided": two_sided}
    want = infonce.distill_loss_and_grad(*arrays, scale=3.0, **options)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}[dtype]
    for reduction in ("mean", "none"):
        tensors = [torch.tensor(z) for z in arrays]
        scale = torch.tensor(3.0, requires_grad=True)
        for z in tensors[:2]:
            z.requires_grad_()
        loss = losses.distill_loss(*tensors, scale=scale, reduction=reduction, **options)
        assert loss.shape == ((12,) if reduction == "none" else ())
        (2.0 * loss.mean()).backward()
        np.testing.assert_allclose(loss.detach().mean(), want.loss, rtol=1e-5)
        np.testing.assert_allclose(scale.grad, 2 * want.grads.scale, rtol=1e-5, atol=1e-6)
        for z, gradient in zip(tensors[:2], want.grads[:2], strict=True):
            assert z.grad.dtype == z.dtype
            np.testing.assert_allclose(z.grad, 2 * gradient, rtol=tolerance, atol=tolerance)
    temperature = torch.tensor(1 / 3.0, dtype=torch.float64, requires_grad=True)
    losses.distill_loss(*tensors, temperature=temperature, **options).backward()
    np.testing.assert_allclose(temperature.grad, -9 * want.grads.scale, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("two_sided", [True, False])
def test_distillation_in_jax(two_sided: bool) -> None:
    jax = pytest.importorskip("jax")
    import infonce.jax as losses

    options: dict[str, Any] = {"normalize": True, "two_sided": two_sided}
    want = infonce.distill_loss_and_grad(*Z, *GUIDE, scale=3.0, teacher_scale=2.0, **options)
    with jax.enable_x64(True):
        query, key, *teacher = map(jax.numpy.asarray, (*Z, *GUIDE))
        for reduction in ("mean", "none"):

            def value(
                query: Any, key: Any, scale: Any, teacher_scale: Any, reduction: str = reduction
            ) -> Any:
                return losses.distill_loss(
                    query, key, *teacher, scale=scale, teacher_temperature=1.0 / teacher_scale,
                    reduction=reduction, **options,
                ).mean()  # fmt: skip

            got, grads = jax.jit(jax.value_and_grad(value, (0, 1, 2)))(query, key, 3.0, 2.0)
            close(got, want.loss)
            for have, gradient in zip(grads, want.grads, strict=True):
                close(have, gradient)
        shared = losses.distill_loss(query, key, *teacher, scale=3.0, **options)
        close(shared, infonce.distill_loss(*Z, *GUIDE, scale=3.0, **options))


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
