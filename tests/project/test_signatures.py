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


@pytest.fixture(scope="module")
def mypy_output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """mypy's output for a user's file with right and wrong calls."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("user")
    (folder / "mypy.ini").write_text(CONFIG)
    (folder / "train.py").write_text(PROGRAM + "".join(f"    {wrong}\n" for wrong in WRONG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache"), "train.py"],
        capture_output=True, text=True, cwd=folder, env={"MYPYPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_mypy_takes_right_calls_and_refuses_wrong_ones(mypy_output: str) -> None:
    lines = {int(n): text for n, text in re.findall(r"train\.py:(\d+): error: (.*)", mypy_output)}
    first = len(PROGRAM.splitlines()) + 1
    assert sorted(lines) == [*range(first, first + len(WRONG))], mypy_output
    for line, words in enumerate(WRONG.values(), first):
        assert words in lines[line]


def defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.extras
@pytest.mark.parametrize("loss", LOSSES)
def test_help_has_all_keywords(loss: str) -> None:
    """Imported functions and modules have all keywords and their defaults."""
    pytest.importorskip("torch")
    import infonce.torch as it

    module = getattr(it, f"{SIGNATURES['CAMEL'][loss]}Loss")
    torch_defaults = {
        name: value for name, (_, value) in keywords.torch_function(LOSSES[loss]).items()
    }
    assert defaults(getattr(it, f"{loss}_loss")) == torch_defaults == defaults(module.forward)
    assert defaults(module) == {
        name: value for name, (_, value) in keywords.torch_module(LOSSES[loss]).items()
    }
    instance_signature = inspect.signature(module(scale=1.0))
    assert "learnable" not in instance_signature.parameters


@pytest.mark.extras
@pytest.mark.parametrize("loss", LOSSES)
def test_help_of_jax_has_all_keywords(loss: str) -> None:
    pytest.importorskip("jax")
    import infonce.jax as ij

    jax_defaults = {name: value for name, (_, value) in keywords.jax_function(LOSSES[loss]).items()}
    assert defaults(getattr(ij, f"{loss}_loss")) == jax_defaults


def test_keywords_of_a_group_are_those_over_ranks() -> None:
    pytest.importorskip("mpi4py")
    from infonce.distributed.losses import RANK_OPTIONS

    group_defaults = {name: value for name, (_, value) in keywords.GROUP.items()}
    over_ranks = {{"comm": "group"}.get(name, name): v for name, v in RANK_OPTIONS.items()}
    assert group_defaults == {**over_ranks, "gradient_scale": "ddp"}
