"""What commands say of a newcomer's calls: files of several arrays, a loss in the wrong place, and
losses that no features could change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import fail, run, succeed

RNG = np.random.default_rng(0)


def unit_rows(rows: int) -> Any:
    z = RNG.standard_normal((rows, 4))
    return z / np.linalg.norm(z, axis=1, keepdims=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("loss", ["clip", "distill", "nt_xent", "sup_con"])
def test_a_file_of_several_arrays_lists_them(folder: Path, loss: str) -> None:
    """A loss of two arrays, given one file; and a loss of one array."""
    np.savez("ab.npz", image=unit_rows(8), text=unit_rows(8))
    np.save("labels.npy", np.arange(8) % 4)
    options = ["--loss", loss, "--temperature", 0.1]
    if loss == "sup_con":
        options += ["--labels", "labels.npy"]
    if loss == "distill":
        options += ["--teacher-query", "ab.npz:image", "--teacher-key", "ab.npz:text"]
    message = fail("loss", "ab.npz", *options)
    arrays = "ab.npz: expected one array, got the arrays image, text: choose one, as in ab.npz:"
    assert f"{arrays}image" in message
    takes_two = loss in ("clip", "distill")
    assert (f"{loss}: expected 2 embeddings (" in message) == takes_two
    succeed("loss", "ab.npz:image", *["ab.npz:text"] * takes_two, *options)


@pytest.mark.parametrize("command", ["loss", "bench"])
def test_the_loss_is_an_option(folder: Path, command: str) -> None:
    message = fail(command, "nt_xent", "a.npy", "b.npy")
    assert "expected --loss nt_xent, got nt_xent without the option" in message


@pytest.mark.parametrize("number", ["-5", "-0.5", "-5e3", "-1."])
def test_negative_sizes_are_no_options(number: str) -> None:
    for sizes in ((number, "512"), ("512", number, "--keys", "9")):
        message = fail("explain", "clip", *sizes)
        assert f"ROWS, FEATURES: expected positive integers, got {number}" in message
    assert "Invalid value for 'LOSS'" in fail("explain", "clipp", "512", "512")


NO_NEGATIVE = "warning: no row has a negative: the loss is 0 for any features"
NO_POSITIVE = "warning: no row has a positive: the loss is 0 for any features"
TEACHER = ["--teacher-query", "0.npy", "--teacher-key", "1.npy", "--teacher-scale", 1]
# loss, rows of its arrays, options, labels or ids, expected: a warning or None
CONSTANT: list[tuple[str, tuple[int, ...], list[Any], Any, str | None]] = [
    ("clip", (1, 1), [], None, NO_NEGATIVE),
    ("gte", (1, 1), [], None, NO_NEGATIVE),
    ("nt_xent", (2,), [], None, NO_NEGATIVE),
    ("info_nce", (4, 1), ["--labels"], np.zeros(4, int), NO_NEGATIVE),
    ("distill", (1, 1), TEACHER, None, NO_NEGATIVE),
    ("clip", (6, 6), ["--ids"], np.zeros(6, int), NO_NEGATIVE),
    ("nt_xent", (6,), ["--groups"], np.arange(6) % 3, NO_NEGATIVE),
    ("sup_con", (6,), ["--labels"], np.arange(6), NO_POSITIVE),
    ("info_nce", (6, 6), ["--labels"], np.full(6, -1), NO_POSITIVE),
    ("info_nce", (6, 6), ["--labels"], np.full((6, 2), -1), NO_POSITIVE),
    # losses that depend on their features
    ("siglip", (1, 1), [], None, None),
    ("gte", (2, 2), [], None, None),
    ("nt_xent", (4,), [], None, None),
    ("info_nce", (1, 2), [], None, None),
    ("sup_con", (6,), ["--labels"], np.arange(6) % 5, None),
    ("info_nce", (6, 6), ["--labels"], np.r_[np.full(5, -1), 3], None),
    ("clip", (6, 6), ["--ids"], np.r_[np.zeros(5, int), 1], None),
    ("distill", (2, 2), TEACHER, None, None),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "rows", "options", "values", "expected"), CONSTANT)
def test_a_loss_that_is_0_by_definition(
    folder: Path, loss: str, rows: tuple[int, ...], options: list[Any], values: Any,
    expected: str | None,
) -> None:  # fmt: skip
    files = [f"{i}.npy" for i in range(len(rows))]
    for file, n in zip(files, rows, strict=True):
        np.save(file, unit_rows(n))
    if values is not None:
        np.save("values.npy", values)
        options = [*options, "values.npy"]
    result = run("loss", *files, "--loss", loss, "--scale", 3, "--json", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr == ("" if expected is None else f"infonce: {expected}\n")
    value = float(result.stdout.partition('"total":')[2].partition(",")[0])
    assert (abs(value) < 1e-15) == (expected is not None)


def test_compare_is_an_option(folder: Path) -> None:
    """Of the command whose function is infonce.compare; a precision of a GPU leads there, too."""
    np.save("0.npy", unit_rows(4))
    for command in (["compare", "0.npy"], ["loss", "0.npy", "0.npy", "--precision", "fp16"]):
        result = run(*command)
        assert result.exit_code == 2
        assert "infonce loss --compare" in result.stderr


@pytest.mark.parametrize("equal", [(1,), (0, 1), ()])
def test_equal_rows(folder: Path, equal: tuple[int, ...]) -> None:
    """Also of more rows than are compared at a time."""
    for i in range(2):
        z = np.repeat(unit_rows(1), 2100, axis=0)
        if i not in equal:
            z[-1] = -z[-1]
        np.save(f"{i}.npy", z)
    result = run("loss", "0.npy", "1.npy", "--temperature", 0.1)
    names = ("image (0.npy)", "text (1.npy)")
    assert result.stderr.splitlines() == [
        f"infonce: warning: all rows of {names[i]} are equal: the loss cannot tell them apart"
        for i in equal
    ]
