"""The documentation: builds without a warning, has every public name, points at code that is there,
and its examples run; how records become its tables."""

import ast
import html
import json
import math
import re
import shutil
import subprocess
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import PNG, succeed
from infonce.kernels import problem
from infonce.kernels.gpu.schedule import method
from infonce.kernels.offload import layout

import infonce
from infonce.spec import LOSSES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
RENDER = ROOT / "benchmarks" / "render.py"
MODULES = {  # name -> where its __all__ is
    "infonce": "infonce/__init__.py",
    "infonce.distributed": "distributed/__init__.py",
    "infonce.jax": "infonce/jax/__init__.py",
    "infonce.reference": "infonce/reference/__init__.py",
    "infonce.schedules": "infonce/schedules.py",
    "infonce.torch": "infonce/torch/__init__.py",
}
PROJECTS = [
    "colpali_engine", "inf_cl", "infonce_cuda", "lightly", "open_clip", "pylate",
    "pytorch_metric_learning", "sup_contrast",
]  # fmt: skip
IN_PLACE_OF = {
    **{f"infonce.torch.{name}": f"infonce/torch/{name}.py" for name in PROJECTS},
    **{f"infonce.torch.{name}": f"infonce/torch/{name}/__init__.py"
       for name in ("memory_efficient_clip", "sentence_transformers", "siglip_kernel")},
}  # fmt: skip


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
    for part in ("docs", "notebooks", "benchmarks/results"):
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
    entries = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = public({**MODULES, **IN_PLACE_OF}[module])
    losses = [n for n in names if n.endswith(("_loss", "_loss_and_grad", "Loss", "Contrastive"))]
    if module == "infonce.reference":
        losses = ["clip", "gte", "info_nce", "lit", "nt_xent", "siglip", "sup_con"]
    assert losses
    for name in losses:
        text = re.sub(r"<[^>]+>", "", entries[f"{module}.{name}"])
        wanted = ["=", "[", "Parameters", "References"]
        if module != "infonce.reference":  # which validates nothing, as it says
            wanted.append("Raises")
        assert not [part for part in wanted if part not in text], name


def test_needs_no_network(site: Path) -> None:
    """Scripts and styles are the site's own."""
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link)\b[^>]*>", page.read_text()):
            link = re.search(r'(?:src|href)="(?:https?:)?//', tag)
            assert not link or 'rel="canonical"' in tag, f"{page.name}: {tag}"


# --- pages in a browser ---------------------------------------------------------------------------

BROWSER = next(filter(shutil.which, ("chromium", "google-chrome", "chromium-browser")), None)
LOOK = (Path(__file__).parent / "page_faults.js").read_text()


@pytest.mark.skipif(not BROWSER, reason="no browser to open the pages")
@pytest.mark.parametrize("width", [420, 1300, 1400])
@pytest.mark.parametrize("page", ["explorer", "migrating", "losses", "index"])
def test_nothing_is_cut_off(site: Path, tmp_path: Path, page: str, width: int) -> None:
    """Text is inside the page and not too small; labels do not collide. Tables of words fit: those
    of numbers and of equations scroll in a box of their own."""
    words = {"migrating": ".table-wrapper", "losses": ".table-wrapper:not(:has(.math))"}
    if width < 500:  # its columns of numbers scroll
        words["migrating"] = ".table-wrapper:not(:has(th:nth-child(5)))"
    look = tmp_path / "look.html"
    look.write_text(
        f"<meta charset=utf-8><body><iframe width={width} height=2000 "
        f"src='{(site / page).as_uri()}.html#n=16'></iframe>"
        f"<script>const WORDS = {json.dumps(words.get(page, 'no-table'))};{LOOK}</script>"
    )
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'user'}",
         f"--window-size={width + 60},2100", "--dump-dom", look.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    assert json.loads(html.unescape(found[1])) == []


# --- the README -----------------------------------------------------------------------------------


