"""Every loss, dtype and precision on a GPU against the float64 references.

These tests drive the backend itself, from a `Problem`; what dispatch adds is tested beside the CPU.
"""

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from infonce.kernels import launch_config as config
from infonce.kernels.blocks import Gradients, Problem
from judge import (
    KINDS,
    LOSSES,
    VIEWS,
    arguments,
    cancelling,
    judged,
    largest_logit,
    pairs,
    scale_size,
    viewed,
)

from infonce import losses


def _missing() -> str:
    """Why there is no GPU to test on; empty if there is one."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        cupy.zeros(1)
    except Exception as error:
        return f"no GPU: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return ""


MISSING = _missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy
    from infonce.kernels import gpu
    from infonce.kernels.gpu_operands import Accumulator

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# (dtype of the features, precision)
CASES = [
    ("float64", "fp64"), ("float32", "fp32"), ("float32", "tf32"), ("float32", "bf16x3"),
    ("bfloat16", "bf16"), ("float16", "fp16"), ("bfloat16", "fp32"), ("float16", "fp64"),
]  # fmt: skip
LOSS_BOUND = {"fp64": 1e-13, "fp32": 1e-6, "bf16x3": 1e-5, "tf32": 1e-4, "bf16": 1e-5,
              "fp16": 1e-5}  # fmt: skip
GRAD_BOUND = {"fp64": 1e-12, "fp32": 5e-6, "bf16x3": 1e-4, "tf32": 2e-3, "bf16": 2.5e-3,
              "fp16": 4e-4}  # fmt: skip
STORED_BOUND = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 0.0, "float64": 0.0}
# roundoff of a product relative to its largest terms, and of an element of dL/dx
PRODUCT = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16x3": 2.0**-17, "tf32": 2.0**-11,
           "bf16": 2.0**-24, "fp16": 2.0**-24}  # fmt: skip
ELEMENT = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16x3": 2.0**-17, "tf32": 2.0**-12,
           "bf16": 2.0**-9, "fp16": 2.0**-12}  # fmt: skip


def dtype_of(name: str) -> np.dtype[Any]:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def host(array: Any) -> Any:
    return None if array is None else cupy.asnumpy(array)


class Result:
    """What one evaluation gave, on the host."""

    def __init__(self, solution: Any, grads: dict[str, Any], upstream: Any) -> None:
        self.losses = host(solution.losses)
        self.loss = float(np.sum(host(upstream) * self.losses))
        self.grads = {k: host(v) for k, v in grads.items()}
        self.solution = solution


def run(name: str, args: Any, precision: str, scale: Any, **options: Any) -> Result:
    """Evaluate loss `name` on the GPU, and fetch the results."""
    return Result(*evaluate(name, args, precision, scale, **options))


def evaluate(
    name: str, args: Any, precision: str, scale: Any, *, bias: Any = -10.0, labels: Any = None,
    ids: Any = None, normalize: bool = False, workspace: int = 2**28, view: str = "contiguous",
    wrt: tuple[str, ...] | None = None, grad_dtype: Any = None, outs: Any = None,
    gradient: bool = True, ranks: bool = False, method: str = "tiled",
) -> tuple[Any, dict[str, Any], Any]:  # fmt: skip
    """Solution, gradients and upstream of loss `name`, the way dispatch gets them."""
    kind = {"info_nce": losses.INFO_NCE, "nt_xent": losses.NT_XENT, "clip": losses.CLIP,
            "lit": losses.LIT, "siglip": losses.SIGLIP}[name]  # fmt: skip
    arrays = [z if isinstance(z, cupy.ndarray) else device_view(z, view) for z in args]
    query, key = arrays[0], arrays[-1]
    m, n = len(query), len(key)
    if kind.symmetric:
        positives = (cupy.arange(m) + m // 2) % m
    else:
        positives = cupy.arange(m) if labels is None else cupy.asarray(labels, np.int64)
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    upstream = cupy.full(m, 1.0 / m)
    problem = Problem(
        query=query, key=key, scale=scale, upstream=upstream, positives=positives,
        row_weight=kind.row_weight, column_weight=kind.column_weight,
        bias=bias if kind.sigmoid else None, symmetric=kind.symmetric,
        query_ids=None if ids is None else cupy.asarray(pair[0], np.int64),
        key_ids=None if ids is None else cupy.asarray(pair[1], np.int64),
        normalize=normalize, compute=precision, method=method, workspace=workspace, ranks=ranks,
    )  # fmt: skip
    wanted = [a for a in kind.arguments if a not in kind.locked] if wrt is None else list(wrt)
    made: dict[str, Any] = {}
    gradients = None
    if gradient:
        for a, z in zip(kind.arguments, arrays, strict=True):
            if a in wanted:
                made[a] = (outs or {}).get(a)
                if made[a] is None:
                    made[a] = cupy.full(z.shape, np.nan, grad_dtype or z.dtype)
        last = kind.arguments[-1]
        want_key = not kind.symmetric and last in made
        want_query = kind.arguments[0] in made or not want_key
        gradients = Gradients(
            query=made.get(kind.arguments[0]), key=made.get(last) if want_key else None,
            dots=cupy.zeros(m if want_query else n), want_query=want_query, want_key=want_key,
        )  # fmt: skip
    solution = gpu.solve(problem, gradients)
    if gradients is not None:
        made["scale"] = solution.scale_grad
        if kind.sigmoid:
            made["bias"] = solution.bias_grad
    return solution, made, upstream


def device_view(z: Any, how: str) -> Any:
    """The array on the device, behind the same strides."""
    if how == "contiguous":
        return cupy.asarray(z)
    seen = viewed(z, how)
    root = seen
    while root.base is not None:
        root = root.base
    whole = cupy.asarray(root)
    offset = seen.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return cupy.ndarray(seen.shape, seen.dtype, whole.data + offset, seen.strides)


def check(
    out: Result, ref: Any, args: Any, precision: str, scale: float, grad_dtype: str = "",
    averaged: bool = False,
) -> None:  # fmt: skip
    """Hold a result to the bounds. `averaged`: a batch large enough for rounding to average out."""
    logit = largest_logit(scale, args[0], args[-1])
    u = PRODUCT[precision]
    single = 2.0**-53 if precision == "fp64" else 2.0**-24
    bound = LOSS_BOUND[precision] * max(1.0, logit / 200) * abs(ref.loss)
    # a loss near 0 is judged beside its logits, of which siglip adds up a row
    summed = ref.losses.size if ref.lse is None else 1
    bound = max(bound, 4 * max(u, single) * max(logit, 1.0) * summed)
    error = abs(out.loss - ref.loss)
    assert error <= bound, f"loss {out.loss} for {ref.loss}: off by {error:.2e}, bound {bound:.2e}"
    terms = cancelling(ref, args, scale)
    for name, got in out.grads.items():
        want = ref.grads[name]
        if got is None:
            continue
        wide = np.asarray(got, np.float64)
        whole, cancels, shared = float(np.linalg.norm(want)), terms, 0.0
        relative = GRAD_BOUND[precision] * max(1.0, logit / 200)
        if name in ("scale", "bias"):
            whole = max(scale_size(ref, args), abs(want)) if name == "scale" else whole
            cancels = terms * np.sqrt(len(args[0])) / scale
            # an error that all logits share, as the rounding of `scale` is, does not average out
            shared = 0.25 * single * logit * (name == "bias")
        else:
            relative = max(relative, STORED_BOUND[grad_dtype or got.dtype.name])
        limit = relative * whole + shared + 1e-30
        if not averaged:
            limit += 6 * u * logit * whole
            limit += (8 * u * (1 + logit) + 2 * ELEMENT[precision]) * cancels
        tiny = {"float16": 2.0**-24, "bfloat16": 2.0**-126}.get(got.dtype.name, 0.0)
        limit += tiny * np.sqrt(np.size(want)) + 1e-24 * (precision != "fp64")
        error = float(np.linalg.norm(wide - want))
        assert error <= limit, f"{name}: off by {error:.2e}, bound {limit:.2e}, norm {whole:.2e}"


SHAPES = [
    (1, 1, 1), (2, 3, 5), (7, 9, 33), (31, 64, 8), (65, 65, 31), (127, 128, 64), (128, 129, 65),
    (129, 257, 16), (255, 300, 127), (300, 300, 70),
]  # fmt: skip
TEMPERATURES = [0.005, 0.01, 0.07, 1.0]
METHODS = ["tiled", "fused", "naive"]


@pytest.mark.parametrize(("dtype", "precision"), CASES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_against_reference(loss: str, method: str, dtype: str, precision: str) -> None:
    """Sizes around tile boundaries, odd widths, all temperatures and kinds of pairs, strides, and
    workspaces that cut into many blocks."""
    for i, (m, n, d) in enumerate(SHAPES):
        for j, kind in enumerate(KINDS):
            temperature = TEMPERATURES[(i + j) % 4]
            if kind == "long" and precision == "tf32":
                continue
            args = arguments(loss, *pairs(kind, m, n, d, dtype_of(dtype), i + j))
            ref = judged(loss, args, scale=1 / temperature)
            spaces = [2**28, 2**23] + [150_000 + 3000 * d] * (method == "tiled")
            out = run(
                loss, args, precision, 1 / temperature, view=VIEWS[(i + j) % len(VIEWS)],
                workspace=spaces[(i + 2 * j) % len(spaces)],
                method=method,
            )  # fmt: skip
            try:
                check(out, ref, args, precision, 1 / temperature)
            except AssertionError as error:
                raise AssertionError(f"{m, n, d} {kind} at {temperature}: {error}") from None


@pytest.mark.parametrize("kind", ["random", "aligned", "partly aligned", "opposed"])
@pytest.mark.parametrize(("dtype", "precision"), CASES[:6])
@pytest.mark.parametrize("loss", LOSSES)
def test_accuracy_of_a_batch(loss: str, dtype: str, precision: str, kind: str) -> None:
    """The accuracy that the precisions promise, at a size where rounding averages out."""
    for temperature in TEMPERATURES:
        args = arguments(loss, *pairs(kind, 1500, 1500, 128, dtype_of(dtype), 3))
        ref = judged(loss, args, scale=1 / temperature)
        # gradients of a loss near 0 are themselves differences of rounded numbers
        averaged = ref.loss > 0.05
        for grad_dtype in {"float32", dtype} if precision != "fp64" else {dtype}:
            out = run(loss, args, precision, 1 / temperature, grad_dtype=dtype_of(grad_dtype))
            try:
                check(out, ref, args, precision, 1 / temperature, averaged=averaged)
            except AssertionError as error:
                raise AssertionError(f"at {temperature} to {grad_dtype}: {error}") from None


# --- sweeps: what Hopper has instead of tiles -----------------------------------------------------

SWEEPS = [
    ("float32", "fp32"), ("float32", "tf32"), ("float32", "bf16x3"), ("bfloat16", "bf16"),
    ("float16", "fp16"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "precision"), SWEEPS)
@pytest.mark.parametrize("loss", LOSSES)
def test_widths(loss: str, dtype: str, precision: str) -> None:
    """Rows of one slab and of many; those that stay in shared memory and those a cluster shares."""
    for i, d in enumerate((63, 64, 65, 192, 256, 264, 509, 512, 513, 768, 1024, 1025)):
        args = arguments(loss, *pairs(KINDS[i % 3], 300, 300, d, dtype_of(dtype), i))
        ref = judged(loss, args, scale=20.0)
        check(run(loss, args, precision, 20.0), ref, args, precision, 20.0)


@pytest.mark.parametrize(("dtype", "precision", "bound"), [
    ("bfloat16", "bf16", 3e-6), ("float16", "fp16", 5e-6), ("float32", "fp32", 5e-7),
])  # fmt: skip
def test_what_tensor_cores_cut_off(dtype: str, precision: str, bound: float) -> None:
    """Positives of cosine 0.7 among random negatives: a sum of 512 products that is short by a
    share of itself moves the loss by that times the logit."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal((1500, 512))
    text = image + rng.standard_normal(image.shape)
    args = tuple((z / np.linalg.norm(z, axis=1, keepdims=True)).astype(dtype_of(dtype))
                 for z in (image, text))  # fmt: skip
    ref = judged("clip", args, scale=1 / 0.07)
    assert run("clip", args, precision, 1 / 0.07).loss == pytest.approx(ref.loss, rel=bound)


