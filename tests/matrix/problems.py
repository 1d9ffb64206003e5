"""Problems: calls of all losses with options that go together, by a seed and a number.

Shapes lie on both sides of the boundaries of blocks. Losses are from 1e-9 to 20, temperatures from
0.003 to 50, norms of rows from 1e-300 to 1e300. A tenth of the problems has a NaN or an infinity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from option_values import COMPARISONS, above_positives

from infonce import spec
from infonce.checks.teacher import ALL_LOSSES, DISTILL_ROWS
from infonce.checks.tokens import REFUSED as REFUSED_WITH_TOKENS

Array = np.ndarray
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16,
          "bfloat16": ml_dtypes.bfloat16}  # fmt: skip
POWERS = {"float64": 300, "float32": 30, "float16": 2, "bfloat16": 30}  # of 10, of norms
KINDS = ["random", "aligned", "partly aligned", "opposed", "identical", "nearly identical"]
LABELS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
TEACHER = ("teacher_query", "teacher_key", "teacher_scale", "two_sided")  # of distillation
GAP = 1e-4  # between a limit and a product of unit rows: rounding does not decide
TOKEN_GAP = 1e-5  # between the largest products of a query's token, likewise
MOST_ROWS, MOST_TOKENS = 12, 7  # of features that are sets of tokens


@dataclass
class Problem:
    """One call of one loss."""

    loss: str
    features: tuple[Array, ...]  # queries and keys, or one array of both; [rows, D] or of tokens
    scale: float
    # labels, bias and keywords that change the result, if they are given
    options: dict[str, Any] = field(default_factory=dict)
    grad_out: Any = 1.0
    dtype: str = "float64"
    # keywords that change no result, or how much of it comes
    settings: dict[str, Any] = field(default_factory=dict)
    sides: dict[str, Any] = field(default_factory=dict)  # of tiles on the CPU
    poison: str = ""  # the number that is not finite, and the array that has it
    seed: int = 0
    number: int = 0
    largest: int = 140

    @property
    def kind(self) -> spec.Loss:
        """The loss; with own negatives, it has one more argument."""
        if "own" in self.options and self.loss == "info_nce":
            return spec.INFO_NCE_OWN
        two_sided = self.options.get("two_sided", True)
        return ALL_LOSSES[self.loss] if two_sided else DISTILL_ROWS

    @property
    def normalize(self) -> bool:
        return bool(self.options.get("normalize", False))

    @property
    def reduction(self) -> str:
        return str(self.options.get("reduction", "mean"))

    @property
    def compute(self) -> str:
        """The dtype of products and exponentials."""
        if (precision := self.settings.get("precision", "auto")) != "auto":
            return {"fp64": "float64", "fp32": "float32"}[precision]
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.features[0]), len(self.features[-1])

    @property
    def has_tokens(self) -> bool:
        """Whether features are sets of tokens, [rows, tokens, D]."""
        return self.features[0].ndim == 3

    def find_tokens(self) -> list[Array]:
        """Which tokens of queries, and of keys, count: [rows, tokens]."""
        return [
            self.options.get(name, np.ones(z.shape[:2], bool))
            for name, z in zip(("query_mask", "key_mask"), self.features, strict=True)
        ]

    def read_features(self) -> tuple[Array, ...]:
        """Features, of which tokens that do not count are 0."""
        if not self.has_tokens:
            return self.features
        zeros = [np.zeros_like(z) for z in self.features]
        for zero, z, counts in zip(zeros, self.features, self.find_tokens(), strict=True):
            zero[counts] = z[counts]
        return tuple(zeros)

    def find_positives(self) -> Array:
        """Pairs that are positives, [M, N]; of gte [2B, 2B]."""
        rows, columns = self.shape
        labels = self.options.get("labels")
        if self.loss == "gte":
            rows = columns = 2 * rows
        positive = np.zeros((rows, columns), bool)
        index = np.arange(rows)
        if self.loss == "nt_xent":
            positive[index, (index + rows // 2) % rows] = True
        elif self.loss == "gte":
            positive[index[: rows // 2], index[: rows // 2] + rows // 2] = True
        elif self.loss == "distill":
            pass
        elif self.loss == "sup_con":
            positive = (labels[:, None] == labels) & (labels >= 0) & ~np.eye(rows, dtype=bool)
        elif "positive_ids" in self.options:
            own, others = in_pair(self.options["positive_ids"])
            positive = own[:, None] == others
        elif labels is None:
            positive[index, index] = True
        else:
            counts = (labels >= 0) & (self.options.get("label_weights", 1.0) != 0)
            for i, keys in enumerate(labels.reshape(rows, -1)):
                positive[i, keys[counts.reshape(rows, -1)[i]].astype(np.int64)] = True
        return positive

    def find_targets(self, positive: Array) -> Array:
        """The target of each row, without label smoothing: numbers that add up to 1 over `positive`
        pairs, [M, N] or with the own negatives of rows as further columns."""
        size, targets = positive.shape[1], positive.astype(float)
        if "label_weights" in self.options:
            for i, (keys, weights) in enumerate(
                zip(self.options["labels"], self.options["label_weights"], strict=True)
            ):
                one_hot = (keys[:, None] == np.arange(size)) & (keys >= 0)[:, None]
                targets[i] = np.where(one_hot, weights[:, None], 0.0).sum(axis=0)
        return targets / np.maximum(targets.sum(axis=1), 1e-300)[:, None]

    def __repr__(self) -> str:
        def short(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(short, value))
            return f"{value.dtype} {value.shape}" if np.ndim(value) else value

        options = {name: short(value) for name, value in self.options.items()}
        return (
            f"<{self.number}: {self.loss} of {short(self.features)}, scale {self.scale:g}, "
            f"{options}, grad_out {short(self.grad_out)}, {self.settings} {self.poison}>"
        )


def in_pair(value: Any) -> tuple[Array, Array]:
    return value if isinstance(value, tuple) else (value, value)


def draw_features(
    kind: str, m: int, n: int, d: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Unit rows."""
    query, key = rng.standard_normal((m, d)), rng.standard_normal((n, d))
    both = min(m, n)
    if kind == "aligned":
        key[:both] = query[:both] + 10 ** rng.uniform(-6, -1) * key[:both]
    elif kind == "partly aligned":
        key[:both] = query[:both] + rng.uniform(0.1, 2) * key[:both]
    elif kind == "opposed":
        key[:both] = -query[:both]
    elif kind == "identical":
        query[:] = key[:] = query[0]
    elif kind == "nearly identical":
        query, key = (query[0] + 1e-3 * z for z in (query, key))
    return unit(query), unit(key)


