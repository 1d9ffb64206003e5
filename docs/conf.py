"""How the documentation is built: sphinx-build -W docs build/docs (needs no network)."""

import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from sphinx.application import Sphinx

import infonce

HERE = Path(__file__).parent
# Sphinx reads pages from one folder only. As they are committed: outputs and plots are there.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(
    HERE.parent / "notebooks", HERE / "notebooks",
    ignore=shutil.ignore_patterns("*.py", "__pycache__", ".ipynb_checkpoints"),
)  # fmt: skip

# The same pages whether PyTorch is installed or not; its modules' own signatures stay visible.
sys.modules["torch"] = torch = MagicMock()
torch.nn.Module = type("Module", (), {})
torch.autograd.Function = type("Function", (), {})

project = "infonce"
copyright = "the infonce authors, Apache-2.0"
version = release = infonce.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # MathJax itself: formulas without a network
]
html_theme = "furo"
html_title = f"infonce {release}"
html_static_path = ["static"]
html_css_files = ["infonce.css"]
exclude_patterns = ["README.md"]

nb_execution_mode = "off"  # tests/project/test_notebooks.py runs them
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # nothing is fetched from elsewhere
nb_render_markdown_format = "myst"  # tables among the outputs
myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3

default_role = "py:obj"
# the same pages whether they are installed or not
autodoc_mock_imports = ["jax", "pylate", "pytorch_metric_learning", "sentence_transformers"]
autodoc_typehints = "none"  # docstrings say shapes and dtypes
autodoc_member_order = "groupwise"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # so that other parameters are a section of their own
python_maximum_signature_line_length = 88


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Fields of named tuples: the class's docstring has said what they are."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", skip)
