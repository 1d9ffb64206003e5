"""Loss and gradient of a small or medium batch on the GPU, in one launch: kernels/cuda/fused.cu."""

from __future__ import annotations

import struct
from typing import Any

import cupy
import numpy as np

from . import compiler
from .blocks import Array, Gradients, Problem, Solution
from .launch_config import Device

THREADS = 256
TILE = 64  # rows and columns of a tile
CHUNK_BYTES = 128  # of a row, in one step of a product
PAYS = 2**29  # multiply-adds up to which one launch beats several with tensor cores
DTYPES = {"float64": 0, "float32": 1, "bfloat16": 2, "float16": 3}  # kernels/cuda/common.cuh

# struct Fused: four matrices, m n d, scale and bias, weights, ...; every field has 8 bytes
_LAYOUT = struct.Struct("=" + 4 * "Qqqq" + "qqq" + 2 * "dQ" + "dddd" + "QQQQ" + 6 * "q" + 21 * "Q")
_BY_VALUE = np.dtype(f"V{_LAYOUT.size}")  # one parameter, to CuPy
_NO_MATRIX = (0, 0, 0, 0)
_kernels: dict[tuple[int, bool, str], Any] = {}
_barriers: dict[tuple[int, int], Array] = {}


def logit_bytes(problem: Problem) -> int:
    """What the logits and dL/dx take."""
    m, n, _ = problem.shape
    return 2 * m * n * (8 if problem.compute == "fp64" else 4)


def fits(problem: Problem) -> bool:
    return logit_bytes(problem) <= problem.workspace


def pays(problem: Problem) -> bool:
    m, n, d = problem.shape
    return m * n * d <= PAYS and fits(problem)


