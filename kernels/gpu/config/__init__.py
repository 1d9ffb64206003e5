"""How work is shaped for a device: pure functions of shapes, precision, device and workspace."""

from .precision import (
    ACCUMULATOR_BYTES,
    FLOAT16,
    K_SLICE,
    LONGEST_SUM,
    OPERAND_BYTES,
    OPERAND_PARTS,
    Device,
    operands,
    padded,
    supported,
    sweep_truncation_bias,
    truncation_bias,
)
from .sweep import SWEEP_PRECISIONS, Schedule, Sweep, defines, in_registers, sweep_for
from .tile import BLOCK_M, Tile, tile_for
from .workspace import (
    Blocking,
    Needs,
    blocking,
    blockings,
    least_workspace,
    panel_stride,
    sums_at_once,
)

__all__ = [
    "ACCUMULATOR_BYTES",
    "BLOCK_M",
    "FLOAT16",
    "K_SLICE",
    "LONGEST_SUM",
    "OPERAND_BYTES",
    "OPERAND_PARTS",
    "SWEEP_PRECISIONS",
    "Blocking",
    "Device",
    "Needs",
    "Schedule",
    "Sweep",
    "Tile",
    "blocking",
    "blockings",
    "defines",
    "in_registers",
    "least_workspace",
    "operands",
    "padded",
    "panel_stride",
    "sums_at_once",
    "supported",
    "sweep_for",
    "sweep_truncation_bias",
    "tile_for",
    "truncation_bias",
]
