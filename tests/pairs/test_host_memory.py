"""Options and distillation of features in host memory, on a part of the host that stands for a
device."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
from host_device import close, on_host
from infonce.kernels import between_passes
from judge import arguments, assert_grad, assert_loss, pairs
from reference_problems import each_once

import infonce
from infonce import reference, spec
from infonce.checks import validation
from infonce.checks.teacher import Teacher

REFUSED = {"sup_con": spec.SUP_CON.refused, "gte": spec.GTE.refused}


GUIDE = np.random.default_rng(9).standard_normal((2, 30, 3))
OPTIONS: list[dict[str, Any]] = [
    {"margin": 0.2, "hardness": 1.5},
    {"margin": 0.2, "decoupled": True},
    {"weights": np.linspace(0.0, 2.0, 30)},
    {"weights": np.linspace(2.0, 0.0, 30), "margin": 0.1},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.3, "margin": 0.1, "ids": np.arange(30) // 3, "normalize": True},
    {"key_bias": np.sin(np.arange(30))},
    {"false_negative_margin": 0.1},
    {"key_bias": np.sin(np.arange(30)), "false_negative_margin": -0.1, "hardness": 1.5},
    {"guide": GUIDE, "guide_margin": 0.3},
    {"guide": GUIDE, "normalize": True, "groups": np.arange(30) // 10, "hardness": 1.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("workspace", [7_000, 10_000_000])
@pytest.mark.parametrize(
    "loss", ["info_nce", "info_nce sets", "nt_xent", "clip", "lit", "sup_con", "gte"]
)
@pytest.mark.parametrize("few", [True, False])
def test_options_of_the_softmax(
    loss: str, workspace: int, options: dict[str, Any], few: bool, request: pytest.FixtureRequest
) -> None:
    """`few` logits, or so many that feature gradients give the gradient of the scale."""
    if not few:
        request.getfixturevalue("no_few_logits")
    loss, _, sets = loss.partition(" ")
    one_set = loss in ("nt_xent", "sup_con")
    args = pairs("partly aligned", 15 if one_set else 30, 15 if one_set else 30, 8, np.float64, 3)
    args = arguments("nt_xent" if one_set else loss, *args)
    keywords = {k: v for k, v in options.items() if k not in REFUSED.get(loss, ())}
    if "guide" in keywords:
        keywords["guide"] = GUIDE[0] if one_set else tuple(GUIDE)
    labels = None
    if loss == "info_nce":
        labels = np.arange(30)
        labels[4] = -1
        if sets:
            labels = each_once(np.stack([labels, labels // 2, np.full(30, -1)], axis=1))
            labels[4] = -1
    if loss == "sup_con":
        labels = np.arange(30) // 4
        labels[3] = -1  # and rows 28, 29 are a class of two
    reference_options = dict(keywords) if labels is None else keywords | {"labels": labels}
    if "weights" in keywords:
        some = np.ones(30, bool)
        if loss == "sup_con":
            some = labels >= 0  # no class has a single row
        elif labels is not None:
            some = (labels.reshape(30, -1) >= 0).any(axis=1)
        weights = some * keywords["weights"]
        reference_options["weights"] = weights / weights.sum()
    want = getattr(reference, loss)(*args, scale=6.0, **reference_options)
    keywords |= {"scale": 6.0, "workspace": workspace, "offload": True}
    last = spec.LOSSES[loss].arguments[-1]
    for wrt in (None, (last, "scale")) if loss != "lit" else (None,):
        with mock.patch.object(validation, "gpu_missing", return_value=""):
            out, device = on_host(loss, args, labels, wrt=wrt, **keywords)
        assert device.whole == (workspace > 7_000)
        assert device.whole or device.blocks > 4
        np.testing.assert_allclose(out.loss, want.loss, rtol=1e-12)
        for name, gradient in want.grads.items():
            got = getattr(out.grads, name)
            if got is not None:
                np.testing.assert_allclose(got, gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("workspace", [9_000, 10_000_000])
@pytest.mark.parametrize("few", [True, False])
def test_distillation(
    two_sided: bool, workspace: int, few: bool, request: pytest.FixtureRequest
) -> None:
    """The teacher has rows of another width, or is the student."""
    if not few:
        request.getfixturevalue("no_few_logits")
    rng = np.random.default_rng(0)
    m, n = (30, 30) if two_sided else (20, 34)
    query, key, *teachers = (
        rng.standard_normal(shape) for shape in ((m, 8), (n, 8), (m, 5), (n, 5))
    )
    weights = rng.random(m)
    options: dict[str, Any] = {"scale": 2.0, "normalize": few}
    want = reference.distill(
        query, key, *teachers, weights=weights / weights.sum(), teacher_scale=3.0,
        two_sided=two_sided, **options,
    )  # fmt: skip
    teacher = Teacher(*teachers, scale=3.0, two_sided=two_sided)
    options["workspace"] = workspace
    for wrt in (None, ("key", "scale"), ("scale",)):
        out, device = on_host(
            "distill", (query, key), teacher=teacher, weights=weights, wrt=wrt, **options
        )
        assert device.whole == (workspace > 9_000)
        assert device.whole or device.blocks > 4
        np.testing.assert_allclose(out.loss, want.loss, rtol=1e-12)
        for lse, expected in zip(np.atleast_2d(out.lse), np.atleast_2d(want.lse), strict=True):
            np.testing.assert_allclose(lse, expected, rtol=1e-12)
        for name, gradient in want.grads.items():
            got = getattr(out.grads, name)
            if got is not None:
                np.testing.assert_allclose(got, gradient, rtol=1e-11, atol=1e-13)
    student = Teacher(query, key, two_sided=two_sided)
    self_taught, _ = on_host("distill", (query, key), teacher=student, **options)
    assert not self_taught.grads.query.any()
    assert not self_taught.grads.key.any()
    teachers[1][7, 2] = np.nan
    assert np.isnan(on_host("distill", (query, key), teacher=teacher, **options)[0].loss)


@pytest.mark.parametrize("has_whole_mask", [True, False])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"in_batch": False}, {"false_negative_margin": 0.1, "normalize": True},
        {"hardness": 1.5, "margin": 0.1, "key_bias": np.sin(np.arange(34))},
        {"guide": (GUIDE[0], np.sin(np.arange(102.0)).reshape(34, 3)), "guide_margin": -0.1},
    ],
    ids=lambda options: "-".join(options) or "none",
)  # fmt: skip
def test_own_negatives(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], dtype: Any, few: bool,
    has_whole_mask: bool, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Several parts of their rows; masked ones are not read."""
    if not few:
        request.getfixturevalue("no_few_logits")
    workspace = 10_000_000 if has_whole_mask else 7_000 if dtype is np.float64 else 4_000
    monkeypatch.setattr(between_passes, "OWN_BYTES", 3000)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape) / 3 for shape in ((30, 8), (34, 8), (30, 3, 8))]
    query, key, own = (z.astype(dtype) for z in args)
    labels, mask = rng.permutation(34)[:30], rng.random((30, 3)) < 0.8
    own[~mask] = np.nan
    keywords = {"scale": 6.0, "own_mask": mask, **options}
    want = reference.info_nce(query, key, own=own, labels=labels, **keywords)
    for wrt in (None, ("own",), ("query", "scale"), ("key", "own")):
        out, device = on_host(
            "info_nce own", (query, key, own), labels, wrt=wrt, workspace=workspace, **keywords
        )
        assert device.whole == has_whole_mask
        assert device.whole or device.blocks > 4
        assert_loss(out.loss, want.loss, np.dtype(dtype).name, 10.0)
        for name, gradient in want.grads.items():
            got = getattr(out.grads, name)
            assert (got is None) == (wrt is not None and name not in wrt)
            if got is not None:
                assert_grad(got, gradient, np.dtype(dtype).name, 10.0, terms=1.0)
    if "guide" not in keywords and "false_negative_margin" not in keywords and dtype is np.float64:
        keywords["metrics"] = "key_bias" not in keywords
        how = {"normalize": False, **keywords}
        plain = infonce.info_nce_loss_and_grad(query, key, labels, own=own, **how)
        out, _ = on_host("info_nce own", (query, key, own), labels, workspace=workspace, **how)
        close(out, plain)
        del keywords["metrics"]
    own[3, :, 1], mask[3] = np.inf, True
    losses = on_host(
        "info_nce own", (query, key, own), labels, reduction="none", workspace=workspace, **keywords
    )[0].loss
    assert np.flatnonzero(np.isnan(losses)).tolist() == [3]


