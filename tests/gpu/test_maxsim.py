"""MaxSim on a GPU against the float64 reference: scores, winners, gradients of tokens, memory."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import BFLOAT16, EMULATED, MISSING, find_dtype, gpu_only
from infonce.kernels.gpu import config
from infonce.kernels.problem import Problem
from judge import assert_same_bits

import infonce
from infonce import reference
from infonce.reference import maxsim, maxsim_gradients

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels.maxsim import gpu, sizes
    from infonce.kernels.maxsim.tokens import Tokens

# Of the largest element: products are exact in float32 for features of 16 bits, sums are rounded.
# A sum of L maxima of 1 has an error of about L 2^-24; logits are at most 40 here, so probabilities
# have relative errors of 40 times that
BOUND = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-5, "float16": 2e-5}
# queries, their tokens, keys, their tokens, features
SHAPES = [
    (5, 3, 5, 7, 8), (5, 17, 9, 70, 96), (3, 40, 6, 190, 64), (13, 33, 13, 310, 128),
    (4, 16, 4, 152, 128), (4, 32, 4, 153, 128), (3, 7, 5, 20, 264), (3, 5, 3, 9, 13),
]  # fmt: skip


def draw(
    shape: tuple[int, ...], dtype: str, masked: bool, seed: int = 0
) -> tuple[Any, Any, dict[str, Any]]:
    """Tokens on the host with no near ties, so that each winner is certain; and masks."""
    m, query_tokens, n, key_tokens, d = shape
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((m, query_tokens, d)) / d**0.5
    key = rng.standard_normal((n, key_tokens, d)) / d**0.5
    query, key = (z.astype(find_dtype(dtype)) for z in (query, key))
    masks = {}
    if masked:
        masks = {"query_mask": rng.random((m, query_tokens)) < 0.6,
                 "key_mask": rng.random((n, key_tokens)) < 0.6}  # fmt: skip
        masks["query_mask"][0] = False
        masks["key_mask"][np.arange(n), rng.integers(0, key_tokens, n)] = True
    return query, key, masks


def on_device(masks: dict[str, Any]) -> dict[str, Any]:
    return {name: cupy.asarray(mask) for name, mask in masks.items()}


def near(got: Any, want: Any, bound: float) -> None:
    error = np.abs(np.asarray(cupy.asnumpy(got), np.float64) - want).max()
    assert error <= bound * np.abs(want).max(), f"{error / np.abs(want).max()}"


def check(
    query: Any, key: Any, masks: dict[str, Any], bound: float, scale: float = 2.0, **options: Any
) -> Any:
    """info_nce over scores, whose gradients are judged at the winners of the float64 scores."""
    of_tokens = {name: options[name] for name in ("token_mean", "normalize") if name in options}
    grad_dtype = None if query.dtype == np.float64 else np.float32
    got = infonce.info_nce_loss_and_grad(
        cupy.asarray(query), cupy.asarray(key), scale=scale, grad_dtype=grad_dtype,
        **on_device(masks), **options,
    )  # fmt: skip
    scored = maxsim(query, key, **masks, **of_tokens)
    want = reference.info_nce(scored.scores, np.eye(len(key)), scale=scale)
    g = want.grads["query"]
    dq, dk = maxsim_gradients(g, scored, query, key, of_tokens.get("normalize", False))
    near(got.loss, np.asarray(want.loss), bound)
    near(got.grads.query, dq, bound)
    near(got.grads.key, dk, bound)
    return got


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_reference(shape: tuple[int, ...], dtype: str, masked: bool) -> None:
    check(*draw(shape, dtype, masked), BOUND[dtype], token_mean=masked)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_portable(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of other cards than Hopper: products in memory, tiles of them."""
    monkeypatch.setattr(config.precision, "PORTABLE", True)
    monkeypatch.setattr(sizes, "GPU_TILE_BYTES", 2**14)
    monkeypatch.setattr(gpu, "MOST_TILE_ROWS", 32)
    check(*draw((5, 17, 9, 70, 96), dtype, True), BOUND[dtype])


