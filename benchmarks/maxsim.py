"""Time MaxSim scores, and the CLIP loss over them with gradients, beside other projects on a GPU.

python benchmarks/maxsim.py [--shapes 128x32x128x300 1024x32x1024x300 ...] [--leave-out NAME ...]
    [--output FILE]

A shape is queries x tokens x documents x tokens, of 128 features in bfloat16; an r at its end:
queries have a quarter to all of their tokens, documents a fifth to all. The bare product is
cuBLAS's rate at 8192^3 for the floating-point operations of the valid tokens. Each number is the
time on the device (by events, the host ahead) of one call: least, median and 90th percentile.
Peers: late-interaction-kernels and flash-maxsim (scores by theirs, cross-entropy by PyTorch), and
PyTorch in checkpointed chunks of queries, compiled.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import infonce
from infonce.cli import machine
from infonce.cli.common import to_json

RESULTS = Path(__file__).parent / "results"
SHAPES = (
    "128x32x128x300", "1024x32x1024x300", "1024x32x1024x300r", "256x128x256x1024",
    "4096x32x4096x300",
)  # fmt: skip
D, SCALE = 128, 20.0
CHUNK = 64  # queries of a chunk of PyTorch's


def draw(shape: str) -> tuple[Any, ...]:
    """Queries and documents of unit tokens, and their masks (None: all tokens count)."""
    m, query_tokens, n, key_tokens = map(int, shape.rstrip("r").split("x"))
    generator = torch.Generator("cuda").manual_seed(0)

    def side(rows: int, tokens: int, least: int) -> tuple[Any, Any]:
        z = torch.randn(rows, tokens, D, device="cuda", generator=generator)
        mask = None
        if shape.endswith("r"):
            lengths = torch.randint(
                least, tokens + 1, (rows, 1), device="cuda", generator=generator
            )
            mask = torch.arange(tokens, device="cuda") < lengths
        return F.normalize(z, dim=-1).bfloat16(), mask

    query, query_mask = side(m, query_tokens, max(1, query_tokens // 4))
    key, key_mask = side(n, key_tokens, max(1, key_tokens // 5))
    return query, key, query_mask, key_mask


def clip(scores: Any) -> Any:
    """The CLIP loss of scores, by PyTorch."""
    target = torch.arange(len(scores), device="cuda")
    return (F.cross_entropy(SCALE * scores, target) + F.cross_entropy(SCALE * scores.T, target)) / 2


def torch_scores(query: Any, key: Any, query_mask: Any, key_mask: Any) -> Any:
    """Scores of a chunk of queries: all products of its tokens, then maxima."""
    products = torch.einsum("iad,jbd->ijab", query, key)
    if key_mask is not None:
        products = products.masked_fill(~key_mask[None, :, None], -math.inf)
    maxima = products.amax(-1).float()
    if query_mask is not None:
        maxima = maxima * query_mask[:, None]
    return maxima.sum(-1)


def contenders(
    query: Any, key: Any, query_mask: Any, key_mask: Any
) -> dict[str, Callable[[bool], Any]]:
    """Name -> (with gradients) -> one call."""
    masks = {"query_mask": query_mask, "key_mask": key_mask}

    def ours(with_grad: bool, **options: Any) -> Any:
        if not with_grad:
            return infonce.maxsim_scores(query, key, **masks, **options)
        return infonce.clip_loss_and_grad(
            query, key, scale=SCALE, grad_dtype="float32", **masks, **options
        )

    def by_scores(scores: Callable[[Any, Any], Any]) -> Callable[[bool], Any]:
        def call(with_grad: bool) -> Any:
            if not with_grad:
                with torch.no_grad():
                    return scores(query, key)
            q, k = (z.detach().requires_grad_() for z in (query, key))
            clip(scores(q, k)).backward()
            return q.grad, k.grad

        return call

    compiled = torch.compile(torch_scores)

    def chunks(q: Any, k: Any) -> Any:
        rows = []
        for first in range(0, len(q), CHUNK):
            part = slice(first, first + CHUNK)
            mask = None if query_mask is None else query_mask[part]
            arguments = q[part], k, mask, key_mask
            rows.append(
                checkpoint(compiled, *arguments, use_reentrant=False)
                if q.requires_grad
                else compiled(*arguments)
            )
        return torch.cat(rows)

    calls: dict[str, Callable[[bool], Any]] = {
        "infonce": lambda g: ours(g, workspace="4GiB"),
        "infonce 256 MiB": lambda g: ours(g, workspace="256MiB"),
    }
    try:
        from late_interaction_kernels import maxsim

        calls["late-interaction-kernels"] = by_scores(
            lambda q, k: maxsim(q, k, q_mask=query_mask, d_mask=key_mask)
        )
    except ImportError as error:
        print(f"late-interaction-kernels: {error}")
    try:
        from flash_maxsim import flash_maxsim_batched_train

        lengths = {
            name: None if mask is None else mask.sum(1, dtype=torch.int32)
            for name, mask in (("query_lengths", query_mask), ("doc_lengths", key_mask))
        }
        calls["flash-maxsim"] = by_scores(
            lambda q, k: flash_maxsim_batched_train(q, k, shared_docs=True, **lengths)
        )
    except ImportError as error:
        print(f"flash-maxsim: {error}")
    if len(query) * len(key) <= 2**20:
        calls["torch.compile, chunks"] = by_scores(chunks)
    return calls


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Times on the device, the host ahead."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # some milliseconds, in which the host gets ahead
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--leave-out", nargs="+", default=[], help="contenders that do not run")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "maxsim.json")
    arguments = parser.parse_args()
    side = 8192
    square = torch.randn(side, side, device="cuda").bfloat16()
    rate = 2 * side**3 / np.median(seconds(lambda: square @ square, arguments.repeats))
    rows = []
    for shape in arguments.shapes:
        query, key, query_mask, key_mask = draw(shape)
        valid = [
            z.shape[0] * z.shape[1] if mask is None else int(mask.sum())
            for z, mask in ((query, query_mask), (key, key_mask))
        ]
        bare = 2 * D * math.prod(valid) / rate
        print(f"{shape}: bare {1e3 * bare:.3f} ms at {rate / 1e12:.0f} TFLOP/s", flush=True)
        for name, call in contenders(query, key, query_mask, key_mask).items():
            if name in arguments.leave_out:
                continue
            for with_grad in (False, True):
                row: dict[str, Any] = {"shape": shape, "contender": name, "bare_s": bare,
                                       "gradients": with_grad}  # fmt: skip
                try:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    times = seconds(lambda c=call, g=with_grad: c(g), arguments.repeats)
                    peak = torch.cuda.max_memory_allocated() - before
                    row |= {"least_s": min(times), "median_s": float(np.median(times))}
                    row |= {"p90_s": float(np.quantile(times, 0.9)), "torch_peak_bytes": peak}
                    shown = f"{1e3 * row['median_s']:.3f} ms, {row['median_s'] / bare:.2f} of bare"
                except Exception as error:
                    row["error"] = shown = f"{type(error).__name__}: {error}"[:150]
                    torch.cuda.empty_cache()
                rows.append(row)
                print(f"  {name}, {'gradients' if with_grad else 'scores'}: {shown}", flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": machine.versions("torch", "late-interaction-kernels", "flash-maxsim"),
        "commit": machine.commit(), "date": machine.now(),
        "settings": {"features": D, "dtype": "bfloat16", "scale": SCALE, "chunk": CHUNK},
        "results": rows,
    }  # fmt: skip
    arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
