"""Launch configuration: pure functions of the device, the shapes and the precision."""

from dataclasses import replace

import numpy as np
import pytest
from gpu_problems import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from infonce.kernels.gpu import config
from infonce.kernels.grid import has_few_blocks


@pytest.mark.parametrize("precision", config.SWEEP_PRECISIONS)
def test_short_rows_take_the_kernels_of_one_k_slice(precision: str) -> None:
    """Rows of one K-slice or less share the variants that test_compile.py compiles."""
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
        assert (config.choose_register_sweep(sweep, precision, rows) is not None) == narrow
    assert config.choose_register_sweep(None, "bf16", 10**5) is None


def test_schedules_by_width() -> None:
    """Rows of more than eight K-slices, all parts of them, do not stay in shared memory."""
    device = DEVICES["sm_90a"]
    for precision, width, schedule in [
        ("bf16", 1024, "RESIDENT"), ("bf16", 1025, "WIDE"), ("fp16", 1025, "WIDE"),
        ("bf16x3", 512, "RESIDENT"), ("bf16x3", 513, "WIDE"), ("bf16", 10**5, "WIDE"),
        ("fp16x3", 2, "STREAMED"), ("fp16x3", 10**5, "STREAMED"),
    ]:  # fmt: skip
        sweep = config.sweep_for(precision, width, device, False)
        assert sweep is not None
        assert sweep.residency.name == schedule
    assert config.sweep_for("fp32", 1024, device, False) is None


@pytest.mark.parametrize(("precision", "by"), [("fp32", "fp16x3"), ("tf32", "fp16")])
def test_float16_takes_the_place_of_longer_numbers_on_hopper_alone(precision: str, by: str) -> None:
    precisions = {
        arch: config.fastest_operand_precision(precision, device)
        for arch, device in DEVICES.items()
    }
    assert precisions == {"sm_75": precision, "sm_80": precision, "sm_90a": by, "sm_100": precision}
    assert config.fastest_operand_precision("bf16", DEVICES["sm_90a"]) == "bf16"
    portable = replace(DEVICES["sm_90a"], portable=True)
    assert config.fastest_operand_precision(precision, portable) == precision


