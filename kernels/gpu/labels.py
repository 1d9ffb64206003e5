"""Classes of rows and shares of weights on a GPU: kernels/cuda/labels.cu. Nothing waits for the
device, as CuPy's `argsort` and `unique` do."""

from __future__ import annotations

import math

import cupy
import numpy as np

from ..linear import Classes, Segments
from ..problem import Array
from . import plan
from .device.launcher import Launcher
from .device.launches import Queue

SORT_THREADS, SORT_ROWS = 1024, 2048
THREADS, SHARE_THREADS = 256, 1024


def _launcher(queue: Queue) -> Launcher:
    return Launcher(cupy.cuda.Device(), "fp32", queue)  # no kernel of labels.cu has products


def _sorted(
    labels: Array, queue: Queue, ids: Array | None = None, negative_apart: bool = False
) -> tuple[Array, Array]:
    """Labels in ascending order; and the rows that have them, those of one label in their order,
    [n] int64 each. `ids` are written: the labels, but of rows of negative labels, if those are
    classes `negative_apart`."""
    n, launcher = len(labels), _launcher(queue)
    found = cupy.empty(n, np.int64), cupy.empty(n, np.int64)
    launcher.launch(
        "labels.cu", "sort_labels", -(-n // SORT_ROWS), SORT_THREADS,
        {"labels": labels, "n": n, "classes": negative_apart, "ids": ids, "sorted": found[0],
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
    return found


def order_of(segment: Array) -> Array:
    """[n] rows, those of one segment one after another."""
    return _sorted(segment, Queue())[1]


def classes(labels: Array, decoupled: bool, unsigned: bool = False) -> tuple[Classes, Array, Array]:
    """The classes of rows, of which those of negative labels are alone, unless labels are bits of
    `unsigned` ones; `linear.partners` of them, the latter as numbers."""
    least = 2 if decoupled else 3
    made = plan.call(_classes, labels, least, not unsigned, graphs=True)
    places = Segments(made["place"], made["place"], -(-len(labels) // least), made["order"])
    found = Classes(made["ids"], made["ids"], in_sums=places, others=made["others"])
    return found, made["positives"], made["present"]


def _classes(
    labels: Array, least: int, negative_apart: bool, queue: Queue
) -> dict[str, Array | None]:
    """What `classes` is made of; classes of fewer rows than `least` have no sums."""
    n = len(labels)
    ids = cupy.empty(n, np.int64)
    labels, order = _sorted(labels, queue, ids, negative_apart)
    positives, place, others = cupy.empty((3, n), np.int64)
    made = {"positives": positives, "present": cupy.empty(n), "place": place, "others": others}
    _launcher(queue).launch(
        "labels.cu", "find_classes", -(-n // THREADS), THREADS,
        {"sorted": labels, "order": order, "n": n, "least": least, **made},
    )  # fmt: skip
    return {**made, "order": order, "ids": ids}


def shares(weights: Array) -> Array:
    """Each weight's share of their sum."""
    n, out = len(weights), cupy.empty(len(weights))
    _launcher(Queue()).launch(
        "labels.cu", "find_shares", 1, SHARE_THREADS,
        {"weights": weights, "n": n, "smallest": math.ulp(0.0), "shares": out},
    )  # fmt: skip
    return out
