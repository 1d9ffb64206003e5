"""CUDA kernels as functions of the host, by a C++ compiler and the runtime of this folder.

    kernel = engine.kernel("tiled/lse.cu", "lse", PRECISION="BF16", ...)    # of kernels/cuda
    kernel.launch(grid, block, shared, parameters, seed=7)

- `parameters`: the bytes of each parameter, as `bytes`, NumPy arrays or numbers; or an int, the
  address of pointers to them, as the CUDA driver takes it.
- `seed`: a schedule. With 0, threads run in their order, and asynchronous work is done at once.
  With another seed, threads run in a random order, and copies and matrix products are done at a
  random time between their start and the wait for them. The default is `SEED`.
- `cooperative`: whether all blocks run side by side. The blocks of a cluster always do.

A thread that uses memory beyond an array of `Memory`, waits for ever, or breaks a rule of a
barrier, a copy or a matrix product ends the launch: a `KernelError` names the kernel, the block,
the thread and the line. With `WATCHES_ORDER`, a launch also ends if two lanes of a warp use the
same bytes, one of them to write, without a synchronisation in between. Such launches take about
three times as long.

`compile_source` and `Kernel` are the two steps of `kernel`. The environment's CXX is the compiler,
or g++.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from infonce.kernels.gpu.device import compiler

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "g++")
SEED = 0  # of launches without `seed`
WATCHES_ORDER = False  # whether kernels that are compiled from now on check the order of accesses
OPTIONS = ("-std=c++17", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-gnu-unique",
           "-w")  # fmt: skip
# The functions that the compiler's checks of bounds and alignment call are in runtime/, so the
# libraries of the compiler are left out
KERNEL_OPTIONS = (
    "-Og",  # kernels are as fast as with -O1, and compile in two thirds of the time
    "-fvisibility=hidden",
    "-fsanitize=bounds,alignment",
    "-fno-sanitize-recover=all",  # a failed check ends the launch: half of the code
    "-nodefaultlibs",
)
MORE_OPTIONS = tuple(os.environ.get("EMULATOR_CXXFLAGS", "").split())  # "-O0 -g": for a debugger
ORDER_OPTIONS = ("-fsanitize=thread",)  # a call to runtime/order.cpp before each access
LINE_OPTIONS = ("-g1",)  # lines, which `_error` reports; without them, a kernel compiles sooner
KERNEL_LIBRARIES = ("-lm", "-lc", "-lgcc")
RUNTIME_OPTIONS = ("-O3", "-g", "-shared")
TIME_LIMIT = 600  # seconds for one compilation

_LINE = re.compile(r'#line (\d+) "([^"]+)"')
_KERNEL = re.compile(r'extern "C" __global__ void\b[^{]*?\b(\w+)\s*\((?:[^(){}]*)\)\s*\{', re.S)
_CLUSTER = re.compile(r"__cluster_dims__\((\w+)")
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?char (\w+)\[\];")
# Held by a thread that launches, asks for or does work of a stream, or takes memory. There is no
# second lock: each of these may free garbage, whose end needs all of them
turn = threading.RLock()


class CompileError(RuntimeError):
    """The messages of the compiler, with files and lines of kernels/cuda."""


class KernelError(RuntimeError):
    """A mistake that ended a launch, with kernel, block, thread and line."""


@cache
def missing() -> str:
    """Why kernels cannot run here; empty if they can."""
    if os.name != "posix" or platform.system() != "Linux":
        return f"the emulator needs Linux, not {platform.system()}"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the emulator needs x86-64 or aarch64, not {platform.machine()}"
    if shutil.which(CXX) is None:
        return f"no C++ compiler: {CXX} is not installed"
    return ""


# --- compilation ----------------------------------------------------------------------------------


@cache
def _machine_options() -> tuple[str, ...]:
    """Options for instructions of this CPU: with them, fma is an instruction instead of a call."""
    try:
        flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    except OSError:
        return ()
    return ("-mavx2", "-mfma") if {"avx2", "fma"} <= flags else ()


@cache
def tools() -> str:
    """A digest of what compiled kernels depend on, except for their sources and -D options."""
    headers = "".join(path.read_text() for path in sorted((HERE / "headers").iterdir()))
    version = subprocess.run([CXX, "--version"], capture_output=True, text=True, check=True).stdout
    recipe = repr((headers, version, OPTIONS, _machine_options(), KERNEL_OPTIONS, MORE_OPTIONS))
    return hashlib.sha256(recipe.encode()).hexdigest()


def _build(
    text: str, suffix: str, options: Sequence[str], files: Sequence[str] = ("-x", "c++", "-")
) -> Path:
    """The path of what `text` and `files` are compiled to, which is done if it is not cached.

    Its name is a digest of everything that it depends on.
    """
    recipe = repr((text, options, files, tools()))
    directory = compiler.cache_directory() / "emulated"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{hashlib.sha256(recipe.encode()).hexdigest()[:32]}{suffix}"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for the one that compiles it
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            command = [CXX, *OPTIONS, *_machine_options(), *options, "-o", str(part)]
            done = subprocess.run(
                [*command, *files], input=text, text=True, capture_output=True, cwd=directory,
                timeout=TIME_LIMIT,
            )  # fmt: skip
            if done.returncode:
                # "file:line:column: " becomes "file(line): ", as NVRTC writes it
                raise CompileError(
                    re.sub(r"^([^:\s]+):(\d+)(?::\d+)?: ", r"\1(\2): ", done.stderr, flags=re.M)
                )
            os.replace(part, path)
    path.with_suffix(".lock").unlink(missing_ok=True)
    return path


@cache
def _runtime() -> ctypes.CDLL:
    """The library of runtime/, with the functions that kernels call. Loaded once."""
    files = sorted(map(str, (HERE / "runtime").glob("*.cpp")))
    text = "".join(path.read_text() for path in sorted((HERE / "runtime").iterdir()))
    library = ctypes.CDLL(
        str(_build(text, "-runtime.so", RUNTIME_OPTIONS, files)), mode=ctypes.RTLD_GLOBAL
    )
    library.emulator_error.restype = library.emulator_fault.restype = ctypes.c_char_p
    library.emulator_allocate.restype = ctypes.c_void_p
    library.emulator_allocate.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.emulator_free.argtypes = [ctypes.c_void_p]
    return library


@cache
def _precompiled(options: tuple[str, ...]) -> str:
    """The folder of cuda.h, precompiled with these options. g++ passes over it with others."""
    header = ("-x", "c++-header", str(HERE / "headers" / "cuda.h"))
    return str(_build("", "-headers/cuda.h.gch", options, header).parent)


def host_source(source: str) -> str:
    """A flattened source of kernels/cuda as C++ for the host.

    headers/ptx.h replaces ptx.cuh. Each kernel becomes a function, which a macro at the end exports
    with its name. Its dynamic shared memory becomes a pointer to the memory of the current block.
    """
    lines: list[str] = []
    kernels: dict[str, str] = {}  # name -> number of blocks of a cluster
    file, number, replaced = "", 0, False
    text = source.splitlines()
    for i, line in enumerate(text):
        if marker := _LINE.match(line):
            number, file = int(marker[1]) - 1, marker[2]
        else:
            number += 1
        if file == "ptx.cuh" or file.startswith("ptx/"):
            if not replaced:
                lines.append('#line 1 "headers/ptx.h"\n}\n#include "ptx.h"\nnamespace {')
            replaced = True
            continue
        if line.startswith('extern "C" __global__'):
            head = "\n".join(text[i : i + 40])  # its parameters end in 40 lines
            if kernel := _KERNEL.match(head):
                cluster = _CLUSTER.search(kernel[0])
                kernels[kernel[1]] = cluster[1] if cluster else "1"
                lines.append(f'#define EMULATES_{kernel[1]}\n#line {number} "{file}"')
            line = line.replace('extern "C" __global__', "__global__", 1)
        lines.append(_DYNAMIC.sub(r"char* const \1 = device::current->shared;", line))
    ends = [
        f"#ifdef EMULATES_{name}\nEMULATED_KERNEL({name}, {blocks})\n#endif"
        for name, blocks in kernels.items()
    ]
    return "\n".join(['#include "cuda.h"\nnamespace {', *lines, '\n#line 1 "ends"\n}', *ends, ""])


def compile_source(source: str, options: Sequence[str]) -> str:
    """The path of a shared library of a flattened source. `options` are NVRTC's -D and -arch."""
    arch = next(o.removeprefix("-arch=sm_") for o in options if o.startswith("-arch="))
    macros = [o for o in options if o.startswith("-D")]
    macros.append(f"-D__CUDA_ARCH__={arch.rstrip('a')}0")
    if arch == "90a":
        macros.append("-D__CUDA_ARCH_FEAT_SM90_ALL=1")
    kernel_options = (*KERNEL_OPTIONS, *(ORDER_OPTIONS if WATCHES_ORDER else ()), *MORE_OPTIONS)
    folders = ("-I", _precompiled(kernel_options), "-I", str(HERE / "headers"))
    files = (*folders, "-x", "c++", "-", "-x", "none", *KERNEL_LIBRARIES)
    recipe = host_source(source), ".so", (*kernel_options, "-shared", *macros), files
    path = str(_build(*recipe))
    _recipes[path] = recipe
    return path


