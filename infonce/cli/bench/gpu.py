"""Measurement on the current GPU: time between events, memory of CuPy's and PyTorch's pools."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import machine
from . import contenders_gpu
from .contenders_gpu import METHODS, by_panels, product
from .measure import DTYPES, Array, Case, Outcome, Run

GEMM = 8192  # side of the matrix product that everything is compared with
MOST_INPUTS = 8  # sets of random inputs that take turns, so that none stays in the L2 cache
TURN = 0.15  # seconds that a contender's turn takes, about
MOST_CALLS = 50  # calls in a turn
SMALL = 3e-3  # seconds; shorter calls are also timed by the wall clock, Python included
REFERENCE_ROWS = 2**17  # errors are measured up to here


class Device:
    """The current GPU, through CuPy: see `measure.Bench`."""

    methods = METHODS

    def __init__(self, dtype: str) -> None:
        state = machine.cuda()
        if not state.startswith("available"):
            raise ValueError(f"expected a GPU that CuPy can use; it is {state}")
        import cupy

        self.cupy = cupy
        self.rng = cupy.random.default_rng(0)
        self.precision = contenders_gpu.PRECISION[dtype]
        self.square = self._unit_rows(GEMM, GEMM, dtype)
        self.product = cupy.empty_like(self.square)
        self.rates: list[float] = []  # of the product, GFLOP/s

    def _unit_rows(self, rows: int, dim: int, dtype: str) -> Array:
        z = self.rng.standard_normal((rows, dim), dtype="float64" if dtype == "float64" else "f4")
        z /= self.cupy.linalg.norm(z, axis=1, keepdims=True)
        return z.astype(DTYPES[dtype])

    def inputs(self, case: Case) -> list[list[Array]]:
        """Enough sets of features that the other sets fill the L2 cache, at most `MOST_INPUTS`."""
        cache = self.cupy.cuda.Device().attributes["L2CacheSize"]
        one = [self._unit_rows(*shape, case.dtype) for shape in case.shapes]
        sets = min(MOST_INPUTS, 1 + -(-cache // sum(z.nbytes for z in one)))
        others = [
            [self._unit_rows(*shape, case.dtype) for shape in case.shapes] for _ in range(1, sets)
        ]
        return [one, *others]

    def reference(self, case: Case, features: Sequence[Array]) -> Outcome | None:
        """The loss and gradients by panels in torch's float64. None without torch."""
        if case.rows > REFERENCE_ROWS:
            return None
        try:
            import torch
        except ImportError:
            return None
        solved = by_panels(case, [torch.from_dlpack(z) for z in features], torch.float64)
        self.release()
        return solved

    def contender(self, method: str, case: Case, inputs: Sequence[Sequence[Array]]) -> Run:
        self.release()
        return contenders_gpu.contender(method, case, inputs)

    def release(self) -> None:
        """Hand unused memory back to the device, torch's too."""
        self.cupy.get_default_memory_pool().free_all_blocks()
        if (torch := self._torch()) is not None:
            torch.cuda.empty_cache()

    def _torch(self) -> Any:
        torch = sys.modules.get("torch")
        return torch if torch is not None and torch.cuda.is_available() else None

    def memory(self, method: str, run: Run) -> dict[str, int | None]:
        if method == "captured":  # the graph reserves the memory, before any call
            return {"peak_bytes": None}
        self.release()
        torch, before = self._torch(), 0
        if torch is not None:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with _peak(self.cupy) as hook:
            outcome = run()
        self.cupy.cuda.Device().synchronize()
        peak = hook.peak
        if torch is not None:
            peak += torch.cuda.max_memory_allocated() - before
        gradient_bytes = sum(g.nbytes for g in outcome[1] if not isinstance(g, np.ndarray))
        return {"peak_bytes": max(0, peak - gradient_bytes)}

    def turn(self, run: Run) -> dict[str, list[float]]:
        """Calls are queued one after another as in a training loop; the first, which refills caches
        after the other contenders, is not counted if there are more."""
        seconds = self.elapsed(run, 1)
        calls = int(min(MOST_CALLS, TURN / seconds[0]))
        if calls > 1:
            seconds = self.elapsed(run, calls)
        times = {"seconds": seconds}
        if seconds[-1] < SMALL:
            times["wall"] = [self._wall(run) for _ in range(MOST_CALLS)]
        return times

    def elapsed(self, run: Callable[[], Any], calls: int) -> list[float]:
        """Seconds on the device of each of the calls, which are queued one after another."""
        events = [self.cupy.cuda.Event() for _ in range(calls + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        pairs = itertools.pairwise(events)
        return [1e-3 * self.cupy.cuda.get_elapsed_time(*pair) for pair in pairs]

    def _wall(self, run: Run) -> float:
        start = time.perf_counter()
        run()
        self.cupy.cuda.get_current_stream().synchronize()
        return time.perf_counter() - start

    def time_gemm(self) -> None:
        seconds = self.elapsed(
            lambda: product(self.precision, self.product, self.square, self.square), 5
        )
        self.rates += [2 * GEMM**3 / s / 1e9 for s in seconds[1:]]  # the first refills caches

    def skipped_errors(self) -> tuple[type[BaseException], ...]:
        return (Exception,)  # other projects' code fails in many ways

    def describe(self) -> dict[str, Any]:
        gpu = machine.gpu()
        return {
            "device": gpu["model"],
            "versions": machine.versions(
                "numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton"
            ),
            "gpu": gpu,
            "gemm": {"size": GEMM, "gflops": self.rates},
        }


def _peak(cupy: Any) -> Any:
    """A context that measures the peak of the bytes that CuPy's pool has allocated inside it."""

    class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "infonce peak"
        peak = used = 0

        def malloc_postprocess(self, **event: Any) -> None:
            self.used += event["mem_size"]
            self.peak = max(self.peak, self.used)

        def free_postprocess(self, **event: Any) -> None:
            self.used -= event["mem_size"]

    return Peak()
