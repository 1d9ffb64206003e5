"""The record of calls on the emulator, beside the same calls today."""

import copy
import json
from pathlib import Path

import engine
import pytest
import record

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
PATH = Path(__file__).parents[2] / "benchmarks" / "results" / "emulated-calls.json"


@pytest.fixture(scope="module")
def known() -> dict:
    return json.loads(PATH.read_text())


@pytest.mark.parametrize("call", record.CALLS[::4], ids=lambda call: call.name)
def test_as_recorded(call: record.Call, known: dict) -> None:
    """To the bound: products by another NumPy, or sums of another kernel, are rounded otherwise."""
    import cupy

    outputs = {name: record.described(z) for name, z in record.results(call, cupy).items()}
    row = {"call": call.name, "outputs": outputs}
    told = record.compared(call, row, known)
    assert not told.too_far, told.text
    for name in outputs:
        wrong = copy.deepcopy(row)
        wrong["outputs"][name]["digest"] = ""
        sums = wrong["outputs"][name]["sums"]
        off = 2 * record.bound(name, call.dtype, call.options.get("precision", ""))
        sums[:] = [s + off * outputs[name]["norm"] * (-1) ** i for i, s in enumerate(sums)]
        assert record.compared(call, wrong, known).too_far


def test_every_call_is_recorded(known: dict) -> None:
    assert [row["call"] for row in known["results"]] == [call.name for call in record.CALLS]
    assert len({call.name for call in record.CALLS}) == len(record.CALLS) == 30
