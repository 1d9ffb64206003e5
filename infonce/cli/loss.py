"""`infonce loss`: one loss of embeddings in files, and its gradients as files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from rich.table import Table

import infonce

from ..checks import validation
from ..reference import normalize
from ..result import LossAndGrad
from ..spec import CHOICES, DEFAULTS, LOSSES, OPTIONS, SOFTMAX, VECTORS, Loss
from .common import (
    UNITS_HELP,
    Bytes,
    human,
    one_line_errors,
    peak_resident,
    progress_bar,
    reset_peak,
    resident,
    stdout,
    to_json,
)
from .embeddings import open_embeddings, open_npy, some, split
from .gradient_files import GradientFiles, check_gradient_files

PATH = click.Path(path_type=Path)
LABELLED = ("info_nce", "sup_con")
SIDES = ("rows", "columns")
NORMS = 0.95, 1.05  # of rows that count as normalized, in whatever precision
SAMPLE = 256  # rows whose norm is looked at


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of `infonce.spec` that have a help text for the command line."""
    for name, option in reversed(OPTIONS.items()):
        if not option.flag:
            continue
        flag = _flag(name)
        type_: Any = None
        if isinstance(option.default, bool):
            flag = f"{flag}/{_flag(f'no_{name}')}"
        elif name in CHOICES:
            type_ = click.Choice(CHOICES[name])
        elif name in VECTORS:
            type_ = PATH
        decorate = click.option(flag, type=type_, default=option.default, help=option.flag)
        command = decorate(command)
    return command


