"""Faults that are put in the source of a kernel on purpose are reported; and ranks swap arrays."""

import re
from typing import Any

import engine
import numpy as np
import pytest
import two_ranks
from gpu_problems import BFLOAT16
from infonce.kernels.gpu.device import compiler

import infonce

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
SCHEDULES = 20


@pytest.mark.parametrize("seed", range(2))
def test_two_ranks_swap_arrays(seed: int) -> None:
    """swap.cu between two processes."""
    steps = range(2 * len(two_ranks.SIZES))
    want = [x for rank in (1, 0) for step in steps for x in two_ranks.contents(rank, step)]
    assert two_ranks.swap_arrays(seed) == b"".join(x.tobytes() for x in want)


# name -> (device of the stand-in, features, whether there are gradients)
CALLS = {
    "tiles": (2, 72, False), "rows": (0, 512, False), "wide": (0, 1152, False),
    "gradient": (0, 512, True),
}  # fmt: skip


def call(name: str, seed: int) -> list[Any]:
    """Everything that a call of clip in bfloat16 returns, without a plan of an earlier call."""
    import cupy
    from infonce.kernels.gpu import plan

    plan.forget()
    device, d, gradient = CALLS[name]
    z = (np.random.default_rng(0).standard_normal((2, 300, d)) / d**0.5).astype(BFLOAT16)
    with cupy.cuda.Device(device), engine.schedule(seed):
        features = map(cupy.asarray, z)
        if not gradient:
            return [infonce.clip_loss(*features, scale=8.0, method="tiled").get()]
        out = infonce.clip_loss_and_grad(*features, scale=8.0, method="tiled")
        return [out.loss.get(), *(z.get() for z in out.grads[:2])]


# fault -> (call of CALLS, text of the source, the text that replaces it, pattern of the message)
FAULTS = {
    "a missing barrier_expect": (
        "rows", "barrier_expect(full, STAGE_BYTES);", "",
        r"^sweep_lse: threads wait for ever\n(.*\n)*.*an mbarrier at sm90/sweep/sweep.cuh.* 0 of 1",
    ),
    "a wrong swizzle of tiles": (
        "tiles", "to += find_chunk(threadIdx.x / 8, threadIdx.x % 8);",
        "to += threadIdx.x / 8 * K_SLICE + threadIdx.x % 8 * 16;", "^results differ",
    ),
    "a missing fence before a TMA store": (
        "gradient", "    fence_before_tma_store();\n", "",
        r"^sweep_gradient: TMA: a store reads what lanes 0xffffffff have written without a fence",
    ),
    "a block of a cluster that ends early": (
        "wide", "if (CLUSTER_BLOCKS > 1) cluster_sync();  // no block ends", "// no block ends",
        r"^sweep_lse: (TMA: block|an mbarrier of block) \d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_kernel(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, old, new, message = FAULTS[fault]
    want, flatten = call(name, 0), compiler.flatten
    assert any(old in path.read_text() for path in compiler.SOURCES.rglob("*.cu*"))
    for known in ("_modules", "_functions", "_started"):
        monkeypatch.setattr(compiler, known, {})
    monkeypatch.setattr(compiler, "flatten", lambda *args: flatten(*args).replace(old, new))
    with pytest.raises((engine.KernelError, AssertionError), match=message):  # noqa: PT012
        for seed in range(SCHEDULES):
            pairs = zip(call(name, seed), want, strict=True)
            is_same = all(z.tobytes() == wanted.tobytes() for z, wanted in pairs)
            assert is_same, "results differ"  # of arrays, pytest would print each line that differs
    monkeypatch.undo()
    call(name, 0)  # no plan is left of the fault


def test_inline_ptx_is_in_one_place() -> None:
    """All inline PTX is in the files that headers/ptx.h replaces: ptx.cuh and ptx/."""
    for path in compiler.SOURCES.rglob("*.cu*"):
        name, text = path.relative_to(compiler.SOURCES).as_posix(), path.read_text()
        if not name.startswith("ptx/"):
            assert re.search(r"\basm\b", text) is None, name
            assert '#include "ptx/' not in text or name == "ptx.cuh", name
