"""Checks documents: links, commands, wrapping, the form of decision records, and words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tables import each_row
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


@each_row("path", DOCUMENTS)
def test_links_lead_somewhere(path: Path) -> None:
    """A reader follows every link of a document."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@each_row("path", DOCUMENTS)
def test_make_targets_exist(path: Path) -> None:
    """A reader can type every command of a document."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z]+)", path.read_text()):
        assert target in targets, target


@each_row("path", [one for folder in PRODUCT for one in (ROOT / folder).rglob("README.md")])
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


@each_row("path", sorted((ROOT / "docs/adr").glob("[0-9]*.md")))
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


@each_row("path", DOCUMENTS)
def test_prose_is_wrapped(path: Path) -> None:
    """Long lines make diffs and terminals hard to read."""
    longer = [line for line in prose_lines(path.read_text()) if len(line) > PROSE_COLUMNS_MAX]

    assert longer == [] or name_of(path) in UNWRAPPED


def sentences(text: str) -> list[str]:
    """Return the sentences of a document's prose: links as their texts, code as one word."""
    items: list[str] = []
    unfenced = re.sub(r"^ *```.*?^ *```", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", unfenced):
        items.append("")
        for line in block.splitlines():
            is_prose = not line.startswith("#") and not line.lstrip().startswith("|")
            if not is_prose or LIST_ITEM.match(line):
                items.append("")
            if is_prose:
                items[-1] += f" {LIST_ITEM.sub('', line).strip()}"
    found: list[str] = []
    for item in items:
        plain = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", item.strip()))
        found += re.split(r"(?<=[.!?])[)\"”*_]*\s+(?=[A-Z\"“(*_0-9c])", plain)
    return found


LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")
SENTENCE_WORDS_MAX = 35
LONG_SENTENCES_MAX = 43
"""Sentences of more words, in all manuals, READMEs and the map. It may only shrink."""


def test_sentences_are_short() -> None:
    """A sentence of more than 35 words is read twice."""
    pages = [
        path
        for path in DOCUMENTS
        if path.name in ("README.md", "ARCHITECTURE.md") or path.is_relative_to(ROOT / "docs")
    ]
    long = [
        f"{name_of(path)}: {one[:80]}"
        for path in pages
        for one in sentences(path.read_text())
        if len(one.split()) > SENTENCE_WORDS_MAX
    ]

    assert len(long) <= LONG_SENTENCES_MAX, "\n".join(long)


def test_long_sentences_are_counted_as_a_reader_does() -> None:
    """Links count by their text, code as one word; items of a list and tables stand apart."""
    text = "A [b c](d.md) e. `f g` h.\n- I j\n- K\n\n| l m | n |\n```\no. P q\n```\nR"

    assert [one for one in sentences(text) if one] == ["A b c e.", "code h.", "I j", "K", "R"]


FORBIDDEN = {
    r"\bpage_table\b": "block table",
    r"\bblock_map\b": "block table",
    r"\bswap_(in|out)\b": "load / offload",
    r"\bseq_group\b": "sequence",
    r"\bnum_computed_tokens\b": "kv_tokens",
    r"\bcache_hit_rate\b": "cached / prompt tokens",
    r"\block_ref\b": "pin",
}


@each_row("word", FORBIDDEN)
def test_code_uses_the_words_of_the_glossary(word: str) -> None:
    """A search for a word finds every place that means it."""
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(word, path.read_text()), f"{name_of(path)}: say {FORBIDDEN[word]}"


GLOSSARY_ROWS = re.findall(
    r"^\| (?!word |---)(.*?) \| .* \| (.*?) \|$", (ROOT / "docs/glossary.md").read_text(), re.M
)
AVOIDED = {
    (word, qualifier): use
    for use, words in GLOSSARY_ROWS
    for word, qualifier in re.findall(r"([^,(–]+?)(?: \((.*?)\))?(?:, |$)", words)
}
"""Words to avoid, with their qualifiers, and what to say."""

SAY_IT_ANYWAY = {
    "session": "the dashboard's: a browser that has signed in",
}
"""Names that have one of these words, each with its reason."""


def words_of(name: str) -> list[str]:
    """The words of a name or phrase, in small letters."""
    found = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)
    return [word.lower() for word in found]


def says(name: str, avoided: str, qualifier: str) -> bool:
    """Whether a name has the avoided words, the last one in any form, and a noun of the qualifier
    where there is one."""
    words, phrase = words_of(name), words_of(avoided)
    forms = {phrase[-1] + end for end in ("", "s", "es", "d", "ed", "r", "er", "ing")}
    is_there = any(
        words[at : at + len(phrase) - 1] == phrase[:-1] and words[at + len(phrase) - 1] in forms
        for at in range(len(words) - len(phrase) + 1)
    )
    nouns = {noun.removesuffix("s") for noun in words_of(qualifier)}
    return is_there and (not nouns or any(word.removesuffix("s") in nouns for word in words))


def public_names() -> set[str]:
    """The names of the product's files and public classes."""
    names = set()
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".js", ".c", ".h") and "vendor" not in path.parts:
                names.add(path.stem)
            if path.suffix == ".py":
                nodes = ast.parse(path.read_text()).body
                names.update(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {name for name in names if not name.startswith("_")}


def test_each_word_of_the_glossary_has_one_row() -> None:
    """A word with two rows has two meanings; a qualifier tells them apart."""
    words = [word for use, _ in GLOSSARY_ROWS for word in re.split(r", (?![^(]*\))", use)]

    assert len(GLOSSARY_ROWS) > 100
    assert sorted(set(words)) == sorted(words)


def test_no_name_has_a_word_that_the_glossary_avoids() -> None:
    """A reader who meets two words looks for two things."""
    found = {
        name: f"{word}; say {use}"
        for name in public_names()
        for (word, qualifier), use in AVOIDED.items()
        if says(name, word, qualifier)
    }

    assert found.keys() == SAY_IT_ANYWAY.keys(), found


@each_row(
    ("name", "avoided", "qualifier", "expected"),
    [
        ("KvPages", "page", "of KV", True),
        ("KeyPage", "page", "of KV", False),
        ("block_page_tables", "page table", "", True),
        ("CompileJob", "job", "", True),
        ("jobless", "job", "", False),
    ],
)
def test_an_avoided_word_is_found_in_its_sense(
    name: str, avoided: str, qualifier: str, expected: bool
) -> None:
    """In any form, within a longer name, and only with its qualifier."""
    assert says(name, avoided, qualifier) is expected


def test_tables_of_models_come_from_the_code() -> None:
    """`python -m tests.tools.model_tables` writes them anew."""
    page = model_tables.PAGE.read_text()

    assert model_tables.written(page) == page