@pytest.mark.parametrize("d", [40, 520])
@pytest.mark.parametrize(("dtype", "precision"), SWEEPS)
@pytest.mark.parametrize("loss", LOSSES)
def test_few_multiprocessors(
    loss: str, dtype: str, precision: str, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many panels for each block of threads, as in a large batch."""
    device = gpu.device_properties(cupy.cuda.runtime.getDevice())
    for multiprocessors, n in ((2, 700), (6, 1500), (8, 1281)):
        few = replace(device, multiprocessors=multiprocessors)
        monkeypatch.setattr(gpu, "device_properties", lambda index, few=few: few)
        args = arguments(loss, *pairs("partly aligned", n, n, d, dtype_of(dtype), n))
        ref = judged(loss, args, scale=30.0)
        for workspace in (2**28, 2**22):
            out = run(loss, args, precision, 30.0, workspace=workspace)
            check(out, ref, args, precision, 30.0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_narrow_rows(
    dtype: str, precision: str, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NT-Xent whose dL/dx stays in registers: widths of one and two slabs, sizes around the panels'
    edges, few and many panels for each block of threads, blocks of keys added to, ids."""
    device = gpu.device_properties(cupy.cuda.runtime.getDevice())
    if device.capability != "90":
        pytest.skip("for Hopper")
    folds: list[int] = []
    block = gpu._NarrowFold.block

    def counted(self: Any, *args: Any) -> None:
        folds.append(1)
        block(self, *args)

    monkeypatch.setattr(gpu._NarrowFold, "block", counted)
    cases = itertools.product((1, 8, 63, 64, 65, 127, 128), ((2, 130), (3, 257), (8, 1281)))
    for i, (d, (multiprocessors, n)) in enumerate(cases):
        few = replace(device, multiprocessors=multiprocessors)
        monkeypatch.setattr(gpu, "device_properties", lambda index, few=few: few)
        (z,) = arguments("nt_xent", *pairs(KINDS[i % 4], n, n, d, dtype_of(dtype), i))
        ids = np.random.default_rng(i).integers(0, n // 2, 2 * n) if i % 3 == 0 else None
        options: Any = {"normalize": normalize, "ids": ids}
        ref = judged("nt_xent", (z,), scale=14.0, **options)
        for workspace, grad_dtype in ((2**28, None), (2**28, np.float32), (2**18, None)):
            folds.clear()
            out = run("nt_xent", (z,), precision, 14.0, workspace=workspace,
                      grad_dtype=grad_dtype, **options)  # fmt: skip
            assert folds
            if not normalize:
                check(out, ref, (z,), precision, 14.0)
            else:
                assert out.loss == pytest.approx(ref.loss, rel=1e-4)
            again = run("nt_xent", (z,), precision, 14.0, workspace=workspace,
                        grad_dtype=grad_dtype, **options)  # fmt: skip
            assert np.array_equal(out.grads["features"], again.grads["features"])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("portable", [False, True])
def test_logits_far_apart(loss: str, portable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's rows or columns lie hundreds of powers of 2 from those of the tile before, from each
    other's, and from what was expected of them."""
    monkeypatch.setattr(config, "PORTABLE", portable)
    rng = np.random.default_rng(0)
    n, d = 900, 64
    for kind in ("rising", "one high", "lengths"):
        image, text = pairs("random", n, n, d, np.float64, 1)
        if kind == "rising":  # every tile is above the ones before
            text = text + image.mean(0) + np.arange(n)[:, None] / n * image[0]
            image = image + image[0]
        elif kind == "one high":  # rows with copies of themselves among the others
            text[rng.integers(0, n, 9)] = image[rng.integers(0, n, 9)]
        else:
            image = image * np.exp(rng.standard_normal((n, 1)))
            text = text * np.exp(rng.standard_normal((n, 1)))
        args = arguments(loss, image.astype(BFLOAT16), text.astype(BFLOAT16))
        for scale in (1.0, 100.0, 200.0):
            ref = judged(loss, args, scale=scale)
            check(run(loss, args, "bf16", scale), ref, args, "bf16", scale)


@pytest.mark.parametrize("loss", LOSSES)
def test_portable_kernels(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiled kernels of other cards, where sweeps would run."""
    monkeypatch.setattr(config, "PORTABLE", True)
    for (dtype, precision), (m, n, d) in itertools.product(
        SWEEPS, ((129, 257, 16), (300, 300, 70))
    ):
        args = arguments(loss, *pairs("random", m, n, d, dtype_of(dtype), 0))
        ref = judged(loss, args, scale=20.0)
        check(run(loss, args, precision, 20.0), ref, args, precision, 20.0)


# --- one pass: LiT, and InfoNCE with respect to queries -------------------------------------------

ONE_SIDED = ["info_nce", "lit"]
ONE_PASS = [("float32", "fp32"), ("float32", "tf32"), ("float32", "bf16x3"), ("bfloat16", "bf16")]


@pytest.fixture
def blocks_swept(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of every block folded in one pass, the panels that were swept twice."""
    device = gpu.device_properties(cupy.cuda.runtime.getDevice())
    if device.capability != "90":
        pytest.skip("for Hopper")
    swept: list[list[int]] = []
    block = gpu._OnlineFold.block

    def watched(self: Any, rows: slice, columns: slice, a: int, b: int) -> None:
        block(self, rows, columns, a, b)
        panels = -(-(rows.stop - rows.start) // 128)
        swept.append(np.flatnonzero(host(self.wanted[:panels])).tolist())

    monkeypatch.setattr(gpu._OnlineFold, "block", watched)
    return swept


def for_tensor_cores(z: np.ndarray, dtype: str) -> Any:
    """Features whose products are exact: what is left are the errors of sums and panels."""
    return z.astype(BFLOAT16).astype(dtype_of(dtype))


def one_sided(loss: str, args: Any, precision: str, scale: float, **options: Any) -> Result:
    if loss == "info_nce":
        options["wrt"] = ("query",)
    return run(loss, args, precision, scale, **options)


@pytest.mark.parametrize(("dtype", "precision"), ONE_PASS)
@pytest.mark.parametrize("loss", ONE_SIDED)
def test_one_pass(loss: str, dtype: str, precision: str, blocks_swept: list[list[int]]) -> None:
    """Rows of 1 to 16 slabs, sizes around the tiles' edges, every temperature, several row panels
    and column blocks, gradients gathered in the workspace and where they are handed out."""
    slab = 128 // dtype_of(dtype).itemsize
    for i in range(1, 17):
        d = slab * i + (-1, 0, -slab + 1)[i % 3]
        m, n = ((127, 385), (129, 128), (300, 257), (640, 901))[i % 4]
        temperature = TEMPERATURES[i % 4]
        for workspace in (2**28, 100_000 + 500 * d):
            args = pairs(KINDS[i % 4], m, n, d, np.float64, i)
            args = arguments(loss, *(for_tensor_cores(z, dtype) for z in args))
            labels = None
            if loss == "info_nce":
                labels = np.random.default_rng(i).integers(0, n, m)
            given: Any = {} if labels is None else {"labels": labels}
            ref = judged(loss, args, scale=1 / temperature, **given)
            blocks_swept.clear()
            out = one_sided(loss, args, precision, 1 / temperature, workspace=workspace,
                            grad_dtype=(None, np.float32)[i % 2], **given)  # fmt: skip
            assert len(blocks_swept) > (i % 4 == 3 and workspace < 2**28)
            try:
                check(out, ref, args, "bf16", 1 / temperature)
            except AssertionError as error:
                raise AssertionError(f"{m, n, d} at {temperature}: {error}") from None


@pytest.mark.parametrize("kind", ["3", "30", "rising", "falling", "all low", "late"])
@pytest.mark.parametrize(("dtype", "precision"), ONE_PASS)
@pytest.mark.parametrize("d", [40, 1000])
def test_one_pass_where_heights_are_no_good(
    d: int, dtype: str, precision: str, kind: str, blocks_swept: list[list[int]]
) -> None:
    """Rows that leave the range of the height they were given, at first or in a later block, above
    or below: hundreds of powers of 2 from block to block."""
    if dtype == "float32" and d > 512:
        d //= 2  # as many bytes
    m, n = 300, 1500
    query, key = pairs("random", m, n, d, np.float64, 1)
    ids: Any = None
    if kind in ("3", "30"):
        query, key = query * float(kind), key * float(kind)
    elif kind in ("rising", "falling"):
        along = np.linspace(-1, 5, n)[:: 1 if kind == "rising" else -1]
        query, key = 0.3 * query + query[0], 0.1 * key + along[:, None] * query[0]
    elif kind == "all low":
        query, key = 0.02 * query + query[0], 0.05 * key - 2 * query[0]
    else:  # the first blocks have no pairs at all for some rows, which then begin high
        query[100:] *= 10
        ids = np.where(np.arange(m) >= 200, 1, 2), np.where(np.arange(n) < 1200, 1, 3)
    labels = np.random.default_rng(0).integers(0, n, m)
    args = for_tensor_cores(query, dtype), for_tensor_cores(key, dtype)
    for i, scale in enumerate((1.0, 14.0, 100.0, 200.0)):
        ref = judged("info_nce", args, scale=scale, labels=labels, ids=ids)
        for workspace in (2**28, 200_000 + 400 * d):
            blocks_swept.clear()
            whole = cupy.full((m, d + 24), 7.0, np.float32)
            options: Any = [{}, {"grad_dtype": np.float32}, {"outs": {"query": whole[:, 8:-16]}}]
            out = run("info_nce", args, precision, scale, labels=labels, ids=ids, wrt=("query",),
                      workspace=workspace, **options[i % 3])  # fmt: skip
            check(out, ref, args, "bf16", scale)
            assert i % 3 < 2 or bool((whole[:, :8] == 7).all() and (whole[:, -16:] == 7).all())
            again = [panel for panels in blocks_swept for panel in panels]
            assert again or scale < 200
            assert scale > 1 or kind == "30" or not again
            if workspace < 2**28 and kind == "rising" and scale == 200:  # not only at first
                assert sum(map(bool, blocks_swept)) > len(blocks_swept) // 2


@pytest.mark.parametrize("d", [40, 520])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_one_pass_with_some_panels_swept_twice(
    d: int, workers: int, blocks_swept: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of threads has many panels, and skips those that were good."""
    monkeypatch.setattr(config.Sweep, "blocks", lambda self, *_: workers * (2 if self.wide else 1))
    n = 1500
    text, image = pairs("partly aligned", n, n, d, np.float64, 0)
    for panel in (1, 4, 5, 11):
        text[128 * panel + 3 : 128 * panel + 9] *= 60
    args = text.astype(BFLOAT16), image.astype(BFLOAT16)
    ref = judged("lit", args, scale=14.0)
    out = run("lit", args, "bf16", 14.0)
    assert blocks_swept == [[1, 4, 5, 11]]
    check(out, ref, args, "bf16", 14.0)


@pytest.mark.parametrize(("dtype", "precision"), ONE_PASS)
def test_one_pass_with_ids_and_normalised(
    dtype: str, precision: str, blocks_swept: list[list[int]]
) -> None:
    """Excluded pairs; rows that have no negatives; lengths that normalisation takes away."""
    m, n, d = 260, 700, 72
    rng = np.random.default_rng(0)
    query, key = (for_tensor_cores(z, dtype) for z in pairs("random", m, n, d, np.float64, 3))
    labels = rng.integers(0, n, m)
    ids = rng.integers(0, 9, m), rng.integers(0, 9, n)
    none = np.full(m, 7), np.full(n, 7)
    none[0][20:] = 8  # only the first rows are without negatives
    for scale in (14.0, 200.0):
        for pair in (ids, none):
            ref = judged("info_nce", (query, key), scale=scale, labels=labels, ids=pair)
            for workspace in (2**28, 400_000):
                out = run("info_nce", (query, key), precision, scale, labels=labels, ids=pair,
                          wrt=("query",), workspace=workspace)  # fmt: skip
                check(out, ref, (query, key), "bf16", scale)
                if pair is none:
                    assert np.all(out.losses[:20] == 0)
                    assert np.all(out.grads["query"][:20] == 0)
        lengths = np.exp2(rng.integers(-3, 4, m))[:, None], np.exp2(rng.integers(-3, 4, n))[:, None]
        args = tuple((z.astype(np.float64) * by).astype(z.dtype)
                     for z, by in zip((query, key), lengths, strict=True))  # fmt: skip
        ref = judged("info_nce", args, scale=scale, labels=labels, normalize=True)
        for workspace in (2**28, 400_000):
            out = run("info_nce", args, precision, scale, labels=labels, normalize=True,
                      wrt=("query",), workspace=workspace, grad_dtype=np.float32)  # fmt: skip
            assert out.loss == pytest.approx(ref.loss, rel=1e-4)
            want = ref.grads["query"]
            # what remains after the part along the row is taken off is judged beside the whole
            inverse = 1 / np.linalg.norm(args[0].astype(np.float64), axis=1)
            size = np.linalg.norm(want) + scale * np.linalg.norm(inverse) / m
            assert np.linalg.norm(out.grads["query"] - want) <= GRAD_BOUND["bf16"] * size
    assert blocks_swept


def test_one_pass_is_reproducible_and_sees_nan(blocks_swept: list[list[int]]) -> None:
    args = tuple(z.astype(BFLOAT16) for z in pairs("long", 700, 900, 72, np.float64, 0))
    options: Any = {"wrt": ("query",), "workspace": 500_000, "labels": np.arange(700)}
    first = run("info_nce", args, "bf16", 100.0, **options)
    assert any(blocks_swept)
    again = run("info_nce", args, "bf16", 100.0, **options)
    assert np.array_equal(first.losses, again.losses)
    for name, got in again.grads.items():
        assert np.array_equal(got, first.grads[name]), name
    for value in (np.nan, np.inf, -np.inf):
        query, key = (z.copy() for z in args)
        query[5, 2] = value
        out = run("info_nce", (query, key), "bf16", 100.0, **options)
        finite = np.arange(700) != 5
        assert np.isnan(out.losses[5])
        assert np.allclose(out.losses[finite], first.losses[finite], rtol=1e-5)
        assert np.isfinite(out.grads["query"][finite].astype(np.float32)).all()
        key[600, 2] = value
        assert np.isnan(run("info_nce", (args[0], key), "bf16", 100.0, **options).losses).all()


@pytest.mark.parametrize(("dtype", "precision"), CASES[:6])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_normalize(loss: str, method: str, dtype: str, precision: str) -> None:
    for m, n, d, seed in ((3, 4, 5, 0), (140, 140, 33, 1), (300, 300, 64, 2)):
        rng = np.random.default_rng(seed)
        args = [
            (z.astype(np.float64) * np.exp(2 * rng.standard_normal((len(z), 1)))).astype(z.dtype)
            for z in arguments(loss, *pairs("partly aligned", m, n, d, dtype_of(dtype), seed))
        ]
        ref = judged(loss, tuple(args), scale=20.0, normalize=True)
        out = run(loss, args, precision, 20.0, normalize=True, method=method)
        unit = [z.astype(np.float64) for z in args]
        unit = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in unit]
        # what remains after the part along the row is taken off is judged beside the whole
        for name, want in ref.grads.items():
            got = out.grads.get(name)
            if got is None or np.ndim(want) < 2:
                continue
            index = list(out.grads).index(name) if len(args) > 1 else 0
            inverse = 1 / np.linalg.norm(args[index].astype(np.float64), axis=1)
            size = np.linalg.norm(want) + 20.0 * np.linalg.norm(inverse) / len(inverse)
            error = np.linalg.norm(got.astype(np.float64) - want)
            bound = max(GRAD_BOUND[precision], STORED_BOUND[dtype]) + 200 * PRODUCT[precision]
            assert error <= bound * size, (name, m, n, d, error / size)
        bound = 80 * PRODUCT[precision] * max(1, abs(ref.loss))
        assert abs(out.loss - ref.loss) <= bound + LOSS_BOUND[precision] * abs(ref.loss)


def test_rows_of_zeros_stay_zero() -> None:
    image, text = pairs("random", 40, 40, 16, np.float32, 0)
    image[3] = 0
    out = run("clip", (image, text), "fp32", 10.0, normalize=True)
    assert np.all(out.grads["image"][3] == 0)
    assert np.isfinite(out.loss)
    assert all(np.isfinite(g).all() for g in out.grads.values())


@pytest.mark.parametrize("size", [1e-18, 1e-6, 1e15])
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_length_of_rows_does_not_matter(dtype: str, precision: str, size: float) -> None:
    args = [z.astype(dtype_of(dtype)) for z in pairs("random", 40, 40, 16, np.float32, 0)]
    power = 2.0 ** round(np.log2(size))
    long = [(z.astype(np.float64) * power).astype(z.dtype) for z in args]
    assert run("clip", args, precision, 10.0, normalize=True).loss == pytest.approx(
        run("clip", long, precision, 10.0, normalize=True).loss, rel=1e-12
    )


@pytest.mark.parametrize(("dtype", "precision"), [CASES[0], CASES[1], CASES[4]])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_ids(loss: str, method: str, dtype: str, precision: str) -> None:
    for n, seed in ((1, 0), (6, 1), (60, 2), (200, 3)):
        args = arguments(loss, *pairs("partly aligned", n, n, 8, dtype_of(dtype), seed))
        rng = np.random.default_rng(seed)
        ids: Any = rng.integers(0, max(1, n // 2), len(args[0]))
        if loss == "info_nce" and seed % 2:
            ids = ids, rng.integers(0, max(1, n // 2), len(args[1]))
        ref = judged(loss, args, scale=20.0, ids=ids)
        out = run(loss, args, precision, 20.0, ids=ids, method=method)
        check(out, ref, args, precision, 20.0)


@pytest.mark.parametrize(("dtype", "precision"), [CASES[0], CASES[1], CASES[4]])
@pytest.mark.parametrize("method", METHODS)
def test_labels_and_extra_negatives(method: str, dtype: str, precision: str) -> None:
    for m, n, seed in ((1, 1, 0), (5, 3, 1), (70, 300, 2), (300, 70, 3)):
        args = pairs("random", m, n, 24, dtype_of(dtype), seed)
        labels = np.random.default_rng(seed).integers(0, n, m)
        ref = judged("info_nce", args, scale=9.0, labels=labels)
        for wrt in (None, ("query",), ("key",), ()):
            out = run("info_nce", args, precision, 9.0, labels=labels, method=method,
                      wrt=wrt)  # fmt: skip
            check(out, ref, args, precision, 9.0)


def test_scale_and_bias_on_the_device() -> None:
    args = pairs("random", 90, 90, 32, np.float32, 0)
    for loss in LOSSES:
        z = arguments(loss, *args)
        for method in METHODS:
            known = run(loss, z, "fp32", 10.0, bias=-5.0, method=method)
            unknown = run(loss, z, "fp32", cupy.asarray(10.0), method=method,
                          bias=cupy.asarray(-5.0, np.float32))  # fmt: skip
            assert known.loss == unknown.loss
            for name, got in unknown.grads.items():
                assert np.array_equal(got, known.grads[name]), (loss, name)


@pytest.mark.parametrize(("dtype", "precision"), CASES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_reproducible(loss: str, method: str, dtype: str, precision: str) -> None:
    args = arguments(loss, *pairs("random", 700, 700, 40, dtype_of(dtype), 5))
    size = 2**21 if method == "tiled" else 2**28
    first = run(loss, args, precision, 30.0, workspace=size, method=method)
    for _ in range(2):
        again = run(loss, args, precision, 30.0, workspace=size, method=method)
        assert np.array_equal(first.losses, again.losses)
        for name, got in again.grads.items():
            assert np.array_equal(got, first.grads[name]), name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite(loss: str, method: str, value: float) -> None:
    for dtype, precision in (CASES[1], CASES[4]):
        for where in range(2):
            args = list(arguments(loss, *pairs("random", 70, 70, 9, dtype_of(dtype), 1)))
            args[min(where, len(args) - 1)][5, 2] = value
            out = run(loss, args, precision, 10.0, method=method)
            assert np.isnan(out.loss)
            if where == 0 and len(args) == 2:
                finite = np.delete(np.arange(70), 5)
                one_sided = loss in ("info_nce", "lit", "siglip")
                assert not one_sided or np.isfinite(out.losses[finite]).all()


def test_outputs_of_any_strides_and_guards() -> None:
    """Gradients go where they belong, and nothing beside it is touched."""
    for dtype, precision in (CASES[1], CASES[4], CASES[5]):
        for loss in ("clip", "nt_xent", "siglip"):
            z = arguments(loss, *pairs("random", 130, 130, 24, dtype_of(dtype), 2))
            plain = run(loss, z, precision, 15.0)
            names = ("features",) if loss == "nt_xent" else ("image", "text")
            for step in (1, 2):
                wholes, outs = {}, {}
                for name, a in zip(names, z, strict=True):
                    rows, d = a.shape
                    whole = cupy.full((rows + 6, step * d + 16), 7.0, a.dtype)
                    wholes[name], outs[name] = whole, whole[3:-3, 8 : 8 + step * d : step]
                run(loss, z, precision, 15.0, outs=outs)
                for name in names:
                    assert np.array_equal(host(outs[name]), plain.grads[name])
                    outs[name][...] = 7.0
                    assert bool((wholes[name] == 7.0).all())


@pytest.mark.parametrize("method", ["tiled", "naive"])
def test_metrics(method: str) -> None:
    image, text = pairs("partly aligned", 300, 300, 16, np.float32, 4)
    options: Any = {"ranks": True, "workspace": 2**19, "method": method}
    out = run("clip", (image, text), "fp32", 10.0, **options)
    x = image.astype(np.float64) @ text.astype(np.float64).T
    stats = out.solution.statistics
    assert np.array_equal(host(stats.row_rank), (x > np.diag(x)[:, None]).sum(1))
    assert np.array_equal(host(stats.column_rank), (x > np.diag(x)[None, :]).sum(0))
    z = np.concatenate([image, text])
    out = run("nt_xent", (z,), "fp32", 10.0, **options)
    x = z.astype(np.float64) @ z.astype(np.float64).T
    np.fill_diagonal(x, -np.inf)
    positive = x[np.arange(600), (np.arange(600) + 300) % 600]
    assert np.array_equal(host(out.solution.statistics.row_rank), (x > positive[:, None]).sum(1))


@pytest.mark.parametrize(("dtype", "precision"), [CASES[1], CASES[3], CASES[4]])
@pytest.mark.parametrize("loss", LOSSES)
def test_workspace_is_a_ceiling(loss: str, dtype: str, precision: str) -> None:
    """Temporary memory stays within `workspace`, beyond vectors of length M and N."""
    n, d, workspace = 4096, 256, 8 * 2**20
    args = [cupy.asarray(z) for z in arguments(loss, *pairs("random", n, n, d, dtype_of(dtype), 0))]
    outs = {"nt_xent": ("features",), "info_nce": ("query", "key"), "lit": ("text",)}
    made = {
        name: cupy.empty(z.shape, z.dtype)
        for name, z in zip(outs.get(loss, ("image", "text")), args, strict=False)
    }
    run(loss, args, precision, 14.0, workspace=workspace, outs=made)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        run(loss, args, precision, 14.0, workspace=workspace, outs=made)
        assert pool.total_bytes() <= workspace + 64 * 8 * 2 * n + 2**20


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), CASES[4:])
@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "clip", "siglip"])  # lit has no dK
def test_destinations_lend_memory(
    loss: str, dtype: str, precision: str, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of half of the rows are gathered where they will be handed out, in 16 bits."""
    names = {"nt_xent": ("features",), "info_nce": ("query", "key")}
    row_bytes = 8 if precision == "fp64" else 4
    for i, (n, d) in enumerate([(700, 40), (1301, 8), (701, 201), (612, 512)]):
        args = arguments(loss, *pairs("partly aligned", n, n, d, dtype_of(dtype), i))
        n = len(args[0])
        ids = np.random.default_rng(i).integers(0, n // 2, n) if i % 2 else None
        # half of it has room for nine tenths of dK
        options: Any = {"ids": ids, "normalize": normalize, "workspace": n * d * row_bytes * 9 // 5}
        if loss == "info_nce":
            options["labels"] = np.random.default_rng(i).integers(0, n, n)
        name = names.get(loss, ("image", "text"))[-1]
        made: list[Any] = []
        outs: dict[str, Any] = {}

        def recorded(*args: Any, made: list[Any] = made) -> Accumulator:
            made.append(Accumulator(*args))
            return made[-1]

        if i % 2:  # the caller's, in the middle of his
            whole = cupy.full((n + 32, d), 7.0, dtype_of(dtype))
            outs[name] = whole[16:-16]
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "Accumulator", recorded)
            lent = run(loss, args, precision, 10.0, outs=outs, **options)
            assert sum(acc.before is not None for acc in made) == 1
            patch.setattr(gpu, "lends", lambda out, real: 0)
            made.clear()
            plain = run(loss, args, precision, 10.0, **options)
            assert not any(acc.before is not None for acc in made)
        if not normalize:
            ref = judged(loss, args, scale=10.0, **{k: options[k] for k in ("ids", "labels")
                                                    if k in options})  # fmt: skip
            check(lent, ref, args, precision, 10.0)
        got, want = (np.asarray(r.grads[name], np.float64) for r in (lent, plain))
        assert np.linalg.norm(got - want) <= STORED_BOUND[dtype] * np.linalg.norm(want)
        if i % 2:
            assert bool((whole[:16] == 7.0).all())
            assert bool((whole[-16:] == 7.0).all())
        again = run(loss, args, precision, 10.0, outs=outs, **options)
        assert np.array_equal(lent.grads[name], again.grads[name])


def test_workspace_too_small() -> None:
    with pytest.raises(ValueError, match="workspace"):
        run("clip", pairs("random", 9, 9, 64, np.float32, 0), "fp32", 1.0, workspace=20)


def test_fused_that_does_not_fit() -> None:
    args = pairs("random", 99, 99, 4, np.float32, 0)
    with pytest.raises(ValueError, match="fused"):
        run("clip", args, "fp32", 1.0, workspace=9999, method="fused")


@pytest.mark.parametrize("method", METHODS)
def test_losses_near_zero_keep_their_digits(method: str) -> None:
    args = pairs("aligned", 50, 50, 256, np.float64, 0)
    ref = judged("clip", args, scale=200.0)
    assert 0 < ref.loss < 1e-40
    out = run("clip", args, "fp64", 200.0, method=method)
    assert out.loss == pytest.approx(ref.loss, rel=1e-11)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_graph_capture(loss: str, method: str) -> None:
    """Everything runs again, on new values, when a captured graph is launched."""
    options: Any = {"method": method}
    z = arguments(loss, *pairs("random", 64, 64, 32, np.float32, 0))
    new = arguments(loss, *pairs("partly aligned", 64, 64, 32, np.float32, 1))
    want = run(loss, new, "fp32", 10.0, **options)
    args = [cupy.asarray(a) for a in z]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        evaluate(loss, args, "fp32", 10.0, **options)  # compiles, allocates
        stream.begin_capture()
        solution, grads, _ = evaluate(loss, args, "fp32", 10.0, **options)
        graph = stream.end_capture()
        for a, b in zip(args, new, strict=True):
            a[...] = cupy.asarray(b)
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(host(solution.losses), want.losses)
        for name, got in grads.items():
            if got is not None:
                assert np.array_equal(host(got), want.grads[name]), name


def test_work_is_ordered_on_the_current_stream() -> None:
    args = [cupy.asarray(z) for z in pairs("random", 200, 200, 32, np.float32, 0)]
    want = run("clip", args, "fp32", 10.0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        busy = cupy.ones((4096, 4096), np.float32)
        for _ in range(20):
            busy = busy @ busy * np.float32(1e-4)
        late = [z + busy[0, 0] * 0 for z in args]
        out = run("clip", late, "fp32", 10.0)
    assert out.loss == want.loss


def test_many_calls_leak_nothing() -> None:
    args = [cupy.asarray(z) for z in pairs("random", 64, 64, 32, np.float32, 0)]
    for method in METHODS:
        run("clip", args, "fp32", 10.0, method=method)
    pool = cupy.get_default_memory_pool()
    used, total = pool.used_bytes(), pool.total_bytes()
    for i in range(1000):
        run("clip", args, "fp32", 10.0, method=METHODS[i % 3])
        with pytest.raises(ValueError, match="workspace"):
            run("clip", args, "fp32", 10.0, workspace=10)
    assert pool.used_bytes() <= used + 4096
    assert pool.total_bytes() <= total + 2**20
