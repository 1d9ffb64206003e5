"""Guides on a GPU: marks of pairs, which kernels read; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, find_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_problems import one_problem

import infonce
from infonce import reference

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy
    from infonce.kernels.gpu import plan as gpu_plan
    from infonce.kernels.gpu import select as gpu_select
    from infonce.kernels.gpu.tiled.guide import Guide

NAMES = ("info_nce", "nt_xent", "clip", "lit", "gte")


WORKSPACES = st.sampled_from([2**19, None])


def placed(value: Any) -> Any:
    """Arrays, or a tuple of them, on the GPU."""
    return tuple(map(cupy.asarray, value)) if isinstance(value, tuple) else cupy.asarray(value)


SIDES = st.sampled_from([1, 127, 128, 129, 200, 257])


@settings(max_examples=4, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["info_nce", "clip", "nt_xent"])
def test_marks_on_both_sides_of_tiles(name: str, dtype: str, data: st.DataObject) -> None:
    """Guides whose products every precision holds exactly, none within 0.5 of a limit; one block
    and several, of rows of one K-slice and of several."""
    rows, columns = data.draw(SIDES, "rows"), data.draw(SIDES, "columns")
    width, guide_width = (data.draw(st.sampled_from([8, 40, 136]), label) for label in ("D", "E"))
    rows += rows % 2 if name == "nt_xent" else 0
    columns = columns if name == "info_nce" and columns > rows else rows
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    sizes = (rows, columns)[: 1 + (name != "nt_xent")]
    z = [(rng.normal(size=(n, width)) / width**0.5).astype(find_dtype(dtype)) for n in sizes]
    guide = [rng.integers(-2, 3, (n, guide_width)) * 1.0 for n in sizes]
    options: dict[str, Any] = {"scale": 4.0, "guide_margin": 0.5}
    guides = tuple(guide) if len(guide) > 1 else guide[0]
    want = getattr(reference, name)(*(a.astype(np.float64) for a in z), guide=guides, **options)
    of_dtype = [cupy.asarray(a.astype(find_dtype(dtype))) for a in guide]
    got = getattr(infonce, f"{name}_loss_and_grad")(
        *map(cupy.asarray, z), guide=tuple(of_dtype) if len(guide) > 1 else of_dtype[0],
        grad_dtype=np.float32, method="tiled", workspace=data.draw(WORKSPACES), **options,
    )  # fmt: skip
    tolerance = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    assert abs(float(got.loss) - want.loss) <= 2e-6 * max(1, want.loss)
    for gradient, argument in zip(want.grads.values(), got.grads, strict=False):
        difference = np.linalg.norm(argument.get() - gradient)
        assert difference <= tolerance * np.linalg.norm(gradient) + 1e-9


@pytest.mark.parametrize(
    ("name", "dtype"), [("clip", "bfloat16"), ("clip", "float32"), ("info_nce", "float32")]
)
def test_marks_of_several_blocks_are_kept(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass marks all pairs, and the gradient pass reads these marks in other blocks."""
    blocks: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    mark = Guide.mark

    def spy(guide: Guide, rows: slice, columns: slice, *args: Any) -> Any:
        if guide.keeps_marks:
            blocks[args[-1]].add((rows.start, columns.start))
        return mark(guide, rows, columns, *args)

    monkeypatch.setattr(Guide, "mark", spy)
    rows, columns = 600, 600 if name == "clip" else 1000
    rng = np.random.default_rng(4)
    z = [(rng.normal(size=(n, 8)) / 8**0.5).astype(find_dtype(dtype)) for n in (rows, columns)]
    guide = [rng.integers(-2, 3, (n, 5)) * 1.0 for n in (rows, columns)]
    options: dict[str, Any] = {"scale": 4.0, "guide_margin": 0.5}
    want = getattr(reference, name)(
        *(a.astype(np.float64) for a in z), guide=tuple(guide), **options
    )
    got = getattr(infonce, f"{name}_loss_and_grad")(
        *map(cupy.asarray, z), guide=placed(tuple(a.astype(find_dtype(dtype)) for a in guide)),
        grad_dtype=np.float32, method="tiled", workspace=2 * rows * columns, **options,
    )  # fmt: skip
    assert len(blocks[False]) > 1
    assert blocks[True] != blocks[False]
    assert abs(float(got.loss) - want.loss) <= 2e-6 * max(1, want.loss)
    for gradient, argument in zip(want.grads.values(), got.grads, strict=False):
        difference = np.linalg.norm(argument.get() - gradient)
        tolerance = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
        assert difference <= tolerance * np.linalg.norm(gradient)


