"""Time calls over the GPUs of this host: runs step.py for each size.

python benchmarks/ranks/ring.py [--gpus 1 2 4 8] [--batch 65536 262144] [--dim 512]
    [--exchange ring] [--launcher "mpirun --allow-run-as-root"]
    [--output benchmarks/results/ring.json]
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from infonce.distributed.schedule import EXCHANGES

from infonce.cli import machine
from infonce.cli.common import to_json

RESULTS = Path(__file__).resolve().parents[1] / "results"


def measured(arguments: argparse.Namespace, gpus: int, batch: int, dim: int) -> dict[str, Any]:
    """One run of step.py; what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        step = [str(Path(__file__).parent / "step.py"), "--gpu", "--output", str(output)]
        size = ["--batch", str(batch), "--dim", str(dim), "--steps", str(arguments.steps)]
        size += ["--exchange", arguments.exchange, "--workspace", "256MiB"]
        subprocess.run(
            [*arguments.launcher, "-n", str(gpus), sys.executable, *step, *size],
            check=True, timeout=arguments.limit, stdout=sys.stderr,
        )  # fmt: skip
        row: dict[str, Any] = json.loads(output.read_text())
    return {
        "gpus": row["ranks"],
        "batch": row["batch"],
        "dim": row["dim"],
        "step_s": row["step_s"],
        "TFLOP/s a GPU": row["flops_a_rank"] / 1e12,
        "memory_bytes": row["memory_bytes"],
        "transfers_s": row["transfers_s"],
        "not_hidden_s": row["not_hidden_s"],
    }


def libraries() -> str:
    """The host's GPUs, MPI and NCCL."""
    import cupy
    import mpi4py
    from cupy.cuda import nccl

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    version = nccl.get_version()
    nccl_version = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    mpi = " ".join(MPI.Get_library_version().split("\n")[0].split()).rstrip("\0")
    return (
        f"{cupy.cuda.runtime.getDeviceCount()} x {machine.gpu()['model']} of one host; {mpi}, "
        f"NCCL {nccl_version}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--dim", type=int, nargs="+", default=[512])
    parser.add_argument("--steps", type=int, default=5, help="timed, the median counts")
    parser.add_argument("--exchange", choices=EXCHANGES, default="ring")
    parser.add_argument("--launcher", type=shlex.split, default=["mpiexec"])
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run")
    parser.add_argument("--output", type=Path, default=RESULTS / "ring.json")
    arguments = parser.parse_args()

    rows = []
    for dim in arguments.dim:
        for batch in arguments.batch:
            for gpus in arguments.gpus:
                try:
                    rows.append(measured(arguments, gpus, batch, dim))
                except subprocess.SubprocessError as error:
                    print(f"{gpus} GPUs, {batch} x {dim}: {error}", file=sys.stderr)
    report = {
        "device": libraries(),
        "versions": machine.versions("cupy-cuda13x", "cupy-cuda12x", "mpi4py"),
        "commit": machine.commit(),
        "date": machine.now(),
        "settings": {"loss": "clip", "dtype": "bfloat16", "temperature": 0.07,
                     "workspace_bytes": 2**28, "exchange": arguments.exchange},
        "results": rows,
    }  # fmt: skip
    arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
