"""Executors: every entrance of the library, as a function from a problem to a loss and gradients.

An executor takes the keywords that the product's own tables give its entrance. A problem with other
keywords is refused: test_matrix.py holds the error to name one of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from comparison import Result
from host_device import Host, Rows
from infonce.kernels import between_passes, solve
from infonce.kernels import problem as kernels_problem
from infonce.kernels.arrays.backend import ArrayBlocks
from infonce.kernels.cpu import backend, schedule
from infonce.kernels.distill.solve import solver_by_passes
from infonce.kernels.maxsim import sizes as token_sizes
from infonce.kernels.offload import backend as offload_backend
from problems import TEACHER, Problem

import infonce
from infonce import dispatch, reference, spec
from infonce.checks import validation
from infonce.checks.tokens import METHODS

Keywords = Callable[[spec.Loss], Iterable[str]]


@dataclass(frozen=True)
class Executor:
    """An entrance."""

    run: Callable[[Problem], Result]
    keywords: Keywords  # those that the entrance takes, of a loss
    draws: int = 40  # problems that the test computes
    roundings: int = 1  # of a gradient, to the dtype of features
    device: bool = False  # of a GPU: see comparison.py
    largest: int = 140  # rows of a problem
    fits: Callable[[Problem], bool] = lambda _: True  # beyond keywords: what the entrance can hold
    not_finite: str = "all"  # of problems with a NaN: which numbers are compared with "auto"
    tokens: bool = True  # whether features may be sets of tokens
    needs: tuple[str, ...] = ()  # modules
    marks: tuple[str, ...] = ()

    def takes(self, problem: Problem) -> bool:
        keywords = {*self.keywords(problem.kind), "labels", "bias"}
        takes_features = self.tokens or not problem.has_tokens
        return {*problem.options} <= keywords and takes_features and self.fits(problem)


EXECUTORS: dict[str, Executor] = {}


def executor(name: str, keywords: Keywords, **fields: Any) -> Callable[..., Any]:
    """Adds an entrance to the table."""

    def add(run: Callable[[Problem], Result]) -> Callable[[Problem], Result]:
        EXECUTORS[name] = Executor(run, keywords, **fields)
        return run

    return add


# --- NumPy ----------------------------------------------------------------------------------------


def of_numpy(kind: spec.Loss) -> list[str]:
    names = [name for name in spec.LossOptions.__annotations__ if name not in kind.refused]
    return [*names, *of_teacher(kind)]


def of_teacher(kind: spec.Loss) -> tuple[str, ...]:
    return TEACHER if kind.taught else ()


def arguments(problem: Problem) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments, with labels and bias, and keywords with the scale."""
    options = {"scale": problem.scale, **problem.options}
    positional = [*problem.features]
    if "labels" in options and problem.loss in ("info_nce", "sup_con"):
        positional.append(options.pop("labels"))
    if "bias" in options:
        positional.append(options.pop("bias"))
    return positional, options


def by_name(out: Any) -> Result:
    """The result of a function with gradients."""
    lse = out.lse if isinstance(out.lse, tuple) else (out.lse,)
    found: Result = {"loss": out.loss, "lse": [z for z in lse if z is not None]}
    return found | out.grads._asdict() | {"metrics": out.metrics}


def with_numpy(problem: Problem, **settings: Any) -> Result:
    """Loss and gradients, and the loss alone."""
    args, options = arguments(problem)
    settings = problem.settings | settings
    alone_too = ("method", "precision", "workspace", "offload")
    alone = {k: v for k, v in settings.items() if k in alone_too}
    if settings.get("method") in ("naive", "fused"):
        for each in (alone, settings):
            each.pop("workspace", None)
    with contextlib.ExitStack() as stack:
        if problem.number % 3:  # several blocks of tokens
            small = {"CPU_MOST_ROWS": problem.number % 5, "CPU_MOST_SIDE": 2 + problem.number % 7}
            stack.enter_context(mock.patch.multiple(token_sizes, **small))
        if problem.number % 4:  # parts of rows with their own negatives
            stack.enter_context(mock.patch.object(between_passes, "OWN_BYTES", 2000))
        if problem.number % 5 == 0:  # the scale's gradient is that of products, or of features
            stack.enter_context(mock.patch.object(kernels_problem, "FEW_LOGITS", 0))
        for name, value in problem.sides.items():
            stack.enter_context(mock.patch.object(schedule, name, value))
        function = getattr(infonce, f"{problem.loss}_loss_and_grad")
        out = function(*args, **options, **settings, grad_out=problem.grad_out)
        loss = getattr(infonce, f"{problem.loss}_loss")(*args, **options, **alone)
        found = by_name(out) | {"loss alone": loss}
        if problem.has_tokens:
            found["scores"] = find_scores(problem.features, options | alone)
    named = {name for name, gradient in out.grads._asdict().items() if gradient is not None}
    assert named == {*settings.get("wrt", named)}, f"gradients of {named}"
    assert loss.dtype == out.loss.dtype
    return found


def find_scores(features: Sequence[Any], options: dict[str, Any]) -> Any:
    """MaxSim scores, by the options of a loss that scores have."""
    names = {"normalize", "precision", "workspace", *spec.TOKEN_OPTIONS}
    return infonce.maxsim_scores(*features, **{k: v for k, v in options.items() if k in names})


for _method in spec.CHOICES["method"]:
    executor(f"NumPy, {_method}", of_numpy, draws=300, tokens=_method in METHODS)(
        lambda problem, method=_method: with_numpy(problem, method=method)
    )


