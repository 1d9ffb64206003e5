"""A rank that is killed, exits, hangs or raises at any line of a call, for ranks over MPI
(ranks_trouble.py) and over a process group of PyTorch (torch_trouble.py)."""

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infonce import distributed

KINDS = ("killed", "exits", "hangs", "raises")
LOSSES = ("clip", "info_nce", "nt_xent", "siglip")
EXCHANGES = ("auto", "ring", "gather", "hierarchical")  # "auto": a whole batch on each rank
PACKAGE = str(Path(distributed.__file__).parents[1])
# What happens to rank 1 of a communicator, by which exchange, and the communicator's ranks among
# those that mpiexec starts. Troubles of other ranks run at the same time; rank 0 outlives them all.
# A rank that ends by itself has been in no other trouble, after which it would end the others
TROUBLES = (
    ("misses", "auto", (0, 1, 2)), ("stopped", "ring", (3, 4, 7)), ("stopped", "gather", (0, 1, 2)),
    ("raises", "ring", (3, 4, 7)), ("stopped", "hierarchical", (3, 4, 7, 2)),
    ("interrupted", "gather", (0, 1, 2)), ("killed", "hierarchical", (0, 7, 1, 2)),
    ("killed", "ring", (3, 4, 1)), ("killed", "gather", (0, 2, 1)),
    ("killed before", "ring", (0, 3, 1)), ("exits before", "gather", (0, 5, 1)),
    ("raises before", "ring", (0, 6, 1)),
)  # fmt: skip


class Trouble:
    """What happens to which rank, chosen by a seed; of so many `ranks`, if they are not 0."""

    def __init__(self, seed: int, ranks: int = 0) -> None:
        choose = random.Random(seed)
        self.what, self.exchange = KINDS[seed % len(KINDS)], choose.choice(EXCHANGES)
        self.ranks = ranks or (4 if self.exchange == "hierarchical" else 3)
        self.culprit, self.loss = choose.randrange(self.ranks), choose.choice(LOSSES)
        self.share = choose.random()  # of the lines of a call that run before the trouble

    def happen(
        self, rank: int, call: Callable[[float], Any], timeout: float, say: Callable[..., None]
    ) -> None:  # fmt: skip
        """Make calls until the trouble; all ranks do so. The other ranks say their error.

        `call` makes the same call each time, with this timeout.
        """
        say("process", os.getpid())
        for _ in range(2):  # the first calls compile kernels, and agree on the schedule
            call(120.0)
        lines, fatal = 0, -1

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            lines += event == "line"
            if event == "line" and lines == fatal:
                sys.settrace(None)
                name = Path(frame.f_code.co_filename).name
                say(f"rank {rank} {self.what} at line {lines}, {name}:{frame.f_lineno}")
                do[self.what]()
            return trace

        def fails() -> None:
            raise OSError("no more of this")

        do: dict[str, Callable[[], object]] = {
            "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "exits": lambda: os._exit(3),
            "hangs": lambda: time.sleep(100), "raises": fails,
        }  # fmt: skip

        def traced() -> None:
            sys.settrace(trace)
            try:
                call(timeout)
            finally:
                sys.settrace(None)

        step: Callable[[], object] = lambda: call(timeout)  # noqa: E731
        if rank == self.culprit:
            step = traced
            traced()  # counts the lines of a call
            fatal, lines = 1 + int(self.share * lines), 0
        else:
            call(timeout)
        began = time.monotonic()
        try:
            # A rank whose part was done already learns of it in a later call. Of a call that waits,
            # the number of lines varies, so that the trouble may come in a later call than the next
            for _ in range(100):
                began = time.monotonic()
                step()
        except BaseException as error:
            passed = time.monotonic() - began
            say(f"rank {rank} after {passed:.2f} s: {type(error).__name__}: {error}")
            raise

    def assert_named(self, output: str, timeout: float, work: float = 1) -> None:
        """All other ranks have named the rank in trouble, in what they said, before the timeout and
        the `work` of a call, seconds."""
        happened = rf"^rank {self.culprit} {self.what} at line"
        assert len(re.findall(happened, output, re.MULTILINE)) == 1, output
        for rank in {*range(self.ranks)} - {self.culprit}:
            error = re.search(rf"rank {rank} after ([\d.]+) s: RankError: (.*)", output)
            assert error is not None, output
            # one that hangs is named by ranks that have waited for it, or have been told so
            named = re.sub(rf"^rank \d+ waited {timeout:g} s for ", "", error[2])
            assert re.findall(r"rank (\d+)", named) == [str(self.culprit)], output
            assert float(error[1]) < timeout + work, output
