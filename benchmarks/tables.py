"""Tables of the documentation, in Markdown, from a record of benchmarks/results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


Row = Mapping[str, Any]
TOOLS = {"python", "infonce", "numpy", "numba", "triton", "mpi4py", "cupy-cuda13x"}
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
    return key.replace("_", " "), _plain


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(record: Mapping[str, Any], *chosen: str) -> str:
    """Markdown: where and when it was measured, then one line for each result. If columns are
    `chosen`, results that were skipped are left out."""
    rows = record["results"]
    if "section" in rows[0]:
        return side_by_side(record, *chosen)
    lines = provenance(record)
    if chosen and "skipped" not in chosen:
        rows = [row for row in rows if "skipped" not in row]
    keys = chosen or dict.fromkeys(
        key for row in rows for key, value in row.items() if not isinstance(value, (list, dict))
    )
    columns = {key: column(key) for key in keys}
    lines += ["", _line(heading for heading, _ in columns.values()), "|---" * len(keys) + "|"]
    for row in rows:
        cells = ((form, row.get(key)) for key, (_, form) in columns.items())
        lines.append(_line("-" if value is None else form(value) for form, value in cells))
    return "\n".join(lines) + "\n"


def provenance(record: Mapping[str, Any]) -> list[str]:
    """The lines that say where, when and how the record was measured. Of versions, which the record
    has, those of contenders."""
    versions = (f"{n} {v}" for n, v in record["versions"].items() if v and n not in TOOLS)
    about = (record["device"], ", ".join(versions), f"commit {record['commit']}")
    lines = ["; ".join(filter(None, (*about, record["date"][:10]))) + "."]
    for part in ("settings", "environment"):
        pairs = (f"{name} {value}" for name, value in record.get(part, {}).items())
        if text := ", ".join(pairs):
            lines.append(f"{part.capitalize()}: {text}.")
    return lines


# --- contenders in one line -----------------------------------------------------------------------


def company(record: Mapping[str, Any]) -> str:
    """Records of benchmarks/small.py, a line for all widths of a batch: medians of calls alone, in
    ms, a number for each width, and ratios, each the largest of all widths and states."""
    batches: dict[tuple[str, int], list[Row]] = {}
    for row in record["results"]:
        batches.setdefault((row["loss"], row["rows"]), []).append(row)
    first = record["results"][0]
    contenders = [name for name, value in first.items() if isinstance(value, dict)]
    contenders = [name for name in contenders if name != "infonce.torch"]  # `module` takes longer
    measured = [name for name in ("infonce", "module") if name in contenders]
    headings = ["loss", "rows", "dim", *contenders, *(f"{name} / torch" for name in measured)]
    lines = [*provenance(record), "", _line(headings), "|---" * len(headings) + "|"]
    for (loss, count), rows in batches.items():
        cells = [loss, count, ", ".join(str(row["dim"]) for row in rows)]
        cells += [
            ", ".join(_ms(next(iter(row[name].values()))["median_s"]) for row in rows)
            for name in contenders
        ]
        cells += [_largest_ratio(rows, name, "torch") for name in measured]
        lines.append(_line(map(str, cells)))
    return "\n".join(lines) + "\n"


def _largest_ratio(rows: Iterable[Row], name: str, other: str) -> str:
    """The largest ratio of a median to that of another contender in the same state."""
    ratios = [
        of["median_s"] / row[other][state]["median_s"]
        for row in rows
        for state, of in row[name].items()
    ]
    return f"{max(ratios):.2f}"


def beside(record: Mapping[str, Any], *keys: str) -> str:
    """A line for each case, a column for each contender. The last two keys are the contender's and
    its number's, and the others tell cases apart."""
    *names, contender, number = keys
    forms = [column(name) for name in names]
    unit, form = next((unit for end, unit in UNITS.items() if number.endswith(end)), ("", _plain))
    cases: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in record["results"]:
        if "skipped" not in row:
            case = tuple(write(row[name]) for name, (_, write) in zip(names, forms, strict=True))
            cases.setdefault(case, {})[row[contender]] = form(row[number])
    contenders = dict.fromkeys(name for cells in cases.values() for name in cells)
    headings = [*(heading for heading, _ in forms), *(f"{name}{unit}" for name in contenders)]
    lines = [*provenance(record), "", _line(headings), "|---" * len(headings) + "|"]
    for case, cells in cases.items():
        lines.append(_line([*case, *(cells.get(name, "-") for name in contenders)]))
    return "\n".join(lines) + "\n"


def clients(record: Mapping[str, Any]) -> str:
    """Records of benchmarks/frameworks/clients.py: a line for each step."""
    steps: dict[str, list[Row]] = {}
    for row in record["results"]:
        steps.setdefault(row["step"], []).append(row)
    headings = ["step", "project", "its loss", "infonce in its place", "infonce"]
    lines = [*provenance(record), "", _line(headings), "|---" * len(headings) + "|"]
    for step, rows in steps.items():
        cells = ["out of memory" if "skipped" in row else _brief(row) for row in rows]
        lines.append(_line([step, rows[0]["loss by"], *cells]))
    return "\n".join(lines) + "\n"


# --- one GPU, contenders side by side -------------------------------------------------------------

