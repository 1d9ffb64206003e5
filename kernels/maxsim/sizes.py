"""The sizes of a call on tokens, from which its division follows: pure functions without arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .division import Division, Sizes, divide

if TYPE_CHECKING:
    from ..gpu.config import DeviceProperties

NORMALIZED_BYTES = 24  # of a feature, while `normalized_rows` divides it in float64
MOST_WINNER = 2**16 - 1  # of uint16
CPU_TILE_BYTES = 2**20  # of a tile of products on the CPU, which exists twice
CPU_MOST_SIDE, CPU_MOST_ROWS = 1024, 1024
GPU_TILE_BYTES = 2**25  # of a tile of products, which stays in the L2 cache
GPU_MOST_SIDE, GPU_MOST_ROWS = 4096, 2**16
UNIT, MOST_SWEEP_FEATURES = 16, 128  # sm90/maxsim.cu: query tokens of a unit, most features
# query tokens and threads of a thread block of query_gradient, and blocks of a multiprocessor
QUERY_BLOCK, QUERY_THREADS, QUERY_RESIDENT = 32, 64, 8
MOST_QUERY_SEGMENTS = 8  # of keys, whose parts of a gradient are added up
# precision of products -> dtype of operands on a GPU
OPERANDS = {
    "fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16",
}  # fmt: skip
ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # dtype -> bytes of an element


@dataclass(frozen=True)
class TokenSide:
    """Queries or keys of a call."""

    rows: int
    tokens: int  # of a row
    dtype: str
    has_mask: bool


@dataclass(frozen=True)
class TokenCall:
    """All facts about a call on tokens from which its division follows."""

    query: TokenSide
    key: TokenSide
    features: int
    precision: str  # resolved: no "auto"
    workspace: int  # bytes
    normalize: bool = False
    has_second_pass: bool = True  # gradients of features, by a pass of their own
    wants_key: bool = True
    all_keys: bool = False  # pairs are compared with limits
    # no options of logits and targets, for which a GPU computes losses from all scores
    is_plain: bool = True

    @property
    def item(self) -> int:
        """Bytes of a score, and of an element of a sum."""
        return 8 if self.precision == "fp64" else 4

    @property
    def winner_bytes(self) -> int:
        """Bytes of the number of a key token."""
        return 2 if self.key.tokens <= MOST_WINNER + 1 else 4

    def divide(self, sizes: Sizes) -> Division:
        return divide(sizes, self.workspace, self.has_second_pass, self.wants_key, self.all_keys)


def cpu_sizes(call: TokenCall) -> Sizes:
    """The sizes of a call on the CPU."""

    def token_bytes(side: TokenSide) -> int:
        """Of a token of a block: its copy as an operand, if it has one, and its gradient."""
        copies = call.item if side.has_mask else 0
        if call.normalize:
            copies += NORMALIZED_BYTES
        elif ITEM.get(side.dtype) != call.item:
            copies += call.item
        return call.features * (copies + 2 * call.item)

    return _make_sizes(
        call, token_bytes(call.query), token_bytes(call.key), call.query.tokens * call.item,
        2 * CPU_TILE_BYTES, 0, CPU_MOST_ROWS, CPU_MOST_SIDE, False,
    )  # fmt: skip


def has_sweeps(call: TokenCall, device: DeviceProperties) -> bool:
    """Whether sm90/maxsim.cu finds the maxima, and no products of tokens are stored."""
    fits = call.features % 8 == 0 and call.features <= MOST_SWEEP_FEATURES
    is_16_bit = call.precision in ("bf16", "fp16")
    return device.has_sweeps and is_16_bit and fits and call.key.tokens <= MOST_WINNER


def gpu_sizes(call: TokenCall, device: DeviceProperties) -> Sizes:
    """The sizes of a call on a GPU."""
    query, d, operand = call.query, call.features, OPERANDS[call.precision]
    # with few query tokens, parts of the keys are added up by more thread blocks
    tokens, parts = query.rows * query.tokens, 0
    if tokens <= device.multiprocessors * QUERY_RESIDENT // 2 * QUERY_BLOCK:
        parts = MOST_QUERY_SEGMENTS * tokens * d * call.item

    def token_bytes(side: TokenSide, gradients: int) -> int:
        is_staged = side.has_mask or call.normalize or side.dtype != operand
        of_token = 20  # order, norms, row
        return d * (is_staged * ITEM[operand] + gradients * call.item) + of_token

    sweeps = has_sweeps(call, device)
    in_units = sweeps and not query.has_mask
    maxima = -(-query.tokens // UNIT) * 4 if in_units else query.tokens * call.item
    # the total of parts is beside the sums of other pieces
    return _make_sizes(
        call, token_bytes(query, 1 + (parts > 0)), token_bytes(call.key, 1), maxima,
        0 if sweeps else GPU_TILE_BYTES, parts, GPU_MOST_ROWS, GPU_MOST_SIDE, call.is_plain,
    )  # fmt: skip


def _make_sizes(
    call: TokenCall, query_token: int, key_token: int, maxima: int, fixed: int, parts: int,
    most_rows: int, most_side: int, takes_all_scores: bool,
) -> Sizes:  # fmt: skip
    query, key, d = call.query, call.key, call.features
    return Sizes(
        query.rows, key.rows, d, query.tokens * query_token, key.tokens * key_token,
        key.tokens * d * call.item, call.item, query.tokens * call.winner_bytes, maxima, fixed,
        parts, most_rows, most_side, takes_all_scores,
    )  # fmt: skip