@pytest.mark.parametrize("width", [128, 1024, 2048])
def test_what_is_cut_off_is_that_of_a_sum_that_is_truncated(width: int) -> None:
    """The bias is the loss of a truncated sum of like terms, 32 bytes of features at a time."""
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
        tiles = -(-n // sweep.block_n)
        meetings = tiles // 2 + tiles % 2 if triangle else tiles
        assert 1 <= segments <= meetings
        assert segments <= sweep.max_segments(n, n)
        slots = sweep.segment_slots * sweep.max_segments(n, n)
        assert slots * n <= sweep.max_row_partials(n, n)
        assert sweep.column_slots(n, n, triangle) * n <= sweep.max_column_partials(n, n)
        if n >= 8192:  # at least nine tenths of the workers' time are of use
            rounds = -(-tiles * segments // sweep.workers)
            assert tiles * meetings / (rounds * -(-meetings // segments) * sweep.workers) > 0.9


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("precision", config.OPERAND_BYTES)
@pytest.mark.parametrize("d", [1, 64, 4096])
def test_tiles_fit_shared_memory(precision: str, d: int, arch: str) -> None:
    device = DEVICES[arch]
    tile = config.tile_for(precision, d, device)
    assert tile.shared + tile.static_shared <= device.shared_memory
    assert tile.threads == 64 * tile.block_n // tile.warp_n


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_two_blocks_share_a_multiprocessor_where_they_fit(precision: str) -> None:
    """One computes products while the other has its epilogue."""
    for device, stages in ((DEVICES["sm_90a"], 3), (DEVICES["sm_80"], 2)):
        tile = config.tile_for(precision, 512, device)
        assert (tile.warp_n, tile.stages, tile.min_blocks) == (64, stages, 2)
        all_blocks = 2 * (tile.shared + tile.static_shared + 1024)
        assert all_blocks <= device.multiprocessor_shared_memory
    small = config.DeviceProperties("89", 128, 99 * 1024, 100 * 1024, 24 * 2**30)
    assert config.tile_for(precision, 512, small).min_blocks == 1


def test_a_launch_has_as_many_blocks_as_run_at_once() -> None:
    tile = config.tile_for("bf16", 512, DEVICES["sm_90a"])
    assert tile.blocks(128, 128, 132) == 1
    assert tile.blocks(129, 300, 132) == 6
    assert tile.blocks(16384, 16384, 132) == 264


def test_device_with_too_little_shared_memory() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        config.tile_for("fp32", 64, config.DeviceProperties("75", 1, 48 * 1024, 48 * 1024, 2**34))


@pytest.mark.parametrize("precision", config.OPERAND_BYTES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 7, 33), (10**6, 10**6, 512)])
def test_the_least_workspace_is_named(shape: tuple[int, int, int], precision: str) -> None:
    """The error names the bytes of the pass that needs more."""
    for dk_in_workspace in (False, True):
        needs = config.Needs(precision, True, True, True, True, True, dk_in_workspace)
        with pytest.raises(ValueError, match="workspace: expected at least") as refused:
            config.choose_block_sizes(shape, needs, 1, 128, False)
        least = int(str(refused.value).split("at least ")[1].split()[0])
        assert config.choose_block_sizes(shape, needs, least, 128, False)[2] <= least
        with pytest.raises(ValueError, match=rf"at least {least} bytes .* got {least - 1}"):
            config.choose_block_sizes(shape, needs, least - 1, 128, False)
        for reserved in (least // 3, 10 * least):  # less than half of the workspace, and half of it
            enough = min(least + reserved, 2 * least)
            left = config.workspace_of_passes(enough, reserved)
            assert config.choose_block_sizes(shape, needs, left, 128, False, 0, reserved)[2] <= left
            left = config.workspace_of_passes(enough - 2, reserved)
            with pytest.raises(ValueError, match=rf"at least {enough} bytes .* got {enough - 2}"):
                config.choose_block_sizes(shape, needs, left, 128, False, 0, reserved)


@pytest.mark.parametrize("precision", config.OPERAND_BYTES)
def test_rows_of_whole_16_bytes(precision: str) -> None:
    """Staged rows have whole K-slices, short ones of one part 16 bytes; products count as many
    features where those given are no multiple of 16 bytes."""
    item, parts = config.element_bytes(precision), config.OPERAND_PARTS.get(precision, 1)
    assert item * parts == config.OPERAND_BYTES[precision]
    for d in (*range(1, 131), 499, 500, 504, 512, 513):
        staged, width = config.padded(d, precision), config.product_width(d, precision)
        piece = 16 if d * item < config.K_SLICE and parts == 1 else config.K_SLICE
        assert staged * item % piece == 0
        assert d <= staged < d + piece // item
        assert width == (staged if d * item % 16 else d)
        assert config.product_width(width, precision) == width


@pytest.mark.parametrize("precision", ["fp64", "fp16x3", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 9, 3), (300, 7, 33), (7, 300, 33),
                                   (5000, 5000, 129), (10**6, 10**6, 3)])  # fmt: skip
def test_blocks_fit_with_staged_copies_of_all_rows(
    shape: tuple[int, int, int], precision: str
) -> None:
    m, n, d = shape
    size = (m + n) * config.padded(d, precision) * config.OPERAND_BYTES[precision]
    assert config.may_stage_all_rows(size, 5 * size)
    assert not config.may_stage_all_rows(size, 5 * size - 1)
    for dk_in_workspace in (False, True):
        by_blocks = config.Needs(precision, True, True, True, True, True, dk_in_workspace)
        needs = replace(by_blocks, staged_copy_bytes=size)
        workspace = max(5 * size, config.least_workspace(shape, by_blocks, 128))
        *both_sizes, bytes_of_both = config.choose_block_sizes(shape, needs, workspace, 128, False)
        assert bytes_of_both + size <= workspace
        for sizes in both_sizes:
            assert has_few_blocks(m, n, sizes.rows, sizes.columns)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("precision", "d", "overlaid"), [
    ("bf16", 128, 0), ("bf16", 768, 32768), ("bf16", 1024, 32768), ("bf16", 1100, 0),
    ("fp16x3", 500, 64000),
])  # fmt: skip
def test_accumulators_that_overlay_gradients(
    precision: str, d: int, overlaid: int, square: bool
) -> None:
    """Half of a 16-bit dK overlays its destination if its float32 sums take too much workspace;
    nearly all of a float32 dK with rows of 2000 bytes, whose accumulators take 2048."""
    n, item = 65536, config.OPERAND_BYTES[precision]
    sweep = config.sweep_for(precision, 2 * d, DEVICES["sm_90a"], False)
    staged = precision == "fp16x3"
    needs = config.Needs(
        precision, staged, staged, False, True, True, True, sweep, False, overlay_row_bytes=item * d
    )
    sizes = config.largest_blocks((n, n, d), needs, 2**28, 128, square)
    assert sizes.overlaid == overlaid
    assert needs.pass_bytes(sizes, d, 128) <= 2**28
    if overlaid:
        assert sizes.dk_rows == n
        assert sizes.rows * sizes.columns >= 6144 * 6144
    else:
        assert sizes == config.largest_blocks(
            (n, n, d), replace(needs, overlay_row_bytes=0), 2**28, 128, square
        )


@pytest.mark.parametrize("precision", ["bf16", "fp16x3"])
@pytest.mark.parametrize("overlaid", [False, True])
@pytest.mark.parametrize("shape", [(200, 128, 520), (385, 257, 1024), (16384, 16384, 2048)])
def test_cached_exponentials_fit(
    shape: tuple[int, int, int], overlaid: bool, precision: str
) -> None:
    """The cache holds all logits in one block, or the first columns: at least 8192."""
    m, n, d = shape
    item = config.OPERAND_BYTES[precision]
    sweep = config.sweep_for(precision, 2 * d, DEVICES["sm_90a"], False)
    assert sweep is not None
    needs = config.Needs(
        precision, True, True, True, True, True, True, sweep, overlay_row_bytes=item * d * overlaid
    )

    def choose_block_sizes(keep: int) -> tuple[config.BlockSizes, config.BlockSizes, int]:
        return config.choose_block_sizes(shape, needs, 2**28, sweep.block_n, False, keep)

    first, second, size = choose_block_sizes(2**40)
    assert first == second == config.BlockSizes(m, n, n, 0, cached_columns=n)
    gradient_block = item * m * config.gradient_stride(n, precision)
    assert size > gradient_block + 4 * d * (m + n)
    assert choose_block_sizes(size) == (first, second, size)
    if overlaid and n >= 256:  # less room: whole all the same, then in part
        first, second, size = choose_block_sizes(size - 1)
        assert (first.cached_columns, second.overlaid) == (n, needs.overlay_border(n, d))
        assert (first.columns, first.overlaid) == (n, 0)
    cached = n
    for room in range(size, size // 40, -(size // 40)):
        first, second, taken = choose_block_sizes(room)
        if not first.cached_columns:
            assert second.cached_columns == 0
            break
        assert taken <= room
        assert second.cached_columns == second.columns == first.cached_columns <= cached
        assert second.rows == first.rows == m
        cached = first.cached_columns
        assert cached == n or cached % sweep.block_n == 0
        blocks = second.column_blocks(n)
        assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])]
        assert blocks[-1].stop == n
        for border in (cached, second.overlaid):
            assert all(b.stop <= border or b.start >= border for b in blocks)
    assert cached == n if n <= 8192 else 8192 <= cached < 1.1 * 8192
    assert not choose_block_sizes(0)[0].cached_columns
    # copies of all rows are staged before the passes, so the passes stage no rows
    staged = item * (m + n) * config.padded(d, precision)
    needs = replace(needs, staged_copy_bytes=staged)
    assert (
        choose_block_sizes(2**40)[2]
        == config.choose_block_sizes(shape, needs, 2**28, 256, False, 2**40)[2]
    )


