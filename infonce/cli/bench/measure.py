"""How contenders are compared: cases, rounds in which they take turns, errors, the record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ...arrays import native
from ...spec import Loss
from .. import machine

Array = Any
Outcome = tuple[Any, list[Array]]  # loss, gradients of the features that get one
Run = Callable[[], Outcome]
TEMPERATURE = 0.07
# module that a contender needs -> argument of `pip install`
PACKAGES = {"torch": "'infonce-kernels[torch]'"}
# Largest relative error, by dtype of the features, with which a contender is timed
PARITY = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16,
          "bfloat16": ml_dtypes.bfloat16}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One loss at one size."""

    kind: Loss
    rows: int
    dim: int
    dtype: str = "float32"
    workspace: int | None = None  # None: not given
    scale: float = 1 / TEMPERATURE
    keys: int | None = None  # rows of keys, among which labels point; None: each query has its own
    wrt: tuple[str, ...] = ()  # features that get a gradient; none: all that the loss has

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shape of the features of each argument."""
        last = self.rows if self.keys is None else self.keys
        return [(self.rows, self.dim), (last, self.dim)][: len(self.kind.arguments)]

    @property
    def classes(self) -> int:
        """Number of classes, each of four rows or of two."""
        return self.rows // (2 if self.rows % 4 else 4)

    @property
    def labels(self) -> Array | None:
        """[rows] classes, or keys; None if the loss takes none."""
        if self.kind.classes:
            return np.arange(self.rows) % self.classes
        return None if self.keys is None else self.positives[:, 0]

    @property
    def positives(self) -> Array:
        """[rows, positives of a row] columns of the matrix of logits."""
        rows = np.arange(self.rows)
        if self.keys is not None:
            return np.random.default_rng(0).integers(0, self.keys, (self.rows, 1))
        if self.kind.classes:
            return (rows[:, None] + np.arange(self.classes, self.rows, self.classes)) % self.rows
        if self.kind.joint:  # see `contenders_cpu.joint_rows`
            return self.rows + rows[:, None]
        shift = self.rows // 2 if self.kind.symmetric else 0
        return (rows[:, None] + shift) % self.rows

    @property
    def products(self) -> float:
        """Matrix products of 2 N N D operations that loss and gradient need if logits are not kept.

        Clip, info_nce: the logits in both passes, dQ and dK. Sigmoid: the logits once, dQ and dK.
        One gradient alone: the logits once, and it. If rows are columns: one triangle of the logits
        in both passes, and dQ.
        """
        if self.kind.joint:  # two such products of 2 N rows, so four times as large
            return 8.0
        if self.kind.symmetric or self.kind.locked or self.wrt:
            return 2.0
        return 3.0 if self.kind.sigmoid else 4.0

    @property
    def operations(self) -> float:
        """Floating-point operations of these products, whatever a contender executes."""
        return self.products * 2 * self.rows * self.shapes[-1][0] * self.dim

    def select_gradients(self, values: Sequence[Any]) -> list[Any]:
        """The items of `values` (one for each argument) whose argument gets a gradient."""
        pairs = zip(self.kind.arguments, values, strict=True)
        wanted = self.wrt or [a for a in self.kind.arguments if a not in self.kind.locked]
        return [value for name, value in pairs if name in wanted]


class Bench(Protocol):
    """Where contenders are measured: the CPU or a GPU."""

    rates: list[float]  # GFLOP/s of the large matrix product, of all calls of `time_gemm`

    @property
    def methods(self) -> Sequence[str]:
        """The names of all contenders."""
        ...

    def inputs(self, case: Case) -> list[list[Array]]:
        """Sets of random unit rows, one array for each argument, which runs take in turn."""
        ...

    def reference(self, case: Case, features: Sequence[Array]) -> Outcome | None:
        """Loss and gradients in float64; None if that would take too long."""
        ...

    def contender(self, method: str, case: Case, inputs: Sequence[Sequence[Array]]) -> Run:
        """A call of `method`; the first takes the first inputs."""
        ...

    def memory(self, method: str, run: Run) -> dict[str, int | None]:
        """Peak bytes of a call beyond inputs and outputs."""
        ...

    def turn(self, run: Run) -> dict[str, list[float]]:
        """Seconds of one call or of several, by what is timed: `seconds`, and maybe others."""
        ...

    def time_gemm(self) -> None:
        """Time one large matrix product, and append its rate to `rates`."""
        ...

    def skipped_errors(self) -> tuple[type[BaseException], ...]:
        """Errors after which a contender is skipped: it cannot run here, or its results are wrong.

        They contain ValueError, which `require_parity` raises for wrong results.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """The facts of a record besides commit and date. `gemm` has the `rates`."""
        ...


