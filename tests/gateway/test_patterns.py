"""Which patterns no grammar can hold, and a schema without them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Grammar
from engine.errors import RequestRefused
from engine.grammar import Rules, Vocabulary, compile_grammar
from engine.model_store import ModelCard
from gateway.prompt.patterns import as_held, can_be_held, in_other_words

HELD = [
    *(r"^a+$", r"[(?=]+", r"\(?=?", r"\\b", r"(?:a|b)", r"(?<name>a)", r"\d{4}-\d\d"),
    r"[^\]\\1]",
]
UNHELD = [
    *(r"^(?!\s*$).+", r"(?=.*\d).{8,}", r"(?<=a)b", r"(?<!a)b", r"\bword\b", r"\Ba"),
    *(r"(?>ab?)b", r"(?P<x>a)(?P=x)"),
    *(r"(a)\1", r"(?<x>a)\k<x>", r"\\(?=a)", r"[\]](?!a)", r"\[(?=a)"),
]


@pytest.fixture(scope="module")
def vocabulary(card: ModelCard) -> Vocabulary:
    return Vocabulary.load(card.tokenizer_path, card.config.vocab, [0], Rules())


@pytest.mark.parametrize("pattern", [*HELD, *UNHELD])
def test_what_can_be_held_is_what_the_engine_compiles(vocabulary: Vocabulary, pattern: str) -> None:
    """It says why when it does not; what is no pattern in any language is another matter."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    refused = ""
    try:
        compile_grammar(Grammar("lenient_json_schema", schema), vocabulary)
    except RequestRefused as error:
        refused = error.message

    assert can_be_held(pattern) is (pattern in HELD)
    assert (not refused) is (pattern in HELD), refused


LOOKS = {"type": "string", "pattern": "(?=a)"}
PLAIN = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "held"),
    [
        (LOOKS, PLAIN),
        ({"items": LOOKS}, {"items": PLAIN}),
        ({"prefixItems": [LOOKS, True]}, {"prefixItems": [PLAIN, True]}),
        ({"anyOf": [{"not": LOOKS}]}, {"anyOf": [{"not": PLAIN}]}),
        ({"properties": {"pattern": LOOKS}}, {"properties": {"pattern": PLAIN}}),
        (
            {"$defs": {"a": LOOKS}, "$ref": "#"},
            {"$defs": {"a": PLAIN}, "$ref": "#"},
        ),
        (
            {"patternProperties": {"^a": LOOKS, "(?!b)": {}}, "additionalProperties": False},
            {"patternProperties": {"^a": PLAIN}, "additionalProperties": True},
        ),
    ],
)
def test_they_are_left_out_wherever_a_schema_stands(schema: Any, held: Any) -> None:
    """And nothing else is; names that they were for may be any."""
    before = json.dumps(schema)

    assert as_held(schema, strict=False) == held
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"const": LOOKS},
        {"enum": [LOOKS, {"pattern": r"\b"}]},
        {"default": LOOKS, "examples": [LOOKS]},
        {"type": "string", "pattern": "^a$"},
        {"properties": {"pattern": {"type": "string"}}},
        {"pattern": 7, "properties": [LOOKS], "anyOf": LOOKS},
    ],
)
def test_what_is_no_such_pattern_is_left_alone(schema: Any) -> None:
    """Values are data, whatever they look like; and the same schema compiles once."""
    assert as_held(schema, strict=False) is schema
    assert as_held(schema, strict=True) is schema


@pytest.mark.parametrize(
    ("pattern", "put"),
    [
        (r"^a\Z", r"^a\z"),
        (r"[\b]", r"[\x08]"),
        (r"[^\b\]b]\\Z", r"[^\x08\]b]\\Z"),
        (r"\0", r"\x00"),
        (r"[[]", r"[\[]"),
        (r"[a-z&&[^b]]", r"[a-z\&\&\[^b]]"),
        (r"[+--]", r"[+-\-]"),
        (r"[--a]", r"[\--a]"),
        (r"[~~]", r"[\~\~]"),
        (r"^[\w-]+(?:a|b)\/\d{2}$", r"^[\w-]+(?:a|b)\/\d{2}$"),
    ],
)
def test_what_is_said_in_other_words_is_put_so(
    vocabulary: Vocabulary, pattern: str, put: str
) -> None:
    """A bracket in a class is a bracket, to ECMAScript and to Python; where both grammars would
    take it for something else, it would hold what nobody has asked for."""
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    held = as_held(schema, strict=True)
    compile_grammar(Grammar("json_schema", json.dumps(held)), vocabulary)

    assert in_other_words(pattern) == put
    assert held == {"properties": {"a": {"type": "string", "pattern": put}}}


def test_names_by_patterns_are_put_so_too() -> None:
    """And with what is left out of a lenient schema the rest stays."""
    named: dict[str, Any] = {r"^a\Z": {}, "(?!b)": {}}

    assert as_held({"patternProperties": named}, strict=True) == {
        "patternProperties": {r"^a\z": {}, "(?!b)": {}}
    }
    assert as_held({"patternProperties": named}, strict=False) == {
        "patternProperties": {r"^a\z": {}},
        "additionalProperties": True,
    }


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
EMAILS = [
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$",
    r"^(?!\.)(?!.*\.\.)([a-zA-Z0-9_'+\-\.]*)[a-zA-Z0-9_+-]@([a-zA-Z0-9][a-zA-Z0-9\-]*\.)+"
    r"[a-zA-Z]{2,}$",
]


@given(st.text("+-.01", max_size=6))
def test_the_equal_of_a_decimal_is_equal(text: str) -> None:
    """Schema writers make it by themselves, and strict schemas must hold."""
    put = in_other_words(DECIMAL)

    assert can_be_held(put)
    assert bool(re.search(put, text)) == bool(re.search(DECIMAL, text))


@given(st.text("a.'@-1", max_size=9), st.sampled_from(["", "@a.aa", "a@1.bb", "a.a@a-.aa"]))
def test_the_equal_of_an_email_address_is_equal(text: str, end: str) -> None:
    """The same, whichever way its letters are written."""
    for email in EMAILS:
        put = in_other_words(email)

        assert can_be_held(put)
        assert bool(re.search(put, text + end)) == bool(re.search(email, text + end))
