"""What a gather on GPUs records as one plan, without a GPU."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy
from cupy.cuda import runtime
from gpu_problems import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.distributed import planned, schedule
from infonce.distributed.exchanges.partition import Partition
from infonce.distributed.transports import nccl as transports
from infonce.distributed.transports.peers import Copies
from infonce.kernels.epilogues import SoftmaxGradient, Statistics, Sums
from infonce.kernels.gpu import config, shard, vectors
from infonce.kernels.gpu.device import compiler, recorder
from infonce.kernels.gpu.tiled import backend as tiled
from infonce.kernels.gpu.tiled.backend import GPU
from infonce.kernels.grid import least_block_side
from infonce.kernels.linear import LinearTerm, Segments
from infonce.kernels.offload import layout
from infonce.kernels.problem import Gradients, Problem

pytestmark = pytest.mark.extras
WEIGHTS = {"clip": (0.5, 0.5), "lit": (1.0, 0.0), "info_nce": (1.0, 0.0), "siglip": (1.0, 0.0)}
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def no_gpu_needed() -> Any:
    """Tests compile nothing, and use a device that this machine need not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cupy.cuda, "Device", lambda *_: SimpleNamespace(id=0, compute_capability="90")
        )
        patch.setattr(runtime, "getDevice", lambda: 0)
        patch.setattr(compiler, "start", lambda *_, **__: False)
        for module in (tiled, vectors):
            patch.setattr(module, "device_properties", lambda _: DEVICES["sm_90a"])
        yield


def record(*call: Any, **options: Any) -> Counter[str]:
    """How often each kernel, and each step of another kind, is in the plan of a rank."""
    return Counter(steps(*call, **options))


def steps(*call: Any, **options: Any) -> list[str]:
    """The kernels, and steps of other kinds, in the plan of a rank."""
    names = [
        step.function.args[2] if isinstance(step, recorder.Launch) else name(step.do)
        for step in recording(*call, **options).steps
    ]
    assert names.count("mark") == names.count("transfer") == names.count("join")
    return names


def recording(
    loss: str, rows: list[int], rank: int, precision: str = "bf16", d: int = 64,
    gradient: bool = True, copies: Any = None, reduced: bool = True, **options: Any,
) -> recorder.Recorder:  # fmt: skip
    """The plan of a rank; `copies` are those to the other GPUs of its host."""
    into, m = recorder.Recorder(), rows[rank]
    ranks: Any = SimpleNamespace(rank=rank, size=len(rows))
    transport: Any = object.__new__(transports.NCCL)
    transport.ranks, transport.copies = ranks, copies
    dtype = DTYPES[precision]
    with cupy.cuda.using_allocator(into.malloc):
        query, key, dq, dk = (cupy.empty((m, d), dtype) for _ in range(4))
        ids = cupy.empty(m, np.int64) if options.pop("ids", False) else None
        row_direction_weight, column_direction_weight = WEIGHTS[loss]
        problem = Problem(
            query, key, 14.0, 1 / sum(rows), None, 1 / sum(rows) if reduced else None,
            row_direction_weight, column_direction_weight, -10.0 if loss == "siglip" else None,
            query_ids=ids, key_ids=ids, compute_precision=precision, **options,
        )  # fmt: skip
        wants_key = loss != "lit"
        gradients = (
            Gradients(dq, dk if wants_key else None, None, True, wants_key) if gradient else None
        )
        place = ranks, transport, 7, tuple(rows), (sum(rows), 1.0), query.dtype, False
        outputs = planned._build(problem, gradients, place, into)
    for array in outputs.values():
        if array is not None:
            recorder.resolve_placeholder(array.data.ptr)
    return into


def name(step: Any) -> str:
    return str(getattr(step, "func", step).__name__)


