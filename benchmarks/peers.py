"""The contenders of benchmarks/gpu.py: those of `infonce bench`, this library in other ways, other
projects, only the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from infonce.kernels.gpu.config import precision

import infonce
from infonce.cli import machine
from infonce.cli.bench import contenders_gpu, gpu, measure
from infonce.cli.bench.contenders_cpu import torch_loss
from infonce.cli.bench.contenders_gpu import by_autograd, torch_inputs
from infonce.cli.bench.measure import TEMPERATURE, Array, Outcome, Run
from infonce.spec import SIGLIP

PEERS = (
    "open_clip", "cut_cross_entropy", "inf_cl", "memory_efficient_clip", "siglip_kernel", "quack"
)  # fmt: skip
LOSS_OF_PEER = {"siglip_kernel": "siglip", "quack": "info_nce"}  # of the others: clip
PACKAGES = {
    "open_clip": "open_clip_torch",
    "cut_cross_entropy": "cut-cross-entropy",
    "inf_cl": "inf_cl",
    "memory_efficient_clip": "memeff",
    "siglip_kernel": "siglip-kernel",
    "quack": "quack-kernels",
}
measure.PACKAGES.update(PACKAGES)
ROOMY = "1 GiB"  # the library with a workspace of that size
PORTABLE = "portable"  # with the kernels that run on every card
OFFLOAD, PINNED = "offload", "offload pinned"  # with features and gradients in host memory
WAYS = (ROOMY, PORTABLE, OFFLOAD, PINNED)
AHEAD = 6_000_000  # clocks that the device is kept busy before a call is timed, about 4 ms
CALLS = 8  # in a turn that is timed so


@dataclass(frozen=True)
class Case(measure.Case):
    """One loss at one size, with options of this library; or only the loss."""

    precision: str = "auto"
    grad_dtype: str | None = None  # of this library's gradients; None: the features'
    gradient: bool = True  # False: only the loss

    @property
    def products(self) -> float:
        if self.gradient:
            return super().products
        return 0.5 if self.kind.symmetric else 1.0

    @property
    def arithmetic(self) -> str:
        """The precision of the bare products."""
        auto = self.precision == "auto"
        return contenders_gpu.PRECISION[self.dtype] if auto else self.precision


class Device(gpu.Device):
    """The current GPU, with other projects among the contenders."""

    methods = (*contenders_gpu.METHODS, *WAYS, *PEERS)
    # Of a section (`Section.ahead`). True: the host is ahead of the device when a call is timed, so
    # that Python is not on the clock. False: calls are queued one after another
    ahead = False

    def contender(self, method: str, case: Case, inputs: Sequence[Sequence[Array]]) -> Run:
        self.release()
        if method in PEERS:
            if case.kind.name != LOSS_OF_PEER.get(method, "clip"):
                raise ValueError(f"{method} has no {case.kind.name}")
            return by_autograd(case, torch_inputs(inputs), peer(method, case.rows))
        if not case.gradient:
            return loss_alone(method, case, inputs)
        if method == "products":
            return contenders_gpu.products(case, inputs, case.arithmetic)
        if method in ("auto", "captured", *contenders_gpu.LIBRARY, *WAYS):
            options: dict[str, Any] = {"precision": case.precision}
            if case.grad_dtype is not None:
                options["grad_dtype"] = case.grad_dtype
            if method in WAYS:
                return in_another_way(method, case, inputs, options)
            return contenders_gpu.library(method, case, inputs, **options)
        return super().contender(method, case, inputs)

    def turn(self, run: Run) -> dict[str, list[float]]:
        if not self.ahead:
            return super().turn(run)
        seconds = [self._timed_ahead(run)]
        while len(seconds) < CALLS and sum(seconds) < gpu.TURN:
            seconds.append(self._timed_ahead(run))
        seconds = seconds[1:] or seconds  # the first refills caches after the other contenders
        times = {"seconds": seconds}
        if seconds[-1] < gpu.SMALL:
            times["wall"] = [self._wall(run) for _ in range(CALLS)]
        return times

    def _timed_ahead(self, run: Run) -> float:
        busy()((1,), (1,), (AHEAD,))
        (seconds,) = self.elapsed(run, 1)
        return seconds

    def describe(self) -> dict[str, Any]:
        about = super().describe()
        about["versions"] |= machine.versions(
            "open_clip_torch",
            "cut_cross_entropy",
            "inf_cl",
            "memeff",
            "siglip-kernel",
            "quack-kernels",
        )
        return about


@cache
def busy() -> Any:
    """A kernel that takes so many clocks."""
    import cupy

    return cupy.RawKernel(
        """extern "C" __global__ void busy(long long clocks) {
             const long long start = clock64();
             while (clock64() - start < clocks) {}
           }""",
        "busy",
    )


def in_another_way(
    method: str, case: Case, inputs: Sequence[Sequence[Array]], options: dict[str, Any]
) -> Run:
    """A call of this library as one of `WAYS`."""
    if method == ROOMY:
        return contenders_gpu.library("auto", case, inputs, **options, workspace=2**30)
    if method == PORTABLE:
        run = contenders_gpu.library("auto", case, inputs, **options)

        def portable() -> Outcome:
            with portable_kernels():
                return run()

        return portable
    import cupyx

    features = [z.get() for z in inputs[0]]  # one set: no cache has room for it
    if method == OFFLOAD:
        return contenders_gpu.library("auto", case, [features], **options, offload=True)

    def pinned() -> list[Array]:
        return [cupyx.empty_pinned(z.shape, z.dtype) for z in features]

    pinned_features = pinned()
    for to, z in zip(pinned_features, features, strict=True):
        to[...] = z
    gradients = case.select_gradients(pinned())
    return contenders_gpu.library(
        "auto", case, [pinned_features], **options, offload=True, out=gradients
    )


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Calls within this context use the portable kernels, as with INFONCE_KERNELS=portable."""
    before, precision.PORTABLE = precision.PORTABLE, True
    try:
        yield
    finally:
        precision.PORTABLE = before