def unit(z: Array) -> Array:
    return z / np.linalg.norm(z, axis=-1, keepdims=True)


def with_norms(
    units: list[Array], name: str, normalize: bool, pairs: bool, rng: np.random.Generator
) -> list[Array]:
    """Rows of any norm; without `normalize`, norms of queries times norms of keys are about 1."""
    most = POWERS[name]
    if normalize:
        how = rng.integers(3)
        powers = [rng.uniform(-most, most, len(z) if how else 1) * (how < 2) for z in units]
    elif pairs and rng.random() < 0.5:  # no products of queries with queries
        power = rng.uniform(-most, most)
        powers = [np.full(1, power), np.full(1, -power)]
    else:
        powers = [np.zeros(1) for _ in units]
    sizes = [np.longdouble(10) ** power[:, None] for power in powers]
    return [(z * size).astype(np.float64) for z, size in zip(units, sizes, strict=True)]


def viewed(z: Array, rng: np.random.Generator) -> Array:
    """The same values behind other strides, or in the other order of bytes."""
    how = rng.integers(7)
    if how == 0:
        return np.asfortranarray(z)
    if how == 1:
        wide = np.full((2 * len(z), 3 * z.shape[1], *z.shape[2:]), np.nan, z.dtype)
        wide[::2, 1::3] = z
        return wide[::2, 1::3]
    if how == 2:
        return np.ascontiguousarray(z[::-1, ::-1])[::-1, ::-1]
    if how == 3 and z.dtype.kind == "f":
        return z.astype(z.dtype.newbyteorder())
    return z


