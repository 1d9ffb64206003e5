"""The backends (CPU, GPU, features in host memory) and the modules that they share.

The first module to read is `infonce.kernels.solve`: it has the order of the passes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["kernel"]


def kernel(name: str, **defines: int | str) -> Any:
    """Return one CUDA kernel of this package, which you launch on CuPy arrays.

    ``kernel("similarity", PRECISION="FP32")(blocks, threads, u=u, v=v, ...)`` launches the kernel
    on the current device and CuPy's current stream. The first launch compiles the kernel;
    `cupy.RawModule` loads it.

    Parameters
    ----------
    name : str
        Name of a kernel in the `.cu` files of `infonce/kernels/cuda`.
    defines : int or str
        Macros with which the kernel is compiled, as the options -D of a compiler.

    Returns
    -------
    callable
        ``launch(blocks, threads, shared=0, **arguments)`` launches `blocks` thread blocks of
        `threads` threads, with `shared` bytes of dynamic shared memory each. The keywords are the
        names of the kernel's parameters. A pointer takes an array or None. A structure takes a dict
        of its fields; a `Matrix` also takes an array, a `Scalar` or `Scale` a number or 0-d array.
        Nothing checks dtypes, shapes and the number of blocks: a wrong one reads or writes memory
        that belongs to something else.

    Raises
    ------
    ImportError
        CuPy is missing.
    ValueError
        There is no kernel of this name.
    """
    from .gpu.device.launcher import Kernel

    return Kernel(name, defines)
