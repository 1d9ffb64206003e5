"""Loss and gradient on one GPU, everything side by side in one process.

    python benchmarks/gpu.py [--only clip,small] [--without torch] [--quick]
                             [--out benchmarks/results/gpu.json]

This library beside the bare cuBLAS products that loss and gradient consist of, torch,
torch.compile, a simple loop over panels, and other projects' losses where they are installed
(open_clip, cut_cross_entropy, inf_cl, MemoryEfficientCLIP's clip_loss). Inputs are random unit rows
of which several sets take turns; contenders take turns too. Times are between CUDA events after a
warm-up: of consecutive calls, or of calls that the host makes while the device is kept busy
(`Section.ahead`); `wall` is the clock around a call and its result, Python included.
Memory is beyond the inputs and the gradients. Errors are against float64 on the very inputs; of
batches of more than `REFERENCE_ROWS` rows, those of random rows (`sampled`).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from peers import Case, Device
from sections import SECTIONS, Section

import infonce
from infonce.cli.bench import gpu, measure
from infonce.cli.common import to_json, written_whole

METHODS = ("auto", *Device.methods)
RESULTS = Path(__file__).resolve().parent / "results"


def smaller(section: Section) -> Section:
    """The section with an eighth of the rows of large cases: shows in a minute that all cases
    run."""
    cases = (replace(c, rows=c.rows // 8 if c.rows > 4096 else c.rows) for c in section.cases)
    return replace(section, cases=tuple(dict.fromkeys(cases)), goals=(), roomy_goals=())


def run(name: str, section: Section, place: Device, rounds: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of each of a section's cases, printed as they come."""
    place.ahead = section.ahead
    for i, c in enumerate(section.cases):
        about = {
            "section": name, "table": section.table, "loss": c.kind.name, "dim": c.dim,
            "dtype": c.dtype, "precision": c.precision, "gradient": c.gradient,
        }  # fmt: skip
        if c.keys is not None:
            about |= {"keys": c.keys, "wrt": list(c.wrt)}
        if c.workspace is not None:
            about["workspace_bytes"] = c.workspace
        rows = []
        huge = c.rows > gpu.REFERENCE_ROWS  # no float64 reference: some rows are checked instead
        compared = measure.compare(place, c, section.methods, 1 if huge else rounds)
        place.release()
        if huge:
            compared[0].update(sampled(place, c))  # of `auto`, the first method
        by_method = {row["method"]: row for row in compared}
        bare = by_method.get("products", {}).get("median_s")
        for row in compared:
            row["calls"] = len(row.pop("seconds", ()))
            if bare and "median_s" in row:
                row["products_share"] = row["median_s"] / bare
            if (goal := section.goal(row["method"], i)) is not None:
                row["goal_s"] = goal
                row["timed"] = "wall_s" if section.by_wall else "median_s"
            rows.append({**about, **row})
            print(line(rows[-1]), flush=True)
        gc.collect()
        place.release()
        yield rows


def line(row: dict[str, Any]) -> str:
    """A result as it scrolls by."""
    keys = f" of {row['keys']}" if "keys" in row else ""
    about = f"{row['loss']} {row['dtype']} {row['precision']} {row['size']}{keys} x {row['dim']}"
    about += f"{'' if row['gradient'] else ' loss only'}"
    about += f" of {', '.join(row['wrt'])} only" if row.get("wrt") else ""
    about += f" {row['method']}: "
    if "skipped" in row:
        return f"{about}skipped: {row['skipped']}"
    parts = [f"{1e3 * row['median_s']:.4g} ms", f"{row['gflops'] / 1e3:.3g} TFLOP/s"]
    parts += [f"wall {1e3 * row['wall_s']:.4g} ms"] if "wall_s" in row else []
    parts += [f"{row['products_share']:.2f} of products"] if "products_share" in row else []
    parts += [f"goal {1e3 * row['goal_s']:.4g}"] if "goal_s" in row else []
    parts += [] if row["peak_bytes"] is None else [f"{row['peak_bytes'] / 2**20:.0f} MiB"]
    errors = ("loss_error", "lse_error", "gradient_error")
    parts += [f"{key} {row[key]:.1e}" for key in errors if key in row]
    return about + ", ".join(parts)


def sampled(place: Device, c: Case, rows: int = 256) -> dict[str, float]:
    """Errors of CLIP's log-sum-exps and gradients in `rows` random rows of each side.

    For a batch whose float64 reference would take too long. The gradient of a row depends on the
    log-sum-exps of the other side. These are taken from the call itself: the other turn of the loop
    measures the errors of `rows` of them.
    """
    features = place.inputs(c)[0]
    out = infonce.clip_loss_and_grad(
        *features, scale=c.scale, workspace=c.workspace, grad_dtype=c.grad_dtype
    )
    at = cupy.asarray(np.random.default_rng(1).choice(c.rows, rows, replace=False))
    errors = {"lse_error": 0.0, "gradient_error": 0.0}
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
            errors[key] = max(errors[key], error)
    return errors


def main() -> str | None:
    """Returns which sections failed, if any did."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help=f"sections, a list of: {', '.join(SECTIONS)}")
    parser.add_argument("--without", help=f"contenders, a list of: {', '.join(METHODS)}")
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows, two rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--commit", help="for a copy that is no checkout")
    options = parser.parse_args()
    chosen = list(SECTIONS) if options.only is None else options.only.split(",")
    left_out = [] if options.without is None else options.without.split(",")
    for name, names, known in (("only", chosen, SECTIONS), ("without", left_out, METHODS)):
        if unknown := set(names) - set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    rounds = 2 if options.quick else options.rounds
    place = Device("bfloat16")
    settings = {
        "temperature": measure.TEMPERATURE, "rounds": rounds,
        "sizes": "an eighth" if options.quick else "full",
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    failed = []
    for name in chosen:
        section = smaller(SECTIONS[name]) if options.quick else SECTIONS[name]
        methods = tuple(method for method in section.methods if method not in left_out)
        section = replace(section, methods=methods)
        start = time.perf_counter()
        try:
            for rows in run(name, section, place, rounds):
                results += rows
                write(options.out, place, settings, results, options.commit)  # runs get cut off
        except Exception as error:  # the other sections go on
            failed.append(name)
            print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    if place.rates:
        rate = np.median(place.rates) / 1e3
        print(f"cuBLAS, {gpu.GEMM} rows, bf16: {rate:.0f} TFLOP/s")
    return f"failed: {', '.join(failed)}" if failed else None


def write(
    out: Path, place: Device, settings: dict[str, Any], results: list[dict[str, Any]],
    commit: str | None,
) -> None:  # fmt: skip
    report = measure.report(place, settings, results)
    report["commit"] = commit or report["commit"]
    with written_whole(out) as temporary:
        temporary.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    sys.exit(main())
