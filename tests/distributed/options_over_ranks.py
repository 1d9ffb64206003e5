"""Checks of options over ranks: softmax, positives, sup_con, gte, parameters, ends of the range."""

import itertools
from typing import Any

import numpy as np
from host_device import room
from infonce.distributed import cost
from infonce.kernels import problem as problems
from ranks import COMM, RANK, SIZE, compute_on_device, follow, shards
from reference_problems import FEATURES, Problem, call_of, drawn_problem

import infonce
from infonce import distributed, reference, spec
from infonce.checks import call as checks

OF_TWO_RANKS = SIZE == 4  # hosts: see `ranks.main`
NAMES = ("info_nce", "nt_xent", "clip", "lit", "sup_con", "gte", "siglip")


def near(got: Any, want: Any, what: str, terms: float = 1.0) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12 * terms, err_msg=what)


def make_problem(
    name: str, rng: np.random.Generator, sizes: tuple[int, int] | None = None
) -> Problem:
    """Some of the options, drawn one by one; few rows, so that some ranks have none."""
    rows, width = sizes or (int(rng.integers(1, 18)), int(rng.integers(1, 5)))
    rows *= 1 + (name == "nt_xent" and sizes is None)
    columns = rows
    if name in ("info_nce", "lit", "siglip") and sizes is None and rng.random() < 0.7:
        columns += int(rng.integers(0, 9))
    return drawn_problem(name, rng, rows, columns, width)


def placed(features: Any, place: str) -> Any:
    """The features on the host, or on this rank's GPU."""
    if place != "gpu":
        return features
    import cupy

    cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy.asarray(features)


def offloaded(place: str) -> dict[str, Any]:
    """Options of calls whose place is "offload to host" or "offload to gpu"."""
    if not place.startswith("offload to "):
        return {}
    compute_on_device(place.removeprefix("offload to "))
    return {"offload": True}


def on_host(out: Any) -> Any:
    """A result with NumPy's arrays."""
    if isinstance(out, infonce.LossAndGrad):
        lse, grads = out.lse, type(out.grads)(*map(on_host, out.grads))
        lse = tuple(map(on_host, lse)) if isinstance(lse, tuple) else on_host(lse)
        return infonce.LossAndGrad(on_host(out.loss), grads, lse)
    return out.get() if hasattr(out, "get") else out


def compare(case: tuple[str, int, str, dict[str, Any], tuple[int, int] | None]) -> None:
    """One loss over the ranks against the specification of all rows."""
    name, seed, place, spread, sizes = case
    rng = np.random.default_rng([seed, SIZE, NAMES.index(name)])
    reduction = ("mean", "mean", "sum", "none")[rng.integers(4)]
    problem, options = call_of(make_problem(name, rng, sizes), reduction)
    rows, columns = len(problem.features[0]), len(problem.features[-1])
    seed = seed if sizes is None else 5  # of the shards

    # the order in which ranks hold rows, and this rank's
    parts = [
        shards(rows, seed)[RANK],
        shards(columns, seed + (rows != columns or name == "info_nce"))[RANK],
    ]
    mine: list[Any] = [np.arange(rows)[parts[0]], np.arange(columns)[parts[1]]]
    options = dict(options, reduction=reduction, timeout=60, **spread)
    if name == "siglip":
        options["bias"] = problem.bias
    if name == "nt_xent":
        half = rows // 2
        views = [
            np.r_[r.start : r.stop, half + r.start : half + r.stop] for r in shards(half, seed)
        ]
        order = np.concatenate(views).astype(int)
        mine = [views[RANK].astype(int)] * 2
        if seed % 2:
            order = rng.permutation(rows)
            mine = [order[shards(rows, seed)[RANK]]] * 2
            options["labels"] = np.argsort(order)[(order + half) % rows]
            options["labels"] = options["labels"][shards(rows, seed)[RANK]]
    elif "labels" in options:
        options["labels"] = options["labels"][mine[0]]
    for side in spec.INTEGER_OPTIONS:
        if isinstance(options[side], tuple):
            options[side] = tuple(z[own] for z, own in zip(options[side], mine, strict=True))
        elif options[side] is not None:
            options[side] = options[side][mine[0]]
    for option, own in (
        ("weights", mine[0]), ("label_weights", mine[0]), ("key_bias", mine[1])
    ):  # fmt: skip
        if option in options:
            options[option] = options[option][own]
    if "guide" in options:
        sides = options["guide"] if isinstance(options["guide"], tuple) else (options["guide"],)
        sides = tuple(placed(z[own], place) for z, own in zip(sides, mine, strict=False))
        options["guide"] = sides if len(sides) > 1 else sides[0]
    with_grad = dict(options)
    if reduction == "none":
        grad_out = rng.uniform(-1.0, 1.0, rows)
        problem = problem._replace(weights=problem.weights * grad_out)
        with_grad["grad_out"] = grad_out[mine[0]]
    local = [placed(z[own], place) for z, own in zip(problem.features, mine, strict=False)]

    def call(end: str, **options: Any) -> Any:
        return on_host(getattr(distributed, f"{name}_loss{end}")(*local, **options))

    want = problem.reference()
    got, again = (call("_and_grad", **with_grad) for _ in range(2))
    loss = want.loss
    if reduction == "none":
        loss = np.abs(want.losses[mine[0]])
        loss = (problem.weights * want.losses / np.where(grad_out == 0, 1.0, grad_out))[mine[0]]
    near(got.loss, loss, "loss")
    near(call("", **options), loss, "loss alone")
    alone = call("_and_grad", wrt="scale", **with_grad)
    near(alone.grads.scale, want.grads["scale"], "d scale alone")
    for i, (field, gradient) in enumerate(want.grads.items()):
        if gradient is None:
            continue
        g, terms = getattr(got.grads, field), 1.0
        if problem.normalize and np.ndim(gradient):  # the part along a row cancels
            terms = max(1.0, problem.scale / np.linalg.norm(problem.features[i], axis=1).min())
        near(g, gradient[mine[i]] if np.ndim(gradient) else gradient, f"d {field}", terms)
        assert np.asarray(g).tobytes() == np.asarray(getattr(again.grads, field)).tobytes(), field
    lse = want.lse if isinstance(want.lse, tuple) else (want.lse,) * (want.lse is not None)
    for side_lse, own, have in zip(lse, mine, np.atleast_2d(got.lse), strict=False):
        near(have, side_lse[own], "lse")


