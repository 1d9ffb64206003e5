"""Problems for tests beside the specification, `infonce.reference`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from infonce import reference, spec

LOSSES = ("info_nce", "nt_xent", "clip", "lit", "siglip", "sup_con", "gte")
FEATURES = {"info_nce": ("query", "key"), "clip": ("image", "text"), "lit": ("text", "image")}
FEATURES |= {"siglip": ("image", "text"), "gte": ("query", "key")}
FEATURES |= {"nt_xent": ("features",), "sup_con": ("features",)}
SETS = ("info_nce", "clip", "lit", "siglip")  # losses with `positive_ids`
EPS = np.finfo(np.float64).eps

SEEDS = st.integers(0, 2**32 - 1)
quick = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def each_once(labels: np.ndarray) -> np.ndarray:
    """Sets of positives [M, P], in which -1 replaces repetitions of a key in a row."""
    labels = np.sort(labels, axis=1)
    labels[:, 1:][labels[:, 1:] == labels[:, :-1]] = -1
    return labels


class Problem(NamedTuple):
    """The arguments of one call of one loss."""

    name: str  # of LOSSES
    features: tuple  # of arrays, in the order of the function's arguments
    scale: complex = 1.0
    bias: complex = -1.5
    labels: np.ndarray | None = None
    label_weights: np.ndarray | None = None
    ids: object = None
    groups: object = None
    positive_ids: object = None
    normalize: bool = False
    weights: np.ndarray | None = None
    softmax: Mapping[str, object] = MappingProxyType({})  # options of the softmax: margin, ...

    def options(self):
        """The keywords of the function of `infonce.reference`."""
        options = {"scale": self.scale, "normalize": self.normalize, "weights": self.weights}
        if self.name != "sup_con":
            options |= {"ids": self.ids, "groups": self.groups}
        if self.name in SETS:
            options["positive_ids"] = self.positive_ids
        if self.name == "siglip":
            options["bias"] = self.bias
        if self.name in ("info_nce", "sup_con"):
            options["labels"] = self.labels
        if self.label_weights is not None:
            options["label_weights"] = self.label_weights
        return options | dict(self.softmax)

    def reference(self):
        return getattr(reference, self.name)(*self.features, **self.options())

    def positives(self):
        """The set of positive keys of each row."""
        rows = len(self.features[0])
        if self.name == "nt_xent":
            return [{(i + rows // 2) % rows} for i in range(rows)]
        if self.name == "sup_con":
            y = self.labels
            return [{j for j in range(rows) if j != i and 0 <= y[i] == y[j]} for i in range(rows)]
        if self.positive_ids is not None:
            ids = self.positive_ids
            own, others = ids if isinstance(ids, tuple) else (ids, ids)
            return [{j for j in range(len(others)) if others[j] == i} for i in own]
        if self.labels is None:
            return [{i} for i in range(rows)]
        if self.label_weights is not None:
            return [{*weights} for weights in self.weights_of_positives()]
        return [{int(j) for j in np.atleast_1d(row) if j >= 0} for row in self.labels]

    def weights_of_positives(self):
        """The weights of each row's positives, by key."""
        rows = zip(self.labels, self.label_weights, strict=True)
        return [{int(j): w for j, w in zip(*row, strict=True) if j >= 0 and w > 0} for row in rows]

    def have_loss(self):
        """Whether each row has a loss: rows of SigLIP, and rows with a positive."""
        return np.array([self.name == "siglip" or bool(keys) for keys in self.positives()])


REFUSED = {"sup_con": spec.SUP_CON.refused, "gte": spec.GTE.refused}


def taken(name, options):
    """The `options` without those that a loss refuses."""
    return {key: v for key, v in options.items() if key not in REFUSED.get(name, ())}


def call_of(problem, reduction="mean"):
    """(the problem without options that its loss refuses, the keywords of the same public call).

    The weights of the returned problem are the row shares of the reduced loss.
    """
    softmax = taken(problem.name, problem.softmax)
    named = {name for name in spec.INTEGER_OPTIONS if getattr(problem, name) is not None}
    for names in spec.EXCLUSIVE:
        if {*names} <= softmax.keys() | named:
            del softmax[next(name for name in reversed(names) if name in softmax)]
    if "guide" not in softmax:
        softmax.pop("guide_margin", None)
    if np.ndim(problem.ids[0] if isinstance(problem.ids, tuple) else problem.ids) > 1:
        softmax.pop("label_smoothing", None)
    options = {"scale": problem.scale, "normalize": problem.normalize}
    options |= {name: getattr(problem, name) for name in spec.INTEGER_OPTIONS}
    for argument in ("labels", "label_weights"):
        if getattr(problem, argument) is not None:
            options[argument] = getattr(problem, argument)
    weights = problem.have_loss().astype(float)
    if problem.weights is not None:
        options["weights"] = np.abs(problem.weights)
        weights = weights * options["weights"]
    if reduction == "mean":
        weights = weights / (weights.sum() or 1.0)
    return problem._replace(softmax=softmax, weights=weights), options | softmax


