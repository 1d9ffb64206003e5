"""What the programs of test_devices.py share: the devices of a CPU, as many as XLA_FLAGS says, and
calls of the losses on one of them and on all."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "support"))

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from reference_problems import FEATURES as OF_REFERENCE

import infonce.jax as ij

FEATURES = {**OF_REFERENCE, "distill": ("query", "key")}

R, D = len(jax.devices()), 4
MESH = Mesh(np.array(jax.devices()), "data")
ROWS, SAME = P("data"), P()
SCALE = jnp.asarray(3.0, np.float32)


def close(what: str, got: Any, want: Any, tolerance: float = 1e-12) -> None:
    """Relative to the largest number, or to 1 where all are zero; NaN fails."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert g.shape == w.shape, (what, g.shape, w.shape)
        error = float(np.abs(g - w).max()) / (float(np.abs(w).max()) or 1.0)
        assert error <= tolerance, (what, error)


def unit(rng: np.random.Generator, *shape: int, dtype: Any = None) -> Any:
    z = rng.standard_normal(shape)
    return jnp.asarray(z / np.linalg.norm(z, axis=-1, keepdims=True), dtype)


def features(name: str, rows: int = 6, width: int = D, dtype: Any = None) -> list[Any]:
    """`rows` a device."""
    rng = np.random.default_rng(rows)
    return [unit(rng, rows * R, width, dtype=dtype) for _ in FEATURES[name]]


def make_guide(rng: np.random.Generator, rows: int, width: int = 3) -> Any:
    return jnp.asarray(rng.normal(size=(rows, width)))


def make_labels(name: str, rows: int) -> dict[str, Any]:
    """Classes; and the other views, which may be on other devices: row i and i + B of 2B."""
    if name == "sup_con":
        return {"labels": jnp.arange(rows) % 5 - 1}
    return {"labels": (jnp.arange(rows) + rows // 2) % rows} if name == "nt_xent" else {}


def one(name: str, z: list[Any], numbers: Any, by_row: Any, **options: Any) -> Any:
    """The loss on one device."""
    by_row = {k: v for k, v in by_row.items() if name != "nt_xent" or k != "labels"}
    return getattr(ij, f"{name}_loss")(*z, **numbers, **by_row, **options)


def whole_loss(name: str, z: list[Any], numbers: Any, by_row: Any, **options: Any) -> Any:
    options = {"axis_name": "data", **options}
    return getattr(ij, f"{name}_loss")(*z, **numbers, **by_row, **options)


def mapped(f: Callable[..., Any], check: bool = True, inside: bool = True) -> Any:
    """Value and gradients of f(features, numbers, by_row), differentiated inside or outside of
    shard_map."""
    over = partial(jax.shard_map, mesh=MESH, in_specs=(ROWS, SAME, ROWS), check_vma=check)
    if inside:
        return jax.jit(over(jax.value_and_grad(f, (0, 1)), out_specs=(SAME, (ROWS, SAME))))
    return jax.jit(jax.value_and_grad(over(f, out_specs=SAME), (0, 1)))


def raises(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        call()


def main(cases: dict[str, Callable[..., None]]) -> None:
    """Run the cases of the command line in float64. Arguments of a case follow its name and a
    colon."""
    jax.config.update("jax_enable_x64", True)
    for case in sys.argv[1:]:
        name, *arguments = case.split(":")
        start = time.time()
        cases[name](*arguments)
        print(f"{case}: {time.time() - start:.1f} s", flush=True)
