"""The hierarchical exchange: a gather among the ranks of a node, a ring between nodes.

Ranks are numbered node by node, and each node has the same number of ranks. A rank's place is its
number on its node. Counterparts are the ranks with the same place on all nodes. The ranks of node h
first visit each other's keys, as in a gather. Then they visit the keys of nodes h - 1, h - 2, ...
(mod the number of nodes). A shard goes from counterpart to counterpart, and each counterpart sends
it to the other ranks of its node, so a shard enters a node once. The sums of the shard's keys
follow it: a counterpart adds the sums of its node to the sums that arrive, and sends them on.

The work is a pipeline. In tick t, while the keys of node h - t + 1 are visited,

    keys of node h - t - 1 arrive from the counterpart,
    keys of node h - t are gathered inside the node,
    sums of keys of node h - t + 2 go to the ranks of the node that add them,
    sums of keys of node h - t + 3 are complete on this node, and go to the counterpart.

A tick is one exchange, so links inside nodes and links between nodes work at the same time. The
sums of a shard are always added in the same order: pairwise over the ranks of a node, and over
nodes as in the ring. If each pair of shards meets on one rank only, shards go half way round the
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from infonce.kernels.problem import Array

from ..communicators.base import Pending, Shifts
from ..transports.base import Exchanger
from .base import Keys, Round, RowType, no_keys
from .gather import Gather, add_pairwise
from .partition import Partition


class Inside:
    """Exchanges among the ranks of a node. Distances are differences of places."""

    def __init__(self, transport: Exchanger, ranks: int, local_size: int, place: int) -> None:
        self.transport, self.ranks = transport, ranks
        self.local_size, self.place = local_size, place

    def shifts(self, inside: Shifts) -> dict[int, tuple[Sequence[Array], Sequence[Array]]]:
        """The same shifts by distances among all ranks. These distances are equal on all ranks."""
        shifts: dict[int, tuple[Sequence[Array], Sequence[Array]]] = {}
        for distance, (send, receive) in inside.items():
            # a shift may wrap around: the first rank of a node follows the last
            send_wraps = self.place + distance >= self.local_size
            receive_wraps = self.place < distance
            for wraps in (False, True):
                among_all = distance - self.local_size if wraps else distance
                among_all %= self.ranks
                sent, received = shifts.get(among_all, ([], []))
                shifts[among_all] = (
                    [*sent, *(send if send_wraps == wraps else [])],
                    [*received, *(receive if receive_wraps == wraps else [])],
                )
        return shifts

    def exchange(self, shifts: Shifts) -> Pending:
        return self.transport.exchange(self.shifts(shifts))


class Hierarchical:
    """How the shards of one call go round nodes: an `Exchange`."""

    def __init__(
        self, xp: Any, rank: int, transport: Exchanger, partition: Partition, local_size: int,
        keys: list[Array],
    ) -> None:  # fmt: skip
        self.xp, self.rank, self.transport, self.partition = xp, rank, transport, partition
        self.local_size = local_size
        self.ranks = len(partition.rows)
        self.nodes = self.ranks // local_size
        self.node, self.place = divmod(rank, local_size)
        self.inside = Inside(transport, self.ranks, local_size, self.place)
        self.gather = Gather(xp, self.place, self.inside, self.shards(0), keys)

    def first_rank(self, step: int) -> int:
        """The first rank of the node that is `step` nodes before this one."""
        return (self.node - step) % self.nodes * self.local_size

    def shards(self, step: int) -> Partition:
        """The shards of the node that is `step` nodes before this one."""
        first = self.first_rank(step)
        return Partition(self.partition.rows[first : first + self.local_size])

    def run(self, round: Round) -> None:
        """See `Exchange`."""
        visit, combine = round.visit, round.combine
        reach, summed_reach = round.reach(self.nodes), round.summed_reach(self.nodes)  # in steps
        pipeline = Pipeline(self, round, reach, summed_reach)
        # sums of this rank's keys: first over the queries of its node, then over those of others
        complete: list[list[Array]] = []
        steps = reach

        def visit_inside(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            """Visit keys of this node. Keys past the last rank of the node take a second visit."""
            nonlocal steps
            pipeline.advance(min(pipeline.begun + 1, 2))
            steps = 2 * keys.steps + reach
            here, end = self.partition.starts[self.first_rank(0)], self.gather.partition.total
            start, stop = keys.rows.start, keys.rows.stop
            ranges = [(start, stop, slice(None))]
            if stop > end:
                cut = end - start
                ranges = [(start, end, slice(cut)), (0, stop - end, slice(cut, None))]
            for step, (first, last, rows) in enumerate(ranges, 2 * keys.step + 2 - len(ranges)):
                visit(
                    Keys(keys.are_own, slice(here + first, here + last), True, step, steps),
                    [array[rows] for array in arrays], [array[rows] for array in sums],
                )  # fmt: skip

        def keep_inside(_: slice, sums: list[Array], *others: list[Array]) -> None:
            for other in others:
                combine(sums, other)  # type: ignore[misc]  # rounds with sums have `combine`
            complete.append([array.copy() for array in sums])

        self.gather.run(replace(round, visit=visit_inside, keep=keep_inside))
        for step in range(1, reach + 1):
            pipeline.advance(step + 2)
            arrays = pipeline.keys(step)
            sums = pipeline.sums(step) if step <= summed_reach else []
            if round.is_left_to_other(self.node, step, self.nodes):
                visit(*no_keys(arrays), sums)
                continue
            start = self.partition.starts[self.first_rank(step)]
            rows = slice(start, start + self.shards(step).total)
            visit(Keys(False, rows, True, steps - reach + step - 1, steps), arrays, sums)
        complete += pipeline.finish()
        if round.keep is not None and complete:
            round.keep(slice(0, self.partition.rows[self.rank]), *complete)


class Pipeline:
    """The keys and sums of other nodes in one round, and the exchanges that carry them."""

    def __init__(self, exchange: Hierarchical, round: Round, reach: int, summed_reach: int) -> None:
        self.exchange, self.own, self.types, self.combine = (
            exchange,
            round.own,
            round.types,
            round.combine,
        )
        self.key_types: list[RowType] = [(array.shape[1:], array.dtype) for array in self.own]
        self.reach = reach  # the step in which the last node is visited
        self.summed_reach = summed_reach  # the last step with sums
        self.shards = [exchange.shards(step) for step in range(reach + 1)]
        self.largest = max(shards.largest for shards in self.shards)
        self.node_keys = max(shards.total for shards in self.shards)  # keys of a node
        self.stores: dict[str, list[Array]] = {}
        self.views: dict[tuple[str, tuple[int, ...]], list[Array]] = {}
        self.complete: list[list[Array]] = []
        self.begun = 0  # number of ticks that have begun
        self.ticks = self._ticks()

    def advance(self, ticks: int) -> None:
        """Begin ticks until `ticks` of them have begun. A tick begins when the last one ends."""
        while self.begun < ticks:
            next(self.ticks, None)
            self.begun += 1

    def finish(self) -> list[list[Array]]:
        """The sums of this rank's keys over other nodes, if there are any."""
        for _ in self.ticks:
            pass
        return self.complete

    def keys(self, step: int) -> list[Array]:
        """The arrays of the keys of the node that is `step` nodes before this one."""
        return self._arrays(
            f"keys {step % 3}", self.key_types, self.node_keys, self.shards[step].total
        )

    def sums(self, step: int) -> list[Array]:
        """The sums of the keys of that node over this rank's queries."""
        return self._arrays(f"sums {step % 2}", self.types, self.node_keys, self.shards[step].total)

    def _get_shard_sums(self, name: str, step: int, *count: int) -> list[Array]:
        """Memory for sums of the keys of this rank's counterpart, from each of `count` ranks."""
        rows = self.shards[step].rows[self.exchange.place]
        return self._arrays(name, self.types, prod(count) * self.largest, *count, rows)

    def _arrays(self, name: str, types: Sequence[RowType], room: int, *shape: int) -> list[Array]:
        """Arrays of this shape, in memory for `room` rows that is allocated once."""
        if name not in self.stores:
            self.stores[name] = [
                self.exchange.xp.empty((room, *tail), dtype) for tail, dtype in types
            ]
        if (name, shape) not in self.views:
            self.views[name, shape] = [
                store[: prod(shape)].reshape(*shape, *store.shape[1:])
                for store in self.stores[name]
            ]
        return self.views[name, shape]

    def _select_place_rows(self, arrays: list[Array], step: int, place: int) -> list[Array]:
        """From arrays of a node's keys, the rows of the rank at `place` (mod the node's ranks)."""
        starts, place = self.shards[step].starts, place % self.exchange.local_size
        return [array[starts[place] : starts[place + 1]] for array in arrays]

    def _ticks(self) -> Iterator[None]:
        exchange, place, local_size = self.exchange, self.exchange.place, self.exchange.local_size
        with_sums = range(1, self.summed_reach + 1)
        last = max(self.reach, self.summed_reach + 3) if with_sums else self.reach
        for tick in range(last + 1) if self.reach else ():
            to_add, to_send = tick - 2, tick - 3
            gathers, adds = 1 <= tick <= self.reach, to_add in with_sums
            keys = self.keys(tick) if gathers else []
            shard = self._select_place_rows(keys, tick, place) if gathers else self.own
            sums = self.sums(to_add) if adds else []
            partial_sums = self._get_shard_sums("partial", to_add, local_size - 1) if adds else []
            inside: dict[int, tuple[list[Array], list[Array]]] = {}
            for distance in range(1, local_size):
                send, receive = inside[distance] = [], []
                if gathers:
                    send += shard
                    receive += self._select_place_rows(keys, tick, place - distance)
                if adds:
                    send += self._select_place_rows(sums, to_add, place + distance)
                    receive += [part[distance - 1] for part in partial_sums]
            shifts = exchange.inside.shifts(inside)
            send, receive = [], []
            if tick < self.reach:
                send += shard
                receive += self._select_place_rows(self.keys(tick + 1), tick + 1, place)
            nodes = 1
            if to_send in with_sums:
                home = to_send == self.summed_reach
                nodes = exchange.nodes - to_send if home else 1
                send += self._get_shard_sums("added", to_send)
                receive += self._get_shard_sums("arrived", 0 if home else to_send + 1)
            shifts[nodes * local_size] = send, receive
            pending = exchange.transport.exchange(shifts)
            yield
            pending.wait()
            if adds:
                self._add(to_add)
        if with_sums:
            self.complete.append(self._get_shard_sums("arrived", 0))

    def _add(self, step: int) -> None:
        """Add the sums of a shard: of this rank, of the other ranks of its node, and of the nodes
        that the shard has visited before."""
        assert self.combine is not None
        sums = self._get_shard_sums("added", step)
        own_sums = self._select_place_rows(self.sums(step), step, self.exchange.place)
        for total, part in zip(sums, own_sums, strict=True):
            total[...] = part
        if self.exchange.local_size > 1:
            partial_sums = self._get_shard_sums("partial", step, self.exchange.local_size - 1)
            self.combine(sums, *add_pairwise(partial_sums, self.combine))
        if step > 1:
            self.combine(sums, self._get_shard_sums("arrived", step))
