"""Render the recorded results as tables and plots of the documentation.

    python benchmarks/render.py [--check] [PAGE ...]

A page has marks, `<!-- KIND:NAME begin -->` ... `<!-- KIND:NAME end -->`. What is between them is
filled from benchmarks/results/NAME.json, an object with `device`, `versions`, `commit`, `date`,
optionally `settings` and `environment`, and `results`: one object a row, whose keys are the
columns. The end of a key is its unit: `_s` seconds, `_bytes`, `_share` of 1, `_error` relative.

| kind | table |
|---|---|
| `results` | all rows; of benchmarks/gpu.py's records, a column for each contender |
| `peers` | a few cases of benchmarks/gpu.py's record, beside the best of the other projects |
| `goals` | the cases with a goal, and whether it was reached |
| `ladder` | the cases that several steps of the ladder in docs/kernels.md ran |

Records of benchmarks/gpu.py have plots too, drawn where matplotlib is installed: NAME.png (useful
TFLOP/s, all contenders), NAME-peers.png (time and memory) and NAME-shapes.png (time over
torch.compile's). `--check` writes nothing and exits with 1 if a page is not what would be written.
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
PAGES = [HERE.parent / "README.md", HERE / "NOTES.md"]
PAGES += [HERE.parent / "docs" / f"{name}.md" for name in ("kernels", "migrating", "results")]
MARKED = re.compile(
    r"(?P<begin><!-- (?P<kind>results|peers|goals|ladder):(?P<name>[\w.-]+) begin -->\n).*?"
    r"(?P<end><!-- (?P=kind):(?P=name) end -->)",
    re.DOTALL,
)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


UNITS: dict[str, tuple[str, Callable[[float], str]]] = {  # end of a key -> heading's end, format
    "_s": (" (ms)", _ms),
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
        cells = ((form, row.get(key)) for key, (_, form) in columns.items())
        lines.append(_line("-" if value is None else form(value) for form, value in cells))
    return "\n".join(lines) + "\n"


def provenance(record: Mapping[str, Any]) -> list[str]:
    """The lines that say where, when and how the record was measured."""
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
OTHERS = (  # what is not this library's
    "panels", "torch", "torch.compile", "open_clip", "cut_cross_entropy", "inf_cl",
    "memory_efficient_clip", "siglip_kernel", "quack",
)  # fmt: skip
SELECTED = (  # cases of the `peers` table
    "clip bfloat16 8192 x 512", "clip bfloat16 32768 x 512", "clip bfloat16 65536 x 512",
    "clip float32 16384 x 512, fp32", "lit bfloat16 65536 x 512", "siglip bfloat16 65536 x 512",
    "nt_xent bfloat16 65536 x 128", "nt_xent float32 256 x 2048",
)  # fmt: skip
NAMES = {LIBRARY: "infonce", CEILING: "bare products"}
STEPS = {"naive": "1. naive", "portable": "2. tiles", LIBRARY: "3. sweeps", CEILING: NAMES[CEILING]}
WIDTH = 512  # of the features whose results are drawn
Row = Mapping[str, Any]


def side_by_side(record: Mapping[str, Any]) -> str:
    """One line for each case, one column for each contender, in tables by kind."""
    lines = [
        *provenance(record),
        f"cuBLAS's bf16 product of {record['gemm']['size']} rows: {_ceiling(record):.0f} TFLOP/s.",
        "",
        "Median milliseconds (Python and waiting included), MiB beyond inputs and gradients;",
        "errors of loss and gradient, relative to float64 on the same inputs.",
    ]
    for title, cases in _cases(record).items():
        methods = list(dict.fromkeys(method for rows in cases.values() for method in rows))
        titles = [title, "of the bare products", "TFLOP/s"]
        lines += ["", _line([*titles, *(NAMES.get(method, method) for method in methods)])]
        lines.append("|---" * (len(titles) + len(methods)) + "|")
        lines += [
            _line([name, *_standing(rows), *(_measured(rows.get(method)) for method in methods)])
            for name, rows in cases.items()
        ]
    return "\n".join(lines) + "\n"


def _cases(record: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Row]]]:
    """Title of a table -> case -> method -> its result."""
    tables: dict[str, dict[str, dict[str, Row]]] = {}
    for row in record["results"]:
        case = tables.setdefault(row["table"], {}).setdefault(_case(row), {})
        case.setdefault(row["method"], row)  # of two sections, the first counts
    return tables


def _all_cases(record: Mapping[str, Any]) -> dict[str, dict[str, Row]]:
    """The cases of all tables. A case of two tables has the rows of the first."""
    tables = reversed(_cases(record).values())
    return {case: rows for table in tables for case, rows in table.items()}


def peers(record: Mapping[str, Any]) -> str:
    """A few cases: this library, the bare products, and the best of the others."""
    headings = ["loss and gradient", *NAMES.values(), "fastest other", "other of least memory"]
    lines = [_line(headings), "|---" * len(headings) + "|"]
    cases = _all_cases(record)
    for case in filter(cases.__contains__, SELECTED):
        rows = {method: row for method, row in cases[case].items() if "median_s" in row}
        others = [rows[method] for method in OTHERS if method in rows]
        best = (min(others, key=lambda row: row[field]) for field in ("median_s", "peak_bytes"))
        cells = [_brief(rows[method]) if method in rows else "-" for method in NAMES]
        cells += [f"{row['method']}: {_brief(row)}" for row in best] if others else ["-", "-"]
        lines.append(_line([case, *cells]))
    return "\n".join(lines) + "\n"


def _brief(row: Row) -> str:
    """Time and memory."""
    return f"{_ms(row['median_s'])} ms, {row['peak_bytes'] / 2**20:.0f} MiB"


def goals(record: Mapping[str, Any]) -> str:
    """Cases with a goal, in milliseconds."""
    lines = [_line(["case", "goal (ms)", "measured (ms)", ""]), "|---|---|---|---|"]
    for row in record["results"]:
        if "median_s" in row and "goal_s" in row:
            goal, time = row["goal_s"], row[row["timed"]]
            case = _case(row) + ("" if row["method"] == LIBRARY else f", {row['method']}")
            verdict = "reached" if time <= goal else "missed"
            lines.append(_line([case, _ms(goal), _ms(time), verdict]))
    return "\n".join(lines) + "\n"


def ladder(record: Mapping[str, Any]) -> str:
    """Cases that an earlier step of the ladder ran too, a line for each step."""
    headings = ["case", "step", "of the bare products", "TFLOP/s", "time, memory"]
    lines = [*provenance(record)[:1], "", _line(headings), "|---" * len(headings) + "|"]
    for cases in _cases(record).values():
        for case, rows in cases.items():
            if rows.keys() & {"naive", "portable"} and rows[CEILING]["size"] >= 4096:  # not fused
                lines += [
                    _line([case, step, *_standing({LIBRARY: rows[method]}), _brief(rows[method])])
                    for method, step in STEPS.items()
                    if method in rows
                ]
    return "\n".join(lines) + "\n"


def _ceiling(record: Mapping[str, Any]) -> float:
    return float(statistics.median(record["gemm"]["gflops"])) / 1e3


def _case(row: Row) -> str:
    """The case of a row, in words."""
    precision = "" if row["precision"] == "auto" else f", {row['precision']}"
    alone = "" if row["gradient"] else ", loss only"
    if row.get("wrt"):
        alone = f", gradient of {' and '.join(row['wrt'])} only"
    keys = f" of {row['keys']}" if "keys" in row else ""
    return f"{row['loss']} {row['dtype']} {row['size']}{keys} x {row['dim']}{precision}{alone}"


def _standing(rows: Mapping[str, Row]) -> tuple[str, str]:
    """This library's time divided by the time of the bare products, and its useful rate."""
    row = rows.get(LIBRARY, {})
    if "median_s" not in row:
        return "-", "-"
    share = f"{row['products_share']:.2f}" if "products_share" in row else "-"
    return share, f"{row['gflops'] / 1e3:.3g}"


