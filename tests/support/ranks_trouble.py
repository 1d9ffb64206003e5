"""Checks that `ranks.main` runs on each rank, for tests/distributed/test_ranks.py: memory, freed
communicators, bad calls, calls that differ between ranks, and ranks that end or hang."""

import functools
import gc
import importlib
import itertools
import os
import re
import signal
import sys
import threading
import time
import tracemalloc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from infonce.distributed import cost
from infonce.distributed.communicators.mpi import connect
from ranks import COMM, RANK, SIZE, accuracy, say, shards
from trouble import TROUBLES, Trouble

import infonce
from infonce import distributed

SWITCH = "INFONCE_COPY_ENGINES"


def memory() -> None:
    """A rank allocates at most the memory of the model in `cost`; a gather also its buffers."""

    def peak(**options: Any) -> int:  # the most bytes that are allocated during a call
        for part in (slice(10), slice(None)):  # the first call, of 10 rows, compiles
            features, into = [z[part] for z in sides], [z[part] for z in out]
            tracemalloc.start()
            distributed.clip_loss_and_grad(*features, scale=1.0, out=into, **options)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return most

    rows, d, workspace, rng = 4000, 64, 2**21, np.random.default_rng(RANK)
    sides = [rng.standard_normal((rows, d)).astype(np.float16) for _ in range(2)]
    out = [np.empty_like(z) for z in sides]
    ring, most = peak(workspace=workspace), cost.predict_memory(rows, d, workspace)
    total_bytes = rows * d * (2 * cost.FEATURE_BYTES + 3 * cost.DK_BYTES)
    assert 0.5 * most < ring < most < total_bytes + workspace, (ring, most, total_bytes)

    buffers = cost.gather_bytes([rows] * SIZE, d * cost.FEATURE_BYTES + 24, d * cost.DK_BYTES)
    gather = peak(exchange="gather", workspace=2 * buffers)
    # workspace (two buffers), buffers, dQ and a block's part of it, vectors
    most = 3 * buffers + 2 * rows * d * cost.DK_BYTES + cost.VECTOR_BYTES * rows * SIZE
    assert buffers < gather < most, (gather, buffers, most)


def freed() -> None:
    """A communicator that its owner frees keeps nothing alive. Other communicators still work."""
    x, before = np.ones((4, 3)), threading.active_count()
    for _ in range(3):
        comm = COMM.Dup()
        distributed.clip_loss(x, x, scale=1.0, timeout=60, comm=comm, exchange="ring")
        ranks, transports = connect(comm), []
        ranks.__dict__["gpu_transports"] = {
            "": SimpleNamespace(free=functools.partial(transports.append, "freed"))
        }
        kept = weakref.ref(ranks)
        del ranks
        comm.Free()
        gc.collect()
        assert transports == ["freed"]
        assert kept() is None
        assert threading.active_count() <= before + 1  # the thread of COMM, which is not freed
    distributed.clip_loss(x, x, scale=1.0, timeout=60)


