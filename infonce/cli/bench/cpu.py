"""Measurement on the CPU: wall time of single calls, memory of NumPy and of the process."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...kernels.cpu.resources import BUFFER_POOL
from .. import machine
from ..common import ResidentGrowth, return_freed_memory
from . import contenders_cpu
from .measure import DTYPES, Array, Case, Outcome, Run

GEMM = 4096  # side of the matrix product that everything is compared with
PAUSE = 0.15  # seconds, in which idle threads of the last contender's BLAS stop spinning
REFERENCE_ROWS = 2048  # errors are measured up to here: the reference keeps float64 matrices


class Host:
    """The CPU, through NumPy: see `measure.Bench`."""

    methods = contenders_cpu.METHODS

    def __init__(self, dtype: str) -> None:
        self.rng = np.random.default_rng(0)
        self.square = self.rng.standard_normal((GEMM, GEMM)).astype(
            np.float64 if dtype == "float64" else np.float32
        )
        self.product = np.matmul(self.square, self.square)
        self.rates: list[float] = []  # of the product, GFLOP/s

    def inputs(self, case: Case) -> list[list[Array]]:
        """One set: no CPU cache holds arrays of this size from call to call."""

        wide = np.dtype(np.float64).itemsize * case.rows * case.dim
        contenders_cpu.require(2 * wide * len(case.kind.arguments))

        def unit_rows() -> Array:
            z = self.rng.standard_normal((case.rows, case.dim))
            return (z / np.linalg.norm(z, axis=1, keepdims=True)).astype(DTYPES[case.dtype])

        return [[unit_rows() for _ in case.kind.arguments]]

    def reference(self, case: Case, features: Sequence[Array]) -> Outcome | None:
        from ... import reference

        if case.rows > REFERENCE_ROWS:
            return None
        labels = {} if case.labels is None else {"labels": case.labels}
        solved = getattr(reference, case.kind.name)(*features, scale=case.scale, **labels)
        return solved.loss, case.select_gradients([solved.grads[n] for n in case.kind.arguments])

    def contender(self, method: str, case: Case, inputs: Sequence[Sequence[Array]]) -> Run:
        return contenders_cpu.contender(method, case, inputs[0])

    def memory(self, method: str, run: Run) -> dict[str, int | None]:
        """Peak of NumPy's allocations, and growth of the resident set."""
        BUFFER_POOL.clear()  # to count the memory of a first call
        tracemalloc.start()
        run()
        allocated = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        BUFFER_POOL.clear()
        return_freed_memory()
        growth = ResidentGrowth()
        run()
        return {
            # torch does not allocate through NumPy
            "numpy_peak_bytes": None if method == "torch" else allocated,
            "rss_growth_bytes": growth.bytes(),
        }

    def turn(self, run: Run) -> dict[str, list[float]]:
        return {"seconds": [_seconds(run)]}

    def time_gemm(self) -> None:
        seconds = _seconds(lambda: np.matmul(self.square, self.square, out=self.product))
        self.rates.append(2 * GEMM**3 / seconds / 1e9)

    def skipped_errors(self) -> tuple[type[BaseException], ...]:
        return ImportError, MemoryError, ValueError

    def describe(self) -> dict[str, Any]:
        """The facts that a record names in addition to commit and date."""
        cpu = machine.cpu()
        return {
            "device": machine.describe_cpu(cpu),
            "versions": machine.versions("numpy", "numba", "torch"),
            "cpu": cpu,
            "blas": machine.blas(),
            "gemm": {"size": GEMM, "gflops": self.rates},
        }


def _seconds(run: Callable[[], Any]) -> float:
    time.sleep(PAUSE)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
