"""Executors of infonce.torch: functions and modules, under what PyTorch does to them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gpu_executors
import ml_dtypes
import numpy as np
import torch
import torch_wrappers
from comparison import METRICS, Result
from executors import executor, of_teacher
from problems import Problem, in_pair
from torch import Tensor
from torch_problems import MODULES

import infonce.torch as it
from infonce import spec
from infonce.checks import keywords

SCALARS = ("scale", "bias", "temperature")
# A gradient waits in the dtype of features, is multiplied, and added up over prefixes
ROUNDINGS = 3


def of_torch(kind: spec.Loss) -> set[str]:
    return {*keywords.torch_function(kind), *of_teacher(kind)} - {*keywords.GROUP}


def of_module(kind: spec.Loss) -> set[str]:
    """Of modules, and of operators of compiled graphs: distillation has none."""
    return {*keywords.torch_function(kind)} - {*keywords.GROUP}


def fits(problem: Problem) -> bool:
    """Upstream gradients have the dtype of the loss."""
    return (problem.compute, problem.dtype == "float64") in (("float64", True), ("float32", False))


def tensor(value: Any) -> Any:
    """Arrays as tensors; pairs of them; other values as they are."""
    if isinstance(value, tuple) and isinstance(value[0], np.ndarray):
        return tuple(map(tensor, value))
    if not isinstance(value, np.ndarray):
        return value
    native = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("="))
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(native.astype(np.float32)).to(torch.bfloat16)
    strided = torch.from_numpy(native)
    if value.flags.f_contiguous and value.ndim > 1:
        strided = strided.mT.contiguous().mT
    return strided


def array(value: Tensor | None) -> Any:
    if value is None:
        return None
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return value.float().numpy().astype(ml_dtypes.bfloat16)
    return value.numpy()


class Call:
    """The tensors of a problem: those with gradients by name, and the others."""

    def __init__(self, problem: Problem) -> None:
        self.problem, kind = problem, problem.kind
        options = {name: tensor(value) for name, value in problem.options.items()}
        self.labels = (
            [options.pop("labels")] if "labels" in options and kind is not spec.NT_XENT else []
        )
        names = [name for name in kind.arguments if name != "own"]
        leaves = dict(zip(names, map(tensor, problem.features), strict=True))
        number = "temperature" if problem.number % 3 == 0 else "scale"
        numbers = {number: 1 / problem.scale if number == "temperature" else problem.scale}
        numbers |= {"bias": options.pop("bias")} if kind.sigmoid else {}
        leaves |= {name: torch.tensor(z, dtype=torch.float64) for name, z in numbers.items()}
        leaves |= {"own": options.pop("own")} if "own" in options else {}
        self.arguments, self.leaves = names, leaves
        given = ("method", "precision", "workspace", "metrics")
        self.options = options | {k: v for k, v in problem.settings.items() if k in given}
        self.metrics: Any = None  # of the last call
        wanted = problem.settings.get("wrt", [*names, "own", "scale", "bias"])
        self.wanted = [
            name for name in leaves if {name.replace("temperature", "scale")} & {*wanted}
        ]
        self.upstream = torch.as_tensor(problem.grad_out, dtype=torch.float64)

    def on_gpu(self) -> Call:
        """The same call of tensors on a GPU; numbers are there, or on the host."""
        self.leaves = {
            name: z if name in SCALARS and self.problem.number % 2 else z.cuda()
            for name, z in self.leaves.items()
        }
        self.labels = [z.cuda() for z in self.labels]
        self.upstream = self.upstream.cuda()
        self.options = {
            name: torch.utils._pytree.tree_map_only(Tensor, Tensor.cuda, value)
            for name, value in self.options.items()
            if name != "workspace"
        }
        return self

    def fresh(self) -> dict[str, Tensor]:
        """Leaves of a new graph."""
        return {
            name: z.detach().clone().requires_grad_(name in self.wanted)
            for name, z in self.leaves.items()
        }

    def apply(self, function: Callable[..., Any], leaves: dict[str, Tensor]) -> Any:
        """The loss; metrics are kept."""
        features = [leaves[name] for name in self.arguments]
        others = {name: z for name, z in leaves.items() if name not in self.arguments}
        return self.without_metrics(function(*features, *self.labels, **others))

    def without_metrics(self, out: Any) -> Any:
        loss, self.metrics = out if isinstance(out, tuple) else (out, None)
        return loss

    def total(self, loss: Tensor) -> Tensor:
        return (self.upstream.to(loss.dtype) * loss).sum()

    def result(self, loss: Tensor, grads: dict[str, Tensor | None]) -> Result:
        found: Result = {"loss": array(loss), "metrics": None}
        if self.metrics is not None:
            values = {field: array(getattr(self.metrics, field)) for field in METRICS}
            found["metrics"] = SimpleNamespace(**values)
        for name, gradient in grads.items():
            if name == "temperature" and gradient is not None:
                name, gradient = "scale", -gradient / self.problem.scale**2
            found[name] = array(gradient)
        return found

    def differentiate(self, function: Callable[..., Any], passes: int = 1) -> Result:
        """By autograd; with two passes, the gradients of the second, after one of other numbers."""
        leaves = self.fresh()
        loss = self.apply(function, leaves)
        # the caller may go on to resize them, as fully_shard does
        assert all(z.untyped_storage().resizable() for z in leaves.values())
        wanted = [leaves[name] for name in self.wanted]
        if not wanted or not loss.requires_grad:
            return self.result(loss, {})
        for _ in range(passes - 1):
            torch.autograd.grad(3 * loss.sum(), wanted, allow_unused=True, retain_graph=True)
        grads = torch.autograd.grad(self.total(loss), wanted, allow_unused=True)
        return self.result(loss, dict(zip(self.wanted, grads, strict=True)))


def function_of(call: Call, **more: Any) -> Callable[..., Any]:
    return functools.partial(getattr(it, f"{call.problem.loss}_loss"), **call.options, **more)


def module_of(call: Call, **more: Any) -> Any:
    return MODULES[call.problem.loss](**call.options, **more)


add = functools.partial(executor, draws=100, roundings=ROUNDINGS, fits=fits, not_finite="loss")


@add("torch, function", of_torch)
def with_function(problem: Problem) -> Result:
    call = Call(problem)
    found = call.differentiate(function_of(call))
    with torch.no_grad():
        found["loss alone"] = call.apply(function_of(call), call.leaves).numpy()
    return found


@add("torch, module", of_module)
def with_module(problem: Problem) -> Result:
    call = Call(problem)
    return call.differentiate(module_of(call))


@add("torch, repeated calls", of_torch)
def with_repeated_calls(problem: Problem) -> Result:
    """The third of equal calls: the second finds what the first one kept."""
    call = Call(problem)
    for _ in range(2):
        found = call.differentiate(function_of(call))
    return found | call.differentiate(function_of(call))


@add("torch, second backward pass", of_torch)
def with_two_passes(problem: Problem) -> Result:
    call = Call(problem)
    return call.differentiate(function_of(call), passes=2)


@add("torch, autocast", of_module)
def with_autocast(problem: Problem) -> Result:
    call = Call(problem)
    with torch.autocast("cpu", torch.bfloat16):
        return call.differentiate(module_of(call))


@add("torch, checkpoint", of_torch)
def with_checkpoint(problem: Problem) -> Result:
    call = Call(problem)
    return call.differentiate(
        functools.partial(torch.utils.checkpoint.checkpoint, function_of(call), use_reentrant=False)
    )


@add("torch, func.grad", of_torch, draws=30)
def with_transform(problem: Problem) -> Result:
    call = Call(problem)
    others = {name: z for name, z in call.leaves.items() if name not in call.wanted}

    def total(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = call.apply(function_of(call), leaves | others)
        return call.total(loss), loss

    leaves = {name: call.leaves[name] for name in call.wanted}
    if not leaves:
        return call.result(total({})[1], {})
    grads, loss = torch.func.grad(total, has_aux=True)(leaves)
    return call.result(loss, {k: z for k, z in grads.items() if k not in problem.kind.locked})


def of_one_loss(problem: Problem) -> bool:
    differentiated = {*problem.settings.get("wrt", ["scale"])} - {*problem.kind.locked}
    square = problem.shape[0] == problem.shape[1]
    return fits(problem) and problem.reduction != "none" and square and bool(differentiated)


@add("torch, grad_cache", of_torch, fits=of_one_loss, draws=30, roundings=4)
def with_grad_cache(problem: Problem) -> Result:
    """Encoders by chunks: functions, a module, functions of mappings, or one of all inputs. Their
    output is their input; numbers are an output, too, or keywords of the loss."""
    call = Call(problem)
    leaves = call.fresh()
    sides: list[Any] = [leaves[name] for name in call.arguments]
    others = {name: z for name, z in leaves.items() if name not in call.arguments}
    numbers = {name: others.pop(name) for name in SCALARS if name in others and problem.number % 2}
    encoders: list[Any] = [[lambda z: z * 1, torch.nn.Identity()][problem.number % 3 % 2]] * 2
    if problem.number % 5 == 0:
        sides, encoders = [{"z": z} for z in sides], [lambda entry: entry["z"] * 1] * 2
    if numbers:
        encoders[0] = lambda z, first=encoders[0]: (first(z), *numbers.values())

    def loss(first: Tensor, *outputs: Tensor, **options: Any) -> Tensor:
        given = dict(zip(numbers, outputs, strict=False))
        features = first, *outputs[len(given) :]
        out = function_of(call)(*features, *call.labels, **given, **options)
        return call.total(call.without_metrics(out))

    chunk = max(1, problem.number % 7 * problem.shape[0] // 7)
    towers: Any = encoders[: len(sides)]
    if problem.number % 4 == 2:
        towers = lambda *z: tuple(tower(side) for tower, side in zip(encoders, z, strict=False))  # noqa: E731
    run = functools.partial(it.grad_cache, towers, sides, loss, chunk, **others)
    found = call.result(run(), {name: leaves[name].grad for name in call.wanted})
    with torch.no_grad():
        found["loss alone"] = run().numpy() / problem.grad_out
    return found | {"loss": found["loss"] / problem.grad_out}


def of_queue(problem: Problem) -> bool:
    has_columns = np.ndim(in_pair(problem.options.get("ids"))[0]) > 1  # ids of a queue are [B]
    return fits(problem) and problem.loss == "info_nce" and not has_columns


@add("torch, KeyQueue", of_torch, fits=of_queue, draws=300, tokens=False)
def with_queue(problem: Problem) -> Result:
    """The last keys, with their ids, come from a queue. It got them in parts, the last part first,
    and before them others, which it has forgotten."""
    call = Call(problem)
    leaves, options = call.fresh(), dict(call.options)
    key, ids = leaves["key"], options.pop("ids", None)
    query_ids, key_ids = ids if isinstance(ids, tuple) else (ids, ids)
    first = problem.number % (len(key) + 1)  # rows of the batch
    queue = it.KeyQueue(len(key) - first, key.shape[1]).to(key.dtype)
    rows = torch.cat([key.detach(), key.new_full((3, key.shape[1]), math.nan)])
    row_ids = None if ids is None else torch.cat([key_ids.long(), torch.zeros(3).long()])
    for part in reversed(torch.arange(first, len(rows)).tensor_split(1 + problem.number % 4)):
        queue(rows[part], None if row_ids is None else row_ids[part])
    keys, all_ids = queue(key[:first], None if row_ids is None else row_ids[:first])
    if ids is not None:
        options["ids"] = query_ids.long(), all_ids
    leaves["key"] = keys
    loss = call.apply(functools.partial(it.info_nce_loss, **options), leaves)
    wanted = [leaves[name] for name in call.wanted]
    if not wanted or not loss.requires_grad:
        return call.result(loss, {})
    grads = torch.autograd.grad(call.total(loss), wanted)
    return call.result(loss, dict(zip(call.wanted, grads, strict=True)))


def compiled(run: Any) -> Any:
    torch.compiler.reset()  # it gives up where one function is compiled many times
    return torch.compile(run, fullgraph=True, backend="aot_eager")


def of_graphs(problem: Problem) -> bool:
    """A graph has no metrics."""
    has_graph = problem.reduction != "none" and not problem.settings.get("metrics", False)
    return fits(problem) and has_graph and not problem.poison


@add("torch, compiled function", of_module, fits=of_graphs, draws=14)
def with_compiled_function(problem: Problem) -> Result:
    call = Call(problem)
    return call.differentiate(compiled(function_of(call)))


@add("torch, compiled module", of_module, fits=of_graphs, draws=14)
def with_compiled_module(problem: Problem) -> Result:
    call = Call(problem)
    return call.differentiate(compiled(module_of(call)))


def fits_gpu(problem: Problem) -> bool:
    return fits(problem) and gpu_executors.fits(problem)


for _form, _make, _takes in (
    ("function", function_of, of_torch), ("module", module_of, of_module)
):  # fmt: skip
    add(f"torch on a GPU, {_form}", _takes, fits=fits_gpu, device=True, marks=("card",))(
        lambda problem, make=_make: (call := Call(problem).on_gpu()).differentiate(make(call))
    )


# --- modules that learn their numbers, under wrappers ---------------------------------------------


def learned(problem: Problem, wrapper: Callable[..., Any]) -> Result:
    """The module holds the scale and the bias, which have gradients under the wrapper."""
    call = Call(problem)
    bias = {"bias": float(problem.options["bias"])} if problem.kind.sigmoid else {}
    make = functools.partial(
        MODULES[problem.loss], learnable=True, scale=problem.scale, max_scale=math.inf,
        **call.options, **bias,
    )  # fmt: skip
    module = make().double()
    for name, parameter in module.named_parameters():  # not rounded to float32
        parameter.data.fill_(bias["bias"] if name == "bias" else math.log(problem.scale))
    leaves = call.fresh()
    sides = [leaves[name] for name in call.arguments]
    inputs, own = (*sides, *call.labels), {"own": leaves["own"]} if "own" in leaves else {}
    run, gradients = wrapper(module, inputs, own, make)
    run(*inputs, **own)  # a call that comes again takes a shorter way
    loss = call.without_metrics(run(*inputs, **own))
    call.total(loss).backward()
    grads = {name: leaves[name].grad for name in leaves if name not in SCALARS}
    found = call.result(loss, grads)
    numbers = gradients()
    found["scale"] = float(numbers["log_scale"].reshape(())) / problem.scale
    if bias:
        found["bias"] = float(numbers["bias"].reshape(()))
    return found


@add("torch, learned, beyond a limit", of_module, draws=40,
     fits=lambda problem: of_learned(problem))  # fmt: skip
def beyond_a_limit(problem: Problem) -> Result:
    """A scale that is beyond its limit has the gradient at the limit, if a step leads back."""
    ways = ["plain", "functional_call", "compile", "export", "strict export"]
    name = ways[problem.number % 5 if of_graphs(problem) else problem.number % 2]

    def at_limit(limit: str, step: float) -> Result:
        def wrapper(module: Any, *others: Any) -> Any:
            setattr(module, limit, problem.scale)
            module.log_scale.data += step
            wrapped = torch_wrappers.LOCAL[name](module, *others)
            assert getattr(module, limit) == problem.scale
            return wrapped

        return learned(problem, wrapper)

    above, below = at_limit("max_scale", 0.5), at_limit("min_scale", -0.5)
    assert above["scale"] >= 0 >= below["scale"]
    return above | {"scale": above["scale"] + below["scale"]}


def of_learned(problem: Problem) -> bool:
    return fits(problem) and not problem.poison


def of_learned_graphs(problem: Problem) -> bool:
    return of_graphs(problem) and problem.number % 2 == 0  # one of two: each compiles


for _name, _wrapper in torch_wrappers.LOCAL.items():
    _graph = any(word in _name for word in ("compile", "export"))
    add(f"torch, learned, {_name}", of_module, draws=35 if _graph else 20,
        fits=of_learned_graphs if _graph else of_learned)(
        functools.partial(learned, wrapper=_wrapper)
    )  # fmt: skip


# --- processes of torch.distributed ---------------------------------------------------------------


def over_processes(problem: Problem, exchange: str, way: str) -> Result:
    import processes

    task = problem.seed, problem.number, problem.largest, exchange, way
    found: Result = processes.run("gloo 3", *task)
    return found


def of_group(problem: Problem) -> bool:
    return fits(problem) and not problem.poison


if torch.distributed.is_available() and torch.distributed.is_gloo_available():
    # first by two of three processes, which then have one group more than the third
    for _exchange, _way in (("auto", "subgroup"), ("ring", "world"), ("gather", "world")):
        add(f"torch, gloo, {_exchange}, {_way}", of_torch, fits=of_group, largest=40, draws=30)(
            functools.partial(over_processes, exchange=_exchange, way=_way)
        )
    for _name in torch_wrappers.RANKS:
        add(f"torch, gloo, learned, {_name}", of_module, fits=of_learned, largest=40, draws=16)(
            functools.partial(over_processes, exchange="auto", way=_name)
        )
