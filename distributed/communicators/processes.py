"""The processes of the ranks: their identity, and which have ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple


class Process(NamedTuple):
    """A rank's process. Its number is unique in one process namespace of one machine."""

    host: str
    machine: str  # boot id of the kernel: host names are neither unique nor the same in containers
    space: str  # process namespace
    number: int
    started: str  # start time: numbers are used again


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
    """The processes of all ranks; those that are visible from this one are watched."""

    def __init__(self, processes: Sequence[Process] = ()) -> None:
        self.processes = processes
        machines: dict[str, list[int]] = {}
        for rank, process in enumerate(processes):
            machines.setdefault(process.machine, []).append(rank)
        self.nodes = list(machines.values())  # the ranks of each
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
        """Ranks whose processes have ended, each with a message."""
        return {
            rank: f"rank {rank} (process {process.number} on {process.host}) is gone"
            for rank, process in self.watched.items()
            if _started(process.number) not in (process.started, None)
        }


def _started(process: int) -> str | None:
    """Start time of a process; "" if it has ended, None if the system has no /proc."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "" if os.path.exists("/proc/self/stat") else None
    except OSError:
        return None
    zombie_or_dead = fields[0] in "ZX"
    return "" if zombie_or_dead else fields[19]
