"""Time small batches on the CPU: infonce, infonce.torch and torch's eager loss, in turns.

    python benchmarks/small.py [--rows 8 32 ...] [--dim 64 256 768] [--rounds 15] [--output FILE]

Loss and gradients of float32 unit rows and of the scale. All contenders of a case take turns in
each round, so that they meet the same clocks. A time is the least of all: other work on the machine
can only add to it. Threads of OpenMP and of OpenBLAS wait busily after a call, and keep a core from
the next contender: a pause before each turn lets these threads fall asleep. Bare products, whose
threads are OpenBLAS's, have no turns. It takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch.nn import functional

import infonce
import infonce.torch
from infonce import spec
from infonce.cli import machine
from infonce.cli.bench.contenders_cpu import torch_loss
from infonce.cli.common import to_json

RESULT = Path(__file__).resolve().parent / "results" / "cpu-small.json"
ROWS, DIMS = (8, 32, 128, 256, 512, 1024), (64, 256, 768)
SCALE = 14.0
SECONDS = 0.004  # of each turn, or one call
PAUSE = 0.03  # seconds before each turn
LONG_PAUSE = 0.2  # after threads of OpenBLAS, which wait busily for a tenth of a second
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "normalize": {"normalize": True}}
LOSSES = {"clip": spec.CLIP, "nt_xent": spec.NT_XENT}


def contenders(loss: str, rows: int, dim: int, options: str) -> dict[str, Callable[[], Any]]:
    """The calls of one case, by name."""
    kind, rng = LOSSES[loss], np.random.default_rng(0)
    z = [rng.standard_normal((rows, dim)) for _ in kind.arguments]
    features = [(x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in z]
    leaves = [torch.tensor(x, requires_grad=True) for x in features]
    scale = torch.tensor(SCALE, requires_grad=True)
    function = getattr(infonce, f"{loss}_loss_and_grad")
    in_torch = getattr(infonce.torch, f"{loss}_loss")
    y = torch.arange(rows)
    y = ((y + rows // 2) % rows if kind.symmetric else y)[:, None]
    left, right = features[0], features[-1]

    def backward(make_loss: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for leaf in (*leaves, scale):
                leaf.grad = None
            make_loss().backward()

        return run

    def eager() -> Any:
        unit = [functional.normalize(x) for x in leaves] if options == "normalize" else leaves
        return torch_loss(kind, unit[0], unit[-1], scale, y)

    def products() -> None:
        x = left @ right.T
        x @ right
        if not kind.symmetric:
            x.T @ left

    loss_options = OPTIONS[options]
    return {
        "products": products,
        "infonce": lambda: function(*features, scale=SCALE, **loss_options),
        "infonce.torch": backward(lambda: in_torch(*leaves, scale=scale, **loss_options)),
        "torch": backward(eager),
    }


def least_seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least time of one call over all turns, by contender's name."""
    least = {}
    for name, run in runs.items():
        run()  # compiles
        start = time.perf_counter()
        run()
        least[name] = time.perf_counter() - start
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            run()  # wakes the contender's own threads
            end = time.perf_counter() + SECONDS
            while True:
                start = time.perf_counter()
                run()
                now = time.perf_counter()
                least[name] = min(least[name], now - start)
                if now > end:
                    break
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dim", type=int, nargs="+", default=DIMS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cases = [
        (loss, options, rows, dim)
        for loss in LOSSES for options in OPTIONS for rows in args.rows for dim in args.dim
    ]  # fmt: skip
    results = []
    for loss, options, rows, dim in track(cases, "cases"):
        runs = contenders(loss, rows, dim, options)
        names = list(runs)
        alone = {"products": runs.pop("products")}
        least = least_seconds(runs, args.rounds)
        least |= least_seconds(alone, args.rounds)
        time.sleep(LONG_PAUSE)
        row: dict[str, Any] = {"loss": loss, "options": options, "rows": rows, "dim": dim}
        row |= {f"{name}_s": least[name] for name in names}
        for name in ("infonce", "infonce.torch"):
            row[f"{name} / torch"] = round(least[name] / least["torch"], 2)
        results.append(row)
    report = {
        "device": machine.describe_cpu(machine.cpu()), "blas": machine.blas(),
        "versions": machine.versions("numpy", "numba", "torch"),
        "environment": machine.environment(),
        "commit": machine.commit(), "date": machine.now(),
        "settings": {"dtype": "float32", "scale": SCALE, "rounds": args.rounds, "pause_s": PAUSE},
        "results": results,
    }  # fmt: skip
    args.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