def bad_calls(rank: int, size: int) -> list[tuple[str, str, Any]]:
    """Calls in which rank 1 differs or all are wrong: (words of the message, type, the call)."""
    odd = rank == 1
    x = np.ones((4, 3))

    def clip(image: Any = x, text: Any = x, **options: Any) -> Any:
        return distributed.clip_loss_and_grad(image, text, **{"scale": 1.0, **options})

    def lone_row() -> Any:
        """NT-Xent whose first row of all has no other view: its label is -1."""
        first = 4 * rank + (rank > 0)
        labels = first + np.array([1, 0, 3, 2])
        if not rank:
            return distributed.nt_xent_loss(np.ones((5, 3)), np.r_[-1, labels + 1], scale=1.0)
        return distributed.nt_xent_loss(x, labels, scale=1.0)

    def clip_over_nodes(local_size: str | None, nodes: Any = None) -> Any:
        peers = connect().peers
        with patch.dict(os.environ), patch.object(peers, "nodes", nodes or peers.nodes):
            del os.environ["INFONCE_LOCAL_SIZE"]
            if local_size is not None:
                os.environ["INFONCE_LOCAL_SIZE"] = local_size
            return clip(exchange="hierarchical")

    def crowded() -> Any:
        """Rank 1 has no memory for the logits of a block."""
        room = 100 if odd else 0  # available bytes; 0: unknown
        with patch("infonce.kernels.cpu.resources.available_memory", return_value=room):
            return clip(method="naive", exchange="ring", workspace=10)

    wide, tall, single = np.ones((4, 5)), np.ones((400, 3)), x.astype(np.float32)
    distill = functools.partial(distributed.distill_loss, x, x, x, scale=1.0)
    given: list[tuple[str, str, Any, Any]] = [  # option, words, others' values, rank 1's value
        ("scale", "1.0 on rank 0 and 2.0", 1.0, 2.0), ("normalize", "False True", False, True),
        ("reduction", "'mean' 'sum'", "mean", "sum"), ("wrt", "", None, ["image"]),
        ("gradient_scale", "'global' 'ddp'", "global", "ddp"), ("margin", "0.0 0.5", 0.0, 0.5),
        ("ids", "'not given' on rank 0 and 'given as int64'", None, np.arange(4)),
        ("method", "'tiled' on rank 0 and 'naive'", "auto", "naive"),
        ("metrics", "True", False, True), ("exchange", "'auto' and 'ring'", "auto", "ring"),
        ("false_negative_margin", "inf 0.1", np.inf, 0.1),
        ("key_bias", "'not given' and 'given'", None, np.zeros(4)),
        ("weights", "'not given' and 'given'", None, np.ones(4)),
        ("guide", "'not given' 'float64 of width 3'", None, (x, x)),
        ("dims", "on rank 0 None ([2, 3], None)", None, (2, 3)),
        ("scale", "rank 1: expected a positive number", 1.0, -1),
        ("timeout", "rank 1: expected a positive number", 60, -1),
        ("weights", "rank 1: numbers that are not negative, got -1.0 at position 2", np.ones(4),
         np.array([1, 1, -1, 1])),
    ]  # fmt: skip
    return [
        *(
            (f"{name} {words} rank 1", "ValueError", functools.partial(clip, **{name: z[odd]}))
            for name, words, *z in given
        ),
        ("image: width 3 on rank 0 and 5 on rank 1", "ValueError",
         lambda: clip(*([wide] * 2 if odd else [x] * 2))),
        ("dtype 'float64' on rank 0 and 'float32' on rank 1", "ValueError",
         lambda: clip(*([single] * 2 if odd else [x] * 2))),
        ("function 'clip_loss_and_grad' on rank 0 and 'lit_loss_and_grad' on rank 1", "ValueError",
         lambda: (distributed.lit_loss_and_grad if odd else distributed.clip_loss_and_grad)(
             x, x, scale=1.0)),
        ("rank 1: text: expected 4 rows", "ValueError", lambda: clip(text=x[:3] if odd else x)),
        ("rank 1: image: expected an array", "TypeError", lambda: clip("x" if odd else x)),
        ("rank 1: image: expected dtype", "TypeError",
         lambda: clip(x.astype(int) if odd else x)),
        ("rank 1: temperature: expected a number in [1.1102230246251565e-16, got 1e-39",
         "ValueError", lambda: clip(scale=None, temperature=1e-39 if odd else 1.0)),
        ("unexpected keyword argument 'tempreature'", "TypeError", lambda: clip(tempreature=1.0)),
        ("rank 1: expected image, text, got no text", "TypeError",
         lambda: distributed.clip_loss(*[x] * (1 if odd else 2), scale=1.0)),
        ("rank 1: 2 positional arguments (image, text), got 3", "TypeError",
         lambda: distributed.clip_loss(*[x] * (3 if odd else 2), scale=1.0)),
        ("method \"tiled\" \"naive\" over ranks \"fused\"", "ValueError",
         lambda: clip(method="fused")),
        ("rank 1: method: \"naive\" keeps the 4 x 4 logits of which 100 are free", "MemoryError",
         crowded),
        ("gradient_scale \"global\", \"ddp\" 'mean'", "ValueError",
         lambda: clip(gradient_scale="mean")),
        ("transport 'nccl' does not carry", "ValueError", lambda: clip(transport="nccl")),
        ("exchange \"ring\", \"gather\" 'broadcast'", "ValueError",
         lambda: clip(exchange="broadcast")),
        (f"workspace: expected at least {192 * (4 * size - 3)} bytes to gather {4 * size} keys of "
         "width 3 got 1000", "ValueError", lambda: clip(exchange="gather", workspace=1000)),
        ("rank 1: workspace: expected at least bytes for 400 x 1 logits got 100", "ValueError",
         lambda: clip(*([tall] * 2 if odd else [x] * 2), exchange="ring", workspace=100)),
        (f"exchange nodes with ranks [0], {list(range(1, size))}; \"ring\"", "ValueError",
         lambda: clip_over_nodes(None, [[0], list(range(1, size))])),
        ("INFONCE_LOCAL_SIZE '1' on rank 0 and None on rank 1", "ValueError",
         lambda: clip_over_nodes(None if odd else "1")),
        (f"INFONCE_LOCAL_SIZE divisor of the {size} ranks, got '7'", "ValueError",
         lambda: clip_over_nodes("7")),
        ("at least one row over all ranks", "ValueError", lambda: clip(x[:0], x[:0])),
        ("rank 1: features even number of rows", "ValueError",
         lambda: distributed.nt_xent_loss(x[:3] if odd else x, scale=1.0)),
        ("labels each other's label", "ValueError",
         lambda: distributed.nt_xent_loss(x, np.arange(4), scale=1.0)),
        ("rank 0: labels each other's label got -1 at position 0", "ValueError", lone_row),
        ("rank 1: labels: expected shape (4,), got (4, 2)", "ValueError",
         lambda: distributed.nt_xent_loss(
             x, np.zeros((4, 2) if odd else 4, int), scale=1.0)),
        ("rank 1: key: expected 4 rows like query", "ValueError",
         lambda: distributed.gte_loss(x, x[:3] if odd else x, scale=1.0)),
        ("weights: expected a positive sum over all ranks, got only zeros", "ValueError",
         lambda: clip(weights=np.zeros(4))),
        ("rank 0: label_smoothing: expected 0.0 with decoupled, got float 0.1", "ValueError",
         lambda: clip(label_smoothing=0.1, decoupled=True)),
        ("rank 1: metrics: expected one positive a row", "ValueError",
         lambda: distributed.info_nce_loss_and_grad(
             x, x, np.full(4, -odd), scale=1.0, metrics=True)),
        (f"rank 1: labels [0, {4 * size}) got {4 * size}", "ValueError",
         lambda: distributed.info_nce_loss(x, x, np.full(4, 4 * size if odd else 0), scale=1.0)),
        ("teacher_key 'float64 of width 3' 'float32 of width 3' on rank 1", "ValueError",
         lambda: distill(single if odd else x)),
        ("teacher_scale 1 2 on rank 1", "ValueError", lambda: distill(x, teacher_scale=1 + odd)),
        ("rank 1: truth value", "ValueError",
         lambda: distill(x, two_sided=np.ones(2) if odd else True)),
        ("rank 1: dims: expected increasing integers in [1, 3], got [3, 1]", "ValueError",
         lambda: clip(dims=(3, 1) if odd else (1, 3))),
        ("rank 1: dim_weights: expected 2 numbers like dims, got [1.0]", "ValueError",
         lambda: clip(dims=(1, 3), dim_weights=(1,) if odd else (1, 1))),
        ("rank 1: out['image']: expected shape (4, 3), got (4, 2)", "ValueError",
         lambda: clip(dims=(1, 3), out={"image": np.ones((4, 2 if odd else 3))})),
        ("rank 1: image: expected an array", "TypeError",
         lambda: clip("x" if odd else x, dims=(1, 3))),
        ("rank 1: grad_out: expected a number", "TypeError",
         lambda: clip(dims=(1, 3), grad_out="1" if odd else 1.0)),
        (f"key at least {3 * size} rows, got {2 * size} in all", "ValueError",
         lambda: distributed.info_nce_loss(x[:3], x[:2], scale=1.0)),
        ("own: dtype: None on rank 0 and 'float64' on rank 1", "ValueError",
         lambda: distributed.info_nce_loss(
             x, x, scale=1.0, own=np.ones((4, 2, 3)) if odd else None)),
    ]  # fmt: skip


