"""Files that commands write: no input is replaced, and nothing but a regular file."""

import os

import numpy as np
import pytest
from command_line import PNG, fail, succeed

from infonce.cli import loss as loss_command
from infonce.cli.bench import cpu

SEVERAL = ("--temperature", "1,2")  # for --plot


@pytest.mark.parametrize("output", ["--plot", "--grad-out"])
@pytest.mark.parametrize(
    "arguments",
    [
        "shards two.npz:v --loss info_nce --labels labels.npy --ids ids.npy --guide guide.npy "
        "--guide guide",
        "image.npy shards --loss distill --teacher-query two.npz:x:y --teacher-key teacher",
    ],
)
def test_no_output_replaces_an_input(tmp_path, monkeypatch, output, arguments):
    """Neither a file, nor a shard or an archive, of features or of an option."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loss_command.LossFiles, "open_features", None)  # before anything is read
    words = arguments.split()
    inputs = []
    for name in (word.partition(":")[0] for word in words if os.path.splitext(word)[1]):
        inputs.append(tmp_path / name)
    for folder in {"shards", "guide", "teacher"}.intersection(words):
        inputs += [tmp_path / folder / "part_0.npy", tmp_path / folder / "part_1.npy"]
    for path in inputs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    (tmp_path / "out").mkdir()
    link = tmp_path / "out" / "query.npy"
    for path in inputs:
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        several = (*SEVERAL, "--plot", path)
        gradients = ("--temperature", 1, "--force", "--grad-out", "out")
        error = fail("loss", *words, *(several if output == "--plot" else gradients))
        assert f"{output}: expected another name, {path.relative_to(tmp_path)} is an input" in error
    assert len(inputs) >= 6
    assert {path.read_text() for path in inputs} == {"precious"}


OUTPUTS = {  # a call that writes `file`
    "loss --plot": lambda pair, file: ("loss", *pair[:2], *SEVERAL, "--plot", file),
    "loss --grad-out": lambda pair, file: (
        "loss", *pair[:2], "--scale", 1, "--grad-out", file.parent, "--force"
    ),
    "bench --output": lambda _, file: (
        "bench", "--sizes", 32, "--repeat", 1, "--methods", "numpy", "--output", file
    ),
    "bench --plot": lambda _, file: (
        "bench", "--sizes", 32, "--repeat", 1, "--methods", "numpy", "--plot", file
    ),
    "demo --output": lambda _, file: ("demo", "--epochs", 1, "--output", file),
}  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="pipes and links of a POSIX system")
@pytest.mark.parametrize("call", OUTPUTS)
def test_only_files_are_replaced(pair, tmp_path, call, monkeypatch):
    """A pipe, a folder and a link without a file are refused. A link to a file stays a link."""
    pytest.importorskip("matplotlib")
    if call.startswith("demo"):
        pytest.importorskip("sklearn")
    monkeypatch.setattr(cpu, "GEMM", 64)
    monkeypatch.setattr(cpu, "PAUSE", 0)
    out = tmp_path / "out"
    out.mkdir()
    file, target = out / "scalars.json", tmp_path / "target"
    arguments = OUTPUTS[call](pair, file)
    for make, kind in (
        (os.mkfifo, "a pipe, a device or a broken link"),
        (os.mkdir, "a folder"),
        (lambda file: file.symlink_to("none"), "a pipe, a device or a broken link"),
        (lambda file: file.symlink_to(file), "a pipe, a device or a broken link"),
    ):
        make(file)
        before = file.lstat()
        assert f"{file}: expected a file or none, got {kind}" in fail(*arguments)
        assert file.lstat() == before
        assert list(out.iterdir()) == [file]
        file.rmdir() if kind == "a folder" else file.unlink()
    target.write_text("old")
    file.symlink_to(os.path.join("..", "target"))
    succeed(*arguments)
    assert file.readlink() == type(file)("..", "target")
    is_json = call in ("loss --grad-out", "bench --output")
    assert target.read_bytes().startswith(b"{" if is_json else PNG)


@pytest.mark.skipif(os.name != "posix", reason="names of files are bytes")
def test_names_that_are_no_text(pair, tmp_path, monkeypatch):
    """stdout and a plot show them with escapes; a plot takes no name for mathematics."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    error = fail("loss", "none\udcff.npy", "text.npy", "--temperature", 1)
    assert error == "infonce: error: none\\udcff.npy: no such file or folder\n"
    np.save("$\\x$\udcff.npy", pair[2])
    plot = ("--temperature", "1,2", "--plot", "plot\udcff.png")
    for options in (("--temperature", 1, "--grad-out", "out\udcff"), plot, (*plot, "--compare")):
        printed = succeed("loss", "$\\x$\udcff.npy", "text.npy", *options)
        assert "$\\x$\\udcff.npy" in printed
    pytest.importorskip("sklearn")
    printed = succeed("demo", "--epochs", 1, "--output", file := tmp_path / "demo\udcff.png")
    assert "wrote " in printed.splitlines()[-1]
    assert file.exists()
