"""Other projects' CLIP losses, as contenders of benchmarks/gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from infonce.cli import machine
from infonce.cli.bench import contenders_gpu, gpu, measure
from infonce.cli.bench.contenders_gpu import by_autograd, of_torch
from infonce.cli.bench.measure import TEMPERATURE, Array, Case, Run

PEERS = ("open_clip", "cut_cross_entropy", "inf_cl", "memory_efficient_clip")
PACKAGES = {
    "open_clip": "open_clip_torch",
    "cut_cross_entropy": "cut-cross-entropy",
    "inf_cl": "inf_cl",
}
measure.PACKAGES.update(PACKAGES)


class Device(gpu.Device):
    """The current GPU, with other projects among the contenders."""

    methods = (*contenders_gpu.METHODS, *PEERS)

    def contender(self, method: str, case: Case, inputs: Sequence[Sequence[Array]]) -> Run:
        if method not in PEERS:
            return super().contender(method, case, inputs)
        if case.kind.name != "clip":
            raise ValueError(f"{method} has no {case.kind.name}")
        self.release()
        return by_autograd(case, of_torch(case, inputs), peer(method, case.rows))

    def describe(self) -> dict[str, Any]:
        about = super().describe()
        about["versions"] |= machine.versions("open_clip_torch", "cut_cross_entropy", "inf_cl")
        return about


def peer(name: str, rows: int) -> Callable[[Any, Any, Any], Any]:
    """Another project's CLIP loss of (image, text, scale), called as its documentation has it."""
    import torch

    y = torch.arange(rows, device="cuda")
    if name == "open_clip":
        from open_clip.loss import ClipLoss

        function: Callable[[Any, Any, Any], Any] = ClipLoss()
        return function
    if name == "cut_cross_entropy":
        from cut_cross_entropy import linear_cross_entropy

        def both_ways(image: Any, text: Any, scale: Any) -> Any:
            exact = {"filter_eps": None}  # its filter of gradients is made for vocabularies
            rows = linear_cross_entropy(scale * image, text, y, **exact)
            return (rows + linear_cross_entropy(scale * text, image, y, **exact)) / 2

        return both_ways
    if name == "inf_cl":
        from inf_cl import cal_flash_loss

        def flash(image: Any, text: Any, scale: Any) -> Any:
            rows = cal_flash_loss(image, text, y, scale).mean()
            return (rows + cal_flash_loss(text, image, y, scale).mean()) / 2

        return flash
    from clip_loss import MemoryEfficientCLIPLoss

    fixed = MemoryEfficientCLIPLoss(temperature=TEMPERATURE, normalized_inputs=True)
    return lambda image, text, _: fixed(image, text)
