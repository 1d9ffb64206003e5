"""Calls over ranks that are bad on one of them, or on which ranks disagree: for tests/ranks.py."""

from typing import Any

import numpy as np

from infonce import distributed


def bad_calls(rank: int, size: int) -> list[tuple[str, str, Any]]:
    """(words of the message, its type, the call as rank 1 differs)."""
    odd = rank == 1
    x = np.ones((4, 3))

    def clip(image: Any = x, text: Any = x, **options: Any) -> Any:
        return distributed.clip_loss_and_grad(image, text, **{"scale": 1.0, **options})

    wide, single = np.ones((4, 5)), x.astype(np.float32)
    return [
        ("image: width 3 on rank 0 and 5 on rank 1", "ValueError",
         lambda: clip(*([wide] * 2 if odd else [x] * 2))),
        ("dtype 'float64' on rank 0 and 'float32' on rank 1", "ValueError",
         lambda: clip(*([single] * 2 if odd else [x] * 2))),
        ("scale 1.0 on rank 0 and 2.0 on rank 1", "ValueError",
         lambda: clip(scale=2.0 if odd else 1.0)),
        ("normalize False rank 0 True on rank 1", "ValueError", lambda: clip(normalize=odd)),
        ("reduction 'mean' 'sum' on rank 1", "ValueError",
         lambda: clip(reduction="sum" if odd else "mean")),
        ("wrt on rank 1", "ValueError", lambda: clip(wrt=["image"] if odd else None)),
        ("gradient_scale 'global' 'ddp' on rank 1", "ValueError",
         lambda: clip(gradient_scale="ddp" if odd else "global")),
        ("ids 'not given' on rank 0 and 'given' on rank 1", "ValueError",
         lambda: clip(ids=np.arange(4) if odd else None)),
        ("function 'clip_loss_and_grad' on rank 0 and 'lit_loss_and_grad' on rank 1", "ValueError",
         lambda: (distributed.lit_loss_and_grad if odd else distributed.clip_loss_and_grad)(
             x, x, scale=1.0)),
        ("rank 1: text: expected 4 rows", "ValueError", lambda: clip(text=x[:3] if odd else x)),
        ("rank 1: image: expected an array", "TypeError", lambda: clip("x" if odd else x)),
        ("rank 1: image: expected dtype", "TypeError",
         lambda: clip(x.astype(int) if odd else x)),
        ("rank 1: scale: expected a positive number", "ValueError",
         lambda: clip(scale=-1 if odd else 1.0)),
        ("rank 1: temperature: expected a number in [1.1102230246251565e-16, got 1e-39",
         "ValueError", lambda: clip(scale=None, temperature=1e-39 if odd else 1.0)),
        ("unexpected keyword argument 'tempreature'", "TypeError", lambda: clip(tempreature=1.0)),
        ("method \"tiled\" over ranks 'naive'", "ValueError", lambda: clip(method="naive")),
        ("metrics True on rank 1", "ValueError", lambda: clip(metrics=odd)),
        ("gradient_scale \"global\", \"ddp\" 'mean'", "ValueError",
         lambda: clip(gradient_scale="mean")),
        ("transport 'nccl' does not carry", "ValueError", lambda: clip(transport="nccl")),
        ("at least one row over all ranks", "ValueError", lambda: clip(x[:0], x[:0])),
        ("rank 1: features even number of rows", "ValueError",
         lambda: distributed.nt_xent_loss(x[:3] if odd else x, scale=1.0)),
        ("labels each other's label", "ValueError",
         lambda: distributed.nt_xent_loss(x, np.arange(4), scale=1.0)),
        (f"rank 1: labels [0, {4 * size}) got {4 * size}", "ValueError",
         lambda: distributed.info_nce_loss(x, x, np.full(4, 4 * size if odd else 0), scale=1.0)),
        (f"key at least {3 * size} rows, got {2 * size} in all", "ValueError",
         lambda: distributed.info_nce_loss(x[:3], x[:2], scale=1.0)),
    ]  # fmt: skip
