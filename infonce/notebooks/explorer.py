"""InfoNCE in a format, its exact values and bounds of its errors, for notebook 8.

`docs/explorer.md` derives the bounds. Its page rounds positives with the gradient block; `compute`
adds them in float32, as a GPU does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comparison import PRECISIONS, emulated_loss_and_grad, random_pairs
from ..kernels.arrays.formats import product
from ..spec import INFO_NCE

Array = Any
# roundoff, exponent of the smallest normal number, largest number
FORMATS = {
    "fp64": (2.0**-53, -1022, 1.8e308), "fp32": (2.0**-24, -126, 3.4e38),
    "bf16x3": (2.0**-16, -126, 3.4e38), "tf32": (2.0**-11, -126, 3.4e38),
    "fp16": (2.0**-11, -14, 65504.0), "bf16": (2.0**-8, -126, 3.4e38),
}  # fmt: skip
QUANTITIES = ("logits", "log-sum-exp", "loss", "gradient")


@dataclass
class InfoNCE:
    """Logits [N, N], log-sum-exps [N], losses [N], their mean, and dL/dquery [N, D]."""

    logits: Array
    lse: Array
    losses: Array
    loss: Any
    gradient: Array

    def parts(self) -> tuple[Array, ...]:
        """The arrays in the order of `QUANTITIES`."""
        return self.logits, self.lse, np.atleast_1d(self.loss), self.gradient


def compute(query: Array, key: Array, scale: float, form: str) -> InfoNCE:
    """InfoNCE in a format of products, with the roundings of `infonce.compare`."""
    is_wide = form == "fp64"
    features = [z.astype(np.float64 if is_wide else PRECISIONS[form]) for z in (query, key)]
    options = {
        "scale": scale, "grad_dtype": np.float64 if is_wide else np.float32,
        "reduction": "none", "grad_out": 1 / len(query), "normalize": False,
    }  # fmt: skip
    out = emulated_loss_and_grad(INFO_NCE, features, form, options=options)
    x = out.loss.dtype.type(scale) * product(query, key.T, form)
    return InfoNCE(x, out.lse, out.loss, out.loss.mean(), out.grads.query)


def exact(query: Array, key: Array, scale: float) -> InfoNCE:
    """The result in the widest type of this processor: 80 bits on x86.

    x = scale q k^T; n_i is the log-sum-exp of the negatives of row i;
    loss_i = softplus(n_i - x_ii), lse_i = x_ii + loss_i;
    dx_ij = exp(x_ij - lse_i), dx_ii = -sigmoid(n_i - x_ii); the gradient is scale / N dx k.
    """
    wide, n = np.longdouble, len(query)
    query, key = query.astype(wide), key.astype(wide)
    x = wide(scale) * (query @ key.T)
    positive, others = x.diagonal().copy(), x.copy()
    np.fill_diagonal(others, -np.inf)
    top = others.max(1, keepdims=True)
    negative = (np.log(np.exp(others - top).sum(1, keepdims=True)) + top).ravel()
    losses = np.logaddexp(wide(0), negative - positive)
    lse = positive + losses
    dx = np.exp(others - lse[:, None])
    np.fill_diagonal(dx, -np.exp(negative - positive - losses))
    return InfoNCE(x, lse, losses, losses.mean(), wide(scale / n) * (dx @ key))


def bounds(query: Array, key: Array, want: InfoNCE, scale: float, form: str) -> InfoNCE:
    """Bounds of the errors of `compute` against `want`, element by element.

    The letters of docs/explorer.md: `roundoff` is u_f, `sums` is u, `rho` the roundoff of the other
    steps. `tiny` and `subnormal` are absolute errors of numbers near 0, of other steps and of
    operands. `dropped` is the relative size of the product of second parts: bf16x3 leaves it out.
    """
    roundoff, least, most = FORMATS[form]
    sums, low = (2.0**-53, -1022) if form == "fp64" else (2.0**-24, -126)
    rho, tiny, subnormal = 4 * sums, 2.0 ** (low - 20), 2.0**least * roundoff
    if form == "bf16x3":  # of its parts
        subnormal = 2.0 ** (least - 8)
    dropped = (2.0**-8 * (1 + 2.0**-8)) ** 2 if form == "bf16x3" else 0.0
    n = len(query)

    def growth(terms: int) -> float:
        return terms * sums / (1 - terms * sums)

    def step(size: Array, error: Array) -> Array:
        """The error of a result of this size and error after it is rounded."""
        return error + rho * (size + error) + tiny

    def operand(size: Array) -> Array:
        return np.where(size > most, np.inf, roundoff * size + subnormal)

    def sizes(a: Array, da: Array, b: Array, db: Array) -> Array:
        """Error of a product of matrices with the errors da and db."""
        error = a @ db + da @ b + da @ db + dropped * ((a + da) @ (b + db))
        return error + growth(a.shape[1] + 3) * (a @ b + error)

    x, lse, losses = (np.asarray(z, np.float64) for z in (want.logits, want.lse, want.losses))
    a, b = np.abs(query.astype(np.float64)), np.abs(key.astype(np.float64)).T
    dx = step(np.abs(x), scale * sizes(a, operand(a), b, operand(b)))

    negative = ~np.eye(n, dtype=bool)
    others = np.where(negative, x, -np.inf)
    top = others.max(1, keepdims=True)
    negative_lse = np.log(np.exp(others - top).sum(1, keepdims=True)) + top
    share = np.exp(others - negative_lse)
    with np.errstate(over="ignore", invalid="ignore"):
        reach = np.where(negative, dx, 0).max(1)
        moved = np.fmin(np.log1p(np.where(negative, share * np.expm1(dx), 0).sum(1)), reach)
        far = np.where(negative, np.abs(x - top) + 2 * reach[:, None], 0)
        relative = (share * ((1 + rho) * np.exp(rho * far) - 1)).sum(1) + growth(n) + n * tiny
        total = moved - np.log1p(-np.minimum(relative, 1 - 2.0**-53)) + rho * np.abs(top.ravel())
        gap = step(np.abs(negative_lse.ravel()), step(0, total)) + dx.diagonal()
        gap = step(np.abs(negative_lse.ravel() - x.diagonal()), gap)
        sigma = -np.expm1(-losses)
        loss_rows = step(losses, np.fmin(sigma * np.expm1(gap), gap))
        lse_rows = step(np.abs(lse), loss_rows + dx.diagonal())
        p = np.where(negative, np.exp(x - lse[:, None]), sigma[:, None])
        exponent = step(np.abs(x - lse[:, None]), dx + lse_rows[:, None])
        exponent = np.where(negative, exponent, gap[:, None])
        dp = step(p, np.fmin(p * np.expm1(exponent), 1))
    rounding = operand(p + dp)
    if form == "fp16":  # dX is in units that fit its range
        rounding = roundoff * (p + dp) + subnormal * max((p + dp).max(), 2.0**-100) / 2.0**13
    gradient = scale / n * sizes(p, dp + rounding, b.T, operand(b.T))
    mean = loss_rows.mean() + growth(n) * (losses + loss_rows).mean()
    size = np.abs(np.asarray(want.gradient, np.float64))
    return InfoNCE(dx, lse_rows, loss_rows, step(float(want.loss), mean), step(size, gradient))


def errors(got: InfoNCE, want: InfoNCE) -> list[Array]:
    """Absolute errors of the elements, an array for each of `QUANTITIES`."""
    pairs = zip(got.parts(), want.parts(), strict=True)
    return [np.abs(g - w).astype(np.float64) for g, w in pairs]


def relative_errors(parts: list[Array], want: InfoNCE) -> list[float]:
    """The relative errors of the worst logit and log-sum-exp, of the loss, and of the gradient's
    norm."""
    logits, lse, loss, gradient = (np.asarray(z, np.float64) for z in want.parts())
    return [
        float(parts[0].max() / np.abs(logits).max()),
        float(parts[1].max() / np.abs(lse).max()),
        float(parts[2][0] / loss[0]),
        float(np.linalg.norm(parts[3]) / np.linalg.norm(gradient)),
    ]


def pairs(n: int, d: int, norm: float, cosine: float, seed: int = 0) -> tuple[Array, Array]:
    """Queries and keys [n, d], float32 rows of one norm; key i has this cosine to query i."""
    query, key = random_pairs(n, d, cosine, seed)
    return (norm * query).astype(np.float32), (norm * key).astype(np.float32)


def positive(x: Any) -> Array:
    """The numbers as float64, with NaN in place of 0, which has no place on a logarithmic axis."""
    x = np.asarray(x, np.float64)
    return np.where(x == 0, np.nan, x)


def bits(x: float, form: str) -> str:
    """Sign, exponent and fraction of a number in float64, with a bar behind what the format has."""
    text = f"{np.float64(x).view(np.uint64):064b}"
    end = 12 + round(-np.log2(FORMATS[form][0])) - 1
    return f"{text[0]} {text[1:12]} {text[12:end]}|{text[end:]}"