def test_readme_has_both_commands() -> None:
    text = README.read_text()
    for mark in ("demo", "test"):  # .ci/run looks for the second like this
        after = text.partition(f"<!-- {mark} command -->\n```\n")[2]
        assert after.startswith("python3 -m venv .venv && .venv/bin/python -m pip install -q -e ")


def test_first_program_of_the_readme_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what the page says, to rounding, and stands on the first screen."""
    program, printed = re.search(  # type: ignore[union-attr]
        r"^```python\n(import numpy.*?)^```\n\n```\n(.*?)^```",
        README.read_text(), re.M | re.S,
    ).groups()  # fmt: skip
    assert README.read_text().index(program) < README.read_text().index("\n## ")
    exec(compile(program, "README.md", "exec"), {})
    number = re.compile(r"[\d.]+")
    got, said = capsys.readouterr().out, printed
    assert number.sub("#", got) == number.sub("#", said)
    values = [[float(v) for v in number.findall(text)] for text in (got, said)]
    losses, accuracies = values[0][1::4], values[0][3::4]
    assert losses == pytest.approx(values[1][1::4], rel=0.02)
    assert accuracies == pytest.approx(values[1][3::4], abs=2)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.2 * losses[0]
    assert accuracies == sorted(accuracies)
    assert accuracies[-1] > 90


@pytest.mark.extras
def test_torch_example_of_the_readme_learns() -> None:
    """Its encoders and its scale."""
    (example,) = (e for e in examples("../README.md") if e.startswith("import torch"))
    pytest.importorskip("torch")
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"] < 0.1
    assert names["criterion"].log_scale.exp() > 16


# --- what pages say of the code -------------------------------------------------------------------


PAGES = [README, ROOT / "benchmarks" / "NOTES.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_are_there(page: Path) -> None:
    folders = "infonce|kernels|distributed|benchmarks|tests|tools|notebooks|docs"
    named = re.findall(rf"(?<!}})`((?:{folders})/[\w./-]*)`", page.read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


def defined(path: Path) -> set[str]:
    """Functions, classes, their methods and constants of a file; of CUDA C++, all names."""
    if path.suffix != ".py":
        return set(re.findall(r"\w+", path.read_text()))
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
        if isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return names


def test_map_of_the_code() -> None:
    """Functions that tables of docs/code.md name are defined in the files, and its folders are
    there."""
    lines = [line for line in (DOCS / "code.md").read_text().splitlines() if line[:2] == "| "]
    places = re.findall(r"`([\w.]+/[\w./]+\.\w+)`: (`[\w.]+`(?:, `[\w.]+`)*)", "\n".join(lines))
    assert len(places) > 50
    for path, names in places:
        missing = set(re.findall(r"[\w.]+", names)) - defined(ROOT / path)
        assert not missing, f"not in {path}"
    paths = re.findall(
        r"`((?:infonce|kernels|distributed|benchmarks|tests|tools)/[\w./]*)`", "\n".join(lines)
    )
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_names_of_the_code_are_there() -> None:
    """The code has all constants that pages name, and all names in CONTRIBUTING.md."""
    folders = ("infonce", "kernels", "distributed", "tests", "tools", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    sources = [path.read_text() for path in files if path.suffix in (".py", ".cu", ".cuh")]
    words = set(re.findall(r"\w+", " ".join(sources)))
    for page in PAGES:
        named = re.findall(r"`([A-Z]+_?[A-Z_0-9]{3,})(?:=\w+)?`", page.read_text())
        assert not [name for name in named if name not in words], page.name
    named = re.findall(r"`([A-Za-z_][\w.]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20
    parts = {part for name in named if "/" not in name for part in name.split(".")}
    assert not parts - words - {"py", "cu", "cuh", "kernels", "distributed"}


def test_page_of_methods_has_the_limits_of_the_code() -> None:
    page = " ".join((DOCS / "methods.md").read_text().split())
    assert f"The default is {problem.WORKSPACE // 2**20} MiB" in page
    assert f"chunks of {layout.WAVE_ROWS} rows" in page
    logits, rows = method.MAX_FUSED_LOGITS, method.MAX_FUSED_ROWS
    multiply_adds = method.MAX_FUSED_MULTIPLY_ADDS
    limits = (
        f"up to 2^{math.log2(logits):.0f} logits, {rows} rows on each side and "
        f"2^{math.log2(multiply_adds):.0f} multiply-adds"
    )
    assert limits in page


NAMES = {"info_nce": "InfoNCE", "nt_xent": "NT-Xent", "sup_con": "SupCon", "clip": "CLIP",
         "lit": "LiT", "siglip": "SigLIP", "gte": "GTE"}  # fmt: skip


@pytest.mark.parametrize("place", [
    "README.md", "docs/index.md", "docs/losses.md", "docs/api/index.md", "docs/migrating.md",
    "setup.cfg description", "setup.cfg keywords", "infonce --help",
])  # fmt: skip
def test_every_loss_is_named(place: str) -> None:
    """Each place names every loss, or its function."""
    assert NAMES.keys() == LOSSES.keys()
    file, _, part = place.partition(" ")
    if file == "infonce":
        text = succeed(part)
    else:
        text = (ROOT / file).read_text()
        if part:
            (text,) = re.findall(rf"^{part} = (.*)$", text, re.MULTILINE)
    missing = [n for loss, n in NAMES.items() if n not in text and f"{loss}_loss" not in text]
    assert not missing


@pytest.mark.slow
def test_errors_of_precisions_are_those_of_a_run() -> None:
    """The table of docs/numerics.md. Errors of float32 depend on the order of sums, so they are
    compared within a factor of 3; others have the roundings of their format."""
    text = (DOCS / "numerics.md").read_text()
    lines = re.findall(r"^\| (0\.\d+) \| `(\w+)` \| (\w+) \| (.*) \|$", text, re.M)
    found = infonce.compare("clip", rows=4096, dim=512, cosine=0.3, temperature=(0.01, 0.07))
    assert len(lines) == len(found.errors) == 14
    for (temperature, precision, dtype, numbers), error in zip(lines, found.errors, strict=True):
        key = float(temperature), precision, dtype
        assert key == (error.temperature, error.precision, error.grad_dtype)
        loss, norm, element, lost = numbers.split(" | ")
        factor = 3 if precision in ("fp32", "bf16x3") else 1.1
        assert 1 / factor < error.worst("norm") / float(norm) < factor
        assert 1 / 3 < error.worst("element") / float(element) < 3
        assert abs(error.loss_error - float(loss)) < 0.1 * float(loss) + 3e-7
        assert 100 * error.worst("lost") == pytest.approx(float(lost[:-1]), abs=0.2)


@pytest.mark.slow
def test_errors_of_float16_in_the_readme() -> None:
    """Of a batch that is not learned yet, and of one that is."""
    (part,) = re.findall(r"^It depends on how small.*?^$", README.read_text(), re.M | re.S)
    numbers = [
        float(n)
        for n in re.findall(
            r"\d+(?:\.\d+)?(?:e-\d+)?(?=%|\b)", part.replace("float16", "").replace("float32", "")
        )
    ]
    loss, gradient, learned_loss, cosine, *learned, loss_error, learned_loss_error = numbers
    assert (loss, cosine, learned_loss) == (2.2, 0.3, 5.6e-6)
    for cosine, want, percent, error_of_loss in (
        (0.15, loss, [gradient], loss_error),
        (0.3, learned_loss, learned, learned_loss_error),
    ):
        found = infonce.compare("clip", rows=4096, dim=512, cosine=cosine, temperature=0.01)
        narrow, wide = (error for error in found.errors if error.precision == "fp16")
        assert narrow.loss == pytest.approx(want, rel=0.02)
        assert narrow.loss_error == pytest.approx(error_of_loss, rel=0.05)
        got = narrow.worst("norm"), narrow.worst("lost"), wide.worst("norm")
        for value, said in zip(got, percent, strict=False):
            assert 100 * value == pytest.approx(said, rel=0.11)


# --- examples -------------------------------------------------------------------------------------


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "page", ["faq.md", "index.md", "late_interaction.md", "losses.md", "methods.md"]
)
def test_examples_run(page: str) -> None:
    assert examples(page)
    names: dict[str, object] = {}
    for example in examples(page):
        exec(compile(example, page, "exec"), names)


@pytest.mark.extras
def test_first_model_learns() -> None:
    pytest.importorskip("torch")
    names: dict[str, float] = {}
    for example in examples("first_model.md"):
        exec(compile(example, "first_model.md", "exec"), names)
    assert names["first"] > 0.4  # of 300 names


@pytest.mark.extras
def test_training_with_a_queue() -> None:
    """The last step compares with the keys of all steps."""
    torch = pytest.importorskip("torch")
    (example,) = (text for text in examples("frameworks.md") if "KeyQueue" in text)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(example, "frameworks.md", "exec"), names)
    assert names["keys"].shape == (30 * 16, 32)
    query, keys = (torch.nn.functional.normalize(names[z]) for z in ("query", "keys"))
    want = torch.nn.functional.cross_entropy(query @ keys.T / 0.2, torch.arange(16))
    torch.testing.assert_close(names["loss"], want)
    assert want > 0.1


DIFFS = re.findall(r"^```diff\n(.*?)^```", (DOCS / "migrating.md").read_text(), re.M | re.S)
PROJECT = re.compile(r"^-from (\w+).* import", re.M)  # what a diff leaves


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")  # of the projects
@pytest.mark.parametrize("diff", DIFFS, ids=lambda d: "".join(PROJECT.findall(d)) or "own_loss")
def test_training_steps_of_other_projects(diff: str) -> None:
    """Three steps before and after the change: the same loss, of the same parameters."""
    torch = pytest.importorskip("torch")
    from torch_problems import sentence_model

    for project in PROJECT.findall(diff):
        pytest.importorskip(project, exc_type=ImportError)
    assert re.search(r"^-", diff, re.M)
    assert re.search(r"^\+.*infonce", diff, re.M)
    losses = []
    for side in "-+":
        lines = [line[1:] for line in diff.splitlines() if line[:1] in ("", " ", side)]
        # random weights instead of a download
        code = re.sub(
            r"SentenceTransformer\(.*\)$", "sentence_model()", "\n".join(lines), flags=re.M
        )
        torch.manual_seed(0)
        names: dict[str, Any] = {"sentence_model": partial(sentence_model, width=16, dropout=0.0)}
        exec(compile(code, "migrating.md", "exec"), names)
        losses.append(float(names["loss"].detach()))
    assert losses[0] > 0.01
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_diffs_are_of_the_projects_that_install() -> None:
    projects = {name for diff in DIFFS for name in PROJECT.findall(diff)}
    assert projects == {"lightly", "open_clip", "pytorch_metric_learning", "sentence_transformers"}
    assert len(DIFFS) == len(projects) + 3  # and one's own loss, without and with mined negatives


@pytest.mark.parametrize("page", ["distributed.md", "frameworks.md", "migrating.md"])
def test_examples_are_python(page: str) -> None:
    assert examples(page)
    for example in examples(page):
        compile(example, page, "exec")


# --- recorded results -----------------------------------------------------------------------------


def test_render(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    chosen = "<!-- results:a method; median_s begin -->\n"
    readme.write_text(
        "before\n<!-- results:a begin -->\nold\n<!-- results:a end -->\nafter\n"
        f"{chosen}<!-- results:a end -->\n"
    )
    record = {
        "device": "a machine", "versions": {"numpy": "2", "torch": "3", "jax": None},
        "commit": "abc", "date": "2026-11-24T12:47:08", "settings": {"dim": 8},
        "results": [
            {"method": "x", "median_s": 0.0125, "peak_bytes": 3 * 2**20, "seconds": [1]},
            {"method": "y", "gemm_share": 0.5, "loss_error": 2e-7, "gflops": 123.456},
            {"method": "z", "skipped": "no memory"},
        ],
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(record))

    def render(*arguments: str) -> int:
        command = [sys.executable, RENDER, readme, "--results", tmp_path, *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert render("--check") == 1
    assert "old" in readme.read_text()
    assert render() == 0
    assert readme.read_text() == (
        "before\n<!-- results:a begin -->\n"
        "a machine; torch 3; commit abc; 2026-11-24.\nSettings: dim 8.\n\n"
        "| method | median (ms) | peak (MiB) | gemm share | loss error | gflops | skipped |\n"
        "|---|---|---|---|---|---|---|\n"
        "| x | 12.5 | 3.0 | - | - | - | - |\n"
        "| y | - | - | 50% | 2e-07 | 123.5 | - |\n"
        "| z | - | - | - | - | - | no memory |\n"
        "<!-- results:a end -->\nafter\n"
        f"{chosen}a machine; torch 3; commit abc; 2026-11-24.\nSettings: dim 8.\n\n"
        "| method | median (ms) |\n|---|---|\n| x | 12.5 |\n| y | - |\n<!-- results:a end -->\n"
    )
    assert render("--check") == 0


def test_render_of_contenders_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    kinds = ("results", "peers", "goals", "ladder")
    marks = (f"<!-- {kind}:gpu begin -->\n<!-- {kind}:gpu end -->\n" for kind in kinds)
    chosen = (
        f"<!-- {kind}:gpu {title} begin -->\n<!-- {kind}:gpu end -->\n"
        for kind, title in (("results", "Labels"), ("times", "Wide"), ("times", "Labels"))
    )
    readme.write_text("".join([*marks, *chosen]))

    def row(size: int, method: str, table: str = "Half", **measured: object) -> dict[str, object]:
        section = "widths" if table == "Wide" else table.lower()
        kind = {"section": section, "table": table, "loss": "clip", "dtype": "bfloat16"}
        about = {"precision": "auto", "gradient": True, "dim": 512, "size": size}
        return {**kind, **about, "method": method, **measured}

    record = {
        "device": "a GPU", "gpu": {"driver": "1.2", "cuda": "3.4"}, "versions": {"torch": "2"},
        "commit": "abc", "date": "today", "settings": {}, "environment": {},
        "gemm": {"size": 16, "gflops": [700e3, 800e3, 790e3]},
        "results": [
            row(8, "auto", median_s=2e-3, wall_s=3e-3, gflops=5e5, peak_bytes=2**21, goal_s=2.5e-3,
                timed="wall_s", products_share=0.5, loss_error=1e-7, gradient_error=2e-3),
            row(8, "products", median_s=4e-3, gflops=2.5e5, peak_bytes=0, products_share=1.0),
            row(8, "torch", skipped="no memory"),
            row(16, "auto", median_s=8e-3, gflops=5e5, peak_bytes=2**22, goal_s=9e-3,
                timed="median_s"),
            row(8192, "auto", median_s=1e-3, gflops=9e5, peak_bytes=2**20),
            row(8192, "captured", median_s=1e-4, gflops=9e5, peak_bytes=None),
            row(8192, "torch", median_s=2e-3, gflops=1e5, peak_bytes=9 * 2**20),
            row(8192, "panels", median_s=3e-3, gflops=1e5, peak_bytes=2**22),
            # of two sections, the first counts
            row(8192, "auto", "Wide", median_s=5e-3, gflops=9e5, peak_bytes=2**20),
            row(8192, "torch.compile", "Wide", median_s=4e-3, gflops=9e5, peak_bytes=2**20),
            row(8192, "auto", "Wide", dim=768, median_s=6e-3, gflops=9e5, peak_bytes=2**20),
            row(8192, "1 GiB", "Wide", dim=768, median_s=6e-3, gflops=9e5, peak_bytes=2**30,
                goal_s=5e-3, timed="median_s"),
            row(8192, "torch.compile", "Wide", dim=768, median_s=6e-3, gflops=9e5, peak_bytes=0),
            row(65536, "auto", "Wide", dim=768, median_s=6e-2, gflops=9e5, peak_bytes=2**20),
            row(65536, "torch.compile", "Wide", dim=768, skipped="no memory"),
            row(256, "auto", "Labels", loss="info_nce", dim=128, keys=4096, wrt=["query"],
                median_s=1e-3, wall_s=2e-3, gflops=9e5, peak_bytes=0),
            row(256, "auto", "Labels", loss="info_nce", dim=128, keys=4096, wrt=[],
                median_s=2e-3, gflops=9e5, peak_bytes=0),
            row(4096, "portable", "Every card", median_s=2e-3, gflops=4e5, peak_bytes=2**21,
                products_share=2.0),
            row(4096, "auto", "Every card", median_s=1e-3, gflops=8e5, peak_bytes=2**20,
                products_share=1.0),
            row(4096, "products", "Every card", median_s=1e-3, gflops=8e5, peak_bytes=2**23,
                products_share=1.0),
            # too small for a sweep
            row(1024, "naive", "Every card", median_s=2e-3, gflops=1e5, peak_bytes=2**20),
            row(1024, "products", "Every card", median_s=1e-3, gflops=2e5, peak_bytes=2**20),
        ],
    }  # fmt: skip
    (tmp_path / "gpu.json").write_text(json.dumps(record))
    command = [sys.executable, RENDER, readme, "--results", tmp_path]
    subprocess.run(command, check=True)
    lines = readme.read_text().splitlines()
    methods = "infonce | bare products | torch | captured | panels"
    assert "a GPU; torch 2; commit abc; today." in lines
    assert "cuBLAS's bf16 product of 16 rows: 790 TFLOP/s." in lines
    assert (
        "| clip bfloat16 8 x 512 | 0.50 | 2 (3), 2 MiB<br>1e-07, 2e-03 | 4, 0 MiB | - |  |  |"
    ) in lines
    assert f"| Half | of the bare products | {methods} |" in lines
    assert "| clip bfloat16 16 x 512 | - | 8, 4 MiB |  |  |  |  |" in lines
    assert "1 of 3 goals are reached; missed:" in lines
    assert "| clip bfloat16 8 x 512 | 2.5 | 3 |" in lines
    assert (
        "| clip bfloat16 8192 x 512 | 1 ms, 1 MiB | - | torch: 2 ms, 9 MiB | panels: 3 ms, 4 MiB |"
    ) in lines
    query_only = "info_nce bfloat16 256 of 4096 x 128, gradient of query only"
    assert f"| {query_only} | - | 1 (2), 0 MiB |" in lines
    assert "| info_nce bfloat16 256 of 4096 x 128 | - | 2, 0 MiB |" in lines
    assert "| clip bfloat16 8192 x 768, 1 GiB | 5 | 6 |" in lines
    texts = ("\n".join(lines) + "\n").split(" begin -->\n")[-3:]
    chosen_result, wide, labels = (
        [line for line in text.splitlines() if line[:1] == "|"] for text in texts
    )
    assert chosen_result == [
        "| Labels | of the bare products | infonce |",
        "|---|---|---|",
        f"| {query_only} | - | 1 (2), 0 MiB |",
        "| info_nce bfloat16 256 of 4096 x 128 | - | 2, 0 MiB |",
    ]
    assert wide == [
        "| Wide | of the bare products | infonce (MiB) | infonce (ms) | torch.compile (ms) |",
        "|---|---|---|---|---|",
        "| clip bfloat16 8192 x 512 | - | 1 | 5 | 4 |",
        "| clip bfloat16 8192 x 768 | - | 1 | 6 | 6 |",
        "| clip bfloat16 65536 x 768 | - | 1 | 60 |  |",
    ]
    assert labels == [
        "| Labels | of the bare products | infonce (MiB) | infonce (ms) |",
        "|---|---|---|---|",
        "| info_nce bfloat16 256 of 4096 x 128 | - | 0 | 2 |",
    ]
    steps = lines[lines.index("| case | step | of the bare products | TFLOP/s | time, memory |") :]
    assert steps[2:6] == [
        "| clip bfloat16 4096 x 512 | 2. tiles | 2.00 | 400 | 2 ms, 2 MiB |",
        "| clip bfloat16 4096 x 512 | 3. sweeps | 1.00 | 800 | 1 ms, 1 MiB |",
        "| clip bfloat16 4096 x 512 | bare products | 1.00 | 800 | 1 ms, 8 MiB |",
        "<!-- ladder:gpu end -->",
    ]
    for plot in ("gpu.png", "gpu-peers.png", "gpu-shapes.png"):
        assert (tmp_path / plot).read_bytes().startswith(PNG)
    subprocess.run([*command, "--check"], check=True)


def test_render_in_one_line(tmp_path: Path) -> None:
    """Contenders of a small batch, and of a training step, stand beside each other."""
    page = tmp_path / "page.md"
    kinds = ("company", "clients")
    marks = "".join(f"<!-- {k}:{k} begin -->\n<!-- {k}:{k} end -->\n" for k in kinds)
    keys = "shape; gradients; contender; median_s"
    page.write_text(f"{marks}<!-- beside:beside {keys} begin -->\n<!-- beside:beside end -->\n")
    head = {"device": "a CPU", "versions": {}, "commit": "abc", "date": "today"}

    def states(*medians: float) -> dict[str, dict[str, float]]:
        names = ("alone", "after", "in_turns")
        times = zip(names, medians, strict=True)
        return {name: {"median_s": t, "least_s": t / 2, "p90_s": 3 * t} for name, t in times}

    small = {"loss": "clip", "rows": 8}
    company = [
        {**small, "dim": 64, "infonce": states(0.001, 0.002, 0.003), "torch": states(0.004, 1, 1)},
        {**small, "dim": 96, "infonce": states(0.005, 0.002, 0.003), "torch": states(0.010, 1, 1)},
    ]
    project, ours = {"step": "SimCLR", "loss by": "lightly"}, {"step": "SimCLR", "loss by": "x"}
    clients = [
        {**project, "skipped": "no memory"}, {**ours, "median_s": 0.002, "peak_bytes": 2**20},
        {**ours, "median_s": 0.001, "peak_bytes": 2**21},
    ]  # fmt: skip
    beside = [
        {"shape": 8, "gradients": gradients, "contender": name, "median_s": seconds}
        for name, gradients, seconds in (
            ("x", False, 0.001),
            ("y", False, 0.002),
            ("y", True, 0.003),
        )
    ]
    beside.append({"shape": 8, "gradients": True, "contender": "x", "skipped": "no memory"})
    (tmp_path / "beside.json").write_text(json.dumps({**head, "results": beside}))
    (tmp_path / "company.json").write_text(json.dumps({**head, "results": company}))
    (tmp_path / "clients.json").write_text(json.dumps({**head, "results": clients}))
    subprocess.run([sys.executable, RENDER, page, "--results", tmp_path], check=True)
    lines = page.read_text().splitlines()
    assert "| clip | 8 | 64, 96 | 1, 5 | 4, 10 | 0.50 |" in lines
    assert "| SimCLR | lightly | out of memory | 2 ms, 1 MiB | 1 ms, 2 MiB |" in lines
    assert lines[-5:-1] == [
        "| shape | gradients | x (ms) | y (ms) |",
        "|---|---|---|---|",
        "| 8 | no | 1 | 2 |",
        "| 8 | yes | - | 3 |",
    ]


def test_records_are_written_where_pages_read_them() -> None:
    """The default output of each benchmark is in benchmarks/results/."""
    scripts = [path for path in RENDER.parent.rglob("*.py") if path != RENDER]
    folders = {
        path: eval(expression, {"Path": Path, "__file__": str(path)})
        for path in scripts
        for expression in re.findall(r"^RESULTS = (.*)$", path.read_text(), re.M)
    }
    assert len(folders) > 8
    assert set(folders.values()) == {RENDER.parent / "results"}
    others = [path for path in scripts if '/ "results"' in path.read_text()]
    assert set(others) == set(folders)
