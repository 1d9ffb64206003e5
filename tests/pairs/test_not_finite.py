"""NaN and infinities in every array of a call: the same losses become NaN by every method."""

from typing import Any

import numpy as np
import pytest

import infonce

ROWS, BAD = 12, 2  # the row with a feature that is not finite
# Which pairs are left out: none, or all but the positives
EXCLUDED: dict[str, dict[str, Any]] = {
    "no pair": {},
    "equal ids": {"ids": np.zeros(ROWS, int)},
    "other groups": {"groups": np.arange(ROWS)},
}
# (loss, name of the array, number of the array, whether all losses depend on a row of it)
ARRAYS = [
    ("info_nce", "features", 0, False),
    ("info_nce", "features", 1, True),
    ("info_nce", "guide", 0, False),
    ("info_nce", "guide", 1, True),
    ("info_nce", "own", 0, False),
    ("lit", "features", 0, False),
    ("lit", "features", 1, True),
    ("lit", "guide", 0, False),
    ("lit", "guide", 1, True),
    ("clip", "features", 1, True),
    ("clip", "guide", 0, True),
    ("clip", "guide", 1, True),
    ("gte", "features", 0, True),
    ("gte", "features", 1, True),
    ("gte", "guide", 0, True),
    ("gte", "guide", 1, True),
    ("siglip", "features", 0, False),
    ("siglip", "features", 1, True),
]


def features(number: int, width: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(width)
    return list(rng.standard_normal((number, ROWS, width)) / width**0.5)


def affected(losses: np.ndarray, all_rows: bool) -> bool:
    """Whether the losses that depend on the bad row are NaN, and no other loss."""
    return bool(np.array_equal(np.isnan(losses), all_rows | (np.arange(ROWS) == BAD)))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pairs", EXCLUDED)
@pytest.mark.parametrize(("loss", "name", "number", "all_rows"), ARRAYS)
def test_which_losses_become_nan(
    loss: str, name: str, number: int, all_rows: bool, pairs: str, bad: float,
    method: dict[str, Any],
) -> None:  # fmt: skip
    sides, guide, own = features(2), features(2, 3), features(2, 5)
    own_negatives = np.stack([own[0][:, :4], own[1][:, :4]], axis=1)
    array = {"features": sides, "guide": guide, "own": [own_negatives]}[name][number]
    array[BAD].flat[1] = bad
    options: dict[str, Any] = {"scale": 2.0, **EXCLUDED[pairs], **method}
    if name == "guide":
        options["guide"] = tuple(guide)
    if name == "own":
        options["own"] = own_negatives
    function = getattr(infonce, f"{loss}_loss")
    for normalize in (False, True):
        options["normalize"] = normalize
        assert affected(function(*sides, reduction="none", **options), all_rows)
        assert np.isnan(function(*sides, **options))
        if name == "own":  # a masked negative counts nowhere
            mask = np.ones((ROWS, 2), bool)
            mask[BAD, 0] = False
            assert np.isfinite(function(*sides, own_mask=mask, **options))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_which_losses_of_distillation_become_nan(
    number: int, two_sided: bool, bad: float, method: dict[str, Any]
) -> None:
    arrays = [*features(2), *features(2, 3)]
    arrays[number][BAD, 1] = bad
    options: dict[str, Any] = {"scale": 2.0, "two_sided": two_sided, "normalize": False, **method}
    losses = infonce.distill_loss(*arrays, reduction="none", **options)
    if number == 0 and two_sided:
        assert np.isnan(losses[BAD])  # the sums of columns decide about others
    else:
        assert affected(losses, number % 2 == 1 or (number == 2 and two_sided))
    assert np.isnan(infonce.distill_loss(*arrays, **options))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["key_bias", "weights"])
def test_numbers_of_rows_are_refused(name: str, bad: float, method: dict[str, Any]) -> None:
    numbers = np.ones(ROWS)
    numbers[BAD] = bad
    options: dict[str, Any] = {"scale": 2.0, name: numbers, **method}
    with pytest.raises(ValueError, match=f"^{name}: expected finite numbers, got .* position 2$"):
        infonce.info_nce_loss(*features(2), **options)
