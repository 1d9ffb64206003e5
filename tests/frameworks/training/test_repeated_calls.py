"""Calls of infonce.torch like an earlier one, whose checks are not made again."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import infonce  # noqa: E402
import infonce.torch  # noqa: E402
from infonce.torch.core import autograd, repeated  # noqa: E402

pytestmark = [pytest.mark.extras, pytest.mark.usefixtures("no_templates")]
ARGUMENTS = {"clip": 2, "lit": 2, "info_nce": 2, "nt_xent": 1, "siglip": 2}
F32, F64 = torch.float32, torch.float64
CASES: list[tuple[str, Any, dict[str, Any]]] = [  # of float64, other products have no template
    *(("clip", F32, options) for options in ({"margin": 0.1}, {"precision": "fp64"})),
    *((loss, F32, {}) for loss in ARGUMENTS),
    *((loss, F64, {"reduction": "sum", "normalize": True}) for loss in ARGUMENTS),
]  # fmt: skip


@pytest.fixture
def no_templates() -> None:
    repeated._templates.clear()


def batch(loss: str, dtype: Any, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        torch.tensor(0.3 * rng.standard_normal((12, 7)), dtype=dtype, requires_grad=True)
        for _ in range(ARGUMENTS[loss])
    ]


def bits(loss: str, features: list[Any], numbers: dict[str, Any], options: dict[str, Any]) -> list:
    """The dtypes and bytes of the loss and all gradients."""
    for tensor in (*features, *numbers.values()):
        tensor.grad = None
    value = getattr(infonce.torch, f"{loss}_loss")(*features, **numbers, **options)
    value.backward()
    grads = [tensor.grad for tensor in (*features, *numbers.values())]
    return [None if z is None else (z.dtype, z.numpy().tobytes()) for z in (value.detach(), *grads)]


@pytest.mark.parametrize(("loss", "dtype", "options"), CASES)
def test_the_same_bits(
    loss: str, dtype: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_bits() -> list[Any]:
        results = []
        for seed in range(3):
            numbers = {"scale": torch.tensor(5.0 + seed, dtype=dtype, requires_grad=True)}
            if loss == "siglip":
                numbers["bias"] = torch.tensor(-2.0 - seed, dtype=dtype, requires_grad=True)
            results.append(bits(loss, batch(loss, dtype, seed), numbers, options))
        return results

    got = all_bits()
    assert [template is not None for template in repeated._templates.values()] == [True]
    monkeypatch.setattr(repeated, "evaluate", lambda *_, **__: None)
    assert all_bits() == got


@pytest.mark.parametrize(
    ("loss", "keywords", "message"),
    [
        ("clip", {"scale": torch.tensor(-1.0)}, "scale: expected a positive number, got -1.0"),
        ("clip", {"scale": torch.tensor(1e30)},
         r"scale: expected a number in .* for products in float32"),
        ("clip", {"scale": torch.tensor(True)}, "scale: expected a number or an array.*bool True"),
        ("clip", {"scale": -3}, "scale: expected a positive number, got -3"),
        ("clip", {"scale": 5.0, "normalize": 1}, "normalize: expected True or False, got int 1"),
        ("clip", {"scale": 5.0, "temperature": 0.2},
         "temperature, scale: expected one of them, got both"),
        ("clip", {"temperature": -0.1}, "temperature: expected a positive number, got -0.1"),
        ("siglip", {"scale": 5.0, "bias": torch.tensor(torch.inf)},
         "bias: expected a finite number, got inf"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_said_after_a_good_call(
    loss: str, keywords: dict[str, Any], message: str
) -> None:
    good: dict[str, Any] = {"scale": torch.tensor(5.0)} if "scale" in keywords else {
        "temperature": 0.2}  # fmt: skip
    values = {"normalize": True, "bias": torch.tensor(-3.0)}
    good |= {name: value for name, value in values.items() if name in keywords}
    run = getattr(infonce.torch, f"{loss}_loss")
    for features in (batch(loss, torch.float32, seed) for seed in (0, 1)):
        run(*features, **good)
    with pytest.raises((TypeError, ValueError), match=message):
        run(*features, **keywords)


def test_temperature_is_not_that_of_an_earlier_call() -> None:
    features = batch("clip", torch.float32, 0)
    for temperature in (0.1, 0.5):
        got = infonce.torch.clip_loss(*features, temperature=temperature)
        arrays = [z.detach().numpy() for z in features]
        want = infonce.clip_loss_and_grad(*arrays, temperature=temperature).loss
        assert float(got.detach()) == float(want)


@pytest.mark.parametrize(
    "options",
    [{"reduction": "none"}, {"check_finite": True}, {"method": "tiled"}, {"decoupled": True}],
    ids=str,
)
def test_other_calls_are_checked_each_time(options: dict[str, Any]) -> None:
    features = batch("clip", torch.float32, 0)
    want = infonce.clip_loss(*[z.detach().numpy() for z in features], scale=5.0, **options)
    for _ in range(2):
        got = infonce.torch.clip_loss(*features, scale=5.0, **options)
        np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-6)  # with gradients
    assert list(repeated._templates.values()) == [None]
    with torch.no_grad():
        features[0][3, 2] = float("nan")
    if options == {"check_finite": True}:
        with pytest.raises(ValueError, match="image: expected finite values, got NaN"):
            infonce.torch.clip_loss(*features, scale=5.0, **options)


def test_features_that_are_not_finite_make_the_loss_nan() -> None:
    features = batch("clip", torch.float32, 0)
    for value in (1.0, float("nan"), float("inf"), 1.0):
        with torch.no_grad():
            features[1][2, 3] = value
        loss = infonce.torch.clip_loss(*features, scale=5.0)
        assert bool(loss.isfinite()) == (value == 1.0)


def test_many_blocks_where_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    features = batch("clip", torch.float32, 0)
    want = infonce.torch.clip_loss(*features, scale=5.0)
    monkeypatch.setattr(repeated, "_solve_in_one_block", lambda: lambda *_: None)
    torch.testing.assert_close(infonce.torch.clip_loss(*features, scale=5.0), want)


def test_few_templates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "MOST_TEMPLATES", 3)
    for rows in range(4, 12):
        z = torch.zeros(rows, 3, requires_grad=True)
        infonce.torch.clip_loss(z, z.detach(), scale=1.0, normalize=False)
        assert 1 <= len(repeated._templates) <= 3


def test_the_second_call_makes_its_node_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = []

    def apply(*inputs: Any) -> Any:
        nodes.append(inputs)
        return autograd._LossNode.apply(*inputs)

    monkeypatch.setattr(autograd._LossNode, "apply_unchecked", apply)
    features = batch("clip", torch.float32, 0)
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    losses = [infonce.torch.clip_loss(*features, scale=scale) for _ in range(3)]
    assert len(nodes) == 2
    want, *got = [
        torch.autograd.grad(loss, [scale, *features], retain_graph=True)
        for loss in (*losses, losses[2])  # the last one again: computed in the backward pass
    ]
    assert want[0].dtype == torch.float64
    for grads in got:
        torch.testing.assert_close(grads, want, rtol=1e-6, atol=1e-9)
    half = torch.autograd.grad(0.5 * infonce.torch.clip_loss(*features, scale=scale), scale)
    torch.testing.assert_close(half[0], 0.5 * want[0], rtol=1e-7, atol=0)
    assert len(nodes) == 3
    constants = [z.detach() for z in features]
    for _ in range(2):
        assert not infonce.torch.clip_loss(*constants, scale=5.0).requires_grad
    assert len(nodes) == 3


@pytest.mark.parametrize("loss", ["clip", "nt_xent"])
def test_products_in_threads_of_torch(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near those of BLAS, the same bits each time, and none if the user limits threads."""
    products: list[Any] = []

    def product(*args: Any, **options: Any) -> Any:
        products.append(args)
        return multiply(*args, **options)

    multiply = repeated._torch_product
    monkeypatch.setattr(repeated, "_torch_product", product)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    z = np.random.default_rng(0).standard_normal((2, 160, 100))
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    features = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in z]
    features = features[: ARGUMENTS[loss]]

    def call() -> Any:
        value = getattr(infonce.torch, f"{loss}_loss")(*features, scale=10.0)
        return value, *torch.autograd.grad(value, features)

    first, second = call(), call()
    assert len(products) == 2 * (1 + len(features))
    for precision in ("medium", "high"):  # with which PyTorch may round operands
        torch.set_float32_matmul_precision(precision)
        try:
            call()
        finally:
            torch.set_float32_matmul_precision("highest")
    assert len(products) == 2 * (1 + len(features))
    call()
    assert len(products) == 3 * (1 + len(features))
    products.clear()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    monkeypatch.setenv("INFONCE_NUM_THREADS", "1")
    for got, want in zip(first, call(), strict=True):
        size = float(want.detach().abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * size)  # 5e-7 (1 + x) twice
    assert not products
