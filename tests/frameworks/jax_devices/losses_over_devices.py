"""Ways to differentiate losses of the rows of all devices: for test_devices.py."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from devices import (
    FEATURES,
    MESH,
    ROWS,
    SAME,
    SCALE,
    D,
    R,
    close,
    features,
    main,
    make_guide,
    mapped,
    one,
    raises,
    unit,
    whole_loss,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import infonce.jax as ij
from infonce import reference

# --- ways to differentiate, transforms ------------------------------------------------------------


def formula(name: str, z: list[Any], numbers: Any, by_row: Any) -> Any:
    """clip with a guide, and info_nce with own negatives, in JAX: logits of own rows, and of own
    columns."""
    i, m = jax.lax.axis_index("data"), len(z[0])
    own = (i * m + jnp.arange(m))[:, None]

    def products(query: Any, key: Any) -> Any:
        return query @ jax.lax.all_gather(key, "data", tiled=True).T

    def direction(query: Any, key: Any, *guide: Any) -> Any:
        x = numbers["scale"] * products(query, key)
        positive = jnp.take_along_axis(x, own, 1)
        if guide:
            seen = products(*guide)
            x = jnp.where(seen > jnp.take_along_axis(seen, own, 1), -jnp.inf, x)
        if "own" in by_row:
            mine = numbers["scale"] * (query[:, None] * by_row["own"]).sum(2)
            x = jnp.concatenate([x, mine], axis=1)
        return jax.nn.logsumexp(x, axis=1) - positive[:, 0]

    losses = direction(*z, *by_row.get("guide", ()))
    if name == "clip":
        losses = (losses + direction(*z[::-1], *by_row["guide"][::-1])) / 2
    return jax.lax.psum(losses.sum(), "data") / (m * R)


def modes() -> None:
    """Compare unchecked shard_map, pmap and vmap, in which a device has R times its part of the
    gradient."""
    for name in ("clip", "info_nce"):
        z, numbers = features(name), {"scale": SCALE.astype(np.float64)}
        rng = np.random.default_rng(0)
        by_row = {"own": unit(rng, len(z[0]), 3, D)}
        if name == "clip":
            by_row = {"guide": (make_guide(rng, len(z[0])), make_guide(rng, len(z[0])))}
        sharded = jax.tree.map(lambda v: v.reshape(R, -1, *v.shape[1:]), (z, by_row))
        shards = sharded[0]

        def both(z: Any, numbers: Any, by_row: Any, loss: Any = None, name: str = name) -> Any:
            value, (grads, number_gradients) = jax.value_and_grad(partial(loss, name), (0, 1))(
                z, numbers, by_row
            )
            return value, (grads, jax.lax.pmean(number_gradients, "data"))

        over = partial(jax.shard_map, mesh=MESH, in_specs=(ROWS, SAME, ROWS), check_vma=False,
                       out_specs=(SAME, (ROWS, SAME)))  # fmt: skip
        ours, theirs = (
            (jax.jit(over(partial(both, loss=function)))(z, numbers, by_row),
             jax.pmap(partial(both, loss=function), "data", in_axes=(0, None, 0))(
                 shards, numbers, sharded[1]))
            for function in (whole_loss, formula)
        )  # fmt: skip
        close(f"{name}: unchecked, and pmap, as the formula", ours, theirs)

        def step(z: Any, scale: Any, name: str = name) -> Any:
            def loss(weights: Any, scale: Any) -> Any:
                return whole_loss(name, [v @ weights for v in z], {"scale": scale}, {})

            return jax.lax.pmean(jax.grad(loss, (0, 1))(jnp.eye(D), scale), "data")

        got = jax.pmap(step, "data", in_axes=(0, None))(shards, numbers["scale"])
        want = jax.grad(
            lambda w, s: one(name, [v @ w for v in z], {"scale": s}, {}), (0, 1)  # noqa: B023
        )(jnp.eye(D), numbers["scale"])  # fmt: skip
        close(f"{name}: pmean of parameters' gradients", [v[0] for v in got], want)
        got = jax.vmap(partial(whole_loss, name), (0, None, None), axis_name="data")(
            shards, numbers, {}
        )
        close(f"{name}: vmap with an axis name", got[0], one(name, z, numbers, {}))


def transforms() -> None:
    """vmap, scan, checkpoint, donation; axes of a mesh of two; second derivatives."""
    numbers, z = {"scale": SCALE.astype(np.float64)}, features("clip")
    stacked = [jnp.stack([v, 2 * v[::-1], v * v]) for v in z]
    f = jax.value_and_grad(partial(whole_loss, "clip"), (0, 1))
    rows = P(None, "data")
    run = jax.shard_map(jax.vmap(f, (0, None, None)), mesh=MESH, in_specs=(rows, SAME, SAME),
                        out_specs=(SAME, (rows, SAME)))  # fmt: skip
    alone = jax.value_and_grad(partial(one, "clip"), (0, 1))
    want = jax.vmap(alone, (0, None, None))(stacked, numbers, {})
    close("vmap", jax.jit(run)(stacked, numbers, {}), want)

    def trained(function: Any, z: Any) -> Any:
        def loss(z: Any) -> Any:
            return function("clip", [jnp.tanh(v) for v in z], numbers, {})

        def step(z: Any, _: Any) -> Any:
            value, grads = jax.value_and_grad(jax.checkpoint(loss))(z)
            return [a - b for a, b in zip(z, grads, strict=True)], value

        return jax.lax.scan(step, z, None, length=5)

    want = jax.jit(partial(trained, one))(z)
    run = jax.shard_map(partial(trained, whole_loss), mesh=MESH, in_specs=(ROWS,),
                        out_specs=(ROWS, SAME))  # fmt: skip
    put = [jax.device_put(v + 0, NamedSharding(MESH, ROWS)) for v in z]
    close("scan, checkpoint, donation", jax.jit(run, donate_argnums=0)(put), want)

    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("hosts", "data"))
    want = alone(z, numbers, {})
    for names in ("data", ("hosts", "data"), ("data", "hosts")):
        rows = P(names)
        f = jax.value_and_grad(partial(whole_loss, "clip", axis_name=names), (0, 1))
        run = jax.shard_map(
            f, mesh=mesh, in_specs=(rows, SAME, SAME), out_specs=(SAME, (rows, SAME))
        )
        close(f"axes {names} of a mesh of two", jax.jit(run)(z, numbers, {}), want)

    over = ij.sharded(ij.clip_loss, MESH, "data")
    close("sharded without jit", over(*z, scale=3.0), want[0])
    hessian = jax.hessian(lambda z: over(z, z, scale=3.0))
    raises(TypeError, "cannot be differentiated again", lambda: jax.jit(hessian)(z[0]))


def table() -> None:
    """One table of own negatives on all devices: its gradient is the sum over the devices."""
    rng, z = np.random.default_rng(0), features("info_nce")
    own, rows = unit(rng, 5, D), len(z[0])
    by_row = {"own_indices": rng.integers(-1, 5, (rows, 3)), "own_bias": rng.normal(size=(rows, 3))}
    want = reference.info_nce(*z, scale=float(SCALE), own=own, **by_row)
    by_row = jax.tree.map(jnp.asarray, by_row)
    numbers = {"scale": SCALE.astype(np.float64), "own": own}
    for check, inside in ((True, True), (True, False), (False, False)):
        step = mapped(partial(whole_loss, "info_nce"), check, inside)
        loss, (grads, others) = step(z, numbers, by_row)
        close("loss of a table", loss, want.loss)
        for name, gradient in [*zip(FEATURES["info_nce"], grads, strict=True), *others.items()]:
            close(f"d {name} beside a table", gradient, want.grads[name], 1e-11)


def single_precision() -> None:
    """Compare 32-bit and 16-bit features with ids of 64 bits at a scale of 100, without
    jax_enable_x64."""
    jax.config.update("jax_enable_x64", False)
    hashes = (np.arange(6 * R) % 7 << 40) + 5  # without their upper halves, all the same
    for name, dtype, tolerance in (
        ("clip", "float32", 1e-5), ("nt_xent", "float32", 1e-5), ("info_nce", "bfloat16", 2e-2)
    ):  # fmt: skip
        z = features(name, dtype=jnp.dtype(dtype))
        options = {"ids": hashes} if dtype == "float32" else {}
        alone = getattr(ij, f"{name}_loss")

        def step(loss: Any, z: Any = z, options: Any = options) -> Any:
            f = jax.value_and_grad(lambda z, s: loss(*z, scale=s, **options), (0, 1))
            return jax.jit(f)(z, jnp.float32(100.0))

        got, want = step(ij.sharded(alone, MESH, "data")), step(alone)
        assert [v.dtype for v in jax.tree.leaves(got)] == [v.dtype for v in jax.tree.leaves(want)]
        close(f"{name}, {dtype}", got, want, tolerance)
    jax.config.update("jax_enable_x64", True)


if __name__ == "__main__":
    main(globals())