@settings(max_examples=25)
@given(
    loss=st.sampled_from(sorted(WEIGHTS)), precision=st.sampled_from(sorted(DTYPES)),
    rows=st.lists(st.integers(1, 3000), min_size=2, max_size=9), rank=st.integers(0, 8),
    d=st.integers(1, 600), ids=st.booleans(), normalize=st.booleans(), gradient=st.booleans(),
    scalars=st.sampled_from(["none", "dots", "moments"]), reduced=st.booleans(),
)  # fmt: skip
def test_any_gather(
    loss: str, precision: str, rows: list[int], rank: int, d: int, ids: bool, normalize: bool,
    gradient: bool, scalars: str, reduced: bool,
) -> None:  # fmt: skip
    """A plan can replay each step, and each kind of array is exchanged once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "MAX_STEPS", 10**6)
        counts = record(
            loss, rows, rank % len(rows), precision, d, gradient, ids=ids, normalize=normalize,
            scalar_grads=scalars != "none", moments=scalars == "moments" or not gradient,
            reduced=reduced,
        )  # fmt: skip
    wants_bias = loss == "siglip" and scalars != "none"
    numbers = reduced + (scalars != "none" or not gradient) + wants_bias
    assert counts["sum_over_ranks"] == numbers
    exchanges = {"clip": 1 + 1 + 2 * gradient, "lit": 1}.get(loss, 1 + gradient)
    assert counts["transfer"] == exchanges + (numbers > 0)
    assert counts["totals"] == 1


def test_steps_do_not_grow_with_the_ranks() -> None:
    """64 ranks take the steps of 2 ranks, and one addition of partial sums for each binary
    digit."""
    two, many = (record("clip", [256] * n, 1) for n in (2, 64))
    assert {*two, "add"} == set(many)
    added = many["add"] - two["add"], many["merge_sums"] - two["merge_sums"]
    assert added == (5, 5)
    assert sum(many.values()) - sum(two.values()) == 10


@pytest.mark.parametrize(("ranks", "little"), [(2, True), (2, False), (3, True)])
def test_work_that_hides_an_exchange(
    ranks: int, little: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local block, launched before what little comes from one other rank, and after what else
    comes; both follow the same mark."""
    monkeypatch.setattr(transports, "LATE_BYTES", 256 * 64 * 4 - (not little))  # bytes of dK
    names = steps("clip", [256] * ranks, 1)
    for sweep, which, exchange in (("sweep_lse", 0, 0), ("sweep_gradient", -1, -2)):
        marks, transfers, sweeps = (
            [i for i, name in enumerate(names) if name == kind]
            for kind in ("mark", "transfer", sweep)
        )
        own = sweeps[which]
        assert marks[exchange] < own
        late = ranks == 2 and (little or sweep == "sweep_lse")
        assert (own < transfers[exchange]) == late


@pytest.mark.parametrize("loss", sorted(WEIGHTS))
def test_copies_between_two_gpus_are_part_of_graphs(loss: str) -> None:
    """Graphs hold copies between two GPUs. They hold no call of NCCL, and no copy beside NCCL."""
    copies = Copies(1, {0: 0, 1: 2**40}, None)
    for others, rows in ((copies, [300, 200]), (None, [300, 200]), (copies, [300, 200, 100])):
        recorded_call = recording(loss, rows, 1, copies=others)
        captured = [
            step.capturable for step in recorded_call.steps if not isinstance(step, recorder.Launch)
        ]
        in_graphs = others is not None and len(rows) == 2
        assert all(captured) == in_graphs
        exchanges = [
            step.do.args[0] for step in recorded_call.steps
            if not isinstance(step, recorder.Launch) and name(step.do) == "transfer"
        ]  # fmt: skip
        by_nccl = [exchange for exchange in exchanges if exchange.links]
        assert len(by_nccl) == (0 if in_graphs else len(exchanges))


def test_accumulators_are_cleared_as_memory() -> None:
    """A kernel writes dK, and dQ where it has another dtype than its sums: once each."""
    for precision, written in (("bf16", 2), ("fp32", 1)):
        assert record("clip", [256] * 2, 1, precision)["assign"] == written


def test_large_sums_go_home_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infonce.distributed.cost.LEAST_VISIT_BYTES", 2**20)
    assert record("clip", [2048] * 4, 1, d=512)["transfer"] == 1 + 1 + 1 + 3 + 1