def loss_alone(method: str, case: Case, inputs: Sequence[Sequence[Array]]) -> Run:
    """The loss without gradients: by this library ("auto"), its bare product, or torch."""
    turns = itertools.cycle(inputs)
    if method == "auto":
        function = getattr(infonce, f"{case.kind.name}_loss")
        options = {
            "scale": case.scale, "precision": case.precision, "workspace": case.workspace
        }  # fmt: skip
        return lambda: (function(*next(turns), **options), [])
    if method == "products":
        return lambda: bare_product(case, next(turns))
    if method != "torch":
        raise ValueError(f"{method} has no loss without gradients")
    import torch

    turns = itertools.cycle(torch_inputs(inputs))
    y = torch.as_tensor(case.positives, device="cuda")
    dtype = torch.float64 if case.dtype == "float64" else torch.float32
    scale = torch.tensor(case.scale, dtype=dtype, device="cuda")

    def run() -> Outcome:
        tensors = next(turns)
        with torch.no_grad():
            return torch_loss(case.kind, tensors[0], tensors[-1], scale, y), []

    return run


def bare_product(case: Case, features: Sequence[Array]) -> Outcome:
    """The logits by cuBLAS."""
    import cupy

    query, key = features[0], features[-1]
    x = cupy.empty((case.rows, case.rows), query.dtype)
    contenders_gpu.product(case.arithmetic, x, query, key, transpose_b=True)
    return float("nan"), []


def peer(name: str, rows: int) -> Callable[[Any, Any, Any], Any]:
    """Another project's loss of (image, text, scale), called as its documentation has it."""
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
    if name == "siglip_kernel":
        from siglip_kernel import fused_siglip_loss

        bias = torch.tensor(SIGLIP.bias, device="cuda", requires_grad=True)
        return lambda image, text, scale: fused_siglip_loss(image, text, scale.log(), bias)
    if name == "quack":
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return lambda query, key, scale: chunked_linear_cross_entropy(  # which takes no scale
            scale.to(query.dtype) * query, key, y
        )
    from memeff import MemoryEfficientCLIPLoss

    fixed = MemoryEfficientCLIPLoss(temperature=TEMPERATURE, normalized_inputs=True)
    return lambda image, text, _: fixed(image, text)
