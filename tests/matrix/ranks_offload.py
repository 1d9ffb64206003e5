"""Offload to a stand-in for a GPU, whose memory is the host's, in one process and over ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from host_device import Host
from infonce.distributed import run as ranks_run
from infonce.kernels.offload import backend
from infonce.kernels.solve import Vectors

from infonce.checks import validation


@contextlib.contextmanager
def offloading(asked: bool) -> Iterator[dict[str, Any]]:
    """Context of calls over ranks; the options of these calls."""
    if not asked:
        yield {}
        return
    passes = functools.partial(backend.run_block_pass, Host())
    runner = ranks_run.BlockRunner(passes, Vectors(np), backend.layout)
    with (
        mock.patch.object(ranks_run, "choose_block_runner", return_value=runner),
        mock.patch.object(validation, "gpu_missing", return_value=None),
    ):
        yield {"offload": True}
