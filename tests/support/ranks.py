"""The program of each rank in tests/distributed/test_ranks.py, which starts `main` by mpiexec, and
checks of the numbers that ranks get: against one process and against float64.
"""

import importlib
import itertools
import os
import sys
from typing import Any
from unittest.mock import patch

import judge
import ml_dtypes
import numpy as np
from infonce.distributed import cost
from infonce.distributed.communicators.mpi import connect
from mpi4py import MPI

import infonce
from infonce import distributed

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
NODE_SIZES = [size for size in range(1, SIZE + 1) if SIZE % size == 0]  # ranks of a pretended node
SCALARS = ("scale", "bias")
DTYPES = "float64,float32,bfloat16,float16"
SMALL = 4000  # bytes of a workspace


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


def follow(step: Any, case: Any) -> list[str | None]:  # for each rank, its error or None
    failure = None
    try:
        step(case)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return COMM.allgather(failure)


def accuracy(place: str, transport: str, exchange: str, dtypes: str = DTYPES) -> None:
    """All losses over ranks, with shards in GPU ("gpu") or host memory: within judge.py's bounds of
    float64, the same bits from run to run, in float32 and float64 equal to one process."""
    placed = use_gpu() if place == "gpu" else np.asarray
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
                features, mine = [np.concatenate([q, k[:m]])], [shards(2 * m, 5)[RANK]]
                own["labels"] = ((np.arange(2 * m) + m) % (2 * m))[mine[0]]
            elif loss != "info_nce":
                features, mine = [q, k[:m]], [rows, rows]
                if "ids" in own:
                    own["ids"] = own["ids"][rows]
            elif own:
                own = {"labels": labels[rows], "ids": (ids[:m][rows], ids[columns])}
            parts = [placed(z[part]) for z, part in zip(features, mine, strict=True)]
            function = f"{loss}_loss_and_grad"
            own |= {"scale": scale, "transport": transport, "exchange": exchange, "timeout": 60}
            if exchange == "ring":  # with the small workspace, a shard is visited in pieces
                own["workspace"] = 2**18 if options or loss == "siglip" else 2**28
            got = on_host(getattr(distributed, function)(*parts, **own))
            what = f"{loss} {dtype} {sorted(options)}"
            for _ in range(5 if place == "gpu" else 1):  # 5: graphs are captured, then launched
                again = on_host(getattr(distributed, function)(*parts, **own))
                for field, g, twice in zip(got.grads._fields, got.grads, again.grads, strict=True):
                    if g is not None and g.tobytes() != twice.tobytes():
                        wrong.append(f"rank {RANK}: {what}: d {field} differs from run to run")

            truth = judge.judged(loss, features, scale=scale, **options)
            sizes = {  # bounds are relative to the gradient of all rows, and to d scale's terms
                field: float(np.linalg.norm(w)) for field, w in truth.grads.items() if w is not None
            }
            sizes["scale"] = max(sizes["scale"], judge.scale_size(truth, features))
            mine_of = {field: mine[i] for i, field in enumerate(sizes) if field not in SCALARS}
            logit = judge.largest_logit(scale, features[0], features[-1])
            cancels = judge.cancelling(truth, features, scale)
            check(what, judge.assert_loss, got.loss, truth.loss, dtype, logit)
            for field, size in sizes.items():
                w = np.asarray(truth.grads[field])[mine_of.get(field, ...)]
                check(f"{what}: d {field}", judge.assert_grad, getattr(got.grads, field), w, dtype,
                      logit, size, cancels)  # fmt: skip
            if dtype not in one_process_bounds:
                continue
            loss_bound, bound = one_process_bounds[dtype]
            one = getattr(infonce, function)(*map(placed, features), scale=scale, **options)
            want = on_host(one)
            check(what, close, got.loss, want.loss, loss_bound, "one process's loss")
            for field, size in sizes.items():
                w = getattr(want.grads, field).astype(float)[mine_of.get(field, ...)]
                check(what, close, getattr(got.grads, field), w, bound,
                      f"one process's d {field}", size)  # fmt: skip
    assert not wrong, "\n".join(wrong)
    if place == "gpu" and transport == "auto" and exchange == "gather":
        import cupy

        if cupy.cuda.runtime.getDeviceCount() < SIZE:  # not by NCCL
            return
        transports = connect().__dict__["gpu_transports"].values()
        plans = [plan for transport in transports for plan in transport.plans.values()]
        # a queue stands for calls that have no plan
        assert any(getattr(plan, "graph_bytes", 0) for plan in plans), "no plan has a CUDA graph"


def use_gpu() -> Any:
    """Uses the GPU of this rank; the function that copies arrays to it."""
    import cupy

    cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy.asarray


def on_host(out: Any) -> Any:
    """An array, or a result, with NumPy's arrays."""
    if isinstance(out, infonce.LossAndGrad):
        lse, grads = out.lse, type(out.grads)(*map(on_host, out.grads))
        lse = tuple(map(on_host, lse)) if isinstance(lse, tuple) else on_host(lse)
        return infonce.LossAndGrad(on_host(out.loss), grads, lse)
    return out.get() if hasattr(out, "get") else out


def main() -> None:
    """Run the checks of the command line, each `MODULE:FUNCTION:ARGUMENT:...`, one by one."""
    for check in sys.argv[1:]:
        module, function, *arguments = check.split(":")
        with (  # restores what checks set
            patch.object(cost, "LEAST_VISIT_BYTES", cost.LEAST_VISIT_BYTES),
            patch.dict(os.environ, INFONCE_LOCAL_SIZE=str(NODE_SIZES[(len(NODE_SIZES) - 1) // 2])),
        ):
            getattr(importlib.import_module(module), function)(*arguments)
        say("passed", check)
