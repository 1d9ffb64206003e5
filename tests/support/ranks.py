"""The program of each rank in tests/distributed/test_ranks.py, which starts `main` by mpiexec, and
checks of the numbers that ranks get: against one process and against float64.

Rank 0 leads: hypothesis runs there, and sends each example to all ranks, which report back.
"""

import functools
import importlib
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import judge
import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from infonce.distributed import cost
from infonce.distributed import run as ranks_run
from infonce.distributed.communicators.mpi import connect
from infonce.kernels.cpu.backend import CPU
from infonce.kernels.problem import Problem
from mpi4py import MPI

import infonce
from infonce import distributed
from infonce.checks import validation

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
NODE_SIZES = [size for size in range(1, SIZE + 1) if SIZE % size == 0]  # ranks of a pretended node
SCALARS = ("scale", "bias")
DTYPES = "float64,float32,bfloat16,float16"
SMALL = 4000  # bytes of a workspace
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2}  # of gradients, relative norm


def say(*words: Any) -> None:
    """Print a line by one write, because all ranks write to the same pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def shards(n: int, seed: int) -> list[slice]:
    """The rows of each rank: n rows cut at random positions, so that some ranks may have none."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, n + 1, SIZE - 1))
    return [slice(a, b) for a, b in itertools.pairwise([0, *map(int, cuts), n])]


def close(got: Any, want: Any, tolerance: float, what: str, size: float = 0.0) -> None:
    """AssertionError if ||got - want|| > tolerance max(||want||, size). `what` names the array."""
    got, want = (np.asarray(z, np.float64) for z in (got, want))
    assert got.shape == want.shape, f"{what}: shape {got.shape} for {want.shape}"
    error, size = np.linalg.norm(got - want), max(size, float(np.linalg.norm(want)))
    assert error <= tolerance * size + 1e-14, f"{what}: off by {error:.1e} of {size:.1e}"