def compare(
    bench: Bench,
    case: Case,
    methods: Sequence[str],
    rounds: int,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[dict[str, Any]]:
    """One row of results for each method. They take turns, so that a slow minute hits them all.

    A method that fails, or whose first call breaks `require_parity`, is `skipped`, with the reason.
    """
    try:
        inputs = bench.inputs(case)
        reference = bench.reference(case, inputs[0])
    except bench.skipped_errors() as error:
        bench.time_gemm()  # every record has its rate
        reason = _reason(error)
        return [{"size": case.rows, "method": method, "skipped": reason} for method in methods]
    running: dict[str, Run] = {}
    rows: dict[str, dict[str, Any]] = {}
    for method in methods:
        row = rows[method] = {"size": case.rows, "method": method}
        try:
            run = bench.contender(method, case, inputs)
            row.update(errors(run(), reference))
            require_parity(row, case.dtype)
            row.update(bench.memory(method, run))
        except bench.skipped_errors() as error:
            row["skipped"] = _reason(error)
            continue
        running[method] = run
    times: dict[str, dict[str, list[float]]] = {method: {} for method in running}
    earlier_rates = len(bench.rates)
    for done in range(rounds):
        bench.time_gemm()
        for method in list(times):
            try:
                turn = bench.turn(running[method])
            except (
                bench.skipped_errors()
            ) as error:  # the other contenders have left too little memory
                rows[method]["skipped"] = _reason(error)
                del times[method]
                continue
            for what, seconds in turn.items():
                times[method].setdefault(what, []).extend(seconds)
        progress(f"{case.rows} rows", done + 1, rounds)
    gemm = statistics.median(bench.rates[earlier_rates:])
    for method, timed in times.items():
        seconds = timed.pop("seconds")
        median = statistics.median(seconds)
        rows[method].update(
            median_s=median, min_s=min(seconds), max_s=max(seconds), seconds=seconds,
            gflops=case.operations / median / 1e9, gemm_share=case.operations / median / 1e9 / gemm,
        )  # fmt: skip
        rows[method].update({f"{what}_s": statistics.median(s) for what, s in timed.items()})
    return list(rows.values())


def _reason(error: BaseException) -> str:
    message = " ".join(str(error).split())[:300]
    if isinstance(error, ModuleNotFoundError):
        package = PACKAGES.get((error.name or "").partition(".")[0])
        return f"{message}: pip install {package}" if package else message
    if isinstance(error, (ImportError, MemoryError, ValueError)) and message:
        return message
    return f"{type(error).__name__}: {message}".removesuffix(": ")


def report(bench: Bench, settings: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a run."""
    return {
        "date": machine.now(),
        "commit": machine.commit(),
        **bench.describe(),
        "environment": machine.environment(),
        "settings": settings,
        "results": results,
    }


def errors(outcome: Outcome, reference: Outcome | None) -> dict[str, float]:
    """Relative errors: of the loss, and the largest ||g - g_ref|| / ||g_ref|| of a gradient.

    {}, for a contender that is timed unchecked: there is no reference, or the reference's loss is 0
    (there are no negatives), or the contender has no loss (bare products).
    """
    loss, gradients = outcome
    loss = float(loss)
    if reference is None or float(reference[0]) == 0 or (loss != loss and not gradients):
        return {}
    relative = {"loss_error": abs(loss - float(reference[0])) / abs(float(reference[0]))}
    if gradients:
        pairs = zip(gradients, reference[1], strict=True)
        relative["gradient_error"] = max(_distance(native(g), native(r)) for g, r in pairs)
    return relative


def require_parity(row: dict[str, Any], dtype: str) -> None:
    """ValueError if a contender computes something else than loss and gradients of the case."""
    for name in ("loss_error", "gradient_error"):
        error, bound = row.get(name, 0.0), PARITY[dtype]
        if not error <= bound:
            raise ValueError(f"{name}: expected at most {bound:g} in {dtype}, got {error:.2g}")


def _distance(got: Array, want: Array) -> float:
    if isinstance(got, np.ndarray) and not isinstance(want, np.ndarray):
        want = want.get()  # gradients in host memory, of features there
    wide = got.astype(np.float64)
    wide -= want
    return float(np.linalg.norm(wide) / np.linalg.norm(want))
