"""Problems for tests of the specification, and the losses by definition.

The specification is judged by what it is not made of. The definitions are loops over pairs, any
number type, no shift by a maximum: in complex numbers, a complex step yields their gradients to
full precision.
"""

from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from infonce import reference

LOSSES = ("info_nce", "nt_xent", "clip", "lit", "siglip")
SOFTMAX = ("info_nce", "nt_xent", "clip", "lit")
TWO_SIDED = {"info_nce": ("query", "key"), "clip": ("image", "text"), "lit": ("text", "image")}
TWO_SIDED["siglip"] = ("image", "text")
EPS = np.finfo(np.float64).eps

EITHER = st.booleans()
quick = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def kept_keys(i, positive, columns, query_ids, key_ids, itself_too):
    """Keys that query i is compared with."""
    kept = []
    for j in range(columns):
        if j == i and not itself_too:
            continue
        if j != positive and query_ids is not None and query_ids[i] == key_ids[j]:
            continue
        kept.append(j)
    return kept


def rows_by_definition(x, positives, query_ids, key_ids, itself_too=True):
    """log sum exp over the kept keys, less the positive logit; row by row."""
    losses, lse = [], []
    for i, positive in enumerate(positives):
        kept = kept_keys(i, positive, len(x[i]), query_ids, key_ids, itself_too)
        lse.append(np.log(sum(np.exp(x[i, j]) for j in kept)))
        losses.append(lse[-1] - x[i, positive])
    return np.array(losses), np.array(lse)


class Problem(NamedTuple):
    """One call of one loss."""

    name: str
    features: tuple  # of arrays, in the order of the function's arguments
    scale: complex = 1.0
    bias: complex = -1.5
    labels: np.ndarray | None = None
    ids: object = None
    normalize: bool = False
    weights: np.ndarray | None = None

    def argument_names(self):
        return ("features",) if self.name == "nt_xent" else TWO_SIDED[self.name]

    def options(self):
        options = {"scale": self.scale, "ids": self.ids, "normalize": self.normalize}
        options["weights"] = self.weights
        if self.name == "siglip":
            options["bias"] = self.bias
        if self.name == "info_nce":
            options["labels"] = self.labels
        return options

    def reference(self):
        return getattr(reference, self.name)(*self.features, **self.options())

    def definition(self):
        """Losses, their weighted sum, and the log-sum-exps, by definition."""
        a, b = self.features[0], self.features[-1]
        if self.normalize:
            a = a / np.sqrt((a * a).sum(axis=1, keepdims=True))
            b = b / np.sqrt((b * b).sum(axis=1, keepdims=True))
        x = self.scale * (a @ b.T)
        rows = len(a)
        paired = self.ids if isinstance(self.ids, tuple) else (self.ids, self.ids)
        diagonal = range(rows)
        if self.name == "nt_xent":
            half = rows // 2
            partners = [*range(half, rows), *range(half)]
            losses, lse = rows_by_definition(x, partners, *paired, itself_too=False)
        elif self.name == "clip":
            row, r = rows_by_definition(x, diagonal, *paired)
            column, c = rows_by_definition(x.T, diagonal, *paired[::-1])
            losses, lse = (row + column) / 2, (r, c)
        elif self.name == "siglip":
            losses, lse = [], None
            for i in range(rows):
                kept = kept_keys(i, i, rows, *paired, itself_too=True)
                away = [(1 if i == j else -1) * (x[i, j] + self.bias) for j in kept]
                losses.append(sum(np.log(1 + np.exp(-a)) for a in away))
            losses = np.array(losses)
        else:
            positives = diagonal if self.labels is None else self.labels
            losses, lse = rows_by_definition(x, positives, *paired)
        weights = np.full(rows, 1 / rows) if self.weights is None else self.weights
        return losses, (weights * losses).sum(), lse

    def complex_step(self, **change):
        """d loss along `change`, exact: f(x + ih) = f(x) + ih f'(x) + O(h^2), h = 1e-30."""
        return self._replace(**change).definition()[1].imag / 1e-30

    def scalars(self):
        return ("scale", "bias") if self.name == "siglip" else ("scale",)


def every_entry(array):
    """The array with 1e-30 i added to one entry, for each entry in turn."""
    for index in np.ndindex(array.shape):
        moved = array.astype(np.complex128)
        moved[index] += 1e-30j
        yield index, moved


@st.composite
def problems(draw, names=LOSSES, ids=("none", "one", "pair"), normalize=EITHER):
    """Small problems of every kind; logits small enough to do without a shift."""
    name = draw(st.sampled_from(names))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    if name == "nt_xent":
        rows *= 2
    columns = rows + (draw(st.integers(0, 3)) if name == "info_nce" else 0)
    labels = None
    if name == "info_nce" and draw(st.booleans()):
        columns = draw(st.integers(1, 7))  # fewer keys than queries, and shared positives
        labels = rng.integers(0, columns, rows)
    features = (rng.normal(size=(rows, width)),)
    if name != "nt_xent":
        features += (rng.normal(size=(columns, width)),)
    kind = draw(st.sampled_from(ids))
    if kind == "pair" and name == "nt_xent":
        kind = "one"
    if kind == "one" and rows != columns:
        kind = "pair"
    some = {
        "none": None,
        "one": rng.integers(0, 3, rows),
        "pair": (rng.integers(0, 3, rows), rng.integers(0, 3, columns)),
    }
    return Problem(
        name,
        features,
        scale=draw(st.floats(0.1, 10.0)),
        bias=draw(st.floats(-10.0, 2.0)),
        labels=labels,
        ids=some[kind],
        normalize=draw(normalize),
        weights=rng.normal(size=rows) if draw(st.booleans()) else None,
    )


def assert_close(actual, expected, rtol=1e-11, atol=1e-11):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def assert_same_result(actual, expected):
    """Losses, loss and every gradient that both have."""
    assert_close(actual.losses, expected.losses)
    assert_close(actual.loss, expected.loss)
    assert actual.grads.keys() == expected.grads.keys()
    for name in actual.grads:
        if expected.grads[name] is None:
            assert actual.grads[name] is None
        else:
            assert_close(actual.grads[name], expected.grads[name])


def one_problem(name, seed=0, rows=6, width=4, **options):
    rng = np.random.default_rng(seed)
    count = 1 if name == "nt_xent" else 2
    return Problem(name, tuple(rng.normal(size=(count, rows, width))), scale=2.0, **options)
