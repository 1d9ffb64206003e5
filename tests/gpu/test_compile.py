"""Every kernel compiles for every kind of card, and keeps to its registers; no GPU is needed."""

import re
from dataclasses import replace

import numpy as np
import pytest
from infonce.kernels.gpu import config
from infonce.kernels.gpu.device import compiler, signatures
from infonce.kernels.problem import few_blocks

try:
    from cupy.cuda import nvrtc

    nvrtc.getVersion()
    MISSING = ""
except Exception as error:
    MISSING = f"no NVRTC: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
needs_nvrtc = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# capability, shared memory of a block and of a multiprocessor in KiB
DEVICES = {
    "sm_75": config.Device("75", 40, 64 * 1024, 64 * 1024),
    "sm_80": config.Device("80", 108, 163 * 1024, 164 * 1024),
    "sm_90a": config.Device("90", 132, 227 * 1024, 228 * 1024),
    "sm_100": config.Device("100", 148, 227 * 1024, 228 * 1024),
}
TILED = {"lse": "COLUMNS", "gradient": "COLUMNS", "sigmoid": "PANEL", "ranks": "COLUMNS"}
# bytes that a thread may spill, where two blocks share a multiprocessor's registers or float64
# takes two for each number; nothing is spilled elsewhere
SPILLS = {"lse": 160, "gradient": 240, "sigmoid": 420, "ranks": 120}
SPILLS_FP64 = {"lse": 120, "gradient": 700, "sigmoid": 1100, "ranks": 120}


def spilled(log: str) -> int:
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert found, log
    return max(int(n) for pair in found for n in pair)


@needs_nvrtc
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("precision", config.OPERAND_BYTES)
@pytest.mark.parametrize("name", TILED)
def test_tiled_kernels(name: str, precision: str, arch: str) -> None:
    device = DEVICES[arch]
    if not config.supported(precision, device):
        pytest.skip(f"{arch} has no tensor cores for {precision}")
    compile_within_budget(name, precision, arch, config.tile_for(precision, 64, device), 1)


@needs_nvrtc
@pytest.mark.parametrize("name", TILED)
def test_other_variants(name: str) -> None:
    device = DEVICES["sm_90a"]
    compile_within_budget(name, "bf16", "sm_90a", config.tile_for("bf16", 64, device), 0)
    compile_within_budget(name, "bf16", "sm_90a", config.tile_for("bf16", 4096, device), 1)


def compile_within_budget(
    name: str, precision: str, arch: str, tile: config.Tile, option: int
) -> None:
    defines = {
        "PRECISION": precision.upper(), "BLOCK_N": tile.block_n, "STAGES": tile.stages,
        "LEVELS": tile.levels, "MIN_BLOCKS": tile.min_blocks, TILED[name]: option,
    }  # fmt: skip
    code, log = compiler.compile_for(f"tiled/{name}.cu", defines, arch, ("--ptxas-options=-v",))
    assert code
    budget = 24
    if precision == "fp64":
        budget = SPILLS_FP64[name]
    elif tile.min_blocks == 2:
        budget = SPILLS[name]
    assert spilled(log) <= budget, (defines, log)
    declared = max(int(n) for n in re.findall(r"(\d+) bytes smem", log))
    assert declared <= tile.static_shared


# bytes that a thread of a sweep may spill, which has 112 registers, 64 of them for logits
SWEEPS = {"lse": ("COLUMNS", 128), "gradient": ("COLUMNS", 64), "sigmoid": ("PANEL", 200),
          "online": ("", 128)}  # fmt: skip
SPILLS_EXTRAS = 1024