def _measured(row: Row | None) -> str:
    """Time and memory, and below them the errors."""
    if row is None:
        return ""
    if "median_s" not in row:
        return "-"
    wall = f" ({_ms(row['wall_s'])})" if "wall_s" in row else ""
    errors = [f"{row[key]:.0e}" for key in ("loss_error", "gradient_error") if key in row]
    below = f"<br>{', '.join(errors)}" if errors else ""
    peak = row["peak_bytes"]
    memory = "" if peak is None else f", {peak / 2**20:.0f} MiB"
    return f"{_ms(row['median_s'])}{wall}{memory}{below}"


def drawn(row: Row) -> bool:
    """Whether a result is a point of the plot."""
    kind = row.get("loss"), row.get("dtype"), row.get("dim"), row.get("gradient")
    return kind == ("clip", "bfloat16", WIDTH, True) and "median_s" in row


def _curves(
    axes: Any, rows: Iterable[Row], field: str, factor: float, wanted: Callable[[str], bool]
) -> None:
    """One line for each contender: `field` against the batch."""
    rows = [row for row in rows if wanted(row["method"]) and row.get(field) is not None]
    for method in sorted({row["method"] for row in rows}, key=lambda m: (m not in NAMES, m)):
        points: dict[int, float] = {}
        for row in rows:  # of two sections, the first counts
            if row["method"] == method:
                points.setdefault(row["size"], row[field] * factor)
        style = {LIBRARY: "ko-", CEILING: "k--"}.get(method, "o-")
        line = zip(*sorted(points.items()), strict=True)
        axes.plot(*line, style, label=NAMES.get(method, method))
    sizes = sorted({row["size"] for row in rows})
    axes.set(xscale="log", xlabel="rows in the batch")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def roofline(record: Mapping[str, Any], path: Path) -> None:
    """Plot useful TFLOP/s of CLIP against the batch, beside what cuBLAS reaches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    label = f"cuBLAS, product of {record['gemm']['size']} rows"
    axes.axhline(_ceiling(record), color="gray", linestyle=":", label=label)
    _curves(axes, filter(drawn, record["results"]), "gflops", 1e-3, lambda method: True)
    axes.set(
        ylabel="useful TFLOP/s", ylim=(0, None),
        title=f"CLIP loss and gradient, bfloat16, width {WIDTH}, on {record['device']}",
    )  # fmt: skip
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


def over_compiled(record: Mapping[str, Any], path: Path) -> None:
    """Plot CLIP's time over torch.compile's, against the width and against the batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (along, fixed, label) in zip(
        figure.subplots(1, 2),
        (("dim", "size", "features in a row"), ("size", "dim", "rows in the batch")),
        strict=True,
    ):
        lines: dict[Any, dict[str, dict[int, float]]] = {}  # of a fixed value, by method
        for row, ratio in _ratios(record):
            method_line = lines.setdefault(row[fixed], {}).setdefault(row["method"], {})
            method_line.setdefault(row[along], ratio)  # of two sections, the first counts
        value = max(lines, key=lambda name: max(map(len, lines[name].values())))
        for method, points in lines[value].items():
            style = {LIBRARY: "ko-", CEILING: "k--"}.get(method, "o-")
            line = zip(*sorted(points.items()), strict=True)
            axes.plot(*line, style, label=NAMES.get(method, method))
        axes.axhline(1, color="gray", linestyle=":")
        axes.set(xscale="log", xlabel=label, ylim=(0, None), ylabel="time over torch.compile's")
        places = sorted({at for points in lines[value].values() for at in points})
        ticks = [at for i, at in enumerate(places) if i == 0 or at > 1.05 * places[i - 1]]
        axes.set_xticks(ticks, [str(at) for at in ticks], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_title(f"{value} {'rows' if fixed == 'size' else 'features'}", fontsize="medium")
    figure.suptitle(f"CLIP loss and gradient, bfloat16, on {record['device']}", fontsize="medium")
    labelled = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()[:-1]}
    figure.legend(labelled.values(), labelled.keys(), loc="outside right upper")
    figure.savefig(path, dpi=100)


