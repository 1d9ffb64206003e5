"""Losses, gradients and metrics of the rows of all devices: for test_devices.py."""

from functools import partial
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
    labels_of,
    main,
    mapped,
    one,
    raises,
    whole_loss,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference_problems import FEATURES, LOSSES, call_of, drawn_problem

import infonce.jax as ij
from infonce import spec

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
    drawn = drawn_problem(name, rng, rows, columns, D)
    for option in ("guide", "guide_margin"):  # not over devices
        drawn.softmax.pop(option, None)
    problem, given = call_of(drawn, reduction)
    numbers = {"scale": jnp.asarray(given.pop("scale"))}
    if name == "siglip":
        numbers["bias"] = jnp.asarray(problem.bias)
    arrays = ("labels", *spec.NAMES, *spec.VECTORS)
    by_row = {k: given.pop(k) for k in arrays if given.get(k) is not None}
    given = {k: v for k, v in given.items() if v is not None} | {"reduction": reduction}
    upstream = np.ones(rows)
    if reduction == "none":
        upstream = rng.uniform(-1.0, 1.0, rows)
        problem = problem._replace(weights=problem.weights * upstream)
    z, order = [jnp.asarray(side) for side in problem.features], np.arange(rows)
    way = int(rng.integers(5))  # the last one: `sharded`
    loss = partial(whole_loss, name, **given)
    if way == 4:
        over = ij.sharded(getattr(ij, f"{name}_loss"), MESH, "data")
        loss = lambda z, numbers, by_row: over(*z, **numbers, **by_row, **given)  # noqa: E731
    elif name == "nt_xent" and rows % (2 * R) == 0 and rng.random() < 0.5:
        order = order.reshape(2, R, -1).swapaxes(0, 1).ravel()  # both views on one device
        z, by_row, upstream = jax.tree.map(lambda v: v[order], (z, by_row, upstream))
    elif name == "nt_xent":
        by_row |= labels_of(name, rows)
    still = FEATURES[name][rng.integers(2) :][:1] if rng.random() < 0.5 else ("scale",)

    def objective(z: Any, numbers: Any, both: Any) -> Any:
        by_row, upstream = both
        named = dict(zip(FEATURES[name], z, strict=True)) | numbers
        named |= {k: jax.lax.stop_gradient(named[k]) for k in still}
        z, numbers = [named.pop(k) for k in FEATURES[name]], named
        losses = loss(z, numbers, by_row)
        if reduction != "none":
            return losses
        total = (losses * upstream).sum()
        return total if way == 4 else jax.lax.psum(total, "data")

    check, inside = ((True, True), (True, False), (False, False), (True, True), (True, False))[way]
    step = mapped(objective, check, inside)
    if way == 4:
        step = jax.jit(jax.value_and_grad(objective, (0, 1)))
    got, (grads, number_gradients) = step(z, numbers, (by_row, jnp.asarray(upstream)))
    want = problem.reference()
    what = f"{name}, seed {seed}, {given}, {list(by_row)}, way {way}, without d {still}"
    close(what, got, want.loss)
    for field, gradient in [*zip(FEATURES[name], grads, strict=True), *number_gradients.items()]:
        wanted = want.grads[field]
        if field in still or wanted is None:
            wanted = np.zeros(gradient.shape)
        elif gradient.ndim:
            wanted = wanted[order] if name == "nt_xent" else wanted
        close(f"{what}: d {field}", gradient, wanted, 1e-12 if gradient.ndim else 1e-11)


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
            value, (grads, number_gradients) = jax.value_and_grad(
                partial(of, name, by_row={}), (0, 1)
            )(z, numbers)
            return value, (grads, jax.lax.pmean(number_gradients, "data"))

        over = partial(jax.shard_map, mesh=MESH, in_specs=(ROWS, SAME), check_vma=False,
                       out_specs=(SAME, (ROWS, SAME)))  # fmt: skip
        ours, theirs = (
            (jax.jit(over(partial(both, of=of)))(z, numbers),
             jax.pmap(partial(both, of=of), "data", in_axes=(0, None))(shards, numbers))
            for of in (whole_loss, formula)
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

    def trained(of: Any, z: Any) -> Any:
        def loss(z: Any) -> Any:
            return of("clip", [jnp.tanh(v) for v in z], numbers, {})

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


if __name__ == "__main__":
    main(globals())
