"""Every kernel compiles for every kind of card, and keeps to its registers; no GPU is needed."""

import os
import re
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
from gpu_problems import DEVICES
from infonce.kernels.gpu import config
from infonce.kernels.gpu.device import compiler, signatures
from infonce.kernels.options import MOST_COLUMNS

try:
    from cupy.cuda import nvrtc

    nvrtc.getVersion()
    MISSING = ""
except Exception as error:
    MISSING = f"no NVRTC: {type(error).__name__}: {str(error).splitlines()[0][:100]}"


def needs_nvrtc(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = pytest.mark.skipif(bool(MISSING), reason=MISSING)(test)
    return pytest.mark.extras(marked)


PTXAS = ("--ptxas-options=-v",)
TILED = {"lse": "COLUMNS", "gradient": "COLUMNS", "sigmoid": "GRADIENT", "ranks": "COLUMNS",
         "distill": "COLUMNS"}  # fmt: skip
# bytes that a thread may spill, where two blocks share a multiprocessor's registers or float64
# takes two for each number; hardly anything is spilled elsewhere
SPILLS_TWO_BLOCKS, SPILLS_FP64, SPILLS = 32, 160, 24
SPILLS_EXTRAS_MOMENTS = 192


THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def some(times: int, *choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Of the combinations of a kernel's choices, those with each choice `times` times at least; the
    first has the first choices, the second the second ones. Thorough: all combinations."""
    lists = [list(choice) for choice in choices]
    if THOROUGH:
        return list(product(*lists))
    turns = product(range(times), range(max(map(len, lists))))
    chosen = (
        tuple((place + turn * i) % len(each) for i, each in enumerate(lists))
        for turn, place in turns
    )
    return [
        tuple(each[i] for each, i in zip(lists, places, strict=True))
        for places in dict.fromkeys(chosen)
    ]


def require_use(precision: str, arch: str) -> None:
    """Skips what no call launches on such a card."""
    if not config.supported(precision, DEVICES[arch]):
        pytest.skip(f"{arch} has no tensor cores for {precision}")
    if precision == "fp16x3" and not DEVICES[arch].has_sweeps:
        pytest.skip(f"{arch} computes float32 without {precision}")


def require_range(name: str, precision: str) -> None:
    if name == "online" and precision in config.FLOAT16:
        pytest.skip("one pass wants the exponents of float32")


def spilled(log: str) -> int:
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills, log
    return max(int(n) for pair in spills for n in pair)


def spilled_in(file: str, defines: dict[str, Any], arch: str) -> int:
    return spilled(compiler.compile_for(file, defines, arch, PTXAS)[1])


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "precision", "arch"), some(1, TILED, config.OPERAND_BYTES, DEVICES)
)
def test_tiled_kernels(name: str, precision: str, arch: str) -> None:
    require_use(precision, arch)
    tile = config.tile_for(precision, 64, DEVICES[arch], taught=name == "distill")
    compile_within_budget(name, precision, arch, tile, 1)


@needs_nvrtc
@pytest.mark.parametrize("name", [name for name in TILED if name != "distill"])
def test_other_variants(name: str) -> None:
    """One direction, or no gradient; ids and factors; sums in two levels; a card whose shared
    memory has no room for two blocks."""
    device, small = DEVICES["sm_90a"], config.DeviceProperties("89", 128, 101376, 102400, 2**34)
    two_blocks, two_levels = (config.tile_for("bf16", d, device) for d in (64, 4096))
    assert (two_blocks.min_blocks, two_levels.levels) == (2, 2)
    if name in ("lse", "sigmoid") or THOROUGH:
        compile_within_budget(name, "bf16", "sm_90a", two_blocks, 0)
        compile_within_budget(name, "bf16", "sm_89", config.tile_for("bf16", 64, small), 1)
    if name in ("gradient", "ranks") or THOROUGH:
        compile_within_budget(name, "bf16", "sm_90a", two_blocks, 1, extras=1)
        compile_within_budget(name, "bf16", "sm_90a", two_levels, 1)


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "precision"), some(1, ["lse", "sigmoid"], ["bf16", "fp32", "tf32", "fp64"])
)
def test_tiled_moments(name: str, precision: str) -> None:
    tile = config.tile_for(precision, 64, DEVICES["sm_80"])
    compile_within_budget(name, precision, "sm_80", tile, 1, moments=1)
    if precision == "bf16":
        compile_within_budget(name, precision, "sm_80", tile, 0, extras=1, moments=1)


def compile_within_budget(
    name: str, precision: str, arch: str, tile: config.Tile, option: int, extras: int = 0,
    moments: int = 0, **more: int,
) -> None:  # fmt: skip
    defines = {
        "PRECISION": precision.upper(), "BLOCK_N": tile.block_n, "WARP_N": tile.warp_n,
        "STAGES": tile.stages, "LEVELS": tile.levels, "MIN_BLOCKS": tile.min_blocks,
        "IDS": extras, "NORM_FACTORS": extras, "MOMENTS": moments, TILED[name]: option,
        **more,
    }  # fmt: skip
    code, log = compiler.compile_for(f"tiled/{name}.cu", defines, arch, PTXAS)
    assert code
    budget = SPILLS_TWO_BLOCKS if tile.min_blocks == 2 else SPILLS
    if precision == "fp64":
        budget = SPILLS_FP64
    if extras and moments:  # few logits of normalised rows, and no Hopper
        budget += SPILLS_EXTRAS_MOMENTS
    if {"LIMITS", "BIAS", "POSITIVE_IDS"} & more.keys() or more.get("IDS", 0) > 1:
        budget += SPILLS_OPTIONS
    if tile.taught:  # two products
        budget = SPILLS + (tile.levels - 1) * 200
    assert spilled(log) <= budget, (defines, log)
    declared = max(int(n) for n in re.findall(r"(\d+) bytes smem", log))
    assert declared <= tile.static_shared


# bytes that a thread of a sweep may spill, which has 112 registers, 64 of them for logits
SWEEPS = {"lse": ("COLUMNS", 128), "gradient": ("COLUMNS", 64), "sigmoid": ("GRADIENT", 200),
          "online": ("", 128)}  # fmt: skip
SPILLS_EXTRAS = 1024
SPILLS_MOMENTS = 64  # more: they are for few logits, or for a pass without gradients
# Wide rows differ in the length of a loop alone
WIDTHS = [128, 1024, 1040, *([2048] if THOROUGH else [])]


def find_sweep(precision: str, width: int, *args: Any, **options: Any) -> config.Sweep:
    sweep = config.sweep_for(precision, width, DEVICES["sm_90a"], *args, **options)
    assert sweep is not None
    return sweep


def compile_sweep(
    name: str, precision: str, sweep: config.Sweep, allowed: int,
    has: tuple[bool, bool] | None = None, **more: int,
) -> None:  # fmt: skip
    """`has`: gradients, sums. No product waits for another, and few bytes are spilled."""
    has = (name != "lse", name == "lse") if has is None else has
    defines = {"PRECISION": precision.upper(), **config.defines(sweep, *has), **more}
    log = compiler.compile_for(f"sm90/sweep_{name}.cu", defines, "sm_90a", PTXAS)[1]
    assert "serialized" not in log
    assert spilled(log) <= allowed, (defines, log)


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "precision", "width"), some(1, SWEEPS, config.SWEEP_PRECISIONS, WIDTHS)
)
def test_sweeps(name: str, precision: str, width: int) -> None:
    """Sweeps compile for Hopper: the first variant, and one in three of the others."""
    require_range(name, precision)
    place = WIDTHS.index(width) + config.SWEEP_PRECISIONS.index(precision)
    option, budget = SWEEPS[name]
    if precision in config.OPERAND_PARTS:
        # of each part; with many times the products, spills matter less
        width, budget = width // 2, 512
    variants = [(False, 1, False), (False, 0, False), (True, 1, False)]
    if name != "gradient":
        variants += [(False, 1, True), (True, 1, True)]
    if not option:
        variants = [choice for choice in variants if choice[1]]
    for i, (extras, variant, moments) in enumerate(variants):
        if i and (place + i) % 3 and not THOROUGH:
            continue
        sweep = find_sweep(precision, width, extras, moments)
        gradient = name != "lse"
        assert sweep.stages(gradient, not gradient) >= 3
        assert sweep.shared(gradient, not gradient) <= DEVICES["sm_90a"].shared_memory
        more = {"IDS": int(extras), "NORM_FACTORS": int(extras), "MOMENTS": int(moments)}
        more |= {option: variant} if option else {}
        more |= {"MAXIMA": int(extras)} if name == "lse" else {}
        allowed = (SPILLS_EXTRAS if extras else budget) + moments * SPILLS_MOMENTS
        compile_sweep(name, precision, sweep, allowed, **more)


ROWS = [("bf16", 1024), ("bf16", 2304), ("fp16x3", 512)]  # precision, bytes of a row of one part
# More bytes that a thread may spill with limits and biases of pairs
SPILLS_OPTIONS = 512


@needs_nvrtc
@pytest.mark.parametrize(
    ("of_pass", "rows", "of_pairs"),
    some(1, [("lse", 1), ("gradient", 1), ("online", 0)], ROWS, [(1, 0), (0, 2), (1, 1)]),
)
def test_sweeps_with_limits_and_biases(
    of_pass: tuple[str, int], rows: tuple[str, int], of_pairs: tuple[int, int]
) -> None:
    (name, columns), (precision, width), (limits, bias) = of_pass, rows, of_pairs
    require_range(name, precision)
    options = limits + (bias > 0)
    gradient = name != "lse"
    sweep = find_sweep(precision, width, False, False, options)
    if precision == "bf16" and options == 1:  # no stage less than without them
        plain = find_sweep(precision, width, False)
        assert sweep.stages(gradient, not gradient) == plain.stages(gradient, not gradient)
    more = {"COLUMNS": columns, "LIMITS": limits * (1 + columns), "BIAS": bias}
    allowed = SWEEPS[name][1] + SPILLS_OPTIONS
    compile_sweep(name, precision, sweep, allowed, IDS=0, FACTORS=0, **more)


@needs_nvrtc
@pytest.mark.parametrize(
    ("rows", "more"), some(1, [("bf16", 1024), ("fp16", 1040)], [(1, False), (1, True), (2, True)])
)
def test_sweep_of_a_guide(rows: tuple[str, int], more: tuple[int, bool]) -> None:
    """A guide's sweep has as many stages as fit shared memory, and hardly spills."""
    (precision, width), (limits, normalize) = rows, more
    sweep = find_sweep(precision, width, False, False, 1 + normalize)
    assert sweep.stages(False, False) == (4 if sweep.wide else 6)
    options = {"NORM_FACTORS": int(normalize), "COLUMNS": limits - 1, "LIMITS": limits}
    compile_sweep("guide", precision, sweep, SPILLS, (False, False), IDS=0, **options)


# Rows' ids are in registers of a sweep, two for each
SPILLS_COLUMNS = 512


@needs_nvrtc
@pytest.mark.parametrize(("name", "rows"), some(1, SWEEPS, ROWS))
def test_sweeps_with_columns_of_ids(name: str, rows: tuple[str, int]) -> None:
    """The most columns of ids leave two stages of the pipeline."""
    precision, width = rows
    require_range(name, precision)
    gradient, option = name != "lse", SWEEPS[name][0]
    sweep = find_sweep(precision, width, True, integer_count=MOST_COLUMNS - 1)
    assert sweep.stages(gradient, not gradient) >= 2
    more = {"IDS": MOST_COLUMNS, "NORM_FACTORS": 1} | ({option: 1} if option else {})
    allowed = SPILLS_EXTRAS + SPILLS_COLUMNS
    compile_sweep(name, precision, sweep, allowed, **more)


@needs_nvrtc
@pytest.mark.parametrize(("precision", "normalize"), some(1, ["bf16", "fp16"], [False, True]))
def test_sweep_of_a_teacher(precision: str, normalize: bool) -> None:
    sweep = config.teacher_sweep(precision, 1024, 1024, DEVICES["sm_90a"], normalize)
    assert sweep is not None
    more = {"IDS": 0, "NORM_FACTORS": int(normalize), "COLUMNS": int(precision == "bf16")}
    compile_sweep("distill", precision, sweep, 96, GRADIENT=1, **more)


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "precision", "arch", "extras", "options"),
    [(*each, "sm_80", 0, {"IDS": MOST_COLUMNS})
     for each in (("lse", "bf16"), ("gradient", "fp64"), ("sigmoid", "fp32"))]
    + [("lse", "bf16", "sm_90a", 1, {"LIMITS": 2, "BIAS": 2}),
       ("lse", "fp32", "sm_90a", 1, {"LIMITS": 2, "BIAS": 2}),
       ("gradient", "fp64", "sm_80", 1, {"LIMITS": 2}),
       ("sigmoid", "bf16", "sm_80", 0, {"POSITIVE_IDS": 1, "PAIR_WEIGHTS": 1, "GROUPS": 1}),
       ("gradient", "bf16", "sm_80", 1, {"POSITIVE_IDS": 1, "GROUPS": 1})],
)  # fmt: skip
def test_tiled_kernels_with_options(
    name: str, precision: str, arch: str, extras: int, options: dict[str, int]
) -> None:
    """Columns of ids, limits, biases, and positive ids with groups."""
    if "IDS" in options:
        tile = config.tile_for(precision, 512, DEVICES[arch], integer_count=MOST_COLUMNS - 1)
    else:
        pairs = len({"LIMITS", "BIAS", "PAIR_WEIGHTS"} & options.keys())
        tile = config.tile_for(precision, 64, DEVICES[arch], pairs, 2 * ("GROUPS" in options))
    compile_within_budget(name, precision, arch, tile, 1, extras, **options)


