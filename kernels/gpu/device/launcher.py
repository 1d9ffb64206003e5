"""Launches kernels by name: compiled by compiler.py, on a queue that runs or records the launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import cupy

from .. import config, schedule
from . import compiler
from .arguments import matrix, scalar, with_strides_in_whole_elements
from .launches import Queue
from .signatures import Structure, given_options, kernel_files, signature

HALF_WARP_ROW = 128  # half a warp computes a row of up to this number of features (rows.cuh)
# Values of the -D option PRECISION, by precision of operands
CUDA_PRECISIONS = {precision: precision.upper() for precision in config.OPERAND_BYTES}


def device_properties(index: int) -> config.DeviceProperties:
    """The properties of device `index`: always the same object, by which schedules are cached."""
    return _properties(index, config.precision.PORTABLE)


@cache
def _properties(index: int, portable: bool) -> config.DeviceProperties:
    """The properties, cached for both values of `config.precision.PORTABLE`, which tests set."""
    device = cupy.cuda.Device(index)
    attributes = device.attributes
    return config.DeviceProperties(
        device.compute_capability,
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
        attributes["MaxSharedMemoryPerMultiprocessor"],
        device.mem_info[1],
        portable,
    )


class Launcher:
    """Launches kernels on `queue`, which runs or records them.

    `device` is the current device. `precision` is the precision of operands for which `launch`
    compiles kernels (`launch_scheduled` takes it from the schedule).
    """

    def __init__(self, device: Any, precision: str, queue: Queue) -> None:
        self.device, self.precision, self.queue = device, precision, queue

    def launch(
        self, file: str, kernel: str, grid: int, block: int, arguments: Mapping[str, Any],
        shared: int = 0, **defines: int | str,
    ) -> None:  # fmt: skip
        """Launch `kernel` of `file` in kernels/cuda.

        `grid` thread blocks have `block` threads and `shared` bytes of dynamic shared memory each.
        `arguments` has the values of the kernel's parameters by name. `defines` are its -D options.
        """
        function = self.queue.function(
            self.device, file, kernel, shared, PRECISION=CUDA_PRECISIONS[self.precision], **defines
        )
        parameters = signature(file, kernel, given_options(defines))
        self.queue.launch(function, parameters, grid, block, shared, arguments)

    def launch_scheduled(
        self, kernel: schedule.ScheduledKernel, blocks: int, arguments: Mapping[str, Any]
    ) -> None:
        """Launch a scheduled kernel, which has its threads and -D options, in `blocks` blocks."""
        function = self.queue.function(
            self.device, kernel.file, kernel.name, kernel.shared, **kernel.defines
        )
        parameters = signature(kernel.file, kernel.name, given_options(kernel.defines))
        self.queue.launch(function, parameters, blocks, kernel.threads, kernel.shared, arguments)

    def launch_rows(
        self, kernel: str, rows: int, features: int | None = None, /, most: int | None = None,
        file: str = "rows.cu", defines: Mapping[str, int] | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel that computes `rows` rows, in at most `most` thread blocks (None: any).

        A warp computes a row, or half a warp if the row has few `features` (None: always a warp).
        `defines` are the kernel's -D options.
        """
        # 256 threads are 8 warps
        rows_per_block = 16 if features is not None and features <= HALF_WARP_ROW else 8
        blocks = -(-rows // rows_per_block)
        blocks = blocks if most is None else min(blocks, most)
        self.launch(file, kernel, blocks, 256, arguments, **(defines or {}))

    def launch_vectors(
        self, kernel: str, elements: int, /, threads: int = 1,
        defines: Mapping[str, int] | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel of vectors.cu on `elements` elements, with `threads` threads for each."""
        blocks = -(-elements * threads // 128)
        self.launch("vectors.cu", kernel, blocks, 128, arguments, **(defines or {}))


class Kernel:
    """A kernel of this library that a user launches: the result of `infonce.kernels.kernel`."""

    def __init__(self, name: str, defines: Mapping[str, int | str]) -> None:
        files = kernel_files()
        if name not in files:
            raise ValueError(f"name: expected one of {', '.join(sorted(files))}; got {name!r}")
        self.file, self.name, self.defines = files[name], name, dict(defines)
        self.signature = signature(self.file, name, given_options(defines))

    def __call__(self, blocks: int, threads: int, shared: int = 0, **arguments: Any) -> None:
        """Launch `blocks` thread blocks of `threads` threads on the current stream.

        `arguments` are the values of the kernel's parameters by name. The value of a struct Matrix
        may be an array, of a struct Scalar or Scale a number, of any structure a dict of fields.
        """
        arrays: list[Any] = []  # keeps the arrays until the kernel is launched
        for parameter, kind in self.signature.fields:
            value = arguments.get(parameter)
            if not isinstance(kind, Structure) or value is None or isinstance(value, Mapping):
                continue
            if kind.name == "Matrix":
                arrays.append(with_strides_in_whole_elements(value))
                arguments[parameter] = matrix(arrays[-1])
            else:
                arguments[parameter], array = scalar(value)
                arrays.append(array)
        packed = tuple(self.signature.arguments(arguments))
        device = cupy.cuda.Device()
        function = compiler.function(device, self.file, self.name, shared, **self.defines)
        function((blocks,), (threads,), packed, shared_mem=shared)
