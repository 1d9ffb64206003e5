"""The lanes of a warp use the same bytes in an order that synchronisations make."""

import os
import subprocess
import sys

import calls
import engine
import pytest

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
# Calls that launch kernels of every file, and both branches of `lse`. Thorough: all calls
FEW = [
    "naive", "naive sigmoid", "fused, features in parts", "tiled limits", "tiled sigmoid",
    "tiled, logits far apart", "sweep of all options", "wide parts", "one pass, rising logits",
    "kept, all logits high", "narrow triangle", "sigmoid of positive ids", "guide", "hardness",
    "gte", "offload", "classes of pairs",
]  # fmt: skip
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
NAMES = [*calls.CALLS, calls.ONE_TILE] if THOROUGH else FEW


@pytest.mark.parametrize("first", range(2))  # each is one process, with kernels of its own
def test_calls_are_in_order(first: int) -> None:
    done = subprocess.run(
        [sys.executable, calls.__file__, *NAMES[first::2]], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"{name}: in order" for name in NAMES[first::2]], (
        done.stderr
    )