@needs_nvrtc
@pytest.mark.parametrize(
    ("precision", "columns", "extras", "moments"),
    some(1, ["bf16", "fp16x3"], [0, 1], [False, True], [False, True]),
)
def test_cached_exponentials(precision: str, columns: int, extras: bool, moments: bool) -> None:
    """The log-sum-exp sweep that stores them, and the kernel that makes a gradient of them."""
    sweep = find_sweep(precision, 2304, extras, moments)
    more = dict(IDS=int(extras), NORM_FACTORS=int(extras), COLUMNS=columns, MAXIMA=0, CACHE=1)
    allowed = SWEEPS["lse"][1] + moments * SPILLS_MOMENTS
    compile_sweep("lse", precision, sweep, allowed, (True, True), MOMENTS=int(moments), **more)
    defines = {"PRECISION": precision.upper(), "COLUMNS": columns}
    assert spilled_in("sm90/cached_gradient.cu", defines, "sm_90a") == 0


@needs_nvrtc
@pytest.mark.parametrize(
    ("precision", "extras", "width"),
    [("bf16", True, 1024)]
    + THOROUGH * [("fp16x3", False, 2304), ("bf16", False, 2304), ("fp16x3", True, 1024)],
)
def test_sets_of_positives(precision: str, extras: bool, width: int) -> None:
    """Kernels that look for several positives a row keep to the budgets of the others."""
    sweep = find_sweep(precision, width, extras)
    for name in ("lse", "gradient", *["online"] * (precision not in config.FLOAT16)):
        more = {"IDS": int(extras), "NORM_FACTORS": int(extras), "COLUMNS": 0, "SETS": 1}
        allowed = SPILLS_EXTRAS if extras else SWEEPS[name][1]
        compile_sweep(name, precision, sweep, allowed, **more)
    for name, element, options in some(1, ["lse", "gradient"], ["bf16", "fp64"], [2, 0]):
        more = {"LIMITS": 1, "BIAS": 1} if options else {}
        tile = config.tile_for(element, 64, DEVICES["sm_80"], len(more))
        compile_within_budget(name, element, "sm_80", tile, 0, int(extras), SETS=1, **more)
    defines = {"PRECISION": "FP32", "NORM_FACTORS": int(extras), "SETS": 1}
    assert spilled_in("finish.cu", defines, "sm_80") <= 64


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "extras", "options"),
    [("sigmoid", 0, {"GRADIENT": 1, "PAIR_WEIGHTS": 1}), ("lse", 1, {"COLUMNS": 1})],
)
def test_positives_that_groups_do_not_leave_out(
    name: str, extras: int, options: dict[str, int]
) -> None:
    """A sigmoid with positive ids, their weights and groups; a softmax with ids, without weights:
    names of 8 bytes each."""
    sweep = find_sweep("bf16", 1024, bool(extras), False, 1 - extras, integer_count=2)
    options = options | {"IDS": extras, "NORM_FACTORS": extras, "POSITIVE_IDS": 1, "GROUPS": 1}
    compile_sweep(name, "bf16", sweep, SPILLS_EXTRAS, **options)