def compare(case: dict[str, Any]) -> None:
    """Compare a loss over the ranks with one process that has all rows. `case` is of `cases`."""
    loss, seed, n, d = case["loss"], case["seed"], case["n"], case["d"]
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, case["dtype"], case["dtype"]))
    m = max(1, n - case["extra"]) if loss == "info_nce" else n
    key = rng.standard_normal((n, d)).astype(dtype)
    query = (key[:m].astype(float) * case["aligned"] + rng.standard_normal((m, d))).astype(dtype)
    options = {name: case[name] for name in ("scale", "normalize", "reduction")}

    # whole arrays, the order in which ranks hold their rows, and the rows of this rank
    rows = shards(m, seed)
    features, orders, parts = [query, key], [np.arange(m), np.arange(n)], [rows, rows]
    labels = None
    if loss == "info_nce":
        parts[1] = shards(n, seed + 1)
        labels = rng.integers(0, n, m) if case["labelled"] else None
    if loss == "nt_xent":
        features = [np.concatenate([query, key])]
        if case["labelled"]:  # any row of the batch may be on any rank
            orders, parts = [rng.permutation(2 * n)], [shards(2 * n, seed)]
            labels = np.argsort(orders[0])[(orders[0] + n) % (2 * n)]
        else:  # both views of a sample are on the same rank
            both = [np.r_[r.start : r.stop, n + r.start : n + r.stop] for r in rows]
            orders = [np.concatenate(both).astype(int)]
            parts = [[slice(2 * r.start, 2 * r.stop) for r in rows]]
    mine = [order[part[RANK]] for order, part in zip(orders, parts, strict=True)]

    single, spread = dict(options), dict(options, timeout=60)
    cost.LEAST_VISIT_BYTES = case.get("visit_bytes", cost.LEAST_VISIT_BYTES)
    os.environ["INFONCE_LOCAL_SIZE"] = str(NODE_SIZES[case.get("nodes", seed) % len(NODE_SIZES)])
    spread["method"] = case.get("method", "auto")
    spread["exchange"] = exchange = case.get("exchange", "auto")
    spread["workspace"] = case.get("workspace") if exchange in ("auto", "ring") else None
    if case["ids"]:
        ids = [rng.integers(0, n, len(z)) for z in features]
        if len(ids) == 1:
            single["ids"], spread["ids"] = ids[0], ids[0][mine[0]]
        else:
            single["ids"] = tuple(ids)
            spread["ids"] = tuple(i[own] for i, own in zip(ids, mine, strict=True))
    if labels is not None:
        spread["labels"] = labels[parts[0][RANK]]
        if loss != "nt_xent":
            single["labels"] = labels
    local = [z[own] for z, own in zip(features, mine, strict=True)]

    metrics = {"metrics": case.get("metrics", False) and loss != "siglip"}
    want = getattr(infonce, f"{loss}_loss_and_grad")(*features, **single, **metrics)
    got = getattr(distributed, f"{loss}_loss_and_grad")(*local, **spread, **metrics)
    again = getattr(distributed, f"{loss}_loss_and_grad")(*local, **spread, **metrics)
    loss_only = getattr(distributed, f"{loss}_loss")(*local, **spread)

    tolerance = TOLERANCE[dtype.name]
    assert got.loss.dtype == want.loss.dtype
    # Other blocks: metrics exclude the triangle and a single block, a loss has room for larger ones
    other_blocks = metrics["metrics"] and (loss == "nt_xent" or COMM.size == 1)
    if other_blocks or case.get("workspace") == SMALL:
        close(loss_only, got.loss, 0.1 * tolerance, "loss without gradients")
    else:
        assert np.array_equal(loss_only, got.loss)
    per_row = case["reduction"] == "none"
    close(got.loss, want.loss[mine[0]] if per_row else want.loss, 0.1 * tolerance, "loss")
    terms = np.abs(np.asarray(want.grads[0], float) * features[0].astype(float)).sum()
    if case["normalize"]:  # the part of dQ along q cancels: up to |x| (1 - P of the positive)
        terms = max(terms, case["scale"] * np.minimum(want.loss, 1).sum())
    for i, field in enumerate(want.grads._fields):
        w, g = getattr(want.grads, field), getattr(got.grads, field)
        if w is None:
            assert g is None, field
            continue
        assert g.dtype == w.dtype, field
        assert np.asarray(g).tobytes() == np.asarray(getattr(again.grads, field)).tobytes(), field
        if field in SCALARS:  # sums that cancel: relative to their terms
            close(g, w, tolerance, f"d {field}", terms / case["scale"])
        else:  # relative to the rows of all ranks, because those of one rank may be almost 0
            size = np.linalg.norm(w.astype(float))
            if case["normalize"]:  # or to the terms, of which only the part across a row is left
                size = max(size, terms / np.linalg.norm(features[i].astype(float), axis=1).min())
            close(g, w[mine[i]], tolerance, f"d {field}", size)
    if got.lse is not None:
        both = zip(*((z if isinstance(z, tuple) else (z,)) for z in (got.lse, want.lse)),
                   strict=True)  # fmt: skip
        for i, (g, w) in enumerate(both):
            close(g, w[mine[i]], tolerance, "lse", 1.0 + np.abs(w).max())
    assert (got.metrics is None) == (want.metrics is None)
    if got.metrics is None or want.metrics is None:
        return
    for name in infonce.Metrics.__dataclass_fields__:
        g, w = getattr(got.metrics, name), getattr(want.metrics, name)
        if w is None:
            assert g is None, name
        elif w.dtype.kind == "i":  # rounding changes retrieval ranks of logits that are close
            ties = n * (d == 1 and case["normalize"])  # rows are +-1: see `Metrics.row_rank`
            above = g - w[mine[name == "column_rank"]]
            assert dtype.name != "float64" or ((above >= 0) & (above <= ties)).all(), name
        else:
            g, w = (np.maximum(z, -1e30) for z in (g, w))  # -inf for rows without negatives
            close(g, w[mine[0]] if w.ndim else w, tolerance, name, 1.0 + np.abs(w).max())


