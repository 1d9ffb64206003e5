"""Which module may import which: layers, and no circles.

Every import counts, also those inside functions and under TYPE_CHECKING, except for `TYPES`. The
tests read sources, so libraries that a module imports need not be installed.
"""

import ast
import configparser
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each module of a line imports only from the lines below.
LAYERS = [
    {"infonce.distributed"},
    {"infonce.distributed.losses"},
    {"infonce.distributed.call"},
    {"infonce.distributed.run"},
    {"infonce.distributed.agreement", "infonce.distributed.passes"},
    {"infonce.distributed.schedule"},
    {"infonce.distributed.exchanges.gather", "infonce.distributed.exchanges.ring"},
    {"infonce.distributed.exchanges.base"},
    {"infonce.distributed.transports.choice"},
    {"infonce.distributed.transports.nccl"},
    {"infonce.distributed.transports.gpu", "infonce.distributed.transports.peers"},
    {"infonce.distributed.transports.base"},
    {"infonce.distributed.communicators.mpi"},
    {"infonce.distributed.communicators.base"},
    {"infonce"},
    {"infonce.losses"},
    {"infonce.dispatch"},
    {"infonce.checks.call"},
    {"infonce.checks.softmax"},
    {"infonce.checks.validation"},
    {"infonce.arrays"},
    {"infonce.spec"},
    {"infonce.result"},
]


# Imports of a package that are not part of a circle, because they are only under TYPE_CHECKING:
# `Problem` takes its options from the list of them, and options read the fields of a `Problem`
TYPES = {"infonce.kernels.options": "infonce.kernels.problem"}


def packages() -> dict[str, Path]:
    """The folder of each package, by its installed name: `kernels` is `infonce.kernels`."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pairs = setup["options"]["package_dir"].strip().splitlines()
    return {name.strip(): ROOT / folder.strip() for name, folder in (p.split("=") for p in pairs)}


def sources() -> dict[str, Path]:
    """All modules by their installed names; a package's is its ``__init__.py``."""
    texts = {}
    for package, folder in packages().items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            texts[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return texts


SOURCES = sources()


def named(module: str, source: str, is_package: bool) -> Iterator[str]:
    """The absolute names that the statements of a module import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:  # a module of that package, or a name in it
                full = f"{base}.{alias.name}"
                yield full if full in SOURCES else base


IMPORTS = {
    module: {
        name
        for name in named(module, path.read_text(), path.name == "__init__.py")
        if name in SOURCES and name != module
    }
    for module, path in SOURCES.items()
}


def circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that all reach each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for name in imports[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        return seen

    reached = {module: reach(module) for module in imports}
    return {
        frozenset(n for n in names if module in reached[n])
        for module, names in reached.items()
        if module in names
    }


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_every_kind_of_import_is_seen() -> None:
    source = """
import infonce.spec, numpy
from . import operands as rows
from .. import solve as blocks, problem
from ..problem import Array
from ...checks.call import check
if TYPE_CHECKING:
    from .backend import CPU
def later():
    from infonce import arrays
    from .resources import BLAS
"""
    seen = set(named("infonce.kernels.cpu.pass_state", source, False))
    here = {"operands", "backend", "resources"}
    assert seen == {
        "infonce.spec", "numpy", "infonce.kernels.solve", "infonce.kernels.problem",
        "infonce.checks.call", "infonce.arrays", *(f"infonce.kernels.cpu.{name}" for name in here),
    }  # fmt: skip
    assert set(named("infonce", "from . import spec\nfrom .result import x", True)) == {
        "infonce.spec", "infonce.result",
    }  # fmt: skip


def test_all_packages_that_are_installed_are_read() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert set(setup["options"]["packages"].split()) <= SOURCES.keys()
    assert {"infonce.kernels.solve", "infonce.arrays"} <= IMPORTS["infonce.dispatch"]


def test_circles_are_found() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    graph |= {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f"}, "f": {"e", "a"}}
    assert circles(graph) == {frozenset("bc"), frozenset("ef")}


def test_there_are_no_circles() -> None:
    graph = dict(IMPORTS)
    for package, types in TYPES.items():
        graph |= {m: names - {types} for m, names in graph.items() if within(m, package)}
    assert not circles(graph)


def test_types_are_not_imported_at_run_time() -> None:
    for package, types in TYPES.items():
        modules = [module for module in SOURCES if within(module, package)]
        assert types in set().union(*(IMPORTS[module] for module in modules))
        for module in modules:
            path = SOURCES[module]
            lines = map(ast.unparse, ast.parse(path.read_text()).body)
            source = "\n".join(line for line in lines if "TYPE_CHECKING:" not in line)
            assert types not in named(module, source, path.name == "__init__.py"), module


def test_layers() -> None:
    for i, layer in enumerate(LAYERS):
        above = set().union(*LAYERS[: i + 1])
        for module in layer:
            assert not IMPORTS[module] & above, module


@pytest.mark.parametrize("package", ["infonce.reference", "infonce.kernels"])
def test_packages_that_stand_alone(package: str) -> None:
    """The reference shares nothing with what is compared to it; kernels know no public function."""
    for module in filter(lambda m: within(m, package), SOURCES):
        assert not {name for name in IMPORTS[module] if not within(name, package)}, module


# --- markers --------------------------------------------------------------------------------------


BEYOND_TEST = ("torch", "jax", "cupy")  # what the extra `test` does not bring


def may_skip(node: ast.AST) -> bool:
    """Whether it calls `importorskip` for such a library, or for one that is a variable."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    wanted = [call.args[0] for call in calls if ast.unparse(call.func).endswith("importorskip")]
    return any(
        not isinstance(name, ast.Constant) or str(name.value).split(".")[0] in BEYOND_TEST
        for name in wanted
    )


def unmarked(source: str) -> list[str]:
    """Tests that skip without an extra or a GPU, and have neither mark."""

    def marked(node: ast.AST) -> bool:
        return re.search(r"mark\.(extras|gpu)|gpu_only", ast.unparse(node)) is not None

    body = ast.parse(source).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    others = [node for node in body if node not in functions]
    if any(marked(node) for node in others if ast.unparse(node).startswith("pytestmark")):
        return []
    skipping = {f.name for f in functions if may_skip(f)}
    lines = [f"line {node.lineno}" for node in others if may_skip(node)]
    for f in functions:
        wants = skipping & {f.name, *(argument.arg for argument in f.args.args)}
        if f.name.startswith("test_") and wants and not any(map(marked, f.decorator_list)):
            lines.append(f.name)
    return lines


def test_what_wants_more_libraries_is_marked() -> None:
    """.ci/run has them after the first tests, and then runs those that are marked."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = {path.name: unmarked(path.read_text()) for path in files}
    assert not {name: lines for name, lines in found.items() if lines}
