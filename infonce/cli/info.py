"""`infonce info`: versions, processor, backends and caches, whatever is missing."""

from __future__ import annotations

import click
from rich.table import Table

from .. import checks
from . import machine
from .common import human, stdout, to_json

OPTIONAL = {  # library -> what brings it
    "matplotlib": "pip install 'infonce[plot]'",
    "scikit-learn": "pip install 'infonce[demo]'",
    "safetensors": "pip install 'infonce[safetensors]'",
    "cupy-cuda12x": "pip install 'infonce[cuda12]'",
    "cupy-cuda13x": "pip install 'infonce[cuda13]'",
    "torch": "pip install torch",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(as_json: bool) -> None:
    """Versions, processor, backends, optional libraries and caches of this machine."""
    report = {
        "versions": machine.versions("infonce", "numpy", "numba"),
        "cpu": machine.cpu(),
        "blas": machine.blas(),
        "environment": machine.environment(),
        "backends": {"cpu": _cpu(), "cuda": _cuda()},
        "optional": {
            name: {"version": version, "from": OPTIONAL[name]}
            for name, version in machine.versions(*OPTIONAL).items()
            if name in OPTIONAL
        },
        "workspace_bytes": checks.DEFAULTS["workspace"],
        "compiled_code": _cache(),
    }
    if as_json:
        click.echo(to_json(report))
        return
    table = Table.grid(padding=(0, 2))
    for name, version in report["versions"].items():
        table.add_row(name, version or "missing")
    table.add_row("CPU", machine.describe_cpu(report["cpu"]))
    table.add_row("BLAS", machine.describe_blas(report["blas"]))
    for name, value in report["environment"].items():
        table.add_row(name, value)
    for name, state in report["backends"].items():
        table.add_row(f"backend {name}", state)
    for name, library in report["optional"].items():
        table.add_row(name, library["version"] or f"missing: {library['from']}")
    table.add_row("workspace", f"{human(report['workspace_bytes'])} by default")
    table.add_row("compiled code", report["compiled_code"])
    stdout().print(table)


def _cpu() -> str:
    try:
        from ..kernels.cpu import thread_count

        return f"available, {thread_count()} threads"
    except (ImportError, ValueError) as error:
        return f"unavailable: {error}"


def _cuda() -> str:
    """The devices CuPy finds, or why there is none."""
    try:
        import cupy

        runtime = cupy.cuda.runtime
        names = [
            runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())
        ]
    except ImportError as error:
        return f"unavailable: {error} (pip install 'infonce[cuda12]' or 'infonce[cuda13]')"
    except Exception as error:  # a driver that is missing, too old or broken fails in many ways
        return f"unavailable: {' '.join(str(error).split())}"
    return f"available: {', '.join(names)}" if names else "unavailable: no device"


def _cache() -> str:
    """Folder in which Numba keeps compiled code."""
    try:
        from ..kernels.cpu_epilogues import row_statistics

        return str(row_statistics.stats.cache_path)
    except (ImportError, RuntimeError) as error:
        return f"unknown: {error}"