cases = st.fixed_dictionaries({
    "loss": st.sampled_from(["info_nce", "nt_xent", "clip", "lit", "siglip"]),
    "n": st.integers(1, 40), "d": st.sampled_from([1, 3, 16]),
    "extra": st.integers(0, 20),
    "seed": st.integers(0, 10**6),
    "scale": st.sampled_from([0.5, 3.0, 20.0]),
    "aligned": st.sampled_from([0.0, 1.0]),
    "normalize": st.booleans(),
    "ids": st.booleans(),
    "labelled": st.booleans(),
    "reduction": st.sampled_from(["mean", "mean", "sum", "none"]),
    "metrics": st.booleans(),
    "method": st.sampled_from(["auto", "auto", "naive"]),
    "workspace": st.sampled_from([2**28, SMALL]),
    "exchange": st.sampled_from(["auto", "ring", "gather", "hierarchical"]),
    "visit_bytes": st.sampled_from([1, 2**26]),  # bytes
    "dtype": st.sampled_from(["float64", "float64", "float64", "float32", "bfloat16"]),
})  # fmt: skip


def lead(step: Any, case: Any) -> None:
    """Run `step(case)` on all ranks, from rank 0. AssertionError names ranks that failed."""
    failures = follow(step, COMM.bcast(case))
    assert not any(failures), [f"rank {r}: {text}" for r, text in enumerate(failures) if text]


def follow(step: Any, case: Any) -> list[str | None]:  # for each rank, its error or None
    failure = None
    try:
        step(case)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return COMM.allgather(failure)


@contextmanager
def watched_blocks() -> Iterator[set[bool]]:
    """Context: collects and checks `Problem.lacks_positives` of the blocks that are computed."""
    seen, start = set(), CPU.__init__

    def watched(self: CPU, problem: Problem, *gradients: Any) -> None:
        assert not (problem.lacks_positives and np.any(problem.positives >= 0))
        seen.add(problem.lacks_positives)
        start(self, problem, *gradients)

    with patch.object(CPU, "__init__", watched):
        yield seen


def equal(examples: str) -> None:
    """Ranks get what one process gets: `compare`, on `examples` cases that hypothesis draws."""
    with watched_blocks() as seen:
        if not RANK:
            lead_examples(int(examples))
            return
        while isinstance(case := COMM.bcast(None), dict):
            follow(compare, case)
        assert case == "passed"  # otherwise rank 0 reports the failure
        assert seen == {False, True}


def lead_examples(examples: int) -> None:
    """Run one case of each loss, exchange and method from rank 0, then `examples` drawn ones."""

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=cases)
    def property_holds(case: dict[str, Any]) -> None:
        lead(compare, case)

    plain = {"n": 23, "d": 5, "extra": 3, "seed": 3, "scale": 3.0, "aligned": 1.0,
             "normalize": True, "ids": True, "labelled": True, "reduction": "mean",
             "dtype": "float64", "metrics": True, "workspace": SMALL, "nodes": 1}  # fmt: skip
    end = "failed"
    try:
        for loss in ("info_nce", "nt_xent", "clip", "lit", "siglip"):
            for exchange in ("ring", "gather", "hierarchical"):
                for method in ("tiled", "naive"):
                    lead(compare, {**plain, "loss": loss, "exchange": exchange, "method": method})
        property_holds()
        end = "passed"
    finally:
        COMM.bcast(end)


