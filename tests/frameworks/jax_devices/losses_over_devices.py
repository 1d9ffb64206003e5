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
    main,
    make_guide,
    make_labels,
    mapped,
    one,
    raises,
    unit,
    whole_loss,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference_problems import FEATURES, LOSSES, call_of, drawn_problem

import infonce.jax as ij
from infonce import reference, spec

# --- all losses and options -----------------------------------------------------------------------


def options(seeds: str) -> None:
    """Drawn options, against the specification of all rows."""
    for seed in range(int(seeds)):
        for name in LOSSES:
            drawn(name, seed)
        distilled(seed)


def with_own(problem: Any, rng: np.random.Generator) -> Any:
    """The problem with negatives of each row alone, of which every row has one."""
    rows, width = problem.features[0].shape
    mask = rng.random((rows, 3)) < 0.6
    mask[:, 0] = True
    own = {"own": rng.normal(size=(rows, 3, width)), "own_mask": mask}
    if rng.random() < 0.5:
        own["in_batch"] = False
    others = {k: v for k, v in problem.softmax.items() if not k.startswith(("decoupled", "guide"))}
    return problem._replace(softmax=others | own)


def expected(problem: Any, prefixes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients by the specification, of the sum over prefixes if there are any."""
    if not prefixes:
        result = problem.reference()
        return result.loss, result.grads
    loss, grads = 0.0, {}
    for d, weight in zip(*prefixes.values(), strict=True):
        part = problem._replace(features=[z[:, :d] for z in problem.features]).reference()
        loss += weight * part.loss
        for field, gradient in part.grads.items():
            if gradient is None:  # of a locked tower
                grads[field] = None
                continue
            if np.ndim(gradient):
                gradient = np.pad(gradient, ((0, 0), (0, D - d)))
            grads[field] = grads.get(field, 0.0) + weight * gradient
    return loss, grads


def distilled(seed: int) -> None:
    """`distill_loss`, whose keys may be more than the queries if it has one side."""
    rng = np.random.default_rng([seed, R])
    two_sided, weighted = bool(rng.random() < 0.5), bool(rng.random() < 0.5)
    rows = R * int(rng.integers(1, 4))
    columns = rows if two_sided else rows + R
    z = [rng.normal(size=(n, D)) for n in (rows, columns)]
    teacher = [rng.normal(size=(n, 3)) for n in (rows, columns)]
    options = {"two_sided": two_sided, "normalize": bool(rng.random() < 0.5)}
    by_row = dict(zip(("teacher_query", "teacher_key"), teacher, strict=True))
    weights = rng.uniform(0.0, 2.0, rows) if weighted else np.ones(rows)
    by_row |= {"weights": weights} if weighted else {}
    numbers = {"scale": rng.uniform(0.5, 8.0)}
    teacher_scale = float(rng.uniform(0.5, 8.0))
    loss = partial(whole_loss, "distill", teacher_temperature=1 / teacher_scale, **options)
    step = mapped(loss, inside=bool(seed % 2))
    if seed % 3 == 2:
        over = partial(ij.sharded(ij.distill_loss, MESH, "data"), teacher_scale=teacher_scale)
        step = jax.jit(jax.value_and_grad(lambda z, n, by: over(*z, **n, **by, **options), (0, 1)))
    got, (grads, number_gradients) = step(*jax.tree.map(jnp.asarray, (z, numbers, by_row)))
    want = reference.distill(*z, *teacher, **numbers, teacher_scale=teacher_scale,
                             weights=weights / weights.sum(), **options)  # fmt: skip
    what = f"distill, seed {seed}, {options}, {list(by_row)}"
    close(what, got, want.loss)
    # relative to the terms p and p^T of a gradient, which cancel: a gradient with p^T = 0
    term = (
        numbers["scale"] * (weights / weights.sum()).max() * max(np.abs(side).max() for side in z)
    )
    for name, gradient in zip(("query", "key"), grads, strict=True):
        close(f"{what}: d {name}", *(np.append(g, term) for g in (gradient, want.grads[name])))
    # relative to 1, for terms of the size of products cancel
    slopes = number_gradients["scale"], want.grads["scale"]
    close(f"{what}: d scale", *(np.append(slope, 1.0) for slope in slopes))


def drawn(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, R, LOSSES.index(name)])
    reduction = ("mean", "mean", "sum", "none")[rng.integers(4)]
    rows = R * int(rng.integers(1, 4)) * (1 + (name == "nt_xent" and R % 2))
    columns = rows + R * int(rng.integers(-1, 2)) * (name == "info_nce" and rows > R)
    drawn = drawn_problem(name, rng, rows, columns, D)
    if name == "info_nce" and rng.random() < 0.5:
        drawn = with_own(drawn, rng)
    problem, options = call_of(drawn, reduction)
    numbers = {"scale": jnp.asarray(options.pop("scale"))}
    if name == "siglip":
        numbers["bias"] = jnp.asarray(problem.bias)
    arrays = ("labels", "guide", "own", *spec.INTEGER_OPTIONS, *spec.ARRAY_OPTIONS)
    by_row = {k: options.pop(k) for k in arrays if options.get(k) is not None}
    options = {k: v for k, v in options.items() if v is not None} | {"reduction": reduction}
    upstream = np.ones(rows)
    if reduction == "none":
        upstream = rng.uniform(-1.0, 1.0, rows)
        problem = problem._replace(weights=problem.weights * upstream)
    z, order = [jnp.asarray(side) for side in problem.features], np.arange(rows)
    own = {"own": jnp.asarray(by_row.pop("own"))} if "own" in by_row else {}
    prefixes = {}
    if not own and "dims" not in spec.LOSSES[name].refused and rng.random() < 0.3:
        prefixes = {"dims": (2, D), "dim_weights": (0.5, 1.0)}
        options |= prefixes
    way = int(rng.integers(5))  # the last one: `sharded`
    loss = partial(whole_loss, name, **options)
    if way == 4:
        over = ij.sharded(getattr(ij, f"{name}_loss"), MESH, "data")
        loss = lambda z, numbers, by_row: over(*z, **numbers, **by_row, **options)  # noqa: E731
    elif name == "nt_xent" and rows % (2 * R) == 0 and rng.random() < 0.5:
        order = order.reshape(2, R, -1).swapaxes(0, 1).ravel()  # both views on one device
        z, by_row, upstream = jax.tree.map(lambda v: v[order], (z, by_row, upstream))
    elif name == "nt_xent":
        by_row |= make_labels(name, rows)
    still = FEATURES[name][rng.integers(2) :][:1] if rng.random() < 0.5 else ("scale",)

    def objective(z: Any, numbers: Any, both: Any) -> Any:
        by_row, upstream = both
        named = dict(zip((*FEATURES[name], *own), z, strict=True)) | numbers
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
    z += own.values()
    got, (grads, number_gradients) = step(z, numbers, (by_row, jnp.asarray(upstream)))
    loss_wanted, grads_wanted = expected(problem, prefixes)
    what = f"{name}, seed {seed}, {options}, {list(by_row)}, way {way}, without d {still}"
    close(what, got, loss_wanted)
    by_name = zip((*FEATURES[name], *own), grads, strict=True)
    for field, gradient in [*by_name, *number_gradients.items()]:
        wanted = grads_wanted[field]
        if field in still or wanted is None:
            wanted = np.zeros(gradient.shape)
        elif gradient.ndim:
            wanted = wanted[order] if name == "nt_xent" else wanted
        close(f"{what}: d {field}", gradient, wanted, 1e-12 if gradient.ndim else 1e-11)


def metrics() -> None:
    """Compare the metrics of each device's rows, which count the keys of all devices."""
    fields = "row_loss", "column_loss", "row_rank", "column_rank", "positive", "hardest_negative"
    for name in ("clip", "lit", "info_nce", "nt_xent"):
        z, numbers = features(name), {"scale": SCALE}
        want = one(name, z, numbers, {}, metrics=True)
        over = ij.sharded(getattr(ij, f"{name}_loss"), MESH, "data")

        @jax.jit
        def run(z: Any, over: Any = over) -> Any:
            def loss(z: Any) -> Any:
                value, values = over(*z, scale=SCALE, metrics=True)
                return value, [getattr(values, field) for field in fields]

            return jax.value_and_grad(loss, has_aux=True)(z)

        (value, metrics), grads = run(z)
        close(f"{name}: loss", value, want[0])
        wanted = [getattr(want[1], field) for field in fields]
        assert [v is None for v in metrics] == [v is None for v in wanted]
        close(f"{name}: metrics", metrics, wanted)
        close(f"{name}: grads", grads, jax.grad(lambda z: one(name, z, numbers, {}))(z))  # noqa: B023


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
    over = ij.sharded(ij.info_nce_loss, MESH, "data")
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda own: over(*z, own=own, scale=SCALE.astype(np.float64), **by_row))
    )
    close("a table of all devices", value_and_grad(own), (want.loss, want.grads["own"]))


def single_precision() -> None:
    """Compare 32-bit and 16-bit features with ids of 64 bits at a scale of 100, without
    jax_enable_x64."""
    jax.config.update("jax_enable_x64", False)
    hashes = (np.arange(6 * R) % 7 << 40) + 5  # without their upper halves, all the same
    for name, dtype, tolerance in (
        ("clip", "float32", 1e-5), ("nt_xent", "float32", 1e-5), ("info_nce", "bfloat16", 2e-2),
        ("clip", "float16", 2e-3), ("siglip", "float32", 1e-5),
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
