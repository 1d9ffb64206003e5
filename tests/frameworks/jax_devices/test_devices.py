"""infonce.jax over 2, 4 and 8 devices of a CPU: see over_devices.py. Each test is a process, as JAX
asks once how many devices there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

pytestmark = pytest.mark.extras
PROGRAM = Path(__file__).with_name("over_devices.py")


def run(devices: int, *cases: str) -> None:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, *cases], env=environment, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" s\n") >= len(cases), done.stdout


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_losses_and_options(devices: int) -> None:
    run(devices, "options:3")


@pytest.mark.parametrize("devices", [2, 8])
def test_compiled_programs_and_loops(devices: int) -> None:
    run(devices, "compiled", "loop")


def test_derivatives_and_transforms() -> None:
    run(4, "modes", "transforms")


def test_metrics_dtypes_and_errors() -> None:
    run(4, "metrics", "single_precision", "refused", "not_a_number")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5])
def test_many_options(devices: int) -> None:
    run(devices, "options:25")
