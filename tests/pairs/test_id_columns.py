"""`ids` of several columns: a pair is left out if its ids are equal in any of them."""

from typing import Any

import numpy as np
import pytest
from judge import assert_same_bits
from reference_problems import one_problem

import infonce
from infonce import spec

RNG = np.random.default_rng(0)
LOSSES = [name for name, loss in spec.LOSSES.items() if "ids" not in loss.refused]
ROWS = 60


def call(name: str, ids: Any, **options: Any) -> infonce.LossAndGrad:
    features = one_problem(name, rows=ROWS).features
    function = getattr(infonce, f"{name}_loss_and_grad")
    options = {"scale": 2.0, "normalize": True, **options}
    return function(*features, ids=ids, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["naive", "auto", "tiled"])
@pytest.mark.parametrize("name", LOSSES)
def test_one_column_is_a_vector(name: str, method: str) -> None:
    """The same bits, also if the column is one of a matrix."""
    ids = RNG.integers(0, 20, (ROWS, 3))
    plain, column = (call(name, z, method=method) for z in (ids[:, 1], ids[:, 1:2]))
    assert_same_bits(column, plain)
    assert float(plain.loss) != float(call(name, None, method=method).loss)
    if name != "siglip":  # several columns refuse it
        options: dict[str, Any] = {"method": method, "label_smoothing": 0.1}
        plain, column = (call(name, z, **options) for z in (ids[:, 1], ids[:, 1:2]))
        assert_same_bits(column, plain)


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_columns_is_free(name: str) -> None:
    ids = RNG.integers(0, 30, (ROWS, 3))
    assert_same_bits(call(name, ids[:, ::-1]), call(name, np.asfortranarray(ids)))
    twice = np.stack([ids[:, 0], ids[:, 0]], axis=1)
    assert_same_bits(call(name, twice), call(name, ids[:, 0]))


def test_dtypes_of_two_sides() -> None:
    """An int64 of one side has the bits of a uint64 of the other, in the second column alone."""
    apart = np.arange(ROWS)
    signed = np.stack([apart, -apart - 1], axis=1)
    unsigned = np.stack([apart + ROWS, -apart - 1], axis=1).astype(np.uint64)
    assert_same_bits(call("clip", (signed, unsigned)), call("clip", (apart, apart + ROWS)))