@needs_nvrtc
@pytest.mark.parametrize("width", [128, 1024, 1040, 2048])
@pytest.mark.parametrize("precision", config.SWEEP_PRECISIONS)
@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps(name: str, precision: str, width: int) -> None:
    """For Hopper alone. That shared memory suffices is asserted by the kernels."""
    if name == "online" and precision in config.FLOAT16:
        pytest.skip("one pass wants the exponents of float32")
    option, budget = SWEEPS[name]
    if (
        precision in config.OPERAND_PARTS
    ):  # of each part; with many times the products, spills matter less
        width, budget = width // 2, 512
    variants = ((False, 1), (False, 0), (True, 1)) if option else ((False, 1), (True, 1))
    for extras, variant in variants:
        sweep = config.sweep_for(precision, width, DEVICES["sm_90a"], extras)
        assert sweep is not None
        panel = name != "lse"
        assert sweep.stages(panel) >= 3
        assert sweep.shared(panel) <= DEVICES["sm_90a"].shared_memory
        defines = {
            "PRECISION": precision.upper(), "SLABS": sweep.k_slices, "STAGES": sweep.stages(panel),
            "WIDE": int(sweep.clustered), "SHARED": sweep.shared(panel), "IDS": int(extras),
            "FACTORS": int(extras), **({option: variant} if option else {}),
            **({"MAXIMA": int(extras)} if name == "lse" else {}),
        }  # fmt: skip
        options = ("--ptxas-options=-v",)
        log = compiler.compile_for(f"sm90/sweep_{name}.cu", defines, "sm_90a", options)[1]
        assert "serialized" not in log  # products that wait for each other
        assert spilled(log) <= (SPILLS_EXTRAS if extras else budget), (defines, log)


@needs_nvrtc
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sweeps_of_narrow_rows(precision: str, width: int, extras: bool) -> None:
    """dL/dx and the gathered gradient in registers; stages hold whole tiles."""
    device = DEVICES["sm_90a"]
    sweep = config.in_registers(
        config.sweep_for(precision, width, device, extras), precision, 10**5
    )
    assert sweep is not None
    assert sweep.stages(True) % sweep.k_slices == 0
    assert sweep.shared(True) <= device.shared_memory
    for columns in (0, 1):
        defines = {
            "PRECISION": precision.upper(), "SLABS": sweep.k_slices, "STAGES": sweep.stages(True),
            "WIDE": 0, "NARROW": 1, "SHARED": sweep.shared(True), "IDS": int(extras),
            "FACTORS": int(extras), "COLUMNS": columns,
        }  # fmt: skip
        options = ("--ptxas-options=-v",)
        log = compiler.compile_for("sm90/sweep_narrow.cu", defines, "sm_90a", options)[1]
        assert "serialized" not in log
        assert spilled(log) <= SWEEPS["gradient"][1], (defines, log)


@pytest.mark.parametrize("precision", config.SWEEP_PRECISIONS)
def test_short_rows_take_the_kernels_of_one_k_slice(precision: str) -> None:
    """Which are compiled above."""
    shapes = [
        config.sweep_for(precision, width, DEVICES["sm_90a"], False) for width in (2, 16, 128)
    ]
    assert shapes[0] == shapes[1] == shapes[2]


def test_which_rows_are_narrow() -> None:
    device = DEVICES["sm_90a"]
    for precision, width, rows, narrow in [
        ("bf16", 256, 10**5, True), ("fp16", 2, 10**5, True), ("bf16", 258, 10**5, False),
        ("tf32", 256, 10**5, False), ("bf16", 256, 100, False),
    ]:  # fmt: skip
        sweep = config.sweep_for(precision, width, device, False)
        assert (config.in_registers(sweep, precision, rows) is not None) == narrow
    assert config.in_registers(None, "bf16", 10**5) is None


def test_sweeps_are_for_hopper() -> None:
    device = DEVICES["sm_90a"]
    assert config.sweep_for("bf16", 1024, DEVICES["sm_80"], False) is None
    assert config.sweep_for("bf16", 1024, DEVICES["sm_100"], False) is None
    assert config.sweep_for("fp32", 1024, device, False) is None
    assert config.sweep_for("bf16", 2049, device, False) is None
    assert config.sweep_for("bf16x3", 1025, device, False) is None


