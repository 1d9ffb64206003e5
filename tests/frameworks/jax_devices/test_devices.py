"""infonce.jax over 2, 4 and 8 devices of a CPU. Each test runs a program in a process of its own:
JAX asks once how many devices there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

pytestmark = pytest.mark.extras


def run(program: str, devices: int, *cases: str) -> None:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    path = Path(__file__).with_name(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", path, *cases], env=environment, timeout=240, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" s\n") >= len(cases), done.stdout


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_losses_and_options(devices: int) -> None:
    run("losses_over_devices.py", devices, "options:3")


@pytest.mark.parametrize("devices", [2, 8])
def test_compiled_programs_and_loops(devices: int) -> None:
    run("programs_over_devices.py", devices, "compiled", "loop")


def test_derivatives_and_transforms() -> None:
    run("losses_over_devices.py", 4, "modes", "transforms")


def test_metrics_and_dtypes() -> None:
    run("losses_over_devices.py", 4, "metrics", "single_precision")


def test_errors_and_documentation() -> None:
    run("programs_over_devices.py", 4, "refused", "not_a_number", "page")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3, 5])
def test_other_numbers_of_devices(devices: int) -> None:
    run("losses_over_devices.py", devices, "options:8")
