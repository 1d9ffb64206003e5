"""The command line: `infonce demo | loss | bench | info | explain`, a module or a package each."""

from __future__ import annotations

import io
import sys
from typing import Any, NoReturn

import click

from .. import __version__
from . import bench, demo, explain, info, loss
from .common import error_message

FAILED = 1  # a failure at run time; 2 means that the input is wrong (`common.Misuse`)
INTERRUPTED = 130  # what shells report for Ctrl-C: 128 + SIGINT


class _Commands(click.Group):
    """A group whose failures are one line on stderr: the user's errors and Ctrl-C alike."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before click makes exit code 1 of it
            click.echo("infonce: interrupted", err=True)
            # If Ctrl-C interrupted code of an exec("..."), which imports run, Python would end as
            # if killed by the signal, without our exit code. Another exec prevents that
            exec("")
            ctx.exit(INTERRUPTED)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] == "compare":  # as the function infonce.compare
            ctx.fail("compare is an option: infonce loss --compare")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):  # names of files can be what it cannot encode
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except (MemoryError, OSError) as error:  # a full disk behind stdout, say
            _fail(error_message(error), FAILED)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"infonce: error: {' '.join(message.split())}", err=True)
    sys.exit(code)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="infonce")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Contrastive losses in memory linear in the batch.

    InfoNCE, NT-Xent, SupCon, CLIP, LiT, SigLIP and GTE.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for command in (demo.demo, loss.loss, bench.bench, info.info, explain.explain):
    main.add_command(command)
