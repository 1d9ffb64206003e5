"""Embeddings from files: .npy, .npz, .safetensors, .pt, .parquet, or a folder of .npy shards.

Nothing that runs code of a pickle is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from .common import Misuse, error_message, flag, optional

KEYED = (".npz", ".safetensors", ".pt", ".parquet")  # files of several arrays
KNOWN = f"a .npy, {', '.join(KEYED[:-1])} or {KEYED[-1]} file, or a folder of .npy shards"
MAGIC = b"\x93NUMPY"
SHOWN = 5  # names in a message
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
SAFETENSORS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
}


@dataclass(frozen=True)
class LossFiles:
    """The files of a call of a loss. A source is a path, or PATH:KEY (`open_embeddings`)."""

    features: Mapping[str, str]  # sources by argument
    teacher: Mapping[str, str]  # sources of the teacher's features, by option
    arrays: Mapping[str, Path]  # .npy files by option
    sides: Mapping[str, Sequence[Path]]  # .npy files by option: one for both sides, or two
    guides: Sequence[str]  # sources: none, one, or one for rows and one for columns

    def paths(self) -> list[Path]:
        """All files, without keys, and folders with their shards."""
        sources = (*self.features.values(), *self.teacher.values(), *self.guides)
        files = [split(source)[0] for source in sources]
        shards = chain.from_iterable(map(shard_paths, files))
        return [*files, *shards, *self.arrays.values(), *chain(*self.sides.values())]

    def open_features(self) -> dict[str, Any]:
        return {name: open_embeddings(source) for name, source in self.features.items()}

    def open_teacher(self) -> dict[str, Any]:
        return {name: open_embeddings(source) for name, source in self.teacher.items()}

    def open_options(self) -> dict[str, Any]:
        """The arrays of all options but the teacher's, by option."""
        sides = {name: tuple(map(open_npy, paths)) for name, paths in self.sides.items()}
        if self.guides:
            sides["guide"] = tuple(map(open_embeddings, self.guides))
        single_or_both = {name: z[0] if len(z) == 1 else z for name, z in sides.items()}
        return {name: open_npy(path) for name, path in self.arrays.items()} | single_or_both

    def names_in_errors(self) -> dict[str, str]:
        """Argument -> its name on the command line, with its file."""
        names = {name: f"{name} ({source})" for name, source in self.features.items()}
        for name, file in {**self.arrays, **self.teacher}.items():
            names[name] = f"{flag(name)} ({file})"
        for name, files in {**self.sides, "guide": self.guides}.items():
            for i, file in enumerate(files):
                argument = f"{name}[{i}]" if len(files) > 1 else name
                names[argument] = f"{flag(name)} ({file})"
        return names


def open_embeddings(source: str) -> Any:
    """The array in `source`. Memory-mapped: .npy, .safetensors, .pt and a single shard.

    The others (.npz, .parquet, several shards) are read into memory.

    `source` is a path, or PATH:KEY for one array out of a file of several. Raises
    click.ClickException, naming the file, for anything that is not there or not what it should be.
    """
    path, key = split(source)
    if not source:
        raise Misuse(f"expected {KNOWN}, got an empty name")
    if path.is_dir():
        return _shards(path)
    with _reading(path):
        if path.suffix in KEYED:
            readers = (_npz, _safetensors, _pt, _parquet)
            return dict(zip(KEYED, readers, strict=True))[path.suffix](path, key)
        if path.suffix != ".npy" and not _begins(path, MAGIC):  # .npy under any name
            raise Misuse(f"{source}: expected {KNOWN}")
        return open_npy(path)


def open_npy(path: Path) -> Any:
    """A memory-mapped .npy file; two raw bytes an element are bfloat16, as ml_dtypes saves it."""
    with _reading(path):
        return _with_bfloat16(np.lib.format.open_memmap(path, mode="r"))


def _with_bfloat16(array: Any) -> Any:
    return array.view(BFLOAT16) if array.dtype == np.dtype("V2") else array


