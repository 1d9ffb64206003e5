"""The documentation: builds without a warning, has every public name, points at code that is there,
and its examples run; how records become its tables."""

import ast
import functools
import html
import json
import math
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import succeed
from infonce.kernels import problem
from infonce.kernels.gpu.schedule import method
from infonce.kernels.offload import layout

import infonce
from infonce import comparison
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


def test_every_public_name_is_there(site: Path) -> None:
    for module, path in MODULES.items():
        names = public(path)
        assert len(names) > 3
        assert not {f"{module}.{name}" for name in names} - documented(site)


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
@pytest.mark.parametrize("page", ["explorer", "migrating", "losses", "index"])
def test_nothing_is_cut_off(site: Path, tmp_path: Path, page: str) -> None:
    """Text is inside the page and not too small; labels do not collide. Tables of words fit: those
    of numbers and of equations scroll in a box of their own."""
    words = {"migrating": ".table-wrapper", "losses": ".table-wrapper:not(:has(.math))"}
    # its columns of numbers scroll
    narrow = {**words, "migrating": ".table-wrapper:not(:has(th:nth-child(5)))"}
    frames = "".join(
        f"<iframe width={width} height=2000 src='{(site / page).as_uri()}.html#n=16' "
        f"data-words='{tables.get(page, 'no-table')}'></iframe><br>"
        for width, tables in ((420, narrow), (1300, words), (1400, words))
    )
    look = tmp_path / "look.html"
    look.write_text(f"<meta charset=utf-8><body>{frames}<script>{LOOK}</script>")
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'user'}",
         "--window-size=1460,2100", "--dump-dom", look.as_uri()],
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
    execute([program])
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
def test_examples_of_torch_learn() -> None:
    """Encoders and the scale of the README; the model of docs/first_model.md."""
    pytest.importorskip("torch")
    (example,) = (e for e in examples("../README.md") if e.startswith("import torch"))
    names = execute([example])
    assert names["loss"] < 0.1
    assert names["criterion"].log_scale.exp() > 16
    assert execute(examples("first_model.md"))["first"] > 0.4  # of 300 names


# --- what pages say of the code -------------------------------------------------------------------


PAGES = [README, ROOT / "benchmarks" / "NOTES.md", *sorted(DOCS.glob("*.md"))]


def test_paths_are_there() -> None:
    folders = "infonce|kernels|distributed|benchmarks|tests|tools|notebooks|docs"
    for page in PAGES:
        named = re.findall(rf"(?<!}})`((?:{folders})/[\w./-]*)`", page.read_text())
        assert not [path for path in named if not (ROOT / path).exists()], page.name


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
    """Functions that tables of docs/code.md name are defined in the files."""
    lines = [line for line in (DOCS / "code.md").read_text().splitlines() if line[:2] == "| "]
    places = re.findall(r"`([\w.]+/[\w./]+\.\w+)`: (`[\w.]+`(?:, `[\w.]+`)*)", "\n".join(lines))
    assert len(places) > 50
    for path, names in places:
        missing = set(re.findall(r"[\w.]+", names)) - defined(ROOT / path)
        assert not missing, f"not in {path}"


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


def test_every_loss_is_named() -> None:
    """Each place names every loss, or its function."""
    assert NAMES.keys() == LOSSES.keys()
    texts = {page: (ROOT / page).read_text() for page in (
        "README.md", "docs/index.md", "docs/losses.md", "docs/api/index.md", "docs/migrating.md",
    )}  # fmt: skip
    setup = (ROOT / "setup.cfg").read_text()
    for part in ("description", "keywords"):
        (texts[part],) = re.findall(rf"^{part} = (.*)$", setup, re.MULTILINE)
    texts["infonce --help"] = succeed("--help")
    for place, text in texts.items():
        missing = [n for loss, n in NAMES.items() if n not in text and f"{loss}_loss" not in text]
        assert not missing, place


