"""Options and settings of drop-in replacements: each option is right for the whole loss or refused
by its name at construction, and settings are checked whenever they are set."""

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch_problems import features, formula  # noqa: E402

from infonce.checks import keywords  # noqa: E402
from infonce.torch import core, inf_cl, infonce_cuda, lightly, open_clip, sup_contrast  # noqa: E402
from infonce.torch import memory_efficient_clip as memeff  # noqa: E402
from infonce.torch import siglip_kernel as siglip  # noqa: E402

pytestmark = pytest.mark.extras
N, D = 8, 6


def data() -> dict[str, Any]:
    """Features [N, D] of two sides, and what the calls need besides; always the same."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return {"a": draw(N, D), "b": draw(N, D), "own": draw(N, 2, D), "teacher": [draw(N, 4), draw(N, 4)],
            "logits": draw(N, 3, 5), "tokens": torch.randint(5, (N, 3), generator=generator)}  # fmt: skip


def unit(z: Any) -> Any:
    return F.normalize(z, dim=-1)
