"""Problems by executors, as many as you like, and how far results are from their bounds.

python tests/matrix --draws 20000                       by NumPy
python tests/matrix --draws 500 --seed 7 --executors 'torch.*' --record results.json
python tests/matrix --only 1234                         one of them, once more
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE)]

from evaluation import Tally, numbers  # noqa: E402
from executors import EXECUTORS  # noqa: E402
from gpu_executors import missing  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402


def versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
    found = {
        "commit": commit,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for name in ("infonce", "numpy", "numba", "torch"):
        found[name] = str(__import__(name).__version__)
    return found


def find_first(chosen: list[str], seed: int) -> int:
    """Prints the first wrong result of the problems that the test computes."""
    tally = Tally()
    for position, row in enumerate(zip_longest(*(numbers(name, seed) for name in chosen)), 1):
        for name, number in zip(chosen, row, strict=True):
            if number is not None:
                tally.run(name, seed, [number])
            if tally.wrong:
                print(f"first wrong: {name} at {position}: {tally.wrong[0]['wrong']}", flush=True)
                return 1
    return 0


def main() -> int:
    as_written = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--draws", type=int, default=2000, help="number of problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one problem")
    parser.add_argument("--executors", default="NumPy.*", help="expression; NumPy.* by default")
    parser.add_argument(
        "--first", action="store_true", help="as many as the test, to the first wrong"
    )
    parser.add_argument("--record", type=Path, help="write counts and worst shares here, JSON")
    arguments = parser.parse_args()
    console, tally, provenance = Console(), Tally(), versions()
    drawn = range(arguments.draws) if arguments.only is None else [arguments.only]
    chosen = [
        name for name, each in EXECUTORS.items()
        if re.fullmatch(arguments.executors, name) and not missing(each.marks)
    ]  # fmt: skip
    if arguments.first:
        return find_first(chosen, arguments.seed)
    for number in track(drawn, "problems", console=console):
        for name in chosen:
            tally.run(name, arguments.seed, [number])
    table = Table("compared", "largest share of its bound")
    for name, value in sorted(tally.worst.items()):
        table.add_row(name, f"{value:.2g}")
    console.print(table)
    decades = {f"1e{k}": v for k, v in sorted(tally.losses.items())}
    console.print(f"{chosen}\ncounts: {dict(tally.counts)}\nrows by size of loss: {decades}")
    for wrong in tally.wrong[:40]:
        console.print(f"wrong: {wrong}", markup=False)
    console.print(f"{len(drawn)} problems, {len(tally.wrong)} wrong")
    if arguments.record:
        record = {"seed": arguments.seed, "problems": len(drawn), "wrong": tally.wrong,
                  "versions": provenance, "counts": dict(sorted(tally.counts.items())),
                  "executors": chosen, "rows_by_decade_of_loss": decades,
                  "worst_share_of_bound": dict(sorted(tally.worst.items()))}  # fmt: skip
        arguments.record.write_text(
            json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8"
        )
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
