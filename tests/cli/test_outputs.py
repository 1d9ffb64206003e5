"""Files that commands write: no input is replaced, and nothing but a regular file."""

import os

import pytest
from command_line import fail

from infonce.cli import loss as loss_command

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
