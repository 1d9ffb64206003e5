"""The losses over ranks, in processes that mpiexec starts (tests/support/ranks*.py,
options_over_ranks.py)."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from trouble import TROUBLES, Trouble

HERE = Path(__file__).parent
PATHS = (str(HERE.parent / "support"), str(HERE), os.environ.get("PYTHONPATH", ""))
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
LIMIT = 100  # seconds for one start of mpiexec
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def mpi_missing() -> str | None:
    """Why nothing can be started here."""
    if MPIEXEC is None:
        return "no mpiexec: pip install 'infonce-kernels[mpi]'"
    done = subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True
    )
    return f"mpi4py: {done.stderr.strip().splitlines()[-1]}" if done.returncode else None


@pytest.fixture(scope="module", autouse=True)
def _mpi() -> None:
    if reason := mpi_missing():
        pytest.skip(reason)


def command(ranks: int, *arguments: str, shell: tuple[str, ...] = ()) -> list[str]:
    assert MPIEXEC is not None
    program = [sys.executable, "-W", "error", "-W", "ignore:norms of rows", *arguments]
    flags: list[str] = []
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        flags = ["--allow-run-as-root", "--oversubscribe"]
    return [MPIEXEC, *flags, "-n", str(ranks), *shell, *program]


ENVIRONMENT = {**os.environ, "INFONCE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(PATHS)


def checking(ranks: int, *checks: str, shell: tuple[str, ...] = ()) -> list[str]:
    """The command for `ranks.main`."""
    return command(ranks, "-c", "import ranks; ranks.main()", *checks, shell=shell)


def run(
    ranks: int, *checks: str, shell: tuple[str, ...] = (), limit: float = LIMIT
) -> tuple[int, str]:
    """(exit status, everything the ranks said); none of them is left behind."""
    done = subprocess.run(
        checking(ranks, *checks, shell=shell), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=limit, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    output = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # colours of Open MPI's mpiexec
    no_orphans(output)
    return done.returncode, output


def printed(command: list[str]) -> str:
    """What a program prints that succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def no_orphans(output: str) -> None:
    for process in map(int, re.findall(r"^process (\d+)$", output, re.MULTILINE)):
        for _ in range(50):
            if not Path(f"/proc/{process}").exists():
                break
            time.sleep(0.1)
        assert not Path(f"/proc/{process}").exists(), f"process {process} is left behind\n{output}"


def all_pass(ranks: int, *checks: str, limit: float = LIMIT) -> None:
    status, output = run(ranks, *checks, limit=limit)
    passed = Counter(re.findall(r"^passed (.*)$", output, re.MULTILINE))
    assert passed == dict.fromkeys(checks, ranks), output
    assert status == 0, output


