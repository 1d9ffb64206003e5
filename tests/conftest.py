"""What all tests share: a worker's share of the machine, hypothesis profiles, and a hint where the
package is not installed."""

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

# JAX reads this once, when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes 3/4 of the GPU

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # programs run once

import numpy as np
import pytest
import threadpoolctl
from hypothesis import HealthCheck, settings

try:
    import emulation
    from infonce.kernels import problem as problems  # only an installed infonce has its kernels
    from infonce.kernels.cpu import schedule

    from infonce.checks import call
except ImportError as error:
    raise pytest.UsageError(
        f"infonce is not installed ({error}): run  python -m pip install -e '.[test]'  first"
    ) from None

# Workers share the cores, and threads of BLAS wait busily. (Tests of threads ask for them)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
    # and of this one, where a plugin of pytest's may have imported NumPy already
    threadpoolctl.threadpool_limits(int(os.environ["OMP_NUM_THREADS"]))

# Processes in the background of a script ignore Ctrl-C, and so would those that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

NO_GPU = re.compile(r"\bno GPU\b|cudaError|needs \d GPUs, found 0")  # in reasons of skipped tests

pytest.register_assert_rewrite("command_line", "gpu_problems", "reference_problems")

settings.register_profile(
    "default", max_examples=25, deadline=None, suppress_health_check=list(HealthCheck),
    derandomize=True,
)  # fmt: skip
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    if emulation.asked_for(config):
        config.pluginmanager.register(emulation)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The emulator's own tests are asked for by their marker alone; then no other file is read."""
    if emulation.asked_for(config):
        return emulation.has_no_tests(collection_path)
    return True if collection_path == Path(__file__).parent / "emulator" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """First those of the site, which one worker builds; then notebooks: no worker is left with one
    at the end. Ranks come last: they use all cores by themselves, and load what Numba has compiled
    for other tests. Those marked `slow` run where `-m` names them."""
    if "slow" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in set(slow)]
        config.hook.pytest_deselected(items=slow)
    items.sort(
        key=lambda item: (
            "site" not in getattr(item, "fixturenames", ()),
            "test_ranks.py::test_equal_to_one_process" in item.nodeid,
            "test_notebooks.py::test_runs" not in item.nodeid,
        )
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for all tests that a GPU is missing for: skips at one place are printed as one."""
    skipped = terminalreporter.stats.get("skipped", ())
    reports = [report for report in skipped if NO_GPU.search(report.longrepr[2])]
    reasons = Counter(report.longrepr[2] for report in reports)
    for report in reports:
        report.longrepr = "tests", None, reasons.most_common(1)[0][0]


@pytest.fixture(autouse=True)
def no_known_schedules(monkeypatch):
    """Tests patch what schedules depend on: each call of a test computes its own."""
    for name in ("tiled.backend", "shard"):
        module = sys.modules.get(f"infonce.kernels.gpu.{name}")
        if module is not None:
            monkeypatch.setattr(module, "tiled_schedule", module.tiled_schedule.__wrapped__)


@pytest.fixture
def no_few_logits(monkeypatch):
    """All batches are large: on a GPU too, feature gradients give the gradient of the scale."""
    monkeypatch.setattr(problems, "FEW_LOGITS", 0)
    call._cache.clear()
    yield
    call._cache.clear()


@pytest.fixture
def tile_sides(monkeypatch):
    """Sets the rows and columns of tiles on the CPU: `tile_sides(16, 24)`."""

    def choose(rows, columns):
        monkeypatch.setattr(schedule, "TILE", (rows, columns))
        monkeypatch.setattr(schedule, "TRIANGLE_SIDE", min(rows, columns))

    return choose


@pytest.fixture
def pair(tmp_path):
    """Paths of two float32 arrays [M, D], and the arrays: what commands read."""
    from command_line import D, M

    rng = np.random.default_rng(0)
    image = rng.standard_normal((M, D)).astype(np.float32)
    text = (image + rng.standard_normal((M, D))).astype(np.float32)
    paths = tmp_path / "image.npy", tmp_path / "text.npy"
    for path, z in zip(paths, (image, text), strict=True):
        np.save(path, z)
    return *paths, image, text
