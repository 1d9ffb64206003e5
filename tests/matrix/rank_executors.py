"""Executors over ranks: MPI and gloo. Ranks hold any number of rows, also none.

The functions that processes.py calls in each rank (`over_mpi`, `over_gloo`) are here, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gpu_executors
import numpy as np
import processes
from comparison import Result
from executors import arguments, by_name, executor, of_numpy
from gpu_problems import EMULATED
from infonce.kernels.cpu.backend import CPU
from problems import Problem, draw, in_pair
from ranks_offload import offloading

from infonce import spec
from infonce.checks.tokens import METHODS

Mine = list[Any]  # indices of this rank's queries, and of its keys


def cut(rows: int, size: int, seed: int) -> list[slice]:
    """Rows cut at random positions."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, rows + 1, size - 1))
    return [slice(a, b) for a, b in itertools.pairwise([0, *map(int, cuts), rows])]


def shard(problem: Problem, rank: int, size: int) -> tuple[Problem, Mine]:
    """The problem of a rank: its rows, and their indices."""
    (rows, columns), seed, options = problem.shape, problem.number, dict(problem.options)
    of_pairs = rows == columns and problem.loss != "info_nce"
    of_pairs &= problem.loss == "clip" or "positive_ids" not in options
    parts = [cut(n, size, seed + place * (not of_pairs)) for place, n in enumerate((rows, columns))]
    order = np.arange(rows)
    if problem.loss == "nt_xent":
        half = rows // 2
        views = [
            np.r_[r.start : r.stop, half + r.start : half + r.stop] for r in cut(half, size, seed)
        ]
        mine = [views[rank].astype(int)] * 2
        if seed // 8 % 2:  # any row may be on any rank
            order = np.random.default_rng(seed).permutation(rows)
            mine = [order[parts[0][rank]]] * 2
            options["labels"] = np.argsort(order)[(order + half) % rows][parts[0][rank]]
    else:
        mine = [np.arange(n)[part[rank]] for n, part in zip((rows, columns), parts, strict=True)]
        if "labels" in options:
            options["labels"] = options["labels"][mine[0]]
    for name in (*spec.INTEGER_OPTIONS, "guide"):
        if name in options:
            pair = tuple(z[own] for z, own in zip(in_pair(options[name]), mine, strict=True))
            single = not isinstance(options[name], tuple) and of_pairs
            options[name] = pair[0] if single else pair
    of_rows = (
        "weights", "own_indices", "own_mask", "own_bias", "label_weights", "teacher_query",
        "query_mask",
    )  # fmt: skip
    of_rows += () if "own_indices" in options else ("own",)  # a table is on all ranks
    of_keys = ("key_bias", "teacher_key", "key_mask")
    for name, own in (*((name, 0) for name in of_rows), *((name, 1) for name in of_keys)):
        if name in options:
            options[name] = options[name][mine[own]]
    grad_out = problem.grad_out if np.ndim(problem.grad_out) == 0 else problem.grad_out[mine[0]]
    features = tuple(z[own] for z, own in zip(problem.features, mine, strict=False))
    return replace(problem, features=features, options=options, grad_out=grad_out), mine


def merge(problem: Problem, parts: list[tuple[Result, Mine]]) -> Result:
    """The result of the whole batch, from those of the ranks."""
    found: Result = {}
    places = {name: int(i == 1) for i, name in enumerate(problem.kind.arguments)}

    def whole(values: list[Any], place: int) -> Any:
        out = np.zeros((problem.shape[place], *values[0].shape[1:]), values[0].dtype)
        for value, (_, mine) in zip(values, parts, strict=True):
            out[mine[place]] = value
        return out

    for name, first in parts[0][0].items():
        values = [part[name] for part, _ in parts]
        if name == "lse":
            sides = zip(*values, strict=True)
            found[name] = [whole(side, place) for place, side in enumerate(sides)]
        elif name == "metrics" and first is not None:
            fields = {"row_rank": 0, "positive": 0, "hardest_negative": 0, "column_rank": 1}
            of_field = {k: [getattr(v, k) for v in values] for k in fields}
            found[name] = SimpleNamespace(**{
                k: None if v[0] is None else whole(v, fields[k]) for k, v in of_field.items()
            })  # fmt: skip
        elif first is not None and name == "own" and "own_indices" in problem.options:
            found[name] = sum(values)
        elif first is not None and name in places:
            found[name] = whole(values, places[name])
        elif first is not None and np.ndim(first):
            found[name] = whole(values, 0)
        else:
            assert all(np.array_equal(v, first, equal_nan=True) for v in values if v is not None), (
                name
            )
            found[name] = first
    return found


