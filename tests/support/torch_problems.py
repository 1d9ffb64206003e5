"""Features, the published formulas in PyTorch, and calls: for the tests of infonce.torch."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import infonce.torch as it  # noqa: E402

MODULES = {"clip": it.CLIPLoss, "info_nce": it.InfoNCELoss, "lit": it.LiTLoss,
           "nt_xent": it.NTXentLoss, "siglip": it.SigLIPLoss}  # fmt: skip
LOSSES = list(MODULES)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no GPU"),
        ],
    ),
]


def features(loss: str, rows: int = 12, dim: int = 5, device: str = "cpu", **options: Any) -> Any:
    generator = torch.Generator().manual_seed(rows)
    options = {"dtype": torch.float64, "generator": generator, **options}
    sides = [torch.randn(rows, dim, **options) for _ in range(1 if loss == "nt_xent" else 2)]
    return [F.normalize(z, dim=1).to(device).requires_grad_() for z in sides]


def formula(loss: str, z: Any, scale: Any, bias: Any = -10.0) -> Any:
    x = scale * z[0] @ z[-1].T
    n = len(x)
    y = torch.arange(n, device=x.device)
    if loss == "nt_xent":
        x = x.masked_fill(torch.eye(n, dtype=torch.bool, device=x.device), -torch.inf)
        return F.cross_entropy(x, (y + n // 2) % n)
    if loss == "siglip":
        t = 2 * torch.eye(n, dtype=x.dtype, device=x.device) - 1
        return -F.logsigmoid(t * (x + bias)).sum() / n
    if loss == "clip":
        return (F.cross_entropy(x, y) + F.cross_entropy(x.T, y)) / 2
    return F.cross_entropy(x, y)


def call(loss: str, z: Any, **options: Any) -> Any:
    return getattr(it, f"{loss}_loss")(*z, **options)
