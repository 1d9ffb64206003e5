"""Classes of rows by label, and row shares, on a GPU: kernels/cuda/labels.cu.

The kernels sort, because CuPy's `argsort` and `unique` would wait for the device.
"""

from __future__ import annotations

import cupy
import numpy as np

from ..linear import Classes, Segments
from ..problem import Array
from . import plan
from .device.launcher import Launcher
from .device.launches import Queue

SORT_THREADS, SORT_ROWS = 1024, 2048  # threads of a block of sort_labels, rows that it sorts
THREADS, SHARE_THREADS = 256, 1024  # of a block of other kernels, of find_shares


def _launcher(queue: Queue) -> Launcher:
    # a precision that labels.cu compiles with, but does not use: its kernels have no products
    return Launcher(cupy.cuda.Device(), "fp32", queue)


def sort_integers(
    labels: Array, queue: Queue, ids: Array | None = None, negative_apart: bool = False
) -> tuple[Array, Array]:
    """([n] int64 labels in ascending order, [n] int64 row of each; rows of a label ascend).

    `ids` [n] is filled with the label of each row. With `negative_apart`, each row with a negative
    label is a class by itself: it gets a negative number of its own in place of its label.
    """
    n, launcher = len(labels), _launcher(queue)
    runs = cupy.empty(n, np.int64), cupy.empty(n, np.int64)
    launcher.launch(
        "labels.cu", "sort_labels", -(-n // SORT_ROWS), SORT_THREADS,
        {"labels": labels, "n": n, "negative_apart": negative_apart, "ids": ids, "sorted": runs[0],
         "order": runs[1]},
    )  # fmt: skip
    if n <= SORT_ROWS:
        return runs
    # merge sorted runs of `run_rows` rows in pairs, until one run is left
    run_rows, merged = SORT_ROWS, (cupy.empty(n, np.int64), cupy.empty(n, np.int64))
    while run_rows < n:
        launcher.launch(
            "labels.cu", "merge_labels", -(-n // THREADS), THREADS,
            {"sorted": runs[0], "order": runs[1], "n": n, "run": run_rows, "merged": merged[0],
             "merged_order": merged[1]},
        )  # fmt: skip
        runs, merged, run_rows = merged, runs, 2 * run_rows
    return runs


def order_by_segment(segment: Array) -> Array:
    """[n] the numbers of all rows, sorted by segment."""
    return sort_integers(segment, Queue())[1]


def classes(labels: Array, decoupled: bool, unsigned: bool = False) -> tuple[Classes, Array, Array]:
    """The classes of N rows with these labels, for sup_con. Returns:

    - the classes;
    - [N] int64 the only other row of a class of two rows, or -1;
    - [N] float64 1.0 for a row that has a positive, otherwise 0.0.

    The number of classes stays on the device. Only classes of 3 rows or more (2 if `decoupled`)
    have sums, so there are at most N / 3 (N / 2) segments, rounded up. `find_classes` of labels.cu
    numbers them without counting; some numbers have no class. In a class of two, the only other row
    is the positive, and needs no sum; but if `decoupled`, the softmax leaves out all positives. A
    row with a negative label is a class by itself. `unsigned`: labels are the bits of unsigned
    integers, and none is negative.
    """
    least_rows = 2 if decoupled else 3
    outputs = plan.run_by_plan(_classes, labels, least_rows, not unsigned, graphs=True)
    segment = outputs["segment"]  # of each row, or -1
    in_sums = Segments(segment, segment, -(-len(labels) // least_rows), outputs["order"])
    row_classes = Classes(outputs["ids"], outputs["ids"], in_sums=in_sums, others=outputs["others"])
    return row_classes, outputs["positives"], outputs["present"]


def _classes(
    labels: Array, least: int, negative_apart: bool, queue: Queue
) -> dict[str, Array | None]:
    """The arrays of `classes`, by name. Classes of fewer rows than `least` have no sums."""
    n = len(labels)
    ids = cupy.empty(n, np.int64)
    labels, order = sort_integers(labels, queue, ids, negative_apart)
    positives, segment, others = cupy.empty((3, n), np.int64)
    outputs = {
        "positives": positives,
        "present": cupy.empty(n),
        "segment": segment,
        "others": others,
    }
    _launcher(queue).launch(
        "labels.cu", "find_classes", -(-n // THREADS), THREADS,
        {"sorted": labels, "order": order, "n": n, "least": least, **outputs},
    )  # fmt: skip
    return {**outputs, "order": order, "ids": ids}


def row_shares(weights: Array) -> Array:
    """[n] row shares: weights [n], float64, divided by their sum.

    If the sum is 0, all shares are 0.
    """
    n, out = len(weights), cupy.empty(len(weights))
    _launcher(Queue()).launch(
        "labels.cu", "find_shares", 1, SHARE_THREADS,
        {"weights": weights, "n": n, "shares": out},
    )  # fmt: skip
    return out
