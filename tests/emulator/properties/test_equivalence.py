"""Every method of the GPU against the float64 reference, and with it against each other: calls that
hypothesis draws, by the bounds of judged_call.py.

A failing example is reported as it was drawn: to shrink it would compile kernels for each try.
"""

import re
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
from gpu_problems import find_dtype
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from infonce.kernels import problem as problems
from infonce.kernels.gpu import config
from judge import VIEWS
from judged_call import Call

from infonce import spec
from infonce.checks import call as checks

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
HOPPER, PORTABLE = 0, 2  # devices of the stand-in
CASES = [
    ("float64", "fp64"), ("float32", "fp32"), ("float32", "tf32"), ("float32", "bf16x3"),
    ("bfloat16", "bf16"), ("float16", "fp16"), ("bfloat16", "fp32"), ("float16", "fp64"),
    ("float64", "fp32"),
]  # fmt: skip
# tiles have 64, 128 or 256 rows and columns
SIZES = st.one_of(
    st.integers(1, 40),
    st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 300]),
    st.integers(41, 420),
)
# K-slices have 32 to 64 features; the last ones are wide rows, whose exponentials may be kept
WIDTHS = st.one_of(
    st.integers(1, 130),
    st.sampled_from([1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 256, 264, 510, 512, 513]),
    st.sampled_from([600, 1030, 1152]),
)
MOST_LOGITS = 40**2  # where blocks of the least workspace are few enough for the emulator
KINDS = ["random", "partly aligned", "aligned", "one direction", "identical", "rising"]


def features(
    kind: str, m: int, n: int, d: int, normalize: bool, rng: np.random.Generator
) -> tuple[Any, Any]:
    """Queries [m, d] and keys [n, d]: of length 1, or of any length that `normalize` takes off."""
    query, key = rng.standard_normal((m, d)), rng.standard_normal((n, d))
    both = min(m, n)
    if kind in ("aligned", "partly aligned"):
        key[:both] = query[:both] + 0.7 * (kind != "aligned") * key[:both]
    elif kind == "one direction":
        query, key = query + 2 * query[0], key + 2 * query[0]
    elif kind == "identical":
        query[:] = key[:] = query[0]
    elif kind == "rising":  # each tile's logits are above those of the tile before
        key = key + 3 * np.arange(n)[:, None] / n * query[0]
    for z in (query, key):
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        if normalize:
            z *= np.exp(rng.standard_normal((len(z), 1)))
            z[rng.random(len(z)) < 0.02] = 0
    return query, key


@st.composite
def softmax_options(draw: st.DrawFn, loss: spec.Loss, columns: int, rng: Any) -> dict[str, Any]:
    """Some of the options that this loss takes."""
    drawn = draw(st.sets(st.sampled_from(spec.SOFTMAX_OPTIONS), max_size=3))
    values: dict[str, Any] = {
        "margin": rng.uniform(-0.3, 0.3), "decoupled": True, "hardness": rng.uniform(0, 5),
        "label_smoothing": rng.uniform(0, 0.9), "key_bias": 2 * rng.standard_normal(columns),
        "false_negative_margin": rng.uniform(-0.2, 0.3),
    }  # fmt: skip
    options = {name: values[name] for name in values if name in drawn - {*loss.refused}}
    for one, other in spec.EXCLUSIVE[:3]:
        if {one, other} <= options.keys():
            del options[one]
    return options


