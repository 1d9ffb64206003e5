"""What a measurement has to name: versions, processor, BLAS, environment, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import threadpoolctl

import infonce

PREFIXES = ("OPENBLAS_", "GOTO_", "OMP_", "KMP_", "MKL_", "BLIS_", "VECLIB_", "NUMBA_", "INFONCE_")


def versions(*distributions: str) -> dict[str, str | None]:
    """Python's version, and that of each installed distribution, None for those that are not."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu() -> dict[str, Any]:
    """Model of the processor, and how many of its logical cores this process may use."""
    model = platform.processor() or platform.machine()
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        model = match[1] if match else model
    except OSError:
        pass
    count = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    return {"model": model, "cores": count, "usable_cores": usable}


def blas() -> list[dict[str, Any]]:
    """Linear algebra libraries that are loaded: name, version, architecture, threads."""
    import numpy  # noqa: F401  loads the one that counts

    fields = ("internal_api", "version", "architecture", "num_threads")
    return [
        {field: library.get(field) for field in fields}
        for library in threadpoolctl.threadpool_info()
        if library["user_api"] == "blas"
    ]


def environment() -> dict[str, str]:
    """Environment variables that change results or speed."""
    ours = "KMP_DUPLICATE_LIB_OK"  # threadpoolctl sets it by itself
    names = (name for name in sorted(os.environ) if name.startswith(PREFIXES) and name != ours)
    return {name: os.environ[name] for name in names}


def commit() -> str | None:
    """Git commit of the checkout that infonce runs from, `-dirty` if changed; None outside one."""
    root = Path(infonce.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_cpu(found: Mapping[str, Any]) -> str:
    """The processor in one line."""
    return f"{found['model']}, {found['usable_cores']} of {found['cores']} cores"


def describe_blas(found: Sequence[Mapping[str, Any]]) -> str:
    """The libraries in one line."""
    lines = [
        f"{lib['internal_api']} {lib['version']}"
        f"{' ' + lib['architecture'] if lib['architecture'] else ''}, {lib['num_threads']} threads"
        for lib in found
    ]
    return "; ".join(lines) or "unknown"
