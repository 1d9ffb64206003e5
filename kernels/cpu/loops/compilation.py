"""How loops are compiled, and a line in a terminal while a first call compiles them."""

from __future__ import annotations

import sys
import time
from typing import Any

from numba import config, njit
from numba.core import event

# No 'nnan' or 'ninf': NaN and infinity must survive. 'reassoc' lets sums over j vectorise.
FAST = ("contract", "nsz", "reassoc")


def compiled(function: Any) -> Any:
    """Compiled on first use, kept on disk, run without the GIL.

    A compiled function calls no other compiled function: the process that compiles would link one
    version of the other's code, and later processes, which load from disk, another version with
    other last bits. The functions of elementary.py become a part of the code that calls them.
    """
    # Also with NUMBA_DISABLE_JIT, by which users debug loops of their own: these have intrinsics
    disabled, config.DISABLE_JIT = config.DISABLE_JIT, 0
    try:
        return njit(fastmath=set(FAST), nogil=True, cache=True, error_model="numpy")(function)
    finally:
        config.DISABLE_JIT = disabled


class _Notice(event.Listener):  # type: ignore[misc]  # Numba has no types
    """Says once in a terminal that loops are compiled, if that takes longer than `PATIENCE`.

    Numba reports each compilation, and none where it loads from disk.
    """

    PATIENCE = 1.0  # seconds of compilation in this process
    TEXT = "infonce: compiling loops for this processor, once; later calls load them from disk\n"

    def __init__(self) -> None:
        self.seconds, self.begun, self.is_given = 0.0, 0.0, False

    def on_start(self, event: event.Event) -> None:
        self.begun = time.perf_counter()
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        if is_terminal and self.seconds > self.PATIENCE and not self.is_given:
            self.is_given = True
            sys.stderr.write(self.TEXT)
            sys.stderr.flush()

    def on_end(self, event: event.Event) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith("infonce.kernels."):
            self.seconds += time.perf_counter() - self.begun


event.register("numba:compile", _Notice())
