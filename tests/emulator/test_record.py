"""Calls on the emulator give the results of the record benchmarks/results/emulated-calls.json."""

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
    """Up to the bound, as products by another NumPy and sums by a changed kernel are rounded
    otherwise. A result that is twice the bound off is noticed."""
    import cupy

    outputs = {name: record.describe(z) for name, z in record.run_call(call, cupy).items()}
    row = {"call": call.name, "outputs": outputs}
    comparison = record.compare(call, row, known)
    assert not comparison.too_far, comparison.text
    for name in outputs:
        wrong = copy.deepcopy(row)
        wrong["outputs"][name]["digest"] = ""
        sums = wrong["outputs"][name]["sums"]
        off = 2 * record.error_bound(name, call.dtype, call.options.get("precision", ""))
        sums[:] = [s + off * outputs[name]["norm"] * (-1) ** i for i, s in enumerate(sums)]
        assert record.compare(call, wrong, known).too_far


def test_every_call_is_recorded(known: dict) -> None:
    assert [row["call"] for row in known["results"]] == [call.name for call in record.CALLS]
    assert len({call.name for call in record.CALLS}) == len(record.CALLS) == 30
