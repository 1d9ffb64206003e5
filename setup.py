"""The description for package indexes, which setup.cfg cannot make: the README without its pictures
and its links to files, which an index does not have. The source distribution has them."""

import re
from pathlib import Path

from setuptools import setup

CODE = r"^```.*?^```"  # left as it is
PICTURE = r"^!\[[^]]*\]\([^)]*\)\n+"
LINK = r"\[(?P<words>[^]]+)\]\((?!https?://)(?P<file>[^)]+)\)"


def without_files(found: re.Match[str]) -> str:
    """[docs/faq.md](docs/faq.md) becomes `docs/faq.md`; other links have the file in brackets."""
    words, file = found["words"], found["file"]
    if found[0].startswith("```"):
        return found[0]
    if words is None:
        return ""
    return f"`{file}`" if words == file else f"{words} (`{file}`)"


README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
DESCRIPTION = re.sub(
    f"{CODE}|{PICTURE}|{LINK}", without_files, README, flags=re.MULTILINE | re.DOTALL
)
setup(long_description=DESCRIPTION)