@pytest.mark.parametrize("workspace", [4_000, 10_000_000])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_own_negatives_in_a_table(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, normalize: bool, workspace: int
) -> None:
    """Several parts of the rows and of the table. Rows of it that are not used hold NaN."""
    monkeypatch.setattr(between_passes, "OWN_BYTES", 1500)
    rng = np.random.default_rng(0)
    query, key, table = (
        (rng.standard_normal((rows, 8)) / 3).astype(dtype) for rows in (30, 34, 12)
    )
    indices = rng.integers(-1, 11, (30, 6))
    indices[rng.random((30, 6)) < 0.5] = 3
    table[11] = np.nan
    bias, mask = rng.standard_normal((30, 6)), rng.random((30, 6)) < 0.8
    for more in ({}, {"own_bias": bias, "own_mask": mask, "hardness": 1.0}):
        keywords: dict[str, Any] = {"scale": 6.0, "normalize": normalize, "own_indices": indices}
        keywords |= more
        want = reference.info_nce(query, key, own=table, **keywords)
        for wrt in (None, ("own",), ("query", "scale")):
            out, device = on_host(
                "info_nce own", (query, key, table), None, wrt=wrt, workspace=workspace, **keywords
            )
            assert device.whole == (workspace > 10_000)
            assert_loss(out.loss, want.loss, np.dtype(dtype).name, 10.0)
            for name, gradient in want.grads.items():
                got = getattr(out.grads, name)
                assert (got is None) == (wrt is not None and name not in wrt)
                if got is not None:
                    assert_grad(got, gradient, np.dtype(dtype).name, 10.0, terms=1.0)
