"""`infonce loss`: values against the reference, and nothing half-written when it fails."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from command_line import close, fail, run, succeed

import infonce
from infonce import reference
from infonce.cli import common
from infonce.cli.embeddings import open_embeddings

M, D = 48, 12
loss_command = importlib.import_module("infonce.cli.loss")


@pytest.fixture
def pair(tmp_path):
    """Paths of two float32 arrays [M, D], and the arrays."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal((M, D)).astype(np.float32)
    text = (image + rng.standard_normal((M, D))).astype(np.float32)
    paths = tmp_path / "image.npy", tmp_path / "text.npy"
    for path, z in zip(paths, (image, text), strict=True):
        np.save(path, z)
    return *paths, image, text


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["clip", "lit", "siglip", "info_nce"])
def test_loss_is_the_reference(pair, kind):
    image, text, u, v = pair
    options = ("--scale", 3.0, "--normalize", "--json")
    report = json.loads(succeed("loss", image, text, "--loss", kind, *options))
    arrays = (v, u) if kind == "lit" else (u, v)
    expected = getattr(reference, kind)(*arrays, scale=3.0, normalize=True)
    assert close(report["value"]["total"], expected.loss)
    assert report["inputs"]["key" if kind == "info_nce" else "image"]["shape"] == [M, D]


def test_nt_xent_takes_one_argument(pair):
    image, text, u, _ = pair
    report = json.loads(succeed("loss", image, "--loss", "nt_xent", "--temperature", 0.5, "--json"))
    assert close(report["value"]["total"], reference.nt_xent(u, scale=2.0).loss)
    assert "expected 1 embeddings" in fail("loss", image, text, "--loss", "nt_xent", "--scale", 1)


def test_directions_ranks_and_lse(pair):
    image, text, u, v = pair
    report = json.loads(succeed("loss", image, text, "--scale", 3, "--json"))
    rows = reference.info_nce(u, v, scale=3.0)
    columns = reference.info_nce(v, u, scale=3.0)
    assert close(report["value"]["rows"], rows.loss, 1e-4)
    assert close(report["value"]["columns"], columns.loss, 1e-4)
    logits = 3.0 * u.astype(np.float64) @ v.T.astype(np.float64)
    for side, x, lse in (("rows", logits, rows.lse), ("columns", logits.T, columns.lse)):
        rank = (x > np.diag(x)[:, None]).sum(1)
        assert report["retrieval"][side]["top1"] == (rank < 1).mean()
        assert report["retrieval"][side]["top5"] == (rank < 5).mean()
        assert close(report["lse"][side]["min"], lse.min())
        assert close(report["lse"][side]["mean"], lse.mean())
        assert close(report["lse"][side]["max"], lse.max())


def test_no_metrics(pair):
    report = json.loads(succeed("loss", *pair[:2], "--scale", 3, "--no-metrics", "--json"))
    assert report["retrieval"] is None
    assert report["value"]["rows"] is None


def test_labels_and_ids(pair, tmp_path):
    image, text, u, v = pair
    rng = np.random.default_rng(1)
    labels, ids = rng.integers(0, M, M), rng.integers(0, 9, M)
    np.save(tmp_path / "labels.npy", labels)
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "others.npy", ids[::-1])
    base = ("loss", image, text, "--scale", 1, "--loss", "info_nce", "--json")
    report = json.loads(succeed(*base, "--labels", tmp_path / "labels.npy"))
    assert close(report["value"]["total"], reference.info_nce(u, v, labels=labels, scale=1.0).loss)
    base += ("--ids", tmp_path / "ids.npy")
    report = json.loads(succeed(*base))
    assert close(report["value"]["total"], reference.info_nce(u, v, scale=1.0, ids=ids).loss)
    report = json.loads(succeed(*base, "--ids", tmp_path / "others.npy"))
    expected = reference.info_nce(u, v, scale=1.0, ids=(ids, ids[::-1])).loss
    assert close(report["value"]["total"], expected)


def test_bias(pair):
    image, text, u, v = pair
    base = ("loss", image, text, "--json", "--scale", 2)
    report = json.loads(succeed(*base, "--loss", "siglip", "--bias", -3))
    expected = reference.siglip(u, v, scale=2.0, bias=-3.0).loss
    assert close(report["value"]["total"], expected)
    assert "--bias is of siglip" in fail(*base, "--bias", -3)


def test_table_says_what_json_says(pair):
    image, text, u, v = pair
    printed = succeed("loss", image, text, "--scale", 3, "--method", "tiled")
    words = " ".join(printed.split())
    assert f"clip loss {reference.clip(u, v, scale=3.0).loss:.4g}" in words
    assert "image 48 x 12 float32" in words
    assert "method tiled" in words


def test_not_finite_is_null_and_said(pair):
    image, text, u, _ = pair
    u[3, 4] = np.nan
    np.save(image, u)
    result = run("loss", image, text, "--scale", 1, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["value"]["total"] is None
    assert "not finite" in result.stderr
    assert "row 3" in fail("loss", image, text, "--scale", 1, "--check-finite")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1048576", 2**20), ("64KiB", 2**16), ("256MiB", 2**28), ("1.5 gib", 3 * 2**29)],
)
def test_sizes(text, expected):
    assert common.Bytes().convert(text, None, None) == expected


