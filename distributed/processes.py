"""The processes of the ranks, and which of them have ended."""

from __future__ import annotations

import os
import socket


def _identity() -> tuple[str, str, int, str]:
    """(host, process namespace, process, when it started): by which others see it is alive."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return socket.gethostname(), space, os.getpid(), _started(os.getpid()) or ""


def _started(process: int) -> str | None:
    """When a process started; None if there is none, "" where the system does not tell."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if os.path.exists("/proc/self/stat") else ""
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


_here = _identity()[:2]


def _gone(peer: tuple[str, str, int, str]) -> bool:
    """Whether a rank of this host has ended."""
    host, space, process, started = peer
    return (host, space) == _here and started != "" and _started(process) != started
