"""Several positives of a row in SigLIP: every method of the CPU, options, frameworks, errors."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from judge import assert_grad, assert_loss, largest_logit
from reference_problems import YES, call_of, problems

import infonce
from infonce import reference

RNG = np.random.default_rng(0)
IMAGE, TEXT = RNG.standard_normal((40, 5)), RNG.standard_normal((75, 5))
IDS = np.arange(40) // 2, RNG.integers(0, 24, 75)  # of some images and captions no other has the id
OPTIONS: dict[str, Any] = {"scale": 3.0, "normalize": True, "positive_ids": IDS}


def test_every_method(method: dict[str, Any], small_tiles: None) -> None:
    """Beside ids, groups and weights, in float64 and float32."""
    others = {
        "ids": (np.arange(40) // 4, RNG.integers(0, 10, 75)),
        "groups": (np.arange(40) // 9, np.sort(RNG.integers(0, 5, 75))),
        "weights": RNG.uniform(0.5, 2.0, 40),
    }
    for names in ((), ("ids",), ("groups",), ("ids", "groups", "weights")):
        more = {name: others[name] for name in names}
        given_weights = {"weights": more["weights"] / 40} if "weights" in more else {}
        want = reference.siglip(IMAGE, TEXT, bias=-2.0, **OPTIONS | more | given_weights)
        for dtype in ("float64", "float32"):
            image, text = IMAGE.astype(dtype), TEXT.astype(dtype)
            got = infonce.siglip_loss_and_grad(image, text, -2.0, **OPTIONS | more | method)
            total = 1.0 if "weights" not in more else more["weights"].sum() / 40
            logit = 3.0 + 2.0
            assert_loss(got.loss * total, want.loss, dtype, logit)
            for field, gradient in want.grads.items():
                have = np.asarray(getattr(got.grads, field)) * total
                terms = np.abs(want.losses).max() if np.ndim(gradient) == 0 else 0.0
                assert_grad(have, gradient, dtype, logit, terms=terms)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(problems(names=("siglip",), groups=YES, positive_ids=YES))
def test_drawn_problems(drawn: Any) -> None:
    """Ids that one side lacks, one row, one column: each method has the reference's numbers."""
    problem, options = call_of(drawn)
    want = problem.reference()
    logit = largest_logit(float(problem.scale), *problem.features) + abs(problem.bias)
    for method in ("auto", "naive", "tiled"):
        got = infonce.siglip_loss_and_grad(
            *problem.features, problem.bias, method=method, **options
        )
        assert_loss(got.loss, want.loss, "float64", logit)
        for field, gradient in want.grads.items():
            terms = np.abs(want.losses).max()
            assert_grad(getattr(got.grads, field), gradient, "float64", logit, terms=terms)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unique_ids_are_todays_siglip(dtype: str) -> None:
    image, text = IMAGE.astype(dtype), TEXT[:40].astype(dtype)
    order = RNG.permutation(40)
    plain = infonce.siglip_loss_and_grad(image, text, **OPTIONS | {"positive_ids": None})
    got = infonce.siglip_loss_and_grad(
        image, text[order], **OPTIONS | {"positive_ids": (np.arange(40), order)}
    )
    logit = 3.0 + 10.0
    assert_loss(got.loss, float(plain.loss), dtype, logit)
    assert_grad(got.grads.image, plain.grads.image, dtype, logit)
    assert_grad(got.grads.text, plain.grads.text[order], dtype, logit)


def test_one_array_serves_both_sides() -> None:
    ids = np.arange(40, dtype=np.uint64) // 3 + 2**63
    pair = infonce.siglip_loss(IMAGE, TEXT[:40], **OPTIONS | {"positive_ids": (ids, ids)})
    one = infonce.siglip_loss(IMAGE, TEXT[:40], **OPTIONS | {"positive_ids": ids})
    assert one == pair != infonce.siglip_loss(IMAGE, TEXT[:40], scale=3.0, normalize=True)


def test_positives_count_where_groups_leave_out_blocks(small_tiles: None) -> None:
    """Sorted groups leave out blocks of other groups, but not blocks that may have a positive."""
    groups = np.arange(40) // 10, np.arange(75) // 19
    far = np.arange(40) % 2 + 10, np.where(np.arange(75) > 60, 11, np.arange(75) + 20)
    options: dict[str, Any] = {"scale": 3.0, "groups": groups, "positive_ids": far}
    want = reference.siglip(IMAGE, TEXT, **options)
    got = infonce.siglip_loss_and_grad(IMAGE, TEXT, method="tiled", **options)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-13)
    np.testing.assert_allclose(got.grads.text, want.grads["text"], rtol=1e-11, atol=1e-14)


