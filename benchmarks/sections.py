"""What benchmarks/gpu.py measures: sections of cases, what runs in each, and goals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peers import OFFLOAD, PEERS, PINNED, PORTABLE, ROOMY, Case

from infonce.spec import LOSSES

TORCH = ("torch", "torch.compile")
BESIDE = ("products", "panels", *TORCH)
BF16_PEERS, FP32_PEERS = PEERS[:2], PEERS[2:4]  # the latter compute in float32 whatever they get


@dataclass(frozen=True)
class Section:
    """Cases and what runs in each; `auto` is this library as it is called."""

    table: str  # in which the results are shown
    cases: tuple[Case, ...]
    methods: tuple[str, ...]
    # of `auto` on an H200, milliseconds, one a case; NOTES.md has their origin
    goals: tuple[float | None, ...] = ()
    by_wall: bool = False  # goals are of the wall clock
    roomy_goals: tuple[float | None, ...] = ()  # of `ROOMY`
    ahead: bool = False  # calls are timed with the host ahead of the device, without Python

    def goal(self, method: str, i: int) -> float | None:
        """The time in seconds that `method` is meant to reach in case `i`. None if no goal is
        set."""
        goals = {"auto": self.goals, ROOMY: self.roomy_goals}.get(method, ())
        goal = goals[i] if i < len(goals) else None
        return None if goal is None else goal / 1e3


def case(loss: str, rows: int, dim: int, dtype: str = "bfloat16", **options: Any) -> Case:
    return Case(LOSSES[loss], rows, dim, dtype, **options)


RECTANGLES = ((256, 65536, 128), (1024, 8192, 384), (512, 4096, 1024), (2048, 16384, 768))
RAGGED = ((16384, 500), (16384, 512), (16384, 100), (16384, 128), (20001, 512), (20096, 512))
HALF, SINGLE = "16-bit features", "32-bit features"
SECTIONS: dict[str, Section] = {
    "clip": Section(
        HALF,
        tuple(case("clip", n, 512) for n in (8192, 32768, 65536)),
        ("auto", *BESIDE, *BF16_PEERS),
        (0.50, 5.9, 26.0),
    ),
    "sizes": Section(
        HALF,
        tuple(case("clip", n, 512) for n in (1024, 2048, 4096, 8192, 16384)),
        ("auto", "captured", "products", "torch"),
    ),
    "wide": Section(
        HALF,
        (case("clip", 65536, 768), case("clip", 65536, 1024)),
        ("auto", "products"),
        (39.0, 51.0),
    ),
    "forward": Section(
        HALF, (case("clip", 65536, 512, gradient=False),), ("auto", "products", "torch"), (6.3,)
    ),
    "splits": Section(
        SINGLE,
        tuple(case("clip", 65536, 512, "float32", precision=p) for p in ("tf32", "bf16x3")),
        ("auto", "products"),
        (55.0, 90.0),
    ),
    "fp32": Section(
        SINGLE,
        tuple(case("clip", n, 512, "float32", precision="fp32") for n in (65536, 16384)),
        ("auto", "products", "torch"),
        (175.0,),
    ),
    "fp32 peers": Section(
        SINGLE, (case("clip", 16384, 512, "float32", precision="fp32"),), FP32_PEERS
    ),
    "lit": Section(
        HALF, (case("lit", 65536, 512),), ("auto", "products", "panels", "torch"), (14.0,)
    ),
    "siglip": Section(
        HALF,
        (case("siglip", 65536, 512), case("siglip", 65536, 768)),
        ("auto", "products", "panels", "torch", PEERS[4]),
        (20.0, None),
    ),
    "info_nce": Section(
        HALF, (case("info_nce", 32768, 512, "float16"),), ("auto", "products", "panels", "torch")
    ),
    "nt_xent": Section(
        HALF,
        (case("nt_xent", 65536, 128), case("nt_xent", 8192, 128)),
        ("auto", *BESIDE),
        (5.0, 0.15),
    ),
    "small": Section(
        "Small batches",
        tuple(
            case("nt_xent", n, d, "float32")
            for n, d in ((32, 256), (64, 512), (128, 1024), (256, 2048))
        ),
        ("auto", "captured", "torch"),
        (0.06, 0.06, 0.06, 0.06),
        by_wall=True,
    ),
    "methods": Section(
        "Methods of this library",
        (case("clip", 1024, 256, "float32"), case("clip", 4096, 512, "float32")),
        ("auto", "captured", "naive", "fused", "tiled", "products", "torch"),
    ),
    # float32 gradients accumulate in their own memory: the workspace is left to gradient blocks
    "million": Section(
        HALF, (case("clip", 2**20, 512, grad_dtype="float32"),), ("auto",), (7000.0,)
    ),
    # what follows is of the shapes that models have
    "widths": Section(
        "Wide rows",
        (
            *(case("clip", 16384, d) for d in (512, 768, 1024, 1152, 1280, 1536, 2048, 3072, 4096)),
            case("clip", 65536, 1024),
            *(case("clip", 16384, d, "float32", precision="fp32") for d in (512, 1536)),
        ),
        ("auto", ROOMY, "products", "torch.compile"),
        (None, 2.35, 3.1, 3.5, 3.8, 4.3, 5.3, 7.4, 9.1, 54.0, 5.3, 15.5),
        roomy_goals=(None, None, 2.6, 2.9, 3.2, 3.7, 4.7, 7.0, 9.0),
        ahead=True,
    ),
    "rectangles": Section(
        "Labels that point into more keys",
        tuple(
            case("info_nce", m, d, dtype, keys=n, wrt=wrt)
            for m, n, d in RECTANGLES
            for dtype in ("float32", "bfloat16")
            for wrt in ((), ("query",))
        ),
        ("auto", "products", "torch.compile"),
        by_wall=True,
        ahead=True,
    ),
    "ragged": Section(
        "Sizes that are not round, beside round ones",
        tuple(case("clip", n, d) for n, d in RAGGED),
        ("auto", "products"),
        ahead=True,
    ),
    "portable": Section(
        "Kernels that run on every card",
        tuple(case("clip", n, 512) for n in (16384, 65536)),
        ("auto", PORTABLE, "products", "torch.compile"),
        ahead=True,
    ),
    "offload": Section(
        "Features in host memory, 1 GiB of workspace",
        tuple(case("clip", n, 512, workspace=2**30) for n in (65536, 262144)),
        ("auto", OFFLOAD, PINNED),
        ahead=True,
    ),
    "one_sided": Section(
        "One softmax, both gradients",
        tuple(case("info_nce", n, 512) for n in (16384, 65536)),
        ("auto", ROOMY, "products", PEERS[5]),
        ahead=True,
    ),
}
