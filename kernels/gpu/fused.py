"""The method fused: loss and gradient of a small batch in one launch of kernels/cuda/fused.

schedule/fused.py decides the grid and the memory of the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from ..problem import Array, Gradients, Problem
from ..solve import Solution
from .device import compiler
from .device.arguments import (
    NO_MATRIX,
    address,
    matrix_values,
    scalar_values,
    with_strides_in_whole_elements,
)
from .device.launcher import device_properties
from .device.signatures import structure
from .device.streams import identity
from .schedule.decisions import common_dtype
from .schedule.fused import THREADS, TILE, one_launch

# Fields of struct Fused, which are packed by position. Packing by name would take 2% of the time of
# a small batch
FIELDS = (
    "q", "k", "dq", "dk", "m", "n", "d", "scale", "bias", "row_direction_weight",
    "column_direction_weight", "common_share", "row_shares", "upstream", "upstreams",
    "positives", "known_row_nans", "query_ids", "key_ids", "gradient", "parts", "x", "row_inverse",
    "column_inverse",
    "row_nans", "column_nans", "row_gap", "column_gap", "row_dot", "column_dot", "row_sum",
    "losses", "row_lse", "column_lse", "loss", "scale_grad", "bias_grad", "row_reference",
    "row_factor", "column_reference", "column_factor", "barrier",
)  # fmt: skip
# Fields that point into the temporary memory of the launch. If queries are the keys, a field of
# columns has the address of the same field of rows
IN_MEMORY = (
    "logits", "row_inverse", "column_inverse", "row_nans", "column_nans", "row_gap", "column_gap",
    "row_dot", "column_dot", "row_sum", "row_reference", "row_factor", "column_reference",
    "column_factor",
)  # fmt: skip
_FUSED = structure("fused/fused.cu", "Fused")
assert tuple(name for name, _ in _FUSED.fields) == FIELDS
_pack = _FUSED.layout.pack
_BY_VALUE = np.dtype(f"V{_FUSED.size}")  # the type of one parameter that CuPy passes by value
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
NO_SCALAR = scalar_values(0.0)
MAX_BARRIERS = 256  # in `_barriers`
_barriers: dict[tuple[int, int], Array] = {}  # by (device, stream)


def _barrier(device: int) -> Array:
    """[2] counters for the barrier over the grid: 0 before a launch, and reset to 0 by the kernel.

    Launches on one stream share two counters, because they run one after another. A graph under
    capture may run on another stream, so it gets its own counters, and sets them to 0.
    """
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        return cupy.zeros(2, np.uint32)
    key = device, identity(stream.ptr)
    barrier = _barriers.get(key)
    if barrier is None:
        while len(_barriers) >= MAX_BARRIERS:  # CuPy reuses the memory only on its stream
            _barriers.pop(next(iter(_barriers)), None)
        barrier = _barriers[key] = cupy.zeros(2, np.uint32)
    return barrier


@dataclass(frozen=True)
class _Launch:
    """`schedule.OneLaunch` with the compiled kernel, for all calls of one kind."""

    kernel: Any  # of CuPy
    blocks: int  # thread blocks
    parts: int  # ranges of features, whose products have a matrix each
    memory: int  # bytes of temporary memory
    offsets: tuple[int, ...]  # byte at which each of the fields IN_MEMORY begins


@lru_cache(maxsize=1024)
def _launch(
    m: int, n: int, d: int, dtype: Any, double: bool, symmetric: bool, two_sided: bool,
    sigmoid: bool, normalize: bool, ids: int, gradient_tiles: int, workspace: int,
    device: int, multiprocessors: int,
) -> _Launch:  # fmt: skip
    """The launch of a kind of call, compiled once; for arguments see `one_launch`."""
    launch = one_launch(
        (m, n, d), dtype.name, double, symmetric, two_sided, sigmoid, normalize, ids,
        gradient_tiles, workspace, multiprocessors,
    )  # fmt: skip
    starts = launch.offsets
    offsets = [starts.get(name, starts[name.replace("column", "row")]) for name in IN_MEMORY]
    kernel = launch.kernel
    raw_kernel = compiler.function(
        cupy.cuda.Device(device), kernel.file, kernel.name, 0, **kernel.defines
    )
    # `raw_kernel.kernel` is launched, because a launch of the RawKernel asks for the device first
    return _Launch(raw_kernel.kernel, launch.blocks, launch.parts, launch.bytes, tuple(offsets))


def solve_in_one_launch(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients by one launch. `choose_method` has checked that the logits fit."""

    # operands, destinations and the launch for them
    m, n, d = problem.shape
    double = problem.compute_precision == "fp64"
    symmetric, two_sided, sigmoid = problem.symmetric, problem.two_sided, problem.bias is not None
    query = with_strides_in_whole_elements(problem.query)
    key = query if symmetric else with_strides_in_whole_elements(problem.key)
    if query.dtype != key.dtype:
        dtype = common_dtype(query.dtype.name, key.dtype.name)
        query, key = query.astype(dtype), key.astype(dtype)
    query_gradient = key_gradient = NO_MATRIX
    if gradients is not None:
        query_gradient, key_gradient = matrix_values(gradients.query), matrix_values(gradients.key)
    gradient_tiles = -(-m // TILE) * (query_gradient[0] != 0)  # address 0: not wanted
    gradient_tiles += -(-n // TILE) * (key_gradient[0] != 0)
    device = query.device.id
    launch = _launch(
        m, n, d, query.dtype, double, symmetric, two_sided, sigmoid, problem.normalize,
        problem.id_columns, gradient_tiles, problem.workspace, device,
        device_properties(device).multiprocessors,
    )  # fmt: skip

    # memory: `out` has the results, one after another: [M] losses, [M] and [N] log-sum-exps of rows
    # and columns, the loss, the gradients of scale and bias
    real, item = (DOUBLE, 8) if double else (SINGLE, 4)
    out, scratch = cupy.cuda.alloc(item * (2 * m + n + 3)), cupy.cuda.alloc(launch.memory)
    start, base = out.ptr, scratch.ptr
    lse, column_lse, loss = item * m, item * 2 * m, item * (2 * m + n)  # bytes from `start`
    addresses = [base + offset for offset in launch.offsets]
    if not (symmetric or two_sided):
        addresses[-2:] = 0, 0  # column_reference, column_factor: columns have no softmax

    # the arguments, in the order of FIELDS
    q = matrix_values(query)
    k = q if symmetric else matrix_values(key)
    scale, _held = scalar_values(problem.scale)
    bias, _held_too = scalar_values(problem.bias) if sigmoid else NO_SCALAR
    barrier = _barrier(device)
    upstream, each = problem.upstream, None
    if not isinstance(upstream, float):
        upstream, each = 0.0, upstream
    arguments = _pack(
        *q, *k, *query_gradient, *key_gradient, m, n, d, *scale, *bias,
        problem.row_direction_weight, problem.column_direction_weight,
        problem.common_share or 0.0,
        address(problem.row_shares), upstream, address(each), address(problem.positives),
        address(problem.known_row_nans), address(problem.query_ids), address(problem.key_ids),
        problem.scalar_grads or gradients is not None, launch.parts,
        *addresses[:10], start, start + lse, start + column_lse,
        start + loss, start + loss + item, start + loss + 2 * item, *addresses[10:],
        barrier.data.ptr,
    )  # fmt: skip
    launch.kernel(
        (launch.blocks,), (THREADS,), (np.frombuffer(arguments, _BY_VALUE),),
        enable_cooperative_groups=True,
    )  # fmt: skip
    if problem.progress is not None:
        problem.progress("loss and gradient", 1, 1)

    # the results as arrays on `out`
    array, solution = cupy.ndarray, Solution()
    if problem.common_share is None:
        solution.losses = array((m,), real, out)
    else:
        solution.loss = array((), real, out + loss)
    if not sigmoid:
        solution.row_lse = array((m,), real, out + lse)
        if two_sided:
            solution.column_lse = array((n,), real, out + column_lse)
    if problem.scalar_grads:
        solution.scale_grad = array((), real, out + (loss + item))
        if sigmoid:
            solution.bias_grad = array((), real, out + (loss + 2 * item))
    return solution
