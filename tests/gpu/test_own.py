"""Own negatives by kernels, beside the float64 reference."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import EMULATED, MISSING, fewer, find_dtype, gpu_only
from infonce.kernels import problem
from infonce.kernels.solve import solve_by_passes

import infonce
from infonce import reference

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels.arrays.backend import ArrayBlocks
    from infonce.kernels.gpu import linear, shard
    from infonce.kernels.gpu import plan as gpu_plan
    from infonce.kernels.gpu import select as gpu_select

FIELDS = ("query", "key", "own", "scale")
# of the gradients' norms: roundings of gradients in their dtype, and of dL/dx
NEAR = {"float64": 1e-11, "float32": 3e-5, "bfloat16": 1e-2, "float16": 2e-3}


def near(got: Any, want: Any, dtype: str, least: float = 1e-36) -> None:
    """`least`: of the norm to which the error is compared, for terms that cancel."""
    error = np.linalg.norm(np.asarray(cupy.asnumpy(got), np.float64) - want)
    assert error <= NEAR[dtype] * max(np.linalg.norm(want), least)


def draw(m: int, n: int, k: int, d: int, dtype: str, seed: int = 0) -> tuple[list[Any], Any]:
    """Queries, keys and own negatives on the host, in the dtype."""
    rng = np.random.default_rng(seed)
    shapes = (m, d), (n, d), (m, k, d)
    z = [rng.standard_normal(shape) / d**0.5 for shape in shapes]
    return [part.astype(find_dtype(dtype)) for part in z], rng


def with_strides(z: np.ndarray, strides: str) -> Any:
    """The array on the device: without gaps, or with elements between any two."""
    if strides == "contiguous":
        return cupy.asarray(z)
    if strides == "columns first":
        return cupy.asarray(z, order="F")
    steps = tuple(slice(None, None, 2) for _ in z.shape)
    wide = cupy.full([2 * n for n in z.shape], np.nan, z.dtype)
    wide[steps] = cupy.asarray(z)
    return wide[steps]


def on_device(value: Any) -> Any:
    """Arrays, or a tuple of them, on the device; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(map(cupy.asarray, value))
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def check(
    z: list[Any], strides: str = "contiguous", least: float = 1e-36,
    wrt: tuple[str, ...] = FIELDS, grad_dtype: Any = np.float32, **options: Any,
) -> Any:  # fmt: skip
    """All results of a call beside the reference's. Returns the gradient of own negatives."""
    query, key, own = (with_strides(part, strides) for part in z)
    got = infonce.info_nce_loss_and_grad(
        query, key, own=own, wrt=wrt, grad_dtype=None if z[0].dtype == np.float64 else grad_dtype,
        **{name: on_device(value) for name, value in options.items()},
    )  # fmt: skip
    if "own_indices" in options and "own_mask" in options:  # what does not count may be anything
        options["own_indices"] = np.where(options["own_mask"], options["own_indices"], -1)
    want = reference.info_nce(*z[:2], own=z[2], **options)
    near(got.loss, want.loss, z[0].dtype.name, least)
    for field in wrt:
        near(getattr(got.grads, field), want.grads[field], z[0].dtype.name, least)
    return got.grads.own


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("k", [1, 3, 4, 17, 70])
@pytest.mark.parametrize(("dtype", "d"), [
    ("bfloat16", 64), ("bfloat16", 203), ("float16", 136), ("float32", 40), ("float32", 300),
    ("float64", 24),
])  # fmt: skip
def test_sizes(dtype: str, d: int, k: int, normalize: bool) -> None:
    """Rows that are read in words of 16 bytes and rows that are not; several groups a row."""
    z, _ = draw(21, 150, k, d, dtype)
    check(z, scale=4.0, normalize=normalize)


