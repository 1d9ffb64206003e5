"""Kernels take arguments by the names that their sources declare; recordings say which of them are
filled in later. No GPU is needed."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy")
from infonce.kernels.gpu.device import compiler, signatures
from infonce.kernels.gpu.device import recorder as recording
from infonce.kernels.gpu.device.recorder import FIRST, SPACING, Placeholder, Pointer, Recorder

pytestmark = pytest.mark.extras
KERNELS = signatures.kernel_files()
HOST = Path(compiler.__file__).parents[1]


class Function:
    ptr = 77


def test_options_of_0_are_not_given() -> None:
    assert signatures.given_options({"LIMITS": 0, "BIAS": 2, "IDS": 1}) == ("BIAS",)


def test_every_kernel_is_found() -> None:
    text = "".join(path.read_text() for path in compiler.SOURCES.rglob("*.cu*"))
    assert len(KERNELS) == text.count('extern "C" __global__') > 30


def test_every_kernel_is_launched_from_one_file() -> None:
    """A search for a kernel's name finds its launch, or the pass whose schedule names it."""
    launch = (
        r"\b(?:launch\w*|rows|vectors|function|\w*Kernel)\("
        r'\s*(?:\w+,\s*)?(?:"[\w/]+\.cu",\s*)?"(\w+)"'
    )
    launched: dict[str, set[str]] = {}
    for path in [*HOST.rglob("*.py"), *(HOST.parent / "maxsim").glob("*.py")]:
        for kernel in re.findall(launch, path.read_text()):
            launched.setdefault(kernel, set()).add(path.name)
    chosen = r'(?:kernel\(|\bname(?:, columns)? = |\belse )"(\w+)"'
    for path in (HOST / "schedule").glob("*.py"):
        for kernel in KERNELS.keys() & set(re.findall(chosen, path.read_text())):
            launched.setdefault(kernel, set()).add(path.name)
    assert launched.keys() == KERNELS.keys()
    # rows and tokens have norms
    assert {kernel for kernel, files in launched.items() if len(files) > 1} == {"row_norms"}


def test_constants_that_both_languages_have_are_equal() -> None:
    """Sides of tiles, threads of blocks, rows of pieces: the host lays out memory by them."""
    assigned, of_kernels = r"([A-Z][A-Z0-9_]+) = (\d+)(?=[,;])", dict[str, set[int]]()
    for path in compiler.SOURCES.rglob("*.cu*"):
        for line in re.findall(r"^ *constexpr int ([^()]*;)", path.read_text(), re.MULTILINE):
            for name, value in re.findall(assigned, line):
                of_kernels.setdefault(name, set()).add(int(value))
    of_one_file = {"ROWS", "THREADS"}  # words of several meanings
    compared = 0
    for path in [*HOST.rglob("*.py"), *(HOST.parent / "maxsim").glob("*.py")]:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign) or path.name == "cpu.py":
                continue
            sides = ast.unparse(node).split(" = ", 1)
            names, values = (side.strip("()").split(", ") for side in sides)
            for name, value in zip(names, values, strict=False):
                if name in of_kernels.keys() - of_one_file and value.isdigit():
                    assert int(value) in of_kernels[name], (path, name)
                    compared += 1
    assert compared >= 18


@pytest.mark.parametrize(
    "arguments", [{"x": 0, "n": 1, "ranges": 0}, {"x": 0, "n": 1, "ranges": 0, "to": 0},
              {"x": 0, "n": 1, "ranges": 0, "out": 0, "to": 0}],
)  # fmt: skip
def test_names_that_are_missing_or_unknown(arguments: dict[str, int]) -> None:
    signature = signatures.signature("vectors.cu", "divide_factors")
    message = r"^divide_factors: expected x, n, ranges, out; got x, n, ranges"
    with pytest.raises(TypeError, match=message):
        signature.arguments(arguments)
    raise_scale = signatures.signature("vectors.cu", "raise_scale")
    message = r"^Scale: expected value, pointer, factor, feature_divisors; got"
    with pytest.raises(TypeError, match=message):
        raise_scale.arguments({"by": 3, "out": 9, "scale": arguments})
    with pytest.raises(TypeError, match=r"^divide_factors: expected"):
        Recorder().launch(Function(), signature, 1, 128, 0, arguments)


def test_recordings_say_what_is_filled_in() -> None:
    """Pointers by their type, wherever they point; numbers by their class."""
    recorder = Recorder()
    recorder.sizes += [512, 512]
    second = FIRST + SPACING + SPACING // 2
    number = Placeholder(3)
    look_alike = np.array([second], np.uint64).view(np.float64)[0]  # a number with such bits
    signature = signatures.signature("vectors.cu", "ranges")
    names = (name for name, _ in signatures.structure("vectors.cu", "FactorSources").fields)
    factors = dict.fromkeys(names) | {"row_factor": second + 24}
    sources = {"f": factors, "m": second, "n": -1, "set_size": 3, "by_factor": True,
               "largest_element": look_alike}  # fmt: skip
    arguments = {"sources": sources, "out": second - 8}
    recorder.launch(Function(), signature, 1, 1024, 0, arguments)
    words = recorder.words
    assert words.pointers == [(1, Pointer(1, 24)), (11, Pointer(1, -8))]
    assert words.values[6:11] == [second, 2**64 - 1, 3, 1, second]
    assert not words.numbers
    signature = signatures.signature("vectors.cu", "raise_scale")
    scale = {"value": number, "pointer": None, "factor": 1.0, "feature_divisors": None}
    recorder.launch(
        Function(), signature, 1, 128, 0,
        {"scale": scale, "by": 4.0, "out": second},
    )  # fmt: skip
    assert words.numbers == [(12, 3)]
    assert [8 * at for at in (0, 11, 12, 16, 17)] == recorder.parameters
    recorder.gemm(0, 1, 2, 3, 4, 1234, second, 2, 8, second, 2, 8, 5678, second, 0, 8, 68, -1)
    # the first would be cuBLAS's workspace, which products in CUDA graphs have
    assert [at for at, _ in recorder.other_arguments.pointers] == [7, 10, 14]
    with pytest.raises(ValueError, match="expected an address in one of the call's arrays, got"):
        recording.resolve_placeholder(4096)
