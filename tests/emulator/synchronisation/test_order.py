"""The lanes of a warp use the same bytes in an order that synchronisations make."""

import os
import subprocess
import sys
from pathlib import Path

import calls
import engine
import pytest

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
# Calls that launch every kernel, and those of other branches of one kernel. Thorough: all calls
FEW = [
    "naive", "naive sigmoid", "fused", "fused, few keys", "tiled limits", "tiled sigmoid",
    "tiled, logits far apart", "sweep of all options", "sweep, logits far apart",
    "sweep, one tile of keys", "one pass, rising logits", "wide parts", "kept, all logits high",
    "narrow triangle", "sigmoid of positive ids", "guide", "hardness", "gte", "sets", "offload",
    "classes of pairs", calls.ONE_TILE,
]  # fmt: skip
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
NAMES = [*calls.CALLS, calls.ONE_TILE] if THOROUGH else FEW
GROUPS = 6 if THOROUGH else 2  # each is one process, with kernels of its own


@pytest.mark.parametrize("first", range(GROUPS))
def test_calls_are_in_order(first: int) -> None:
    names = NAMES[first::GROUPS]
    done = subprocess.run(
        [sys.executable, Path(calls.__file__), *names], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [f"{name}: in order" for name in names], done.stderr
