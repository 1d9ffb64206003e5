"""Widths and numbers of rows that are no multiples of what the hardware likes."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import CASES, MISSING, check, fewer, find_dtype, gpu_only, run
from judge import LOSSES, VIEWS, arguments, judged, pairs

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels.gpu import config
    from infonce.kernels.gpu import recorded as gpu_recorded
    from infonce.kernels.gpu.device.launcher import Launcher, device_properties
    from infonce.kernels.gpu.device.launches import Queue
    from infonce.kernels.gpu.schedule import matrix_products
    from infonce.kernels.gpu.tiled.backend import GPU

ITEM = {0: 4, 1: 8, 2: 2, 14: 2}  # bytes of an element, by cuBLAS's number for its type


@pytest.mark.parametrize(("dtype", "precision"), CASES[:6])
@pytest.mark.parametrize("loss", LOSSES)
def test_large_products_are_of_whole_16_bytes(
    loss: str, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes along memory, strides and addresses are multiples of 16 bytes, for cuBLAS's fast
    kernels."""
    asked: list[tuple[int, ...]] = []
    gemm = Queue.gemm

    def recorded(queue: Any, *args: int) -> None:
        asked.append(args)
        gemm(queue, *args)

    monkeypatch.setattr(Queue, "gemm", recorded)
    for n, d in ((1601, 500), (1443, 513)):
        args = arguments(loss, *pairs("random", n, n, d, find_dtype(dtype), d))
        check(run(loss, args, precision, 10.0), judged(loss, args, scale=10.0), args, precision,
              10.0)  # fmt: skip
    large = [product for product in asked if np.prod(product[2:5], dtype=float) >= 2**28]
    assert large
    for _, op_b, m, n, k, _, a, type_a, lda, b, type_b, ldb, _, c, type_c, ldc, *_ in large:
        assert not any(address % 16 for address in (a, b, c))
        assert not any(size * ITEM[type_a] % 16 for size in (m, lda))
        assert not any(size * ITEM[type_b] % 16 for size in (n if op_b else k, ldb))
        assert not any(size * ITEM[type_c] % 16 for size in (m, ldc))


@pytest.mark.parametrize(("dtype", "precision"), CASES)
@pytest.mark.parametrize("loss", LOSSES)
def test_keys_that_remain(
    loss: str, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer keys than 16 bytes hold, as many, and one more or less; also where blocks are many."""
    monkeypatch.setattr(matrix_products, "LARGE_PRODUCT", 0)
    sizes = [(5, 1), (5, 3), (9, 7), (9, 8), (8, 9), (20, 15), (17, 17), (130, 127), (120, 129),
             (260, 250), (600, 521)]  # fmt: skip
    widths = (1, 7, 8, 9, 63, 64, 65, 100, 127, 129, 260)
    for i, ((m, n), d) in fewer(enumerate(zip(sizes, widths, strict=True)), 5):
        m = m if loss == "info_nce" else n
        args = arguments(loss, *pairs("partly aligned", m, n, d, find_dtype(dtype), i))
        options: dict[str, Any] = {}
        if loss == "info_nce":
            options["labels"] = np.random.default_rng(i).integers(0, n, m)
        ref = judged(loss, args, scale=10.0, **options)
        for workspace in (2**28, 150_000 + 3000 * d):
            view = VIEWS[i % len(VIEWS)]
            out = run(loss, args, precision, 10.0, workspace=workspace, view=view, **options)
            check(out, ref, args, precision, 10.0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), CASES[:6])
@pytest.mark.parametrize("loss", LOSSES)
def test_features_are_staged_once_where_they_fit(
    loss: str, dtype: str, precision: str, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are the same on both sides of the workspace that has room for staged features."""
    n, d = 300, 101
    args = arguments(loss, *pairs("partly aligned", n, n, d, find_dtype(dtype), 2))
    operands = config.fastest_operand_precision(
        precision, device_properties(cupy.cuda.runtime.getDevice())
    )
    row = config.padded(d, operands) * config.OPERAND_BYTES[operands]
    least = 5 * sum(len(z) for z in args) * row
    staged: list[str] = []
    launch_rows = Launcher.launch_rows

    def recorded(launcher: Any, kernel: str, *shape: int, **arguments: Any) -> None:
        staged.extend([kernel] * (kernel == "stage" and not arguments["weight"]))
        launch_rows(launcher, kernel, *shape, **arguments)

    monkeypatch.setattr(Launcher, "launch_rows", recorded)
    monkeypatch.setattr(gpu_recorded, "compile_kernels", lambda *_: None)  # which launches them too
    results = []
    for workspace in (least, least - 1):
        staged.clear()
        results.append(run(loss, args, precision, 10.0, normalize=normalize, workspace=workspace))
        if workspace == least:
            assert len(staged) == len(args)
    once, by_blocks = results
    assert once.loss == pytest.approx(by_blocks.loss, rel=1e-5)
    if not normalize:
        ref = judged(loss, args, scale=10.0)
        for result in results:
            check(result, ref, args, precision, 10.0)
    for name, got in once.grads.items():
        want = np.asarray(by_blocks.grads[name], np.float64)
        error = np.linalg.norm(np.asarray(got, np.float64) - want)
        assert error <= 4e-3 * np.linalg.norm(want), name


@pytest.mark.parametrize("wrt", [("text",), ("image", "text")])
@pytest.mark.parametrize("loss", ["siglip", "clip"])
def test_ranges_of_keys(loss: str, wrt: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of dK have no room for all keys, in a small workspace or in their destination."""
    passes: list[int] = []
    run_passes = GPU.run

    def recorded(self: GPU, scheduled: Any, *args: Any) -> None:
        passes.append(len(scheduled))
        run_passes(self, scheduled, *args)

    monkeypatch.setattr(GPU, "run", recorded)
    args = arguments(loss, *pairs("random", 700, 700, 24, find_dtype("bfloat16"), 1))
    outs = {name: cupy.zeros((700, 48), args[0].dtype)[:, ::2] for name in wrt}
    got = run(loss, args, "bf16", 0.5, wrt=wrt, outs=outs, workspace=2**17)
    assert max(passes) == 3 - (wrt == ("text",) and loss == "clip")
    check(got, judged(loss, args, scale=0.5), args, "bf16", 0.5)
