"""`infonce loss`: values against the reference, and nothing half-written when it fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from command_line import D, M, close, fail, run, succeed

from infonce import reference
from infonce.checks import validation
from infonce.cli import common
from infonce.cli.embeddings import open_embeddings

# --- values --------------------------------------------------------------------------------------


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
    assert close(report["value"]["unweighted"]["rows"], rows.loss, 1e-4)
    assert close(report["value"]["unweighted"]["columns"], columns.loss, 1e-4)
    logits = 3.0 * u.astype(np.float64) @ v.T.astype(np.float64)
    for side, x, lse in (("rows", logits, rows.lse), ("columns", logits.T, columns.lse)):
        rank = (x > np.diag(x)[:, None]).sum(1)
        assert report["retrieval"][side]["top1"] == (rank < 1).mean()
        assert report["retrieval"][side]["top5"] == (rank < 5).mean()
        assert close(report["lse"][side]["min"], lse.min())
        assert close(report["lse"][side]["mean"], lse.mean())
        assert close(report["lse"][side]["max"], lse.max())


def test_table_says_what_json_says(pair):
    image, text, u, v = pair
    words = " ".join(succeed("loss", image, text, "--scale", 3, "--method", "tiled").split())
    assert f"clip loss {reference.clip(u, v, scale=3.0).loss:.4g}" in words
    assert "image 48 x 12 float32" in words
    assert "method tiled" in words


def test_not_finite_is_null_and_fails(pair):
    image, text, u, v = pair
    u[3:] = np.nan
    v[5, 0] = np.inf
    np.save(image, u)
    np.save(text, v)
    result = run("loss", image, text, "--scale", 1, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["value"]["total"] is None
    assert report["retrieval"] is None  # NaN ranks nothing
    assert result.stderr == (
        f"infonce: error: the loss is nan: image ({image}) holds NaN or infinity in 45 of 48 rows: "
        f"3, 4, 5, 6, 7, ...; text ({text}) holds NaN or infinity in 1 of 48 rows: 5\n"
    )
    assert "row 3" in fail("loss", image, text, "--scale", 1, "--check-finite")


@pytest.mark.parametrize("method", ["naive", "fused", "tiled"])
def test_overflow_is_no_fault_of_a_row(pair, method):
    for path, z in zip(pair[:2], pair[2:], strict=True):
        np.save(path, z * np.float32(1e25))
    result = run("loss", *pair[:2], "--scale", 1, "--method", method)
    assert result.exit_code == 1
    assert "clip loss nan" in result.stdout
    assert len(result.stderr.splitlines()) == 1  # none of NumPy's warnings
    assert "features are finite, but products overflow float32" in result.stderr


@pytest.mark.parametrize("option", ["bias", "margin", "key-bias", "dim-weights"])
def test_an_option_that_overflows_is_named(pair, tmp_path, option):
    """Large products overflow before an option that is smaller."""
    image, text, u, _ = pair
    value, more = 1e300, {"bias": ("--loss", "siglip"), "dim-weights": ("--dims", f"4,{D}")}
    if option == "key-bias":
        np.save(value := tmp_path / "key_bias.npy", np.full(M, 1e300))
    given = (f"--{option}", "1e300,1" if option == "dim-weights" else value)
    base = ("loss", image, text, "--scale", 1, *more.get(option, ()), *given)
    result = run(*base)
    assert result.exit_code == 1
    assert f"features are finite, but --{option} overflows float32" in result.stderr
    np.save(image, np.float64(u) * 1e200)
    np.save(text, np.float64(u) * 1e101)
    result = run(*base)
    assert "overflow" in result.stderr
    assert f"--{option}" not in result.stderr


def test_arrays_of_options_that_are_not_finite_are_named(pair, tmp_path):
    image, text, u, _ = pair
    base = ("loss", image, text, "--scale", 1, "--loss", "info_nce")
    own, guide = np.ones((M, 2, D), np.float32), np.ones_like(u)
    own[5, 1, 0] = guide[7, 2] = np.nan
    np.save(tmp_path / "own.npy", own)
    np.save(tmp_path / "guide.npy", guide)
    for options, name, row in (
        (("--own", "own.npy"), "own.npy", 5),
        (("--guide", "guide.npy", "--guide", "guide.npy"), "guide.npy", 7),
    ):
        paths = (option if option.startswith("--") else tmp_path / option for option in options)
        result = run(*base, *paths)
        assert result.exit_code == 1
        assert f"{tmp_path / name}) holds NaN or infinity in 1 of {M} rows: {row}" in result.stderr


def test_padding_of_tokens_is_not_read(tmp_path):
    """Neither the warning of norms nor the reason of a loss that is not finite speaks of it."""
    rng = np.random.default_rng(0)
    tokens, mask = rng.standard_normal((6, 3, 4)), np.ones((6, 3), bool)
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    mask[:, 2] = False
    tokens[:, 2] = np.nan
    path, mask_path = tmp_path / "tokens.npy", tmp_path / "mask.npy"
    np.save(mask_path, mask)
    masks = ("--query-mask", mask_path, "--key-mask", mask_path)
    np.save(path, tokens)
    assert not run("loss", path, path, "--scale", 1, *masks).stderr
    np.save(path, tokens * 5)
    assert "norms of rows are 5 to 5 in" in run("loss", path, path, "--scale", 1, *masks).stderr
    tokens[4, 1] = np.inf
    np.save(path, tokens)
    error = run("loss", path, path, "--scale", 1, *masks).stderr
    assert f"image ({path}) holds NaN or infinity in 1 of 6 rows: 4; text" in error


def unit(z):
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def test_hint_at_normalize(pair):
    image, text, u, v = pair
    base = ("loss", image, text, "--scale", 1)
    result = run(*base)
    norms = np.linalg.norm(u, axis=1)
    assert result.exit_code == 0
    assert len(result.stderr.splitlines()) == 1
    assert f"{norms.min():.3g} to {norms.max():.3g} in image ({image})" in result.stderr
    assert f"in text ({text})" in result.stderr
    assert "--normalize" in result.stderr
    assert run(*base, "--json").stderr == result.stderr
    assert run(*base, "--normalize").stderr == ""
    assert run(*base, "--no-normalize").stderr == ""  # whoever asks for it knows
    np.save(image, unit(u).astype(np.float16))
    assert f"in image ({image})" not in run(*base).stderr
    v = unit(v)
    v[7] = 0  # such a row stays zero
    np.save(text, v.astype(ml_dtypes.bfloat16))
    assert run(*base).stderr == ""


@pytest.mark.parametrize("kind", ["siglip", "info_nce", "clip"])
def test_tables_have_no_empty_rows_or_columns(pair, kind):
    base = ("loss", *pair[:2], "--loss", kind, "--scale", 3)
    printed = succeed(*base)
    for words, losses in {
        "retrieval": {"info_nce", "clip"}, "log-sum-exp min": {"info_nce", "clip"},
        "judges each pair by itself": {"siglip"},
    }.items():  # fmt: skip
        assert (words in printed) == (kind in losses)
    assert ("columns" in printed.splitlines()[2]) == (kind == "clip")
    assert "- │" not in printed
    assert "retrieval" not in succeed(*base, "--no-metrics")


def test_sizes(pair):
    for text, expected in (
        ("1048576", 2**20), ("64KiB", 2**16), ("256MiB", 2**28), ("1.5 gib", 3 * 2**29),
        ("1TiB", 2**40), ("0.5 kB", 500), ("3MB", 3 * 10**6), ("2gb", 2 * 10**9), ("1TB", 10**12),
        ("9007199254740993", 2**53 + 1), ("9" * 40, 10**40 - 1),
    ):  # fmt: skip
        assert common.Bytes().convert(text, None, None) == expected
    for text in ("3 apples", "1.5.2GiB", "-1", "", "GiB", "1 G"):
        error = fail("loss", *pair[:2], "--scale", 1, "--workspace", text)
        assert "'--workspace'" in error
        assert "(B, KiB, MiB, GiB, TiB, kB, MB, GB, TB)" in error
        assert f"got {text!r}" in error
    shown = [validation.human(size) for size in (None, 1023, 1536, 2**30, 5 * 2**39)]
    assert shown == ["unknown", "1023 B", "1.5 KiB", "1.0 GiB", "2.5 TiB"]


# --- files ---------------------------------------------------------------------------------------


def test_formats_hold_the_same(pair, tmp_path):
    """The name of a .npy file may end in anything. Files that can be mapped are not read."""
    image, _, u, v = pair
    safetensors = pytest.importorskip("safetensors.numpy")
    shutil.copy(image, tmp_path / "image.dat")
    np.savez(tmp_path / "one.npz", u)
    np.savez(tmp_path / "two.npz", u=u, v=v)
    safetensors.save_file({"u": u}, tmp_path / "one.safetensors")
    safetensors.save_file({"v": v, "u": u}, tmp_path / "two.safetensors")
    for i, part in enumerate(np.array_split(u, 12)):
        (tmp_path / "shards").mkdir(exist_ok=True)
        np.save(tmp_path / "shards" / f"img_emb_{i}.npy", part)  # 10 after 9, not after 1
    for name in (
        "image.npy", "image.dat", "one.npz", "two.npz:u", "one.safetensors", "two.safetensors:u",
        "shards",
    ):  # fmt: skip
        array = open_embeddings(str(tmp_path / name))
        np.testing.assert_array_equal(array, u)
        if name.startswith(("image", "one.s", "two.s")):
            assert isinstance(array, np.memmap)


def test_bfloat16(pair, tmp_path):
    """np.save and np.savez store two raw bytes an element."""
    safetensors = pytest.importorskip("safetensors.numpy")
    u = pair[2].astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "u.npy", u)
    np.savez(tmp_path / "u.npz", u=u)
    safetensors.save_file({"u": u}, tmp_path / "u.safetensors")
    for name in ("u.npy", "u.npz", "u.safetensors"):
        array = open_embeddings(str(tmp_path / name))
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array.view(np.uint16), u.view(np.uint16))


@pytest.mark.parametrize("file", ["a.npz", "a.npz:b.npz", "a:b.npz"])
def test_colons_in_names(pair, tmp_path, file):
    """Of files and of arrays. Of two files that a name may mean, the longer name counts."""
    np.savez(tmp_path / "a.npz", x=pair[3])
    np.savez(tmp_path / file, pair[2])
    np.testing.assert_array_equal(open_embeddings(str(tmp_path / file)), pair[2])
    arrays = {key: pair[2] + i for i, key in enumerate(("b", "x:y", "x:", "", "c.npz:z"))}
    np.savez(tmp_path / file, **arrays)
    for key, array in arrays.items():
        np.testing.assert_array_equal(open_embeddings(f"{tmp_path / file}:{key}"), array)


def write(path, content):
    """Bytes, an array, arrays of an archive by their names, or files of a folder by theirs."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict) and path.suffix == ".npz":
        np.savez(path, **content)
    elif isinstance(content, dict):
        path.mkdir()
        for name, array in content.items():
            np.save(path / f"{name}.npy", array)
    elif content is not None:
        np.save(path, content, allow_pickle=True)


