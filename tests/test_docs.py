"""The documentation: builds without a warning, has every public name, and its examples run."""

import ast
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MODULES = {  # name -> where its __all__ is
    "infonce": "infonce/__init__.py",
    "infonce.distributed": "distributed/__init__.py",
    "infonce.jax": "infonce/jax.py",
    "infonce.reference": "infonce/reference/__init__.py",
    "infonce.schedules": "infonce/schedules.py",
    "infonce.torch": "infonce/torch/__init__.py",
}
PROJECTS = ["inf_cl", "infonce_cuda", "memory_efficient_clip", "open_clip"]
IN_PLACE_OF = {f"infonce.torch.{name}": f"infonce/torch/{name}.py" for name in PROJECTS}


def public(path: str) -> list[str]:
    """`__all__`, or the functions that are not private; read without importing: torch and jax may
    not be installed."""
    body = ast.parse((ROOT / path).read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if name not in ("__version__", "schedules")]
    return [n.name for n in body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: other workers may build at the same time."""
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("copy")
    for part in ("docs", "notebooks"):
        shutil.copytree(ROOT / part, folder / part)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", "site"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "site"


def documented(site: Path) -> set[str]:
    """Names in the site's inventory."""
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split()[0] for line in zlib.decompress(lines[4]).decode().splitlines()}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there(site: Path, module: str) -> None:
    names = public(MODULES[module])
    assert len(names) > 3
    missing = {f"{module}.{name}" for name in names} - documented(site)
    assert not missing


@pytest.mark.parametrize("module", [*sorted(set(MODULES) - {"infonce.schedules"}), *IN_PLACE_OF])
def test_losses_say_equation_shapes_errors_and_source(site: Path, module: str) -> None:
    name = module.removeprefix("infonce.").partition(".")[0]
    page = (site / "api" / f"{name}.html").read_text()
    parts = re.split(r'<dt class="sig sig-object py" id="([\w.]+)">', page)
    of_name = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = public({**MODULES, **IN_PLACE_OF}[module])
    losses = [n for n in names if n.endswith(("_loss", "_loss_and_grad", "Loss"))]
    if module == "infonce.reference":
        losses = ["clip", "info_nce", "lit", "nt_xent", "siglip"]
    assert losses
    for name in losses:
        text = re.sub(r"<[^>]+>", "", of_name[f"{module}.{name}"])
        wanted = ["=", "[", "Parameters", "References"]
        if module != "infonce.reference":  # which validates nothing, as it says
            wanted.append("Raises")
        assert not [part for part in wanted if part not in text], name


def test_needs_no_network(site: Path) -> None:
    """Scripts and styles are the site's own."""
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link)\b[^>]*>", page.read_text()):
            found = re.search(r'(?:src|href)="(?:https?:)?//', tag)
            assert not found or 'rel="canonical"' in tag, f"{page.name}: {tag}"


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


@pytest.mark.parametrize("page", ["faq.md", "index.md", "losses.md", "methods.md"])
def test_examples_run(page: str) -> None:
    assert examples(page)
    names: dict[str, object] = {}
    for example in examples(page):
        exec(compile(example, page, "exec"), names)


@pytest.mark.parametrize("page", ["distributed.md", "frameworks.md", "migrating.md"])
def test_examples_are_python(page: str) -> None:
    assert examples(page)
    for example in examples(page):
        compile(example, page, "exec")
