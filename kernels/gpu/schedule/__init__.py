"""How a call runs on a GPU, decided before anything runs. Nothing here needs a GPU or CuPy.

`Call` describes the call, `schedule` makes a `Schedule` from it with the arithmetic of
kernels/gpu/config, and kernels/gpu/tiled and fused.py run the schedule.
"""

from .call import BlockPass, Call, LossForm, Matrix, Purpose
from .decisions import Schedule, distillation_schedules, schedule, tiled_schedule
from .fused import OneLaunch, one_launch
from .matrix_products import divide_keys, divide_terms
from .method import choose_method, has_plan, is_computed_by_kernels_only
from .operands import OperandRows, Operands, Reading
from .passes import (
    CACHED_BLOCK_COLUMNS,
    AccumulatorRows,
    GuideSchedule,
    ScheduledKernel,
    ScheduledPass,
)

__all__ = [
    "CACHED_BLOCK_COLUMNS",
    "AccumulatorRows",
    "BlockPass",
    "Call",
    "GuideSchedule",
    "LossForm",
    "Matrix",
    "OneLaunch",
    "OperandRows",
    "Operands",
    "Purpose",
    "Reading",
    "Schedule",
    "ScheduledKernel",
    "ScheduledPass",
    "choose_method",
    "distillation_schedules",
    "divide_keys",
    "divide_terms",
    "has_plan",
    "is_computed_by_kernels_only",
    "one_launch",
    "schedule",
    "tiled_schedule",
]
