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
from executors import executor
from problems import Problem, draw

import infonce.jax as ij
from infonce import spec
from infonce.checks import keywords

# A gradient waits in the dtype of features, is multiplied, and added up over prefixes
ROUNDINGS = 3


def of_jax(kind: spec.Loss) -> set[str]:
    return {*keywords.jax_function(kind)} - {*keywords.AXIS}


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
        self.options |= {
            k: v for k, v in problem.settings.items() if k in ("method", "precision", "workspace")
        }
        self.upstream = jnp.asarray(problem.grad_out)

    def objective(self, function: Any = None) -> Callable[..., Any]:
        """(wanted, others, arrays) -> (upstream times the loss, the loss)."""
        loss_of = function or getattr(ij, f"{self.problem.loss}_loss")

        def objective(wanted: Any, others: Any, arrays: Any) -> Any:
            loss = loss_of(**wanted, **others, **arrays, **self.options)
            return (self.upstream.astype(loss.dtype) * loss).sum(), loss

        return objective

    def result(self, loss: Any, grads: dict[str, Any]) -> Result:
        found: Result = {"loss": np.asarray(loss)}
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
            (_, loss), grads = change(objective)(call.wanted, call.others, call.arrays)
        return call.result(loss, grads)


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
            (_, loss), grads = jax.jit(objective)(call.wanted, call.others, call.arrays)
        return call.result(loss, grads)


@add("JAX, vmap", of_jax, draws=14)
def with_vmap(problem: Problem) -> Result:
    """The second of two problems, whose first has other features."""

    def mapped(f: Any) -> Any:
        def run(*trees: Any) -> Any:
            pairs = jax.tree.map(lambda z: jnp.stack([z[::-1] if z.ndim == 2 else z, z]), trees)
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


def over_devices(seed: int, number: int, largest: int, devices: int) -> Result:
    """In a process of as many devices: the rows are split over them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "data")
    problem = draw(seed, number, largest)
    function = ij.sharded(getattr(ij, f"{problem.loss}_loss"), mesh, "data")
    return differentiate(problem, jax.jit if number % 2 else lambda f: f, function)


def divides(problem: Problem) -> bool:
    return not any(n % 2 for n in problem.shape) and fits(problem)


@add("JAX, sharded", of_jax, draws=21, largest=20, fits=divides)
def with_devices(problem: Problem) -> Result:
    import processes

    task = problem.seed, problem.number, problem.largest, 2
    found: Result = processes.run("devices 2", *task)
    name = problem.poison.rpartition(" ")[2]
    if name in ("weights", "key_bias", "own_bias") and np.isnan(found["loss"]).all():
        raise ValueError(f"{name}: over devices, the loss is NaN in place of an error")
    return found
