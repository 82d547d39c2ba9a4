"""Client text meets only linear code: the regular expressions of the product are listed.

A repeat without a bound may be tried from every character of a text, and a repeat inside or beside
another may be divided in many ways: either makes one request cost minutes. A module whose
expressions repeat without a bound is listed with the reason why no text of a client can do that.
The time of the parsers themselves is measured in tests/property/test_linear_time.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tables import each_row

ROOT = Path(__file__).parent.parent
FOLDERS = ("gateway", "engine", "tenancy")

REPEATING = {
    "engine/model_store/gguf_header.py": "matched whole against the name of an operator's file",
    "engine/weights/renaming.py": "names of tensors in a model's files",
    "engine/weights/weights.py": "names of tensors in a model's files",
    "gateway/api/openapi.py": "declared paths",
    "gateway/bench/simulation/faults.py": "matched whole against an operator's argument",
    "gateway/cli/arguments.py": "argparse's own words about an operator's argument",
    "gateway/cli/ledger/books.py": "matched whole against an operator's argument",
    "gateway/config/decoding.py": "the place of an operator's setting, as the decoder writes it",
    "gateway/dialects/openai/tools.py": "anchored at both ends, of at most 64 characters",
    "gateway/dialects/tolerance.py": "each bracket searches its own digits only",
    "gateway/dialects/validation.py": "paths that the decoder writes from names of our own fields",
    "gateway/engines/served_models.py": "an engine's reason; each step ends at its slash",
    "gateway/http/route_table.py": "declared paths; a parameter ends at the next slash",
    "gateway/prompt/layout.py": "digits between private-use characters that clients may not send",
    "gateway/prompt/result_sizes.py": "conversions in a format; each sign has one place",
    "gateway/prompt/tokenizer.py": "alternatives of the model's own words, without repeats",
    "gateway/structured_output/gbnf.py": "one token at its own place; no repeat can be divided",
    "tenancy/accounting/exports.py": "matched whole against our own numbers",
    "tenancy/reuse/prompt_changes.py": "paths of fields, written by the gateway",
    "tenancy/storage/postgres.py": "our own statements",
    "tenancy/storage/postgres_address.py": "an operator's password file",
    "tenancy/storage/postgres_connection.py": "our own statements",
}
"""Modules whose expressions repeat without a bound or are put together, each with its reason."""

MEETS_NO_TEXT = ("escape", "Match", "Pattern", "DOTALL", "ASCII")
MAY_HAVE = re.compile(r"\bre\.\w|\bpattern\s*=")
"""What a file has that `expressions` finds anything in: most have none, and need no syntax tree."""
_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]", re.DOTALL)


def expressions(tree: ast.Module) -> Iterator[str | None]:
    """Yield the regular expressions in a module, as far as they are literals; None for the rest."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id="re"), attr=name) if name not in MEETS_NO_TEXT:
                yield from literals(node.args[0])
        yield from (
            text for word in node.keywords if word.arg == "pattern" for text in literals(word.value)
        )


def literals(node: ast.expr) -> Iterator[str | None]:
    """Yield the literal parts of an expression that makes a string; None for an unknown part."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield from (text for part in parts for text in literals(part))
        case ast.FormattedValue():
            return  # a constant of ours
        case ast.BinOp(left=left, right=right):
            yield from (*literals(left), *literals(right))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="escape")):
            return
        case _:
            yield None


def repeats(expression: str) -> bool:
    """Return whether a regular expression repeats anything without a bound."""
    return re.search(r"[*+]|\{\d*,\}", _CLASS_OR_ESCAPE.sub("x", expression)) is not None


def test_repeating_expressions_are_listed() -> None:
    """The list may shrink; it grows only with a reason why no client's text is searched."""
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    found = {
        name
        for name, text in texts.items()
        if MAY_HAVE.search(text)
        and any(one is None or repeats(one) for one in expressions(ast.parse(text)))
    }

    assert found == REPEATING.keys()


@each_row(
    ("source", "is_found"),
    [
        (r're.compile(r"(a+)+")', True),
        (r're.sub(r"\[(?:\\.|[^\]])*\]", "", text)', True),
        (r're.search(r"a{2,}", text)', True),
        (r're.compile("|".join(words))', True),
        (r'Meta(pattern=r"^a*$")', True),
        (r're.compile(r"[a+*]{1,64}\+\*")', False),
        (r're.compile(re.escape(word) + r"\d{1,2}")', False),
    ],
)
def test_an_expression_that_was_planted_is_found(source: str, is_found: bool) -> None:
    """The search itself is right."""
    assert any(one is None or repeats(one) for one in expressions(ast.parse(source))) is is_found
