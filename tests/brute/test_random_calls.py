"""Some of the random calls, and the program that makes them all."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import brute_force
import random_calls
from draw import draw

import infonce

pytestmark = pytest.mark.extras

PROGRAM = Path(random_calls.__file__)


@pytest.mark.parametrize("part", range(4))
def test_random_calls(part: int) -> None:
    tally = random_calls.Tally()
    for number in range(100 * part, 100 * (part + 1)):
        tally.add(number, draw(1, number))
    assert not tally.wrong
    assert len(tally.losses) > 10  # decades of losses
    assert min(tally.counts[kind] for kind in ("dims", "not finite", "no positives")) > 0


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random calls find an error of a few times the rounding of the logits."""

    def wrong(*args: Any, **options: Any) -> infonce.LossAndGrad:
        out = right(*args, **options)
        out.loss = out.loss * (1 + 3e-3 * (out.loss.dtype != float) + 1e-9)
        return out

    right = infonce.clip_loss_and_grad
    monkeypatch.setattr(infonce, "clip_loss_and_grad", wrong)
    tally = random_calls.Tally()
    for number in range(0, 700, 7):
        tally.add(number, draw(1, number))
    assert len(tally.wrong) > 60


@pytest.mark.parametrize("place", ["feature", "guide", "own", "key_bias", "grad_out", "weights"])
def test_a_hidden_nan_is_found(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One method makes finite numbers of a NaN."""
    drawn = next(
        d
        for d in (draw(2, i) for i in range(5000))
        if place in d.poison and d.options.get("wrt") != []
    )

    def evaluate(call: Any) -> Any:
        out, alone = right(call)
        if call.options["method"] != "tiled":
            return out, alone
        out.loss = np.zeros_like(out.loss)
        out.grads = type(out.grads)(*(None if z is None else np.zeros_like(z) for z in out.grads))
        return out, np.zeros_like(alone)

    right = random_calls.evaluate
    monkeypatch.setattr(random_calls, "evaluate", evaluate)
    refused = place in ("weights", "key_bias")  # an error by every method, so no result
    with np.errstate(all="ignore"):
        assert bool(random_calls.disagreements(drawn)) != refused


def test_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    arguments = ["--count", "14", "--seed", "5", "--record", str(record)]
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    assert random_calls.main() == 0
    assert "14 calls, 0 wrong" in capsys.readouterr().out
    assert json.loads(record.read_text())["calls"] == 14


def test_brute_force_is_the_definition() -> None:
    """The judge agrees with the loss and slope of two pairs, worked out by hand."""
    z = np.array([[1.0, 0.0], [0.0, 1.0]])
    for loss, want in (("info_nce", np.log1p(np.exp(-30.0))), ("gte", np.log1p(4 * np.exp(-30.0)))):
        judgement = brute_force.judge(brute_force.Call(loss, (z, z), 30.0), "float64")
        np.testing.assert_allclose(judgement.losses, want, rtol=1e-14)
        slope = (1 if loss == "info_nce" else 4) * np.exp(-30.0)
        np.testing.assert_allclose(float(judgement.grads["scale"]), -slope, rtol=1e-10)
