"""docs/glossary.md: pages link its terms, and its names of the code are in the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GLOSSARY = DOCS / "glossary.md"
PAGES = sorted({*DOCS.glob("*.md"), *DOCS.glob("api/*.md")} - {GLOSSARY})
LINKED = ("distributed", "emulator", "faq", "frameworks", "index", "kernels", "losses", "methods",
          "migrating", "numerics", "results", "sources")  # fmt: skip


def entries() -> dict[tuple[str, ...], str]:
    """Words that share an entry -> what it says."""
    blocks = re.findall(r"^```{glossary}\n(.*?)^```", GLOSSARY.read_text(), re.M | re.S)
    texts = {}
    for entry in "\n\n".join(blocks).split("\n\n"):
        lines = entry.strip("\n").splitlines()
        words = [line for line in lines if not line.startswith("  ")]
        texts[tuple(words)] = " ".join(line.strip() for line in lines[len(words) :])
    return texts


def links(page: Path) -> list[str]:
    """The terms that a page links, without their case."""
    named = re.findall(r"{term}`(?:[^`<]*<)?([^`>]+)>?`", page.read_text())
    return [term.lower() for term in named]


def test_entries_are_a_sentence() -> None:
    words = [word for words_of_entry in entries() for word in words_of_entry]
    assert len(words) == len(set(words)) > 50
    assert not [
        words_of_entry
        for words_of_entry, text in entries().items()
        if not re.fullmatch(r"[^ ].*[^.]\.", text)
    ]
    assert not [
        words_of_entry
        for words_of_entry, text in entries().items()
        if re.search(r"[a-z`]\. [A-Z]", text)
    ]


def test_links_and_entries_belong_together() -> None:
    """Each link has an entry, and of each entry at least one word is linked."""
    linked = {term for page in PAGES for term in links(page)}
    words = {word.lower() for entry in entries() for word in entry}
    assert not linked - words
    assert not [entry for entry in entries() if not linked & {word.lower() for word in entry}]


@pytest.mark.parametrize("name", LINKED)
def test_pages_link_a_term_once_where_it_comes_first(name: str) -> None:
    page = DOCS / f"{name}.md"
    text = page.read_text()
    terms = links(page)
    assert terms or "{doc}`glossary`" in text
    assert len(terms) == len(set(terms))
    prose = re.sub(r"^(?:```.*?^```|#.*?$|<!-- \w+:.*?end -->$)", "", text, flags=re.M | re.S)
    for term in terms:
        if " " in term or "-" in term:  # other terms are words of other sentences too
            link = re.search(rf"{{term}}`(?:[^`<]*<)?{re.escape(term)}>?`", prose, re.IGNORECASE)
            assert link is not None
            assert term not in prose[: link.start()].lower(), term


def test_names_of_the_code() -> None:
    names = set(re.findall(r"(?<!})`([A-Za-z_]\w+)`", GLOSSARY.read_text()))
    assert len(names) > 15
    folders = ("infonce", "kernels", "distributed")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.*"))
    sources = " ".join(path.read_text() for path in files if path.suffix in (".py", ".cu", ".cuh"))
    assert not names - set(re.findall(r"\w+", sources))
