"""The command line: values against the reference, and nothing half-written when it fails."""

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
from click.testing import CliRunner
from judge import LOSSES, arguments, pairs
from test_gpu import MISSING

import infonce
from infonce import reference
from infonce.cli import common, main, measure
from infonce.cli.embeddings import open_embeddings

M, D = 48, 12
loss_command = importlib.import_module("infonce.cli.loss")
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def succeed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments, code=2):
    """One line on stderr, nothing on stdout, and the exit code."""
    result = run(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("infonce: ")
    return result.stderr


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


def close(value, expected, rtol=2e-6):
    return value == pytest.approx(expected, rel=rtol)


# --- help ----------------------------------------------------------------------------------------


def test_help_names_every_command():
    assert all(f"\n  {name} " in succeed() for name in ("demo", "loss", "bench", "info"))


@pytest.mark.parametrize("command", ["demo", "loss", "bench", "info"])
def test_help_of_command(command):
    assert f"Usage: main {command}" in succeed(command, "--help")


def test_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "infonce", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"infonce, version {infonce.__version__}\n"


# --- loss: values --------------------------------------------------------------------------------


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


# --- loss: files ---------------------------------------------------------------------------------


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


# --- loss: gradients -----------------------------------------------------------------------------


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


# --- demo, bench, info ---------------------------------------------------------------------------


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
    fail("demo", "--output", tmp_path)
    fail("demo", "--temperature", 0, "--output", tmp_path / "demo.png")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(infonce, "clip_loss_and_grad", interrupt)
    fail("demo", "--output", tmp_path / "demo.png", code=130)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["clip", "lit", "siglip", "info_nce", "nt_xent"])
def test_bench(tmp_path, monkeypatch, kind):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(importlib.import_module("infonce.cli.bench"), "GEMM", 64)
    record, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    succeed(
        "bench", "--sizes", "32,64", "--dim", 16, "--loss", kind, "--repeat", 2,
        "--output", record, "--plot", plot,
    )  # fmt: skip
    report = json.loads(record.read_text())
    assert [row["size"] for row in report["results"]] == 6 * [32] + 6 * [64]
    for row in report["results"]:
        if row["method"] == "torch" and "skipped" in row:
            continue
        if row["method"] == "products":
            assert "loss_error" not in row
            continue
        assert row["loss_error"] < 1e-5, row
        assert row["gradient_error"] < 1e-5, row
        assert len(row["seconds"]) == 2
        assert row["min_s"] <= row["median_s"] <= row["max_s"]
        products = {"lit": 2, "siglip": 3, "nt_xent": 2}.get(kind, 4)
        assert close(row["gflops"], products * 2e-9 * row["size"] ** 2 * 16 / row["median_s"])
    assert len(report["gemm"]["gflops"]) == 4
    assert {"device", "versions", "commit", "date", "blas", "environment"} <= report.keys()
    assert plot.read_bytes().startswith(PNG)
    assert sorted(tmp_path.iterdir()) == [record, plot]


def test_bench_skips_and_says_why(monkeypatch):
    monkeypatch.setattr(importlib.import_module("infonce.cli.bench"), "GEMM", 64)
    monkeypatch.setitem(sys.modules, "torch", None)
    arguments = ("--sizes", 64, "--repeat", 1, "--methods", "fused,torch", "--workspace", "32KiB")
    printed = succeed("bench", *arguments)
    assert "skipped 64 torch: import of torch halted" in printed
    assert "skipped 64 fused: " in printed


