"""The result of `infonce.explain`, and its tables: of `print`, and of the command."""

from __future__ import annotations

import html
import io
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from ..checks.validation import human
from ..kernels.gpu.schedule import Schedule
from .token_calls import TokenSchedule
from .work import Work

WIDTH = 140  # columns of the text


@dataclass(frozen=True)
class Explanation:
    """How a call runs on a GPU."""

    call: str  # in words: the shape of the logits, and the softmax or sigmoid
    device: str  # model of the GPU
    method: str  # resolved: not "auto"
    precision: str  # precision of operands, resolved
    work: tuple[Work, ...]  # kernels and matrix products in their order
    memory: dict[str, dict[str, int]]  # the workspace: name of a pass -> name of a part -> bytes
    # bytes of the workspace, which the passes use one after another. With the method fused, all of
    # `memory` but "logits" are vectors of length M and N, which lie outside; with naive, all counts
    workspace: int
    seconds: float  # least time: the sum over `work`, at the peaks of the device
    recorded: float | None  # median seconds of such a call in a benchmark; None: no record
    notes: tuple[str, ...] = ()  # sentences on operands, caches and accumulators
    schedule: Schedule | TokenSchedule | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """The table that the command ``infonce explain`` prints."""
        text = io.StringIO()
        # by itself, rich displays tables in a notebook instead of writing them to `text`, and
        # writes colours if FORCE_COLOR is set, as in notebooks
        console = Console(
            file=text, width=WIDTH, markup=False, highlight=False, force_jupyter=False,
            color_system=None,
        )  # fmt: skip
        console.print(*tables(self), sep="\n")
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """The table, in a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the command prints them with ``--json``."""
        values = {k: v for k, v in vars(self).items() if k != "schedule"}
        return {**values, "work": [asdict(work) for work in self.work]}


def tables(result: Explanation) -> tuple[Table, Table, Table]:
    """The call and the device; the work of each kernel; the memory by name."""
    about = Table.grid(padding=(0, 2))
    about.add_row("call", result.call)
    about.add_row("device", result.device)
    about.add_row("method", f"{result.method}, operands in {result.precision}")
    for note in result.notes:
        about.add_row("", note)
    return about, _work_table(result), _memory_table(result)


def _work_table(result: Explanation) -> Table:
    table = Table("pass", "kernel", "tile", "largest block", box=None, padding=(0, 2, 0, 0))
    for name in ("blocks", "launches", "TFLOP", "GB", "at least ms"):
        table.add_column(name, justify="right")
    before = ""
    for work in result.work:
        sizes = ("" if of is None else f"{of[0]} x {of[1]}" for of in (work.tile, work.block))
        table.add_row(
            work.name * (work.name != before), work.kernel, *sizes, str(work.blocks or ""),
            str(work.launches), f"{work.flops / 1e12:.3g}", f"{work.bytes / 1e9:.3g}",
            f"{1e3 * work.seconds:.3f}",
        )  # fmt: skip
        before = work.name
    recorded = "" if result.recorded is None else f"recorded {1e3 * result.recorded:.3f} ms"
    table.add_row("together", recorded, *[""] * 6, f"{1e3 * result.seconds:.3f}")
    return table


def _memory_table(result: Explanation) -> Table:
    table = Table.grid(padding=(0, 2))
    for i, (name, parts) in enumerate(result.memory.items()):
        table.add_row("memory" if i == 0 else "", name, _sizes(parts))
    beside = ", and vectors beside it" if result.method != "naive" else ""
    table.add_row("", "workspace", f"at most {human(result.workspace)}{beside}")
    return table


def _sizes(parts: dict[str, int]) -> str:
    """Parts by name; those below 1% of the largest together, as vectors."""
    small = [size for size in parts.values() if 100 * size < max(parts.values())]
    shown = [f"{name} {human(size)}" for name, size in parts.items() if size not in small]
    rest = [f"{len(small)} vectors {human(sum(small))}"] if small else []
    return ", ".join(shown + rest) or "none"
