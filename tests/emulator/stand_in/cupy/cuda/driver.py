"""The functions of CUDA's driver that the library calls."""

from __future__ import annotations

from .function import launch_at


def launchKernel(
    function: int, grid: int, grid_y: int, grid_z: int, block: int, block_y: int, block_z: int,
    shared: int, stream: int, parameters: int, extra: int,
) -> None:  # fmt: skip
    launch_at(function, grid, block, shared, stream, parameters)


def funcSetAttribute(function: int, attribute: int, value: int) -> None: ...
