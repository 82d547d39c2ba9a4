"""Which patterns no grammar can hold, and a schema without them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.api import Grammar
from engine.errors import RequestRefused
from engine.grammar import Rules, Vocabulary, compile_grammar
from engine.model_store import ModelCard
from gateway.prompt.patterns import can_be_held, without_unheld

HELD = [
    *(r"^a+$", r"[(?=]+", r"\(?=?", r"\\b", r"(?:a|b)", r"(?<name>a)", r"\d{4}-\d\d"),
    r"[^\]\\1]",
]
UNHELD = [
    *(r"^(?!\s*$).+", r"(?=.*\d).{8,}", r"(?<=a)b", r"(?<!a)b", r"\bword\b", r"\Ba"),
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

    assert without_unheld(schema) == held
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
    assert without_unheld(schema) is schema
