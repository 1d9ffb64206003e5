"""`infonce loss`: one loss of embeddings in files, and its gradients as files."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import numpy as np
from rich.table import Table

import infonce

from .. import checks, losses, validation
from ..result import LossAndGrad
from .common import (
    Bytes,
    human,
    one_line_errors,
    peak_resident,
    progress_bar,
    reset_peak,
    resident,
    stdout,
    temporary_name,
    to_json,
)
from .embeddings import open_embeddings, open_npy

LOSSES = {
    kind.name: kind
    for kind in (losses.CLIP, losses.LIT, losses.SIGLIP, losses.INFO_NCE, losses.NT_XENT)
}
PATH = click.Path(path_type=Path)


@click.command()
@click.argument("image")
@click.argument("text", required=False)
@click.option("--loss", "kind", type=click.Choice(list(LOSSES)), default="clip")
@click.option("--temperature", type=float, help="Divides the dot products; or give --scale.")
@click.option("--scale", type=float, help="Multiplies the dot products.")
@click.option("--bias", type=float, help="Added to the logits (siglip; -10 by default).")
@click.option("--normalize/--no-normalize", help="Divide rows by their L2 norm first.")
@click.option("--labels", type=PATH, help="Index of each query's key, .npy (info_nce).")
@click.option(
    "--ids",
    type=PATH,
    multiple=True,
    help="Pairs of equal ids are no negatives, .npy; twice for ids of rows and of columns.",
)
@click.option("--method", type=click.Choice(checks.CHOICES["method"]), default="auto")
@click.option("--precision", type=click.Choice(checks.CHOICES["precision"]), default="auto")
@click.option(
    "--workspace", type=Bytes(), default="256MiB", help="Most temporary memory: KiB, MiB or GiB."
)
@click.option("--check-finite", is_flag=True, help="Refuse NaN and infinity, naming the row.")
@click.option("--metrics/--no-metrics", default=True, help="Retrieval and loss by direction.")
@click.option("--grad-out", type=PATH, metavar="DIR", help="Write gradients into this folder.")
@click.option(
    "--grad-dtype", type=click.Choice(validation.FLOATS), help="Of the written gradients."
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
    metrics: bool,
    grad_out: Path | None,
    grad_dtype: str | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Loss, retrieval and gradients of embeddings in files.

    IMAGE and TEXT hold one embedding a row: for info_nce the queries and the keys; nt_xent takes
    one argument, the two views of sample i in rows i and i + B. Each is a .npy file, a .npz or
    .safetensors file (FILE:KEY if it holds several arrays), or a folder of .npy shards, taken in
    the order of the numbers in their names. bfloat16 is read from .safetensors, and from .npy as
    ml_dtypes saves it.

    .npy and .safetensors files stay on disk and are mapped into memory; .npz arrays are read, and
    shards are joined in memory, in one array of their dtype. --grad-out DIR gets one .npy for each
    argument that has a gradient, and scalars.json.
    """
    chosen = LOSSES[kind]
    sources = _sources(chosen, image, text)
    if bias is not None and not chosen.sigmoid:
        raise click.UsageError("--bias is of siglip")
    if labels is not None and kind != "info_nce":
        raise click.UsageError("--labels is of info_nce")
    if len(ids) > 2:
        raise click.UsageError(f"--ids: expected one file or two, got {len(ids)}")
    if grad_out is None and (force or grad_dtype):
        raise click.UsageError("--force and --grad-dtype need --grad-out")

    from ..kernels import cpu  # noqa: F401  the compiler's own memory is not the loss's

    measured = reset_peak()
    before = resident()
    features = {name: open_embeddings(source) for name, source in sources.items()}
    if bias is not None:
        options["bias"] = bias
    if labels is not None:
        options["labels"] = open_npy(labels)
    if ids:
        arrays = [open_npy(path) for path in ids]
        options["ids"] = arrays[0] if len(ids) == 1 else tuple(arrays)
    options["metrics"] = metrics and not chosen.sigmoid

    start = time.perf_counter()
    if grad_out is None:
        result = _evaluate(chosen, features, wrt=(), **options)
    else:
        with_grad = {name: z for name, z in features.items() if name not in chosen.locked}
        with GradientFiles(grad_out, with_grad, grad_dtype, force) as files:
            result = _evaluate(chosen, features, out=files.arrays, **options)
            files.commit(_scalars(result))
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
        "value": {"total": float(result.loss), **_directions(result)},
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
        "workspace_bytes": options["workspace"],
        "gradients": str(grad_out) if grad_out else None,
    }  # fmt: skip
    if as_json:
        click.echo(to_json(report))
    else:
        _print(report)
    if not math.isfinite(result.loss):
        click.echo("infonce: the loss is not finite; --check-finite says where", err=True)


def _sources(kind: losses.Loss, image: str, text: str | None) -> dict[str, str]:
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


def _evaluate(kind: losses.Loss, features: Mapping[str, Any], **options: Any) -> LossAndGrad:
    function = getattr(infonce, f"{kind.name}_loss_and_grad")
    # a loss that is not finite is said in one line, not in NumPy's warnings
    with one_line_errors(), progress_bar() as progress:
        result: LossAndGrad = function(*features.values(), progress=progress, **options)
    return result


