"""`infonce explain`: how a call would run on a GPU, on a machine that needs none."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import click

from .. import explanation, spec
from ..checks.teacher import ALL_LOSSES
from ..explanation.devices import GPUS
from ..explanation.result import tables
from .common import Bytes, List, flag, one_line_errors, stdout, to_json


class _Explain(click.Command):
    """Refuses negative numbers by name. click would take them for options that it does not know."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for before, argument in pairwise(["", *args]):
            if re.fullmatch(r"-\d+(\.\d*)?(e\d+)?", argument) and not before.startswith("--"):
                raise click.UsageError(
                    f"ROWS, FEATURES: expected positive integers, got {argument}"
                )
        return super().parse_args(ctx, args)


def _pair_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each option of pairs."""
    for name in reversed(explanation.FLAGS):
        command = click.option(flag(name), is_flag=True, help=f"The call has {name}.")(command)
    return command


@click.command(cls=_Explain)
@click.argument("loss", metavar="LOSS", type=click.Choice([*ALL_LOSSES]))
@click.argument("rows", type=int)
@click.argument("features", type=int)
@click.option("--keys", type=int, help="Rows of the second array; as many as ROWS by default.")
@click.option("--dtype", type=click.Choice(explanation.DTYPES), default="float32")
@click.option("--device", type=click.Choice([*GPUS]), default="h200")
@click.option("--precision", type=click.Choice(spec.CHOICES["precision"]), default="auto")
@click.option("--method", type=click.Choice(spec.CHOICES["method"]), default="auto")
@click.option("--workspace", type=Bytes(), help="Upper limit of temporary memory.")
@click.option("--wrt", multiple=True, help="An argument whose gradient is wanted; all by default.")
@click.option("--loss-alone", is_flag=True, help="Without gradients.")
@click.option("--normalize", is_flag=True, help="Divide rows by their L2 norm first.")
@click.option("--ids", count=True, help="The call has ids; once for each of their columns.")
@_pair_options
@click.option("--own", type=int, default=0, help="Own negatives of each row (info_nce).")
@click.option(
    "--own-table", type=int, default=0, help="Rows of the table that has own negatives by index."
)
@click.option("--dims", type=List(int), help="Widths of prefixes, as in 64,128,256.")
@click.option("--query-tokens", type=int, default=0, help="Tokens of a row of ROWS.")
@click.option("--key-tokens", type=int, default=0, help="Tokens of a row of the second array.")
@click.option("--query-mask", is_flag=True, help="Tokens of the first array have a mask.")
@click.option("--key-mask", is_flag=True, help="Tokens of the second array have a mask.")
@click.option("--metrics", is_flag=True, help="The call counts retrieval ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def explain(
    loss: str, rows: int, features: int, wrt: tuple[str, ...], loss_alone: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """How a call of LOSS on ROWS x FEATURES would run on a GPU.

    Kernels and matrix products in their order, memory, work, and the time that the device's peaks
    allow, and the time that benchmarks have recorded. It needs no GPU.
    """
    names = () if loss_alone else wrt or None
    arguments = {name: flag(name) for name in ("wrt", *options)}
    with one_line_errors(names=arguments | {"rows": "ROWS", "features": "FEATURES"}):
        if loss_alone and wrt:
            raise ValueError(f"--loss-alone: expected no --wrt beside it, got {', '.join(wrt)}")
        result = explanation.explain(loss, rows, features, wrt=names, **options)
    if as_json:
        click.echo(to_json(result.as_dict()))
    else:
        for table in tables(result):
            stdout(table).print(table)
