"""`infonce loss`: one loss of embeddings in files, and its gradients as files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

import infonce

from .. import spec
from ..checks import norms, validation
from ..checks.teacher import ALL_LOSSES
from ..comparison import COSINE, REFUSED, Comparison, random_inputs
from ..kernels.norms import log2_norms
from ..result import LossAndGrad
from ..spec import CHOICES, DEFAULTS, NOT_WITH_METRICS, OPTIONS, PREFIX_OPTIONS, Loss
from . import comparison_report, loss_hints, loss_report, machine
from .common import (
    TEACHER,
    TEACHER_FEATURES,
    UNITS_HELP,
    Bytes,
    File,
    List,
    LossByOption,
    Misuse,
    ResidentGrowth,
    check_destination,
    flag,
    one_line_errors,
    optional,
    peak_resident,
    progress_bar,
    refuse_inputs,
    teacher_options,
    to_json,
    written_whole,
)
from .embeddings import LossFiles, open_embeddings, some
from .gradient_files import check_gradient_files, gradient_files

PATH = File()
LABELLED = ("info_nce", "sup_con")
# options whose numbers join logits or losses, and can be too large for the dtype of the loss
OVERFLOWING = ("bias", "margin", "key_bias", "own_bias", "dim_weights")


class _NotFinite(Exception):
    """Ends `gradient_files`: the gradients of a loss that is not finite replace no others."""


def _spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of `infonce.spec` that have a help text for the command line."""
    for name, option in reversed(OPTIONS.items()):
        if not option.cli_help:
            continue
        switch = flag(name)
        type_: Any = None
        if isinstance(option.default, bool):
            switch += f"/{flag(f'no_{name}')}"
        elif name in CHOICES:
            type_ = click.Choice(CHOICES[name])
        elif name in (*spec.INTEGER_OPTIONS, "own", *spec.ARRAY_OPTIONS):
            type_ = PATH
        elif name in PREFIX_OPTIONS:
            type_ = List(int) if name == "dims" else List(float, distinct=False)
        decorate = click.option(
            switch, type=type_, default=option.default, help=option.cli_help,
            multiple=name in spec.INTEGER_OPTIONS,
        )  # fmt: skip
        command = decorate(command)
    return command


