"""What calls ask of a GPU, before and after a change: launches, products and copies.

    python tools/launches.py record before.json     in the checkout before the change
    python tools/launches.py record after.json      in the checkout after the change
    python tools/launches.py compare before.json after.json

`record` draws 2600 calls and blocks of calls over ranks, and lets the library run them where
nothing is compiled and nothing runs: it needs CuPy, and no GPU. Of each it writes a digest of all
steps in their order: kernel, -D options, blocks, threads, shared memory and arguments; products,
copies and zeros. Addresses become buffers, in the order of their first use, and offsets. Beside it
is the memory that a call makes. `--show NUMBER` prints the steps of one call.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from infonce.kernels.gpu import fused, plan, recorded, select, shard
from infonce.kernels.gpu.device import compiler, recorder
from infonce.kernels.gpu.device.launches import Queue
from random_problems import Drawing, Drawn

MOST_STEPS = 4000  # that are recorded of a call; of a longer one the outcome is "too long"
Step = tuple[Any, ...]


class Direct:
    """A kernel that is launched without a queue: of the method naive, or of a small batch."""

    def __init__(self, into: Recording, file: str, name: str, defines: Any) -> None:
        self.into, self.what, self.kernel = into, (file, name, tuple(sorted(defines.items()))), self

    def __call__(self, grid: Any, block: Any, arguments: Any, **_: Any) -> None:
        packed = b"".join(np.asarray(argument).tobytes() for argument in arguments)
        packed += bytes(-len(packed) % 8)
        words = np.frombuffer(packed, np.uint64).tolist()
        self.into.direct.append((*self.what, grid[0], block[0], *words))


class Recording(recorder.Recorder):
    """The recording of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: list[Step] = []
        self.ends: list[int] = []  # of each launch's words

    def launch(self, *launch: Any) -> None:
        super().launch(*launch)
        self.ends.append(len(self.words.values))

    def memory(self, size: int) -> int:
        """Bytes that the call makes."""
        return sum(self.sizes[size:])

    def steps_taken(self) -> Iterator[Step]:
        """All steps, with addresses as numbers of buffers and offsets."""
        yield from map(self.relocated, self.direct)
        words = dict.fromkeys(range(len(self.words.values)))
        words |= dict(enumerate(self.words.values))
        for at, to in self.words.pointers:
            words[at] = ("at", to.array, to.offset)  # type: ignore[assignment]
        for at, argument, form in self.maps:
            words[at] = ("map", self.pointer(argument), form)  # type: ignore[assignment]
        first, ends = 0, iter(self.ends)
        for step in self.steps:
            if isinstance(step, recorder.Launch):
                last = next(ends)
                _, file, name, shared = step.function.args  # type: ignore[attr-defined]
                defines = tuple(sorted(step.function.keywords.items()))  # type: ignore[attr-defined]
                taken = tuple(map(self.named, (words[i] for i in range(first, last))))
                yield file, name, defines, step.grid, step.block, shared, *taken
                first = last
            else:
                pointers = range(*step.arguments.indices(len(self.other_arguments.values)))
                yield step.do.__name__, *(self.named(self.pointer(i)) for i in pointers)

    def pointer(self, argument: int) -> Any:
        to = self.pointers.get(argument)
        if to is not None:
            return "at", to.array, to.offset
        return self.known(self.other_arguments.values[argument])

    def known(self, word: Any) -> Any:
        """A factor in the host's memory by its value: addresses there are another every time."""
        return self.numbers.get(word, word)

    def relocated(self, step: Step) -> Step:
        buffers = []
        for word in step:
            try:
                to = recorder.resolve_placeholder(word)
                buffers.append(self.named(("at", to.array, to.offset)))
            except (TypeError, ValueError):
                buffers.append(word)
        return tuple(buffers)

    def named(self, word: Any) -> Any:
        if isinstance(word, tuple) and word[0] == "at":
            return f"{self.buffers.setdefault(word[1], len(self.buffers))}+{word[2]}"
        if isinstance(word, tuple):
            return "map", self.named(word[1]), word[2]
        return word

    def finish(self) -> None:
        """All is recorded."""
        self.buffers: dict[int, int] = {}
        self.pointers = dict(self.other_arguments.pointers)
        self.numbers = {at: f"factor {float(z)}" for z, at in host_numbers()}


_host_numbers: list[tuple[Any, int]] = []


def host_numbers() -> list[tuple[Any, int]]:
    return _host_numbers


class Device:
    """A device that this machine need not have."""

    id, compute_capability, mem_info = 0, "90", (2**50, 2**50)

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


