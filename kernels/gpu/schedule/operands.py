"""The operands of a call's matrix products: their precision, and where kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .. import config


class Reading(Enum):
    """Where kernels and cuBLAS read rows of features."""

    IN_PLACE = "in place"
    ONCE = "from one copy of all rows"
    BY_BLOCK = "from copies by block"


@dataclass(frozen=True)
class OperandRows:
    """The rows of queries, or of keys, as operands of products."""

    reading: Reading
    features: int  # elements of a row, with the zeros at its end
    row_bytes: int
    has_divisor: bool  # features are divided by a feature divisor, for float16


@dataclass(frozen=True)
class Operands:
    """The operands of all matrix products: their precision, width and place."""

    precision: str
    query: OperandRows
    key: OperandRows
    width: int  # bytes of a row in the products of logits, in each part
    gradient_width: int  # features of a row in the products that compute gradients
    staged_copy_bytes: int  # of copies of all rows; 0 if each pass copies the rows of its blocks

    @property
    def parts(self) -> int:
        """16-bit numbers whose sum is one element."""
        return config.OPERAND_PARTS.get(self.precision, 1)

    @property
    def rows_by_block(self) -> tuple[int, int]:
        """Bytes of a row of queries, and of keys, that is copied by block; 0: it is not."""
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
