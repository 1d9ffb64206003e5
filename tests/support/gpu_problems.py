"""Calls of the GPU backend without the public functions: problems, results, bounds of errors.

`run` makes a `Problem` and calls the backend; `check` compares its results with float64.
"""

from typing import Any

import numpy as np
import pytest
from infonce.kernels.gpu import config
from infonce.kernels.problem import Gradients, Problem, uses_moments
from judge import (
    BFLOAT16,
    cancelling,
    largest_logit,
    scale_size,
    viewed,
)

from infonce.spec import LOSSES


def _missing() -> str:
    """Why there is no GPU to test on; empty if there is one."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        cupy.zeros(1)
    except Exception as error:
        return f"no GPU: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return ""


MISSING = _missing()
EMULATED = False  # whether kernels run on the emulator, which takes a thousand times as long
gpu_only = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy
    from infonce.kernels.gpu import select as gpu

    EMULATED = "emulated" in cupy.__version__

# Devices that tests choose kernels for: compute capability, multiprocessors, bytes of shared memory
# of a thread block and of a multiprocessor, bytes of memory
DEVICES = {
    "sm_75": config.DeviceProperties("75", 40, 64 * 1024, 64 * 1024, 16 * 2**30),
    "sm_80": config.DeviceProperties("80", 108, 163 * 1024, 164 * 1024, 80 * 2**30),
    "sm_90a": config.DeviceProperties("90", 132, 227 * 1024, 228 * 1024, 80 * 2**30),
    "sm_100": config.DeviceProperties("100", 148, 227 * 1024, 228 * 1024, 180 * 2**30),
}
# (dtype of the features, precision)
CASES = [
    ("float64", "fp64"), ("float32", "fp32"), ("float32", "tf32"), ("float32", "bf16x3"),
    ("bfloat16", "bf16"), ("float16", "fp16"), ("bfloat16", "fp32"), ("float16", "fp64"),
]  # fmt: skip
PRECISIONS = CASES[:6]  # each precision once
# Bounds of relative errors that docs/methods.md states for a GPU, by precision
LOSS_BOUND = {"fp64": 1e-13, "fp32": 1e-6, "bf16x3": 1e-5, "tf32": 1e-4, "bf16": 1e-5,
              "fp16": 1e-5}  # fmt: skip
GRAD_BOUND = {"fp64": 1e-12, "fp32": 5e-6, "bf16x3": 1e-4, "tf32": 2e-3, "bf16": 2.5e-3,
              "fp16": 4e-4}  # fmt: skip
# Relative error of a gradient from its rounding to the dtype in which it is stored
STORED_BOUND = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 0.0, "float64": 0.0}
# By precision: roundoff of a dot product, relative to its largest terms; and of an element of dL/dx
PRODUCT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16x3": 2.0**-17, "tf32": 2.0**-11,
           "bf16": 2.0**-24, "fp16": 2.0**-24}  # fmt: skip
ELEMENT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16x3": 2.0**-17, "tf32": 2.0**-12,
           "bf16": 2.0**-9, "fp16": 2.0**-12}  # fmt: skip


def fewer(cases: Any, most: int) -> list[Any]:
    """All cases on a GPU; on the emulator `most` of them, spread over all."""
    cases = list(cases)
    if not EMULATED or len(cases) <= most:
        return cases
    return [cases[i * len(cases) // most] for i in range(most)]


def smaller(size: Any, emulated: Any) -> Any:
    """`size` on a GPU, `emulated` on the emulator."""
    return emulated if EMULATED else size


def find_dtype(name: str) -> np.dtype[Any]:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def features(loss: str, n: int, d: int, dtype: Any, seed: int) -> list[Any]:
    """The feature arrays of a loss on the GPU: random unit rows [n, d]."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((2, n, d))
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    return [cupy.asarray(side.astype(dtype)) for side in z[: 1 if loss == "nt_xent" else 2]]


def host(array: Any) -> Any:
    """A copy of a GPU array as a NumPy array; None as it is."""
    return None if array is None else cupy.asnumpy(array)


class Result:
    """The results of one evaluation, copied to the host."""

    def __init__(self, solution: Any, grads: dict[str, Any], upstream: Any) -> None:
        self.losses = host(solution.losses)
        self.loss = float(np.sum(host(upstream) * self.losses))
        self.grads = {k: host(v) for k, v in grads.items()}
        self.solution = solution


def run(name: str, args: Any, precision: str, scale: Any, **options: Any) -> Result:
    """Evaluate loss `name` on the GPU, and fetch the results."""
    return Result(*evaluate(name, args, precision, scale, **options))


