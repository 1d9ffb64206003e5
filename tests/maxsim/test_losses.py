"""Losses over MaxSim scores on the CPU: against the float64 reference, and against dot products."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from infonce.kernels.grid import Grid, gradient_visits, slices
from infonce.kernels.maxsim import division

import infonce
from infonce import reference, spec
from infonce.reference import MaxSim, maxsim, maxsim_gradients

LOSSES = ("clip", "info_nce", "lit", "siglip")
SIDES = {"clip": ("image", "text"), "info_nce": ("query", "key"), "lit": ("text", "image"),
         "siglip": ("image", "text")}  # fmt: skip


def draw(
    m: int, n: int, query_tokens: int, key_tokens: int, d: int, seed: int, masked: bool = True
) -> tuple[Any, Any, dict[str, Any]]:
    """Queries and keys of float64 tokens, with ties, and masks with a query without tokens."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((m, query_tokens, d)) / d**0.5
    key = rng.standard_normal((n, key_tokens, d)) / d**0.5
    key[:, 1::2] = key[:, ::2][:, : key[:, 1::2].shape[1]]  # equal tokens: the first one wins
    masks = {}
    if masked:
        masks = {"query_mask": rng.random((m, query_tokens)) < 0.6,
                 "key_mask": rng.random((n, key_tokens)) < 0.6}  # fmt: skip
        masks["query_mask"][0] = False
        masks["key_mask"][np.arange(n), rng.integers(0, key_tokens, n)] = True
    return query, key, masks


def judged(
    loss: str, query: Any, key: Any, masks: dict[str, Any], scale: float, **options: Any
) -> tuple[float, Any, Any, float]:
    """(loss, dq, dk, dscale) by the float64 reference. `token_mean`, `normalize`: see `maxsim`."""
    of_tokens = {name: options.pop(name, False) for name in ("token_mean", "normalize")}
    scored: MaxSim = maxsim(query, key, **masks, **of_tokens)
    unit = np.eye(len(key))
    want = getattr(reference, loss)(scored.scores, unit, scale=scale, **options)
    g = want.grads[SIDES[loss][0]]
    if loss == "siglip":
        options.setdefault("bias", -10.0)
    dq, dk = maxsim_gradients(g, scored, query, key, of_tokens["normalize"])
    return want.loss, dq, dk, want.grads["scale"]


def near(got: Any, want: Any, bound: float) -> None:
    largest = np.abs(want).max(initial=0.0)
    error = np.abs(np.asarray(got, np.float64) - want).max(initial=0.0)
    assert error <= bound * max(largest, 1e-300), f"{error / max(largest, 1e-300)}"


def check(loss: str, query: Any, key: Any, masks: dict[str, Any], bound: float, **o: Any) -> None:
    got = getattr(infonce, f"{loss}_loss_and_grad")(query, key, scale=1.5, **masks, **o)
    reference_options = {k: v for k, v in o.items() if k != "workspace"}
    if loss == "siglip":
        reference_options["bias"] = -10.0
    want, dq, dk, dscale = judged(loss, query, key, masks, 1.5, **reference_options)
    near(got.loss, want, bound)
    first, second = SIDES[loss]
    near(getattr(got.grads, first), dq, bound)
    if loss != "lit":
        near(getattr(got.grads, second), dk, bound)
    near(got.grads.scale, dscale, bound)


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(LOSSES), m=st.integers(1, 7), query_tokens=st.integers(1, 9),
    key_tokens=st.integers(1, 40), d=st.sampled_from([1, 3, 16]), masked=st.booleans(),
    mean=st.booleans(), normalize=st.booleans(), negative=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@example(
    loss="clip", m=1, query_tokens=1, key_tokens=1, d=1, masked=False, mean=False, normalize=False,
    negative=False, seed=0,
)  # fmt: skip
def test_against_reference(
    loss: str, m: int, query_tokens: int, key_tokens: int, d: int, masked: bool, mean: bool,
    normalize: bool, negative: bool, seed: int,
) -> None:  # fmt: skip
    """`negative`: all products are negative."""
    n = m + 3 * (loss == "info_nce")
    query, key, masks = draw(m, n, query_tokens, key_tokens, d, seed, masked)
    if negative:
        query, key = np.abs(query), -np.abs(key)
    if normalize and d == 1:
        normalize = False  # all tokens would be 1 or -1, and all gradients 0
    check(loss, query, key, masks, 1e-12, token_mean=mean, normalize=normalize)


