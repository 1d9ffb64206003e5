"""What kernels take, read from their sources: parameters and fields of structures, by name.

The `.cu` files are the only description. Python hands a kernel its arguments by the names of its
parameters, and a structure as a dict by the names of its fields; order and types come from here. A
name that is missing or unknown is a TypeError before the launch.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any

import numpy as np

from .compiler import SOURCES, flatten

# Letters of Python's struct module; each has 8 bytes, so that nothing is padded
POINTER, INTEGER, NUMBER = "Q", "q", "d"
LETTERS = {"i64": INTEGER, "double": NUMBER}
# -D options with which struct Block has more fields, or kernels have more parameters
_BLOCK = re.search(r"^struct Block .*?^};", flatten("block/options.cuh"), re.S | re.M)
assert _BLOCK is not None
OPTIONAL = (*re.findall(r"^#if (\w+)$", _BLOCK[0], re.M), "LINEAR")
TENSOR_MAP = "TensorMap"  # bytes that the driver has written
# Python expressions that convert a value to the type of its field; CuPy passes numbers in 8 bytes
CODE = {
    POINTER: "({0} if {0}.__class__ is int else address_of({0}))", INTEGER: "int({})",
    NUMBER: "({0} if isinstance({0}, float) else float({0}))", TENSOR_MAP: "{}",
}  # fmt: skip

_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = r"\bstruct {}(?: : (\w+))? \{{(.*?)\n\}};"
_KERNEL = re.compile(r'extern "C" __global__ void\b[^{]*?\b(\w+)\s*\(([^(){}]*)\)\s*\{', re.S)
_METHOD = re.compile(  # with braces up to three deep
    r"(?:template\s*<[^>]*>\s*)?__device__[^{;]*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
)
_OPTIONAL = re.compile(rf"^#if ({'|'.join(OPTIONAL)})\n(.*?)^#endif\n", re.S | re.M)
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

    @cached_property
    def leaves(self) -> Callable[[Mapping[str, Any]], list[Any]]:
        """From values by name to values for `letters`, those of inner structures too."""
        lines: list[str] = []
        return self._compiled(lines, self.expressions("v", lines))

    def expressions(self, given: str, lines: list[str]) -> list[str]:
        """Python's code for each leaf of the values in variable `given`, after `lines`."""
        found = []
        lines.append(f"if len({given}) != {len(self.fields)}: raise KeyError")
        for i, (name, kind) in enumerate(self.fields):
            value = f"{given}_{i}"
            lines.append(f"{value} = {given}[{name!r}]")
            if isinstance(kind, Structure):
                found += kind.expressions(value, lines)
            else:
                found.append(CODE[kind].format(value))
        return found

    def _compiled(
        self, lines: list[str], result: list[str], **names: Any
    ) -> Callable[[Mapping[str, Any]], list[Any]]:
        """Compiled, because a loop over the fields of a block takes longer than its launch."""
        body = "\n  ".join([*lines, f"return [{', '.join(result)}]"])
        names |= {"address_of": address_of, "frombuffer": np.frombuffer}
        exec(f"def function(v):\n  {body}", names)
        function: Callable[[Mapping[str, Any]], list[Any]] = names["function"]

        def checked(values: Mapping[str, Any]) -> list[Any]:
            try:
                return function(values)
            except KeyError:
                self.require(values)
                raise

        return checked

    def require(self, values: Mapping[str, Any]) -> None:
        """TypeError unless there is a value for every field and for nothing else."""
        names = [name for name, _ in self.fields]
        if values.keys() != set(names):
            raise TypeError(f"{self.name}: expected {', '.join(names)}; got {', '.join(values)}")
        for name, kind in self.fields:
            if isinstance(kind, Structure):
                kind.require(values[name])


class Signature(Structure):
    """A kernel's parameters, each passed by itself."""

    @cached_property
    def arguments(self) -> Callable[[Mapping[str, Any]], list[Any]]:
        """From values by name to what CuPy launches a kernel with: structures as bytes. (CuPy
        takes long over a dtype with names.)"""
        lines: list[str] = []
        leaves = iter(self.expressions("v", lines))
        result: list[str] = []
        names: dict[str, Any] = {}
        for i, (_, kind) in enumerate(self.fields):
            if isinstance(kind, Structure):
                packed = ", ".join(islice(leaves, len(kind.letters)))
                result.append(f"frombuffer(pack_{i}({packed}), void_{i})")
                names |= {f"pack_{i}": kind.layout.pack, f"void_{i}": np.dtype(f"V{kind.size}")}
            else:
                result.append(next(leaves))
        return self._compiled(lines, result, **names)

    def words(self, values: Mapping[str, Any]) -> Iterator[Iterable[tuple[str, Any]]]:
        """(letter, value) of each parameter's fields."""
        leaves = iter(self.leaves(values))
        for _, kind in self.fields:
            letters = kind.letters if isinstance(kind, Structure) else (kind,)
            yield zip(letters, islice(leaves, len(letters)), strict=True)


def address_of(array: Any) -> int:
    """The address of an array; 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def given_options(defines: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of `OPTIONAL` that a kernel is compiled with."""
    return tuple(name for name in OPTIONAL if defines.get(name))


@cache
def signature(file: str, kernel: str, options: tuple[str, ...] = ()) -> Signature:
    """Of a kernel in `file`, compiled with `given_options`."""
    return signatures(file, options)[kernel]


@cache
def signatures(file: str, options: tuple[str, ...] = ()) -> dict[str, Signature]:
    """Of all kernels in `file`, by name."""
    text = _source(file, options)
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
def _source(file: str, options: tuple[str, ...] = ()) -> str:
    text = _COMMENT.sub("", flatten(file)).replace("__grid_constant__", "")
    return _OPTIONAL.sub(lambda found: found[2] if found[1] in options else "", text)


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