LIBRARY = "auto"  # the method that stands for this library as it is called
CEILING = "products"
ROOMY = "1 GiB"  # a workspace that is set to the largest default
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


def side_by_side(record: Mapping[str, Any], *titles: str) -> str:
    """One line for each case, one column for each contender, in tables by kind: all of them, or
    those with these titles."""
    size, ceiling = record["gemm"]["size"], ceiling_tflops(record)
    lines = [
        *provenance(record),
        f"cuBLAS's bf16 product of {size} rows: {ceiling:.0f} TFLOP/s.",
        "",
        "Median milliseconds (Python and waiting included), MiB beyond inputs and gradients;",
        "errors of loss and gradient, relative to float64 on the same inputs.",
    ]
    tables = _cases(record)
    for title in titles or tables:
        methods = list(dict.fromkeys(method for rows in tables[title].values() for method in rows))
        headings = [title, "of the bare products"]
        headings += [NAMES.get(method, method) for method in methods]
        lines += ["", _line(headings), "|---" * len(headings) + "|"]
        lines += [
            _line(
                [
                    name,
                    _share(rows.get(LIBRARY, {})),
                    *(_measured(rows.get(method)) for method in methods),
                ]
            )
            for name, rows in tables[title].items()
        ]
    return "\n".join(lines) + "\n"


def times(record: Mapping[str, Any], *titles: str) -> str:
    """As `side_by_side` for tables with these titles, with times in ms, without calls for one of
    two gradients and calls in `ROOMY`. Memory is this library's."""
    lines, tables = provenance(record), _cases(record)
    for title in titles:
        rows = {name: rows for name, rows in tables[title].items() if not rows[LIBRARY].get("wrt")}
        methods = dict.fromkeys(
            method
            for row in rows.values()
            for method in row
            if "median_s" in row[method] and method != ROOMY
        )
        headings = [title, "of the bare products", "infonce (MiB)"]
        headings += [f"{NAMES.get(method, method)} (ms)" for method in methods]
        lines += ["", _line(headings), "|---" * len(headings) + "|"]
        for name, row in rows.items():
            cells = [
                _ms(row[m]["median_s"]) if "median_s" in row.get(m, {}) else "" for m in methods
            ]
            memory = f"{row[LIBRARY]['peak_bytes'] / 2**20:.0f}"
            lines.append(_line([name, _share(row[LIBRARY]), memory, *cells]))
    return "\n".join(lines) + "\n"


def _cases(record: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Row]]]:
    """Title of a table -> case -> method -> its result."""
    tables: dict[str, dict[str, dict[str, Row]]] = {}
    for row in record["results"]:
        case = tables.setdefault(row["table"], {}).setdefault(case_name(row), {})
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
    """How many cases reach their goal, and those that do not, in milliseconds."""
    rows = [row for row in record["results"] if "median_s" in row and "goal_s" in row]
    missed = [row for row in rows if row[row["timed"]] > row["goal_s"]]
    lines = [f"{len(rows) - len(missed)} of {len(rows)} goals are reached; missed:", ""]
    lines += [_line(["case", "goal (ms)", "measured (ms)"]), "|---|---|---|"]
    for row in missed:
        case = case_name(row) + ("" if row["method"] == LIBRARY else f", {row['method']}")
        lines.append(_line([case, _ms(row["goal_s"]), _ms(row[row["timed"]])]))
    return "\n".join(lines) + "\n"


def ladder(record: Mapping[str, Any]) -> str:
    """Cases that an earlier step of the ladder ran too, a line for each step."""
    headings = ["case", "step", "of the bare products", "TFLOP/s", "time, memory"]
    about = f"{record['device']}; commit {record['commit']}; {record['date'][:10]}."
    lines = [about, "", _line(headings), "|---" * len(headings) + "|"]
    for cases in _cases(record).values():
        for case, rows in cases.items():
            if rows.keys() & {"naive", "portable"} and rows[CEILING]["size"] >= 4096:  # not fused
                lines += [
                    _line([case, step, _share(row), f"{row['gflops'] / 1e3:.3g}", _brief(row)])
                    for method, step in STEPS.items()
                    if (row := rows.get(method))
                ]
    return "\n".join(lines) + "\n"


def ceiling_tflops(record: Mapping[str, Any]) -> float:
    """The rate of cuBLAS's bf16 product in the same run, in TFLOP/s."""
    return float(statistics.median(record["gemm"]["gflops"])) / 1e3


def case_name(row: Row) -> str:
    """The case of a row, in words."""
    precision = "" if row["precision"] == "auto" else f", {row['precision']}"
    alone = "" if row["gradient"] else ", loss only"
    if row.get("wrt"):
        alone = f", gradient of {' and '.join(row['wrt'])} only"
    keys = f" of {row['keys']}" if "keys" in row else ""
    return f"{row['loss']} {row['dtype']} {row['size']}{keys} x {row['dim']}{precision}{alone}"


def _share(row: Row) -> str:
    """The time divided by the time of the bare products."""
    return f"{row['products_share']:.2f}" if "products_share" in row else "-"


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


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


KINDS: dict[str, Callable[..., str]] = {
    "results": table, "beside": beside, "company": company, "clients": clients, "times": times,
    "peers": peers, "goals": goals, "ladder": ladder,
}  # fmt: skip
