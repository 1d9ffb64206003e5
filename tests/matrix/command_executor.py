"""Executor of the command `infonce loss`, which reads and writes files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from comparison import Result
from executors import executor
from problems import Problem

from infonce import spec
from infonce.cli import main
from infonce.cli.common import flag

FILES = (*spec.INTEGER_OPTIONS, *spec.ARRAY_OPTIONS, "labels", "own", "guide")


def of_command(kind: spec.Loss) -> set[str]:
    """Options with a help text, and the guide's files."""
    named = {name for name, option in spec.OPTIONS.items() if option.cli_help}
    return {*named, "guide", "reduction"} - {*kind.refused}


def fits(problem: Problem) -> bool:
    """The command computes the mean, and gradients if it is finite."""
    mean = problem.reduction == "mean" and np.all(problem.grad_out == 1)
    return bool(mean) and not problem.poison and not problem.options.get("decoupled", False)


def write(folder: Path, name: str, value: Any) -> list[str]:
    """The words of an option whose value is an array, or a pair of them."""
    words: list[str] = []
    for i, z in enumerate(value if isinstance(value, tuple) else (value,)):
        np.save(folder / f"{name}{i}.npy", z)
        words += [flag(name), str(folder / f"{name}{i}.npy")]
    return words


@executor("infonce loss", of_command, draws=400, fits=fits)
def with_command(problem: Problem) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["loss", "--loss", problem.loss, "--json", "--no-metrics"]
        sides = problem.features[::-1] if problem.loss == "lit" else problem.features  # IMAGE, TEXT
        for i, z in enumerate(sides):
            words.append(write(folder, f"features{i}", z)[1])
        words += ["--scale", repr(problem.scale), "--grad-out", str(folder / "gradients")]
        options = {k: v for k, v in problem.options.items() if k != "reduction"}
        for option, value in options.items():
            if option in FILES:
                words += write(folder, option, value)
            elif isinstance(value, bool):
                words.append(flag(option if value else f"no_{option}"))
            else:
                text = ",".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
                words += [flag(option), text]
        for option in ("method", "precision", "workspace"):
            if option in problem.settings:
                words += [flag(option), str(problem.settings[option])]
        done = CliRunner().invoke(main, words)
        if done.exit_code:
            raise ValueError(done.output)
        gradients = {f.stem: np.load(f) for f in (folder / "gradients").glob("*.npy")}
        scalars = json.loads((folder / "gradients" / "scalars.json").read_text())
        report = json.loads(done.stdout[done.stdout.index("{") :])
    # the report has the digits of the loss's dtype
    wide = any(z.dtype.itemsize == 8 for z in problem.features)
    total = report["value"]["total"]
    found: Result = {"loss": np.asarray(total, np.float64 if wide else np.float32)}
    gradients |= {k: v for k, v in scalars.items() if k in ("scale", "bias")}
    dtypes = {
        name: z.dtype for name, z in zip(problem.kind.arguments, problem.features, strict=False)
    }
    dtypes["own"] = problem.features[0].dtype
    for name, gradient in gradients.items():
        dtype = dtypes.get(name, np.dtype(np.float64))
        if getattr(gradient, "dtype", None) is not None and gradient.dtype.kind == "V":
            gradient = gradient.view(dtype)  # bfloat16
        found[name] = np.asarray(gradient)
    return found
