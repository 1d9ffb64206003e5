"""Losses over MaxSim scores on the CPU: against the float64 reference, and against dot products."""

import functools
import tracemalloc
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.kernels.grid import Grid, gradient_visits, slices
from infonce.kernels.maxsim import division, sizes
from judge import assert_same_bits

import infonce
from infonce import reference
from infonce.reference import MaxSim, maxsim, maxsim_gradients

LOSSES = ("clip", "info_nce", "lit", "siglip")
SIDES = {"clip": ("image", "text"), "info_nce": ("query", "key"), "lit": ("text", "image"),
         "siglip": ("image", "text")}  # fmt: skip
SCALE, BIAS = 1.5, -10.0


@pytest.fixture
def divisions(monkeypatch: pytest.MonkeyPatch) -> list[division.Division]:
    """The divisions of calls, whose tiles are so small that little workspace is enough."""
    monkeypatch.setattr(sizes, "CPU_TILE_BYTES", 2**14)
    found: list[division.Division] = []

    def divide(*args: Any, **options: Any) -> division.Division:
        found.append(division.divide(*args, **options))
        return found[-1]

    monkeypatch.setattr(sizes, "divide", divide)
    return found


def draw(
    m: int, n: int, query_tokens: int, key_tokens: int, d: int, seed: int, masked: bool = True,
    tied: bool = True,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    """Queries and keys of float64 tokens, and masks with a query without tokens. `tied`: tokens of
    a key are equal, of which the first one wins."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((m, query_tokens, d)) / d**0.5
    key = rng.standard_normal((n, key_tokens, d)) / d**0.5
    if tied:
        key[:, 1::2] = key[:, ::2][:, : key[:, 1::2].shape[1]]
    masks = {}
    if masked:
        masks = {"query_mask": rng.random((m, query_tokens)) < 0.6,
                 "key_mask": rng.random((n, key_tokens)) < 0.6}  # fmt: skip
        masks["query_mask"][0] = False
        masks["key_mask"][np.arange(n), rng.integers(0, key_tokens, n)] = True
    return query, key, masks


class Judged(NamedTuple):
    """A loss and its gradients by the float64 reference; G = dL/ds, and the scores."""

    loss: float
    query: Any
    key: Any
    scale: float
    g: Any
    scored: MaxSim


def judged(loss: str, query: Any, key: Any, masks: dict[str, Any], **options: Any) -> Judged:
    """`token_mean`, `normalize`: see `maxsim`."""
    of_tokens = {name: options.pop(name, False) for name in ("token_mean", "normalize")}
    scored: MaxSim = maxsim(query, key, **masks, **of_tokens)
    if loss == "siglip":
        options["bias"] = BIAS
    want = getattr(reference, loss)(scored.scores, np.eye(len(key)), scale=SCALE, **options)
    g = want.grads[SIDES[loss][0]]
    gradients = maxsim_gradients(g, scored, query, key, of_tokens["normalize"])
    return Judged(want.loss, *gradients, want.grads["scale"], g, scored)


def near(got: Any, want: Any, bound: float) -> None:
    largest = np.abs(want).max(initial=0.0)
    error = np.abs(np.asarray(got, np.float64) - want).max(initial=0.0)
    assert error <= bound * max(largest, 1e-300), f"{error / max(largest, 1e-300)}"


def check(
    loss: str, query: Any, key: Any, masks: dict[str, Any], bound: float,
    want: Judged | None = None, **options: Any,
) -> None:  # fmt: skip
    """`want`: computed here if it is None."""
    got = getattr(infonce, f"{loss}_loss_and_grad")(query, key, scale=SCALE, **masks, **options)
    want = want or judged(loss, query, key, masks, **options)
    near(got.loss, want.loss, bound)
    first, second = SIDES[loss]
    near(getattr(got.grads, first), want.query, bound)
    if loss != "lit":
        near(getattr(got.grads, second), want.key, bound)
    near(got.grads.scale, want.scale, bound)


@functools.cache
def of_blocks(loss: str) -> tuple[Any, Any, dict[str, Any], Judged]:
    """A problem that little workspace divides, and its solution."""
    query, key, masks = draw(70, 70, 32, 10, 4, 1, tied=False)
    return query, key, masks, judged(loss, query, key, masks)


@pytest.mark.parametrize(("workspace", "has_ranges", "has_one_row_block", "keeps"), [
    ("60KiB", True, False, (False, False)), ("300KiB", False, False, (False, False)),
    ("380KiB", False, False, (True, False)), ("520KiB", False, True, (True, False)),
    ("700KiB", False, False, (True, True)), ("900KiB", False, True, (True, True)),
])  # fmt: skip
@pytest.mark.parametrize("loss", LOSSES)
def test_blocks(
    loss: str, workspace: str, has_ranges: bool, has_one_row_block: bool,
    keeps: tuple[bool, bool], divisions: list[division.Division],
) -> None:  # fmt: skip
    """Gradients of keys accumulate in ranges smaller than a block would be, for all keys, or not at
    all; `keeps`: whether scores, and winners, are kept or computed again."""
    query, key, masks, want = of_blocks(loss)
    check(loss, query, key, masks, 1e-12, want, workspace=workspace)
    (found,) = divisions
    assert found.piece < 70
    if loss == "siglip":  # one pass, for which nothing is kept
        keeps = False, False
    else:
        assert (found.rows == 70) == has_one_row_block
    assert (found.keeps_scores, found.keeps_winners) == keeps
    if has_ranges and loss != "lit":
        assert 70 // 2 < found.columns == found.key_rows < 70
    else:
        assert found.key_rows in (0, 70)


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
    found_sizes = division.Sizes(
        m, n, 128, query_tokens * token, key_tokens * token, key_tokens * 512, 4, 2 * query_tokens,
        4 * query_tokens, 2**20, query_tokens, 1024, 1024,
    )  # fmt: skip
    try:
        found = division.divide(found_sizes, workspace, has_second_pass, True, all_keys)
    except ValueError:
        return
    whole = Grid(slices(m, found.rows), slices(n, found.columns))
    ranges = slices(n, found.key_rows or n)
    for grid, *_ in gradient_visits(whole, ranges, False, True, True):
        assert {(c.start, c.stop) for c in grid.columns} <= {
            (c.start, c.stop) for c in whole.columns
        }


def test_what_is_kept_leaves_room_for_blocks() -> None:
    """Winners fit half of this workspace, and blocks do not fit the rest."""
    query, key, masks = draw(90, 90, 110, 6, 8, 1, tied=False)
    want = judged("clip", query, key, masks)
    for workspace in ("3000KiB", "3500KiB", "4000KiB"):
        check("clip", query, key, masks, 1e-12, want, workspace=workspace)


def test_memory_within_the_workspace() -> None:
    """Also where the gradients of keys accumulate, and are completed at the end."""
    query, key = (
        np.random.default_rng(0).standard_normal((256, 32, 128), np.float32) for _ in range(2)
    )
    for loss in ("clip", "siglip"):
        more = {"bias": 0.0} if loss == "siglip" else {}
        function = getattr(infonce, f"{loss}_loss_and_grad")
        options = {"scale": 2.0, "normalize": True, "workspace": 2**24, **more}
        function(query[:8], key[:8], **options)  # compiles the loops
        tracemalloc.start()
        try:
            out = function(query, key, **options)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak - sum(z.nbytes for z in out.grads[:2]) <= 2**24


@pytest.mark.parametrize("workspace", ["300KiB", "520KiB"])
@pytest.mark.parametrize("loss", LOSSES)
def test_same_bits(
    loss: str, workspace: str, divisions: list[division.Division], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and winners that are kept, and those that are computed again, are the same."""
    query, key, masks, _ = of_blocks(loss)
    query, key = query.astype(np.float32), key.astype(np.float32)
    divide, results = sizes.divide, []
    for keeps in ((False, False), (True, False), (False, True), (True, True), (True, True)):
        monkeypatch.setattr(
            sizes, "divide",
            lambda *args, keeps=keeps, **options: replace(
                divide(*args, **options), keeps_scores=keeps[0], keeps_winners=keeps[1]
            ),
        )  # fmt: skip
        function = getattr(infonce, f"{loss}_loss_and_grad")
        results.append(function(query, key, scale=2.0, **masks, workspace=workspace))
    for got in results[1:]:
        assert_same_bits(got, results[0])
    assert divisions[0].columns < 70 or divisions[0].rows < 70
    # the only pass of a sigmoid has blocks of one piece, with which winners are found once
    assert loss == "siglip" or divisions[0].piece < divisions[0].columns


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


LOSS, SCORES = functools.partial(infonce.info_nce_loss, scale=1.0), infonce.maxsim_scores
ERRORS: list[tuple[Any, dict[str, Any], str]] = [
    (LOSS, {"query_mask": np.ones((5, 2), bool)}, r"query_mask: expected shape \(5, 3\)"),
    (LOSS, {"key_mask": np.ones((5, 4))}, "key_mask: expected dtype bool"),
    (LOSS, {"key_mask": np.zeros((5, 4), bool)}, "key_mask: expected at least one token .* key 0"),
    (LOSS, {"own": np.ones((5, 2, 6))}, "own: expected None with features of three dimensions"),
    (LOSS, {"method": "naive"}, "method: expected .* with features of three dimensions"),
    (LOSS, {"offload": True}, "offload: expected False with features of three dimensions"),
    (LOSS, {"token_mean": 1}, "token_mean: expected True or False"),
    (SCORES, {"workspace": 0}, "workspace: expected a positive number of bytes"),
    (SCORES, {"workspace": "much"}, "workspace: "),
    (SCORES, {"workspace": 1.5}, "workspace: expected an integer number of bytes"),
    (SCORES, {"workspace": "1KiB"}, "workspace: expected at least [0-9]+ bytes"),
    (SCORES, {"precision": "tf32"}, 'precision: expected "auto", "fp64" or "fp32" on the CPU'),
    (SCORES, {"precision": None}, "precision: expected"),
    (SCORES, {"token_mean": 1}, "token_mean: expected True or False"),
    (SCORES, {"normalize": None}, "normalize: expected True or False"),
]


@pytest.mark.parametrize(("function", "options", "message"), ERRORS)
def test_errors(function: Any, options: dict[str, Any], message: str) -> None:
    query, key, _ = draw(5, 5, 3, 4, 6, 5, masked=False)
    with pytest.raises((TypeError, ValueError), match=message):
        function(query, key, **options)


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
