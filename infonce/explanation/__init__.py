"""`infonce.explain`: how a call would run on a GPU, found without running it and without a GPU.

The arguments become the description of a call (`Call`), for which `kernels.gpu.schedule` decides
kernels and memory, as for a call that runs. `work` counts operations and bytes of the schedule, and
`devices` has the peaks of GPUs, from which the least time follows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import spec
from ..checks import prefixes, tokens, validation
from ..checks.outputs import ALIGNMENT
from ..checks.teacher import ALL_LOSSES
from ..kernels.gpu.schedule import (
    Call,
    LossForm,
    Matrix,
    Schedule,
    distillation_schedules,
    schedule,
)
from ..kernels.maxsim.sizes import TokenCall, TokenSide
from ..kernels.options import MOST_COLUMNS, PAIR_OPTIONS, GivenOptions
from ..kernels.problem import WORKSPACE, uses_moments
from .devices import GPUS, DeviceModel
from .result import Explanation
from .token_calls import count_token_work, schedule_tokens
from .work import naive_memory, schedule_work

DTYPES = ("float64", "float32", "bfloat16", "float16")
# Options of pairs that a call has or lacks. Ids have a number of columns
FLAGS = tuple(option.name for option in PAIR_OPTIONS if option.name != "ids")
# benchmark record of a checkout; it is not part of an installed package
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu.json"


def explain(
    loss: str,
    rows: int,
    features: int,
    *,
    keys: int | None = None,
    dtype: str = "float32",
    device: str = "h200",
    precision: str = "auto",
    method: str = "auto",
    workspace: int | str | None = None,
    wrt: Sequence[str] | None = None,
    normalize: bool = False,
    ids: bool | int = False,
    own: int = 0,
    own_table: int = 0,
    dims: Sequence[int] | None = None,
    metrics: bool = False,
    query_tokens: int = 0,
    key_tokens: int = 0,
    query_mask: bool = False,
    key_mask: bool = False,
    **pair_options: bool,
) -> Explanation:
    """How a call of a loss with gradients would run on a GPU.

    >>> plan = infonce.explain("clip", 65536, 512, dtype="bfloat16", device="h200")
    >>> print(plan)  # a table
    >>> plan.workspace, plan.seconds, [work.kernel for work in plan.work]

    The function needs neither a GPU nor CuPy. The seconds are a lower bound, not a prediction: they
    follow from the vendor's peak rates. Kernels on vectors of length M or N are left out.

    Parameters
    ----------
    loss : str
        "clip", "lit", "siglip", "info_nce", "nt_xent", "sup_con", "gte", or "distill" with a
        teacher of as many features.
    rows : int
        Rows of the first array of features, M.
    features : int
        Features of a row, D.
    keys : int, optional
        Rows of the second array, N; `rows` by default.
    dtype : str, default "float32"
        Dtype of features and of their gradients: "float64", "float32", "bfloat16" or "float16".
    device : str, default "h200"
        "b200", "h200", "h100", "a100", "l40s", "l4", "rtx4090" or "t4".
    precision, method, workspace, wrt, normalize, metrics
        As in the functions of the losses. With an empty `wrt`, the call has no gradients.
    ids : bool or int, default False
        Whether the call has ids, or the number of their columns.
    own : int, default 0
        Own negatives of each row, K. If the call has gradients, theirs is wanted, too.
    own_table : int, default 0
        Rows of the table that has the own negatives (`own_indices`), T; 0: there is no table.
    dims : increasing integers, optional
        Widths of the prefixes of the features. On a GPU, each prefix is a call.
    query_tokens, key_tokens : int, default 0
        Tokens of a row, if rows are sets of tokens (late interaction).
    query_mask, key_mask : bool, default False
        Whether tokens of queries, or of keys, have a mask.
    {flags} : bool, default False
        Whether the call has the option; a guide has as many features.

    Returns
    -------
    Explanation
        Kernels and matrix products in their order, memory by name in bytes, operations, bytes and
        seconds.

    Raises
    ------
    TypeError, ValueError
        As in the functions of the losses, and for an unknown name.
    """
    # check the arguments
    validation.choice("loss", loss, (*ALL_LOSSES,))
    validation.choice("dtype", dtype, DTYPES)
    validation.choice("device", device, (*GPUS,))
    validation.choice("precision", precision, spec.CHOICES["precision"])
    validation.choice("method", method, spec.CHOICES["method"])
    kind, gpu = ALL_LOSSES[loss], GPUS[device]
    sizes = {"rows": rows, "features": features, "keys": rows if keys is None else keys}
    for name, value in sizes.items():
        if not validation.is_integer(value) or value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {validation.what(value)}")
    for name in pair_options.keys() - {*FLAGS}:
        raise TypeError(f"explain got an unexpected keyword argument {name!r}")
    guide, positive_ids = (pair_options.get(name, False) for name in ("guide", "positive_ids"))
    flags = {"normalize": normalize, "metrics": metrics} | pair_options
    for name, value in flags.items():
        validation.flag(name, value)
    for name, value in (("own", own), ("own_table", own_table)):
        if not validation.is_integer(value) or value < 0:
            came = validation.what(value)
            raise ValueError(f"{name}: expected an integer of at least 0, got {came}")
    if own_table and not own:
        raise ValueError(f"own_table: expected 0 without own, got {own_table}")
    token_counts = {"query_tokens": query_tokens, "key_tokens": key_tokens}
    has_tokens = _check_tokens(
        kind, token_counts, {"query_mask": query_mask, "key_mask": key_mask},
        {"own": own, "guide": guide, "dims": dims}, method,
    )  # fmt: skip
    if not validation.is_integer(ids):
        validation.flag("ids", ids)
    if not 0 <= ids <= MOST_COLUMNS:
        raise ValueError(f"ids: expected 0 to {MOST_COLUMNS} columns, got {ids}")
    options = flags | {"ids": ids, "own": own}
    for name, value in options.items():
        if value and name in kind.refused:
            raise ValueError(f"{name}: {loss} does not take it")
    for name, *others in spec.EXCLUSIVE:
        if options.get(name) and all(map(options.get, others)):
            raise ValueError(f"{name}: not with {' and '.join(others)}")
    for name in spec.NOT_WITH_METRICS:
        if metrics and options.get(name):
            raise ValueError(f"metrics: expected False with {name}, got True")
    widths = [features] if dims is None else prefixes.read_widths(dims, features)
    if dims is not None and "dims" in kind.refused:
        raise ValueError(f"dims: {loss} does not take it")
    columns = sizes["keys"]
    square = kind.is_square(positive_ids) or kind.symmetric
    if columns != rows and square:
        raise ValueError(f"keys: expected {rows} for {loss}, got {columns}")
    if kind.symmetric and not (kind.classes or kind.joint) and rows % 2:
        raise ValueError(f"rows: expected an even number, two views of each sample, got {rows}")
    caller_workspace = validation.workspace(workspace)
    wrt_names = validation.wrt(kind, wrt)

    # describe the call, or the call of each prefix, and schedule it
    call = replace(
        _make_call(kind, (rows, columns, features), dtype, precision, wrt_names), method=method,
        workspace=caller_workspace or WORKSPACE, workspace_given=caller_workspace is not None,
        normalize=normalize, own=own, table_rows=own_table, retrieval_ranks=metrics,
        id_columns=int(ids) or 1,
    )  # fmt: skip
    given = dict(options)
    if positive_ids and not kind.sigmoid:
        # the largest possible number of classes of two keys or more, whose features are summed.
        # Kernels compare the ids only if others could leave out positives
        call = replace(call, classes=True, max_class_sums=-(-columns // 2))
        given["positive_ids"] = bool(ids or given.get("groups"))
    pairs = GivenOptions(option for option in PAIR_OPTIONS if given.get(option.name))
    call = replace(call, pairs=pairs)
    if guide:  # the guide's features are as wide as the features of the call
        call = replace(call, guide_query=call.query, guide_key=call.key)
    if has_tokens:
        sides = (query_tokens, query_mask), (key_tokens, key_mask)
        is_plain = not (pairs.change_logits or positive_ids)
        return _explain_tokens(kind, call, sides, dtype, precision, is_plain, gpu)
    calls = [_narrow(call, width) for width in widths]
    schedules = [each for one in calls for each in _make_schedules(kind, one, gpu)]
    last_schedule = schedules[-1]
    work = tuple(step for each in schedules for step in schedule_work(each, gpu))

    # a benchmark may have measured the same call, if the call has no options
    case = {"loss": loss, "size": rows, "dim": features, "dtype": dtype, "precision": precision,
             "method": method, "gradient": bool(wrt_names)}  # fmt: skip
    has_options = any(options.values()) or caller_workspace or dims is not None
    has_all_gradients_or_none = wrt is None or not wrt_names
    may_be_recorded = columns == rows and has_all_gradients_or_none and not has_options
    recorded = _recorded_seconds(case, gpu) if may_be_recorded else None
    operands = last_schedule.operands
    return Explanation(
        _title(last_schedule.call), gpu.model, last_schedule.method,
        operands.precision if operands is not None else call.compute_precision,
        work, _memory(schedules), max(map(_workspace_bytes, schedules)),
        sum(step.seconds for step in work), recorded, tuple(_notes(last_schedule)), last_schedule,
    )  # fmt: skip


def _name_flags(function: Any) -> None:
    """Put `FLAGS` in the place of `pair_options` in a function's signature and docstring."""
    signature = inspect.signature(function)
    others = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")
        for name in FLAGS
    ]
    function.__signature__ = signature.replace(parameters=[*others, *flags])
    if function.__doc__ is not None:  # None: without docstrings, python -OO
        function.__doc__ = function.__doc__.replace("{flags}", ", ".join(FLAGS))


