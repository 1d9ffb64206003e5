"""infonce.jax over 2, 4 and 8 devices of a CPU. Each test runs a program in a process of its own:
JAX asks once how many devices there are."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import engine
import pytest

pytest.importorskip("jax")

pytestmark = pytest.mark.extras


def start(program: str, devices: int, *arguments: str) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    path = Path(__file__).with_name(program)
    warnings = "-W", "error", "-W", "ignore:norms of rows"
    return subprocess.Popen(
        [sys.executable, *warnings, path, *arguments], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs


def run(program: str, devices: int, *cases: str) -> None:
    (output,) = outputs([start(program, devices, *cases)])
    assert output.count(" s\n") >= len(cases), output


@pytest.mark.parametrize(
    ("devices", "case"), [(2, "compiled:nt_xent"), (4, "compiled"), (8, "loop")]
)
def test_compiled_programs_and_loops(devices: int, case: str) -> None:
    """Over two devices, gradients of a loss of all views need no sum."""
    run("programs_over_devices.py", devices, case)


def test_derivatives_transforms_tables_and_dtypes() -> None:
    run("losses_over_devices.py", 4, "modes", "transforms", "table", "single_precision")


def test_errors_and_documentation() -> None:
    cases = "refused", "shards", "explicit", "not_a_number", "page"
    run("programs_over_devices.py", 4, *cases)


def test_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    message = outputs([start("processes.py", 2, str(rank), str(port)) for rank in range(2)])
    assert all("equal" in text for text in message), message


@pytest.mark.skipif(bool(engine.missing()), reason=engine.missing())
def test_callbacks_of_gpus_on_the_emulator() -> None:
    losses = "nt_xent", "siglip", "sup_con", "clip guide", "distill"
    (output,) = outputs([start("emulated_devices.py", 1, "3", *losses)])
    assert output.count("is equal") == len(losses), output
