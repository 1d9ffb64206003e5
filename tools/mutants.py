"""Which synchronisations of the CUDA kernels can be taken away without any test noticing.

    python tools/mutants.py [FILE ...] [--seeds 32] [--record]

Each barrier, wait, release and fence in kernels/cuda (or in FILE) is taken away, one at a time.
Calls that come to it run in one schedule after the other, until results have other bits or a launch
ends with an error; then once more, in fewer schedules, while the engine watches the order of each
warp's accesses. A synchronisation that no call misses is superfluous, or has its reason in
`REASONS`, or needs another call in `CALLS`. `--record` writes benchmarks/results/mutants.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "emulator" / "synchronisation"))

from calls import CALLS, ONE_TILE, SWAP, run, use_emulator  # noqa: E402

SOURCES = ROOT / "kernels" / "cuda"
RECORD = ROOT / "benchmarks" / "results" / "mutants.json"
WATCHED_SEEDS = 4  # schedules of each call in which accesses are watched
SECONDS = 600  # for the calls of one mutant

# Why a synchronisation that no call notices stays: by file and a part of its line
REASONS: dict[tuple[str, str], str] = {
    ("ranks/swap.cu", "__threadfence_system();"):
        "orders writes to another GPU's memory; one thread runs at a time here",
    ("sm90/sweep_narrow.cu", "__syncwarp();"):
        "bar.sync and bar.arrive count warps, whose lanes have to be together; the emulator counts "
        "threads",
    ("sm90/sweep/strip.cuh", "__syncwarp();"):
        "after `wait_for_writes`, lane 0 starts the next stores; it keeps the lanes together",
    ("tiled/gradient.cu", "if (Options::SPARSE) __syncwarp();"):
        "no synchronisation: it keeps the compiler from using more registers",
    ("sm90/sweep_lse.cu", "__syncwarp();  // else the compiler"):
        "no synchronisation: it keeps the compiler from using more registers",
}  # fmt: skip

# --- synchronisations in sources ------------------------------------------------------------------

NAMES = re.compile(
    r"(?:lane\.|out->|out\.|team\.)?\b(?:sync|grid_barrier|barrier_(?:wait|arrive|arrive_at|expect)|named_barrier_(?:sync|arrive)"
    r"|__sync(?:threads|threads_or|warp)|sync_(?:warpgroup|consumer|all)|release_(?:stage|tile_stages)"
    r"|warpgroup_(?:arrive|commit|wait)(?:<\d>)?|cp_async_(?:commit|wait)(?:<[^>]*>)?|cluster_sync"
    r"|tma_stores_(?:wait|written)|wait_for_(?:reads|writes)|fence_barrier_init|fence_before_tma_store"
    r"|add_release|store_release_system|__threadfence_system)\("
)
LOOP = re.compile(r"\bwhile \((.*load_acquire.*)\)( \{| __nanosleep\(20\);)$")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int  # from 1
    code: str
    without: str  # the line without its synchronisation
    noted: str  # the line, which notes that it is reached as number `@`


def synchronisations(file: str, text: str) -> Iterator[Mutant]:
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("//")[0]
        if "__device__" in code or "__global__" in code:
            continue
        if loop := LOOP.search(code.rstrip()):
            condition, rest = loop.groups()
            before = line[: loop.start()]
            yield Mutant(
                file, number, line.strip(), f"{before}while (false){rest}",
                f"{before}while (device::reach(@), {condition}){rest}",
            )  # fmt: skip
        elif call := NAMES.search(code):
            end = closing(code, call.end())
            before, argument, after = code[: call.start()], code[call.end() : end], code[end + 1 :]
            if "__syncthreads_or" in call[0]:
                without, noted = (
                    f"{before}({argument}){after}",
                    f"(device::reach(@), {call[0]}{argument}))",
                )
                yield Mutant(file, number, line.strip(), without, f"{before}{noted}{after}")
            elif after.startswith(";"):
                noted = f"{{ device::reach(@); {call[0]}{argument}); }}"
                yield Mutant(
                    file,
                    number,
                    line.strip(),
                    f"{before};{after[1:]}",
                    f"{before}{noted}{after[1:]}",
                )


def closing(code: str, start: int) -> int:
    """The position of the parenthesis that closes the one opened before `start`."""
    depth = 1
    for i in range(start, len(code)):
        depth += (code[i] == "(") - (code[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"expected a call on one line, got {code!r}")


def all_mutants() -> list[Mutant]:
    paths = sorted(p for p in SOURCES.rglob("*.cu*") if p.relative_to(SOURCES).parts[0] != "ptx")
    files = [p.relative_to(SOURCES).as_posix() for p in paths if p.name != "ptx.cuh"]
    return [m for file in files for m in synchronisations(file, (SOURCES / file).read_text())]


@contextlib.contextmanager
def sources_with(changed: dict[tuple[str, int], str]) -> Iterator[Path]:
    """A copy of kernels/cuda with other lines, by file and number."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "cuda"
        shutil.copytree(SOURCES, copy)
        for file in {file for file, _ in changed}:
            lines = (copy / file).read_text().splitlines()
            for (changed_file, number), line in changed.items():
                if changed_file == file:
                    lines[number - 1] = line
            (copy / file).write_text("\n".join(lines) + "\n")
        yield copy


# --- runs of calls -------------------------------------------------------------------------------


