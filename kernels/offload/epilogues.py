"""Epilogues of offloaded calls: copies between host and device, and the parts of one block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from ..distill.problem import TaughtGradient, TaughtStatistics
from ..epilogues import Epilogue, RetrievalRanks, Sigmoid, SoftmaxGradient, Statistics, Sums
from ..linear import LinearTerm, Segments
from ..problem import Array, fast_replace
from .device import OffloadDevice


def map_arrays(
    value: Any, function: Callable[[Array], Array], mapped: dict[int, Any] | None = None
) -> Any:
    """A copy of a dataclass or tuple of arrays, with `function` applied to each array.

    An object that occurs twice is mapped once, so that it is one object in the result, too.
    `mapped` is only for recursive calls: id of an object -> its result.
    """
    mapped = {} if mapped is None else mapped
    if value is None or isinstance(value, bool):
        return value
    if id(value) not in mapped:
        if is_dataclass(value):
            parts = (map_arrays(getattr(value, f.name), function, mapped) for f in fields(value))
            make: Any = type(value)
            result: Any = make(*parts)
        elif isinstance(value, tuple):
            result = tuple(map_arrays(each, function, mapped) for each in value)
        else:
            result = function(value)
        mapped[id(value)] = result
    return mapped[id(value)]


def copy_segments(segments: Segments, device: OffloadDevice) -> Segments:
    """A copy on the device of segments on the host."""
    segments = segments.numbered(np)
    rows = device.put(segments.rows)
    columns = rows if segments.columns is segments.rows else device.put(segments.columns)
    return Segments(rows, columns, segments.count)


def copy_epilogue(epilogue: Epilogue, device: OffloadDevice) -> Any:
    """A copy on the device of an epilogue on the host."""
    if not isinstance(epilogue, SoftmaxGradient):
        return map_arrays(epilogue, device.put)
    copied = map_arrays(replace(epilogue, linear=()), device.put)
    copied.linear = tuple(
        LinearTerm(
            copy_segments(term.segments, device),
            *(None if z is None else device.put(z) for z in (term.row_factor, term.column_factor)),
        )
        for term in epilogue.linear
    )
    return copied


def copy_arrays(target: Any, source: Any) -> None:
    """Copy the arrays of the epilogue `source` into the arrays of the epilogue `target`."""
    for f in fields(target):
        destination, values = getattr(target, f.name), getattr(source, f.name)
        if isinstance(destination, Sums):
            copy_arrays(destination, values)
        elif destination is not None:
            destination[...] = values


def block_epilogue(epilogue: Epilogue, rows: slice, columns: slice) -> Epilogue:
    """The epilogue of one block, from that of a pass: its rows and columns, in the same memory.

    Linear terms are left out, because `StreamedPass.leave` adds them to complete gradients.
    """
    if isinstance(epilogue, Statistics):
        sides = {"rows": rows, "columns": columns}
        if isinstance(epilogue, TaughtStatistics):
            sides |= {"teacher_rows": rows, "teacher_columns": columns}
        sums = {name: getattr(epilogue, name) for name in sides}
        parts = {name: each and each.part(sides[name]) for name, each in sums.items()}
        return fast_replace(epilogue, positive_logits=epilogue.positive_logits[rows], **parts)
    if isinstance(epilogue, RetrievalRanks):
        part = RetrievalRanks(epilogue.positive_logits[rows], epilogue.row_rank[rows])
        if epilogue.column_rank is not None:
            part.column_positive_logits = epilogue.column_positive_logits[columns]
            part.column_rank = epilogue.column_rank[columns]
        return part
    if isinstance(epilogue, SoftmaxGradient):
        reference, factor, positive = (
            epilogue.column_reference, epilogue.column_factor, epilogue.column_positive_gradient,
        )  # fmt: skip
        if reference is not None and factor is not None:  # columns have a softmax
            # None: key j is the positive of query j
            positive = (epilogue.positive_gradient if positive is None else positive)[columns]
            reference, factor = reference[columns], factor[columns]
        softmax = SoftmaxGradient(
            epilogue.row_reference[rows], epilogue.row_factor[rows], reference, factor,
            epilogue.positive_gradient[rows], positive,
            bounded_by_positives=epilogue.bounded_by_positives,
        )  # fmt: skip
        if isinstance(epilogue, TaughtGradient) and epilogue.teacher is not None:
            teacher: Any = block_epilogue(epilogue.teacher, rows, columns)
            return TaughtGradient(**softmax.__dict__, teacher=teacher)
        return softmax
    assert isinstance(epilogue, Sigmoid)
    vectors = (getattr(epilogue, f.name) for f in fields(epilogue))
    return Sigmoid(*(None if v is None else v[rows] for v in vectors))
