"""The part of `cupy.cuda` that the library and its tests use."""
# ruff: noqa: F401

from . import cublas, device, driver, function, memory, nccl, nvrtc, runtime, stream
from .device import Device
from .memory import (
    BaseMemory,
    Memory,
    MemoryHook,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
    using_allocator,
)
from .stream import Event, Graph, Stream, get_current_stream, get_elapsed_time