@click.command()
@click.argument("image")
@click.argument("text", required=False)
@click.option("--loss", "kind", type=click.Choice(list(LOSSES)), default="clip", help="Which loss.")
@click.option("--temperature", type=float, help="Divides the dot products. (Or pass --scale.)")
@click.option("--scale", type=float, help="Multiplies the dot products.")
@click.option("--bias", type=float, help="Added to the logits (siglip; -10 by default).")
@click.option(
    "--labels",
    type=PATH,
    help="Index of each query's key, or of several (info_nce); class of each row (sup_con); .npy.",
)
@click.option(
    "--ids",
    type=PATH,
    multiple=True,
    help="Pairs of equal ids are no negatives, .npy; pass it twice for ids of rows and of columns.",
)
@_spec_options
@click.option(
    "--workspace",
    type=Bytes(),
    default="256MiB",
    help=f"Upper limit of temporary memory; {UNITS_HELP}.",
)
@click.option(
    "--metrics/--no-metrics",
    default=None,
    help="Report retrieval and the loss of each direction; by default if rows have one positive.",
)
@click.option("--grad-out", type=PATH, metavar="DIR", help="Write gradients into this folder.")
@click.option(
    "--grad-dtype", type=click.Choice(validation.FLOATS), help="Dtype of the written gradients."
)
@click.option("--force", is_flag=True, help="Overwrite gradients of an earlier run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def loss(
    image: str,
    text: str | None,
    kind: str,
    labels: Path | None,
    ids: tuple[Path, ...],
    bias: float | None,
    metrics: bool | None,
    grad_out: Path | None,
    grad_dtype: str | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Loss, retrieval and gradients of embeddings in files.

    IMAGE and TEXT hold one embedding a row: for info_nce and gte the queries and the keys. nt_xent
    takes one argument, the two views of sample i in rows i and i + B, and sup_con one argument and
    --labels. Each is a .npy file, a .npz or .safetensors file (FILE:KEY if it holds several
    arrays), or a folder of .npy shards, taken in the order of the numbers in their names. bfloat16
    is read from .safetensors, and from .npy as ml_dtypes saves it.

    .npy and .safetensors files stay on disk and are mapped into memory; .npz arrays are read, and
    shards are joined in memory, in one array of their dtype. --grad-out DIR gets one .npy for each
    argument that has a gradient, and scalars.json.
    """
    chosen = LOSSES[kind]
    sources = _sources(chosen, image, text)
    if bias is not None and not chosen.sigmoid:
        raise click.UsageError("--bias is of siglip")
    if labels is not None and kind not in LABELLED:
        raise click.UsageError(f"--labels is of {' and '.join(LABELLED)}")
    if labels is None and chosen.classes:
        raise click.UsageError(f"{kind}: expected --labels, the class of each row")
    if len(ids) > 2:
        raise click.UsageError(f"--ids: expected one file or two, got {len(ids)}")
    if grad_out is None and (force or grad_dtype):
        raise click.UsageError("--force and --grad-dtype need --grad-out")

    paths = {"labels": labels, **{name: options.pop(name) for name in VECTORS}}
    paths = {name: path for name, path in paths.items() if path is not None}
    if grad_out is not None:
        files = [split(source)[0] for source in sources.values()]
        files += [*paths.values(), *ids]
        with_grad = [name for name in chosen.arguments if name not in chosen.locked]
        check_gradient_files(grad_out, with_grad, files, force)

    from ..kernels.cpu import backend as cpu  # noqa: F401  the compiler's own memory is not the loss's

    measured = reset_peak()
    before = resident()
    features = {name: open_embeddings(source) for name, source in sources.items()}
    if bias is not None:
        options["bias"] = bias
    options |= {name: open_npy(path) for name, path in paths.items()}
    if ids:
        arrays = [open_npy(path) for path in ids]
        options["ids"] = arrays[0] if len(ids) == 1 else tuple(arrays)
    options["metrics"] = _ranked(chosen, options) if metrics is None else metrics

    names = {name: f"{name} ({source})" for name, source in sources.items()}
    names |= {name: f"{_flag(name)} ({path})" for name, path in paths.items()}
    names |= {f"ids{f'[{i}]' * (len(ids) > 1)}": f"--ids ({path})" for i, path in enumerate(ids)}
    start = time.perf_counter()
    if grad_out is None:
        result = _evaluate(chosen, features, names, wrt=(), **options)
    else:
        with GradientFiles(
            grad_out, {name: features[name] for name in with_grad}, grad_dtype
        ) as gradients:
            result = _evaluate(chosen, features, names, out=gradients.arrays, **options)
            gradients.commit(_scalars(result))
    seconds = time.perf_counter() - start

    size = sum(z.nbytes for z in features.values())
    peak = peak_resident()
    report = {
        "loss": kind,
        "inputs": {
            name: {"source": source, "shape": features[name].shape,
                   "dtype": str(features[name].dtype)}
            for name, source in sources.items()
        },
        "value": {"total": float(result.loss), "unweighted": _directions(result)},
        "retrieval": _retrieval(result),
        "lse": _lse(result),
        "memory_bytes": {
            "inputs": size,
            "peak_rss": peak,
            "growth_over_inputs": max(0, peak - before - size)
            if measured and peak is not None and before is not None else None,
        },
        "seconds": seconds,
        "method": options["method"],
        "precision": options["precision"],
        "options": _record(chosen, options, paths, ids) | (
            {"grad_dtype": grad_dtype} if grad_dtype else {}
        ),
        "workspace_bytes": options["workspace"],
        "gradients": str(grad_out) if grad_out else None,
    }  # fmt: skip
    if as_json:
        click.echo(to_json(report))
    else:
        _print(report)
    given = click.get_current_context().get_parameter_source("normalize")
    if not math.isfinite(result.loss):
        raise click.ClickException(_why_not_finite(result.loss, features, names))
    if given is ParameterSource.DEFAULT and (hint := _norms(features, names)):
        click.echo(f"infonce: {hint}", err=True)


def _sources(kind: Loss, image: str, text: str | None) -> dict[str, str]:
    """Argument name -> source, in the order of the loss's arguments."""
    if (text is None) != (len(kind.arguments) == 1):
        raise click.UsageError(
            f"{kind.name}: expected {len(kind.arguments)} embeddings ({', '.join(kind.arguments)}),"
            f" got {1 if text is None else 2}"
        )
    if text is None:
        return {kind.arguments[0]: image}
    given = {"image": image, "text": text, "query": image, "key": text}
    return {name: given[name] for name in kind.arguments}


def _ranked(kind: Loss, options: Mapping[str, Any]) -> bool:
    """Whether metrics are of this call: each row has one positive, and the logits are unchanged."""
    labels = options.get("labels")
    single = labels is None or (
        labels.ndim == 1 and labels.dtype.kind in "iu" and labels.min(initial=0) >= 0
    )
    changed = "key_bias" in options or options["false_negative_margin"] != math.inf
    return single and not changed and "metrics" not in kind.refused


def _record(
    kind: Loss, options: Mapping[str, Any], paths: Mapping[str, Path], ids: Sequence[Path]
) -> dict[str, Any]:
    """All that the loss depends on beside the inputs: `scale` as it was used, arrays by path."""
    temperature, scale = options["temperature"], options["scale"]
    if scale is None:
        scale = 1 / temperature if temperature else kind.scale
    record = {"temperature": temperature, "scale": scale}
    if kind.sigmoid:
        record["bias"] = options.get("bias", kind.bias)
    names = [name for name in SOFTMAX if name not in (*VECTORS, *kind.refused)]
    record |= {name: options[name] for name in ("normalize", *names)}
    record |= {name: str(path) for name, path in paths.items()}
    return record | ({"ids": [str(path) for path in ids]} if ids else {})


def _evaluate(
    kind: Loss, features: Mapping[str, Any], names: Mapping[str, str], **options: Any
) -> LossAndGrad:
    """The loss and its gradients; `names` replace those of arguments in errors."""
    function = getattr(infonce, f"{kind.name}_loss_and_grad")
    names = {**{name: _flag(name) for name in options}, **names}
    # the command reports a loss that is not finite itself, without NumPy's warnings
    quiet = np.errstate(over="ignore", invalid="ignore")
    with one_line_errors(names=names), progress_bar() as progress, quiet:
        result: LossAndGrad = function(*features.values(), progress=progress, **options)
    return result


def _why_not_finite(loss: Any, features: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The rows with NaN or infinity; where there are none, an overflow, or no negatives."""
    bad_rows = {name: list(validation.rows_not_finite(np, z)) for name, z in features.items()}
    reasons = [
        f"{names[name]} holds NaN or infinity in {len(rows)} of {len(features[name])} rows: "
        f"{some(rows)}"
        for name, rows in bad_rows.items()
        if rows
    ]
    if not reasons and loss == -math.inf:
        reasons = ["--decoupled leaves nothing in the denominator of a row without negatives"]
    if not reasons:
        reasons = [
            f"the features are finite, but products overflow {loss.dtype}: expected --normalize, a "
            "smaller --scale or a larger --temperature"
        ]
    return f"the loss is {loss}: {'; '.join(reasons)}"


def _norms(features: Mapping[str, Any], names: Mapping[str, str]) -> str | None:
    """A hint where rows, but those of zeros, are not of unit norm."""
    ranges = []
    for name, z in features.items():
        sample = z[:: -(-len(z) // SAMPLE)].astype(np.float64)
        _, norms = normalize(sample)
        norms = norms[norms > 0]
        if len(norms) and not NORMS[0] <= norms.min() <= norms.max() <= NORMS[1]:
            ranges.append(f"{norms.min():.3g} to {norms.max():.3g} in {names[name]}")
    if not ranges:
        return None
    return f"norms of rows are {', '.join(ranges)}, expected about 1: --normalize divides by them"


def _scalars(result: LossAndGrad) -> dict[str, float]:
    """Gradients that are single numbers."""
    grads = result.grads._asdict()
    return {name: float(grads[name]) for name in ("scale", "bias") if name in grads}


def _directions(result: LossAndGrad) -> dict[str, float | None]:
    """Mean loss over rows and over columns; None for those that the loss does not have."""
    if result.metrics is None:
        return {"rows": None, "columns": None}
    columns = result.metrics.column_loss
    return {
        "rows": float(result.metrics.row_loss),
        "columns": None if columns is None else float(columns),
    }


def _retrieval(result: LossAndGrad) -> dict[str, dict[str, float]] | None:
    """Share of positives that are ranked first, and among the first five; NaN ranks nothing."""
    if result.metrics is None or not math.isfinite(result.loss):
        return None
    top1, top5 = result.metrics.top(1), result.metrics.top(5)
    return {
        side: {"top1": first, "top5": fifth}
        for side, first, fifth in zip(SIDES, top1, top5, strict=True)
        if first is not None and fifth is not None
    }


def _lse(result: LossAndGrad) -> dict[str, dict[str, float]] | None:
    if result.lse is None:
        return None
    sides = result.lse if isinstance(result.lse, tuple) else (result.lse,)
    return {
        side: {"min": float(lse.min()), "mean": float(lse.mean()), "max": float(lse.max())}
        for side, lse in zip(SIDES, sides, strict=False)
    }


def _words(name: str, value: Any) -> str:
    """An option as it is written on the command line."""
    if value is True:
        return _flag(name)
    values = value if isinstance(value, list) else [value]
    return " ".join(
        f"{_flag(name)} {v:.6g}" if isinstance(v, float) else f"{_flag(name)} {v}" for v in values
    )


def _print(report: Mapping[str, Any]) -> None:
    value = report["value"]
    title = f"{report['loss']} loss {value['total']:.6g}"
    retrieval, lse = report["retrieval"] or {}, report["lse"] or {}
    title_of_mean = "mean loss, unweighted" if "weights" in report["options"] else "mean loss"
    rows: list[tuple[str, str, Mapping[str, Any]]] = [(title_of_mean, ".6g", value["unweighted"])]
    for k in (1, 5):
        shares = {side: values[f"top{k}"] for side, values in retrieval.items()}
        rows.append((f"retrieval top-{k}", ".2%", shares))
    for key in ("min", "mean", "max"):
        rows.append((f"log-sum-exp {key}", ".6g", {side: lse[side][key] for side in lse}))
    # columns and rows without values are left out
    sides = [side for side in SIDES if any(cells.get(side) is not None for *_, cells in rows)]
    table = Table(title=title, title_justify="left")
    for heading in ("", *sides):
        numbers = bool(heading)
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=numbers)
    for name, form, cells in rows:
        if any(cells.get(side) is not None for side in sides):
            shown = (cells.get(side) for side in sides)
            table.add_row(name, *("-" if cell is None else format(cell, form) for cell in shown))
    facts = Table.grid(padding=(0, 2))
    for name, given in report["inputs"].items():
        shape = " x ".join(map(str, given["shape"]))
        facts.add_row(name, f"{shape} {given['dtype']}, {given['source']}")
    memory = report["memory_bytes"]
    facts.add_row(
        "memory",
        f"peak {human(memory['peak_rss'])}, of it inputs {human(memory['inputs'])}, growth over "
        f"inputs {human(memory['growth_over_inputs'])}",
    )
    facts.add_row("time", f"{report['seconds']:.3g} s")
    facts.add_row("method", f"{report['method']}, precision {report['precision']}")
    options = report["options"]
    by_temperature = options["temperature"] is not None  # then it stands for the scale
    changed = {
        name: value for name, value in options.items()
        if value != DEFAULTS.get(name) and not (by_temperature and name == "scale")
    }  # fmt: skip
    facts.add_row("options", ", ".join(_words(name, value) for name, value in changed.items()))
    if report["gradients"]:
        facts.add_row("gradients", report["gradients"])
    console = stdout(table)
    console.print(table if sides else title)
    if LOSSES[report["loss"]].sigmoid:
        console.print(
            "A sigmoid loss judges each pair by itself: it has no softmax over rows or columns, so "
            "no loss by direction, no log-sum-exp and no ranking."
        )
    console.print(facts)