@needs_nvrtc
@pytest.mark.parametrize(
    ("precision", "width", "extras", "columns"),
    some(1, ["bf16", "fp16"], [128, 256], [False, True], [0, 1]),
)
def test_sweeps_of_narrow_rows(precision: str, width: int, extras: bool, columns: int) -> None:
    """dL/dx and the gathered gradient in registers; stages hold whole tiles."""
    sweep = config.choose_register_sweep(find_sweep(precision, width, extras), precision, 10**5)
    assert sweep is not None
    assert sweep.stages(True, False) % sweep.k_slices == 0
    assert sweep.shared(True, False) <= DEVICES["sm_90a"].shared_memory
    more = {"IDS": int(extras), "NORM_FACTORS": int(extras), "COLUMNS": columns}
    compile_sweep("narrow", precision, sweep, SWEEPS["gradient"][1], **more)


OF_FINISH = [{"NORM_FACTORS": a, "LINEAR": b} for a, b in ((0, 0), (1, 1), (0, 1), (1, 0))]
# whose code depends on the type of sums alone
OF_ONE_TYPE = "naive/naive.cu", "linear.cu", "vectors.cu", "block/guide_rows.cu"


@needs_nvrtc
@pytest.mark.parametrize(
    ("file", "precision", "options", "arch"),
    some(1, ["rows.cu"], ["FP64", "FP32", "BF16X3", "FP16X3", "FP16"], [{}], DEVICES)
    + some(1, OF_ONE_TYPE, ["FP64", "FP32"], [{}], DEVICES)
    + some(1, ["labels.cu", "block/positive_tiles.cu"], ["FP32"], [{}], DEVICES)
    + some(1, ["vectors.cu"], ["FP32", *THOROUGH * ["FP64"]], [{"LABEL_WEIGHTS": 1}], ["sm_90a"])
    + some(1, ["finish.cu"], ["FP32", "FP64"], OF_FINISH, DEVICES),
)
def test_other_kernels(file: str, precision: str, options: dict[str, int], arch: str) -> None:
    require_use(precision.lower(), arch)
    assert spilled_in(file, {"PRECISION": precision, **options}, arch) <= 32


