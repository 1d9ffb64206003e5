"""Single kernels, launched without the library's passes: sums of exponentials, a gradient block,
swaps between two ranks. test_kernels.py and synchronisation/calls.py call them.

`swap_arrays` starts `python tests/emulator/direct.py MAILBOXES RANK SEED SOURCES` for each rank.
"""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engine
import ml_dtypes
import numpy as np
from infonce.kernels.gpu import config
from infonce.kernels.gpu.device import compiler, signatures

# An H200 with 4 multiprocessors: shared memory of a block and of a multiprocessor, memory, in bytes
H200 = config.DeviceProperties("90", 4, 232448, 233472, 150 << 30)
SCALE, LOG2_E = 8.0, 1 / np.log(2)
SCALAR = {"value": SCALE, "pointer": 0, "factor": 1.0, "feature_divisors": 0}  # struct Scale
NO_GRADIENT_BLOCK = {"data": 0, "stride": 0, "part": 0}  # struct GradientBlock
Edit = Callable[[str], str]  # changes a flattened source, to put a fault in


class Features:
    """Unit rows in bfloat16 in the emulator's memory, queries [m, d] and keys [n, d]; their logits
    in float64; and the positive of each query."""

    def __init__(self, m: int, n: int, d: int) -> None:
        rng = np.random.default_rng(m * 7919 + n)
        self.arrays = [rng.standard_normal((rows, d)) for rows in (m, n)]
        for z in self.arrays:
            z /= np.linalg.norm(z, axis=1, keepdims=True)
        q, k = (z.astype(ml_dtypes.bfloat16) for z in self.arrays)
        self.m, self.n, self.d = m, n, d
        self.padded = -(-d // 8) * 8  # features with padding: rows begin at multiples of 16 bytes
        self.q, self.k = to_device(pad(q, self.padded)), to_device(pad(k, self.padded))
        self.logits = SCALE * q.astype(np.float64) @ k.astype(np.float64).T
        self.positives = to_device(np.arange(m) * 7 % n)

    def block(self, query_tile_rows: int, block_n: int) -> dict[str, Any]:
        """The fields of the kernels' struct Block, for one block of all queries and keys.

        `query_tile_rows` and `block_n` are the rows and columns of a tile.
        """
        width = 2 * self.padded  # bytes of a row
        sides = {
            name: {"data": memory.ptr, "stride": width, "part": 0, "rows": rows, "factor": 0}
            for name, memory, rows in (("q", self.q, self.m), ("k", self.k, self.n))
        }
        return {
            **sides, "width": width, "first_row": 0, "first_column": 0,
            "row_tiles": -(-self.m // query_tile_rows), "column_tiles": -(-self.n // block_n),
            "positives": self.positives.ptr, "set_size": 1, "query_ids": 0, "key_ids": 0,
            "symmetric": False, "triangle": False, "scale": SCALAR,
        }  # fmt: skip

    def negative_sums(self, axis: int) -> Any:
        """Sums of the exponentials of the negatives: of rows (axis 1) or columns (axis 0)."""
        e = np.exp(self.logits)
        e[np.arange(self.m), self.positives.view(np.int64)] = 0
        return e.sum(axis)


def pad(z: Any, d: int) -> Any:
    return np.pad(z, ((0, 0), (0, d - z.shape[1])))


def to_device(values: Any) -> engine.Memory:
    """A copy of an array in the emulator's memory."""
    memory = engine.Memory(values.nbytes)
    memory.view()[:] = np.frombuffer(values.tobytes(), np.uint8)
    return memory


def compile_kernel(
    file: str, name: str, defines: Mapping[str, Any], edit: Edit | None
) -> engine.Kernel:
    """Kernel `name` of `file` in kernels/cuda, after `edit`. `defines` are its -D options."""
    source = compiler.flatten(file)
    if edit is not None:
        source = edit(source)
    return engine.Kernel(
        engine.compile_source(source, compiler.compiler_flags(defines, "sm_90a")), name
    )


def launch(
    file: str, name: str, grid: int, block: int, shared: int, arguments: Mapping[str, Any],
    defines: Mapping[str, Any], edit: Edit | None, seed: int,
) -> None:  # fmt: skip
    """Launch kernel `name` of `file`: `grid` blocks of `block` threads, `shared` bytes.

    `arguments` are by the names of the kernel's parameters, and `seed` is the schedule.
    """
    values = signatures.signature(file, name).arguments(arguments)
    dtypes = {"Q": np.uint64, "q": np.int64, "d": np.float64}
    kinds = [kind for _, kind in signatures.signature(file, name).fields]
    packed = [
        value if isinstance(value, np.ndarray) else np.array(value, dtypes[kind])
        for value, kind in zip(values, kinds, strict=True)
    ]
    kernel = compile_kernel(file, name, defines, edit)
    kernel.launch(grid, block, shared, packed, seed=seed)


def tensor_map(data: int, rows: int, width: int, box_rows: int, stride: int = 0) -> Any:
    return np.frombuffer(engine.tensor_map(data, rows, width, stride or width, box_rows), "V128")


def merge_sums(pairs: Any, factor: float) -> Any:
    """Sums of exponentials [n], from pairs (reference exponent, sum) [slots, n, 2] of tiles.

    A pair stands for sum * 2^(factor * reference).
    """
    reference, sums = pairs[..., 0].astype(np.float64), pairs[..., 1].astype(np.float64)
    return (np.exp2(factor * np.where(sums == 0, 0, reference)) * sums).sum(axis=0)


def tiled_sums(z: Features, seed: int = 0, edit: Edit | None = None) -> tuple[Any, Any]:
    """Sums of the exponentials of negatives, of rows [m] and columns [n], by tiled/lse.cu."""
    tile = config.tile_for("bf16", z.d, H200)
    rows = engine.Memory(8 * z.m * tile.row_slots(z.m, z.n))
    columns = engine.Memory(8 * z.n * tile.column_slots(z.m, z.n))
    defines = {
        "PRECISION": "BF16", "BLOCK_N": tile.block_n, "WARP_N": tile.warp_n, "STAGES": tile.stages,
        "LEVELS": tile.levels, "MIN_BLOCKS": tile.min_blocks, "IDS": 0, "NORM_FACTORS": 0,
        "COLUMNS": 1,
    }  # fmt: skip
    arguments = {
        "block": z.block(config.BLOCK_M, tile.block_n),
        "positive_logits": engine.Memory(8 * z.m).ptr,
        "row_partials": rows.ptr, "row_stride": z.m, "column_partials": columns.ptr,
        "column_stride": z.n, "row_moments": 0, "column_moments": 0,
    }  # fmt: skip
    positive = engine.Memory(8 * z.m)
    arguments["positive_logits"] = positive.ptr
    blocks = tile.blocks(z.m, z.n, 2)  # each has several tiles
    launch("tiled/lse.cu", "lse", blocks, tile.threads, tile.shared, arguments, defines, edit, seed)
    factor = SCALE * LOG2_E
    return (
        merge_sums(rows.view(np.float32).reshape(-1, z.m, 2), factor),
        merge_sums(columns.view(np.float32).reshape(-1, z.n, 2), factor),
    )


def find_sweep(z: Features) -> config.Sweep:
    """The sweep that the library chooses for these features."""
    sweep = config.sweep_for("bf16", 2 * z.padded, H200, False)
    assert sweep is not None
    return sweep


def sweep_arguments(z: Features, sweep: config.Sweep) -> dict[str, Any]:
    """The arguments that all sweeps have."""
    width = 2 * z.padded
    return {
        "q": tensor_map(z.q.ptr, z.m, width, sweep.query_box),
        "k": tensor_map(z.k.ptr, z.n, width, config.BLOCK_M),
        "block": z.block(sweep.query_tile_rows, sweep.block_n),
        "segments": sweep.segments(z.m, z.n),
    }  # fmt: skip


def sweep_sums(z: Features, seed: int = 0, edit: Edit | None = None) -> tuple[Any, Any]:
    """Sums of the exponentials of negatives, of rows [m] and columns [n], by sm90/sweep_lse.cu."""
    sweep = find_sweep(z)
    slots, blocks = sweep.row_slots(z.m, z.n), sweep.blocks(z.m, z.n)
    rows = engine.Memory(8 * z.m * slots)
    columns = engine.Memory(8 * z.n * 2 * blocks)
    marks, positive = engine.Memory(4 * 32 * blocks), engine.Memory(8 * z.m)
    defines = {
        "PRECISION": "BF16", **config.defines(sweep, False, True), "IDS": 0, "NORM_FACTORS": 0,
        "COLUMNS": 1, "MAXIMA": 0, "CACHE": 0,
    }  # fmt: skip
    arguments = sweep_arguments(z, sweep) | {
        "positive_logits": positive.ptr, "row_partials": rows.ptr, "row_stride": z.m,
        "column_partials": columns.ptr, "column_stride": z.n, "written_tiles": marks.ptr,
        "cached": {"references": 0, "stride": 0, "uncached_tiles": 0},
        "gradient_block": NO_GRADIENT_BLOCK,
        "gradient_map": np.zeros(1, "V128"), "row_moments": 0, "column_moments": 0,
    }  # fmt: skip
    shared = sweep.shared(False, True)
    launch(
        "sm90/sweep_lse.cu", "sweep_lse", blocks, sweep.threads, shared, arguments, defines, edit,
        seed,
    )  # fmt: skip
    pairs = columns.view(np.float32).reshape(blocks, 2, z.n, 2).copy()
    marked = marks.view(np.uint32).reshape(blocks, 32)
    # A thread block writes pairs only of the tiles that it marks: clear the others
    for tile in range(-(-z.n // config.BLOCK_M)):
        absent = marked[:, tile // 32] >> tile % 32 & 1 == 0
        pairs[absent, :, tile * config.BLOCK_M : (tile + 1) * config.BLOCK_M] = 0
    return (
        merge_sums(rows.view(np.float32).reshape(slots, z.m, 2), 1),
        merge_sums(pairs.reshape(-1, z.n, 2), 1),
    )


def sweep_gradient(z: Features, seed: int = 0, edit: Edit | None = None) -> Any:
    """The gradient block [m, n] by sm90/sweep_gradient.cu: softmax probabilities of rows, 0 for
    positives."""
    sweep = find_sweep(z)
    stride = -(-z.n // config.BLOCK_M) * config.BLOCK_M
    gradient = engine.Memory(2 * z.m * stride)
    # A probability is a exp2(x - reference), with x in base 2
    largest = z.logits.max(1) * LOG2_E
    inverse_sum = 1 / np.exp2(z.logits * LOG2_E - largest[:, None]).sum(1)
    reference, a = (to_device(v.astype(np.float32)) for v in (largest, inverse_sum))
    u = to_device(np.zeros(z.m, np.float32))
    one_exponential = to_device(np.ones(1, np.int64))
    defines = {
        "PRECISION": "BF16", **config.defines(sweep, True, False), "IDS": 0, "NORM_FACTORS": 0,
        "COLUMNS": 0,
    }  # fmt: skip
    arguments = sweep_arguments(z, sweep) | {
        "factors": {"row_reference": reference.ptr, "a": a.ptr, "u": u.ptr, "column_reference": 0,
                    "v": 0, "one_exponential": one_exponential.ptr},
        "gradient_block": {"data": gradient.ptr, "stride": stride, "part": 0},
        "gradient_map": tensor_map(gradient.ptr, z.m, 2 * stride, 16), "visited_tiles": 0,
    }  # fmt: skip
    grid, shared = sweep.blocks(z.m, z.n), sweep.shared(True, False)
    launch(
        "sm90/sweep_gradient.cu", "sweep_gradient", grid, sweep.threads, shared, arguments, defines,
        edit, seed,
    )  # fmt: skip
    return gradient.view(ml_dtypes.bfloat16).reshape(z.m, stride)[:, : z.n]


# --- two ranks: a process each, with memory that both map -----------------------------------------

SWAP_BLOCKS, SWAP_THREADS = 4, 256  # of a launch of swap.cu
ROOM, LINE = 2**14, 256  # bytes of a buffer, and of counters
MAILBOX = 2 * ROOM + 2 * LINE  # two buffers, numbers of the other rank's pieces, own counters
# Bytes of the arrays (up to four) that rank 0 sends in a step. Rank 1 sends those of the next step.
SWAP_SIZES = [
    (4096, 80),
    (7,),
    (16, 3, 24, 1000),
    (12000,),
    (8,),
    (48, 48),
    (1, 1, 1, 1),
    (9000, 16),
]
SWAP_SECONDS = 300


def swap_arrays(seed: int) -> bytes:
    """Swap arrays between two processes in all steps. Returns the bytes that both have received."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(2 * MAILBOX))
        file.flush()
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, file.name, str(rank), str(seed), str(compiler.SOURCES)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=SWAP_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            raise engine.KernelError(errors.decode().strip())
    return b"".join(received for received, _ in outputs)


def swap_content(rank: int, step: int) -> list[Any]:
    """The arrays that a rank sends in a step."""
    rng = np.random.default_rng(100 * step + rank)
    sizes = SWAP_SIZES[(step + rank) % len(SWAP_SIZES)]
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


def arrays_fields(memories: list[Any]) -> dict[str, int]:
    """The fields of swap.cu's struct Arrays: addresses and bytes of up to four arrays."""
    names = "first", "second", "third", "fourth"
    fields = dict.fromkeys(names, 0) | {f"{name}_bytes": 0 for name in names}
    for name, memory in zip(names, memories, strict=False):
        fields |= {name: memory.ptr, f"{name}_bytes": memory.size}
    return fields


def swap_as_rank(path: str, rank: int, seed: int) -> None:
    """Run all steps as one of the two ranks, and write the received bytes to stdout.

    `path` is a file of two mailboxes, which both processes map.
    """
    with open(path, "r+b") as file:
        mailboxes = mmap.mmap(file.fileno(), 2 * MAILBOX)
    start = np.frombuffer(mailboxes, np.uint8).ctypes.data
    mine, other = (start + r * MAILBOX for r in (rank, 1 - rank))
    delays = random.Random(10 * seed + rank)
    for step in range(2 * len(SWAP_SIZES)):
        sent = [to_device(x) for x in swap_content(rank, step)]
        received = [engine.Memory(x.size) for x in swap_content(1 - rank, step)]
        time.sleep(delays.choice([0, 0, 0.02]))
        arguments = {
            "sent": arrays_fields(sent), "received": arrays_fields(received), "room": ROOM,
            "counters": mine + 2 * ROOM + LINE,
            "other": {"buffers": other, "arrived": other + 2 * ROOM},
            "own": {"buffers": mine, "arrived": mine + 2 * ROOM},
        }  # fmt: skip
        launch(
            "ranks/swap.cu", "swap", SWAP_BLOCKS, SWAP_THREADS, 0, arguments, {"PRECISION": "FP32"},
            None, seed and seed + step,  # seed 0: threads in order in each step
        )  # fmt: skip
        for memory in received:
            sys.stdout.buffer.write(memory.view().tobytes())


if __name__ == "__main__":
    path, rank, seed, folder = sys.argv[1:]
    compiler.SOURCES = signatures.SOURCES = Path(folder)
    try:
        swap_as_rank(path, int(rank), int(seed))
    except engine.KernelError as error:
        sys.exit(f"rank {rank}: {error}")
