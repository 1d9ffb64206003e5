"""`infonce loss` with several temperatures, and its plot."""

import json

import pytest
from command_line import close, fail, succeed

from infonce import reference
from infonce.cli import loss_report


def test_several_temperatures(pair, tmp_path):
    image, text, u, v = pair
    base = ("loss", image, text, "--temperature", "0.5, 0.1,2", "--no-normalize")
    report = json.loads(succeed(*base, "--json"))
    assert "value" not in report
    assert report["options"]["temperature"] == [0.5, 0.1, 2.0]
    assert report["options"]["scale"] == [2.0, 10.0, 0.5]
    for run, scale in zip(report["by_temperature"], (2.0, 10.0, 0.5), strict=True):
        expected = reference.clip(u, v, scale=scale)
        assert run["temperature"] == 1 / scale
        assert close(run["value"]["total"], expected.loss)
        assert close(run["lse"]["rows"]["max"], expected.lse[0].max())
        rows = reference.info_nce(u, v, scale=scale).loss
        assert close(run["value"]["unweighted"]["rows"], rows, 1e-4)
    one = json.loads(succeed("loss", image, text, "--temperature", 0.1, "--json"))
    assert one["retrieval"] == report["retrieval"]
    assert one["value"] == report["by_temperature"][1]["value"]
    table = succeed(*base)
    for run in report["by_temperature"]:
        line = next(x for x in table.splitlines() if x.startswith(f"│ {run['temperature']:>11.6g}"))
        assert f"{run['value']['total']:.6g}" in line
    assert "--temperature 0.5,0.1,2" in table
    assert f"top-1 {report['retrieval']['rows']['top1']:.2%}" in table


def test_a_plot_of_temperatures(pair):
    figures = pytest.importorskip("matplotlib.figure")
    report = json.loads(succeed("loss", *pair[:2], "--temperature", "0.5,0.1,2", "--json"))
    (axes,) = loss_report.figure(figures, report).axes
    total = axes.lines[0]
    assert list(total.get_xdata()) == [0.1, 0.5, 2.0]
    assert list(total.get_ydata()) == [report["by_temperature"][i]["value"]["total"]
                                       for i in (1, 0, 2)]  # fmt: skip
    assert [line.get_label() for line in axes.lines] == [
        "loss", "mean loss, rows", "mean loss, columns",
    ]  # fmt: skip


def test_temperatures_that_are_none(pair, tmp_path):
    base = ("loss", *pair[:2], "--temperature")
    assert "expected each once, got 0.1 more than once" in fail(*base, "0.1,0.1")
    assert "expected numbers separated by commas, got '0.1,x'" in fail(*base, "0.1,x")
    assert "--temperature: expected a positive number, got 0.0" in fail(*base, "0.1,0")
    assert "--grad-out: expected one --temperature" in fail(*base, "1,2", "--grad-out", tmp_path)
    assert "--plot: expected several values of --temp" in fail(*base, "1", "--plot", tmp_path / "x")
    file = tmp_path / "none" / "x.png"
    assert "expected a folder that exists" in fail(*base, "1,2", "--plot", file)
