"""What follows from (max, sum) and the positive's logit: the CUDA header, compiled for the host and
on a GPU, and its counterpart in Python, against mpmath."""

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_problems import gpu_only
from infonce.kernels.direction_losses import finalize_direction as finalize_in_numpy
from infonce.kernels.epilogues import Sums
from infonce.kernels.gpu.device.compiler import SOURCES
from infonce.kernels.problem import LN_2
from infonce.kernels.solve import Vectors
from mpmath import mp

INF, NAN = math.inf, math.nan
Numbers = list[tuple[float, ...]]
# loss, share, log-sum-exp in base 2, d log(scale) from (max, sum, moment, positive)
Finalize = Callable[[np.ndarray], np.ndarray]

WRAPPER = """
#include <math.h>
#define __device__
#define __forceinline__ inline
#include "direction_losses.cuh"
extern "C" void directions(long n, const double* in, double* out) {
  for (; n > 0; --n, in += 4, out += 4) {
    const DirectionLosses d = finalize_direction(Sum{in[0], in[1], in[2]}, in[3]);
    out[0] = d.loss, out[1] = d.negative_probability, out[2] = d.lse2, out[3] = d.log_scale_grad;
  }
}
extern "C" void merged(long n, const double* in, double* out) {
  for (; n > 0; --n, in += 6, out += 3) {
    const Sum a = {in[0], in[1], in[2]}, b = {in[3], in[4], in[5]};
    const Sum s = merge(a, b, [](double x) { return exp2(x); });
    out[0] = s.max, out[1] = s.sum, out[2] = s.moment;
  }
}
"""


@pytest.fixture(scope="session")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """kernels/cuda/direction_losses.cuh as the host's compiler makes it."""
    named = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    compiler = next((name for name in named if name and shutil.which(name)), None)
    if compiler is None:
        pytest.skip("no C++ compiler: none of $CXX, c++, g++ and clang++ was found")
    folder = tmp_path_factory.mktemp("finalize")
    source, library = folder / "wrapper.cpp", folder / "wrapper.so"
    source.write_text(WRAPPER)
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([compiler, *options, source, "-o", library, "-lm"], check=True)
    return ctypes.CDLL(str(library))


def called(function: Any, rows: np.ndarray, results: int) -> np.ndarray:
    out = np.empty((len(rows), results))
    pointers = (z.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for z in (rows, out))
    function(ctypes.c_long(len(rows)), *pointers)
    return out


def in_numpy(rows: np.ndarray) -> np.ndarray:
    *sums, positive = rows.T
    d = finalize_in_numpy(np, Sums(*sums), positive)
    return np.stack([d.loss, d.negative_probability, d.lse / LN_2, d.log_scale_grad], 1)


def on_gpu(rows: np.ndarray) -> np.ndarray:
    import cupy
    from infonce.kernels.gpu.vectors import ElementwiseVectors

    *sums, positive = (cupy.asarray(z) for z in rows.T)
    d = ElementwiseVectors().direction(Sums(*sums), positive)
    columns = d.loss, d.negative_probability, d.lse / LN_2, d.log_scale_grad
    return np.stack([cupy.asnumpy(z) for z in columns], 1)


PLACES = ["header", pytest.param("gpu", marks=gpu_only)]


@pytest.fixture
def finalize(request: pytest.FixtureRequest) -> Finalize:
    if request.param != "header":
        return on_gpu if request.param == "gpu" else in_numpy
    library = request.getfixturevalue("header")
    return lambda rows: called(library.directions, rows, 4)


def finite_cases() -> np.ndarray:
    """Rows whose logarithms and differences have no rounding of their own."""
    rng = np.random.default_rng(0)
    gaps = np.concatenate([
        np.arange(-1100.0, 1101.0), rng.uniform(-1100, 1100, 500), rng.uniform(-40, 40, 500),
        [-2.0**-60, 0.0, 2.0**-60],
    ])  # fmt: skip
    gaps = np.round(gaps * 2**30) / 2**30
    power = rng.integers(-20, 20, len(gaps))
    gap_rows = np.stack([gaps - power, 2.0**power, 0 * gaps], 1)
    # Logits so large that a sum's logarithm is lost beside them
    huge = [
        (2.0**s + 64 * a, 2.0**k, 2.0**s) for s in (55, 57) for a in (-1, 0, 1) for k in (0, 1, 3)
    ]
    rows = np.concatenate([gap_rows, huge])
    mean = rng.uniform(-1, 1, len(rows)) * np.maximum(1, np.abs(rows[:, 0]))
    return np.insert(rows, 2, mean * rows[:, 1], axis=1)


def reference(row: np.ndarray) -> tuple[mp.mpf, mp.mpf, mp.mpf, mp.mpf]:
    with mp.workdps(60):
        top, total, moment, positive = (mp.mpf(float(z)) for z in row)
        gap = top - positive + mp.log(total, 2)
        odds = mp.mpf(2) ** gap
        loss, share = mp.log1p(odds), odds / (1 + odds)
        return (
            loss, share, positive + loss / mp.log(2),
            mp.log(2) * share * (moment / total - positive),
        )  # fmt: skip


def ulps(got: float, expected: mp.mpf, size: float | None = None) -> float:
    """The error in units of the last place of what was expected, or of another number."""
    with mp.workdps(60):
        return float(
            abs(mp.mpf(got) - expected) / math.ulp(float(expected) if size is None else size)
        )


