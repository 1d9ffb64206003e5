"""Machine code of the CUDA kernels, before and after a change. Needs NVRTC, but no GPU.

    python tools/cubins.py record before.json     in the checkout before the change
    python tools/cubins.py record after.json      in the checkout after the change
    python tools/cubins.py compare before.json after.json

`record` runs tests/cuda/test_compile.py on the kernels of the checkout, which must be installed. It
writes a digest of each cubin that the tests compile, by file, architecture and -D options. Names of
functions and types, which a cubin has in tables of their own, are not in the digest: to rename them
changes no machine code. `HYPOTHESIS_PROFILE=thorough` compiles all variants; options of pytest
after the file's name choose among the tests (`-k sweeps`).
"""

import hashlib
import json
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import infonce

# Types of ELF sections: symbols, strings, nothing in the file, and NVIDIA's second table of symbols
NAMES = {2, 3, 8, 0x70000085}
CHECKOUT = Path(__file__).resolve().parents[1]
TESTS = CHECKOUT / "tests" / "cuda" / "test_compile.py"


def record(path: Path, options: list[str]) -> int:
    """The exit status of the tests."""
    from infonce.kernels.gpu.device import compiler

    installed = Path(infonce.__file__).resolve().parents[1]
    if installed != CHECKOUT:
        sys.exit(f"expected infonce of {CHECKOUT}, got that of {installed}: pip install -e . first")
    digests: dict[str, str] = {}
    compile_for = compiler.compile_for

    def recording(
        file: str, defines: Mapping[str, int | str], arch: str, extra: Iterable[str] = ()
    ) -> tuple[bytes, str]:
        code, log = compile_for(file, defines, arch, extra)
        options = " ".join(f"{name}={value}" for name, value in sorted(defines.items()))
        digests[f"{file} {arch} {options}"] = hashlib.sha256(without_names(code)).hexdigest()
        return code, log

    compiler.compile_for = recording
    status = pytest.main([str(TESTS), "-q", "-n", "0", "-p", "no:cacheprovider", *options])
    path.write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")
    print(f"{len(digests)} cubins")
    return int(status)


def without_names(cubin: bytes) -> bytes:
    """The sections of an ELF file, sorted, but those of symbols and their names. The compiler sorts
    functions by name, so a new name moves a section."""
    start, size, count = (  # of the table of sections, one of its entries, the number of entries
        *struct.unpack_from("<Q", cubin, 0x28),
        *struct.unpack_from("<2H", cubin, 0x3A),
    )
    headers = [struct.unpack_from("<2I4Q", cubin, start + i * size) for i in range(count)]
    return b"".join(
        sorted(
            cubin[offset : offset + length]
            for _, kind, _, _, offset, length in headers
            if kind not in NAMES
        )
    )


def compare(before: Path, after: Path) -> int:
    """0 if both files have the same variants with the same machine code."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            print(f"only before: {name}")
        elif name not in old:
            print(f"only after: {name}")
        elif old[name] != new[name]:
            print(f"differs: {name}")
    same = sum(new.get(name) == digest for name, digest in old.items())
    print(f"{same} of {len(old.keys() | new.keys())} cubins are identical")
    return int(old != new)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", path, *options]:
            sys.exit(record(Path(path), options))
        case ["compare", before, after]:
            sys.exit(compare(Path(before), Path(after)))
        case _:
            print(__doc__)
            sys.exit(2)
