"""The program of each rank in tests/distributed/test_ranks.py, which starts `main` by mpiexec, and
checks of the numbers that ranks get: against one process and against float64.
"""

import functools
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
from infonce.distributed import run as ranks_run
from infonce.distributed.communicators.mpi import connect
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