@pytest.mark.parametrize("strides", ["gaps", "columns first"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_strides(dtype: str, strides: str) -> None:
    """Of all features. Own negatives that do not count are NaN."""
    z, rng = draw(21, 150, 5, 40, dtype)
    mask = rng.random((21, 5)) < 0.7
    z[2][~mask] = np.nan
    check(z, strides, own_mask=mask, scale=4.0, normalize=True)
    z, indices, _ = draw_table(21, 5, 40, 9, dtype)
    check(z, strides, own_indices=indices, scale=4.0, normalize=True)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("shift", [-300.0, -40.0, 40.0, 300.0])
def test_logits_far_from_those_of_the_batch(dtype: str, shift: float) -> None:
    """One pass chooses its reference exponents from own negatives, and chooses others if the batch
    is far above them."""
    z, _ = draw(140, 260, 3, 64, dtype)
    z[2] = (z[0][:, None] * (shift / (z[0].astype(float) ** 2).sum(1)[:, None, None])).astype(
        z[0].dtype
    ) + z[2]
    check(z, scale=1.0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_negatives_that_are_not_finite(dtype: str, normalize: bool) -> None:
    """They spoil the loss of their row, if they count, and no other."""
    z, rng = draw(30, 140, 6, 40, dtype)
    mask = rng.random((30, 6)) < 0.8
    mask[[3, 7, 9], 1], mask[5, 1] = True, False
    for row, value in ((3, np.nan), (5, np.nan), (7, np.inf), (9, -np.inf)):
        z[2][row, 1, 2] = value
    query, key, own = map(cupy.asarray, z)
    for gradients in (False, True):
        options = {"own": own, "own_mask": cupy.asarray(mask), "scale": 3.0}
        options |= {"normalize": normalize, "reduction": "none"}
        if gradients:
            losses = infonce.info_nce_loss_and_grad(query, key, **options).loss
        else:
            losses = infonce.info_nce_loss(query, key, **options)
        assert np.flatnonzero(np.isnan(cupy.asnumpy(losses))).tolist() == [3, 7, 9]


def test_little_workspace() -> None:
    """Many blocks of rows; own negatives in an array that is not aligned to 16 bytes."""
    z, _ = draw(700, 700, 3, 64, "bfloat16")
    query, key, own = map(cupy.asarray, z)
    memory = cupy.empty(own.size + 1, own.dtype)
    shifted = memory[1:].reshape(own.shape)
    shifted[...] = own
    options = {"scale": 3.0, "workspace": 2**20, "grad_dtype": np.float32}
    aligned, other = (
        infonce.info_nce_loss_and_grad(query, key, own=part, **options) for part in (own, shifted)
    )
    want = reference.info_nce(*z[:2], own=z[2], scale=3.0)
    for got in (aligned, other):
        for field in FIELDS:
            near(getattr(got.grads, field), want.grads[field], "bfloat16")


@pytest.mark.parametrize("normalize", [False, True])
def test_the_vectors_of_a_rank(normalize: bool) -> None:
    """The rank's blocks know nothing of own negatives, so they have plans. Own negatives join the
    sums of its rows between the passes."""
    gpu_plan.forget()
    z, rng = draw(40, 40, 5, 32, "float32")
    mask = rng.random((40, 5)) < 0.8
    want = reference.info_nce(*z[:2], own=z[2], own_mask=mask, scale=5.0, normalize=normalize)
    query, key, own = map(cupy.asarray, z)
    call = problem.Problem(
        query, key, 5.0, 1 / 40, scalar_grads=True, moments=True, own=own,
        own_mask=cupy.asarray(mask), normalize=normalize,
    )  # fmt: skip
    to = problem.Gradients(*map(cupy.empty_like, (query, key)), own=cupy.empty_like(own))
    vectors = shard.VectorsOverRanks()

    class Block(ArrayBlocks):
        def run_pass(self, part: Any, grid: Any, epilogue: Any, gradients: Any) -> None:
            shard.run_block_pass(part, False, epilogue, gradients)

    block = Block(call, to, vectors, linear.GPURows.from_features)
    solved = solve_by_passes(call, block, to)
    near(solved.losses.sum() / 40, want.loss, "float32")
    near(solved.scale_grad, want.grads["scale"], "float32")
    for field in FIELDS[:3]:
        near(getattr(to, field), want.grads[field], "float32")
    assert len(gpu_plan._plans) == 2


def test_a_scale_on_the_device() -> None:
    """A recording has no numbers: nothing may compute with the scale meanwhile."""
    z, _ = draw(140, 260, 5, 64, "float32")
    want = reference.info_nce(*z[:2], own=z[2], scale=3.0)
    arrays = [cupy.asarray(x) for x in z]
    for _ in range(3):  # a plan, replayed, as a graph
        got = infonce.info_nce_loss_and_grad(*arrays[:2], own=arrays[2], scale=cupy.array(3.0))
        assert abs(float(got.loss) - want.loss) < 1e-5 * want.loss
        assert abs(float(got.grads.scale) - want.grads["scale"]) < 1e-5 * want.loss


# --- own negatives in a table, and their biases


def draw_table(
    m: int, k: int, d: int, rows: int, dtype: str, seed: int = 0
) -> tuple[list[Any], np.ndarray, Any]:
    """Queries, keys and a table on the host, indices [m, k] of all its rows but the last, and a
    generator."""
    z, rng = draw(m, m + 30, 1, d, dtype, seed)
    table = (rng.standard_normal((rows, d)) / d**0.5).astype(z[0].dtype)
    return [*z[:2], table], rng.integers(-1, rows - 1, (m, k)), rng


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("k", "rows"), fewer([(1, 5), (3, 700), (300, 3), (17, 40)], 2))
@pytest.mark.parametrize(("dtype", "d"), [
    ("bfloat16", 64), ("bfloat16", 203), ("float16", 136), ("float32", 40), ("float32", 300),
    ("float32", 600), ("float64", 24),
])  # fmt: skip
def test_tables(dtype: str, d: int, k: int, rows: int, normalize: bool) -> None:
    """Rows of the table with no use, with a few, and with more than several pieces."""
    z, indices, _ = draw_table(21, k, d, rows, dtype)
    z[2][-1] = np.nan  # it has no use
    gradient = check(z, own_indices=indices, scale=4.0, normalize=normalize)
    assert not gradient[-1].any()


@pytest.mark.parametrize("shift", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_biases_of_own_negatives(dtype: str, shift: float) -> None:
    """Also biases far from the logits, from which one pass takes its reference exponents."""
    z, rng = draw(140, 260, 3, 64, dtype)
    check(z, scale=1.0, own_bias=rng.standard_normal((140, 3)) + shift)


@pytest.mark.parametrize("normalize", [False, True])
def test_invalid_indices_and_biases_spoil_their_row(normalize: bool) -> None:
    """The host reads no index and no bias on the device."""
    z, indices, rng = draw_table(30, 6, 40, 9, "float32")
    mask, bias = rng.random((30, 6)) < 0.8, rng.standard_normal((30, 6))
    mask[[3, 7, 11], 1], mask[[5, 12], 1] = True, False
    indices[[3, 5], 1] = 10**9, 10**9
    indices[[7, 11, 12], 1] = 0
    bias[[7, 11, 12], 1] = np.nan, np.inf, np.nan
    query, key, table = map(cupy.asarray, z)
    options = {"own": table, "scale": 3.0, "reduction": "none", "normalize": normalize}
    options |= {
        name: cupy.asarray(value)
        for name, value in (("own_indices", indices), ("own_mask", mask), ("own_bias", bias))
    }
    losses = infonce.info_nce_loss(query, key, **options)
    assert np.flatnonzero(np.isnan(cupy.asnumpy(losses))).tolist() == [3, 7, 11]
    # gradients read nothing beyond the table
    got = infonce.info_nce_loss_and_grad(query, key, **options)
    assert np.flatnonzero(np.isnan(cupy.asnumpy(got.loss))).tolist() == [3, 7, 11]
    huge = cupy.asarray(indices.astype(np.uint64))
    huge[20, 0] = 2**64 - 1
    options |= {"own_indices": huge, "own_mask": cupy.ones((30, 6), bool)}
    assert np.isnan(cupy.asnumpy(infonce.info_nce_loss(query, key, **options))[20])


@pytest.mark.parametrize("in_table", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plans_and_graphs_give_the_same_bits(monkeypatch: Any, dtype: str, in_table: bool) -> None:
    """Calls launch by launch, by a plan and by a graph: of other scales each, or of other indices.
    One row of the table has most of the uses."""
    gpu_plan.forget()
    options: dict[str, Any] = {}
    z, rng = draw(140, 260, 5, 64, dtype)
    if in_table:
        z, indices, rng = draw_table(140, 5, 64, 50, dtype)
        bias = cupy.asarray(rng.standard_normal((140, 5)))
        options = {"own_indices": cupy.asarray(indices), "own_bias": bias}
    query, key, own = map(cupy.asarray, z)
    out = {
        name: cupy.empty_like(part) for name, part in zip(FIELDS, (query, key, own), strict=False)
    }

    def results(turn: int) -> list[Any]:
        if in_table:
            popular = np.random.default_rng(turn).random(indices.shape) < 0.7
            chosen = np.where(popular, turn, (indices + turn) % 49)
            options["own_indices"][...] = cupy.asarray(chosen)
        scale = 3.0 if in_table or turn < 3 else 5.0
        got = infonce.info_nce_loss_and_grad(query, key, own=own, scale=scale, out=out, **options)
        return [cupy.asnumpy(part) for part in (got.loss, *got.grads)]

    by_plan = [results(turn) for turn in range(4)]
    assert len(gpu_plan._plans) == 1
    monkeypatch.setattr(gpu_select, "has_plan", lambda *_: False)
    for turn, got in enumerate(by_plan):
        for a, b in zip(got, results(turn), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(EMULATED, reason="CuPy's hooks of memory")
def test_a_table_is_not_gathered() -> None:
    """No array that a call makes has as many numbers as all own negatives."""
    z, indices, _ = draw_table(64, 64, 256, 100, "float32")
    arrays = [*map(cupy.asarray, z), cupy.asarray(indices)]
    largest = 0

    class Hook(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "sizes"

        def malloc_preprocess(self, **arguments: Any) -> None:
            nonlocal largest
            largest = max(largest, arguments["size"])

    options = {"own": arrays[2], "own_indices": arrays[3], "scale": 3.0, "workspace": 2**20}
    with Hook():
        infonce.info_nce_loss_and_grad(*arrays[:2], **options)
    assert largest < indices.size * 256 * 4


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_normalised_rows_of_any_size(dtype: str, size: float) -> None:
    """Squares of such features are 0 or infinite in float32."""
    z, _ = draw(20, 140, 5, 48, dtype)
    z[0], z[2] = (part * z[0].dtype.type(size) for part in (z[0], z[2]))
    check(z, scale=4.0, normalize=True)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_normalised_tables_of_any_size(dtype: str, size: float) -> None:
    z, indices, _ = draw_table(20, 20, 48, 9, dtype)
    z[0], z[2] = (part * part.dtype.type(size) for part in (z[0], z[2]))
    check(z, own_indices=indices, scale=4.0, normalize=True)


@pytest.mark.parametrize("options", [
    {"hardness": 5.0, "false_negative_margin": 0.1}, {"margin": 0.2, "in_batch": False},
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_options(dtype: str, options: dict[str, Any]) -> None:
    z, _ = draw(21, 150, 5, 40, dtype)
    check(z, scale=6.0, normalize=True, **options)
    z, indices, rng = draw_table(21, 5, 40, 9, dtype)
    options = options | {"own_indices": indices, "own_bias": rng.standard_normal((21, 5))}
    check(z, scale=6.0, normalize=True, **options)


@pytest.mark.parametrize("wrt", [FIELDS, ("key", "scale"), ("own", "scale")])
@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_the_scale_from_feature_gradients(
    monkeypatch: pytest.MonkeyPatch, margin: float, wrt: tuple[str, ...]
) -> None:
    """In large batches, own negatives and a margin each add their part."""
    monkeypatch.setattr(problem, "FEW_LOGITS", 0)
    z, _ = draw(140, 150, 5, 40, "float32")
    options: dict[str, Any] = {"scale": 3.0, "margin": margin}
    check(z, wrt=wrt, **options)