def compared(cosine: float, *temperature: float) -> list[Any]:
    found = infonce.compare("clip", rows=4096, dim=512, cosine=cosine, temperature=temperature)
    return list(found.errors)


@pytest.mark.slow
def test_errors_of_precisions_are_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/numerics.md. Errors of float32 depend on the order of sums, so they are
    compared within a factor of 3; others have the roundings of their format. And float16 in the
    README: of a batch that is not learned yet, and of one that is."""
    text = (DOCS / "numerics.md").read_text()
    lines = re.findall(r"^\| (0\.\d+) \| `(\w+)` \| (\w+) \| (.*) \|$", text, re.M)
    found = compared(0.3, 0.01, 0.07)
    assert len(lines) == len(found) == 14
    for (temperature, precision, dtype, numbers), error in zip(lines, found, strict=True):
        key = float(temperature), precision, dtype
        assert key == (error.temperature, error.precision, error.grad_dtype)
        loss, norm, element, lost = numbers.split(" | ")
        factor = 3 if precision in ("fp32", "bf16x3") else 1.1
        assert 1 / factor < error.worst("norm") / float(norm) < factor
        assert 1 / 3 < error.worst("element") / float(element) < 3
        assert abs(error.loss_error - float(loss)) < 0.1 * float(loss) + 3e-7
        assert 100 * error.worst("lost") == pytest.approx(float(lost[:-1]), abs=0.2)

    (part,) = re.findall(r"^It depends on how small.*?^$", README.read_text(), re.M | re.S)
    part = part.replace("float16", "").replace("float32", "")
    said = [float(n) for n in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?(?=%|\b)", part)]
    loss, gradient, learned_loss, cosine, *learned, loss_error, learned_loss_error = said
    assert (loss, cosine, learned_loss) == (2.2, 0.3, 5.6e-6)
    monkeypatch.setattr(comparison, "PRECISIONS", {"fp16": comparison.PRECISIONS["fp16"]})
    for errors, want, percent, error_of_loss in (
        (compared(0.15, 0.01), loss, [gradient], loss_error),
        (found, learned_loss, learned, learned_loss_error),
    ):
        narrow, wide = (e for e in errors if e.precision == "fp16" and e.temperature == 0.01)
        assert narrow.loss == pytest.approx(want, rel=0.02)
        assert narrow.loss_error == pytest.approx(error_of_loss, rel=0.05)
        got = narrow.worst("norm"), narrow.worst("lost"), wide.worst("norm")
        for value, each in zip(got, percent, strict=False):
            assert 100 * value == pytest.approx(each, rel=0.11)


# --- examples -------------------------------------------------------------------------------------


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def execute(programs: Sequence[str], **names: Any) -> dict[str, Any]:
    """The names that programs leave, of which each sees those of the earlier ones."""
    assert programs
    for program in programs:
        exec(compile(program, "an example", "exec"), names)
    return names


@pytest.mark.parametrize(
    "page", ["faq.md", "index.md", "late_interaction.md", "losses.md", "methods.md"]
)
def test_examples_run(page: str) -> None:
    execute(examples(page))


@pytest.mark.extras
def test_training_with_a_queue() -> None:
    """The last step compares with the keys of all steps."""
    torch = pytest.importorskip("torch")
    (example,) = (text for text in examples("frameworks.md") if "KeyQueue" in text)
    torch.manual_seed(0)
    names = execute([example])
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
        model = functools.partial(sentence_model, width=16, dropout=0.0)
        losses.append(float(execute([code], sentence_model=model)["loss"].detach()))
    assert losses[0] > 0.01
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_diffs_are_of_the_projects_that_install() -> None:
    projects = {name for diff in DIFFS for name in PROJECT.findall(diff)}
    assert projects == {"lightly", "open_clip", "pytorch_metric_learning", "sentence_transformers"}
    assert len(DIFFS) == len(projects) + 3  # and one's own loss, without and with mined negatives


def test_examples_are_python() -> None:
    for page in ("distributed.md", "frameworks.md", "migrating.md"):
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
