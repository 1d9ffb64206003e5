"""What the PyTorch modules cost over the same calls on CuPy arrays, on a GPU.

    python benchmarks/frameworks/modules.py [--output benchmarks/results/torch.json]

Small batches: wall time of loss and backward pass with a synchronisation after it, and in a loop;
of the CuPy call alone, and as it stands in a training step: autograd takes the gradient from there.
Large ones: device time between events, and peak memory above inputs and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import torch
import torch.nn.functional as F

import infonce
import infonce.torch
from infonce.cli import machine
from infonce.cli.bench.gpu import Device
from infonce.cli.common import to_json

TEMPERATURE = 0.07
RESULTS = Path(__file__).resolve().parents[1] / "results"


def wall(runs: dict[str, Callable[[], Any]], rounds: int = 9) -> dict[str, dict[str, float]]:
    """All of `runs` in turns, as hosts have slow moments: medians over the rounds."""
    alone: dict[str, list[float]] = {method: [] for method in runs}
    in_a_loop: dict[str, list[float]] = {method: [] for method in runs}
    for _ in range(rounds):
        for method, run in runs.items():
            for _ in range(10):
                run()
            torch.cuda.synchronize()
            for _ in range(50):
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                alone[method].append(time.perf_counter() - start)
            start = time.perf_counter()
            for _ in range(100):
                run()
            torch.cuda.synchronize()
            in_a_loop[method].append((time.perf_counter() - start) / 100)
    return {
        method: {
            "wall_s": statistics.median(alone[method]),
            "in_a_loop_s": statistics.median(in_a_loop[method]),
        }
        for method in runs
    }


def device(bench: Device, run: Callable[[], Any], repeat: int = 10) -> dict[str, float]:
    times = [bench.elapsed(run, 1)[0] for _ in range(3 + repeat)][3:]
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def in_one_thread(run: Callable[[], None]) -> Callable[[], None]:
    """The same where autograd does not hand the backward pass to a thread of the device's."""

    def alone() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            run()

    return alone


def small() -> list[dict[str, Any]]:
    z = F.normalize(torch.randn(256, 2048, device="cuda"), dim=1)
    array = cupy.from_dlpack(z)
    leaf = z.clone().requires_grad_()
    loss = infonce.torch.NTXentLoss(temperature=0.5)
    positive = (torch.arange(256, device="cuda") + 128) % 256

    def module() -> None:
        leaf.grad = None
        loss(leaf).backward()

    def by_hand() -> None:
        leaf.grad = None
        gradient = infonce.nt_xent_loss_and_grad(array, temperature=0.5).grads.features
        leaf.backward(torch.from_dlpack(gradient))

    def eager() -> None:
        leaf.grad = None
        x = leaf @ leaf.T / 0.5
        x.fill_diagonal_(-torch.inf)
        F.cross_entropy(x, positive).backward()

    # torch's own way to have no Python in a step of fixed shapes
    graphed_loss = torch.cuda.make_graphed_callables(
        infonce.torch.NTXentLoss(temperature=0.5), (leaf,)
    )

    def graphed() -> None:
        leaf.grad = None
        graphed_loss(leaf).backward()

    runs = {
        "CuPy arrays": lambda: infonce.nt_xent_loss_and_grad(array, temperature=0.5),
        "CuPy arrays, gradient handed to autograd": by_hand,
        "torch module": module,
        "torch module, autograd in one thread": in_one_thread(module),
        "torch module, graphed": graphed,
        "torch module, graphed, autograd in one thread": in_one_thread(graphed),
        "torch eager": eager,
    }
    return [
        {"loss": "nt_xent", "rows": 256, "dim": 2048, "dtype": "float32", "method": m, **times}
        for m, times in wall(runs).items()
    ]


def large(bench: Device, rows: int, dim: int) -> list[dict[str, Any]]:
    sides = [F.normalize(torch.randn(rows, dim, device="cuda"), dim=1).bfloat16() for _ in range(2)]
    arrays = [cupy.from_dlpack(z) for z in sides]
    out = [cupy.empty_like(z) for z in arrays]
    leaves = [z.clone().requires_grad_() for z in sides]

    def module() -> None:
        for leaf in leaves:
            leaf.grad = None
        infonce.torch.clip_loss(*leaves, temperature=TEMPERATURE).backward()

    runs = {
        "CuPy arrays": lambda: infonce.clip_loss_and_grad(
            *arrays, temperature=TEMPERATURE, out=out
        ),
        "torch module": module,
    }
    results = []
    for method, run in runs.items():
        row = {"loss": "clip", "rows": rows, "dim": dim, "dtype": "bfloat16", "method": method}
        results.append({**row, **device(bench, run)})
    for leaf in leaves:
        leaf.grad = None
    out.clear()
    cupy.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    module()
    torch.cuda.synchronize()
    gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    results[-1]["peak_bytes"] = before - torch.cuda.mem_get_info()[0] - gradients
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "torch.json")
    arguments = parser.parse_args()
    bench = Device("float32")
    described = bench.describe()
    report = {
        "date": machine.now(),
        "commit": machine.commit(),
        "device": described["device"],
        "versions": described["versions"],
        "settings": {"temperature": TEMPERATURE},
        "results": [*small(), *large(bench, 65536, 512)],
    }
    for row in report["results"]:
        print({k: f"{v:.3e}" if isinstance(v, float) else v for k, v in row.items()})
    arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