@pytest.mark.parametrize(("precision", "by"), [("fp32", "fp16x3"), ("tf32", "fp16")])
def test_float16_takes_the_place_of_longer_numbers_on_hopper_alone(
    precision: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {arch: config.operands(precision, device) for arch, device in DEVICES.items()}
    assert found == {"sm_75": precision, "sm_80": precision, "sm_90a": by, "sm_100": precision}
    assert config.operands("bf16", DEVICES["sm_90a"]) == "bf16"
    monkeypatch.setattr(config.precision, "PORTABLE", True)
    assert config.operands(precision, DEVICES["sm_90a"]) == precision


@pytest.mark.parametrize("width", [128, 1024, 2048])
def test_what_is_cut_off_is_that_of_a_sum_that_is_truncated(width: int) -> None:
    """Of like terms, 32 bytes of features at a time. (16-bit mantissas lose more in hardware, whose
    terms are longer than what it keeps of them.)"""
    steps = width // 32
    terms = np.square(np.random.default_rng(0).standard_normal((steps, 16, 4000))).sum(1)
    total = np.zeros(4000)
    for term in terms:
        mantissa, exponent = np.frexp(total + term)
        total = np.ldexp(np.trunc(mantissa * 2**24) / 2**24, exponent)
    lost = float(np.mean(1 - total / terms.sum(0)))
    assert config.sweep_truncation_bias("bf16", width) == pytest.approx(lost, rel=0.25)
    assert config.sweep_truncation_bias("bf16x3", width) == 2 * config.sweep_truncation_bias(
        "bf16", width
    )  # twice the steps
    assert config.sweep_truncation_bias("fp16", width) > config.sweep_truncation_bias("bf16", width)
    assert (
        config.sweep_truncation_bias("fp16x3", width)
        == config.truncation_bias("fp16x3", 64)
        < 2.0**-23
    )  # half a K-slice
    assert config.sweep_truncation_bias("tf32", width) == 0


@pytest.mark.parametrize("triangle", [False, True])
@pytest.mark.parametrize("width", [128, 2048])
def test_segments_keep_all_workers_busy(width: int, triangle: bool) -> None:
    sweep = config.sweep_for("bf16", width, DEVICES["sm_90a"], False)
    assert sweep is not None
    for n in (1, 128, 129, 2048, 8192, 32768, 65536, 10**6):
        segments = sweep.segments(n, n, triangle)
        tiles = -(-n // 128)
        meetings = tiles // 2 + tiles % 2 if triangle else tiles
        assert 1 <= segments <= meetings
        assert segments <= sweep.max_segments(n, n)
        assert 2 * sweep.max_segments(n, n) * n <= sweep.row_sums(n, n)
        assert sweep.column_slots(n, n, triangle) * n <= sweep.column_sums(n, n)
        if n >= 8192:  # at least nine tenths of the workers' time are of use
            rounds = -(-tiles * segments // sweep.workers)
            assert tiles * meetings / (rounds * -(-meetings // segments) * sweep.workers) > 0.9


@needs_nvrtc
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize(
    ("file", "precision"),
    [("rows.cu", precision) for precision in ("FP64", "FP32", "BF16X3", "FP16X3", "FP16")]
    # whose code depends on the type of sums alone
    + [(f, precision) for f in ("vectors.cu", "naive/naive.cu") for precision in ("FP64", "FP32")],
)
def test_other_kernels(file: str, precision: str, arch: str) -> None:
    options = ("--ptxas-options=-v",)
    assert spilled(compiler.compile_for(file, {"PRECISION": precision}, arch, options)[1]) <= 32


@needs_nvrtc
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize(("precision", "dtype"), [("FP32", "FLOAT32"), ("FP64", "FLOAT64")])
@pytest.mark.parametrize("kind", ["SYMMETRIC", "TWO_SIDED", "SIGMOID"])
def test_fused(kind: str, precision: str, dtype: str, arch: str) -> None:
    kinds = {name: int(name == kind) for name in ("SYMMETRIC", "TWO_SIDED", "SIGMOID")}
    defines = {"PRECISION": precision, "DTYPE": f"DTYPE_{dtype}", "NORMALIZE": 1, "IDS": 1, **kinds}
    log = compiler.compile_for("fused/fused.cu", defines, arch, ("--ptxas-options=-v",))[1]
    assert spilled(log) <= (64 if precision == "FP32" else 512)


# options that have no default
OPTIONS = {
    "fused/fused.cu": {"DTYPE": "DTYPE_FLOAT32", "SYMMETRIC": 0, "TWO_SIDED": 0, "SIGMOID": 0,
                       "NORMALIZE": 0, "IDS": 0},
    "sm90/sweep_narrow.cu": {"NARROW": 1, "SLABS": 2},
}  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("file", sorted(set(signatures.kernel_files().values())))
def test_structures_lie_as_python_packs_them(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read from the sources, against the compiler's sizes and offsets."""
    parameters = [kind for s in signatures.signatures(file).values() for _, kind in s.fields]
    structures = {s.name: s for s in parameters if isinstance(s, signatures.Structure)}
    checks = "".join(
        f"static_assert(sizeof({name}) == {of.size});\n"
        + "".join(
            f"static_assert(__builtin_offsetof({name}, {field}) == {of.offset(field)});\n"
            for field, _ in of.fields
        )
        for name, of in structures.items()
    )
    # templates that nobody instantiates cost no time
    source = compiler.flatten(file).replace('extern "C" __global__', "template <int> __global__")
    monkeypatch.setattr(compiler, "flatten", lambda _: source + checks)
    assert compiler.compile_for(file, {"PRECISION": "BF16", **OPTIONS.get(file, {})}, "sm_90a")[0]


@needs_nvrtc
@pytest.mark.parametrize("name", ["_empty_sums", "_merge_sums", "_within", "_conclude"])
def test_elementwise_kernels(name: str, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Their texts, and the header that goes before them, as CuPy puts them together."""
    from infonce.kernels.gpu import vectors

    kernel = getattr(vectors, name)
    given = [f"const {p.ctype}& {p.name}" for p in kernel.in_params]
    made = [f"{p.ctype}& {p.name}" for p in kernel.out_params]
    text = f"__device__ void apply({', '.join(given + made)}) {{\n{kernel.operation};\n}}\n"
    (tmp_path / "elementwise.cu").write_text(kernel.preamble + text)
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    assert compiler.compile_for("elementwise.cu", {}, "sm_80")


@needs_nvrtc
def test_errors_name_file_and_line(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "inner.cuh").write_text("#pragma once\nint fine;\nint broken = missing;\n")
    (tmp_path / "outer.cu").write_text('int a;\n#include "inner.cuh"\n#include "inner.cuh"\nhuh;\n')
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError) as error:
        compiler.compile_for("outer.cu", {}, "sm_80")
    assert "inner.cuh(3)" in str(error.value)
    assert "outer.cu(4)" in str(error.value)


def test_headers_are_part_of_the_source() -> None:
    text = compiler.flatten("tiled/lse.cu")
    assert text.count('#line 1 "ptx.cuh"') == 1
    assert not re.search(r'^\s*#\s*include\s+"', text, re.MULTILINE)


def test_architecture() -> None:
    assert [compiler.architecture(c) for c in ("75", "90", "100")] == ["sm_75", "sm_90a", "sm_100"]


# --- launch configuration -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("precision", config.OPERAND_BYTES)
@pytest.mark.parametrize("d", [1, 64, 4096])
def test_tiles_fit_shared_memory(precision: str, d: int, arch: str) -> None:
    device = DEVICES[arch]
    tile = config.tile_for(precision, d, device)
    assert tile.shared + tile.static_shared <= device.shared_memory
    assert tile.threads == 2 * tile.block_n


def test_device_with_too_little_shared_memory() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        config.tile_for("fp32", 64, config.Device("75", 1, 48 * 1024, 48 * 1024))


@pytest.mark.parametrize("precision", config.OPERAND_BYTES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 7, 33), (10**6, 10**6, 512)])
def test_the_least_workspace_is_named(shape: tuple[int, int, int], precision: str) -> None:
    """That of both folds, whichever needs more."""
    for key_accumulator in (False, True):
        needs = config.Needs(precision, True, True, True, True, True, key_accumulator)
        with pytest.raises(ValueError, match="workspace: expected at least") as refused:
            config.blockings(shape, needs, 1, 128, False)
        least = int(str(refused.value).split("at least ")[1].split()[0])
        assert config.blockings(shape, needs, least, 128, False)[2] <= least
        with pytest.raises(ValueError, match=rf"at least {least} bytes .* got {least - 1}"):
            config.blockings(shape, needs, least - 1, 128, False)


@pytest.mark.parametrize("precision", config.OPERAND_BYTES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 7, 33), (5000, 5000, 129), (10**6, 10**6, 512)])
@pytest.mark.parametrize("workspace", [2**20, 2**24, 2**28])
def test_blocks_fit_the_workspace(
    shape: tuple[int, int, int], precision: str, workspace: int
) -> None:
    m, n, d = shape
    for key_accumulator, overlay in ((False, 0), (False, 2), (True, 0), (True, 2), (True, 4)):
        needs = config.Needs(
            precision, True, True, True, True, True, key_accumulator, overlay=overlay
        )
        for square in {False, m == n}:
            size = max(workspace, config.least_workspace(shape, needs, 128))
            assert size == workspace or (m == 10**6 and size < 2**26)
            cut = config.blocking(shape, needs, size, 128, square)
            assert few_blocks(m, n, cut.rows, cut.columns)
            assert 1 <= cut.rows <= m
            assert 1 <= cut.columns <= n
            assert not square or cut.rows == cut.columns
            used = needs.block(cut.rows, cut.columns, d, 128)
            used += (cut.key_rows - cut.overlaid) * needs.accumulator_row(d)
            assert used == needs.size(cut, d, 128) <= size
            assert (cut.key_rows > 0) == key_accumulator
            assert cut.overlaid * overlay <= cut.key_rows
            assert not cut.overlaid or cut.key_rows == n


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("d", "overlaid"), [(128, 0), (768, 32768), (1024, 32768), (1100, 0)])
def test_accumulators_that_overlay_gradients(d: int, overlaid: int, square: bool) -> None:
    """Where 16-bit dK of 65536 keys has no room in float32, half of it lies in its destination; not
    where it fits a quarter of the workspace, nor where the other half has no room."""
    n = 65536
    device = config.Device("90", 132, 227 * 1024, 228 * 1024)
    sweep = config.sweep_for("bf16", 2 * d, device, False)
    needs = config.Needs("bf16", False, False, False, True, True, True, sweep, False, overlay=2)
    cut = config.blocking((n, n, d), needs, 2**28, 128, square)
    assert cut.overlaid == overlaid
    assert needs.size(cut, d, 128) <= 2**28
    if overlaid:
        assert cut.key_rows == n
        assert cut.rows * cut.columns >= 6144 * 6144
    else:
        assert cut == config.blocking((n, n, d), replace(needs, overlay=0), 2**28, 128, square)


def test_a_batch_that_fits_is_one_block() -> None:
    needs = config.Needs("bf16", False, False, True, True, False, False)
    cut = config.blocking((8192, 8192, 512), needs, 2**28, 128, False)
    assert (cut.rows, cut.columns, cut.key_rows) == (8192, 8192, 0)
