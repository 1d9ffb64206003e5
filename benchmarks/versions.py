"""Time this checkout beside another one on the current GPU, in turns.

    git worktree add ../old COMMIT
    python benchmarks/versions.py ../old [--rounds 7] [--out benchmarks/results/versions.json]

Each is installed into a folder of its own. A process for each takes turns at the same calls:
consecutive calls between CUDA events, and for small batches the host's time for a call and the
clock around a call with its result. A ratio above 1 says that this checkout is slower.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  names bfloat16 for NumPy
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# loss, rows, features, dtype, options
CASES: list[tuple[str, int, int, str, dict[str, Any]]] = [
    *(("nt_xent", n, 8 * n, "float32", {}) for n in (32, 64, 128, 256)),
    ("clip", 1024, 256, "float32", {}),
    ("clip", 1024, 512, "bfloat16", {}),
    ("clip", 2048, 512, "bfloat16", {}),
    ("siglip", 2048, 512, "bfloat16", {}),
    ("info_nce", 2048, 512, "float32", {}),
    ("clip", 600, 128, "float32", {"method": "naive"}),
    ("clip", 2048, 512, "bfloat16", {"metrics": True}),
    ("nt_xent", 4096, 128, "float32", {}),
    ("sup_con", 4096, 128, "float32", {}),
    ("sup_con", 8192, 512, "bfloat16", {}),
    ("gte", 2048, 512, "bfloat16", {}),
    *(("clip", n, 512, "bfloat16", {}) for n in (4096, 8192, 32768, 65536)),
    ("clip", 16384, 512, "float32", {"precision": "fp32"}),
    ("clip", 65536, 512, "float32", {"precision": "tf32"}),
    ("lit", 65536, 512, "bfloat16", {}),
    ("siglip", 65536, 512, "bfloat16", {}),
    ("nt_xent", 65536, 128, "bfloat16", {}),
    ("nt_xent", 8192, 128, "bfloat16", {}),
]  # fmt: skip
CLASSES = 1000  # of sup_con
SMALL = 8192  # rows up to which the host's time is of interest
TURN = 0.15  # seconds of a turn


def format_case(case: tuple[str, int, int, str, dict[str, Any]]) -> str:
    loss, rows, dim, dtype, options = case
    return " ".join([f"{loss} {rows} x {dim} {dtype}", *(f"{k}={v}" for k, v in options.items())])


def work() -> None:
    """Answer each line, the number of a case, with seconds a call: device, wall and host."""
    import cupy

    import infonce

    if hasattr(os, "sched_setaffinity"):  # both on one core, as cores differ
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rng = np.random.default_rng(0)
    prepared: tuple[int, Any] = (-1, None)
    for line in sys.stdin:
        loss, rows, dim, dtype, options = CASES[int(line)]
        if prepared[0] != int(line):
            prepared = (-1, None)
            cupy.get_default_memory_pool().free_all_blocks()
            features = []
            for _ in range(1 if loss in ("nt_xent", "sup_con") else 2):
                z = rng.standard_normal((rows, dim), np.float32)
                z /= np.linalg.norm(z, axis=1, keepdims=True)
                features.append(cupy.asarray(z.astype(dtype)))
            if loss == "sup_con":
                features.append(cupy.arange(rows) % CLASSES)
            prepared = int(line), features
        function, z = getattr(infonce, f"{loss}_loss_and_grad"), prepared[1]
        print(json.dumps(turn(lambda f=function, z=z, o=options: f(*z, scale=20.0, **o), rows)))
        sys.stdout.flush()


def turn(call: Any, rows: int) -> dict[str, float]:
    """Seconds of a call on the device; up to `SMALL` rows also by the wall clock and the host's."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    for _ in range(3):
        call()
    stream.synchronize()
    start = time.perf_counter()
    call()
    stream.synchronize()
    calls = int(max(3, min(400, TURN / (time.perf_counter() - start))))
    events = [cupy.cuda.Event() for _ in range(calls + 1)]
    events[0].record()
    start = time.perf_counter()
    for event in events[1:]:
        call()
        event.record()
    host = (time.perf_counter() - start) / calls
    stream.synchronize()
    pairs = itertools.pairwise(events)
    times = {"device": float(np.median([cupy.cuda.get_elapsed_time(*p) for p in pairs])) / 1e3}
    if rows <= SMALL:
        walls = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            stream.synchronize()
            walls.append(time.perf_counter() - start)
        times |= {"wall": float(np.median(walls)), "host": host}
    return times


def installed(tree: Path, folder: Path) -> subprocess.Popen[str]:
    """A worker that imports the library from `tree`."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(folder), str(tree)], check=True)
    return subprocess.Popen(
        [sys.executable, __file__, "--work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commits", nargs=2, help="of copies that are no checkouts")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/versions.json")
    options = parser.parse_args()
    from infonce.cli import machine
    from infonce.cli.common import to_json

    with tempfile.TemporaryDirectory() as folder:
        trees = {"this": ROOT, "other": options.other}
        workers = {which: installed(tree, Path(folder) / which) for which, tree in trees.items()}
        rows = []
        for i, case in enumerate(CASES):
            seconds: dict[str, dict[str, list[float]]] = {which: {} for which in workers}
            for turns in range(options.rounds):
                # who goes first changes from round to round
                for which, worker in sorted(workers.items(), reverse=turns % 2 == 1):
                    assert worker.stdin is not None
                    assert worker.stdout is not None
                    worker.stdin.write(f"{i}\n")
                    worker.stdin.flush()
                    for key, value in json.loads(worker.stdout.readline()).items():
                        seconds[which].setdefault(key, []).append(value)
            row: dict[str, Any] = {"case": format_case(case), "seconds": seconds}
            for key in seconds["this"]:
                mine, theirs = (np.array(seconds[which][key]) for which in ("this", "other"))
                row[f"{key}_ratio"] = float(np.median(mine / theirs))
                row[f"{key}_ratio_of_least"] = float(mine.min() / theirs.min())
                print(
                    f"{row['case']}: {key} {1e3 * np.median(mine):.4g} ms, other "
                    f"{1e3 * np.median(theirs):.4g} ms, ratio {row[f'{key}_ratio']:.3f} "
                    f"(of the least {row[f'{key}_ratio_of_least']:.3f})",
                    flush=True,
                )
            rows.append(row)
    commits = options.commits or [machine.commit(), None]
    report = {
        "date": machine.now(), "commit": commits[0], "other": commits[1], "gpu": machine.gpu(),
        "versions": machine.versions("numpy", "cupy-cuda13x"),
        "rounds": options.rounds, "results": rows,
    }  # fmt: skip
    options.out.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--work"] else main()