# Arguments of `_build` of the libraries that this process has compiled, by path
_recipes: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {}


def kernel(file: str, name: str, arch: str = "sm_90a", **defines: int | str) -> Kernel:
    """Kernel `name` of `file` in kernels/cuda, compiled with -D options `defines`."""
    path = compile_source(compiler.flatten(file), compiler.compiler_flags(defines, arch))
    return Kernel(path, name)


# --- launches -------------------------------------------------------------------------------------


class Kernel:
    """Kernel `name` of the library at `path`, which `compile_source` has made."""

    def __init__(self, path: str, name: str) -> None:
        _runtime()
        library = ctypes.CDLL(path)
        self.name, self._run = name, getattr(library, f"emulate_{name}")
        sizes = getattr(library, f"sizes_{name}")
        sizes.restype = ctypes.POINTER(ctypes.c_size_t)
        self.sizes: list[int] = []  # bytes of each parameter
        while size := sizes()[len(self.sizes)]:
            self.sizes.append(size)
        self.cluster = int(getattr(library, f"cluster_{name}")())  # blocks of a cluster

    def launch(
        self, grid: int, block: int, shared: int, parameters: int | Sequence[Any], *,
        cooperative: bool = False, seed: int | None = None,
    ) -> None:  # fmt: skip
        """Run `grid` blocks of `block` threads with `shared` bytes of dynamic shared memory.

        Returns when all have ended. The top of this file explains the other arguments.
        """
        if isinstance(parameters, int):
            address, buffers = parameters, None
        else:
            address, buffers = self._pack(parameters)
        concurrent = grid if cooperative else self.cluster
        if grid % concurrent:
            raise ValueError(f"{self.name}: expected a multiple of {concurrent} blocks, got {grid}")
        with turn:
            failed = self._run(
                grid, block, ctypes.c_size_t(shared), ctypes.c_void_p(address), concurrent,
                ctypes.c_uint64(SEED if seed is None else seed),
            )  # fmt: skip
            if failed:
                raise KernelError(_error())
        del buffers  # they had to live until the end of the launch

    def _pack(self, parameters: Sequence[Any]) -> tuple[int, Any]:
        """(address of an array of pointers to the parameters, buffers that have to stay alive)."""
        values = [p if isinstance(p, bytes) else np.asarray(p).tobytes() for p in parameters]
        if [len(v) for v in values] != self.sizes:
            raise TypeError(
                f"{self.name}: expected parameters of {self.sizes} bytes, got {[*map(len, values)]}"
            )
        buffers = [ctypes.create_string_buffer(v, len(v)) for v in values]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        return ctypes.addressof(pointers), (buffers, pointers)