def draw_tokens(units: list[Array], rng: np.random.Generator) -> list[Array]:
    """Sets of unit tokens, which are around each of the rows."""
    counts, spread = rng.integers(1, MOST_TOKENS + 1, 2), 10 ** rng.uniform(-1, 1)
    return [
        unit(z[:, None] + spread * rng.standard_normal((len(z), count, z.shape[1])))
        for z, count in zip(units, counts, strict=True)
    ]


def has_clear_winners(sides: list[Array], normalize: bool) -> bool:
    """Whether rounding decides no winner, as it does of equal tokens: BLAS may round their products
    differently."""
    near = compare_tokens(*sides, np.ones(sides[1].shape[:2], bool), normalize)[2]
    near &= sides[0].any(axis=2)[:, :, None, None]  # all products of zeros are 0
    return not (near.sum(axis=3) > 1).any()


def compare_tokens(
    query: Array, key: Array, key_counts: Array, normalize: bool
) -> tuple[Array, Array, Array]:
    """Products of tokens [M, L, N, K], the winner of each token of a query [M, L, N], and which
    others are as near to the largest product as its rounding."""
    sides, lengths = [], []
    for z in (query, key):
        wide = z.astype(np.longdouble)
        length = np.sqrt((wide * wide).sum(axis=2))
        sides.append(wide / np.where(length == 0, 1, length)[:, :, None] if normalize else wide)
        lengths.append((length != 0).astype(float) if normalize else length)
    q, k = (z.astype(np.float64) for z in sides)
    x = (q[:, :, None, None] * k).sum(axis=4)
    x[:, :, ~key_counts] = -np.inf
    longest = np.where(key_counts, lengths[1], 0).max(axis=1)
    gap = (TOKEN_GAP * lengths[0][:, :, None] * longest).astype(np.float64)
    near = x >= (x.max(axis=3) - gap)[..., None]
    return x, near.argmax(axis=3), near


def find_scores(problem: Problem) -> Array:
    """MaxSim scores [M, N]."""
    counts, key_counts = problem.find_tokens()
    x = compare_tokens(*problem.read_features(), key_counts, problem.normalize)[0]
    scores = np.where(counts[:, :, None], x.max(axis=3), 0.0).sum(axis=1)
    if problem.options.get("token_mean", False):
        scores /= np.maximum(counts.sum(axis=1), 1)[:, None]
    return scores


def draw_masks(sides: list[Array], rng: np.random.Generator) -> dict[str, Any]:
    """Options of tokens. Tokens that do not count hold anything; each key has one that counts."""
    drawn: dict[str, Any] = {}
    for name, z in zip(("query_mask", "key_mask"), sides, strict=True):
        if rng.random() < 0.6:
            mask = drawn[name] = rng.random(z.shape[:2]) < rng.uniform(0.2, 1)
            if name == "key_mask":
                mask[np.arange(len(z)), rng.integers(0, z.shape[1], len(z))] = True
            if rng.random() < 0.7:
                z[~mask] = rng.choice([np.nan, -np.inf, float(ml_dtypes.finfo(z.dtype).max)])
    if rng.random() < 0.4:
        drawn["token_mean"] = True
    return drawn


