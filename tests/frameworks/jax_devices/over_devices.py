"""What the CPU devices of one process do in test_devices.py: ``python over_devices.py CASE...``.

XLA_FLAGS=--xla_force_host_platform_device_count says how many devices there are. float64 but for
`single_precision`.
"""

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "support"))

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference_problems import FEATURES, LOSSES, call_of, drawn_problem

import infonce.jax as ij

R, D = len(jax.devices()), 4
MESH = Mesh(np.array(jax.devices()), "data")
ROWS, SAME = P("data"), P()
SCALE = jnp.asarray(3.0, np.float32)


def close(what: str, got: Any, want: Any, tolerance: float = 1e-12) -> None:
    """Relative to the largest number, or to 1; NaN fails."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert g.shape == w.shape, (what, g.shape, w.shape)
        error = float(np.abs(g - w).max()) / max(1.0, float(np.abs(w).max()))
        assert error <= tolerance, (what, error)


def unit(rng: np.random.Generator, *shape: int, dtype: Any = None) -> Any:
    z = rng.standard_normal(shape)
    return jnp.asarray(z / np.linalg.norm(z, axis=-1, keepdims=True), dtype)


def features(name: str, rows: int = 6, width: int = D, dtype: Any = None) -> list[Any]:
    """`rows` a device."""
    rng = np.random.default_rng(rows)
    return [unit(rng, rows * R, width, dtype=dtype) for _ in FEATURES[name]]


def labels_of(name: str, rows: int) -> dict[str, Any]:
    """Classes; and the other views, which may be on other devices: row i and i + B of 2B."""
    if name == "sup_con":
        return {"labels": jnp.arange(rows) % 5 - 1}
    return {"labels": (jnp.arange(rows) + rows // 2) % rows} if name == "nt_xent" else {}


def one(name: str, z: list[Any], numbers: Any, by_row: Any, **options: Any) -> Any:
    """The loss on one device."""
    by_row = {k: v for k, v in by_row.items() if name != "nt_xent" or k != "labels"}
    return getattr(ij, f"{name}_loss")(*z, **numbers, **by_row, **options)


def of_all(name: str, z: list[Any], numbers: Any, by_row: Any, **options: Any) -> Any:
    options = {"axis_name": "data", **options}
    return getattr(ij, f"{name}_loss")(*z, **numbers, **by_row, **options)


def mapped(f: Callable[..., Any], check: bool = True, inside: bool = True) -> Any:
    """Value and gradients of f(features, numbers, by_row), differentiated inside or outside of
    shard_map."""
    over = partial(jax.shard_map, mesh=MESH, in_specs=(ROWS, SAME, ROWS), check_vma=check)
    if inside:
        return jax.jit(over(jax.value_and_grad(f, (0, 1)), out_specs=(SAME, (ROWS, SAME))))
    return jax.jit(jax.value_and_grad(over(f, out_specs=SAME), (0, 1)))


# --- all losses and options -----------------------------------------------------------------------


def options(seeds: str) -> None:
    """Drawn options, against the specification of all rows."""
    for seed in range(int(seeds)):
        for name in LOSSES:
            drawn(name, seed)


def drawn(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, R, LOSSES.index(name)])
    reduction = ("mean", "mean", "sum", "none")[rng.integers(4)]
    rows = R * int(rng.integers(1, 4)) * (1 + (name == "nt_xent" and R % 2))
    columns = rows + R * int(rng.integers(-1, 2)) * (name == "info_nce" and rows > R)
    problem, given = call_of(drawn_problem(name, rng, rows, columns, D), reduction)
    numbers = {"scale": jnp.asarray(given.pop("scale"))}
    if name == "siglip":
        numbers["bias"] = jnp.asarray(problem.bias)
    arrays = ("labels", "ids", "weights", "key_bias")
    by_row = {k: given.pop(k) for k in arrays if given.get(k) is not None}
    given = {k: v for k, v in given.items() if v is not None} | {"reduction": reduction}
    if name == "nt_xent":
        by_row |= labels_of(name, rows)
    upstream = np.ones(rows)
    if reduction == "none":
        upstream = rng.uniform(-1.0, 1.0, rows)
        problem = problem._replace(weights=problem.weights * upstream)
    way = int(rng.integers(5))  # the last one: `sharded`
    loss = partial(of_all, name, **given)
    if way == 4:
        if name == "nt_xent":
            by_row.pop("labels")
        over = ij.sharded(getattr(ij, f"{name}_loss"), MESH, "data")
        loss = lambda z, numbers, by_row: over(*z, **numbers, **by_row, **given)  # noqa: E731

    def objective(z: Any, numbers: Any, both: Any) -> Any:
        by_row, upstream = both
        losses = loss(z, numbers, by_row)
        if reduction != "none":
            return losses
        total = (losses * upstream).sum()
        return total if way == 4 else jax.lax.psum(total, "data")

    check, inside = ((True, True), (True, False), (False, False), (True, True), (True, False))[way]
    step = mapped(objective, check, inside)
    if way == 4:
        step = jax.jit(jax.value_and_grad(objective, (0, 1)))
    z = [jnp.asarray(side) for side in problem.features]
    got, (grads, of_numbers) = step(z, numbers, (by_row, jnp.asarray(upstream)))
    want = problem.reference()
    what = f"{name}, seed {seed}, {given}, {list(by_row)}, way {way}"
    close(what, got, want.loss)
    for field, gradient in zip(FEATURES[name], grads, strict=True):
        wanted = want.grads[field]
        close(
            f"{what}: d {field}", gradient, np.zeros(gradient.shape) if wanted is None else wanted
        )
    for field, gradient in of_numbers.items():
        close(f"{what}: d {field}", gradient, want.grads[field], 1e-11)


def metrics() -> None:
    """Of the rows of a device, with the keys of all."""
    fields = "row_loss", "column_loss", "row_rank", "column_rank", "positive", "hardest_negative"
    for name in ("clip", "lit", "info_nce", "nt_xent"):
        z, numbers = features(name), {"scale": SCALE}
        want = one(name, z, numbers, {}, metrics=True)
        over = ij.sharded(getattr(ij, f"{name}_loss"), MESH, "data")

        @jax.jit
        def run(z: Any, over: Any = over) -> Any:
            def loss(z: Any) -> Any:
                value, found = over(*z, scale=SCALE, metrics=True)
                return value, [getattr(found, field) for field in fields]

            return jax.value_and_grad(loss, has_aux=True)(z)

        (value, found), grads = run(z)
        close(f"{name}: loss", value, want[0])
        wanted = [getattr(want[1], field) for field in fields]
        assert [v is None for v in found] == [v is None for v in wanted]
        close(f"{name}: metrics", found, wanted)
        close(f"{name}: grads", grads, jax.grad(lambda z: one(name, z, numbers, {}))(z))  # noqa: B023


# --- ways to differentiate, transforms ------------------------------------------------------------


def formula(name: str, z: list[Any], numbers: Any, by_row: Any) -> Any:
    """clip and info_nce in JAX: logits of own rows, and of own columns."""
    i, m = jax.lax.axis_index("data"), len(z[0])
    own = (i * m + jnp.arange(m))[:, None]

    def direction(query: Any, key: Any) -> Any:
        x = numbers["scale"] * query @ jax.lax.all_gather(key, "data", tiled=True).T
        return jax.nn.logsumexp(x, axis=1) - jnp.take_along_axis(x, own, 1)[:, 0]

    losses = direction(*z)
    if name == "clip":
        losses = (losses + direction(*z[::-1])) / 2
    return jax.lax.psum(losses.sum(), "data") / (m * R)


def modes() -> None:
    """Where each device has R times its part of the gradient, it is as with the formula."""
    for name in ("clip", "info_nce"):
        z, numbers = features(name), {"scale": SCALE.astype(np.float64)}
        shards = [v.reshape(R, -1, D) for v in z]

        def both(z: Any, numbers: Any, of: Any = None, name: str = name) -> Any:
            value, (grads, of_numbers) = jax.value_and_grad(partial(of, name, by_row={}), (0, 1))(
                z, numbers
            )
            return value, (grads, jax.lax.pmean(of_numbers, "data"))

        over = partial(jax.shard_map, mesh=MESH, in_specs=(ROWS, SAME), check_vma=False,
                       out_specs=(SAME, (ROWS, SAME)))  # fmt: skip
        ours, theirs = (
            (jax.jit(over(partial(both, of=of)))(z, numbers),
             jax.pmap(partial(both, of=of), "data", in_axes=(0, None))(shards, numbers))
            for of in (of_all, formula)
        )  # fmt: skip
        close(f"{name}: unchecked, and pmap, as the formula", ours, theirs)

        def step(z: Any, scale: Any, name: str = name) -> Any:
            def loss(weights: Any, scale: Any) -> Any:
                return of_all(name, [v @ weights for v in z], {"scale": scale}, {})

            return jax.lax.pmean(jax.grad(loss, (0, 1))(jnp.eye(D), scale), "data")

        got = jax.pmap(step, "data", in_axes=(0, None))(shards, numbers["scale"])
        want = jax.grad(
            lambda w, s: one(name, [v @ w for v in z], {"scale": s}, {}), (0, 1)  # noqa: B023
        )(jnp.eye(D), numbers["scale"])  # fmt: skip
        close(f"{name}: pmean of parameters' gradients", [v[0] for v in got], want)
        got = jax.vmap(partial(of_all, name), (0, None, None), axis_name="data")(
            shards, numbers, {}
        )
        close(f"{name}: vmap with an axis name", got[0], one(name, z, numbers, {}))


def transforms() -> None:
    """vmap, scan, checkpoint, donation; axes of a mesh of two; second derivatives."""
    numbers, z = {"scale": SCALE.astype(np.float64)}, features("clip")
    stacked = [jnp.stack([v, 2 * v[::-1], v * v]) for v in z]
    f = jax.value_and_grad(partial(of_all, "clip"), (0, 1))
    rows = P(None, "data")
    run = jax.shard_map(jax.vmap(f, (0, None, None)), mesh=MESH, in_specs=(rows, SAME, SAME),
                        out_specs=(SAME, (rows, SAME)))  # fmt: skip
    alone = jax.value_and_grad(partial(one, "clip"), (0, 1))
    want = jax.vmap(alone, (0, None, None))(stacked, numbers, {})
    close("vmap", jax.jit(run)(stacked, numbers, {}), want)

    def trained(of: Any, z: Any) -> Any:
        def loss(z: Any) -> Any:
            return of("clip", [jnp.tanh(v) for v in z], numbers, {})

        def step(z: Any, _: Any) -> Any:
            value, grads = jax.value_and_grad(jax.checkpoint(loss))(z)
            return [a - b for a, b in zip(z, grads, strict=True)], value

        return jax.lax.scan(step, z, None, length=5)

    want = jax.jit(partial(trained, one))(z)
    run = jax.shard_map(partial(trained, of_all), mesh=MESH, in_specs=(ROWS,),
                        out_specs=(ROWS, SAME))  # fmt: skip
    put = [jax.device_put(v + 0, NamedSharding(MESH, ROWS)) for v in z]
    close("scan, checkpoint, donation", jax.jit(run, donate_argnums=0)(put), want)

    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("hosts", "data"))
    want = alone(z, numbers, {})
    for names in ("data", ("hosts", "data"), ("data", "hosts")):
        rows = P(names)
        f = jax.value_and_grad(partial(of_all, "clip", axis_name=names), (0, 1))
        run = jax.shard_map(
            f, mesh=mesh, in_specs=(rows, SAME, SAME), out_specs=(SAME, (rows, SAME))
        )
        close(f"axes {names} of a mesh of two", jax.jit(run)(z, numbers, {}), want)

    over = ij.sharded(ij.clip_loss, MESH, "data")
    close("sharded without jit", over(*z, scale=3.0), want[0])
    hessian = jax.hessian(lambda z: over(z, z, scale=3.0))
    raises(TypeError, "cannot be differentiated again", lambda: jax.jit(hessian)(z[0]))


def single_precision() -> None:
    """Without jax_enable_x64, at a scale of 100: float32 and less, ids of 64 bits."""
    jax.config.update("jax_enable_x64", False)
    hashes = (np.arange(6 * R) % 7 << 40) + 5  # without their upper halves, all the same
    for name, dtype, tolerance in (
        ("clip", "float32", 1e-5), ("nt_xent", "float32", 1e-5), ("info_nce", "bfloat16", 2e-2),
        ("clip", "float16", 2e-3), ("siglip", "float32", 1e-5),
    ):  # fmt: skip
        z = features(name, dtype=jnp.dtype(dtype))
        given = {"ids": hashes} if dtype == "float32" else {}
        alone = getattr(ij, f"{name}_loss")

        def step(of: Any, z: Any = z, given: Any = given) -> Any:
            f = jax.value_and_grad(lambda z, s: of(*z, scale=s, **given), (0, 1))
            return jax.jit(f)(z, jnp.float32(100.0))

        got, want = step(ij.sharded(alone, MESH, "data")), step(alone)
        assert [v.dtype for v in jax.tree.leaves(got)] == [v.dtype for v in jax.tree.leaves(want)]
        close(f"{name}, {dtype}", got, want, tolerance)
    jax.config.update("jax_enable_x64", True)


# --- the compiled program -------------------------------------------------------------------------

COLLECTIVES = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"


def compiled() -> None:
    """Features travel once to all devices, their gradients once back; no buffer is N x N."""
    rows, width = 256 // R, 8
    n, numbers = rows * R, {"scale": SCALE.astype(np.float64)}
    for name in LOSSES:
        z = features(name, rows, width)
        by_row = labels_of(name, n) if name == "sup_con" else {}
        step = mapped(partial(of_all, name)).lower(z, numbers, by_row).compile()
        text = step.as_text()
        found = re.findall(rf"= \(?(\w+)\[([\d,]*)\].*? ({COLLECTIVES})(?:-start)?\(", text)
        sizes = Counter((kind, "features" if f",{width}]" in f"[{shape}]" else "vectors")
                        for _, shape, kind in found)  # fmt: skip
        print(name, dict(sizes), text.count("custom-call("), "callbacks")
        assert sizes["all-gather", "features"] == 1, (name, sizes)
        wanted = name != "lit" and (name not in ("nt_xent", "sup_con", "gte") or R > 2)
        assert sizes["reduce-scatter", "features"] == wanted, (name, sizes)
        others = set(sizes) - {("all-gather", "features"), ("reduce-scatter", "features")}
        assert all(of == "vectors" for _, of in others), (name, sizes)
        if name in ("info_nce", "siglip", "lit"):  # rows alone have sums
            assert {kind for kind, _ in others} == {"all-reduce"}, (name, sizes)
        joint = 2 if name == "gte" else 1
        shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", text)
        largest = max(int(np.prod([int(d) for d in s.split(",") if d] or [1])) for s in shapes)
        assert largest <= 2 * joint * n * width, (name, largest)  # N x N: 16 times as much


def loop() -> None:
    """200 steps. XLA's CPU client stands still if 32 programs are under way on as many devices as
    it has threads, with calls out of them or without: so no more than eight are."""
    z = [jax.device_put(v, NamedSharding(MESH, ROWS)) for v in features("clip", 32, 16)]
    numbers = {"scale": SCALE.astype(np.float64)}

    @jax.jit
    def step(z: Any, numbers: Any) -> Any:
        value, (grads, of_numbers) = mapped(partial(of_all, "clip"))(z, numbers, {})
        z = [a - 0.5 * b for a, b in zip(z, grads, strict=True)]
        return z, jax.tree.map(lambda a, b: a - 0.01 * b, numbers, of_numbers), value

    start, values = time.time(), []
    for i in range(200):
        z, numbers, value = step(z, numbers)
        values.append(value)
        if i % 8 == 7:
            jax.block_until_ready(z)
    assert float(values[-1]) < float(values[0])
    print(f"200 steps: {time.time() - start:.1f} s")


# --- errors ---------------------------------------------------------------------------------------


def raises(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        call()


def refused() -> None:
    """While JAX traces."""
    z, numbers = features("clip"), {"scale": SCALE}
    over = ij.sharded(ij.clip_loss, MESH, "data")
    call = partial(of_all, "clip")

    def run(f: Any, specs: Any = (ROWS, SAME, ROWS), z: Any = z) -> Any:
        return jax.jit(jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=SAME))(z, numbers, {})

    short = [v[:-1] for v in z]
    raises(ValueError, rf"image: expected a number of rows that the {R} devices of axis 'data' "
           rf"divide, got shape \({6 * R - 1}, {D}\)", lambda: over(*short, scale=3.0))  # fmt: skip
    raises(ValueError, "text: expected .* rows like image", lambda: over(z[0], short[1], scale=3.0))
    raises(ValueError, "image: expected rows of each device of axis 'data', got the same",
           lambda: run(call, (SAME, SAME, ROWS)))  # fmt: skip
    raises(ValueError, "axis_name: expected the name of an axis .* got 'model'",
           lambda: run(partial(call, axis_name="model")))  # fmt: skip
    raises(ValueError, "axis_name: expected the name of an axis .* got 'data'",
           lambda: call(z, numbers, {}))  # fmt: skip
    for names in ((), ("data", "data"), ["data"]):
        raises(ValueError, rf"axis_name: expected .* got {re.escape(repr(names))}",
               lambda: run(partial(call, axis_name=names)))  # noqa: B023  # fmt: skip
    raises(ValueError, "text: expected 6 rows like image",
           lambda: run(lambda z, *of: call([z[0], z[1][1:]], *of)))  # fmt: skip
    raises(ValueError, 'method: expected "auto"', lambda: run(partial(call, method="fused")))
    raises(ValueError, "workspace: expected at least", lambda: run(partial(call, workspace=64)))
    raises(ValueError, "features: expected an even number of rows",
           lambda: run(lambda z, *of: of_all("nt_xent", [z[0][1:]], *of)))  # fmt: skip
    raises(ValueError, "labels: expected with axis_name",
           lambda: ij.nt_xent_loss(z[0], jnp.arange(6 * R), scale=3.0))  # fmt: skip
    raises(TypeError, "unexpected keyword argument 'marign'",
           lambda: run(partial(call, marign=1)))  # fmt: skip
    raises(TypeError, "loss: expected a loss of infonce.jax", lambda: ij.sharded(max, MESH, "data"))
    raises(TypeError, "mesh: expected", lambda: ij.sharded(ij.clip_loss, "data", "data"))
    raises(ValueError, r"axis_name: expected one of the mesh's axes \('data',\)",
           lambda: ij.sharded(ij.clip_loss, MESH, "model"))  # fmt: skip
    raises(TypeError, "axis_name: expected as an argument of infonce.jax.sharded",
           lambda: over(*z, scale=3.0, axis_name="data"))  # fmt: skip


def not_a_number() -> None:
    """What is known only when the program runs: NaN on all devices, with the reason in the log. An
    error on one device would leave the others waiting."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infonce.jax").addHandler(handler)
    logging.getLogger("infonce.jax").propagate = False
    z, n = features("clip"), 6 * R
    clip, info_nce = (ij.sharded(f, MESH, "data") for f in (ij.clip_loss, ij.info_nce_loss))
    bad = [z[0].at[3, 2].set(jnp.nan), z[1]]
    assert np.isnan(jax.jit(lambda z: clip(*z, scale=3.0))(bad))
    assert not said
    step = jax.jit(jax.value_and_grad(lambda z, labels: info_nce(*z, labels, scale=3.0)))
    value, grads = step(z, jnp.arange(n).at[n - 1].set(n))
    assert np.isnan(value)
    assert np.isnan(grads[1]).all()
    assert said == [
        f"info_nce_loss: the loss is NaN: ValueError: labels: expected values in [0, {n}), or "
        f"negative ones for none, got {n} at position 5"
    ]
    close("the same program, with labels in range", step(z, jnp.arange(n))[0],
          one("info_nce", z, {"scale": 3.0}, {}))  # fmt: skip
    del said[:]
    step = jax.jit(lambda z, s: clip(*z, scale=s))
    assert np.isnan(step(z, -1.0))
    assert len(said) == R
    assert "scale: expected" in said[0]
    del said[:]
    views = ij.sharded(ij.nt_xent_loss, MESH, "data")
    assert np.isnan(jax.jit(lambda z, y: views(z, y, scale=3.0))(z[0], (jnp.arange(n) + 1) % n))
    assert any("labels: expected two rows that are each other's label" in text for text in said)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for case in sys.argv[1:]:
        name, *arguments = case.split(":")
        start = time.time()
        globals()[name](*arguments)
        print(f"{case}: {time.time() - start:.1f} s", flush=True)
