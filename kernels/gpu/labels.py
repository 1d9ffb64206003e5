"""Classes of rows and shares of weights on a GPU: kernels/cuda/labels.cu. Nothing waits for the
device, as CuPy's `argsort` and `unique` do."""

from __future__ import annotations

import math

import cupy
import numpy as np

from ..linear import Classes, Segments
from ..problem import Array
from .device.launcher import Launcher
from .device.launches import Queue

SORT_THREADS, SORT_ROWS = 1024, 2048
THREADS, SHARE_THREADS = 256, 1024


def _launcher() -> Launcher:
    return Launcher(cupy.cuda.Device(), "fp32", Queue())  # no kernel of labels.cu has products


def _sorted(labels: Array, classes: bool = False) -> tuple[Array, Array, Array | None]:
    """Labels in ascending order; the rows that have them, those of one label in their order; and
    ids of `classes`, [n] int64 each."""
    n, launcher = len(labels), _launcher()
    ids = cupy.empty(n, np.int64) if classes else None
    found = cupy.empty(n, np.int64), cupy.empty(n, np.int64)
    launcher.launch(
        "labels.cu", "sort_labels", -(-n // SORT_ROWS), SORT_THREADS,
        {"labels": labels, "n": n, "classes": classes, "ids": ids, "sorted": found[0],
         "order": found[1]},
    )  # fmt: skip
    run, other = SORT_ROWS, found
    while run < n:
        if other is found:
            other = cupy.empty(n, np.int64), cupy.empty(n, np.int64)
        launcher.launch(
            "labels.cu", "merge_labels", -(-n // THREADS), THREADS,
            {"sorted": found[0], "order": found[1], "n": n, "run": run, "merged": other[0],
             "merged_order": other[1]},
        )  # fmt: skip
        found, other, run = other, found, 2 * run
    return *found, ids


def order_of(segment: Array) -> Array:
    """[n] rows, those of one segment one after another."""
    return _sorted(segment)[1]


def classes(labels: Array, decoupled: bool) -> tuple[Classes, Array, Array]:
    """The classes of rows, of which those of negative labels are alone; `linear.partners` of them,
    the latter as numbers."""
    n, least = len(labels), 2 if decoupled else 3
    labels, order, ids = _sorted(labels, True)
    positives, place, others = cupy.empty((3, n), np.int64)
    present = cupy.empty(n)
    _launcher().launch(
        "labels.cu", "find_classes", -(-n // THREADS), THREADS,
        {"sorted": labels, "order": order, "n": n, "least": least, "positives": positives,
         "present": present, "place": place, "others": others},
    )  # fmt: skip
    places = Segments(place, place, -(-n // least), order)
    return Classes(ids, ids, in_sums=places, others=others), positives, present


def shares(weights: Array) -> Array:
    """Each weight's share of their sum."""
    n, out = len(weights), cupy.empty(len(weights))
    _launcher().launch(
        "labels.cu", "find_shares", 1, SHARE_THREADS,
        {"weights": weights, "n": n, "smallest": math.ulp(0.0), "shares": out},
    )  # fmt: skip
    return out
