"""What options of the softmax, sup_con and gte cost, beside the same losses without.

    python benchmarks/options.py [--rows 65536] [--width 512]
    python benchmarks/options.py --cpu [--rows 8192] [--width 256]

Median milliseconds of a loss with its gradients, of unit rows: bfloat16 on a GPU, float32 on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import infonce

REPEATS = {"gpu": 20, "cpu": 5}
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


class GPU:
    name = "gpu"

    def __init__(self) -> None:
        import cupy
        import ml_dtypes

        self.xp, self.dtype = cupy, ml_dtypes.bfloat16

    def milliseconds(self, call: Callable[[], Any]) -> float:
        cuda = self.xp.cuda
        start, end = cuda.Event(), cuda.Event()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(cuda.get_elapsed_time(start, end))


class CPU:
    name, xp, dtype = "cpu", np, np.float32

    def milliseconds(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)


def unit_rows(device: GPU | CPU, rows: int, width: int, seed: int) -> Any:
    z = np.random.default_rng(seed).standard_normal((rows, width), np.float32)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    return device.xp.asarray(z.astype(device.dtype))


def cases(device: GPU | CPU, rows: int, width: int) -> Iterator[tuple[str, str, float]]:
    """(loss, what, milliseconds)."""
    query, key = (unit_rows(device, rows, width, seed) for seed in (0, 1))
    xp = device.xp

    def milliseconds(loss: str, *args: Any, **options: Any) -> float:
        call = partial(getattr(infonce, f"{loss}_loss_and_grad"), *args, scale=50.0, **options)
        times = [device.milliseconds(call) for _ in range(REPEATS[device.name] + 3)]
        return float(np.median(times[3:]))

    for loss in ("clip", "info_nce"):
        for given in OPTIONS:
            options = dict(given)
            if "weights" in options:
                options["weights"] = xp.linspace(0.5, 1.5, rows)
            if "key_bias" in options:
                options["key_bias"] = xp.linspace(-2, 2, rows)
            yield loss, "-".join(given) or "plain", milliseconds(loss, query, key, **options)
    yield "nt_xent", "plain", milliseconds("nt_xent", query)
    labels = xp.arange(rows) % 1000
    yield "sup_con", "1000 classes", milliseconds("sup_con", query, labels)
    half = rows // 2
    yield "gte", f"{half} pairs", milliseconds("gte", query[:half], key[:half])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--width", type=int)
    given = parser.parse_args()
    device = CPU() if given.cpu else GPU()
    rows, width = given.rows or (8192 if given.cpu else 65536), given.width or 512 >> given.cpu
    print(f"{rows} x {width}, {device.name}")
    plain = 0.0
    for loss, what, median in cases(device, rows, width):
        plain = median if what == "plain" else plain
        beside = f"{median / plain:8.2f}" if loss in ("clip", "info_nce") else ""
        print(f"{loss:10}{what:32}{median:10.3f} ms{beside}", flush=True)


if __name__ == "__main__":
    main()