def _scalars(result: LossAndGrad) -> dict[str, float]:
    """Gradients that are single numbers."""
    grads = result.grads._asdict()
    return {name: float(grads[name]) for name in ("scale", "bias") if name in grads}


def _directions(result: LossAndGrad) -> dict[str, float | None]:
    """Mean loss over rows and over columns, of what the loss has."""
    if result.metrics is None:
        return {"rows": None, "columns": None}
    columns = result.metrics.column_loss
    return {
        "rows": float(result.metrics.row_loss),
        "columns": None if columns is None else float(columns),
    }


def _retrieval(result: LossAndGrad) -> dict[str, dict[str, float]] | None:
    """Share of positives that are ranked first, and among the first five."""
    if result.metrics is None:
        return None
    top1, top5 = result.metrics.top(1), result.metrics.top(5)
    return {
        side: {"top1": first, "top5": fifth}
        for side, first, fifth in zip(("rows", "columns"), top1, top5, strict=True)
        if first is not None and fifth is not None
    }


def _lse(result: LossAndGrad) -> dict[str, dict[str, float]] | None:
    if result.lse is None:
        return None
    sides = result.lse if isinstance(result.lse, tuple) else (result.lse,)
    return {
        side: {"min": float(lse.min()), "mean": float(lse.mean()), "max": float(lse.max())}
        for side, lse in zip(("rows", "columns"), sides, strict=False)
    }


def _print(report: Mapping[str, Any]) -> None:
    value, retrieval = report["value"], report["retrieval"] or {}
    table = Table(title=f"{report['loss']} loss {value['total']:.6g}", title_justify="left")
    for heading in ("", "rows", "columns"):
        table.add_column(heading, justify="right" if heading else "left")

    def row(title: str, form: str, sides: Mapping[str, Any]) -> None:
        cells = (sides.get(side) for side in ("rows", "columns"))
        table.add_row(title, *("-" if cell is None else format(cell, form) for cell in cells))

    row("mean(lse - positive)", ".6g", value)
    for key, title in (("top1", "retrieval top-1"), ("top5", "retrieval top-5")):
        row(title, ".2%", {side: values[key] for side, values in retrieval.items()})
    for key in ("min", "mean", "max"):
        lse = report["lse"] or {}
        row(f"log-sum-exp {key}", ".6g", {side: values[key] for side, values in lse.items()})
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
    if report["gradients"]:
        facts.add_row("gradients", report["gradients"])
    console = stdout()
    console.print(table)
    console.print(facts)


class GradientFiles:
    """Gradients of features as .npy files in a folder: all of them, or none.

    Inside the `with`, `arrays` are memory-mapped temporary files beside the final ones; `commit`
    moves them into place. Whatever was not committed is removed at the end.
    """

    def __init__(
        self, folder: Path, features: Mapping[str, Any], dtype: str | None, force: bool
    ) -> None:
        self.folder = folder
        self.arrays: dict[str, Any] = {}
        self._features, self._dtype, self._force = features, dtype, force
        self._made = False  # whether the folder is ours
        self._temporary: dict[Path, Path] = {}  # final -> temporary

    def __enter__(self) -> GradientFiles:
        try:
            with one_line_errors():
                self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def _create(self) -> None:
        final = {name: self.folder / f"{name}.npy" for name in self._features}
        for path in (*final.values(), self.folder / "scalars.json"):
            if path.exists() and not self._force:
                raise FileExistsError(f"{path} exists; --force overwrites it")
        dtypes = {
            name: np.dtype(self._dtype or z.dtype.newbyteorder("="))
            for name, z in self._features.items()
        }
        needed = sum(z.size * dtypes[name].itemsize for name, z in self._features.items())
        if not self.folder.exists():
            self.folder.mkdir()
            self._made = True
        if not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder}: expected a folder, got a file")
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(f"{self.folder}: gradients need {human(needed)}, {human(free)} are free")
        for name, z in self._features.items():
            temporary = self._temporary[final[name]] = temporary_name(final[name])
            array = np.lib.format.open_memmap(temporary, "w+", dtypes[name], z.shape)
            _reserve(temporary)
            self.arrays[name] = array

    def commit(self, scalars: Mapping[str, float]) -> None:
        """Write `scalars` besides, and move everything into place once it is on disk."""
        with one_line_errors():
            path = self.folder / "scalars.json"
            temporary = self._temporary[path] = temporary_name(path)
            temporary.write_text(to_json(dict(scalars)) + "\n")
            for array in self.arrays.values():
                array.flush()
            for temporary in self._temporary.values():
                _sync(temporary)
            for path, temporary in self._temporary.items():
                os.replace(temporary, path)
            self._made = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        self.arrays = {}
        for temporary in self._temporary.values():
            temporary.unlink(missing_ok=True)
        if self._made:
            self.folder.rmdir()


def _reserve(path: Path) -> None:
    """Take the file's blocks now: a full disk is an error here, and a crash (SIGBUS) later."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
