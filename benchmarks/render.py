"""Render the recorded results as tables of README.md.

    python benchmarks/render.py [--check]

Every `<!-- results:NAME begin -->` ... `<!-- results:NAME end -->` in the README is filled from
benchmarks/results/NAME.json, an object with `device`, `versions`, `commit`, `date`, optionally
`settings` and `environment`, and `results`: one object a row, whose keys are the columns. The end
of a key is its unit: `_s` seconds, `_bytes`, `_share` of 1, `_error` relative. `--check` writes
nothing and exits with 1 if the README is not what would be written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARKED = re.compile(
    r"(?P<begin><!-- results:(?P<name>[\w.-]+) begin -->\n).*?"
    r"(?P<end><!-- results:(?P=name) end -->)",
    re.DOTALL,
)


UNITS: dict[str, tuple[str, Callable[[float], str]]] = {  # end of a key -> heading's end, format
    "_s": (" (ms)", lambda x: f"{1e3 * x:.3g}" if x < 1 else f"{1e3 * x:.0f}"),
    "_bytes": (" (MiB)", lambda x: f"{x / 2**20:.1f}"),
    "_share": (" share", lambda x: f"{x:.0%}"),
    "_error": (" error", lambda x: f"{x:.0e}"),
}


def column(key: str) -> tuple[str, Callable[[Any], str]]:
    """Heading of a key, and how its values are written."""
    for end, (heading, form) in UNITS.items():
        if key.endswith(end):
            return key.removesuffix(end).replace("_", " ") + heading, form
    return key.replace("_", " "), lambda x: f"{x:.4g}" if isinstance(x, float) else str(x)


def table(record: Mapping[str, Any]) -> str:
    """Markdown: where and when it was measured, then one line for each result."""
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if v)
    lines = [f"{record['device']}; {versions}; commit {record['commit']}; {record['date']}."]
    for part in ("settings", "environment"):
        pairs = (f"{name} {value}" for name, value in record.get(part, {}).items())
        if text := ", ".join(pairs):
            lines.append(f"{part.capitalize()}: {text}.")
    rows = record["results"]
    keys = dict.fromkeys(
        key for row in rows for key, value in row.items() if not isinstance(value, (list, dict))
    )
    columns = {key: column(key) for key in keys}
    lines += ["", _line(heading for heading, _ in columns.values()), "|---" * len(keys) + "|"]
    for row in rows:
        given = ((form, row.get(key)) for key, (_, form) in columns.items())
        lines.append(_line("-" if value is None else form(value) for form, value in given))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def render(readme: str, results: Path) -> str:
    """The README with every marked table replaced; OSError if a marker's file is missing."""

    def fill(match: re.Match[str]) -> str:
        record = json.loads((results / f"{match['name']}.json").read_text())
        return f"{match['begin']}{table(record)}{match['end']}"

    return MARKED.sub(fill, readme)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether README is stale")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    before = arguments.readme.read_text()
    after = render(before, arguments.results)
    if arguments.check and before != after:
        print(f"{arguments.readme} is stale: run python benchmarks/render.py", file=sys.stderr)
        return 1
    if not arguments.check:
        arguments.readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
