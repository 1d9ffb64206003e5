"""From `.cu` files to functions on a device, compiled at run time by NVRTC.

Sources are real files, named by their path in `kernels/cuda`: "tiled/lse.cu". So are headers:
`#include "tiled/tile.cuh"` is replaced by that file's text, with `#line` directives, so that one
string is all there is to compile: its digest is the key of the cache on disk, which therefore sees
headers too, and an error still names the file and line it is in.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "cuda"
OPTIONS = ("--std=c++17", "-default-device", "-ftz=true", "-prec-div=true", "-prec-sqrt=true")
Defines = Mapping[str, int | str]

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')


def flatten(file: str, seen: set[str] | None = None) -> str:
    """The text of `file` with its own headers, each once, in place of their includes."""
    seen = set() if seen is None else seen
    seen.add(file)
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate((SOURCES / file).read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
            continue
        if include[1] not in seen:
            lines.append(flatten(include[1], seen).rstrip("\n"))
        lines.append(f'#line {number + 1} "{file}"')
    return "\n".join(lines) + "\n"


def architecture(capability: str) -> str:
    """`-arch` for a compute capability as CuPy spells it, "90": with the features of that very
    chip where kernels use them (wgmma exists on 9.0 alone)."""
    return "sm_90a" if capability == "90" else f"sm_{capability}"


def options(defines: Defines, arch: str) -> tuple[str, ...]:
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in sorted(defines.items())),
            f"-arch={arch}")  # fmt: skip


def compile_for(
    file: str, defines: Defines, arch: str, extra: Iterable[str] = ()
) -> tuple[bytes, str]:
    """Machine code and compiler log of `file` for `arch`. Needs NVRTC, but no GPU."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(flatten(file), file, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*options(defines, arch), *extra))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip()
            named = " ".join(f"{k}={v}" for k, v in sorted(defines.items()))
            raise RuntimeError(
                f"{file} does not compile for {arch} ({named}): {error}\n{log}"
            ) from None
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


# --- cache on disk --------------------------------------------------------------------------------


compile_seconds: dict[tuple[Any, ...], float] = {}  # of this process, by file and defines


def cache_directory() -> Path:
    """INFONCE_CACHE_DIR, or the user's cache."""
    asked = os.environ.get("INFONCE_CACHE_DIR")
    if asked:
        return Path(asked)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infonce"


def cubin(file: str, defines: Defines, arch: str) -> bytes:
    """Machine code from the cache, or compiled and put there."""
    from cupy.cuda import nvrtc

    recipe = (flatten(file), options(defines, arch), nvrtc.getVersion())
    path = cache_directory() / f"{hashlib.sha256(repr(recipe).encode()).hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    start = time.perf_counter()
    code, _ = compile_for(file, defines, arch)
    compile_seconds[file, *sorted(defines.items())] = time.perf_counter() - start
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Many processes may start at once: each writes a file of its own and renames it
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(code)
        os.replace(part.name, path)
    except OSError:  # no place to write: this process compiles for itself
        pass
    return code


# --- functions on a device ------------------------------------------------------------------------

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_modules: dict[tuple[Any, ...], Any] = {}
_functions: dict[tuple[Any, ...], Any] = {}
_started: dict[tuple[Any, ...], Future[bytes]] = {}  # modules that are compiled ahead
_lock = threading.Lock()


def start(device: Any, file: str, **defines: int | str) -> bool:
    """Begin to compile `file` for the current device, in a thread of its own; False if this process
    has it already. So all that a call needs is compiled side by side: NVRTC lets go of Python's
    lock."""
    key = _module_key(device, file, defines)
    future: Future[bytes] = Future()
    if key in _modules or _started.setdefault(key, future) is not future:
        return False

    arch = architecture(device.compute_capability)

    def compile_it() -> None:
        try:
            future.set_result(cubin(file, defines, arch))
        except BaseException as error:  # for the thread that waits
            future.set_exception(error)

    threading.Thread(target=compile_it, name=f"compile {file}").start()
    return True


def _module_key(device: Any, file: str, defines: Defines) -> tuple[Any, ...]:
    return device.id, file, *sorted(defines.items())


def function(device: Any, file: str, name: str, shared: int = 0, **defines: int | str) -> Any:
    """Kernel `name` of `file` on the current device, compiled once a process.

    `shared` is the dynamic shared memory of its launches in bytes.
    """
    key = (device.id, file, name, shared, *defines.items())
    found = _functions.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _functions:
            _functions[key] = _load(device, file, name, shared, defines)
        return _functions[key]


def _load(device: Any, file: str, name: str, shared: int, defines: Defines) -> Any:
    from cupy.cuda import driver
    from cupy.cuda.function import Module

    key = _module_key(device, file, defines)
    if key not in _modules:
        module, started = Module(), _started.pop(key, None)
        if started is None:
            code = cubin(file, defines, architecture(device.compute_capability))
        else:
            code = started.result()
        module.load(code)
        _modules[key] = module
    kernel = _modules[key].get_function(name)
    if shared > 48 * 1024:  # beyond this a kernel has to ask
        driver.funcSetAttribute(kernel.ptr, _MAX_DYNAMIC_SHARED, shared)
    return kernel
