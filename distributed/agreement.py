"""Ranks compare their calls before any work, and agree on one schedule.

Each rank sends one message about its call to all ranks. A message has two parts, each as bytes:

- The report (`RankReport`) follows from shapes, dtypes, devices and options. Calls with the same
  shapes and options have the same report, so reports are cached.
- The scalars (scale, bias, `grad_out`) may change from call to call.

If every rank sends the same report as for its last call, the schedule of the last call is used
again. A rank of such a call sends the rows of a small batch with its message (whole_batch.py): its
work begins while the calls are compared. An error on one rank is raised on all ranks. call.py calls
`agree_on_schedule`; schedule.py decides the schedule.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from infonce.kernels.distill.problem import TaughtProblem
from infonce.kernels.problem import Array, Problem

from infonce import arrays, spec
from infonce.checks.call import Request, check
from infonce.checks.rows import compared_as
from infonce.checks.teacher import Teacher, add_teacher
from infonce.checks.validation import Batch
from infonce.spec import ARRAY_OPTIONS, INTEGER_OPTIONS, Loss

from .communicators.base import Communicator, RankError
from .exchanges.partition import Partition
from .schedule import RankReport, RankSchedule, decide, find_exchange_room, require_options
from .transports import choice as transports
from .whole_batch import row_arrays

# errors that all ranks raise with their own type; any other type becomes a `RankError`
BUILTIN_ERRORS = {
    error.__name__: error
    for error in (TypeError, ValueError, MemoryError, ImportError, OverflowError)
}
Options = Mapping[str, Any]
# pickled report, pickled scalars, `whole_batch.row_arrays` or None
RankMessage = tuple[bytes, bytes, dict[str, Array] | None]
# All options in `COMPILED_OPTIONS` must be the same on all ranks. The checks of a call replace the
# values of these five options ("auto" becomes a method, for example), so `_list_shared_values`
# lists these options one by one. All others are fields of `Problem`
RESOLVED_OPTIONS = "method", "reduction", "precision", "in_batch", "token_mean"
SHARED_OPTIONS = [name for name in spec.COMPILED_OPTIONS if name not in RESOLVED_OPTIONS]
# keywords of distributed/losses.py that must be the same on all ranks, and `dims`
SHARED_KEYWORDS = ("gradient_scale", "transport", "exchange", "dims")
# scale -> temperature that may be given in its place; ranks compare scales, and send temperatures
# only for the messages of errors
TEMPERATURES = {"scale": "temperature", "teacher_scale": "teacher_temperature"}
MAX_CACHED_REPORTS = 64  # if there are as many, all are forgotten before the next is stored
# bytes, more than the memory of any machine: "naive" holds all logits of a block at once
UNBOUNDED_WORKSPACE = 2**62
_packed_reports: dict[tuple[Any, ...], bytes] = {}  # pickled reports of earlier calls


class AgreedError(Exception):
    """An error that all ranks raise together, so that no rank waits for another one."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


Failure = tuple[str, str] | None  # type and message of an error; None: no error


def run_on_all_ranks(
    ranks: Communicator, function: Callable[[], tuple[Any, Any]]
) -> tuple[Any, list[Any]]:
    """Run `function` on each rank, and return its result and the messages of all ranks.

    All ranks call this together. `function` returns (result for this rank, message for all ranks).
    An error on any rank is raised on all ranks, as `AgreedError`.
    """
    result = error = message = None
    try:
        result, message = function()
    except Exception as e:
        error = e
    outcomes = ranks.allgather((as_failure(error), message))
    raise_first_failure([failure for failure, _ in outcomes], error)
    return result, [message for _, message in outcomes]


def as_failure(error: Exception | None) -> Failure:
    """The type and the message of an error, which other ranks receive."""
    return None if error is None else (type(error).__name__, str(error))


def raise_first_failure(failures: Sequence[Failure], own_error: Exception | None) -> None:
    """Raise `AgreedError` if a rank has failed. `own_error` is this rank's exception, or None."""
    for rank, failure in enumerate(failures):
        if failure is None:
            continue
        if len(failures) == 1 and own_error is not None:
            raise AgreedError(own_error)  # one rank: its own exception, with its traceback
        name, text = failure
        raise AgreedError(BUILTIN_ERRORS.get(name, RankError)(f"rank {rank}: {text}"))


