"""The stand-in for CuPy: public calls on both kinds of device, memory, streams, and errors that are
those of CuPy."""

import gc
import re
from typing import Any

import emulation
import engine
import numpy as np
import pytest
from gpu_problems import find_dtype
from infonce.kernels.gpu import config
from judge import pairs

import infonce

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]


@pytest.fixture
def cupy() -> Any:
    import cupy

    assert "emulated" in cupy.__version__
    return cupy


def test_devices_and_portable_kernels(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    launch = engine.Kernel.launch

    def begin_recorded(self: Any, *args: Any, **options: Any) -> None:
        launched.append(self.name)
        launch(self, *args, **options)

    monkeypatch.setattr(engine.Kernel, "launch", begin_recorded)
    for device, portable, kernel in ((0, False, "sweep_lse"), (0, True, "lse"), (2, False, "lse")):
        monkeypatch.setattr(config.precision, "PORTABLE", portable)
        launched.clear()
        with cupy.cuda.Device(device):
            z = [cupy.asarray(z) for z in pairs("random", 140, 140, 72, find_dtype("bfloat16"), 0)]
            infonce.clip_loss(*z, scale=9.0, method="tiled")
        assert kernel in launched


def test_memory_is_nan_before_and_after(cupy: Any) -> None:
    array = cupy.empty(1000)
    assert np.isnan(array.get()).all()
    array[...] = 1.0
    late = cupy.ndarray(
        1000, float, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(array.data.ptr, 8000, None), 0)
    )
    assert (late.get() == 1.0).all()
    del array
    gc.collect()
    assert np.isnan(late.get()).all()


WRITES = """
extern "C" __global__ void writes(float* out, long long n) {
  if (threadIdx.x < n) out[threadIdx.x] = 1;
}
"""


def test_a_write_beyond_an_array_names_the_kernel(cupy: Any) -> None:
    writes, out = cupy.RawKernel(WRITES, "writes"), cupy.empty(64, np.float32)
    writes((1,), (96,), (out, np.int64(64)))
    assert (out.get() == 1).all()
    with pytest.raises(
        engine.KernelError, match=r"^writes: .*beyond the end of array of 256 bytes"
    ):
        writes((1,), (96,), (out, np.int64(65)))
    with pytest.raises(TypeError, match=r"writes: expected parameters of \[8, 8\] bytes"):
        writes((1,), (96,), (out, np.int32(64)))
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="bytes of shared memory"):
        writes((1,), (96,), (out, np.int64(64)), shared_mem=50_000)


def test_pools(cupy: Any) -> None:
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        a = cupy.empty(100, np.uint8)
        at = a.data.ptr
        assert (pool.used_bytes(), pool.total_bytes()) == (512, 512)
        del a
        assert (pool.used_bytes(), pool.free_bytes()) == (0, 512)
        assert cupy.empty(100, np.uint8).data.ptr == at
        pool.set_limit(size=1024)
        with pytest.raises(MemoryError, match="limit set to: 1,024 bytes"):
            cupy.empty(1025, np.uint8)


def test_arrays_of_the_host_are_no_operands(cupy: Any) -> None:
    array, host = cupy.ones(3), np.ones(3)
    for refused in (lambda: array + host, lambda: host + array, lambda: np.asarray(array),
                    lambda: np.maximum(array, host)):  # fmt: skip
        with pytest.raises(TypeError):
            refused()
    with pytest.raises(ValueError, match="Non-scalar"):
        array[...] = host
    with cupy.cuda.Device(1), pytest.raises(ValueError, match="Array device must be same"):
        array + 1


def test_views_share_memory_and_results_do_not(cupy: Any) -> None:
    array = cupy.zeros((4, 6))
    for view in (array[1:], array[2, 3], array.T, array.reshape(24), array[:, ::-2], array[None]):
        array[...] = 0
        view[...] = 7.0
        assert (array.get() == 7).sum() == view.size
        assert view.data.ptr == array.data.ptr + (view.data.ptr - array.data.ptr)
        assert cupy.may_share_memory(view, array)
    array[...] = 0
    copies = array + 0, array.copy(), array[[1, 2]], array[array == 0], cupy.where(array, 1, 2)
    for copy in copies:
        copy[...] = 7.0
        assert (array.get() == 0).all()
    array += 1
    array[1] *= 3
    assert array.get().sum() == 24 + 12


