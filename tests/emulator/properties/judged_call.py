"""Public calls on the emulated device, and the float64 reference of each, with bounds.

The bounds follow from dL/dx, the gradient of the logits x = scale <l, r> of rows l and r. The exact
matrix G is known. A kernel has G_ij (1 + e_ij) instead, and sums over it:

- `row_error` is what all e_ij of a row may share: the roundings of logits and of log-sum-exps.
  Their effects may add up.
- `element_error` is what each e_ij has by itself: the rounding of an element of dL/dx, and of
  operands. The effects add up as random numbers do, in squares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from gpu_problems import ELEMENT_ROUNDOFF, LOSS_BOUND, PRODUCT_ROUNDOFF, device_view
from judge import viewed

import infonce
from infonce import reference, spec
from infonce.reference import common

STEPS = 8  # roundings on the way to an exponential
SPREAD = 3  # deviations of a sum of roundings; of one to three terms: the worst case
CUT = 2.0**-24  # of a sum, in a step of a tensor core
LONGEST = {"fp32": 2}  # steps of a sum; others are as long as rows
# Absolute errors, of numbers below the range of a dtype
SMALLEST_ELEMENT = {"float16": 2.0**-24, "bfloat16": 2.0**-126}  # of a gradient of this dtype
SMALLEST_NORMAL = 2.0**-126  # of float32, in which precisions but fp64 compute: less becomes 0
# arrays, on the features' side
PER_ROW = ("labels", "weights", "key_bias", *spec.INTEGER_OPTIONS, "grad_out")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `infonce.<loss>_loss_and_grad` with arrays of the host."""

    loss: str
    features: tuple[Any, ...]
    precision: str
    options: dict[str, Any]  # of the public function, `labels` and `bias` too
    view: str = "contiguous"  # strides of the features: see `judge.viewed`

    def __repr__(self) -> str:
        shapes = " and ".join(f"{z.dtype.name} {z.shape}" for z in self.features)
        options = {
            name: _each(lambda z: f"array {np.shape(z)}", value) if name in PER_ROW else value
            for name, value in self.options.items()
        }
        return f"<{self.loss} of {shapes}, {self.view}, in {self.precision}, with {options}>"

    @property
    def kind(self) -> spec.Loss:
        return spec.LOSSES[self.loss]

    def on_device(self, device: int = 0, offload: bool = False, **more: Any) -> Any:
        """The result of the call on an emulated device."""
        options = self.options | more | {"precision": self.precision, "offload": offload}
        with cupy.cuda.Device(device):
            if offload:
                features = [viewed(z, self.view) for z in self.features]
            else:
                features = [device_view(z, self.view) for z in self.features]
                for name in {*PER_ROW} & {*options}:
                    options[name] = _each(cupy.asarray, options[name])
            function = getattr(infonce, f"{self.loss}_loss_and_grad")
            return function(*features, **options)

    # -- the reference

    @cached_property
    def wide(self) -> tuple[Any, ...]:
        """The features in float64."""
        return tuple(z.astype(np.float64) for z in self.features)

    @cached_property
    def rows(self) -> tuple[Any, Any]:
        """Rows whose products are compared, of length 1 with `normalize`."""
        sides = [z / n for z, n in zip(self.wide, self.lengths, strict=True)]
        if self.kind.joint:
            sides = [np.concatenate(sides)]
        return sides[0], sides[-1]

    @cached_property
    def lengths(self) -> list[Any]:
        """The divisors of rows under `normalize`: norms, or 1 for rows of zeros. 1 without
        `normalize`."""
        if not self.options.get("normalize"):
            return [np.ones((len(z), 1)) for z in self.wide]
        norms = [np.linalg.norm(z, axis=1, keepdims=True) for z in self.wide]
        return [np.where(norm == 0, 1.0, norm) for norm in norms]

    @cached_property
    def softmax(self) -> dict[str, Any]:
        return {name: self.options[name] for name in spec.SOFTMAX_OPTIONS if name in self.options}

    @cached_property
    def dots(self) -> Any:
        return self.rows[0] @ self.rows[1].T

    @cached_property
    def _masks(self) -> tuple[Any, Any]:
        """Pairs that are positives, and pairs that are left out; for gte with rows i and i + B side
        by side, as reference/gte.py has them."""
        m, n = self.dots.shape
        own = np.arange(m)
        labels, ids, groups = map(self.options.get, ("labels", "ids", "groups"))
        if self.loss == "sup_con":
            positive = (labels[:, None] == labels) & (labels >= 0)[:, None] & ~np.eye(m, dtype=bool)
        elif "positive_ids" in self.options:
            of_rows, of_columns = self.options["positive_ids"]
            positive = of_rows[:, None] == of_columns
        elif self.loss in ("nt_xent", "gte"):
            positive = own == (own[:, None] + m // 2) % m
        else:
            labels = own if labels is None else labels
            positive = (labels.reshape(m, -1, 1) == np.arange(n)).any(axis=1)
        if self.kind.joint:
            pairs = own[: m // 2] if ids is None else ids
            ids = np.concatenate([pairs, pairs])
            groups = None if groups is None else np.tile(groups, 2)
        excluded = common.duplicates(ids, positive) | common.other_groups(groups, positive)
        if self.kind.symmetric:
            excluded = excluded | np.eye(m, dtype=bool)
        if self.kind.joint:  # the positive of rows i and i + B is one term, in row i
            positive[m // 2 :] = False
            excluded[own[m // 2 :], own[: m // 2]] = True
            return self.side_by_side(positive), self.side_by_side(excluded)
        return positive, excluded

    @staticmethod
    def side_by_side(x: Any) -> Any:
        return np.concatenate(np.split(x, 2), axis=1)

    @cached_property
    def row_weights(self) -> tuple[Any, Any]:
        """The weight of each loss in the reduced loss, and in the sum that the gradients belong
        to."""
        has_positive = self._masks[0].any(axis=1) | self.kind.sigmoid
        weights = np.where(has_positive, self.options.get("weights", 1.0), 0.0)
        if self.options.get("reduction", "mean") == "mean":
            weights = weights / max(weights.sum(), 1e-300)
        return weights, weights * self.options.get("grad_out", 1.0)

    @cached_property
    def reference(self) -> Any:
        names = ["labels", *spec.INTEGER_OPTIONS, "scale", "bias", *self.softmax]
        options = {name: self.options[name] for name in names if name in self.options}
        unit = [z / n for z, n in zip(self.wide, self.lengths, strict=True)]
        result = getattr(reference, self.loss)(*unit, weights=self.row_weights[1], **options)
        if not self.options.get("normalize"):
            return result
        grads = dict(result.grads)  # through the normalisation; those of rows of zeros stay zero
        for name, u, length in zip(self.kind.arguments, unit, self.lengths, strict=True):
            if grads[name] is not None:
                through = common.normalize_backward(grads[name], u, length)
                grads[name] = np.where(u.any(axis=1, keepdims=True), through, 0.0)
        return result._replace(grads=grads)

    def above_positives(self) -> list[Any]:
        """How far each product is above the largest of its row's positives, and of its column's."""
        positive, excluded = self._masks
        dots = self.side_by_side(self.dots) if self.kind.joint else self.dots
        sides = [(dots, positive, excluded)]
        if self.loss == "clip":
            sides.append((dots.T, positive.T, excluded.T))
        return [
            np.where(x | p, np.nan, z - np.where(p, z, -np.inf).max(axis=1, keepdims=True))
            for z, p, x in sides
        ]

    # -- bounds

    @property
    def unit(self) -> float:
        """Roundoff of a logit, relative to the lengths of its rows of D features.

        It is the larger of that of operands and of the sum of products, `single` (1 + sqrt(D) / 4).
        Hopper's tensor cores cut off up to 2^-24 of a sum for every 32 bytes of a row, for which
        kernels correct the logits: `cut` is added.
        """
        width, single = self.features[0].shape[1], 2.0**-53
        cut = 0.0
        if self.precision != "fp64":
            single = 2.0**-24
            steps = -(-width // 16)
            cut = CUT * min(steps, LONGEST.get(self.precision, steps))
        return max(PRODUCT_ROUNDOFF[self.precision], single * (1 + width**0.5 / 4)) + cut

    @cached_property
    def largest(self) -> float:
        """Bound of an exponent."""
        longest = np.prod([np.linalg.norm(z, axis=1).max() for z in self.rows])
        bias = np.abs(self.options.get("key_bias", 0.0)).max() + abs(self.options.get("bias", 0.0))
        scale = self.options["scale"] + self.options.get("hardness", 0.0)
        return float(scale * (longest + abs(self.options.get("margin", 0.0))) + bias)

    @property
    def row_error(self) -> float:
        return STEPS * self.unit * (1 + self.largest)

    @property
    def element_error(self) -> float:
        operands = PRODUCT_ROUNDOFF[self.precision] * (self.precision in ("tf32", "bf16x3"))
        return SPREAD * (ELEMENT_ROUNDOFF[self.precision] + operands)

    @cached_property
    def terms(self) -> Any:
        """Sizes of the elements of dL/dx, of losses whose weights are 1. Where a target may nearly
        cancel a probability, the size of either."""
        positive, excluded = self._masks
        dots, scale = self.dots, self.options["scale"]
        if self.kind.sigmoid:
            x = scale * dots + self.options["bias"]
            size = common.sigmoid(np.where(positive, -x, x))
            return np.where(excluded, 0.0, size)
        if self.kind.joint:
            return self._softmax_terms(self.side_by_side(dots), positive, excluded)
        size = self._softmax_terms(dots, positive, excluded, key_bias=self.options.get("key_bias"))
        if self.loss == "clip":
            columns = self._softmax_terms(dots.T, positive, excluded.T)
            return (size + columns.T) / 2
        return size

    @common.silent
    def _softmax_terms(self, dots: Any, positive: Any, excluded: Any, **more: Any) -> Any:
        options = self.softmax | {"key_bias": None} | more
        scale = self.options["scale"]
        _, _, slope = common.softmax_loss(dots, positive, excluded, scale=scale, **options)
        share = positive / np.maximum(1, positive.sum(axis=1, keepdims=True))
        smoothing = options.get("label_smoothing", 0.0)
        kept = np.maximum(1, (~excluded).sum(axis=1, keepdims=True))
        several = positive.sum(axis=1).max(initial=0) > 1 or smoothing > 0
        return np.abs(slope) + several * share + 2 * smoothing * ~excluded / kept

    @cached_property
    def weighted_terms(self) -> Any:
        """Sizes of the elements of dL/dx, as large as `dots`."""
        terms = self.terms * np.abs(self.row_weights[1])[:, None]
        return np.concatenate(np.split(terms, 2, axis=1)) if self.kind.joint else terms

    def losses_bound(self) -> Any:
        """The bound of the error of each row's loss."""
        # The slopes of a softmax's row add up to 2 at most: its probabilities and its targets
        summed = self.terms.sum(axis=1) if self.kind.sigmoid else 2.0
        least = 4 * self.unit * (1 + self.largest) * summed
        if "label_smoothing" in self.options:
            least = 2 * least
        if self.precision != "fp64":
            least = least + SMALLEST_NORMAL * self.dots.shape[1]
        return LOSS_BOUND[self.precision] * np.abs(self.reference.losses) + least

    def feature_bounds(self) -> list[Any]:
        """Norms of the errors of the feature gradients, without that of storing them."""
        scale, terms, (left, right) = self.options["scale"], self.weighted_terms, self.rows
        errors = [self._sums(terms, right), self._sums(terms.T, left)]
        if self.kind.symmetric:
            errors = [errors[0] + errors[1]]
        if self.kind.joint:
            errors = np.split(errors[0], 2)
        through = 2.0 if self.options.get("normalize") else 1.0  # the part along a row comes off
        sizes = zip(errors, self.lengths, strict=True)
        return [through * scale * np.linalg.norm(error / length) for error, length in sizes]

    def _sums(self, terms: Any, z: Any) -> Any:
        """Errors of the elements of dL/dx z: row errors add up, element errors in squares."""
        together = terms @ np.abs(z)
        apart = together if self.repeated else np.sqrt(np.square(terms) @ np.square(z))
        return self.row_error * together + self.element_error * apart

    @cached_property
    def repeated(self) -> bool:
        """Whether equal rows make equal elements, of which all are rounded in one direction."""
        return any(len(np.unique(z, axis=0)) < 0.9 * len(z) for z in self.rows)

    def scalar_bounds(self) -> dict[str, float]:
        terms, (left, right) = self.weighted_terms, self.rows
        margin = abs(self.options.get("margin", 0.0))
        lengths = [np.linalg.norm(z, axis=1) for z in (left, right)]
        products = lengths[0][:, None] * lengths[1] + margin

        def apart(sizes: Any) -> Any:
            return sizes.sum() if self.repeated else np.linalg.norm(sizes)

        scale_error = self.row_error * (terms * products).sum()
        scale_error += self.element_error * apart(terms * (np.abs(self.dots) + margin))
        bias_error = self.row_error * terms.sum() + self.element_error * apart(terms)
        return {"scale": float(scale_error), "bias": float(bias_error)}

    # -- the comparison

    def check(self, got: Any) -> None:
        """Holds a result to the bounds."""
        want, (weights, _) = self.reference, self.row_weights
        losses = np.where(weights == 0, 0.0, want.losses * weights)
        bounds = np.abs(weights) * self.losses_bound()
        if self.options.get("reduction", "mean") != "none":
            losses, bounds = losses.sum(), bounds.sum()
        loss = _host(got.loss)
        single = ml_dtypes.finfo(loss.dtype).eps
        finite = np.isfinite(losses)
        assert loss.shape == np.shape(losses), f"loss of shape {loss.shape}"
        assert np.array_equal(loss[~finite], np.asarray(losses)[~finite], equal_nan=True), "loss"
        if finite.all():
            wrong = np.abs(loss - losses) > bounds + single * np.abs(losses)
            assert not wrong.any(), f"loss: {loss} for {losses}, bound {bounds}"
            self.check_gradients(got.grads)
        if got.lse is not None and want.lse is not None:
            self.check_lse(got.lse)

    def check_lse(self, got: Any) -> None:
        bound = STEPS * self.unit * (1 + self.largest)
        for have, want in zip(_pair(got), _pair(self.reference.lse), strict=True):
            have = _host(have)
            np.testing.assert_allclose(have, want, ml_dtypes.finfo(have.dtype).eps, bound)

    def check_gradients(self, got: Any) -> None:
        wanted = self.options.get("wrt")
        bounds = dict(zip(self.kind.arguments, self.feature_bounds(), strict=True))
        bounds |= self.scalar_bounds()
        for name, have in got._asdict().items():
            want = self.reference.grads.get(name)
            if want is None or (wanted is not None and name not in wanted):
                assert have is None, f"gradient of {name} where none was asked for"
                continue
            have = _host(have)
            want, bound = np.nan_to_num(want), bounds[name]
            bound += (ml_dtypes.finfo(have.dtype).eps + self.unit) * np.linalg.norm(want)
            least = 1e-290 if self.precision == "fp64" else 1e-24
            bound += SMALLEST_ELEMENT.get(have.dtype.name, least) * np.sqrt(want.size)
            assert have.shape == np.shape(want), f"gradient of {name} of shape {have.shape}"
            error = np.linalg.norm(have.astype(np.float64) - want)
            assert error <= bound, (
                f"{name}: off by {error:.2e}, bound {bound:.2e}, norm {np.linalg.norm(want):.2e}"
            )


def _each(function: Any, values: Any) -> Any:
    """`function` of an array, or of each of a pair."""
    return tuple(map(function, values)) if isinstance(values, tuple) else function(values)


def _pair(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _host(array: Any) -> Any:
    return cupy.asnumpy(array)
