"""How a call runs on a GPU, decided before anything runs. Nothing here needs a GPU or CuPy."""

from .call import BlockFold, Call, Loss, Matrix, Purpose
from .decisions import ALIGNMENT, Schedule, schedule, tiled_schedule
from .folds import (
    CACHED_COLUMNS,
    AccumulatorRows,
    Fold,
    Kernel,
    OperandRows,
    Operands,
    Part,
    Reading,
)
from .fused import OneLaunch, one_launch
from .matrix_products import key_ranges_of_products, products
from .method import choose_method, has_plan, needs_kernels_alone

__all__ = [
    "ALIGNMENT",
    "CACHED_COLUMNS",
    "AccumulatorRows",
    "BlockFold",
    "Call",
    "Fold",
    "Kernel",
    "Loss",
    "Matrix",
    "OneLaunch",
    "OperandRows",
    "Operands",
    "Part",
    "Purpose",
    "Reading",
    "Schedule",
    "choose_method",
    "has_plan",
    "key_ranges_of_products",
    "needs_kernels_alone",
    "one_launch",
    "products",
    "schedule",
    "tiled_schedule",
]
