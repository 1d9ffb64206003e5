"""Which products make dQ and dK of gradient blocks: run by NumPy on the host, without a GPU."""

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy
from cupy.cuda import runtime
from gpu_problems import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.kernels.gpu import config, recorded
from infonce.kernels.gpu.config import workspace as blocks
from infonce.kernels.gpu.device import cublas
from infonce.kernels.gpu.device.launches import Queue
from infonce.kernels.gpu.schedule.matrix_products import SMALL_PART_FACTOR
from infonce.kernels.gpu.tiled import backend
from infonce.kernels.problem import Gradients, Problem

pytestmark = pytest.mark.extras
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ELEMENT = {"fp64": np.dtype("f8"), "fp32": np.dtype("f2"), "bf16": BFLOAT16, "bf16x3": BFLOAT16}
FEATURES = {"fp64": "f8", "fp32": "f4", "bf16": BFLOAT16, "bf16x3": "f4"}
CUBLAS_TYPES = {0: np.dtype("f4"), 1: np.dtype("f8"), 2: np.dtype("f2"), 14: BFLOAT16}
# of P and of features in two 16-bit parts, and of sums in float32
BOUND = {"fp64": 1e-14, "fp32": 4e-6, "bf16": 6e-3, "bf16x3": 1e-4}
DIVISOR = 4.0  # gradient divisor


class Device:
    id, compute_capability = 0, "90"


def host(address: int, rows: int, columns: int, stride: int, dtype: Any) -> np.ndarray:
    """A matrix in the host's memory, `stride` elements from row to row."""
    item = np.dtype(dtype).itemsize
    size = ((rows - 1) * stride + columns) * item
    memory = np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(memory, (rows, columns), (stride * item, item))


def number(array: Any, i: int = 0) -> float:
    """A float64 number of an array."""
    return float(host(array.data.ptr + 8 * i, 1, 1, 1, "f8")[0, 0])


