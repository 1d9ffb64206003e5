"""`infonce info`: versions, processor, backends and caches, whatever is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import click
import ml_dtypes
from rich.table import Table

from .. import dispatch, spec
from ..checks.validation import human
from ..kernels.gpu.device import compiler
from ..kernels.problem import WORKSPACE
from . import machine
from .common import progress_bar, stdout, to_json

CUPY = {"cupy-cuda13x": "cuda13", "cupy-cuda12x": "cuda12"}  # build of CuPy -> its extra
OPTIONAL = {  # library -> the extra that brings it
    "matplotlib": "plot",
    "scikit-learn": "demo",
    "safetensors": "safetensors",
    "pyarrow": "parquet",
    "mpi4py": "mpi",
    "torch": "torch",
    "jax": "jax",
    **CUPY,
}
WIDTHS = (128, 256, 384, 512, 768, 1024)
SMALL_ROWS, LARGE_ROWS = 64, 8192
MOST_AT_ONCE = 8  # calls that compile at once; each call takes a workspace


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--compile/--no-compile", "compiles", default=False,
    help="Compile the GPU kernels of common calls (all losses but distill, without options; "
    f"float32, bfloat16, float16; widths {', '.join(map(str, WIDTHS))}) into the cache, side by "
    "side, and time them. Such calls compile nothing later. Calls of distill, and calls with "
    "options such as normalize, may compile further kernels. Without a GPU nothing is compiled, "
    "and the exit status is 1.",
)  # fmt: skip
def info(as_json: bool, compiles: bool) -> None:
    """Versions, processor, GPU, backends, optional libraries and caches of this machine."""
    cuda = machine.cuda()
    on_gpu = cuda.startswith("available")
    libraries = _cuda_libraries()
    needs = {"CUDA": cuda, "NVRTC": libraries["NVRTC"]}  # of kernels that are compiled here
    missing = [f"{name} {state}" for name, state in needs.items() if not state.startswith("avail")]
    can_compile = not missing
    report = {
        "versions": machine.versions("numpy", "numba", "ml_dtypes"),
        "cpu": machine.cpu(),
        "blas": machine.blas(),
        "environment": machine.environment(),
        "backends": {"cpu": _cpu(), "cuda": cuda},
        "gpu": machine.gpu() if can_compile else None,  # `gpu` asks for NVRTC's version
        "optional": _optional(),
        "cuda_libraries": libraries,
        "transports": _transports(on_gpu),
        "workspace_bytes": WORKSPACE,
        "compiled_code": _cache(),
        "compiled_kernels": str(compiler.cache_directory()),
        "compile_seconds": _compile_common_calls() if can_compile and compiles else {},
    }
    if as_json:
        click.echo(to_json(report))
    else:
        _print(report)
    if compiles and missing:
        raise click.ClickException(f"--compile: no kernel was compiled: {'; '.join(missing)}")
    if compiles and not report["compile_seconds"]:
        click.echo("infonce: --compile: the kernels of common calls were in the cache", err=True)


def _print(report: Mapping[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, version in report["versions"].items():
        table.add_row(name, version or "missing")
    table.add_row("CPU", machine.describe_cpu(report["cpu"]))
    table.add_row("BLAS", machine.describe_blas(report["blas"]))
    if report["gpu"]:
        table.add_row("GPU", machine.describe_gpu(report["gpu"]))
    for name, value in report["environment"].items():
        table.add_row(name, value)
    for name, state in report["backends"].items():
        table.add_row(f"backend {name}", state)
    for name, library in report["optional"].items():
        table.add_row(name, library["version"] or f"missing: {library['from']}")
    for name, state in report["cuda_libraries"].items():
        table.add_row(name, state)
    for name, state in report["transports"].items():
        table.add_row(f"ranks by {name}", state)
    table.add_row("workspace", f"{human(report['workspace_bytes'])} by default")
    table.add_row("compiled code", report["compiled_code"])
    table.add_row("compiled kernels", report["compiled_kernels"])
    for kernel, seconds in report["compile_seconds"].items():
        table.add_row("", f"{kernel}: {seconds:.1f} s")
    stdout().print(table)


def _optional() -> dict[str, dict[str, str | None]]:
    """The version of each optional library, and the extra that installs it.

    If one build of CuPy is installed, the other build does not count as missing.
    """
    installed = machine.versions(*OPTIONAL)
    has_cupy = any(installed[build] for build in CUPY)
    return {
        name: {"version": installed[name], "from": _install(extra)}
        for name, extra in OPTIONAL.items()
        if installed[name] or not (has_cupy and name in CUPY)
    }


def _install(extra: str) -> str:
    return f"pip install 'infonce-kernels[{extra}]'"


def _cuda_libraries() -> dict[str, str]:
    """The CUDA libraries that CuPy finds, which infonce calls through CuPy. No GPU is needed."""

    def nvrtc() -> str:
        from cupy.cuda import nvrtc

        return "available, " + ".".join(map(str, nvrtc.getVersion()))

    def cublas() -> str:
        from cupy.cuda import cublas  # noqa: F401  it is linked to cuBLAS

        return "available"

    def nccl() -> str:
        from ..distributed.transports.nccl import why_unavailable

        if why := why_unavailable():
            raise ImportError(why)
        from cupy.cuda import nccl

        version = nccl.get_version()
        return f"available, {version // 10000}.{version // 100 % 100}.{version % 100}"

    installed = machine.versions(*CUPY)
    extra = next((CUPY[build] for build in CUPY if installed[build]), "cuda13")
    states = {}
    for name, load in {"NVRTC": nvrtc, "cuBLAS": cublas, "NCCL": nccl}.items():
        try:
            states[name] = load()
        except Exception:  # CuPy or the library is missing, or is of another version
            states[name] = f"missing: {_install(extra)}"
    return states


def common_calls(tensor_cores: bool) -> list[tuple[spec.Loss, str, int, int]]:
    """(loss, dtype, rows, width) of the calls whose kernels `--compile` compiles: small batches in
    one launch, and large batches of all common widths.

    `tensor_cores`: whether kernels use tensor cores, which they do from compute capability 8.0 on.
    Without tensor cores there are no 16-bit products.
    """
    dtypes = ("float32", "bfloat16", "float16") if tensor_cores else ("float32",)
    sizes = [(SMALL_ROWS, WIDTHS[0]), *((LARGE_ROWS, width) for width in WIDTHS)]
    return [
        (loss, dtype, rows, width)
        for rows, width in sizes for loss in spec.LOSSES.values() for dtype in dtypes
    ]  # fmt: skip


def _compile_common_calls() -> dict[str, float]:
    """Compile the kernels of common calls into the cache. Returns, for each kernel that was not in
    the cache, the seconds of its compilation."""
    import cupy

    device = cupy.cuda.Device()

    def call(loss: spec.Loss, dtype: str, rows: int, width: int) -> None:
        with device:  # a new thread begins on device 0
            z = cupy.ones((rows, width), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            features = [z.copy() for _ in loss.arguments]
            labels = cupy.zeros(rows, int) if loss.classes else None
            dispatch.loss_and_grad(loss, features, labels, None, {"scale": 1.0})

    run_all(call, common_calls(int(device.compute_capability) >= 80))
    return {
        f"{file} {' '.join(f'{name}={value}' for name, value in defines)}": seconds
        for (file, *defines), seconds in compiler.compile_seconds.items()
    }


def run_all(call: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    """Run all calls in threads, at most MOST_AT_ONCE at once. A bar shows how many are done."""
    at_once = min(MOST_AT_ONCE, os.cpu_count() or 1)
    with progress_bar() as progress, ThreadPoolExecutor(at_once) as threads:
        running = [threads.submit(call, *arguments) for arguments in calls]
        for done, future in enumerate(as_completed(running), 1):
            future.result()
            if progress is not None:
                progress("calls compiled", done, len(calls))


def _cpu() -> str:
    try:
        from ..kernels.cpu.backend import CPU  # noqa: F401  Numba may be missing
        from ..kernels.cpu.resources import thread_count

        return f"available, {thread_count()} threads"
    except (ImportError, ValueError) as error:
        return f"unavailable: {error}"


def _transports(on_gpu: bool) -> dict[str, str]:
    """How the losses over ranks could move arrays here."""
    from ..distributed.transports.choice import describe

    return describe(on_gpu)


def _cache() -> str:
    """Folder in which Numba keeps compiled code."""
    try:
        from ..kernels.cpu.loops.tile_ops import row_statistics

        return str(row_statistics.stats.cache_path)
    except (ImportError, RuntimeError) as error:
        return f"unknown: {error}"
