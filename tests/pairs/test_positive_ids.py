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
def test_the_module_of_siglip_kernel() -> None:
    """What its module returns beside the loss. (The matrix has the losses of these drop-ins.)"""
    torch = pytest.importorskip("torch")
    from infonce.torch import siglip_kernel as theirs

    image, text = map(torch.tensor, (IMAGE, TEXT))
    rows, columns = map(torch.tensor, IDS)
    module = theirs.SigLIPPlusLoss(0.1, bias_init=-2.0, precision="fp64")
    out = module([2 * image, 3 * text], rows, columns)
    assert out["n_positives"] == (rows[:, None] == columns).sum()
    torch.testing.assert_close(out["logit_scale"], torch.tensor(10.0))
    out["total_loss"].backward()
    assert module.logit_scale.grad is not None is not module.logit_bias.grad
    assert list(theirs.SigLIPPlusLoss(use_bias=False).state_dict()) == ["logit_scale", "logit_bias"]
    with pytest.raises(ValueError, match=r"positive_ids\[1\]: expected shape \(75,\)"):
        theirs.fused_siglip_plus_loss(
            image, text, module.logit_scale, module.logit_bias, rows, rows, chunk_size=8,
            num_groups=30,
        )  # fmt: skip
