"""What kernels take, read from their sources: parameters and fields of structures, by name.

The `.cu` files are the only description. Python hands a kernel its arguments by the names of its
parameters, and a structure as a dict by the names of its fields; order and types come from here. A
name that is missing or unknown is a TypeError before the launch.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from .compiler import SOURCES, flatten

# Letters of Python's struct module; each has 8 bytes, so that nothing is padded
POINTER, INTEGER, NUMBER = "Q", "q", "d"
LETTERS = {"i64": INTEGER, "double": NUMBER}
TENSOR_MAP = "TensorMap"  # bytes that the driver has written

_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = r"\bstruct {}(?: : (\w+))? \{{(.*?)\n\}};"
_KERNEL = re.compile(r'extern "C" __global__ void\b[^{]*?\b(\w+)\s*\(([^(){}]*)\)\s*\{', re.S)
_METHOD = re.compile(  # with braces up to three deep
    r"(?:template\s*<[^>]*>\s*)?__device__[^{;]*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
)
_DECLARATION = re.compile(r"\s*(?:const\s+)?(\w+)(.*)", re.S)


@dataclass(frozen=True)
class Structure:
    """Fields in their order: names, and a letter, TENSOR_MAP or another structure for each."""

    name: str
    fields: tuple[tuple[str, Any], ...]

    @cached_property
    def letters(self) -> str:
        """Of all fields, those of inner structures too."""
        return "".join(getattr(kind, "letters", kind) for _, kind in self.fields)

    @cached_property
    def layout(self) -> struct.Struct:
        return struct.Struct("=" + self.letters)

    @property
    def size(self) -> int:
        return self.layout.size

    def offset(self, name: str) -> int:
        """Bytes from the beginning to a field."""
        names = [field for field, _ in self.fields]
        before = self.fields[: names.index(name)]
        return sum(getattr(kind, "size", 8) for _, kind in before)

    def leaves(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """(letter, value) of every field in its order, inner structures' fields one by one."""
        self.require(values)
        for name, kind in self.fields:
            if isinstance(kind, Structure):
                yield from kind.leaves(values[name])
            else:
                yield kind, as_letter(kind, values[name])

    def pack(self, values: Mapping[str, Any]) -> Any:
        """As bytes to pass by value. (CuPy takes long over a dtype with names.)"""
        return np.frombuffer(self.layout.pack(*(v for _, v in self.leaves(values))), self._void)

    @cached_property
    def _void(self) -> np.dtype[Any]:
        return np.dtype(f"V{self.size}")

    def require(self, values: Mapping[str, Any]) -> None:
        """TypeError unless there is a value for every field and for nothing else."""
        if len(values) == len(self.fields) and all(name in values for name, _ in self.fields):
            return
        names = [name for name, _ in self.fields]
        raise TypeError(f"{self.name}: expected {', '.join(names)}; got {', '.join(values)}")


class Signature(Structure):
    """A kernel's parameters, each passed by itself."""

    def arguments(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """As CuPy launches a kernel with them."""
        self.require(values)
        return tuple(
            kind.pack(values[name])
            if isinstance(kind, Structure)
            else as_letter(kind, values[name])
            for name, kind in self.fields
        )

    def parameters(self, values: Mapping[str, Any]) -> Iterator[Iterable[tuple[str, Any]]]:
        """`leaves` of each parameter."""
        self.require(values)
        for name, kind in self.fields:
            if isinstance(kind, Structure):
                yield kind.leaves(values[name])
            else:
                yield [(kind, as_letter(kind, values[name]))]


def as_letter(letter: str, value: Any) -> Any:
    """A value as its field holds it: arrays as addresses (None: 0), numbers as Python's."""
    if letter is POINTER:
        return value if value.__class__ is int else 0 if value is None else value.data.ptr
    if letter is INTEGER:
        return int(value)
    if letter is NUMBER:
        return value if isinstance(value, float) else float(value)
    return value


@cache
def signature(file: str, kernel: str) -> Signature:
    """Of a kernel in `file`."""
    return signatures(file)[kernel]


@cache
def signatures(file: str) -> dict[str, Signature]:
    """Of all kernels in `file`, by name."""
    text = _source(file)
    return {
        name: Signature(name, tuple(_fields(text, inside.split(","))))
        for name, inside in _KERNEL.findall(text)
    }


@cache
def structure(file: str, name: str) -> Structure:
    """Structure `name` of `file` or of a header that it includes."""
    return _structure(_source(file), name)


def kernel_files() -> dict[str, str]:
    """The file that each kernel is in, by its name."""
    files = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cu"))
    return {kernel: file for file in files for kernel in signatures(file)}


@cache
def _source(file: str) -> str:
    return _COMMENT.sub("", flatten(file)).replace("__grid_constant__", "")


@cache
def _structure(text: str, name: str) -> Structure:
    found = re.search(_STRUCT.format(name), text, re.S)
    if found is None:
        raise ValueError(f"struct {name}: expected a definition whose fields have 8 bytes each")
    base, body = found.groups()
    inherited = _structure(text, base).fields if base else ()
    return Structure(name, (*inherited, *_fields(text, _METHOD.sub("", body).split(";"))))


def _fields(text: str, declarations: list[str]) -> Iterator[tuple[str, Any]]:
    """Names and kinds of what is declared: `const double *a, *b` are two pointers."""
    for declaration in declarations:
        if not declaration.strip():
            continue
        kind, declarators = _DECLARATION.match(declaration).groups()  # type: ignore[union-attr]
        for declarator in declarators.split(","):
            name = declarator.strip("* \n")
            if "*" in declarator:
                yield name, POINTER
            elif kind == TENSOR_MAP:
                yield name, TENSOR_MAP
            else:
                yield name, LETTERS.get(kind) or _structure(text, kind)