_name_flags(explain)


def _check_tokens(
    kind: spec.Loss, counts: dict[str, int], masks: dict[str, bool], others: dict[str, Any],
    method: str,
) -> bool:  # fmt: skip
    """Whether rows are sets of tokens. ValueError for what such a call does not have."""
    for name, value in counts.items():
        if not validation.is_integer(value) or value < 0:
            came = validation.what(value)
            raise ValueError(f"{name}: expected an integer of at least 0, got {came}")
    for name, value in masks.items():
        validation.flag(name, value)
    given = [name for name, value in (counts | masks).items() if value]
    if not given:
        return False
    if not all(counts.values()):
        names = " and ".join(counts)
        raise ValueError(f"{names}: expected both, with {given[0]}, got {counts}")
    if not kind.takes_tokens:
        raise ValueError(f"query_tokens: {kind.name} takes no sets of tokens")
    for name, value in others.items():
        if value:
            raise ValueError(f"{name}: not explained for sets of tokens, got {value}")
    tokens.require_method(method)
    return True


def _explain_tokens(
    kind: spec.Loss, call: Call, sides: Sequence[tuple[int, bool]], dtype: str, precision: str,
    is_plain: bool, gpu: DeviceModel,
) -> Explanation:  # fmt: skip
    """The explanation of a call on sets of tokens. `sides`: tokens of a row, and whether they have
    a mask, of queries and of keys."""
    m, n, d = call.shape
    wants = call.query_gradient is not None, call.key_gradient is not None
    sigmoid = call.loss is LossForm.PAIRS
    query, key = (
        TokenSide(rows, count, dtype, mask)
        for rows, (count, mask) in zip((m, n), sides, strict=True)
    )
    token_call = TokenCall(
        query, key, d, validation.precision(precision, {dtype}, False, has_tokens=True),
        call.workspace, call.normalize, has_second_pass=any(wants) and not sigmoid,
        wants_key=wants[1], is_plain=is_plain,
    )  # fmt: skip
    chosen = schedule_tokens(token_call, gpu)
    work = tuple(count_token_work(chosen, gpu, sigmoid, wants))
    return Explanation(
        f"{m} x {n} scores of {query.tokens} x {key.tokens} tokens of {d} features, "
        f"{call.loss.value}",
        gpu.model, "tiled", token_call.precision, work, {"all passes": chosen.memory},
        sum(chosen.memory.values()), sum(step.seconds for step in work), None,
        tuple(chosen.notes()), chosen,
    )  # fmt: skip