def _ratios(record: Mapping[str, Any]) -> list[tuple[Row, float]]:
    """Results of CLIP in bfloat16, and their times over torch.compile's in the same section."""
    rows = [
        row
        for row in record["results"]
        if (row.get("loss"), row.get("dtype")) == ("clip", "bfloat16")
        and row.get("section") in ("widths", "portable")
        and "median_s" in row
    ]
    compiled = {
        (row["section"], _case(row)): row["median_s"]
        for row in rows
        if row["method"] == "torch.compile"
    }
    pairs = ((row, compiled.get((row["section"], _case(row)))) for row in rows)
    return [
        (row, row["median_s"] / time) for row, time in pairs if time and row["method"] not in OTHERS
    ]


def time_and_memory(record: Mapping[str, Any], path: Path) -> None:
    """Plot time and memory of CLIP against the batch, beside the other projects."""
    from matplotlib.figure import Figure

    shown = (*NAMES, *OTHERS)
    rows = [row for row in record["results"] if drawn(row)]
    compared = {row["size"] for row in rows if row["method"] in OTHERS}
    rows = [row for row in rows if row["size"] in compared]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, rows, "median_s", 1e3, lambda method: method in shown)
    _curves(right, rows, "peak_bytes", 2**-20, lambda method: method in shown)
    left.set(yscale="log", ylabel="milliseconds")
    right.set(yscale="log", ylabel="MiB beyond inputs and gradients")
    title = f"CLIP loss and gradient, bfloat16, width {WIDTH}, on {record['device']}"
    figure.suptitle(title, fontsize="medium")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=100)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


KINDS = {"results": table, "peers": peers, "goals": goals, "ladder": ladder}


def render(page: str, results: Path) -> str:
    """The page with every marked table replaced; OSError if a mark's file is missing."""

    def fill(match: re.Match[str]) -> str:
        record = json.loads((results / f"{match['name']}.json").read_text())
        return f"{match['begin']}{KINDS[match['kind']](record)}{match['end']}"

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


def draw(results: Path, name: str) -> None:
    """The plots of a record that has some to draw."""
    record = json.loads((results / f"{name}.json").read_text())
    try:
        if any(drawn(row) and row["method"] == "torch" for row in record["results"]):
            roofline(record, results / f"{name}.png")
            time_and_memory(record, results / f"{name}-peers.png")
        if _ratios(record):
            over_compiled(record, results / f"{name}-shapes.png")
    except ImportError as error:
        print(f"{name}.png is not drawn: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
