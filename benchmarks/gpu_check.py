"""Tests and timings of the GPU backend in one go, on a machine with a GPU.

    python benchmarks/gpu_check.py [--out result.json] [--no-tests]

Times are medians of CUDA events after a warm-up, over rotated random inputs. Beside them, in the
same run, stand the four bare matrix products that loss and gradient consist of (the logits twice,
dI, dT), from cuBLAS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from infonce.kernels import compiler, gpu, gpu_fused
from infonce.kernels import launch_config as config
from infonce.kernels.blocks import Gradients, Problem

TILED = {"lse": "COLUMNS", "gradient": "COLUMNS", "sigmoid": "PANEL", "ranks": "COLUMNS"}


def compile_all(precisions: list[str]) -> float:
    """Fill the disk cache, on all cores; the seconds it took."""
    start = time.perf_counter()
    properties = gpu.device_properties(0)
    arch = compiler.architecture(properties.capability)
    jobs = []
    for p in precisions:
        tile = config.tile(p, 64, properties)
        shape = {"BLOCK_N": tile.block_n, "STAGES": tile.stages, "LEVELS": tile.levels,
                 "MIN_BLOCKS": tile.min_blocks}  # fmt: skip
        for name, option in TILED.items():
            for value in (0, 1):
                jobs.append((f"{name}.cu", {"PRECISION": p.upper(), **shape, option: value}))
        jobs += [(file, {"PRECISION": p.upper()}) for file in ("rows.cu", "vectors.cu")]
    for dtype in gpu_fused.DTYPES:
        for p in ("FP32", "FP64"):
            jobs.append(("fused.cu", {"PRECISION": p, "DTYPE": f"DTYPE_{dtype.upper()}"}))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: compiler._cubin(*job, arch), jobs))
    return time.perf_counter() - start


def milliseconds(work: Any, repeats: int) -> float:
    for i in range(3):
        work(i)
    times = []
    for i in range(repeats):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        work(i)
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop))
    return statistics.median(times)


def wall_milliseconds(work: Any, repeats: int = 200) -> float:
    """Python included, and the wait for the result."""
    for i in range(10):
        work(i)
    cupy.cuda.Device().synchronize()
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        work(i)
        cupy.cuda.get_current_stream().synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def unit_rows(n: int, d: int, dtype: Any) -> Any:
    z = cupy.random.standard_normal((n, d), dtype=np.float32)
    z /= cupy.linalg.norm(z, axis=1, keepdims=True)
    return z.astype(dtype)


def clip(query: Any, key: Any, out: list[Any], precision: str, **options: Any) -> Any:
    n = len(query)
    problem = Problem(
        query=query, key=key, scale=1 / 0.07, upstream=cupy.full(n, 1.0 / n),
        positives=cupy.arange(n), row_weight=0.5, column_weight=0.5, compute=precision, **options,
    )  # fmt: skip
    return gpu.solve(problem, Gradients(out[0], out[1], cupy.empty(n)) if out else None)


def nt_xent(z: Any, out: Any, precision: str, **options: Any) -> Any:
    n = len(z)
    problem = Problem(
        query=z, key=z, scale=1 / 0.07, upstream=cupy.full(n, 1.0 / n),
        positives=(cupy.arange(n) + n // 2) % n, symmetric=True, compute=precision, **options,
    )  # fmt: skip
    return gpu.solve(problem, Gradients(out, None, cupy.empty(n), True, False))


def bare_products(query: Any, key: Any, out: list[Any]) -> Any:
    """The logits twice, dI and dT, as four cuBLAS calls over a whole matrix in bf16."""
    from cupy.cuda import cublas

    n, d = query.shape
    x = cupy.empty((n, n), query.dtype)
    handle = cupy.cuda.device.get_cublas_handle()
    one, zero = np.array(1, np.float32), np.array(0, np.float32)

    def product(ta: int, tb: int, m: int, k: int, a: Any, lda: int, b: Any, ldb: int, c: Any,
                ctype: int, ldc: int) -> None:  # fmt: skip
        cublas.gemmEx(handle, ta, tb, m, n, k, one.ctypes.data, a.data.ptr, 14, lda,
                      b.data.ptr, 14, ldb, zero.ctypes.data, c.data.ptr, ctype, ldc, 68,
                      -1)  # fmt: skip

    def work(_: int) -> None:
        for _ in range(2):
            product(1, 0, n, d, key, d, query, d, x, 14, n)
        product(0, 0, d, n, key, d, x, n, out[0], 0, d)
        product(0, 1, d, n, query, d, x, n, out[1], 0, d)

    return work


def measure() -> dict[str, Any]:
    bf16 = np.dtype(ml_dtypes.bfloat16)
    result: dict[str, Any] = {}
    for n in (8192, 32768, 65536):
        d = 512
        inputs = [(unit_rows(n, d, bf16), unit_rows(n, d, bf16)) for _ in range(2)]
        single = [cupy.empty((n, d), np.float32) for _ in range(2)]
        half = [cupy.empty((n, d), bf16) for _ in range(2)]
        repeats = 20 if n == 8192 else 5
        row = {
            "bare": milliseconds(bare_products(*inputs[0], single), repeats),
            "loss": milliseconds(lambda i, z=inputs: clip(*z[i % 2], [], "bf16"), repeats),
            "float32 out": milliseconds(
                lambda i, z=inputs, o=single: clip(*z[i % 2], o, "bf16"), repeats
            ),
            "bf16 out": milliseconds(
                lambda i, z=inputs, o=half: clip(*z[i % 2], o, "bf16"), repeats
            ),
        }
        result[f"clip bf16 {n} x {d}"] = row
        print(n, row, flush=True)
        del inputs, single, half
        cupy.get_default_memory_pool().free_all_blocks()
    n, d = 16384, 512
    single = [cupy.empty((n, d), np.float32) for _ in range(2)]
    inputs = [(unit_rows(n, d, np.float32), unit_rows(n, d, np.float32)) for _ in range(2)]
    for precision in ("tf32", "bf16x3", "fp32"):
        t = milliseconds(lambda i, z=inputs, p=precision: clip(*z[i % 2], single, p), 5)
        result[f"clip {precision} {n} x {d}"] = t
        print(precision, n, t, f"{8 * n * n * d / t / 1e9:.0f} TFLOP/s", flush=True)
    for n, d in ((32, 256), (64, 512), (128, 1024), (256, 2048)):
        z, out = unit_rows(n, d, np.float32), cupy.empty((n, d), np.float32)
        for method in ("tiled", "auto"):
            t = wall_milliseconds(lambda i, z=z, o=out, m=method: nt_xent(z, o, "fp32", method=m))
            result[f"nt_xent fp32 {n} x {d} {method}"] = t
            print("nt_xent", n, d, method, f"{t:.4f} ms wall", flush=True)
    n, d = 65536, 128
    z, out = unit_rows(n, d, bf16), cupy.empty((n, d), np.float32)
    result[f"nt_xent bf16 {n} x {d}"] = t = milliseconds(lambda i: nt_xent(z, out, "bf16"), 5)
    print("nt_xent bf16", n, d, t, flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("tests", nargs="*", default=[])
    options = parser.parse_args()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    record: dict[str, Any] = {
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "compile seconds": compile_all(list(config.OPERAND_BYTES)),
    }
    print(record, flush=True)
    if not options.no_tests:
        tests = Path(__file__).parent.parent / "tests" / "test_gpu.py"
        command = [sys.executable, "-m", "pytest", "-q", "-x", str(tests), *options.tests]
        command[4:5] = ["--maxfail=40", "--tb=short"]
        record["tests"] = subprocess.run(command, check=False).returncode
    if not options.no_times:
        record["times"] = measure()
    if options.out:
        options.out.write_text(json.dumps(record, indent=1))
    return int(record.get("tests", 0))


if __name__ == "__main__":
    sys.exit(main())
