"""What infonce.torch does not take: bad calls, and derivatives that there are none of."""

from typing import Any

import numpy as np
import pytest
from bad_calls import NUMERIC

torch = pytest.importorskip("torch")
from torch_problems import MODULES, features  # noqa: E402

import infonce.torch as it  # noqa: E402
from infonce import spec  # noqa: E402
from infonce.torch.open_clip import ClipLoss  # noqa: E402

pytestmark = pytest.mark.extras


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize(("loss", "args", "options", "error", "words"), NUMERIC)
def test_bad_calls_are_those_of_arrays(
    loss: str, args: Any, options: dict[str, Any], error: type[Exception], words: list[str],
    as_module: bool,
) -> None:  # fmt: skip
    options = {"scale": 2.0, **options}
    if refused := spec.GRAD_ONLY - {"metrics"} & options.keys():
        error, words = TypeError, ["unexpected keyword argument", min(refused)]
    arguments = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args]
    if isinstance(options.get("own"), np.ndarray):
        options = options | {"own": torch.from_numpy(options["own"])}
    for z in arguments:
        if isinstance(z, torch.Tensor) and z.is_floating_point():
            z.requires_grad_()

    def call() -> Any:
        if as_module:
            return MODULES[loss](**options)(*arguments)
        return getattr(it, f"{loss}_loss")(*arguments, **options)

    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word.replace("an array", "a tensor") in str(caught.value)
    assert "\n" not in str(caught.value)


NUMBERS = [
    (torch.ones(2), TypeError, r".* a tensor of one number, got Tensor of shape \(2,\)"),
    (torch.tensor(-2.0, requires_grad=True), ValueError, "expected a positive number, got -2.0"),
    (torch.tensor(True), TypeError, "expected a number or an array of one number, got"),
]


@pytest.mark.parametrize("name", ["scale", "temperature"])
@pytest.mark.parametrize(("value", "error", "match"), NUMBERS)
def test_bad_numbers(name: str, value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"^{name}: {match}"):
        it.clip_loss(*features("clip"), **{name: value})


def test_errors() -> None:
    image, text = features("clip")
    with pytest.raises(
        TypeError, match=r"image: expected dtype float64, .*, bfloat16, got torch\.int64"
    ):
        it.clip_loss(torch.ones(3, 2, dtype=torch.int64), text, scale=1.0)
    with pytest.raises(TypeError, match=r"image: expected dtype.*, got torch\.float8_e4m3fn"):
        it.clip_loss(torch.ones(3, 2).to(torch.float8_e4m3fn), text, scale=1.0)
    with pytest.raises(TypeError, match=r"text: expected a dense tensor, got .*torch\.sparse_coo"):
        it.clip_loss(image, text.detach().to_sparse(), scale=1.0)
    with pytest.raises(TypeError, match="text: expected a tensor, got ndarray"):
        it.clip_loss(image, text.detach().numpy(), scale=1.0)
    with pytest.raises(ValueError, match=r"text: expected a tensor on cpu like image, got.*meta"):
        it.clip_loss(image, text.to("meta"), scale=1.0)
    with pytest.raises(ValueError, match=r"image: expected a tensor on cpu or cuda, got.*meta"):
        it.clip_loss(image.to("meta"), text.to("meta"), scale=1.0)
    with pytest.raises(ValueError, match="temperature, scale: expected one of them, got both"):
        it.clip_loss(image, text, scale=1.0, temperature=torch.tensor(1.0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrt': gradients are autogr"):
        it.clip_loss(image, text, scale=1.0, wrt=["image"])


def test_an_unknown_keyword_is_named_with_the_nearest() -> None:
    """The error begins with the name of the function or module. A module refuses at
    construction."""
    image, text = features("clip")
    function, module = r"^infonce\.torch\.clip_loss\(\)", r"^infonce\.torch\.CLIPLoss\(\)"
    words = r": unexpected keyword argument 'normalise' \(did you mean 'normalize'\?\)$"
    with pytest.raises(TypeError, match=function + words):
        it.clip_loss(image, text, scale=1.0, normalise=True)
    with pytest.raises(TypeError, match=module + words):
        it.CLIPLoss(scale=1.0, normalise=True)
    with pytest.raises(TypeError, match=module + words):
        it.CLIPLoss(scale=1.0)(image, text, normalise=True)
    with pytest.raises(TypeError, match=r"^infonce\.torch\.open_clip\.ClipLoss\(\)" + words):
        ClipLoss(normalise=True)
    with pytest.raises(TypeError, match=function + r".*'labels' \(expected one of temperature, sc"):
        it.clip_loss(image, text, scale=1.0, labels=torch.arange(12))
    with pytest.raises(TypeError, match=module + r".*'bias'"):
        it.CLIPLoss(scale=1.0, bias=-10.0)
    for name, value in (("timeout", 3.0), ("gradient_scale", "ddp")):
        with pytest.raises(TypeError, match=rf"{function}: expected group with {name}, got None$"):
            it.clip_loss(image, text, scale=1.0, **{name: value})
    with pytest.raises(TypeError, match="expected group with labels, got None"):
        it.nt_xent_loss(image, scale=1.0, labels=torch.arange(12))


def test_vmap_of_vectors_is_refused() -> None:
    """As of features, for which test_torch_nodes.py has other transforms."""
    image, text = (z.detach() for z in features("clip"))
    ones = torch.ones(2, len(image))

    def loss(image: Any) -> Any:
        return it.clip_loss(image, text, scale=2.0)

    several = torch.stack([image, 2 * image])
    for run, batch in (
        (lambda w: it.clip_loss(image, text, scale=1.0, weights=w), ones),
        (lambda i: it.clip_loss(image, text, scale=1.0, ids=i), ones.long()),
        (lambda b: it.lit_loss(image, text, scale=1.0, key_bias=b), ones),
        (torch.func.grad(loss), several),
    ):
        with pytest.raises(RuntimeError, match=r"^torch\.vmap.*not supported.*call them in a loop"):
            torch.vmap(run)(batch)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^torch\.vmap.*not supported"):
        torch.vmap(loss)(several)
    # a gradient that nobody differentiates again is none the less one
    assert torch.func.grad(loss)(image.requires_grad_()).shape == image.shape


@pytest.mark.parametrize("name", spec.VECTOR_OPTIONS)
def test_vectors_get_no_gradient(name: str) -> None:
    """Refused where autograd watches them, in a compiled graph too."""
    query, key = features("info_nce")
    labels = torch.arange(24).reshape(12, 2) % 12 if name == "label_weights" else None
    own = torch.stack([key, key], 1).detach() if name == "own_bias" else None
    vector = torch.ones(
        (12, 2) if name in ("label_weights", "own_bias") else 12, requires_grad=True
    )

    def loss(query: Any, vector: Any) -> Any:
        return it.info_nce_loss(query, key, labels, scale=2.0, own=own, **{name: vector})

    match = f"^{name}: expected a tensor that requires no gradient.*detach"
    for run in (loss, torch.compile(loss, backend="eager"), torch.func.grad(loss, 1)):
        with pytest.raises(ValueError, match=match):
            run(query, vector)
    with torch.no_grad():
        torch.testing.assert_close(loss(query, vector), loss(query, vector.detach()))
