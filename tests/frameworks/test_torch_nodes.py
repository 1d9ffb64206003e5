"""What a node of autograd's graph promises, for every loss of infonce.torch, distillation included.

A call is a function, and its tensors by name: features and numbers, which get gradients, and
others, which get none.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch_problems import LOSSES, MODULES, arguments, call, features  # noqa: E402

import infonce.torch as it  # noqa: E402
from infonce import spec  # noqa: E402
from infonce.torch.memory_efficient_clip import MemoryEfficientLiTLoss  # noqa: E402

pytestmark = pytest.mark.extras
ROWS = 6


class Call(NamedTuple):
    """The loss of tensors by name, and the tensors."""

    function: Callable[..., Any]
    inputs: dict[str, Any]  # get gradients
    untracked: dict[str, Any]  # get none

    def loss(self, reduction: str = "none", **changed: Any) -> Any:
        return self.function(**{**self.inputs, **self.untracked, **changed}, reduction=reduction)

    def grads(self, loss: Any, **options: Any) -> Any:
        """Gradients with another upstream gradient for each row."""
        upstream = torch.arange(1.0, 1.0 + loss.numel(), dtype=loss.dtype).reshape(loss.shape)
        return torch.autograd.grad(loss, list(self.inputs.values()), upstream, **options)


def clip(image: Any, text: Any, row_guide: Any, column_guide: Any, **options: Any) -> Any:
    return it.clip_loss(image, text, guide=(row_guide, column_guide), **options)


def siglip(image: Any, text: Any, row_ids: Any, column_ids: Any, **options: Any) -> Any:
    return it.siglip_loss(image, text, positive_ids=(row_ids, column_ids), **options)


def make(name: str) -> Call:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    one, two = draw(2, ROWS, 4).unbind()
    numbers = {"scale": torch.tensor(3.0, dtype=torch.float64)}
    weights, guides = {"weights": draw(ROWS).abs()}, draw(2, ROWS, 3).unbind()
    ids, labels = torch.arange(ROWS) % 4, torch.randperm(ROWS, generator=generator)
    calls = {
        "clip": (clip, {"image": one, "text": two},
                 {"row_guide": guides[0], "column_guide": guides[1], "ids": ids}),
        "info_nce": (it.info_nce_loss, {"query": one, "key": two, "own": draw(ROWS, 3, 4)},
                     {"labels": labels, "key_bias": draw(ROWS), "groups": ids % 2,
                      "own_mask": draw(ROWS, 3) < 1.0, "own_bias": draw(ROWS, 3)}),
        "info_nce, table": (it.info_nce_loss, {"query": one, "key": two, "own": draw(5, 4)},
                            {"own_indices": torch.randint(-1, 5, (ROWS, 3), generator=generator)}),
        "lit": (it.lit_loss, {"text": one}, {"image": two}),
        "nt_xent": (it.nt_xent_loss, {"features": one}, {"guide": guides[0]}),
        "siglip": (siglip, {"image": one, "text": two, "bias": torch.tensor(-1.0)},
                   {"row_ids": ids, "column_ids": ids.flip(0)}),
        "sup_con": (it.sup_con_loss, {"features": one}, {"labels": ids % 2}),
        "gte": (it.gte_loss, {"query": one, "key": two}, {}),
        "distill": (it.distill_loss, {"query": one, "key": two},
                    {"teacher_query": guides[0], "teacher_key": guides[1],
                     "teacher_scale": torch.tensor(2.0, dtype=torch.float64)}),
        "distill, one side": (partial(it.distill_loss, two_sided=False),
                              {"query": one, "key": two},
                              {"teacher_query": guides[0], "teacher_key": guides[1],
                               "teacher_temperature": torch.tensor([0.5])}),
    }  # fmt: skip
    function, inputs, untracked = calls[name]
    inputs = {key: z.clone().requires_grad_() for key, z in (inputs | numbers).items()}
    return Call(function, inputs, {key: z.clone() for key, z in (untracked | weights).items()})


each_loss = pytest.mark.parametrize(
    "name", [*LOSSES, "info_nce, table", "distill", "distill, one side"]
)
each_reduction = pytest.mark.parametrize("reduction", ["none", "mean"])


@each_loss
@each_reduction
def test_arguments_changed_in_place(name: str, reduction: str) -> None:
    """An error, where the backward pass reads them: for losses of rows, and in a second pass."""
    names = [*make(name).inputs, *make(name).untracked]
    for changed in names:
        call = make(name)
        loss = call.loss(reduction)
        if reduction == "mean":
            call.grads(loss, retain_graph=True)
        with torch.no_grad():
            tensor = (call.inputs | call.untracked)[changed]
            tensor.copy_(tensor.flip(0)) if tensor.ndim else tensor.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            call.grads(loss)


@each_loss
def test_arrays_and_inference_tensors_changed_in_place(name: str) -> None:
    """The loss has copies, because autograd cannot notice the change."""
    call = make(name)
    want = call.grads(call.loss())
    numbers = {key: z.detach() for key, z in call.inputs.items() if key in ("scale", "bias")}
    with torch.inference_mode():  # the locked features of LiT are refused, as by PyTorch's products
        inference = {key: z.clone() for key, z in call.untracked.items() if key != "image"}
    for kind in ("arrays", "inference"):
        others = inference
        if kind == "arrays":  # NumPy's where a loss takes them: not for features, nor for labels
            features = ("image", "teacher_query", "teacher_key", "labels")
            others = {k: z.clone().numpy() for k, z in call.untracked.items() if k not in features}
            others |= {key: z.numpy().copy() for key, z in numbers.items()}
        wanted = [key for key in call.inputs if key not in others]
        loss = call.loss(**others)
        with torch.inference_mode():
            for array in others.values():
                array[...] = array[::-1].copy() if kind == "arrays" and array.ndim else 0
        upstream = torch.arange(1.0, 1.0 + len(loss), dtype=torch.float64)
        got = torch.autograd.grad(loss, [call.inputs[key] for key in wanted], upstream)
        for key, gradient in zip(wanted, got, strict=True):
            index = list(call.inputs).index(key)
            torch.testing.assert_close(gradient, want[index], rtol=1e-12, atol=1e-14)


@each_loss
def test_vectors_that_require_a_gradient(name: str) -> None:
    """Refused, because they get none. A teacher, which never gets one, is taken."""
    call = make(name)
    want = call.grads(call.loss())
    for key, z in call.untracked.items():
        if z.is_floating_point() and key != "image":
            tensor = z.clone().requires_grad_()
            if key.startswith("teacher"):
                got = call.grads(call.loss(**{key: tensor}))
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
                assert tensor.grad is None
                continue
            argument = "guide" if "guide" in key else key
            wanted = f"^{argument}: expected a tensor that requires no gradient"
            with pytest.raises(ValueError, match=wanted):
                call.loss(**{key: tensor})


@each_loss
@each_reduction
def test_a_second_backward_pass(name: str, reduction: str) -> None:
    """The same gradients from the same graph, and an error where it is to be differentiated."""
    call = make(name)
    loss = call.loss(reduction)
    first, second = call.grads(loss, retain_graph=True), call.grads(loss, retain_graph=True)
    for got, want in zip(second, first, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match=r"^create_graph: expected False.*differentiated again"):
        call.grads(loss, create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode
@each_loss
def test_transforms(name: str) -> None:
    """torch.func.grad is backward's; forward mode, vmap and second derivatives are refused."""
    call = make(name)
    first, leaf = next(iter(call.inputs.items()))
    plain = {key: z.detach() for key, z in call.inputs.items()}

    def loss(z: Any) -> Any:
        return call.loss(**{**plain, first: z}).sum()

    want = torch.autograd.grad(loss(leaf), leaf)[0]
    z = plain[first]
    torch.testing.assert_close(torch.func.grad(loss)(z), want, rtol=1e-12, atol=1e-14)
    refusals = {
        r"^forward mode.*not supported.*use backward\(\) or": [
            lambda: torch.func.jvp(loss, (z,), (z,)),
            lambda: torch.func.jacfwd(loss)(z),
        ],
        r"^torch\.vmap.*not supported.*call them in a loop": [
            lambda: torch.vmap(loss)(torch.stack([z, z])),
            lambda: torch.func.jacrev(loss)(z),
            lambda: torch.autograd.grad(loss(leaf), leaf, torch.ones(2), is_grads_batched=True),
        ],
        r"^gradients.*cannot be differentiated again": [
            lambda: torch.func.grad(lambda z: torch.func.grad(loss)(z).sum())(z)
        ],
    }
    for message, runs in refusals.items():
        for run in runs:
            with pytest.raises(RuntimeError, match=message):
                run()