def accuracy(place: str, transport: str, exchange: str, dtypes: str = DTYPES) -> None:
    """All losses over ranks, with shards in GPU ("gpu") or host memory: within judge.py's bounds of
    float64, the same bits from run to run, in float32 and float64 equal to one process."""
    xp: Any = np
    if place == "gpu":
        import cupy as xp

        xp.cuda.Device(RANK % xp.cuda.runtime.getDeviceCount()).use()

    def host(array: Any) -> Any:
        return array if place == "host" else xp.asnumpy(array)

    rng = np.random.default_rng(0)
    m, n, d, scale = 350, 450, 72, 30.0
    key = rng.standard_normal((n, d))
    key /= np.linalg.norm(key, axis=1, keepdims=True)
    query = key[:m] + 0.1 * rng.standard_normal((m, d))
    labels, ids = rng.integers(0, n, m), rng.integers(0, 300, n)
    one_process_bounds = {"float64": (1e-12, 2e-12), "float32": (2e-6, 1e-5)}  # loss, gradients
    wrong: list[str] = []

    def check(what: str, holds: Any, *arguments: Any) -> None:
        try:
            holds(*arguments)
        except AssertionError as error:
            wrong.append(f"rank {RANK}: {what}: {error}")

    for dtype in dtypes.split(","):
        q, k = (z.astype(getattr(ml_dtypes, dtype, dtype)) for z in (query, key))
        rows, columns = shards(m, 5)[RANK], shards(n, 6)[RANK]
        if SIZE == 2 and dtype == "float32":
            rows = columns = slice(0, 0) if RANK else slice(0, m)  # rank 1 has no queries
            columns = slice(m, n) if RANK else columns
        for loss, options in (
            ("clip", {}), ("clip", {"normalize": True, "ids": ids[:m]}), ("siglip", {}),
            ("lit", {}), ("info_nce", {}), ("info_nce", {"labels": labels, "ids": (ids[:m], ids)}),
            ("nt_xent", {}),
        ):  # fmt: skip
            features, mine, own = [q, k], [rows, columns], dict(options)
            if loss == "nt_xent":
                features = [np.concatenate([q, k[:m]])]
                own["labels"] = (np.arange(2 * m) + m) % (2 * m)
                mine = [shards(2 * m, 5)[RANK]]
                own["labels"] = own["labels"][mine[0]]
            elif loss != "info_nce":
                features, mine = [q, k[:m]], [rows, rows]
                if "ids" in own:
                    own["ids"] = own["ids"][rows]
            elif own:
                own = {"labels": labels[rows], "ids": (ids[:m][rows], ids[columns])}
            parts = [xp.asarray(z[part]) for z, part in zip(features, mine, strict=True)]
            function = f"{loss}_loss_and_grad"
            own |= {"scale": scale, "transport": transport, "exchange": exchange, "timeout": 60}
            if exchange == "ring":  # with the small workspace, a shard is visited in pieces
                own["workspace"] = 2**18 if options or loss == "siglip" else 2**28
            got = getattr(distributed, function)(*parts, **own)
            what = f"{loss} {dtype} {sorted(options)}"
            for _ in range(5 if place == "gpu" else 1):  # 5: graphs are captured, then launched
                again = getattr(distributed, function)(*parts, **own)
                for field, g, twice in zip(got.grads._fields, got.grads, again.grads, strict=True):
                    if g is not None and host(g).tobytes() != host(twice).tobytes():
                        wrong.append(f"rank {RANK}: {what}: d {field} differs from run to run")

            truth = judge.judged(loss, features, scale=scale, **options)
            sizes = {  # bounds are relative to the gradient of all rows, and to d scale's terms
                field: float(np.linalg.norm(w)) for field, w in truth.grads.items() if w is not None
            }
            sizes["scale"] = max(sizes["scale"], judge.scale_size(truth, features))
            mine_of = {field: mine[i] for i, field in enumerate(sizes) if field not in SCALARS}
            logit = judge.largest_logit(scale, features[0], features[-1])
            cancels = judge.cancelling(truth, features, scale)
            check(what, judge.assert_loss, host(got.loss), truth.loss, dtype, logit)
            for field, size in sizes.items():
                w = np.asarray(truth.grads[field])[mine_of.get(field, ...)]
                check(f"{what}: d {field}", judge.assert_grad, host(getattr(got.grads, field)), w,
                      dtype, logit, size, cancels)  # fmt: skip
            if dtype not in one_process_bounds:
                continue
            loss_bound, bound = one_process_bounds[dtype]
            want = getattr(infonce, function)(*map(xp.asarray, features), scale=scale, **options)
            check(what, close, host(got.loss), host(want.loss), loss_bound, "one process's loss")
            for field, size in sizes.items():
                w = host(getattr(want.grads, field)).astype(float)[mine_of.get(field, ...)]
                check(what, close, host(getattr(got.grads, field)), w, bound,
                      f"one process's d {field}", size)  # fmt: skip
    assert not wrong, "\n".join(wrong)
    by_nccl = place == "gpu" and transport == "auto" and xp.cuda.runtime.getDeviceCount() >= SIZE
    if by_nccl and exchange == "gather":
        transports = connect().__dict__["gpu_transports"].values()
        plans = [plan for transport in transports for plan in transport.plans.values()]
        # a queue stands for calls that have no plan
        assert any(getattr(plan, "graph_bytes", 0) for plan in plans), "no plan has a CUDA graph"


