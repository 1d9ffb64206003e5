"""NVRTC's functions: the compiler is that of the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import engine

_programs: dict[int, dict[str, str]] = {}
_numbers = itertools.count(1)


class NVRTCError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__("NVRTC_ERROR_COMPILATION (6)")
        self.status = status


def getVersion() -> tuple[Any, ...]:
    """Part of what names a compiled kernel, so it tells what the engine compiles."""
    return "emulated", engine.WATCHES_ORDER, engine.tools()


def createProgram(source: str, name: str, headers: Any, include_names: Any) -> int:
    number = next(_numbers)
    _programs[number] = {"source": source, "log": ""}
    return number


def compileProgram(program: int, options: tuple[str, ...]) -> None:
    entry = _programs[program]
    try:
        entry["code"] = engine.compile_source(entry["source"], options)
    except engine.CompileError as error:
        entry["log"] = str(error)
        raise NVRTCError(6) from None


def getCUBIN(program: int) -> bytes:
    return _programs[program]["code"].encode()


def getProgramLog(program: int) -> str:
    return _programs[program]["log"]


def destroyProgram(program: int) -> None:
    del _programs[program]