def equal(examples: str, place: str) -> None:
    """Compare drawn problems by each exchange, with both ways to the scale's gradient."""
    ways: list[dict[str, Any]] = [
        {"exchange": "ring"}, {"exchange": "ring", "workspace": 6000}, {"exchange": "gather"},
    ]  # fmt: skip
    if OF_TWO_RANKS:
        ways.append({"exchange": "hierarchical"})
    if options := offloaded(place):
        ways[1]["workspace"] = room(4 if place.endswith("host") else 64, 4, 18, 18)
        ways = [{**way, **options} for way in ways]
    few = problems.FEW_LOGITS
    for seed in range(int(examples)):
        problems.FEW_LOGITS = 0 if seed // len(ways) % 2 else few
        checks._cache.clear()
        for name in NAMES:
            case = name, seed, place, ways[seed % len(ways)], None
            troubles = follow(compare, case)
            assert not any(troubles), (case, troubles)
    problems.FEW_LOGITS = few


def in_turn(examples: str) -> None:
    """Calls with as many rows, one after another: nothing but what is alike is kept."""
    rng = np.random.default_rng(3)
    for _ in range(int(examples)):
        case = NAMES[rng.integers(len(NAMES))], int(rng.integers(4)), "host", {}, (12, 3)
        troubles = follow(compare, case)
        assert not any(troubles), (case, troubles)