@pytest.mark.parametrize("finalize", [*PLACES, "NumPy"], indirect=True)
def test_finite(finalize: Finalize) -> None:
    rows = finite_cases()
    for row, got in zip(rows, finalize(rows), strict=True):
        loss, share, lse2, scale_gradient = reference(row)
        # CUDA's log2 is off by up to 1 ulp, of powers of two as well, and with it the gap
        gap = math.ulp(math.log2(row[1])) if finalize is on_gpu else 0.0
        bound = share_bound = 4 + math.log(2) * gap / 2.0**-53
        if finalize is in_numpy:  # 2^(gap - softplus), to the digits of this exponent
            share_bound = 4 + abs(row[0] - row[3]) + abs(math.log2(row[1]))
        assert ulps(got[0], loss) <= bound, row
        assert ulps(got[1], share) <= share_bound, row
        assert ulps(got[2], lse2, max(1.0, *abs(row[[0, 3]]), abs(lse2))) <= 4, row
        size = float(share) * max(abs(row[2] / row[1]), abs(row[3]), 1.0)  # before they cancel
        assert size < 2.0**-960 or ulps(got[3], scale_gradient, size) <= share_bound + 4, row


NO_NUMBERS: Numbers = [  # max, sum, positive; loss, share, lse2. Moments are sums times maxima
    (-INF, 0, 3, 0, 0, 3),  # no negatives
    (-INF, 0, 0, 0, 0, 0),
    (5, 2, -INF, INF, 1, 6),
    (5, 2, INF, 0, 0, INF),
    (INF, 1, 5, INF, 1, INF),
    (-INF, 0, INF, 0, 0, INF),
    (INF, 1, INF, NAN, NAN, NAN),
    (-INF, 0, -INF, NAN, NAN, -INF),
    (NAN, 1, 0, NAN, NAN, NAN),
    (0, NAN, 0, NAN, NAN, NAN),
    (0, 1, NAN, NAN, NAN, NAN),
    (-INF, 0, NAN, NAN, NAN, NAN),
    (-INF, NAN, 5, NAN, NAN, NAN),
    (INF, NAN, 5, NAN, NAN, NAN),
]


@pytest.mark.parametrize("finalize", PLACES, indirect=True)
def test_infinities_and_nan(finalize: Finalize) -> None:
    table = np.array(NO_NUMBERS, float)
    top, total, positive = table[:, :3].T
    with np.errstate(invalid="ignore"):
        moment = np.where(total == 0, 0.0, total * top)
        mean = np.where(total == 0, positive, top)
        scale_gradient = np.where(total == 0, table[:, 4], LN_2 * table[:, 4] * (mean - positive))
    got = finalize(np.stack([top, total, moment, positive], 1))
    np.testing.assert_array_equal(got[:, :3], table[:, 3:])
    np.testing.assert_array_equal(np.isfinite(got[:, 3]), np.isfinite(scale_gradient))
    np.testing.assert_array_equal(got[:2, 3], 0.0)  # without negatives


MERGED: Numbers = [  # max, sum; max, sum; max, sum of both
    (-INF, 0, -INF, 0, -INF, 0),
    (-INF, 0, 5, 3, 5, 3),
    (5, 3, -INF, 0, 5, 3),
    (5, 3, 5, 4, 5, 7),
    (0, 1, 10, 1, 10, 1 + 2.0**-10),
    (10, 1, 0, 1, 10, 1 + 2.0**-10),
    (300, 2.0**-100, 0, 2.0**127, 300, 2.0**-100 + 2.0**-173),
    (0, 2.0**127, 1500, 2.0**-1000, 1500, 2.0**-1000),
    (-INF, NAN, 5, 1, 5, NAN),
    (5, 1, 7, NAN, 7, NAN),
]


@pytest.mark.parametrize("where", PLACES)
def test_merge(where: str, request: pytest.FixtureRequest) -> None:
    table = np.array(MERGED, float)
    rows = np.ascontiguousarray(np.insert(table[:, :4], [2, 4], -3.0 * table[:, [1, 3]], axis=1))
    if where == "gpu":
        import cupy
        from infonce.kernels.gpu.vectors import ElementwiseVectors

        columns = [cupy.asarray(np.ascontiguousarray(z)) for z in rows.T]
        sums, other = Sums(*columns[:3]), Sums(*columns[3:])
        alone = Sums(sums.max.copy(), sums.sum.copy())
        ElementwiseVectors().merge(alone, Sums(*columns[3:5]))
        ElementwiseVectors().merge(sums, other)
        got = np.stack([z.get() for z in sums.arrays], 1)
        np.testing.assert_array_equal(alone.sum.get(), sums.sum.get())
    else:
        got = called(request.getfixturevalue("header").merged, rows, 3)
    np.testing.assert_array_equal(got[:, :2], table[:, 4:])
    np.testing.assert_array_equal(got[:, 2], -3.0 * table[:, 5])


def test_references_of_a_gpus_sums_are_at_least_the_largest_logit() -> None:
    """Where vectors are on the host: a sum may have a reference far below its largest logit."""
    sums = Sums(np.array([160.0, -np.inf]), np.array([2.0**21, 0.0]))
    with np.errstate(invalid="ignore", divide="ignore"):
        losses = Vectors(np, passes_on_gpu=True).direction(sums, np.full(2, -np.inf))
    assert losses.reference.tolist() == [181.0, 0.0]
    assert losses.reference_probability == 1.0
