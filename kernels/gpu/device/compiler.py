"""Kernels of the CUDA sources, compiled at run time by NVRTC and loaded by CuPy.

A source is named by its path in `kernels/cuda`, such as "tiled/lse.cu". Before compilation, the
text of a header replaces its `#include`. `#line` directives say from which file and line the text
comes, for error messages. The key of the cache on disk is a digest of the whole text, the compiler
options and NVRTC's version: if a header changes, its kernels are compiled again. `cupy.RawModule`
loads the machine code from the cache.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "cuda"  # the folder of all sources
# Options of NVRTC for all kernels. Subnormal float32 numbers become 0, as in the instructions with
# `.ftz` of cuda/ptx/numbers.cuh. Divisions and roots are rounded correctly
FLAGS = ("--std=c++17", "-default-device", "-ftz=true", "-prec-div=true", "-prec-sqrt=true")
Defines = Mapping[str, int | str]  # -D options: values by name

# Lines that include a header, begin an `#if`, end it, and end one of its branches
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')
_IF = re.compile(r"^\s*#\s*if")
_ENDIF = re.compile(r"^\s*#\s*endif\b")
_BRANCH_END = re.compile(r"^\s*#\s*(else|elif|endif)\b")


def flatten(file: str, seen: set[str] | None = None) -> str:
    """The text of `file`, in which the text of each header replaces its first include.

    `seen` are the files whose text has been inserted so far; the function adds to it.
    """
    seen = set() if seen is None else seen
    seen.add(file)
    # `may_be_skipped`: the `#line` after the last include is inside an `#if`, which may skip it
    lines, if_depth, may_be_skipped = [f'#line 1 "{file}"'], 0, False
    for number, line in enumerate((SOURCES / file).read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
            if_depth += bool(_IF.match(line)) - bool(_ENDIF.match(line))
            if may_be_skipped and _BRANCH_END.match(line):
                lines.append(f'#line {number + 1} "{file}"')
                may_be_skipped = if_depth > 0
            continue
        may_be_skipped = if_depth > 0
        if include[1] not in seen:
            lines.append(flatten(include[1], seen).rstrip("\n"))
        lines.append(f'#line {number + 1} "{file}"')
    return "\n".join(lines) + "\n"


def architecture(capability: str) -> str:
    """The `-arch` option for a compute capability such as "90".

    "sm_90a" also has the instructions of Hopper that later devices lack, such as wgmma.
    """
    return "sm_90a" if capability == "90" else f"sm_{capability}"


def compiler_flags(defines: Defines, arch: str) -> tuple[str, ...]:
    """The options of NVRTC for a kernel with these -D options, in a fixed order."""
    return (*FLAGS, *(f"-D{name}={value}" for name, value in sorted(defines.items())),
            f"-arch={arch}")  # fmt: skip


def compile_for(
    file: str, defines: Defines, arch: str, extra: Iterable[str] = ()
) -> tuple[bytes, str]:
    """Machine code and compiler log of `file` for `arch`. Needs NVRTC, but no GPU.

    `extra` are more options of NVRTC.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(flatten(file), file, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*compiler_flags(defines, arch), *extra))
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


# Seconds of each compilation in this process, by file and -D options, for `infonce info`
compile_seconds: dict[tuple[Any, ...], float] = {}


def cache_directory() -> Path:
    """The folder of the cache on disk: INFONCE_CACHE_DIR, or infonce in the user's cache folder."""
    folder = os.environ.get("INFONCE_CACHE_DIR")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infonce"


def cubin(file: str, defines: Defines, arch: str) -> Path:
    """The path of the machine code of `file` on disk, compiled first if the cache lacks it."""
    from cupy.cuda import nvrtc

    recipe = (flatten(file), compiler_flags(defines, arch), nvrtc.getVersion())
    name = f"{hashlib.sha256(repr(recipe).encode()).hexdigest()[:32]}.cubin"
    path = cache_directory() / name
    if os.access(path, os.R_OK):
        return path
    start = time.perf_counter()
    code, _ = compile_for(file, defines, arch)
    compile_seconds[file, *sorted(defines.items())] = time.perf_counter() - start
    try:
        return _write(path, code)
    except OSError:  # the cache cannot be written
        return _write(_temporary_directory() / name, code)


def _write(path: Path, code: bytes) -> Path:
    """Write machine code to `path`. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write at the same time, so each writes a file with another name, and
    # renames the complete file
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as unfinished:
        unfinished.write(code)
    os.replace(unfinished.name, path)
    return path


@cache
def _temporary_directory() -> Path:
    """A folder that is removed at the end of this process."""
    path = tempfile.mkdtemp(prefix="infonce-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


# --- functions on a device ------------------------------------------------------------------------

_modules: dict[tuple[Any, ...], Any] = {}  # cupy.RawModule, by `_module_key`
_functions: dict[tuple[Any, ...], Any] = {}  # cupy.RawKernel
_started: dict[tuple[Any, ...], Future[Path]] = {}  # by `_module_key`, until the module is loaded
_lock = threading.Lock()


def start(device: Any, file: str, **defines: int | str) -> bool:
    """Begin to compile `file` for `device`, in a new thread; `function` waits for the thread.

    Returns False if `file` is loaded or its compilation has begun before. All files of a call
    compile at the same time, because NVRTC releases the GIL.
    """
    key = _module_key(device, file, defines)
    future: Future[Path] = Future()
    if _started.setdefault(key, future) is not future:
        return False
    if key in _modules:  # asked after `_started`: `_load` fills `_modules`, then empties `_started`
        _started.pop(key, None)  # `_load` of another thread may have taken it out already
        return False

    arch = architecture(device.compute_capability)

    def compile_it() -> None:
        try:
            future.set_result(cubin(file, defines, arch))
        except BaseException as error:  # `_load` raises it, in the thread that waits
            future.set_exception(error)

    threading.Thread(target=compile_it, name=f"compile {file}").start()
    return True


def _module_key(device: Any, file: str, defines: Defines) -> tuple[Any, ...]:
    """The key of a module: its device, its file and its -D options."""
    return device.id, file, *sorted(defines.items())


def function(device: Any, file: str, name: str, shared: int = 0, **defines: int | str) -> Any:
    """Kernel `name` of `file` on `device`, the current device, as a `cupy.RawKernel`.

    A process loads a kernel once. `shared` is the dynamic shared memory of its launches in bytes.
    """
    key = (device.id, file, name, shared, *defines.items())
    kernel = _functions.get(key)
    if kernel is not None:
        return kernel
    with _lock:
        if key not in _functions:
            _functions[key] = _load(device, file, name, shared, defines)
        return _functions[key]


def _load(device: Any, file: str, name: str, shared: int, defines: Defines) -> Any:
    """The kernel of `function`. Its module is loaded first if it is new, from the cubin
    that `start` has begun to compile, or else compiled here.

    The caller holds `_lock`.
    """
    import cupy

    key = _module_key(device, file, defines)
    if key not in _modules:
        started = _started.get(key)
        try:
            if started is None:
                path = cubin(file, defines, architecture(device.compute_capability))
            else:
                path = started.result()
            _modules[key] = cupy.RawModule(path=str(path))
        finally:
            _started.pop(key, None)
    kernel = _modules[key].get_function(name)
    if shared > kernel.max_dynamic_shared_size_bytes:  # 48 KiB at first
        kernel.max_dynamic_shared_size_bytes = shared
    return kernel
