"""Gradients as .npy files in a folder, written all together or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..checks.validation import human
from .common import (
    errors_name,
    one_line_errors,
    refuse_inputs,
    require_file_or_none,
    require_folder,
    to_json,
    written_together,
)

SCALARS = "scalars.json"


def check_gradient_files(
    folder: Path, names: Iterable[str], inputs: Iterable[Path], force: bool
) -> None:
    """Refuse, before anything is read, a folder that gradients cannot or must not be written to.

    `inputs`, files and folders of shards, are never overwritten.
    """
    with one_line_errors():
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder}: expected a folder, got a file")
        place = folder if folder.exists() else folder.parent
        require_folder(place)
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(f"{place}: expected a folder that can be written to")
        files = [folder / name for name in (*(f"{name}.npy" for name in names), SCALARS)]
        refuse_inputs("--grad-out", [folder, *files], inputs)
        for path in files:
            require_file_or_none(path)
            if path.exists() and not force:
                raise FileExistsError(f"{path} exists; --force overwrites it")
        if len({path.resolve() for path in files}) < len(files):
            raise FileExistsError(f"{folder}: expected different files, got links to the same file")


@contextmanager
def gradient_files(
    folder: Path, features: Mapping[str, Any], dtype: str | None
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Context with gradients of features and of scalars, which the caller fills.

    The arrays are memory-mapped temporary files beside the final ones. At the end they replace the
    final ones, with the scalars. On an error the folder stays as it was (`written_together`).
    """
    arrays: dict[str, Any] = {}
    scalars: dict[str, float] = {}
    dtypes = [np.dtype(dtype or z.dtype.newbyteorder("=")) for z in features.values()]
    paths = [folder / f"{name}.npy" for name in features]
    is_new = not folder.exists()
    with ExitStack() as undo:
        with one_line_errors():
            folder.mkdir(exist_ok=True)
            if is_new:
                undo.callback(folder.rmdir)
            sizes = (z.size for z in features.values())
            needed = sum(size * d.itemsize for size, d in zip(sizes, dtypes, strict=True))
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise OSError(f"{folder}: gradients need {human(needed)}, {human(free)} are free")
        with written_together([*paths, folder / SCALARS]) as temporaries:
            with one_line_errors():
                files = zip(paths, temporaries, dtypes, strict=False)  # without the scalars
                for (name, z), (path, temporary, kind) in zip(features.items(), files, strict=True):
                    with errors_name(path):
                        arrays[name] = np.lib.format.open_memmap(temporary, "w+", kind, z.shape)
                        _reserve(temporary)
            try:
                yield arrays, scalars
                for array in arrays.values():
                    array.flush()
                temporaries[-1].write_text(to_json(scalars) + "\n")
            finally:
                arrays.clear()  # a mapped file cannot be removed on every system
        undo.pop_all()


def _reserve(path: Path) -> None:
    """Take the file's blocks now: a full disk is an error here, and a crash (SIGBUS) later."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