@contextmanager
def nothing_runs() -> Iterator[SimpleNamespace]:
    """Within this context, work for the GPU goes to the recording `into`. `device` may be any."""
    from unittest.mock import patch

    now = SimpleNamespace(into=None, device=None)
    modules = [m for name, m in sys.modules.items() if name.startswith("infonce.kernels.gpu")]

    def to_recording(name: str) -> Any:
        return lambda _, *args, **options: getattr(now.into, name)(*args, **options)

    methods = (
        "function", "launch", "tensor_map", "gemm", "copy", "zeroed_array", "clear", "scratch",
        "do",
    )  # fmt: skip

    def function(device: Any, file: str, name: str, shared: int = 0, **defines: Any) -> Direct:
        return Direct(now.into, file, name, defines)

    def run_by_plan(build: Any, *parts: Any, **_: Any) -> Any:
        return {k: v for k, v in build(*parts, now.into).items() if v is not None}

    def host_number(value: float, real: Any) -> tuple[Any, int]:
        number = np.array(value, real)
        _host_numbers.append((number, number.ctypes.data))
        return number, number.ctypes.data

    from functools import cache

    patches = [
        patch.object(cupy.cuda, "Device", Device), patch.object(runtime, "getDevice", lambda: 0),
        patch.object(compiler, "start", lambda *_, **__: False),
        patch.object(compiler, "function", function),
        patch.object(plan, "run_by_plan", run_by_plan),
        patch.object(plan, "compile_kernels", lambda *_: None),
        patch.object(recorder, "MAX_STEPS", MOST_STEPS),
        patch.object(fused, "_barrier", lambda _: cupy.empty(2, np.uint32)),
        *(patch.object(Queue, name, to_recording(name)) for name in methods),
        *(patch.object(m, "device_properties", lambda _: now.device)
          for m in modules if hasattr(m, "device_properties")),
        *(patch.object(m, "host_number", cache(host_number))
          for m in modules if hasattr(m, "host_number")),
    ]  # fmt: skip
    for each in patches:
        each.start()
    try:
        yield now
    finally:
        for each in reversed(patches):
            each.stop()


def run(drawn: Drawn) -> str:
    """The call itself. Returns what came of it."""
    try:
        if drawn.block is None:
            select.solve(drawn.problem, drawn.gradients)
        else:
            block = drawn.block
            shard.run_block_pass(
                drawn.problem, block.triangle, block.epilogue, drawn.gradients, block.not_finite,
                block.to_clear, block.ahead,
            )  # fmt: skip
    except recorder.TooLong:
        return "too long"
    except ValueError as error:
        return f"refused: {error}"
    except (RuntimeError, NotImplementedError) as error:  # operations on arrays need a device
        return f"arrays: {type(error).__name__}"
    return "done"


def record_vectors(drawn: Drawn, into: Recording) -> None:
    """Steps on vectors of one rank."""
    problem = drawn.problem
    vectors = shard.VectorsOverRanks()
    if not vectors.has_plan(problem) or problem.bias is not None or problem.retrieval_ranks:
        return
    problem, stats = vectors.statistics(problem)
    not_finite = recorded.NotFinite(cupy.empty(len(problem.query)), cupy.empty(1))
    end = vectors.finalize(problem, stats, False, False, SimpleNamespace(not_finite=not_finite))
    vectors.totals(problem, end.losses, end.log_scale_grad, None, None)


def record_call(drawing: Drawing, now: SimpleNamespace, index: int) -> tuple[str, list[Step], int]:
    """The outcome of call `index`, its steps, and the bytes that it makes.

    Every fourth call is a block over ranks, and every 16th has steps on vectors of a rank as well.
    """
    now.into = into = Recording()
    drawing.malloc = into.malloc
    with cupy.cuda.using_allocator(into.malloc):
        drawn = drawing.block_of_ranks() if index % 4 == 3 else drawing.call()
        now.device, count_before = drawn.device, len(into.sizes)
        outcome = run(drawn)
        if index % 16 == 0 and outcome == "done" and int(drawn.device.capability) >= 80:
            record_vectors(drawn, into)
    into.finish()
    return outcome, list(into.steps_taken()), into.memory(count_before)


def record(path: Path, calls: int, seed: int, show: int | None) -> None:
    rows, kinds, total = [], Counter[str](), 0
    with nothing_runs() as now:
        for index in range(calls):
            drawing = Drawing(seed * 1_000_003 + index, lambda _: None)
            outcome, steps, memory = record_call(drawing, now, index)
            kinds[outcome.split(":")[0]] += 1
            total += len(steps)
            digest = hashlib.sha256(repr((outcome, steps)).encode()).hexdigest()[:16]
            rows.append([digest, memory, len(steps), outcome[:80]])
            if index == show:
                print(*steps, sep="\n")
    path.write_text(json.dumps(rows, indent=0) + "\n")
    print(f"{calls} calls, {total} steps: {dict(kinds)}")


def compare(before: Path, after: Path) -> int:
    """0 if both files have the same calls with the same steps."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    different = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a[0] != b[0]]
    for i in different[:20]:
        print(f"call {i}: {old[i][1:]} before, {new[i][1:]} after")
    memory = [b[1] - a[1] for a, b in zip(old, new, strict=True) if a[1] != b[1]]
    print(f"{len(old) - len(different)} of {len(old)} calls have the same steps")
    print(f"{len(memory)} take other memory, {sum(memory)} bytes more in all, "
          f"at most {max(memory, default=0)}")  # fmt: skip
    return bool(different)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--calls", type=int, default=2600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int)
    options = parser.parse_args()
    if options.what == "compare":
        return compare(*options.paths)
    record(options.paths[0], options.calls, options.seed, options.show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
