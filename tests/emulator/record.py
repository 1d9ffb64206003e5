"""Thirty calls of the library on the emulator, to be compared with the same calls on a GPU.

    python tests/emulator/record.py --write benchmarks/results/emulated-calls.json
    python tests/emulator/record.py --gpu --compare benchmarks/results/emulated-calls.json

Inputs follow from a seed. For each array that a call returns, the record has a digest of its bits,
its norm, and SIGNS sums of its elements with random signs. The mean square of the differences of
two records' sums estimates the square of the norm of the difference of the arrays, which are not
stored. `--compare` prints the relative difference of each array, and exits with 1 if one is larger
than the error bounds of both sides allow.
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

SIGNS = 16  # sums with random signs, for each array
SCALE = 14.3
# The estimate of a squared norm, relative to the true one: 1 + four standard deviations of the mean
# of SIGNS squares
SPREAD = 1 + 4 * (2 / SIGNS) ** 0.5


@dataclass(frozen=True)
class Call:
    """A call of `X_loss_and_grad`, X being the loss."""

    loss: str
    shape: tuple[int, int, int]  # M, N, D
    dtype: str  # of the features
    options: dict[str, Any] = field(default_factory=dict)  # that are no arrays
    arrays: tuple[str, ...] = ()  # names of options that are arrays; "sets": labels that are sets

    @property
    def name(self) -> str:
        arguments = ", ".join([f"{k}={v}" for k, v in self.options.items()] + list(self.arrays))
        return f"{self.loss} {'x'.join(map(str, self.shape))} {self.dtype} {arguments}".strip()


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


def make_inputs(call: Call) -> tuple[list[np.ndarray], dict[str, Any]]:
    """(features: unit rows, queries near their keys; options of the call).

    The seed is the place of the call in `CALLS`: a new call belongs at the end.
    """
    m, n, d = call.shape
    rng = np.random.default_rng(CALLS.index(call))
    z = [rng.standard_normal((rows, d)) / d**0.5 for rows in (m, n)]
    z[1][: min(m, n)] += z[0][: min(m, n)]
    dtype = np.dtype(getattr(ml_dtypes, call.dtype, call.dtype))
    features = [(x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype) for x in z]
    if call.loss in ("nt_xent", "sup_con"):
        features = [np.concatenate(features)]
    rows, columns = len(features[0]), len(features[-1])
    inputs: dict[str, Any] = {
        "ids": rng.integers(0, rows // 2, rows), "weights": rng.random(rows),
        "key_bias": rng.standard_normal(columns), "labels": rng.integers(0, columns, rows),
        "sets": np.where(rng.random((rows, 3)) < 0.6, rng.integers(0, columns, (rows, 3)), -1),
    }  # fmt: skip
    if call.loss == "sup_con":
        inputs["labels"] = rng.integers(0, 20, rows)
    options = {"scale": SCALE, **call.options, **{name: inputs[name] for name in call.arrays}}
    return features, options


def run_call(call: Call, xp: Any) -> dict[str, np.ndarray]:
    """Make the call on arrays of `xp` (CuPy, or its stand-in). Returns NumPy arrays by name."""
    features, options = make_inputs(call)
    if not call.options.get("offload"):
        features = [xp.asarray(z) for z in features]
        options = {k: xp.asarray(v) if k in call.arrays else v for k, v in options.items()}
    labels = [options.pop(name) for name in ("labels", "sets") if name in options]
    out = getattr(infonce, f"{call.loss}_loss_and_grad")(*features, *labels, **options)
    lses = out.lse if isinstance(out.lse, tuple) else (out.lse,)
    outputs = {"loss": out.loss, **{f"lse[{i}]": lse for i, lse in enumerate(lses)}}
    outputs |= {f"d {name}": g for name, g in out.grads._asdict().items()}
    return {name: xp.asnumpy(z) for name, z in outputs.items() if z is not None}


def describe(array: np.ndarray) -> dict[str, Any]:
    """The entry of an array in a record: digest, norm and sums with random signs."""
    wide = array.astype(np.float64).ravel()
    signs = np.random.default_rng(wide.size).integers(0, 2, (SIGNS, wide.size)) * 2 - 1
    return {
        "digest": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16],
        "norm": float(np.linalg.norm(wide)), "sums": (signs @ wide).tolist(),
    }  # fmt: skip


def record(xp: Any, device: str) -> dict[str, Any]:
    """Make all calls. Returns the record; `device` is the name that it states."""
    rows = []
    for call in CALLS:
        print(call.name, file=sys.stderr)
        outputs = {name: describe(z) for name, z in run_call(call, xp).items()}
        rows.append({"call": call.name, "outputs": outputs})
    return {
        "device": device, "versions": machine.versions("infonce", "numpy"),
        "commit": machine.commit(), "date": machine.now(), "results": rows,
    }  # fmt: skip


def error_bound(name: str, dtype: str, precision: str) -> float:
    """The largest estimated difference of two results, relative to their norm.

    Each is within the bound of judge.py of the float64 result, so they are within twice that bound
    of each other, and the estimate of the square within SPREAD times its square. (The gradient of
    the scale has the bound of other gradients.)
    """
    if name.startswith(("loss", "lse")):
        single_bound = max(LOSS_BOUND[dtype], {"tf32": 1e-4, "bf16x3": 1e-5}.get(precision, 0.0))
    else:
        single_bound = max(GRAD_BOUND[dtype], {"tf32": 2e-3, "bf16x3": 1e-4}.get(precision, 0.0))
    return 2 * single_bound * SPREAD**0.5


class Comparison(NamedTuple):
    text: str  # the relative difference of each array
    too_far: bool  # whether one is larger than its bound


def compare(call: Call, row: dict[str, Any], known: dict[str, Any]) -> Comparison:
    """Compare the row of a call with the row of the same call in the record `known`."""
    others = {each["call"]: each["outputs"] for each in known["results"]}.get(row["call"])
    if others is None:
        return Comparison("is not in the record", True)
    parts, too_far = [], row["outputs"].keys() != others.keys()
    for name in row["outputs"].keys() & others.keys():
        got, want = row["outputs"][name], others[name]
        if got["digest"] == want["digest"]:
            parts.append(f"{name} same bits")
            continue
        gap = np.sqrt(np.mean(np.square(np.subtract(got["sums"], want["sums"]))))
        share = float(gap) / max(want["norm"], 1e-300)
        too_far |= not share <= error_bound(name, call.dtype, call.options.get("precision", ""))
        parts.append(f"{name} {share:.1e}")
    return Comparison(", ".join(sorted(parts)), too_far)


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
    recording = record(cupy, device)
    if options.write:
        options.write.write_text(json.dumps(recording, indent=1) + "\n")
    if options.compare:
        known = json.loads(options.compare.read_text())
        comparisons = [
            compare(*pair, known) for pair in zip(CALLS, recording["results"], strict=True)
        ]
        for call, comparison in zip(CALLS, comparisons, strict=True):
            print(f"{'TOO FAR: ' if comparison.too_far else ''}{call.name}: {comparison.text}")
        sys.exit(any(comparison.too_far for comparison in comparisons))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
