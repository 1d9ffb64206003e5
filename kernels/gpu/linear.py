"""Linear terms on a GPU: sums over segments of rows. See `infonce.kernels.linear`."""

from __future__ import annotations

import cupy
import numpy as np

from ..linear import LinearGradient
from ..problem import Array, Problem
from . import config
from .device.arguments import address, matrix
from .device.launcher import Launcher, device_properties
from .device.launches import Queue
from .tiled.operands import Side

FEATURES = 32  # of a block of linear.cu's segment_sums
MOST_WARPS = 32


class Rows:
    """See `infonce.kernels.linear.Rows`."""

    def __init__(self, launcher: Launcher, side: Side) -> None:
        self.launcher, self.side, self.features = launcher, side, side.features
        self.inverse = _inverse_norms(side)

    @staticmethod
    def of(features: Array, problem: Problem) -> Rows:
        """Features on the current device, by themselves."""
        device = cupy.cuda.Device()
        precision = config.operands(problem.compute, device_properties(device.id))
        launcher = Launcher(device, precision, Queue())
        real = np.dtype(np.float64 if precision == "fp64" else np.float32)
        return Rows(launcher, Side(launcher, features, problem.normalize, real))

    def sums(self, segment: Array, count: int, factor: Array | None = None) -> Array:
        n, d = self.features.shape
        order = cupy.argsort(segment, kind="stable")
        begin = cupy.searchsorted(segment[order], cupy.arange(count + 1))
        weight = self.inverse if factor is None else self.inverse * factor
        out = cupy.empty((count, d))
        warps = min(max(1, n // (4 * count)), MOST_WARPS)
        self.launcher.launch(
            "linear.cu", "segment_sums", count * -(-d // FEATURES), 32 * warps,
            {"z": matrix(self.features), "d": d, "order": order, "begin": begin,
             "factor": weight, "out": out},
        )  # fmt: skip
        return out

    def products(self, segment: Array, sums: Array, itself: float) -> Array:
        n, d = self.features.shape
        out = cupy.empty(n)
        self.launcher.rows(
            "segment_products", n, file="linear.cu", z=matrix(self.features), n=n, d=d,
            inverse=self.inverse, segment=segment, sums=sums, itself=itself, out=out,
        )  # fmt: skip
        return out

    def positive_products(self, key: Rows, positives: Array) -> Array:
        """[M] or [M, P] float64: u_i . v_j for the positives j of row i; 0 in place of none."""
        n, out = positives.size, cupy.empty(positives.shape)
        self.launcher.rows(
            "positive_products", n, file="linear.cu", query=matrix(self.features),
            key=matrix(key.features), n=n, d=self.features.shape[1],
            each=n // max(1, len(positives)), query_inverse=self.inverse,
            key_inverse=key.inverse, positives=positives, out=out,
        )  # fmt: skip
        return out

    def subtract(self, term: LinearGradient, gradient: Array, first: int = 0) -> None:
        """Add the term's share of the gradient to a complete one, that of the rows from `first` on,
        through the normalisation. Term and gradient are of the same rows."""
        n, d = gradient.shape
        self.launcher.rows(
            "subtract_linear", n, file="linear.cu", z=matrix(self.features, first), n=n, d=d,
            normalize=self.side.factor is not None, inverse=address(self.inverse, first),
            segment=term.segment, factor=term.factor, sums=term.sums, weighted=term.weighted,
            itself=term.itself, g=matrix(gradient),
        )  # fmt: skip


def _inverse_norms(side: Side) -> Array:
    """[n] float64: 1 / |z_i|, 0 of a row of zeros; 1 without normalisation."""
    if side.factor is None or side.exponent is None:
        return cupy.ones(len(side.features))
    return cupy.ldexp(side.factor.astype(cupy.float64), -side.exponent)
