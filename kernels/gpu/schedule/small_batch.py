"""A small batch in one launch: which batches are, and how their logits are cut. See
kernels/cuda/fused."""

from __future__ import annotations

from dataclasses import dataclass

from ...naive import WITH_OPTIONS
from ...problem import Problem
from .call import Call
from .folds import Kernel, Part

THREADS = 256
TILE = 64  # rows and columns of a tile
CHUNK_BYTES = 128  # of a row, in one step of a product
MOST_PARTS = 16
PAYS = 2**28  # multiply-adds up to which one launch beats a graph of several with tensor cores,
PAYS_LOGITS = 2**18  # and logits,
PAYS_SIDE = 2048  # and rows of a side: one block meets them all


def choose_method(asked: Problem | Call) -> str:
    """One launch for a small batch, else folds over blocks, unless the caller wants another method.
    ValueError for one launch of logits that do not fit the workspace, or that are to be ranked."""
    method, plain = asked.method, asked.plain
    if method in ("naive", "tiled"):
        return method
    if method == "fused":
        _require_one_launch(asked)
        return "fused" if plain else "naive"
    m, n, d = asked.shape
    is_small = m * n <= PAYS_LOGITS and max(m, n) <= PAYS_SIDE and m * n * d <= PAYS
    if is_small and plain and not asked.retrieval_ranks and logit_bytes(asked) <= asked.workspace:
        return "fused"
    return "tiled"


def logit_bytes(asked: Problem | Call) -> int:
    """What the logits and dL/dx take. With options of the softmax there are more matrices."""
    m, n, _ = asked.shape
    matrices = 2 if asked.plain else WITH_OPTIONS
    return matrices * m * n * (8 if asked.compute == "fp64" else 4)


def _require_one_launch(asked: Problem | Call) -> None:
    if asked.retrieval_ranks:
        raise ValueError(
            'method: "fused" counts no ranks on a GPU; expected method="auto", "tiled" or "naive" '
            "with metrics=True"
        )
    lacking = logit_bytes(asked) - asked.workspace
    if lacking > 0:
        m, n, _ = asked.shape
        raise ValueError(
            f'method: "fused" keeps the {m} x {n} logits within workspace = {asked.workspace} '
            f'bytes, which lacks {lacking}; expected method="tiled" or a larger workspace'
        )


@dataclass(frozen=True)
class OneLaunch:
    """The launch for a batch: the grid's barrier needs all of its blocks to run at once."""

    kernel: Kernel
    blocks: int
    parts: int  # of the features in the products, to have work for the device
    memory: tuple[Part, ...]  # one after another

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.memory)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part of the memory begins."""
        found, start = {}, 0
        for part in self.memory:
            found[part.name] = start
            start += part.bytes
        return found


def one_launch(
    shape: tuple[int, int, int], dtype: str, double: bool, symmetric: bool, two_sided: bool,
    sigmoid: bool, normalize: bool, ids: bool, gradient_tiles: int, workspace: int,
    multiprocessors: int,
) -> OneLaunch:  # fmt: skip
    """The launch for features of one dtype. `gradient_tiles`: how many tiles of rows have one."""
    (m, n, d), item = shape, 8 if double else 4
    down, across = -(-m // TILE), -(-n // TILE)
    logit_tiles = across * (across + 1) // 2 if symmetric else down * across
    room = min(MOST_PARTS, workspace // (m * n * item))  # for so many M x N matrices
    chunks = -(-d * item // CHUNK_BYTES)
    parts = max(1, min(MOST_PARTS, chunks, multiprocessors // logit_tiles, room))
    work = max(logit_tiles * parts, gradient_tiles * -(-d // TILE), m, n)
    memory = [("logits", max(parts, 2) * m * n * item), ("row_inverse", 8 * m), ("row_bad", 8 * m)]
    if not symmetric:
        memory += [("column_inverse", 8 * n), ("column_bad", 8 * n)]
    memory += [("row_gap", 8 * m), ("row_dot", 8 * m), ("row_sum", 8 * m)]
    memory += [("column_gap", 8 * n), ("column_dot", 8 * n)]
    memory += [("row_reference", m * item), ("row_factor", m * item)]
    if two_sided and not symmetric:
        memory += [("column_reference", n * item), ("column_factor", n * item)]
    options = {
        "PRECISION": "FP64" if double else "FP32", "DTYPE": f"DTYPE_{dtype.upper()}",
        "SYMMETRIC": int(symmetric), "TWO_SIDED": int(two_sided), "SIGMOID": int(sigmoid),
        "NORMALIZE": int(normalize), "IDS": int(ids),
    }  # fmt: skip
    kernel = Kernel("fused/fused.cu", "fused", THREADS, tuple(options.items()))
    whole = tuple(Part(name, -(-size // 8) * 8) for name, size in memory)
    return OneLaunch(kernel, min(multiprocessors, work), parts, whole)