# What so many ranks do. They start once, which takes seconds a process
CHECKS = {
    2: [
        "ranks_trouble:memory", "options_over_ranks:cases", "options_over_ranks:limits:host",
        "options_over_ranks:ends",
        "ranks:accuracy:host:mpi:ring", "ranks_trouble:functions", "ranks_trouble:rooms",
    ],
    4: [
        "options_over_ranks:cases", "options_over_ranks:limits:host",
        "options_over_ranks:not_finite", "ranks:accuracy:host:mpi:ring",
        "ranks:accuracy:host:mpi:gather", "ranks_trouble:mismatch", "ranks_trouble:freed",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "ranks", [n if n == 2 else pytest.param(n, marks=pytest.mark.slow) for n in CHECKS]
)
def test_equal_to_one_process(ranks: int) -> None:
    all_pass(ranks, *CHECKS[ranks], limit=300)


# mpiexec ends all ranks when one dies. Here it does not see that at once: a shell stands between,
# and the other ranks have to find out for themselves.
SHELL = ("sh", "-c", '"$0" "$@" || { status=$?; sleep 4; exit $status; }')
# The end of rank 0 ends all
UNTIL_RANK_0_ENDS = (
    "sh", "-c",
    '"$0" "$@" || { status=$?; [ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 0 ] || exec sleep 99; '
    "exit $status; }",
)  # fmt: skip
WORDS = {
    "killed": r"rank 1 \(process \d+ on .*\) is gone",
    "raises": "rank 1 failed: OSError: no more of this",
    "interrupted": "rank 1 failed: KeyboardInterrupt",
    "killed before": r"rank 1 \(process \d+ on .*\) is gone",
    "raises before": "rank 1 has ended: OSError: no more of this",
    "exits before": "rank 1 has ended",
    "stopped": "(.*)",
}


def test_rank_in_trouble() -> None:
    """The others say which rank and what: of one that stops or misses the first call at the
    timeout, of others soon; and nobody stays."""
    status, output = run(8, "ranks_trouble:troubles", shell=UNTIL_RANK_0_ENDS)
    assert status != 0
    for what, exchange, members in TROUBLES[1:]:
        low, high = (2, 7) if what == "stopped" else (0, 10)
        calls = re.findall(rf"^{what} {exchange}: rank \d call 1$", output, re.M)
        assert len(calls) == len(members), f"{what} {exchange}\n{output}"
        for rank in {*range(len(members))} - {1}:
            says = rf"^{what} {exchange}: rank {rank}"
            error = re.search(rf"{says} after ([\d.]+) s: RankError: {WORDS[what]}", output, re.M)
            assert error is not None, f"{says}\n{output}"
            assert low <= float(error[1]) < high, f"{says}\n{output}"
            assert re.search(f"{says} then: this communicator is out of step", output, re.M)
            if what == "stopped":  # and no rank that waits is named
                named = re.sub(r"^rank \d+ waited 2 s for ", "", error[2])
                assert set(re.findall(r"rank (\d+)", named)) == {"1"}, f"{says}\n{output}"
    for name, ranks in (("misses", (0, 2)), ("step", (0,))):
        for rank in ranks:
            words = rf"rank {rank} waited 2 s for (another rank|rank 1);"
            error = re.search(rf"^{name}: rank {rank} after ([\d.]+) s: {words}", output, re.M)
            assert error is not None, output
            assert 2 <= float(error[1]) < 3, output


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24 if THOROUGH else 4))
def test_rank_in_trouble_at_any_point(seed: int) -> None:
    """The other ranks name the rank in trouble before the timeout, at any point of a call."""
    trouble, timeout = Trouble(seed), 3.0
    check = f"ranks_trouble:at_any_point:{seed}:{timeout:g}"
    status, output = run(trouble.ranks, check, shell=SHELL)
    assert status != 0
    trouble.assert_named(output, timeout)


