"""Calls that come to every synchronisation of the CUDA kernels.

    python tests/emulator/synchronisation/calls.py [NAME ...] [--seed 3]

The calls run with `engine.WATCHES_ORDER`: two lanes of a warp that use the same bytes without a
synchronisation in between end a call with an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

# Public functions: loss, dtype, rows, features, options. Device 2 has the portable kernels alone
TILED: dict[str, Any] = {"method": "tiled"}
PORTABLE = TILED | {"device": 2}
CALLS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "naive": ("clip", "float32", 70, 40, {"method": "naive", "normalize": True}),
    "naive sigmoid": ("siglip", "float64", 40, 20, {"method": "naive"}),
    "fused": ("clip", "float32", 130, 72, {"method": "fused", "normalize": True}),
    "fused, few rows": ("clip", "float32", 6, 72, {"method": "fused", "normalize": True}),
    "fused, many rows": ("clip", "float32", 400, 20, {"method": "fused"}),
    "fused, few keys": ("info_nce", "float32", 14, 72, {"method": "fused", "keys": 6, "labels": 6}),
    "fused, features in parts": ("info_nce", "float32", 100, 600, {
        "method": "fused", "keys": 20, "labels": 20}),
    "fused, fewer queries": ("info_nce", "float32", 6, 72, {"method": "fused", "keys": 14}),
    "tiled fp64": ("nt_xent", "float64", 300, 72, PORTABLE | {"normalize": True, "ids": True}),
    "tiled sigmoid": ("siglip", "bfloat16", 700, 72, PORTABLE),
    "tiled, one slice": ("clip", "bfloat16", 300, 40, PORTABLE | {"normalize": True, "ids": True}),
    "tiled limits": ("clip", "float32", 300, 72, PORTABLE | {"false_negative_margin": 0.1}),
    "tiled, logits far apart": ("clip", "bfloat16", 300, 72, PORTABLE | {"scale": 3000.0}),
    "sweep of all options": ("nt_xent", "bfloat16", 700, 256, TILED | {
        "normalize": True, "ids": True, "key_bias": True, "false_negative_margin": 0.1}),
    "sweep, logits far apart": ("clip", "bfloat16", 400, 256, TILED | {"scale": 3000.0}),
    "sweep, odd tiles": ("clip", "bfloat16", 1152, 256, TILED),
    "sweep, one tile of keys": ("info_nce", "bfloat16", 1100, 256, TILED | {
        "keys": 100, "labels": 100}),
    "one pass, logits far apart": ("info_nce", "bfloat16", 400, 384, TILED | {"scale": 3000.0}),
    "one pass, rising logits": ("info_nce", "bfloat16", 300, 40, TILED | {
        "keys": 700, "wrt": ("query",), "workspace": 216_000, "scale": 200.0, "rising": True}),
    "wide parts": ("clip", "float32", 300, 1152, TILED | {"precision": "bf16x3"}),
    "wide, logits far apart": ("clip", "bfloat16", 300, 1152, TILED | {"scale": 3000.0}),
    "kept, logits far apart": ("clip", "bfloat16", 512, 1152, TILED | {"scale": 400.0}),
    "kept, all logits high": ("clip", "bfloat16", 512, 1152, TILED | {"scale": 25.0, "shift": 2}),
    "kept parts": ("clip", "float32", 512, 1152, TILED | {"scale": 60.0}),
    "narrow triangle": ("nt_xent", "bfloat16", 900, 60, TILED),
    "narrow, two slices": ("nt_xent", "bfloat16", 900, 128, TILED),
    "sigmoid of positive ids": ("siglip", "bfloat16", 300, 256, TILED | {"positive_ids": True}),
    "guide": ("clip", "bfloat16", 300, 72, TILED | {"guide": True}),
    "hardness": ("clip", "float32", 70, 40, TILED | {"hardness": 0.5, "metrics": True}),
    "gte": ("gte", "float32", 70, 40, TILED | {"ids": True}),
    "sets": ("info_nce", "float32", 300, 40, TILED | {"keys": 200, "labels": 200, "sets": 3}),
    "offload": ("info_nce", "float32", 300, 64, {
        "keys": 200, "labels": 200, "offload": True, "workspace": 2**19}),
    "decoupled": ("nt_xent", "bfloat16", 300, 40, TILED | {"decoupled": True, "margin": 0.1}),
    "classes": ("sup_con", "float32", 1500, 20, {"classes": 90}),
    "classes of pairs": ("lit", "float32", 300, 40, TILED | {"positive_ids": True}),
    "smoothing": ("clip", "float32", 300, 40, TILED | {"label_smoothing": 0.1}),
}  # fmt: skip
SWAP, ONE_TILE = "swap of two ranks", "a rank's block of one tile of keys"


def run(name: str, seed: int) -> list[bytes]:
    """The bytes of a call's results."""
    import cupy
    import engine
    import ml_dtypes  # noqa: F401  names bfloat16 for NumPy
    import numpy as np
    import two_ranks

    import infonce

    if name == SWAP:
        return [two_ranks.swap_arrays(seed)]
    if name == ONE_TILE:
        with engine.schedule(seed):
            return sums_of_a_rank(1100, 100, 256)
    loss, dtype, rows, d, call_options = CALLS[name]
    rng, options = np.random.default_rng(0), {"scale": 10.0, **call_options}
    with cupy.cuda.Device(options.pop("device", 0)), engine.schedule(seed):
        sides = 1 if loss in ("nt_xent", "sup_con") else 2
        shift = options.pop("shift", 0)  # of all features: the length of what rows have in common
        sizes = [rows, options.pop("keys", rows)][:sides]
        z = [(rng.standard_normal((n, d)) + shift) / d**0.5 for n in sizes]
        if options.pop("rising", False):  # from key to key, for every other row
            along, common = np.linspace(-1, 5, len(z[1]))[:, None], z[0][0].copy()
            z = [0.3 * z[0] + common, 0.1 * z[1] + along * common]
            z[0][::2] *= 0.01
        asarray = np.asarray if options.get("offload") else cupy.asarray
        z = [asarray(x.astype(dtype)) for x in z]
        if options.pop("ids", False):
            options["ids"] = asarray(rng.integers(0, rows, rows))
        if keys := options.pop("labels", None):
            options["labels"] = asarray(rng.integers(0, keys, rows))
        if size := options.pop("sets", None):
            options["labels"] = asarray(
                rng.integers(0, keys // size, (rows, 1)) * size + np.arange(size)
            )
        if classes := options.pop("classes", None):
            options["labels"] = asarray(rng.integers(0, classes, rows))
        if options.pop("positive_ids", False):
            options["positive_ids"] = tuple(asarray(rng.integers(0, rows, (2, rows))))
        if options.pop("guide", False):
            options["guide"] = tuple(asarray(rng.standard_normal((2, rows, 40)).astype(dtype)))
        if options.pop("key_bias", False):
            options["key_bias"] = asarray(rng.standard_normal(rows))
        out = getattr(infonce, f"{loss}_loss_and_grad")(*z, **options)
        results = [out.loss, *(g for g in out.grads if g is not None)]
        if out.metrics is not None:
            results += [x for x in vars(out.metrics).values() if x is not None]
        return [cupy.asnumpy(cupy.asarray(x)).tobytes() for x in results]


def sums_of_a_rank(m: int, n: int, d: int) -> list[bytes]:
    """The sums of rows and of columns that a rank gets from one block of clip."""
    import cupy
    import numpy as np
    from infonce.kernels.gpu import shard
    from infonce.kernels.problem import Problem

    rng = np.random.default_rng(0)
    query, key = (
        cupy.asarray((rng.standard_normal((rows, d)) / d**0.5).astype("bfloat16"))
        for rows in (m, n)
    )
    problem = Problem(
        query, key, 8.0, 1 / m, cupy.arange(m) * 7 % n, compute_precision="bf16",
        row_direction_weight=0.5, column_direction_weight=0.5,
    )  # fmt: skip
    problem, statistics = shard.VectorsOverRanks().statistics(problem)
    shard.run_block_pass(problem, False, statistics, None)
    sides = statistics.rows, statistics.columns
    return [cupy.asnumpy(x).tobytes() for side in sides for x in (side.max, side.sum)]


def use_emulator() -> None:
    """Make `import cupy` import the stand-in."""
    emulator = Path(__file__).parents[1]
    sys.path[:0] = [str(emulator / "stand_in"), str(emulator)]
    import ctypes_libraries

    ctypes_libraries.install()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of calls; default: all")
    parser.add_argument("--seed", type=int, default=3, help="the schedule (default 3)")
    arguments = parser.parse_args()
    use_emulator()
    import engine

    engine.WATCHES_ORDER = True
    errors = 0
    for name in arguments.names or [*CALLS, ONE_TILE]:
        try:
            run(name, arguments.seed)
        except engine.KernelError as error:
            print(f"{name}: {error}", flush=True)
            errors += 1
        else:
            print(f"{name}: in order", flush=True)
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