def in_child(sources: Path, function: Callable[[], Any]) -> Any:
    """The result of `function` in a child process that compiles `sources`, or a string that says
    how it failed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(SECONDS)
        try:
            from infonce.kernels.gpu.device import compiler, signatures

            compiler.SOURCES = signatures.SOURCES = sources
            result = function()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    return pickle.loads(answer) if answer else f"the process ended by signal {status & 0x7F}"


def reached_by(names: list[str], mutants: list[Mutant]) -> dict[str, tuple[set[int], float, Any]]:
    """For each call: the mutants that it comes to, its seconds, and its results."""
    noted = {(m.file, m.line): m.noted.replace("@", str(i)) for i, m in enumerate(mutants)}
    answers = {}
    with sources_with(noted) as copy:
        for name in names:

            def measure(name: str = name) -> Any:
                import ctypes

                import engine

                start = time.perf_counter()
                result = run(name, 0)
                seconds = time.perf_counter() - start
                reached = engine._runtime().emulator_reached
                reached.restype = ctypes.POINTER(ctypes.c_ubyte)
                reached_mutants = {i for i in range(len(mutants)) if reached()[i]}
                if name == SWAP:  # in other processes
                    reached_mutants = {
                        i for i, m in enumerate(mutants) if m.file == "ranks/swap.cu"
                    }
                return reached_mutants, seconds, result

            answer = in_child(copy, measure)
            if isinstance(answer, str):
                raise SystemExit(f"{name}: {answer}")
            answers[name] = answer
            print(f"{name}: {len(answer[0])} synchronisations, {answer[1]:.1f} s", flush=True)
    return answers


def judge(mutant: Mutant, calls: list[tuple[str, Any]], seeds: int) -> dict[str, Any]:
    """How, and by which call in which schedule, it is noticed."""

    def search(watches_order: bool, seeds: int) -> Any:
        import engine

        engine.WATCHES_ORDER = watches_order
        for seed in range(seeds):
            for name, want in calls:
                try:
                    got = run(name, seed)
                except engine.KernelError as error:
                    return name, seed, str(error).splitlines()[0][:200]
                except Exception as error:  # of the host, which checks results too
                    return name, seed, f"{type(error).__name__}: {str(error)[:200]}"
                if got != want:
                    return name, seed, "results have other bits"
        return None

    with sources_with({(mutant.file, mutant.line): mutant.without}) as copy:
        answer = in_child(copy, lambda: search(False, seeds))
        if answer is None:
            answer = in_child(copy, lambda: search(True, min(seeds, WATCHED_SEEDS)))
    if isinstance(answer, str):  # it took the process with it
        return {"noticed": answer}
    if answer is None:
        return {}
    return dict(zip(("call", "seed", "noticed"), answer, strict=True))


def reason(mutant: Mutant) -> str:
    reasons = [
        why for (file, part), why in REASONS.items() if file == mutant.file and part in mutant.code
    ]
    return reasons[0] if reasons else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="of kernels/cuda; default: all")
    parser.add_argument("--seeds", type=int, default=32, help="schedules of each call (default 32)")
    parser.add_argument("--calls", default="", metavar="REGEX", help="only calls that match")
    parser.add_argument("--lines", type=int, nargs="+", help="only synchronisations on these lines")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    arguments = parser.parse_args()
    use_emulator()
    mutants = all_mutants()
    names = [name for name in [*CALLS, ONE_TILE, SWAP] if re.search(arguments.calls, name)]
    results = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["INFONCE_CACHE_DIR"] = cache
        calls = reached_by(names, mutants)
        for i, mutant in enumerate(mutants):
            if arguments.files and mutant.file not in arguments.files:
                continue
            if arguments.lines and mutant.line not in arguments.lines:
                continue
            # the shortest calls first: one that notices ends the search
            mine = sorted(
                (name for name in names if i in calls[name][0]), key=lambda n: calls[n][1]
            )
            verdict = judge(mutant, [(name, calls[name][2]) for name in mine], arguments.seeds)
            entry = {
                "file": mutant.file,
                "line": mutant.line,
                "code": mutant.code,
                "calls": len(mine),
                **verdict,
            }
            if not verdict:
                entry["reason"] = reason(mutant)
            results.append(entry)
            note = verdict.get("noticed") or f"MISSED by {len(mine)} calls: {entry['reason']}"
            print(f"{mutant.file}:{mutant.line}: {mutant.code[:60]}: {note}", flush=True)
    noticed = sum("noticed" in entry for entry in results)
    explained = sum(bool(entry.get("reason")) for entry in results)
    print(f"{noticed} of {len(results)} are noticed; {explained} more have their reason")
    if arguments.record:
        write(results, arguments.seeds)
    return int(noticed + explained < len(results))


def write(results: list[dict[str, Any]], seeds: int) -> None:
    """The record of a run. Results of other files that the record has stay there."""
    from infonce.cli import machine

    files = {entry["file"] for entry in results}
    earlier = json.loads(RECORD.read_text())["results"] if RECORD.exists() else []
    results = results + [entry for entry in earlier if entry["file"] not in files]
    results.sort(key=lambda entry: (entry["file"], entry["line"]))
    record = {
        "commit": machine.commit(), "date": machine.now(), "schedules": seeds,
        "synchronisations": len(results), "noticed": sum("noticed" in entry for entry in results),
        "results": results,
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
