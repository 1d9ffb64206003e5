"""Loss and gradient of a small or medium batch on the GPU, in one launch: kernels/cuda/fused.cu."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from . import compiler
from .arguments import NO_MATRIX, address, matrix_fields, scalar_fields, whole_strides
from .blocks import Array, Gradients, Problem, Solution
from .launch_config import Device

THREADS = 256
TILE = 64  # rows and columns of a tile
CHUNK_BYTES = 128  # of a row, in one step of a product
MOST_PARTS = 16
PAYS = 2**29  # multiply-adds up to which one launch beats several with tensor cores,
PAYS_LOGITS = 2**21  # and logits, unless it takes several products to make one

# struct Fused: four matrices, m n d, scale and bias, weights, ...; every field has 8 bytes
_LAYOUT = struct.Struct(
    "=" + 4 * "Qqqq" + "qqq" + 2 * "dQdQ" + "dddd" + "QQQQ" + 2 * "q" + 21 * "Q"
)
_BY_VALUE = np.dtype(f"V{_LAYOUT.size}")  # one parameter, to CuPy
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
_kernels: dict[tuple[Any, ...], Any] = {}
_barriers: dict[tuple[int, int], Array] = {}


def logit_bytes(problem: Problem) -> int:
    """What the logits and dL/dx take."""
    m, n, _ = problem.shape
    return 2 * m * n * (8 if problem.compute == "fp64" else 4)


def fits(problem: Problem) -> bool:
    return logit_bytes(problem) <= problem.workspace


def pays(problem: Problem) -> bool:
    m, n, d = problem.shape
    few = m * n <= PAYS_LOGITS or problem.compute == "fp32"
    return few and m * n * d <= PAYS and fits(problem)


def require(problem: Problem) -> None:
    """ValueError where the logits do not fit the workspace."""
    if not fits(problem):
        m, n, _ = problem.shape
        raise ValueError(
            f'method: "fused" keeps the {m} x {n} logits within workspace = {problem.workspace} '
            f"bytes, which lacks {logit_bytes(problem) - problem.workspace}; expected "
            'method="tiled" or a larger workspace'
        )


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


def _kernel(device: int, double: bool, dtype: Any, *kind: bool) -> Any:
    """The kernel for one kind of problem with features of one dtype."""
    key = device, double, dtype, kind
    found = _kernels.get(key)
    if found is None:
        names = "SYMMETRIC", "TWO_SIDED", "SIGMOID", "NORMALIZE", "IDS"
        found = _kernels[key] = compiler.function(
            cupy.cuda.Device(device), "fused.cu", "fused", 0,
            PRECISION="FP64" if double else "FP32", DTYPE=f"DTYPE_{dtype.name.upper()}",
            **dict(zip(names, map(int, kind), strict=True)),
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class _Plan:
    """How a problem of one shape is laid out and cut."""

    parts: int  # of the features in the products, to have work for the device
    logit_tiles: int  # that are computed: of symmetric ones, a triangle
    scratch: int  # in doubles
    offsets: tuple[int, ...]  # where the kernel's arrays begin in it, in bytes


@lru_cache(maxsize=1024)
def _plan(
    m: int, n: int, d: int, item: int, symmetric: bool, two_sided: bool, resident: int, room: int
) -> _Plan:
    """The plan where so many blocks run at a time, and so many M x N matrices have room."""
    down, across = -(-m // TILE), -(-n // TILE)
    tiles = across * (across + 1) // 2 if symmetric else down * across
    parts = max(1, min(MOST_PARTS, -(-d * item // CHUNK_BYTES), resident // tiles, room))
    size = 0

    def take(elements: int, each: int = 8) -> int:
        nonlocal size
        start, size = size, size + -(-elements * each // 8) * 8
        return start

    x = take(max(parts, 2) * m * n, item)
    row_inverse, row_bad = take(m), take(m)
    column_inverse, column_bad = (row_inverse, row_bad) if symmetric else (take(n), take(n))
    row_gap, row_dot, row_sum, column_gap, column_dot = take(m), take(m), take(m), take(n), take(n)
    of_rows = take(m, item), take(m, item)  # height, factor
    of_columns = of_rows if symmetric or not two_sided else (take(n, item), take(n, item))
    offsets = (
        x, row_inverse, column_inverse, row_bad, column_bad, row_gap, column_gap, row_dot,
        column_dot, row_sum, *of_rows, *of_columns,
    )  # fmt: skip
    return _Plan(parts, tiles, size // 8, offsets)


def solve(problem: Problem, gradients: Gradients | None, properties: Device) -> Solution:
    """Loss and gradients; the logits are temporary, M x N, and have been found to fit."""
    m, n, d = problem.shape
    double = problem.compute == "fp64"
    item = 8 if double else 4
    symmetric, two_sided, sigmoid = problem.symmetric, problem.two_sided, problem.bias is not None
    query, key = whole_strides(problem.query), whole_strides(problem.key)
    if query.dtype != key.dtype:  # a kernel reads one dtype: the wider
        dtype = np.promote_types(*(np.float32 if z.dtype.itemsize < 4 else z.dtype
                                   for z in (query, key)))  # fmt: skip
        query, key = query.astype(dtype), key.astype(dtype)
    device = query.device
    resident = properties.multiprocessors  # the grid's barrier needs all blocks there at a time
    room = min(MOST_PARTS, 2 * problem.workspace // logit_bytes(problem))
    plan = _plan(m, n, d, item, symmetric, two_sided, resident, room)

    # what is handed out: losses, lse of rows, of columns, loss, gradients of scale and bias
    out = cupy.ndarray((2 * m + n + 3,), DOUBLE if double else SINGLE)
    scratch = cupy.ndarray((plan.scratch,), DOUBLE)
    start, base = out.data.ptr, scratch.data.ptr
    reduced = start + item * (2 * m + n)
    addresses = [base + offset for offset in plan.offsets]
    if not (symmetric or two_sided):
        addresses[-2:] = 0, 0  # columns have no log-sum-exp

    scale, _kept = scalar_fields(problem.scale)
    bias, _kept_too = scalar_fields(0.0 if problem.bias is None else problem.bias)
    barrier = _barrier(device.id)
    upstream, each = problem.upstream, None
    if not isinstance(upstream, float):
        upstream, each = 0.0, upstream
    of_queries, of_keys = NO_MATRIX, NO_MATRIX
    if gradients is not None:
        of_queries, of_keys = matrix_fields(gradients.query), matrix_fields(gradients.key)
    arguments = _LAYOUT.pack(
        *matrix_fields(query), *matrix_fields(key), *of_queries, *of_keys,
        m, n, d, *scale, *bias, problem.row_weight, problem.column_weight,
        problem.row_share or 0.0, upstream, address(each), address(problem.positives),
        address(problem.query_ids), address(problem.key_ids),
        gradients is not None, plan.parts,
        *addresses[:10], start, start + item * m, start + 2 * item * m,
        reduced, reduced + item, reduced + 2 * item, *addresses[10:], barrier.data.ptr,
    )  # fmt: skip
    tiles = -(-m // TILE) * (of_queries[0] != 0) + -(-n // TILE) * (of_keys[0] != 0)
    work = max(plan.logit_tiles * plan.parts, tiles * -(-d // TILE), m, n)
    kernel = _kernel(
        device.id, double, query.dtype, symmetric, two_sided, sigmoid, problem.normalize,
        problem.query_ids is not None,
    )  # fmt: skip
    kernel(
        (min(resident, work),), (THREADS,), (np.frombuffer(arguments, _BY_VALUE),),
        enable_cooperative_groups=True,
    )  # fmt: skip
    if problem.progress is not None:
        problem.progress("loss and gradient", 1, 1)
    solution = Solution(None if problem.row_share is not None else out[:m])
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
