"""The same training with a framework's full matrix and with this library: do the curves overlap?

    python benchmarks/frameworks/parity.py [--steps 150] [--output benchmarks/results/parity.json]

In float64 the curves agree to rounding. In float32 they do so at first; then the rounding of any
one loss is amplified by training, as that of another order of summation would be.

On handwritten digits, each run from the same seed: CLIP on left and right halves (retrieval of
held-out pairs), and SimCLR on two augmented views (nearest neighbour accuracy of the embeddings).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import infonce.torch
from infonce.cli import machine
from infonce.cli.common import to_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
HELD_OUT, BATCH, TEMPERATURE = 360, 256, 0.2
Loss = Callable[[Any], Tensor]


def full_clip(z: list[Tensor]) -> Tensor:
    x = z[0] @ z[1].T / TEMPERATURE
    y = torch.arange(len(x))
    return (F.cross_entropy(x, y) + F.cross_entropy(x.T, y)) / 2


def full_nt_xent(z: list[Tensor]) -> Tensor:
    x = torch.cat(z) @ torch.cat(z).T / TEMPERATURE
    n = len(x)
    x = x.masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(x, (torch.arange(n) + n // 2) % n)


def losses(task: str) -> dict[str, Loss]:
    """The contenders, on unit rows."""

    def ours(method: str) -> Loss:
        if task == "clip":
            return lambda z: infonce.torch.clip_loss(*z, temperature=TEMPERATURE, method=method)
        return lambda z: infonce.torch.nt_xent_loss(
            torch.cat(z), temperature=TEMPERATURE, method=method
        )

    full = full_clip if task == "clip" else full_nt_xent
    return {"full matrix": full, "fused": ours("fused"), "tiled": ours("tiled")}


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifted by up to a pixel, brighter or darker, with noise."""
    down, right = (int(torch.randint(-1, 2, (), generator=generator)) for _ in range(2))
    gain = 0.7 + 0.6 * torch.rand(len(images), 1, 1, generator=generator, dtype=images.dtype)
    noise = 0.1 * torch.randn(images.shape, generator=generator, dtype=images.dtype)
    return gain * images.roll((down, right), (1, 2)) + noise


def train(task: str, loss: Loss, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """Curve of the loss, and accuracy on held-out digits."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=dtype)
    classes = torch.tensor(digits.target)
    halves = task == "clip"
    encoders = nn.ModuleList(
        nn.Sequential(nn.Flatten(), nn.Linear(32 if halves else 64, 128), nn.ReLU(),
                      nn.Linear(128, 32))
        for _ in range(2 if halves else 1)
    ).to(dtype)  # fmt: skip
    optimiser = torch.optim.Adam(encoders.parameters(), lr=3e-3)

    def embed(views: list[Tensor]) -> list[Tensor]:
        return [F.normalize(encoders[i % len(encoders)](z), dim=1) for i, z in enumerate(views)]

    def sides(z: Tensor) -> list[Tensor]:
        return [z[:, :, :4], z[:, :, 4:]]

    curve = []
    for _ in range(steps):
        chosen = HELD_OUT + torch.randint(len(images) - HELD_OUT, (BATCH,), generator=generator)
        batch = images[chosen]
        views = sides(batch) if halves else [augmented(batch, generator) for _ in range(2)]
        value = loss(embed(views))
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        curve.append(value.item())
    with torch.no_grad():
        if halves:
            left, right = embed(sides(images[:HELD_OUT]))
            right_one = (left @ right.T).argmax(1) == torch.arange(HELD_OUT)
        else:
            z = embed([images])[0]
            nearest = (z[:HELD_OUT] @ z[HELD_OUT:].T).argmax(1)
            right_one = classes[HELD_OUT:][nearest] == classes[:HELD_OUT]
    return {"curve": curve, "accuracy": float(right_one.float().mean())}


def compare(steps: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row a task and contender, with its distance from the full matrix's curve."""
    rows = []
    for task in ("clip", "nt_xent"):
        runs = {name: train(task, loss, steps, dtype) for name, loss in losses(task).items()}
        reference = runs["full matrix"]["curve"]
        for name, run in runs.items():
            gap = max(abs(a - b) / b for a, b in zip(run["curve"], reference, strict=True))
            rows.append(
                {"task": task, "dtype": str(dtype), "loss": name, "largest_gap": gap, **run}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=RESULTS / "parity.json")
    arguments = parser.parse_args()
    rows = [row for t in (torch.float64, torch.float32) for row in compare(arguments.steps, t)]
    for row in rows:
        print(
            f"{row['task']:8} {row['dtype']:14} {row['loss']:12} loss {row['curve'][0]:.4f} -> "
            f"{row['curve'][-1]:.4f}, accuracy {row['accuracy']:.1%}, "
            f"largest gap to the full matrix {row['largest_gap']:.1e}"
        )
    report = {
        "date": machine.now(),
        "commit": machine.commit(),
        "versions": {"infonce": infonce.__version__, "torch": torch.__version__},
        "settings": {"steps": arguments.steps, "batch": BATCH, "temperature": TEMPERATURE},
        "results": rows,
    }
    arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