@pytest.mark.parametrize("precision", ["bf16", "bf16x3"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 7, 33), (1000, 70000, 96), (65536, 65536, 512),
                                   (65536, 65536, 4096), (10**6, 100, 64),
                                   (10**6, 10**6, 512)])  # fmt: skip
@pytest.mark.parametrize("workspace", [2**16, 2**24, 2**28, 2**30, 2**34])
def test_blocks_of_all_keys(shape: tuple[int, int, int], precision: str, workspace: int) -> None:
    """Blocks of all keys are the largest that fit, and have at least 1024 rows or all rows."""
    m, n, d = shape
    wave = 132 // -(-d // 128) * 128
    item = config.element_bytes(precision)
    sweep = config.sweep_for(precision, d * item, DEVICES["sm_90a"], False)
    for staged, once, accumulator in (
        (False, 0, False), (False, 0, True), (True, 0, True), (True, workspace // 5, True)
    ):  # fmt: skip
        needs = config.Needs(
            precision, staged, staged, False, True, True, accumulator, sweep,
            overlay_row_bytes=item * d, staged_copy_bytes=once,
        )  # fmt: skip
        choice = config.block_sizes_for_all_keys(shape, needs, workspace, sweep.block_n)
        weighted = replace(needs, weighted_query=True)
        room = workspace - once
        more = config.BlockSizes(m, n, n * accumulator, needs.overlay_border(n, d) * accumulator)
        if choice is None:
            assert (
                weighted.pass_bytes(replace(more, rows=min(m, 2 * 1024)), d, sweep.block_n) > room
            )
            continue
        first, sizes, size = choice
        assert first == sizes
        assert sizes.columns == n
        assert sizes.dk_rows == n * accumulator
        assert sizes.overlaid in (0, more.overlaid)
        assert sizes.rows >= min(m, 1024)
        assert weighted.pass_bytes(sizes, d, sweep.block_n) == size <= room
        if sizes.rows < m:
            larger = sizes.rows + wave
            if wave < 1024 or sizes.rows < wave:
                blocks = -(-m // sizes.rows)
                assert sizes.rows == -(-m // (128 * blocks)) * 128
                larger = -(-m // (128 * (blocks - 1))) * 128
            else:
                assert sizes.rows % wave == 0
            assert weighted.pass_bytes(replace(more, rows=min(m, larger)), d, sweep.block_n) > room


@given(
    m=st.integers(0, 5000), n=st.integers(0, 10**6), d=st.integers(1, 5000),
    precision=st.sampled_from(sorted(config.OPERAND_BYTES)), workspace=st.integers(10**4, 2**30),
)  # fmt: skip
def test_accumulators_fit_the_workspace(
    m: int, n: int, d: int, precision: str, workspace: int
) -> None:
    copies = config.choose_dq_copies((m, n, d), precision, 132, workspace)
    assert copies == 1 or copies * m * d * 4 <= workspace // 8
    assert 1 <= copies <= max(1, -(-n // config.MAX_SUM_TERMS.get(precision, n + 1)))
