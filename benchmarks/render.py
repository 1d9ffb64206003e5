"""Render the recorded results as tables of README.md.

    python benchmarks/render.py [--check]

Every `<!-- results:NAME begin -->` ... `<!-- results:NAME end -->` in the README is filled from
benchmarks/results/NAME.json, an object with `device`, `versions`, `commit`, `date`, optionally
`settings` and `environment`, and `results`: one object a row, whose keys are the columns. The end
of a key is its unit: `_s` seconds, `_bytes`, `_share` of 1, `_error` relative. Results of
benchmarks/gpu.py become tables with a column for each contender, and a plot beside their file if
matplotlib is installed. `--check` writes nothing and exits with 1 if the README is not what would
be written.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
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
    rows = record["results"]
    if "section" in rows[0]:
        return side_by_side(record)
    lines = provenance(record)
    keys = dict.fromkeys(
        key for row in rows for key, value in row.items() if not isinstance(value, (list, dict))
    )
    columns = {key: column(key) for key in keys}
    lines += ["", _line(heading for heading, _ in columns.values()), "|---" * len(keys) + "|"]
    for row in rows:
        given = ((form, row.get(key)) for key, (_, form) in columns.items())
        lines.append(_line("-" if value is None else form(value) for form, value in given))
    return "\n".join(lines) + "\n"


def provenance(record: Mapping[str, Any]) -> list[str]:
    """Where and when it was measured, and how."""
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if v)
    gpu = record.get("gpu")
    driver = f", driver {gpu['driver']}, CUDA {gpu['cuda']}" if gpu else ""
    lines = [
        f"{record['device']}{driver}; {versions}; commit {record['commit']}; {record['date']}."
    ]
    for part in ("settings", "environment"):
        pairs = (f"{name} {value}" for name, value in record.get(part, {}).items())
        if text := ", ".join(pairs):
            lines.append(f"{part.capitalize()}: {text}.")
    return lines


# --- one GPU, contenders side by side -------------------------------------------------------------

LIBRARY = "auto"  # the method that stands for this library as it is called
CEILING = "products"
NAMES = {LIBRARY: "infonce", CEILING: "bare products"}
WIDTH = 512  # of the features whose results are drawn
Row = Mapping[str, Any]


def side_by_side(record: Mapping[str, Any]) -> str:
    """One line for each case, one column for each contender, in tables by kind."""
    tables: dict[str, dict[str, dict[str, Row]]] = {}
    for row in record["results"]:
        case = tables.setdefault(row["table"], {}).setdefault(_case(row), {})
        case.setdefault(row["method"], row)  # of two sections, the first counts
    lines = [
        *provenance(record),
        f"cuBLAS's bf16 product of {record['gemm']['size']} rows: {_ceiling(record):.0f} TFLOP/s.",
        "",
        "Median milliseconds (Python and waiting included), MiB beyond inputs and gradients;",
        "errors of loss and gradient, relative to float64 on the same inputs.",
    ]
    for title, cases in tables.items():
        methods = list(dict.fromkeys(method for rows in cases.values() for method in rows))
        titles = [title, "goal", "of the bare products", "TFLOP/s"]
        lines += ["", _line([*titles, *(NAMES.get(method, method) for method in methods)])]
        lines.append("|---" * (len(titles) + len(methods)) + "|")
        lines += [
            _line([name, *_standing(rows), *(_measured(rows.get(method)) for method in methods)])
            for name, rows in cases.items()
        ]
    return "\n".join(lines) + "\n"


def _ceiling(record: Mapping[str, Any]) -> float:
    return float(statistics.median(record["gemm"]["gflops"])) / 1e3


def _case(row: Row) -> str:
    """What was measured, in words."""
    precision = "" if row["precision"] == "auto" else f", {row['precision']}"
    alone = "" if row["gradient"] else ", loss alone"
    return f"{row['loss']} {row['dtype']} {row['size']} x {row['dim']}{precision}{alone}"


def _standing(rows: Mapping[str, Row]) -> tuple[str, str, str]:
    """This library's goal, its time over that of the bare products, and its useful rate."""
    row = rows.get(LIBRARY, {})
    if "median_s" not in row:
        return "-", "-", "-"
    goal = "-"
    if "goal_s" in row:
        verdict = "reached" if row[row["timed"]] <= row["goal_s"] else "missed"
        goal = f"{1e3 * row['goal_s']:.3g} {verdict}"
    share = f"{row['of_products_share']:.2f}" if "of_products_share" in row else "-"
    return goal, share, f"{row['gflops'] / 1e3:.3g}"


def _measured(row: Row | None) -> str:
    """Time and memory, and below them the errors."""
    if row is None:
        return ""
    if "median_s" not in row:
        return "-"
    wall = f" ({1e3 * row['wall_s']:.3g})" if "wall_s" in row else ""
    errors = [f"{row[key]:.0e}" for key in ("loss_error", "gradient_error") if key in row]
    below = f"<br>{', '.join(errors)}" if errors else ""
    peak = row["peak_bytes"]
    memory = "" if peak is None else f", {peak / 2**20:.0f} MiB"
    return f"{1e3 * row['median_s']:.3g}{wall}{memory}{below}"


def drawn(row: Row) -> bool:
    """Whether a result is a point of the plot."""
    kind = row.get("loss"), row.get("dtype"), row.get("dim"), row.get("gradient")
    return kind == ("clip", "bfloat16", WIDTH, True) and "median_s" in row


def roofline(record: Mapping[str, Any], path: Path) -> None:
    """Plot useful TFLOP/s of CLIP against the batch, beside what cuBLAS reaches."""
    from matplotlib.figure import Figure

    rows = [row for row in record["results"] if drawn(row)]
    sizes = sorted({row["size"] for row in rows})
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    label = f"cuBLAS, product of {record['gemm']['size']} rows"
    axes.axhline(_ceiling(record), color="gray", linestyle=":", label=label)
    for method in sorted({row["method"] for row in rows}, key=lambda m: (m not in NAMES, m)):
        points: dict[int, float] = {}
        for row in rows:  # of two sections, the first counts
            if row["method"] == method:
                points.setdefault(row["size"], row["gflops"] / 1e3)
        style = {LIBRARY: "ko-", CEILING: "k--"}.get(method, "o-")
        line = zip(*sorted(points.items()), strict=True)
        axes.plot(*line, style, label=NAMES.get(method, method))
    axes.set(
        xscale="log", xlabel="rows in the batch", ylabel="useful TFLOP/s", ylim=(0, None),
        title=f"CLIP loss and gradient, bfloat16, width {WIDTH}, on {record['device']}",
    )  # fmt: skip
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


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
        for match in MARKED.finditer(after):
            draw(arguments.results, match["name"])
    return 0


def draw(results: Path, name: str) -> None:
    """The plot of a record that has one to draw."""
    record = json.loads((results / f"{name}.json").read_text())
    if any(map(drawn, record["results"])):
        try:
            roofline(record, results / f"{name}.png")
        except ImportError as error:
            print(f"{name}.png is not drawn: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
