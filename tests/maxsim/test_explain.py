"""`infonce.explain` of calls on sets of tokens, without a GPU."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.kernels.maxsim import blocks
from infonce.kernels.maxsim.division import Division, Sizes, divide, parts

import infonce


@pytest.mark.parametrize("loss", ["clip", "info_nce", "lit", "siglip"])
@pytest.mark.parametrize(("wrt", "mask", "normalize", "dtype"), [
    (None, False, False, "float32"), (("query",), True, True, "float64"),
    ((), False, True, "float32"),
])  # fmt: skip
def test_the_call_that_is_explained_is_the_call_that_runs(
    loss: str, wrt: Any, mask: bool, normalize: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All facts from which the division follows."""
    seen = []
    describe = blocks.describe
    monkeypatch.setattr(blocks, "describe", lambda *a: seen.append(describe(*a)) or seen[-1])
    m, n = 6, 9 if loss == "info_nce" else 6
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((m, 3, 8)).astype(dtype), rng.standard_normal((n, 5, 8))
    if wrt:
        wrt = (infonce.spec.LOSSES[loss].arguments[0],)
    options: dict[str, Any] = {"query_mask": np.ones((m, 3), bool)} if mask else {}
    getattr(infonce, f"{loss}_loss_and_grad")(
        query,
        key.astype(dtype),
        scale=2.0,
        normalize=normalize,
        wrt=wrt,
        workspace=2**26,
        **options,
    )
    plan = infonce.explain(
        loss, m, 8, keys=n, dtype=dtype, normalize=normalize, wrt=wrt, workspace=2**26,
        query_tokens=3, key_tokens=5, query_mask=mask,
    )  # fmt: skip
    assert plan.schedule is not None
    assert plan.schedule.call == seen[0]


def test_work_by_hand() -> None:
    """(1024, 32) x (1024, 300) of 128: one product of all tokens, and a sum of tokens a side."""
    sizes: dict[str, Any] = {"query_tokens": 32, "key_tokens": 300, "dtype": "bfloat16"}
    plan = infonce.explain("clip", 1024, 128, workspace="4GiB", **sizes)
    products, gradients = plan.work
    assert (products.kernel, products.launches) == ("sm90/maxsim", 1)
    assert products.flops == 2 * 1024 * 1024 * 32 * 300 * 128
    assert (gradients.kernel, gradients.launches) == ("maxsim/gradients", 2)
    assert gradients.flops == 2 * 2 * 1024 * 1024 * 32 * 128
    assert plan.memory["all passes"]["kept winners"] == 1024 * 1024 * 32 * 2
    # In blocks, without room for winners of all pairs: passes for queries and for ranges of keys
    # compute scores and, if a block has several pieces, winners again
    blocked = infonce.explain("clip", 4096, 128, workspace="128MiB", device="a100", **sizes)
    first, again, _ = blocked.work
    assert first.flops == 2 * 4096 * 4096 * 32 * 300 * 128
    passes = 1 + (0 < blocked.schedule.division.key_rows < 4096)
    assert again.flops == first.flops * passes * (1 + (blocked.schedule.pieces > 1))
    alone = infonce.explain("clip", 1024, 128, wrt=(), **sizes)
    assert [work.name for work in alone.work] == ["log-sum-exp"]
    assert "scores of 32 x 300 tokens" in str(plan)
    # a sigmoid without gradients computes scores once, however many pieces a block has
    only_loss = infonce.explain(
        "siglip", 4096, 128, wrt=(), workspace="64MiB", device="a100", **sizes
    )  # fmt: skip
    assert only_loss.schedule.pieces > 1
    assert [work.flops for work in only_loss.work] == [first.flops]
    whole = infonce.explain("siglip", 1024, 128, wrt=(), **sizes)  # all scores, in pieces
    assert whole.schedule.pieces > 1
    assert [work.flops for work in whole.work] == [products.flops]


@pytest.mark.parametrize("workspace", ["48MiB", "64MiB", "1GiB"])
@pytest.mark.parametrize("wrt", [None, ("image",), ("text",), ()])
@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_each_gradient_has_its_work(loss: str, wrt: Any, workspace: str) -> None:
    """Of gradients of one side, also by ranges of keys: half of the sums of tokens of both."""
    plan = infonce.explain(
        loss, 4096, 128, wrt=wrt, workspace=workspace, device="a100", query_tokens=32,
        key_tokens=300,
    )  # fmt: skip
    sums = [work.flops for work in plan.work if work.kernel == "maxsim/gradients"]
    sides = 2 if wrt is None else len(wrt)
    assert sums == [2 * sides * 4096 * 4096 * 32 * 128] * (sides > 0)
    scores = sum(work.flops for work in plan.work if work.kernel != "maxsim/gradients")
    assert scores % (2 * 4096 * 4096 * 32 * 300 * 128) == 0


@settings(max_examples=300)
@given(st.data())
def test_parts_fit_the_workspace(data: st.DataObject) -> None:
    """The parts of each division, as it was found, are within its workspace."""

    def size(most: int) -> int:
        return data.draw(st.integers(1, most))

    m, n, d, tq, tk = size(3000), size(3000), size(300), size(64), size(400)
    sizes = Sizes(
        m, n, d, tq * d * 6, tk * d * 6, tk * d * 4, 4, tq * 2, tq * 4, size(2**25),
        data.draw(st.sampled_from([0, 8 * m * tq * d * 4])), 2**16, 4096, data.draw(st.booleans()),
    )  # fmt: skip
    workspace = size(2**32)
    try:
        division = divide(sizes, workspace, *(data.draw(st.booleans()) for _ in range(3)))
    except ValueError:
        return
    assert isinstance(division, Division)
    assert sum(parts(sizes, division, workspace).values()) <= workspace


@pytest.mark.parametrize(("loss", "options", "named"), [
    ("nt_xent", {"query_tokens": 3, "key_tokens": 3}, "nt_xent takes no sets of tokens"),
    ("clip", {"query_tokens": 3}, "expected both"),
    ("clip", {"key_mask": True}, "expected both"),
    ("clip", {"query_tokens": -1, "key_tokens": 3}, "query_tokens: expected an integer"),
    ("clip", {"query_tokens": 3, "key_tokens": 3, "guide": True}, "guide: not explained"),
    ("clip", {"query_tokens": 3, "key_tokens": 3, "method": "naive"}, "method: expected"),
])  # fmt: skip
def test_refused(loss: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        infonce.explain(loss, 64, 8, **options)