def _error() -> str:
    """The message of the last launch. For a fault, addr2line (if installed) finds the line."""
    text: str = _runtime().emulator_error().decode()
    offset = ctypes.c_uint64()
    library = _runtime().emulator_fault(ctypes.byref(offset)).decode()
    if library in _recipes and shutil.which("addr2line"):
        source, suffix, options, files = _recipes[library]
        with_lines = _build(source, suffix, (*options, *LINE_OPTIONS), files)
        command = ["addr2line", "-e", str(with_lines), hex(offset.value)]
        line = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if "?" not in line:  # "?": unknown. Lines of kernels/cuda seem to be in the cache's folder
            text += f", at {line.removeprefix(f'{with_lines.parent}/')}"
    return text


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Context in which launches without `seed` run in schedule `seed`."""
    global SEED
    before, SEED = SEED, seed
    try:
        yield
    finally:
        SEED = before


class Memory:
    """An array of `size` bytes in the emulator's memory, before a page that cannot be used.

    Bytes are 0xff at first, which is NaN. If `size` is no multiple of `alignment`, there are bytes
    between the array and the page. A launch that has written to them fails when it ends.
    """

    def __init__(self, size: int, alignment: int = 16) -> None:
        self.size = size
        self.ptr: int = _runtime().emulator_allocate(size, alignment)
        if not self.ptr:
            raise MemoryError(f"no memory is left for {size} bytes")
        weakref.finalize(self, _runtime().emulator_free, self.ptr).atexit = False

    def view(self, dtype: Any = np.uint8) -> Any:
        """A NumPy array on this memory, which keeps it alive."""
        raw = (ctypes.c_uint8 * self.size).from_address(self.ptr)
        raw._memory = self
        return np.frombuffer(raw, np.uint8).view(dtype)


def tensor_map(data: int, rows: int, width: int, stride: int, box_rows: int) -> bytes:
    """The bytes of a struct `TensorMap` of headers/device.h, for copies by TMA of 16-bit numbers.

    `data` is an address, `width` and `stride` are bytes of a row and between rows, `box_rows` the
    rows of a copy. On a GPU, kernels/gpu/device/tensor_map.py makes the map.
    """
    return np.array([data, rows, width, stride, box_rows, 2, *[0] * 10], np.int64).tobytes()
