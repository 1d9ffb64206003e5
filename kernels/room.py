"""How small blocks may be, and the message of the error if the workspace has no room for them."""

from __future__ import annotations

import math


def few_blocks(m: int, n: int, rows: int, columns: int) -> bool:
    """Whether blocks of rows x columns are few enough for m x n logits: 4 sqrt(m n) at most. The
    memory of all blocks beside their logits is then a multiple of vectors of length m and n."""
    blocks = -(-m // rows) * -(-n // columns)
    return blocks * blocks <= 16 * max(1, m * n)


def least_block_side(m: int, n: int) -> int:
    """The least side of square blocks for which `few_blocks` holds."""
    side = max(1, math.isqrt(math.isqrt(m * n)) // 2)
    while not few_blocks(m, n, side, side):
        side += 1
    return side


def workspace_too_small(shape: tuple[int, int, int], least: int, workspace: int) -> str:
    """The message of the ValueError for a workspace that has no room for the least blocks."""
    m, n, d = shape
    return (
        f"workspace: expected at least {least} bytes for {m} x {n} logits and features of width "
        f"{d}, got {workspace}"
    )
