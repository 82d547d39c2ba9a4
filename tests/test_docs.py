"""Checks documents: links, commands, wrapping, the form of decision records, and words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools import model_tables

ROOT = Path(__file__).parent.parent
PRODUCT = ("gateway", "engine", "kernels", "tenancy")
FOLDERS = ("docs", "examples", *PRODUCT, "tests")
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", *(f"{folder}/**/*.md" for folder in FOLDERS))
    for path in ROOT.glob(pattern)
)
PROSE_COLUMNS_MAX = 100

UNWRAPPED: dict[str, str] = {}
"""Documents with prose lines over `PROSE_COLUMNS_MAX`, each with its reason. It may only shrink."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """A reader follows every link of a document."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_exist(path: Path) -> None:
    """A reader can type every command of a document."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z]+)", path.read_text()):
        assert target in targets, target


@pytest.mark.parametrize(
    "path", [one for folder in PRODUCT for one in (ROOT / folder).rglob("README.md")], ids=name_of
)
def test_modules_that_a_readme_names_exist(path: Path) -> None:
    """A newcomer reads the table of a folder's files first."""
    text = path.read_text()
    rows = re.findall(r"^\| (`[a-z_0-9]+`(?:, `[a-z_0-9]+`)*) \|", text, re.MULTILINE)
    modules = {f"{name}.*" for row in rows for name in re.findall(r"\w+", row)}
    named = modules | set(re.findall(r"`([a-z_0-9]+\.py)`", text))

    assert {name for name in named if not any(path.parent.rglob(name))} == set()


def test_the_index_names_every_document() -> None:
    """A page that no index names is found by accident."""
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}

    assert {name for name in pages if f"]({name})" not in index} == set()


def test_decisions_are_numbered_once() -> None:
    """Documents cite a decision by its number."""
    numbers = [path.name[:4] for path in (ROOT / "docs/adr").glob("[0-9]*.md")]

    assert sorted(set(numbers)) == sorted(numbers)


@pytest.mark.parametrize("path", sorted((ROOT / "docs/adr").glob("[0-9]*.md")), ids=name_of)
def test_a_decision_has_options_and_a_condition_to_reopen_it(path: Path) -> None:
    """Options that lost, and the condition that reopens a decision, save repeating the work."""
    text = path.read_text()

    for part in ("**Context.**", "**Options.**", "**Decision.**", "**Would reopen it.**"):
        assert part in text, part


def prose_lines(text: str) -> list[str]:
    """Lines that can be wrapped: no tables, code, headings, images or lines of one word."""
    found = []
    is_code = False
    previous = ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        is_indented_code = line.startswith("    ") and not previous.strip()
        is_fixed = line.lstrip().startswith(("|", "#", "![", "[![", "<"))
        if not (is_code or is_indented_code or is_fixed) and len(line.split()) > 1:
            found.append(line)
        previous = "" if is_indented_code else line
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_prose_is_wrapped(path: Path) -> None:
    """Long lines make diffs and terminals hard to read."""
    longer = [line for line in prose_lines(path.read_text()) if len(line) > PROSE_COLUMNS_MAX]

    assert longer == [] or name_of(path) in UNWRAPPED


FORBIDDEN = {
    r"\bpage_table\b": "block table",
    r"\bblock_map\b": "block table",
    r"\bswap_(in|out)\b": "load / offload",
    r"\bseq_group\b": "sequence",
    r"\bnum_computed_tokens\b": "kv_tokens",
    r"\bcache_hit_rate\b": "cached / prompt tokens",
    r"\block_ref\b": "pin",
}


@pytest.mark.parametrize("word", FORBIDDEN)
def test_code_uses_the_words_of_the_glossary(word: str) -> None:
    """A search for a word finds every place that means it."""
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(word, path.read_text()), f"{name_of(path)}: say {FORBIDDEN[word]}"


def test_tables_of_models_come_from_the_code() -> None:
    """`python -m tests.tools.model_tables` writes them anew."""
    page = model_tables.PAGE.read_text()

    assert model_tables.written(page) == page