def with_least_workspace(problem: Problem, **settings: Any) -> Result:
    """The error for too small a workspace names the least one, which suffices."""
    try:
        return with_numpy(problem, workspace=1, **settings)
    except ValueError as error:
        least = re.findall(r"^workspace: expected at least (\d+)", str(error))
        if not least:
            raise
    # with offload, of the chunks; blocks of a teacher on the device need more
    room = 2**15 if problem.kind.taught and "offload" in settings else int(least[0])
    return with_numpy(problem, workspace=room, **settings)


executor("NumPy, least workspace", of_numpy, draws=300)(
    functools.partial(with_least_workspace, method="tiled")
)


@executor("NumPy, operations on arrays", of_numpy, draws=120, tokens=False,
          fits=lambda problem: "precision" not in problem.settings)  # fmt: skip
def with_arrays(problem: Problem) -> Result:
    """Passes over small blocks by operations on arrays, with vectors of the CPU or of a GPU."""
    vectors = solve.Vectors(np, passes_on_gpu=bool(problem.number % 2))

    def solve_by_arrays(problem: Any, gradients: Any) -> Any:
        blocks = ArrayBlocks(problem, gradients, vectors, Rows)
        blocks.block = min(7, problem.shape[0]), min(5, problem.shape[1])
        return solver_by_passes(problem)(problem, blocks, gradients)

    with mock.patch.object(backend, "solve", solve_by_arrays):
        return with_numpy(problem, method="tiled")


@executor("NumPy, offload", of_numpy, draws=120, tokens=False, fits=lambda problem: (
    problem.dtype == problem.compute == "float64" and not problem.poison))  # fmt: skip
def with_offload(problem: Problem) -> Result:
    """By chunks, on a stand-in for a GPU, which computes in float64: in the least workspace, or on
    the device as a whole."""
    solve_on_host = functools.partial(offload_backend.solve, device=Host())
    with (
        mock.patch.object(dispatch, "backend", return_value=SimpleNamespace(solve=solve_on_host)),
        mock.patch.object(validation, "gpu_missing", return_value=None),
    ):
        if problem.number % 3 == 0:
            return with_numpy(problem, method="auto", offload=True)
        return with_least_workspace(problem, method="auto", offload=True)


@executor("NumPy, grad_cache", of_numpy, draws=60,
          fits=lambda problem: "wrt" not in problem.settings)  # fmt: skip
def with_grad_cache(problem: Problem) -> Result:
    """Encoders by chunks, whose output is their input, in a list or by the names of arguments."""
    args, options = arguments(problem)
    rest = dict(zip(("labels" if "labels" in problem.options else "bias",),
                    args[len(problem.features) :], strict=False))  # fmt: skip
    names = [name for name in problem.kind.arguments if name != "own"]
    received: list[list[Any]] = [[] for _ in names]
    inputs: Any = args[: len(names)]
    backward: Any = [lambda _, gradient, to=to: to.append(gradient) for to in received]
    if problem.number % 2:
        inputs = dict(zip(names, inputs, strict=True))
    if problem.number % 3:  # entries of several arrays
        mappings = [{"z": z} for z in args[: len(names)]]
        inputs = dict(zip(names, mappings, strict=True)) if problem.number % 2 else mappings
    encode = (lambda entry: entry["z"]) if problem.number % 3 else (lambda z: z)
    chunk = max(1, problem.number % 7 * problem.shape[0] // 7)
    function = getattr(infonce, f"{problem.loss}_loss_and_grad")
    settings = {**problem.settings, "grad_out": problem.grad_out}
    out = infonce.grad_cache(
        function, inputs, encode, backward, chunk, **options, **rest, **settings
    )  # fmt: skip
    whole = {name: np.concatenate(each) for name, each in zip(names, received, strict=True) if each}
    return by_name(out) | dict.fromkeys(names) | whole


def of_reference(kind: spec.Loss) -> set[str]:
    return {*of_numpy(kind)} - {*spec.PREFIX_OPTIONS}


def fits_reference(problem: Problem) -> bool:
    """Rows of zeros have no direction, and all indices are of the table."""
    arrays = [*problem.features, *(z for z in (problem.options.get("own"),) if z is not None)]
    divides = problem.normalize and not all(z.any(axis=-1).all() for z in arrays)
    outside = {"own_indices", "own_mask"} <= {*problem.options}
    return not (problem.poison or divides or outside)


@executor("infonce.reference", of_reference, draws=300, tokens=False, fits=fits_reference)
def with_reference(problem: Problem) -> Result:
    """The specification. Its weights are what a reduction, and an upstream gradient, make of the
    loss of each row."""
    options, every = {"scale": problem.scale, **problem.options}, problem.kind.sigmoid
    reduction = options.pop("reduction", "mean")
    has_loss = problem.find_positives()[: problem.shape[0]].any(axis=1) | every
    weights = options.pop("weights", 1.0) * (has_loss | problem.kind.taught)
    if reduction == "mean":
        weights = weights / (weights.sum() or 1.0)
    function = functools.partial(getattr(reference, problem.loss), **options)
    features = [z.astype(np.float64) for z in problem.features]
    value = function(*features, weights=weights)
    losses = np.where(weights == 0, 0.0, weights * value.losses)
    lse = value.lse if isinstance(value.lse, tuple) else (value.lse,)
    grads = function(*features, weights=weights * problem.grad_out).grads
    loss = losses if reduction == "none" else losses.sum()
    return {"loss": loss, "lse": [z for z in lse if z is not None], **grads}


# --- other entrances, which fill the table --------------------------------------------------------

import command_executor  # noqa: E402, F401
import gpu_executors  # noqa: E402, F401
import rank_executors  # noqa: E402, F401
import torch_executors  # noqa: E402, F401

if importlib.util.find_spec("jax"):
    import jax_executors  # noqa: F401
