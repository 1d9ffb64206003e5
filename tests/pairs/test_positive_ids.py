"""Several positives of a row in SigLIP: every method of the CPU, options, frameworks, errors."""

from typing import Any

import numpy as np
import pytest

import infonce

RNG = np.random.default_rng(0)
IMAGE, TEXT = RNG.standard_normal((40, 5)), RNG.standard_normal((75, 5))
IDS = np.arange(40) // 2, RNG.integers(0, 24, 75)  # of some images and captions no other has the id
OPTIONS: dict[str, Any] = {"scale": 3.0, "normalize": True, "positive_ids": IDS}


def test_one_array_serves_both_sides() -> None:
    ids = np.arange(40, dtype=np.uint64) // 3 + 2**63
    pair = infonce.siglip_loss(IMAGE, TEXT[:40], **OPTIONS | {"positive_ids": (ids, ids)})
    one = infonce.siglip_loss(IMAGE, TEXT[:40], **OPTIONS | {"positive_ids": ids})
    assert one == pair != infonce.siglip_loss(IMAGE, TEXT[:40], scale=3.0, normalize=True)


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
