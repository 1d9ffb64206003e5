"""Checks of what the problems of tests/matrix lack: limits that rounding decides, what ranks hold
differently, rows that are not finite, ends of the range."""

import itertools
from typing import Any

import numpy as np
from infonce.distributed import cost
from ranks import COMM, RANK, SIZE, follow, on_host, shards, use_gpu
from reference_problems import FEATURES

import infonce
from infonce import distributed

OF_TWO_RANKS = SIZE == 4  # hosts: see `ranks.main`


def near(got: Any, want: Any, what: str) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=what)


def cases() -> None:
    """Ranks whose weights are zeros, integers of two dtypes, retrieval ranks, prefixes."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 20, 3))
    rows = shards(20, 3)[RANK]
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
    ids, small = (hashes, hashes.astype(np.int64)), np.arange(20) % 7
    named = small, small + 9 * (ids[1] < 0)  # negative ones are no hashes
    want = infonce.info_nce_loss(x, y, np.arange(20), scale=2.0, ids=named)
    got = distributed.info_nce_loss(
        x[rows], y[rows], np.arange(20)[rows], scale=2.0, ids=tuple(side[rows] for side in ids)
    )
    near(got, want, "loss of ids in two dtypes")

    # retrieval ranks: counts of columns come from all ranks
    ranks = infonce.clip_loss_and_grad(x, y, scale=2.0, metrics=True).metrics
    for exchange in ("ring", "gather"):
        options = {"scale": 2.0, "metrics": True, "exchange": exchange}
        found = distributed.clip_loss_and_grad(x[rows], y[rows], **options).metrics
        assert np.array_equal(found.row_rank, ranks.row_rank[rows])
        assert np.array_equal(found.column_rank, ranks.column_rank[rows]), exchange

    table()
    # prefixes in another container on other ranks; gradients that underflow in float16, the dtype
    # of features, while other ranks may ask for others
    holds, asked = (tuple, np.float64) if RANK % 2 else (iter, np.float32)
    for name in ("clip", "siglip"):
        prefixes: dict[str, Any] = {"scale": 2.0, "grad_out": 2.0**-30, "precision": "fp64"}
        narrow = [z.astype(np.float16) for z in (x, y)]
        wide = [z.astype(np.float64) for z in narrow]
        held = {"dims": (1, 3), "dim_weights": (0.5, 2.0)}
        want = getattr(infonce, f"{name}_loss_and_grad")(*wide, **prefixes, **held)
        mine = [z[rows] for z in narrow]
        got = getattr(distributed, f"{name}_loss_and_grad")(
            *mine, **prefixes, **{key: holds(value) for key, value in held.items()},
            out=[np.full(z.shape, np.nan, asked) for z in mine],
        )  # fmt: skip
        rounding = 2.0**-22 if asked is np.float32 else 1e-12
        for gradient, exact in zip(got.grads[:2], want.grads[:2], strict=True):
            assert gradient.dtype == asked
            error = np.abs(gradient - exact[rows]).max(initial=0.0)
            assert error <= rounding * np.abs(exact).max(), "gradients of prefixes"


def table(place: str = "host") -> None:
    """Own negatives whose table has its rows in another order on each rank, and further rows."""
    rng, placed = np.random.default_rng(1), use_gpu() if place == "gpu" else np.asarray
    x, y = rng.standard_normal((2, 20, 3))
    negatives, rows = rng.standard_normal((7, 3)), shards(20, 3)[RANK]
    kept = {"own_indices": rng.integers(-1, 7, (20, 4)), "own_bias": rng.standard_normal((20, 4))}
    want = infonce.info_nce_loss_and_grad(x, y, scale=2.0, own=negatives, **kept)
    order = np.random.default_rng(RANK).permutation(7)
    moved, places = np.concatenate([negatives[order], np.ones((RANK, 3))]), np.argsort(order)
    local = {name: array[rows] for name, array in kept.items()}
    local["own_indices"] = np.append(places, -1)[local["own_indices"]]
    got = on_host(
        distributed.info_nce_loss_and_grad(
            *(placed(z[rows]) for z in (x, y)), scale=2.0, own=placed(moved),
            **{name: placed(array) for name, array in local.items()},
        )
    )  # fmt: skip
    near(got.loss, want.loss, "loss of a table")
    near(got.grads.query, want.grads.query[rows], "d query beside a table")
    near(sum(COMM.allgather(got.grads.own[places])), want.grads.own, "d table")


def limits(place: str) -> None:
    """Rows that differ by rounding, so that digits beyond float32 decide which pairs take part. The
    slopes of a row add up to 0 if those in its sum are those in its gradient."""
    cost.LEAST_VISIT_BYTES = 1  # sums would go home in parts
    rng, placed = np.random.default_rng(2), use_gpu() if place == "gpu" else np.asarray
    z = (rng.standard_normal(64) / 8 + 6e-8 * rng.standard_normal((2, 150, 64))).astype(np.float32)
    rows = shards(150, 4)[RANK]
    ways = [("ring", None), ("ring", 40_000 if place == "host" else 2**20), ("gather", None)]
    ways += [("hierarchical", None)] * OF_TWO_RANKS
    losses, options = ("info_nce", "clip", "nt_xent", "gte"), dict[str, Any]()
    if place == "offload to gpu":
        use_gpu()
        losses, options = ("clip", "nt_xent"), {"offload": True}
    for name, (exchange, workspace) in itertools.product(losses, ways):
        labels = {"labels": ((np.arange(150) + 75) % 150)[rows]} if name == "nt_xent" else {}
        got = on_host(getattr(distributed, f"{name}_loss_and_grad")(
            *placed(z[: len(FEATURES[name]), rows]), scale=1.0, reduction="sum",
            exchange=exchange, workspace=workspace, false_negative_margin=0.0, timeout=60,
            **labels, **options,
        ))  # fmt: skip
        lse = np.concatenate(COMM.allgather(np.atleast_2d(got.lse).ravel()))
        assert len(np.unique(lse.round(2))) > 20  # rows have different numbers of keys
        total = sum(sum(g.sum(axis=0) for g in COMM.allgather(grad)) for grad in got.grads[:-1])
        assert np.abs(total).max() < 1e-3, (name, exchange, workspace)


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

    for case in itertools.product(("info_nce", "nt_xent", "clip", "lit", "siglip"), range(0, n, 5)):
        troubles = follow(check, case)
        assert not any(troubles), troubles
    x, y = np.random.default_rng(1).standard_normal((2, n, 3))
    x[17, 1] = np.nan  # in sums over all keys
    for name in ("clip", "gte"):
        loss = getattr(distributed, f"{name}_loss")
        assert np.isnan(loss(x[rows], y[rows], scale=2.0, label_smoothing=0.2))
    assert np.isnan(distributed.sup_con_loss(x[rows], np.arange(n)[rows] // 5, scale=2.0))


def ends() -> None:
    """Logits and upstream gradients at the ends of their range: as one process has it, silently."""
    rows = shards(12, 5)[RANK]
    for dtype, loss, size, scale in itertools.product(
        ("float32", "float64"), ("info_nce", "clip", "lit", "siglip"),
        (2.0**-10, 1.0, 2.0**20, 2.0**60), (1e-9, 1.0, 1.5e7),
    ):  # fmt: skip
        one = (np.eye(4)[np.arange(12) % 4]).astype(dtype)  # products are exact, many are ties
        z = [side * np.asarray(size, dtype) for side in (one, one[::-1])]
        want = getattr(infonce, f"{loss}_loss_and_grad")(*z, scale=scale)
        function, local = getattr(distributed, f"{loss}_loss_and_grad"), [a[rows] for a in z]
        got = function(*local, scale=scale, timeout=60)
        where = f"{loss} {dtype} {size} {scale}"
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6, err_msg=where)
        for g, w in zip(got.grads[:2], want.grads[:2], strict=True):
            if w is not None:
                largest = np.abs(w).max()
                error = np.abs(g / largest - w[rows] / largest).max(initial=0)
                assert error <= 1e-5, where
        function(*local, scale=scale, grad_out=1e300, grad_dtype=np.float16, timeout=60)
