"""Thirty calls of the library on the emulator, to be compared with the same calls on a GPU.

    python tests/emulator/record.py --write benchmarks/results/emulated-calls.json
    python tests/emulator/record.py --gpu --compare benchmarks/results/emulated-calls.json

Inputs follow from a seed. Of every array that a call returns, the record holds a digest of its
bits, its norm, and sums of its elements with random signs: the mean square of the differences of
such sums is, on average, the square of the difference of the arrays. `--compare` says for each call
how far the results are apart, and exits with 1 if that is more than both sides may be off by.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from judge import GRAD_BOUND, LOSS_BOUND  # noqa: E402

import infonce  # noqa: E402
from infonce.cli import machine  # noqa: E402

SIGNS = 16  # sums with random signs, of every array
SCALE = 14.3
# Of the float64 result, both sides are within a bound of judge.py; by that of float32, the gradient
# of the scale; four standard deviations of the mean of `SIGNS` squares
SPREAD = 1 + 4 * (2 / SIGNS) ** 0.5


@dataclass(frozen=True)
class Call:
    loss: str
    shape: tuple[int, int, int]  # M, N, D
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()  # options that are arrays

    @property
    def name(self) -> str:
        given = ", ".join([f"{k}={v}" for k, v in self.options.items()] + list(self.arrays))
        return f"{self.loss} {'x'.join(map(str, self.shape))} {self.dtype} {given}".strip()


def _tiled(**options: Any) -> dict[str, Any]:
    return {"method": "tiled", **options}


CALLS = [
    # every method
    Call("clip", (70, 70, 24), "float32", {"method": "naive"}),
    Call("siglip", (70, 70, 24), "float64", {"method": "naive"}),
    Call("clip", (150, 150, 40), "float32", {"method": "fused"}),
    Call("nt_xent", (90, 90, 33), "bfloat16", {"method": "fused"}),
    Call("siglip", (130, 130, 64), "float16", {"method": "fused", "normalize": True}),
    # tiles and sweeps, in every precision
    Call("clip", (300, 300, 72), "float64", _tiled()),
    Call("clip", (300, 300, 72), "float32", _tiled()),
    Call("clip", (300, 300, 72), "float32", _tiled(precision="tf32")),
    Call("clip", (300, 300, 72), "float32", _tiled(precision="bf16x3")),
    Call("clip", (300, 300, 128), "bfloat16", _tiled()),
    Call("clip", (257, 257, 512), "float16", _tiled()),
    Call("clip", (300, 300, 1152), "bfloat16", _tiled()),
    Call("nt_xent", (300, 300, 64), "bfloat16", _tiled()),  # narrow: dL/dx in registers
    Call("nt_xent", (300, 300, 600), "float16", _tiled()),
    Call("siglip", (300, 300, 128), "bfloat16", _tiled()),
    Call("siglip", (300, 300, 64), "float64", _tiled()),
    Call("lit", (300, 300, 96), "bfloat16", _tiled()),  # one pass
    Call("info_nce", (200, 600, 96), "bfloat16", _tiled()),
    Call("info_nce", (200, 600, 1000), "bfloat16", _tiled(wrt=("query",))),
    Call("clip", (600, 600, 128), "bfloat16", _tiled(workspace=2**20)),
    # options
    Call("clip", (300, 300, 64), "bfloat16", _tiled(normalize=True), ("ids",)),
    Call("clip", (300, 300, 64), "float32", _tiled(margin=0.2, hardness=2.0)),
    Call("clip", (300, 300, 64), "bfloat16", _tiled(label_smoothing=0.1), ("weights",)),
    Call("info_nce", (200, 300, 64), "float32", _tiled(), ("labels", "key_bias")),
    Call("info_nce", (200, 300, 64), "bfloat16", _tiled(), ("sets",)),
    Call("nt_xent", (150, 150, 64), "float32", _tiled(false_negative_margin=0.1)),
    Call("sup_con", (150, 150, 64), "bfloat16", _tiled(), ("labels",)),
    Call("gte", (150, 150, 64), "bfloat16", _tiled(label_smoothing=0.1)),
    # from the host
    Call("clip", (300, 300, 64), "bfloat16", {"offload": True, "workspace": 2**19}),
    Call("info_nce", (300, 500, 64), "float32", {"offload": True, "workspace": 2**19}),
]


def inputs(call: Call) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Features of length 1, queries near their keys; and options."""
    m, n, d = call.shape
    rng = np.random.default_rng(CALLS.index(call))
    z = [rng.standard_normal((rows, d)) / d**0.5 for rows in (m, n)]
    z[1][: min(m, n)] += z[0][: min(m, n)]
    dtype = np.dtype(getattr(ml_dtypes, call.dtype, call.dtype))
    features = [(x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype) for x in z]
    if call.loss in ("nt_xent", "sup_con"):
        features = [np.concatenate(features)]
    rows, columns = len(features[0]), len(features[-1])
    made: dict[str, Any] = {
        "ids": rng.integers(0, rows // 2, rows), "weights": rng.random(rows),
        "key_bias": rng.standard_normal(columns), "labels": rng.integers(0, columns, rows),
        "sets": np.where(rng.random((rows, 3)) < 0.6, rng.integers(0, columns, (rows, 3)), -1),
    }  # fmt: skip
    if call.loss == "sup_con":
        made["labels"] = rng.integers(0, 20, rows)
    given = {"scale": SCALE, **call.options, **{name: made[name] for name in call.arrays}}
    return features, given


def results(call: Call, xp: Any) -> dict[str, np.ndarray]:
    """What the call returns, by name, on the host."""
    features, options = inputs(call)
    if not call.options.get("offload"):
        features = [xp.asarray(z) for z in features]
        options = {k: xp.asarray(v) if k in call.arrays else v for k, v in options.items()}
    labels = [options.pop(name) for name in ("labels", "sets") if name in options]
    out = getattr(infonce, f"{call.loss}_loss_and_grad")(*features, *labels, **options)
    lses = out.lse if isinstance(out.lse, tuple) else (out.lse,)
    found = {"loss": out.loss, **{f"lse[{i}]": lse for i, lse in enumerate(lses)}}
    found |= {f"d {name}": g for name, g in out.grads._asdict().items()}
    return {name: xp.asnumpy(z) for name, z in found.items() if z is not None}


def described(array: np.ndarray) -> dict[str, Any]:
    wide = array.astype(np.float64).ravel()
    signs = np.random.default_rng(wide.size).integers(0, 2, (SIGNS, wide.size)) * 2 - 1
    return {
        "digest": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16],
        "norm": float(np.linalg.norm(wide)), "sums": (signs @ wide).tolist(),
    }  # fmt: skip


