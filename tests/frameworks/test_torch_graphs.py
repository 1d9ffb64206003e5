"""infonce.torch in graphs of torch.compile and torch.export: what autograd may ask of them, and
numbers that change."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch._dynamo.testing  # noqa: E402, F811
import torch._functorch.config  # noqa: E402
from torch_problems import FORMS, MODULES, arguments, call, features, with_options  # noqa: E402

import infonce.torch as it  # noqa: E402

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated"),
]
WAYS = ["eager", "aot_eager", "export"]


class Run(torch.nn.Module):
    """A function as a module, which torch.export wants."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def graph(way: str, function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    """The function in one graph: compiled, or exported with these examples of its arguments."""
    torch.compiler.reset()
    if way == "export":
        module = function if isinstance(function, torch.nn.Module) else Run(function)
        program: Callable[..., Any] = torch.export.export(module, examples).module()
        return program
    compiled: Callable[..., Any] = torch.compile(function, backend=way, fullgraph=True)
    return compiled


# --- second derivatives ---------------------------------------------------------------------------


def penalized(loss: Any, inputs: list[Any]) -> Any:
    """Gradients of the loss plus a penalty of its gradients."""
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    return torch.autograd.grad(loss + sum(g.square().sum() for g in grads), inputs)


REFUSED = "create_graph: expected False.*differentiated again|does not currently support double"


@torch._functorch.config.patch(donated_buffer=False)  # with it, AOT refuses to keep the graph
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("loss", "options"), [("clip", {}), ("siglip", {}), ("sup_con", {}), ("clip", {"dims": (2, 5)})]
)
def test_second_derivatives_are_refused(loss: str, way: str, options: dict[str, Any]) -> None:
    """Not left out of the sum, also where the features are computed in the same graph."""
    z = features(loss)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for factor in (1, 2):  # 1: the features are inputs of the graph

        def step(scale: Any, *z: Any, factor: int = factor) -> Any:
            return call(loss, [side * factor if factor > 1 else side for side in z],
                        scale=scale, **options)  # fmt: skip

        run = graph(way, step, scale, *z)
        inputs = [scale, *z[:1]]  # the second tower of lit is locked
        value = run(scale, *z)
        want = torch.autograd.grad(step(scale, *z), inputs)
        torch.testing.assert_close(torch.autograd.grad(value, inputs, retain_graph=True), want)
        with pytest.raises(RuntimeError, match=REFUSED):
            penalized(value, inputs)
        with pytest.raises(RuntimeError, match=REFUSED):  # of one input alone
            penalized(run(scale, *z), inputs[1:])


@torch._functorch.config.patch(donated_buffer=False)
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_of_a_learned_scale_are_refused(way: str) -> None:
    module, z = it.CLIPLoss(learnable=True, scale=5.0), [z.detach() for z in features("clip")]
    run = graph(way, module, *z)
    number = module.log_scale if way != "export" else run.log_scale  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=REFUSED):
        penalized(run(*z), [number])


@torch._functorch.config.patch(donated_buffer=False)
def test_first_derivatives_inside_of_another_node() -> None:
    """A backward pass in the forward pass of a node is no second derivative."""
    image, text = features("clip")
    run = graph("aot_eager", lambda z: call("clip", [z, text.detach()], scale=2.0))

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Any) -> Any:
            with torch.enable_grad():
                leaf = z.detach().requires_grad_()
                return torch.autograd.grad(run(leaf), leaf)[0]

    want = torch.autograd.grad(call("clip", [image, text], scale=2.0), image)[0]
    torch.testing.assert_close(Inside.apply(image).detach(), want)


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", ["clip", "lit", "sup_con"])
def test_an_exported_loss_trains(loss: str, form: str) -> None:
    """Whether or not the examples required gradients."""
    z = features(loss)
    args = arguments(loss, z)
    want = torch.autograd.grad(call(loss, z, scale=2.0), z[:1])
    run = with_options(form, loss, scale=2.0)
    plain = [x.detach() for x in args]
    for examples, enabled in ((plain, True), (args, False)):
        with torch.set_grad_enabled(enabled):
            program = graph("export", run, *examples)
        got = torch.autograd.grad(program(*args), z, allow_unused=True)
        torch.testing.assert_close(got[:1], want)
        assert (got[-1] is None) == (loss == "lit")
        assert not program(*plain).requires_grad


def test_an_exported_module_trains_its_numbers() -> None:
    """Also those that were frozen when it was exported."""
    z = features("siglip")
    module = it.SigLIPLoss(learnable=True, scale=2.0, bias=-1.0).requires_grad_(False)
    program: Any = graph("export", module, *[side.detach() for side in z])
    numbers = [program.log_scale.requires_grad_(), program.bias.requires_grad_()]
    module.requires_grad_(True)
    want = torch.autograd.grad(module(*z), [module.log_scale, module.bias, *z])
    torch.testing.assert_close(torch.autograd.grad(program(*z), [*numbers, *z]), want)


# --- numbers that change --------------------------------------------------------------------------

CHANGING: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "temperature": ("clip", lambda v: {"temperature": v}),
    "scale": ("nt_xent", lambda v: {"scale": v}),
    "bias": ("siglip", lambda v: {"bias": v, "scale": 2.0}),
    "dim_weights": ("info_nce", lambda v: {"dims": (2, 5), "dim_weights": (v, 1.0), "scale": 2.0}),
}
VALUES: dict[str, Any] = {
    "float": [0.1 * n for n in range(1, 6)],
    "int": range(1, 6),
    "NumPy": np.linspace(0.1, 1.0, 5),
}


@pytest.mark.parametrize(
    ("name", "values", "dynamic"),
    [*product(["temperature"], VALUES, [None, True]),
     *product(["scale", "bias", "dim_weights"], ["float"], [None]),
     *product(["bias", "dim_weights"], ["int"], [True])],
)  # fmt: skip
def test_a_number_that_changes_is_compiled_twice(name: str, values: str, dynamic: Any) -> None:
    """At most: as a constant, and as an input of the graph."""
    loss, options = CHANGING[name]
    z = features(loss)

    def step(value: Any, *z: Any) -> Any:
        return call(loss, z, **options(value))

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    run = torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic)
    for value in VALUES[values]:
        torch.testing.assert_close(run(value, *z), step(value, *z))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["temperature", "bias"])
def test_a_number_of_a_module_that_changes_is_compiled_twice(name: str) -> None:
    loss = "siglip" if name == "bias" else "clip"
    module = MODULES[loss](**{"scale": 2.0} if name == "bias" else {})
    z = features(loss)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    run = torch.compile(module, backend=counter, fullgraph=True)
    for value in VALUES["float"]:
        setattr(module, name, value)
        torch.testing.assert_close(run(*z), module(*z))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_a_number_that_becomes_wrong_is_named(value: float) -> None:
    z = features("clip")
    torch.compiler.reset()
    run = torch.compile(lambda v: call("clip", z, temperature=v), backend="aot_eager")
    for right in (0.1, 0.2, 0.3):
        run(right)
    with pytest.raises(ValueError, match=r"^temperature: expected a"):
        run(value)