def test_bad_size(pair):
    assert "got '3 apples'" in fail("loss", *pair[:2], "--scale", 1, "--workspace", "3 apples")


# --- files ---------------------------------------------------------------------------------------


def test_formats_hold_the_same(pair, tmp_path):
    image, text, u, v = pair
    safetensors = pytest.importorskip("safetensors.numpy")
    np.savez(tmp_path / "one.npz", u)
    np.savez(tmp_path / "two.npz", u=u, v=v)
    safetensors.save_file({"u": u}, tmp_path / "one.safetensors")
    safetensors.save_file({"v": v, "u": u}, tmp_path / "two.safetensors")
    for i, part in enumerate(np.array_split(u, 12)):
        (tmp_path / "shards").mkdir(exist_ok=True)
        np.save(tmp_path / "shards" / f"img_emb_{i}.npy", part)  # 10 after 9, not after 1
    expected = reference.clip(u, v, scale=3.0).loss
    names = ("one.npz", "two.npz:u", "one.safetensors", "two.safetensors:u", "shards")
    for source in (image, *(tmp_path / name for name in names)):
        np.testing.assert_array_equal(open_embeddings(str(source)), u)
        report = json.loads(succeed("loss", source, text, "--scale", 3, "--json"))
        assert close(report["value"]["total"], expected), source


def test_mapped_not_read(pair, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"u": pair[2]}, tmp_path / "u.safetensors")
    for source in (pair[0], tmp_path / "u.safetensors"):
        assert isinstance(open_embeddings(str(source)), np.memmap)


def test_bfloat16(pair, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    u = pair[2].astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "u.npy", u)
    safetensors.save_file({"u": u}, tmp_path / "u.safetensors")
    for name in ("u.npy", "u.safetensors"):
        array = open_embeddings(str(tmp_path / name))
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array.view(np.uint16), u.view(np.uint16))


def test_colon_in_a_name(pair, tmp_path):
    np.savez(tmp_path / "a.npz:b.npz", pair[2])
    np.testing.assert_array_equal(open_embeddings(str(tmp_path / "a.npz:b.npz")), pair[2])


def bad_inputs(folder, u):
    """name -> (what to pass as IMAGE, part of the message)."""

    def path(name):
        return folder / name

    data = (folder / "image.npy").read_bytes()
    path("truncated.npy").write_bytes(data[:-40])
    path("header.npy").write_bytes(data[:40])
    path("empty.npy").write_bytes(b"")
    path("magic.npy").write_bytes(b"these are no numbers at all")
    np.save(path("pickle.npy"), np.array([{}], object), allow_pickle=True)
    np.save(path("integers.npy"), u.astype(np.int64))
    np.save(path("flat.npy"), u.ravel())
    np.save(path("wide.npy"), np.hstack([u, u]))
    np.save(path("rows.npy"), u[:-1])
    np.savez(path("two.npz"), a=u, b=u)
    path("truncated.npz").write_bytes(path("two.npz").read_bytes()[:-40])
    path("bad.safetensors").write_bytes(b"\xff" * 60)
    shards = {
        "width": {"s_0.npy": u, "s_1.npy": u[:, 1:]},
        "dtype": {"s_0.npy": u, "s_1.npy": u.astype(np.float64)},
        "flat": {"s_0.npy": u[0]},
        "series": {"img_0.npy": u, "text_0.npy": u},
        "none": {},
    }
    for name, arrays in shards.items():
        path(name).mkdir()
        for file, array in arrays.items():
            np.save(path(name) / file, array)
    return {
        "truncated.npy": "not a whole .npy",
        "header.npy": "not a whole .npy",
        "empty.npy": "not a whole .npy",
        "magic.npy": "magic",
        "pickle.npy": "objects",
        "integers.npy": "got int64",
        "flat.npy": "expected 2 dimensions",
        "wide.npy": "expected width 24",
        "rows.npy": "expected 47 rows",
        "two.npz": "two.npz:KEY",
        "two.npz:c": "it has a, b",
        "truncated.npz": "not a whole .npz",
        "bad.safetensors": "not a whole .safetensors",
        "missing.npy": "no such file",
        "width": "expected width 12 and dtype float32",
        "dtype": "got width 12 and dtype float64",
        "flat": "expected 2 dimensions",
        "series": "img_#.npy, text_#.npy",
        "none": "got none",
    }


def test_bad_inputs(pair, tmp_path):
    pytest.importorskip("safetensors")
    out = tmp_path / "out"
    for name, message in bad_inputs(tmp_path, pair[2]).items():
        base = ("loss", tmp_path / name, pair[1], "--scale", 1, "--grad-out", out)
        said = fail(*base)
        assert message in said, (name, said)
        assert not out.exists(), name


