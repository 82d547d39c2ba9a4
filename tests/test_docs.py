"""The documents keep the promises that a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "engine/**/*.md", "tests/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """A dead link is a promise somebody else has to find out about."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_exist(path: Path) -> None:
    """A command in a document can be typed."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z]+)", path.read_text()):
        assert target in targets, target


def test_decisions_are_numbered_once() -> None:
    """An ADR is cited by its number."""
    numbers = [path.name[:4] for path in (ROOT / "docs/adr").glob("[0-9]*.md")]

    assert sorted(set(numbers)) == sorted(numbers)


@pytest.mark.parametrize("path", sorted((ROOT / "docs/adr").glob("[0-9]*.md")), ids=name_of)
def test_a_decision_names_its_options_and_what_would_reopen_it(path: Path) -> None:
    """Negative results are documents; a decision without an end is a dogma."""
    text = path.read_text()

    for part in ("**Context.**", "**Options.**", "**Decision.**", "**Would reopen it.**"):
        assert part in text, part


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
def test_words_are_the_glossarys(word: str) -> None:
    """One word for one thing, so that a name can be searched for."""
    for folder in ("gateway", "engine", "kernels", "tenancy"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(word, path.read_text()), f"{name_of(path)}: say {FORBIDDEN[word]}"
