"""Loss and gradient on one GPU, everything side by side in one process.

    python benchmarks/gpu.py [--only clip,small] [--quick] [--out benchmarks/results/gpu.json]

This library beside the bare cuBLAS products that loss and gradient consist of, torch,
torch.compile, a simple loop over panels, and other projects' losses where they are installed
(open_clip, cut_cross_entropy, inf_cl, MemoryEfficientCLIP's clip_loss). Inputs are random unit rows
of which several sets take turns; contenders take turns too. Times are of consecutive calls between
CUDA events, after a warm-up; `wall` is the clock around a call and its result, Python included.
Memory is beyond the inputs and the gradients. Errors are against float64 on the very inputs.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from peers import PEERS, Case, Device

import infonce
from infonce.cli.bench import gpu, measure
from infonce.cli.common import to_json, written_whole
from infonce.spec import LOSSES

RESULTS = Path(__file__).resolve().parent / "results"
TORCH = ("torch", "torch.compile")
BESIDE = ("products", "panels", *TORCH)
BF16_PEERS, FP32_PEERS = PEERS[:2], PEERS[2:]  # the others compute in float32 whatever they get


@dataclass(frozen=True)
class Section:
    """Cases and what runs in each; `auto` is this library as it is called."""

    table: str  # in which the results are shown
    cases: tuple[Case, ...]
    methods: tuple[str, ...]
    goals: tuple[float, ...] = ()  # of `auto`, milliseconds, one a case
    by_wall: bool = False  # goals are of the wall clock


def case(loss: str, rows: int, dim: int, dtype: str = "bfloat16", **options: Any) -> Case:
    return Case(LOSSES[loss], rows, dim, dtype, **options)


HALF, SINGLE = "16-bit features", "32-bit features"
SECTIONS: dict[str, Section] = {
    "clip": Section(
        HALF,
        tuple(case("clip", n, 512) for n in (8192, 32768, 65536)),
        ("auto", *BESIDE, *BF16_PEERS),
        (0.50, 5.9, 26.0),
    ),
    "sizes": Section(
        HALF,
        tuple(case("clip", n, 512) for n in (1024, 2048, 4096, 8192, 16384)),
        ("auto", "captured", "products", "torch"),
    ),
    "wide": Section(
        HALF,
        (case("clip", 65536, 768), case("clip", 65536, 1024)),
        ("auto", "products"),
        (39.0, 51.0),
    ),
    "forward": Section(
        HALF, (case("clip", 65536, 512, gradient=False),), ("auto", "products", "torch"), (6.3,)
    ),
    "splits": Section(
        SINGLE,
        tuple(case("clip", 65536, 512, "float32", precision=p) for p in ("tf32", "bf16x3")),
        ("auto", "products"),
        (55.0, 90.0),
    ),
    "fp32": Section(
        SINGLE,
        tuple(case("clip", n, 512, "float32", precision="fp32") for n in (65536, 16384)),
        ("auto", "products", "torch"),
        (175.0,),
    ),
    "fp32 peers": Section(
        SINGLE, (case("clip", 16384, 512, "float32", precision="fp32"),), FP32_PEERS
    ),
    "lit": Section(
        HALF, (case("lit", 65536, 512),), ("auto", "products", "panels", "torch"), (14.0,)
    ),
    "siglip": Section(
        HALF, (case("siglip", 65536, 512),), ("auto", "products", "panels", "torch"), (20.0,)
    ),
    "info_nce": Section(
        HALF, (case("info_nce", 32768, 512, "float16"),), ("auto", "products", "panels", "torch")
    ),
    "nt_xent": Section(
        HALF,
        (case("nt_xent", 65536, 128), case("nt_xent", 8192, 128)),
        ("auto", *BESIDE),
        (5.0, 0.15),
    ),
    "small": Section(
        "Small batches",
        tuple(
            case("nt_xent", n, d, "float32")
            for n, d in ((32, 256), (64, 512), (128, 1024), (256, 2048))
        ),
        ("auto", "captured", "torch"),
        (0.06, 0.06, 0.06, 0.06),
        by_wall=True,
    ),
    "methods": Section(
        "Methods of this library",
        (case("clip", 1024, 256, "float32"), case("clip", 4096, 512, "float32")),
        ("auto", "captured", "naive", "fused", "tiled", "products", "torch"),
    ),
    # gradients that are gathered where they are handed out leave the workspace to panels
    "million": Section(
        HALF, (case("clip", 2**20, 512, grad_dtype="float32"),), ("auto",), (7000.0,)
    ),
}


def smaller(section: Section) -> Section:
    """To see in a minute that all runs: an eighth of the rows where there are many."""
    cases = (replace(c, rows=c.rows // 8 if c.rows > 4096 else c.rows) for c in section.cases)
    return replace(section, cases=tuple(dict.fromkeys(cases)), goals=())


def run(name: str, section: Section, place: Device, rounds: int) -> list[dict[str, Any]]:
    """A section's rows, printed as they come."""
    rows = []
    for i, c in enumerate(section.cases):
        huge = c.rows > gpu.REFERENCE_ROWS
        compared = measure.compare(place, c, section.methods, 1 if huge else rounds)
        place.release()
        if huge:
            compared[0].update(sampled(place, c))
        by_method = {row["method"]: row for row in compared}
        bare = by_method.get("products", {}).get("median_s")
        for row in compared:
            row["calls"] = len(row.pop("seconds", ()))
            if bare and "median_s" in row:
                row["of_products_share"] = row["median_s"] / bare
            if row["method"] == "auto" and i < len(section.goals):
                row["goal_s"] = section.goals[i] / 1e3
                row["timed"] = "wall_s" if section.by_wall else "median_s"
            rows.append(
                {
                    "section": name, "table": section.table, "loss": c.kind.name, "dim": c.dim,
                    "dtype": c.dtype, "precision": c.precision, "gradient": c.gradient, **row,
                }
            )  # fmt: skip
            print(line(rows[-1]), flush=True)
        gc.collect()
        place.release()
    return rows


