"""How sources are put together, and files compiled side by side; nothing is compiled here."""

import re
import threading
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

    def cubin(file: str, defines: Any, arch: str) -> bytes:
        if file == "broken.cu":
            raise RuntimeError("broken.cu does not compile")
        both.wait()
        return f"{file} {defines} {arch}".encode()

    monkeypatch.setattr(compiler, "cubin", cubin)
    files = ["rows.cu", "finish.cu"]
    assert [compiler.start(Card, file, PRECISION="BF16") for file in (*files, *files)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert [future.result() for future in started.values()] == [
        f"{file} {{'PRECISION': 'BF16'}} sm_90a".encode() for file in files
    ]
    assert compiler.start(Card, "broken.cu")
    with pytest.raises(RuntimeError, match=r"broken\.cu does not compile"):
        compiler.function(Card, "broken.cu", "kernel")
    assert len(started) == len(files)  # who asks again, compiles again


def test_headers_are_part_of_the_source() -> None:
    text = compiler.flatten("tiled/lse.cu")
    assert text.count('#line 1 "ptx.cuh"') == 1
    assert not re.search(r'^\s*#\s*include\s+"', text, re.MULTILINE)


def test_architecture() -> None:
    assert [compiler.architecture(c) for c in ("75", "90", "100")] == ["sm_75", "sm_90a", "sm_100"]
