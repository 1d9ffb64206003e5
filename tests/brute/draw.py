"""Random calls: every one follows from a seed and its number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from brute_force import Call, find_positives
from infonce.kernels.cpu import schedule

from infonce import spec

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16,
          "bfloat16": ml_dtypes.bfloat16}  # fmt: skip
POWERS = {"float64": 300, "float32": 30, "float16": 2, "bfloat16": 30}  # of 10, of norms
METHODS = ["naive", "fused", "tiled", "auto"]
KINDS = ["random", "aligned", "partly aligned", "opposed", "identical", "nearly identical"]


def draw_features(
    kind: str, m: int, n: int, d: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
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
    return tuple(z / np.linalg.norm(z, axis=1, keepdims=True) for z in (query, key))


def with_norms(
    units: list[np.ndarray], name: str, normalize: bool, pairs: bool, rng: np.random.Generator
) -> list[np.ndarray]:
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


def viewed(z: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The same values behind other strides, or in the other order of bytes."""
    how = rng.integers(7)
    if how == 0:
        return np.asfortranarray(z)
    if how == 1:
        wide = np.full((2 * len(z), 3 * z.shape[1]), np.nan, z.dtype)
        wide[::2, 1::3] = z
        return wide[::2, 1::3]
    if how == 2:
        return np.ascontiguousarray(z[::-1, ::-1])[::-1, ::-1]
    if how == 3 and z.dtype.kind == "f":
        return z.astype(z.dtype.newbyteorder())
    return z


def softmax_options(
    loss: spec.Loss, columns: int, scale: float, rng: np.random.Generator
) -> dict[str, Any]:
    drawn = {
        "margin": rng.uniform(-0.5, 0.5), "hardness": scale * rng.uniform(0, 1),
        "false_negative_margin": rng.uniform(-0.5, 1), "key_bias": 3 * rng.standard_normal(columns),
    }  # fmt: skip
    drawn = {name: value for name, value in drawn.items() if rng.random() < 0.25}
    form = rng.integers(5)
    if form == 0:
        drawn["decoupled"] = True
    elif form == 1:
        drawn["label_smoothing"] = rng.uniform(0, 0.99)
    for name, other in spec.EXCLUSIVE[:3]:  # label_smoothing: without each option drawn above
        if name in drawn:
            drawn.pop(other, None)
    return {name: value for name, value in drawn.items() if name not in loss.refused}


