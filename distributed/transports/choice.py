"""The choice of a call's transport: the fastest transport that all ranks have.

| transport | for |
|---|---|
| `mpi` | NumPy arrays, by the communicator: MPI, or gloo for a process group of PyTorch |
| `nccl` | CuPy arrays, one GPU for each rank: NCCL from CuPy, on a separate stream |
| `cuda-aware` | CuPy arrays, if the MPI library says that it accepts them |
| `staged` | CuPy arrays over any communicator, through pinned host memory |

An MPI library that is not CUDA-aware crashes on a GPU array, so the library is queried first.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..communicators.base import Communicator
from ..communicators.mpi import load_mpi
from .base import HostTransport, Transport

CHOICES = ("auto", "mpi", "nccl", "cuda-aware", "staged")
CUDA_AWARE = "INFONCE_CUDA_AWARE_MPI"  # an environment variable: 0 or 1 overrules the library


def cuda_aware() -> bool | None:
    """Whether MPI takes device memory. None: the library does not tell.

    The answer is that of INFONCE_CUDA_AWARE_MPI if it is set, otherwise the library's.
    """
    value = os.environ.get(CUDA_AWARE, "")
    if value:
        if value not in ("0", "1"):
            raise ValueError(f"{CUDA_AWARE}: expected 0 or 1, got {value!r}")
        return value == "1"
    return _query_library()


@functools.cache
def _query_library() -> bool | None:
    try:
        query = ctypes.CDLL(load_mpi().__file__).MPIX_Query_cuda_support
    except (ImportError, OSError, AttributeError):
        return None
    query.restype, query.argtypes = ctypes.c_int, []
    return bool(query())


# the transports of a rank, fastest first: name -> None, or the reason why the rank cannot use it
Availability = dict[str, str | None]
HOST_AVAILABILITY: Availability = {"mpi": None}


def gpu_availability(over_mpi: bool) -> Availability:
    """The transports for GPU arrays on this rank. `over_mpi`: see `Communicator`."""
    from . import nccl

    why_not_cuda_aware = None
    if not over_mpi:
        why_not_cuda_aware = "the ranks do not communicate by MPI"
    elif not cuda_aware():
        why_not_cuda_aware = "the MPI library does not say it is CUDA-aware"
    return {
        "nccl": nccl.why_unavailable(),
        "cuda-aware": why_not_cuda_aware,
        "staged": None,
    }


def describe(on_gpu: bool) -> dict[str, str]:
    """For `infonce info`: each transport, and whether it is available or why not.

    This function does not initialise MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        library = load_mpi().Get_library_version().split("\n")[0]
        states = {"mpi": "available: " + " ".join(library.split()).rstrip("\0")}
    except ImportError as error:
        return {"mpi": f"unavailable: {' '.join(str(error).split())}"}
    for name, why in gpu_availability(over_mpi=True).items() if on_gpu else ():
        states[name] = "available" if why is None else f"unavailable: {why}"
    return states


def choose(transport: str, availability_by_rank: Sequence[Availability]) -> str:
    """The transport of a call: `transport`, or for "auto" the first one that all ranks can use.

    `availability_by_rank` has the transports of each rank. ValueError names a rank without
    `transport`; "auto" always finds one, because all ranks have "mpi" or "staged".
    """
    for name in availability_by_rank[0] if transport == "auto" else [transport]:
        reasons = [
            (rank, transports.get(name, "it does not carry this kind of array"))
            for rank, transports in enumerate(availability_by_rank)
            if name not in transports or transports[name] is not None
        ]
        if not reasons:
            return name
    rank, reason = reasons[0]
    raise ValueError(
        f"transport: expected one that all ranks have, got {transport!r}; "
        f"rank {rank}: {name}: {reason}"
    )


def make(name: str, ranks: Communicator) -> Transport:
    """The transport called `name`. All ranks have to call this function together."""
    if name == "mpi":
        return HostTransport(ranks)
    from . import gpu, nccl

    makers: dict[str, Callable[[Communicator], Any]] = {
        "nccl": nccl.NCCL, "cuda-aware": gpu.CudaAware, "staged": gpu.Staged,
    }  # fmt: skip
    transport: Transport = gpu.get_transport(name, ranks, makers[name])
    return transport
