"""The lanes of a warp use the same bytes in an order that synchronisations make."""

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
NAMES = [*calls.CALLS, calls.ONE_TILE]
GROUPS = 6  # each is one process, with kernels of its own


@pytest.mark.parametrize("first", range(GROUPS))
def test_calls_are_in_order(first: int) -> None:
    names = NAMES[first::GROUPS]
    done = subprocess.run(
        [sys.executable, Path(calls.__file__), *names], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [f"{name}: in order" for name in names], done.stderr