# operands of up to 1024 bytes a row stay in a sweep's shared memory, longer ones do not
@pytest.mark.parametrize("width", [16, 576])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("info_nce", "float16"), ("clip", "bfloat16")])
def test_marks_of_normalized_and_of_wide_rows(
    name: str, dtype: str, normalize: bool, width: int
) -> None:
    """Guides of -1 and 1, whose products differ by even numbers; the margin is odd."""
    rng = np.random.default_rng(width)
    z = [rng.normal(size=(n, 8)).astype(find_dtype(dtype)) for n in (130, 130 + (name != "clip"))]
    guide = [rng.choice([-1.0, 1.0], (len(a), width)) for a in z]
    options: dict[str, Any] = {"scale": 4.0 if normalize else 0.5, "normalize": normalize}
    options["guide_margin"] = -(width // 16 | 1) / (width if normalize else 1)
    want = getattr(reference, name)(
        *(a.astype(np.float64) for a in z), guide=tuple(guide), **options
    )
    got = getattr(infonce, f"{name}_loss_and_grad")(
        *map(cupy.asarray, z), guide=placed(tuple(a.astype(find_dtype(dtype)) for a in guide)),
        grad_dtype=np.float32, method="tiled", **options,
    )  # fmt: skip
    assert abs(float(got.loss) - want.loss) <= 2e-6 * max(1, want.loss)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [0, -1])
def test_a_guide_that_is_not_finite_makes_losses_nan(name: str, side: int) -> None:
    problem = one_problem(name, rows=6)
    guide = [a for a in np.random.default_rng(3).normal(size=(len(problem.features), 6, 5))]
    guide[side][2, 1] = np.inf
    guides = tuple(guide) if len(guide) > 1 else guide[0]
    with np.errstate(invalid="ignore"):
        want = problem._replace(softmax={"guide": guides}).reference()
    options = {k: v for k, v in problem.options().items() if k not in ("weights", "guide")}
    function = getattr(infonce, f"{name}_loss_and_grad")
    features = map(cupy.asarray, problem.features)
    options |= {"guide": placed(guides), "reduction": "none"}
    got = function(*features, **options)
    np.testing.assert_array_equal(np.isnan(got.loss.get()), np.isnan(want.losses))
    for gradient, argument in zip(want.grads.values(), got.grads, strict=False):
        if gradient is not None:
            np.testing.assert_array_equal(np.isnan(argument.get()), np.isnan(gradient))


@pytest.mark.parametrize("method", ["naive", "fused", "tiled"])
@pytest.mark.parametrize(("name", "side", "all_rows"), [
    ("info_nce", 0, False), ("info_nce", 1, True), ("clip", 0, True), ("gte", 1, True),
])  # fmt: skip
def test_a_guide_that_is_not_finite_is_seen_if_its_pairs_are_excluded(
    name: str, side: int, all_rows: bool, method: str
) -> None:
    features, guide = np.random.default_rng(3).normal(size=(2, 2, 6, 5))
    guide[side, 2, 1] = np.inf
    losses = getattr(infonce, f"{name}_loss")(
        *map(cupy.asarray, features), scale=1.0, normalize=True, reduction="none", method=method,
        guide=placed(tuple(guide)), ids=cupy.zeros(6, int),
    )  # fmt: skip
    assert np.array_equal(np.isnan(losses.get()), all_rows | (np.arange(6) == 2))


