"""infonce.torch.grad_cache in one process, beside one graph of the whole batch."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import infonce  # noqa: E402
import infonce.torch as it  # noqa: E402

pytestmark = pytest.mark.extras
ROWS, WIDTH = 10, 6


class Tower(nn.Sequential):
    """Features by rows, with dropout; counts calls, and the rows of the largest."""

    def __init__(self, dropout: float = 0.3) -> None:
        layers = (nn.Linear(WIDTH, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 4))
        super().__init__(*layers)
        self.calls = self.largest = 0

    def forward(self, z: Any) -> Any:
        self.calls, self.largest = self.calls + 1, max(self.largest, len(z))
        return super().forward(z)


def pairs(dtype: Any = torch.float64) -> list[Any]:
    return list(torch.randn(2, ROWS, WIDTH, dtype=dtype))


def gradients(*modules: Any) -> list[Any]:
    return [p.grad for module in modules for p in module.parameters()]


def in_one_graph(encoders: Any, inputs: Any, loss: Any, chunk: int, **options: Any) -> Any:
    """The loss of the whole batch, whose encoders draw random numbers chunk by chunk."""
    features = [
        torch.cat([encoder(z) for z in side.split(chunk)])
        for encoder, side in zip(encoders, inputs, strict=True)
    ]
    value = loss(*features, **options)
    value.backward()
    return value.detach()


@pytest.fixture
def towers() -> Any:
    torch.manual_seed(0)
    return Tower().double(), Tower().double()


def assert_same(got: list[Any], want: list[Any]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("module", "chunk"), [(it.CLIPLoss, 1), (it.SigLIPLoss, 3), (it.CLIPLoss, 10), (it.GTELoss, 64)]
)
def test_gradients_are_those_of_one_graph(towers: Any, module: Any, chunk: int) -> None:
    """Gradients equal those of one graph, also of scale and bias. The generator's state does,
    too."""
    results = []
    batch = pairs()
    for run in (it.grad_cache, in_one_graph):
        encoders = copy.deepcopy(towers)
        criterion = module(learnable=True, scale=4.0, normalize=True).double()
        torch.manual_seed(1)
        loss = run(encoders, batch, criterion, chunk)
        assert not loss.requires_grad
        results.append([loss, torch.rand(1), *gradients(*encoders, criterion)])
        if run is it.grad_cache:
            assert {encoder.largest for encoder in encoders} == {min(chunk, ROWS)}
    assert all(want.abs().max() > 1e-6 for want in results[1])
    assert_same(*results)


def test_example_of_the_docstring(towers: Any) -> None:
    encoder, _ = towers
    image, text = pairs()
    criterion = it.CLIPLoss(learnable=True, temperature=0.07)
    optimizer = torch.optim.SGD([*encoder.parameters(), *criterion.parameters()], lr=0.1)
    before = copy.deepcopy(criterion.log_scale)
    names = {"infonce": infonce, **locals()}
    for line in re.findall(r"^ *>>> (.*)", it.grad_cache.__doc__ or "", re.MULTILINE):
        exec(line, names)
    assert encoder.largest == 4
    assert criterion.log_scale != before


def test_one_encoder_for_two_inputs_and_gradients_that_are_there(towers: Any) -> None:
    """Gradients of both inputs add to existing gradients, as backward() adds them."""
    results = []
    batch = pairs()
    for run in (it.grad_cache, in_one_graph):
        encoder, _ = copy.deepcopy(towers)
        torch.manual_seed(1)
        for _ in range(2):
            run([encoder, encoder], batch, it.gte_loss, 4, scale=2.0)
        results.append(gradients(encoder))
    assert_same(*results)


class Model(nn.Module):
    """Features of both inputs by one layer, and its learned numbers as `numbers` returns them."""

    def __init__(self, numbers: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(WIDTH, 4).double(), numbers
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.vector = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))

    def forward(self, image: Any, text: Any) -> Any:
        return self.layer(image), self.layer(text), *self.numbers(self)


NUMBERS = {
    "a parameter": lambda model: (model.scale,),
    "a parameter twice": lambda model: (model.scale, model.scale),
    "a parameter and a tensor computed of it": lambda model: (model.scale, model.scale.exp()),
    "views of a parameter": lambda model: (model.vector[0], model.vector[1]),
    "one view twice": lambda model: (model.vector[0],) * 2,
    "a view and its base": lambda model: (model.scale.view(1), model.scale),
}


@pytest.mark.parametrize("numbers", list(NUMBERS))
@pytest.mark.parametrize("chunk", [4, ROWS])
def test_outputs_that_are_parameters(numbers: str, chunk: int) -> None:
    """Gradients are added to those of an earlier step exactly once. The loss reads a parameter of
    the encoder too."""
    torch.manual_seed(0)
    model, inputs = Model(NUMBERS[numbers]), pairs()

    def loss(image: Any, text: Any, scale: Any, other: Any = 0.0) -> Any:
        total = it.clip_loss(image, text, scale=scale, normalize=True)
        return total + 3 * other + 0.5 * model.scale**2 + scale.sum()

    results = []
    for cached in (True, False):
        model.zero_grad()
        for _ in range(2):
            if cached:
                it.grad_cache(model, inputs, loss, chunk)
            else:
                loss(*model(*inputs)).backward()
        results.append(gradients(model))
    assert_same(*results)  # None in the place of None


@pytest.mark.parametrize("encoder", [nn.Identity(), lambda z: z, lambda z: z.view(-1, WIDTH)])
def test_outputs_that_are_inputs(encoder: Any) -> None:
    """Inputs that require a gradient get it; one input may be there twice. Others stay as they
    are."""
    image, text = pairs()
    image.requires_grad_()
    loss = it.clip_loss
    for inputs, chunk in (([image, text], 3), ([image, image], ROWS)):
        image.grad = None
        for _ in range(2):
            it.grad_cache([encoder] * 2, inputs, loss, chunk, scale=2.0, normalize=True)
        want = torch.autograd.grad(loss(*inputs, scale=2.0, normalize=True), image)[0]
        torch.testing.assert_close(image.grad, 2 * want, rtol=1e-10, atol=1e-13)
    assert not text.requires_grad
    assert text.grad is None


class StaticOutput(torch.autograd.Function):
    """x w in memory that all calls share, as the outputs of CUDA graphs are."""

    memory = torch.empty(64, 4, dtype=torch.float64)

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w, out=StaticOutput.memory[: len(x)]).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


@pytest.mark.parametrize(("in_one_encoder", "chunk"), [(False, 4), (True, 4), (True, ROWS)])
def test_outputs_in_static_memory(in_one_encoder: bool, chunk: int) -> None:
    inputs, results = pairs(), []
    for product in (torch.mm, StaticOutput.apply):
        w = torch.eye(WIDTH, 4, dtype=torch.float64).requires_grad_()
        encode: Any = lambda z, run=product, w=w: run(z, w)  # noqa: E731
        encoders: Any = [encode, encode]
        if in_one_encoder:
            encoders = lambda a, b, encode=encode: (encode(a), b[:, :4])  # noqa: E731
        loss = it.grad_cache(encoders, inputs, it.clip_loss, chunk, scale=4.0, normalize=True)
        results.append([loss, w.grad])
    assert_same(*results)


@pytest.mark.parametrize("loss", [it.clip_loss, it.lit_loss])
def test_a_frozen_encoder_runs_once(towers: Any, loss: Any) -> None:
    """One whose parameters are frozen, or one that the loss locks."""
    text, image = towers
    if loss is it.clip_loss:
        image.requires_grad_(False)
    it.grad_cache((text, image), pairs(), loss, 4, scale=2.0)
    assert (text.calls, image.calls) == (6, 3)
    assert all(p.grad is None for p in image.parameters())
    assert all(p.grad is not None for p in text.parameters())


def test_autocast(towers: Any) -> None:
    """Autocast's cache of converted weights from the first pass, which has no graph, is not
    used."""
    results = []
    batch = pairs(torch.float32)
    for run in (it.grad_cache, in_one_graph):
        encoders = [encoder.float() for encoder in copy.deepcopy(towers)]
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            run(encoders, batch, it.clip_loss, 5, scale=4.0, normalize=True)
        results.append(gradients(*encoders))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))


def no_loss(*_: Any) -> Any:
    raise AssertionError("an error comes before any work")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"chunk": 0}, ValueError, "chunk: expected at least 1, got 0"),
        ({"inputs": torch.ones(2, 3)}, TypeError, "inputs: expected a list or tuple with one "),
        ({"encoders": [nn.Identity()]}, ValueError, "encoders: expected one callable or 2 of them"),
        ({"loss": 3}, TypeError, "loss: expected a callable, got int 3"),
        ({"encoders": nn.Identity(), "inputs": [torch.ones(4, 3), torch.ones(5, 3)]}, ValueError,
         r"inputs: expected the same number of rows in each of encoders, got \[4, 5\]"),
        ({"encoders": [lambda z: z[1:], nn.Identity()]}, ValueError,
         r"encoders\[0\]: expected features of 3 rows, or a tensor of one number, got .*\(2, 3\)"),
        ({"encoders": [lambda z: {"features": z}, nn.Identity()]}, TypeError,
         r"encoders\[0\]: expected a function that returns a tensor, or a tuple of them, got"),
        ({"encoders": lambda a, b: (a, b, torch.ones(7))}, ValueError,
         r"encoders: expected features of 3 rows, or a tensor of one number, got shape \(7,\)"),
    ],
)  # fmt: skip
def test_bad_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"encoders": [nn.Identity()] * 2, "inputs": [torch.ones(4, 3)] * 2,
                 "loss": no_loss, "chunk": 3, **change}  # fmt: skip
    with pytest.raises(error, match=f"^{words}"):
        it.grad_cache(**arguments)


@pytest.mark.filterwarnings("ignore:clip_loss. no gradient will reach")
@pytest.mark.parametrize(
    "loss",
    [infonce.clip_loss, infonce.clip_loss_and_grad,
     lambda *z, scale: it.clip_loss(*z, scale=scale).item(),
     lambda *z, scale: it.clip_loss(*z, scale=scale).detach()],
)  # fmt: skip
def test_a_loss_without_a_gradient(towers: Any, loss: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^loss: expected a function of tensors with a gradient"):
        it.grad_cache(towers, pairs(), loss, 4, scale=2.0)


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_disabled_gradients(towers: Any, disabled: Any) -> None:
    """Only the loss is computed, also with metrics: no gradient, and one call for each chunk."""
    inputs = pairs()
    for encoder in towers:
        encoder.eval()

    def loss(*features: Any, **options: Any) -> Any:
        return it.clip_loss(*features, **options, metrics=True)

    with disabled():
        value, metrics = it.grad_cache(towers, inputs, loss, 4, scale=2.0)
        assert [encoder.calls for encoder in towers] == [3, 3]
        want, both = loss(*(f(z) for f, z in zip(towers, inputs, strict=True)), scale=2.0)
    torch.testing.assert_close(value, want)
    assert torch.equal(metrics.row_rank, both.row_rank)
    assert not value.requires_grad
    assert gradients(*towers) == [None] * 8
    with disabled(), pytest.raises(TypeError, match=r"^loss: expected a function .* returns float"):
        it.grad_cache(towers, inputs, lambda *z: it.clip_loss(*z, scale=2.0).item(), 4)