def parts(problem: Problem, resident: int) -> int:
    """Into how many parts of the features the products are cut, to have work for the device."""
    d = problem.shape[2]
    chunks = -(-d // (CHUNK_BYTES // (8 if problem.compute == "fp64" else 4)))
    room = 2 * problem.workspace // logit_bytes(problem)
    return max(1, min(16, chunks, resident // logit_tiles(problem), room))


def logit_tiles(problem: Problem) -> int:
    """Tiles of logits that are computed: of symmetric ones, a triangle."""
    m, n, _ = problem.shape
    across = -(-n // TILE)
    return across * (across + 1) // 2 if problem.symmetric else -(-m // TILE) * across


def require(problem: Problem) -> None:
    """ValueError where the logits do not fit the workspace."""
    if not fits(problem):
        m, n, _ = problem.shape
        raise ValueError(
            f'method: "fused" keeps the {m} x {n} logits within workspace = {problem.workspace} '
            f"bytes, which lacks {logit_bytes(problem) - problem.workspace}; expected "
            'method="tiled" or a larger workspace'
        )


def _matrix(array: Array | None) -> tuple[int, int, int, int]:
    if array is None:
        return _NO_MATRIX
    item = array.dtype.itemsize
    rows, columns = array.strides
    return array.data.ptr, rows // item, columns // item, DTYPES[array.dtype.name]


def _whole(array: Array) -> Array:
    """Strides in whole elements."""
    item = array.dtype.itemsize
    return array if not any(s % item for s in array.strides) else cupy.ascontiguousarray(array)


def _scalar(value: Any) -> tuple[float, int, Array]:
    """(value, pointer, what keeps the pointer valid) of a number or of a 0-d device array."""
    if isinstance(value, cupy.ndarray):
        wide = value.astype(np.float64, copy=False)
        return 0.0, wide.data.ptr, wide
    return float(value), 0, None


def _barrier(device: int) -> Array:
    """Two counters at zero, which the kernel leaves at zero: one pair for each stream, where
    launches follow one another. A graph under capture gets its own, and zeroes it itself."""
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        return cupy.zeros(2, np.uint32)
    key = device, stream.ptr
    if key not in _barriers:
        _barriers[key] = cupy.zeros(2, np.uint32)
    return _barriers[key]


def _kernel(device: Any, double: bool, dtype: str) -> Any:
    """The kernel for features of one dtype, or ("") of any two."""
    found = _kernels.get((device.id, double, dtype))
    if found is None:
        defines: dict[str, int | str] = {"PRECISION": "FP64" if double else "FP32"}
        if dtype:
            defines["DTYPE"] = f"DTYPE_{dtype.upper()}"
        found = compiler.function(device, "fused.cu", "fused", 0, **defines)
        _kernels[device.id, double, dtype] = found
    return found


def solve(problem: Problem, gradients: Gradients | None, properties: Device) -> Solution:
    """Loss and gradients; the logits are temporary, M x N, and have been found to fit."""
    m, n, d = problem.shape
    double = problem.compute == "fp64"
    item = 8 if double else 4
    symmetric, two_sided, sigmoid = problem.symmetric, problem.two_sided, problem.bias is not None
    device = cupy.cuda.Device()
    query, key = _whole(problem.query), _whole(problem.key)

    # what is handed out: losses, lse of rows, of columns, loss, gradients of scale and bias
    out = cupy.empty(2 * m + n + 3, np.float64 if double else np.float32)
    resident = properties.multiprocessors  # the grid's barrier needs all blocks there at a time
    cuts = parts(problem, resident)
    size = max(cuts, 2) * m * n * item
    scratch = cupy.empty(5 * m + 4 * n + (size + 2 * (m + n) * item) // 8 + 1)
    start = out.data.ptr
    losses, row_lse, column_lse = start, start + item * m, start + 2 * item * m
    reduced = start + item * (2 * m + n)
    at = int(scratch.data.ptr)

    def take(size: int) -> int:
        nonlocal at
        at += size
        return at - size

    x = take(-(-size // 8) * 8)
    row_inverse, row_bad = take(8 * m), take(8 * m)
    column_inverse, column_bad = (row_inverse, row_bad) if symmetric else (take(8 * n), take(8 * n))
    row_gap, row_dot, row_sum = (take(8 * m) for _ in range(3))
    column_gap, column_dot = take(8 * n), take(8 * n)
    row_height, row_factor = take(m * item), take(m * item)
    column_height = column_factor = 0
    if symmetric:
        column_height, column_factor = row_height, row_factor
    elif two_sided:
        column_height, column_factor = take(n * item), take(n * item)

    scale, bias = _scalar(problem.scale), _scalar(0.0 if problem.bias is None else problem.bias)
    barrier = _barrier(device.id)
    upstream, each = problem.upstream, None
    if not isinstance(upstream, float):
        upstream, each = 0.0, upstream
    arguments = _LAYOUT.pack(
        *_matrix(query), *_matrix(key),
        *(_NO_MATRIX if gradients is None else _matrix(gradients.query)),
        *(_NO_MATRIX if gradients is None else _matrix(gradients.key)),
        m, n, d, *scale[:2], *bias[:2], problem.row_weight, problem.column_weight,
        problem.row_share or 0.0, upstream,
        0 if each is None else each.data.ptr,
        0 if problem.positives is None else problem.positives.data.ptr,
        0 if problem.query_ids is None else problem.query_ids.data.ptr,
        0 if problem.key_ids is None else problem.key_ids.data.ptr,
        symmetric, two_sided, sigmoid, problem.normalize, gradients is not None, cuts,
        x, row_inverse, column_inverse, row_bad, column_bad, row_gap, column_gap,
        row_dot, column_dot, row_sum, losses, row_lse, column_lse,
        reduced, reduced + item, reduced + 2 * item,
        row_height, row_factor, column_height, column_factor, barrier.data.ptr,
    )  # fmt: skip
    kernel = _kernel(device, double, query.dtype.name if query.dtype == key.dtype else "")
    of_gradients = 0
    if gradients is not None:
        of_gradients = -(-m // TILE) * (gradients.query is not None)
        of_gradients += -(-n // TILE) * (gradients.key is not None)
    work = max(logit_tiles(problem) * cuts, of_gradients * -(-d // TILE), -(-max(m, n) // 8))
    grid = min(resident, work)
    kernel((grid,), (THREADS,), (np.frombuffer(arguments, _BY_VALUE),),
           enable_cooperative_groups=True)  # fmt: skip
    if problem.progress is not None:
        problem.progress("loss and gradient", 1, 1)
    solution = Solution(out[:m])
    if not sigmoid:
        solution.row_lse = out[m : 2 * m]
        if two_sided:
            solution.column_lse = out[2 * m : 2 * m + n]
    if problem.row_share is not None:
        solution.loss = out[2 * m + n]
    if gradients is not None:
        solution.scale_grad = out[2 * m + n + 1]
        if sigmoid:
            solution.bias_grad = out[2 * m + n + 2]
    return solution
