"""`infonce.compare`: the errors of a loss and its gradients by precision and temperature."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from . import dispatch, spec
from .arrays import compute_context, natives
from .checks import prefixes, validation
from .checks.call import check
from .checks.keywords import with_own
from .checks.teacher import ALL_LOSSES, Teacher, add_teacher
from .kernels.problem import Array
from .result import LossAndGrad

# precision -> dtype of features, from the most accurate to the least
PRECISIONS: dict[str, Any] = {
    "fp32": np.float32,
    "bf16x3": np.float32,
    "tf32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
COSINE = 0.3  # of the random rows of a positive pair, by default
# keywords of the losses that `compare` sets itself, or whose results it does not have
REFUSED = (
    "scale", "precision", "method", "offload", "reduction", "wrt", "out", "metrics",
    "return_logits",
)  # fmt: skip


@dataclass(frozen=True)
class GradientError:
    """The error of one gradient G of float64 elements, of which a precision makes g."""

    norm: float  # |g - G| / |G|, Euclidean norms
    element: float  # the largest |g_i - G_i| / the largest |G_i|
    lost: float  # the share of elements with g_i = 0, among those with G_i != 0


@dataclass(frozen=True)
class PrecisionError:
    """The errors of one precision at one temperature."""

    temperature: float
    precision: str
    grad_dtype: str  # dtype in which the feature gradients are written
    loss: float
    loss_error: float  # |loss - loss in float64| / |loss in float64|
    gradients: dict[str, GradientError]  # by argument; with "scale", and "bias" if the loss has one

    def worst(self, measure: str) -> float:
        """The largest "norm", "element" or "lost" of the gradients of all feature arrays."""
        names = [name for name in self.gradients if name not in ("scale", "bias")]
        return max((float(getattr(self.gradients[n], measure)) for n in names), key=_nan_last)


# heading -> the number of a precision
MEASURES: dict[str, Callable[[PrecisionError], float]] = {
    "loss error": lambda error: error.loss_error,
    "gradient error": lambda error: error.worst("norm"),
    "worst element": lambda error: error.worst("element"),
    "lost to underflow": lambda error: error.worst("lost"),
}


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`; `str` makes a table of it."""

    loss: str
    shapes: dict[str, tuple[int, ...]]  # of the features, by argument
    losses: dict[float, float]  # temperature -> loss in float64
    errors: tuple[PrecisionError, ...]  # for each temperature, `PRECISIONS` in their order

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the command prints them with ``--json``."""
        return asdict(self)

    def table(self) -> list[tuple[str, ...]]:
        """The headings of a table, then its lines: for each temperature, the loss in float64 and
        the errors of all precisions."""
        lines: list[tuple[str, ...]] = [
            ("temperature", "precision", "gradients", "loss", *MEASURES)
        ]
        for temperature, errors in itertools.groupby(self.errors, lambda error: error.temperature):
            loss = f"{self.losses[temperature]:.6g}"
            lines.append((f"{temperature:.6g}", "fp64", "float64", loss, *["-"] * len(MEASURES)))
            for error in errors:
                *relative, lost = (measure(error) for measure in MEASURES.values())
                numbers = *(f"{number:.1e}" for number in relative), f"{lost:.2%}"
                lines.append(("", error.precision, error.grad_dtype, f"{error.loss:.6g}", *numbers))
        return lines

    def __str__(self) -> str:
        lines = self.table()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cells = [[c.rjust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
        return "\n".join("  ".join(line) for line in cells)


def compare(
    loss: str, *features: Array, temperature: float | Sequence[float] | None = None,
    rows: int | None = None, dim: int | None = None, cosine: float = COSINE, seed: int = 0,
    labels: Array | None = None, bias: float | None = None,
    teacher_query: Array | None = None, teacher_key: Array | None = None,
    teacher_temperature: float | None = None, teacher_scale: float | None = None,
    two_sided: bool = True, grad_dtype: Any = None,
    progress: Callable[[str, int, int], None] | None = None, **options: Any,
) -> Comparison:  # fmt: skip
    """Errors of a loss and its gradients by precision, for several temperatures.

    >>> found = infonce.compare("clip", rows=512, dim=64, cosine=0.3, temperature=(0.01, 0.07))
    >>> [(e.temperature, e.precision, e.loss_error, e.worst("norm")) for e in found.errors]

    The features are vectors of rows, not sets of tokens.

    The truth is the loss and its gradients in float64, of the features as they are given. Each
    precision is computed on the CPU, with the roundings of a GPU:

    1. *Features* are rounded to the dtype of the precision: float32 (fp32, bf16x3, tf32), float16
       or bfloat16. Pass 16-bit features to leave this error out: they are exact in float64.
    2. *Dot products* have operands in the precision: tf32 has 10 bits behind the point; bf16x3 is
       the sum of three products of bfloat16 parts. Sums are float32. With `normalize`, norms divide
       the features, and are not rounded to 16 bits.
    3. *Logits, exponentials and sums over a block* are float32 in all these precisions. Sums over
       blocks, log-sum-exps, losses and reference exponents are float64. So no precision overflows
       in an exponential.
    4. *Gradient blocks*, dL/dx of the negatives, are rounded to the precision before they are
       multiplied with features. Positives stay out of the block, and are added in float32. The
       block is first divided by a bound of its elements, so that float16 cannot overflow, and only
       elements below 2^-37 of the bound underflow. The bound is twice the largest gradient at a
       positive; or, if that is larger, 2^-60 of a row's scale times its weight.
    5. *Gradients* are float32, and are rounded to the dtype of the features at the end, or to
       `grad_dtype`. In the 16-bit precisions, a second entry has float32 gradients. A float16
       number below 2^-25 becomes 0, below 6e-5 it has fewer digits, and above 65504 it is infinite.
       `grad_out` moves gradients into this range, as the factor of a GradScaler does.

    float16 features above 65504 become infinite, and the loss NaN; below 2^-25 they become 0.
    Not emulated: the order in which a GPU adds, and the truncation of tensor cores in long sums.

    Memory is linear in the number of rows: blocks within `workspace`, and gradients.

    Parameters
    ----------
    loss : str
        "clip", "lit", "siglip", "info_nce", "nt_xent", "sup_con", "gte" or "distill".
    *features : arrays [rows, features]
        In the order of the loss's function, NumPy or any array on the CPU. None: random unit rows.
    temperature : float or sequence of floats, optional
        1 / scale; by default that of the loss, if it has one (siglip: 0.1).
    rows, dim : int, optional
        Without `features`: rows and features of each random array. The rows of positive pairs have
        the cosine `cosine`. In nt_xent and sup_con, row i + rows / 2 belongs to row i.
    cosine : float, default 0.3
        In [-1, 1].
    seed : int, default 0
        Of the random rows.
    labels, bias, teacher_query, teacher_key, teacher_temperature, teacher_scale, two_sided
        As in the functions of the losses. Random rows of distill have a random teacher.
    grad_dtype : dtype, optional
        Dtype of the feature gradients of all precisions.
    progress : callable (phase, done, total), optional
        Called at the start, and after each precision at each temperature.
    **options
        Further keywords of the losses, such as `normalize`, `margin` or `grad_out`.

    Returns
    -------
    Comparison
        The losses in float64, and for each temperature and precision the relative error of the
        loss, and for each gradient: the norm of its error, relative to its norm; the largest error
        of an element, relative to the largest element; and the share of elements that are lost to
        underflow, however small they are.

    Raises
    ------
    TypeError, ValueError
        As in the functions of the losses, and if there are neither features nor `rows` and `dim`.
    """
    validation.choice("loss", loss, (*ALL_LOSSES,))
    kind = ALL_LOSSES[loss]
    for name in REFUSED:
        if name in options:
            raise ValueError(f"{name}: compare does not take it")
    if (rows is None) != (dim is None) or (rows is None) != bool(features):
        raise ValueError("rows, dim: expected both, or arrays of features")
    if rows is not None and dim is not None:
        inputs = random_inputs(kind, rows, dim, cosine, seed)
        features = tuple(inputs[name] for name in kind.arguments)
        labels = inputs.get("labels") if labels is None else labels
        teacher_query = inputs.get("teacher_query") if teacher_query is None else teacher_query
        teacher_key = inputs.get("teacher_key") if teacher_key is None else teacher_key
    if len(features) != len(kind.arguments):
        expected = f"{len(kind.arguments)} arrays of features ({', '.join(kind.arguments)})"
        raise TypeError(f"{loss}: expected {expected}, got {len(features)}")
    temperatures = _read_temperatures(kind, temperature)
    grad_dtype = validation.grad_dtype(grad_dtype)

    teacher = None
    if kind.taught:
        teacher = Teacher(teacher_query, teacher_key, teacher_temperature, teacher_scale, two_sided)
        kind = teacher.loss
    kind, arrays, call_options = with_own(kind, natives(features, kind.arguments), options)
    for name, z in zip(kind.arguments[:2], arrays, strict=False):
        if z.ndim == 3:
            raise ValueError(
                f"{name}: expected 2 dimensions [rows, features], because precisions of tokens are "
                f"not emulated, got shape {z.shape}"
            )
    call = _Call(kind, arrays, labels, bias, call_options, teacher)
    call = call.as_dtype(np.float64)  # the truth is of the features as they are given
    losses: dict[float, float] = {}
    errors: list[PrecisionError] = []
    total, done = len(temperatures) * (1 + len(PRECISIONS)), itertools.count()

    def report() -> None:
        if progress is not None:
            progress("comparing", next(done), total)

    report()
    for t in temperatures:
        wanted = call.solve("fp64", t, np.float64)
        losses[t] = float(wanted.loss)
        report()
        for precision, dtype in PRECISIONS.items():
            wide = np.promote_types(np.float32, grad_dtype or np.float32)
            got = call.as_dtype(dtype).solve(precision, t, wide)
            dtypes = [grad_dtype] if grad_dtype else list(dict.fromkeys((dtype, np.float32)))
            errors += [_find_error(t, precision, got, wanted, np.dtype(d)) for d in dtypes]
            report()
    shapes = {name: z.shape for name, z in zip(kind.arguments, arrays, strict=True)}
    return Comparison(loss, shapes, losses, tuple(errors))


@dataclass(frozen=True)
class _Call:
    """A call of a loss without its temperature."""

    kind: spec.Loss
    features: Sequence[Array]
    labels: Array | None
    bias: float | None
    options: Mapping[str, Any]
    teacher: Teacher | None

    def as_dtype(self, dtype: Any) -> _Call:
        """The call with all features rounded to `dtype`, those of a guide and a teacher too."""

        def rounded(z: Any) -> Any:
            if isinstance(z, tuple):
                return tuple(map(rounded, z))
            with np.errstate(over="ignore"):  # a number beyond the range of float16 is infinite
                return np.asarray(z).astype(dtype, copy=False)

        options, teacher = dict(self.options), self.teacher
        if options.get("guide") is not None:
            options["guide"] = rounded(options["guide"])
        if teacher is not None and teacher.query is not None and teacher.key is not None:
            teacher = teacher._replace(query=rounded(teacher.query), key=rounded(teacher.key))
        return replace(self, features=rounded((*self.features,)), options=options, teacher=teacher)

    def solve(self, precision: str, temperature: float, grad_dtype: Any) -> LossAndGrad:
        """The loss and its gradients: in one of `PRECISIONS`, or with "fp64" in float64."""
        options = {**self.options, "temperature": temperature, "grad_dtype": grad_dtype}
        if precision == "fp64":
            return dispatch.loss_and_grad(
                self.kind, self.features, self.labels, self.bias, options, teacher=self.teacher
            )
        return emulated_loss_and_grad(
            self.kind, self.features, precision, self.labels, self.bias, options, self.teacher
        )


def emulated_loss_and_grad(
    kind: spec.Loss, features: Sequence[Array], precision: str, labels: Any = None,
    bias: Any = None, options: Mapping[str, Any] | None = None, teacher: Teacher | None = None,
) -> LossAndGrad:  # fmt: skip
    """`dispatch.loss_and_grad` of NumPy arrays, with the roundings of a GPU's `precision`.

    `precision` is one of `PRECISIONS`, and the features have its dtype; or "fp64", for float64.
    """
    from .kernels.cpu import emulated  # here, so that commands do not wait for Numba

    options = options or {}
    if prefixes.has_prefixes(kind, options):
        return prefixes.loss_and_grad(
            kind, features, options,
            lambda z, others: emulated_loss_and_grad(kind, z, precision, labels, bias, others),
        )  # fmt: skip
    with compute_context(features[0]), np.errstate(all="ignore"):
        request = check(kind, features, labels, bias, options, with_grad=True)
        if teacher is not None:
            add_teacher(kind, request, features, teacher)
        solution = emulated.solve(request.problem, request.gradients, precision)
        return dispatch.make_result(kind, request, solution, features[0])


def random_pairs(rows: int, dim: int, cosine: float, seed: int = 0) -> tuple[Array, Array]:
    """Two arrays [rows, dim] of unit rows, float64, in random directions: row i of the second has
    this cosine to row i of the first."""
    first, other = np.random.default_rng(seed).standard_normal((2, rows, dim))
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    other -= (other * first).sum(1, keepdims=True) * first
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    return first, cosine * first + math.sqrt(1 - cosine**2) * other


def random_inputs(
    kind: spec.Loss, rows: int, dim: int, cosine: float = COSINE, seed: int = 0
) -> dict[str, Array]:
    """Random unit rows, float32, by feature argument of a loss: see `compare`.

    Also `labels` for sup_con, and `teacher_query` and `teacher_key` for distill.
    """
    views = len(kind.arguments) == 1  # row i + rows / 2 belongs to row i
    least = {"rows": 2, "dim": 2, "seed": 0}
    for (name, smallest), value in zip(least.items(), (rows, dim, seed), strict=True):
        if not validation.is_integer(value) or value < smallest:
            got = validation.what(value)
            raise ValueError(f"{name}: expected an integer of at least {smallest}, got {got}")
    if views and rows % 2:
        raise ValueError(f"rows: expected an even number, two views of each sample, got {rows}")
    if not -1 <= validation.number("cosine", cosine) <= 1:
        raise ValueError(f"cosine: expected a number in [-1, 1], got {cosine!r}")

    def pair(seed: int) -> list[Array]:
        both = random_pairs(rows // 2 if views else rows, dim, cosine, seed)
        return [z.astype(np.float32) for z in both]

    features = [np.concatenate(pair(seed))] if views else pair(seed)
    inputs = dict(zip(kind.arguments, features, strict=True))
    if kind.classes:
        inputs["labels"] = np.arange(rows) % (rows // 2)
    if kind.taught:
        inputs |= zip(("teacher_query", "teacher_key"), pair(seed + 1), strict=True)
    return inputs


def _read_temperatures(kind: spec.Loss, temperature: Any) -> list[float]:
    """The temperatures as distinct floats; by default that of the loss. Each is in the range of
    products in float32."""
    if temperature is None:
        return [1 / validation.scale(kind, None, None, "fp32")]
    values = [temperature] if np.ndim(temperature) == 0 else list(temperature)
    if not values or len({*values}) < len(values):
        raise ValueError(f"temperature: expected different numbers, got {temperature!r}")
    for value in values:
        validation.scale(kind, value, None, "fp32")
    return [float(value) for value in values]


def _find_error(
    temperature: float, precision: str, got: LossAndGrad, wanted: LossAndGrad, dtype: np.dtype[Any]
) -> PrecisionError:
    """The errors of `got`, whose feature gradients are rounded to `dtype`."""
    gradients = {}
    for name, truth in wanted.grads._asdict().items():
        if truth is None:
            continue
        gradient = np.asarray(getattr(got.grads, name))
        if gradient.ndim:  # scale and bias stay in the dtype of the loss
            with np.errstate(over="ignore"):
                gradient = gradient.astype(dtype)
        gradients[name] = _gradient_error(gradient, np.asarray(truth))
    loss, truth = float(got.loss), float(wanted.loss)
    loss_error = _ratio(abs(loss - truth), abs(truth))
    return PrecisionError(temperature, precision, dtype.name, loss, loss_error, gradients)


def _gradient_error(got: Array, wanted: Array) -> GradientError:
    difference = got.astype(np.float64) - wanted
    nonzero = wanted != 0
    largest = (float(np.abs(z).max()) for z in (difference, wanted))
    return GradientError(
        _ratio(float(np.linalg.norm(difference)), float(np.linalg.norm(wanted))),
        _ratio(*largest),
        _ratio(float(np.count_nonzero(nonzero & (got == 0))), float(np.count_nonzero(nonzero))),
    )


def _ratio(part: float, whole: float) -> float:
    """part / whole; 0 / 0 is 0."""
    return part / whole if whole else (0.0 if part == 0 else math.inf)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
