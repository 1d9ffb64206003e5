"""Helpers of several commands: errors in one line, sizes, progress, memory, atomic files."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..checks.teacher import ALL_LOSSES
from ..checks.validation import BINARY, DECIMAL, parse_bytes

PIPE_WIDTH = 140  # columns, if the output is no terminal
UNITS_HELP = f"{', '.join([*BINARY])}, or {', '.join([*DECIMAL])}"


class Misuse(click.ClickException):
    """The user's input is wrong (exit code 2); other ClickExceptions are failures at run time."""

    exit_code = 2


class LossByOption(click.Command):
    """A command with an option --loss, which says so if it gets the loss as its first argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in ALL_LOSSES and not Path(args[0]).exists():
            raise click.UsageError(f"expected --loss {args[0]}, got {args[0]} without the option")
        return super().parse_args(ctx, args)


class Bytes(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A number of bytes: `268435456`, `256MiB`, `1.5GiB`, `2TB`."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        try:
            size = parse_bytes(value)
        except ValueError as error:
            self.fail(str(error))
        if size == 0:
            self.fail(f"expected a positive number of bytes, got {value!r}")
        return size


class File(click.Path):
    """A path. An empty name is refused, which pathlib takes for the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("expected a name, got an empty one")
        return super().convert(value, param, ctx)


