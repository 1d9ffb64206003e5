"""Memory of the loss on each of 8 GPUs, beside what the paper on Inf-CL reports.

    python benchmarks/paper.py [--measured benchmarks/results/ring-768.json]

The paper (Cheng et al.: Breaking the Memory Barrier: Near Infinite Batch Size Scaling for
Contrastive Loss, 2024) gives the peak of training's loss for ViT-L/14, features of width 768, on
8 A800: Table 1, and Table 2 for 448k and 4096k rows. Here: what `infonce.distributed.cost` says,
which the tests hold CPU ranks to, and recorded runs with as many rows on a GPU.

A second record, paper-batches.json, has what the model gives of Table 2: memory of the loss at the
paper's greatest batch, and the greatest batch whose loss takes no more memory than the paper's does
there, of 8, 32 and 128 GPUs. The paper says that Inf-CL takes 78 times less than the local loss at
256k rows on 8 GPUs, and 281 times less at 1024k on 128: beside it, local loss of the same batch by
the paper's own bytes a logit, over what this library takes by its model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infonce.distributed import cost
from infonce.kernels.problem import WORKSPACE

from infonce.cli import machine
from infonce.cli.common import to_json

# GPUs, width, offload; batches of 1024 rows of CLIP, OpenCLIP, Inf-CL; GB of the last; from Table 2
GREATEST = (
    (8, 512, False, (68, 172, 800), 3.01), (32, 512, False, (68, 360, 3456), 3.27),
    (8, 768, False, (64, 152, 448), 2.52), (32, 768, False, (64, 352, 2048), 2.89),
    (8, 768, True, (64, 184, 4096), 26.12), (32, 768, True, (64, 368, 12288), 19.59),
)  # fmt: skip
FACTORS = ((8, 256, 78), (128, 1024, 281))  # GPUs, batch, how many times less memory than others
# A logit of the local loss, by Table 1: 33.64 GB on each of 8 GPUs at 128k rows
LOCAL_BYTES = 33.64e9 * 8 / (128 * 1024) ** 2
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
    shards = 4 * rows * DIM * cost.FEATURE_BYTES  # features of two sides, and their gradients
    above = cost.predict_memory(rows, DIM)

    def in_gb(size: float | None) -> float | None:
        return None if size is None else round(size / GB, 2)

    return {
        "batch": f"{batch}k",
        **{f"{name} (GB)": value for name, value in zip(COLUMNS, PAPER[batch], strict=True)},
        "infonce (GB)": in_gb(above + shards),
        "of it above features and gradients (GB)": in_gb(above),
        "the same measured (GB)": in_gb(measured.get(rows)),
        "infonce, offload (GB)": in_gb(cost.predict_memory(rows, DIM, offload=True)),
    }


def loss_bytes(batch: float, gpus: int, dim: int, offload: bool) -> float:
    """Memory of the loss on a GPU by the model: what a call takes; features and gradients, too,
    if they are there."""
    rows = int(1024 * batch) // gpus
    shards = 0 if offload else 4 * rows * dim * cost.FEATURE_BYTES
    return float(cost.predict_memory(rows, dim, offload=offload) + shards)


def greatest_batch(size: float, gpus: int, dim: int) -> int:
    """The most 1024s of rows whose loss takes no more than `size` bytes."""
    fits, exceeds = 0, 1
    while loss_bytes(exceeds, gpus, dim, False) <= size:
        fits, exceeds = exceeds, 2 * exceeds
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        within = loss_bytes(middle, gpus, dim, False) <= size
        fits, exceeds = (middle, exceeds) if within else (fits, middle)
    return fits


def batches() -> list[dict[str, Any]]:
    """Rows of Table 2, then the factors."""
    rows: list[dict[str, Any]] = []
    for gpus, dim, offload, (clip, open_clip, batch), paper in GREATEST:
        rows.append({
            "gpus": gpus, "batch": f"{batch}k", "dim": dim, "offload": "yes" if offload else "no",
            "CLIP, the paper's (batch)": f"{clip}k",
            "OpenCLIP, the paper's (batch)": f"{open_clip}k",
            "Inf-CL, the paper's (GB)": paper,
            "infonce, modelled (GB)": round(loss_bytes(batch, gpus, dim, offload) / GB, 2),
            # with offload, the host's memory is what bounds a batch
            "infonce in as much memory, modelled (batch)":
                None if offload else f"{greatest_batch(paper * GB, gpus, dim)}k",
        })  # fmt: skip
    for gpus, batch, factor in FACTORS:
        local, here = LOCAL_BYTES * (1024 * batch) ** 2 / gpus, loss_bytes(batch, gpus, DIM, False)
        rows.append({
            "gpus": gpus, "batch": f"{batch}k", "dim": DIM, "offload": "no",
            "infonce, modelled (GB)": round(here / GB, 2),
            "local loss, modelled (GB)": round(local / GB, 1),
            "times less: the paper": factor, "times less: infonce, modelled": round(local / here),
        })  # fmt: skip
    return rows


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
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": machine.now(),
        "settings": {"gpus": GPUS, "dim": DIM, "features": "bfloat16",
                     "workspace_bytes": WORKSPACE},
        "results": [row(batch, measured) for batch in PAPER],
    }  # fmt: skip
    arguments.output.write_text(to_json(report) + "\n")
    report["device"] = "Inf-CL: the paper's, A800; infonce and local loss: by models"
    report["settings"] = {"features": "bfloat16", "workspace_bytes": WORKSPACE}
    report["results"] = batches()
    (arguments.output.parent / "paper-batches.json").write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
