"""The emulated devices: few multiprocessors, so that blocks of threads have more than one tile."""

from __future__ import annotations

from . import runtime

MULTIPROCESSORS = 4
KIB = 1024
# of a block and of a multiprocessor, and of the device
SHARED = {"90": (227 * KIB, 228 * KIB), "80": (163 * KIB, 164 * KIB)}
MEMORY = {"90": 141 * 10**9, "80": 80 * 2**30}


class Device:
    def __init__(self, device: int | Device | None = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __index__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        self._before.append(runtime.getDevice())
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        runtime.setDevice(self._before.pop())

    def use(self) -> Device:
        runtime.setDevice(self.id)
        return self

    def synchronize(self) -> None:
        runtime.deviceSynchronize()

    @property
    def compute_capability(self) -> str:
        return runtime.CAPABILITIES[self.id]

    @property
    def attributes(self) -> dict[str, int]:
        block_bytes, multiprocessor_bytes = SHARED[self.compute_capability]
        return {
            "MultiProcessorCount": MULTIPROCESSORS,
            "MaxSharedMemoryPerBlockOptin": block_bytes,
            "MaxSharedMemoryPerMultiprocessor": multiprocessor_bytes,
        }

    @property
    def mem_info(self) -> tuple[int, int]:
        from .memory import default_pool

        total = MEMORY[self.compute_capability]
        return total - default_pool.total_bytes(), total

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id:02x}:00.0"


def get_cublas_handle() -> int:
    return 1
