"""One call of a loss over ranks: agreement of the ranks, run, and errors.

losses.py calls `evaluate`. agreement.py, transports/choice.py and run.py do the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from infonce import arrays, dispatch
from infonce.checks import prefixes
from infonce.checks.teacher import Teacher
from infonce.spec import Loss

from . import run
from .agreement import AgreedError, RankCall, agree_on_schedule, run_on_all_ranks
from .communicators.base import TIMEOUT
from .communicators.mpi import connect
from .schedule import require_options
from .transports import choice as transports
from .transports.base import Transport


def evaluate(
    kind: Loss, caller_arrays: Sequence[Any], labels: Any, bias: Any, options: Mapping[str, Any],
    rank_options: Mapping[str, Any], with_grad: bool, teacher: Teacher | None = None,
    refusal: Exception | None = None,
) -> Any:  # fmt: skip
    """The result of one call on this rank, for the caller's arrays of this rank's rows.

    `rank_options` are the keywords that only the functions of distributed/losses.py have
    (`losses.RANK_OPTIONS`). A call on one rank is a call of `infonce`, except `nt_xent` with
    labels, which only the functions over ranks take. `refusal` is the error of arguments that are
    no call: then there are no arrays.
    """
    ranks = connect(rank_options["comm"])
    ranks.timeout, not_a_timeout = _read_timeout(rank_options["timeout"])
    refusal = refusal or not_a_timeout
    pairs_views = kind.symmetric and not kind.classes
    is_alone = ranks.size == 1 and not (pairs_views and labels is not None)
    if refusal is None and not is_alone and prefixes.has_prefixes(kind, options):
        prefix_count = 0
        options = prefixes.listed(options)
        dims, weights = options["dims"], options.get("dim_weights")

        def evaluate_prefix(features: Sequence[Any], others: Mapping[str, Any]) -> Any:
            nonlocal prefix_count
            prefix_count += 1
            # `dims` as a rank option: the ranks check that it is the same on all ranks
            shared = [*map(int, dims)], None if weights is None else [*map(float, weights)]
            with_dims = {**rank_options, "dims": repr(shared)}
            return evaluate(kind, features, labels, bias, others, with_dims, with_grad)

        over_prefixes: Any = prefixes.loss_and_grad if with_grad else prefixes.loss
        try:
            return over_prefixes(kind, caller_arrays, options, evaluate_prefix)
        except Exception as error:
            if prefix_count:
                raise
            refusal = error
    if is_alone:
        if refusal is not None:
            raise refusal
        require_options(options, rank_options)
        function: Any = dispatch.loss_and_grad if with_grad else dispatch.loss
        return function(kind, caller_arrays, labels, bias, options, teacher=teacher)
    features: list[Any] = []
    transport: Transport | None = None
    try:
        with arrays.use_caller_stream(caller_arrays[0] if caller_arrays else None):
            try:
                features = arrays.natives(caller_arrays, kind.arguments)
            except Exception as error:
                refusal = refusal or error
            with arrays.compute_context(features[0] if features else None):
                call = RankCall(kind, labels, bias, options, rank_options, with_grad, teacher)
                request, schedule, rank_rows = agree_on_schedule(call, features, refusal, ranks)
                transport = transports.make(schedule.transport, ranks)
                try:
                    # raise on all ranks before arrays are sent, so that no rank waits for arrays
                    if schedule.may_lack_room:
                        run_on_all_ranks(
                            ranks, lambda: run.require_room(request, schedule, ranks.rank)
                        )
                    ddp = rank_options["gradient_scale"] == "ddp"
                    solution = run.solve(
                        request, schedule, labels is not None, ddp, ranks, transport, rank_rows
                    )
                except MemoryError as error:
                    dispatch.raise_with_advice(error, request.problem)
                if with_grad:
                    result = dispatch.make_result(kind, request, solution, caller_arrays[0])
                else:
                    result = dispatch.make_loss(request, solution, caller_arrays[0])
                transport.finish()  # last: the device works while the host makes the result
    except AgreedError as agreed:  # all ranks raise it and stay in step: no `ranks.fail`
        raise agreed.error from None
    except BaseException as error:
        try:
            ranks.fail(error)  # before the transport closes, because the other ranks wait
        finally:
            if transport is not None:
                transport.close()
        raise
    if not with_grad:
        arrays.warn_of_lost_gradients(kind, caller_arrays, bias, options)
    return result


def _read_timeout(timeout: Any) -> tuple[float | None, Exception | None]:
    """The timeout of a call, and the error if it is not one: then all ranks raise the error, within
    the default timeout."""
    if timeout is None:
        return None, None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not float(timeout) > 0:
        return TIMEOUT, ValueError(
            f"timeout: expected a positive number of seconds or None, got {timeout!r}"
        )
    return float(timeout), None