def test_options_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with options go step by step."""
    monkeypatch.setattr(planned.plan, "run_by_plan", lambda *_, **__: {})
    transport: Any = object.__new__(transports.NCCL)
    ranks: Any = SimpleNamespace(rank=0, size=2)
    transport.ranks, transport.plans = ranks, {}
    into, asked = recorder.Recorder(), []
    monkeypatch.setattr(shard, "Queue", lambda: into)  # of launches that would need the device
    with cupy.cuda.using_allocator(into.malloc):
        query, key = (cupy.empty((8, 64), "float32") for _ in range(2))
        plain = Problem(query, key, 14.0, 0.1, None, 0.1)
        rows = Partition([8, 8])
        how: Any = SimpleNamespace(exchange="gather", queries=rows, keys=rows)
        for option, steps in (
            ({}, False), ({"margin": 0.1}, True), ({"decoupled": True}, True),
            ({"hardness": 2.0}, True), ({"label_smoothing": 0.1}, True),
        ):  # fmt: skip
            problem = replace(plain, **option)
            result = planned.solve_by_plan(
                how, problem, None, ranks, transport, (16.0, 1.0), query.dtype
            )
            assert (result is None) == steps
            assert shard.VectorsOverRanks().has_plan(problem) != steps
            if steps:
                shard.run_block_pass(
                    problem, False, lambda *args: asked.append(args), None,
                    ahead=Gradients(want_key=False, add_query=True),
                )  # fmt: skip
                backend, block = asked[-1]
                assert isinstance(backend, GPU)
                assert vars(block) == vars(problem)


def test_blocks_of_operations_on_arrays_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear terms, questions, limits and biases: a plan records kernels alone."""
    built: list[str] = []
    monkeypatch.setattr(shard, "device_properties", lambda _: DEVICES["sm_90a"])
    monkeypatch.setattr(shard, "readable_by_kernels", lambda problem: problem)
    monkeypatch.setattr(shard.gpu_plan, "run_by_plan", lambda *_: built.append("a plan"))
    monkeypatch.setattr(shard.recorded, "block", lambda *_: built.append("steps"))
    query: Any = SimpleNamespace(device=SimpleNamespace(id=0))
    plain = Problem(query, query, 1.0, 1.0)
    losses = Statistics(Sums(None, None), None, None)
    gradient = SoftmaxGradient(None, None, None, None, None)
    linear = replace(gradient, linear=(LinearTerm(Segments(None, None), None),))
    question: Any = lambda backend, block: None  # noqa: E731
    cases: list[tuple[Problem, Any, str]] = [
        (plain, losses, "a plan"), (plain, gradient, "a plan"),
        (plain, linear, "steps"), (plain, question, "steps"),
        (replace(plain, key_bias=query), losses, "steps"),
        (replace(plain, false_negative_margin=0.1), losses, "steps"),
    ]  # fmt: skip
    for problem, epilogue, _ in cases:
        shard.run_block_pass(problem, False, epilogue, None)
    assert built == [how for _, _, how in cases]


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": True}, {"hardness": 2.0}, {"false_negative_margin": 0.1}, {"ids": True},
     {"key_bias": True}],
)  # fmt: skip
def test_room_for_a_block_is_known_before_it_is_there(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a block's workspace launches nothing and allocates nothing."""
    monkeypatch.setattr(shard, "device_properties", lambda _: DEVICES["sm_90a"])
    into, ahead = recorder.Recorder(), Gradients(want_key=False, add_query=True)
    with cupy.cuda.using_allocator(into.malloc):
        query, key, dq, dk = (cupy.empty((300, 64), "float32") for _ in range(4))
        if options.pop("ids", False):
            options = {"query_ids": cupy.empty(300, np.int64), "key_ids": cupy.empty(300, np.int64)}
        if options.pop("key_bias", False):
            options = {"key_bias": cupy.empty(300)}
    problem = Problem(query, key, 14.0, 0.1, None, 0.1, key_shard=True, **options)
    for gradients in (None, Gradients(dq, dk, None, True, True, add_query=True)):
        shard.require_room(problem, gradients, ahead)
        with pytest.raises(ValueError, match=r"^workspace: expected at least \d+ bytes for 300 x"):
            shard.require_room(replace(problem, workspace=1000), gradients, ahead)


def test_room_that_is_enough() -> None:
    """No block needs more workspace than `enough_room`: ranks with as much need not ask each
    other."""
    for m, n, d in itertools.product((1, 64, 8192, 10**6), (1, 65536, 10**7), (1, 512, 20000)):
        enough = schedule.enough_room(m, n, d)
        needs = config.Needs("fp64", True, True, True, True, 1, True, weighted_query=True)
        assert config.least_workspace((m, n, d), needs, 128) < enough
        row = layout.RowBytes(8 * d, 8 * d, 8 * d, layout.block_row_bytes(m, n, d, 8, 8))
        assert layout.least_workspace(least_block_side(m, n), row) < enough


def test_totals_of_a_rank_weigh_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's problem has the weights of losses in `upstream` and `row_shares`."""
    monkeypatch.setattr(shard, "device_properties", lambda _: DEVICES["sm_90a"])
    problems: list[Problem] = []
    outputs = {"loss": "the sum"}
    monkeypatch.setattr(
        shard.gpu_plan, "run_by_plan", lambda *parts: problems.append(parts[1]) or outputs
    )
    into = recorder.Recorder()
    with cupy.cuda.using_allocator(into.malloc):
        query, key = (cupy.empty((8, 64), "float32") for _ in range(2))
        weights, losses = (cupy.empty(8) for _ in range(2))
    problem = Problem(
        query, key, 14.0, weights, common_share=0.1, weights=weights, row_shares=weights
    )
    assert problem.loss_follows_from_sums
    problem = problem.without_weights()
    assert problem.plain
    vectors = shard.VectorsOverRanks()
    assert vectors.totals(problem, losses, None, None, None)[0] == "the sum"
    assert problems[0].row_shares is weights
    assert problems[0].common_share == 1.0
    separate = replace(problem, common_share=None)
    assert vectors.totals(separate, losses, None, None, None)[0] is None
    smoothed = replace(problem, weights=weights, label_smoothing=0.1)
    assert not smoothed.loss_follows_from_sums