def functions() -> None:
    """Rank 1 calls another function: each pair of losses raises the same error on all ranks, in
    a first call and in a later one, and the communicator works afterwards."""
    x, classes = np.random.default_rng(RANK).standard_normal((6 + 2 * RANK, 3)), np.arange(6) % 2
    arguments = {
        "info_nce_loss": (x, x), "clip_loss_and_grad": (x, x), "clip_loss": (x, x),
        "lit_loss": (x, x), "siglip_loss_and_grad": (x, x), "gte_loss": (x, x),
        "nt_xent_loss_and_grad": (x,), "sup_con_loss": (x, np.resize(classes, len(x))),
        "distill_loss_and_grad": (x, x, x, x),
    }  # fmt: skip

    def call(name: str) -> Any:
        return getattr(distributed, name)(*arguments[name], scale=1.0, timeout=60)

    for known in (False, True):
        for expected, got in itertools.permutations(arguments, 2):
            if known:
                call(expected)
            else:
                connect().last_schedule = None
            try:
                call(got if RANK == 1 else expected)
                note = "nothing"
            except ValueError as error:
                note = str(error)
            everyone = COMM.allgather(note)
            assert everyone == SIZE * [
                f"function: expected the same on all ranks, got {expected!r} on rank 0 and "
                f"{got!r} on rank 1"
            ], everyone
    for name in arguments:
        call(name)


