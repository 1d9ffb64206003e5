"""The parameters of kernels, and the fields of structures, read from the CUDA sources.

No Python code repeats their order or types. Python passes the arguments of a kernel as a dict by
the names of its parameters, and a structure as a dict by the names of its fields. This module
brings the values in order and converts them. A missing or unknown name is a TypeError before the
launch.
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

# Types of fields, as letters of Python's struct module. Each has 8 bytes, so there is no padding
POINTER, INTEGER, NUMBER = "Q", "q", "d"
LETTERS = {"i64": INTEGER, "double": NUMBER}
# OPTIONAL: -D options that add fields to PairVectors, (LABEL_WEIGHTS) to FinalizeArguments or
# (OWN_...) to PlainOwnNegatives, or (LINEAR) parameters to kernels
_VECTORS = re.search(r"^struct PairVectors .*?^};", flatten("block/options.cuh"), re.S | re.M)
assert _VECTORS is not None
OPTIONAL = (
    *re.findall(r"^#if (\w+)$", _VECTORS[0], re.M), "LABEL_WEIGHTS", "LINEAR", "OWN_INDICES",
    "OWN_BIAS",
)  # fmt: skip
TENSOR_MAP = "TensorMap"  # the type of a tensor map, whose bytes the driver writes
# Python expressions that convert a value {0} to the type of its field. CuPy passes the results,
# Python's int and float, as 8-byte numbers
CONVERSIONS = {
    POINTER: "({0} if {0}.__class__ is int else get_address({0}))", INTEGER: "int({})",
    NUMBER: "({0} if isinstance({0}, float) else float({0}))", TENSOR_MAP: "{}",
}  # fmt: skip

# C++ in the sources: comments, a structure (its base, the base of a template, its body), a kernel
# (its name, its parameters), a method, fields or parameters of an option, and a declaration (its
# type, its names)
_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = r"\bstruct {}(?: : (\w+)(?:<(\w+), \w+>)?)? \{{(.*?)\n\}};"
_KERNEL = re.compile(r'extern "C" __global__ void\b[^{]*?\b(\w+)\s*\(([^(){}]*)\)\s*\{', re.S)
_METHOD = re.compile(  # with braces up to three deep
    r"(?:template\s*<[^>]*>\s*)?__device__[^{;]*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
)
_OPTIONAL = re.compile(rf"^#if ({'|'.join(OPTIONAL)})\n(.*?)^#endif\n", re.S | re.M)
_DECLARATION = re.compile(r"\s*(?:const\s+)?(\w+)(.*)", re.S)


@dataclass(frozen=True)
class Structure:
    """The fields of a structure, in their order."""

    name: str
    fields: tuple[tuple[str, Any], ...]  # (name, type): a letter, TENSOR_MAP or a structure

    @cached_property
    def letters(self) -> str:
        """The letters of the leaves: of all fields that are no structures, at any depth."""
        return "".join(getattr(kind, "letters", kind) for _, kind in self.fields)

    @cached_property
    def layout(self) -> struct.Struct:
        """The structure in memory, without padding."""
        return struct.Struct("=" + self.letters)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.layout.size

    def offset(self, name: str) -> int:
        """The offset of a field, in bytes."""
        names = [field for field, _ in self.fields]
        before = self.fields[: names.index(name)]
        return sum(getattr(kind, "size", 8) for _, kind in before)

    @cached_property
    def leaves(self) -> Callable[[Mapping[str, Any]], list[Any]]:
        """A function from values by name to the converted values, one for each of `letters`."""
        lines: list[str] = []
        return self._compile(lines, self.expressions("v", lines))

    def expressions(self, variable: str, lines: list[str]) -> list[str]:
        """Python expressions of the converted leaves, of the dict in the variable `variable`.

        The statements that must run before the expressions are added to `lines`.
        """
        leaves = []
        lines.append(f"if len({variable}) != {len(self.fields)}: raise KeyError")
        for i, (name, kind) in enumerate(self.fields):
            value = f"{variable}_{i}"
            lines.append(f"{value} = {variable}[{name!r}]")
            if isinstance(kind, Structure):
                leaves += kind.expressions(value, lines)
            else:
                leaves.append(CONVERSIONS[kind].format(value))
        return leaves

    def _compile(
        self, lines: list[str], result: list[str], **names: Any
    ) -> Callable[[Mapping[str, Any]], list[Any]]:
        """A function of a dict `v` that runs `lines` and returns the values of `result`.

        The function is compiled, because a loop over the fields would take longer than a launch. Of
        a kernel with the parameters (const double* x, i64 n), it is

            def function(v):
              if len(v) != 2: raise KeyError
              v_0 = v['x']
              v_1 = v['n']
              return [(v_0 if v_0.__class__ is int else get_address(v_0)), int(v_1)]

        `names` are variables that `result` uses.
        """
        body = "\n  ".join([*lines, f"return [{', '.join(result)}]"])
        names |= {"get_address": get_address, "frombuffer": np.frombuffer}
        exec(f"def function(v):\n  {body}", names)
        function: Callable[[Mapping[str, Any]], list[Any]] = names["function"]

        def checked(values: Mapping[str, Any]) -> list[Any]:
            try:
                return function(values)
            except KeyError:
                self.require(values)  # a TypeError that says which names are expected
                raise

        return checked

    def require(self, values: Mapping[str, Any]) -> None:
        """Raise a TypeError if a field has no value, or a value has no field."""
        names = [name for name, _ in self.fields]
        if values.keys() != set(names):
            raise TypeError(f"{self.name}: expected {', '.join(names)}; got {', '.join(values)}")
        for name, kind in self.fields:
            if isinstance(kind, Structure):
                kind.require(values[name])


class Signature(Structure):
    """The parameters of a kernel: a structure whose fields are passed one by one."""

    @cached_property
    def arguments(self) -> Callable[[Mapping[str, Any]], list[Any]]:
        """A function from values by name to the arguments with which CuPy launches the kernel.

        A structure becomes an array with one element of bytes (dtype "V"), because CuPy takes long
        for a dtype with named fields.
        """
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
        return self._compile(lines, result, **names)

    def words(self, values: Mapping[str, Any]) -> Iterator[Iterable[tuple[str, Any]]]:
        """For each parameter, the (letter, converted value) of its leaves, for a recording."""
        leaves = iter(self.leaves(values))
        for _, kind in self.fields:
            letters = kind.letters if isinstance(kind, Structure) else (kind,)
            yield zip(letters, islice(leaves, len(letters)), strict=True)


def get_address(array: Any) -> int:
    """The address of an array; 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def given_options(defines: Mapping[str, Any]) -> tuple[str, ...]:
    """The options of `OPTIONAL` that `defines` sets: the parameters of a kernel depend on them."""
    return tuple(name for name in OPTIONAL if defines.get(name))


