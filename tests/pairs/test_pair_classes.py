"""`positive_ids` of a softmax: pairs of equal numbers are positives, in clip, lit and info_nce."""

from typing import Any

import numpy as np
import pytest

import infonce

RNG = np.random.default_rng(0)
LOSSES = ("clip", "lit", "info_nce")
# of some queries no key has the class, of some keys no query, and some classes have one key
QUERY_CLASSES, KEY_CLASSES = np.arange(60) // 2, RNG.integers(4, 45, 85)
SCALE = 6.0


def draw(loss: str, dtype: Any = np.float64) -> tuple[Any, Any, Any]:
    """Queries, keys and positive ids: clip has as many keys as queries, which share ids."""
    query, key = (RNG.standard_normal((n, 7)).astype(dtype) for n in (60, 85))
    if loss == "clip":
        return query, key[:60], RNG.integers(0, 25, 60)
    return query, key, (QUERY_CLASSES, KEY_CLASSES)


def evaluate(loss: str, *args: Any, **options: Any) -> Any:
    return getattr(infonce, f"{loss}_loss_and_grad")(*args, scale=SCALE, normalize=True, **options)


@pytest.mark.parametrize("loss", LOSSES)
def test_unique_ids_are_the_loss_without(loss: str) -> None:
    """Rounding alone differs, and small losses keep their digits."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((60, 20))
    key = query + 1e-3 * rng.standard_normal(query.shape)
    ids = rng.permutation(60) - 30
    options: dict[str, Any] = {"scale": 300.0, "normalize": True}
    function = getattr(infonce, f"{loss}_loss_and_grad")
    want, got = function(query, key, **options), function(query, key, positive_ids=ids, **options)
    assert 0 < want.loss < 1e-6
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-11)
    for one, other in zip(got.grads, want.grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-22)


def test_hashes_of_both_signs_are_compared_by_value() -> None:
    query, key, (rows, columns) = draw("lit")
    want = evaluate("lit", query, key, positive_ids=(rows, np.where(columns < 9, -1, columns)))
    hashes = rows.astype(np.uint64) + np.uint64(2**63), columns + np.int64(-(2**63))
    got = evaluate("lit", query, key, positive_ids=hashes)
    assert got.loss == 0 != want.loss  # 2^63 + 4 and 4 - 2^63 have the same bits
    same = hashes[0], columns.astype(np.uint64) + np.uint64(2**63)
    other = evaluate("lit", query, key, positive_ids=(rows, columns))
    assert evaluate("lit", query, key, positive_ids=same).loss == other.loss


def test_no_matrix_of_positives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of many keys compare no positive ids."""
    from infonce.kernels.cpu import tiled_pass

    seen = []
    monkeypatch.setattr(tiled_pass.tile, "exclude_pairs", lambda *_: seen.append(1))
    image, text, classes = draw("clip")
    evaluate("clip", image, text, positive_ids=classes, method="tiled")
    assert not seen
    evaluate("clip", image, text, positive_ids=classes, method="tiled", ids=np.arange(60))
    assert seen