def test_graphs(cupy: Any) -> None:
    """A wait for the device cannot be captured. Other work runs when the graph is launched."""
    add_one = cupy.ElementwiseKernel("float64 x", "float64 y", "y = x + 1", "add_one")
    writes = cupy.RawKernel(WRITES, "writes")
    x, out = cupy.zeros(3), cupy.zeros(3, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    add_one(x)  # compiles
    with stream:
        stream.begin_capture()
        y = add_one(x) * 2
        z = y.sum()
        z += 1
        size = np.int64(3)
        writes((1,), (32,), (out, size))
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="waits for a stream"):
            float(z)
        graph = stream.end_capture()
        assert np.isnan(y.get()).all()
        for value in (1.0, 5.0):
            x[...] = value
            out[...] = 0
            graph.launch()
            assert (y.get() == 2 * (value + 1)).all()
            assert float(z) == 6 * (value + 1) + 1
            assert (out.get() == 1).all()


def test_what_a_captured_stream_refuses(cupy: Any) -> None:
    """Waits of the host, copies from the host, and CuPy's products."""
    x, stream = cupy.arange(3.0), cupy.cuda.Stream(non_blocking=True)
    waits = (lambda: x[x > 0], lambda: x.__setitem__(x > 0, 1.0), lambda: cupy.unique(x),
             lambda: cupy.bincount(cupy.arange(3)), lambda: bool((x > 0).any()))  # fmt: skip
    others = {lambda: cupy.asarray(np.arange(3)): RuntimeError, lambda: x @ x: NotImplementedError}
    with stream:
        stream.begin_capture()
        for wait in waits:
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="the host waits"):
                wait()
        for refused, error in others.items():
            with pytest.raises(error):
                refused()
        cupy.copyto(x, 5.0, where=x > 0)
        x[cupy.arange(1)] = cupy.asarray(4.0)
        stream.end_capture().launch()
    assert x.get().tolist() == [4, 5, 5]
    before = len(cupy.cuda.stream.waits)
    x[x > 4] = 0.0
    assert len(cupy.cuda.stream.waits) == before + 1


def test_no_value_of_several_at_one_index_stays(cupy: Any) -> None:
    x, index = cupy.zeros(4), cupy.asarray(np.array([0, 2, 2, 3, 3]))
    x[index] = cupy.asarray(np.array([1.0, 2.0, 3.0, 4.0, 4.0]))
    np.testing.assert_array_equal(x.get(), [1.0, 0.0, np.nan, 4.0])


@pytest.mark.parametrize("waits", [False, True])
def test_a_missing_wait_for_another_stream_shows(cupy: Any, waits: bool) -> None:
    wrong = 0
    for _ in range(30):
        with engine.schedule(1):
            x, stream = cupy.zeros(3), cupy.cuda.Stream(non_blocking=True)
            with stream:
                x += 1
                event = stream.record()
            if waits:
                cupy.cuda.get_current_stream().wait_event(event)
            wrong += not (x.get() == 1).all()
            stream.synchronize()
            assert (x.get() == 1).all()
    assert (wrong == 0) == waits


def test_memory_that_is_freed_before_a_copy_shows(cupy: Any) -> None:
    """A stream that copies late reads freed memory, which others have written since."""
    wrong = 0
    for _ in range(30):
        with engine.schedule(1):
            stream, to = cupy.cuda.Stream(non_blocking=True), cupy.zeros(3)
            array = cupy.ones(3)
            to.data.copy_from_device_async(array.data, to.nbytes, stream)
            del array
            stream.synchronize()
            wrong += not (to.get() == 1).all()
    assert wrong > 10


def test_the_tables_name_tests() -> None:
    """Names of `emulation.LEFT_OUT` and `EVERY` are tests on a GPU, and are in one of both."""
    tests = emulation.ROOT / "tests"
    files = [*(tests / "gpu").glob("test_*.py"), *(tests / "pairs").glob("test_*_gpu.py")]
    text = "".join(file.read_text() for file in files)
    known = set(re.findall(r"^def (test_\w+)", text, re.M))
    left_out = {name for names in emulation.LEFT_OUT.values() for name in names}
    assert left_out | emulation.EVERY.keys() <= known
    assert not left_out & emulation.EVERY.keys()
