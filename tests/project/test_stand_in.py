"""The emulator's stand-in for CuPy beside CuPy: what it has, CuPy has too."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EMULATOR = Path(__file__).parents[1] / "emulator"
MODULES = [
    "cupy", "cupy.testing", "cupyx", "cupy.cuda", "cupy.cuda.cublas", "cupy.cuda.device",
    "cupy.cuda.driver", "cupy.cuda.nccl", "cupy.cuda.nvrtc", "cupy.cuda.runtime",
]  # fmt: skip
# What its modules have for each other
OWN = {
    "cupy.apply", "cupy.on_device", "cupy.run", "cupy.cuda.Graph.run", "cupy.cuda.Memory.spoil",
    "cupy.cuda.Stream.finish", "cupy.cuda.Stream.note_wait", "cupy.cuda.Stream.submit",
    "cupy.cuda.driver.launch_at",
}  # fmt: skip
NAMES = """
import importlib, json, sys
names = []
for module in sys.argv[1:]:
    for name, value in vars(importlib.import_module(module)).items():
        home = getattr(value, "__module__", "")
        if name.startswith("_") or not callable(value) or not home.startswith("cupy"):
            continue
        names.append(f"{module}.{name}")
        if isinstance(value, type):
            names += [f"{module}.{name}.{key}" for key in vars(value) if not key.startswith("_")]
print(json.dumps(names))
"""


def exists(path: str) -> bool:
    top, *names = path.split(".")
    value = importlib.import_module(top)
    for name in names:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


@pytest.mark.extras
def test_cupy_has_what_the_stand_in_has() -> None:
    pytest.importorskip("cupy")
    path = os.pathsep.join(map(str, (EMULATOR / "stand_in", EMULATOR)))
    done = subprocess.run(
        [sys.executable, "-c", NAMES, *MODULES], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    importlib.import_module("cupy.cuda.nccl")  # no attribute before
    names = json.loads(done.stdout)
    assert {"cupy.concatenate", "cupy.cuda.Stream.begin_capture"} <= set(names)
    assert {name for name in names if not exists(name)} <= OWN