IN_TABLE = {"OWN_INDICES": 1, "OWN_BIAS": 1}


@needs_nvrtc
@pytest.mark.parametrize(
    ("precision", "words", "factors", "arch", "table"),
    [(*each, {}) for each in some(
        1, ["FP32", "FP64"], [(0, 0), (1, 1), (1, 2), (2, 2)], [0, 1], DEVICES)]
    + [("FP64", (0, 0), 0, "sm_90a", IN_TABLE), ("FP32", (2, 2), 1, "sm_90a", IN_TABLE),
       ("FP32", (2, 2), 1, "sm_90a", IN_TABLE | {"LIMITS": 1})],
)  # fmt: skip
def test_own(
    precision: str, words: tuple[int, int], factors: int, arch: str, table: dict[str, int]
) -> None:
    """Only rare rows, whose squares are out of range, call functions, and spill for them."""
    defines = {"PRECISION": precision, "NORM_FACTORS": factors, "WORDS": words[0], **table}
    if words[0]:
        defines["OUT_WORDS"] = words[1]
    most = {"own.cu": (620 if table else 520) if factors else 130}
    if table:
        most["own_table.cu"] = 160
    for file, budget in most.items():
        assert spilled_in(file, defines, arch) <= budget


@needs_nvrtc
@pytest.mark.parametrize(
    ("kind", "precision", "arch"),
    some(1, ["SYMMETRIC", "TWO_SIDED", "SIGMOID"], ["FP32", "FP64"], DEVICES),
)
def test_fused(kind: str, precision: str, arch: str) -> None:
    kinds = {name: int(name == kind) for name in ("SYMMETRIC", "TWO_SIDED", "SIGMOID")}
    dtype = "DTYPE_FLOAT32" if precision == "FP32" else "DTYPE_FLOAT64"
    defines = {"PRECISION": precision, "DTYPE": dtype, "NORMALIZE": 1, "IDS": 1, **kinds}
    assert spilled_in("fused/fused.cu", defines, arch) <= (64 if precision == "FP32" else 512)