@click.command(cls=LossByOption)
@click.argument("image", required=False)
@click.argument("text", required=False)
@click.option(
    "--loss", "loss_name", type=click.Choice(list(ALL_LOSSES)), default="clip", help="Which loss."
)
@click.option(
    "--temperature",
    "temperature_lists",
    type=List(float),
    multiple=True,
    help="Divides the dot products; several values, as in 0.01,0.07,0.2 or in several options. "
    "(Or pass --scale.)",
)
@click.option("--scale", type=float, help="Multiplies the dot products.")
@click.option("--bias", type=float, help="Added to the logits (siglip; -10 by default).")
@click.option(
    "--labels",
    type=PATH,
    help="Index of each query's key, or of several (info_nce); class of each row (sup_con); .npy.",
)
@click.option(
    "--guide",
    "guides",
    multiple=True,
    help="Embeddings of another model that tell likely positives; twice: of rows and of columns.",
)
@_spec_options
@teacher_options
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
@click.option(
    "--grad-out",
    type=PATH,
    metavar="DIR",
    help="Write gradients into this folder, if the loss is finite.",
)
@click.option(
    "--grad-dtype", type=click.Choice(validation.FLOATS), help="Dtype of the written gradients."
)
@click.option(
    "--compare",
    "compares",
    is_flag=True,
    help="Compare precisions: errors of loss and gradients, as on a GPU, relative to float64. The "
    "worst element is relative to the largest.",
)
@click.option("--rows", type=int, help="Rows of random unit features, in place of files.")
@click.option("--dim", type=int, help="Features of a random row.")
@click.option(
    "--cosine",
    type=float,
    help=f"Cosine of the random rows of a positive pair; by default {COSINE}.",
)
@click.option("--seed", type=int, help="Seed of random rows; 0 by default.")
@click.option(
    "--plot",
    type=PATH,
    help="Write a PNG file: the loss, or the errors of --compare, against the temperature.",
)
@click.option("--force", is_flag=True, help="Overwrite gradients of an earlier run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def loss(
    image: str | None,
    text: str | None,
    loss_name: str,
    labels: Path | None,
    guides: tuple[str, ...],
    bias: float | None,
    metrics: bool | None,
    grad_out: Path | None,
    grad_dtype: str | None,
    force: bool,
    temperature_lists: tuple[list[float], ...],
    compares: bool,
    rows: int | None,
    dim: int | None,
    cosine: float | None,
    seed: int | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Loss, retrieval and gradients of embeddings in files.

    IMAGE and TEXT hold one embedding a row: for info_nce and gte the queries and the keys. nt_xent
    takes one argument, the two views of sample i in rows i and i + B, and sup_con one argument and
    --labels. Each is a .npy file; a .npz, .safetensors, .pt or .parquet file (FILE:KEY if it holds
    several arrays); or a folder of .npy shards, taken in the order of the numbers in their names.
    bfloat16 is read from .safetensors and .pt, and from .npy as ml_dtypes saves it.

    .npy, .safetensors and .pt files stay on disk and are mapped into memory; arrays of .npz and
    .parquet are read, and shards are joined in memory, in one array of their dtype. --grad-out DIR
    gets one .npy for each argument that has a gradient, and scalars.json.

    In place of files, --rows and --dim make random unit rows. --compare computes the errors of all
    precisions of a GPU: --rows 4096 --dim 512 --temperature 0.01,0.07 --compare. The help of the
    function infonce.compare says what is rounded.
    """
    kind = ALL_LOSSES[loss_name]
    drawn = _draw_rows(kind, image, rows=rows, dim=dim, cosine=cosine, seed=seed)
    files = _take_files(kind, image, text, labels, guides, drawn, options)
    if bias is not None and not kind.sigmoid:
        raise click.UsageError("--bias is of siglip")
    temperatures = _distinct(temperature_lists)
    several = temperatures is not None and len(temperatures) > 1
    _check_outputs(several, compares, grad_out, grad_dtype, force, plot, files.paths())
    if compares:
        _check_comparison(metrics, grad_out, options)
    figures = optional("matplotlib.figure", "plot") if plot else None
    with_grad = [name for name in kind.arguments if name not in kind.locked]
    with_grad += ["own"] if "own" in files.arrays else []
    if grad_out is not None:
        check_gradient_files(grad_out, with_grad, files.paths(), force)

    # Import Numba before measuring: its memory is not counted.
    from ..kernels.cpu import backend as cpu  # noqa: F401

    growth = ResidentGrowth()
    features = files.open_features() or {name: drawn[name] for name in kind.arguments}
    teacher = {name: drawn[name] for name in TEACHER if name in drawn} | files.open_teacher()
    inputs = features | teacher
    options |= {"labels": drawn["labels"]} if "labels" in drawn else {}
    options |= files.open_options() | teacher
    if bias is not None:
        options["bias"] = bias

    names_in_errors = files.names_in_errors()
    start = time.perf_counter()
    results: list[LossAndGrad] = []
    if compares:
        found = _compare(kind, features, names_in_errors, temperatures, grad_dtype, options)
        losses = [np.float64(value) for value in found.losses.values()]
    else:
        options["metrics"] = _reports_metrics(kind, options) if metrics is None else metrics
        values: Sequence[float | None] = temperatures or [None]
        for temperature in values:
            options["temperature"] = temperature
            if grad_out is None:
                results.append(_evaluate(kind, features, names_in_errors, wrt=(), **options))
                continue
            like = {name: (features | options)[name] for name in with_grad}
            with (
                suppress(_NotFinite),
                gradient_files(grad_out, like, grad_dtype) as (arrays, scalars),
            ):
                results.append(_evaluate(kind, features, names_in_errors, out=arrays, **options))
                if not math.isfinite(results[0].loss):
                    raise _NotFinite
                scalars |= _scalars(results[0])
        losses = [result.loss for result in results]

    is_finite = all(map(math.isfinite, losses))
    seconds = time.perf_counter() - start
    input_bytes = sum(z.nbytes for z in inputs.values())
    memory_bytes = {
        "inputs": input_bytes,
        "peak_rss": peak_resident(),
        "growth_over_inputs": growth.bytes(input_bytes),
    }
    drawn_from = f"random unit rows, cosine {cosine or COSINE:g}, seed {seed or 0}"
    sources = files.features or dict.fromkeys(features, drawn_from)
    report: dict[str, Any] = {
        "loss": kind.name,
        "inputs": loss_report.record_inputs(sources, features),
        "options": loss_report.record_options(kind, files, options, temperatures),
    }
    if compares:
        report |= found.as_dict()
    else:
        report |= loss_report.build_report(report["options"], options, results)
        report["gradients"] = str(grad_out) if grad_out and is_finite else None
    report |= {
        "workspace_bytes": options["workspace"],
        "memory_bytes": memory_bytes,
        "seconds": seconds,
        "versions": machine.versions("numpy", "numba"),
    }
    if grad_dtype:
        report["options"]["grad_dtype"] = grad_dtype
    if plot is not None and is_finite:
        if compares:
            drawing = comparison_report.figure(figures, found, report)
        else:
            drawing = loss_report.figure(figures, report)
        with written_whole(plot) as temporary:
            drawing.savefig(temporary, format="png", dpi=120)
    if as_json:
        click.echo(to_json(report))
    elif compares:
        comparison_report.table(found, report)
    else:
        loss_report.tables(report)

    for value in losses:
        if not math.isfinite(value):
            raise click.ClickException(_why_not_finite(value, inputs, options, names_in_errors))
    hints = (
        []
        if compares
        else loss_hints.find_constant(kind, features, options, results[0], names_in_errors)
    )
    normalize_source = click.get_current_context().get_parameter_source("normalize")
    if normalize_source is ParameterSource.DEFAULT:  # neither --normalize nor --no-normalize
        read = norms.without_unread(np, inputs, options)
        hints += loss_hints.find_norms(read, names_in_errors)
    for hint in hints:
        click.echo(f"infonce: warning: {hint}", err=True)


def _draw_rows(kind: Loss, image: str | None, **drawing: Any) -> dict[str, Any]:
    """Random features for a loss, if `drawing` has options of them, and no files are given; {}."""
    given = {name: value for name, value in drawing.items() if value is not None}
    if not given and image is None:
        raise click.UsageError("Missing argument 'IMAGE'.")
    if given and image is not None:
        raise click.UsageError(f"{flag(next(iter(given)))}: expected no files of embeddings")
    if given and not given.keys() >= {"rows", "dim"}:
        raise click.UsageError("--rows, --dim: expected both for random rows")
    with one_line_errors(names={name: flag(name) for name in drawing}):
        return random_inputs(kind, **given) if given else {}


def _distinct(lists: Sequence[list[float]]) -> list[float] | None:
    """The temperatures of all options --temperature; None without one."""
    values = [value for each in lists for value in each]
    for value in values:
        if values.count(value) > 1:
            message = f"expected each once, got {value} more than once"
            raise click.BadParameter(message, param_hint="'--temperature'")
    return values or None


def _check_comparison(
    metrics: bool | None, grad_out: Path | None, options: Mapping[str, Any]
) -> None:
    """click.UsageError for options that a comparison does not have."""
    given = {name: options[name] != DEFAULTS[name] for name in ("method", "precision")}
    given |= {"metrics": metrics is not None, "grad_out": grad_out is not None}
    for name, is_given in given.items():
        if is_given:
            raise click.UsageError(f"{flag(name)}: expected none beside --compare")


def _compare(
    kind: Loss, features: Mapping[str, Any], names_in_errors: Mapping[str, str],
    temperatures: Sequence[float] | None, grad_dtype: str | None, options: Mapping[str, Any],
) -> Comparison:  # fmt: skip
    """`infonce.compare`. Errors name arguments by `names_in_errors`."""
    if options["scale"] is not None and temperatures is not None:
        raise Misuse("--temperature, --scale: expected one of them, got both")
    temperature: Any = temperatures
    if options["scale"] is not None:
        temperature = 1 / options["scale"]
    names = {**{name: flag(name) for name in (*options, "temperature")}, **names_in_errors}
    others = {name: value for name, value in options.items() if name not in REFUSED}
    with one_line_errors(names=names), progress_bar() as progress:
        return infonce.compare(
            kind.name, *features.values(), temperature=temperature, grad_dtype=grad_dtype,
            progress=progress, **others,
        )  # fmt: skip


def _take_files(
    kind: Loss, image: str | None, text: str | None, labels: Path | None, guides: Sequence[str],
    drawn: Mapping[str, Any], options: dict[str, Any],
) -> LossFiles:  # fmt: skip
    """The files of a call. Takes the options that are files, or None, out of `options`. `drawn` has
    what is random, in place of files.

    click.UsageError if the loss has no such option, or if files are missing.
    """
    teacher = {name: options.pop(name) for name in TEACHER}
    teacher = {name: value for name, value in teacher.items() if value is not None}
    if teacher and not kind.taught:
        raise click.UsageError(f"{flag(min(teacher))} is of distill")
    if kind.taught and not teacher.keys() | drawn.keys() >= TEACHER_FEATURES:
        raise click.UsageError("distill: expected --teacher-query and --teacher-key")
    options |= {name: v for name, v in teacher.items() if name not in TEACHER_FEATURES}
    features = {} if image is None else _sources(kind, image, text)
    if labels is not None and kind.name not in LABELLED:
        raise click.UsageError(f"--labels is of {' and '.join(LABELLED)}")
    if labels is None and kind.classes and not drawn:
        raise click.UsageError(f"{kind.name}: expected --labels, the class of each row")
    integers = {name: options.pop(name) for name in spec.INTEGER_OPTIONS}
    for name, paths in integers.items():
        if len(paths) > 2:
            raise click.UsageError(f"{flag(name)}: expected one file or two, got {len(paths)}")
    if guides and len(guides) != len(kind.arguments):
        raise click.UsageError(
            f"--guide: expected {len(kind.arguments)} for {kind.name}, got {len(guides)}"
        )
    arrays = {"labels": labels} | {name: options.pop(name) for name in ("own", *spec.ARRAY_OPTIONS)}
    return LossFiles(
        features=features,
        teacher={name: v for name, v in teacher.items() if name in TEACHER_FEATURES},
        arrays={name: path for name, path in arrays.items() if path is not None},
        sides={name: paths for name, paths in integers.items() if paths},
        guides=guides,
    )


def _check_outputs(
    several: bool, compares: bool, grad_out: Path | None, grad_dtype: str | None, force: bool,
    plot: Path | None, inputs: Sequence[Path],
) -> None:  # fmt: skip
    """click.UsageError for outputs that the call does not have. `several`: temperatures."""
    if grad_out is None and (force or (grad_dtype and not compares)):
        raise click.UsageError("--force and --grad-dtype need --grad-out")
    if several and grad_out is not None:
        raise click.UsageError("--grad-out: expected one --temperature, got several")
    if plot is not None and not (several or compares):
        raise click.UsageError("--plot: expected several values of --temperature, as in 0.01,0.07")
    if plot is not None:
        refuse_inputs("--plot", [plot], inputs)
        check_destination(plot)


def _sources(kind: Loss, image: str, text: str | None) -> dict[str, str]:
    """Argument name -> source, in the order of the loss's arguments."""
    if (text is None) != (len(kind.arguments) == 1):
        reason = ""
        if text is None:  # one file of several arrays?
            try:
                open_embeddings(image)
            except click.ClickException as error:
                reason = f"; {error.format_message()}"
        raise click.UsageError(
            f"{kind.name}: expected {len(kind.arguments)} embeddings ({', '.join(kind.arguments)}),"
            f" got {1 if text is None else 2}{reason}"
        )
    if text is None:
        return {kind.arguments[0]: image}
    by_name = {"image": image, "text": text, "query": image, "key": text}
    return {name: by_name[name] for name in kind.arguments}


def _reports_metrics(kind: Loss, options: Mapping[str, Any]) -> bool:
    """Whether to report metrics by default: if each row has one positive, the loss has metrics, and
    neither own negatives, nor positive ids, nor an option of `NOT_WITH_METRICS` is given."""
    labels = options.get("labels")
    single = labels is None or (
        labels.ndim == 1 and labels.dtype.kind in "iu" and labels.min(initial=0) >= 0
    )
    given = {"own", "positive_ids", *NOT_WITH_METRICS} & options.keys()
    changed = any(DEFAULTS[name] is None or options[name] != DEFAULTS[name] for name in given)
    return single and not changed and "metrics" not in kind.refused


def _evaluate(
    kind: Loss, features: Mapping[str, Any], names_in_errors: Mapping[str, str], **options: Any
) -> LossAndGrad:
    """The loss and its gradients. Errors name arguments by `names_in_errors`."""
    function = getattr(infonce, f"{kind.name}_loss_and_grad")
    names = {**{name: flag(name) for name in options}, **names_in_errors}
    # no warnings of NumPy: the command itself reports a loss that is not finite
    quiet = np.errstate(over="ignore", invalid="ignore")
    with one_line_errors(names=names), progress_bar() as progress, quiet:
        result: LossAndGrad = function(*features.values(), progress=progress, **options)
    return result


def _why_not_finite(
    loss: Any, features: Mapping[str, Any], options: Mapping[str, Any],
    names_in_errors: Mapping[str, str],
) -> str:  # fmt: skip
    """The reason: rows with NaN or infinity; if there are none, an overflow, or no negatives."""
    given: dict[str, Any] = {name: options.get(name) for name in ("guide", *spec.ARRAY_OPTIONS)}
    if isinstance(given["guide"], tuple):
        given |= {f"guide[{i}]": z for i, z in enumerate(given.pop("guide"))}
    own = {} if options.get("own") is None else {"own": options["own"]}
    arrays = norms.without_unread(np, {**features, **own}, options)
    arrays |= {name: z for name, z in given.items() if z is not None}
    if "own_bias" in arrays and (own_mask := options.get("own_mask")) is not None:
        arrays["own_bias"] = np.where(own_mask, arrays["own_bias"], 0)
    if "label_weights" in arrays:
        arrays["label_weights"] = np.where(options["labels"] >= 0, arrays["label_weights"], 0)
    bad_rows = {name: list(norms.rows_not_finite(np, z)) for name, z in arrays.items()}
    reasons = [
        f"{names_in_errors[name]} holds NaN or infinity in {len(rows)} of {len(arrays[name])} "
        f"rows: {some(rows)}"
        for name, rows in bad_rows.items()
        if rows
    ]
    if not reasons and loss == -math.inf:
        reasons = ["--decoupled leaves nothing in the denominator of a row without negatives"]
    if not reasons:
        culprit = _largest_option(features, options)
        overflow, remedy = f"{culprit} overflows", "smaller numbers"
        if culprit is None:
            overflow = "products overflow"
            remedy = "--normalize, a smaller --scale or a larger --temperature"
        reasons = [f"the features are finite, but {overflow} {loss.dtype}: expected {remedy}"]
    return f"the loss is {loss}: {'; '.join(reasons)}"


def _largest_option(features: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """The option whose numbers are larger than all products of features; None if there is none."""
    log2_product = 0.0  # of rows of unit norm
    if not options["normalize"]:
        log2_product = max(0.0, *(2 * log2_norms(z).max() for z in features.values()))
    given = {name: options.get(name) for name in OVERFLOWING}
    sizes = {name: np.abs(values).max() for name, values in given.items() if values is not None}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return flag(largest) if largest and math.frexp(sizes[largest])[1] > log2_product else None


def _scalars(result: LossAndGrad) -> dict[str, float]:
    """Gradients that are single numbers."""
    grads = result.grads._asdict()
    return {name: float(grads[name]) for name in ("scale", "bias") if name in grads}