def line(row: dict[str, Any]) -> str:
    """A result as it scrolls by."""
    about = f"{row['loss']} {row['dtype']} {row['precision']} {row['size']} x {row['dim']}"
    about += f"{'' if row['gradient'] else ' loss alone'} {row['method']}: "
    if "skipped" in row:
        return f"{about}skipped: {row['skipped']}"
    parts = [f"{1e3 * row['median_s']:.4g} ms", f"{row['gflops'] / 1e3:.3g} TFLOP/s"]
    parts += [f"wall {1e3 * row['wall_s']:.4g} ms"] if "wall_s" in row else []
    parts += [f"{row['of_products_share']:.2f} of products"] if "of_products_share" in row else []
    parts += [f"goal {1e3 * row['goal_s']:.4g}"] if "goal_s" in row else []
    parts += [] if row["peak_bytes"] is None else [f"{row['peak_bytes'] / 2**20:.0f} MiB"]
    errors = ("loss_error", "lse_error", "gradient_error")
    parts += [f"{key} {row[key]:.1e}" for key in errors if key in row]
    return about + ", ".join(parts)


def sampled(place: Device, c: Case, rows: int = 256) -> dict[str, float]:
    """Errors of CLIP's log-sum-exps and gradients in some rows, for a batch beyond float64's
    reach. The log-sum-exps of the other side, which these rows' gradients depend on, are taken as
    they came: the next rows are theirs."""
    features = place.inputs(c)[0]
    out = infonce.clip_loss_and_grad(
        *features, scale=c.scale, workspace=c.workspace, grad_dtype=c.grad_dtype
    )
    at = cupy.asarray(np.random.default_rng(1).choice(c.rows, rows, replace=False))
    found = {"lse_error": 0.0, "gradient_error": 0.0}
    for side in (0, 1):
        own, other = (features[s].astype(np.float64) for s in (side, 1 - side))
        x = c.scale * own[at] @ other.T
        top = x.max(axis=1)
        lse = top + cupy.log(cupy.exp(x - top[:, None]).sum(axis=1))
        p = (cupy.exp(x - lse[:, None]) + cupy.exp(x - out.lse[1 - side].astype(np.float64))) / 2
        p[cupy.arange(rows), at] -= 1
        want = c.scale / c.rows * p @ other
        got = out.grads[side].astype(np.float64)[at]
        pairs = {"lse_error": (out.lse[side][at], lse), "gradient_error": (got, want)}
        for key, (g, w) in pairs.items():
            error = float(cupy.linalg.norm(g - w) / cupy.linalg.norm(w))
            found[key] = max(found[key], error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help=f"sections, a list of: {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows, two rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--commit", help="for a copy that is no checkout")
    options = parser.parse_args()
    chosen = list(SECTIONS) if options.only is None else options.only.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"--only: expected some of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    rounds = 2 if options.quick else options.rounds
    place = Device("bfloat16")
    workspace = SECTIONS["clip"].cases[0].workspace
    settings = {
        "temperature": measure.TEMPERATURE, "workspace_bytes": workspace, "rounds": rounds,
        "sizes": "an eighth" if options.quick else "full",
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    for name in chosen:
        section = smaller(SECTIONS[name]) if options.quick else SECTIONS[name]
        start = time.perf_counter()
        results += run(name, section, place, rounds)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        report = measure.report(place, settings, results)  # written as it grows: runs get cut off
        report["commit"] = options.commit or report["commit"]
        with written_whole(options.out) as temporary:
            temporary.write_text(to_json(report) + "\n")
    rates = report["gemm"]["gflops"]
    print(f"cuBLAS, {gpu.GEMM} rows, bf16: {np.median(rates) / 1e3:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