@cache
def signature(file: str, kernel: str, options: tuple[str, ...] = ()) -> Signature:
    """The signature of a kernel in `file`, compiled with `options` (`given_options`)."""
    return signatures(file, options)[kernel]


@cache
def signatures(file: str, options: tuple[str, ...] = ()) -> dict[str, Signature]:
    """The signatures of all kernels in `file`, by name."""
    text = _source(file, options)
    return {
        name: Signature(name, tuple(_fields(text, inside.split(","))))
        for name, inside in _KERNEL.findall(text)
    }


@cache
def structure(file: str, name: str) -> Structure:
    """The structure `name`, which `file` or one of its headers defines."""
    return _structure(_source(file), name)


def kernel_files() -> dict[str, str]:
    """The file of each kernel, by the name of the kernel."""
    files = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cu"))
    return {kernel: file for file in files for kernel in signatures(file)}


@cache
def _source(file: str, options: tuple[str, ...] = ()) -> str:
    """The text of `file` with its headers, without comments and without `OPTIONAL` options that are
    not in `options`."""
    text = _COMMENT.sub("", flatten(file)).replace("__grid_constant__", "")
    return _OPTIONAL.sub(lambda match: match[2] if match[1] in options else "", text)


@cache
def _structure(text: str, name: str, plain: str | None = None) -> Structure:
    """The structure `name` that `text` defines, after the fields of its base structure; `plain`:
    the structure that is the base of a template."""
    match = re.search(_STRUCT.format(name), text, re.S)
    if match is None:
        raise ValueError(f"struct {name}: expected a definition whose fields have 8 bytes each")
    base, plain_of_base, body = match.groups()
    inherited = _structure(text, plain or base, plain_of_base).fields if base else ()
    return Structure(name, (*inherited, *_fields(text, _METHOD.sub("", body).split(";"))))


def _fields(text: str, declarations: list[str]) -> Iterator[tuple[str, Any]]:
    """The (name, type) of each declared variable; `const double *a, *b` declares two pointers."""
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
