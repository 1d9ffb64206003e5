"""Render the recorded results as tables and plots of the documentation.

    python benchmarks/render.py [--check] [PAGE ...]

A page has marks, `<!-- KIND:NAME begin -->` ... `<!-- KIND:NAME end -->`. What is between them is
filled from benchmarks/results/NAME.json, an object with `device`, `versions`, `commit`, `date`,
optionally `settings` and `environment`, and `results`: one object a row, whose keys are the
columns. The end of a key is its unit: `_s` seconds, `_bytes`, `_share` of 1, `_error` relative.
`<!-- results:NAME KEY; KEY begin -->` chooses columns or, of
benchmarks/gpu.py's records, tables, and `<!-- times:NAME TITLE; TITLE begin -->` tables.

| kind | table |
|---|---|
| `results` | all rows; of benchmarks/gpu.py's records, a column for each contender |
| `beside` | a line for each case, a column for each contender: KEY...; CONTENDER; NUMBER |
| `times` | of benchmarks/gpu.py's records, only times, of chosen tables |
| `company` | of benchmarks/small.py: medians of calls alone, and the largest ratios |
| `clients` | of benchmarks/frameworks/clients.py: a line for each step |
| `peers` | a few cases of benchmarks/gpu.py's record, beside the best of the other projects |
| `goals` | the cases that missed their goal |
| `ladder` | the cases that several steps of the ladder in docs/kernels.md ran |

Records of benchmarks/gpu.py have plots too, drawn where matplotlib is installed: NAME.png (useful
TFLOP/s, all contenders), NAME-peers.png (time and memory) and NAME-shapes.png (time over
torch.compile's). `--check` writes nothing and exits with 1 if a page is not what would be written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from plots import draw
from tables import KINDS

HERE = Path(__file__).resolve().parent
PAGES = [HERE.parent / "README.md", HERE / "NOTES.md"]
PAGES += [HERE.parent / "docs" / f"{name}.md" for name in ("kernels", "migrating", "results")]
MARKED = re.compile(
    r"(?P<begin><!-- (?P<kind>"
    + "|".join(KINDS)
    + r"):(?P<name>[\w.-]+)(?P<columns> [^<>]+)? begin -->\n).*?"
    r"(?P<end><!-- (?P=kind):(?P=name) end -->)",
    re.DOTALL,
)


def render(page: str, results: Path) -> str:
    """The page with every marked table replaced; OSError if a mark's file is missing."""

    def fill(match: re.Match[str]) -> str:
        record = json.loads((results / f"{match['name']}.json").read_text())
        columns = [key.strip() for key in (match["columns"] or "").split(";") if key]
        return f"{match['begin']}{KINDS[match['kind']](record, *columns)}{match['end']}"

    return MARKED.sub(fill, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES, metavar="PAGE")
    arguments = parser.parse_args()
    stale = False
    for page in arguments.pages:
        before = page.read_text()
        after = render(before, arguments.results)
        if not arguments.check:
            page.write_text(after)
            for name in {match["name"] for match in MARKED.finditer(after)}:
                draw(arguments.results, name)
        elif before != after:
            print(f"{page} is stale: run python benchmarks/render.py", file=sys.stderr)
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
