"""Agreement of ranks before any work: errors of one rank are raised on all, calls are the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from .communicators.base import Communicator, RankError

BUILTIN = {e.__name__: e for e in (TypeError, ValueError, MemoryError, ImportError, OverflowError)}


class AgreedError(Exception):
    """An error that all ranks raise together: they stay in step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


Failure = tuple[str, str] | None  # type and message


def agree(ranks: Communicator, function: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
    """`function` returns a result for this rank and a message for all; this returns the result and
    the messages of all ranks. An error on any rank is raised on all, as `AgreedError`."""
    result = error = message = None
    try:
        result, message = function()
    except Exception as e:
        error = e
    everyone = ranks.allgather((failure_of(error), message))
    require_none([failure for failure, _ in everyone], error)
    return result, [message for _, message in everyone]


def failure_of(error: Exception | None) -> Failure:
    """An error as it is sent to other ranks."""
    return None if error is None else (type(error).__name__, str(error))


def require_none(failures: Sequence[Failure], error: Exception | None) -> None:
    """`AgreedError` of the first rank's failure; `error` is that of this rank."""
    for r, failure in enumerate(failures):
        if failure is not None:
            if len(failures) == 1 and error is not None:
                raise AgreedError(error)
            name, text = failure
            raise AgreedError(BUILTIN.get(name, RankError)(f"rank {r}: {text}"))


def packed(facts: Any) -> bytes:
    """Facts of a call as they are sent, and as `require_same` compares them."""
    return pickle.dumps(facts)


def require_same(everyone: Sequence[Sequence[bytes]]) -> None:
    """`AgreedError` of a ValueError that names the first fact in which a rank differs. Each rank
    has one or more packed dictionaries of facts, the later in the place of the earlier."""
    for r, facts in enumerate(everyone):
        if facts == everyone[0]:
            continue
        first, other = (_together(of) for of in (everyone[0], facts))
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                error = (
                    f"{name}: expected the same on all ranks, got {first.get(name)!r} on rank 0 "
                    f"and {other.get(name)!r} on rank {r}"
                )
                raise AgreedError(ValueError(error))


def _together(packed_facts: Sequence[bytes]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for part in packed_facts:
        facts |= pickle.loads(part)
    return facts
