"""Whether the matrix notices faults. Each is put into a copy of the code, one at a time.

python tests/matrix/mutants.py                      FAULTS, which the code has had
python tests/matrix/mutants.py --random 50 --seed 1   as many changes at random, in FOLDERS
python tests/matrix/mutants.py --only NAME          one of them

Executors compute their problems until a result is wrong. A fault that no result shows is one of
the errors that the library raises, or should not raise: then `tests` run. A change that nothing
shows is either without effect, or the matrix lacks something.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from faults import FAULTS, Mutant
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
MATRIX = Path("tests", "matrix")
CODE = ("infonce", "kernels", "distributed", "tests")
FOLDERS = ("infonce/torch", "infonce/jax", "infonce/checks", "infonce/dispatch.py", "distributed")
NOTHING = Mutant("no change", "infonce/__init__.py", "__version__ =", "__version__ =")
PROJECTS = ("sentence_transformers", "pylate", "pytorch_metric_learning")
SECONDS = 1500  # for the problems of one mutant, and for its tests
RANKS = "MPI.*|torch, gloo, (auto|ring|gather).*|JAX, sharded"
CHECKED = "NumPy.*|infonce loss|torch, function|torch, module|JAX, jit|MPI, 3 ranks, ring, world"
REFUSALS = "tests/matrix/test_matrix.py -k refused"
DROP_INS = "tests/matrix/test_matrix.py -k drop_in"
# For changes of files whose names begin so: executors, then tests of errors
TORCH = (
    "tests/frameworks/test_torch_errors.py tests/frameworks/test_torch_modules.py "
    "tests/frameworks/test_torch_nodes.py tests/frameworks/training tests/frameworks/test_torch.py"
)
SEEN_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        [f"infonce/torch/{name}" for name in ("core/", "cach", "functions", "modules", "__init")],
        ("torch.*", (REFUSALS, TORCH, "tests/frameworks/test_torch_ranks.py")),
    ),
    "infonce/torch": ("", (
        DROP_INS,
        "tests/frameworks/test_drop_in_options.py tests/frameworks/test_torch_drop_ins.py",
        "tests/frameworks/test_torch_ranks.py",
    )),
    "infonce/jax": ("JAX.*", (
        REFUSALS, "tests/frameworks/test_jax.py tests/frameworks/test_jax_errors.py",
        "tests/frameworks/jax_devices", "tests/frameworks/test_jax_drop_ins.py",
    )),
    "distributed": (RANKS, ("tests/distributed",)),
    "kernels": ("NumPy.*", ("tests/cpu", "tests/losses")),
    "infonce": (CHECKED, (
        REFUSALS, "tests/losses tests/reference", "tests/pairs",
        "tests/frameworks/test_first_calls.py tests/frameworks/test_torch_errors.py",
    )),
}  # fmt: skip


# --- changes at random ----------------------------------------------------------------------------

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def changed(node: ast.expr) -> Iterator[ast.expr]:
    """The expression with one change each."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in SWAPS:
                other = copy.deepcopy(node)
                other.ops[i] = SWAPS[type(op)]()
                yield other
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in SWAPS:
        other = copy.deepcopy(node)
        other.op = SWAPS[type(node.op)]()
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call):
        for i in range(len(node.keywords)):
            other = copy.deepcopy(node)
            del other.keywords[i]
            yield other
        if len(node.args) > 1 and not any(isinstance(z, ast.Starred) for z in node.args):
            other = copy.deepcopy(node)
            other.args[:2] = other.args[1::-1]
            yield other
            other = copy.deepcopy(node)
            del other.args[-1]
            yield other


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that run: no annotations, no words of errors, nothing inside of a text."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return
    if isinstance(node, ast.expr):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_message(child):
                yield from expressions(child)


