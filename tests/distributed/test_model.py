"""The scaling model against recorded runs, and against what must hold."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from infonce.distributed import cost
from infonce.kernels.problem import WORKSPACE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_recorded_runs() -> None:
    """The model predicts recorded rings within 6%, and recorded gathers of two GPUs, each by one
    call over MPI, within 15%."""
    for name, predict, time, error in (
        ("ring", cost.predict_ring, "step_s", 0.06),
        ("ring-large", cost.predict_ring, "step_s", 0.06),
        ("exchanges-mpi", cost.predict_gather, "gather_mpi_s", 0.15),
    ):
        for run in json.loads((RESULTS / f"{name}.json").read_text())["results"]:
            rows = run["batch"] / run["gpus"]
            predicted = predict(rows, int(run["dim"]), int(run["gpus"]))
            assert abs(predicted.seconds / run[time] - 1) < error, (name, run)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, which is no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "ranks"))
    return importlib.import_module("model")


def test_program_runs_by_its_path() -> None:
    """As a file, not only as a module of a package."""
    path = ROOT / "distributed" / "demo.py"
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--dim" in done.stdout


def test_hidden_from_is_where_transfers_vanish() -> None:
    machine = replace(cost.Machine(), start=0.0)
    rows = cost.hidden_from(512, machine.inside, machine)
    more, fewer = (cost.predict_ring(f * rows, 512, 8, machine) for f in (1.01, 0.9))
    home = machine.inside.latency + 1.01 * rows * 512 * cost.DK_BYTES / machine.inside.bandwidth
    assert more.exposed == pytest.approx(home, rel=1e-9)
    assert fewer.exposed > home


def test_hierarchical_needs_less_of_the_network() -> None:
    slow = replace(cost.Machine(), across=cost.Link(30e-6, 4.5e9))
    for machine in (cost.Machine(), slow):
        ring, gather, hierarchical = (
            predict(4096, 512, 64, machine).exposed
            for predict in (cost.predict_ring, cost.predict_gather, cost.predict_hierarchical)
        )
        assert hierarchical < min(ring, gather)
    assert cost.predict_hierarchical(4096, 512, 8) == cost.predict_hierarchical(4096, 512, 8, slow)


def test_one_gpu_computes_only() -> None:
    machine = replace(cost.Machine(), start=0.0)
    step = cost.predict_ring(1000, 512, 1, machine)
    assert step.exposed == pytest.approx(0, abs=1e-12)
    assert step.efficiency == pytest.approx(1)


def test_exchanges_that_are_fastest(model: Any) -> None:
    """The gather where ranks have few rows or share a node; the hierarchical one on more nodes; the
    ring in the place of both where a network would carry all of dK late."""
    for ranks in (2, 8, 64, 1024):
        assert cost.fastest(512, 512, ranks) == "gather"
    for rows in (512, 2**17):
        assert cost.fastest(rows, 512, 8) == "gather"
    assert cost.fastest(8192, 512, 64) == "hierarchical"
    assert cost.fastest(2**17, 512, 1024) == "hierarchical"
    assert cost.fastest(2**17, 512, 1024, None, ("gather", "ring")) == "ring"
    rows = model.fastest_up_to("gather", 512, 1024)
    assert cost.fastest(0.9 * rows, 512, 1024) == "gather"
    assert cost.fastest(1.2 * rows, 512, 1024) == "hierarchical"
    rows = model.fastest_up_to("hierarchical", 512, 64)
    assert cost.fastest(0.9 * rows, 512, 64) == "hierarchical"
    assert cost.fastest(1.2 * rows, 512, 64) != "hierarchical"
    assert model.fastest_up_to("gather", 512, 2) == np.inf
    assert model.fastest_up_to("hierarchical", 512, 8) == 0


def test_gather_of_one_host_uses_its_links() -> None:
    one_host = replace(cost.Machine(), node_gpus=64)
    inside, across = (cost.predict_gather(512, 512, 64, m) for m in (one_host, cost.Machine()))
    assert inside.seconds < across.seconds
    assert inside.computing == across.computing


def test_bytes_of_a_gather() -> None:
    """Keys and sums of the others, sums of all for the own keys: on the worst of the ranks."""
    for rows in ([5, 5, 5], [7, 0, 3], [1]):
        worst = max((sum(rows) - own) * (3 + 4) + len(rows) * max(rows) * 4 for own in rows)
        assert cost.gather_bytes(rows, 3, 4) == worst


def test_bytes_of_a_hierarchical_exchange() -> None:
    """Grow with a node, not with the number of nodes."""
    two, four = (cost.hierarchical_bytes([5, 7] * nodes, 2, 3, 4) for nodes in (2, 4))
    assert two == four == 4 * 12 * 3 + (2 * 12 + 4 * 7) * 4
    assert cost.hierarchical_bytes([0, 3, 9, 1], 2, 1, 0) == 4 * 10


def test_sums_in_parts() -> None:
    assert cost.visit_count(cost.LEAST_VISIT_BYTES - 1, 7) == 1
    assert cost.visit_count(3 * cost.LEAST_VISIT_BYTES, 7) == 3
    assert cost.visit_count(99 * cost.LEAST_VISIT_BYTES, 7) == cost.MOST_VISITS
    assert cost.visit_count(99 * cost.LEAST_VISIT_BYTES, 2) == 2


def test_command(tmp_path: Path, model: Any) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "ring.png"
    done = CliRunner().invoke(model.main, ["--output", str(picture)])
    assert done.exit_code == 0, done.output
    assert "1024" in done.output
    assert "fastest up to so many rows a GPU" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="rows, dim, ranks"):
        cost.predict_ring(0, 512, 8)
    with pytest.raises(ValueError, match="rows, dim, workspace"):
        cost.predict_memory(0, 512)


def test_memory_grows_with_the_rows() -> None:
    rows, dim = 2**17, 512
    shard = rows * dim * cost.DK_BYTES  # dQ
    beyond = cost.predict_memory(rows, dim) - shard - cost.VECTOR_BYTES * rows
    assert 1.2 * WORKSPACE < beyond <= 1.5 * WORKSPACE
    assert cost.predict_memory(rows, dim, offload=True) == WORKSPACE + cost.VECTOR_BYTES * rows
    assert cost.predict_memory(1000, dim) < WORKSPACE / 10  # which is a ceiling
