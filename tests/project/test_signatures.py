"""Signatures of infonce.torch and infonce.jax: editors and mypy see all keywords, as do help() and
the table of options."""

import inspect
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infonce.checks import keywords
from infonce.spec import LOSSES

ROOT = Path(__file__).parents[2]
SIGNATURES = runpy.run_path(str(ROOT / "tools" / "signatures.py"))
CONFIG = """\
[mypy]
strict = True
[mypy-torch.*,jax.*]
ignore_missing_imports = True
follow_imports = skip
[mypy-infonce.kernels.*,infonce.distributed.*]
ignore_missing_imports = True
"""
PROGRAM = """\
import infonce.jax
import infonce.torch
from infonce.torch.open_clip import ClipLoss
from torch import Tensor


def train(image: Tensor, text: Tensor) -> None:
    criterion = infonce.torch.CLIPLoss(learnable=True, temperature=0.07, max_scale=50.0)
    criterion(image, text, normalize=True).backward()
    infonce.torch.clip_loss(image, text, temperature=0.07, reduction="sum", timeout=None)
    infonce.torch.siglip_loss(image, text, -10.0, workspace="1GiB")
    infonce.torch.grad_cache([len, len], [image, text], criterion, 2)
    ClipLoss()(image, text, 20.0)
    infonce.jax.clip_loss(image, text, temperature=0.07, decoupled=True, axis_name="data")
    print(criterion.log_scale)
    criterion.max_scale, criterion.normalize = 20.0, True
"""
WRONG = {  # statement -> what mypy says
    "infonce.torch.clip_loss(image, text, temprature=0.07)": 'did you mean "temperature"',
    "infonce.torch.CLIPLoss(temprature=0.07)": 'did you mean "temperature"',
    "criterion(image, text, normalise=True)": 'did you mean "normalize"',
    "infonce.torch.siglip_loss(image, text, margin=0.1)": 'Unexpected keyword argument "margin"',
    "infonce.torch.clip_loss(image, text, wrt=())": 'Unexpected keyword argument "wrt"',
    'infonce.torch.NTXentLoss(reduction="avg")': "incompatible type \"Literal['avg']\"",
    'infonce.torch.GTELoss(margin="1")': 'incompatible type "str"',
    'criterion.reduction = "avg"': "Incompatible types in assignment (expression",
    "infonce.jax.clip_loss(image, text, offload=True)": 'Unexpected keyword argument "offload"',
}


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_stubs_are_those_of_the_table(package: str) -> None:
    """`python tools/signatures.py` writes them anew."""
    written = (ROOT / "infonce" / package / "__init__.pyi").read_text()
    assert SIGNATURES["stub"](package) == written


def test_defaults_are_written_as_python_reads_them() -> None:
    for value in (math.inf, -math.inf, "auto", None, 0.5):
        assert eval(SIGNATURES["written"](value), {"math": math}) == value


def test_mypy_takes_right_calls_and_refuses_wrong_ones(tmp_path: Path) -> None:
    """A user's file with right and wrong calls."""
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "train.py").write_text(PROGRAM + "".join(f"    {wrong}\n" for wrong in WRONG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "train.py"],
        capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = {int(n): text for n, text in re.findall(r"train\.py:(\d+): error: (.*)", done.stdout)}
    first = len(PROGRAM.splitlines()) + 1
    assert sorted(lines) == [*range(first, first + len(WRONG))], done.stdout
    for line, words in enumerate(WRONG.values(), first):
        assert words in lines[line]


def defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def values(table: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {name: value for name, (_, value) in table.items()}


@pytest.mark.extras
@pytest.mark.parametrize("loss", LOSSES)
def test_help_has_all_keywords(loss: str) -> None:
    """Imported functions and modules have all keywords and their defaults."""
    it, kind = pytest.importorskip("infonce.torch"), LOSSES[loss]
    module = getattr(it, f"{SIGNATURES['CAMEL'][loss]}Loss")
    of_function = values(keywords.torch_function(kind))
    assert defaults(getattr(it, f"{loss}_loss")) == of_function == defaults(module.forward)
    assert defaults(module) == values(keywords.torch_module(kind))
    assert "learnable" not in inspect.signature(module(scale=1.0)).parameters
    ij = pytest.importorskip("infonce.jax")
    assert defaults(getattr(ij, f"{loss}_loss")) == values(keywords.jax_function(kind))


def test_keywords_of_a_group_are_those_over_ranks() -> None:
    options = pytest.importorskip("infonce.distributed.losses").RANK_OPTIONS
    over_ranks = {{"comm": "group"}.get(name, name): value for name, value in options.items()}
    assert values(keywords.GROUP) == {**over_ranks, "gradient_scale": "ddp"}