def is_message(node: ast.AST) -> bool:
    """An error that is made to be raised later."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (
        node.func.id.endswith(("Error", "Warning")) or node.func.id == "cast"
    )  # fmt: skip


def statements(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Statements with what takes their place: calls without a result, and additions."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if isinstance(node, ast.stmt) and (is_call or isinstance(node, ast.AugAssign)):
            yield node, "pass"


def replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + text.encode() + after).decode()


def all_changes(file: str) -> list[Mutant]:
    source = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(source)
    found = [(node, f"({ast.unparse(other)})") for node in expressions(tree)
             for other in changed(node)]  # fmt: skip
    changes = []
    for node, text in [*found, *statements(tree)]:
        old = ast.get_source_segment(source, node) or ""
        new = replaced(source, node, text)
        words = " ".join(f"{old}  ->  {text}".split())
        name = f"{file}:{node.lineno}"
        seen_by = next(seen_by for begin, seen_by in SEEN_BY.items() if file.startswith(begin))
        changes.append(Mutant(name, file, source, new, *seen_by, words))
    return changes


def at_random(count: int, seed: int) -> list[Mutant]:
    """Changes of files, each file with a chance by its length; of drop-ins those whose project is
    installed, if they need it."""
    missing = [name for name in PROJECTS if not importlib.util.find_spec(name)]
    paths = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py")) or [ROOT / folder]
        if not {*missing} & {*path.parts, path.stem}
    ]
    rng = random.Random(seed)
    changes = [all_changes(str(path.relative_to(ROOT))) for path in paths]
    weights = [path.stat().st_size * bool(each) for path, each in zip(paths, changes, strict=True)]
    return [rng.choice(each) for each in rng.choices(changes, weights, k=count)]


# --- runs -----------------------------------------------------------------------------------------


def run(tree: Path, command: list[str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None for a command that was ended, and the output."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "INFONCE_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=tree, env=environment, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:  # also processes that it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return code, out.read()


def words(tests: str) -> list[str]:
    """Arguments of pytest; what follows -k is one."""
    files, k, expression = tests.partition(" -k ")
    return [*files.split(), *(["-k", expression] if k else [])]


def judge(mutant: Mutant, tree: Path) -> str:
    """By what the mutant was found; "" if by nothing."""
    path = tree / mutant.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        return f"? {source.count(mutant.old)} places have the text"
    stamp = path.stat()
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        if mutant.executors:
            command = [str(MATRIX), "--first", "--seed", "1", "--executors", mutant.executors]
            code, out = run(tree, command, SECONDS)
            found = [line for line in out.splitlines() if line.startswith("first wrong")]
            if found:
                return found[0].removeprefix("first wrong: ")
            if code is None:
                return f"? no end within {SECONDS} s"
            if code:
                return f"the matrix ends with {code}: {(out.splitlines() or [''])[-1]}"
        for files in mutant.tests:
            command = ["-m", "pytest", "-xq", "-p", "no:cacheprovider", *words(files)]
            code, out = run(tree, command, SECONDS)
            failed = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if code is None or failed:
                return f"test: {(failed or ['no end'])[0].partition(' - ')[0]}"
        return ""
    finally:
        path.write_text(source, encoding="utf-8")
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def main() -> int:
    as_written = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--random", type=int, help="so many changes, in place of FAULTS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="expression for names")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    mutants = FAULTS if arguments.random is None else at_random(arguments.random, arguments.seed)
    mutants = [mutant for mutant in mutants if re.search(arguments.only or "", mutant.name)]
    if arguments.only is None:
        mutants = [NOTHING, *mutants]
    console, survivors = Console(width=200), 0
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for i in range(arguments.workers):
            tree = Path(folder) / str(i)
            for name in CODE:
                shutil.copytree(ROOT / name, tree / name, symlinks=True)
            for name in ("setup.cfg", "pyproject.toml", "README.md", "docs", "benchmarks"):
                (tree / name).symlink_to(ROOT / name)
            trees.put(tree)

        def one(mutant: Mutant) -> tuple[Mutant, str]:
            tree, start = trees.get(), time.monotonic()
            try:
                found = judge(mutant, tree)
            finally:
                trees.put(tree)
            console.print(
                f"{mutant.name}  {mutant.words}\n   {found or 'SURVIVES'}"
                f"  ({time.monotonic() - start:.0f} s)", markup=False, highlight=False,
            )  # fmt: skip
            return mutant, found

        with ThreadPoolExecutor(arguments.workers) as pool:
            results = list(pool.map(one, mutants))
    table = Table("mutant", "found by")
    if arguments.only is None:
        nothing = results.pop(0)
        assert not nothing[1], f"wrong without a change: {nothing[1]}"
    for mutant, found in results:
        survivors += not found
        table.add_row(f"{mutant.name}  {mutant.words}", found or "nothing")
    console.print(table)
    console.print(f"{len(results)} mutants, {survivors} survive")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