def bad_inputs(data, u):
    """File or folder -> (what is in it, part of the message). `data`: bytes of a .npy file."""
    code, wide, table = np.array([{}], object), np.hstack([u, u]), b"1,2\n3,4\n"
    return {
        "truncated.npy": (data[:-40], "expected a whole .npy"),
        "header.npy": (data[:40], "expected a whole .npy"),
        "empty.npy": (b"", "expected a whole .npy"),
        "magic.npy": (b"these are no numbers at all", "magic"),
        "pickle.npy": (code, "objects"),
        "integers.npy": (u.astype(np.int64), "got int64"),
        "flat.npy": (u.ravel(), "flat.npy): expected 2 dimensions"),
        "wide.npy": (wide, "expected width 24"),
        "rows.npy": (u[:-1], "expected 47 rows"),
        "two.npz": ({"a": u, "b": u}, "two.npz:a"),
        "two.npz:c": (None, "it has a, b"),
        "truncated.npz": (b"PK" + data, "expected a whole .npz"),
        "pickle.npz": ({"a": code}, "pickle.npz: expected a whole .npz file of numbers"),
        "many.npz": (dict.fromkeys("abcdefghi", u), "got the arrays a, b, c, d, e, ..."),
        "array.npz": (data, "expected a whole .npz"),
        "table.csv": (table, "table.csv: expected a .npy, .npz, .safetensors, .pt or .parquet"),
        "array": (table, "array: expected a .npy, .npz, .safetensors, .pt or .parquet file, or"),
        "bad.safetensors": (b"\xff" * 60, "expected a whole .safetensors"),
        "missing.npy": (None, "no such file"),
        "width": ({"s_0": u, "s_1": u[:, 1:]}, "expected width 12 and dtype float32"),
        "dtype": ({"s_0": u, "s_1": np.float64(u)}, "got width 12 and dtype float64"),
        "flat": ({"s_0": u[0]}, "expected 2 dimensions"),
        "series": ({"img_0": u, "text_0": u}, "img_#.npy, text_#.npy"),
        "equal": (dict.fromkeys(("s_2", "s_1", "s_01"), u),
                  "equal: expected shards of different numbers, got s_01.npy and s_1.npy"),
        "none": ({}, "got none"),
    }  # fmt: skip