def compute_on_device(place: str) -> None:
    """Make `offload` compute on this rank's GPU, or on the stand-in of host_device.py ("host")."""
    if place == "gpu":
        import cupy

        cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount()).use()
        return
    from host_device import Host
    from infonce.kernels.offload import backend as offloading
    from infonce.kernels.solve import Vectors

    run_block_pass = functools.partial(offloading.run_block_pass, Host())
    block_runner = ranks_run.BlockRunner(run_block_pass, Vectors(np), offloading.layout)
    ranks_run.choose_block_runner = lambda _: block_runner
    validation.gpu_missing = lambda: None


def offload(place: str, exchange: str) -> None:
    """Shards in host memory, computed on a device (`compute_on_device`), against one process."""
    from host_device import close, room

    d, options = 30, {"scale": 9.0, "normalize": True, "workspace": room(16, 30, 150, 150)}
    spread = dict(options, timeout=60, exchange=exchange, offload=True)
    compute_on_device(place)
    if place == "gpu":
        spread["workspace"] = room(64, d, 150, 150)
    key = np.random.default_rng(0).standard_normal((150, d))
    query = key + np.random.default_rng(1).standard_normal((150, d))
    rows = shards(150, 4)[RANK]
    for loss in ("clip", "info_nce", "lit", "siglip", "nt_xent"):
        features = [query, key] if loss != "nt_xent" else [query]
        part, own = np.arange(150)[rows], dict(spread)
        if loss == "nt_xent":
            own["labels"] = (part + 75) % 150
        own |= {"workspace": 2**20} if exchange == "gather" else {}  # for the keys of all ranks
        want = getattr(infonce, f"{loss}_loss_and_grad")(*features, **options)
        got = getattr(distributed, f"{loss}_loss_and_grad")(*(z[part] for z in features), **own)

        def rank_part(z: Any, part: Any = part) -> Any:
            return z if z is None or not np.ndim(z) else z[part]

        lse = want.lse
        lse = tuple(map(rank_part, lse)) if isinstance(lse, tuple) else rank_part(lse)
        grads = type(want.grads)(*map(rank_part, want.grads))
        close(got, infonce.LossAndGrad(want.loss, grads, lse))


def main() -> None:
    """Run the checks of the command line, each `MODULE:FUNCTION:ARGUMENT:...`, one by one."""
    for check in sys.argv[1:]:
        module, function, *arguments = check.split(":")
        # Restore what checks set
        with (
            patch.object(cost, "LEAST_VISIT_BYTES", cost.LEAST_VISIT_BYTES),
            patch.object(ranks_run, "choose_block_runner", ranks_run.choose_block_runner),
            patch.object(validation, "gpu_missing", validation.gpu_missing),
            patch.dict(os.environ, INFONCE_LOCAL_SIZE=str(NODE_SIZES[(len(NODE_SIZES) - 1) // 2])),
        ):
            getattr(importlib.import_module(module), function)(*arguments)
        say("passed", check)
