"""Every entrance of the library computes the same problems, within the bounds of oracle.py."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import drop_ins
import gpu_executors
import gpu_problems
from comparison import Result
from evaluation import Tally, numbers
from executors import EXECUTORS
from faults import FAULTS
from option_values import option_values
from problems import Problem, draw

import infonce.torch as it
from infonce import spec
from infonce.checks import validation
from infonce.checks.teacher import ALL_LOSSES

pytestmark = pytest.mark.extras


def marked(name: str) -> Any:
    """A GPU's executor, with its marker; the emulated one is asked for."""
    marks = EXECUTORS[name].marks
    if not marks:
        return name
    if "gpu" in marks and gpu_problems.EMULATED:
        return pytest.param(name, marks=pytest.mark.emulated)
    reason = gpu_executors.missing(marks)
    only = pytest.mark.skipif(bool(reason), reason=reason)
    return pytest.param(name, marks=[pytest.mark.gpu, only])


@pytest.mark.parametrize("name", list(map(marked, EXECUTORS)))
def test_executor(name: str) -> None:
    tally = Tally()
    tally.run(name, 1, numbers(name, 1))
    assert not tally.wrong, "\n".join(map(str, tally.wrong[:5]))
    assert tally.counts["compared"] >= EXECUTORS[name].draws / 20


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Result], Result]) -> Tally:
    """ "NumPy, tiled" with other results."""
    right = EXECUTORS["NumPy, tiled"]
    wrong = replace(right, run=lambda problem: change(right.run(problem)))
    monkeypatch.setitem(EXECUTORS, "NumPy, tiled", wrong)
    tally = Tally()
    tally.run("NumPy, tiled", 1, range(120))
    return tally


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an error of a few times the rounding of the logits, and a NaN that a result hides."""

    def by_rounding(got: Result) -> Result:
        single = got["loss"].dtype == np.float32
        return got | {"loss": got["loss"] * (1 + 3e-3 * single + 1e-9)}

    tally = changed(monkeypatch, by_rounding)
    assert len(tally.wrong) > 60
    monkeypatch.undo()
    tally = changed(monkeypatch, lambda got: got | {"loss": np.zeros_like(got["loss"])})
    assert any("finite" in str(each["wrong"]) for each in tally.wrong)
    assert len(tally.losses) > 10  # decades of losses


def test_the_program(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    program = [sys.executable, Path(__file__).parent, "--draws", "14", "--record", record]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "14 problems, 0 wrong" in done.stdout
    assert json.loads(record.read_text())["problems"] == 14


@pytest.mark.parametrize("name", drop_ins.DRAWS)
def test_drop_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the equations of their projects, which may have stand-ins here."""
    monkeypatch.setattr(drop_ins, "peer", lambda module, name: None)
    try:
        assert not drop_ins.faults(name, 30, 1)
    except ImportError as error:
        pytest.skip(str(error))


def test_every_drop_in_is_drawn() -> None:
    """A module of infonce.torch that is no part of its own losses is a drop-in, and an attribute
    before it is imported."""
    folder = Path(it.__file__).parent
    own = {"__init__", "caching", "core", "functions", "key_queue", "modules", "__pycache__"}
    modules = {path.stem for path in folder.iterdir()} - own
    drawn = {name.split(".")[0].split(":")[0].split(",")[0] for name in drop_ins.DRAWS}
    assert drawn == modules
    for name in modules - {"sentence_transformers", "pylate", "pytorch_metric_learning"}:
        assert it.__getattr__(name).__name__ == f"infonce.torch.{name}"


# --- what executors refuse ------------------------------------------------------------------------

# A value of each option that is not its default
VALUES = option_values(8, 8, 4) | {
    "dim_weights": (1.0, 0.5), "guide": (np.ones((8, 3)),) * 2, "guide_margin": 0.1,
    "offload": True, "wrt": ("scale",), "grad_dtype": np.float32, "grad_out": 2.0, "out": {},
    "return_logits": True,
}  # fmt: skip
REFUSING = [
    name for name in EXECUTORS
    if name in ("NumPy, auto", "JAX, eager", "JAX, jit", "torch, function", "torch, module",
                "torch, func.grad", "torch, learned, plain", "infonce loss")
]  # fmt: skip


