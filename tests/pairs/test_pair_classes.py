"""`positive_ids` of a softmax: pairs of equal numbers are positives, in clip, lit and info_nce."""

from typing import Any

import numpy as np
import pytest
from infonce.kernels.cpu import schedule
from judge import assert_grad, assert_loss

import infonce
from infonce import reference

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


def assert_is(got: Any, want: Any, dtype: str, loss: Any = None) -> None:
    """A result is a `Reference`, or another result."""
    assert_loss(float(got.loss), float(want.loss if loss is None else loss), dtype, SCALE)
    wanted = want.grads if isinstance(want.grads, dict) else want.grads._asdict()
    for name, gradient in got.grads._asdict().items():
        if gradient is not None:
            terms = np.abs(np.asarray(got.lse[0] if isinstance(got.lse, tuple) else got.lse)).max()
            assert_grad(gradient, wanted[name], dtype, SCALE, terms=float(terms))


METHODS = ("auto", "naive", "fused", "tiled")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "decoupled": {"decoupled": True}, "label smoothing": {"label_smoothing": 0.2},
    "key bias": {"key_bias": True}, "weights": {"weights": True}, "ids": {"ids": True},
    "groups": {"groups": True},
    "several": {"groups": True, "ids": True, "key_bias": True, "weights": True},
    "decoupled in groups": {"groups": True, "decoupled": True},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("loss", LOSSES)
def test_against_the_reference(
    loss: str, dtype: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, classes = draw(loss, dtype)
    m, n = len(query), len(key)
    drawn: dict[str, Any] = {
        "key_bias": RNG.standard_normal(n), "weights": RNG.uniform(0.1, 2.0, m),
        "ids": (RNG.integers(0, 5, m), RNG.integers(0, 5, n)),
        "groups": (np.sort(RNG.integers(0, 3, m)), np.sort(RNG.integers(0, 3, n))),
    }  # fmt: skip
    given = {k: drawn[k] if v is True and k in drawn else v for k, v in OPTIONS[options].items()}
    both = {"positive_ids": classes, **given}
    pairs = classes if isinstance(classes, tuple) else (classes, classes)
    weights = both.get("weights", 1.0) * np.isin(pairs[0], pairs[1])
    want = getattr(reference, loss)(
        query, key, scale=SCALE, normalize=True, **both | {"weights": weights / weights.sum()}
    )
    monkeypatch.setattr(schedule, "TILE", (16, 24))
    for method in METHODS:
        assert_is(evaluate(loss, query, key, method=method, **both), want, dtype)


@pytest.mark.parametrize("loss", LOSSES)
def test_unique_ids_are_the_loss_without(loss: str) -> None:
    """Rounding alone differs, and small losses keep their digits."""
    query, _, _ = draw(loss)
    key = query + 1e-3 * RNG.standard_normal(query.shape)
    ids = RNG.permutation(60) - 30
    options: dict[str, Any] = {"scale": 300.0, "normalize": True}
    function = getattr(infonce, f"{loss}_loss_and_grad")
    want, got = function(query, key, **options), function(query, key, positive_ids=ids, **options)
    assert 0 < want.loss < 1e-9
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-11)
    for one, other in zip(got.grads, want.grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-22)


def test_sets_of_positives_are_info_nce_with_labels() -> None:
    query, key, (rows, columns) = draw("info_nce")
    labels = np.full((60, 85), -1)
    for i, row in enumerate(rows):
        found = np.flatnonzero(columns == row)
        labels[i, : len(found)] = found
    want = evaluate("info_nce", query, key, labels)
    assert_is(evaluate("info_nce", query, key, positive_ids=(rows, columns)), want, "float64")


def test_clip_is_the_mean_of_both_directions() -> None:
    image, text, classes = draw("clip")
    both = evaluate("clip", image, text, positive_ids=classes)
    rows = evaluate("info_nce", image, text, positive_ids=classes)
    columns = evaluate("info_nce", text, image, positive_ids=classes)
    np.testing.assert_allclose(both.loss, (rows.loss + columns.loss) / 2, rtol=1e-13)
    np.testing.assert_allclose(
        both.grads.image, (rows.grads.query + columns.grads.key) / 2, rtol=1e-10, atol=1e-14
    )


def test_rows_without_a_positive_do_not_count() -> None:
    """Neither in the mean nor in the gradients of queries; their keys remain negatives."""
    query, key, (rows, columns) = draw("info_nce")
    has_positive = np.isin(rows, columns)
    assert 0 < has_positive.sum() < 60
    out = evaluate("info_nce", query, key, positive_ids=(rows, columns), reduction="none")
    assert (out.loss[~has_positive] == 0).all()
    assert (out.grads.query[~has_positive] == 0).all()
    mean = evaluate("info_nce", query, key, positive_ids=(rows, columns)).loss
    np.testing.assert_allclose(mean, out.loss[has_positive].mean(), rtol=1e-13)
    none = evaluate("info_nce", query, key, positive_ids=(rows, columns + 1000))
    assert none.loss == 0
    assert not none.grads.key.any()


def test_hashes_of_both_signs_are_compared_by_value() -> None:
    query, key, (rows, columns) = draw("lit")
    want = evaluate("lit", query, key, positive_ids=(rows, np.where(columns < 9, -1, columns)))
    hashes = rows.astype(np.uint64) + np.uint64(2**63), columns + np.int64(-(2**63))
    got = evaluate("lit", query, key, positive_ids=hashes)
    assert got.loss == 0 != want.loss  # 2^63 + 4 and 4 - 2^63 have the same bits
    same = hashes[0], columns.astype(np.uint64) + np.uint64(2**63)
    other = evaluate("lit", query, key, positive_ids=(rows, columns))
    assert evaluate("lit", query, key, positive_ids=same).loss == other.loss


def test_own_negatives_join_the_sums() -> None:
    query, key, classes = draw("info_nce")
    own = RNG.standard_normal((60, 3, 7))
    pairs = classes[0][:, None] == classes[1]
    weights = pairs.any(axis=1) / pairs.any(axis=1).sum()
    for options in ({}, {"in_batch": False}):
        want = reference.info_nce(
            query, key, scale=SCALE, normalize=True, positive_ids=classes, own=own,
            weights=weights, **options,
        )  # fmt: skip
        assert_is(evaluate("info_nce", query, key, positive_ids=classes, own=own, **options), want,
                  "float64")  # fmt: skip


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