def test_bench_options(tmp_path):
    assert "even" in fail("bench", "--sizes", "7")
    assert "got 'numba'" in fail("bench", "--methods", "numpy,numba")
    fail("bench", "--output", tmp_path / "no" / "bench.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not MISSING, reason="there is a GPU")
def test_bench_without_a_gpu(monkeypatch):
    said = fail("bench", "--gpu", "--sizes", 32)
    assert "expected a GPU that CuPy can use" in said
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install 'infonce[cuda12]'" in fail("bench", "--gpu", "--sizes", 32)
    assert "with --gpu, got 'numpy'" in fail("bench", "--gpu", "--methods", "products,numpy")


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", LOSSES)
def test_bench_on_a_gpu(tmp_path, monkeypatch, kind, dtype):
    torch = pytest.importorskip("torch")
    bench_gpu = importlib.import_module("infonce.cli.bench_gpu")
    monkeypatch.setattr(bench_gpu, "GEMM", 256)
    record, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    printed = succeed(
        "bench", "--gpu", "--sizes", "64,256", "--dim", 64, "--loss", kind, "--repeat", 1,
        "--dtype", dtype, "--methods", "products,naive,fused,tiled,captured,panels,torch",
        "--output", record, "--plot", plot,
    )  # fmt: skip
    report = json.loads(record.read_text())
    assert report["gpu"]["model"] in printed
    assert [row["size"] for row in report["results"]] == 7 * [64] + 7 * [256]
    for row in report["results"]:
        if not torch.cuda.is_available() and row["method"] in ("panels", "torch"):
            continue
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"], row
        if row["max_s"] < bench_gpu.SMALL:  # longer calls have no clock besides the device's
            assert row["wall_s"] > 0, row
        assert row["peak_bytes"] is None if row["method"] == "captured" else row["peak_bytes"] > 0
        if row["method"] != "products":
            bound = {"bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-11}[dtype]
            assert row["gradient_error"] < bound, row
            assert row["loss_error"] < bound, row
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_bare_products(dtype):
    import cupy

    contenders = importlib.import_module("infonce.cli.contenders_gpu")
    rng = np.random.default_rng(0)
    kind = measure.DTYPES[dtype]
    a, b = (rng.integers(-4, 5, shape).astype(kind) for shape in ((24, 40), (40, 16)))
    want = a.astype(np.float64) @ b.astype(np.float64)
    for turned_a in (False, True):
        for turned_b in (False, True):
            out = cupy.full((24, 16), np.nan, np.float64 if dtype == "float64" else np.float32)
            first, second = a.T if turned_a else a, b.T if turned_b else b
            operands = [cupy.asarray(np.ascontiguousarray(z)) for z in (first, second)]
            contenders.product(
                contenders.PRECISION[dtype], out, *operands,
                transpose_a=turned_a, transpose_b=turned_b,
            )  # fmt: skip
            assert np.array_equal(out.get(), want)  # small integers: exact in every arithmetic
    with pytest.raises(ValueError, match="bf16x3"):
        contenders.product("bf16x3", out, out, out)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("gradient", [True, False])
def test_panels_judge_like_the_reference(monkeypatch, kind, gradient):
    torch = pytest.importorskip("torch")
    contenders = importlib.import_module("infonce.cli.contenders_gpu")
    monkeypatch.setattr(contenders, "PANEL", 7)
    case = measure.Case(loss_command.LOSSES[kind], 24, 5, "float64", gradient=gradient, scale=4.0)
    features = arguments(kind, *pairs("partly aligned", 24, 24, 5, np.float64, 0))
    if kind == "nt_xent":
        features = (features[0][:24],)
    want = getattr(reference, kind)(*features, scale=4.0)
    loss, gradients = contenders.by_panels(case, list(map(torch.as_tensor, features)),
                                           torch.float64)  # fmt: skip
    assert close(float(loss), want.loss)
    expected = case.gradients_of([want.grads[name] for name in case.kind.arguments])
    assert len(gradients) == len(expected) * gradient
    for got, wanted in zip(gradients, expected, strict=False):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-14)


class Pretended:
    """A place to measure where everything takes as long as it is told to."""

    methods = ("quick", "slow", "missing")

    def inputs(self, case):
        return [[np.full((case.rows, case.dim), 2.0)]]

    def reference(self, case, features):
        return 4.0, [features[0]]

    def contender(self, method, case, inputs):
        if method == "missing":
            raise ImportError("not\n here")
        return lambda: (5.0, [1.5 * inputs[0][0]]) if method == "quick" else (4.0, inputs[0])

    def memory(self, method, run):
        return {"peak_bytes": 7}

    def turn(self, run):
        quick = run()[0] == 5.0
        return {"seconds": [1.0, 3.0, 2.0], "wall": [5.0]} if quick else {"seconds": [8.0]}

    def yardstick(self):
        pass

    def refusals(self):
        return (ImportError,)


def test_rounds_of_a_comparison():
    case = measure.Case(loss_command.LOSSES["clip"], 4, 2)
    quick, slow, missing = measure.compare(Pretended(), case, Pretended.methods, 2)
    assert quick["seconds"] == [1.0, 3.0, 2.0] * 2
    assert (quick["median_s"], quick["min_s"], quick["max_s"]) == (2.0, 1.0, 3.0)
    assert quick["wall_s"] == 5.0
    assert "wall_s" not in slow
    assert close(quick["gflops"], 8 * 4 * 4 * 2 / 2.0 / 1e9)
    assert close(quick["loss_error"], 0.25)
    assert close(quick["gradient_error"], 0.5)
    assert slow["loss_error"] == slow["gradient_error"] == 0
    assert missing == {"size": 4, "method": "missing", "skipped": "not here"}


def test_bench_prints_the_environment(monkeypatch):
    monkeypatch.setattr(importlib.import_module("infonce.cli.bench"), "GEMM", 64)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    printed = succeed("bench", "--sizes", 32, "--repeat", 1, "--methods", "numpy")
    assert "OPENBLAS_CORETYPE=Haswell" in printed


def test_info():
    printed = succeed("info")
    assert infonce.__version__ in printed
    assert "scikit-learn" in printed
    report = json.loads(succeed("info", "--json"))
    assert report["versions"]["infonce"] == infonce.__version__
    assert report["backends"]["cpu"].startswith("available")
    assert report["workspace_bytes"] == 256 * 2**20


def test_info_survives_whatever_is_missing(monkeypatch):
    from importlib import metadata

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    for name in ("cupy", "infonce.kernels.cpu", "infonce.kernels.cpu_epilogues"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("threadpoolctl.threadpool_info", list)
    printed = succeed("info")
    assert "pip install 'infonce[safetensors]'" in printed
    assert "unavailable" in printed


# --- recorded results ----------------------------------------------------------------------------


def test_render(tmp_path):
    script = Path(__file__).parents[1] / "benchmarks" / "render.py"
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results:a begin -->\nold\n<!-- results:a end -->\nafter\n")
    record = {
        "device": "a machine", "versions": {"numpy": "2", "torch": None}, "commit": "abc",
        "date": "today", "settings": {"dim": 8},
        "results": [
            {"method": "x", "median_s": 0.0125, "peak_bytes": 3 * 2**20, "seconds": [1]},
            {"method": "y", "gemm_share": 0.5, "loss_error": 2e-7, "gflops": 123.456},
        ],
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(record))

    def render(*arguments):
        command = [sys.executable, script, "--readme", readme, "--results", tmp_path, *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert render("--check") == 1
    assert "old" in readme.read_text()
    assert render() == 0
    assert readme.read_text() == (
        "before\n<!-- results:a begin -->\n"
        "a machine; numpy 2; commit abc; today.\nSettings: dim 8.\n\n"
        "| method | median (ms) | peak (MiB) | gemm share | loss error | gflops |\n"
        "|---|---|---|---|---|---|\n"
        "| x | 12.5 | 3.0 | - | - | - |\n"
        "| y | - | - | 50% | 2e-07 | 123.5 |\n"
        "<!-- results:a end -->\nafter\n"
    )
    assert render("--check") == 0


def test_render_of_contenders_side_by_side(tmp_path):
    pytest.importorskip("matplotlib")
    script = Path(__file__).parents[1] / "benchmarks" / "render.py"
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:gpu begin -->\n<!-- results:gpu end -->\n")

    def row(size, method, **measured):
        kind = {"section": "clip", "table": "Half", "loss": "clip", "dtype": "bfloat16"}
        about = {"precision": "auto", "gradient": True, "dim": 512, "size": size}
        return {**kind, **about, "method": method, **measured}

    record = {
        "device": "a GPU", "gpu": {"driver": "1.2", "cuda": "3.4"}, "versions": {"numpy": "2"},
        "commit": "abc", "date": "today", "settings": {}, "environment": {},
        "gemm": {"size": 16, "gflops": [700e3, 800e3, 790e3]},
        "results": [
            row(8, "auto", median_s=2e-3, wall_s=3e-3, gflops=5e5, peak_bytes=2**21, goal_s=2.5e-3,
                timed="wall_s", of_products_share=0.5, loss_error=1e-7, gradient_error=2e-3),
            row(8, "products", median_s=4e-3, gflops=2.5e5, peak_bytes=0, of_products_share=1.0),
            row(8, "torch", skipped="no memory"),
            row(16, "auto", median_s=8e-3, gflops=5e5, peak_bytes=2**22, goal_s=9e-3,
                timed="median_s"),
        ],
    }  # fmt: skip
    (tmp_path / "gpu.json").write_text(json.dumps(record))
    command = [sys.executable, script, "--readme", readme, "--results", tmp_path]
    subprocess.run(command, check=True)
    lines = readme.read_text().splitlines()
    assert "a GPU, driver 1.2, CUDA 3.4; numpy 2; commit abc; today." in lines
    assert "cuBLAS's bf16 product of 16 rows: 790 TFLOP/s." in lines
    assert (
        "| Half | goal | of the bare products | TFLOP/s | infonce | bare products | torch |"
        in lines
    )
    assert (
        "| clip bfloat16 8 x 512 | 2.5 missed | 0.50 | 500 | 2 (3), 2 MiB<br>1e-07, 2e-03 "
        "| 4, 0 MiB | - |"
    ) in lines
    assert "| clip bfloat16 16 x 512 | 9 reached | - | 500 | 8, 4 MiB |  |  |" in lines
    assert (tmp_path / "gpu.png").read_bytes().startswith(PNG)
    subprocess.run([*command, "--check"], check=True)
