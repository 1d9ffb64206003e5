"""Compiled programs over devices, loops of steps, errors: for test_devices.py."""

import contextlib
import io
import logging
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from devices import (
    MESH,
    ROWS,
    SAME,
    SCALE,
    D,
    R,
    close,
    features,
    main,
    make_labels,
    mapped,
    one,
    raises,
    unit,
    whole_loss,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from reference_problems import LOSSES

import infonce.jax as ij

# --- the compiled program -------------------------------------------------------------------------

COLLECTIVES = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"


def compiled(only: str = "") -> None:
    """Features of keys travel once to all devices, their gradients once back; so do those of a
    guide or a teacher, without a gradient, and own negatives stay. No buffer is N x N."""
    rows, width = 256 // R, 8
    n, numbers, rng = rows * R, {"scale": SCALE.astype(np.float64)}, np.random.default_rng(0)
    second = [unit(rng, n, width) for _ in range(2)]
    calls: list[tuple[str, dict[str, Any]]] = [
        *((name, make_labels(name, n) if name == "sup_con" else {}) for name in LOSSES),
        ("clip", {"guide": tuple(second)}),
        ("distill", {"teacher_query": second[0], "teacher_key": second[1]}),
        ("info_nce", {"own": unit(rng, n, 3, width)}),
    ]
    for name, by_row in calls:
        if only not in name:
            continue
        z = features(name, rows, width)
        step = mapped(partial(whole_loss, name)).lower(z, numbers, by_row).compile()
        once, again = (jax.tree.leaves(step(z, numbers, by_row)) for _ in range(2))
        assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True)), name
        text = step.as_text()
        collectives = re.findall(rf"= \(?(\w+)\[([\d,]*)\].*? ({COLLECTIVES})(?:-start)?\(", text)
        sizes = Counter((kind, "features" if f",{width}]" in f"[{shape}]" else "vectors")
                        for _, shape, kind in collectives)  # fmt: skip
        print(name, [*by_row], dict(sizes), text.count("custom-call("), "callbacks")
        two = "guide" in by_row or name == "distill"
        assert sizes["all-gather", "features"] == 1 + two, (name, sizes)
        wanted = name != "lit" and (name not in ("nt_xent", "sup_con", "gte") or R > 2)
        assert sizes["reduce-scatter", "features"] == wanted, (name, sizes)
        others = set(sizes) - {("all-gather", "features"), ("reduce-scatter", "features")}
        assert all(which == "vectors" for _, which in others), (name, sizes)
        if name in ("info_nce", "siglip", "lit"):  # rows alone have sums
            assert {kind for kind, _ in others} == {"all-reduce"}, (name, sizes)
        joint = 2 if name == "gte" or "own" in by_row else 1
        shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", text)
        largest = max(int(np.prod([int(d) for d in s.split(",") if d] or [1])) for s in shapes)
        # features (own negatives on a device), and up to 12 numbers of 4 bytes for each key;
        # N x N is 21 times as much
        assert largest <= joint * n * max(width, 12), (name, largest)


def loop() -> None:
    """80 steps with several losses. XLA's CPU client stands still if 32 programs are under way on
    as many devices as it has threads, also without callbacks: so no more than eight are."""
    z = [jax.device_put(v, NamedSharding(MESH, ROWS)) for v in features("clip", 32, 16)]
    numbers = {"scale": SCALE.astype(np.float64)}

    def several(z: Any, *others: Any) -> Any:
        both = whole_loss("clip", z, *others) + whole_loss("siglip", z, *others)
        return both + whole_loss("nt_xent", z[:1], *others)

    @jax.jit
    def step(z: Any, numbers: Any) -> Any:
        value, (grads, number_gradients) = mapped(several)(z, numbers, {})
        z = [a - 0.5 * b for a, b in zip(z, grads, strict=True)]
        return z, jax.tree.map(lambda a, b: a - 0.01 * b, numbers, number_gradients), value

    start, values = time.time(), []
    for i in range(80):
        z, numbers, value = step(z, numbers)
        values.append(value)
        if i % 8 == 7:
            jax.block_until_ready(z)
    assert float(values[-1]) < float(values[0])
    print(f"80 steps: {time.time() - start:.1f} s")


