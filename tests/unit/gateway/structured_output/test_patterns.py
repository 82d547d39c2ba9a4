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
from engine.grammar.grammar import GrammarLimits, Vocabulary, compile_grammar
from engine.model_store import ModelCard
from gateway.structured_output.patterns import (
    UnsupportedPattern,
    is_supported,
    translate_pattern,
    translate_schema,
)

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
    return Vocabulary.load(card.tokenizer_path, card.config.vocab, [0], GrammarLimits())


@pytest.mark.parametrize("pattern", [*HELD, *UNHELD])
def test_what_can_be_held_is_what_the_engine_compiles(vocabulary: Vocabulary, pattern: str) -> None:
    """It says why when it does not; what is no pattern in any language is another matter."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    refused = ""
    try:
        compile_grammar(Grammar("lenient_json_schema", schema), vocabulary)
    except RequestRefused as error:
        refused = error.message

    assert is_supported(pattern) is (pattern in HELD)
    assert (not refused) is (pattern in HELD), refused


@pytest.mark.parametrize(
    "pattern", ["a++b", "a*+", "(ab)?+c", "a{2}+", "a{1,}+", r"[+]++", r"\+++"]
)
def test_a_quantifier_that_gives_nothing_back_cannot_be_held(pattern: str) -> None:
    """A grammar would take its plus for another repetition, and draw what it does not match."""
    assert not is_supported(pattern)
    with pytest.raises(UnsupportedPattern, match="possessive quantifier"):
        translate_schema({"items": {"pattern": pattern}}, strict=True)


@pytest.mark.parametrize("pattern", [r"a\++", r"[*+]+", "[+]+", r"\{2}+", "a+?b", "(?:a+)+"])
def test_a_plus_that_is_a_sign_is_held(pattern: str) -> None:
    """Or one behind a class, or a group."""
    assert is_supported(pattern)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"^(?!\s*$).+", "uses lookaround ((?!); write the allowed text as alternatives"),
        (r"\bword", r"uses a word boundary (\b); write the characters that may stand there"),
        (r"(a)\1", r"uses a backreference (\1)"),
        (r"(?P<x>a)(?P=x)", "uses a backreference ((?P=)"),
        (r"(?>ab?)b", "uses an atomic group ((?>); write (?:"),
        (r"^\d{2}+$", r"uses a possessive quantifier ({2}+); write {2}"),
    ],
)
def test_a_strict_schema_is_told_what_to_write_instead(pattern: str, said: str) -> None:
    """By the pattern, and the piece of it; a name in `patternProperties` is one too."""
    schemas: list[dict[str, object]] = [{"pattern": pattern}, {"patternProperties": {pattern: {}}}]
    for schema in schemas:
        with pytest.raises(UnsupportedPattern) as caught:
            translate_schema(schema, strict=True)

        assert caught.value.why.startswith(f"the pattern '{pattern}' {said}")


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

    assert translate_schema(schema, strict=False) == held
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
    assert translate_schema(schema, strict=False) is schema
    assert translate_schema(schema, strict=True) is schema


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
    held = translate_schema(schema, strict=True)
    compile_grammar(Grammar("json_schema", json.dumps(held)), vocabulary)

    assert translate_pattern(pattern) == put
    assert held == {"properties": {"a": {"type": "string", "pattern": put}}}


def test_names_by_patterns_are_put_so_too() -> None:
    """And with what is left out of a lenient schema the rest stays."""
    named: dict[str, Any] = {r"^a\Z": {}, "(?!b)": {}}

    assert translate_schema({"patternProperties": {r"^a\Z": {}}}, strict=True) == {
        "patternProperties": {r"^a\z": {}}
    }
    assert translate_schema({"patternProperties": named}, strict=False) == {
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
    put = translate_pattern(DECIMAL)

    assert is_supported(put)
    assert bool(re.search(put, text)) == bool(re.search(DECIMAL, text))


@given(st.text("a.'@-1", max_size=9), st.sampled_from(["", "@a.aa", "a@1.bb", "a.a@a-.aa"]))
def test_the_equal_of_an_email_address_is_equal(text: str, end: str) -> None:
    """The same, whichever way its letters are written."""
    for email in EMAILS:
        put = translate_pattern(email)

        assert is_supported(put)
        assert bool(re.search(put, text + end)) == bool(re.search(email, text + end))


_HEAD = r"^(?!^[-+.]*$)[+-]?0*"
DIGITS = st.integers(0, 4)


def decimal_pattern(digits: int | None, places: int | None) -> str:
    """As Pydantic 2.12 has written it."""
    if digits is None:
        return rf"{_HEAD}\d*\.?\d{{0,{places}}}0*$"
    ahead = rf"(?=[\d.]{{1,{digits + 1}}}0*$)"
    if places is None:
        return rf"{_HEAD}(?:\d{{0,{digits}}}|{ahead}\d*\.\d*0*$)"
    whole = max(0, digits - places)
    return rf"{_HEAD}(?:\d{{0,{whole}}}|{ahead}\d{{0,{whole}}}\.\d{{0,{places}}}0*$)"


def is_within(text: str, digits: int | None, places: int | None) -> bool:
    """Is it a decimal of so many digits and places, zeros at either end left out?"""
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", text):
        return False
    whole, _, fraction = text.lstrip("+-").partition(".")
    before, after = len(whole.lstrip("0")), len(fraction.rstrip("0"))
    if places is not None and after > places:
        return False
    if digits is not None and places is not None:
        return before <= max(0, digits - places) and after <= digits
    return digits is None or before + after <= digits


@given(st.text("+-.01", max_size=8), st.none() | DIGITS, st.none() | DIGITS)
def test_a_decimal_of_so_many_digits_is_held(
    text: str, digits: int | None, places: int | None
) -> None:
    """What is meant is drawn, and nothing that its pattern does not match."""
    if digits is places is None:
        return
    pattern = decimal_pattern(digits, places)
    put = translate_pattern(pattern)

    assert is_supported(put)
    assert bool(re.search(put, text)) == is_within(text, digits, places)
    assert re.search(pattern, text) or not re.search(put, text)


DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)


@given(st.lists(st.sampled_from(["1Y", "2M", "3D", "T", "4H", "5S", "6.7S", "8W", ""]), max_size=6))
def test_the_equal_of_a_duration_is_equal(parts: list[str]) -> None:
    """As Zod writes it."""
    put, text = translate_pattern(DURATION), "P" + "".join(parts)

    assert is_supported(put)
    assert bool(re.search(put, text)) == bool(re.search(DURATION, text))


@pytest.mark.parametrize(
    "pattern",
    [decimal_pattern(20, 6), decimal_pattern(28, None), decimal_pattern(None, 0), DURATION],
)
def test_such_a_pattern_compiles_in_a_strict_schema(vocabulary: Vocabulary, pattern: str) -> None:
    """Beside the format that Zod names with it too."""
    schema = {"type": "string", "pattern": pattern}
    if pattern == DURATION:
        schema["format"] = "duration"
    compile_grammar(
        Grammar("json_schema", json.dumps(translate_schema(schema, strict=True))), vocabulary
    )