def test_bad_inputs(pair, tmp_path):
    pytest.importorskip("safetensors")
    out = tmp_path / "out"
    for name, (content, message) in bad_inputs(pair[0].read_bytes(), pair[2]).items():
        write(tmp_path / name, content)
        error = fail("loss", tmp_path / name, pair[1], "--scale", 1, "--grad-out", out)
        assert message in error, (name, error)
        assert not out.exists(), name


def test_names_that_are_no_file(pair, tmp_path):
    assert "got an empty name" in fail("loss", "", pair[1], "--scale", 1)
    if os.name == "posix":
        os.mkfifo(tmp_path / "pipe.npy")  # would wait for whoever writes to it
        assert "pipe.npy: expected a file" in fail("loss", tmp_path / "pipe.npy", pair[1])
    base = ("loss", *pair[:2], "--scale", 1, "--loss", "info_nce")
    missing = tmp_path / "missing.npy"
    error = fail(*base, "--ids", missing)
    assert error == f"infonce: error: {missing}: no such file or folder\n"


@pytest.mark.skipif(os.name != "posix", reason="permissions of a POSIX system")
def test_file_that_may_not_be_read(pair, monkeypatch):
    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(np.lib.format, "open_memmap", refused)  # root may read everything
    error = fail("loss", *pair[:2], "--scale", 1)
    assert error == f"infonce: error: {pair[0]}: Permission denied\n"