def plain_problem(loss: str, **options: Any) -> Problem:
    rng = np.random.default_rng(0)
    features = tuple(rng.standard_normal((len(spec.LOSSES[loss].arguments), 8, 4)))
    if loss == "sup_con":
        options |= {"labels": np.arange(8) // 2}
    if loss == "siglip":
        options |= {"bias": -1.0}
    return Problem(loss, features, 2.0, options, number=1)


def refusal(name: str, loss: str, **options: Any) -> str:
    problem = plain_problem(loss, **options)
    with np.errstate(all="ignore"), pytest.raises((TypeError, ValueError)) as error:
        EXECUTORS[name].run(problem)
    return str(error.value).replace("--", "").replace("-", "_")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", spec.LOSSES)
@pytest.mark.parametrize("name", REFUSING)
def test_a_refused_option_is_named(name: str, loss: str) -> None:
    """Options that no table of the product gives an entrance, and options that exclude others."""
    takes = {*EXECUTORS[name].keywords(spec.LOSSES[loss])} | {"labels", "bias"}
    if "NumPy" in name:
        takes |= {*spec.GRAD_ONLY} - {*spec.LOSSES[loss].refused}
    refused = {*spec.OPTIONS} - takes - {"metrics", "grad_out"}
    for option in sorted(refused):
        if name == "infonce loss" and option not in spec.LOSSES[loss].refused:
            continue  # no switch of the command
        assert option in refusal(name, loss, **{option: VALUES[option]}), option
    for options in spec.EXCLUSIVE:
        if {*options} <= takes and (loss == "info_nce" or "own" not in options):
            values = {option: VALUES[option] for option in options}
            if "guide" in values and loss == "nt_xent":
                values["guide"] = values["guide"][0]
            words = refusal(name, loss, **values)
            assert any(option in words for option in options), (options, words)


# --- what the matrix has to have ------------------------------------------------------------------

# Options that problems do not draw, by what computes them
ELSEWHERE = {
    "temperature": "executors of PyTorch and JAX, a third of problems", "method": "executors",
    "scale": "each problem", "grad_out": "each problem", "offload": "an executor",
    "check_finite": "tests/losses/test_checks.py", "progress": "tests/cpu", "out": "tests/losses",
    "return_logits": "tests/losses/test_losses.py",
}  # fmt: skip


def test_every_option_is_drawn() -> None:
    drawn: set[str] = set()
    for number in range(700):
        problem = draw(1, number)
        drawn |= {*problem.options, *problem.settings}
        validation.wrt(problem.kind, problem.settings.get("wrt"))  # no name that the loss lacks
    assert {*spec.OPTIONS} - drawn == {*ELSEWHERE}
    assert {*VALUES} == {*spec.OPTIONS}


# Public names that compute no loss
OTHERS = {
    "infonce": {
        "Captured", "Comparison", "Explanation", "LossAndGrad", "Metrics", "__version__", "capture",
        "compare", "explain", "schedules",
    },
    "infonce.torch": set(),
    "infonce.jax": set(),
    "infonce.distributed": {"Communicator", "RankError"},
    "infonce.cli": {"demo", "bench", "info", "explain"},
}  # fmt: skip


def test_every_entrance_is_an_executor() -> None:
    """A public name is a loss that an executor computes, or is in the list of others."""
    from torch_problems import MODULES

    from infonce.cli import main

    losses = {f"{loss}_loss{end}" for loss in ALL_LOSSES for end in ("", "_and_grad")}
    computed = {
        "infonce": {*losses, "grad_cache", "maxsim_scores"},
        "infonce.torch": {
            *losses,
            "grad_cache",
            "KeyQueue",
            *(kind.__name__ for kind in MODULES.values()),
        },
        "infonce.jax": {*losses, "sharded"},
        "infonce.distributed": losses,
    }
    for name, names in computed.items():
        module = pytest.importorskip(name)
        assert {*module.__all__} - names == OTHERS[name], name
    assert {*main.commands} - {"loss"} == OTHERS["infonce.cli"]
    words = " ".join(EXECUTORS)
    ways = ("NumPy, grad_cache", "NumPy, offload", "infonce loss", "MPI", "torch, gloo",
            "torch, grad_cache", "torch, KeyQueue", "JAX, sharded")  # fmt: skip
    for way in ways:
        assert way in words
    drawn = {problem.loss for problem in (draw(0, number) for number in range(20))}
    assert drawn == {*ALL_LOSSES}


def test_faults_are_faults_of_this_code() -> None:
    """Their text occurs once. (`python tests/matrix/mutants.py` puts each of them into a copy)"""
    for fault in FAULTS:
        text = (Path(__file__).parents[2] / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, fault.name
        assert fault.executors or fault.tests
        assert not fault.executors or any(re.fullmatch(fault.executors, z) for z in EXECUTORS)
