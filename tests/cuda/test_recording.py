"""What calls record, without a GPU: every option that `select.solve` takes, and which launches."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
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
from infonce.kernels.epilogues import SoftmaxGradient
from infonce.kernels.gpu import config, recorded
from infonce.kernels.gpu.device import compiler, recorder
from infonce.kernels.gpu.schedule import BlockPass, choose_method
from infonce.kernels.gpu.tiled import backend
from infonce.kernels.grid import Grid, slices
from infonce.kernels.linear import Classes, Segments
from infonce.kernels.problem import Gradients, Problem, uses_moments

pytestmark = pytest.mark.extras
DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16x3": "float32",
          "bf16": ml_dtypes.bfloat16, "fp16": "float16"}  # fmt: skip


class Device:
    id, compute_capability = 0, "90"


@pytest.fixture(scope="module", autouse=True)
def no_gpu_needed() -> Iterator[None]:
    """Tests compile nothing, and use a device that this machine need not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.cuda, "Device", Device)
        patch.setattr(runtime, "getDevice", lambda: 0)
        patch.setattr(compiler, "start", lambda *_, **__: False)
        patch.setattr(backend, "device_properties", lambda _: DEVICES["sm_90a"])
        yield


def record(*shape: Any, **options: Any) -> Counter[str]:
    """How often each kernel, and each step of another kind, is in the recording of a call."""
    return kernels(recording(*shape, **options))