def mismatch() -> None:
    """Each bad call raises the same error on every rank, and the next call works."""
    for words, kind, call in bad_calls(RANK, SIZE):
        try:
            call()
            note = "nothing"
        except (MemoryError, TypeError, ValueError) as error:
            note = f"{type(error).__name__}: {error}"
        everyone = COMM.allgather(note)
        assert len(set(everyone)) == 1, everyone
        assert note.startswith(kind), note
        for word in words.split():
            assert word in note, f"{word!r} is not in {note!r}"
        z = np.random.default_rng(1).standard_normal((2, 9, 3))
        mine = [side[shards(9, 1)[RANK]] for side in z]
        want, got = infonce.clip_loss(*z, scale=1.0), distributed.clip_loss(*mine, scale=1.0)
        np.testing.assert_allclose(got, want, rtol=1e-12)
    import pytest  # here, because importing takes time that other checks do not need

    for timeout in (0, -1, "soon", True):
        with pytest.raises(ValueError, match="timeout"):
            distributed.clip_loss(np.ones((2, 2)), np.ones((2, 2)), scale=1.0, timeout=timeout)


def wait_for_all(comm: Any) -> None:
    """A barrier that leaves the cores to others."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.01)


def troubles() -> None:
    """TROUBLES, then the first call of benchmarks/ranks/step.py, which other ranks do not make.
    mpiexec ends all ranks when rank 0 ends."""
    say("process", os.getpid())
    comms = []
    for *_, members in TROUBLES:
        comm = COMM.Split(RANK in members, (*members, RANK).index(RANK))
        comms.append((comm, comm.Dup()))  # the second one for a barrier, on which no call waits
    x = np.ones((4, 3))
    for (what, exchange, members), (comm, barriers) in zip(TROUBLES, comms, strict=True):
        if RANK not in members:
            continue
        wait_for_all(barriers)
        nodes = 2 if exchange == "hierarchical" else 1
        os.environ["INFONCE_LOCAL_SIZE"] = str(len(members) // nodes)
        if what == "misses":
            call = functools.partial(distributed.clip_loss, x, x, scale=1.0, comm=comm)
            if comm.rank != 1:
                say_limit(what, comm.rank, functools.partial(call, timeout=2.0))
            continue
        try:
            trouble(what, "2" if what == "stopped" else "20", exchange, comm=comm)
        except BaseException:
            if comm.rank == 1 and what.endswith("before"):
                raise
    if RANK == 0:
        sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "ranks"))
        step, arguments = importlib.import_module("step"), ["--batch", "60", "--timeout", "2"]
        say_limit("step", RANK, lambda: step.main(arguments, standalone_mode=False))
        os._exit(1)
    time.sleep(60)


def say_limit(name: str, rank: int, call: Any) -> None:
    """Say how long a call waits for ranks that do not make it."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        say(f"{name}: rank {rank} after {time.monotonic() - began:.1f} s: {error}")


