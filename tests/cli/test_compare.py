"""`infonce loss --compare`, and random rows in place of files."""

import json

import numpy as np
import pytest
from command_line import PNG, close, fail, run, succeed

import infonce
from infonce.cli import comparison_report

RANDOM = ("loss", "--rows", 48, "--dim", 8, "--temperature", 0.05)


def test_random_rows_have_a_loss():
    report = json.loads(succeed(*RANDOM, "--cosine", 0.6, "--seed", 3, "--json"))
    image, text = infonce.comparison.random_pairs(48, 8, 0.6, 3)
    expected = infonce.clip_loss(image, text, temperature=0.05)
    assert close(report["value"]["total"], float(expected))
    source = "random unit rows, cosine 0.6, seed 3"
    assert report["inputs"]["image"] == {"source": source, "shape": [48, 8], "dtype": "float32"}
    table = succeed(*RANDOM, "--compare")
    assert "random unit rows, cosine 0.3, seed 0" in table


@pytest.mark.parametrize("loss", [*infonce.comparison.ALL_LOSSES])
def test_comparison_is_that_of_the_function(loss):
    found = infonce.compare(loss, rows=48, dim=8, temperature=(0.05, 0.2))
    options = ("--temperature", 0.2, "--loss", loss, "--compare", "--no-normalize")
    report = json.loads(succeed(*RANDOM, *options, "--json"))
    assert report["errors"] == json.loads(json.dumps(found.as_dict()))["errors"]
    assert report["losses"] == {str(t): value for t, value in found.losses.items()}
    assert report["options"]["temperature"] == [0.05, 0.2]
    printed = succeed(*RANDOM, *options)
    for line in found.table():
        assert all(cell in printed for cell in line)
    assert [line.split() for line in str(found).splitlines()[1:]] == [
        [cell for cell in line if cell] for line in found.table()[1:]
    ]


def test_comparison_of_files(pair, tmp_path):
    image, text, u, v = pair
    ids = np.arange(len(u)) % 9
    np.save(tmp_path / "ids.npy", ids)
    options = ("--temperature", "0.1,1", "--normalize", "--loss", "siglip", "--bias", -3, "--ids",
               tmp_path / "ids.npy", "--grad-dtype", "float16")  # fmt: skip
    report = json.loads(succeed("loss", image, text, "--compare", "--json", *options))
    found = infonce.compare(
        "siglip", u, v, temperature=(0.1, 1), normalize=True, bias=-3, ids=ids,
        grad_dtype=np.float16,
    )  # fmt: skip
    assert report["errors"] == json.loads(json.dumps(found.as_dict()))["errors"]
    assert report["inputs"]["text"]["source"] == str(text)
    scale, same = (
        json.loads(succeed("loss", image, text, *option, "--compare", "--json"))
        for option in (("--scale", 10), ("--temperature", 0.1))
    )
    assert scale["errors"] == same["errors"]


def test_a_plot_of_a_comparison(tmp_path):
    figures = pytest.importorskip("matplotlib.figure")
    file = tmp_path / "plot.png"
    succeed(*RANDOM, "--compare", "--plot", file)
    assert file.read_bytes().startswith(PNG)
    found = infonce.compare("clip", rows=64, dim=16, cosine=0.95, temperature=(0.1, 0.02))
    drawing = comparison_report.figure(figures, found, {"inputs": {}})
    loss, *_, lost = drawing.axes
    assert loss.get_xscale() == loss.get_yscale() == "log"
    names = [f"{e.precision}, {e.grad_dtype}" for e in found.errors[:7]]
    assert [line.get_label() for line in loss.lines] == names
    assert list(loss.lines[0].get_xdata()) == [0.02, 0.1]
    fp16 = names.index("fp16, float16")
    errors = found.errors[7 + fp16], found.errors[fp16]
    assert list(loss.lines[fp16].get_ydata()) == [e.loss_error for e in errors]
    assert lost.get_yscale() == "linear"
    assert list(lost.lines[fp16].get_ydata()) == [100 * e.worst("lost") for e in errors]
    assert lost.lines[fp16].get_ydata()[0] > 50


def test_features_that_are_not_finite(pair):
    image, text, u, _ = pair
    u[3, 4] = np.nan
    np.save(image, u)
    result = run("loss", image, text, "--scale", 1, "--compare")
    assert result.exit_code == 1
    assert "holds NaN or infinity in 1 of 48 rows: 3" in result.stderr


@pytest.mark.parametrize(("message", "arguments"), [
    ("Missing argument 'IMAGE'", ("--temperature", 1)),
    ("--rows, --dim: expected both for random rows", ("--rows", 4, "--temperature", 1)),
    ("--dim: expected an integer of at least 2, got int 1", ("--rows", 4, "--dim", 1)),
    ("--cosine: expected a number in [-1, 1]", ("--rows", 4, "--dim", 4, "--cosine", 2)),
    ("--method: expected none beside --compare", (*RANDOM[1:], "--compare", "--method", "naive")),
    ("--metrics: expected none beside --compare", (*RANDOM[1:], "--compare", "--metrics")),
    ("--grad-out: expected none beside", (*RANDOM[1:], "--compare", "--grad-out", "folder")),
    ("--temperature, --scale: expected one", (*RANDOM[1:], "--compare", "--scale", 2)),
    ("--temperature: expected a positive number", (*RANDOM[1:-1], 0, "--compare")),
    ("expected each once, got 0.05", (*RANDOM[1:], "--temperature", 0.05)),
    ("--force and --grad-dtype need --grad-out", (*RANDOM[1:], "--grad-dtype", "float16")),
])  # fmt: skip
def test_what_is_refused(message, arguments):
    assert message in fail("loss", *arguments)


def test_files_that_are_refused(pair, tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.ones((4, 3, 2)))
    error = fail("loss", path, path, "--compare", "--temperature", 1)
    assert f"({path}): expected 2 dimensions [rows, features], because" in error
    error = fail("loss", *pair[:2], "--rows", 4, "--dim", 4, "--temperature", 1)
    assert "--rows: expected no files of embeddings" in error
