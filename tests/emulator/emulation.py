"""The pytest plugin for `-m emulated`, which tests/conftest.py loads.

`import cupy` imports the stand-in for CuPy. Tests of tests/gpu run on it, each in a schedule of
threads that follows from its name. Some files of tests/pairs and tests/emulator have the marker
themselves, and run as a whole. The emulator takes about a thousand times as long as a GPU, so only
every nth case of a test with many parameters runs (`EVERY`).
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import engine
import pytest
import threadpoolctl

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Tests of tests/gpu that do not run here, by what they need of a GPU
LEFT_OUT = {
    "time that passes on the device": (
        "test_nothing_waits_for_the_device", "test_work_is_ordered_on_the_current_stream",
    ),
    "PyTorch's or JAX's own memory on the device": ("test_torch", "test_jax"),
    "batches of a size that only a device has time for": (
        "test_no_memory_left_for_exponentials", "test_more_tiles_than_lanes_remember",
        "test_large_products_are_of_whole_16_bytes", "test_memory_stays_within_the_workspace",
        "test_workspace_is_a_ceiling", "test_destinations_lend_memory",
        "test_workspace_of_one_pass_with_keys",
        "test_what_tensor_cores_cut_off", "test_accuracy_where_rows_share_a_direction",
    ),
}  # fmt: skip
# Test -> n: every nth of its cases runs. All cases of other tests run
EVERY: dict[str, int] = {
    # test_api.py
    "test_scales_at_the_ends": 17, "test_capture": 5,
    # test_kernels.py
    "test_against_reference": 7, "test_accuracy_of_a_batch": 17, "test_reproducible": 17,
    "test_features_that_are_not_finite": 7,
    "test_graph_capture": 2,
    # test_labels.py
    "test_classes": 5, "test_sums": 13,
    # test_offload.py
    "test_on_the_gpu": 7,
    # test_maxsim.py
    "test_tails_of_keys": 3,
    # test_one_pass.py
    "test_one_pass_where_heights_are_no_good": 9, "test_positives_and_linear_terms_in_one_pass": 5,
    # test_options.py
    "test_both_passes_leave_out_the_same_pairs": 22, "test_limits_far_apart": 2,
    "test_gradients_of_prefixes_are_as_precise_as_asked": 3,
    # test_own.py
    "test_sizes": 4, "test_tables": 3,
    # test_plan.py
    "test_as_without_a_plan": 17, "test_graphs": 11,
    # test_ragged.py
    "test_keys_that_remain": 7, "test_features_are_staged_once_where_they_fit": 11,
    # test_sweeps.py
    "test_widths": 7, "test_features_of_any_size": 3, "test_few_multiprocessors": 9,
    "test_hardest_negatives": 5, "test_logits_far_apart": 4, "test_portable_kernels": 5,
    "test_cached_exponentials": 6,
}  # fmt: skip


# Random schedules, with the seeds 1 to SCHEDULES. With seed 0, threads run in their order. A test
# has one of these 5 seeds
SCHEDULES = 4


def asked_for(config: pytest.Config) -> bool:
    """Whether tests are selected by the marker `emulated`."""
    return re.search(r"(?<!not )\bemulated\b", config.option.markexpr or "") is not None


def has_no_tests(path: Path) -> bool | None:
    """True for a file without tests that run here: it is not in tests/gpu, and lacks the marker."""
    if path.suffix != ".py" or path.parent == ROOT / "tests" / "gpu":
        return None
    return True if "mark.emulated" not in path.read_text(encoding="utf-8") else None


def begin() -> None:
    """From now on, `import cupy` imports the stand-in, whether there is a GPU or not.

    `pytest_configure` calls it before CuPy is imported.
    """
    sys.path.insert(0, str(HERE / "stand_in"))
    os.environ["INFONCE_CACHE_DIR"] = str(ROOT / "build" / "emulated")
    # One BLAS thread: waiting for more takes a fifth of all time, as matrix products are small
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    threadpoolctl.threadpool_limits(1)
    import ctypes_libraries

    ctypes_libraries.install()


def pytest_configure() -> None:
    if "cupy" in sys.modules:
        raise pytest.UsageError("-m emulated: a plugin of pytest's has imported CuPy already")
    begin()


def pytest_report_header() -> str:
    wants = "; ".join(f"{want} ({len(names)})" for want, names in LEFT_OUT.items())
    return f"emulated, without tests that want {wants}"


@pytest.hookimpl(tryfirst=True)  # before those without the marker are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of tests/gpu that run with `emulated`."""
    left_out = {name for names in LEFT_OUT.values() for name in names}
    seen: Counter[str] = Counter()
    for item in items:
        name = getattr(item, "originalname", "")
        if item.get_closest_marker("gpu") is None or name in left_out:
            continue
        if item.path.parent == ROOT / "tests" / "gpu":
            if seen[name] % EVERY.get(name, 1) == 0:
                item.add_marker("emulated")
            seen[name] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    seed = zlib.crc32(item.nodeid.encode()) % (SCHEDULES + 1)
    item.add_report_section("call", "schedule", f"engine.schedule({seed})")
    from cupy.cuda import stream

    stream.chance.seed(seed)
    with engine.schedule(seed):
        return (yield)
