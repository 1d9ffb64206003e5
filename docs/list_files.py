"""Write docs/files.md, the list of source files: what the first lines of each say, what it defines.

python docs/list_files.py
"""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What may come before the name of a CUDA kernel, such as __launch_bounds__(256, F(2))
ATTRIBUTE = r"__\w+__\((?:[^()]|\([^()]*\))*\)\s*"
PAGE = Path(__file__).parent / "files.md"
ROOMS = ("infonce", "kernels", "distributed")
START = """\
# Files

Every source file, with the sentences at its top, and the functions, classes or kernels in it that
other files use. {doc}`code` leads from a question to a function. To change a sentence, change it in
the source file, then run `python docs/list_files.py`.
"""


def first_paragraph(path: Path) -> str:
    """The first paragraph of a Python docstring, or of the comment at the top of a CUDA file."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.match(r"(?://.*\n)*", text)
        text = re.sub(r"(?m)^// ?", "", comment[0] if comment else "")
    return " ".join(text.split("\n\n")[0].split()).rstrip(":")


def definitions(path: Path) -> list[str]:
    """The names of public functions and classes at the top level of a file, or of its kernels."""
    text = path.read_text()
    if path.suffix != ".py":
        text = re.sub(r"(?m)^#.*\n", "", text)  # `#if` may be inside a signature
        return re.findall(rf"__global__ void\s+(?:{ATTRIBUTE})*(\w+)\(", text)
    kinds = ast.FunctionDef, ast.ClassDef
    nodes = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    return [node.name for node in nodes if not node.name.startswith("_")]


def lines() -> Iterator[str]:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.*")]
    sources = [path for path in files if path.suffix in (".py", ".cu", ".cuh")]
    sources.sort(key=lambda path: (path.parent, path.name))
    yield START
    for folder, paths in groupby(sources, lambda path: path.parent):
        yield f"## {folder.relative_to(ROOT).as_posix()}\n"
        for path in paths:
            name = "" if path.name == "__init__.py" else f"`{path.name}`: "
            yield f"- {name}{first_paragraph(path)}"
            if defined := definitions(path):
                yield f"  ({', '.join(f'`{symbol}`' for symbol in defined)})"
        yield ""


def page() -> str:
    return "\n".join(lines()).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
