"""Random calls on a GPU that this machine need not have: arrays lie at addresses without memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from infonce.kernels.epilogues import RetrievalRanks, Sigmoid, SoftmaxGradient, Statistics, Sums
from infonce.kernels.gpu import config
from infonce.kernels.linear import Classes, Segments
from infonce.kernels.problem import WORKSPACE, Gradients, NotFinite, Problem, uses_moments

KIB, GIB = 2**10, 2**30
DEVICES = [
    config.DeviceProperties("75", 40, 64 * KIB, 64 * KIB, 16 * GIB),
    config.DeviceProperties("80", 108, 163 * KIB, 164 * KIB, 80 * GIB),
    config.DeviceProperties("90", 132, 227 * KIB, 228 * KIB, 80 * GIB),
    config.DeviceProperties("90", 132, 227 * KIB, 228 * KIB, 141 * GIB),
    config.DeviceProperties("100", 148, 227 * KIB, 228 * KIB, 180 * GIB),
]
HOPPERS = DEVICES[2:4]
DTYPES = {"fp64": ["float64"], "fp32": ["float32", "bfloat16"], "tf32": ["float32"],
          "bf16x3": ["float32"], "bf16": ["bfloat16"], "fp16": ["float16"]}  # fmt: skip
LOSSES = ("rows", "both", "views", "pairs")  # which softmax there is: pairs are a sigmoid's
OPTIONS = ("label_smoothing", "joint", "classes", "weights")
Malloc = Callable[[int], Any]


@dataclass
class Block:
    """One block of a call over ranks."""

    epilogue: Any
    triangle: bool
    not_finite: NotFinite | None
    to_clear: Sums | None
    ahead: Gradients | None


@dataclass
class Drawn:
    """A random call, or a block of one."""

    device: config.DeviceProperties
    problem: Problem
    gradients: Gradients | None
    block: Block | None = None


def numpy_dtype(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class Drawing:
    """Draws calls. `malloc` makes the memory of their arrays."""

    def __init__(self, seed: int, malloc: Malloc) -> None:
        self.rng, self.malloc = random.Random(seed), malloc

    def some(self, unlikely: int) -> bool:
        """True one time in `unlikely`."""
        return self.rng.randrange(unlikely) == 0

    # -- arrays

    def vector(self, *shape: int, dtype: Any = np.float64) -> Any:
        return cupy.ndarray(shape, dtype, self.malloc(16))

    def matrix(self, rows: int, columns: int, dtype: str) -> Any:
        """Mostly packed; else with gaps, or off a multiple of 16 bytes."""
        item = numpy_dtype(dtype).itemsize
        gap, offset = self.rng.choice([(0, 0)] * 6 + [(16, 0), (item, 0), (0, item), (0, 8)])
        memory, strides = self.malloc(16) + offset % 16, (columns * item + gap, item)
        return cupy.ndarray((rows, columns), numpy_dtype(dtype), memory, strides)

    # -- shapes and options

    def shape(self, loss: str) -> tuple[int, int, int]:
        """Mostly of one block or few."""
        rng = self.rng
        sizes = (
            rng.randint(1, 300), 128 * rng.randint(1, 40), rng.randint(1, 9000),
            2 ** rng.randint(6, 16), rng.choice([511, 513, 2047, 2049, 4096, 32768]),
        )  # fmt: skip
        m, n = (rng.choice(sizes) for _ in range(2))
        m += m % 2 if loss == "views" else 0
        n = n if loss == "rows" else m
        d = rng.choice([rng.randint(1, 1300), 8 * rng.randint(1, 160), 64 * rng.randint(1, 24),
                        128, rng.choice([120, 136, 520, 576, 584, 640, 1024, 1032])])  # fmt: skip
        if loss == "views" and rng.random() < 0.3:  # narrow rows: dL/dx may stay in registers
            m = n = 2 * rng.randint(2000, 9000)
            d = 8 * rng.randint(1, 16)
        return m, n, d

    def softmax_options(self, loss: str, m: int, n: int, positives: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.some(8):
            options["margin"] = 0.1
        if self.some(8):
            options["hardness"] = 2.0
        if self.some(12):
            options["decoupled"] = True
        if self.some(8):
            options["key_bias"] = bias = self.vector(n)
            options["query_bias"] = bias if loss == "views" else None
        if self.some(8):
            options["false_negative_margin"] = 0.1
        if options.keys() & {"key_bias", "false_negative_margin"}:
            return options
        if self.some(8) and positives <= 1:
            options["retrieval_ranks"] = True
            return options
        option = self.rng.choice([*OPTIONS, *[""] * 16])
        if option == "label_smoothing" and positives <= 1:
            options["label_smoothing"] = 0.1
        elif option == "weights":
            options["weights"] = options["row_shares"] = self.vector(m)
        elif option == "joint" and loss == "views":
            options |= {"joint": True, "joint_copy_bytes": 2**20 * self.rng.randint(0, 9)}
        elif option == "classes" and loss != "pairs" and positives <= 1:
            order, place, number = (self.vector(m, dtype=np.int64) for _ in range(3))
            key_order, key_place = order, place
            if loss != "views":
                key_order, key_place = (self.vector(n, dtype=np.int64) for _ in range(2))
            in_sums = Segments(place, key_place, -(-n // 3), order, key_order)
            options["classes"] = Classes(place, key_place, in_sums=in_sums, positive_count=number)
            options["weights"] = options["row_shares"] = self.vector(m)
        return options

    def call(self) -> Drawn:
        """A whole call of one process."""
        rng = self.rng
        loss = rng.choice([*LOSSES, "rows", "rows"])
        m, n, d = self.shape(loss)
        precision = rng.choice([*DTYPES, "bf16", "bf16", "fp32"])
        dtypes = DTYPES[precision]
        query = self.matrix(m, d, rng.choice(dtypes))
        key = query if loss == "views" else self.matrix(n, d, rng.choice(dtypes))
        long = partial(self.vector, dtype=np.int64)
        number = rng.choice([0, 0, 1, 3]) if loss == "rows" else 0
        number = number or int(loss == "rows" and n < m)
        options = {} if loss == "pairs" else self.softmax_options(loss, m, n, number)
        positives = None
        if number or "classes" in options:
            positives = long(m, number) if number > 1 else long(m)
        plain = not options.keys() & {"joint", "classes", "label_smoothing"}
        ids = self.some(3) and plain
        wanted = rng.choice([(1, 1), (1, 1), (1, 0), (0, 1), (0, 0)])
        if loss == "views":
            wanted = wanted[0], 0
        gradients = None
        if any(wanted):
            gradients = Gradients(*self.destinations(query, key, wanted), None, *map(bool, wanted))
        workspace = rng.choice([None, None, 2**19, 2**22, 2**24, 2**26, 2**28, 2**30, 2**31])
        scalars = self.some(3)
        rows = m // 2 if options.get("joint") else m
        each = self.some(5)
        problem = Problem(
            query, key, 14.0, self.vector(rows) if each else 1 / m, positives,
            rng.choice([None, 1 / m]), bias=-10.0 if loss == "pairs" else None,
            symmetric=loss == "views", query_ids=long(m) if ids else None,
            key_ids=long(n) if ids else None, normalize=self.some(3), compute_precision=precision,
            method=rng.choice(["auto"] * 7 + ["tiled"] * 3 + ["fused", "naive"]),
            workspace=workspace or WORKSPACE, workspace_given=workspace is not None,
            progress=(lambda *_: None) if self.some(16) else None,
            known_row_nans=self.vector(m) if positives is not None else None, scalar_grads=scalars,
            moments=scalars and uses_moments(m * n, gradients is not None, False),
            row_direction_weight=0.5 if loss == "both" else 1.0,
            column_direction_weight=0.5 if loss == "both" else 0.0, **options,
        )  # fmt: skip
        return Drawn(rng.choice([*DEVICES, *HOPPERS, *HOPPERS]), problem, gradients)

    def destinations(self, query: Any, key: Any, wanted: Any) -> list[Any]:
        return [
            self.matrix(*z.shape, self.rng.choice([z.dtype.name] * 2 + ["float32"])) if w else None
            for z, w in zip((query, key), wanted, strict=True)
        ]

    def block_of_ranks(self) -> Drawn:
        """The block of a rank's rows and some keys: see distributed/passes.py."""
        drawn = self.call()
        problem = drawn.problem
        m, n, d = problem.shape
        problem.method, problem.positives = "auto", self.vector(m, dtype=np.int64)
        problem.retrieval_ranks, problem.joint, problem.classes = False, False, None
        problem.label_smoothing, problem.weights, problem.row_shares = 0.0, None, None
        problem.upstream, problem.joint_copy_bytes = self.vector(m), 0
        loss = "pairs" if problem.bias is not None else "both" if problem.two_sided else "rows"
        own = problem.symmetric
        if own and self.some(2):  # the keys of another rank
            problem.key, own, loss = self.matrix(n, d, problem.query.dtype.name), False, "both"
        if problem.symmetric:
            problem.symmetric, problem.column_direction_weight = own, problem.row_direction_weight
        problem.key_shard, problem.lacks_positives = not own, not own and self.some(2)
        if problem.compares_with_limits:
            problem.query_limits = self.vector(m)
            problem.key_limits = self.vector(n) if own or loss == "both" else None
        dtype, both = self.real(problem), own or loss == "both"
        ahead = None if self.some(4) else Gradients(want_key=False, add_query=True)
        gradients = drawn.gradients
        if loss == "pairs":
            epilogue: Any = Sigmoid(self.vector(m), self.vector(m), self.vector(m),
                                    self.vector(m) if problem.moments else None,
                                    self.vector(m))  # fmt: skip
        elif gradients is not None and self.some(2):
            columns = [self.vector(n), self.vector(n)] if both else [None, None]
            epilogue = SoftmaxGradient(self.vector(m), self.vector(m), *columns, self.vector(m))
        else:
            gradients = None
            positive = self.vector(m)
            if self.some(6):
                counts = partial(self.vector, dtype=np.int64)
                key_ranks = (self.vector(n), counts(n)) if both and not own else (None, None)
                epilogue = RetrievalRanks(positive, counts(m), *key_ranks)
            else:
                rows = self.sums(m, problem.moments)
                triangle = own and self.some(2)
                columns_of = rows if triangle else self.sums(n, problem.moments)
                epilogue = Statistics(rows, columns_of if triangle or both else None, positive)
        if gradients is not None:
            wanted = gradients.want_query, gradients.want_key
            dq = self.matrix(m, d, dtype) if wanted[0] else None
            dk = self.matrix(n, d, dtype) if wanted[1] or (both and not own) else None
            gradients = Gradients(dq, dk, None, dq is not None, dk is not None, self.some(2))
            gradients.add_query &= dq is not None
        triangle = own and (
            (isinstance(epilogue, Statistics) and epilogue.columns is not None)
            or (isinstance(epilogue, SoftmaxGradient) and problem.compares_with_limits)
        )
        if triangle and gradients is not None:
            gradients.add_query = False
        marks = None
        if isinstance(epilogue, Statistics | Sigmoid):
            marks = NotFinite(self.vector(m), self.vector(1), self.some(2))
        clear = getattr(epilogue, "columns", None) if both and not own else None
        drawn.problem, drawn.gradients = problem, gradients
        drawn.block = Block(epilogue, triangle, marks, clear, ahead)
        return drawn

    @staticmethod
    def real(problem: Problem) -> str:
        return "float64" if problem.compute_precision == "fp64" else "float32"

    def sums(self, n: int, moments: bool) -> Sums:
        return Sums(self.vector(n), self.vector(n), self.vector(n) if moments else None)
