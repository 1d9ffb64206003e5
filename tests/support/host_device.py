"""A part of the host that stands for a device, to which offloaded features go panel by panel."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from infonce.kernels.cpu.backend import CPU

import infonce


class Host:
    """A device whose memory is the host's, which spoils what it may use again."""

    xp = np
    backend = CPU
    put = get = staticmethod(np.array)

    def __init__(self) -> None:
        self.largest = 0

    def stream(self, features: Any, panels: Any) -> Iterator[tuple[slice, Any]]:
        last = None
        for panel in panels:
            there = np.array(features[panel])
            self.largest = max(self.largest, len(there))
            yield panel, there
            if last is not None:
                last[...] = np.nan
            last = there


def room(rows: int, d: int, item: int = 8, real: int = 8) -> int:
    """A workspace for panels of so many rows."""
    return 2 * rows * d * (4 * item + 3 * real)


def close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    """Two results are the same, but for rounding."""
    pairs_of = [(got.loss, want.loss)]
    pairs_of += [(g, w) for g, w in zip(got.grads, want.grads, strict=True) if w is not None]
    for lse in (got.lse, want.lse):
        assert (lse is None) == (want.lse is None)
    if want.lse is not None:
        both = (z if isinstance(z, tuple) else (z,) for z in (got.lse, want.lse))
        pairs_of += zip(*both, strict=True)
    assert (got.metrics is None) == (want.metrics is None)
    if want.metrics is not None:
        found = [
            [getattr(of.metrics, f.name) for f in fields(infonce.Metrics)] for of in (got, want)
        ]
        for g, w in zip(*found, strict=True):
            assert (g is None) == (w is None)
            pairs_of += [] if w is None else [(g, w)]
    for g, w in pairs_of:
        assert g.dtype == w.dtype
        if w.dtype.kind in "iu":
            np.testing.assert_array_equal(g, w)
        g, w = (np.maximum(np.asarray(z, np.float64), -1e30) for z in (g, w))  # -inf: none
        assert np.linalg.norm(g - w) <= tolerance * (1 + np.linalg.norm(w))
