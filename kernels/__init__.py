"""Backends and the passes over blocks they share: see `infonce.kernels.solve`."""

from __future__ import annotations

from typing import Any

__all__ = ["kernel"]


def kernel(name: str, **defines: int | str) -> Any:
    """A CUDA kernel of this package, to be launched by itself on CuPy arrays.

    ``kernel("similarity", PRECISION="FP32")(blocks, threads, u=u, v=v, ...)`` launches it on the
    current device and CuPy's current stream. It is compiled at its first launch, and loaded by
    `cupy.RawModule`.

    Parameters
    ----------
    name : str
        Of the kernel in the `.cu` files of `infonce/kernels/cuda`.
    defines : int or str
        Macros with which the kernel is compiled.

    Returns
    -------
    callable
        ``launch(blocks, threads, shared=0, **arguments)``: so many blocks of so many threads, with
        so many bytes of dynamic shared memory. Arguments go by the names of the kernel's
        parameters: arrays or None for pointers; numbers; for a structure a dict of its fields, or
        the array or number that a `Matrix`, `Scalar` or `Scale` is about. A kernel reads memory as
        it is: dtypes, shapes and the number of blocks are the caller's to get right.

    Raises
    ------
    ImportError
        CuPy is missing.
    ValueError
        There is no kernel of this name.
    """
    from .gpu.device.launcher import Kernel

    return Kernel(name, defines)