@st.composite
def calls(draw: st.DrawFn, name: str, cases: Any = CASES) -> Call:
    kind = spec.LOSSES[name]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype, precision = draw(st.sampled_from(cases))
    m, d = draw(SIZES), draw(WIDTHS)
    n = m if kind.square else draw(SIZES)
    options: dict[str, Any] = {"normalize": draw(st.booleans())}
    labels = None
    if name == "info_nce":
        labelled = draw(st.sampled_from(["no", "one", "some", "sets"]))
        if labelled == "no":
            m, n = min(m, n), max(m, n)
        elif labelled == "sets":
            labels = np.argsort(rng.random((m, n)), axis=1)[:, : rng.integers(1, 5)]
            labels[rng.random(labels.shape) < 0.3] = -1
        else:
            labels = rng.integers(-1 if labelled == "some" else 0, n, m)
    z = features(draw(st.sampled_from(KINDS)), m, n, d, options["normalize"], rng)
    if len(kind.arguments) == 1:
        z = (np.concatenate([z[0], z[1][:m]] if m <= n else [z[0][:n], z[1]]),)
    m, n = len(z[0]), len(z[-1])
    if kind.classes:
        labels = rng.integers(-1, rng.integers(1, m + 1), m)
    if labels is not None:
        options["labels"] = labels
    if kind.sigmoid:
        options["bias"] = rng.uniform(-10, 2)
    for number, names in ((m // 2 + 1, "ids"), (3, "groups")):
        if names not in kind.refused and draw(st.booleans()):
            of_rows = rng.integers(0, number, m)
            pair = m != n or (name in ("info_nce", "clip") and rng.random() < 0.5)
            options[names] = (of_rows, rng.integers(0, number, n)) if pair else of_rows
    if kind.sigmoid and draw(st.booleans()):
        options["positive_ids"] = tuple(rng.integers(0, m // 2 + 2, size) for size in (m, n))
    options |= draw(softmax_options(kind, n, rng))
    if {"ids", "groups"} <= options.keys():
        options.pop("label_smoothing", None)
    options["scale"] = float(np.exp(draw(st.floats(0.0, np.log(200)))))
    if draw(st.booleans()):
        options["weights"] = rng.uniform(0, 2, m) * (rng.random(m) < 0.9) + 1e-3
    options["reduction"] = draw(st.sampled_from(["mean", "sum", "none"]))
    if draw(st.booleans()):
        size = m if options["reduction"] == "none" else None
        options["grad_out"] = rng.uniform(-2, 2, size)
    names = [*kind.arguments, "scale", *["bias"] * kind.sigmoid]
    options["wrt"] = [
        a for a in names if a not in kind.locked and draw(st.sampled_from([True, True, False]))
    ]
    if draw(st.booleans()):
        options["grad_dtype"] = np.float64 if precision == "fp64" else np.float32
    rounded = tuple(side.astype(find_dtype(dtype)) for side in z)
    call = Call(name, rounded, precision, options, draw(st.sampled_from(VIEWS)))
    return with_clear_limits(call)


def with_clear_limits(call: Call) -> Call:
    """The call with a false_negative_margin that no pair is near, so that rounding decides about
    none."""
    if "false_negative_margin" not in call.options:
        return call
    options = dict(call.options)
    margin = options.pop("false_negative_margin")
    above = np.unique(np.concatenate([z.ravel() for z in call.above_positives()]))
    above = above[np.isfinite(above)]
    tolerance = 16 * call.unit * max(1.0, call.largest / options["scale"])
    near = np.concatenate([[-4.0], above, [4.0]])
    clear = np.flatnonzero(np.diff(near) > 2 * tolerance)
    middles = (near[clear] + near[clear + 1]) / 2
    options["false_negative_margin"] = float(middles[np.abs(middles - margin).argmin()])
    return Call(call.loss, call.features, call.precision, options, call.view)


@st.composite
def ways(draw: st.DrawFn, call: Call) -> dict[str, Any]:
    """How a call is computed."""
    way = {
        "device": draw(st.sampled_from([HOPPER, HOPPER, PORTABLE])),
        "method": draw(st.sampled_from(["auto", "tiled", "tiled", "fused", "naive", "offload"])),
        "schedule": draw(st.integers(0, 2**32)),
        # few logits have the gradient of the scale from moments
        "few_logits": draw(st.booleans()),
        "two_passes": draw(st.booleans()),  # where one pass would do
        "workspace": draw(st.sampled_from([None, 1, 3, 20])),  # times the least
    }
    return way


def computed(call: Call, way: dict[str, Any]) -> Any:
    method = way["method"]
    options: dict[str, Any] = {"method": "auto" if method == "offload" else method}
    if method in ("tiled", "offload") and way["workspace"] is not None:
        options["workspace"] = 1
    with ExitStack() as stack:
        stack.enter_context(engine.schedule(way["schedule"]))
        for target, value in (
            ((config.workspace, "MIN_CACHED_COLUMNS"), 256),
            ((problems, "FEW_LOGITS"), problems.FEW_LOGITS * way["few_logits"]),
        ):
            stack.enter_context(mock.patch.object(*target, value))
        if way["two_passes"]:
            patch = mock.patch.object(config, "block_sizes_for_all_keys", return_value=None)
            stack.enter_context(patch)
        checks._cache.clear()
        run = partial(call.on_device, way["device"], method == "offload")
        try:
            return run(**options)
        except ValueError as error:
            least = named_workspace(error)
        # 4 sqrt(MN) blocks at most with the least
        many = np.prod(call.dots.shape) > MOST_LOGITS
        options["workspace"] = max(way["workspace"], 10 * many, 4 * (method == "offload")) * least
        try:
            return run(**options)
        except ValueError as error:
            # Blocks of an offloaded call pad their rows (`layout.least_workspace`). So a tiny block
            # may need more than the chunks' share, which no workspace of 64 KiB or more does
            if method != "offload" or options["workspace"] >= 2**16:
                raise
            options["workspace"] += 4 * named_workspace(error)
        return run(**options)


def named_workspace(error: ValueError) -> int:
    """The least number of bytes that an error names. Raises any other error again."""
    words = re.match(r"workspace: expected at least (\d+) bytes", str(error))
    if words is None:
        raise error
    return int(words[1])


@pytest.mark.parametrize("loss", spec.LOSSES)
@settings(max_examples=-(-settings.default.max_examples // 8), phases=[Phase.generate])
@given(data=st.data())
def test_methods(loss: str, data: st.DataObject) -> None:
    call = data.draw(calls(loss))
    for _ in range(2):
        way = data.draw(ways(call))
        call.check(computed(call, way))


def test_keys_of_a_block_accumulate_by_ranges() -> None:
    """Rows of dK that are wider than its destination accumulate in the workspace; where a block of
    chunks has no room for all of them, in ranges of keys."""
    rng = np.random.default_rng(0)
    z = tuple(rng.standard_normal((256, 103)).astype(find_dtype("bfloat16")) / 10 for _ in range(2))
    for name, options in (("siglip", {"bias": -3.0}), ("clip", {})):
        call = Call(name, z, "bf16", {"scale": 14.0, "grad_dtype": np.float32} | options)
        way = {"device": PORTABLE, "method": "offload", "schedule": 1, "few_logits": True,
               "two_passes": False, "workspace": 10}  # fmt: skip
        call.check(computed(call, way))


def test_the_least_workspace_that_an_error_names() -> None:
    """The workspace has room for gradient chunks, whose elements are longer than those of
    features."""
    rng = np.random.default_rng(0)
    z = tuple(rng.standard_normal((61, 300)).astype(find_dtype("bfloat16")) / 17 for _ in range(2))
    options = {"scale": 5.0, "bias": -3.0, "ids": np.arange(61) // 2, "wrt": ["text", "scale"]}
    call = Call("siglip", z, "fp32", options)
    with pytest.raises(ValueError, match="workspace: expected at least") as error:
        call.on_device(HOPPER, True, workspace=1)
    call.check(call.on_device(HOPPER, True, workspace=named_workspace(error.value)))
