"""Kernels that callers write: element by element, or as they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ._array import ndarray
from .cuda import nvrtc
from .cuda.device import Device
from .cuda.function import Function, Module

TYPES = {"float64": "double", "float32": "float", "int64": "long long", "int32": "int",
         "bool": "bool"}  # fmt: skip
THREADS = 128


@cache
def _module(source: str, options: tuple[str, ...], capability: str) -> Module:
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    arch = "sm_90a" if capability == "90" else f"sm_{capability}"
    try:
        nvrtc.compileProgram(program, (*options, f"-arch={arch}"))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{error}\n{nvrtc.getProgramLog(program)}") from None
    module = Module()
    module.load(nvrtc.getCUBIN(program))
    return module


class RawModule:
    """Kernels of a file that NVRTC has made, or of source."""

    def __init__(
        self, *, code: str | None = None, path: str | None = None, options: tuple[str, ...] = ()
    ) -> None:
        self._code, self._path, self._options = code, path, options

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self._code, name, self._options, path=self._path)


class RawKernel:
    """A kernel, which each device loads when it is first needed there."""

    def __init__(
        self, code: str | None, name: str, options: tuple[str, ...] = (), *,
        path: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self._code, self._path, self._options = name, code, path, options
        self._of_devices: dict[int, Function] = {}

    @property
    def kernel(self) -> Function:
        device = Device()
        if device.id not in self._of_devices:
            self._of_devices[device.id] = self._module(device).get_function(self.name)
        return self._of_devices[device.id]

    def _module(self, device: Device) -> Module:
        if self._path is None:
            assert self._code is not None
            return _module(self._code, self._options, device.compute_capability)
        module = Module()
        with open(self._path, "rb") as file:
            module.load(file.read())
        return module

    @property
    def attributes(self) -> dict[str, int]:
        """CuPy's attributes of a kernel, without those that machine code decides."""
        return {"max_dynamic_shared_size_bytes": self.max_dynamic_shared_size_bytes}

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self.kernel.max_shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self.kernel.max_shared = size

    def __call__(self, *args: Any, **options: Any) -> None:
        self.kernel(*args, **options)


class ElementwiseKernel:
    """`operation` on each element of arrays that are broadcast; outputs that are given are read and
    written where they are."""

    def __init__(
        self, in_params: str, out_params: str, operation: str, name: str = "kernel",
        preamble: str = "",
    ) -> None:  # fmt: skip
        self._inputs, self._outputs = _declared(in_params), _declared(out_params)
        self._name = name
        fields = [f"{c}* {n}_all" for c, n, _, _ in (*self._inputs, *self._outputs)]
        lines = [
            f"{c}{'* const' if raw else '&'} {n} = {n}_all{'' if raw else '[i]'};"
            for c, n, _, raw in (*self._inputs, *self._outputs)
        ]
        self._code = (
            f'{preamble}\n#line 1 "{name}"\n'
            f'extern "C" __global__ void {name}({", ".join(fields)}, long long size) {{\n'
            "const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
            f"if (i >= size) return;\n{' '.join(lines)}\n{operation};\n}}\n"
        )

    def __call__(self, *args: Any, size: int | None = None) -> Any:
        inputs = list(args[: len(self._inputs)])
        outputs = list(args[len(self._inputs) :])
        arrays = [
            z.shape for z, (*_, raw) in zip(inputs, self._inputs, strict=True)
            if isinstance(z, ndarray) and not raw
        ]  # fmt: skip
        shape = (
            np.broadcast_shapes(*arrays, *(z.shape for z in outputs)) if arrays else (size or 0,)
        )
        kept: list[Any] = []
        for z, (_, _, dtype, raw) in zip(inputs, self._inputs, strict=True):
            kept.append(_spread(z, None if raw else shape, dtype))
        new_outputs = [ndarray(shape, dtype) for _, _, dtype, _ in self._outputs[len(outputs) :]]
        for z, (_, name, dtype, _) in zip(outputs, self._outputs, strict=False):
            if z.dtype != dtype or z.shape != shape or not z.flags.c_contiguous:
                raise TypeError(f"{self._name}: {name} is expected as {shape} {dtype}, contiguous")
        count = int(np.prod(shape, dtype=object))
        if count:
            function = RawKernel(self._code, self._name)
            arguments = (*kept, *outputs, *new_outputs, count)
            function((-(-count // THREADS),), (THREADS,), arguments)
        results = (outputs + new_outputs)[: len(self._outputs)]
        return results[0] if len(results) == 1 else tuple(results)


def _spread(z: Any, shape: Any, dtype: Any) -> Any:
    """A contiguous array of this dtype, with an element for each of the shape."""
    import cupy

    if not isinstance(z, ndarray):
        if isinstance(z, np.ndarray) and z.ndim:
            raise TypeError(f"Unsupported type {type(z)}")
        z = cupy.full((), z, dtype)
    if shape is not None and z.shape != shape:
        z = cupy.broadcast_to(z, shape)
    return cupy.ascontiguousarray(z, dtype)


def _declared(params: str) -> list[tuple[str, str, Any, bool]]:
    """Type in C, name, dtype, and whether it is indexed by the operation: "raw float64 x"."""
    parameters = []
    for param in filter(None, map(str.strip, params.split(","))):
        *raw, kind, name = param.split()
        parameters.append((TYPES[kind], name, np.dtype(kind), raw == ["raw"]))
    return parameters
