"""One device's part of a loss over devices, as callbacks between XLA's collectives (axis.py).

A device runs the passes of `PassesOverRanks`, as a rank of `infonce.distributed` does. Data travels
by XLA's collectives, which run between callbacks. So each callback (`run_callback`) runs the call
from its beginning. It restores the results of rounds that earlier callbacks have visited, and takes
the data that has arrived from other devices: it repeats operations on vectors, no matrix products.
Then it visits the keys of the next round, and stops (`_Stop`) when new data has to travel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from infonce.distributed.agreement import UNBOUNDED_WORKSPACE
from infonce.distributed.exchanges.arrays import row_shape
from infonce.distributed.exchanges.base import Keys, Round, no_keys
from infonce.distributed.exchanges.gather import add_pairwise
from infonce.distributed.exchanges.partition import Partition, shard_positives
from infonce.distributed.passes import PassesOverRanks
from infonce.distributed.run import (
    BlockRunner,
    choose_block_runner,
    count_positives_over_ranks,
    find_classes,
    find_unpaired_rows,
    require_pairs,
)
from infonce.distributed.schedule import choose_sum_dtype

from .. import arrays, dispatch
from ..checks.call import Request, check
from ..checks.teacher import add_teacher
from ..checks.validation import Batch
from ..kernels.direction_losses import weigh_losses
from ..kernels.distill.solve import solver_by_passes
from ..kernels.maxsim.tokens import Tokens
from ..kernels.options import weigh_positives
from ..kernels.problem import SILENT, Array, Gradients, Problem, uses_moments
from ..kernels.solve import Solution
from .callback import TracedCall, collect_options, join_integers, make_teacher, stand_in, write_out

LOG = logging.getLogger("infonce.jax")
# All numbers that travel, or go to later callbacks, have 8 bytes, and are passed as this type
BITS = np.dtype(np.int64)


@dataclass(frozen=True)
class Travel:
    """The vectors that travel after a callback, with one number of 8 bytes for each key."""

    to_owners: bool  # True: sums go to the device of their keys; False: vectors go to all devices
    vector_count: int
    result_count: int  # numbers that the callback passes to later callbacks of its device


@dataclass(frozen=True)
class CallbackPlan:
    """The callbacks of a call: one before each of `travels`, and one that ends the call."""

    travels: tuple[Travel, ...]
    sum_dtype: np.dtype[Any]  # dtype of feature gradients that are sums over devices
    has_partial_dk: bool  # whether the last callback writes its part of dK for all keys


class _Stop(BaseException):
    """Ends a callback, because data has to travel. `except Exception` does not catch it."""

    def __init__(self, payload: Array) -> None:
        self.payload = payload  # the data, as BITS


@dataclass
class Rounds:
    """The exchange of one callback, with the interface of `distributed.exchanges.base.Exchange`."""

    xp: Any  # numpy or cupy
    rank: int  # index of this device
    devices: int  # number of devices
    keys: Array  # [N, D] or [N, L, D]: the keys of all devices
    results: Array  # BITS: the results of all earlier callbacks, one after another
    # for each travel before this callback: BITS [devices, vectors, keys of a device]
    arrived: Iterator[Array]
    partial_dk: Array = None  # output like `keys`: this device's part of dK for all keys
    has_partial_dk: bool = False  # whether the last round with sums has written `partial_dk`
    restored_count: int = 0  # elements of `results` that rounds have restored
    new_results: list[Array] = field(default_factory=list)  # of rounds visited by this callback
    nothing_travels_later: bool = False  # True after a call's last round, which has no results
    # id of an array of this device's keys -> (the array, the same array for all devices' keys)
    gathered: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def run(self, round: Round) -> None:
        """Visit the keys of all devices, and bring sums for keys to the devices of the keys.

        dK is not sent here: it stays in `partial_dk` until psum_scatter of axis.py adds it up.
        """
        n, k, xp = self.devices, len(self.keys) // self.devices, self.xp  # k: keys of a device
        own, visit, types = round.own, round.visit, round.types

        # Sums [N] for the keys of all devices. With `visits_half`, there are none for own keys
        summed_reach, own_sum_count = round.summed_reach(n), 0 if round.visits_half else 1
        sums: list[Array] = []
        if types and own_sum_count + summed_reach:
            self.has_partial_dk = any(row_shape for row_shape, _ in types)  # dK has rows [D]
            sums = [self.partial_dk]
            if not self.has_partial_dk:
                sums = [xp.empty(n * k, dtype) for _, dtype in types]

        # Visits, unless an earlier callback has made them
        gathered = self._gather(own)
        if not self._restore(round.results):
            span = slice(self.rank * k, (self.rank + 1) * k)
            own_sums = [total[span] for total in sums if own_sum_count]
            visit(Keys(True, span, are_whole_shards=True, step=0, steps=1), own, own_sums)
            for shards, is_left_to_other, has_sums in self._other_visits(round):
                keys = slice(shards.start * k, shards.stop * k)
                visit_arrays = [array[keys] for array in gathered]
                visit_sums = [total[keys] for total in sums if has_sums]
                if is_left_to_other:  # the visit only clears its sums
                    visit(*no_keys(visit_arrays), visit_sums)
                else:
                    visit(Keys(False, keys, True, 0, 1), visit_arrays, visit_sums)
            self.new_results += round.results
            self.nothing_travels_later = not round.results
        if not sums or self.has_partial_dk:
            return

        # Partial sums travel to the devices of their keys, and are added: first those of this
        # device, then those of the devices after it, in the order of distance
        payload = xp.stack([total.view(BITS).reshape(n, k) for total in sums], axis=1)
        arrived = self._travel(True, payload)
        order = [(self.rank + d) % n for d in range(1 - own_sum_count, summed_reach + 1)]
        partial_sums = [
            xp.ascontiguousarray(arrived[order, i]).view(dtype)
            for i, (_, dtype) in enumerate(types)
        ]
        assert round.combine is not None
        assert round.keep is not None
        round.keep(slice(0, k), *add_pairwise(partial_sums, round.combine, 2))

    def _other_visits(self, round: Round) -> Iterator[tuple[slice, bool, bool]]:
        """The visits of other devices' keys. Each visit has the keys of consecutive devices.

        Yields (range of devices, whether another device visits this pair of shards instead of this
        one, whether the visit computes sums for the keys).
        """
        n, r = self.devices, self.rank
        reach, summed_reach = round.reach(n), round.summed_reach(n)
        # (farthest, nearest) distance of shards without sums for keys, and with them
        distances = [(reach, summed_reach + 1), (summed_reach, 1)]
        # Only one of two devices visits shards n / 2 apart, so the farthest shard is a visit of its
        # own
        if round.visits_half and round.same_pairs and 2 * reach == n:
            distances = [(reach, reach), (reach - 1, 1)]
        for far, near in distances:
            first, count = (r - far) % n, far - near + 1
            is_left_to_other = round.is_left_to_other(r, far, n)
            for shards in (slice(first, min(first + count, n)), slice(0, first + count - n)):
                if shards.start < shards.stop:
                    yield shards, is_left_to_other, far <= summed_reach

    def _gather(self, own: list[Array]) -> list[Array]:
        """For each array in `own`, of this device's keys, the same array for all devices' keys.

        Features do not travel here: all_gather of axis.py has brought them (see `_solve`).
        """
        to_gather = [array for array in own if id(array) not in self.gathered]
        if to_gather:
            # one vector of each array, or one for each column of ids
            columns = [array.size // len(array) for array in to_gather]
            payload = self.xp.concatenate([
                array.view(BITS).reshape(-1, count).T
                for array, count in zip(to_gather, columns, strict=True)
            ])  # fmt: skip
            vectors = self._travel(False, payload).transpose(1, 0, 2)
            for array, count in zip(to_gather, columns, strict=True):
                arrived, vectors = vectors[:count], vectors[count:]
                all_devices = self.xp.ascontiguousarray(arrived.reshape(count, -1).T)
                all_devices = all_devices.view(array.dtype).reshape(-1, *array.shape[1:])
                self.gathered[id(array)] = array, all_devices
        return [self.gathered[id(array)][1] for array in own]

    def _restore(self, results: Sequence[Array]) -> bool:
        """Restore the results of a round that an earlier callback has visited.

        Returns False, and restores nothing, if no earlier callback has visited the round.
        """
        if self.restored_count == len(self.results):
            return False
        for array in results:
            end = self.restored_count + array.size
            flat = self.results[self.restored_count : end]
            array[...] = flat.view(array.dtype).reshape(array.shape)
            self.restored_count = end
        return True

    def _travel(self, to_owners: bool, payload: Array) -> Array:
        """The payloads of all devices. `_Stop` ends the callback if they have not arrived yet."""
        arrived = next(self.arrived, None)
        if arrived is None:
            raise _Stop(payload)
        return arrived


@dataclass
class _Rehearsal(Rounds):
    """Rounds over stand-ins while JAX traces the call, which record the data that has to travel."""

    travels: list[Travel] = field(default_factory=list)

    def _travel(self, to_owners: bool, payload: Array) -> Array:
        assert not self.nothing_travels_later
        result_count = sum(array.size for array in self.new_results)
        self.travels.append(Travel(to_owners, payload.shape[-2], result_count))
        self.new_results = []
        return np.zeros((self.devices, *payload.shape[-2:]), BITS)


# --- the call, as each callback begins it ---------------------------------------------------------


def plan_callbacks(call: TracedCall, inputs: dict[str, Any]) -> CallbackPlan:
    """Find the callbacks of a call, by a rehearsal on stand-ins for `inputs`, while JAX traces.

    `inputs` are the arguments of a device, and the keys of all devices ("keys", "key_masks",
    "auxiliary_keys").
    ValueError if the workspace has no room for a block on a CPU; `run_callback` checks it on a GPU.
    """
    axis = call.axis
    assert axis is not None
    # their stand-ins are 1, others' are 0
    positive = {"scale", "teacher_scale", "weights", "label_weights", "key_mask", "key_masks"}
    inputs = {name: _stand_ins(value, int(name in positive)) for name, value in inputs.items()}
    with np.errstate(**SILENT):
        request = _check_call(call, inputs, 0)
        problem, gradients = request.problem, request.gradients
        sum_dtype = np.dtype(jax.dtypes.canonicalize_dtype(choose_sum_dtype(problem)))
        if gradients is not None and gradients.want_query:
            query = problem.query
            gradients.query = np.empty((len(query), *row_shape(query)), sum_dtype)
        rounds = _Rehearsal(
            np, 0, axis.size, inputs["keys"], np.empty(0, BITS), iter(()),
            np.empty(inputs["keys"].shape, sum_dtype),
        )  # fmt: skip
        runner = choose_block_runner(request)

        def rehearse(
            block: Problem, triangle: bool, epilogue: Any, gradients: Any, *_: Any
        ) -> None:
            if axis.on_cpu and not callable(epilogue):
                runner.require_room(block, gradients)

        rehearsing = replace(runner, run_block_pass=rehearse)
        _solve(call, inputs, request, 0, rehearsing, rounds, sum_dtype)
    return CallbackPlan(tuple(rounds.travels), sum_dtype, rounds.has_partial_dk)


def _stand_ins(value: Any, number: int) -> Any:
    """`callback.stand_in` for each array of a tuple, or for an array."""
    if isinstance(value, tuple):
        return tuple(_stand_ins(each, number) for each in value)
    return None if value is None else stand_in(value, number)


def run_callback(
    call: TracedCall, plan: CallbackPlan, out: dict[str, Any], inputs: dict[str, Any]
) -> None:
    """Run one callback of a call when the program runs.

    An error is logged and not raised, because other devices would wait for ever for this device.
    Instead, all outputs become NaN, and integer outputs their largest value. Two such uint32 are a
    NaN of float64. So sums that travel are NaN, and the loss becomes NaN on all devices.
    Later callbacks of this device still run. On a CPU, row 0 of an earlier "error_and_results"
    tells them that the error is logged, and they log no error. On a GPU, callbacks do not read this
    row, so each of them logs its error.
    """
    try:
        with arrays.compute_context(inputs["keys"]):
            _run_until_travel(call, plan, out, inputs)
    except Exception as error:
        errors = [each["error_and_results"][0] for each in inputs["earlier_callbacks"]]
        if not any(isinstance(flag, np.ndarray) and flag.any() for flag in errors):
            LOG.error(
                "%s_loss: the loss is NaN: %s: %s", call.kind.name, type(error).__name__, error
            )
        for array in jax.tree.leaves(out):
            array[...] = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else np.nan


def _run_until_travel(
    call: TracedCall, plan: CallbackPlan, out: dict[str, Any], inputs: dict[str, Any]
) -> None:
    """Run the call until data has to travel, or in the last callback to its end.

    `out`: "error_and_results", uint32 [1 + results, 2] (row 0: not zero after an error), and
    "travelling"; in the last callback, the results of the call.
    """
    assert call.axis is not None
    rank = int(inputs["rank"])
    request = _check_call(call, inputs, rank)
    runner, is_last = choose_block_runner(request), "loss" in out
    xp = runner.vectors.xp
    earlier = inputs["earlier_callbacks"]
    results = [each["error_and_results"].view(BITS)[1:, 0] for each in earlier]
    arrived = (each["arrived"].view(BITS)[..., 0] for each in earlier)
    rounds = Rounds(
        xp, rank, call.axis.size, inputs["keys"], xp.concatenate([xp.empty(0, BITS), *results]),
        arrived, out.get("partial_dk"),
    )  # fmt: skip
    if is_last and plan.has_partial_dk and call.kind.symmetric:
        rounds.partial_dk[...] = 0  # visits write dK only of the keys of about half of the devices
    if request.gradients is not None:
        request.gradients.query, request.gradients.own = out.get("dq"), out.get("own")
    try:
        solution = _solve(call, inputs, request, rank, runner, rounds, plan.sum_dtype)
    except _Stop as stop:
        out["error_and_results"][...] = 0
        if rounds.new_results:
            flat = xp.concatenate([array.view(BITS).reshape(-1) for array in rounds.new_results])
            out["error_and_results"].view(BITS)[1:, 0] = flat
        out["travelling"].view(BITS)[..., 0] = stop.payload
        return
    result = dispatch.make_result(call.kind, request, solution, inputs["keys"])
    write_out(call, result, out, call.kind.arguments)
    if out["weight"] is not None:
        row_shares = request.problem.row_shares
        rows = len(request.problem.query)
        out["weight"][...] = rows if row_shares is None else row_shares.sum()


def _check_call(call: TracedCall, inputs: dict[str, Any], rank: int) -> Request:
    """Check the call of this device, as that of a rank of a batch over ranks."""
    assert call.axis is not None
    kind, features, n = call.kind, inputs["features"], len(inputs["keys"])
    m = len(features[0])
    batch = Batch(m * call.axis.size, n, rank * m * (1 + kind.joint))
    # normalize=False instead of None: no warning about norms, which users can turn into an error
    options = {"normalize": False, **collect_options(call, inputs)}
    request = check(
        kind, features, join_integers(inputs["labels"]), inputs["bias"], options, True, batch, {}
    )
    request.joined, request.feature_grads = None, {}  # the gradients of both arguments are in `dq`
    if (teacher := make_teacher(call, inputs)) is not None:
        add_teacher(kind, request, features, teacher)
    problem = request.problem
    if request.on_gpu:
        from ..kernels.gpu.device.arguments import readable_by_kernels

        problem = request.problem = readable_by_kernels(problem)
    if problem.method == "naive":
        problem.workspace = UNBOUNDED_WORKSPACE  # "naive" keeps all logits, however many
    # `moments` changes which vectors travel, and JAX has to know these vectors while it traces. So
    # shapes and JAX's default backend decide: the platform of the program is not known yet
    moments_pay = uses_moments(batch.rows * n, request.gradients is not None, call.axis.on_cpu)
    problem.moments = problem.scalar_grads and (request.static.has_tokens or moments_pay)
    if request.gradients is None and "own" in request.wrt:
        request.gradients = Gradients(want_query=False, want_key=False)  # of own negatives alone
    return request


def _solve(
    call: TracedCall, inputs: dict[str, Any], request: Request, rank: int, runner: BlockRunner,
    rounds: Rounds, sum_dtype: np.dtype[Any],
) -> Solution:  # fmt: skip
    """The part of the device with index `rank` of the loss and its gradients, by passes."""
    assert call.axis is not None
    problem, gradients = request.problem, request.gradients
    labelled = inputs["labels"] is not None or problem.classes is not None
    devices, first, total = call.axis.size, rank * len(problem.query), len(rounds.keys)
    if not (labelled or problem.has_positive_ids):
        problem.positives = shard_positives(runner.vectors.xp, problem, first)
    key, mask = problem.key, None
    if isinstance(key, Tokens):
        key, mask = key.values, key.mask
    for own, all_devices in (
        (key, rounds.keys), (mask, inputs["key_masks"]),
        (problem.auxiliary_key, inputs["auxiliary_keys"]),
    ):  # fmt: skip
        rounds.gathered[id(own)] = own, all_devices
    passes = PassesOverRanks(
        problem, gradients, rank * len(problem.key), Partition([len(problem.key)] * devices),
        rounds, runner.run_block_pass, labelled, runner.vectors, sum_dtype,
    )  # fmt: skip
    if problem.classes is not None:
        find_classes(passes, problem, first)
    elif problem.has_positive_ids:
        weigh_positives(runner.vectors.xp, problem, *count_positives_over_ranks(passes, problem))
    elif problem.symmetric and labelled:
        unpaired = find_unpaired_rows(passes, problem, first)
        if not isinstance(rounds, _Rehearsal):  # stand-ins of labels are no pairs
            require_pairs(problem, *unpaired)
    if problem.weights is not None:
        problem.row_shares = problem.weights  # `axis.sum_over_devices` divides by their sum
        problem.upstream = problem.upstream * problem.weights
    # Kernels read the weights from `upstream`. Operations on arrays read `weights`: they compute
    # classes, and losses that sums and positives' logits do not determine
    if request.on_gpu and problem.loss_follows_from_sums:
        problem = problem.without_weights()
    solution = solver_by_passes(problem)(problem, passes, gradients)
    if request.reduction != "none":
        xp, loss = runner.vectors.xp, solution.loss
        if loss is None:
            loss = weigh_losses(xp, solution.losses, problem.row_shares).sum()
        solution.loss = loss / (request.static.batch.rows if request.reduction == "mean" else 1)
    if request.metrics and solution.direction_losses is not None:
        rows_loss, columns_loss = solution.direction_losses
        solution.mean_losses = (
            rows_loss.sum() / (devices * len(problem.query)),
            None if columns_loss is None else columns_loss.sum() / total,
        )
    return solution