def page() -> None:
    """The programs of docs/frameworks.md."""
    text = (Path(__file__).parents[3] / "docs" / "frameworks.md").read_text()
    text = text.partition("### Over devices")[2].partition("\n## ")[0]
    trained, global_arrays = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(trained, names)
    assert output.getvalue().count("\n") == 30
    assert names["value"] < 0.5
    image, text = names["batch"]
    exec(global_arrays, names)
    want = jax.value_and_grad(lambda image: ij.clip_loss(image, np.asarray(text), scale=14.3))
    close("sharded", (names["value"], names["gradient"]), want(np.asarray(image)), 1e-5)


# --- errors ---------------------------------------------------------------------------------------


def refused() -> None:
    """While JAX traces."""
    z, numbers = features("clip"), {"scale": SCALE}
    over = ij.sharded(ij.clip_loss, MESH, "data")
    call = partial(whole_loss, "clip")

    def run(f: Any, specs: Any = (ROWS, SAME, ROWS), z: Any = z) -> Any:
        return jax.jit(jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=SAME))(z, numbers, {})

    short = [v[:-1] for v in z]
    raises(ValueError, rf"image: expected a number of rows that the {R} devices of axis 'data' "
           rf"divide, got shape \({6 * R - 1}, {D}\)", lambda: over(*short, scale=3.0))  # fmt: skip
    raises(ValueError, "text: expected .* rows like image", lambda: over(z[0], short[1], scale=3.0))
    raises(ValueError, "image: expected rows of each device of axis 'data', got the same",
           lambda: run(call, (SAME, SAME, ROWS)))  # fmt: skip
    raises(ValueError, r"guide\[0\]: expected rows of each device of axis 'data', got the same",
           lambda: run(partial(call, guide=z)))  # fmt: skip
    raises(
        ValueError,
        r"teacher_key: expected shape \(\d+, 4\)",
        lambda: ij.sharded(ij.distill_loss, MESH, "data")(*z, z[0], short[1], scale=3.0),
    )
    raises(ValueError, "axis_name: expected the name of an axis .* got 'model'",
           lambda: run(partial(call, axis_name="model")))  # fmt: skip
    raises(ValueError, "axis_name: expected the name of an axis .* got 'data'",
           lambda: call(z, numbers, {}))  # fmt: skip
    for names in ((), ("data", "data"), ["data"]):
        raises(ValueError, rf"axis_name: expected .* got {re.escape(repr(names))}",
               lambda: run(partial(call, axis_name=names)))  # noqa: B023  # fmt: skip
    raises(ValueError, "text: expected 6 rows like image",
           lambda: run(lambda z, *args: call([z[0], z[1][1:]], *args)))  # fmt: skip
    raises(ValueError, 'method: expected "auto"', lambda: run(partial(call, method="fused")))
    raises(ValueError, "workspace: expected at least", lambda: run(partial(call, workspace=64)))
    raises(ValueError, "features: expected an even number of rows",
           lambda: run(lambda z, *args: whole_loss("nt_xent", [z[0][1:]], *args)))  # fmt: skip
    raises(ValueError, "labels: expected with axis_name",
           lambda: ij.nt_xent_loss(z[0], labels=jnp.arange(6 * R), scale=3.0))  # fmt: skip
    raises(TypeError, "unexpected keyword argument 'marign'",
           lambda: run(partial(call, marign=1)))  # fmt: skip
    raises(TypeError, "unexpected keyword argument 'marign' .did you mean 'margin'",
           lambda: over(*z, scale=3.0, marign=1))  # fmt: skip
    raises(TypeError, "loss: expected a loss of infonce.jax", lambda: ij.sharded(max, MESH, "data"))
    raises(TypeError, "mesh: expected", lambda: ij.sharded(ij.clip_loss, "data", "data"))
    raises(ValueError, r"axis_name: expected one of the mesh's axes \('data',\)",
           lambda: ij.sharded(ij.clip_loss, MESH, "model"))  # fmt: skip
    raises(TypeError, "axis_name: expected as an argument of infonce.jax.sharded",
           lambda: over(*z, scale=3.0, axis_name="data"))  # fmt: skip