def _make_call(
    kind: spec.Loss, shape: tuple[int, int, int], dtype: str, precision: str, wrt: frozenset[str]
) -> Call:  # fmt: skip
    """The description of a call on contiguous arrays, without options.

    `shape` is (M, N, D) of the arguments; `wrt` are the arguments whose gradients are wanted.
    """
    (m, n, d), feature_names = shape, wrt & set(kind.arguments)
    joint_copy_bytes = 0
    if kind.joint:  # features are copied to one array of 2M rows, which are queries and keys
        m = n = 2 * m
        row_bytes = Matrix.packed(m, d, dtype).row_bytes
        # Halves of the array of gradients are the gradients, or are copied (`outputs.joined`)
        copied = bool(feature_names) and m // 2 * row_bytes % ALIGNMENT != 0
        joint_copy_bytes = (1 + copied) * m * row_bytes
    query, key = (Matrix.packed(rows, d, dtype) for rows in (m, n))
    dq, dk = (Matrix.packed(rows, d, dtype) for rows in (m, n))
    wants_query = bool(feature_names) if kind.joint else kind.arguments[0] in wrt
    wants_key = not kind.symmetric and kind.arguments[-1] in wrt
    return Call(
        _loss_form(kind), query, key, dq if wants_query else None, dk if wants_key else None,
        validation.precision(precision, {dtype}, on_cpu=False),
        moments=bool(wrt & {"scale", "bias"})
        and uses_moments(m * n, bool(feature_names), on_cpu=False),
        # the largest possible number of classes of three rows or more, whose features are summed
        classes=kind.classes, max_class_sums=-(-m // 3) if kind.classes else 0, joint=kind.joint,
        joint_copy_bytes=joint_copy_bytes,
    )  # fmt: skip


def _narrow(call: Call, width: int) -> Call:
    """The call on the first `width` features of each row."""
    query, key = (replace(z, columns=width) for z in (call.query, call.key))
    gradients = (call.query_gradient, call.key_gradient)
    dq, dk = (None if z is None else replace(z, columns=width) for z in gradients)
    return replace(call, query=query, key=key, query_gradient=dq, key_gradient=dk)


def _make_schedules(kind: spec.Loss, call: Call, gpu: DeviceModel) -> list[Schedule]:
    """The schedules of a call, in their order: one, or three of distillation."""
    if not kind.taught:
        return [schedule(call, gpu.properties)]
    taught = replace(call, teacher_query=call.query, teacher_key=call.key)
    return [*distillation_schedules(taught, gpu.properties)]


def _loss_form(kind: spec.Loss) -> LossForm:
    """The softmax or sigmoid of a loss. Views are rows that are queries and keys."""
    if kind.sigmoid:
        return LossForm.PAIRS
    if kind.symmetric:
        return LossForm.VIEWS
    return LossForm.BOTH if kind.column_direction_weight else LossForm.ROWS


def _title(call: Call) -> str:
    """The field `call` of an explanation."""
    m, n, d = call.shape
    return f"{m} x {n} logits of {d} features, {call.loss.value}"


def _memory(schedules: Sequence[Schedule]) -> dict[str, dict[str, int]]:
    """The parts of the workspace, for the field `memory` of an explanation.

    Of several passes with the same purpose, it has the pass with the largest workspace.
    """
    last = schedules[-1]
    if last.method == "naive":
        return {"loss and gradient": naive_memory(last.call)}
    if last.one_launch is not None:
        return {"loss and gradient": dict(last.one_launch.memory)}
    memory: dict[str, dict[str, int]] = {}
    for scheduled in (one for each in schedules for one in each.passes):
        parts_so_far = memory.get(scheduled.purpose.value, {})
        if sum(scheduled.parts.values()) >= sum(parts_so_far.values()):
            memory[scheduled.purpose.value] = dict(scheduled.parts)
    if last.cached:
        memory["cached from pass to pass"] = dict(last.cached)
    if last.call.own:
        memory["own negatives"] = last.call.own_memory
    return memory


def _workspace_bytes(chosen: Schedule) -> int:
    if chosen.method == "naive":
        return sum(naive_memory(chosen.call).values())
    if chosen.one_launch is not None:
        return int(chosen.one_launch.memory["logits"])
    size: int = chosen.workspace
    return size


def _notes(chosen: Schedule) -> list[str]:
    """Sentences on decisions that kernels and memory do not show."""
    call, operands = chosen.call, chosen.operands
    if chosen.method == "naive":
        way = "the kernels of kernels/cuda/naive run in turn"
        if not call.plain:
            way = (
                "operations on arrays, of which only matrix products are counted, compute the loss"
            )
        return [f"the logits are kept in memory; {way}"]
    if operands is None:
        return []
    names = ("queries", operands.query), ("keys", operands.key)
    notes = [f"{name} are read {rows.reading.value}" for name, rows in names]
    notes = notes[:1] if call.symmetric else notes
    if operands.precision != call.compute_precision:
        notes.append(f"{call.compute_precision} is computed with operands in {operands.precision}")
    if chosen.cached_columns:
        notes.append(
            f"the exponentials of {chosen.cached_columns} columns are cached between passes"
        )
    if call.own:
        of_table = f" of a table of {call.table_rows} rows" * bool(call.table_rows)
        notes.append(
            f"{call.own} own negatives of each row{of_table} are read twice, beside the passes"
        )
    for scheduled in chosen.passes:
        dk = scheduled.dk_accumulator
        if dk is not None and dk.overlaid:
            notes.append(f"{dk.overlaid} rows of the accumulator lie in the gradient's own memory")
            break
    return notes


def _recorded_seconds(case: dict[str, Any], gpu: DeviceModel) -> float | None:
    """The median seconds that the benchmark record has for such a call; None: it has none.

    A row of the record matches if both of these hold: it has all entries of `case`; and it has
    neither an entry "keys" (N differs from M) nor an entry "wrt" (some of the gradients).
    """
    try:
        record = json.loads(RESULTS.read_text())
    except OSError:
        return None
    if record["device"] != gpu.model:
        return None
    for row in record["results"]:
        matches = case.items() <= row.items() and not row.keys() & {"keys", "wrt"}
        if matches and "median_s" in row:
            return float(row["median_s"])
    return None