# tokens of queries that count, and the largest number of tokens
COUNTS = {
    "ragged": ([5, 1, 17, 9, 13], 17), "whole units": ([16, 3, 13, 10, 6], 16),
    "one more": ([16, 3, 13, 11, 6], 16), "none at the ends": ([0, 7, 0, 5, 0], 7),
    "one token": ([0, 0, 1, 0, 0], 3), "none": ([0] * 5, 4), "a block": ([40, 39, 41, 40, 32], 41),
    "more than a block": ([40, 40, 40, 40, 33], 40),
    "several blocks": ([33, 40, 29, 1, 0, 40, 40, 40, 40, 38, 35, 40], 40),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", COUNTS)
def test_packed_queries(name: str, dtype: str) -> None:
    """Units and blocks of packed tokens span queries, and may be empty."""
    counts, query_tokens = COUNTS[name]
    m = len(counts)
    query, key, _ = draw((m, query_tokens, m, 20, 128), dtype, False)
    mask = np.arange(query_tokens) < np.array(counts)[:, None]
    mask = np.random.default_rng(1).permuted(mask, axis=1)
    check(query, key, {"query_mask": mask}, BOUND[dtype], token_mean=name == "ragged")


def test_tokens_that_do_not_count() -> None:
    """May hold anything, and get gradient 0; with all that count, masks change nothing."""
    query, key, masks = draw((7, 19, 7, 70, 128), "bfloat16", True)
    arrays = cupy.asarray(query), cupy.asarray(key)
    query[~masks["query_mask"]] = np.nan
    key[~masks["key_mask"]] = np.nan
    spoiled = cupy.asarray(query), cupy.asarray(key)
    full = {name: cupy.ones(mask.shape, bool) for name, mask in masks.items()}
    options: dict[str, Any] = {"scale": 2.0, "grad_dtype": np.float32}
    results = [
        infonce.info_nce_loss_and_grad(q, k, **given, **options)
        for q, k, given in (
            (*arrays, on_device(masks)), (*spoiled, on_device(masks)), (*arrays, {}),
            (*arrays, full),
        )
    ]  # fmt: skip
    for one, other in (results[:2], results[2:]):
        near(one.loss, cupy.asnumpy(other.loss), 1e-6)
        near(one.grads.query, cupy.asnumpy(other.grads.query).astype(np.float64), 2e-6)
        near(one.grads.key, cupy.asnumpy(other.grads.key).astype(np.float64), 2e-6)
    for name, mask in masks.items():
        got = getattr(results[1].grads, name.removesuffix("_mask"))
        assert not cupy.asnumpy(got)[~mask].any()


@pytest.mark.parametrize("winners", [False, True])
@pytest.mark.parametrize(("tile", "key_tokens"), [(64, 190), (104, 310), (128, 250), (152, 300),
                                                  (176, 350)])  # fmt: skip
def test_tails_of_keys(tile: int, key_tokens: int, winners: bool) -> None:
    """Keys that end at half a tile, a tile, or one token later. The last token wins."""
    half = -(-tile // 16) * 8
    lengths = [1, half - 1, half, half + 1, tile, tile + 1, tile + half, tile + half + 1]
    lengths += [2 * tile - 1, key_tokens]
    lengths = [min(length, key_tokens) for length in (*lengths, *reversed(lengths))]
    n = len(lengths)
    query, key, _ = draw((n, 4, n, key_tokens, 128), "bfloat16", False)
    query[:, ::2, 0] = 1
    key[np.arange(n), np.array(lengths) - 1, 0] = 4
    masks: dict[str, Any] = {"key_mask": np.arange(key_tokens) < np.array(lengths)[:, None]}
    if winners:
        check(query, key, masks, BOUND["bfloat16"], scale=0.1)
        return
    masks["query_mask"] = np.arange(4) < np.arange(n)[:, None] % 5
    got = infonce.maxsim_scores(cupy.asarray(query), cupy.asarray(key), **on_device(masks))
    near(got, maxsim(query, key, **masks).scores, 2e-6)


@pytest.mark.parametrize("key_tokens", [31, 32, 33])
def test_keys_of_half_a_tile(key_tokens: int) -> None:
    query, key, _ = draw((12, 5, 12, key_tokens, 64), "bfloat16", False)
    check(query, key, {}, BOUND["bfloat16"])


def test_segments_of_packed_queries() -> None:
    """The busiest multiprocessor has little more to do than others, however many tokens count."""
    segments = gpu.choose_segments(171, 1024, 132, gpu.PACKED_SHARES)
    for tiles in range(43, 172):
        busiest = -(-tiles * segments // 132) * (1024 / segments + gpu.SEGMENT_START)
        assert busiest <= 1.1 * tiles * 1024 / 132


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_normalize(dtype: str) -> None:
    query, key, masks = draw((5, 7, 9, 20, 24), dtype, True)
    query *= np.float32(3.0)
    check(query, key, masks, BOUND[dtype], normalize=True)


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_unit_tokens_of_16_bits_are_rounded(dtype: str, rounding: float) -> None:
    """So a product of unit tokens is off by up to twice the rounding, a score by that of each of
    its tokens."""
    query, key, masks = draw((5, 7, 9, 20, 24), dtype, True)
    got = infonce.maxsim_scores(
        cupy.asarray(3 * query), cupy.asarray(key), normalize=True, **on_device(masks)
    )
    want = maxsim(query, key, normalize=True, **masks).scores
    most = 2.1 * rounding * masks["query_mask"].sum(axis=1)
    assert (np.abs(cupy.asnumpy(got) - want) <= most[:, None]).all()
    assert np.abs(cupy.asnumpy(got) - want).max() > rounding / 8  # else the docs are wrong


def test_negative_products() -> None:
    """Integers do not have the order of negative floats, so warps with negative maxima differ."""
    query, key, masks = draw((6, 20, 7, 170, 128), "bfloat16", True)
    negative = np.abs(query.astype(np.float32)).astype(BFLOAT16)
    key = (-np.abs(key.astype(np.float32))).astype(BFLOAT16)
    check(negative, key, masks, BOUND["bfloat16"])
    negative[3] = -negative[3]
    check(negative, key, masks, BOUND["bfloat16"])


def test_equal_products() -> None:
    """Of equal products the first wins. (On Hopper, products of 16-bit features that differ by less
    than 2^-19 count as equal, and any of these may win.)"""
    query, key, masks = draw((4, 18, 5, 330, 128), "float32", True)
    key[:, 1::2] = key[:, ::2]
    key[:, 200:] = key[:, :130]
    check(query, key, masks, BOUND["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_that_wins_all(dtype: str) -> None:
    """The list of a key token that most query tokens choose is divided among warps."""
    query, key, masks = draw((24, 16, 24, 50, 128), dtype, False)
    key[:, 7] = 0
    key[:, 7, 0] = 9
    query[::2, :, 0] = 5
    check(query, key, masks, BOUND[dtype], scale=0.01)


@pytest.mark.parametrize("workspace", ["1MiB", "1200KiB", "3MiB", "1GiB"])
def test_workspace(workspace: str) -> None:
    """Blocks and pieces, winners kept or computed again, ranges of keys, give the same numbers."""
    shape = (30, 16, 40, 40, 64) if EMULATED else (300, 16, 400, 40, 64)
    query, key, masks = draw(shape, "bfloat16", True)
    check(query, key, masks, BOUND["bfloat16"], workspace=workspace)


def test_same_bits() -> None:
    query, key, masks = draw((20, 33, 24, 200, 128), "bfloat16", True)
    arguments = cupy.asarray(query), cupy.asarray(key)
    results = [
        infonce.info_nce_loss_and_grad(*arguments, scale=2.0, **on_device(masks)) for _ in range(2)
    ]
    assert_same_bits(*results)


def test_scores() -> None:
    query, key, masks = draw((13, 33, 29, 310, 128), "bfloat16", True)
    got = infonce.maxsim_scores(cupy.asarray(query), cupy.asarray(key), **on_device(masks))
    near(got, maxsim(query, key, **masks).scores, 2e-6)


@pytest.mark.parametrize("precision", ["bf16x3", "fp8"])
def test_precisions_that_tokens_lack(precision: str) -> None:
    query, key, _ = draw((4, 5, 4, 7, 8), "float32", False)
    arguments = cupy.asarray(query), cupy.asarray(key)
    with pytest.raises(ValueError, match="precision: expected"):
        infonce.maxsim_scores(*arguments, precision=precision)
    with pytest.raises(ValueError, match="precision: expected"):
        infonce.clip_loss(*arguments, scale=1.0, precision=precision)


def test_keys_without_tokens() -> None:
    """A mask on the device is not read by the host: the loss is NaN, and no kernel waits."""
    query, key, masks = draw((4, 5, 4, 40, 128), "bfloat16", True)
    masks["key_mask"][2] = False
    got = infonce.clip_loss(cupy.asarray(query), cupy.asarray(key), scale=1.0, **on_device(masks))
    assert np.isnan(float(got))


@pytest.mark.parametrize("where", ["query", "key"])
def test_not_finite(where: str) -> None:
    query, key, _ = draw((4, 5, 4, 40, 128), "bfloat16", False)
    {"query": query, "key": key}[where][2, 3, 1] = np.nan
    losses = infonce.info_nce_loss(
        cupy.asarray(query), cupy.asarray(key), scale=1.0, reduction="none"
    )
    expected = np.arange(4) == 2 if where == "query" else np.ones(4, bool)
    np.testing.assert_array_equal(np.isnan(cupy.asnumpy(losses)), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_memory_stays_within_the_workspace(masked: bool) -> None:
    """Of a call whose winners would not fit, and whose gradients of keys would not either."""
    m, n, workspace = 1500, 1700, 96 * 2**20
    rng = cupy.random.default_rng(0)
    query = rng.standard_normal((m, 16, 128), np.float32).astype(BFLOAT16)
    key = rng.standard_normal((n, 64, 128), np.float32).astype(BFLOAT16)
    mask = cupy.arange(16) < rng.integers(4, 17, (m, 1)) if masked else None
    pool = cupy.get_default_memory_pool()
    infonce.info_nce_loss_and_grad(query[:64], key[:64], scale=0.1)
    pool.free_all_blocks()
    before = pool.used_bytes()
    peak = 0

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, pool.total_bytes() - before)

    infonce.info_nce_loss_and_grad(
        query, key, scale=0.1, query_mask=mask, workspace=workspace, progress=progress
    )
    outputs = query.nbytes + key.nbytes
    assert outputs < peak <= workspace + outputs + 2**22


def test_winners() -> None:
    """Winners are maxima up to a relative difference of 2^-19."""
    query, key, _ = draw((8, 20, 9, 330, 128), "bfloat16", False)
    problem = Problem(
        Tokens(cupy.asarray(query)), Tokens(cupy.asarray(key)), 1.0, 1.0, compute_precision="bf16"
    )
    blocks = gpu.make_blocks(problem, None)
    sides = [blocks.stage(problem, side) for side in (problem.query, problem.key)]
    _, winners = blocks.score(*sides, True)
    products = np.einsum("iad,jbd->jiab", query.astype(np.float64), key.astype(np.float64))
    chosen = cupy.asnumpy(winners).astype(np.int64).reshape(9, 8, 20, 1)
    at_winners = np.take_along_axis(products, chosen, axis=3)[..., 0]
    largest = products.max(axis=3)
    assert np.all(largest - at_winners <= 2.0**-18 * np.abs(largest))
