"""Faults that the code has had: text of today, and the fault in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of the code, and what should find it."""

    name: str
    file: str
    old: str  # text that occurs once
    new: str
    executors: str = ".*"  # expression for names; "": none, because the fault is about errors
    tests: Sequence[str] = ()  # arguments of pytest, of runs for what no executor shows
    words: str = ""  # what is changed


FAULTS = [
    Mutant(
        "the sum of weights is compared with the least subnormal number",
        "infonce/checks/rows.py",
        "weights / (weights.sum() or 1.0)",
        "weights / xp.maximum(weights.sum(), 5e-324)",
        "JAX.*",
    ),
]  # fmt: skip
