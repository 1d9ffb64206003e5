"""The part of `cupyx` that the library uses."""

from typing import Any
from weakref import finalize

import numpy as np
from cupy.cuda import runtime


def empty_pinned(shape: Any, dtype: Any = float) -> np.ndarray:
    """An array of the host that counts as pinned."""
    array = np.empty(shape, dtype)
    if array.nbytes:
        runtime.pinned[array.ctypes.data] = array.nbytes
        base = array.view()
        finalize(array, runtime.pinned.pop, base.ctypes.data, None)
    return array
