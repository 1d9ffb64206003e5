"""The checks of features that are sets of tokens, [rows, tokens, features]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import native
from ..kernels.maxsim.tokens import Tokens
from ..kernels.problem import Array
from ..spec import DEFAULTS, TOKEN_OPTIONS
from .validation import is_array, what

# Options that ask for products of rows, or for a method that has no code for tokens
REFUSED = ("offload", "return_logits")
METHODS = ("auto", "tiled")


def require_options(values: Mapping[str, Any]) -> None:
    """ValueError for an option that sets of tokens do not have."""
    for name in REFUSED:
        value = values.get(name)
        if value is not None and value is not False:
            raise ValueError(
                f"{name}: expected {DEFAULTS[name]!r} with features of three dimensions, whose "
                f"scores are no dot products of rows, got {what(value)}"
            )
    require_method(values["method"])


def require_method(method: str) -> None:
    """ValueError for a method that has no code for tokens."""
    if method not in METHODS:
        raise ValueError(
            f'method: expected "auto" or "tiled" with features of three dimensions, got {method!r}'
        )


def refuse_without_tokens(values: Mapping[str, Any]) -> None:
    """ValueError for an option of tokens beside features of two dimensions."""
    for name in TOKEN_OPTIONS:
        if values[name] is not None and values[name] is not False:
            raise ValueError(
                f"{name}: expected {DEFAULTS[name]!r} with features of two dimensions, which have "
                f"no tokens, got {what(values[name])}"
            )


def make(xp: Any, arrays: Sequence[Array], options: Mapping[str, Any]) -> tuple[Tokens, Tokens]:
    """The queries and keys of a call, with their masks."""
    query_mask, key_mask = (
        _mask(xp, name, options.get(name), z)
        for name, z in zip(("query_mask", "key_mask"), arrays, strict=False)
    )
    if key_mask is not None and isinstance(key_mask, np.ndarray):
        without = np.flatnonzero(~key_mask.any(axis=1))
        if without.size:
            raise ValueError(
                f"key_mask: expected at least one token for each key, got none for key {without[0]}"
            )
    return Tokens(arrays[0], query_mask, bool(options.get("token_mean"))), Tokens(
        arrays[1], key_mask
    )


def require_width(query: Tokens, key: Tokens) -> None:
    """ValueError unless tokens of queries and keys have the same number of features."""
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key: expected width {query.shape[1]} like query, got shape {key.values.shape}"
        )


def _mask(xp: Any, name: str, mask: Any, features: Array) -> Array | None:
    """The mask as a bool array of the library of the features; None: all tokens count."""
    if mask is None:
        return None
    mask = native(mask, name)
    if not is_array(mask):
        mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"{name}: expected dtype bool, got {what(mask)}")
    if mask.shape != features.shape[:2]:
        raise ValueError(
            f"{name}: expected shape {features.shape[:2]} like the tokens, got {mask.shape}"
        )
    return xp.asarray(mask)