def recording(
    m: int, n: int, d: int, precision: str, labels: bool = False, ids: bool = False,
    wrt: tuple[bool, bool] = (True, True), gradient: bool = True, **options: Any,
) -> recorder.Recorder:  # fmt: skip
    """The recording of a call."""
    into = recorder.Recorder()

    def array(*shape: int, dtype: Any = DTYPES[precision]) -> Any:
        return cupy.ndarray(shape, dtype, into.malloc(16))

    query = array(m, d)
    if options.get("classes"):
        labels, (order, place, others) = True, (array(m, dtype=np.int64) for _ in range(3))
        in_sums = Segments(place, place, -(-m // 3), order, order)
        options["classes"] = Classes(place, place, in_sums=in_sums, positive_count=others)
    if options.pop("biased", False):
        options["key_bias"] = array(n, dtype=np.float64)
        options["query_bias"] = options["key_bias"] if options.get("symmetric") else None
    problem = Problem(
        query, query if options.get("symmetric") else array(n, d), 14.0, 1 / m,
        array(m, dtype=np.int64) if labels else None,
        1 / m, query_ids=array(m, dtype=np.int64) if ids else None,
        key_ids=array(n, dtype=np.int64) if ids else None, compute_precision=precision,
        known_row_nans=array(m, dtype=np.float64) if labels else None, **options,
    )  # fmt: skip
    gradients = None
    if gradient:
        want_query, want_key = wrt
        want_key = want_key and not problem.symmetric
        query, key = array(m, d) if want_query else None, array(n, d) if want_key else None
        gradients = Gradients(query, key, None, want_query, want_key)
    with cupy.cuda.using_allocator(into.malloc):
        outputs = recorded.solution(problem, gradients, into)
    for array in outputs.values():
        if array is not None:
            recorder.resolve_placeholder(array.data.ptr)
    return into


def kernels(into: recorder.Recorder) -> Counter[str]:
    return Counter(
        step.function.args[2] if isinstance(step, recorder.Launch) else step.do.__name__
        for step in into.steps
    )


@settings(max_examples=200)
@given(
    m=st.integers(1, 3000), n=st.integers(1, 70000), d=st.integers(1, 1100),
    precision=st.sampled_from(sorted(DTYPES)), labels=st.booleans(), ids=st.booleans(),
    wrt=st.sampled_from([(True, True), (True, False), (False, True)]), gradient=st.booleans(),
    normalize=st.booleans(), ranks=st.booleans(),
    scalars=st.sampled_from([(False, False), (True, False), (True, True)]),
    workspace=st.sampled_from([2**24, 2**28]),
)  # fmt: skip
def test_any_call_of_info_nce(
    m: int, n: int, d: int, precision: str, labels: bool, ids: bool, wrt: tuple[bool, bool],
    gradient: bool, normalize: bool, ranks: bool, scalars: tuple[bool, bool],
    workspace: int,
) -> None:  # fmt: skip
    """A call asks only for steps that a plan can replay at the addresses of its own arrays."""
    n = n if labels else max(m, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "MAX_STEPS", 10**6)
        counts = record(
            m, n, d, precision, labels, ids, wrt, gradient, normalize=normalize,
            retrieval_ranks=ranks, scalar_grads=scalars[0], moments=scalars[1],
            workspace=workspace,
        )  # fmt: skip
    listed = labels and gradient and wrt[1]
    for kernel in ("count_queries", "place_queries", "list_queries", "sort_queries"):
        assert counts[kernel] == listed
    assert (counts["ranks"] > 0) == ranks
    assert counts["finalize"] == 1
    # `finalize` has the totals before a gradient pass, unless they contain its dot products
    one_pass = gradient and not {"sweep_gradient", "gradient"} & counts.keys()
    from_dots = scalars == (True, False)
    assert counts["totals"] == (not gradient or one_pass or from_dots)


LOSSES: list[dict[str, Any]] = [
    {}, {"row_direction_weight": 0.5, "column_direction_weight": 0.5}, {"bias": -10.0}
]  # fmt: skip
SMOOTHED, SYMMETRIC = {"label_smoothing": 0.1}, {"symmetric": True}
LIMITED = {"false_negative_margin": 0.1}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("loss", "sums", "more", "products"),  # sums over segments, and those for gradients
    [(SMOOTHED, 1, 1, 1), (SMOOTHED | LOSSES[1], 2, 2, 2), (SMOOTHED | SYMMETRIC, 1, 1, 1),
     ({"joint": True, **SYMMETRIC}, 0, 0, 0), ({"joint": True, **SYMMETRIC, **SMOOTHED}, 1, 1, 1),
     ({"classes": True, **SYMMETRIC}, 1, 1, 1),
     ({"classes": True, **SYMMETRIC, **SMOOTHED}, 2, 2, 2)],
)  # fmt: skip
def test_linear_terms_and_joint_losses(
    loss: dict[str, Any], sums: int, more: int, products: int, gradient: bool, precision: str
) -> None:
    """Sums that losses and gradients need are taken once; `finish` has the terms."""
    into = recording(1000, 1000, 384, precision, gradient=gradient, normalize=True, **loss)
    counts = kernels(into)
    assert counts["segment_pieces"] == counts["join_pieces"] == sums + more * gradient
    assert counts["segment_products"] == products
    assert counts["finalize"] == 1
    assert counts["finalize_linear"] == (sums > 0)
    assert counts["join_rows"] == loss.get("joint", 0)
    options = [options for kernel, options, *_ in launches(into) if kernel == "finish"]
    assert len(options) == gradient
    assert all(defines.get("LINEAR", 0) == (sums > 0) for defines in options)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16x3", "fp64"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("options", [{"biased": True}, LIMITED, {"biased": True, **LIMITED}])
@pytest.mark.parametrize("loss", [*LOSSES[:2], {"labels": True}, SYMMETRIC])
def test_limits_and_biases_of_pairs(
    loss: dict[str, Any], options: dict[str, Any], gradient: bool, precision: str
) -> None:
    """All of it by kernels: nothing reads an array while a call is recorded."""
    shape = 1000, 1000, 384, precision
    counts = record(*shape, gradient=gradient, **loss, **options)
    two_sided, symmetric = "row_direction_weight" in loss, "symmetric" in loss
    biased, limited = "biased" in options, options.keys() >= LIMITED.keys()
    sides = two_sided or symmetric  # of keys too, there are sums
    assert counts["to_products"] == biased * (1 + symmetric) + limited * (1 + sides)
    assert counts["limits"] == counts["positive_products"] == limited
    # Sums have them during the passes, and reference exponents of the gradient
    references = gradient * (two_sided + 2 * symmetric)
    assert counts["add_bias"] == biased * (2 * sides + references)
    assert counts["check_spread"] == (limited and gradient and sides)
    assert counts["finalize"] == 1


def launches(into: recorder.Recorder) -> list[tuple[str, dict[str, int], int, int]]:
    """Kernel, -D options, blocks and shared memory of each launch but `totals`: `finalize` may have
    its results."""
    return [
        (step.function.args[2], step.function.keywords, step.grid, step.shared)  # type: ignore[attr-defined]
        for step in into.steps
        if isinstance(step, recorder.Launch) and step.function.args[2] != "totals"  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_the_scale(loss: dict[str, Any], precision: str) -> None:
    """Taken from feature gradients, it changes no launch but its sum's. Taken from moments, it adds
    an option."""
    shape = 1000, 1000, 384, precision
    without = launches(recording(*shape, **loss))
    assert launches(recording(*shape, scalar_grads=True, **loss)) == without
    with_moments = recording(*shape, scalar_grads=True, moments=True, **loss)
    summing = {"lse", "sweep_lse", "sweep_online", "sigmoid", "sweep_sigmoid"}
    for (kernel, options, *_), (same, before, *_) in zip(
        launches(with_moments), without, strict=True
    ):
        assert kernel == same
        assert options.get("MOMENTS", 0) == (kernel in summing)
        assert before.get("MOMENTS", 0) == 0
    alone = recording(*shape, gradient=False, scalar_grads=True, moments=True, **loss)
    counts = kernels(alone)
    assert sum(counts[kernel] for kernel in summing) == 1
    assert not {"gemm", "finish", "gradient", "sweep_gradient"} & counts.keys()
    one_pass = recording(*shape, wrt=(True, False), scalar_grads=True, moments=True, **loss)
    for kernel, options, *_ in launches(one_pass):
        assert options.get("MOMENTS", 0) == (kernel in summing)


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_many_logits_are_launched_as_before(loss: dict[str, Any]) -> None:
    """From 2^24 logits on, the gradient of the scale changes no launch."""
    for rows, few in ((4096, True), (4104, False)):
        moments = uses_moments(rows * rows, True, False)
        assert moments == few
        shape = rows, rows, 128, "bf16"
        without = launches(recording(*shape, **loss))
        counts = launches(recording(*shape, scalar_grads=True, moments=moments, **loss))
        assert (counts == without) == (not few)


def test_rows_are_staged_once() -> None:
    """The log-sum-exp pass and the gradient pass read the same copies if blocks are the same."""
    assert record(512, 4096, 384, "fp32")["stage"] == 2
    assert record(512, 4096, 384, "fp32", normalize=True, labels=True)["stage"] == 2
    assert record(512, 4096, 384, "fp32", workspace=2**23)["stage"] > 4  # other blocks
    assert not record(512, 4096, 384, "bf16", wrt=(True, False))["stage"]


def test_what_other_blocks_overwrite_is_staged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of blocks of other sizes lies between two passes of the same blocks."""
    monkeypatch.setattr(config, "may_stage_all_rows", lambda *_: False)
    (m, n, d), into = (512, 4096, 384), recorder.Recorder()
    with cupy.cuda.using_allocator(into.malloc):
        query, key, dq, dk = (cupy.empty((rows, d), np.float32) for rows in (m, n, m, n))
        problem = Problem(query, key, 14.0, 1 / m, cupy.empty(m, "i8"), compute_precision="fp32")
        gradients = Gradients(dq, dk)
        epilogue = SoftmaxGradient(cupy.empty(m), cupy.empty(m), None, None, cupy.empty(m))
        gpu = backend.GPU(problem, gradients, into, BlockPass.from_epilogue(epilogue, False, True))
        gpu.buffers.prepare(problem)
        (scheduled,) = gpu.schedule.passes
        for step, staged in ((m, 2), (m, 2), (m // 2, 5), (m, 7)):
            other = replace(scheduled, grid=Grid(slices(m, step), slices(n, n)))
            gpu.run([other], problem, epilogue, gradients)
            assert kernels(into)["stage"] == staged


@pytest.mark.parametrize("wrt", [(True, True), (False, True)])
@pytest.mark.parametrize("precision", ["bf16", "bf16x3"])
def test_one_pass_makes_both_gradients_of_one_softmax(
    precision: str, wrt: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass runs if blocks of all keys have enough rows, with a product a side for each pair of
    parts."""
    monkeypatch.setattr(recorder, "MAX_STEPS", 10**6)
    part_products = 3 if precision == "bf16x3" else 1

    def blocks(m: int, n: int, d: int, **options: Any) -> int:
        """Blocks that are swept in one pass; 0 for two passes."""
        counts = record(m, n, d, precision, wrt=wrt, **options)
        swept = counts["end_online"]
        assert counts["sweep_online"] == 2 * swept
        assert (counts["sweep_lse"] == counts["sweep_gradient"] == 0) == (swept > 0)
        if swept:
            products = wrt[0] + 1 + (counts["_copy"] > 0)
            assert counts["_gemm"] == products * part_products * swept
        return swept

    for m, n, d in ((1024, 8192, 384), (2048, 16384, 768), (4096, 4096, 512)):
        assert blocks(m, n, d) == 1
        assert blocks(m, n, d, normalize=True, labels=True, ids=True) == 1
    large = 65536, 65536, 512
    assert blocks(*large, workspace=2**30) == (16 if precision == "bf16" else 19)
    assert blocks(*large) == (47 if precision == "bf16" else 0)
    assert not blocks(*large, workspace=2**27)
    assert not blocks(1024, 8192, 384, retrieval_ranks=True)
    assert not blocks(1024, 8192, 384, row_direction_weight=0.5, column_direction_weight=0.5)
    assert not record(4096, 4096, 512, "fp16", wrt=wrt)["sweep_online"]


OPTIONS: list[dict[str, Any]] = [
    {"margin": 0.1}, {"decoupled": True}, {"hardness": 2.0},
    {"margin": 0.1, "decoupled": True, "hardness": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("loss", LOSSES[:2])
def test_numbers_of_a_row_take_no_other_steps(
    loss: dict[str, Any], options: dict[str, Any]
) -> None:
    """Plans, and one pass where there is one, with these options too."""
    for shape in ((512, 512, 128, "bf16"), (1024, 1024, 520, "bf16"), (300, 300, 70, "fp64")):
        for scale in ({"moments": True}, {}):
            without = record(*shape, scalar_grads=True, **scale, **loss)
            counts = record(*shape, scalar_grads=True, **scale, **loss, **options)
            assert counts - without == Counter({"raise_scale": int("hardness" in options)})
            assert not without - counts


def test_sets_of_positives_are_set_aside_by_the_same_kernels() -> None:
    """Kernels look for several positives a row only in calls that have several."""
    looking = {"sweep_lse", "sweep_gradient", "sweep_online", "finish", "lse", "gradient"}
    for precision in ("bf16", "fp64"):
        into, dtype = recorder.Recorder(), DTYPES[precision]
        with cupy.cuda.using_allocator(into.malloc):
            query, key = cupy.empty((300, 70), dtype), cupy.empty((300, 70), dtype)
            positives = cupy.empty((300, 3), np.int64)
            problem = Problem(query, key, 14.0, 1 / 300, positives, compute_precision=precision)
            recorded.solution(problem, Gradients(query, key), into)
        set_defines = [(kernel, options.get("SETS", 0)) for kernel, options, *_ in launches(into)]
        assert looking & {kernel for kernel, _ in set_defines}
        for kernel, sets in set_defines:
            assert sets == (kernel in looking), kernel
        for kernel, options, *_ in launches(recording(300, 300, 70, precision, labels=True)):
            assert "SETS" not in options, kernel


def test_exponentials_are_kept_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache stays within the caller's workspace, or within 1/32 of the device's memory."""
    monkeypatch.setattr(recorder, "MAX_STEPS", 10**6)
    clip = {"row_direction_weight": 0.5, "column_direction_weight": 0.5}

    def kept(rows: int, d: int, precision: str = "bf16", **options: Any) -> tuple[int, int]:
        """Blocks that are cached, and others. (Query tiles of the former may be wanted anew.)"""
        counts = record(rows, rows, d, precision, **clip, **options)
        return counts["cached_gradient"], counts["sweep_gradient"] - counts["cached_gradient"]

    assert kept(16384, 1152, workspace_given=False) == (1, 0)
    assert kept(16384, 1152)[0] == 0
    assert kept(16384, 1152, workspace=2**29)[0] > 0
    assert kept(16384, 1152, workspace=2**30) == (1, 0)
    assert kept(16384, 768, workspace_given=False) == (1, 0)
    assert kept(16384, 512, "fp32", workspace_given=False) == (1, 0)
    assert kept(65536, 1024, workspace_given=False) == (1, 3)
    for precision, d in (("bf16", 512), ("fp16", 1152), ("bf16x3", 1152), ("fp32", 320)):
        assert kept(1024, d, precision)[0] == 0
    assert kept(1024, 520, "bf16") == kept(1024, 330, "fp32") == (1, 0)
    assert kept(1024, 520, retrieval_ranks=True)[0] == 0
    assert kept(1024, 520, gradient=False)[0] == 0


def test_copies_and_linear_terms_lie_in_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a joint loss and sums of linear terms take from the blocks; vectors are beside."""
    monkeypatch.setattr(recorder, "MAX_STEPS", 10**6)
    clip = {"row_direction_weight": 0.5, "column_direction_weight": 0.5, "label_smoothing": 0.1}
    for options in (clip, {"symmetric": True, "classes": True}):
        into = recording(65536, 65536, 512, "bf16", workspace=2**28, **options)
        assert sum(into.sizes) <= 2**28 + 32 * 8 * 65536
    joint = {"symmetric": True, "joint": True, "joint_copy_bytes": 2**26}
    into = recording(65536, 65536, 512, "bf16", workspace=2**28, **joint)
    assert sum(into.sizes) <= 2**28 - 2**26 + 32 * 8 * 65536


def test_sums_of_few_queries_are_batched() -> None:
    """A queue of keys: the products that make dQ do not come one by one."""
    for wrt in ((True, True), (True, False)):
        counts = record(256, 65536, 128, "fp32", wrt=wrt)
        assert counts["_gemm"] <= 6 + 3 * wrt[1]
        assert counts["add_dq_copies"] == 1
    assert not record(256, 65536, 128, "bf16")["add_dq_copies"]
    assert not record(256, 65536, 128, "fp32", wrt=(False, True))["add_dq_copies"]


def test_calls_of_many_steps_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_STEPS", 30)
    with pytest.raises(recorder.TooLong):
        record(3000, 3000, 64, "bf16", workspace=2**20)
    monkeypatch.setattr(recorder, "MAX_ARRAYS", 8)
    with pytest.raises(recorder.TooLong):
        record(300, 300, 64, "bf16")


def test_one_launch_for_small_batches_without_a_long_side() -> None:
    """A block meets all rows of the other side: 64 x 16384 took four times as long as by a plan.
    Where plans are graphs, more logits than those of 512 rows take less time by them."""
    cases = {
        "bf16": [(512, 512, 512, True), (128, 2048, 512, True), (32, 8192, 128, False),
                 (512, 513, 64, False), (512, 512, 2048, False)],
        "fp32": [(512, 512, 1024, True), (128, 2048, 128, True), (64, 16384, 512, False),
                 (1024, 512, 64, False)],
    }  # fmt: skip
    for precision, shapes in cases.items():
        for m, n, d, pays in shapes:
            into = recorder.Recorder()
            query, key = (cupy.ndarray((z, d), DTYPES[precision], into.malloc(16)) for z in (m, n))
            problem = Problem(query, key, 14.0, 1 / m, compute_precision=precision)
            assert (choose_method(problem) == "fused") == pays, (precision, m, n, d)
