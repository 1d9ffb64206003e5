"""Train CLIP on a batch whose full matrix does not fit: encoders by chunks (infonce.grad_cache).

    python benchmarks/frameworks/large_batch.py [--rows 262144] [--dim 512] [--steps 10]
        [--device cuda] [--output benchmarks/results/large_batch.json]

Two small encoders learn to bring noisy views of the same random vector together. Afterwards the
same step is tried with the full matrix, and what becomes of that is recorded too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infonce
import infonce.torch
from infonce.cli import common, machine
from infonce.cli.common import to_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
LATENT, CHUNK, TEMPERATURE, NOISE = 64, 8192, 0.07, 1.0


class Views:
    """Noisy views of the same vectors, the same each time that they are asked for."""

    def __init__(self, rows: int, seed: int, device: str) -> None:
        self.rows, self.seed, self.device = rows, seed, device

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, part: slice) -> Tensor:
        row_generator = torch.Generator(self.device).manual_seed(part.start)
        view_generator = torch.Generator(self.device).manual_seed(
            self.rows * (1 + self.seed) + part.start
        )
        size = (min(part.stop, self.rows) - part.start, LATENT)
        latent = torch.randn(size, generator=row_generator, device=self.device)
        return latent + NOISE * torch.randn(size, generator=view_generator, device=self.device)


def train(rows: int, dim: int, steps: int, device: str) -> dict[str, Any]:
    """Losses and seconds of each step, peak memory, and what the full matrix does."""
    torch.manual_seed(0)
    encoders = [
        nn.Sequential(nn.Linear(LATENT, 1024), nn.GELU(), nn.Linear(1024, dim)).to(device)
        for _ in range(2)
    ]
    optimiser = torch.optim.Adam([p for e in encoders for p in e.parameters()], lr=1e-3)
    views = [Views(rows, seed, device) for seed in range(2)]

    def embed(encoder: nn.Module, chunk: Tensor) -> Tensor:
        return F.normalize(encoder(chunk), dim=1).bfloat16()

    def encode(encoder: nn.Module) -> Any:
        @torch.no_grad()
        def run(chunk: Tensor) -> Tensor:
            return embed(encoder, chunk)

        return run

    def backward(encoder: nn.Module) -> Any:
        def run(chunk: Tensor, gradient: Tensor) -> None:
            embed(encoder, chunk).backward(gradient)

        return run

    cuda = device != "cpu"
    losses, seconds = [], []
    free = torch.cuda.mem_get_info()[0] if cuda else 0
    with common.progress_bar() as progress:
        for step in range(steps):
            began = time.perf_counter()
            optimiser.zero_grad()
            out = infonce.grad_cache(
                infonce.clip_loss_and_grad, views, [encode(e) for e in encoders],
                [backward(e) for e in encoders], CHUNK, temperature=TEMPERATURE,
            )  # fmt: skip
            optimiser.step()
            losses.append(float(out.loss))  # waits for the device
            seconds.append(time.perf_counter() - began)
            if progress is not None:
                progress("training", step + 1, steps)
    held_memory = free - torch.cuda.mem_get_info()[0] if cuda else None
    del out
    try:
        features = [
            torch.cat([encode(e)(v[slice(i, i + CHUNK)]) for i in range(0, rows, CHUNK)])
            for e, v in zip(encoders, views, strict=True)
        ]
        x = features[0].requires_grad_() @ features[1].T / TEMPERATURE
        y = torch.arange(rows, device=device)
        ((F.cross_entropy(x.float(), y) + F.cross_entropy(x.T.float(), y)) / 2).backward()
        full = "completes"
    except torch.OutOfMemoryError as error:
        full = str(error).partition(". GPU")[0]
    return {
        "rows": rows, "dim": dim, "losses": losses, "step_s": seconds, "held_bytes": held_memory,
        "full matrix": full,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=262144)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / "large_batch.json")
    arguments = parser.parse_args()
    common.check_destination(arguments.output)
    row = train(arguments.rows, arguments.dim, arguments.steps, arguments.device)
    report = {
        "device": machine.gpu()["model"] if arguments.device != "cpu" else machine.cpu()["model"],
        "versions": machine.versions("torch", "cupy-cuda13x"),
        "commit": machine.commit(),
        "date": machine.now(),
        "settings": {"loss": "clip", "dtype": "bfloat16", "temperature": TEMPERATURE,
                     "chunk": CHUNK, "noise": NOISE},
        "results": [row],
    }  # fmt: skip
    arguments.output.write_text(to_json(report) + "\n")
    median = sorted(row["step_s"])[len(row["step_s"]) // 2]
    print(f"{row['rows']} pairs: loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}, "
          f"{median:.2f} s a step; the full matrix: {row['full matrix']}")  # fmt: skip


if __name__ == "__main__":
    main()
