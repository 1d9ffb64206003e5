"""Kernels of the CUDA sources, compiled at run time by NVRTC and loaded by CuPy.

A source is named by its path in `kernels/cuda`, such as "tiled/lse.cu". Before compilation, the
text of a header replaces its `#include`. The digest of the whole text is the key of the cache on
disk, so that a changed header compiles its kernels again. `#line` directives keep the file and line
of an error. `cupy.RawModule` loads the machine code from its path in the cache.
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

SOURCES = Path(__file__).parents[2] / "cuda"
FLAGS = ("--std=c++17", "-default-device", "-ftz=true", "-prec-div=true", "-prec-sqrt=true")
Defines = Mapping[str, int | str]

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')
_BEGIN = re.compile(r"^\s*#\s*if")
_END = re.compile(r"^\s*#\s*endif\b")
_OTHER = re.compile(r"^\s*#\s*(else|elif|endif)\b")


def flatten(file: str, seen: set[str] | None = None) -> str:
    """The text of `file`, in which the text of each header replaces its first include."""
    seen = set() if seen is None else seen
    seen.add(file)
    lines, depth, skippable = [f'#line 1 "{file}"'], 0, False
    for number, line in enumerate((SOURCES / file).read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
            depth += bool(_BEGIN.match(line)) - bool(_END.match(line))
            if skippable and _OTHER.match(line):  # the `#if` may skip the `#line` after an include
                lines.append(f'#line {number + 1} "{file}"')
                skippable = depth > 0
            continue
        skippable = depth > 0
        if include[1] not in seen:
            lines.append(flatten(include[1], seen).rstrip("\n"))
        lines.append(f'#line {number + 1} "{file}"')
    return "\n".join(lines) + "\n"


def architecture(capability: str) -> str:
    """The `-arch` option for a compute capability such as "90".

    For Hopper it includes the features of 9.0 that later devices lack, such as wgmma.
    """
    return "sm_90a" if capability == "90" else f"sm_{capability}"


def compiler_flags(defines: Defines, arch: str) -> tuple[str, ...]:
    return (*FLAGS, *(f"-D{name}={value}" for name, value in sorted(defines.items())),
            f"-arch={arch}")  # fmt: skip


def compile_for(
    file: str, defines: Defines, arch: str, extra: Iterable[str] = ()
) -> tuple[bytes, str]:
    """Machine code and compiler log of `file` for `arch`. Needs NVRTC, but no GPU."""
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


compile_seconds: dict[tuple[Any, ...], float] = {}  # in this process, by file and -D options


def cache_directory() -> Path:
    """The folder of the cache on disk: INFONCE_CACHE_DIR, or in the user's cache."""
    folder = os.environ.get("INFONCE_CACHE_DIR")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infonce"


def cubin(file: str, defines: Defines, arch: str) -> Path:
    """The path of the machine code in the cache. It is compiled first if the cache lacks it."""
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
        return _written(path, code)
    except OSError:  # the cache cannot be written: use a folder of this process
        return _written(_own_directory() / name, code)


def _written(path: Path, code: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write at the same time: each writes another file and renames it
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(code)
    os.replace(part.name, path)
    return path


@cache
def _own_directory() -> Path:
    """A folder that is removed at the end of this process."""
    path = tempfile.mkdtemp(prefix="infonce-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


# --- functions on a device ------------------------------------------------------------------------

_modules: dict[tuple[Any, ...], Any] = {}  # cupy.RawModule
_functions: dict[tuple[Any, ...], Any] = {}  # cupy.RawKernel
_started: dict[tuple[Any, ...], Future[Path]] = {}  # modules whose compilation has begun
_lock = threading.Lock()


def start(device: Any, file: str, **defines: int | str) -> bool:
    """Begin to compile `file` for the current device, in a new thread.

    Returns False if the file is compiled or has been started. All files of a call compile at the
    same time, because NVRTC releases the GIL.
    """
    key = _module_key(device, file, defines)
    future: Future[Path] = Future()
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
    """Kernel `name` of `file` on the current device, as a `cupy.RawKernel`.

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
    import cupy

    key = _module_key(device, file, defines)
    if key not in _modules:
        started = _started.pop(key, None)
        if started is None:
            path = cubin(file, defines, architecture(device.compute_capability))
        else:
            path = started.result()
        _modules[key] = cupy.RawModule(path=str(path))
    kernel = _modules[key].get_function(name)
    if shared > kernel.max_dynamic_shared_size_bytes:  # 48 KiB, unless a kernel asks for more
        kernel.max_dynamic_shared_size_bytes = shared
    return kernel
