"""Memory of the loss on each of 8 GPUs, beside what the paper on Inf-CL reports.

    python benchmarks/paper.py [--measured benchmarks/results/ring-768.json]

The paper (Cheng et al.: Breaking the Memory Barrier: Near Infinite Batch Size Scaling for
Contrastive Loss, 2024) gives the peak of training's loss for ViT-L/14, features of width 768, on
8 A800: Table 1, and Table 2 for 448k and 4096k rows. Here: what `infonce.distributed.model` says,
which the tests hold CPU ranks to, and recorded runs with as many rows on a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infonce.distributed import model

from infonce.cli import machine
from infonce.cli.common import to_json

RESULTS = Path(__file__).resolve().parent / "results"
GPUS, DIM, GB = 8, 768, 1e9
# batch: GB of CLIP (all logits), OpenCLIP (local loss), Inf-CL, Inf-CL with data offload
PAPER: dict[int, tuple[float | None, ...]] = {
    32: (16.67, 2.27, 0.18, 0.18),
    64: (66.11, 8.63, 0.36, 0.36),
    128: (None, 33.64, 0.72, 0.72),
    256: (None, None, 1.45, 1.45),
    448: (None, None, 2.52, None),
    1024: (None, None, None, 6.53),
    4096: (None, None, None, 26.12),
}
COLUMNS = ("CLIP", "OpenCLIP", "Inf-CL", "Inf-CL, offload")


def row(batch: int, measured: dict[int, float]) -> dict[str, Any]:
    """One batch, in 1024 rows: the paper's figures and ours, GB on a GPU."""
    rows = 1024 * batch // GPUS
    shards = 4 * rows * DIM * model.ITEM  # features of two sides, and their gradients
    above = model.memory(rows, DIM)

    def in_gb(size: float | None) -> float | None:
        return None if size is None else round(size / GB, 2)

    return {
        "batch": f"{batch}k",
        **{f"{name} (GB)": value for name, value in zip(COLUMNS, PAPER[batch], strict=True)},
        "infonce (GB)": in_gb(above + shards),
        "of it above features and gradients (GB)": in_gb(above),
        "the same measured (GB)": in_gb(measured.get(rows)),
        "infonce, offload (GB)": in_gb(model.memory(rows, DIM, offload=True)),
    }


def recorded(path: Path) -> dict[int, float]:
    """Bytes of recorded runs of the ring on several GPUs, by rows on a GPU."""
    if not path.exists():
        return {}
    runs = json.loads(path.read_text())["results"]
    return {
        run["batch"] // run["gpus"]: run["memory_bytes"]
        for run in runs
        if run["dim"] == DIM and run["gpus"] > 1
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measured", type=Path, default=RESULTS / "ring-768.json")
    parser.add_argument("--output", type=Path, default=RESULTS / "paper.json")
    arguments = parser.parse_args()
    measured = recorded(arguments.measured)
    report = {
        "device": "CLIP, OpenCLIP, Inf-CL: the paper's, 8 x A800; infonce: by its model",
        "versions": machine.versions("infonce"),
        "commit": machine.commit(),
        "date": machine.now(),
        "settings": {"gpus": GPUS, "dim": DIM, "features": "bfloat16",
                     "workspace_bytes": model.WORKSPACE},
        "results": [row(batch, measured) for batch in PAPER],
    }  # fmt: skip
    arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
