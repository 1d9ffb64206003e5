"""Calls that tests/matrix draws, of more rows than a tile has and of rows of any width, by the
kernels of Hopper, by those of other cards, and from host memory; within the bounds of its oracle.

The matrix has calls of few rows, by every method.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from gpu_problems import EMULATED, MISSING, gpu_only, host, smaller
from infonce.kernels.gpu import config

import infonce
from infonce.checks.teacher import ALL_LOSSES

pytest.importorskip("torch")
import comparison
import gpu_executors
from executors import arguments, with_numpy
from oracle import Judgement, judge
from problems import Problem, draw, in_pair

if not MISSING:
    import cupy

pytestmark = gpu_only
SEED = 5
MOST_ROWS = smaller(600, 200)  # tiles have 64, 128 or 256 rows and columns
CONSIDERED = 300  # draws of each loss
Compute = Callable[..., comparison.Result]


def widen(problem: Problem, times: int) -> Problem:
    """A problem of so many times as many features, with the same products: features come several
    times, divided by the root of `times`, a power of two. It wants all gradients."""

    def wide(z: np.ndarray) -> np.ndarray:
        repeated = np.concatenate([z] * times, axis=-1)
        return (repeated * z.dtype.type(times**-0.5)).astype(z.dtype)

    options = {name: wide(z) if name == "own" else z for name, z in problem.options.items()}
    settings = {name: z for name, z in problem.settings.items() if name != "wrt"}
    features = tuple(map(wide, problem.features))
    return replace(problem, features=features, options=options, settings=settings)


def find_traits(problem: Problem) -> set[str]:
    """What tiles may do otherwise: options, and forms of options."""
    labels, ids = (problem.options.get(name) for name in ("labels", "ids"))
    forms = {"sets of labels": np.ndim(labels) > 1, "columns of ids": np.ndim(in_pair(ids)[0]) > 1}
    given = {*problem.options, *({"metrics"} & {*problem.settings})}
    return {*given, problem.dtype, *(name for name, has in forms.items() if has)}


@cache
def find_problems(loss: str) -> list[Problem]:
    """Problems of more pairs than a tile of 64 rows and columns, each with a trait that those
    before it lack. Rows have up to 16 times 70 features."""
    first, step = list(ALL_LOSSES).index(loss), len(ALL_LOSSES)
    seen: set[str] = set()
    found: list[Problem] = []
    for number in range(first, CONSIDERED * step, step):
        problem = draw(SEED, number, MOST_ROWS)
        traits, large = find_traits(problem), np.prod(problem.shape) > 64**2
        fits = large and not problem.has_tokens and gpu_executors.fits(problem)
        # prefixes (`dims`) are calls by themselves, and their bounds do not know of 16-bit dL/dx
        if fits and "dims" not in traits and traits - seen:
            seen |= traits
            found.append(widen(problem, (16, 1, 4)[len(found) % 3]))
    return found


def with_workspace(compute: Compute, problem: Problem) -> comparison.Result:
    """In several blocks, or in one, as far as there is room."""
    room = (2**20, 2**28, 2**19)[problem.number % 3]
    try:
        return compute(problem, workspace=room)
    except ValueError as error:
        least = re.match(r"workspace: expected at least (\d+)", str(error))
        if least is None:
            raise
    return compute(problem, workspace=10 * int(least[1]))


def with_tiles(problem: Problem, **options: Any) -> comparison.Result:
    return gpu_executors.with_gpu(replace(problem, options=problem.options | options), "tiled")


def find_scale_rounding(problem: Problem, want: Judgement) -> float:
    """By how much the scale's gradient, sum_i q_i . dq_i / scale, is off because elements of dL/dx
    are rounded to the dtype of features."""
    lengths = np.linalg.norm(problem.features[0].astype(np.float64), axis=1)
    size = float(lengths @ want.terms[0].astype(np.float64)) / problem.scale
    return comparison.ROUNDING.get(problem.dtype, 0.0) * size


WAYS: dict[str, Compute] = {
    "Hopper": with_tiles,
    "portable": with_tiles,
    "offload": partial(with_numpy, method="auto", offload=True),
}


@pytest.mark.parametrize("loss", ALL_LOSSES)
@pytest.mark.parametrize("way", WAYS)
def test_drawn_calls(
    way: str, loss: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """On the emulator, each way computes a third of the problems."""
    monkeypatch.setattr(config.precision, "PORTABLE", way == "portable")
    of_features = loss in ("clip", "nt_xent", "siglip")  # the scale's gradient is from theirs
    if of_features:
        request.getfixturevalue("no_few_logits")
    chosen = find_problems(loss)
    for problem in chosen[list(WAYS).index(way) :: len(WAYS)] if EMULATED else chosen:
        with np.errstate(all="ignore"):
            got, want = with_workspace(WAYS[way], problem), judge(problem, problem.compute)
            if of_features:
                want.bounds["scale"] += find_scale_rounding(problem, want)
            shares = comparison.shares(problem, want, got, device=True)
        assert max(shares.values()) <= 1, (problem, shares)
        if not EMULATED:  # there, test_identical_bits.py compares schedules
            again = with_workspace(WAYS[way], problem)
            for name in ("loss", *problem.kind.arguments):
                one, other = (np.asarray(result.get(name, 0.0)) for result in (got, again))
                assert one.tobytes() == other.tobytes(), name


# --- calls that wait for the device ---------------------------------------------------------------


def waits(problem: Problem) -> bool:
    """Whether a tiled call waits for the device: docs/losses.md, "What options cost"."""
    options = {*problem.options}
    by_classes = problem.loss == "sup_con" or "positive_ids" in options
    numbered = {"ids", "groups"} if "label_smoothing" in options else set()
    if by_classes and problem.loss != "siglip":
        numbered = {"ids", "groups", "own", "key_bias"}
    return not (problem.has_tokens or numbered.isdisjoint(options))


@cache
def find_small_problems(loss: str) -> list[Problem]:
    """Problems with a pair of options that those before them lack."""
    first, step = list(ALL_LOSSES).index(loss), len(ALL_LOSSES)
    seen: set[Any] = set()
    found: list[Problem] = []
    for number in range(first, smaller(CONSIDERED, 100) * step, step):
        problem = draw(SEED, number, 24)
        options = sorted(problem.options)
        pairs = {(waits(problem), one, other) for one in options for other in options}
        if gpu_executors.fits(problem) and pairs - seen:
            seen |= pairs
            found.append(problem)
    return found


def prepare(problem: Problem, method: str) -> tuple[Callable[..., Any], list[Any]]:
    """The call of a problem on the GPU as a function of its features, and these."""
    args, options = arguments(problem)
    options |= {name: z for name, z in problem.settings.items() if name != "workspace"}
    options |= {"method": method, "grad_out": problem.grad_out}
    options = {name: gpu_executors.on_device(value) for name, value in options.items()}
    args, count = list(map(gpu_executors.on_device, args)), len(problem.features)
    function = getattr(infonce, f"{problem.loss}_loss_and_grad")
    return lambda *features: function(*features, *args[count:], **options), args[:count]


@pytest.mark.parametrize("loss", ALL_LOSSES)
@pytest.mark.parametrize("method", ["naive", "tiled"])
def test_calls_wait_for_the_device_only_where_documented(method: str, loss: str) -> None:
    """A call that waits cannot be captured. Nor can products of CuPy: of "naive", and of the guides
    of tokens."""
    for problem in find_small_problems(loss)[:: smaller(1, 2)]:
        if problem.has_tokens and method == "naive":
            continue
        call, features = prepare(problem, method)
        may_wait = method == "tiled" and waits(problem)
        with np.errstate(all="ignore"):
            if EMULATED:
                cupy.cuda.stream.waits.clear()
                call(*features)
                assert bool(cupy.cuda.stream.waits) == may_wait, problem
            guide_of_tokens = problem.has_tokens and "guide" in problem.options
            if method == "naive" or may_wait or guide_of_tokens:
                continue
            results = infonce.capture(call, *features)(), call(*features)
            arrays = [(out.loss, *out.grads) for out in results]
        for one, other in zip(*arrays, strict=True):
            assert one is other or host(one).tobytes() == host(other).tobytes(), problem