def test_bad_options(pair, tmp_path):
    base = ("loss", *pair[:2])
    assert "got both" in fail(*base, "--scale", 1, "--temperature", 1)
    assert "got neither" in fail(*base)
    assert "positive" in fail(*base, "--scale", 0)
    assert "--labels is of info_nce" in fail(*base, "--scale", 1, "--labels", pair[0])
    assert "need --grad-out" in fail(*base, "--scale", 1, "--force")
    assert "No such option" in fail(*base, "--scael", 1)
    assert "expected integers" in fail(*base, "--scale", 1, "--ids", pair[0])
    assert "workspace" in fail(*base, "--scale", 1, "--workspace", "4")
    fail("lose")


def test_a_real_failure_has_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "infonce", "loss", "a.npy", "b.npy", "--scale", "1"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "infonce: error: a.npy: no such file or folder\n"


def test_missing_library_names_its_extra(pair, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "u.safetensors").touch()
    said = fail("loss", tmp_path / "u.safetensors", pair[1], "--scale", 1)
    assert "pip install 'infonce[safetensors]'" in said
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install 'infonce[demo]'" in fail("demo", "--output", tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'infonce[plot]'" in fail("bench", "--plot", tmp_path / "x.png")


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["clip", "lit", "siglip", "info_nce"])
def test_gradients_are_those_of_the_library(pair, tmp_path, kind):
    image, text, u, v = pair
    out = tmp_path / "out"
    succeed("loss", image, text, "--loss", kind, "--scale", 2, "--grad-out", out)
    arrays = (v, u) if kind == "lit" else (u, v)
    function = getattr(infonce, f"{kind}_loss_and_grad")
    grads = function(*arrays, scale=2.0, metrics=kind != "siglip").grads._asdict()
    scalars = json.loads((out / "scalars.json").read_text())
    expected = {"scalars.json"}
    for name, grad in grads.items():
        if grad is None:
            continue
        if grad.ndim:
            expected.add(f"{name}.npy")
            np.testing.assert_array_equal(np.load(out / f"{name}.npy"), grad)
        else:
            assert scalars.pop(name) == float(grad)
    assert scalars == {}
    assert {path.name for path in out.iterdir()} == expected


def test_grad_dtype(pair, tmp_path):
    image, text, u, v = pair
    for z, path in ((u, image), (v, text)):
        np.save(path, z.astype(np.float16))
    base = ("loss", image, text, "--scale", 2, "--grad-out", tmp_path / "out")
    succeed(*base)
    assert np.load(tmp_path / "out" / "image.npy").dtype == np.float16
    succeed(*base, "--force", "--grad-dtype", "float32")
    assert np.load(tmp_path / "out" / "image.npy").dtype == np.float32


@pytest.mark.parametrize("existing", ["text.npy", "scalars.json"])
def test_nothing_is_overwritten_without_force(pair, tmp_path, existing):
    out = tmp_path / "out"
    out.mkdir()
    (out / existing).write_text("precious")
    base = ("loss", *pair[:2], "--scale", 2, "--grad-out", out)
    assert "--force" in fail(*base)
    assert [path.name for path in out.iterdir()] == [existing]
    assert (out / existing).read_text() == "precious"
    succeed(*base, "--force")
    assert len(list(out.iterdir())) == 3


def test_folder_that_cannot_be_written(pair, tmp_path, monkeypatch):
    base = ("loss", *pair[:2], "--scale", 2, "--grad-out")
    monkeypatch.setattr(infonce, "clip_loss_and_grad", None)  # refused before any work
    said = fail(*base, pair[0] / "out")  # under a regular file: not even root can
    assert "image.npy" in said
    fail(*base, tmp_path / "no" / "such" / "parent")
    fail(*base, pair[0])


def test_disk_that_is_too_small(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(infonce, "clip_loss_and_grad", None)
    usage = loss_command.shutil.disk_usage(tmp_path)._replace(free=2 * M * D * 4 - 1)
    monkeypatch.setattr(loss_command.shutil, "disk_usage", lambda _: usage)
    out = tmp_path / "out"
    assert "are free" in fail("loss", *pair[:2], "--scale", 2, "--grad-out", out)
    assert not out.exists()


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (MemoryError, 2)])
@pytest.mark.parametrize("existed", [False, True])
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
    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(loss_command, "_sync", full)
    out = tmp_path / "out"
    assert "No space left" in fail("loss", *pair[:2], "--scale", 2, "--grad-out", out)
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
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode == 130
    assert said == "infonce: interrupted\n"
    assert not out.exists()


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_large_inputs_stay_on_disk(tmp_path):
    """64 MiB a side in float16: neither another copy nor one in float32 comes on top."""
    rows = np.lib.format.open_memmap(tmp_path / "z.npy", "w+", np.float16, (2048, 16384))
    rows[:] = np.random.default_rng(0).standard_normal((1, 16384))
    rows.flush()
    done = subprocess.run(
        [sys.executable, "-m", "infonce", "loss", "z.npy", "z.npy", "--scale", "1e-4",
         "--workspace", "32MiB", "--json"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    memory = json.loads(done.stdout)["memory_bytes"]
    assert memory["inputs"] == 2**27
    assert memory["growth_over_inputs"] < memory["inputs"]
