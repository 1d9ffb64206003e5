"""How sources are put together, and files compiled side by side. One file is compiled here:
one with errors."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from infonce.kernels.gpu.device import compiler


class Card:
    id, compute_capability = 0, "90"


@pytest.mark.extras
def test_files_of_a_call_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither file is done before both have begun, each once; an error reaches who waits."""
    pytest.importorskip("cupy")
    started: dict[tuple[Any, ...], Any] = {}
    monkeypatch.setattr(compiler, "_started", started)
    both = threading.Barrier(2, timeout=30)

    def cubin(file: str, defines: Any, arch: str) -> Path:
        if file == "broken.cu":
            raise RuntimeError("broken.cu does not compile")
        both.wait()
        return Path(f"{file} {defines} {arch}")

    monkeypatch.setattr(compiler, "cubin", cubin)
    files = ["rows.cu", "finish.cu"]
    assert [compiler.start(Card, file, PRECISION="BF16") for file in (*files, *files)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert [future.result() for future in started.values()] == [
        Path(f"{file} {{'PRECISION': 'BF16'}} sm_90a") for file in files
    ]
    assert compiler.start(Card, "broken.cu")
    with pytest.raises(RuntimeError, match=r"broken\.cu does not compile"):
        compiler.function(Card, "broken.cu", "kernel")
    assert len(started) == len(files)  # who asks again, compiles again


class RawModule:
    """Stands for CuPy's: what was loaded, and 48 KiB of dynamic shared memory for each kernel."""

    loaded: list[bytes]

    def __init__(self, *, path: str) -> None:
        self.loaded.append(Path(path).read_bytes())
        self.kernels: dict[str, Any] = {}

    def get_function(self, name: str) -> Any:
        new = SimpleNamespace(name=name, max_dynamic_shared_size_bytes=48 * 1024)
        return self.kernels.setdefault(name, new)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """No module is loaded and no file cached; the files that are compiled from now on."""
    cupy = pytest.importorskip("cupy")
    compiled: list[str] = []

    def compile_for(file: str, defines: Any, arch: str) -> tuple[bytes, str]:
        compiled.append(file)
        return f"{file} for {arch}".encode(), ""

    for known in ("_modules", "_functions", "_started", "compile_seconds"):
        monkeypatch.setattr(compiler, known, {})
    monkeypatch.setattr(compiler, "compile_for", compile_for)
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (13, 0))
    monkeypatch.setenv("INFONCE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(RawModule, "loaded", [], raising=False)
    monkeypatch.setattr(cupy, "RawModule", RawModule)
    return compiled


@pytest.mark.extras
def test_raw_modules_load_what_is_in_the_cache(
    nothing_compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each device, and a kernel may ask for more shared memory again."""
    kernel = compiler.function(Card, "rows.cu", "stage", PRECISION="FP32")
    assert compiler.function(Card, "rows.cu", "stage", PRECISION="FP32") is kernel
    assert kernel.max_dynamic_shared_size_bytes == 48 * 1024
    other = compiler.function(Card, "rows.cu", "finish", 99, PRECISION="FP32")
    assert (kernel.name, other.name) == ("stage", "finish")
    for shared in (1000, 160 * 1024, 80 * 1024):  # the last one must not take from the one before
        assert compiler.function(Card, "rows.cu", "stage", shared, PRECISION="FP32") is kernel
    assert kernel.max_dynamic_shared_size_bytes == 160 * 1024
    assert RawModule.loaded == [b"rows.cu for sm_90a"]

    class Second(Card):
        id = 1

    assert compiler.function(Second, "rows.cu", "stage", PRECISION="FP32") is not kernel
    assert RawModule.loaded == 2 * [b"rows.cu for sm_90a"]
    assert nothing_compiled == ["rows.cu"]
    monkeypatch.setattr(compiler, "_modules", {})  # as another process
    monkeypatch.setattr(compiler, "_functions", {})
    compiler.start(Card, "rows.cu", PRECISION="FP32")
    compiler.function(Card, "rows.cu", "stage", PRECISION="FP32")
    assert nothing_compiled == ["rows.cu"]
    assert len(RawModule.loaded) == 3


@pytest.mark.extras
def test_a_file_is_not_compiled_again_while_it_is_loaded(
    nothing_compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = []

    class SlowModule(RawModule):
        """While a thread loads it, another thread begins a call with the same kernel."""

        def __init__(self, *, path: str) -> None:
            super().__init__(path=path)
            again.append(compiler.start(Card, "rows.cu"))

    monkeypatch.setattr(pytest.importorskip("cupy"), "RawModule", SlowModule)
    assert compiler.start(Card, "rows.cu")
    compiler.function(Card, "rows.cu", "stage")
    again.append(compiler.start(Card, "rows.cu"))
    assert again == [False, False]
    assert not compiler._started
    assert nothing_compiled == ["rows.cu"]

    class EmptiedMeanwhile(dict[Any, Any]):
        """`_modules`, while the thread that has loaded a module empties `_started`."""

        def __contains__(self, key: object) -> bool:
            compiler._started.pop(key, None)  # type: ignore[call-overload]
            return super().__contains__(key)

    monkeypatch.setattr(compiler, "_modules", EmptiedMeanwhile(compiler._modules))
    assert not compiler.start(Card, "rows.cu")


@pytest.mark.extras
def test_kernels_load_where_no_cache_can_be_written(
    nothing_compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFONCE_CACHE_DIR", str(tmp_path / "file" / "no folder"))
    assert compiler.function(Card, "rows.cu", "stage").name == "stage"
    assert RawModule.loaded == [b"rows.cu for sm_90a"]


def test_headers_are_part_of_the_source() -> None:
    text = compiler.flatten("tiled/lse.cu")
    assert text.count('#line 1 "ptx.cuh"') == 1
    assert not re.search(r'^\s*#\s*include\s+"', text, re.MULTILINE)


def test_lines_after_an_include_that_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.cuh").write_text("int a;\nint b;\n")
    (tmp_path / "a.cu").write_text('#if X\n#include "a.cuh"\n#else\nint c;\n#endif\nint d;\n')
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    number, at, skipped, line_numbers = 0, "", False, {}
    for line in compiler.flatten("a.cu").splitlines():  # without X
        skipped = line == "#if X" or (skipped and line != "#else")
        if skipped:
            number += 1
        elif line.startswith("#line"):
            number, at = int(line.split()[1]), line.split()[2]
        else:
            line_numbers[line] = number, at
            number += 1
    assert line_numbers["int c;"] == (4, '"a.cu"')
    assert line_numbers["int d;"] == (6, '"a.cu"')


def test_architecture() -> None:
    assert [compiler.architecture(c) for c in ("75", "90", "100")] == ["sm_75", "sm_90a", "sm_100"]


@pytest.mark.extras
def test_errors_name_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        pytest.importorskip("cupy").cuda.nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"no NVRTC: {error}")
    (tmp_path / "inner.cuh").write_text("#pragma once\nint fine;\nint broken = missing;\n")
    (tmp_path / "outer.cu").write_text('int a;\n#include "inner.cuh"\n#include "inner.cuh"\nhuh;\n')
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError) as error:
        compiler.compile_for("outer.cu", {}, "sm_80")
    assert "inner.cuh(3)" in str(error.value)
    assert "outer.cu(4)" in str(error.value)
