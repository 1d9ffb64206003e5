"""What ranks tell each other before a call, and what they keep of it."""

import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from infonce.distributed import agreement

from infonce import distributed

Say = Callable[[Any], Any]


class Mirror(distributed.Communicator):
    """Rank 0 of two: the other has the same rows, and says what `other` makes of its words."""

    rank, size = 0, 2

    def __init__(self, other: Say = lambda value: value) -> None:
        self.other, self.said = other, []  # type: ignore[var-annotated]

    def allgather(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [value, self.other(value)]

    def shift(self, send: Sequence[Any], receive: Sequence[Any], distance: int = 1) -> Any:
        for to, array in zip(receive, send, strict=True):
            to[...] = array
        return self

    def wait(self) -> None:
        """All has been received."""

    def message(self, loss: str = "siglip", rows: int = 6, **options: Any) -> agreement.RankMessage:
        """The message of this rank about the second of two equal calls."""
        x, y = np.random.default_rng(0).standard_normal((2, rows, 5))
        for _ in range(2):
            self.said.clear()
            getattr(distributed, f"{loss}_loss_and_grad")(x, y, comm=self, **options)
        message: agreement.RankMessage = self.said[0]
        return message


def changed(**values: Any) -> Say:
    """Another rank whose shared values and scalars have these values, if they have such names."""

    def say(value: Any) -> Any:
        if isinstance(value, tuple) and value[0] is None:  # of a call that is checked once more
            return None, say(value[1])
        if not isinstance(value, tuple):
            return value
        report = vars(pickle.loads(value[0]))
        report["function"] = values.get("function", report["function"])
        scalars = pickle.loads(value[1]) if value[1] else {}
        others = {name: x for name, x in values.items() if name not in {"function", *scalars}}
        if value[1] and others:
            shared_values = pickle.loads(report["shared_values"])
            report["shared_values"] = pickle.dumps(shared_values | others)
        scalars |= {name: x for name, x in values.items() if name in scalars}
        packed_report = value[0]
        if others or "function" in values:
            packed_report = pickle.dumps(agreement.RankReport(**report))
        return packed_report, pickle.dumps(scalars) if value[1] else b"", value[2]

    return say


def test_calls_that_are_alike_agree_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is not computed a second time; the scalars are those of each call."""
    monkeypatch.setattr(agreement, "_packed_reports", {})
    ranks = Mirror()
    first = {"scale": 3.0, "bias": -1.0, "grad_out": 1.0}
    report, scalars, _ = ranks.message(**{name: np.array(value) for name, value in first.items()})
    last_schedule, other = ranks.last_schedule, {"scale": 4.0, "bias": 1.0, "grad_out": 2.0}
    with monkeypatch.context() as patch:
        for function in ("unpack_reports", "_list_shared_values"):
            patch.setattr(agreement, function, None)
        again = ranks.message(**{name: np.array(value) for name, value in other.items()})
    assert len(ranks.said) == 2  # the message, and sums
    assert again[0] == report == ranks.message(scale=5.0)[0]
    assert (pickle.loads(scalars), pickle.loads(again[1])) == (first, other)
    assert ranks.last_schedule is last_schedule


def test_a_schedule_has_all_decisions_and_can_be_printed() -> None:
    ranks = Mirror()
    ranks.message(rows=6, scale=3.0)
    printed = repr(ranks.last_schedule)
    for decision in (
        "queries=Partition(rows=[6, 6])", "keys=Partition(rows=[6, 6])", "exchange='gather'",
        "transport='mpi'", "piece_count=1", "dtype('float64')", "may_lack_room=False",
    ):  # fmt: skip
        assert decision in printed
    assert "report" not in printed
    ranks.message("clip", rows=15, scale=3.0, exchange="ring", workspace=4000)
    schedule = ranks.last_schedule
    assert (schedule.exchange, schedule.piece_count, schedule.keys.rows) == ("ring", 2, [15, 15])
    assert schedule.may_lack_room


def test_the_report_follows_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has all that the other ranks need to know of a call."""
    kept = {Mirror().message(scale=3.0)[0]}
    zeros = np.zeros(6)
    options: list[dict[str, Any]] = [
        {"loss": "clip"}, {"loss": "info_nce"}, {"rows": 8}, {"wrt": ["image"]},
        {"workspace": 2**27}, {"normalize": True}, {"reduction": "sum"}, {"exchange": "ring"},
        {"transport": "mpi"}, {"gradient_scale": "ddp"}, {"ids": np.arange(6)},
        {"weights": np.ones(6)}, {"weights": zeros}, {"ids": np.arange(6, dtype=np.uint64)},
    ]  # fmt: skip
    for changes in options:
        ranks = Mirror()
        if changes.get("weights") is zeros:
            with pytest.raises(ValueError, match=r"^weights: expected a positive sum over all"):
                ranks.message(scale=3.0, **changes)
            kept.add(ranks.said[-1][1][0])
        else:
            kept.add(ranks.message(scale=3.0, **changes)[0])
    assert len(kept) == 1 + len(options)
    monkeypatch.setenv("INFONCE_LOCAL_SIZE", "1")
    assert Mirror().message(scale=3.0)[0] not in kept
    monkeypatch.setenv("INFONCE_LOCAL_SIZE", "3")
    with pytest.raises(ValueError, match=r"^INFONCE_LOCAL_SIZE: expected a divisor of the 2 ranks"):
        Mirror().message(scale=3.0)


def test_labels_of_views_may_not_be_negative() -> None:
    """The error for a large label does not offer negative labels."""
    x = np.random.default_rng(0).standard_normal((4, 3))
    with pytest.raises(ValueError, match=r"labels: expected values in \[0, 8\), got 8 at p.* 3$"):
        distributed.nt_xent_loss(x, np.array([1, 0, 3, 8]), scale=1.0, comm=Mirror())


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"scale": 4.0}, "scale: expected the same on all ranks, got 3.0 on rank 0 and 4.0"),
        ({"bias": 1.0, "grad_out": 2.0}, "bias: expected"),
        ({"grad_out": float("nan")}, "grad_out: expected"),
        ({"scale": 4.0, "function": "clip_loss"}, "function: expected"),
        ({"scale": 4.0, "labels": "given"}, "scale: expected"),
        ({"grad_out": 2.0, "labels": "given"}, "labels: expected"),
        ({"grad_out": 2.0, "exchange": "ring"}, "grad_out: expected"),
    ],
)
def test_ranks_that_differ(known: bool, values: dict[str, Any], named: str) -> None:
    """The first value in their order is named, in a first call and after calls that agreed; calls
    go on afterwards."""
    ranks = Mirror()
    if known:
        ranks.message(scale=3.0)
    before = ranks.last_schedule
    ranks.other = changed(**values)
    with pytest.raises(ValueError, match=f"^{named}"):
        ranks.message(scale=3.0)
    assert ranks.last_schedule is before
    ranks.other = lambda value: value
    ranks.message(scale=3.0)