class HostQueue(Queue):
    """Does what matters here of some kernels, and cuBLAS's products, on arrays in host memory. In
    one pass, each row of P has a gradient divisor of its own."""

    def __init__(self, p: np.ndarray, precision: str) -> None:
        self.p, self.precision, self.element = p, precision, ELEMENT[precision]
        self.arrays: list[np.ndarray] = []
        self.sums: dict[bool, dict[int, np.ndarray]] = {False: {}, True: {}}  # of queries, of keys
        self.row_divisors = np.exp2(np.arange(len(p)) % 7 - 3) * (-1) ** np.arange(len(p))
        self.rows = slice(0)  # of the last block
        self.swept: list[int] = []  # rows of blocks in one pass
        self.copied = 0

    def malloc(self, size: int) -> Any:
        self.arrays.append(np.full(size + 16, 0xFF, np.uint8))  # NaN, whatever the type
        start = self.arrays[-1].ctypes.data
        memory = cupy.cuda.UnownedMemory(start, size + 16, None, 0)
        return cupy.cuda.MemoryPointer(memory, -start % 16)

    def split(self, to: int, values: np.ndarray, stride: int, part: int, low: float) -> None:
        """Values as operands or gradient blocks hold them: one part, or the rest beside it in units
        of 1 / low."""
        into = host(to, len(values), stride, stride, self.element)
        into[:, : values.shape[1]] = first = values.astype(self.element)
        if part:
            rest = (values - first.astype(np.float64)) * low
            into[:, part : part + values.shape[1]] = rest.astype(self.element)

    def function(self, device: Any, file: str, name: str, shared: int, **defines: Any) -> str:  # type: ignore[override]
        return name

    def launch(
        self, function: Any, signature: Any, grid: int, block: int, shared: int,
        arguments: Mapping[str, Any],
    ) -> None:  # fmt: skip
        a = arguments
        if function == "stage":
            rows = host(
                a["z"]["data"], a["n"], a["d"], a["z"]["row_stride"], FEATURES[self.precision]
            )
            wide = np.zeros((a["n"], a["part"] or a["stride"]))
            wide[:, : a["d"]] = rows
            if a["weight"]:
                wide *= host(a["weight"], a["n"], 1, 1, "f8") / number(a["gradient_divisor"])
            self.split(a["out"].data.ptr, wide, a["stride"], a["part"], 1.0)
        elif function in ("gradient", "sweep_gradient", "sweep_online"):
            q, k = a["block"]["q"]["rows"], a["block"]["k"]["rows"]
            top, left = a["block"]["first_row"], a["block"]["first_column"]
            low = SMALL_PART_FACTOR.get("fp16x3", 1.0) if self.precision == "fp32" else 1.0
            data, stride, part = (a["gradient_block"][name] for name in ("data", "stride", "part"))
            self.rows = slice(top, top + q)
            divisor: Any = DIVISOR
            if function == "sweep_online":
                divisor = self.row_divisors[self.rows, None]
                self.swept += [q] * (a["visited_tiles"] is None)
            block = self.p[self.rows, left : left + k] / divisor
            self.split(data, block, stride, part * (part != stride), low)
        elif function == "ranges":
            host(a["out"].data.ptr, 1, 1, 1, "f8")[...] = DIVISOR
        elif function == "end_online":
            host(a["gradient_divisor"], 1, a["n"], a["n"], "f8")[...] = self.row_divisors[self.rows]
        elif function == "add_dq_copies":
            sums = host(a["sums"].data.ptr, a["dq_copies"], a["n"], a["n"], np.float32)
            sums[0] = sums.sum(0)
        elif function == "finish":
            real = np.float64 if self.precision == "fp64" else np.float32
            rows = host(a["acc"], a["n"], a["d"], a["acc_stride"], real)
            totals = self.sums[a["positives"]["begin"] is not None]  # rows are keys
            for i, row in enumerate(rows.astype(np.float64), a["first"]):
                totals[i] = row * number(a["gradient_divisor"], i * a["divisor_step"])

    def tensor_map(self, data: int, *form: Any) -> Any:
        return None

    def copy(self, to: Any, source: Any, size: int) -> None:
        """Counts copies of finished gradients from their accumulators. No test here reads the
        copies."""
        self.copied += 1

    def zeroed_array(self, n: int, dtype: Any) -> Any:
        return cupy.empty(n, dtype)

    def gemm(self, *arguments: int) -> None:
        batch = arguments[18:] or (0, 0, 0, 1)
        (_, op, d, n, k, alpha, z, input_type, z_stride, p, _, p_stride, beta, out, output_type,
         out_stride, *_) = arguments[:18]  # fmt: skip
        element, real = CUBLAS_TYPES[input_type], CUBLAS_TYPES[output_type]
        alpha_value, beta_value = (
            float(host(number, 1, 1, 1, real)[0, 0]) for number in (alpha, beta)
        )
        for i in range(batch[3]):
            shape = (n, k) if op == 0 else (k, n)
            left = host(p + i * batch[1] * element.itemsize, *shape, p_stride, element)
            right = host(z + i * batch[0] * element.itemsize, k, d, z_stride, element)
            to = host(out + i * batch[2] * real.itemsize, n, d, out_stride, real)
            product = (left if op == 0 else left.T).astype(np.float64) @ right.astype(np.float64)
            to[...] = alpha_value * product + (beta_value * to if beta_value else 0)


@pytest.fixture(scope="module", autouse=True)
def no_gpu_needed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.cuda, "Device", Device)
        patch.setattr(runtime, "getDevice", lambda: 0)
        patch.setattr(backend, "device_properties", lambda _: DEVICES["sm_90a"])
        yield