# The second is PyTorch's own, of operators with inputs that require gradients
FORWARD = r"^forward mode.*not supported.*use backward\(\) or|^You must implement the jvp function"


def refuse_tangents(run: Callable[..., Any], **tensors: Any) -> None:
    """Assert that `run` refuses a tangent of each tensor, at the first call and the next."""
    for _ in range(2):
        for key, z in tensors.items():
            with forward_ad.dual_level(), pytest.raises(RuntimeError, match=FORWARD):
                run(**{**tensors, key: forward_ad.make_dual(z.detach(), torch.ones_like(z))})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@each_loss
def test_forward_mode_is_refused(name: str) -> None:
    """Of each argument that has a derivative, with and without gradients."""
    call = make(name)
    tensors = {**call.inputs, **call.untracked}
    constants = {k for k in tensors if k.startswith("teacher") or (name, k) == ("lit", "image")}
    floats = {k: z for k, z in tensors.items() if z.is_floating_point() and k not in constants}
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            refuse_tangents(call.loss, **floats)
    with forward_ad.dual_level():  # tensors without a tangent are taken, and constants
        for key in constants:
            tensors[key] = forward_ad.make_dual(tensors[key], tensors[key])
        assert forward_ad.unpack_dual(call.function(**tensors)).tangent is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("loss", "way"),
    [*product(LOSSES, ["eager", "dims", "module"]),
     *product(["clip", "siglip", "sup_con"], ["no_grad", "graph", "export"])],
)  # fmt: skip
def test_forward_mode_of_repeated_and_compiled_calls(loss: str, way: str) -> None:
    """Calls that have templates, and those that are operators."""
    z = features(loss, dtype=torch.float32)  # float64 has no template
    tensors = dict(zip(spec.LOSSES[loss].arguments, z, strict=True))
    tensors["scale"] = torch.tensor(2.0, dtype=torch.float64)
    if way == "module":
        tensors["scale"] = torch.tensor([math.log(2.0)])  # log_scale

    def run(scale: Any, **by_name: Any) -> Any:
        z = [by_name[name] for name in spec.LOSSES[loss].arguments]
        options = {"dims": (2, 5)} if way == "dims" and loss not in ("gte", "sup_con") else {}
        if way != "module":
            return call(loss, z, scale=scale, **options)
        module = MODULES[loss](learnable=True, scale=2.0)
        return torch.func.functional_call(module, {"log_scale": scale}, arguments(loss, z))

    constants = {key: z.detach() for key, z in tensors.items()}
    run(**constants)  # makes the template of their calls
    step: Callable[..., Any] = run
    if way == "no_grad":
        step = torch.no_grad()(run)
    if way == "graph":
        step = torch.compile(run, backend="eager")
    if way == "export":

        class Module(torch.nn.Module):
            def forward(self, **tensors: Any) -> Any:
                return run(**tensors)

        step = torch.export.export(Module(), (), tensors).module()
    locked = spec.LOSSES[loss].locked
    for given in (constants, tensors):
        tangents = {key: z for key, z in given.items() if key not in locked}
        refuse_tangents(partial(step, **{key: given[key] for key in locked}), **tangents)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_linearize_and_forward_jacobians_are_refused() -> None:
    image, text = (z.detach() for z in features("clip", dtype=torch.float32))
    calls: list[tuple[Callable[[Any], Any], Any]] = [
        (lambda z: call("clip", [z, text], scale=2.0), image),
        (lambda scale: call("clip", [image, text], scale=scale), torch.tensor(2.0)),
        (lambda t: call("clip", [image, text], temperature=t), torch.tensor(0.5)),
    ]
    options = {"strategy": "forward-mode", "vectorize": True}
    for function, z in calls:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=FORWARD):
                torch.func.linearize(function, z)
            with pytest.raises(RuntimeError, match=FORWARD):
                torch.autograd.functional.jacobian(function, z, **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo
@pytest.mark.parametrize(
    ("way", "options"),
    [*product(["function", "module"], [{}, {"reduction": "none"}, {"dims": (2, 4)}]),
     ("compiled", {}), ("compiled", {"dims": (2, 4)}), ("memory_efficient_clip", {})],
)  # fmt: skip
def test_a_locked_tower_gets_no_graph(way: str, options: dict[str, Any]) -> None:
    """The loss requires a gradient only if something else does than the locked tower."""
    image = torch.randn(ROWS, 4, requires_grad=True)
    text, scale = torch.randn(ROWS, 4), torch.tensor(0.0, requires_grad=True)
    run: Any = partial(it.lit_loss, scale=3.0, normalize=True, **options)
    if way == "module":
        run = it.LiTLoss(scale=3.0, normalize=True, **options)
    if way == "compiled":
        torch.compiler.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    if way == "memory_efficient_clip":
        run = MemoryEfficientLiTLoss(temperature=0.3)
    for _ in range(2):
        assert not run(text, image).requires_grad
        loss = run(text + scale, image).sum()
        (loss + image.square().sum()).backward()
        torch.testing.assert_close(image.grad, 2 * image.detach())
        image.grad = None
    assert scale.grad is not None
    encoders = torch.nn.Linear(4, 4).requires_grad_(False), lambda z: z * image
    with pytest.raises(TypeError, match=r"^loss: expected a function of tensors with a gradient"):
        it.grad_cache(encoders, (text, text), lambda *z: run(*z).sum(), chunk=ROWS)


@each_loss
def test_losses_without_a_graph(name: str) -> None:
    """Where nothing requires a gradient, or gradients are disabled."""
    call = make(name)
    want = call.loss().detach()
    for disabled in (torch.no_grad, torch.inference_mode):
        with disabled():
            loss = call.loss()
        assert not loss.requires_grad
        torch.testing.assert_close(loss.clone(), want, rtol=1e-12, atol=1e-14)
    plain = {key: z.detach() for key, z in call.inputs.items()}
    assert not call.loss(**plain).requires_grad
