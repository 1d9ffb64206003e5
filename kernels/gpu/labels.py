"""Classes of rows by label, and row shares, on a GPU: kernels/cuda/labels.cu.

The kernels sort, and no number of classes is needed: CuPy's `unique` would wait for the device.
"""

from __future__ import annotations

import cupy
import numpy as np

from ..linear import Classes, Segments
from ..problem import Array
from . import plan
from .device.launcher import Launcher
from .device.launches import Queue

SORT_THREADS, SORT_ROWS = 256, 512  # threads of a block of sort_labels, rows that it sorts
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


def classes(
    labels: Array, decoupled: bool, unsigned: bool = False
) -> tuple[Classes, Array, Array | None]:
    """The classes of N rows with these labels, for sup_con: the results of `_make_classes`.

    A row with a negative label is a class by itself. `unsigned`: labels are the bits of unsigned
    integers, and none is negative.
    """
    return _make_classes(labels, None, decoupled, True, not unsigned)


def pair_classes(
    query_ids: Array, key_ids: Array, decoupled: bool
) -> tuple[Classes, Array, Array | None]:
    """The classes of queries and keys with these positive ids: the results of `_make_classes`."""
    keys = None if key_ids is query_ids else key_ids
    return _make_classes(query_ids, keys, decoupled, False, False)


def _make_classes(
    labels: Array, key_labels: Array | None, decoupled: bool, apart: bool, negative_apart: bool
) -> tuple[Classes, Array, Array | None]:
    """The classes of M rows and N keys (`key_labels` None: the labels of rows). Returns:

    - the classes;
    - [M] int64 the only positive of a row that has one, or -1;
    - [M] float64 1.0 for a row that has a positive, otherwise 0.0; None: each row has one.

    The number of classes stays on the device. Only classes whose rows have two positives or more
    (one if `decoupled`) have sums, so there are at most N / 2 (N) segments. `apart`: a row is no
    positive of itself, so that such classes have a key more, and there are at most N / 3 (N / 2)
    segments, rounded up. `find_classes` of labels.cu numbers them without counting; some numbers
    have no class. A single positive needs no sum; but if `decoupled`, the softmax leaves out all
    positives. `negative_apart`: a row with a negative label is a class by itself.
    """
    parts = labels, key_labels, decoupled, apart, negative_apart
    outputs = plan.run_by_plan(_classes, *parts, graphs=True)
    ids: Array = outputs.get("ids", labels)
    key_ids, segment, order = ids, outputs["segment"], outputs["order"]
    if key_labels is not None:
        key_ids = key_labels
    in_sums = Segments(
        segment, outputs.get("key_segment", segment), -(-len(key_ids) // _least(decoupled, apart)),
        order, outputs.get("key_order", order),
    )  # fmt: skip
    row_classes = Classes(ids, key_ids, in_sums=in_sums, positive_count=outputs["positive_count"])
    return row_classes, outputs["positives"], outputs.get("present")


def _least(decoupled: bool, apart: bool) -> int:
    """The least number of keys of a class with a sum. See `_make_classes`."""
    return (1 if decoupled else 2) + apart


def _classes(
    labels: Array, key_labels: Array | None, decoupled: bool, apart: bool, negative_apart: bool,
    queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    """The arrays of `_make_classes`, by name."""
    m, launcher, least = len(labels), _launcher(queue), _least(decoupled, apart)
    ids = cupy.empty(m, np.int64) if negative_apart else None
    sorted_labels, order = sort_integers(labels, queue, ids, negative_apart)
    keys = {"keys": sorted_labels, "key_order": order, "n": m}
    positives, segment, positive_count = cupy.empty((3, m), np.int64)
    outputs: dict[str, Array | None] = {"order": order, "ids": ids}
    if key_labels is not None:
        n = len(key_labels)
        sorted_keys, key_order = sort_integers(key_labels, queue)
        keys = {"keys": sorted_keys, "key_order": key_order, "n": n}
        key_segment = cupy.empty(n, np.int64)
        launcher.launch(
            "labels.cu", "find_key_segments", -(-n // THREADS), THREADS,
            {**keys, "sorted": sorted_labels, "m": m, "least": least, "segment": key_segment},
        )  # fmt: skip
        outputs |= {"key_segment": key_segment, "key_order": key_order}
    present = cupy.empty(m) if apart or key_labels is not None else None
    results = {"positives": positives, "present": present, "segment": segment,
               "positive_count": positive_count}  # fmt: skip
    launcher.launch(
        "labels.cu", "find_classes", -(-m // THREADS), THREADS,
        {"sorted": sorted_labels, "order": order, "m": m, **keys, "apart": apart,
         "least": least, "decoupled": decoupled, **results},
    )  # fmt: skip
    return outputs | results


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
