"""The hierarchical exchange: a gather among the ranks of a node, and a ring between nodes.

Ranks are numbered node by node, and each node has the same number of ranks. The local rank is the
number of a rank on its node. Counterparts are the ranks with one local rank, one on each node. The
ranks of node h first visit each other's keys, by the exchange of gather.py. In step s = 1, 2, ...
they visit the keys of node h - s (mod the number of nodes). A shard goes from counterpart to
counterpart, and each counterpart sends it to the other ranks of its node, so a shard enters a node
once. The sums of the shard's keys follow the shard: a counterpart adds the sums of its node to the
sums that arrive, and sends the result to the next counterpart, at the end to the owner of the keys.

The work is a pipeline of ticks. Ticks 0 and 1 run during the visits of this node's keys, and tick
t >= 2 runs during step t - 1. The keys of node h - s, and their sums, pass these stages:

    tick s - 1    the keys arrive from the counterpart on node h - 1
    tick s        they are gathered inside this node
    step s        this node's ranks visit them; tick s + 1 runs meanwhile
    tick s + 2    their sums are added inside this node, by the counterpart of the keys' owner
    tick s + 3    that rank sends the sums to its counterpart on node h + 1

A tick is one exchange, so links inside nodes and links between nodes work at the same time. The
sums of a shard are always added in the same order: pairwise over the ranks of a node, and over
nodes as in the ring. If each rank visits only about half of the shards (`Round.visits_half`),
shards go half way round the nodes.
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


class NodeExchanger:
    """An `Exchanger` among the ranks of a node. Distances are differences of local ranks."""

    def __init__(
        self, transport: Exchanger, rank_count: int, local_size: int, local_rank: int
    ) -> None:
        self.transport, self.rank_count = transport, rank_count
        self.local_size, self.local_rank = local_size, local_rank

    def among_all_ranks(
        self, node_shifts: Shifts
    ) -> dict[int, tuple[Sequence[Array], Sequence[Array]]]:
        """The shifts `node_shifts` of local ranks, as shifts of the ranks of all nodes.

        A shift by d inside nodes becomes two shifts: by d, and by d - `local_size`. In one of them
        this rank sends its arrays, and in the other it sends none; likewise for received arrays.
        All ranks need both shifts, because all ranks of an exchange pass the same distances.
        """
        shifts: dict[int, tuple[Sequence[Array], Sequence[Array]]] = {}
        for distance, (send, receive) in node_shifts.items():
            # a shift wraps if it passes the last rank of the node, which the first rank follows
            send_wraps = self.local_rank + distance >= self.local_size
            receive_wraps = self.local_rank < distance
            for wraps in (False, True):
                distance_among_all = distance - self.local_size if wraps else distance
                distance_among_all %= self.rank_count
                sent, received = shifts.get(distance_among_all, ([], []))
                shifts[distance_among_all] = (
                    [*sent, *(send if send_wraps == wraps else [])],
                    [*received, *(receive if receive_wraps == wraps else [])],
                )
        return shifts

    def exchange(self, shifts: Shifts) -> Pending:
        return self.transport.exchange(self.among_all_ranks(shifts))


class Hierarchical:
    """The exchange "hierarchical" of a call: see `Exchange`. `keys` are the arrays of this rank's
    keys that several rounds visit."""

    def __init__(
        self, xp: Any, rank: int, transport: Exchanger, partition: Partition, local_size: int,
        keys: list[Array],
    ) -> None:  # fmt: skip
        self.xp, self.rank, self.transport, self.partition = xp, rank, transport, partition
        self.local_size = local_size
        rank_count = len(partition.rows)
        self.node_count = rank_count // local_size
        self.node, self.local_rank = divmod(rank, local_size)  # `node`: number of this rank's node
        self.node_exchanger = NodeExchanger(transport, rank_count, local_size, self.local_rank)
        self.gather = Gather(xp, self.local_rank, self.node_exchanger, self.shards(0), keys)

    def first_rank(self, step: int) -> int:
        """The first rank of the node that is `step` nodes before this one."""
        return (self.node - step) % self.node_count * self.local_size

    def shards(self, step: int) -> Partition:
        """The shards of the node that is `step` nodes before this one."""
        first = self.first_rank(step)
        return Partition(self.partition.rows[first : first + self.local_size])

    def run(self, round: Round) -> None:
        """See `Exchange`."""
        visit, combine = round.visit, round.combine
        # the farthest nodes that are visited, and visited with sums: distances in nodes
        reach, summed_reach = round.reach(self.node_count), round.summed_reach(self.node_count)
        pipeline = Pipeline(self, round, reach, summed_reach)
        # sums of this rank's keys: over the queries of its node, then over those of other nodes
        complete: list[list[Array]] = []
        # Visits are numbered for `Keys`. Visit k of the gather has numbers 2 k and 2 k + 1 if its
        # keys wrap around, or 2 k + 1 alone. Each other node has one visit, after all of these
        gather_visits = 0

        def visit_in_node(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            """Visit keys of this node. `keys.rows` count from the first key of the node, and may
            pass its last key: then the keys from the first key on take a second visit."""
            nonlocal gather_visits
            pipeline.advance(min(pipeline.begun + 1, 2))  # ticks 0 and 1, in the first two visits
            gather_visits = 2 * keys.steps
            node_start = self.partition.starts[self.first_rank(0)]
            node_keys = self.gather.partition.total
            start, stop = keys.rows.start, keys.rows.stop
            ranges = [(start, stop, slice(None))]
            if stop > node_keys:
                cut = node_keys - start
                ranges = [(start, node_keys, slice(cut)), (0, stop - node_keys, slice(cut, None))]
            for number, (first, last, part) in enumerate(ranges, 2 * keys.step + 2 - len(ranges)):
                rows = slice(node_start + first, node_start + last)
                visit(
                    Keys(keys.are_own, rows, True, number, gather_visits + reach),
                    [array[part] for array in arrays], [array[part] for array in sums],
                )  # fmt: skip

        def keep_in_node(_: slice, sums: list[Array], *others: list[Array]) -> None:
            for other in others:
                combine(sums, other)  # type: ignore[misc]  # rounds with sums have `combine`
            complete.append([array.copy() for array in sums])

        self.gather.run(replace(round, visit=visit_in_node, keep=keep_in_node))
        for step in range(1, reach + 1):
            pipeline.advance(step + 2)
            arrays = pipeline.keys(step)
            sums = pipeline.sums(step) if step <= summed_reach else []
            if round.is_left_to_other(self.node, step, self.node_count):
                visit(*no_keys(arrays), sums)
                continue
            start = self.partition.starts[self.first_rank(step)]
            rows = slice(start, start + self.shards(step).total)
            number = gather_visits + step - 1
            visit(Keys(False, rows, True, number, gather_visits + reach), arrays, sums)
        complete += pipeline.finish()
        if round.keep is not None and complete:
            round.keep(slice(0, self.partition.rows[self.rank]), *complete)


class Pipeline:
    """The keys and sums of other nodes in one round, and the ticks (exchanges) that carry them.

    A `step` of its methods names a node: the node that is `step` nodes before this one.
    """

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
        self.largest_shard = max(shards.largest for shards in self.shards)  # in keys
        self.most_node_keys = max(shards.total for shards in self.shards)
        self.stores: dict[str, list[Array]] = {}  # memory, by name
        self.views: dict[tuple[str, tuple[int, ...]], list[Array]] = {}  # by name and shape
        self.complete: list[list[Array]] = []
        self.begun = 0  # number of ticks that have begun
        self.ticks = self._ticks()

    def advance(self, ticks: int) -> None:
        """Begin ticks until `ticks` of them have begun. A tick ends before the next one begins."""
        while self.begun < ticks:
            next(self.ticks, None)
            self.begun += 1

    def finish(self) -> list[list[Array]]:
        """The sums of this rank's keys over other nodes, if there are any."""
        for _ in self.ticks:
            pass
        return self.complete

    def keys(self, step: int) -> list[Array]:
        """The arrays of the keys of a node. Memory holds the keys of three nodes: keys that arrive,
        keys that are gathered in this node, and keys that are visited."""
        return self._arrays(
            f"keys {step % 3}", self.key_types, self.most_node_keys, self.shards[step].total
        )

    def sums(self, step: int) -> list[Array]:
        """The sums of the keys of a node over this rank's queries."""
        return self._arrays(
            f"sums {step % 2}", self.types, self.most_node_keys, self.shards[step].total
        )

    def _get_shard_sums(self, name: str, step: int, *count: int) -> list[Array]:
        """Memory for sums of the keys of this rank's counterpart on a node.

        `name` is "partial" (from each of `count` other ranks of this node), "added" (the sum over
        these ranks, this rank and earlier nodes) or "arrived" (from the counterpart before).
        """
        rows = self.shards[step].rows[self.exchange.local_rank]
        return self._arrays(name, self.types, prod(count) * self.largest_shard, *count, rows)

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

    def _select_shard(self, arrays: list[Array], step: int, local_rank: int) -> list[Array]:
        """From arrays of a node's keys, the shard of `local_rank` (mod the node's ranks)."""
        starts, local_rank = self.shards[step].starts, local_rank % self.exchange.local_size
        return [array[starts[local_rank] : starts[local_rank + 1]] for array in arrays]

    def _ticks(self) -> Iterator[None]:
        """Begin a tick, yield while blocks are computed, and end the tick; then the next one."""
        exchange, local_size = self.exchange, self.exchange.local_size
        local_rank, summed_steps = exchange.local_rank, range(1, self.summed_reach + 1)
        last = max(self.reach, self.summed_reach + 3) if summed_steps else self.reach
        for tick in range(last + 1) if self.reach else ():
            # steps of the shards whose sums are added in this node, and sent to the next node
            step_to_add, step_to_send = tick - 2, tick - 3
            gathers, adds = 1 <= tick <= self.reach, step_to_add in summed_steps

            # inside the node: gather keys of node h - tick, and send sums to ranks that add them
            keys = self.keys(tick) if gathers else []
            shard = self._select_shard(keys, tick, local_rank) if gathers else self.own
            sums: list[Array] = []
            partial_sums: list[Array] = []
            if adds:
                sums = self.sums(step_to_add)
                partial_sums = self._get_shard_sums("partial", step_to_add, local_size - 1)
            node_shifts: dict[int, tuple[list[Array], list[Array]]] = {}
            for distance in range(1, local_size):
                send, receive = node_shifts[distance] = [], []
                if gathers:
                    send += shard
                    receive += self._select_shard(keys, tick, local_rank - distance)
                if adds:
                    send += self._select_shard(sums, step_to_add, local_rank + distance)
                    receive += [part[distance - 1] for part in partial_sums]
            shifts = exchange.node_exchanger.among_all_ranks(node_shifts)

            # between nodes: send `shard` on, and sums to the next node or, at the end, to the owner
            send, receive = [], []
            if tick < self.reach:
                send += shard
                receive += self._select_shard(self.keys(tick + 1), tick + 1, local_rank)
            distance_in_nodes = 1
            if step_to_send in summed_steps:
                goes_home = step_to_send == self.summed_reach
                distance_in_nodes = exchange.node_count - step_to_send if goes_home else 1
                send += self._get_shard_sums("added", step_to_send)
                receive += self._get_shard_sums("arrived", 0 if goes_home else step_to_send + 1)
            shifts[distance_in_nodes * local_size] = send, receive
            pending = exchange.transport.exchange(shifts)
            yield
            pending.wait()
            if adds:
                self._add(step_to_add)
        if summed_steps:
            self.complete.append(self._get_shard_sums("arrived", 0))

    def _add(self, step: int) -> None:
        """Add the sums of a shard: of this rank, of the other ranks of this node, and of the nodes
        that the shard has visited before."""
        assert self.combine is not None
        sums = self._get_shard_sums("added", step)
        own_sums = self._select_shard(self.sums(step), step, self.exchange.local_rank)
        for total, part in zip(sums, own_sums, strict=True):
            total[...] = part
        if self.exchange.local_size > 1:
            partial_sums = self._get_shard_sums("partial", step, self.exchange.local_size - 1)
            self.combine(sums, *add_pairwise(partial_sums, self.combine))
        if step > 1:
            self.combine(sums, self._get_shard_sums("arrived", step))