@pytest.mark.parametrize(("name", "launches"), [("info_nce", 4), ("nt_xent", 6), ("clip", 5)])
def test_one_plan_serves_all_guides(
    name: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two guides, one of them not finite: the bits of calls without a plan. A guide adds launches
    of three kernels for its limits and NaNs, and of one kernel for its marks (in each pass, if
    queries are the keys); columns that leave out pairs also make a call check the range of
    log-sum-exps."""
    gpu_plan.forget()
    sides = 1 + (name != "nt_xent")
    values = np.random.default_rng(1).standard_normal((3, sides, 140, 24))
    values[2, 0, 3, 5] = np.nan
    features, *guides = cupy.asarray(values.astype(find_dtype("bfloat16")))
    function = getattr(infonce, f"{name}_loss_and_grad")

    def call(**options: Any) -> list[Any]:
        out = function(*features, scale=4.0, method="tiled", grad_dtype="float32", **options)
        return [a.get() for a in (out.loss, *out.grads) if a is not None]

    for guide in guides:
        options = {"guide": tuple(guide) if sides == 2 else guide[0]}
        got = call(**options)
        with monkeypatch.context() as patch:
            patch.setattr(gpu_select, "has_plan", lambda *_: False)
            want = call(**options)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
    assert np.isnan(got[0])
    call()
    guided, plain = (len(plan.steps) for plan in gpu_plan._plans.values())
    assert guided == plain + launches


def test_a_guide_elsewhere_is_refused() -> None:
    z = np.eye(4)
    with pytest.raises(ValueError, match=r"guide\[0\]: expected an array on GPU 0 like image"):
        infonce.clip_loss(placed(z), placed(z), scale=1.0, guide=(z, z))


def test_a_guide_below_all_margins_has_the_bits_of_none() -> None:
    z = np.random.default_rng(0).standard_normal((4, 30, 8)).astype(np.float32)
    pair, guide = [placed(a) for a in z[:2]], placed(tuple(z[2:]))
    got = infonce.clip_loss_and_grad(*pair, scale=3.0, guide=guide, guide_margin=np.inf)
    want = infonce.clip_loss_and_grad(*pair, scale=3.0)
    assert got.loss.get() == want.loss.get()
    np.testing.assert_array_equal(got.grads.image.get(), want.grads.image.get())
    expected = reference.clip(*z[:2], scale=3.0).loss
    np.testing.assert_allclose(want.loss.get(), expected, rtol=1e-5)


@pytest.mark.parametrize("workspace", [2**17, 2**16])  # one side stays, or a part of it
@pytest.mark.parametrize("name", ["info_nce", "clip", "nt_xent"])
def test_both_passes_leave_out_the_same_pairs_of_host_memory(
    name: str, workspace: int, tmp_path: Any
) -> None:
    """The guide's rows differ by rounding, so that digits beyond float32 decide which pairs take
    part. Slopes of a row add up to 0 if those in its sum are those in its gradient."""
    rng = np.random.default_rng(2)
    guide = rng.standard_normal(37) / 6 + 6e-8 * rng.standard_normal((2, 150, 37))
    z = rng.standard_normal((2, 150, 8)).astype(np.float32)
    z[:, :, -1] = 1.0  # whose gradient is the sum of the slopes
    np.save(tmp_path / "guide.npy", guide.astype(np.float32))
    mapped = np.load(tmp_path / "guide.npy", mmap_mode="r")
    sides = 1 if name == "nt_xent" else 2
    got = getattr(infonce, f"{name}_loss_and_grad")(
        *z[:sides], scale=1.0, reduction="sum", offload=True, workspace=workspace,
        guide=tuple(mapped) if sides == 2 else mapped[0],
    )  # fmt: skip
    lse = np.concatenate(got.lse) if name == "clip" else got.lse
    assert len(np.unique(lse.round(2))) > 20
    total = sum(gradient[:, -1].sum() for gradient in got.grads[:-1])
    assert np.abs(total).max() < 1e-3