def make_labels(loss: str, rows: int, columns: int, rng: np.random.Generator) -> Any:
    if loss == "sup_con":
        return rng.integers(-1, max(1, rows // int(rng.integers(1, 5))), rows)
    if loss != "info_nce" or (rng.random() < 0.4 and columns >= rows):
        return None
    if rng.random() < 0.5:
        return rng.integers(-1, columns, rows)
    most = int(rng.integers(1, min(columns, 4) + 1))
    sets = np.stack([rng.permutation(columns)[:most] for _ in range(rows)])
    return np.where(rng.random(sets.shape) < 0.3, -1, sets)


def draw_ids(loss: spec.Loss, rows: int, columns: int, rng: np.random.Generator) -> Any:
    if "ids" in loss.refused or rng.random() < 0.6:
        return None
    values = int(rng.integers(2, 2 + max(rows, columns)))
    if loss.symmetric or (rows == columns and rng.random() < 0.5):
        return rng.integers(-5, values, rows)
    return rng.integers(-5, values, rows), rng.integers(-5, values, columns)


def is_ambiguous(call: Call, sides: list[np.ndarray]) -> bool:
    """Whether rounding decides which negatives are above the limit of false_negative_margin.

    `draw` then leaves the option out.
    """
    margin = call.softmax.get("false_negative_margin")
    if margin is None:
        return False
    units = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in sides]
    if call.loss == "gte":
        units = [np.concatenate(units)]
    dots = units[0] @ units[-1].T
    positive = find_positives(call, *dots.shape)
    if call.loss == "gte":
        dots, positive = (np.concatenate(np.split(x, 2), axis=1) for x in (dots, positive))
    both = [(dots, positive)] + ([(dots.T, positive.T)] if call.loss == "clip" else [])
    for x, at in both:
        limit = np.where(at, x, -np.inf).max(axis=1, keepdims=True) + margin
        if (np.abs(np.where(at, np.inf, x) - limit) < 1e-4).any():
            return True
    return False


def draw_without_positives(call: Call, rng: np.random.Generator) -> None:
    """No row of info_nce or sup_con has a positive."""
    rows = len(call.features[0])
    alone = call.loss == "sup_con" and rng.random() < 0.5  # each row has a class of its own
    call.labels = np.arange(rows) if alone else np.full(rows, -1)


def draw_prefixes(width: int, rng: np.random.Generator) -> list[tuple[int, float]]:
    """One to three widths, the last of which is all features, and the weights of their losses."""
    widths = {*map(int, rng.integers(1, width + 1, rng.integers(3))), width}
    return [(each, float(rng.uniform(0.1, 2))) for each in sorted(widths)]


def draw_poison(drawn: Drawn, rng: np.random.Generator) -> None:
    """A NaN or an infinity in one array of a call: features, or arrays of options."""
    call, loss = drawn.call, spec.LOSSES[drawn.call.loss]
    rows, columns = len(call.features[0]), len(call.features[-1])
    places = ["feature 0", f"feature {len(call.features) - 1}", "weights", "grad_out"]
    places += ["key_bias"] * ("key_bias" not in loss.refused)
    places += ["guide"] * 2 * ("guide" not in loss.refused) + ["own"] * ("own" not in loss.refused)
    place = places[rng.integers(len(places))]
    bad = [np.nan, np.inf, -np.inf][rng.integers(3)]
    drawn.poison = f"{bad} in {place}"
    drawn.options = {k: v for k, v in drawn.options.items() if k not in ("workspace", "metrics")}
    if place.startswith("feature"):
        sides = [z.copy() for z in call.features]
        spoilt = sides[int(place[-1])]
        call.features = tuple(sides)
    elif place == "weights":
        spoilt = call.weights = rng.uniform(0.5, 2, rows)
    elif place == "grad_out":
        call.reduction = "none"
        spoilt = call.grad_out = rng.standard_normal(rows)
    elif place == "key_bias":
        spoilt = rng.standard_normal(columns)
        call.softmax = {**call.softmax, "key_bias": spoilt}
    else:
        left_out = (*spec.NOT_WITH_LABEL_SMOOTHING, "label_smoothing", "key_bias")
        call.softmax = {k: v for k, v in call.softmax.items() if k not in left_out}
        if place == "own":
            if len(call.features[0]) != len(call.features[-1]):
                call.labels = np.arange(rows) % columns
            spoilt = rng.standard_normal((rows, 2, call.features[0].shape[1]))
            spoilt = spoilt.astype(call.features[0].dtype)
            drawn.extra = {"own": spoilt}
        else:
            sides = [rng.standard_normal((len(z), 3)).astype(z.dtype) for z in call.features]
            spoilt = sides[rng.integers(len(sides))]
            drawn.extra = {"guide": tuple(sides) if len(sides) == 2 else sides[0]}
    spoilt[tuple(rng.integers(n) for n in spoilt.shape)] = bad


@dataclass
class Drawn:
    """A call, and what does not change its result."""

    call: Call
    dtype: str
    compute: str
    options: dict[str, Any]
    patches: dict[str, Any]
    norms: tuple[float, float]
    prefixes: list[tuple[int, float]] | None = None  # of `dims`: widths and weights
    poison: str = ""  # the number that is not finite, and the array that has it
    extra: dict[str, Any] = field(default_factory=dict)  # options of a poisoned call


def draw(seed: int, number: int) -> Drawn:
    rng = np.random.default_rng([seed, number])
    loss = list(spec.LOSSES.values())[number % len(spec.LOSSES)]
    name = list(DTYPES)[rng.integers(4)]
    rows = int(rng.integers(1, 13)) if rng.random() < 0.6 else int(rng.integers(13, 140))
    rows *= 2 if loss.name == "nt_xent" else 1
    columns = int(rng.integers(1, 150)) if loss.name == "info_nce" else rows
    d = int(rng.choice([1, 2, 3, 5, 8, 17, 33, 64, 70]))
    kind = KINDS[rng.integers(len(KINDS))]
    units = list(draw_features(kind, rows, columns, d, rng))
    if len(loss.arguments) == 1:
        half = rows // 2 if loss.name == "nt_xent" else rows
        units = [np.concatenate([units[0][:half], units[1][:half]])[:rows]]
    normalize = bool(rng.random() < 0.6)
    pairs = len(units) == 2 and not loss.joint
    scaled = with_norms(units, name, normalize, pairs, rng)
    if rng.random() < 0.03:
        scaled[0][rng.integers(rows)] = 0.0
    sides = [viewed(z.astype(DTYPES[name]), rng) for z in scaled]
    if len(sides) == 2 and name in ("float16", "bfloat16") and rng.random() < 0.1:
        sides[1] = sides[1].astype(np.float32)
    compute = "float64" if name == "float64" else "float32"
    precision = "auto"
    if rng.random() < 0.15:
        compute = str(rng.choice(["float64", "float32"]))
        precision = {"float64": "fp64", "float32": "fp32"}[compute]
    if name == "float64" and not normalize:
        compute, precision = "float64", "auto"
    scale = float(10 ** rng.uniform(-1.5, 2.3))
    call = Call(loss.name, tuple(sides), scale, float(rng.uniform(-12, 3)), normalize)
    call.reduction = ["mean", "sum", "none"][rng.integers(3)]
    call.labels = make_labels(loss.name, rows, columns, rng)
    if loss.name == "info_nce" and call.labels is None:
        call.features = (call.features[0][:columns], call.features[1])
        rows = len(call.features[0])
    call.ids = draw_ids(loss, rows, columns, rng)
    if rng.random() < 0.3:
        call.weights = rng.uniform(0, 2, rows) * (rng.random(rows) < 0.8)
        call.weights[rng.integers(rows)] = 1.0
    call.softmax = softmax_options(loss, columns, scale, rng)
    if is_ambiguous(call, [z for z in units]) or (scaled[0] == 0).all(axis=1).any():
        call.softmax = {k: v for k, v in call.softmax.items() if k != "false_negative_margin"}
    if call.reduction == "none":
        call.grad_out = rng.standard_normal(rows)
    elif rng.random() < 0.5:
        call.grad_out = float(10 ** rng.uniform(-3, 3) * rng.choice([-1, 1]))
    options: dict[str, Any] = {"method": METHODS[rng.integers(4)], "precision": precision}
    if rng.random() < 0.3:
        options["grad_dtype"] = list(DTYPES.values())[rng.integers(2)]
    possible = [z for z in loss.arguments if z not in loss.locked] + ["scale"]
    possible += ["bias"] * loss.sigmoid
    if rng.random() < 0.3:
        options["wrt"] = [z for z in possible if rng.random() < 0.5]
    single = call.labels is None or (call.labels.ndim == 1 and (call.labels >= 0).all())
    plain = not {"key_bias", "false_negative_margin"} & call.softmax.keys()
    if "metrics" not in loss.refused and single and plain and rng.random() < 0.3:
        options["metrics"] = True
    if options["method"] in ("tiled", "auto") and rng.random() < 0.3:
        options["workspace"] = int(rng.integers(2**17, 2**21))
    tiles = [(16, 24), (64, 96), (40, 8), schedule.TILE][rng.integers(4)]
    patches = {"TILE": tiles, "TRIANGLE_SIDE": int(rng.choice([16, 50, 896]))}
    with np.errstate(divide="ignore"):
        norms = [float(np.sqrt((z.astype(np.longdouble) ** 2).sum(axis=1)).max()) for z in scaled]
    drawn = Drawn(call, name, compute, options, patches, (min(norms), max(norms)))
    # what follows is drawn last, so that it changes no number drawn before
    if loss.name in ("info_nce", "sup_con") and rng.random() < 0.05:
        draw_without_positives(call, rng)
        options.pop("metrics", None)
    if rng.random() < 0.1:
        draw_poison(drawn, rng)
    elif "dims" not in loss.refused and rng.random() < 0.2:
        drawn.prefixes = draw_prefixes(d, rng)
        options["grad_dtype"] = list(DTYPES.values())[rng.integers(4)]
        options.pop("metrics", None)
        call.softmax = {k: v for k, v in call.softmax.items() if k != "false_negative_margin"}
    return drawn