def record(xp: Any, device: str) -> dict[str, Any]:
    rows = []
    for call in CALLS:
        print(call.name, file=sys.stderr)
        outputs = {name: described(z) for name, z in results(call, xp).items()}
        rows.append({"call": call.name, "outputs": outputs})
    return {
        "device": device, "versions": machine.versions("infonce", "numpy"),
        "commit": machine.commit(), "date": machine.now(), "results": rows,
    }  # fmt: skip


def bound(name: str, dtype: str, precision: str) -> float:
    """How far two results may be apart, as a share of their norm."""
    if name.startswith(("loss", "lse")):
        single_bound = max(LOSS_BOUND[dtype], {"tf32": 1e-4, "bf16x3": 1e-5}.get(precision, 0.0))
    else:
        single_bound = max(GRAD_BOUND[dtype], {"tf32": 2e-3, "bf16x3": 1e-4}.get(precision, 0.0))
    return 2 * single_bound * SPREAD**0.5


class Told(NamedTuple):
    text: str  # how far the results are apart
    too_far: bool


def compared(call: Call, row: dict[str, Any], known: dict[str, Any]) -> Told:
    """A call's row beside that of a record."""
    others = {of["call"]: of["outputs"] for of in known["results"]}.get(row["call"])
    if others is None:
        return Told("is not in the record", True)
    parts, too_far = [], row["outputs"].keys() != others.keys()
    for name in row["outputs"].keys() & others.keys():
        got, want = row["outputs"][name], others[name]
        if got["digest"] == want["digest"]:
            parts.append(f"{name} same bits")
            continue
        gap = np.sqrt(np.mean(np.square(np.subtract(got["sums"], want["sums"]))))
        share = float(gap) / max(want["norm"], 1e-300)
        too_far |= not share <= bound(name, call.dtype, call.options.get("precision", ""))
        parts.append(f"{name} {share:.1e}")
    return Told(", ".join(sorted(parts)), too_far)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpu", action="store_true", help="on the current GPU, by CuPy")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    if options.gpu:
        import cupy

        device = str(machine.gpu()["model"])
    else:
        import emulation

        emulation.begin()
        import cupy

        device = "emulator of kernels on the host"
    made = record(cupy, device)
    if options.write:
        options.write.write_text(json.dumps(made, indent=1) + "\n")
    if options.compare:
        known = json.loads(options.compare.read_text())
        told = [compared(*pair, known) for pair in zip(CALLS, made["results"], strict=True)]
        for call, of in zip(CALLS, told, strict=True):
            print(f"{'TOO FAR: ' if of.too_far else ''}{call.name}: {of.text}")
        sys.exit(any(of.too_far for of in told))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
