"""NumPy's assertions for arrays on a device."""

from typing import Any

import numpy as np

from . import _array


def _host(array: Any) -> Any:
    return array.get() if isinstance(array, _array.ndarray) else array


def assert_allclose(actual: Any, desired: Any, *args: Any, **options: Any) -> None:
    np.testing.assert_allclose(_host(actual), _host(desired), *args, **options)


def assert_array_equal(actual: Any, desired: Any, **options: Any) -> None:
    np.testing.assert_array_equal(_host(actual), _host(desired), **options)
