"""The processes of the ranks, and which of them have ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple


class Process(NamedTuple):
    """A rank's process. Its number means something on one machine, in one process namespace."""

    host: str
    machine: (
        str  # one boot of one kernel: hosts may share a name, containers of a host have several
    )
    space: str
    number: int
    started: str  # numbers are used again


def identity() -> Process:
    """This process."""
    host, number = socket.gethostname(), os.getpid()
    try:
        space = os.readlink("/proc/self/ns/pid")
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
    except OSError:
        space = machine = ""
    return Process(host, machine or host, space, number, _started(number) or "")


class Peers:
    """The processes of all ranks. Watched are those that can be seen from here while they live."""

    def __init__(self, processes: Sequence[Process] = ()) -> None:
        self.processes = processes
        here = identity()
        self.watched = {
            rank: process
            for rank, process in enumerate(processes)
            if (process.machine, process.space) == (here.machine, here.space)
            and process.number != here.number
            and process.started
            and _started(process.number) == process.started
        }

    def gone(self) -> dict[int, str]:
        """Ranks whose processes have ended: what to say of each."""
        return {
            rank: f"rank {rank} (process {process.number} on {process.host}) is gone"
            for rank, process in self.watched.items()
            if _started(process.number) not in (process.started, None)
        }


def _started(process: int) -> str | None:
    """When a process started; "" if it has ended, None where the system does not tell."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "" if os.path.exists("/proc/self/stat") else None
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]
