"""Gradients as .npy files in a folder, written all together or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import numpy as np

from .common import errors_name, human, one_line_errors, require_folder, temporary_name, to_json

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
        existing = [path for path in (folder, *files) if path.exists()]
        for path in inputs:
            if path.exists() and any(map(path.samefile, existing)):
                raise FileExistsError(f"--grad-out: expected another folder, {path} is an input")
        for path in filter(Path.exists, files):
            if not path.is_file():
                raise FileExistsError(f"{path}: expected a file or none")
            if not force:
                raise FileExistsError(f"{path} exists; --force overwrites it")


class GradientFiles:
    """Gradients of features as .npy files in a folder, which change only if the call succeeds.

    Inside the `with`, `arrays` are memory-mapped temporary files beside the final ones. `commit`
    writes them to disk and then renames them to the final names, one after the other. What was not
    committed is removed at the end. If the process is killed, temporary files stay; if it is
    stopped between two renames, some files are new and some old, and each of them is complete.
    """

    def __init__(self, folder: Path, features: Mapping[str, Any], dtype: str | None) -> None:
        self.folder = folder
        self.arrays: dict[str, Any] = {}
        self._features, self._dtype = features, dtype
        self._made = False  # whether this object made the folder, and removes it on an error
        self._temporary: dict[Path, Path] = {}  # final -> temporary

    def __enter__(self) -> GradientFiles:
        try:
            with one_line_errors():
                self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def _create(self) -> None:
        final = {name: self.folder / f"{name}.npy" for name in self._features}
        dtypes = {
            name: np.dtype(self._dtype or z.dtype.newbyteorder("="))
            for name, z in self._features.items()
        }
        needed = sum(z.size * dtypes[name].itemsize for name, z in self._features.items())
        if not self.folder.exists():
            self.folder.mkdir()
            self._made = True
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(f"{self.folder}: gradients need {human(needed)}, {human(free)} are free")
        for name, z in self._features.items():
            temporary = self._temporary[final[name]] = temporary_name(final[name])
            with errors_name(final[name]):
                array = np.lib.format.open_memmap(temporary, "w+", dtypes[name], z.shape)
                _reserve(temporary)
            self.arrays[name] = array

    def commit(self, scalars: Mapping[str, float]) -> None:
        """Write `scalars`, too, and move everything into place once it is on disk."""
        with one_line_errors(click.ClickException), errors_name(self.folder):
            path = self.folder / SCALARS
            temporary = self._temporary[path] = temporary_name(path)
            temporary.write_text(to_json(dict(scalars)) + "\n")
            for array in self.arrays.values():
                array.flush()
            for temporary in self._temporary.values():
                _sync(temporary)
            for path, temporary in self._temporary.items():
                os.replace(temporary, path)
            self._made = False

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        self.arrays = {}
        for temporary in self._temporary.values():
            temporary.unlink(missing_ok=True)
        if self._made:
            self.folder.rmdir()


def _reserve(path: Path) -> None:
    """Take the file's blocks now: a full disk is an error here, and a crash (SIGBUS) later."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