@settings(max_examples=60)
@given(
    m=st.integers(1, 300), n=st.integers(1, 5000), d=st.integers(1, 150),
    precision=st.sampled_from(sorted(ELEMENT)),
    wrt=st.sampled_from([(True, False), (True, True), (False, True)]),
    least_rows=st.sampled_from([1, blocks.ALL_KEYS_ROWS]),
    workspace=st.sampled_from([2**18, 2**20, 2**22, 2**28]), seed=st.integers(0, 99),
)  # fmt: skip
def test_gradients_are_products_with_all_of_the_gradient_blocks(
    m: int, n: int, d: int, precision: str, workspace: int, wrt: tuple[bool, bool],
    least_rows: int, seed: int,
) -> None:  # fmt: skip
    """dQ = P K and dK = P' Q, whatever the blocks, the sums that are batched and their rest, and
    what lies staged from pass to pass; in one pass or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "ALL_KEYS_ROWS", least_rows)
        config.block_sizes_for_all_keys.cache_clear()
        gradients_of_blocks(m, max(m, n), d, precision, workspace, wrt, seed)
    config.block_sizes_for_all_keys.cache_clear()


def gradients_of_blocks(
    m: int, n: int, d: int, precision: str, workspace: int, wrt: tuple[bool, bool], seed: int
) -> HostQueue:
    """Checks the gradients of random gradient blocks. Returns the queue that made them."""
    rng = np.random.default_rng(seed)
    p = rng.standard_normal((m, n))
    query, key = (rng.standard_normal((rows, d)).astype(FEATURES[precision]) for rows in (m, n))
    queue = HostQueue(p, precision)
    with cupy.cuda.using_allocator(queue.malloc):

        def array(values: np.ndarray) -> Any:
            array = cupy.empty(values.shape, values.dtype)
            host(array.data.ptr, *values.shape, values.shape[1], values.dtype)[...] = values
            return array

        problem = Problem(array(query), array(key), 1.0, 1 / m, cupy.empty(m, np.int64),
                          compute_precision=precision, workspace=workspace)  # fmt: skip
        gradients = Gradients(
            cupy.empty_like(problem.query), cupy.empty_like(problem.key), None, *wrt
        )
        recorded.solution(problem, gradients, queue)
    for key_side in (side for side, wanted in zip((False, True), wrt, strict=True) if wanted):
        left, right = (p.T, query) if key_side else (p, key)
        right = right.astype(np.float64)
        gradient = np.stack([queue.sums[key_side][i] for i in range(n if key_side else m)])
        size = np.sqrt(left**2 @ right**2)  # of sums whose terms have random signs
        error = np.linalg.norm(gradient - left @ right) / np.linalg.norm(size)
        assert error <= BOUND[precision], (key_side, error)
    return queue


@pytest.mark.parametrize("wrt", [(True, True), (False, True)])
@pytest.mark.parametrize(
    ("precision", "d", "workspace"),
    [("bf16", 72, 900_000), ("bf16", 70, 1_100_000), ("bf16x3", 72, 900_000)],
)
def test_blocks_of_all_keys_add_to_their_gradients(
    precision: str, d: int, workspace: int, wrt: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One pass adds to dQ and dK. The first accumulators of a 16-bit dK overlay it."""
    monkeypatch.setattr(blocks, "ALL_KEYS_ROWS", 1)
    config.block_sizes_for_all_keys.cache_clear()
    queue = gradients_of_blocks(300, 1500, d, precision, workspace, wrt, 0)
    assert len(queue.swept) > 1
    assert sum(queue.swept) == 300
    assert (queue.copied > 0) == (precision == "bf16")
    config.block_sizes_for_all_keys.cache_clear()


def test_sums_are_batched_here() -> None:
    """The shapes of the test above have several accumulators for each row of dQ."""
    for shape in ((300, 5000, 150), (100, 2000, 40), (256, 65536, 128)):
        assert config.choose_dq_copies(shape, "fp16x3", 132, 2**28) > 1


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("batch", [(), (7, 8, 9, 3)])
def test_arguments_of_cublas(
    batch: tuple[int, ...], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS gets its arguments in the order of its headers, from CuPy's wrapper or under
    capture."""
    names = ["transa", "transb", "m", "n", "k", "alpha", "A", "Atype", "lda", "B", "Btype", "ldb",
             "beta", "C", "Ctype", "ldc", "compute", "algo"]  # fmt: skip
    values = dict(zip(names, range(100, 118), strict=True))
    wanted = list(values.values())
    if batch:
        wanted = [*wanted[:9], 7, *wanted[9:12], 8, *wanted[12:16], 9, 3, *wanted[16:]]
    called: dict[str, list[Any]] = {}

    class Library:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: called.update({name: list(arguments)}) or 0

    class Stream:
        ptr = 0

        def is_capturing(self) -> bool:
            return captured

    monkeypatch.setitem(vars(cupy.cuda), "cublas", Library())  # which need not be there
    monkeypatch.setattr(cupy.cuda, "get_current_stream", Stream)
    monkeypatch.setattr(cublas, "_library", Library)
    monkeypatch.setattr(cublas, "workspace_bytes", lambda _: 4 * 2**20)
    monkeypatch.setattr(runtime, "getDevice", lambda: 0)
    with cupy.cuda.using_allocator(HostQueue(np.zeros((1, 1)), "fp32").malloc):
        cublas.gemm_ex(55, *values.values(), *batch)
    name = "gemmStridedBatchedEx" if batch else "gemmEx"
    name = f"cublasG{name[1:]}" if captured else name
    numbers = [getattr(argument, "value", argument) for argument in called[name]]
    assert numbers == [55, *wanted]
    if captured:
        assert called["cublasSetWorkspace_v2"][2].value == 4 * 2**20
