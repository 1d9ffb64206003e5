"""Executors of infonce.jax: functions under JAX's transforms, and over the devices of a mesh."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from comparison import Result
from executors import executor, of_teacher
from problems import Problem, draw

import infonce.jax as ij
from infonce import spec
from infonce.checks import keywords

# A gradient waits in the dtype of features, is multiplied, and added up over prefixes
ROUNDINGS = 3


def of_jax(kind: spec.Loss) -> set[str]:
    return {*keywords.jax_function(kind), *of_teacher(kind)} - {*keywords.AXIS}


def fits(problem: Problem) -> bool:
    """Upstream gradients have the dtype of the loss. JAX's own threads take subnormals for 0."""
    upstream = (problem.compute, problem.dtype == "float64")
    return upstream in (("float64", True), ("float32", False))


def native(value: Any) -> Any:
    """Arrays as JAX's; pairs of them; other values as they are."""
    if isinstance(value, tuple) and isinstance(value[0], np.ndarray):
        return tuple(map(native, value))
    if not isinstance(value, np.ndarray):
        return value
    return jnp.asarray(value.astype(value.dtype.newbyteorder("=")))


class Call:
    """The arrays of a problem: those with gradients by name, and the others."""

    def __init__(self, problem: Problem) -> None:
        self.problem, kind = problem, problem.kind
        options = {name: native(value) for name, value in problem.options.items()}
        names = [name for name in kind.arguments if name != "own"]
        leaves = dict(zip(names, map(native, problem.features), strict=True))
        number = "temperature" if problem.number % 3 == 0 else "scale"
        numbers = {number: 1 / problem.scale if number == "temperature" else problem.scale}
        numbers |= {"bias": options.pop("bias")} if kind.sigmoid else {}
        leaves |= {name: jnp.asarray(z, jnp.float64) for name, z in numbers.items()}
        leaves |= {"own": options.pop("own")} if "own" in options else {}
        wanted = problem.settings.get("wrt", [*names, "own", "scale", "bias"])
        self.wanted = {
            name: z for name, z in leaves.items()
            if {name.replace("temperature", "scale")} & {*wanted}
        }  # fmt: skip
        self.others = {name: z for name, z in leaves.items() if name not in self.wanted}
        self.arrays = {k: v for k, v in options.items() if isinstance(v, (jax.Array, tuple)) and
                       k not in spec.PREFIX_OPTIONS}  # fmt: skip
        self.options = {k: v for k, v in options.items() if k not in self.arrays}
        given = ("method", "precision", "workspace", "metrics")
        self.options |= {k: v for k, v in problem.settings.items() if k in given}
        self.upstream = jnp.asarray(problem.grad_out)

    def objective(self, function: Any = None) -> Callable[..., Any]:
        """(wanted, others, arrays) -> (upstream times the loss, (the loss, metrics))."""
        loss_of = function or getattr(ij, f"{self.problem.loss}_loss")

        def objective(wanted: Any, others: Any, arrays: Any) -> Any:
            out = loss_of(**wanted, **others, **arrays, **self.options)
            loss, metrics = out if isinstance(out, tuple) else (out, None)
            return (self.upstream.astype(loss.dtype) * loss).sum(), (loss, metrics)

        return objective

    def result(self, out: Any, grads: dict[str, Any]) -> Result:
        loss, metrics = out
        found: Result = {"loss": np.asarray(loss), "metrics": jax.device_get(metrics)}
        for name, gradient in grads.items():
            if name in self.problem.kind.locked:
                assert not gradient.any()
                continue
            if name == "temperature":
                name, gradient = "scale", -gradient / self.problem.scale**2
            found[name] = np.asarray(gradient)
        return found


def differentiate(problem: Problem, change: Callable[..., Any], function: Any = None) -> Result:
    """`change`: from value_and_grad to what is called."""
    with jax.enable_x64(True):
        call = Call(problem)
        objective = jax.value_and_grad(call.objective(function), has_aux=True)
        with errors_of_callbacks():
            (_, out), grads = change(objective)(call.wanted, call.others, call.arrays)
            return call.result(out, grads)  # waits for the results