@pytest.mark.parametrize("workspace", ["4MiB", "5MiB", "1GiB"])
@pytest.mark.parametrize("loss", LOSSES)
def test_blocks(loss: str, workspace: str) -> None:
    """Several blocks, ranges of keys and pieces; scores and winners kept or computed again."""
    query, key, masks = draw(90, 90, 20, 30, 24, 1)
    check(loss, query, key, masks, 1e-12, workspace=workspace)


@settings(max_examples=40)
@given(
    m=st.integers(1, 3000), n=st.integers(1, 3000), query_tokens=st.integers(1, 40),
    key_tokens=st.integers(1, 600), workspace=st.integers(2**20, 2**29),
    has_second_pass=st.booleans(), all_keys=st.booleans(),
)  # fmt: skip
def test_passes_over_ranges_of_keys_have_the_same_blocks(
    m: int, n: int, query_tokens: int, key_tokens: int, workspace: int, has_second_pass: bool,
    all_keys: bool,
) -> None:  # fmt: skip
    """Scores and winners are kept by the first row and key of their block."""
    token = 128 * 36
    sizes = division.Sizes(
        m, n, 128, query_tokens * token, key_tokens * token, key_tokens * 512, 4, 2 * query_tokens,
        4 * query_tokens, 2**20, query_tokens, 1024, 1024,
    )  # fmt: skip
    try:
        found = division.divide(sizes, workspace, has_second_pass, True, all_keys)
    except ValueError:
        return
    whole = Grid(slices(m, found.rows), slices(n, found.columns))
    ranges = slices(n, found.key_rows or n)
    for grid, *_ in gradient_visits(whole, ranges, False, True, True):
        assert {(c.start, c.stop) for c in grid.columns} <= {
            (c.start, c.stop) for c in whole.columns
        }


def test_a_range_of_keys_smaller_than_a_block() -> None:
    query, key, masks = draw(1100, 200, 1, 16, 256, 1)
    labels = np.arange(1100) % 200
    check("info_nce", query, key, masks, 1e-11, workspace="15MiB", labels=labels)


def test_memory_within_the_workspace() -> None:
    """Also where the gradients of keys accumulate, and are completed at the end."""
    query, key = (
        np.random.default_rng(0).standard_normal((256, 32, 128), np.float32) for _ in range(2)
    )
    for loss in ("clip", "siglip"):
        more = {"bias": 0.0} if loss == "siglip" else {}
        function = getattr(infonce, f"{loss}_loss_and_grad")
        tracemalloc.start()
        try:
            out = function(query, key, scale=2.0, normalize=True, workspace=2**24, **more)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak - sum(z.nbytes for z in out.grads[:2]) <= 2**24