def split(source: str) -> tuple[Path, str | None]:
    """The path, and the array's name if one follows a colon.

    The path is the longest that exists: names of files and of arrays can have colons, too.
    """
    if not Path(source).exists():
        for colon in reversed([*re.finditer(":", source)]):
            path = Path(source[: colon.start()])
            if path.suffix in KEYED and path.is_file():
                return path, source[colon.end() :]
    return Path(source), None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context that reads an existing file: any error is a click.ClickException that names it.

    The libraries raise errors of many types if a file is not whole, or has no arrays of NumPy.
    """
    if not path.exists():
        raise Misuse(f"{path}: no such file or folder")
    if not path.is_file():
        raise Misuse(f"{path}: expected a file")
    try:
        yield
    except click.ClickException:
        raise
    except MemoryError as error:
        raise click.ClickException(f"{path}: {error_message(error)}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:  # the system's, as "Permission denied"
            raise Misuse(f"{path}: {error.strerror}") from error
        reason = error_message(error).splitlines()[0]
        kind = path.suffix if path.suffix in KEYED else ".npy"
        raise Misuse(f"{path}: expected a whole {kind} file of numbers: {reason}") from error


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def some(names: Sequence[object]) -> str:
    """The first few of many names."""
    return ", ".join(map(str, names[:SHOWN])) + ", ..." * (len(names) > SHOWN)


def _pick(path: Path, keys: list[str], key: str | None) -> str:
    """The name of the array to read: `key`, or the only one of `keys` if `key` is None."""
    names = some(sorted(keys)) or "none"
    if key is None and len(keys) != 1:
        example = f": choose one, as in {path}:{min(keys)}" if keys else ""
        raise Misuse(f"{path}: expected one array, got the arrays {names}{example}")
    if key is not None and key not in keys:
        raise Misuse(f"{path}: no array {key!r}; it has {names}")
    return keys[0] if key is None else key


def _npz(path: Path, key: str | None) -> Any:
    # np.load opens the file itself, and would leave a broken file open
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as archive:
        return _with_bfloat16(np.asarray(archive[_pick(path, archive.files, key)]))


def _safetensors(path: Path, key: str | None) -> Any:
    safetensors = optional("safetensors", "safetensors")
    with safetensors.safe_open(path, framework="numpy") as file:  # checks the whole header
        name = _pick(path, list(file.keys()), key)
        code = str(file.get_slice(name).get_dtype())
    if code not in SAFETENSORS:
        raise Misuse(f"{path}: expected {', '.join(SAFETENSORS)}, got {code}")
    # The library would copy the tensor into memory. The header tells its place in the file
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        entry = json.loads(raw.read(length))[name]
    shape = tuple(entry["shape"])
    offset = 8 + length + entry["data_offsets"][0]
    return np.memmap(path, SAFETENSORS[code], mode="r", offset=offset, shape=shape)


def _pt(path: Path, key: str | None) -> Any:
    """A tensor of `torch.save`, or one of a dictionary of them, mapped into memory."""
    torch = optional("torch", "torch")
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if key is not None or not isinstance(saved, torch.Tensor):
        tensors = saved if isinstance(saved, dict) else {}
        tensors = {str(k): z for k, z in tensors.items() if isinstance(z, torch.Tensor)}
        saved = tensors[_pick(path, list(tensors), key)]
    z = saved.detach().resolve_conj().resolve_neg()
    return z.view(torch.int16).numpy().view(BFLOAT16) if z.dtype == torch.bfloat16 else z.numpy()


def _parquet(path: Path, key: str | None) -> Any:
    """A column of lists of numbers, one a row and all of one length."""
    types, parquet = optional("pyarrow.types", "parquet"), optional("pyarrow.parquet", "parquet")
    list_tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    with parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        lists = [field.name for field in schema if any(test(field.type) for test in list_tests)]
        column = file.read([name := _pick(path, lists, key)])[name].combine_chunks()
    values = column.flatten()
    if column.null_count or values.null_count:
        raise Misuse(f"{path}: expected numbers in all rows of {name!r}, got nulls")
    widths = column.value_lengths().unique().to_pylist()
    if len(widths) != 1:
        raise Misuse(
            f"{path}: expected rows of one length in {name!r}, got {some(widths) or 'no rows'}"
        )
    return values.to_numpy(zero_copy_only=False).reshape(len(column), widths[0])


def _shards(folder: Path) -> Any:
    """The rows of all shards, by the numbers in their names, in one array.

    A single shard stays mapped; several are copied shard by shard.
    """
    paths = shard_paths(folder)
    if not paths:
        raise Misuse(f"{folder}: expected .npy shards in this folder, got none")
    series = sorted({re.sub(r"\d+", "#", path.name) for path in paths})
    if len(series) > 1:
        raise Misuse(f"{folder}: expected one series of shards, got {some(series)}")
    for path, following in pairwise(paths):
        if _numbers(path) == _numbers(following):
            raise Misuse(
                f"{folder}: expected shards of different numbers, got {path.name} and "
                f"{following.name}"
            )
    shards = [open_npy(path) for path in paths]
    first = shards[0]
    for path, shard in zip(paths, shards, strict=True):
        if shard.ndim != 2:
            raise Misuse(f"{path}: expected 2 dimensions, got shape {shard.shape}")
        if shard.shape[1] != first.shape[1] or shard.dtype != first.dtype:
            raise Misuse(
                f"{path}: expected width {first.shape[1]} and dtype {first.dtype} like "
                f"{paths[0].name}, got width {shard.shape[1]} and dtype {shard.dtype}"
            )
    if len(shards) == 1:
        return first
    joined = np.empty((sum(map(len, shards)), first.shape[1]), first.dtype)
    return np.concatenate(shards, out=joined)


def shard_paths(folder: Path) -> list[Path]:
    """The shards in a folder, by the numbers in their names."""
    return sorted(folder.glob("*.npy"), key=lambda path: (_numbers(path), path.name))


def _numbers(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path.stem)]