def transfers(how: str, exchange: str) -> None:
    """`accuracy` on GPUs, if all arrays go by copy engines in small pieces, or all by NCCL."""
    if how == "nccl":
        os.environ[SWITCH] = "0"
    else:
        peers = importlib.import_module("infonce.distributed.transports.peers")
        peers.MOST_SWAP_BYTES, peers.SLOTS_BYTES = 0, 2**16
    accuracy("gpu", "auto", exchange)


def trouble(
    what: str, timeout: str, exchange: str, place: str = "host", how: str = "copies",
    comm: Any = COMM,
) -> None:  # fmt: skip
    """Rank 1 ends, hangs or fails before or in the third of 4 calls; others print their error."""
    if how == "nccl":
        os.environ[SWITCH] = "0"
    rank, name = comm.rank, f"{what} {exchange}:"
    say("process", os.getpid())
    x = np.random.default_rng(rank).standard_normal((200, 16))
    if place == "gpu":
        import cupy

        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
        x = cupy.asarray(x)
    in_a_plan = what.endswith(("in a plan", "after the loss"))
    if what.endswith("in a plan") and rank == 1:
        planned = importlib.import_module("infonce.distributed.planned")
        solve = planned.solve_by_plan
        planned.solve_by_plan = lambda *args: end() if calls == 2 else solve(*args)
    if what.endswith("after the loss") and rank == 1:
        nccl = importlib.import_module("infonce.distributed.transports.nccl")
        transfer, sent = nccl.NCCL.transfer, []

        def without_gradients(self: Any, *args: Any) -> None:
            """The exchanges of keys, sums of columns and factors, but not that of dK."""
            sent.append(calls)
            if sent.count(2) < 4:
                transfer(self, *args)

        nccl.NCCL.transfer = without_gradients
        nccl.NCCL.finish = lambda self: end() if calls == 2 else None
    calls, slept = 0, []

    def end() -> None:
        """End this process, after a time in which the other ranks begin to wait for it."""
        time.sleep(0.5 if what.startswith("killed") else 100)
        os.kill(os.getpid(), signal.SIGKILL)

    def progress(phase: str, done: int, total: int) -> None:
        if rank != 1 or calls < 2 or phase != "gradient":
            return
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stopped" and not slept:
            slept.append(time.sleep(float(timeout) + 2))  # the others have waited
        elif what == "raises":
            raise OSError("no more of this")
        elif what == "interrupted":
            signal.raise_signal(signal.SIGINT)
        elif what == "everyone":
            say("now")
            time.sleep(60)

    for calls in range(4):
        if rank == 1 and calls == 2:
            if what == "killed before":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "raises before":
                raise OSError("no more of this")
            elif what == "exits before":
                sys.exit()
        began = time.monotonic()
        try:
            distributed.clip_loss_and_grad(
                x,
                x,
                scale=1.0,
                timeout=float(timeout) if calls > 1 else 120.0,  # the first compiles and connects
                exchange=exchange,
                comm=comm,
                progress=None if in_a_plan else progress,
            )
        except BaseException as error:
            passed = time.monotonic() - began
            say(f"{name} rank {rank} after {passed:.1f} s: {type(error).__name__}: {error}")
            try:  # the ranks are out of step now
                distributed.clip_loss(x, x, scale=1.0, comm=comm)
            except distributed.RankError as second:
                say(f"{name} rank {rank} then: {second}")
            raise
        say(f"{name} rank {rank} call {calls}")