@needs_nvrtc
@pytest.mark.parametrize(
    ("precision", "wide", "arch"), some(1, ["FP64", "FP32", "BF16", "FP16"], [1, 0], DEVICES)
)
def test_maxsim(precision: str, wide: int, arch: str) -> None:
    require_use(precision.lower(), arch)
    defines = {"PRECISION": precision, "WIDE_WINNERS": wide}
    assert spilled_in("maxsim/tokens.cu", defines, arch) <= 16
    warps, chunk, tokens = (16, 1024, 64) if wide else (32, 4096, 304)
    defines |= {"ALIGNED": 1 - wide, "WARPS": warps, "CHUNK": chunk, "TOKENS": tokens}
    # 32 warps share a multiprocessor's registers
    assert spilled_in("maxsim/gradients.cu", defines, arch) <= 192


@needs_nvrtc
@pytest.mark.parametrize(
    ("precision", "tile", "winners", "slices", "packed"),
    some(1, ["BF16", "FP16"], [176, 152, 128, 104, 64], [0, 1], [2, 2, 1, 1], [0, 1]),
)
def test_maxsim_sweeps(precision: str, tile: int, winners: int, slices: int, packed: int) -> None:
    """No registers are spilled, and no product waits for another (C7511)."""
    defines = {"PRECISION": precision, "KEY_TILE": tile, "WINNERS": winners, "SLICES": slices}
    defines["PACKED"] = packed
    log = compiler.compile_for("sm90/maxsim.cu", defines, "sm_90a", PTXAS)[1]
    assert spilled(log) == 0
    assert "C75" not in log


