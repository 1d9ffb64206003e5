"""The operands of a call's matrix products: their precision, and where kernels read them.

decisions.py chooses them (`choose_operands`), and kernels/gpu/tiled/operands.py copies features.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .. import config


class Reading(Enum):
    """Where kernels and cuBLAS read rows of features."""

    IN_PLACE = "in place"  # from the array of the caller
    ONCE = "from one copy of all rows"  # made before the passes
    BY_BLOCK = "from copies by block"  # each pass copies the rows of a block


@dataclass(frozen=True)
class OperandRows:
    """The rows of queries, or of keys, as operands of products."""

    reading: Reading
    features: int  # elements of a row, with the zeros at the end of a copied row
    row_bytes: int  # bytes of a row, in all its parts
    has_divisor: bool  # features are divided by a feature divisor, for float16


@dataclass(frozen=True)
class Operands:
    """The operands of all matrix products: their precision, width and place."""

    precision: str
    query: OperandRows
    key: OperandRows
    part_bytes: int  # bytes of one part of a row in the products that compute logits
    gradient_features: int  # features of a row in the products that compute dQ and dK
    staged_copy_bytes: int  # bytes of copies of all rows (`Reading.ONCE`); 0: there are none

    @property
    def parts(self) -> int:
        """Numbers whose sum is one element: 2 for fp16x3 and bf16x3, otherwise 1."""
        return config.OPERAND_PARTS.get(self.precision, 1)

    @property
    def rows_by_block(self) -> tuple[int, int]:
        """Bytes of a copied row of queries, and of keys; 0: the rows are not copied by block."""
        query, key = (
            side.row_bytes * (side.reading is Reading.BY_BLOCK) for side in (self.query, self.key)
        )
        return query, key

    @property
    def item(self) -> int:
        """Bytes of one part of an element."""
        return config.element_bytes(self.precision)

    @property
    def accumulator_dtype(self) -> str:
        return "float64" if self.precision == "fp64" else "float32"