def at_any_point(seed: str, timeout: str) -> None:
    """The trouble of this seed: see trouble.py."""
    trouble = Trouble(int(seed))
    function = getattr(distributed, f"{trouble.loss}_loss_and_grad")
    x = np.random.default_rng(RANK).standard_normal((120, 16))
    features = [x] if trouble.loss == "nt_xent" else [x, x]

    def call(timeout: float) -> None:
        function(*features, scale=1.0, exchange=trouble.exchange, timeout=timeout)

    trouble.happen(RANK, call, float(timeout), say)


def rooms() -> None:
    """Each workspace either has room for all visits of a call, or raises the same ValueError on all
    ranks. Workspaces are around the least; a rank may have no rows."""
    rng = np.random.default_rng(RANK)

    def options_of(loss: str, n: int) -> list[dict[str, Any]]:
        sides = 1 if loss in ("nt_xent", "sup_con") else 2

        def each(values: Any) -> Any:
            return values if sides == 1 else (values, values)

        options: list[dict[str, Any]] = [{}]
        if loss == "siglip":
            return [*options, {"weights": np.ones(n)}, {"positive_ids": each(np.arange(n) % 3)}]
        guide = rng.standard_normal((n, 40))
        options += [
            {"false_negative_margin": 0.1}, {"guide": each(guide)}, {"label_smoothing": 0.1},
            {"metrics": True}, {"weights": np.ones(n)}, {"groups": each(np.arange(n) % 2)},
            {"ids": each(np.arange(n) % 3), "label_smoothing": 0.1},
        ]  # fmt: skip
        refused = {
            "gte": ("metrics", "groups", "ids"),
            "sup_con": ("metrics", "ids", "groups", "false_negative_margin", "guide"),
        }.get(loss, ())
        return [kinds for kinds in options if not kinds.keys() & refused]

    wrong: list[str] = []
    for turn, empty in enumerate((None, 0, 1)):
        n = 0 if empty == RANK else 60 + 20 * RANK
        x = rng.standard_normal((n, 5))
        for loss, exchange in itertools.product(
            ("clip", "info_nce", "lit", "nt_xent", "sup_con", "gte", "siglip"), ("ring", "gather")
        ):
            function = getattr(distributed, f"{loss}_loss_and_grad")
            features = {"nt_xent": (x,), "sup_con": (x, np.arange(n) % 5)}.get(loss, (x, x))
            # each option by both exchanges, with one of the ranks that are empty
            for options in options_of(loss, n)[(turn + (exchange == "ring")) % 3 :: 3]:
                outcomes, comm = set(), COMM.Dup()  # an error may end a communicator
                what = f"{loss} {exchange} {sorted(options)}, rank {empty} is empty"
                for workspace in np.geomspace(200, 2e6, 6).astype(int):
                    try:
                        function(*features, scale=1.0, exchange=exchange, timeout=60,
                                 workspace=int(workspace), comm=comm, **options)  # fmt: skip
                        note = "room"
                    except Exception as error:
                        note = f"{type(error).__name__}: {error}"
                    everyone = COMM.allgather(note)
                    outcomes.add(note.partition(": expected")[0])
                    if len(set(everyone)) > 1:
                        wrong.append(f"{what}: workspace {workspace}: {everyone}")
                        break
                else:
                    kinds = {re.sub(r"rank \d: ", "", outcome) for outcome in outcomes}
                    if kinds != {"room", "ValueError: workspace"}:
                        wrong.append(f"{what}: {outcomes}")
    assert not wrong, "\n".join(wrong)
