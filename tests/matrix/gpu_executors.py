"""Executors on a GPU, or on the emulated one, by each method."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
from comparison import METRICS, Result
from executors import arguments, by_name, executor, find_scores, of_numpy
from gpu_problems import EMULATED, MISSING, host
from problems import Problem

import infonce
from infonce.checks.tokens import METHODS

if not MISSING:
    import cupy


def missing(marks: tuple[str, ...]) -> str:
    """Why an executor with these marks does not run here. "card": no emulated GPU suffices."""
    if "card" in marks:
        import torch

        return "" if torch.cuda.is_available() else "this torch sees no GPU"
    return MISSING if "gpu" in marks else ""


def on_device(value: Any) -> Any:
    """Arrays on the GPU, of the caller's order of elements; other values as they are."""
    if isinstance(value, tuple) and isinstance(value[0], np.ndarray):
        return tuple(map(on_device, value))
    if not isinstance(value, np.ndarray):
        return value
    return cupy.asarray(value.astype(value.dtype.newbyteorder("=")))


def fits(problem: Problem) -> bool:
    """Kernels take subnormals for 0, so norms at the end of the range are the CPU's. Unit tokens
    are rounded to 16 bits, of which bounds know nothing: tests/gpu/test_maxsim.py has them."""
    if problem.has_tokens and problem.normalize and problem.dtype in ("float16", "bfloat16"):
        return False
    longest = [np.abs(z.astype(np.float64)).max() for z in problem.read_features()]
    return not problem.poison and min(longest) > 1e-15 and max(longest) < 1e15


def use_device(rank: int) -> None:
    """The GPU of a rank: ranks share GPUs if there are fewer."""
    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()


def make_stream() -> Any:
    """Another stream than the default one."""
    return cupy.cuda.Stream(non_blocking=True)


def on_host(found: Result) -> Result:
    """A copy of a result with NumPy's arrays."""
    copied: Result = {k: host(z) for k, z in found.items() if k not in ("lse", "metrics")}
    metrics = found["metrics"]
    if metrics is not None:
        metrics = SimpleNamespace(**{field: host(getattr(metrics, field)) for field in METRICS})
    return copied | {"lse": list(map(host, found["lse"])), "metrics": metrics}


def with_gpu(problem: Problem, method: str) -> Result:
    args, options = arguments(problem)
    options = {name: on_device(value) for name, value in options.items()}
    options |= {k: v for k, v in problem.settings.items() if k != "workspace"}
    options |= {"method": method, "grad_out": on_device(problem.grad_out)}
    if method == "fused":
        options.pop("metrics", None)
    function = getattr(infonce, f"{problem.loss}_loss_and_grad")
    found = by_name(function(*map(on_device, args), **options))
    if problem.has_tokens:
        found["scores"] = find_scores(list(map(on_device, problem.features)), options)
    return on_host(found)


for _method in ("naive", "fused", "tiled"):
    executor(
        f"GPU, {_method}", of_numpy, fits=fits, draws=40 if EMULATED else 200, device=True,
        largest=24 if EMULATED else 140, marks=("gpu",), tokens=_method in METHODS,
    )(functools.partial(with_gpu, method=_method))  # fmt: skip
