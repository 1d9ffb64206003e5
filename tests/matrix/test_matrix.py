"""Every entrance of the library computes the same problems, within the bounds of oracle.py."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import comparison
from evaluation import Tally
from executors import EXECUTORS

import infonce

pytestmark = pytest.mark.extras


@pytest.mark.parametrize("name", EXECUTORS)
def test_executor(name: str) -> None:
    tally = Tally()
    tally.run(name, seed=1, numbers=range(EXECUTORS[name].draws))
    assert not tally.wrong, "\n".join(map(str, tally.wrong[:5]))
    assert tally.counts["compared"] > EXECUTORS[name].draws / 4
