"""Memory of the emulated devices: NaN until something is written."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import Any

import engine

from . import runtime
from . import stream as streams

UNIT = 512  # bytes: CuPy's pool hands out multiples
POISON = 0xFF  # NaN in every floating-point format
CACHE = 2**29  # bytes that a pool keeps for later arrays, at most


class OutOfMemoryError(MemoryError):
    """No memory is left on the device, or a pool has reached its limit."""


class BaseMemory:
    """Memory on a device. `size` is in bytes."""

    def __init__(self, ptr: int, size: int, device: int) -> None:
        self.ptr, self.size, self.device_id = ptr, size, device

    @property
    def device(self) -> Any:
        from .device import Device

        return Device(self.device_id)


class Memory(BaseMemory):
    """Pages of their own. What lies before and behind them stops the launch that goes there."""

    def __init__(self, size: int) -> None:
        try:
            self._memory = engine.Memory(max(size, 1))
        except MemoryError as error:
            raise runtime.CUDARuntimeError(runtime.OUT_OF_MEMORY, str(error)) from None
        super().__init__(self._memory.ptr, size, runtime.getDevice())
        self.stream = streams.get_current_stream()  # which uses it again

    def spoil(self) -> None:
        """Fill the memory with NaN, in stream order: work queued earlier still reads its values.

        Not during a capture: the graph would fill the memory in each of its runs.
        """
        if not self.stream.is_capturing():
            memory = self._memory
            self.stream.submit(lambda: ctypes.memset(memory.ptr, POISON, memory.size))

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # module globals end before the last arrays
            streams.synchronize_all()  # as cudaFree


class UnownedMemory(BaseMemory):
    """Memory that `owner` has."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        super().__init__(ptr, size, runtime.getDevice() if device_id < 0 else device_id)
        self._owner = owner


class PooledMemory(BaseMemory):
    """Memory of a pool, which gets it back."""

    def __init__(self, block: Memory, size: int, pool: MemoryPool) -> None:
        super().__init__(block.ptr, size, block.device_id)
        self._pool = pool  # which has the block: of garbage, blocks could go before their owners

    def __del__(self) -> None:
        self._pool._take_back(self.ptr)


class MemoryPointer:
    """`offset` bytes into some memory."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    @property
    def device(self) -> Any:
        return self.mem.device

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __int__(self) -> int:
        return self.ptr

    def copy_from_device_async(self, source: Any, size: int, stream: Any = None) -> None:
        runtime.memcpyAsync(self.ptr, source.ptr, size, 0, _address(stream))

    def copy_from_host_async(self, source: int, size: int, stream: Any = None) -> None:
        refuse_host_copy(stream or streams.get_current_stream())
        runtime.memcpyAsync(self.ptr, source, size, 0, _address(stream))

    def copy_to_host_async(self, target: int, size: int, stream: Any = None) -> None:
        refuse_host_copy(stream or streams.get_current_stream())
        runtime.memcpyAsync(target, self.ptr, size, 0, _address(stream))

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        runtime.memsetAsync(self.ptr, value, size, _address(stream))


def refuse_host_copy(stream: Any) -> None:
    """As CuPy: a graph would copy memory of the host that is gone when the graph runs."""
    if stream.is_capturing():
        raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")


def _address(stream: Any) -> int:
    address: int = (stream or streams.get_current_stream()).ptr
    return address


class MemoryHook:
    """Is told of what pools of this thread give and take."""

    name = "hook"

    def __enter__(self) -> MemoryHook:
        _hooks().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _hooks().remove(self)

    def malloc_postprocess(self, **facts: int) -> None: ...
    def free_postprocess(self, **facts: int) -> None: ...


_of_thread = threading.local()


def _hooks() -> list[MemoryHook]:
    hooks: list[MemoryHook] = _of_thread.__dict__.setdefault("hooks", [])
    return hooks


class MemoryPool:
    """Keeps memory that was given back for arrays of the same size, as CuPy's pool does.

    Where CuPy's pool cuts what it keeps to size, this one gives it to the host again: `total_bytes`
    are those of a pool that wastes nothing."""

    def __init__(self, allocator: Any = None) -> None:
        self._free: dict[tuple[Any, int, int], list[Memory]] = defaultdict(list)
        self._blocks: dict[int, Memory] = {}  # in use, by address
        self._used = self._kept = self._total = self._limit = 0

    def malloc(self, size: int) -> MemoryPointer:
        if size == 0:
            return MemoryPointer(UnownedMemory(0, 0, self), 0)
        units = -(-size // UNIT) * UNIT
        with engine.turn:
            if self._limit and self._used + units > self._limit:
                raise OutOfMemoryError(
                    f"Out of memory allocating {units:,} bytes (allocated so far: {self._used:,} "
                    f"bytes, limit set to: {self._limit:,} bytes)."
                )
            kept = self._free[streams.get_current_stream(), runtime.getDevice(), size]
            if kept:
                block = kept.pop()
                self._kept -= units
            else:
                if self._kept > CACHE:
                    self._drop()
                block = Memory(size)
            self._blocks[block.ptr] = block
            self._used += units
            self._total = max(self._total, self._used)
        for hook in _hooks():
            hook.malloc_postprocess(size=size, mem_size=units, mem_ptr=block.ptr)
        return MemoryPointer(PooledMemory(block, size, self), 0)

    def _take_back(self, ptr: int) -> None:
        block = self._blocks.pop(ptr)
        units = -(-block.size // UNIT) * UNIT
        block.spoil()
        with engine.turn:
            self._used -= units
            self._kept += units
            self._free[block.stream, block.device_id, block.size].append(block)
        for hook in _hooks():
            hook.free_postprocess(mem_size=units, mem_ptr=block.ptr)

    def _drop(self) -> None:
        self._free.clear()
        self._kept = 0

    def free_all_blocks(self, stream: Any = None) -> None:
        with engine.turn:
            self._drop()
            self._total = self._used

    def used_bytes(self) -> int:
        return self._used

    def total_bytes(self) -> int:
        return self._total

    def free_bytes(self) -> int:
        return self._total - self._used

    def set_limit(self, size: int = 0) -> None:
        self._limit = size


default_pool = MemoryPool()


def alloc(size: int) -> MemoryPointer:
    """Memory of the current allocator."""
    allocators = _of_thread.__dict__.get("allocators")
    pointer: MemoryPointer = (allocators[-1] if allocators else default_pool.malloc)(size)
    return pointer


@contextmanager
def using_allocator(allocator: Any) -> Any:
    allocators = _of_thread.__dict__.setdefault("allocators", [])
    allocators.append(allocator)
    try:
        yield
    finally:
        allocators.pop()
