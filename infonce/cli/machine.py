"""The machine and the software of a measurement: versions, processor, BLAS, environment, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import threadpoolctl

import infonce

NVIDIA = "/proc/driver/nvidia/version"
PREFIXES = ("OPENBLAS_", "GOTO_", "OMP_", "KMP_", "MKL_", "BLIS_", "VECLIB_", "NUMBA_", "INFONCE_")


def versions(*distributions: str) -> dict[str, str | None]:
    """Versions of Python, of infonce and of each distribution; None if it is not installed."""
    installed: dict[str, str | None]
    installed = {"python": platform.python_version(), "infonce": infonce.__version__}
    for name in distributions:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def now() -> str:
    """Date and time of a record, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def gpu() -> dict[str, Any]:
    """Model, capability, memory, driver and CUDA of the current GPU, through CuPy."""
    import cupy
    from cupy.cuda import nvrtc

    def version(number: int) -> str:
        return f"{number // 1000}.{number % 1000 // 10}"

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {
        "model": properties["name"].decode(),
        "capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
        "driver": driver() or f"for CUDA {version(runtime.driverGetVersion())}",
        "cuda": version(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, nvrtc.getVersion())),
    }


def driver() -> str | None:
    """Version of the NVIDIA driver, if the system says."""
    try:
        match = re.search(r"Module(?: for \S+)?\s+([\d.]+)", Path(NVIDIA).read_text())
    except OSError:
        return None
    return match[1] if match else None


def describe_gpu(properties: Mapping[str, Any]) -> str:
    """The GPU in one line."""
    return (
        f"{properties['model']}, compute capability {properties['capability']}, "
        f"{properties['multiprocessors']} multiprocessors, "
        f"{properties['memory_bytes'] / 2**30:.0f} GiB; "
        f"driver {properties['driver']}, CUDA {properties['cuda']}, NVRTC {properties['nvrtc']}"
    )


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
    import numpy  # noqa: F401  loads the BLAS that NumPy calls

    fields = ("internal_api", "version", "architecture", "num_threads")
    return [
        {field: library.get(field) for field in fields}
        for library in threadpoolctl.threadpool_info()
        if library["user_api"] == "blas"
    ]


def environment() -> dict[str, str]:
    """Environment variables that change results or speed."""
    # have one of the PREFIXES, but change neither results nor speed
    without_effect = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "INFONCE_CACHE_DIR"}
    names = (name for name in sorted(os.environ) if name.startswith(PREFIXES))
    return {name: os.environ[name] for name in names if name not in without_effect}


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


def cuda() -> str:
    """The devices CuPy finds, or why there is none."""
    try:
        import cupy

        runtime = cupy.cuda.runtime
        devices = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    except ImportError as error:
        return f"unavailable: {error} (pip install 'infonce-kernels[cuda13]' or '[cuda12]')"
    except Exception as error:  # a driver that is missing, too old or broken fails in many ways
        return f"unavailable: {' '.join(str(error).split())}"
    names = [
        f"{p['name'].decode()} (compute capability {p['major']}.{p['minor']})" for p in devices
    ]
    return f"available: {', '.join(names)}" if names else "unavailable: no device"


def describe_cpu(properties: Mapping[str, Any]) -> str:
    """The processor in one line."""
    return f"{properties['model']}, {properties['usable_cores']} of {properties['cores']} cores"


def describe_blas(libraries: Sequence[Mapping[str, Any]]) -> str:
    """The libraries in one line."""
    lines = [
        f"{lib['internal_api']} {lib['version']}"
        f"{' ' + lib['architecture'] if lib['architecture'] else ''}, {lib['num_threads']} threads"
        for lib in libraries
    ]
    return "; ".join(lines) or "unknown"