def cases() -> None:
    """Compare cases that draws seldom meet."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 20, 3))
    rows = shards(20, 3)[RANK]
    # a rank's weights are zeros; gradients that a framework averages
    weights = np.where(np.isin(np.arange(20), np.arange(20)[shards(20, 3)[0]]), 0.0, 0.5)
    if not weights.any():
        weights[:] = 1.0
    options: dict[str, Any] = {"scale": 2.0, "label_smoothing": 0.2}
    want = infonce.clip_loss_and_grad(x, y, weights=weights, **options)
    got = distributed.clip_loss_and_grad(
        x[rows], y[rows], weights=weights[rows], gradient_scale="ddp", **options
    )
    near(got.loss, want.loss, "loss")
    near(got.grads.scale, want.grads.scale, "d scale")
    near(got.grads.text, SIZE * want.grads.text[rows], "d text")

    # hashes of 64 bits as classes and ids, those of rows and of columns in two dtypes
    hashes = (np.arange(20) % 7).astype(np.uint64) * np.uint64(2**61 + 1)
    want = infonce.sup_con_loss_and_grad(x, np.arange(20) % 7, scale=2.0)
    got = distributed.sup_con_loss_and_grad(x[rows], hashes[rows], scale=2.0)
    near(got.loss, want.loss, "loss of hashed classes")
    near(got.grads.features, want.grads.features[rows], "d features of hashed classes")
    ids = hashes, hashes.astype(np.int64)  # the last have negative ones, which are no hashes
    want = infonce.info_nce_loss(
        x,
        y,
        np.arange(20),
        scale=2.0,
        ids=(np.arange(20) % 7, np.arange(20) % 7 + 9 * (ids[1] < 0)),
    )
    got = distributed.info_nce_loss(
        x[rows], y[rows], np.arange(20)[rows], scale=2.0, ids=tuple(side[rows] for side in ids)
    )
    near(got, want, "loss of ids in two dtypes")

    own_negatives()
    tokens()
    # prefixes of the features
    for name in ("clip", "siglip"):
        holds = tuple if RANK % 2 else iter  # on other ranks, numbers may be in something else
        prefixes: dict[str, Any] = {"scale": 2.0, "dims": (1, 3), "dim_weights": (0.5, 2.0)}
        want = getattr(infonce, f"{name}_loss_and_grad")(x, y, **prefixes)
        held = {"dims": holds((1, 3)), "dim_weights": holds((0.5, 2.0))}
        got = getattr(distributed, f"{name}_loss_and_grad")(x[rows], y[rows], **prefixes | held)
        near(got.loss, want.loss, "loss of prefixes")
        near(got.grads.text, want.grads.text[rows], "d text of prefixes")
        near(got.grads.scale, want.grads.scale, "d scale of prefixes")
        # gradients that underflow in float16, the dtype of features; other ranks may ask for others
        narrow = x.astype(np.float16), y.astype(np.float16)
        prefixes |= {"grad_out": 2.0**-30, "precision": "fp64"}
        wide = [z.astype(np.float64) for z in narrow]
        want = getattr(infonce, f"{name}_loss_and_grad")(*wide, **prefixes)
        mine = [z[rows] for z in narrow]
        asked = np.float64 if RANK % 2 else np.float32
        got = getattr(distributed, f"{name}_loss_and_grad")(
            *mine, **prefixes, out=[np.full(z.shape, np.nan, asked) for z in mine]
        )
        rounding = 2.0**-22 if asked is np.float32 else 1e-12
        for gradient, exact in zip(got.grads[:2], want.grads[:2], strict=True):
            assert gradient.dtype == asked
            error = np.abs(gradient - exact[rows]).max(initial=0.0)
            assert error <= rounding * np.abs(exact).max(), "gradients of prefixes in float32"

    # a feature that is not finite, in sums over all keys
    x[17, 1] = np.nan
    for name in ("clip", "gte"):
        loss = getattr(distributed, f"{name}_loss")
        assert np.isnan(loss(x[rows], y[rows], scale=2.0, label_smoothing=0.2))
    assert np.isnan(distributed.sup_con_loss(x[rows], np.arange(20)[rows] // 5, scale=2.0))


def own_negatives(place: str = "host") -> None:
    """Negatives of rows alone."""
    rng, offload = np.random.default_rng(1), offloaded(place)
    x, y, own = (rng.standard_normal(shape) for shape in ((20, 3), (20, 3), (20, 2, 3)))
    rows, mask = shards(20, 3)[RANK], rng.random((20, 2)) < 0.8
    for more in ({}, {"in_batch": False}, {"false_negative_margin": 0.3, "normalize": True}):
        args, negatives = (x, y, rng.permutation(20)), {"own": own, "own_mask": mask}
        mine = [placed(z[rows], place) for z in args]
        kept = {name: placed(z[rows], place) for name, z in negatives.items()}
        want = infonce.info_nce_loss_and_grad(*args, scale=2.0, **negatives, **more)
        got = on_host(
            distributed.info_nce_loss_and_grad(*mine, scale=2.0, **kept, **more, **offload)
        )
        near(got.loss, want.loss, "loss of own negatives")
        near(got.grads.scale, want.grads.scale, "d scale of own negatives")
        for name in ("query", "key", "own"):
            near(getattr(got.grads, name), getattr(want.grads, name)[rows], f"d {name}")

    # one table on all ranks; then the rows of it in another order on each rank, and further rows
    table, args = rng.standard_normal((7, 3)), (x, y)
    kept = {"own_indices": rng.integers(-1, 7, (20, 4)), "own_bias": rng.standard_normal((20, 4))}
    want = infonce.info_nce_loss_and_grad(*args, scale=2.0, own=table, **kept)
    order = np.random.default_rng(RANK).permutation(7)
    moved = np.concatenate([table[order], np.ones((RANK, 3))])
    for mine, places in ((table, np.arange(7)), (moved, np.argsort(order))):
        local = {name: array[rows] for name, array in kept.items()}
        local["own_indices"] = np.append(places, -1)[local["own_indices"]]
        got = on_host(
            distributed.info_nce_loss_and_grad(
                *(placed(z[rows], place) for z in args), scale=2.0, own=placed(mine, place),
                **{name: placed(array, place) for name, array in local.items()}, **offload,
            )
        )  # fmt: skip
        near(got.loss, want.loss, "loss of a table")
        near(got.grads.query, want.grads.query[rows], "d query beside a table")
        near(sum(COMM.allgather(got.grads.own[places])), want.grads.own, "d table")


def tokens(place: str = "host") -> None:
    """MaxSim scores: tokens and their masks travel as keys do."""
    rng = np.random.default_rng(4)
    query, key = rng.standard_normal((20, 4, 6)), rng.standard_normal((20, 5, 6))
    masks = {"query_mask": rng.random((20, 4)) < 0.7, "key_mask": rng.random((20, 5)) < 0.7}
    masks["key_mask"][:, 2] = True
    rows, names = shards(20, 3)[RANK], rng.integers(0, 6, 20)
    options: tuple[dict[str, Any], ...] = (
        {}, {"normalize": True, "ids": names}, {"label_smoothing": 0.1},
        {"token_mean": True, "false_negative_margin": 0.2},
    )  # fmt: skip
    for loss, exchange in itertools.product(
        ("clip", "info_nce", "lit", "siglip"), ("gather", "ring")
    ):
        for more in options:
            refused = spec.LOSSES[loss].refused
            more = {name: value for name, value in more.items() if name not in refused}
            shared = {name: z[rows] if name == "ids" else z for name, z in more.items()}
            labels = [np.arange(20)] * (loss == "info_nce")
            want = getattr(infonce, f"{loss}_loss_and_grad")(
                query, key, *labels, scale=0.7, **masks, **more
            )
            mine = [placed(z[rows], place) for z in (query, key, *labels)]
            kept = {name: placed(mask[rows], place) for name, mask in masks.items()}
            got = on_host(getattr(distributed, f"{loss}_loss_and_grad")(
                *mine, scale=0.7, exchange=exchange, **kept, **shared
            ))  # fmt: skip
            near(got.loss, want.loss, f"{loss} over tokens by {exchange}")
            for name, gradient in want.grads._asdict().items():
                if gradient is not None:
                    wanted = gradient[rows] if np.ndim(gradient) else gradient
                    near(getattr(got.grads, name), wanted, f"d {name} over tokens by {exchange}")


def limits(place: str) -> None:
    """Rows that differ by rounding, so that digits beyond float32 decide which pairs take part. The
    slopes of a row add up to 0 if those in its sum are those in its gradient."""
    cost.LEAST_VISIT_BYTES = 1  # sums would go home in parts
    rng = np.random.default_rng(2)
    z = (rng.standard_normal(64) / 8 + 6e-8 * rng.standard_normal((2, 150, 64))).astype(np.float32)
    rows = shards(150, 4)[RANK]
    ways = [("ring", None), ("ring", 40_000 if place == "host" else 2**20), ("gather", None)]
    ways += [("hierarchical", None)] * OF_TWO_RANKS
    offload = offloaded(place)
    losses = ("clip", "nt_xent") if offload else ("info_nce", "clip", "nt_xent", "gte")
    for name, (exchange, workspace) in itertools.product(losses, ways):
        options = dict(offload)
        if name == "nt_xent":
            options["labels"] = ((np.arange(150) + 75) % 150)[rows]
        got = on_host(getattr(distributed, f"{name}_loss_and_grad")(
            *placed(z[: len(FEATURES[name]), rows], place), scale=1.0, reduction="sum",
            exchange=exchange, workspace=workspace, false_negative_margin=0.0, timeout=60,
            **options,
        ))  # fmt: skip
        lse = np.concatenate(COMM.allgather(np.atleast_2d(got.lse).ravel()))
        assert len(np.unique(lse.round(2))) > 20  # rows have different numbers of keys
        total = sum(sum(g.sum(axis=0) for g in COMM.allgather(grad)) for grad in got.grads[:-1])
        assert np.abs(total).max() < 1e-3, (name, exchange, workspace)


def distilled(place: str = "host") -> None:
    """Rows of students and teachers are spread alike and unevenly; ranks may have none."""
    offload = offloaded(place)
    rng = np.random.default_rng(4)
    scales: dict[str, Any] = {"scale": 2.0, "teacher_scale": 3.0}
    few = problems.FEW_LOGITS
    for two_sided, (exchange, workspace), normalize in itertools.product(
        (True, False), (("ring", None), ("ring", 9000), ("gather", None)), (True, False)
    ):
        n = 21 if two_sided else 30
        all_features = [rng.standard_normal(shape) for shape in ((21, 4), (n, 4), (21, 3), (n, 3))]
        mine = [shards(21, n + normalize)[RANK], shards(n, n + normalize)[RANK]] * 2
        options = {**scales, "two_sided": two_sided, "normalize": normalize}
        weights = rng.random(21)
        want = reference.distill(*all_features, weights=weights / weights.sum(), **options)
        rows = [z[own] for z, own in zip(all_features, mine, strict=True)]
        options |= {"exchange": exchange, "workspace": workspace, "weights": weights[mine[0]]}
        options |= {"gradient_scale": "ddp", "timeout": 60, **offload}
        problems.FEW_LOGITS = 0 if normalize else few  # the scale's gradient: from those of queries
        checks._cache.clear()
        got = distributed.distill_loss_and_grad(*rows, **options)
        near(got.loss, want.loss, "loss")
        near(distributed.distill_loss(*rows, **options), want.loss, "loss alone")
        near(got.grads.scale, want.grads["scale"], "d scale")
        near(got.grads.query, SIZE * want.grads["query"][mine[0]], "d query")
        near(got.grads.key, SIZE * want.grads["key"][mine[1]], "d key")
        self_taught = distributed.distill_loss_and_grad(
            *rows[:2] * 2, scale=2.0, two_sided=two_sided, **offload
        )
        # The teacher is the student
        assert not any(gradient.any() for gradient in self_taught.grads)
        del options["weights"]
        loss = distributed.distill_loss(*rows, reduction="none", **options)
        near(loss, want.losses[mine[0]], "losses")
    problems.FEW_LOGITS = few


def not_finite() -> None:
    """A feature that is not finite spoils the rows that it does in one process, also where all it
    makes is logits of -inf, which look like excluded pairs."""
    n, d = 24, 6
    rows = shards(n, 7)[RANK]

    def check(case: tuple[str, int]) -> None:
        loss, at = case
        rng = np.random.default_rng(at)
        all_features = [rng.standard_normal((n, d)) for _ in range(1 if loss == "nt_xent" else 2)]
        for z in all_features:
            z[:, 2] = -1.0
        all_features[-1][at, 2] = np.inf
        own: dict[str, Any] = {"scale": 2.0, "reduction": "none"}
        want = getattr(infonce, f"{loss}_loss")(*all_features, **own)
        if loss == "nt_xent":
            own["labels"] = ((np.arange(n) + n // 2) % n)[rows]
        got = getattr(distributed, f"{loss}_loss")(*(z[rows] for z in all_features), **own)
        assert np.isnan(want).any()
        assert np.array_equal(np.isnan(got), np.isnan(want[rows])), case

    losses = ("info_nce", "nt_xent", "clip", "lit", "siglip")
    for case in itertools.product(losses, range(0, n, 5)):
        troubles = follow(check, case)
        assert not any(troubles), troubles


def ends() -> None:
    """Logits and upstream gradients at the ends of their range: as one process has it, silently."""
    rows = shards(12, 5)[RANK]
    for dtype in ("float32", "float64"):
        one = (np.eye(4)[np.arange(12) % 4]).astype(dtype)  # products are exact, many are ties
        for loss in ("info_nce", "clip", "lit", "siglip"):
            for size in (2.0**-10, 1.0, 2.0**20, 2.0**60):
                z = [one * np.asarray(size, dtype), one[::-1] * np.asarray(size, dtype)]
                local = [a[rows] for a in z]
                for scale in (1e-9, 1.0, 1.5e7):
                    want = getattr(infonce, f"{loss}_loss_and_grad")(*z, scale=scale)
                    got = getattr(distributed, f"{loss}_loss_and_grad")(
                        *local, scale=scale, timeout=60
                    )
                    where = f"{loss} {dtype} {size} {scale}"
                    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6, err_msg=where)
                    for g, w in zip(got.grads[:2], want.grads[:2], strict=True):
                        if w is not None:
                            largest = np.abs(w).max()
                            error = np.abs(g / largest - w[rows] / largest).max(initial=0)
                            assert error <= 1e-5, where
                    getattr(distributed, f"{loss}_loss_and_grad")(
                        *local, scale=scale, grad_out=1e300, grad_dtype=np.float16, timeout=60
                    )
