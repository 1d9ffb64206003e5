"""Temporary memory of CLIP's loss and gradients, beyond features and gradients, against the rows.

    python benchmarks/memory.py [--rows 1024,4096,16384,65536] [--dim 512]
        [--output benchmarks/results/memory.json]

On the CPU, the peak of NumPy's allocations in a call of float32 features is measured. On a GPU, the
workspace of a call of bfloat16 features is computed by `infonce.explain`, which leaves vectors out.
Beside them stands one N x N matrix of float32 logits. 65536 rows take minutes on a CPU.
"""

from __future__ import annotations

import argparse
import tracemalloc
from pathlib import Path

import numpy as np
from infonce.kernels.cpu.resources import BUFFER_POOL

import infonce
from infonce.cli import machine
from infonce.cli.common import to_json

RESULTS = Path(__file__).resolve().parent / "results"
DEVICE = "h200"


def cpu_bytes(rows: int, dim: int) -> int:
    """The peak of NumPy's allocations, after a call that has compiled the loops."""
    rng = np.random.default_rng(0)
    features = {name: rng.standard_normal((rows, dim), np.float32) for name in ("image", "text")}
    small = {name: z[:256] for name, z in features.items()}
    gradients = {name: np.empty_like(z) for name, z in features.items()}
    infonce.clip_loss_and_grad(**small, temperature=0.07, normalize=True)
    BUFFER_POOL.clear()
    tracemalloc.start()
    infonce.clip_loss_and_grad(**features, temperature=0.07, normalize=True, out=gradients)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="1024,4096,16384,65536")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    arguments = parser.parse_args()
    results = []
    for rows in map(int, arguments.rows.split(",")):
        plan = infonce.explain("clip", rows, arguments.dim, dtype="bfloat16", device=DEVICE)
        results.append({
            "rows": rows, "matrix_of_logits_bytes": 4 * rows * rows,
            "CPU_bytes": cpu_bytes(rows, arguments.dim), "GPU_bytes": plan.workspace,
        })  # fmt: skip
        print(results[-1], flush=True)
    report = {
        "device": f"{machine.describe_cpu(machine.cpu())}, float32; {plan.device}, bfloat16",
        "versions": machine.versions("numpy", "numba"),
        "commit": machine.commit(), "date": machine.now(),
        "settings": {"loss": "clip", "dim": arguments.dim},
        "results": results,
    }  # fmt: skip
    arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
