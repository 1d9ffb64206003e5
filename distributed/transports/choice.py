"""Which transport a call takes: the fastest that all of its ranks have.

| transport | for |
|---|---|
| `mpi` | NumPy arrays: plain MPI |
| `nccl` | CuPy arrays, a GPU a rank: NCCL from CuPy, on a stream of its own |
| `cuda-aware` | CuPy arrays, where the MPI library says that it takes them |
| `staged` | CuPy arrays over any MPI, through pinned host memory |

An MPI library that is not CUDA-aware crashes on a GPU array: so the library is queried first.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..communicators.base import Communicator
from ..communicators.mpi import load_mpi
from .base import Host, Transport

CHOICES = ("auto", "mpi", "nccl", "cuda-aware", "staged")
CUDA_AWARE = "INFONCE_CUDA_AWARE_MPI"  # of the environment: 0 or 1


def cuda_aware() -> bool | None:
    """Whether the MPI library reports that it takes device memory; None where it cannot tell."""
    asked = os.environ.get(CUDA_AWARE, "")
    if asked:
        if asked not in ("0", "1"):
            raise ValueError(f"{CUDA_AWARE}: expected 0 or 1, got {asked!r}")
        return asked == "1"
    return _library_says()


@functools.cache
def _library_says() -> bool | None:
    try:
        query = ctypes.CDLL(load_mpi().__file__).MPIX_Query_cuda_support
    except (ImportError, OSError, AttributeError):
        return None
    query.restype, query.argtypes = ctypes.c_int, []
    return bool(query())


def offers(on_gpu: bool) -> dict[str, str | None]:
    """The transports for host or GPU arrays, fastest first: None, or why this rank has it not."""
    if not on_gpu:
        return {"mpi": None}
    from . import nccl

    return {
        "nccl": nccl.missing(),
        "cuda-aware": None if cuda_aware() else "the MPI library does not say it is CUDA-aware",
        "staged": None,
    }


def describe(on_gpu: bool) -> dict[str, str]:
    """Each transport: what it uses, or why it is unavailable. Does not initialise MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        library = load_mpi().Get_library_version().split("\n")[0]
        states = {"mpi": "available: " + " ".join(library.split()).rstrip("\0")}
    except ImportError as error:
        return {"mpi": f"unavailable: {' '.join(str(error).split())}"}
    for name, why in offers(True).items() if on_gpu else ():
        states[name] = "available" if why is None else f"unavailable: {why}"
    return states


def choose(asked: str, offered: Sequence[dict[str, str | None]]) -> str:
    """The first transport that all ranks offer; ValueError names a rank that lacks `asked`."""
    for name in offered[0] if asked == "auto" else [asked]:
        lacking = [
            (r, offer.get(name, "it does not carry this kind of array"))
            for r, offer in enumerate(offered)
            if offer.get(name, "no") is not None
        ]
        if not lacking:
            return name
    r, why = lacking[0]
    raise ValueError(
        f"transport: expected one that all ranks have, got {asked!r}; rank {r}: {name}: {why}"
    )


def make(name: str, ranks: Communicator) -> Transport:
    """The transport of that name. Collective."""
    if name == "mpi":
        return Host(ranks)
    from . import gpu, nccl

    makers: dict[str, Callable[[Communicator], Any]] = {
        "nccl": nccl.NCCL, "cuda-aware": gpu.CudaAware, "staged": gpu.Staged,
    }  # fmt: skip
    made: Transport = gpu.kept(name, ranks, makers[name])
    return made
