"""The device that tests of kernels see."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture
def device() -> Any:
    """The properties of the current device."""
    import cupy
    from infonce.kernels.gpu.device import launcher

    return launcher.device_properties(cupy.cuda.runtime.getDevice())


@pytest.fixture
def hopper(device: Any) -> None:
    if device.capability != "90":
        pytest.skip("for Hopper")


@pytest.fixture
def device_with(device: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Changes what calls see of the device: `device_with(multiprocessors=2)`."""
    from infonce.kernels.gpu.tiled import backend

    def change(**properties: Any) -> None:
        changed = replace(device, **properties)
        monkeypatch.setattr(backend, "device_properties", lambda index: changed)

    return change