OPTIONS: list[dict[str, Any]] = [
    {}, {"ids": 1}, {"groups": 1}, {"key_bias": 2}, {"margin": 0.2}, {"decoupled": True},
    {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "groups": 1},
    {"label_smoothing": 0.1, "ids": 1, "key_bias": 2}, {"hardness": 0.3},
    {"false_negative_margin": 0.1}, {"guide": 3, "guide_margin": 0.1}, {"weights": 4},
    {"normalize": True}, {"reduction": "none", "grad_out": 4}, {"metrics": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
@pytest.mark.parametrize("loss", LOSSES)
def test_one_token_is_a_dot_product(loss: str, options: dict[str, Any]) -> None:
    """With one token a row, each option means what it means for rows."""
    rng = np.random.default_rng(0)
    n, d = 9, 8
    query, key = rng.standard_normal((2, n, d))
    arrays = {
        1: rng.integers(0, 4, n), 2: rng.standard_normal(n),
        3: tuple(rng.standard_normal((2, n, 4))), 4: rng.random(n),
    }  # fmt: skip
    given_options = {
        name: arrays[value] if type(value) is int else value for name, value in options.items()
    }
    if not {*options}.isdisjoint(spec.LOSSES[loss].refused):
        return  # an option of the softmax, for siglip
    function = getattr(infonce, f"{loss}_loss_and_grad")
    want = function(query, key, scale=0.9, **given_options)
    got = function(query[:, None], key[:, None], scale=0.9, **given_options)
    near(got.loss, np.asarray(want.loss), 1e-13)
    for name, value in want.grads._asdict().items():
        if value is not None:
            near(np.asarray(getattr(got.grads, name)).reshape(value.shape), value, 1e-12)
    if want.metrics is not None:
        np.testing.assert_array_equal(got.metrics.row_rank, want.metrics.row_rank)


def test_scores() -> None:
    query, key, masks = draw(6, 11, 4, 7, 8, 2)
    for options in ({}, {"token_mean": True}, {"normalize": True}):
        want = maxsim(query, key, **masks, **options).scores
        near(infonce.maxsim_scores(query, key, **masks, **options), want, 1e-13)
        single = infonce.maxsim_scores(
            query.astype(np.float32), key.astype(np.float32), **masks, **options
        )
        assert single.dtype == np.float32
        near(single, want, 1e-5)


def test_same_bits() -> None:
    """Winners that are kept, and winners that are computed again, give the same bits."""
    query, key, masks = draw(90, 90, 20, 30, 24, 3)
    query, key = query.astype(np.float32), key.astype(np.float32)
    results = [
        infonce.clip_loss_and_grad(query, key, scale=2.0, **masks, workspace=workspace)
        for workspace in ("1GiB", "1GiB", "12MiB")
    ]
    for got in results[1:]:
        np.testing.assert_array_equal(got.loss, results[0].loss)
        for z, want in zip(got.grads[:2], results[0].grads[:2], strict=True):
            np.testing.assert_array_equal(z, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(bad: float) -> None:
    """A token that counts makes its losses NaN; one that does not is not read."""
    query, key, _ = draw(5, 5, 3, 4, 6, 4, masked=False)
    query[2, 1, 0] = bad
    losses = infonce.info_nce_loss(query, key, scale=1.0, reduction="none")
    np.testing.assert_array_equal(np.isnan(losses), np.arange(5) == 2)
    mask = np.ones((5, 3), bool)
    mask[2, 1] = False
    assert np.isfinite(infonce.info_nce_loss(query, key, scale=1.0, query_mask=mask))
    infonce.info_nce_loss(query, key, scale=1.0, query_mask=mask, check_finite=True)
    query[2, 1, 0] = 1e308
    assert np.isfinite(infonce.info_nce_loss(query, 2 * key, scale=9.0, query_mask=mask))
    query[2, 1, 0] = bad
    key[1, 3, 2] = bad
    assert np.isnan(infonce.info_nce_loss(query, key, scale=1.0, query_mask=mask))


def test_norms_beyond_the_precision() -> None:
    """Tokens of float64 are divided by their norms before they become float32."""
    query, key, _ = draw(5, 5, 3, 4, 6, 4, masked=False)
    options: dict[str, Any] = {"normalize": True, "precision": "fp32", "label_smoothing": 0.1}
    want = infonce.clip_loss(query, key, scale=1.0, **options)
    got = infonce.clip_loss(2.0**400 * query, key, scale=1.0, **options)
    assert got == want


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"query_mask": np.ones((5, 2), bool)}, r"query_mask: expected shape \(5, 3\)"),
    ({"key_mask": np.ones((5, 4))}, "key_mask: expected dtype bool"),
    ({"key_mask": np.zeros((5, 4), bool)}, "key_mask: expected at least one token .* key 0"),
    ({"own": np.ones((5, 2, 6))}, "own: expected None with features of three dimensions"),
    ({"method": "naive"}, "method: expected .* with features of three dimensions"),
    ({"offload": True}, "offload: expected False with features of three dimensions"),
    ({"token_mean": 1}, "token_mean: expected True or False"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS, ids=[next(iter(o)) for o, _ in ERRORS])
def test_errors(options: dict[str, Any], message: str) -> None:
    query, key, _ = draw(5, 5, 3, 4, 6, 5, masked=False)
    with pytest.raises((TypeError, ValueError), match=message):
        infonce.info_nce_loss(query, key, scale=1.0, **options)


def test_errors_of_shapes() -> None:
    query, key, _ = draw(5, 5, 3, 4, 6, 5, masked=False)
    with pytest.raises(ValueError, match=r"text: expected 3 dimensions .* like image"):
        infonce.clip_loss(query, key[:, 0], scale=1.0)
    with pytest.raises(ValueError, match="key: expected width 6 like query"):
        infonce.maxsim_scores(query, key[:, :, :5])
    with pytest.raises(ValueError, match="query: expected 3 dimensions"):
        infonce.maxsim_scores(query[:, 0], key[:, 0])
    with pytest.raises(ValueError, match="token_mean: expected False with features of two"):
        infonce.clip_loss(query[:, 0], key[:, 0], scale=1.0, token_mean=True)
    with pytest.raises(ValueError, match="workspace: expected at least"):
        infonce.clip_loss(query, key, scale=1.0, workspace="1KiB")