class List(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """Values separated by commas, each once if they must be `distinct`."""

    name = "list"

    def __init__(self, item: Callable[[str], Any], distinct: bool = True) -> None:
        self.item, self.distinct = item, distinct

    def convert(self, value: Any, param: Any, ctx: Any) -> list[Any]:
        try:
            items = [self.item(part.strip()) for part in value.split(",")]
        except ValueError as error:
            message = str(error)  # of a function of ours; those of Python's types name no list
            if self.item in (int, float):
                kind = "integers" if self.item is int else "numbers"
                message = f"expected {kind} separated by commas, got {value!r}"
            self.fail(message)
        for item in items:
            if self.distinct and items.count(item) > 1:
                self.fail(f"expected each once, got {item} more than once")
        return items


def flag(name: str) -> str:
    """The option of a command for an argument: `--grad-out` for `grad_out`."""
    return f"--{name.replace('_', '-')}"


def optional(module: str, extra: str) -> Any:
    """Import a library of an extra; `Misuse` says what to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise Misuse(
            f"{name} cannot be imported ({error}): pip install 'infonce-kernels[{extra}]'"
        ) from error


@contextmanager
def one_line_errors(
    failure: type[click.ClickException] = Misuse, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Context in which errors become a `failure` with the same message.

    A MemoryError is always a failure at run time (exit code 1), never `Misuse`.

    `names` replace the names of arguments that a message begins with.
    """
    try:
        yield
    except MemoryError as error:
        raise click.ClickException(str(error) or "out of memory") from error
    except (TypeError, ValueError, OSError) as error:
        arguments, colon, rest = error_message(error).partition(": ")
        known = [(names or {}).get(name, name) for name in arguments.split(", ")]
        raise failure(", ".join(known) + colon + rest) from error


def error_message(error: BaseException) -> str:
    """The message of an error; of an OSError with the file's name in front."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Context for work on a temporary file that stands for `path`: OSErrors name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # an error of the system; infonce's errors name their file
            error.filename = os.fspath(path)
        raise


def stdout(table: Table | None = None) -> Console:
    """The console for tables: without markup, and wide enough for all columns of `table`.

    In a terminal that is too narrow, lines are too long, and no number is cut short.
    """
    console = Console(markup=False, highlight=False)
    width = console.width if console.is_terminal else PIPE_WIDTH
    if table is not None:
        width = max(
            width, console.measure(table, options=console.options.update_width(999)).minimum
        )
    console.width = width
    return console


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback (phase, done, total) that draws a bar on stderr; None if that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield report


def resident() -> int | None:
    """Bytes of this process in memory now, mapped files included; None if there is no /proc."""
    return _status("VmRSS")


def peak_resident() -> int | None:
    """The most bytes in memory since `reset_peak`, or since the start; None if unknown."""
    peak = _status("VmHWM")  # the peak of getrusage includes the program that ran before exec
    if peak is None:
        with suppress(ImportError):
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            peak *= 1 if sys.platform == "darwin" else 1024  # macOS: bytes, Linux: KiB
    return peak


def reset_peak() -> bool:
    """Start `peak_resident` afresh; False if the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: VmHWM becomes VmRSS
    except OSError:
        return False
    return True


class ResidentGrowth:
    """The growth of the memory of this process since this object was made."""

    def __init__(self) -> None:
        self._peak_is_reset, self._before = reset_peak(), resident()

    def bytes(self, inputs: int = 0) -> int | None:
        """The growth of the peak beyond the bytes of `inputs`. None if the system cannot tell."""
        peak = peak_resident()
        if not self._peak_is_reset or peak is None or self._before is None:
            return None
        return max(0, peak - self._before - inputs)


def return_freed_memory() -> None:
    """Return freed memory to the system (glibc), so that growth counts all later allocations."""
    with suppress(AttributeError, OSError, TypeError):  # another C library; TypeError: Windows
        ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int | None:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def check_destination(path: Path) -> None:
    """Refuse, before any work, a file that could not be written at its end."""
    with one_line_errors():
        require_file_or_none(path)
        require_folder(path.parent)
        temporary = temporary_name(path.resolve())
        with errors_name(path):
            temporary.touch()
            temporary.unlink()


def require_file_or_none(path: Path) -> None:
    """Refuse a name that `written_together` could not give to a file."""
    if os.path.lexists(path) and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe, a device or a broken link"
        raise FileExistsError(f"{path}: expected a file or none, got {kind}")


def require_folder(path: Path) -> None:
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: expected a folder that exists")


def refuse_inputs(option: str, outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """`Misuse` if an output of `option` is the same file or folder as one of `inputs`."""
    existing = [path for path in outputs if path.exists()]
    for path in inputs:
        if path.exists() and any(map(path.samefile, existing)):
            raise Misuse(f"{option}: expected another name, {path} is an input")


@contextmanager
def written_together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Context with temporary files that replace `paths` at the end. On an error no path changes.

    A symbolic link stays, and the file behind it is replaced.

    All are on disk before the first is renamed. If the process is killed, temporary files stay; if
    it is stopped between two renames, some files are new and some old, and each is complete.
    """
    targets = [path.resolve() for path in paths]
    temporaries = [temporary_name(target) for target in targets]
    try:
        with errors_name(paths[0] if len(paths) == 1 else paths[0].parent):
            yield temporaries
            for temporary in temporaries:
                _sync(temporary)
            for temporary, target in zip(temporaries, targets, strict=True):
                os.replace(temporary, target)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Context with a temporary file that replaces `path` at the end, or is removed on an error."""
    with written_together([path]) as (temporary,):
        yield temporary


def temporary_name(path: Path) -> Path:
    """A hidden name in the same directory, with the same suffix, for this process only."""
    return path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")


def to_json(value: Any) -> str:
    """Standard JSON: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- options of distillation ----------------------------------------------------------------------

TEACHER: dict[str, tuple[type, str]] = {  # type and help
    "teacher_query": (str, "The teacher's embeddings of the queries (distill)."),
    "teacher_key": (str, "The teacher's embeddings of the keys (distill)."),
    "teacher_temperature": (float, "Divides the teacher's dot products; --temperature by default."),
    "teacher_scale": (float, "Multiplies the teacher's dot products; --scale by default."),
    "two_sided": (bool, "Whether half of the loss is that of keys against queries; the default."),
}
TEACHER_FEATURES = {"teacher_query", "teacher_key"}


def teacher_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of `TEACHER`."""
    for name, (type_, help_text) in reversed(TEACHER.items()):
        switch = flag(name) + (f"/{flag(f'no_{name}')}" if type_ is bool else "")
        command = click.option(switch, type=type_, default=None, help=help_text)(command)
    return command