def softmax_options(name, rows, columns, rng):
    """Draw some of the options of the softmax that a loss takes, by `rng`: draws by hypothesis
    would be correlated."""
    options = {}
    if rng.random() < 0.5:
        options["margin"] = rng.uniform(-0.5, 0.5)
    if rng.random() < 0.5:
        options["hardness"] = rng.uniform(0.0, 2.0)
    if rng.random() < 0.5:
        options["false_negative_margin"] = rng.uniform(-0.5, 0.5)
    if rng.random() < 0.5 and name != "gte":
        options["key_bias"] = rng.normal(size=columns)
    if rng.random() < 0.3 and name != "sup_con":
        guide = rng.normal(size=(rows, 3)), rng.normal(size=(columns, 3))
        options["guide"] = guide[0] if name == "nt_xent" else guide
        options["guide_margin"] = rng.uniform(-0.5, 0.5)
    form = rng.integers(3)
    if form == 1:
        options["decoupled"] = True
    if form == 2:
        options["label_smoothing"] = rng.uniform(0.0, 0.99)
    return options


def drawn_label_weights(labels, rng):
    """Weights for half of the sets of positives: some are 0, and NaN for negative labels."""
    if labels is None or labels.ndim == 1 or rng.random() < 0.5:
        return None
    weights = rng.uniform(0.1, 2.0, labels.shape) * (rng.random(labels.shape) < 0.8)
    return np.where(labels < 0, np.nan, weights)


def drawn_names(name, rng, number, rows, columns):
    """Draw ids or groups of `number` kinds: one array, or a pair; in half of the cases sorted."""
    sides = [rng.integers(0, number, n) for n in (rows, columns)]
    if rng.random() < 0.5:
        sides = [np.sort(side) for side in sides]
    return sides[0] if name in ("nt_xent", "gte") else tuple(sides)


def drawn_positive_ids(name, rng, number, rows, columns):
    """Draw positive ids: a pair; in clip, one array that both sides share."""
    ids = drawn_names(name, rng, number, rows, columns)
    return ids[0] if name == "clip" else ids


def drawn_problem(name, rng, rows, columns, width):
    """Draw a problem of `rows` queries and `columns` keys, each option by itself, by `rng`."""
    labels = positive_ids = None
    if name in SETS and (rng.random() < 0.3 or (name != "info_nce" and rows != columns)):
        positive_ids = drawn_positive_ids(name, rng, 4, rows, columns)
    elif name == "info_nce" and (columns < rows or rng.random() < 0.8):
        shape = [(rows,), (rows, 1), (rows, 3)][rng.integers(3)]
        labels = rng.integers(-1, columns, shape)
        if len(shape) > 1:
            labels = each_once(labels)
    if name == "sup_con":
        labels = rng.integers(-2, rows // 2 + 1, rows)
    features = [rng.normal(size=(rows, width))]
    if len(FEATURES[name]) == 2:
        features.append(rng.normal(size=(columns, width)))
    ids = groups = None
    if rng.random() < 0.5 and name != "sup_con":
        ids = drawn_names(name, rng, 6, rows, columns)
    if rng.random() < 0.3 and name != "sup_con":
        groups = drawn_names(name, rng, 3, rows, columns)
    softmax = softmax_options(name, rows, columns, rng) if name != "siglip" else {}
    problem = Problem(
        name, tuple(features), scale=rng.uniform(0.5, 8.0), labels=labels,
        label_weights=None if name != "info_nce" else drawn_label_weights(labels, rng), ids=ids,
        groups=groups, positive_ids=positive_ids, normalize=bool(rng.random() < 0.5),
        softmax=softmax, weights=rng.uniform(0.0, 2.0, rows) if rng.random() < 0.5 else None,
    )  # fmt: skip
    with np.errstate(invalid="ignore"):
        if softmax.get("decoupled") and not np.isfinite(call_of(problem)[0].reference().loss):
            del softmax["decoupled"]  # a row without negatives has loss -inf
    return problem


def small_problem(name, seed):
    """Draw a problem of up to five rows, or pairs of views, by `seed`. Its logits are so small that
    exponentials do not overflow."""
    rng = np.random.default_rng(seed)
    rows, width = (int(n) for n in rng.integers(1, 6, 2))
    rows *= 2 if name == "nt_xent" else 1
    columns = int(rng.integers(1, 8)) if name in SETS and name != "clip" else rows
    problem = drawn_problem(name, rng, rows, columns, width)
    return problem._replace(bias=rng.uniform(-10, 2))


def assert_close(actual, expected, rtol=1e-11, atol=1e-11):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def assert_same_result(actual, expected):
    """Losses of rows, loss and gradients are equal, up to rounding."""
    assert_close(actual.losses, expected.losses)
    assert_close(actual.loss, expected.loss)
    assert actual.grads.keys() == expected.grads.keys()
    for name in actual.grads:
        if expected.grads[name] is None:
            assert actual.grads[name] is None
        else:
            assert_close(actual.grads[name], expected.grads[name])


def one_problem(name, seed=0, rows=6, width=4, **options):
    """A problem of `rows` rows of each feature array, with fields from `options`."""
    rng = np.random.default_rng(seed)
    features = tuple(rng.normal(size=(len(FEATURES[name]), rows, width)))
    if name == "sup_con":
        options.setdefault("labels", np.arange(rows) % 2)
    return Problem(name, features, scale=2.0, **options)