def test_prefixes_and_reduction() -> None:
    options = OPTIONS | {"dims": (2, 5), "dim_weights": (0.5, 2.0)}
    got = infonce.siglip_loss_and_grad(IMAGE, TEXT, reduction="sum", **options)
    each = infonce.siglip_loss(IMAGE, TEXT, reduction="none", **options)
    want = [reference.siglip(IMAGE[:, :d], TEXT[:, :d], **OPTIONS) for d in (2, 5)]
    np.testing.assert_allclose(each, 0.5 * want[0].losses + 2.0 * want[1].losses, rtol=1e-12)
    np.testing.assert_allclose(got.loss, each.sum(), rtol=1e-12)
    gradient = 80.0 * want[1].grads["text"]
    gradient[:, :2] += 20.0 * want[0].grads["text"]
    np.testing.assert_allclose(got.grads.text, gradient, rtol=1e-10, atol=1e-12)


def test_bad_features_make_the_loss_nan(method: dict[str, Any]) -> None:
    for place, value in ((IMAGE, np.nan), (TEXT, np.inf)):
        bad = place.copy()
        bad[3, 1] = value
        pair = (bad, TEXT) if place is IMAGE else (IMAGE, bad)
        assert np.isnan(infonce.siglip_loss(*pair, **OPTIONS | method | {"normalize": False}))


@pytest.mark.extras
def test_torch() -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch as losses

    want = infonce.siglip_loss_and_grad(IMAGE, TEXT, -2.0, **OPTIONS)
    image, text = (torch.tensor(z, requires_grad=True) for z in (IMAGE, TEXT))
    options = OPTIONS | {"positive_ids": tuple(map(torch.tensor, IDS))}
    loss = losses.siglip_loss(image, text, bias=-2.0, **options)
    loss.backward()
    np.testing.assert_allclose(loss.detach(), want.loss, rtol=1e-12)
    np.testing.assert_allclose(image.grad, want.grads.image, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(text.grad, want.grads.text, rtol=1e-12, atol=1e-15)
    module = losses.SigLIPLoss(scale=3.0, bias=-2.0, learnable=True, normalize=True)
    loss = module(image, text, positive_ids=options["positive_ids"])
    loss.backward()
    np.testing.assert_allclose(loss.detach(), want.loss, rtol=1e-6)
    np.testing.assert_allclose(module.bias.grad, want.grads.bias, rtol=1e-6)
    with pytest.raises(ValueError, match=re.escape("image: expected 6 rows") + "|positive_ids"):
        losses.siglip_loss(image[:6], text, positive_ids=options["positive_ids"], scale=1.0)


@pytest.mark.extras
def test_siglip_kernel() -> None:
    """The drop-in is the published mean over all pairs of the weighted binary cross-entropy."""
    torch = pytest.importorskip("torch")
    from infonce.torch import siglip_kernel as theirs

    functional = torch.nn.functional
    image, text = (functional.normalize(torch.tensor(z), dim=1) for z in (IMAGE, TEXT))
    rows, columns = map(torch.tensor, IDS)
    log_scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)

    def formula(image: Any, text: Any, log_scale: Any) -> Any:
        positive = (rows[:, None] == columns).to(image.dtype)
        inverse = [1 / positive.sum(axis).clamp(min=1) for axis in (1, 0)]
        weight = torch.where(positive > 0, (inverse[0][:, None] + inverse[1]) / 2, 1.0)
        x = log_scale.exp() * image @ text.T + bias
        return functional.binary_cross_entropy_with_logits(x, positive, weight)

    inputs = (image.requires_grad_(), text.requires_grad_(), log_scale, bias)
    got = theirs.fused_siglip_plus_loss(*inputs, rows, columns, chunk_size=8, num_groups=30)
    want = formula(image, text, log_scale)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(loss, inputs) for loss in (got, want)))
    unique = theirs.fused_siglip_plus_loss(image, text[:40], log_scale, bias)
    plain = theirs.fused_siglip_loss(image, text[:40], log_scale, bias, backend="fused")
    torch.testing.assert_close(40 * unique, plain)
    open_clip = theirs.DistributedSigLIPLoss(strategy="gather")
    torch.testing.assert_close(open_clip(image, text[:40], log_scale.exp(), bias), plain)

    module = theirs.SigLIPPlusLoss(0.1, bias_init=-2.0, precision="fp64")
    out = module([2 * image, 3 * text], rows, columns)
    want = formula(image, text, torch.tensor(10.0).log())
    torch.testing.assert_close(out["total_loss"], want, rtol=1e-6, atol=0.0)
    assert out["n_positives"] == (rows[:, None] == columns).sum()
    torch.testing.assert_close(out["logit_scale"], torch.tensor(10.0))
    out["total_loss"].backward()
    assert module.logit_scale.grad is not None is not module.logit_bias.grad
    assert list(theirs.SigLIPPlusLoss(use_bias=False).state_dict()) == ["logit_scale", "logit_bias"]
    for name, value in (("symmetric", False), ("soft_label", True), ("soft_weighting", False)):
        with pytest.raises(ValueError, match=f"{name}: expected {not value}, got {value}"):
            theirs.SigLIPPlusLoss(**{name: value})
    with pytest.raises(ValueError, match="strategy: expected"):
        theirs.DistributedSigLIPLoss(strategy="hierarchical")
    with pytest.raises(ValueError, match=r"positive_ids\[1\]: expected shape \(75,\)"):
        theirs.fused_siglip_plus_loss(image, text, log_scale, bias, rows, rows)


