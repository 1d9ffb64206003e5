"""Schedules: pure values that say what the library asks of a GPU."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.kernels.gpu import config
from infonce.kernels.gpu.schedule import (
    Call,
    LossForm,
    Matrix,
    Purpose,
    Reading,
    Schedule,
    schedule,
    tiled_schedule,
)
from infonce.kernels.options import FALSE_NEGATIVE_MARGIN, GUIDE, IDS, KEY_BIAS, GivenOptions

from infonce.explanation.devices import GPUS
from infonce.explanation.work import schedule_work

DEVICES = {name: gpu.properties for name, gpu in GPUS.items()}
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16x3": "float32", "bf16": "bfloat16",
          "fp16": "float16"}  # fmt: skip


def a_call(
    loss: LossForm, m: int, n: int, d: int, compute_precision: str = "bf16", wrt: str = "qk",
    **options: Any,
) -> Call:  # fmt: skip
    dtype = DTYPES[compute_precision]
    n = n if loss is LossForm.ROWS else m
    query, key = Matrix.packed(m, d, dtype), Matrix.packed(n, d, dtype)
    dq = query if "q" in wrt else None
    dk = key if "k" in wrt and loss is not LossForm.VIEWS else None
    options.setdefault("workspace_given", "workspace" in options)
    return Call(loss, query, key, dq, dk, compute_precision, "tiled", **options)


def test_a_schedule_is_looked_up_by_its_call() -> None:
    """Equal calls on one device have one schedule; another call has another."""
    call, device = a_call(LossForm.BOTH, 4096, 4096, 512), DEVICES["h200"]
    looked_up = tiled_schedule(call, device)
    assert tiled_schedule(a_call(LossForm.BOTH, 4096, 4096, 512), device) is looked_up
    assert tiled_schedule(call, DEVICES["a100"]) != looked_up
    assert tiled_schedule(replace(call, pairs=GivenOptions([IDS])), device) != looked_up


def aligned(call_schedule: Schedule, parts: Any) -> int:
    return sum(map(config.align, (call_schedule.cached | parts).values()))


@settings(max_examples=300)
@given(
    loss=st.sampled_from(LossForm), m=st.integers(1, 5000).map(lambda k: 2 * k),
    n=st.integers(1, 80000), d=st.integers(1, 1300),
    compute_precision=st.sampled_from(sorted(DTYPES)),
    wrt=st.sampled_from(["", "q", "k", "qk"]), device=st.sampled_from(["h200", "a100", "b200"]),
    workspace=st.sampled_from([None, 2**24, 2**28, 2**31]), normalize=st.booleans(),
)  # fmt: skip
def test_passes_fit_their_workspace_and_visit_all_blocks(
    loss: LossForm, m: int, n: int, d: int, compute_precision: str, wrt: str, device: str,
    workspace: int | None, normalize: bool,
) -> None:  # fmt: skip
    room = {} if workspace is None else {"workspace": workspace, "workspace_given": True}
    call = a_call(loss, m, n, d, compute_precision, wrt, normalize=normalize, **room)
    try:
        call_schedule = schedule(call, DEVICES[device])
    except ValueError:
        with pytest.raises(ValueError, match="workspace: expected at least"):
            schedule(call, DEVICES[device])
        return
    allowed = max(call.workspace, 0 if workspace else DEVICES[device].default_memory_limit)
    assert call_schedule.workspace <= allowed
    dk_passes = [
        scheduled for scheduled in call_schedule.passes if scheduled.dk_accumulator is not None
    ]
    for scheduled in call_schedule.passes:
        assert aligned(call_schedule, scheduled.parts) <= call_schedule.workspace
        edges = [0, *(rows.stop for rows in scheduled.grid.rows)]
        assert [rows.start for rows in scheduled.grid.rows] == edges[:-1]
        assert edges[-1] == call.shape[0]
        columns = scheduled.grid.columns
        assert all(a.stop == b.start for a, b in pairwise(columns))
        if scheduled not in dk_passes:
            assert (columns[0].start, columns[-1].stop) == (0, call.shape[1])
    if call.key_gradient is not None:  # ranges of keys follow one another
        columns_of_passes = [scheduled.grid.columns for scheduled in dk_passes]
        ranges = [(columns[0].start, columns[-1].stop) for columns in columns_of_passes]
        assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
        assert ranges[-1][1] == call.shape[1]
    wanted = call.query_gradient is not None
    assert sum(scheduled.dq_accumulator is not None for scheduled in call_schedule.passes) == wanted


@pytest.mark.parametrize(
    ("device", "compute_precision", "kernel"),
    [("h200", "bf16", "sm90/sweep_guide"), ("h200", "fp16", "sm90/sweep_guide"),
     ("h200", "fp32", "tiled/guide"), ("a100", "bf16", "tiled/guide")],
)  # fmt: skip
def test_the_kernel_of_a_guide(device: str, compute_precision: str, kernel: str) -> None:
    guide = Matrix.packed(4096, 520, DTYPES[compute_precision])
    features = {"guide_query": guide, "guide_key": guide, "pairs": GivenOptions([GUIDE])}
    call = a_call(LossForm.BOTH, 4096, 0, 64, compute_precision, **features)
    works = schedule_work(schedule(call, DEVICES[device]), GPUS[device])
    assert next(works).kernel == kernel


@pytest.mark.parametrize(("loss", "device", "one_block"), [
    (LossForm.BOTH, "h200", True), (LossForm.PAIRS, "h200", True), (LossForm.BOTH, "a100", False),
    (LossForm.VIEWS, "h200", False),
])  # fmt: skip
def test_larger_blocks_by_default(loss: LossForm, device: str, one_block: bool) -> None:
    """Sweeps have gradient blocks of up to a GiB, unless the caller gives a workspace; not if
    queries are the keys, whose small blocks leave out pairs."""
    call = a_call(loss, 16384, 16384, 256)
    chosen = schedule(call, DEVICES[device])
    assert (len(chosen.passes[-1].grid) == 1) == one_block
    assert (chosen.workspace > call.workspace) == one_block
    given = schedule(a_call(loss, 16384, 16384, 256, workspace=2**28), DEVICES[device])
    assert given.workspace <= 2**28


@settings(max_examples=200)
@given(
    loss=st.sampled_from([LossForm.ROWS, LossForm.BOTH]), m=st.integers(1, 9000),
    n=st.integers(1, 9000), compute_precision=st.sampled_from(["fp64", "fp32", "bf16"]),
    device=st.sampled_from(["h200", "a100"]), share=st.sampled_from([None, 2, 16, 64]),
)  # fmt: skip
def test_marks_are_kept_where_they_fit(
    loss: LossForm, m: int, n: int, compute_precision: str, device: str, share: int | None
) -> None:
    """Kept marks are within the workspace, and the blocks of both passes begin with whole words."""
    n = n if loss is LossForm.ROWS else m
    room = {} if share is None else {"workspace": max(2**20, m * n // share)}
    guides = {side: Matrix.packed(size, 40, DTYPES[compute_precision])
              for side, size in (("guide_query", m), ("guide_key", n))}  # fmt: skip
    call = a_call(loss, m, n, 64, compute_precision, **guides, pairs=GivenOptions([GUIDE]), **room)
    try:
        chosen = schedule(call, DEVICES[device])
    except ValueError:
        return
    if share is None and not chosen.one_pass:
        assert chosen.cached
    words = -(-n // config.MARKED_COLUMNS) * m * config.MARK_BYTES
    assert not chosen.cached or chosen.cached["row_marks"] == words
    for scheduled in chosen.passes:
        assert aligned(chosen, scheduled.parts) <= chosen.workspace
        assert ("row_marks" in scheduled.parts) != bool(chosen.cached)
        starts = [columns.start for columns in scheduled.grid.columns]
        assert not chosen.cached or not any(start % config.MARKED_COLUMNS for start in starts)
    assert share is None or chosen.workspace <= call.workspace


def test_the_decisions_of_one_call() -> None:
    """The decisions are those of the example in docs/methods.md."""
    call_schedule = schedule(a_call(LossForm.BOTH, 65536, 65536, 512), DEVICES["h200"])
    purposes = [scheduled.purpose for scheduled in call_schedule.passes]
    assert purposes == [Purpose.STATISTICS, Purpose.GRADIENT]
    kernels = [scheduled.kernel.name for scheduled in call_schedule.passes]
    assert kernels == ["sweep_lse", "sweep_gradient"]
    assert len(call_schedule.passes[0].grid) == 1
    assert call_schedule.operands is not None
    assert call_schedule.operands.query.reading is Reading.IN_PLACE
    one = schedule(a_call(LossForm.ROWS, 4096, 65536, 512), DEVICES["h200"])
    assert [scheduled.purpose for scheduled in one.passes] == [Purpose.ONE_PASS]
    views = schedule(a_call(LossForm.VIEWS, 65536, 0, 128), DEVICES["h200"])
    assert [scheduled.kernel.name for scheduled in views.passes] == ["sweep_lse", "sweep_narrow"]
    assert "gradient_block" not in views.passes[1].parts
    # Products of eight K-slices take no longer than a cache would save
    assert call_schedule.cached_columns == 0
    wide = schedule(a_call(LossForm.BOTH, 16384, 16384, 576), DEVICES["h200"])
    assert wide.cached_columns == 16384
    assert wide.passes[0].caching_kernel is not None
    a100 = schedule(a_call(LossForm.BOTH, 65536, 65536, 512), DEVICES["a100"])
    files = [scheduled.kernel.file for scheduled in a100.passes]
    assert files == ["tiled/lse.cu", "tiled/gradient.cu"]


@pytest.mark.parametrize("wrt", ["k", "q", "qk"])
def test_no_memory_is_reserved_that_no_pass_uses(wrt: str) -> None:
    """A call for one gradient reserves no accumulator of the other."""
    call_schedule = schedule(a_call(LossForm.BOTH, 65536, 65536, 512, wrt=wrt), DEVICES["h200"])
    names = {name for scheduled in call_schedule.passes for name in scheduled.parts}
    assert ("dq_accumulator" in names, "dk_accumulator" in names) == ("q" in wrt, "k" in wrt)
    taken = max(aligned(call_schedule, scheduled.parts) for scheduled in call_schedule.passes)
    assert call_schedule.workspace == taken


@pytest.mark.parametrize("loss", [LossForm.ROWS, LossForm.BOTH])
@pytest.mark.parametrize("teacher_width", [64, 256, 1024])
def test_distillation_has_no_memory_for_a_cache_or_for_one_pass(
    loss: LossForm, teacher_width: int
) -> None:
    teacher = Matrix.packed(16384, teacher_width, "bfloat16")
    call = a_call(loss, 16384, 16384, 768, teacher_query=teacher, teacher_key=teacher)
    call_schedule = tiled_schedule(call, DEVICES["h200"])
    assert not call_schedule.cached_columns
    assert not call_schedule.one_pass
    assert {scheduled.purpose for scheduled in call_schedule.passes} == {Purpose.DISTILLATION}
    assert call_schedule.workspace <= 1 << 30  # MAX_DEFAULT_BLOCK_BYTES


@pytest.mark.parametrize(
    ("rows", "options", "method"),
    [(512, {}, "fused"), (512, {"pairs": GivenOptions([KEY_BIAS])}, "tiled"),
     (512, {"set_size": 2}, "tiled"), (512, {"retrieval_ranks": True}, "tiled"), (514, {}, "tiled"),
     (512, {"workspace": 2**20}, "tiled")],
)  # fmt: skip
def test_one_launch_is_for_small_plain_batches(
    rows: int, options: dict[str, Any], method: str
) -> None:
    """2^18 logits at most, of 2^28 multiply-adds, that fit the workspace."""
    call = replace(a_call(LossForm.ROWS, rows, 512, 512, "fp32"), method="auto", **options)
    call_schedule = schedule(call, DEVICES["h200"])
    assert call_schedule.method == method
    assert (call_schedule.one_launch is not None) == (method == "fused")


@pytest.mark.parametrize("side", ["query", "key"])
def test_limits_over_ranks_and_divided_features(side: str) -> None:
    """Each block divides features by a number of its own: then float16 products vary by block."""
    pairs = GivenOptions([FALSE_NEGATIVE_MARGIN])
    call = replace(
        a_call(LossForm.ROWS, 512, 512, 64, "fp16"), pairs=pairs, row_vectors=("query_limits",)
    )
    device = DEVICES["h200"]
    assert tiled_schedule(call, device).operands.precision == "fp16"
    divided = replace(call, **{side: Matrix.packed(512, 64, "float32")})
    assert tiled_schedule(divided, device).operands.precision == "fp32"


def test_precisions_that_a_device_lacks() -> None:
    with pytest.raises(ValueError, match=r"precision: .* capability 75, which lacks the tensor"):
        schedule(a_call(LossForm.BOTH, 1024, 1024, 64), DEVICES["t4"])


@pytest.mark.extras
def test_launches_are_those_that_calls_ask_for() -> None:
    """Kernels over blocks with their options, and how many products, of 400 random calls."""
    cupy = pytest.importorskip("cupy")
    import launches
    from random_problems import Drawing

    seen: Counter[str] = Counter()
    with launches.nothing_runs() as now:
        for index in range(400):
            now.into = into = launches.Recording()
            with cupy.cuda.using_allocator(into.malloc):
                drawn = Drawing(index, into.malloc).call()
                if drawn.problem.weights is not None:  # which kernels find in `upstream`
                    drawn.problem.weights = None
                now.device, call = drawn.device, Call.from_problem(drawn.problem, drawn.gradients)
                outcome = launches.run(drawn)
            if outcome.startswith("refused"):
                with pytest.raises(ValueError, match=r"^(precision|workspace|method): ") as error:
                    schedule(call, drawn.device)
                assert outcome == f"refused: {error.value}"
                continue
            call_schedule = schedule(call, drawn.device)
            if outcome != "done" or call_schedule.passes == ():
                continue
            into.finish()
            taken = [step[:5] for step in into.steps_taken() if step[0].startswith(("ti", "sm"))]
            assert [(*k[:3], k[3], k[4]) for k in pass_summaries(call_schedule)] == [
                (file, name, defines, threads, blocks)
                for file, name, defines, blocks, threads in taken
            ]
            gpu = replace(GPUS["h200"], properties=drawn.device)
            multiplied = sum(
                w.launches for w in schedule_work(call_schedule, gpu) if w.kernel.startswith("cu")
            )
            assert multiplied == sum(step[0] == "_gemm" for step in into.steps_taken())
            seen.update(scheduled.purpose.name for scheduled in call_schedule.passes)
    # random problems have no teacher
    assert seen.keys() == Purpose.__members__.keys() - {Purpose.DISTILLATION.name}
    assert min(seen.values()) > 5


def pass_summaries(call_schedule: Schedule) -> list[tuple[Any, ...]]:
    """File, kernel, -D options, threads and blocks of each launch over a block of logits."""
    summaries: list[tuple[Any, ...]] = []

    def add(kernel: Any, blocks: int) -> None:
        options = tuple(sorted(kernel.options))
        summaries.append((kernel.file, kernel.name, options, kernel.threads, blocks))

    for scheduled in call_schedule.passes:
        for a, rows in enumerate(scheduled.grid.rows):
            for b in scheduled.grid.visits(a):
                columns = scheduled.grid.columns[b]
                m, n = rows.stop - rows.start, columns.stop - columns.start
                diagonal = call_schedule.call.symmetric and rows == columns
                cached = columns.stop <= call_schedule.cached_columns
                kernel = scheduled.diagonal_kernel if diagonal else None
                caching = scheduled.caching_kernel if cached else None
                kernel = caching or kernel or scheduled.kernel
                if scheduled.cached_kernel is not None and cached:
                    strips = -(-m // config.STRIP) * -(-n // 1024)
                    add(scheduled.cached_kernel, strips)
                half = diagonal and scheduled.column_sums and scheduled.shape.square
                half = half and scheduled.purpose is Purpose.STATISTICS
                if isinstance(scheduled.shape, config.Sweep):
                    blocks = scheduled.shape.blocks(m, n, half)
                else:
                    blocks = scheduled.shape.blocks(m, n, call_schedule.device.multiprocessors)
                for _ in range(1 + (scheduled.purpose is Purpose.ONE_PASS)):
                    add(kernel, blocks)
    return summaries
