"""The command line: help, demo and info."""

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
from command_line import PNG, fail, run, succeed
from infonce.distributed.transports import choice

import infonce
from infonce.cli import common, info, machine, main
from infonce.cli.bench import command
from infonce.spec import LOSSES

# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", main.commands)
def test_help(command):
    assert f"\n  {command} " in succeed()
    assert f"Usage: main {command}" in succeed(command, "--help")


def test_version():
    assert succeed("--version") == f"infonce, version {infonce.__version__}\n"


@pytest.mark.skipif(os.name != "posix", reason="a pseudo-terminal")
@pytest.mark.parametrize("columns", [20, 80])
def test_terminals_cut_no_number_short(columns):
    """Rich would put an ellipsis into a table wider than the terminal."""
    import pty

    primary, secondary = pty.openpty()
    row = {key: 0.125 for key in command.COLUMNS} | {"size": 32768, "method": "products"}
    row |= {"median_s": 123.4567, "min_s": 123.4567, "max_s": 124, "wall_s": None}
    settings = {"loss": "clip", "dtype": "float32", "dim": 8}
    for name in ("peak_bytes", "wall_s"):  # of the GPU
        del row[name]
    with os.fdopen(secondary, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", str(columns))
        command._print_size(settings, [row])
        terminal.flush()
        printed = os.read(primary, 65536).decode()
    os.close(primary)
    assert "…" not in printed
    assert "1.235e+05" in printed
    if columns == 80:
        table = printed.splitlines()[1:5]
        assert max(map(len, (re.sub(r"\x1b\[\d+m", "", line) for line in table))) <= 80


def test_output_that_nobody_reads():
    """`infonce ... | head` and a closed stdout end without a traceback."""
    command = [sys.executable, "-m", "infonce", "--help"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
    assert common.stdout().file is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        common.stdout().print("nowhere")


# --- demo ----------------------------------------------------------------------------------------


def test_demo_learns(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "demo.png"
    printed = succeed("demo", "--epochs", 25, "--output", picture)
    shares = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if len(cells) == 3 and cells[1].endswith("%"):
            shares[cells[0]] = [float(cell.rstrip("%")) for cell in cells[1:]]
    assert len(shares) == 4
    for title, (before, after) in shares.items():
        least = 30 if "top-5" in title else 8
        assert after > max(least, 3 * before), title
    assert picture.read_bytes().startswith(PNG)
    assert list(tmp_path.iterdir()) == [picture]


def test_demo_is_refused_or_interrupted_whole(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    fail("demo", "--output", tmp_path / "file" / "demo.png")
    error = fail("demo", "--temperature", 0, "--output", tmp_path / "demo.png")
    assert "--temperature: expected at least 0.01, got 0.0" in error

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(infonce, "clip_loss_and_grad", interrupt)
    fail("demo", "--output", tmp_path / "demo.png", code=130)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- info ----------------------------------------------------------------------------------------


def test_info():
    printed = succeed("info")
    assert infonce.__version__ in printed
    assert "scikit-learn" in printed
    report = json.loads(succeed("info", "--json"))
    assert report["versions"]["infonce"] == infonce.__version__
    assert report["backends"]["cpu"].startswith("available")
    assert report["workspace_bytes"] == 256 * 2**20
    assert report["versions"]["ml_dtypes"] in printed
    assert {"jax", "torch", "mpi4py"} <= report["optional"].keys()
    assert list(report["cuda_libraries"]) == ["NVRTC", "cuBLAS", "NCCL"]


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_info_without_cudas_libraries(monkeypatch, extra):
    """A GPU, and CuPy alone: the extra of that build brings what it loads."""
    installed = {f"cupy-{extra}x": "14.0"}
    monkeypatch.setattr(machine, "versions", lambda *names: dict.fromkeys(names) | installed)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setitem(sys.modules, "infonce.distributed.transports.nccl", None)
    monkeypatch.setattr(choice, "describe", lambda on_gpu: {})
    monkeypatch.setattr(machine, "cuda", lambda: "available: a GPU")
    report = json.loads(succeed("info", "--json"))
    missing = f"missing: pip install 'infonce-kernels[{extra}]'"
    assert set(report["cuda_libraries"].values()) == {missing}
    assert [name for name in report["optional"] if name.startswith("cupy")] == list(installed)
    assert missing in succeed("info")


@pytest.mark.extras
def test_info_finds_nccl(monkeypatch):
    pytest.importorskip("cupy")
    from cupy.cuda import nccl as cupy_nccl
    from infonce.distributed.transports import nccl

    monkeypatch.setattr(nccl, "why_unavailable", lambda: None)
    monkeypatch.setattr(cupy_nccl, "get_version", lambda: 22703, raising=False)
    assert json.loads(succeed("info", "--json"))["cuda_libraries"]["NCCL"] == "available, 2.27.3"


def test_compile_says_what_it_compiled(monkeypatch):
    """Without a GPU, the command says why nothing was compiled. With a GPU, it lists new
    kernels."""
    monkeypatch.setattr(machine, "cuda", lambda: "unavailable: no device")
    for flags in ([], ["--json"]):
        result = run("info", "--compile", *flags)
        assert result.exit_code == 1
        assert infonce.__version__ in result.stdout
        why = "infonce: error: --compile: no kernel was compiled: CUDA unavailable: no device"
        assert result.stderr.startswith(why)
        assert len(result.stderr.splitlines()) == 1

    monkeypatch.setattr(machine, "cuda", lambda: "available: a GPU")
    monkeypatch.setattr(machine, "gpu", lambda: None)
    libraries = dict.fromkeys(("NVRTC", "cuBLAS", "NCCL"), "available")
    monkeypatch.setattr(info, "_cuda_libraries", lambda: libraries)
    monkeypatch.setattr(info, "_transports", lambda on_gpu: {})
    for seconds, note in (({}, "were in the cache"), ({"lse.cu": 1.5}, "")):
        monkeypatch.setattr(info, "_compile_common_calls", lambda seconds=seconds: seconds)
        result = run("info", "--compile")
        assert result.exit_code == 0
        assert note in result.stderr
        assert bool(note) == bool(result.stderr)
        assert ("lse.cu: 1.5 s" in result.stdout) == bool(seconds)


def test_kernels_of_common_calls(monkeypatch):
    """Every loss in every dtype, batches for both methods; all run, and the first failure shows."""
    calls = info.common_calls(tensor_cores=True)
    assert len(set(calls)) == len(calls) == len(LOSSES) * 3 * (1 + len(info.WIDTHS))
    assert {dtype for _, dtype, *_ in info.common_calls(tensor_cores=False)} == {"float32"}
    assert all(str(width) in succeed("info", "--help") for width in info.WIDTHS)

    seen, shown = [], []
    monkeypatch.setattr(info, "progress_bar", lambda: contextlib.nullcontext(
        lambda *step: shown.append(step)))  # fmt: skip
    info.run_all(lambda *call: seen.append(call), calls)
    assert set(seen) == set(calls)
    assert shown == [("calls compiled", done, len(calls)) for done in range(1, len(calls) + 1)]

    def broken(loss, *_):
        raise RuntimeError(f"{loss.name} does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        info.run_all(broken, calls)


def test_info_survives_whatever_is_missing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    for name in ("cupy", "infonce.kernels.cpu.backend", "infonce.kernels.cpu.loops.tile_ops"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("threadpoolctl.threadpool_info", list)
    printed = succeed("info")
    for extra in ("safetensors", "torch", "jax", "mpi", "cuda12", "cuda13"):
        assert f"missing: pip install 'infonce-kernels[{extra}]'" in printed
    assert "unavailable" in printed
