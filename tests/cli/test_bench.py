"""`infonce bench`: what is said and recorded."""

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from command_line import PNG, close, fail, run, succeed
from gpu_problems import MISSING
from judge import LOSSES

from infonce.cli import main
from infonce.cli.bench import cpu, measure
from infonce.cli.bench import gpu as bench_gpu
from infonce.cli.bench.command import _figure


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Small products, and no pauses in which other contenders' threads stop spinning."""
    monkeypatch.setattr(cpu, "GEMM", 64)
    monkeypatch.setattr(cpu, "PAUSE", 0)


@pytest.mark.parametrize("kind", ["clip", "lit", "siglip", "info_nce", "nt_xent", "sup_con", "gte"])
def test_bench(tmp_path, kind):
    record = tmp_path / "bench.json"
    succeed(
        "bench", "--sizes", "32,64", "--dim", 16, "--loss", kind, "--repeat", 2,
        "--output", record,
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
        products = {"lit": 2, "siglip": 3, "nt_xent": 2, "sup_con": 2, "gte": 8}.get(kind, 4)
        assert close(row["gflops"], products * 2e-9 * row["size"] ** 2 * 16 / row["median_s"])
    assert len(report["gemm"]["gflops"]) == 4
    assert {"device", "versions", "commit", "date", "blas", "environment"} <= report.keys()
    assert list(tmp_path.iterdir()) == [record]


def test_bench_skips_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    arguments = ("--sizes", 64, "--repeat", 1, "--workspace", "32KiB", "--methods")
    printed = succeed("bench", *arguments, "fused,torch,numpy")
    assert "OPENBLAS_CORETYPE=Haswell" in printed
    assert "skipped 64 torch: import of torch halted" in printed
    assert "pip install 'infonce-kernels[torch]'" in printed
    assert "skipped 64 fused: " in printed
    output = tmp_path / "bench.json"
    output.write_text("an earlier run")
    result = run("bench", *arguments, "fused,torch", "--output", output)
    assert result.exit_code == 1
    assert "skipped 64 torch: " in result.stdout
    assert result.stderr.startswith("infonce: error: nothing was measured")
    assert output.read_text() == "an earlier run"


def test_bench_without_negatives(tmp_path):
    """A loss of 0 has no relative error."""
    record = tmp_path / "bench.json"
    options = ("--repeat", 1, "--loss", "nt_xent", "--methods", "tiled", "--output", record)
    succeed("bench", "--sizes", "2,6", *options)
    two, six = json.loads(record.read_text())["results"]
    assert "loss_error" not in two
    assert six["loss_error"] < 1e-5


def test_bench_goes_on_where_inputs_have_no_room(tmp_path):
    record = tmp_path / "bench.json"
    arguments = ("--repeat", 1, "--methods", "numpy,fused", "--output", record, "--sizes")
    printed = succeed("bench", *arguments, f"32,{10**12}")
    assert f"skipped {10**12} fused: needs" in printed
    assert [row["size"] for row in json.loads(record.read_text())["results"]] == [
        32, 32, 10**12, 10**12,
    ]  # fmt: skip
    result = run("bench", *arguments, 10**12)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "sizes", [(1024, 4096, 8192), (4096,), [1024 * 2**i for i in range(8)], (1000, 1200, 1500), ()]
)
def test_ticks_are_the_sizes(sizes):
    figures = pytest.importorskip("matplotlib.figure")
    rows = [
        {"size": n, "method": method, "median_s": 1e-9 * n * n, "peak_bytes": n}
        for n in sizes for method in ("fused", "naive")
    ]  # fmt: skip
    settings = {"loss": "clip", "dtype": "float32", "dim": 8}
    report = {"settings": settings, "device": "a machine", "blas": [], "results": rows}
    figure = _figure(figures, report)
    figure.canvas.draw()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        shown = [
            (tick.get_loc(), tick.label1.get_text())
            for minor in (False, True) for tick in
            (axes.xaxis.get_minor_ticks() if minor else axes.xaxis.get_major_ticks())
            if low <= tick.get_loc() <= high
        ]  # fmt: skip
        assert shown == [(n, str(n)) for n in sizes]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_record_is_written_though_nobody_reads_the_table(tmp_path, monkeypatch, capsys):
    record = tmp_path / "bench.json"
    options = ["--sizes", "32", "--repeat", "1", "--methods", "numpy", "--output", str(record)]
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main(["bench", *options])
    assert end.value.code == 1
    assert capsys.readouterr().err == "infonce: error: No space left on device\n"
    assert len(json.loads(record.read_text())["results"]) == 1


def test_sizes_are_printed_as_they_are_measured(monkeypatch):
    """Ctrl-C at the second size leaves the first."""
    compare = measure.compare

    def interrupted(bench, case, *arguments):
        if case.rows == 64:
            raise KeyboardInterrupt
        return compare(bench, case, *arguments)

    monkeypatch.setattr(measure, "compare", interrupted)
    result = run("bench", "--sizes", "32,64", "--repeat", 1, "--methods", "numpy,tiled")
    assert result.exit_code == 130
    assert "float32 32 x 256" in result.stdout
    assert all(f"\n{method} " in result.stdout for method in ("numpy", "tiled"))


def test_full_is_more(monkeypatch):
    def compare(bench, case, methods, repeat, progress):
        bench.time_gemm()
        compared.append((case.rows, repeat))
        return [{"size": case.rows, "method": "numpy", "skipped": "no time"}]

    monkeypatch.setattr(measure, "compare", compare)
    for options, sizes, rounds in (
        ((), [1024, 2048, 4096], 3), (("--full",), [1024, 4096, 8192], 5),
        (("--full", "--sizes", 64), [64], 5),
        (("--full", "--repeat", 1), [1024, 4096, 8192], 1),
    ):  # fmt: skip
        compared = []
        assert run("bench", *options).exit_code == 1
        assert compared == [(size, rounds) for size in sizes]


def test_bench_options(tmp_path):
    for bad in ("7", "abc", "0", "-1", "1e3", "64,", "", "1.5", "64 128"):
        error = fail("bench", "--sizes", bad)
        assert "'--sizes': expected even numbers of rows from 2, as in 1024,2048,4096" in error
        assert f"got {bad.split(',')[-1]!r}" in error
    assert "got 64 more than once" in fail("bench", "--sizes", "64,32,64")
    assert "got numpy more than once" in fail("bench", "--methods", "numpy,fused,numpy")
    assert "got 'numba'" in fail("bench", "--methods", "numpy,numba")
    folder = tmp_path / "no"
    assert f"{folder}: expected a folder" in fail("bench", "--output", folder / "bench.json")
    twice = ("--output", tmp_path / "a", "--plot", tmp_path / "no" / ".." / "a")
    folder.mkdir()
    if importlib.util.find_spec("matplotlib"):
        assert "--output, --plot: expected two files" in fail("bench", *twice)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.extras
@pytest.mark.skipif(not MISSING, reason="there is a GPU")
def test_bench_without_a_gpu(monkeypatch):
    error = fail("bench", "--gpu", "--sizes", 32)
    assert "expected a GPU that CuPy can use" in error
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install 'infonce-kernels[cuda13]'" in fail("bench", "--gpu", "--sizes", 32)
    assert "with --gpu, got 'numpy'" in fail("bench", "--gpu", "--methods", "products,numpy")


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", LOSSES)
def test_bench_on_a_gpu(tmp_path, monkeypatch, kind, dtype):
    torch = pytest.importorskip("torch")
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
