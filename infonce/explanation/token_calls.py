"""How a call on sets of tokens would run on a GPU: its division, its memory and its work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..checks.validation import human
from ..kernels.grid import Grid, gradient_visits, slices
from ..kernels.maxsim.division import Division, Sizes, parts
from ..kernels.maxsim.sizes import ITEM, OPERANDS, TokenCall, gpu_sizes, has_sweeps
from .devices import DeviceModel
from .work import Work, least_seconds


@dataclass(frozen=True)
class TokenSchedule:
    """All decisions about a call on tokens."""

    call: TokenCall
    sizes: Sizes
    division: Division

    @property
    def pieces(self) -> int:
        """Pieces of a block, whose winners exist at one time."""
        return -(-self.division.columns // self.division.piece)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the parts of the workspace."""
        return parts(self.sizes, self.division, self.call.workspace)

    def notes(self) -> Iterator[str]:
        """Sentences on decisions that kernels and memory do not show."""
        division = self.division
        count = f"{self.pieces} piece{'s' * (self.pieces > 1)} of up to {division.piece} keys"
        yield f"a block has {count}, whose winners take {human(self._piece_bytes)}"
        if self.call.has_second_pass:
            again = (
                "kept" if division.keeps_winners else "found again, unless a block has one piece"
            )
            yield f"winners are {again}, for the gradients of tokens"

    @property
    def _piece_bytes(self) -> int:
        return self.division.rows * self.division.piece * self.sizes.winners


def schedule_tokens(call: TokenCall, gpu: DeviceModel) -> TokenSchedule:
    """The decisions of a call; ValueError if its workspace is too small."""
    sizes = gpu_sizes(call, gpu.properties)
    return TokenSchedule(call, sizes, call.divide(sizes))


def count_token_work(
    schedule: TokenSchedule, gpu: DeviceModel, sigmoid: bool, wants: tuple[bool, bool]
) -> Iterator[Work]:
    """The work of products and of gradients of tokens. `wants`: gradients of queries, of keys."""
    call, division = schedule.call, schedule.division
    m, n = call.query.rows, call.key.rows
    grid = Grid(slices(m, division.rows), slices(n, division.columns))
    has_pieces = schedule.pieces > 1
    if not sigmoid:
        yield _count_products("log-sum-exp", schedule, gpu, grid, 1)
    if not (sigmoid or any(wants)):
        return
    ranges = slices(n, division.key_rows or n)
    visits = [(grid, *wants)]
    has_all_scores = schedule.division.has_all_scores(schedule.sizes)
    if not has_all_scores:
        visits = gradient_visits(grid, ranges, False, *wants, has_losses=sigmoid)
    products, gradients = [], []  # of each pass
    name = "loss" if sigmoid else "gradient"
    for part, wants_query, wants_key in visits:
        sides = wants_query + wants_key
        # of all scores at once, a softmax has computed them before
        computes_scores = sigmoid if has_all_scores else not division.keeps_scores
        # winners come with the scores of a block of one piece
        has_winners = division.keeps_winners or (
            not has_pieces and (computes_scores or has_all_scores)
        )
        times = computes_scores + (sides > 0 and not has_winners)
        if times:
            products.append(_count_products(name, schedule, gpu, part, times))
        if sides:
            gradients.append(_count_gradients(name, schedule, gpu, part, sides))
    yield from (_together(works) for works in (products, gradients) if works)


def _together(works: list[Work]) -> Work:
    """The work of the same step of several passes."""
    sums = {
        name: sum(getattr(work, name) for work in works)
        for name in ("blocks", "launches", "flops", "bytes", "seconds")
    }
    return replace(works[0], **sums)


def _pairs(grid: Grid) -> int:
    first, last = grid.columns[0].start, grid.columns[-1].stop
    return int(grid.rows[-1].stop * (last - first))


def _count_products(
    name: str, schedule: TokenSchedule, gpu: DeviceModel, grid: Grid, times: int
) -> Work:
    """`times` products of all tokens of a grid, and their maxima."""
    call, d = schedule.call, schedule.call.features
    pairs, (rows, columns) = _pairs(grid), grid.largest
    of_pair = call.query.tokens * call.key.tokens
    sweeps = has_sweeps(call, gpu.properties)
    launches = times * len(grid) * -(-columns // schedule.division.piece)
    item = ITEM[OPERANDS[call.precision]]
    keys = pairs // grid.rows[-1].stop * len(grid.rows)
    moved = item * d * (launches * rows * call.query.tokens + times * keys * call.key.tokens)
    moved += times * pairs * (call.item + schedule.sizes.maxima)
    if not sweeps:  # products are written and read
        moved += 2 * times * pairs * of_pair * call.item
    flops = 2.0 * times * pairs * of_pair * d
    return Work(
        name, "sm90/maxsim" if sweeps else "cuBLAS: products of tokens; maxsim/tokens", None,
        (rows, columns), len(grid), launches, flops, moved,
        least_seconds(gpu, call.precision, flops, moved),
    )  # fmt: skip


def _count_gradients(
    name: str, schedule: TokenSchedule, gpu: DeviceModel, grid: Grid, sides: int
) -> Work:
    """Sums of tokens by winners: a multiply-add for each pair, query token, feature and side."""
    call, d, pairs = schedule.call, schedule.call.features, _pairs(grid)
    rows, columns = grid.largest
    flops = 2.0 * pairs * call.query.tokens * d * sides
    tokens = call.query.rows * call.query.tokens + call.key.rows * call.key.tokens
    item = ITEM[OPERANDS[call.precision]]
    moved = sides * pairs * (schedule.sizes.winners + call.item) + tokens * d * (item + call.item)
    precision = "fp64" if call.item == 8 else "fp32"
    launches = sides * len(grid) * -(-columns // schedule.division.piece)
    return Work(
        name, "maxsim/gradients", None, (rows, columns), len(grid), launches, flops, moved,
        least_seconds(gpu, precision, flops, moved),
    )  # fmt: skip
