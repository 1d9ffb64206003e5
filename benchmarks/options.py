"""What options of the softmax, sup_con and gte cost on a GPU, beside the same losses without.

    python benchmarks/options.py [--rows 65536] [--width 512]

Median milliseconds of a loss with its gradients, bfloat16 unit rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import infonce

REPEATS = 20
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weights": True},
    {"margin": 0.1},
    {"hardness": 2.0},
    {"decoupled": True},
    {"label_smoothing": 0.1},
    {"key_bias": True},
    {"false_negative_margin": 0.1},
    {"key_bias": True, "false_negative_margin": 0.1},
]


def unit_rows(rows: int, width: int) -> Any:
    z = cupy.random.default_rng(0).standard_normal((rows, width), dtype=cupy.float32)
    z /= cupy.linalg.norm(z, axis=1, keepdims=True)
    return cupy.asarray(z.get().astype(ml_dtypes.bfloat16))


def milliseconds(loss: str, *args: Any, **options: Any) -> float:
    function = getattr(infonce, f"{loss}_loss_and_grad")
    times = []
    for _ in range(REPEATS + 3):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        function(*args, scale=50.0, **options)
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return float(np.median(times[3:]))


def cases(rows: int, width: int) -> Iterator[tuple[str, str, float]]:
    """(loss, what, milliseconds)."""
    query, key = unit_rows(rows, width), unit_rows(rows, width)
    for loss in ("clip", "info_nce"):
        for given in OPTIONS:
            options = dict(given)
            if "weights" in options:
                options["weights"] = cupy.linspace(0.5, 1.5, rows)
            if "key_bias" in options:
                options["key_bias"] = cupy.linspace(-2, 2, rows)
            yield loss, "-".join(given) or "plain", milliseconds(loss, query, key, **options)
    yield "nt_xent", "plain", milliseconds("nt_xent", query)
    labels = cupy.arange(rows) % 1000
    yield "sup_con", "1000 classes", milliseconds("sup_con", query, labels)
    half = rows // 2
    yield "gte", f"{half} pairs", milliseconds("gte", query[:half], key[:half])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    print(f"{given.rows} x {given.width}, {cupy.cuda.runtime.getDeviceProperties(0)['name']!r}")
    for loss, what, time in cases(given.rows, given.width):
        print(f"{loss:10}{what:20}{time:10.3f} ms", flush=True)


if __name__ == "__main__":
    main()