# options that have no default
OPTIONS = {
    "fused/fused.cu": {"DTYPE": "DTYPE_FLOAT32", "SYMMETRIC": 0, "TWO_SIDED": 0, "SIGMOID": 0,
                       "NORMALIZE": 0, "IDS": 0},
    "sm90/sweep_narrow.cu": {"IN_REGISTERS": 1, "K_SLICES": 2},
}  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize(
    "names",
    [(), ("LIMITS", "BIAS"), ("POSITIVE_IDS", "PAIR_WEIGHTS"), ("LABEL_WEIGHTS",)],
    ids="-".join,
)
@pytest.mark.parametrize("file", sorted(set(signatures.kernel_files().values())))
def test_structures_lie_as_python_packs_them(
    file: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and offsets read from the sources are those of the compiler."""
    kernels = list(signatures.signatures(file, names).values())
    if names and kernels == list(signatures.signatures(file).values()):
        pytest.skip("these options are not its own")
    parameters = [kind for s in kernels for _, kind in s.fields]
    structures = {s.name: s for s in parameters if isinstance(s, signatures.Structure)}
    checks = "".join(
        f"static_assert(sizeof({name}) == {structure.size});\n"
        + "".join(
            f"static_assert(__builtin_offsetof({name}, {field}) == {structure.offset(field)});\n"
            for field, _ in structure.fields
        )
        for name, structure in structures.items()
    )
    # templates that nobody instantiates cost no time
    source = compiler.flatten(file).replace('extern "C" __global__', "template <int> __global__")
    monkeypatch.setattr(compiler, "flatten", lambda _: source + checks)
    defines = {"PRECISION": "BF16", **OPTIONS.get(file, {}), **dict.fromkeys(names, 1)}
    assert compiler.compile_for(file, defines, "sm_90a")[0]


@needs_nvrtc
@pytest.mark.parametrize(
    "name",
    ["_empty_sums", "_merge_sums", "_merge_moments", "_within", "_finalize_direction", "labels"],
)
def test_elementwise_kernels(name: str, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The preamble and operation of an elementwise kernel compile as CuPy joins them."""
    import cupy
    from infonce.kernels.gpu import vectors

    from infonce.checks import rows

    kernel = rows._label_kernel(cupy) if name == "labels" else getattr(vectors, name)
    inputs = [f"const {p.ctype}& {p.name}" for p in kernel.in_params]
    outputs = [f"{p.ctype}& {p.name}" for p in kernel.out_params]
    text = f"__device__ void apply({', '.join(inputs + outputs)}) {{\n{kernel.operation};\n}}\n"
    (tmp_path / "elementwise.cu").write_text(kernel.preamble + text)
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    assert compiler.compile_for("elementwise.cu", {}, "sm_80")