def draw_labels(loss: str, rows: int, columns: int, rng: np.random.Generator) -> Any:
    """Integers of any type; negative ones stand for no positive."""
    if loss == "sup_con":
        labels = rng.integers(-1, max(1, rows // int(rng.integers(1, 5))), rows)
    elif loss != "info_nce" or (rng.random() < 0.4 and columns >= rows):
        return None
    elif rng.random() < 0.5:
        labels = rng.integers(-1, columns, rows)
    else:  # sets
        most = int(rng.integers(1, min(columns, 4) + 1))
        labels = np.stack([rng.permutation(columns)[:most] for _ in range(rows)])
        labels = np.where(rng.random(labels.shape) < 0.3, -rng.integers(1, 9), labels)
    return of_any_type(labels, rng)


def draw_label_weights(labels: Array, rng: np.random.Generator) -> Array:
    """Some are 0; those of negative labels are not read, so they may be NaN."""
    weights = 10 ** rng.uniform(-3, 3) * rng.uniform(0.01, 1, labels.shape)
    weights *= rng.random(labels.shape) < 0.8
    weights[labels < 0] = rng.choice([np.nan, -1.0, 2.0])
    return weights.astype(rng.choice([np.float64, np.float32]))


def of_any_type(values: Array, rng: np.random.Generator) -> Array:
    """The same integers, of a type that holds them."""
    fitting = [t for t in LABELS if (values.astype(t) == values).all() and
               (values.min(initial=0) >= 0 or t[0] != "u")]  # fmt: skip
    return values.astype(fitting[rng.integers(len(fitting))])


def draw_names(loss: spec.Loss, shape: tuple[int, int], number: int, rng: Any) -> Any:
    """ids, groups or positive ids: one array, or a pair; of few values, or of hashes of 64 bits."""
    sides = [rng.integers(-number, number, n) for n in shape]
    if rng.random() < 0.3:
        sides = [np.sort(side) for side in sides]
    if rng.random() < 0.2:
        sides = [side * 2**54 for side in sides]
    sides = [side if abs(side).max() > 99 else of_any_type(side, rng) for side in sides]
    if loss.symmetric or (shape[0] == shape[1] and rng.random() < 0.5):
        return sides[0]
    return tuple(sides)


def draw_columns(ids: Any, rng: np.random.Generator) -> Any:
    """The ids, with one to three columns of other ids beside them."""
    if isinstance(ids, tuple):
        count = int(rng.integers(1, 4))
        return tuple(
            np.c_[side, rng.integers(0, 40, (len(side), count)).astype(side.dtype)] for side in ids
        )
    return np.c_[ids, rng.integers(0, 40, (len(ids), rng.integers(1, 4))).astype(ids.dtype)]


def draw_softmax(problem: Problem, rng: np.random.Generator) -> None:
    """Draws options of the softmax, each by itself; those that the loss refuses are left out."""
    (rows, columns), options = problem.shape, problem.options
    width, dtype = problem.features[0].shape[-1], problem.features[0].dtype.newbyteorder("=")
    drawn: dict[str, Any] = {
        "margin": rng.uniform(-0.5, 0.5), "hardness": problem.scale * rng.uniform(0, 1),
        **{name: each.draw(rng) for name, each in COMPARISONS.items()},
        "key_bias": 3 * rng.standard_normal(columns),
        "own": unit(rng.standard_normal((rows, int(rng.integers(1, 5)), width))).astype(dtype),
        "guide": [rng.standard_normal((n, 3)).astype(dtype) for n in (rows, columns)],
    }  # fmt: skip
    drawn = {
        name: value
        for name, value in drawn.items()
        if rng.random() < (0.45 if name == "own" else 0.22)
    }
    form = rng.integers(5)
    if form == 0:
        drawn["decoupled"] = True
    elif form == 1:
        drawn["label_smoothing"] = rng.uniform(0, 0.99)
    if "own" in drawn:
        shape = drawn["own"].shape[:2]
        if in_table := rng.random() < 0.5:
            drawn["own"] = drawn["own"].reshape(-1, width)[: int(rng.integers(1, 9))]
            drawn["own_indices"] = of_any_type(rng.integers(-1, len(drawn["own"]), shape), rng)
        if rng.random() < 0.6:
            drawn["own_mask"] = rng.random(shape) < 0.7
        if rng.random() < 0.5:  # others are not read
            drawn["own"][~is_read(drawn)] = np.nan
            if in_table and "own_mask" in drawn:
                largest = np.iinfo(drawn["own_indices"].dtype).max
                drawn["own_indices"][~drawn["own_mask"]] = largest
        if rng.random() < 0.3:
            drawn["own_bias"] = 3 * rng.standard_normal(shape)
        if rng.random() < 0.4:
            drawn["in_batch"] = False
        if not problem.normalize:  # of the keys' norms
            largest = np.abs(problem.features[-1][0].astype(np.float64)).max()
            drawn["own"] = (drawn["own"].astype(np.float64) * largest).astype(dtype)
    if "guide" in drawn:
        one = len(problem.features) == 1
        drawn["guide"] = drawn["guide"][0] if one else tuple(drawn["guide"])
        drawn["guide_margin"] = rng.uniform(-0.5, 1)
    options |= {name: v for name, v in drawn.items() if name not in problem.kind.refused}
    if problem.has_tokens:
        leave_out(problem, "own", *REFUSED_WITH_TOKENS)


def draw_teacher(problem: Problem, one_sided: bool, rng: np.random.Generator) -> None:
    """Features of a teacher, of any width and dtype, and whether it teaches rows only."""
    width, options, both = int(rng.choice([1, 3, 8, 33])), problem.options, [*DTYPES]
    units = list(draw_features(KINDS[rng.integers(len(KINDS))], *problem.shape, width, rng))
    name = both[rng.integers(4)]
    least = min(name, problem.dtype, key=lambda each: POWERS[each])
    units = with_norms(units, least, problem.normalize, True, rng)
    for side, z in zip(TEACHER, units, strict=False):
        options[side] = viewed(z.astype(DTYPES[name]), rng)
    if rng.random() < 0.6:
        options["teacher_scale"] = float(10 ** rng.uniform(-1.7, 2.52))
    if one_sided:
        options["two_sided"] = False


def is_read(options: dict[str, Any]) -> Array:
    """Which own negatives [M, K], or rows of their table [T], any row is compared with."""
    own, indices = options["own"], options.get("own_indices")
    if indices is None:
        every: Array = options.get("own_mask", np.ones(own.shape[:2], bool))
        return every
    counts = (indices >= 0) & options.get("own_mask", True)
    return np.isin(np.arange(len(own)), indices[counts])


def find_own(options: dict[str, Any]) -> tuple[Array, Array, Array | None]:
    """Own negatives [M, K, D], of which those that are not read are 0; which of them count [M, K];
    and their rows in a table (None: there is none), which are 0 for those that do not count."""
    own = np.where(is_read(options)[..., None], options["own"], 0)
    indices = options.get("own_indices")
    counts = options.get("own_mask", np.ones(own.shape[:2] if indices is None else indices.shape,
                                             bool))  # fmt: skip
    if indices is None:
        return own, counts, None
    counts = counts & (indices >= 0)
    indices = np.where(counts, indices, 0).astype(np.int64)
    return own[indices], counts, indices


def leave_out(problem: Problem, *names: str) -> None:
    for name in names:
        problem.options.pop(name, None)
    if "own" in names:
        leave_out(problem, "own_indices", "own_mask", "own_bias", "in_batch")
    if "guide" in names:
        leave_out(problem, "guide_margin")


def leave_out_exclusive(problem: Problem) -> None:
    """Of options that raise an error together, the last one goes."""
    for names in spec.EXCLUSIVE:
        if problem.options.keys() >= {*names}:
            # without positive ids, shapes and labels would not fit
            leave_out(problem, names[0] if {"own", "positive_ids"} & {*names} else names[-1])
    if "label_smoothing" in problem.options and np.ndim(in_pair(problem.options.get("ids"))[0]) > 1:
        leave_out(problem, "label_smoothing")


def is_ambiguous(problem: Problem, limit: str) -> bool:
    """Whether rounding decides which negatives a limit leaves out."""
    of_features = limit in COMPARISONS
    bound = COMPARISONS[limit].bound if of_features else above_positives
    of_tokens = problem.has_tokens and of_features
    sides = problem.features if of_features else in_pair(problem.options["guide"])
    sides = tuple(z.astype(np.longdouble) for z in sides)
    if problem.normalize and not of_tokens:
        sides = tuple(map(unit, sides))
    if problem.loss == "gte":
        sides = (np.concatenate(sides),)
    dots = find_scores(problem) if of_tokens else sides[0] @ sides[-1].T
    positive = problem.find_positives()
    if problem.loss == "gte":
        dots, positive = beside(dots), beside(positive)
    both = [(dots, positive)] + ([(dots.T, positive.T)] if problem.loss == "clip" else [])
    if of_features and "own" in problem.options:
        own, counts, _ = find_own(problem.options)
        own = np.where(counts[:, :, None], own.astype(np.longdouble), np.nan)
        own = unit(own) if problem.normalize else own
        more = np.nan_to_num(np.einsum("md,mkd->mk", sides[0], own))
        both = [(np.c_[dots, more], np.c_[positive, np.zeros(more.shape, bool)])]
    for x, at in both:
        gap = GAP * (10 if problem.dtype == "bfloat16" and limit == "guide_margin" else 1)
        if (abs(np.where(at, -np.inf, x) - bound(problem.options[limit], x, at)) < gap).any():
            return True
    return False


def beside(x: Any) -> Any:
    """[2B, 2B] of gte as [B, 4B]: rows i and i + B side by side."""
    half = len(x) // 2
    return np.concatenate([x[:half], x[half:]], axis=1)


def draw_poison(problem: Problem, rng: np.random.Generator, in_guide: bool) -> None:
    """A NaN or an infinity in one array of a call: features, or arrays of options. In a guide, of
    which no pair but the positives counts, if `in_guide`."""
    (rows, _), options = problem.shape, problem.options
    places = ["feature 0", f"feature {len(problem.features) - 1}", "weights", "grad_out"]
    places += [z for z in ("key_bias", "own_bias", "guide", "own", *TEACHER[:2]) if z in options]
    place = "guide" if in_guide else places[rng.integers(len(places))]
    if in_guide:
        leave_out(problem, "groups", "label_smoothing", "decoupled")
        options["ids"] = tuple(np.zeros(n, np.int64) for n in problem.shape)
    bad = [np.nan, np.inf, -np.inf][rng.integers(3)]
    if place.startswith("feature"):
        sides = [z.copy() for z in problem.features]
        problem.features = tuple(sides)
        spoilt = sides[int(place[-1])]
    elif place == "weights":
        spoilt = options["weights"] = rng.uniform(0.5, 2, rows)
    elif place == "grad_out":
        options["reduction"] = "none"
        spoilt = problem.grad_out = rng.standard_normal(rows)
    else:
        spoilt = in_pair(options[place])[0] if place == "guide" else options[place]
    if place == "own":
        leave_out(problem, "own_mask")
    if place == "guide":  # infinite limits, or limits of products, would hide it
        leave_out(problem, *COMPARISONS, "own")
    if spoilt.size:
        at = tuple(rng.integers(n) for n in spoilt.shape)
        spoilt[at] = bad
        mask = {"feature 0": "query_mask", "feature 1": "key_mask"}.get(place)
        if mask in options:  # others are not read
            options[mask][at[:2]] = True
        problem.poison = f"{bad} in {place}"
    problem.settings = {k: v for k, v in problem.settings.items() if k != "metrics"}
    if "wrt" in problem.settings and "own" not in options:
        problem.settings["wrt"] = [z for z in problem.settings["wrt"] if z != "own"]


def draw(seed: int, number: int, largest: int = 140) -> Problem:
    """Problem `number` of a seed, with at most `largest` rows of a view."""
    rng = np.random.default_rng([seed, number])
    loss = list(ALL_LOSSES.values())[number % len(ALL_LOSSES)]
    name = list(DTYPES)[rng.integers(4)]
    rows = int(rng.integers(1, 13)) if rng.random() < 0.6 else int(rng.integers(13, largest))
    rows *= 2 if loss.name == "nt_xent" else 1
    with_tokens = loss.takes_tokens and np.random.default_rng([seed, number, 1]).random() < 0.2
    turn = number // len(ALL_LOSSES)
    spoilt_guide = loss.name in ("clip", "info_nce") and turn % 5 == 2
    # the mean over no row is 0
    without_positives = loss.name in ("sup_con", "info_nce") and turn % 3 == 0
    # positives by their ids, which no guide and no labels go with
    several = "positive_ids" not in loss.refused and rng.random() < 0.3
    several = several and not (spoilt_guide or without_positives)
    one_sided = loss.taught and rng.random() < 0.5
    oblong = loss.name == "info_nce" or one_sided or (several and loss.name != "clip")
    columns = int(rng.integers(1, largest + 10)) if oblong else rows
    if with_tokens:
        rows, columns = (1 + n % MOST_ROWS for n in (rows, columns))
    d = int(rng.choice([1, 2, 3, 5, 8, 17, 33, 64, 70]))
    labels = None if several else draw_labels(loss.name, rows, columns, rng)
    if loss.name == "info_nce" and labels is None and not several:
        rows = min(rows, columns)
    kind = KINDS[rng.integers(len(KINDS))]
    units = list(draw_features(kind, rows, columns, d, rng))
    if len(loss.arguments) == 1:
        half = rows // 2 if loss.name == "nt_xent" else rows
        units = [np.concatenate([units[0][:half], units[1][:half]])[:rows]]
    if with_tokens:
        units = draw_tokens(units, rng)
    normalize = bool(rng.random() < 0.6)
    vectors = [z.reshape(-1, d) for z in units]
    scaled = with_norms(vectors, name, normalize, len(units) == 2 and not loss.joint, rng)
    scaled = [z.reshape(like.shape) for z, like in zip(scaled, units, strict=True)]
    zero = rng.random() < 0.03
    if zero:
        scaled[0][rng.integers(rows)] = 0.0
    sides, token_options = [z.astype(DTYPES[name]) for z in scaled], {}
    if with_tokens:
        if not has_clear_winners(sides, normalize):
            sides[1] = sides[1][:, :1]
        token_options = draw_masks(sides, rng)
    sides = [viewed(z, rng) for z in sides]
    if len(sides) == 2 and name in ("float16", "bfloat16") and rng.random() < 0.1:
        sides[1] = sides[1].astype(np.float32)

    problem = Problem(loss.name, tuple(sides), float(10 ** rng.uniform(-1.7, 2.52)), dtype=name)
    problem.seed, problem.number, problem.largest = seed, number, largest
    options, settings = problem.options, problem.settings
    options |= token_options
    options["normalize"] = normalize
    options["reduction"] = ["mean", "sum", "none"][rng.integers(3)]
    if without_positives:
        options["reduction"] = "mean"
    if loss.sigmoid:
        options["bias"] = float(rng.uniform(-12, 3))
    if labels is not None:
        options["labels"] = labels
    for names, share in (("ids", 0.35), ("groups", 0.25)):
        if names not in loss.refused and rng.random() < share:
            most = int(rng.integers(2, 2 + max(rows, columns))) if names == "ids" else 2
            options[names] = draw_names(loss, (rows, columns), most, rng)
            if names == "ids" and rng.random() < 0.3:
                options["ids"] = draw_columns(options["ids"], rng)
    if several:
        most = int(rng.integers(1, max(9, rows)))
        options["positive_ids"] = draw_names(loss, (rows, columns), most, rng)
        if loss.name == "clip":
            options["positive_ids"] = in_pair(options["positive_ids"])[0]
    if rng.random() < 0.3:
        weights = rng.uniform(0, 2, rows) * (rng.random(rows) < 0.8)
        weights[rng.integers(rows)] = 1.0
        options["weights"] = weights
    if np.ndim(labels) == 2 and rng.random() < 0.5:
        options["label_weights"] = draw_label_weights(options["labels"], rng)
    draw_softmax(problem, rng)
    if loss.taught:
        draw_teacher(problem, one_sided, rng)
    if spoilt_guide:
        guide = [rng.standard_normal((n, 3)).astype(np.float32) for n in (rows, columns)]
        options |= {"guide": tuple(guide), "guide_margin": 0.1}
        leave_out(problem, "label_smoothing")
    leave_out_exclusive(problem)
    spoilt_guide = spoilt_guide and "guide" in options  # which others may exclude
    if options["reduction"] == "none":
        problem.grad_out = rng.standard_normal(rows)
    elif rng.random() < 0.5:
        problem.grad_out = float(10 ** rng.uniform(-3, 3) * rng.choice([-1, 1]))
    if without_positives:
        leave_out(problem, "positive_ids")
        alone = loss.name == "sup_con" and rng.random() < 0.5
        options["labels"] = np.arange(rows) if alone else np.full(rows, -1)
        options.pop("label_weights", None)
    if zero:
        leave_out(problem, *COMPARISONS)
    for limit in (*COMPARISONS, *["guide_margin"] * (not spoilt_guide)):
        if limit in options and is_ambiguous(problem, limit):
            leave_out(problem, limit if limit in COMPARISONS else "guide")
    if (
        "dims" not in loss.refused
        and COMPARISONS.keys().isdisjoint(options)
        and rng.random() < 0.15
    ):
        widths = sorted({*map(int, rng.integers(1, d + 1, rng.integers(3))), d})
        if with_tokens:
            features = problem.read_features()
            widths = [
                z for z in widths
                if z == d or has_clear_winners([side[..., :z] for side in features], normalize)
            ]  # fmt: skip
        options["dims"] = tuple(widths)
        options["dim_weights"] = tuple(float(rng.uniform(0.1, 2)) for _ in widths)

    if number % 5 == 1 and not spoilt_guide:  # a plain call, which may take the shortest way
        kept = {"normalize", "reduction", "labels", "bias", "positive_ids", *TEACHER}
        kept |= {*spec.TOKEN_OPTIONS}
        leave_out(problem, *({*options} - kept))

    # what changes no number of a result
    if rng.random() < 0.15 and (normalize or name != "float64"):
        settings["precision"] = str(rng.choice(["fp64", "fp32"]))
    if rng.random() < 0.3:
        settings["grad_dtype"] = list(DTYPES.values())[rng.integers(2)]
    possible = [z for z in problem.kind.arguments if z not in loss.locked] + ["scale"]
    possible += ["bias"] * loss.sigmoid
    if rng.random() < 0.3:
        settings["wrt"] = [z for z in possible if rng.random() < 0.5]
    without_ranks = {*spec.NOT_WITH_METRICS, "own", "dims", "positive_ids"}
    with_metrics = not without_ranks & {*options}
    with_metrics &= "metrics" not in loss.refused and (problem.find_positives().sum(1) == 1).all()
    with_metrics &= np.size(options.get("labels")) <= rows  # not sets, even of one positive
    if with_metrics and rng.random() < 0.3:
        settings["metrics"] = True
    if rng.random() < 0.3:
        settings["workspace"] = int(rng.integers(2**17, 2**21)) * (32 if with_tokens else 1)
    tiles = [(16, 24), (64, 96), (40, 8), None][rng.integers(4)]
    problem.sides = {"TRIANGLE_SIDE": int(rng.choice([16, 50, 896]))}
    if tiles:
        problem.sides |= {"TILE": tiles, "PREFIX_TILE": tiles, "GROUP_ROWS": tiles[1]}
        problem.sides |= {"LEAST_RUN": 4, "MIXED_SIDE": 6}  # of groups
    if rng.random() < 0.1 or spoilt_guide:
        draw_poison(problem, rng, spoilt_guide)
    if rng.random() < 0.3 and (abs(np.asarray(problem.grad_out)) < 1e3).all():
        of_type = [np.float64, np.float32, np.float16][rng.integers(3)]
        problem.grad_out = np.asarray(problem.grad_out, of_type)
    return problem
