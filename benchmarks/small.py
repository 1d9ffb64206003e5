"""Time calls on the CPU as people meet them: alone, after the caller's own products, and in turns.

    python benchmarks/small.py [--rows 8 32 ...] [--dim 64 256 768] [--threads 2] [--output FILE]

Loss and gradients of float32 unit rows and of the scale, by infonce, infonce.torch (function and
module) and torch's eager loss, beside the bare products. A case has three states:

- alone: calls of one contender, one after another;
- after: before each call, outside of its time, one np.matmul of the caller, whose threads then wait
  busily for about 25 ms;
- turns: before each call, a call of torch's eager loss (of infonce, for torch itself).

The least, the median and the 90th percentile of all calls are recorded. `--threads` limits the
process to so many cores. It takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, DIMS = (8, 32, 128, 256, 512, 1024, 2048), (64, 256, 768)
LARGE = ((1536, 256), (2048, 128), (4096, 128), (8192, 256))  # with `--large`
RESULTS = Path(__file__).resolve().parent / "results"
SCALE = 14.0
PAUSE = 0.05  # seconds before each state, in which threads of the state before fall asleep


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dim", type=int, nargs="+", default=DIMS)
    parser.add_argument("--loss", nargs="+", default=("clip", "nt_xent"))
    parser.add_argument("--contenders", nargs="+", help="default: all")
    parser.add_argument("--normalize", action="store_true", help="normalise the rows")
    parser.add_argument("--large", action="store_true", help=f"clip of {LARGE}")
    parser.add_argument("--threads", type=int, help="cores that the process may use")
    parser.add_argument("--seconds", type=float, default=0.12, help="of each state, at least")
    parser.add_argument("--output", type=Path, help="default: a file of benchmarks/results")
    return parser.parse_args()


ARGS = parse() if __name__ == "__main__" else None
if ARGS is not None and ARGS.threads:  # before libraries count the cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: ARGS.threads])

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from torch.nn import functional  # noqa: E402

import infonce  # noqa: E402
import infonce.torch  # noqa: E402
from infonce import spec  # noqa: E402
from infonce.cli import machine  # noqa: E402
from infonce.cli.bench.contenders_cpu import torch_loss  # noqa: E402
from infonce.cli.common import to_json  # noqa: E402

CORES = len(os.sched_getaffinity(0))
MODULES = {"clip": infonce.torch.CLIPLoss, "nt_xent": infonce.torch.NTXentLoss}
Call = Callable[[], Any]


def contenders(loss: str, rows: int, dim: int, normalize: bool) -> dict[str, Call]:
    """The calls of one case, by name."""
    kind, rng = spec.LOSSES[loss], np.random.default_rng(0)
    z = [rng.standard_normal((rows, dim)) for _ in kind.arguments]
    features = [(x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in z]
    leaves = [torch.tensor(x, requires_grad=True) for x in features]
    scale = torch.tensor(SCALE, requires_grad=True)
    function = getattr(infonce, f"{loss}_loss_and_grad")
    in_torch = getattr(infonce.torch, f"{loss}_loss")
    module = MODULES[loss](normalize=normalize, scale=torch.nn.Parameter(torch.tensor(SCALE)))
    parameters = [*leaves, scale, *module.parameters()]
    y = torch.arange(rows)
    y = ((y + rows // 2) % rows if kind.symmetric else y)[:, None]
    left, right = features[0], features[-1]

    def backward(make_loss: Call) -> Call:
        def run() -> None:
            for leaf in parameters:
                leaf.grad = None
            make_loss().backward()

        return run

    def eager() -> Any:
        unit = [functional.normalize(x) for x in leaves] if normalize else leaves
        return torch_loss(kind, unit[0], unit[-1], scale, y)

    def products() -> None:
        x = left @ right.T
        x @ right
        if not kind.symmetric:
            x.T @ left

    return {
        "products": products,
        "infonce": lambda: function(*features, scale=SCALE, normalize=normalize),
        "infonce.torch": backward(lambda: in_torch(*leaves, scale=scale, normalize=normalize)),
        "module": backward(lambda: module(*leaves)),
        "torch": backward(eager),
    }


def time_calls(run: Call, before: Call | None, seconds: float) -> dict[str, float]:
    """The least, the median and the 90th percentile of the seconds of a call.

    At least seven calls are timed, unless they take more than ten times the `seconds` (then three).
    """
    time.sleep(PAUSE)
    run()
    times: list[float] = []
    start = time.perf_counter()
    while True:
        elapsed = time.perf_counter() - start
        if elapsed > seconds and len(times) >= (3 if elapsed > 10 * seconds else 7):
            break
        if before is not None:
            before()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    times.sort()
    return {"least_s": times[0], "median_s": times[len(times) // 2],
            "p90_s": times[len(times) * 9 // 10]}  # fmt: skip


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(CORES)
    left, right = np.ones((2, 512, 512), np.float32)
    cases = [(loss, rows, dim) for loss in args.loss for rows in args.rows for dim in args.dim]
    if args.large:
        cases = [("clip", *shape) for shape in LARGE]
    results: list[dict[str, Any]] = []
    for loss, rows, dim in track(cases, "cases", console=Console(stderr=True)):
        runs = contenders(loss, rows, dim, args.normalize)
        if args.contenders:
            runs = {name: runs[name] for name in args.contenders}
        case: dict[str, Any] = {"loss": loss, "rows": rows, "dim": dim}
        for name, run in runs.items():
            states: dict[str, Call | None] = {"alone": None, "after": lambda: left @ right}
            other = runs.get("infonce" if name == "torch" else "torch")
            if other is not None:
                states["turns"] = other
            case[name] = {
                state: time_calls(run, before, args.seconds) for state, before in states.items()
            }
        results.append(case)
        summarize(case)
    report = {
        "device": machine.describe_cpu(machine.cpu()), "cores": CORES, "blas": machine.blas(),
        "versions": machine.versions("numpy", "numba", "torch"),
        "environment": machine.environment(),
        "commit": machine.commit(), "date": machine.now(),
        "settings": {"dtype": "float32", "scale": SCALE, "normalize": args.normalize},
        "results": results,
    }  # fmt: skip
    name = f"cpu-{'large' if args.large else 'small'}-{CORES}-cores.json"
    (args.output or RESULTS / name).write_text(to_json(report) + "\n")


def summarize(case: dict[str, Any]) -> None:
    """Print medians in microseconds, and the largest of median / least, p90 / median and median /
    torch's median in the same state."""
    print(f"{case['loss']} {case['rows']} x {case['dim']}:", end="")
    for name in [name for name in case if isinstance(case[name], dict)]:
        states = case[name]
        medians = "/".join(f"{1e6 * of['median_s']:.0f}" for of in states.values())
        ratios = [
            max(of["median_s"] / of["least_s"] for of in states.values()),
            max(of["p90_s"] / of["median_s"] for of in states.values()),
        ]
        if "torch" in case:
            ratios.append(max(of["median_s"] / case["torch"][s]["median_s"]
                              for s, of in states.items()))  # fmt: skip
        print(f"  {name} {medians} ({' '.join(f'{ratio:.2f}' for ratio in ratios)})", end="")
    print(flush=True)


if __name__ == "__main__":
    assert ARGS is not None
    main(ARGS)
    sys.exit()