def evaluate(
    name: str, args: Any, precision: str, scale: Any, *, bias: Any = -10.0, labels: Any = None,
    ids: Any = None, normalize: bool = False, workspace: int = 2**28, view: str = "contiguous",
    wrt: tuple[str, ...] | None = None, grad_dtype: Any = None, outs: Any = None,
    gradient: bool = True, ranks: bool = False, method: str = "tiled", upstream: Any = None,
) -> tuple[Any, dict[str, Any], Any]:  # fmt: skip
    """(solution, gradients by name, upstream gradients of rows) of loss `name` on the GPU.

    Arguments have the names of the public options. `gradient=False`: the loss only. `outs`: arrays
    for gradients, by name; others are made. `ranks`: whether to count retrieval ranks.
    """
    kind = LOSSES[name]
    arrays = [z if isinstance(z, cupy.ndarray) else device_view(z, view) for z in args]
    query, key = arrays[0], arrays[-1]
    m = len(query)
    if kind.symmetric:
        positives = (cupy.arange(m) + m // 2) % m
    else:
        positives = cupy.arange(m) if labels is None else cupy.asarray(labels, np.int64)
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    upstream = cupy.full(m, 1.0 / m) if upstream is None else cupy.asarray(upstream)
    wanted = [a for a in kind.arguments if a not in kind.locked] if wrt is None else list(wrt)
    moments = gradient and uses_moments(m * len(key), bool(wanted), False)
    problem = Problem(
        query=query, key=key, scale=scale, upstream=upstream, positives=positives,
        row_direction_weight=kind.row_direction_weight,
        column_direction_weight=kind.column_direction_weight,
        bias=bias if kind.sigmoid else None, symmetric=kind.symmetric,
        query_ids=None if ids is None else cupy.asarray(pair[0], np.int64),
        key_ids=None if ids is None else cupy.asarray(pair[1], np.int64),
        normalize=normalize, compute_precision=precision, method=method, workspace=workspace,
        retrieval_ranks=ranks, scalar_grads=gradient, moments=moments,
        progress=lambda *_: None,  # a call with `progress` runs its passes without a plan
    )  # fmt: skip
    outputs: dict[str, Any] = {}
    gradients = None
    if gradient:
        for a, z in zip(kind.arguments, arrays, strict=True):
            if a in wanted:
                outputs[a] = (outs or {}).get(a)
                if outputs[a] is None:
                    outputs[a] = cupy.full(z.shape, np.nan, grad_dtype or z.dtype)
        last = kind.arguments[-1]
        want_key = not kind.symmetric and last in outputs
        want_query = kind.arguments[0] in outputs
        if want_query or want_key:
            gradients = Gradients(
                outputs.get(kind.arguments[0]), outputs.get(last) if want_key else None, None,
                want_query, want_key,
            )  # fmt: skip
    solution = gpu.solve(problem, gradients)
    if gradient:
        outputs["scale"] = solution.scale_grad
        if kind.sigmoid:
            outputs["bias"] = solution.bias_grad
    return solution, outputs, upstream


def device_view(z: Any, how: str) -> Any:
    """The array on the GPU, as `judge.viewed` makes it on the host: with the same strides."""
    if how == "contiguous":
        return cupy.asarray(z)
    seen = viewed(z, how)
    root = seen
    while root.base is not None:
        root = root.base
    root_array = cupy.asarray(root)
    offset = seen.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return cupy.ndarray(seen.shape, seen.dtype, root_array.data + offset, seen.strides)


def check(
    out: Result, ref: Any, args: Any, precision: str, scale: float, grad_dtype: str = "",
    averaged: bool = False, call: str = "",
) -> None:  # fmt: skip
    """AssertionError if a result of `call` is too far from `ref`, the loss in float64.

    `args` are the features. `averaged`: whether the batch is so large that errors of rounding
    average out, so that bounds have no terms for small batches. `judge.assert_grad` has the reasons
    of the factors 6 and 8.
    """
    at = f"{call} at {scale:g}:"
    logit = largest_logit(scale, args[0], args[-1])
    u = PRODUCT_ROUNDOFF[precision]
    single = 2.0**-53 if precision == "fp64" else 2.0**-24
    bound = LOSS_BOUND[precision] * max(1.0, logit / 200) * abs(ref.loss)
    # The error of a loss near 0 is relative to the largest logit, of which siglip adds up a row
    summands = ref.losses.size if ref.lse is None else 1
    bound = max(bound, 4 * max(u, single) * max(logit, 1.0) * summands)
    error = abs(out.loss - ref.loss)
    assert error <= bound, f"{at} loss {out.loss} for {ref.loss}: off by {error:.1e} > {bound:.1e}"
    terms = cancelling(ref, args, scale)
    for name, got in out.grads.items():
        want = ref.grads[name]
        if got is None:
            continue
        wide = np.asarray(got, np.float64)
        size, cancels = float(np.linalg.norm(want)), terms
        relative = GRAD_BOUND[precision] * max(1.0, logit / 200)
        if name in ("scale", "bias"):
            size = max(scale_size(ref, args), abs(want)) if name == "scale" else size
            cancels = terms * np.sqrt(len(args[0])) / scale
        else:
            relative = max(relative, STORED_BOUND[grad_dtype or got.dtype.name])
        limit = relative * size + 1e-30
        if not averaged:
            limit += 6 * u * logit * size
            limit += (8 * u * (1 + logit) + 2 * ELEMENT_ROUNDOFF[precision]) * cancels
        tiny = {"float16": 2.0**-24, "bfloat16": 2.0**-126}.get(got.dtype.name, 0.0)
        limit += tiny * np.sqrt(np.size(want)) + 1e-24 * (precision != "fp64")
        error = float(np.linalg.norm(wide - want))
        assert error <= limit, f"{at} {name}: off by {error:.1e} > {limit:.1e}, norm {size:.1e}"


SHAPES = [
    (1, 1, 1), (2, 3, 5), (7, 9, 33), (31, 64, 8), (65, 65, 31), (127, 128, 64), (128, 129, 65),
    (129, 257, 16), (255, 300, 127), (300, 300, 70),
]  # fmt: skip
TEMPERATURES = [0.005, 0.01, 0.07, 1.0]
METHODS = ["tiled", "fused", "naive"]
