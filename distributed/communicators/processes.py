"""The processes of the ranks: their identity, which are on one node, and which have ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple


class Process(NamedTuple):
    """A rank's process. `pid` is unique in one process namespace of one machine at one time."""

    host_name: str  # for messages of errors
    machine: str  # boot id of the kernel: host names are neither unique nor the same in containers
    namespace: str  # process namespace, which containers have of their own
    pid: int
    start_time: str  # differs from that of a later process with the same pid; "": unknown


def identity() -> Process:
    """This process."""
    host_name, pid = socket.gethostname(), os.getpid()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
    except OSError:  # the system has no /proc
        namespace = machine = ""
    return Process(host_name, machine or host_name, namespace, pid, _read_start_time(pid) or "")


class Peers:
    """The processes of all ranks. Processes that this process sees are watched: see `gone`."""

    def __init__(self, processes: Sequence[Process] = ()) -> None:
        self.processes = processes
        machines: dict[str, list[int]] = {}
        for rank, process in enumerate(processes):
            machines.setdefault(process.machine, []).append(rank)
        self.nodes = list(machines.values())  # for each machine, its ranks
        here = identity()
        # other processes of this machine and namespace that run now
        self.watched = {
            rank: process
            for rank, process in enumerate(processes)
            if (process.machine, process.namespace) == (here.machine, here.namespace)
            and process.pid != here.pid
            and process.start_time
            and _read_start_time(process.pid) == process.start_time
        }

    def gone(self) -> dict[int, str]:
        """Watched rank whose process has ended -> message. A process whose start time cannot be
        read (None) counts as running."""
        return {
            rank: f"rank {rank} (process {process.pid} on {process.host_name}) is gone"
            for rank, process in self.watched.items()
            if _read_start_time(process.pid) not in (process.start_time, None)
        }


def _read_start_time(pid: int) -> str | None:
    """Start time of a process; "" if it has ended, None if the system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "" if os.path.exists("/proc/self/stat") else None
    except OSError:
        return None
    zombie_or_dead = fields[0] in "ZX"
    return "" if zombie_or_dead else fields[19]  # `starttime` of proc(5), in clock ticks