def require_equal_values(values_by_rank: Sequence[Sequence[bytes]]) -> None:
    """Raise an `AgreedError` that names the first value in which a rank differs from rank 0.

    Each rank has pickled dictionaries of values by name: the values of the kind of call, with None
    in the places of scalars, and then the scalars. Temperatures are not compared: scales are
    (`TEMPERATURES`).
    """
    for rank, packed in enumerate(values_by_rank):
        if packed == values_by_rank[0]:
            continue
        expected, got = _unpack_values(values_by_rank[0]), _unpack_values(packed)
        for name in {**expected, **got}:
            if name not in TEMPERATURES.values() and got.get(name) != expected.get(name):
                temperature = TEMPERATURES.get(name)
                if temperature in expected and temperature in got:
                    name = temperature  # the argument that the caller knows
                error = (
                    f"{name}: expected the same on all ranks, got {expected.get(name)!r} on rank 0 "
                    f"and {got.get(name)!r} on rank {rank}"
                )
                raise AgreedError(ValueError(error))


def _unpack_values(packed_dictionaries: Sequence[bytes]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for packed in packed_dictionaries:
        values |= pickle.loads(packed)
    return values


# -- the check of a rank's call, and its message to all ranks


@dataclass(frozen=True)
class RankCall:
    """The arguments of this rank's call, except its features."""

    kind: Loss
    labels: Any
    bias: Any
    options: Options
    rank_options: Options
    with_grad: bool
    teacher: Teacher | None = None

    @property
    def function(self) -> str:
        return f"{self.kind.name}_loss{'_and_grad' if self.with_grad else ''}"

    def check(
        self, features: list[Array], queries: Partition, keys: Partition, rank: int
    ) -> Request:
        """Check the call as `rank`, given the shards of all ranks; return the checked call."""
        options = self.options
        require_options(options, self.rank_options)
        if not queries.total or not keys.total:
            raise ValueError(
                f"{self.kind.arguments[0]}: expected at least one row over all ranks, got none"
            )
        loss_count = queries.total // (2 if self.kind.joint else 1)  # gte: B losses of 2B queries
        batch = Batch(loss_count, keys.total, queries.starts[rank])
        request = check(self.kind, features, self.labels, self.bias, options, self.with_grad, batch)
        if self.teacher is not None:
            add_teacher(self.kind, request, features, self.teacher)
        if request.problem.method == "naive":
            if request.on_gpu:
                raise ValueError(
                    'method: expected "auto" or "tiled" over ranks with arrays on GPUs, got "naive"'
                )
            request.problem.workspace = UNBOUNDED_WORKSPACE
        return request


def agree_on_schedule(
    call: RankCall, features: list[Array], early_error: Exception | None, ranks: Communicator
) -> tuple[Request, RankSchedule, list[dict[str, Array]] | None]:
    """This rank's checked call, the schedule of all ranks, and the rows of all ranks if their
    messages had them (`whole_batch.row_arrays`).

    `early_error` is the error of this rank's arguments that was found before, or None.
    `AgreedError` on all ranks if a rank's call is refused, if calls differ, or if no schedule fits.

    The check of a call needs the numbers of rows of all ranks: labels, for example, are indices of
    the keys of all ranks. A rank does not know the numbers of the other ranks before a message. So
    each rank first assumes that the other ranks have as many rows as in the last call. The steps:

    1. A rank whose arrays have as many rows as in its last call checks its call under this
       assumption. Any other rank reports only its numbers of rows. All ranks exchange these
       messages.
    2. If all reports equal those of the last call, the ranks compare only the scalars, and use the
       schedule of the last call again. The steps below are for all other calls.
    3. The ranks compare their functions, on which the meaning of the numbers of rows depends. If a
       rank has not checked its call, all ranks check their calls with the numbers of rows that they
       know now, and exchange messages again.
    4. The ranks compare the values that must be equal, and decide a schedule.
    """
    shapes = [tuple(getattr(array, "shape", ())) for array in features]
    # 1 stands for an array that is no matrix: the checks refuse it
    argument_rows = [shape[0] if len(shape) > 1 else 1 for shape in shapes]

    def check_call(queries: Partition, keys: Partition) -> tuple[Request, RankMessage]:
        request = call.check(features, queries, keys, ranks.rank)
        return request, make_checked_message(call, request, features, argument_rows, ranks.over_mpi)

    # step 1
    last_schedule, own_error, own_message = ranks.last_schedule, early_error, None
    if (
        own_error is None
        and last_schedule is not None
        and last_schedule.has_shards(call.kind.joint, ranks.rank, argument_rows)
    ):
        try:
            request, own_message = check_call(last_schedule.queries, last_schedule.keys)
            if last_schedule.repeats(ranks.rank, own_message[0]) and last_schedule.whole_batch:
                first_query = last_schedule.queries.starts[ranks.rank]
                own_message = *own_message[:2], row_arrays(request.problem, first_query)
        except Exception as refusal:
            own_error = refusal
    if own_message is None:
        own_message = make_unchecked_message(
            call.function, None if early_error else argument_rows, own_error
        )
    messages = ranks.allgather(own_message)

    # step 2
    packed_reports = [report for report, _, _ in messages]
    if last_schedule is not None and packed_reports == last_schedule.packed_reports:
        # The reports of a schedule are those of checked calls. So the check of this rank's call
        # has succeeded, and `request` is bound.
        require_equal_values([(scalars,) for _, scalars, _ in messages])
        rank_arrays = [arrays for _, _, arrays in messages if arrays is not None]
        return request, last_schedule, rank_arrays or None

    # step 3
    reports = unpack_reports(messages)
    require_equal_values([(pickle.dumps({"function": report.function}),) for report in reports])
    # first the errors of unreadable arrays, because their numbers of rows are unknown
    read_failures = [report.failure if report.argument_rows is None else None for report in reports]
    raise_first_failure(read_failures, own_error)
    rows_by_rank = [report.argument_rows or [] for report in reports]
    queries, keys = (
        Partition([sum(rows) if call.kind.joint else rows[argument] for rows in rows_by_rank])
        for argument in (0, call.kind.key_argument)
    )
    # A rank that has checked its call in step 1 reports `shared_values` (the check has passed) or a
    # `failure` (the check has refused the call). A rank checks only if its own rows are those of
    # the last schedule, and assumes that the others' rows are too. If every rank has checked, this
    # is true, and a refusal counts. Otherwise all ranks check again
    every_rank_has_checked = all(report.shared_values or report.failure for report in reports)
    if every_rank_has_checked:
        raise_first_failure([report.failure for report in reports], own_error)
    else:
        request, messages = run_on_all_ranks(ranks, lambda: check_call(queries, keys))
        reports = unpack_reports(messages)

    # step 4
    require_equal_values(
        [
            (report.shared_values, scalars)
            for report, (_, scalars, _) in zip(reports, messages, strict=True)
        ]
    )
    try:
        packed_reports = [report for report, _, _ in messages]
        ranks.last_schedule = decide(
            packed_reports, reports, request, queries, keys, ranks, call.rank_options
        )
    except ValueError as error:
        raise AgreedError(error) from None
    return request, ranks.last_schedule, None


def make_unchecked_message(
    function: str, argument_rows: list[int] | None, error: Exception | None
) -> RankMessage:
    """The message of a rank whose call is not checked yet, or is refused with `error`."""
    return pickle.dumps(RankReport(function, argument_rows, as_failure(error))), b"", None


def unpack_reports(messages: Sequence[RankMessage]) -> list[RankReport]:
    """The reports of all ranks."""
    return [pickle.loads(report) for report, _, _ in messages]


def make_checked_message(
    call: RankCall, request: Request, features: list[Array], argument_rows: list[int],
    over_mpi: bool,
) -> RankMessage:  # fmt: skip
    """The message of a rank whose call is checked. `over_mpi`: see `Communicator`."""
    options, problem = call.options, request.problem
    labels, classes = call.labels, call.kind.classes
    # types of labels, ids and guides, which must be comparable over all ranks
    array_types: dict[str, Any] = {
        "labels": compared_as(labels) if classes else _describe_presence(labels),
        **{name: compared_as(options.get(name)) for name in INTEGER_OPTIONS},
        "guide": _describe_features(problem.guide_key),
    }
    if isinstance(problem, TaughtProblem):
        array_types |= {
            "two_sided": problem.two_sided,
            "teacher_key": _describe_features(problem.teacher_key),
        }
    # weights on a GPU are not read, because the host would wait for the GPU
    weights, has_weights = options.get("weights"), problem.weights is not None
    may_be_positive = (
        weights is None or request.on_gpu or bool(np.any(arrays.native(weights, "weights")))
    )
    keywords = {name: call.rank_options.get(name) for name in SHARED_KEYWORDS}
    keywords["INFONCE_LOCAL_SIZE"] = os.environ.get("INFONCE_LOCAL_SIZE")
    cache_key = (  # `static` is one object for all calls with the same shapes, dtypes and options
        request.static, *keywords.values(), *array_types.values(),
        os.environ.get(transports.CUDA_AWARE), over_mpi, has_weights, may_be_positive,
    )  # fmt: skip
    packed_report = _packed_reports.get(cache_key)
    if packed_report is None:
        gpu, availability = None, transports.HOST_AVAILABILITY
        if request.on_gpu:
            from .transports.gpu import device_name

            gpu, availability = device_name(), transports.gpu_availability(over_mpi)
        shared_values = _list_shared_values(call, request, features, array_types) | keywords
        packed_report = pickle.dumps(RankReport(
            call.function, argument_rows, None, pickle.dumps(shared_values), availability, gpu,
            find_exchange_room(request), has_weights, may_be_positive,
        ))  # fmt: skip
        if len(_packed_reports) >= MAX_CACHED_REPORTS:
            _packed_reports.clear()
        _packed_reports[cache_key] = packed_report
    return packed_report, pickle.dumps(_list_scalars(call, problem)), None


def _describe_presence(value: Any) -> str:
    return "not given" if value is None else "given"


def _describe_features(features: Array | None) -> str:
    if features is None:
        return "not given"
    return f"{features.dtype.name} of width {features.shape[1]}"


def _list_shared_values(
    call: RankCall, request: Request, features: list[Array], array_types: dict[str, Any]
) -> dict[str, Any]:
    """The values that must be the same on all ranks, in the order in which they are compared.

    A value that `_list_scalars` supplies is None here, so that it keeps its position in the order.
    """
    kind, problem = call.kind, request.problem
    first = kind.arguments[0]
    return {
        **{
            f"{name}: dtype": z.dtype.name for name, z in zip(kind.arguments, features, strict=True)
        },
        f"{first}: width": problem.shape[2],
        f"{first}: tokens": getattr(problem.query, "length", None),
        f"{kind.arguments[kind.key_argument]}: tokens": getattr(problem.key, "length", None),
        f"{first}: memory": "a GPU" if request.on_gpu else "the host",
        "scale": None,
        "bias": None,
        **array_types,
        **{name: _describe_presence(call.options.get(name)) for name in ARRAY_OPTIONS},
        "in_batch": call.options.get("in_batch", True),
        "token_mean": call.options.get("token_mean", False),
        "method": "naive" if problem.method == "naive" else "tiled",
        **{name: getattr(problem, name) for name in SHARED_OPTIONS},
        "metrics": problem.retrieval_ranks,
        "reduction": request.reduction,
        "precision": problem.compute_precision,
        "offload": request.offload,
        "wrt": sorted(request.wrt),
        "grad_out": None,
    }


def _list_scalars(call: RankCall, problem: Problem) -> dict[str, Any]:
    """The values that must be the same on all ranks, and may change from call to call.

    The value of an array on a GPU is not read, so ranks do not compare it.
    """
    values = {"scale": problem.scale, "bias": problem.bias}
    temperatures = {"temperature": call.options.get("temperature")}
    if isinstance(problem, TaughtProblem) and call.teacher is not None:
        values["teacher_scale"] = problem.teacher_scale
        temperatures["teacher_temperature"] = call.teacher.temperature
    numbers = {
        name: value if isinstance(value, (float, int, type(None))) else "an array on a GPU"
        for name, value in values.items()
    }
    for scale, name in TEMPERATURES.items():
        temperature = temperatures.get(name)
        if temperature is not None and isinstance(values[scale], (float, int)):
            numbers[name] = float(temperature)
    grad_out = call.options.get("grad_out", 1.0)
    if type(grad_out) is not float:
        grad_out = float(grad_out) if np.ndim(grad_out) == 0 else "per row"
    return {**numbers, "grad_out": grad_out}