@pytest.mark.extras
def test_torch_compile_takes_them() -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch as losses

    z, ids = torch.eye(3), torch.tensor([0, 0, 1])

    def loss(z: Any) -> Any:
        return losses.siglip_loss(z, z, positive_ids=ids, normalize=False)

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert float(compiled(z)) == float(loss(z))
    assert float(loss(z)) != float(losses.siglip_loss(z, z, normalize=False))


@pytest.mark.extras
def test_jax() -> None:
    jax = pytest.importorskip("jax")
    import infonce.jax as losses

    want = infonce.siglip_loss_and_grad(IMAGE, TEXT, -2.0, **OPTIONS)
    with jax.enable_x64(True):
        options = OPTIONS | {"positive_ids": tuple(map(jax.numpy.asarray, IDS))}

        def value(image: Any, text: Any, bias: Any) -> Any:
            return losses.siglip_loss(image, text, bias=bias, **options)

        arrays = (*map(jax.numpy.asarray, (IMAGE, TEXT)), -2.0)
        got, grads = jax.jit(jax.value_and_grad(value, (0, 1, 2)))(*arrays)
    np.testing.assert_allclose(got, want.loss, rtol=1e-12)
    for have, field in zip(grads, ("image", "text", "bias"), strict=True):
        np.testing.assert_allclose(have, getattr(want.grads, field), rtol=1e-12, atol=1e-15)


@pytest.mark.extras
def test_kernels_compile_within_their_registers() -> None:
    """A sweep and tiles, with groups: names of 8 bytes each. As many bytes are spilled, at most, as
    with ids and factors."""
    pytest.importorskip("cupy")
    from gpu_problems import DEVICES
    from infonce.kernels.gpu import config
    from infonce.kernels.gpu.device import compiler

    options = {"POSITIVE_IDS": 1, "GROUPS": 1}
    sweep = config.sweep_for("bf16", 1024, DEVICES["sm_90a"], False, False, 1, 2)
    tile = config.tile_for("bf16", 64, DEVICES["sm_80"], 1, 2)
    assert sweep is not None
    shapes = {
        "sm90/sweep_sigmoid.cu": ("sm_90a", config.defines(sweep, True, False)),
        "tiled/sigmoid.cu": ("sm_80", {
            "BLOCK_N": tile.block_n, "WARP_N": tile.warp_n, "STAGES": tile.stages,
            "LEVELS": tile.levels, "MIN_BLOCKS": tile.min_blocks,
        }),
    }  # fmt: skip
    for file, (arch, defines) in shapes.items():
        given_options = {"PRECISION": "BF16", **defines, **options}
        log = compiler.compile_for(file, given_options, arch, ("--ptxas-options=-v",))[1]
        assert "serialized" not in log
        spills = map(int, re.findall(r"(\d+) bytes spill", log))
        assert max(spills) <= 1024, log
        declared = max(map(int, re.findall(r"(\d+) bytes smem", log)), default=0)
        assert declared <= tile.static_shared
