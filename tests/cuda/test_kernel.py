"""Kernels that are launched by themselves, as docs/api/kernels.md does."""

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy
import infonce.kernels
from infonce.kernels.gpu.device import compiler

pytestmark = pytest.mark.extras
PAGE = Path(__file__).parents[2] / "docs" / "api" / "kernels.md"
_, RAW = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


class OnHost:
    """Stands for a device whose memory is the host's: arrays of CuPy lie in NumPy's."""

    compute_capability, id = "90", 0

    def __init__(self) -> None:
        self.memory: list[Any] = []
        self.launches: list[Any] = []

    def malloc(self, size: int) -> Any:
        self.memory.append(np.zeros(size, np.uint8))
        memory = cupy.cuda.UnownedMemory(self.memory[-1].ctypes.data, size, None, 0)
        return cupy.cuda.MemoryPointer(memory, 0)

    def array(self, values: Any, dtype: Any = None) -> Any:
        values = np.asarray(values, dtype)
        array = cupy.ndarray(values.shape, values.dtype, self.malloc(values.nbytes))
        ctypes.memmove(array.data.ptr, values.ctypes.data, values.nbytes)
        return array

    def function(self, _: Any, file: str, name: str, shared: int, **defines: Any) -> Any:
        def launch(grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
            assert shared_mem == shared
            self.launches.append((file, name, grid, block, arguments, defines))

        return launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> OnHost:
    device = OnHost()
    monkeypatch.setattr(cupy.cuda, "Device", lambda: device)
    monkeypatch.setattr(compiler, "function", device.function)
    return device


def test_matrices_are_arrays(device: OnHost) -> None:
    """A matrix argument is an array, which provides strides and dtype."""
    z = device.array(np.ones((6, 8), np.float16))[::2, 1:]
    u, inverse, bad = (device.array(np.zeros(shape)) for shape in ((3, 7), 3, 3))
    launch = infonce.kernels.kernel("unit_rows", PRECISION="FP64")
    launch(3, 256, z=z, d=7, normalize=True, u=u, inverse=inverse, row_nans=bad)
    ((_, _, _, _, (matrix, *rest), _),) = device.launches
    assert struct.unpack("=Qqqq", matrix.tobytes()) == (z.data.ptr, 16, 1, 3)
    assert rest == [7, 1, u.data.ptr, inverse.data.ptr, bad.data.ptr]


def test_errors_come_before_a_launch(device: OnHost) -> None:
    with pytest.raises(ValueError, match=r"name: expected one of .*similarity.*; got 'similar'"):
        infonce.kernels.kernel("similar")
    with pytest.raises(TypeError, match=r"similarity: expected u, v, m, .*; got u"):
        infonce.kernels.kernel("similarity", PRECISION="FP32")(1, 256, u=None)
    assert not device.launches


def test_the_raw_module_of_the_page(
    device: OnHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The module's path is a file of machine code that has the kernel."""
    loaded: list[Any] = []

    class RawModule:
        def __init__(self, *, path: str) -> None:
            loaded.append(Path(path).read_bytes())

        def get_function(self, name: str) -> Any:
            loaded.append(name)
            return type("RawKernel", (), {"attributes": {}})

    monkeypatch.setenv("INFONCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cupy, "RawModule", RawModule)
    exec(RAW, {"print": lambda _: None})
    code, name = loaded
    assert code[:4] == b"\x7fELF"
    assert b".text." + name.encode() in code
