"""Measure what each level of tiling saves, on CPU ranks: the ablation of the paper on Inf-CL.

python benchmarks/ranks/ablation.py [--ranks 4] [--batch 2048 4096 8192] [--dim 64]
    [--launcher mpiexec] [--output benchmarks/results/ablation.json]

The paper (Cheng et al.: Breaking the Memory Barrier: Near Infinite Batch Size Scaling for
Contrastive Loss, 2024) trains with 64k pairs on 4 A800. Table 4 gives the memory of its loss
without tiles, over ranks (OpenCLIP's local loss), in tiles over GPUs, and in tiles inside GPUs as
well. Here CLIP's loss and gradients are computed in the same four ways, each in processes of its
own.

`logits_bytes` is modelled: the most logits that a rank has at once, with copies. `peak_bytes` is
measured: the most that a rank allocates in a call, beyond its shards and their gradients. `step_s`
is the time of a call, the median of those of the slowest rank. `gradient_error` is relative to one
process that has all rows, in float64.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from infonce.distributed.communicators.mpi import connect
from infonce.kernels.arrays.naive import MATRICES
from infonce.kernels.cpu.resources import BUFFER_POOL

import infonce
from infonce import distributed
from infonce.cli import machine
from infonce.cli.common import to_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
WORKSPACE = 2**20
SCALE, ITEM = 1 / 0.07, 4  # float32
# the call of each variant; the paper's order of its loss' memory, and GB
VARIANTS: dict[str, tuple[str, str, float]] = {
    "vanilla": ('all keys and queries on each rank, method="naive"', "b^2", 66.21),
    "local loss": ('exchange="gather", method="naive"', "b^2 / n", 16.96),
    "tiles over ranks": ('exchange="ring", method="naive"', "b^2 / n^2", 4.81),
    "tiles over and inside ranks": ('exchange="ring", method="tiled"', "b / n^2", 0.81),
}


def logits_bytes(variant: str, batch: int, ranks: int) -> int:
    """What the logits of a rank take at once, for b = `batch` and n = `ranks`.

    vanilla: b^2 logits, copies included. local loss: the largest block, of its b / n rows with the
    keys of other ranks; its own keys are another block. Tiles over ranks: one block of (b / n)^2.
    """
    rows = batch // ranks
    return {
        "vanilla": MATRICES * ITEM * batch**2, "local loss": ITEM * rows * (batch - rows),
        "tiles over ranks": ITEM * rows**2, "tiles over and inside ranks": WORKSPACE,
    }[variant]  # fmt: skip


def make_call(variant: str, image: Any, text: Any) -> Callable[[], Any]:
    """Loss and gradients of this rank's rows."""
    ranks, rows = connect(), len(image)
    mine = slice(ranks.rank * rows, (ranks.rank + 1) * rows)

    def vanilla() -> Any:
        gathered = [np.empty((ranks.size, *z.shape), z.dtype) for z in (image, text)]
        for all_shards, shard in zip(gathered, (image, text), strict=True):
            all_shards[ranks.rank] = shard
        ranks.exchange({
            distance: ([image, text], [z[(ranks.rank - distance) % ranks.size] for z in gathered])
            for distance in range(1, ranks.size)
        }).wait()  # fmt: skip
        flat = [z.reshape(-1, z.shape[-1]) for z in gathered]
        out = infonce.clip_loss_and_grad(*flat, scale=SCALE, method="naive")
        return [np.array(gradient[mine]) for gradient in out.grads[:2]]

    def over_ranks() -> Any:
        exchange = "gather" if variant == "local loss" else "ring"
        method = "tiled" if "inside" in variant else "naive"
        out = distributed.clip_loss_and_grad(
            image, text, scale=SCALE, exchange=exchange, method=method, workspace=WORKSPACE
        )
        return list(out.grads[:2])

    return vanilla if variant == "vanilla" else over_ranks


def on_rank(variant: str, batch: int, dim: int, steps: int, output: Path) -> None:
    """Measure one variant on this rank; rank 0 writes the row."""
    ranks = connect()
    ranks.allgather(None)  # connects
    rows = batch // ranks.size
    rng = np.random.default_rng(0)  # all rows on each rank, to compare
    batch_features = [rng.standard_normal((batch, dim), np.float32) for _ in range(2)]
    batch_features = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in batch_features]
    mine = slice(ranks.rank * rows, (ranks.rank + 1) * rows)
    shards = [np.array(z[mine]) for z in batch_features]
    make_call(variant, *(z[:8] for z in shards))()  # compiles
    step = make_call(variant, *shards)
    BUFFER_POOL.clear()
    tracemalloc.start()
    gradients = step()
    peak = tracemalloc.get_traced_memory()[1] - sum(g.nbytes for g in gradients)
    tracemalloc.stop()
    seconds = []
    for _ in range(steps):
        ranks.allgather(None)  # start together
        began = time.perf_counter()
        step()
        seconds.append(max(ranks.allgather(time.perf_counter() - began)))
    want = infonce.clip_loss_and_grad(
        *(z.astype(float) for z in batch_features), scale=SCALE
    ).grads[:2]
    errors = [np.linalg.norm(g - w[mine]) for g, w in zip(gradients, want, strict=True)]
    sizes = [np.linalg.norm(w[mine]) for w in want]
    error = max(e / s for e, s in zip(errors, sizes, strict=True))
    peaks, errors = (ranks.allgather(float(value)) for value in (peak, error))
    if ranks.rank:
        return
    call, order, paper = VARIANTS[variant]
    output.write_text(to_json({
        "variant": variant, "call": call, "the paper's order": order,
        "the paper's loss (GB, 64k)": paper, "batch": batch, "ranks": ranks.size,
        "logits_modelled_bytes": logits_bytes(variant, batch, ranks.size),
        "peak_measured_bytes": int(max(peaks)), "step_measured_s": statistics.median(seconds),
        "gradient_error": max(errors),
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="timed, the median counts")
    parser.add_argument("--launcher", type=shlex.split, default=["mpiexec"])
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run")
    parser.add_argument("--variant", choices=VARIANTS, help="as one of the ranks")
    parser.add_argument("--output", type=Path, default=RESULTS / "ablation.json")
    arguments = parser.parse_args()
    if any(batch < 8 * arguments.ranks or batch % arguments.ranks for batch in arguments.batch):
        parser.error(f"--batch: expected multiples of {arguments.ranks} ranks, 8 rows a rank")
    if arguments.variant is not None:
        on_rank(arguments.variant, arguments.batch[0], arguments.dim, arguments.steps,
                arguments.output)  # fmt: skip
        return
    rows = []
    for batch in arguments.batch:
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "row.json"
                options = ["--batch", str(batch), "--dim", str(arguments.dim)]
                options += ["--steps", str(arguments.steps), "--output", str(output)]
                subprocess.run(
                    [*arguments.launcher, "-n", str(arguments.ranks), sys.executable, __file__,
                     "--variant", variant, "--ranks", str(arguments.ranks), *options],
                    check=True, timeout=arguments.limit,
                )  # fmt: skip
                rows.append(json.loads(output.read_text()))
    report = {
        "device": machine.cpu()["model"],
        "versions": machine.versions("numpy", "mpi4py"),
        "commit": machine.commit(),
        "date": machine.now(),
        "settings": {"loss": "clip", "dtype": "float32", "dim": arguments.dim,
                     "temperature": 0.07, "workspace_bytes": WORKSPACE},
        "results": rows,
    }  # fmt: skip
    arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
