"""The precision on the CPU, as the table in README states it: every method keeps to it."""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
from oracle import judge
from problems import DTYPES, KINDS, Problem, draw_features

import infonce
from infonce import spec

pytestmark = pytest.mark.extras

ROOT = Path(__file__).parents[2]
NUMBER = r"([\de.+-]+)"
ROW = re.compile(
    rf"^\| (\w+) \| {NUMBER} \(1 \+ x\) \| {NUMBER} \(1 \+ x\)(?: \+ {NUMBER})?"
    rf"(?:, plus {NUMBER} \(absolute\) in each element)? \|",
    re.MULTILINE,
)
LEAST = 1e-36  # of a loss or gradient in float32: it has all digits from there on


def table(page: str) -> dict[str, tuple[float, ...]]:
    """The README's table of errors, by the dtype of features."""
    rows = ROW.findall((ROOT / page).read_text(encoding="utf-8"))
    return {name: tuple(float(number or 0) for number in numbers) for name, *numbers in rows}


def test_pages_state_the_same() -> None:
    assert table("README.md").keys() == DTYPES.keys()
    assert table("docs/methods.md") == table("README.md")


def calls(loss: spec.Loss, name: str, rng: np.random.Generator) -> Any:
    """All temperatures from 0.005 to 1, and so losses from 1e-30 to 20 and above."""
    for kind in KINDS:
        for part in range(5):
            rows, d = int(rng.choice([2, 4, 16, 40, 100])), int(rng.choice([4, 33, 128]))
            query, key = draw_features(kind, rows, rows, d, rng)
            units = [query, key] if len(loss.arguments) == 2 else [np.concatenate([query, key])]
            features = tuple(z.astype(DTYPES[name]) for z in units)
            scale, bias = 200 ** float((part + rng.uniform()) / 5), float(rng.uniform(-9, 1))
            problem = Problem(loss.name, features, scale)
            if loss.sigmoid:
                problem.options["bias"] = bias
            if loss.classes:
                labels = np.tile(np.arange(rows), 2) // int(rng.integers(1, 3))
                problem.options["labels"] = labels
            yield problem


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", spec.LOSSES)
def test_readme(kind: str, name: str) -> None:
    loss = spec.LOSSES[kind]
    loss_factor, gradient_factor, rounding, element = table("README.md")[name]
    rng = np.random.default_rng(list(DTYPES).index(name))
    decades = set()
    for call in calls(loss, name, rng):
        args = [*call.features, *call.options.values()]  # and labels, or a bias
        longest = [np.linalg.norm(z.astype(float), axis=1).max() for z in call.features]
        x = call.scale * longest[0] * longest[-1] + (abs(call.options.get("bias", 0.0)))
        want = judge(call, "float64")
        decades.add(int(np.floor(np.log10(max(want.loss, 1e-40)))))
        for method in ("naive", "fused", "tiled"):
            out = getattr(infonce, f"{kind}_loss_and_grad")(*args, scale=call.scale, method=method)
            error = abs(float(out.loss) - want.loss)
            assert error <= loss_factor * (1 + x) * want.loss + LEAST * (name != "float64")
            for place, argument in enumerate(loss.arguments):
                got = getattr(out.grads, argument)
                if got is None:
                    continue
                right = want.grads[argument].astype(float)
                size, terms = np.linalg.norm(right), float(np.linalg.norm(want.terms[place]))
                limit = gradient_factor * (1 + x) * terms + rounding * size
                limit += element * np.sqrt(right.size)
                limit += (0.0 if name == "float64" else LEAST) * np.sqrt(right.size)
                error = np.linalg.norm(got.astype(float) - right)
                assert error <= limit, (argument, call.scale, want.loss, error / limit)
    few = loss.sigmoid or loss.classes  # whose losses of many pairs are not small
    assert len(decades) > (2 if few else 4)
    assert min(decades) < -9 or few


def test_rounding_of_the_dtypes() -> None:
    """The table adds to the error of a 16-bit gradient only the rounding of its dtype."""
    for name, (*_, rounding, element) in table("README.md").items():
        finfo = ml_dtypes.finfo(DTYPES[name])
        unit = float(finfo.eps) / 2
        assert rounding == 0 or unit <= rounding < 1.1 * unit
        least = float(finfo.smallest_subnormal) / 2
        assert element == 0 or least <= element < 1.1 * least