def test_ctrl_c_ends_all_ranks() -> None:
    with subprocess.Popen(
        checking(3, "ranks_trouble:trouble:everyone:60:auto"), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, start_new_session=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        output = ""
        while "now" not in output:
            line = job.stdout.readline()
            assert line, output
            output += line
        began = time.monotonic()
        os.killpg(job.pid, signal.SIGINT)
        rest, _ = job.communicate(timeout=30)
        assert time.monotonic() - began < 20
    assert job.returncode != 0
    no_orphans(output + rest)


@functools.cache
def gpus() -> int:
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


@pytest.fixture
def need_gpu() -> None:
    if not gpus():
        pytest.skip("no GPU that CuPy can use")


# What so many ranks do on GPUs. They start once: a start, and the first call of each kernel, take
# seconds. In the hierarchical exchange, two ranks are nodes of one GPU each
ON_GPUS = ["options_over_ranks:limits:gpu", "options_over_ranks:table:gpu"]

GPU_CHECKS = {
    1: ON_GPUS,
    2: [
        *[
            f"ranks:accuracy:gpu:{transport}:{exchange}"
            for transport in ("auto", "staged") for exchange in ("ring", "gather", "hierarchical")
        ],
        *ON_GPUS, "options_over_ranks:limits:offload to gpu",
    ],
    4: [*ON_GPUS, "ranks:accuracy:gpu:staged:hierarchical"],
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.usefixtures("need_gpu")
@pytest.mark.parametrize("ranks", GPU_CHECKS)
def test_gpus_equal_one_gpu(ranks: int) -> None:
    """Ranks share GPUs if there are fewer, except with NCCL."""
    with_nccl = ["ranks:accuracy:gpu:nccl:hierarchical"] if ranks == 4 <= gpus() else []
    all_pass(ranks, *GPU_CHECKS[ranks], *with_nccl, limit=900)


@pytest.mark.gpu
@pytest.mark.usefixtures("need_gpu")
@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("how", ["copies", "nccl"])
def test_transfers_between_two_gpus(how: str, exchange: str) -> None:
    """Large arrays take the ways that the swap of small arrays does not."""
    all_pass(2, f"ranks_trouble:transfers:{how}:{exchange}", limit=300)


@pytest.mark.gpu
@pytest.mark.usefixtures("need_gpu")
@pytest.mark.parametrize(
    ("what", "exchange", "how"),
    [
        ("killed", "ring", "copies"), ("raises", "ring", "copies"), ("raises", "gather", "copies"),
        ("killed in a plan", "gather", "copies"), ("killed after the loss", "gather", "nccl"),
        ("killed", "hierarchical", "copies"), ("killed in a plan", "gather", "nccl"),
        ("stopped in a plan", "gather", "copies"), ("stopped in a plan", "gather", "nccl"),
        ("stopped after the loss", "gather", "nccl"), ("killed", "ring", "nccl"),
    ],
)  # fmt: skip
def test_rank_in_trouble_on_gpus(what: str, exchange: str, how: str) -> None:
    """The other rank names it. A stopped rank is named at the timeout, while the device still
    waits."""
    if how == "nccl" and gpus() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    timeout, words, low, high = 20, "rank 1", -1, 10
    if what.startswith("stopped"):
        timeout, words, low, high = 3, ".*rank 1", 2, 8
    check = f"ranks_trouble:trouble:{what}:{timeout}:{exchange}:gpu:{how}"
    status, output = run(2, check, shell=SHELL)
    assert status != 0
    error = re.search(rf"rank 0 after ([\d.]+) s: RankError: {words}", output)
    assert error is not None, output
    assert low < float(error[1]) < high, output


def test_mpi_that_is_not_started_is_told() -> None:
    """`infonce info` loads MPI without starting it; then MPI would end the process."""
    program = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import numpy, infonce
for features in ([numpy.ones((3, 2))], [numpy.ones((3, 2))] * 2):
    try:
        infonce.distributed.clip_loss(*features, scale=1.0, normalize=True)
    except (TypeError, RuntimeError) as error:
        print(error)
"""
    missing, not_started = printed([sys.executable, "-c", program]).splitlines()
    assert "got no text" in missing
    assert not_started.startswith("MPI is not started")


def test_example_of_the_page(tmp_path: Path) -> None:
    """The program of docs/distributed.md: one loss on all ranks."""
    page = (HERE.parents[1] / "docs" / "distributed.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "train.py").write_text(program)
    said = printed(command(2, "-m", "mpi4py", str(tmp_path / "train.py")))
    losses = re.findall(r"rank \d: (loss [\d.]+, gradient of \(256, 64\))", said)
    assert len(losses) == 2
    assert len(set(losses)) == 1


def test_demo() -> None:
    """Digits over ranks, equal to one process."""
    pytest.importorskip("sklearn")
    said = printed(command(3, "-m", "infonce.distributed.demo", "--steps", "11"))
    assert "3 ranks" in said
    assert "against one process" in said


def test_step_of_random_features(tmp_path: Path) -> None:
    output, path = tmp_path / "row.json", HERE.parents[1] / "benchmarks" / "ranks" / "step.py"
    options = ["--batch", "301", "--dim", "9", "--output", str(output)]
    said = printed(command(2, str(path), *options))
    for words in ("301 x 9 float32 over 2 ranks", "useful rate", "memory", "not hidden"):
        assert words in said
    row = json.loads(output.read_text())
    assert (row["batch"], row["dim"], row["ranks"], row["dtype"]) == (301, 9, 2, "float32")
    assert row["flops_a_rank"] == pytest.approx(8 * 301**2 * 9 / 2 / row["step_s"])
