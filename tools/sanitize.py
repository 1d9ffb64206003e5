"""Runs every schedule of the GPU kernels under compute-sanitizer.

    python tools/sanitize.py [--tools memcheck racecheck synccheck initcheck] [--jobs 8]
        [--calls margin]

Sizes are small and odd, on both sides of the tiles' edges. A tool's findings fail the run, as does
a kernel that no call reached. Needs a GPU and CUDA's compute-sanitizer on the PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LOSSES = ("info_nce", "nt_xent", "clip", "lit", "siglip")
ONE_SIDE = frozenset({"nt_xent", "sup_con"})  # with one array of features
OF_16_BITS = {"bf16": "bfloat16", "fp16": "float16"}
OF_16_BIT_PRODUCTS = {*OF_16_BITS, "bf16x3"}
# What calls on a device of compute capability 9.0 use, and what all others do
KERNELS = ("default", "portable")
# initcheck does not notice what a bulk tensor copy (TMA) writes: it reports each read of gradient
# blocks, and of cuBLAS's results of 16-bit products on Hopper, as a read of uninitialised memory.
# So it runs with the portable kernels, and with "tiled" only in precisions without such products.
CHECKED = [
    (tool, kernels) for tool in TOOLS for kernels in KERNELS
    if (tool, kernels) != ("initcheck", "default")
]  # fmt: skip


def features(loss: str) -> list[str]:
    """The arguments that get gradients."""
    from infonce.spec import LOSSES as BY_NAME

    kind = BY_NAME[loss]
    return [name for name in kind.arguments if name not in kind.locked]


def calls(kernels: str) -> Iterator[tuple[str, str, str, int, int, dict[str, Any]]]:
    """(loss, dtype, precision, rows, features, options) of every schedule."""
    small = ((34, 20), (130, 72))
    for loss in LOSSES:
        for method in ("naive", "fused"):
            for dtype in ("float64", "float32", "bfloat16", "float16"):
                for rows, d in small:
                    yield loss, dtype, "auto", rows, d, {"method": method, "normalize": d == 20}
        # one-part and two-part operands, rows that stay, that stream, whose keys a cluster shares
        precisions = ("fp64", "fp32", "tf32", "bf16x3", "bf16", "fp16")
        for precision in precisions:
            wide = {"fp64": 264, "fp32": 330, "bf16x3": 328}.get(precision, 640)
            for rows, d in ((130, 72), (258, 129), (200, wide)):
                dtype = OF_16_BITS.get(precision, "float64" if precision == "fp64" else "float32")
                plain = {"method": "tiled"}
                yield loss, dtype, precision, rows, d, plain
                if d != 129:
                    continue
                yield loss, dtype, precision, rows, d, plain | {"normalize": True, "ids": True}
                yield loss, dtype, precision, rows, d, plain | {"workspace": 2**18}
                yield loss, dtype, precision, rows, d, plain | {"progress": lambda *_: None}
                # the gradient of the scale takes sums of its own in batches of this size
                yield loss, dtype, precision, rows, d, plain | {"wrt": features(loss)}
                if loss != "siglip":
                    yield loss, dtype, precision, rows, d, plain | {"metrics": True}
    # narrow rows, whose gradient stays in registers
    if kernels == "default":
        for dtype in ("bfloat16", "float16"):
            for d in (128, 60):
                yield "nt_xent", dtype, "auto", 4352, d, {"method": "tiled"}
        # wide rows: exponentials that are kept, and that are not
        for loss in LOSSES:
            yield loss, "bfloat16", "auto", 300, 1100, {"method": "tiled"}
            yield loss, "bfloat16", "auto", 300, 1100, {"method": "tiled", "wrt": features(loss)}
            yield loss, "bfloat16", "auto", 600, 1100, {"method": "tiled", "workspace": 3 * 2**20}
        # so many keys that dQ is a sum of sums
        yield "info_nce", "float32", "auto", 1100, 72, {"method": "tiled"}
    # of one positive a row, or none; and of several
    for dtype in ("float64", "float32", "bfloat16"):
        for method in ("naive", "fused", "tiled"):
            yield "info_nce", dtype, "auto", 130, 40, {"method": method, "labels": 1}
        yield "info_nce", dtype, "auto", 130, 72, {"method": "tiled", "labels": 3}
    numbers = {"method": "tiled", "margin": 0.1, "hardness": 2.0, "decoupled": True}
    yield "info_nce", "bfloat16", "auto", 130, 72, numbers
    smoothing = {"method": "tiled", "label_smoothing": 0.1}
    yield "info_nce", "float32", "auto", 130, 40, smoothing | {"ids": True}
    # terms that are linear in the logits, and losses with sums of two rows
    for dtype in ("float64", "float32", "bfloat16"):
        yield "clip", dtype, "auto", 258, 72, smoothing | {"margin": 0.1}
        yield "sup_con", dtype, "auto", 258, 72, {"method": "tiled", "classes": 40}
        yield "gte", dtype, "auto", 130, 72, {"method": "tiled"}
        # classes that both sides share, classes of two sides, and those that groups leave alone
        for loss in ("clip", "lit"):
            classes = {"method": "tiled", "positive_ids": True}
            yield loss, dtype, "auto", 258, 72, classes
            yield loss, dtype, "auto", 258, 72, classes | {"groups": True}
    # racecheck finds hazards in cuBLAS's own kernel for products of 40 columns, and in no other
    yield "sup_con", "float32", "auto", 4200, 72, {"classes": 900, "decoupled": True}
    # limits and biases of pairs, in kernels of every kind
    options = {"method": "tiled", "key_bias": True, "false_negative_margin": 0.1}
    for loss in ("info_nce", "nt_xent", "clip"):
        for dtype in ("float64", "float32", "bfloat16"):
            for d in (40, 1100):
                yield loss, dtype, "auto", 300, d, options
    yield "nt_xent", "bfloat16", "auto", 4352, 128, options
    # marks of a guide, groups and positive ids
    for loss in ("info_nce", "nt_xent", "clip", "siglip"):
        pairs = "positive_ids" if loss == "siglip" else "guide"
        for dtype in ("float64", "float32", "bfloat16"):
            for d in (40, 1100):
                yield loss, dtype, "auto", 300, d, {"method": "tiled", pairs: True, "groups": True}
    # own negatives of rows, and of a table, one of whose rows has most uses
    for dtype in ("float64", "float32", "bfloat16"):
        for d in (40, 300):
            own = {"method": "tiled", "own": 20, "normalize": d == 40}
            yield "info_nce", dtype, "auto", 130, d, own
            yield "info_nce", dtype, "auto", 130, d, own | {"table": 20}
    # a teacher of as many features, in kernels of every kind
    for dtype in ("float64", "float32", "bfloat16"):
        for d in (40, 1100):
            yield "distill", dtype, "auto", 300, d, {"normalize": d == 40}
    offload = {"offload": True, "workspace": 2**20, "label_smoothing": 0.1}
    yield "clip", "float32", "auto", 300, 40, offload


def checked_calls(
    tool: str, kernels: str, pattern: str
) -> list[tuple[str, str, str, int, int, dict[str, Any]]]:
    """The calls that a tool can check and that match, those of the same kernels beside each other.

    Instrumenting a kernel takes longer than running it, so a process gets calls of few kernels.
    """
    checked = calls(kernels)
    if tool == "initcheck":
        checked = (
            call for call in checked
            if call[5].get("method") not in ("tiled", None)
            or (call[4] % 2 and call[2] not in OF_16_BIT_PRODUCTS)
        )  # fmt: skip
    elif kernels == "portable":
        checked = (
            call for call in checked
            if call[5].get("method") not in ("naive", "fused") and call[1] != "float64"
        )  # fmt: skip
    checked = (call for call in checked if re.search(pattern, " ".join(map(str, call))))
    return sorted(checked, key=lambda call: call[1:3])


def sweep(tool: str, kernels: str, pattern: str, part: int, parts: int) -> None:
    """One of `parts` of the calls, each with finite results; prints which kernels they launched."""
    import cupy
    import ml_dtypes  # noqa: F401  names bfloat16 for NumPy
    import numpy as np
    from infonce.kernels.gpu.device import compiler

    import infonce

    rng = np.random.default_rng(0)
    wanted = checked_calls(tool, kernels, pattern)
    mine = slice(part * len(wanted) // parts, (part + 1) * len(wanted) // parts)
    for loss, dtype, precision, rows, d, call_options in wanted[mine]:
        # the last line of a process that was killed tells its call
        print(loss, dtype, precision, rows, d, call_options, flush=True)
        options = dict(call_options)
        sides = {"distill": 4}.get(loss, 1 if loss in ONE_SIDE else 2)
        z = [(rng.standard_normal((rows, d)) / d**0.5).astype(dtype) for _ in range(sides)]
        if not options.get("offload"):
            z = [cupy.asarray(x) for x in z]
        if options.pop("ids", False):
            options["ids"] = cupy.asarray(rng.integers(0, rows, rows))
        if "labels" in options:
            each = [rng.permutation(rows)[: options["labels"]] for _ in range(rows)]
            is_none = rng.random((rows, options["labels"])) < 0.2
            options["labels"] = cupy.asarray(np.where(is_none, -1, each))
        if classes := options.pop("classes", None):
            options["labels"] = cupy.asarray(rng.integers(0, classes, rows))
        if options.pop("groups", False):
            options["groups"] = cupy.arange(rows) % (rows // 2) // 40
        if options.pop("positive_ids", False):
            names = cupy.asarray(rng.integers(0, rows // 2, (2, rows)))
            options["positive_ids"] = names[0] if loss == "clip" else tuple(names)
        if options.pop("guide", False):
            guide = [cupy.asarray(rng.standard_normal((rows, 72)).astype(dtype)) for _ in z]
            options |= {"guide": guide[0] if sides == 1 else tuple(guide), "normalize": True}
        if options.pop("key_bias", False):
            options["key_bias"] = cupy.asarray(rng.standard_normal(rows))
        if many := options.pop("own", 0):
            table = options.pop("table", 0)
            shape = (table, d) if table else (rows, many, d)
            options["own"] = cupy.asarray((rng.standard_normal(shape) / d**0.5).astype(dtype))
            if table:
                indices = rng.integers(-1, table, (rows, many))
                indices[rng.random(indices.shape) < 0.8] = 0
                options["own_indices"] = cupy.asarray(indices)
                options["own_bias"] = cupy.asarray(rng.standard_normal(indices.shape))
        out = getattr(infonce, f"{loss}_loss_and_grad")(
            *z, scale=5.0, precision=precision, **options
        )
        arrays = [out.loss, *(g for g in out.grads if g is not None)]
        assert all(bool(cupy.isfinite(cupy.asarray(g)).all()) for g in arrays), (
            loss, dtype, precision, rows, d, call_options,
        )  # fmt: skip
    steps_over_ranks()
    launched = {name for _, _, name, *_ in compiler._functions}
    print(f"kernels: {' '.join(sorted(launched))}")


def steps_over_ranks() -> None:
    """Launch the other kernels of a plan over ranks: steps on vectors, and sums of other ranks."""
    import cupy
    from infonce.distributed.transports import mailboxes, peers
    from infonce.kernels.epilogues import Sums
    from infonce.kernels.gpu.device.launches import Queue
    from infonce.kernels.gpu.shard import QueuedVectors

    from infonce.checks.call import check
    from infonce.spec import CLIP

    z = cupy.ones((67, 20), "float32")
    problem = check(CLIP, [z, z], None, None, {"scale": 1.0}, False).problem
    vectors = QueuedVectors(problem, Queue())
    own = vectors.shard_positives(5, 67)
    local = vectors.positives_in_block(own, slice(60, 75), 75)
    assert local.tolist() == [-1] * 55 + list(range(12))
    sums = Sums(cupy.zeros(67), cupy.ones(67))
    vectors.merge(sums, Sums(cupy.ones(67), cupy.ones(67)))
    assert cupy.all(sums.max == 1)
    assert cupy.all(sums.sum == 1.5)
    vectors.add(sums.sum, sums.max)
    assert cupy.all(sums.sum == 2.5)
    numbers = cupy.arange(6.0).reshape(3, 2)
    assert vectors.sum_over_ranks(numbers, (2.0, 1.0), "float32").tolist() == [3.0, 9.0]
    out = cupy.empty_like(z)
    vectors.assign(out, z)
    assert cupy.all(out == z)
    vectors.assign(out, z, z)
    assert cupy.all(out == 2 * z)
    mailbox = cupy.zeros(peers.MAILBOX_BYTES + 2**22, "uint8")  # of two ranks that are one
    copies = peers.Copies(0, dict.fromkeys((0, 1), mailbox.data.ptr), mailboxes.Device())
    for _ in range(3):
        arrays, size = [z.data.ptr, out.data.ptr], (z.nbytes,)
        copies.run([peers.Swap(1, size, 1, size)], arrays, cupy.cuda.get_current_stream())
        assert cupy.all(out == z)


def names() -> set[str]:
    """Every kernel there is, by its source."""
    from infonce.kernels.gpu.device import compiler

    text = "".join(path.read_text() for path in compiler.SOURCES.rglob("*.cu*"))
    heads = re.findall(r'extern "C" __global__ void\b(.*?)\{', text, re.S)
    called = (re.findall(r"\b(\w+)\s*\(", head) for head in heads)
    return {next(n for n in words if n != "sizeof" and n[0] != "_") for words in called}


def checked(tool: str, kernels: str, pattern: str, part: int, parts: int) -> dict[str, Any]:
    """One tool over one of `parts` of the calls."""
    environment = os.environ | {"INFONCE_KERNELS": kernels}
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    arguments = [tool, kernels, pattern, str(part), str(parts)]
    sweep_of_part = [sys.executable, __file__, "--sweep", *arguments]
    start = time.perf_counter()
    done = subprocess.run(
        [*sanitizer, *sweep_of_part], env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    launched = re.search(r"^kernels: (.*)$", done.stdout, re.M)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout)
    note = summary[-1] if summary else f"exit status {done.returncode}"
    killed = done.returncode != 0 and launched is None and "Traceback" not in done.stdout
    print(
        f"{tool}, {kernels} kernels, part {part + 1} of {parts}: {note}"
        + killed * ", but the process ended early",
        flush=True,
    )
    if done.returncode:
        print(done.stdout[-6000:], flush=True)
    return {
        "clean": done.returncode == 0 and launched is not None,
        "killed": killed,
        "launched": launched[1].split() if launched else [],
        "seconds": round(time.perf_counter() - start, 1),
    }


def write(path: Path, runs: list[dict[str, Any]], launched: set[str]) -> None:
    """The record of a run so far; runs of other calls that the file has stay there."""
    from infonce.cli import machine

    earlier = json.loads(path.read_text()) if path.exists() else {"runs": [], "kernels": []}
    run_record = {"commit": machine.commit(), "date": machine.now()}
    runs = [run | run_record for run in runs]
    mine = [(run["tool"], run["kernels"], run["matching"]) for run in runs]
    others = [
        run for run in earlier["runs"]
        if (run["tool"], run["kernels"], run["matching"]) not in mine
    ]  # fmt: skip
    kernels = sorted(launched.union(earlier["kernels"]))
    record = {"gpu": machine.gpu(), "kernels": kernels, "runs": others + runs}
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time (default 4)")
    parser.add_argument(
        "--calls", default="", metavar="REGEX",
        help="only calls that match, each as: loss dtype precision rows features options",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="write a record of the run (JSON)")
    parser.add_argument("--sweep", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sweep:
        tool, kernels, pattern, part, parts = arguments.sweep
        sweep(tool, kernels, pattern, int(part), int(parts))
        return 0
    pattern = arguments.calls
    runs, launched, clean = [], set(), True
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for tool, kernels in CHECKED:
            if tool not in arguments.tools or kernels not in arguments.kernels:
                continue
            parts = 2 * arguments.jobs
            check_part = partial(checked, tool, kernels, pattern, parts=parts)
            results = list(pool.map(check_part, range(parts)))
            for part in range(parts):  # side by side they may have lacked memory
                if results[part]["killed"]:
                    results[part] = check_part(part)
            launched |= {name for part in results for name in part["launched"]}
            clean = clean and all(part["clean"] for part in results)
            runs.append({
                "tool": tool, "kernels": kernels, "matching": pattern,
                "calls": len(checked_calls(tool, kernels, pattern)),
                "clean": all(part["clean"] for part in results),
                "seconds": max(part["seconds"] for part in results),
            })  # fmt: skip
            if arguments.output:  # as it grows: a run may be cut off
                write(arguments.output, runs, launched)
    missed = set() if pattern else names() - launched
    if missed:
        print(f"kernels that no call reached: {' '.join(sorted(missed))}")
    print("clean" if clean else "errors were found")
    return int(bool(missed) or not clean)


if __name__ == "__main__":
    sys.exit(main())