def test_temperatures_that_differ() -> None:
    """The error names the argument that both ranks passed. The same NaN is the same."""
    ranks = Mirror(changed(scale=4.0, temperature=0.25))
    message = (
        r"^temperature: expected the same on all ranks, got 0\.07 on rank 0 and 0\.25 on rank 1"
    )
    with pytest.raises(ValueError, match=message):
        ranks.message(temperature=0.07)
    ranks.other = changed(temperature=0.25)  # of the same scale: no error
    ranks.message(temperature=0.07)
    Mirror().message(scale=3.0, grad_out=float("nan"))


def test_hashes_and_integers_with_a_sign_are_not_compared() -> None:
    """-1 and 2^64 - 1 have the same bits."""
    ids, z = np.arange(6), np.random.default_rng(0).standard_normal((6, 5))
    unsigned = ids.astype(np.uint64)

    def call(**integers: Any) -> None:
        ranks = Mirror(changed(**dict.fromkeys(integers, "given as int64")))
        if "labels" in integers:
            distributed.sup_con_loss(z, integers["labels"], scale=1.0, comm=ranks)
        else:
            distributed.info_nce_loss(z, z, ids, scale=1.0, comm=ranks, **integers)

    for name, integers, words in (
        ("labels", unsigned, ".*uint"), ("ids", unsigned, ".*uint"),
        ("ids", (ids, unsigned), ".*uint"), ("ids", np.stack([ids, ids], axis=1), "int64 of 2"),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=f"^{name}: expected the same on .*, got 'given as {words}"
        ):
            call(**{name: integers})
    call(ids=(ids, ids.astype(np.uint32)))
    call(ids=ids.astype(np.int8))


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached reports are few and hold plain values, so no array stays alive."""
    monkeypatch.setattr(agreement, "_packed_reports", {})
    monkeypatch.setattr(agreement, "MAX_CACHED_REPORTS", 3)
    for rows in range(1, 9):
        Mirror().message(rows=rows, scale=3.0)
        assert len(agreement._packed_reports) <= 3
    x, y, out = np.random.default_rng(0).standard_normal((3, 6, 5))
    gone = [weakref.ref(array) for array in (x, y, out)]
    ranks = Mirror()
    distributed.lit_loss_and_grad(x, y, scale=np.array(3.0), out=[out], comm=ranks)
    gc.collect()
    gc.disable()
    try:
        ranks.said.clear()
        del x, y, out
        assert [array() for array in gone] == [None] * 3
    finally:
        gc.enable()


def test_errors_are_those_of_the_rank_that_has_them() -> None:
    """An error is sent with the report; the schedule from before it holds for the next call."""
    ranks = Mirror()
    ranks.message(scale=3.0)
    last_schedule = ranks.last_schedule
    failure = ValueError("text: expected what it is not")
    ranks.other = lambda value: (
        agreement.make_unchecked_message(pickle.loads(value[0]).function, [6, 6], failure)
        if isinstance(value[0], bytes)
        else value
    )
    with pytest.raises(ValueError, match=r"^rank 1: text: expected what it is not$"):
        ranks.message(scale=3.0)
    with pytest.raises(TypeError, match=r"^rank 0: text: expected an array"):
        distributed.siglip_loss(np.ones((6, 5)), [[1.0]], scale=3.0, comm=ranks)
    assert ranks.last_schedule is last_schedule
