"""Single kernels on the emulator: faults that are put in a source on purpose are reported."""

import re
from collections.abc import Callable
from functools import cache

import direct
import engine
import numpy as np
import pytest

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
SCHEDULES = 20
# Relative error of a sum of up to 400 exponentials 2^x in float32, |x| < 16, each with a rounded x;
# and of a probability in bfloat16
SUM_BOUND = 400 * 2.0**-24 + 16 * 2.0**-23
GRADIENT_BOUND = 2.0**-8
SHAPES = {"tiled": (300, 300, 72), "rows": (200, 600, 512), "wide": (300, 400, 1152)}


@cache
def features(shape: str) -> direct.Features:
    return direct.Features(*SHAPES[shape])


def sums(kernel: str, shape: str, seed: int, edit: direct.Edit) -> None:
    """Checks sums of rows and columns by a kernel against float64."""
    z = features(shape)
    run = direct.tiled_sums if kernel == "lse" else direct.sweep_sums
    got = run(z, seed, edit)
    for name, axis, values in zip(("rows", "columns"), (1, 0), got, strict=True):
        want = z.negative_sums(axis)
        error = np.abs(values / want - 1).max()
        assert error <= SUM_BOUND, f"{kernel}: sums of {name} differ by {error}"


def gradient(kernel: str, shape: str, seed: int, edit: direct.Edit) -> None:
    """Checks probabilities by a kernel against float64."""
    z = features(shape)
    got = direct.sweep_gradient(z, seed, edit)
    want = np.exp(z.logits)
    want /= want.sum(1, keepdims=True)
    want[np.arange(z.m), z.positives.view(np.int64)] = 0
    error = (np.abs(got.astype(np.float64) - want) / (want + (want == 0))).max()
    assert error <= GRADIENT_BOUND, f"{kernel}: probabilities differ by {error}"


# name -> (function, kernel, shape of SHAPES)
CALLS: dict[str, tuple[Callable[..., None], str, str]] = {
    "tiled sums": (sums, "lse", "tiled"), "sums": (sums, "sweep_lse", "rows"),
    "wide sums": (sums, "sweep_lse", "wide"), "gradient": (gradient, "sweep_gradient", "rows"),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_swap_arrays(seed: int) -> None:
    """swap.cu between two processes."""
    steps = range(2 * len(direct.SWAP_SIZES))
    want = [x for rank in (1, 0) for step in steps for x in direct.swap_content(rank, step)]
    assert direct.swap_arrays(seed) == b"".join(x.tobytes() for x in want)


# --- faults ---------------------------------------------------------------------------------------

# fault -> (call of CALLS, text of the source, the text that replaces it, pattern of the message)
FAULTS = {
    "one row too many of a tile": (
        "tiled sums", "if (t.row + r >= b.q.rows) break;", "if (t.row + r > b.q.rows) break;",
        "^lse: an access 0 bytes beyond the end of array of 7200 bytes",
    ),
    "one row too many of a sweep": (
        "sums", "lane.t == 0 && row(h) < b.q.rows", "lane.t == 0 && row(h) <= b.q.rows",
        "^sweep_lse: an access 0 bytes beyond the end of array",
    ),
    "a missing barrier_expect": (
        "sums", "barrier_expect(full, STAGE_BYTES);", "",
        r"^sweep_lse: threads wait for ever\n(.*\n)*.*an mbarrier at sm90/sweep/sweep.cuh.* 0 of 1",
    ),
    "too few bytes expected": (
        "wide sums", "barrier_expect(full, STAGE_BYTES);", "barrier_expect(full, STAGE_BYTES / 2);",
        r"^sweep_lse: ",
    ),
    "a swapped parity of full stages": (
        "sums", "barrier_wait(s.full[pipe.stage], pipe.phase);",
        "barrier_wait(s.full[pipe.stage], pipe.phase ^ 1);", "^sweep_lse: ",
    ),
    "a swapped parity of empty stages": (
        "sums", "barrier_wait(s.empty[pipe.stage], pipe.phase ^ 1);",
        "barrier_wait(s.empty[pipe.stage], pipe.phase);",
        r"^sweep_lse: threads wait for ever\n(.*\n)*.*an mbarrier at sm90/sweep/sweep.cuh:\d+",
    ),
    "a wrong swizzle of tiles": (
        "tiled sums", "to += find_chunk(threadIdx.x / 8, threadIdx.x % 8);",
        "to += threadIdx.x / 8 * K_SLICE + threadIdx.x % 8 * 16;", "^lse: sums of rows differ",
    ),
    "a wrong swizzle of gradient blocks": (
        "gradient", "own_offset = row * PIECE + (lane.lane / 16 ^ row % 8) * 8;",
        "own_offset = row * PIECE + lane.lane / 16 * 8;", "^sweep_gradient: probabilities differ",
    ),
    "a missing fence before a TMA store": (
        "gradient", "    fence_before_tma_store();\n", "",
        r"^sweep_gradient: TMA: a store reads what lanes 0xffffffff have written without a fence",
    ),
    "a block of a cluster that ends early": (
        "wide sums",
        "if (CLUSTER_BLOCKS > 1) cluster_sync();  // no block ends", "// no block ends",
        r"^sweep_lse: (TMA: block|an mbarrier of block) \d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_kernel(fault: str) -> None:
    call, old, new, message = FAULTS[fault]

    def edit(source: str) -> str:
        assert old in source
        return source.replace(old, new)

    run, kernel, shape = CALLS[call]
    with pytest.raises((engine.KernelError, AssertionError), match=message):  # noqa: PT012
        for seed in range(SCHEDULES):
            run(kernel, shape, seed, edit)


def test_inline_ptx_is_in_one_place() -> None:
    """All inline PTX is in the files that headers/ptx.h replaces: ptx.cuh and ptx/."""
    sources = direct.compiler.SOURCES
    for path in sources.rglob("*.cu*"):
        name, text = path.relative_to(sources).as_posix(), path.read_text()
        if not name.startswith("ptx/"):
            assert re.search(r"\basm\b", text) is None, name
            assert '#include "ptx/' not in text or name == "ptx.cuh", name