@contextlib.contextmanager
def errors_of_callbacks() -> Iterator[None]:
    """A ValueError in a compiled program is one here, too: JAX puts its text into another error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        (message,) = re.findall(r"^ValueError: (.*)", str(error), re.M)
        raise ValueError(message) from error


add = functools.partial(executor, roundings=ROUNDINGS, fits=fits, not_finite="loss", needs=("jax",))


@add("JAX, eager", of_jax, draws=21)
def eagerly(problem: Problem) -> Result:
    return differentiate(problem, lambda f: f)


@add("JAX, jit", of_jax, draws=30)
def with_jit(problem: Problem) -> Result:
    return differentiate(problem, jax.jit)


@add("JAX, checkpoint", of_jax, draws=15)
def with_checkpoint(problem: Problem) -> Result:
    with jax.enable_x64(True):
        call = Call(problem)
        objective = jax.value_and_grad(jax.checkpoint(call.objective()), has_aux=True)
        with errors_of_callbacks():
            (_, out), grads = jax.jit(objective)(call.wanted, call.others, call.arrays)
            return call.result(out, grads)


@add("JAX, vmap", of_jax, draws=14)
def with_vmap(problem: Problem) -> Result:
    """The second of two problems, whose first has other features."""

    def mapped(f: Any) -> Any:
        def run(*trees: Any) -> Any:
            pairs = jax.tree.map(lambda z: jnp.stack([z[::-1] if z.ndim > 1 else z, z]), trees)
            return jax.tree.map(lambda z: z[1], jax.jit(jax.vmap(f))(*pairs))

        return run

    return differentiate(problem, mapped)


@add("JAX, scan", of_jax, draws=14)
def with_scan(problem: Problem) -> Result:
    """The last of three steps of a loop."""

    def looped(f: Any) -> Any:
        def run(*trees: Any) -> Any:
            _, outs = jax.lax.scan(lambda carry, _: (carry, f(*trees)), 0.0, None, length=3)
            return jax.tree.map(lambda z: z[-1], outs)

        return jax.jit(run)

    return differentiate(problem, looped)


# --- devices --------------------------------------------------------------------------------------


def over_devices(seed: int, number: int, largest: int, devices: int, way: str) -> Result:
    """In a process of as many devices: the rows are split over them, or each has a problem."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "data")
    problem = draw(seed, number, largest)
    if way == "alone":
        return differentiate(problem, functools.partial(each_alone, mesh))
    if way == "axis":
        return differentiate(problem, jax.jit, functools.partial(inside_of_axis, mesh, problem))
    function = ij.sharded(getattr(ij, f"{problem.loss}_loss"), mesh, "data")
    return differentiate(problem, jax.jit if number % 2 else lambda f: f, function)


def each_alone(mesh: Any, f: Any) -> Any:
    """The last device has the problem, the others problems of other features."""
    rows = jax.P("data")

    def of_one(*trees: Any) -> Any:
        return jax.tree.map(lambda z: z[None], f(*jax.tree.map(lambda z: z[0], trees)))

    def run(*trees: Any) -> Any:
        each = jax.tree.map(lambda z: jnp.stack([z[::-1] if z.ndim > 1 else z, z]), trees)
        outs = jax.jit(jax.shard_map(of_one, mesh=mesh, in_specs=rows, out_specs=rows))(*each)
        return jax.tree.map(lambda z: z[1], outs)

    return run


@add("JAX, devices alone", of_jax, draws=16, largest=20)
def with_devices_alone(problem: Problem) -> Result:
    import processes

    task = problem.seed, problem.number, problem.largest, 2, "alone"
    found: Result = processes.run("devices 2", *task)
    return found


def inside_of_axis(mesh: Any, problem: Problem, **named: Any) -> Any:
    """The loss of the rows of all devices, inside of `jax.shard_map`."""
    if problem.loss == "nt_xent":  # views are on any device
        rows = problem.shape[0]
        named["labels"] = (jnp.arange(rows) + rows // 2) % rows
    pairs = {*spec.INTEGER_OPTIONS, "guide"}
    arrays = {k: z for k, z in named.items() if k in pairs or isinstance(z, jax.Array)}
    by_row = {k: z for k, z in arrays.items() if isinstance(z, tuple) or z.ndim}
    if "own_indices" in by_row:  # a table is on all devices
        by_row.pop("own")
    same = {k: z for k, z in arrays.items() if k not in by_row}
    constants = {k: z for k, z in named.items() if k not in arrays}
    loss = functools.partial(getattr(ij, f"{problem.loss}_loss"), axis_name="data", **constants)
    split, whole = jax.P("data"), jax.P()
    return jax.shard_map(
        lambda by_row, same: loss(**by_row, **same), mesh=mesh, in_specs=(split, whole),
        out_specs=split if problem.reduction == "none" else whole,
    )(by_row, same)  # fmt: skip


def divides(problem: Problem, devices: int = 2) -> bool:
    return not any(n % devices for n in problem.shape) and fits(problem)


@add("JAX, axis", of_jax, draws=80, largest=40, fits=lambda problem: (
    divides(problem, 4) and not problem.poison and "metrics" not in problem.settings))  # fmt: skip
def with_axis(problem: Problem) -> Result:
    import processes

    task = problem.seed, problem.number, problem.largest, 4, "axis"
    found: Result = processes.run("devices 4", *task)
    return found


@add("JAX, sharded", of_jax, draws=64, largest=20, fits=divides)
def with_devices(problem: Problem) -> Result:
    import processes

    task = problem.seed, problem.number, problem.largest, 2, "rows"
    found: Result = processes.run("devices 2", *task)
    name = problem.poison.rpartition(" ")[2]
    if name in ("weights", "key_bias", "own_bias") and np.isnan(found["loss"]).all():
        raise ValueError(f"{name}: over devices, the loss is NaN in place of an error")
    return found