def test_bad_options(pair):
    base = ("loss", *pair[:2])
    for options, words in (
        (("--scale", 1, "--temperature", 1), "--temperature, --scale: expected one of them, got b"),
        ((), "--temperature, --scale: expected one of them, got neither"),
        (("--scale", 0), "--scale: expected a positive"),
        (("--scale", 1, "--force"), "need --grad-out"),
        (("--scael", 1), "No such option"),
        (("--scale", 2, "--bias", -3), "--bias is of siglip"),
        (("--scale", 1, "--ids", pair[0]), f"--ids ({pair[0]}): expected integers"),
        (("--scale", 1, "--loss", "info_nce", "--labels", pair[0]),
         f"--labels ({pair[0]}): expected integers"),
        (("--scale", 1, "--workspace", 0), "'--workspace': expected a positive number of bytes"),
        (("--scale", 1, "--workspace", "4"), "workspace"),
    ):  # fmt: skip
        assert words in fail(*base, *options)
    fail("lose")


def test_missing_library_names_its_extra(pair, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "u.safetensors").touch()
    error = fail("loss", tmp_path / "u.safetensors", pair[1], "--scale", 1)
    assert "pip install 'infonce-kernels[safetensors]'" in error
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install 'infonce-kernels[demo]'" in fail("demo", "--output", tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'infonce-kernels[plot]'" in fail("bench", "--plot", tmp_path / "x.png")


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_large_inputs_stay_on_disk(tmp_path):
    """8 and 32 MiB a side in float16: neither another copy nor one in float32 comes on top. What
    libraries take is the same for both."""
    growth = {}
    for n in (256, 1024):
        rows = np.lib.format.open_memmap(tmp_path / "z.npy", "w+", np.float16, (n, 16384))
        rows[:] = np.random.default_rng(0).standard_normal((1, 16384))
        rows.flush()
        done = subprocess.run(
            [sys.executable, "-m", "infonce", "loss", "z.npy", "z.npy", "--scale", "1e-4",
             "--workspace", "32MiB", "--json"],
            capture_output=True, text=True, cwd=tmp_path, check=True,
        )  # fmt: skip
        memory = json.loads(done.stdout)["memory_bytes"]
        assert memory["inputs"] == 2 * n * 16384 * 2
        growth[n] = memory["growth_over_inputs"]
    assert growth[1024] - growth[256] < 2**24  # of 48 MiB more inputs