def shards() -> None:
    """Without `axis_name`, each device has a loss of its own rows. JAX refuses to take it, metrics
    and gradients for the same on all devices, as it does with plain JAX."""
    numbers = {"scale": SCALE.astype(np.float64)}
    for name in ("clip", "nt_xent", "sup_con", "distill"):
        z, by_row = features(name), make_labels(name, 6 * R)
        if name == "distill":
            by_row = {"teacher_query": z[1], "teacher_key": z[0]}
        over = partial(jax.shard_map, mesh=MESH, in_specs=(ROWS, SAME, ROWS))
        alone = partial(one, name)

        results: list[Callable[..., Any]] = [
            alone,
            jax.grad(alone),
            partial(alone, reduction="none"),
        ]
        if name in ("clip", "nt_xent"):
            results.append(lambda *a, alone=alone: alone(*a, metrics=True)[1].row_loss)
        if name == "clip":
            results.append(partial(alone, dims=(2, D)))
        for result in results:
            raises(ValueError, "out_specs which require replication",
                   lambda: jax.jit(over(result, out_specs=SAME))(z, numbers, by_row))  # noqa: B023  # fmt: skip


def explicit() -> None:
    """Arrays that are split over a mesh of explicit axes, in a loss without `axis_name`: results of
    one device, and gradients that are split as the arrays are."""
    mesh = jax.make_mesh((R,), ("data",), axis_types=(AxisType.Explicit,))
    set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh  # until JAX 0.7
    z = features("clip")

    def objective(image: Any, text: Any, scale: Any, **options: Any) -> Any:
        losses = ij.clip_loss(image, text, scale=scale, **options)
        return (losses * jnp.arange(1.0, losses.size + 1)).sum()

    for options in ({}, {"reduction": "none"}):
        step = jax.value_and_grad(partial(objective, **options), (0, 1, 2))
        want = step(*z, SCALE)
        for axes in (("data", None), (None, "data"), (None, None)):
            split = [jax.device_put(v, NamedSharding(mesh, PartitionSpec(*axes))) for v in z]
            with set_mesh(mesh):
                for run in (step, jax.jit(step)):
                    got = run(*split, SCALE)
                    close(f"explicit axes {axes}, {options}", got, want)
                    assert [*map(jax.typeof, got[1][:2])] == [*map(jax.typeof, split)]


def not_a_number() -> None:
    """Values that only the running program knows make NaN on all devices, and a line of the log."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infonce.jax").addHandler(handler)
    logging.getLogger("infonce.jax").propagate = False
    z, n = features("clip"), 6 * R
    clip, info_nce = (ij.sharded(f, MESH, "data") for f in (ij.clip_loss, ij.info_nce_loss))
    bad = [z[0].at[3, 2].set(jnp.nan), z[1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of norms, on one device, would leave the others waiting
        assert np.isfinite(jax.jit(lambda z: clip(9 * z[0], z[1], scale=3.0))(z))
    assert np.isnan(jax.jit(lambda z: clip(*z, scale=3.0))(bad))
    assert not messages
    step = jax.jit(jax.value_and_grad(lambda z, labels: info_nce(*z, labels, scale=3.0)))
    value, grads = step(z, jnp.arange(n).at[n - 1].set(n))
    assert np.isnan(value)
    assert np.isnan(grads[1]).all()
    assert messages == [
        f"info_nce_loss: the loss is NaN: ValueError: labels: expected values in [0, {n}), or "
        f"negative ones for none, got {n} at position 5"
    ]
    close("the same program, with labels in range", step(z, jnp.arange(n))[0],
          one("info_nce", z, {"scale": 3.0}, {}))  # fmt: skip
    del messages[:]
    step = jax.jit(lambda z, s: clip(*z, scale=s))
    assert np.isnan(step(z, -1.0))
    assert len(messages) == R
    assert "scale: expected" in messages[0]
    del messages[:]
    views = ij.sharded(ij.nt_xent_loss, MESH, "data")
    assert np.isnan(
        jax.jit(lambda z, y: views(z, labels=y, scale=3.0))(z[0], (jnp.arange(n) + 1) % n)
    )
    assert any("labels: expected two rows that are each other's label" in text for text in messages)


if __name__ == "__main__":
    main(globals())
