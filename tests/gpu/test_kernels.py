"""Every loss, dtype and precision on a GPU against the float64 references.

These tests drive the backend itself, from a `Problem`.
"""

import itertools
from typing import Any

import numpy as np
import pytest
from gpu_problems import (
    CASES,
    GRAD_BOUND,
    METHODS,
    MISSING,
    SHAPES,
    STORED_BOUND,
    TEMPERATURES,
    check,
    evaluate,
    fewer,
    find_dtype,
    gpu_only,
    host,
    run,
    smaller,
)
from judge import KINDS, LOSSES, VIEWS, arguments, judged, pairs
from reference_problems import each_once

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels.gpu import config
    from infonce.kernels.gpu import recorded as gpu_recorded
    from infonce.kernels.gpu.device.launcher import device_properties
    from infonce.kernels.gpu.schedule import decisions
    from infonce.kernels.gpu.tiled import gradient as gpu_gradients
    from infonce.kernels.gpu.tiled.backend import GPU
    from infonce.kernels.gpu.tiled.gradient import Accumulator


@pytest.mark.parametrize(("dtype", "precision"), CASES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_against_reference(loss: str, method: str, dtype: str, precision: str) -> None:
    """Sizes around tile boundaries, odd widths, all temperatures and kinds of pairs, strides, and
    workspaces that cut into many blocks."""
    shapes, kinds = range(len(SHAPES)), range(len(KINDS))
    for i, j in fewer(itertools.product(shapes, kinds), 5):
        (m, n, d), kind = SHAPES[i], KINDS[j]
        temperature = TEMPERATURES[(i + j) % 4]
        if kind == "long" and precision == "tf32":
            continue
        args = arguments(loss, *pairs(kind, m, n, d, find_dtype(dtype), i + j))
        ref = judged(loss, args, scale=1 / temperature)
        spaces = [2**28, 2**23] + [150_000 + 3000 * d] * (method == "tiled")
        out = run(
            loss, args, precision, 1 / temperature, view=VIEWS[(i + j) % len(VIEWS)],
            workspace=spaces[(i + 2 * j) % len(spaces)], method=method,
        )  # fmt: skip
        check(out, ref, args, precision, 1 / temperature, call=f"{m, n, d} {kind}")


@pytest.mark.parametrize("kind", ["random", "aligned", "partly aligned", "opposed"])
@pytest.mark.parametrize(("dtype", "precision"), CASES[:6])
@pytest.mark.parametrize("loss", LOSSES)
def test_accuracy_of_a_batch(loss: str, dtype: str, precision: str, kind: str) -> None:
    """The accuracy that the precisions promise, at a size where rounding averages out."""
    rows = smaller(1500, 500)
    for temperature in fewer(TEMPERATURES, 2):
        args = arguments(loss, *pairs(kind, rows, rows, 128, find_dtype(dtype), 3))
        ref = judged(loss, args, scale=1 / temperature)
        # gradients of a loss near 0 are themselves differences of rounded numbers
        averaged = ref.loss > 0.05
        for grad_dtype in {"float32", dtype} if precision != "fp64" else {dtype}:
            out = run(loss, args, precision, 1 / temperature, grad_dtype=find_dtype(grad_dtype))
            check(out, ref, args, precision, 1 / temperature, averaged=averaged, call=grad_dtype)


@pytest.mark.parametrize("cosine", [0.3, 0.8])
@pytest.mark.parametrize("loss", LOSSES)
def test_accuracy_where_rows_share_a_direction(loss: str, cosine: float) -> None:
    """Embeddings that are not centred: the products that make gradients are long sums of terms of
    one sign, and the gradient is what is left of them. Tensor cores truncate as they add."""
    for rows in (1024, 1500):
        query, key = pairs("partly aligned", rows, rows, 128, np.float64, 5)
        common = np.ones(128) / 128**0.5
        args = arguments(loss, *(
            np.asarray((1 - cosine) ** 0.5 * z + cosine**0.5 * common, np.float32)
            for z in (query, key)
        ))  # fmt: skip
        ref = judged(loss, args, scale=1 / 0.07)
        check(run(loss, args, "fp32", 1 / 0.07), ref, args, "fp32", 1 / 0.07, averaged=True)


def test_scale_and_bias_on_the_device() -> None:
    args = pairs("random", 90, 90, 32, np.float32, 0)
    for loss in LOSSES:
        z = arguments(loss, *args)
        for method in METHODS:
            known = run(loss, z, "fp32", 10.0, bias=-5.0, method=method)
            unknown = run(loss, z, "fp32", cupy.asarray(10.0), method=method,
                          bias=cupy.asarray(-5.0, np.float32))  # fmt: skip
            assert known.loss == unknown.loss
            for name, got in unknown.grads.items():
                assert np.array_equal(got, known.grads[name]), (loss, name)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite(loss: str, method: str, value: float) -> None:
    for dtype, precision in (CASES[1], CASES[4]):
        for where in range(2):
            args = list(arguments(loss, *pairs("random", 70, 70, 9, find_dtype(dtype), 1)))
            args[min(where, len(args) - 1)][5, 2] = value
            out = run(loss, args, precision, 10.0, method=method)
            assert np.isnan(out.loss)
            if where == 0 and len(args) == 2:
                finite = np.delete(np.arange(70), 5)
                one_sided = loss in ("info_nce", "lit", "siglip")
                assert not one_sided or np.isfinite(out.losses[finite]).all()


def test_outputs_of_any_strides_and_guards() -> None:
    """Gradients go where they belong, and nothing beside it is touched."""
    for dtype, precision in (CASES[1], CASES[4], CASES[5]):
        for loss in ("clip", "nt_xent", "siglip"):
            z = arguments(loss, *pairs("random", 130, 130, 24, find_dtype(dtype), 2))
            plain = run(loss, z, precision, 15.0)
            names = ("features",) if loss == "nt_xent" else ("image", "text")
            for step in fewer((1, 2), 1 + (loss == "clip")):
                wholes, outs = {}, {}
                for name, a in zip(names, z, strict=True):
                    rows, d = a.shape
                    guarded = cupy.full((rows + 6, step * d + 16), 7.0, a.dtype)
                    wholes[name], outs[name] = guarded, guarded[3:-3, 8 : 8 + step * d : step]
                run(loss, z, precision, 15.0, outs=outs)
                for name in names:
                    assert np.array_equal(host(outs[name]), plain.grads[name])
                    outs[name][...] = 7.0
                    assert bool((wholes[name] == 7.0).all())


@pytest.mark.parametrize(("dtype", "precision"), [CASES[1], CASES[3], CASES[4]])
@pytest.mark.parametrize("loss", LOSSES)
def test_workspace_is_a_ceiling(loss: str, dtype: str, precision: str) -> None:
    """Temporary memory stays within `workspace`, beyond vectors of length M and N."""
    n, d, workspace = 4096, 256, 8 * 2**20
    args = [
        cupy.asarray(z) for z in arguments(loss, *pairs("random", n, n, d, find_dtype(dtype), 0))
    ]
    outs = {"nt_xent": ("features",), "info_nce": ("query", "key"), "lit": ("text",)}
    accumulators = {
        name: cupy.empty(z.shape, z.dtype)
        for name, z in zip(outs.get(loss, ("image", "text")), args, strict=False)
    }
    run(loss, args, precision, 14.0, workspace=workspace, outs=accumulators)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        run(loss, args, precision, 14.0, workspace=workspace, outs=accumulators)
        assert pool.total_bytes() <= workspace + 64 * 8 * 2 * n + 2**20


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), CASES[1:3] + CASES[4:])
@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "clip", "siglip"])  # lit has no dK
def test_destinations_lend_memory(
    loss: str, dtype: str, precision: str, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of half of the rows are gathered where they will be handed out, in 16 bits; of more
    in 32 bits, where rows are no multiple of 16 bytes in the products."""
    names = {"nt_xent": ("features",), "info_nce": ("query", "key")}
    row_bytes = 8 if precision == "fp64" else 4
    operands = config.fastest_operand_precision(
        precision, device_properties(cupy.cuda.runtime.getDevice())
    )
    shapes = [(700, 40), (1301, 8), (701, 201), (612, 512)]
    if dtype == "float32":
        shapes = [(700, 41), (1301, 33), (701, 201), (612, 513)]
    for i, (n, d) in enumerate(shapes):
        args = arguments(loss, *pairs("partly aligned", n, n, d, find_dtype(dtype), i))
        n = len(args[0])
        ids = np.random.default_rng(i).integers(0, n // 2, n) if i % 2 else None
        # half of it has room for nine tenths of dK
        workspace = n * config.product_width(d, operands) * row_bytes * 9 // 5
        options: Any = {"ids": ids, "normalize": normalize, "workspace": workspace}
        if loss == "info_nce":
            options["labels"] = np.random.default_rng(i).integers(0, n, n)
        name = names.get(loss, ("image", "text"))[-1]
        accumulators: list[Any] = []
        outs: dict[str, Any] = {}

        def recorded(*args: Any, accumulators: list[Any] = accumulators) -> Accumulator:
            accumulators.append(Accumulator(*args))
            return accumulators[-1]

        if i % 2:  # the caller's, in the middle of his
            guarded = cupy.full((n + 32, d), 7.0, find_dtype(dtype))
            outs[name] = guarded[16:-16]
        with monkeypatch.context() as patch:
            patch.setattr(gpu_gradients, "Accumulator", recorded)
            patch.setattr(gpu_recorded, "compile_kernels", lambda *_: None)  # which makes them too
            overlaid = run(loss, args, precision, 10.0, outs=outs, **options)
            assert sum(acc.overlay is not None for acc in accumulators) == 1
            patch.setattr(decisions, "overlay_bytes", lambda *args: 0)
            accumulators.clear()
            plain = run(loss, args, precision, 10.0, **options)
            assert not any(acc.overlay is not None for acc in accumulators)
        if not normalize:
            ref = judged(loss, args, scale=10.0, **{k: options[k] for k in ("ids", "labels")
                                                    if k in options})  # fmt: skip
            check(overlaid, ref, args, precision, 10.0)
        got, want = (np.asarray(r.grads[name], np.float64) for r in (overlaid, plain))
        bound = STORED_BOUND[dtype] or GRAD_BOUND[precision]
        assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)
        if i % 2:
            assert bool((guarded[:16] == 7.0).all())
            assert bool((guarded[-16:] == 7.0).all())
        again = run(loss, args, precision, 10.0, outs=outs, **options)
        assert np.array_equal(overlaid.grads[name], again.grads[name])


def test_fused_that_does_not_fit() -> None:
    args = pairs("random", 99, 99, 4, np.float32, 0)
    with pytest.raises(ValueError, match="fused"):
        run("clip", args, "fp32", 1.0, workspace=9999, method="fused")


@pytest.mark.parametrize("method", METHODS)
def test_losses_near_zero_keep_their_digits(method: str) -> None:
    args = pairs("aligned", 50, 50, 256, np.float64, 0)
    ref = judged("clip", args, scale=200.0)
    assert 0 < ref.loss < 1e-40
    out = run("clip", args, "fp64", 200.0, method=method)
    assert out.loss == pytest.approx(ref.loss, rel=1e-11)


def test_work_is_ordered_on_the_current_stream() -> None:
    args = [cupy.asarray(z) for z in pairs("random", 200, 200, 32, np.float32, 0)]
    want = run("clip", args, "fp32", 10.0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        busy = cupy.ones((4096, 4096), np.float32)
        for _ in range(20):
            busy = busy @ busy * np.float32(1e-4)
        late = [z + busy[0, 0] * 0 for z in args]
        out = run("clip", late, "fp32", 10.0)
    assert out.loss == want.loss


@pytest.mark.parametrize("rows", [1, 127, 129, 300])
@pytest.mark.parametrize(("loss", "labels"), [
    ("clip", False), ("nt_xent", False), ("info_nce", False), ("info_nce", True),
])  # fmt: skip
def test_launches_that_serve_several_steps(
    loss: str, labels: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`finalize` computes the ranges and totals that kernels of their own compute, and one launch
    the gradients of both sides: the same bits, but for the order of the sum of losses."""
    args = arguments(loss, *pairs("partly aligned", rows, rows, 40, np.dtype("float32"), 1))
    options = {}
    if labels:  # sets: row i has the positives i and, but for every third row, i + 1
        own = np.arange(rows)
        sets = np.stack([own, np.where(own % 3 == 2, -1, (own + 1) % rows)], 1)
        options["labels"] = cupy.asarray(each_once(sets))
    together = run(loss, args, "fp32", 10.0, **options)
    monkeypatch.setattr(GPU, "_conclusion", lambda *_: None)
    monkeypatch.setattr(gpu_gradients, "FEW_FEATURES", 0)
    apart = run(loss, args, "fp32", 10.0, **options)
    assert together.loss == pytest.approx(apart.loss, rel=1e-14, abs=1e-300)
    for name, gradient in together.grads.items():
        np.testing.assert_array_equal(gradient, apart.grads[name], err_msg=name)


@pytest.mark.parametrize("size", [1e-18, 1e-6, 1e15])
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_length_of_rows_does_not_matter(dtype: str, precision: str, size: float) -> None:
    args = [z.astype(find_dtype(dtype)) for z in pairs("random", 40, 40, 16, np.float32, 0)]
    power = 2.0 ** round(np.log2(size))
    long = [(z.astype(np.float64) * power).astype(z.dtype) for z in args]
    assert run("clip", args, precision, 10.0, normalize=True).loss == pytest.approx(
        run("clip", long, precision, 10.0, normalize=True).loss, rel=1e-12
    )


@pytest.mark.parametrize(("dtype", "precision"), CASES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_reproducible(loss: str, method: str, dtype: str, precision: str) -> None:
    n = smaller(700, 300)
    args = arguments(loss, *pairs("random", n, n, 40, find_dtype(dtype), 5))
    size = 2**21 if method == "tiled" else 2**28
    first = run(loss, args, precision, 30.0, workspace=size, method=method)
    for _ in range(2):
        again = run(loss, args, precision, 30.0, workspace=size, method=method)
        assert np.array_equal(first.losses, again.losses)
        for name, got in again.grads.items():
            assert np.array_equal(got, first.grads[name]), name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_graph_capture(loss: str, method: str) -> None:
    """Everything runs again, on new values, when a captured graph is launched."""
    options: Any = {"method": method}
    z = arguments(loss, *pairs("random", 64, 64, 32, np.float32, 0))
    new = arguments(loss, *pairs("partly aligned", 64, 64, 32, np.float32, 1))
    want = run(loss, new, "fp32", 10.0, **options)
    args = [cupy.asarray(a) for a in z]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        evaluate(loss, args, "fp32", 10.0, **options)  # compiles, allocates
        stream.begin_capture()
        solution, grads, _ = evaluate(loss, args, "fp32", 10.0, **options)
        graph = stream.end_capture()
        for a, b in zip(args, new, strict=True):
            a[...] = cupy.asarray(b)
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(host(solution.losses), want.losses)
        for name, got in grads.items():
            if got is not None:
                assert np.array_equal(host(got), want.grads[name]), name
