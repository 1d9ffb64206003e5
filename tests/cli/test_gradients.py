"""`infonce loss --grad-out`: gradients as files, all of them or none."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from command_line import D, M, fail, run, succeed

import infonce
from infonce.cli import common, embeddings, gradient_files


def test_grad_dtype(pair, tmp_path):
    out = tmp_path / "out"
    for dtype in ("float32", "float64"):  # of features, of the option
        more = ("--force", "--grad-dtype", dtype) if out.exists() else ()
        succeed("loss", *pair[:2], "--scale", 2, "--grad-out", out, *more)
        assert np.load(out / "image.npy").dtype == dtype


def test_nothing_is_overwritten_without_force(pair, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    base = ("loss", *pair[:2], "--scale", 2, "--grad-out", out)
    for existing in ("text.npy", "scalars.json"):
        (out / existing).write_text("precious")
        assert "--force" in fail(*base)
        assert [path.name for path in out.iterdir()] == [existing]
        assert (out / existing).read_text() == "precious"
        (out / existing).unlink()
    (out / "text.npy").touch()
    succeed(*base, "--force")
    assert len(list(out.iterdir())) == 3


def test_gradients_do_not_share_a_file(pair, tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "out").mkdir()
    for name in ("image.npy", "text.npy"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "target")
    error = fail("loss", *pair[:2], "--scale", 2, "--grad-out", tmp_path / "out", "--force")
    assert "out: expected different files, got links to the same file" in error
    assert (tmp_path / "target").read_text() == "precious"


def test_folder_that_cannot_be_written(pair, tmp_path, monkeypatch):
    base = ("loss", *pair[:2], "--scale", 2, "--grad-out")
    monkeypatch.setattr(embeddings, "open_embeddings", None)  # refused before anything is read
    error = fail(*base, pair[0] / "out")  # under a regular file: not even root can
    assert "image.npy: expected a folder that exists" in error
    parent = tmp_path / "no" / "such"
    assert f"{parent}: expected a folder that exists" in fail(*base, parent / "parent")
    assert "expected a folder, got a file" in fail(*base, pair[0])
    monkeypatch.setattr(gradient_files.os, "access", lambda *_: False)
    assert f"{tmp_path}: expected a folder that can be" in fail(*base, tmp_path / "new")


def test_shards_are_not_overwritten(pair, tmp_path, monkeypatch):
    """A gradient would be a shard of the input, in its folder or by a link to it."""
    image, _, u, _ = pair
    shards = tmp_path / "shards"
    shards.mkdir()
    np.save(shards / "part_0.npy", u)
    (tmp_path / "link").symlink_to(shards, target_is_directory=True)
    base = ("loss", "--scale", 2, "--loss", "info_nce", image, shards, "--force", "--grad-out")
    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "open_embeddings", None)  # refused before anything is read
        for folder in (shards, tmp_path / "link"):
            error = fail(*base, folder)
            assert f"--grad-out: expected another name, {shards} is an input" in error
    succeed(*base, shards / "gradients")  # is no shard
    assert sorted(path.name for path in shards.iterdir()) == ["gradients", "part_0.npy"]


def test_a_loss_that_is_not_finite_writes_nothing(pair, tmp_path):
    """The command fails, so files of an earlier run stay as they are, with --force too."""
    image, text, u, _ = pair
    out, plot = tmp_path / "out", tmp_path / "plot.png"
    base = ("loss", image, text, "--grad-out", out, "--force")
    succeed(*base, "--scale", 2)
    plot.write_text("good")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    u[3] = np.inf
    np.save(image, u)
    for arguments in (
        (*base, "--scale", 2),
        ("loss", image, text, "--scale", 2, "--grad-out", tmp_path / "new"),
        ("loss", image, text, "--temperature", "0.5,1", "--plot", plot),
    ):
        result = run(*arguments, "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["gradients"] is None
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert plot.read_text() == "good"
    assert {path.name for path in tmp_path.iterdir()} == {image.name, text.name, "out", "plot.png"}


def test_an_empty_name_is_refused(pair, tmp_path, monkeypatch):
    """pathlib takes it for the current folder."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    base = ("loss", *pair[:2], "--loss", "info_nce", "--temperature", "1,2")
    for option in ("--grad-out", "--plot", "--labels", "--weights", "--ids"):
        assert f"{option}': expected a name, got an empty one" in fail(*base, option, "")
    for command in ("bench", "demo"):
        assert "expected a name, got an empty one" in fail(command, "--output", "")
    assert sorted(tmp_path.iterdir()) == before


def test_disk_that_is_too_small(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(infonce, "clip_loss_and_grad", None)
    usage = gradient_files.shutil.disk_usage(tmp_path)._replace(free=2 * M * D * 4 - 1)
    monkeypatch.setattr(gradient_files.shutil, "disk_usage", lambda _: usage)
    out = tmp_path / "out"
    assert "are free" in fail("loss", *pair[:2], "--scale", 2, "--grad-out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("error", "code", "existed"), [(KeyboardInterrupt, 130, False), (MemoryError, 1, True)]
)
def test_failure_leaves_nothing(pair, tmp_path, monkeypatch, error, code, existed):
    out = tmp_path / "out"
    if existed:
        out.mkdir()
    seen = []

    def loss(*_, **options):
        seen.extend(out.iterdir())
        options["out"]["image"][...] = 1
        raise error

    monkeypatch.setattr(infonce, "clip_loss_and_grad", loss)
    fail("loss", *pair[:2], "--scale", 2, "--grad-out", out, code=code)
    assert len(seen) == 2  # temporary files, by then
    assert out.exists() == existed
    assert not existed or list(out.iterdir()) == []


def test_failed_commit_leaves_nothing(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "_sync", lambda _: os.stat(tmp_path / "none"))
    out = tmp_path / "out"
    assert "No such file" in fail("loss", *pair[:2], "--scale", 2, "--grad-out", out, code=1)
    assert not out.exists()


@pytest.mark.skipif(os.name != "posix", reason="SIGINT as a terminal sends it")
def test_ctrl_c(tmp_path):
    """A real interrupt in the middle of real work."""
    n, out = 60_000, tmp_path / "out"
    np.lib.format.open_memmap(tmp_path / "z.npy", "w+", np.float16, (n, 256)).flush()
    command = [sys.executable, "-m", "infonce", "loss", "z.npy", "z.npy", "--scale", "1"]
    process = subprocess.Popen(
        [*command, "--grad-out", "out"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 30
        while not (out.exists() and len(list(out.iterdir())) == 2):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode == 130
    assert output == "infonce: interrupted\n"
    assert not out.exists()
