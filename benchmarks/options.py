"""Time options of the softmax and of siglip, sup_con and gte, beside the same losses without.

    python benchmarks/options.py [--cpu] [--rows 65536] [--dim 512] [--rounds 7]
        [--only REGEX] [--output benchmarks/results/options.json]

Loss and gradients of random unit rows: bfloat16 on the current GPU, float32 on the CPU (8192 rows
of 256 by default). All take turns in each round, in another order each time: a GPU's clock is lower
after long calls that need much power, and a fixed order would lower it for the same options in each
round. On a GPU, calls of more than LONG seconds take part in the first round only. A ratio is the
median over rounds of those to the plain loss of the same size in the same round. nt_xent of all
rows is the plain loss of sup_con, and of gte with half as many pairs. siglip of fewer images than
texts has no plain loss, and so no ratio. On a GPU, own negatives have sizes of their own, and stand
beside PyTorch's loss of the full matrix, eager and compiled, and beside sentence-transformers'
CachedMultipleNegativesRankingLoss, which compares each query with the own negatives of all.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.progress import track

import infonce
from infonce import arrays, spec
from infonce.cli import machine
from infonce.cli.bench.cpu import Host
from infonce.cli.bench.gpu import Device
from infonce.cli.bench.measure import Case
from infonce.cli.common import to_json

RESULTS = Path(__file__).resolve().parent / "results"
SCALE = 50.0
GROUPS = 8
CLASSES = 1000  # of `positive_ids`
POSITIVES = 4  # labels of a row
PREFIXES = 5  # of twice as many features
LONG = 0.25  # seconds
PLAIN = {"sup_con": "nt_xent", "gte": "nt_xent"}  # losses whose plain loss is another one
OPTIONS: dict[str, dict[str, Any]] = {
    "margin": {"margin": 0.1},
    "hardness": {"hardness": 2.0},
    "decoupled": {"decoupled": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "false_negative_margin": {"false_negative_margin": 0.1},
}
# rows, features and dtype of calls with own negatives on a GPU, and their numbers a row
OWN = (
    (16384, 512, "bfloat16", (4, 16)),
    (4096, 256, "float32", (8,)),
    (1024, 128, "bfloat16", (100,)),
)
TABLE_ROWS = 100_000  # of the table that has own negatives by index
POPULARITY = 1.1  # exponent of Zipf's law, by which a few rows of the table have most uses
Run = Callable[[], Any]


def cases(bench: Any, dtype: str, rows: int, dim: int) -> dict[tuple[str, str], Run]:
    """(loss and its size, options) -> the call; "plain" is the same loss of the same size, without.

    The size is left out if it is `rows` and `dim`.
    """
    query, key = bench.inputs(Case(spec.CLIP, rows, dim, dtype))[0]
    xp = arrays.namespace(query)
    vectors = {
        "weights": {"weights": xp.linspace(0.5, 1.5, rows)},
        "key_bias": {"key_bias": xp.linspace(-2.0, 2.0, rows)},
        f"positive_ids ({CLASSES} classes)": {"positive_ids": xp.arange(rows) % CLASSES},
        f"groups ({GROUPS}, sorted)": {"groups": np.arange(rows) * GROUPS // rows},
    }

    def call(loss: str, *args: Any, **options: Any) -> Run:
        function = getattr(infonce, f"{loss}_loss_and_grad")
        return lambda: function(*args, scale=SCALE, **options)

    results = {}
    both = vectors["key_bias"] | OPTIONS["false_negative_margin"]
    option_sets = {"plain": {}, **vectors, **OPTIONS, "key_bias-false_negative_margin": both}
    for loss in ("clip", "info_nce"):
        for name, options in option_sets.items():
            results[loss, name] = call(loss, query, key, **options)
    rng = np.random.default_rng(0)
    labels = xp.asarray(rng.integers(0, rows, (rows, POSITIVES)))
    results["info_nce", f"{POSITIVES} labels a row"] = call("info_nce", query, key, labels=labels)
    results["info_nce", f"{POSITIVES} weighted labels a row"] = call(
        "info_nce", query, key, labels=labels, label_weights=xp.asarray(rng.random(labels.shape))
    )
    teacher = bench.inputs(Case(spec.CLIP, rows, dim, dtype))[0]
    for loss in ("clip", "info_nce"):
        results[loss, "guide"] = call(loss, query, key, guide=tuple(teacher))
    results["clip", "distillation"] = call("distill", query, key, *teacher)
    results["siglip", "plain"] = call("siglip", query, key)
    images = np.arange(rows // 4), np.arange(rows) % (rows // 4)
    placed = tuple(map(xp.asarray, images))
    fewer = rows // 4
    several = call("siglip", query[:fewer], key, positive_ids=placed)
    results[f"siglip of {fewer} images", "4 captions an image"] = several
    results["siglip", f"{rows} pairs by positive_ids"] = call(
        "siglip", query, key, positive_ids=xp.arange(rows)
    )
    half = rows // 2
    dims = dim // 4, dim // 2, dim
    results["clip", f"dims {dims}"] = call("clip", query, key, dims=dims)
    for d in dims[:-1]:
        results[f"clip x {d}", "plain"] = call("clip", query[:, :d], key[:, :d])
    wide = bench.inputs(Case(spec.CLIP, rows, 2 * dim, dtype))[0]
    prefixes = tuple(2 * dim >> i for i in reversed(range(PREFIXES)))
    results[f"clip x {2 * dim}", "plain"] = call("clip", *wide)
    results[f"clip x {2 * dim}", f"dims {prefixes}"] = call("clip", *wide, dims=prefixes)
    on_gpu = isinstance(bench, Device)
    for m, d, own_dtype, counts in OWN if on_gpu else ((fewer, dim, dtype, (4,)),):
        pairs = bench.inputs(Case(spec.CLIP, m, d, own_dtype))[0]
        name = f"info_nce {m} x {d}"
        results[name, "plain"] = call("info_nce", *pairs)
        for k in counts:
            (mined, _), *_ = bench.inputs(Case(spec.CLIP, m * k, d, own_dtype))
            mined = mined.reshape(m, k, d)
            results[name, f"{k} own"] = call("info_nce", *pairs, own=mined)
            (table, _), *_ = bench.inputs(Case(spec.CLIP, TABLE_ROWS, d, own_dtype))
            rng = np.random.default_rng(0)
            for law, drawn in (
                ("", rng.integers(0, TABLE_ROWS, (m, k))),
                (", popular", rng.zipf(POPULARITY, (m, k)) % TABLE_ROWS),
            ):
                results[name, f"{k} own of a table{law}"] = call(
                    "info_nce", *pairs, own=table, own_indices=xp.asarray(drawn)
                )
            if on_gpu:
                for peer, make in PEERS.items():
                    results[name, f"{k} own, {peer}"] = make(*pairs, mined)
    results["nt_xent", "plain"] = call("nt_xent", query)
    results["sup_con", f"{CLASSES} classes"] = call("sup_con", query, xp.arange(rows) % CLASSES)
    results["gte", f"{half} pairs"] = call("gte", query[:half], key[:half])
    return results


def eager_own(*features: Any, compiled: bool = False) -> Run:
    """The loss of queries, keys and own negatives, and its gradients, by PyTorch: the full matrix,
    beside the products with own negatives."""
    import torch

    leaves = [torch.from_dlpack(z).clone().requires_grad_() for z in features]
    labels = torch.arange(len(leaves[0]), device=leaves[0].device)

    def evaluate(query: Any, key: Any, own: Any) -> Any:
        products = torch.einsum("id,ikd->ik", query, own)
        logits = SCALE * torch.cat([query @ key.T, products], 1)
        return torch.nn.functional.cross_entropy(logits, labels)

    if compiled:
        evaluate = torch.compile(evaluate)

    def run() -> Any:
        loss = evaluate(*leaves)
        return SimpleNamespace(loss=loss, grads=torch.autograd.grad(loss, leaves))

    return run


def cached_own(query: Any, key: Any, own: Any) -> Run:
    """The step of sentence-transformers from embeddings to their gradients."""
    import torch
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    cached = CachedMultipleNegativesRankingLoss(
        torch.nn.Sequential(torch.nn.Identity()), SCALE, util.dot_score, mini_batch_size=MINI_BATCH
    )
    columns = [query, key, *own.transpose(1, 0, 2)]
    reps = [[torch.from_dlpack(z.copy()).requires_grad_()] for z in columns]

    def run() -> Any:
        for (rep,) in reps:
            rep.grad = None
        loss = cached.calculate_loss(reps, with_backward=True)
        return SimpleNamespace(loss=loss, grads=[rep.grad for (rep,) in reps])

    return run


# name -> its maker, of queries, keys and own negatives
PEERS: dict[str, Callable[..., Run]] = {
    "PyTorch": eager_own, "torch.compile": partial(eager_own, compiled=True),
    "sentence-transformers": cached_own,
}  # fmt: skip
MINI_BATCH = 1024  # rows of sentence-transformers' losses


def measured(bench: Any, runs: dict[tuple[str, str], Run], rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds, and memory."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for case, run in runs.items():
        try:
            run()  # compiles
        except ValueError as error:  # an option that this place does not have
            print(*case, error)
        else:
            seconds[case] = []
    cases, rng = list(seconds), random.Random(0)
    for _ in track(range(rounds), "rounds"):
        for case in rng.sample(cases, len(cases)):
            if isinstance(bench, Device) and max(seconds[case], default=0.0) > LONG:
                continue
            runs[case]()  # finds memory of its sizes, which the case before did not have
            times = bench.turn(runs[case])["seconds"]
            seconds[case].append(statistics.median(times[1:] or times))
    results = []
    for (loss, name), times in seconds.items():
        plain = seconds.get((PLAIN.get(loss, loss), "plain"))
        ratios = None if plain is None else np.divide(times, plain[: len(times)])
        results.append({
            "loss": loss, "options": name, "median_s": statistics.median(times),
            "of plain": None if ratios is None else round(statistics.median(ratios), 3),
            **bench.memory("auto", _outcome(runs[loss, name])),
        })  # fmt: skip
    return results


def _outcome(run: Run) -> Run:
    """A call as `Bench.memory` takes it: it returns the loss and the gradients of features."""

    def outcome() -> tuple[Any, list[Any]]:
        result = run()
        return result.loss, [g for g in result.grads if g is not None and g.ndim > 1]

    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="on the CPU (default: the current GPU)")
    parser.add_argument("--rows", type=int, help="default 65536, on the CPU 8192")
    parser.add_argument("--dim", type=int, help="default 512, on the CPU 256")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", metavar="REGEX", help="only options that match, and plain losses")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/options[-cpu].json")
    arguments = parser.parse_args()
    dtype = "float32" if arguments.cpu else "bfloat16"
    rows, dim = (
        arguments.rows or (8192 if arguments.cpu else 65536),
        arguments.dim or (256 if arguments.cpu else 512),
    )
    bench: Any = Host(dtype) if arguments.cpu else Device(dtype)
    runs = {
        (loss, name): run
        for (loss, name), run in cases(bench, dtype, rows, dim).items()
        if name == "plain" or re.search(arguments.only or "", name)
    }
    results = measured(bench, runs, arguments.rounds)
    described = bench.describe()
    report = {
        "device": described["device"], "versions": described["versions"],
        "commit": machine.commit(), "date": machine.now(),
        "settings": {"rows": rows, "dim": dim, "dtype": dtype, "scale": SCALE},
        "results": results,
    }  # fmt: skip
    name = "options-cpu.json" if arguments.cpu else "options.json"
    (arguments.output or RESULTS / name).write_text(to_json(report) + "\n")
    for row in results:
        print(*row.values())


if __name__ == "__main__":
    main()