# --- in the processes -----------------------------------------------------------------------------


def watched(begin: Any) -> Any:
    """`CPU.__init__`, with a promise that GPUs rely on: blocks that lack positives have none."""

    def begin_block(self: CPU, problem: Any, *gradients: Any) -> None:
        assert not (problem.lacks_positives and np.any(problem.positives >= 0))
        begin(self, problem, *gradients)

    return begin_block


def over_mpi(seed: int, number: int, largest: int, exchange: str, way: str) -> Any:
    """The result of all ranks. `way`: "world", "subgroup", or the place of features and of blocks:
    "GPU", "offload" (of features in host memory) to a stand-in, or "offload to GPU"."""
    from infonce.distributed import cost
    from mpi4py import MPI

    from infonce import distributed

    world = comm = MPI.COMM_WORLD
    if way == "subgroup":  # of all ranks but the second, in the other order; and of the second
        comm = functools.lru_cache(1)(world.Split)(world.rank == 1, -world.rank)
    problem = draw(seed, number, largest)
    local, mine = shard(problem, comm.rank, comm.size)
    args, options = arguments(local)
    options |= {k: v for k, v in problem.settings.items() if k not in ("workspace", "metrics")}
    options |= {"exchange": exchange, "comm": comm, "timeout": 60}
    options["method"] = ("auto", "naive", "tiled")[number % 3] if "world" in way else "auto"
    if problem.has_tokens and options["method"] not in METHODS:
        options["method"] = "auto"
    turn = number // 8  # the number modulo 8 is that of the loss
    if exchange == "ring" and turn % 2:
        least = 2**22 if problem.has_tokens or "GPU" in way else 2**17
        if problem.has_tokens and way == "GPU":
            least = 2**26  # of which cuBLAS takes half
        options["workspace"] = max(least, problem.settings.get("workspace", least))
    if turn % 3 == 1:  # blocks one after another, without plans
        options["progress"] = lambda *_: None
    grad_out = local.grad_out
    if "GPU" in way:
        gpu_executors.use_device(comm.rank)
    stream: Any = contextlib.nullcontext()
    if way == "GPU":
        stream = gpu_executors.make_stream() if number % 2 else stream
        options["transport"] = ("auto", "staged")[turn // 2 % 2]
        on_device = gpu_executors.on_device
        args, grad_out = list(map(on_device, args)), on_device(grad_out)
        options = {name: on_device(value) for name, value in options.items()}
    alone = {k: v for k, v in options.items() if k not in spec.GRAD_ONLY}
    nodes = {1: 1, 2: 1, 3: (1, 3)[turn % 2], 4: 2}[comm.size]
    answer: Any
    try:
        with (
            mock.patch.object(cost, "LEAST_VISIT_BYTES", (1, 2**26)[turn // 2 % 2]),
            mock.patch.dict(os.environ, INFONCE_LOCAL_SIZE=str(nodes)),
            mock.patch.object(CPU, "__init__", watched(CPU.__init__)),
            np.errstate(all="ignore"), offloading(way == "offload") as more, stream,
        ):  # fmt: skip
            function = getattr(distributed, f"{problem.loss}_loss")
            more |= {"offload": True} if way == "offload to GPU" else {}
            options |= {"grad_out": grad_out, **more}
            options["metrics"] = problem.settings.get("metrics", False)
            with_gradients = getattr(distributed, f"{problem.loss}_loss_and_grad")
            out, again = (with_gradients(*args, **options) for _ in range(2))
            for one, other in zip(out.grads, again.grads, strict=True):  # the same bits
                assert one is other is None or one.tobytes() == other.tobytes()
            found = by_name(out) | {"loss alone": function(*args, **alone, **more)}
            answer = gpu_executors.on_host(found) if "GPU" in way else found, mine
    except Exception as error:
        answer = error
    return collect(problem, comm.allgather(answer))


def over_gloo(seed: int, number: int, largest: int, exchange: str, way: str) -> Any:
    """The result of the processes of a group."""
    import torch.distributed as dist
    import torch_wrappers
    from torch_executors import Call, function_of, learned, module_of

    if way in torch_wrappers.RANKS:  # each process has the whole problem
        return learned(draw(seed, number, largest), torch_wrappers.RANKS[way])
    group = dist.group.WORLD if way == "world" else subgroup()
    problem = draw(seed, number, largest)
    answers: list[Any] = [None] * dist.get_world_size()
    answer: Any = None
    members = dist.get_process_group_ranks(group) if group is not None else []
    if dist.get_rank() in members:
        local, mine = shard(problem, members.index(dist.get_rank()), len(members))
        call = Call(local)
        call.options.pop("workspace", None)
        make = module_of if number % 2 and not problem.kind.taught else function_of
        options = {"group": group, "exchange": exchange, "gradient_scale": "global"}
        try:
            answer = call.differentiate(make(call, **options), passes=1 + number % 2), mine
        except Exception as error:
            answer = error
    dist.all_gather_object(answers, answer)
    return collect(problem, [answers[rank] for rank in members] or [answers[0]])


@functools.lru_cache(1)
def subgroup() -> Any:
    """All processes but the second."""
    import torch.distributed as dist

    group = dist.new_group([rank for rank in range(dist.get_world_size()) if rank != 1])
    return group if dist.get_rank() != 1 else None


def collect(problem: Problem, answers: Any) -> Any:
    for answer in answers or ():
        if isinstance(answer, Exception):
            raise answer
    return merge(problem, answers) if answers and None not in answers else None


# --- in the test ----------------------------------------------------------------------------------


def fits(problem: Problem) -> bool:
    """Gradients of ranks travel in the compute dtype: float32 has no room for norms of float64."""
    if problem.compute == "float32" and problem.dtype == "float64":
        return False
    return not problem.poison or "feature" in problem.poison


def of_stand_in(problem: Problem) -> bool:
    """The stand-in for a GPU computes in float64."""
    return problem.dtype == problem.compute == "float64" and fits(problem)


def by(processes_of: str, exchange: str, way: str) -> Any:
    def run(problem: Problem) -> Result:
        task = problem.seed, problem.number, problem.largest, exchange, way
        found: Result = processes.run(processes_of, *task)
        return found

    return run


if importlib.util.find_spec("mpi4py"):
    for _ranks, _exchange, _way in (
        ("1", "auto", "world"), ("2", "auto", "world"), ("3", "ring", "world"),
        ("3", "gather", "world"), ("3", "hierarchical", "world"), ("3", "ring", "subgroup"),
        ("4", "hierarchical", "world"),  # of two nodes
        ("2", "ring", "offload"), ("3", "gather", "offload"),
    ):  # fmt: skip
        executor(
            f"MPI, {_ranks} ranks, {_exchange}, {_way}", of_numpy, not_finite="loss",
            fits=of_stand_in if _way == "offload" else fits,
            largest=40, needs=("mpi4py",), draws=120 if _way == "offload" else 40,
            tokens=_way != "offload",
        )(by(f"mpi {_ranks}", _exchange, _way))  # fmt: skip
    for _ranks, _exchange, _way, _draws in (
        ("1", "auto", "GPU", 20), ("2", "ring", "GPU", 60), ("2", "gather", "GPU", 20),
        ("2", "auto", "offload to GPU", 20), ("4", "hierarchical", "GPU", 8),
    ):  # fmt: skip
        executor(
            f"MPI, {_ranks} ranks, {_exchange}, {_way}", of_numpy, device=True, largest=40,
            fits=lambda problem: fits(problem) and gpu_executors.fits(problem),
            needs=("mpi4py",), marks=("gpu",), tokens=_way == "GPU", draws=_draws,
        )(by(f"{'emulated' if EMULATED else 'mpi'} {_ranks}", _exchange, _way))  # fmt: skip
