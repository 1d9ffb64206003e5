"""`Host`: a stand-in for the GPU in tests of `offload`, whose memory is the host's.

`kernels/offload/` copies features to it chunk by chunk, and it computes by the CPU backend.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
from infonce.kernels import solve
from infonce.kernels.cpu.backend import CPU
from infonce.kernels.distill.solve import solver_by_passes
from infonce.kernels.offload import backend as offload
from infonce.kernels.offload import layout
from infonce.kernels.problem import SILENT

import infonce
from infonce import spec
from infonce.checks import call as checks
from infonce.checks.teacher import Teacher, add_teacher
from infonce.dispatch import make_result


class Memory:
    """The functions of NumPy that `offload` calls as `xp`, of the device's memory.

    It counts the bytes of arrays that `empty` makes: arrays that are not vectors.
    """

    zeros, array, where = (staticmethod(f) for f in (np.zeros, np.array, np.where))
    abs, isfinite, frexp, ldexp, linalg = np.abs, np.isfinite, np.frexp, np.ldexp, np.linalg

    def __init__(self) -> None:
        self.used = self.peak = 0  # bytes: now, and at most

    def empty(self, shape: Any, dtype: Any) -> Any:
        array = np.empty(shape, dtype)
        self.count(array.nbytes)
        weakref.finalize(array, self.count, -array.nbytes)
        return array

    def count(self, size: int) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)


class Rows:
    """Rows on the device, with the operations that linear terms need (`kernels/linear.py`)."""

    def __init__(self, features: Any, problem: Any) -> None:
        wide = features.astype(np.longdouble)  # in which squares do not over- or underflow
        self.normalize, self.length = problem.normalize, np.ones((len(wide), 1), wide.dtype)
        if problem.normalize:
            self.length = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
            self.length[self.length == 0] = np.inf  # a row of zeros has no direction
        self.u = (wide / self.length).astype(np.float64)

    def sums(self, segment: Any, count: int, factor: Any = None, order: Any = None) -> Any:
        indicators = np.eye(count)[segment]  # [rows, segments]: 1 for the segment of a row
        return indicators.T @ (self.u if factor is None else factor[:, None] * self.u)

    def products(self, segment: Any, sums: Any, itself: float) -> Any:
        return (self.u * (sums[segment] - itself * self.u)).sum(axis=1)

    def subtract(self, term: Any, gradient: Any, dots: Any) -> None:
        g = np.zeros_like(self.u)
        if term.factor is not None:
            g += term.factor[:, None] * (term.sums[term.segment] - term.own_count * self.u)
        if term.weighted is not None:
            g += term.weighted[term.segment]
        products = (g * self.u).sum(axis=1)
        if dots is not None:
            dots -= products
        if self.normalize:
            g -= self.u * products[:, None]
        gradient -= (g / self.length).astype(np.float64)


class Host:
    """The device, as `kernels/offload/device.py` describes it.

    Its copies are as late as possible: features arrive when they are waited for, and gradients
    leave when the call ends. The target of a copy is NaN until then, so that a missing wait shows.
    """

    vectors = solve.Vectors(np)
    put = get = staticmethod(np.array)
    rows = Rows

    def __init__(self) -> None:
        self.xp = Memory()
        self.blocks, self.whole = 0, False  # computed blocks; whether a whole problem was computed
        self.workspace = 0  # bytes, for each block or for the whole problem

    def solve(self, problem: Any, gradients: Any) -> Any:
        """A whole problem, which `offload` has copied to the device: see its backend.py."""
        assert problem.workspace_given  # so a whole problem takes no more than the workspace
        self.whole, self.workspace = True, problem.workspace
        return solver_by_passes(problem)(problem, CPU(problem, gradients), gradients)

    def run_block_pass(
        self, problem: Any, triangle: bool, epilogue: Any, gradients: Any, not_finite: Any
    ) -> None:
        self.blocks, self.workspace = self.blocks + 1, problem.workspace
        backend = CPU(problem, gradients)
        solve.run_block_pass(backend, problem, triangle, epilogue, gradients, not_finite)

    @contextmanager
    def copies(self) -> Iterator[Any]:
        self.pending: list[Copy] = []
        yield self
        for copy in list(self.pending):
            copy.wait()

    def touch(self, target: Any) -> None:
        target[...] = np.nan

    def arrive(self, target: Any, source: Any) -> "Copy":
        return Copy(self, lambda: np.copyto(target, source), target)

    def leave(self, target: Any, source: Any, add: bool) -> "Copy":
        host_copy = source.copy()

        def copy() -> None:
            np.testing.assert_array_equal(host_copy, source)  # nothing has overwritten the source
            target[...] = target + source if add else source

        return Copy(self, copy, None if add else target)


def on_host(
    loss: str, args: Any, labels: Any = None, teacher: Teacher | None = None, **options: Any
) -> tuple[Any, Host]:
    """(result of `X_loss_and_grad(..., offload=True)` on a `Host`, this `Host`)."""
    losses = {**spec.LOSSES, "info_nce own": spec.INFO_NCE_OWN}
    kind = losses[loss] if teacher is None else teacher.loss
    with np.errstate(**SILENT):
        request = checks.check(kind, args, labels, None, options, with_grad=True)
        if teacher is not None:
            add_teacher(kind, request, args, teacher)
        device = Host()
        solution = offload.solve(request.problem, request.gradients, device)
        return make_result(kind, request, solution, request.problem.query), device


class Copy:
    """A copy that `Host.arrive` or `Host.leave` has started; `wait` does it."""

    def __init__(self, host: Host, copy: Any, target: Any) -> None:
        self.host, self.copy = host, copy
        if target is not None:
            target[...] = np.nan
        host.pending.append(self)

    def wait(self) -> None:
        if self in self.host.pending:
            self.copy()
            self.host.pending.remove(self)
            self.copy = None  # its closure would keep arrays alive


def room(rows: int, d: int, m: int, n: int, item: int = 8, real: int = 8) -> int:
    """The bytes of a workspace that has room for chunks of `rows` rows, of M x N pairs of width d.

    `item` and `real` are the bytes of a feature and of a number in the precision of sums.
    """
    row = layout.RowBytes(d * item, d * real, d * item, layout.block_row_bytes(m, n, d, item, real))
    return layout.least_workspace(rows, row)


def close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    """AssertionError unless two results are equal up to rounding."""
    compared = [(got.loss, want.loss)]
    compared += [(g, w) for g, w in zip(got.grads, want.grads, strict=True) if w is not None]
    for lse in (got.lse, want.lse):
        assert (lse is None) == (want.lse is None)
    if want.lse is not None:
        both = (z if isinstance(z, tuple) else (z,) for z in (got.lse, want.lse))
        compared += zip(*both, strict=True)
    assert (got.metrics is None) == (want.metrics is None)
    if want.metrics is not None:
        metrics = [
            [getattr(out.metrics, f.name) for f in fields(infonce.Metrics)] for out in (got, want)
        ]
        for g, w in zip(*metrics, strict=True):
            assert (g is None) == (w is None)
            compared += [] if w is None else [(g, w)]
    for g, w in compared:
        assert g.dtype == w.dtype
        if w.dtype.kind in "iu":
            np.testing.assert_array_equal(g, w)
        # -inf, for rows without negatives, as a finite number
        g, w = (np.maximum(np.asarray(z, np.float64), -1e30) for z in (g, w))
        assert np.linalg.norm(g - w) <= tolerance * (1 + np.linalg.norm(w))
