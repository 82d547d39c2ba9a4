"""Unsupported patterns, and schemas with translated patterns."""

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
from gateway.structured_output.schemas.patterns import (
    PATTERN_CHARS_MAX,
    PATTERNS_CHARS_MAX,
    UnsupportedPattern,
    first_unsupported,
    split_pattern,
    translate_pattern,
    translate_schema,
)
from tests.tables import each_row

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


@each_row("pattern", [*HELD, *UNHELD])
def test_supported_patterns_compile_in_the_engine(vocabulary: Vocabulary, pattern: str) -> None:
    """An unsupported one has a reason; invalid patterns are not tested."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    refused = ""
    try:
        compile_grammar(Grammar("lenient_json_schema", schema), vocabulary)
    except RequestRefused as error:
        refused = error.message

    assert (first_unsupported(pattern) is None) is (pattern in HELD)
    assert (not refused) is (pattern in HELD), refused


@each_row("pattern", ["a++b", "a*+", "(ab)?+c", "a{2}+", "a{1,}+", r"[+]++", r"\+++"])
def test_possessive_quantifiers_are_unsupported(pattern: str) -> None:
    """A grammar would read the plus as another repetition."""
    assert first_unsupported(pattern) is not None
    with pytest.raises(UnsupportedPattern, match="possessive quantifier"):
        translate_schema({"items": {"pattern": pattern}}, strict=True)


@each_row("pattern", [r"a\++", r"[*+]+", "[+]+", r"\{2}+", "a+?b", "(?:a+)+"])
def test_literal_plus_is_supported(pattern: str) -> None:
    """Also after a class or a group."""
    assert first_unsupported(pattern) is None


@each_row(
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
def test_strict_schema_error_names_a_remedy(pattern: str, said: str) -> None:
    """With the pattern and its unsupported piece; names in `patternProperties` are patterns too."""
    schemas: list[dict[str, object]] = [{"pattern": pattern}, {"patternProperties": {pattern: {}}}]
    for schema in schemas:
        with pytest.raises(UnsupportedPattern) as caught:
            translate_schema(schema, strict=True)

        assert caught.value.why.startswith(f"the pattern '{pattern}' {said}")


LOOKS = {"type": "string", "pattern": "(?=a)"}
PLAIN = {"type": "string"}


@each_row(
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
def test_drops_unsupported_patterns_in_every_subschema(schema: Any, held: Any) -> None:
    """Nothing else is dropped; members that they named may have any value."""
    before = json.dumps(schema)

    assert translate_schema(schema, strict=False) == held
    assert json.dumps(schema) == before


@each_row(
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
def test_leaves_data_unchanged(schema: Any) -> None:
    """Values are data, and an unchanged schema is the same object."""
    assert translate_schema(schema, strict=False) is schema
    assert translate_schema(schema, strict=True) is schema


@each_row(
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
def test_translates_dialect_syntax(vocabulary: Vocabulary, pattern: str, put: str) -> None:
    """A bracket in a class is a bracket in ECMAScript and Python, but not in the grammar engine."""
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    held = translate_schema(schema, strict=True)
    compile_grammar(Grammar("json_schema", json.dumps(held)), vocabulary)

    assert translate_pattern(pattern) == put
    assert held == {"properties": {"a": {"type": "string", "pattern": put}}}


def test_translates_pattern_property_names() -> None:
    """Also in lenient schemas with dropped patterns."""
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


@each_row(
    ("pattern", "held", "unheld"),
    [
        (r"^\cA$", "\x01", "A"),
        (r"^[\cA-\cC\cz]+$", "\x01\x03\x1a", "c"),
        (r"^\\cA$", r"\cA", "\x01"),
        (r"^\<a\>$", "<a>", "a"),
        (r"^[^]$", "]", ""),
        (r"^{{a{1}$", "{{a", "a"),
        (r"^a{b}\u{41}\p{Lu}\x{42}{2}$", "a{b}AXBB", "abAXBB"),
    ],
)
def test_spellings_of_ecmascript_mean_what_they_mean_there(
    vocabulary: Vocabulary, pattern: str, held: str, unheld: str
) -> None:
    """The grammar engine reads some as something else, or not at all."""
    for text, is_held in ((held, True), (unheld, False)):
        schema = {"type": "string", "pattern": pattern, "enum": [text]}
        put = json.dumps(translate_schema(schema, strict=True))
        refused = False
        try:
            compile_grammar(Grammar("json_schema", put), vocabulary)
        except RequestRefused:
            refused = True
        assert refused is not is_held, text


@given(st.text("+-.01", max_size=6))
def test_decimal_pattern_equivalent(text: str) -> None:
    """Pydantic generates it, and strict schemas must be enforced."""
    put = translate_pattern(DECIMAL)

    assert first_unsupported(put) is None
    assert bool(re.search(put, text)) == bool(re.search(DECIMAL, text))


@given(st.text("a.'@-1", max_size=9), st.sampled_from(["", "@a.aa", "a@1.bb", "a.a@a-.aa"]))
def test_email_pattern_equivalent(text: str, end: str) -> None:
    """In both spellings of the letter class."""
    for email in EMAILS:
        put = translate_pattern(email)

        assert first_unsupported(put) is None
        assert bool(re.search(put, text + end)) == bool(re.search(email, text + end))


_HEAD = r"^(?!^[-+.]*$)[+-]?0*"
DIGITS = st.integers(0, 4)


def decimal_pattern(digits: int | None, places: int | None) -> str:
    """Return the pattern that Pydantic 2.12 generates."""
    if digits is None:
        return rf"{_HEAD}\d*\.?\d{{0,{places}}}0*$"
    ahead = rf"(?=[\d.]{{1,{digits + 1}}}0*$)"
    if places is None:
        return rf"{_HEAD}(?:\d{{0,{digits}}}|{ahead}\d*\.\d*0*$)"
    whole = max(0, digits - places)
    return rf"{_HEAD}(?:\d{{0,{whole}}}|{ahead}\d{{0,{whole}}}\.\d{{0,{places}}}0*$)"


def is_within(text: str, digits: int | None, places: int | None) -> bool:
    """Return whether it is a decimal within the limits, ignoring zeros at either end."""
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
def test_limited_decimal_pattern_equivalent(
    text: str, digits: int | None, places: int | None
) -> None:
    """Allows what is intended, and nothing that the original does not match."""
    if digits is places is None:
        return
    pattern = decimal_pattern(digits, places)
    put = translate_pattern(pattern)

    assert first_unsupported(put) is None
    assert bool(re.search(put, text)) == is_within(text, digits, places)
    assert re.search(pattern, text) or not re.search(put, text)


DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)


@given(st.lists(st.sampled_from(["1Y", "2M", "3D", "T", "4H", "5S", "6.7S", "8W", ""]), max_size=6))
def test_duration_pattern_equivalent(parts: list[str]) -> None:
    """The pattern that Zod generates."""
    put, text = translate_pattern(DURATION), "P" + "".join(parts)

    assert first_unsupported(put) is None
    assert bool(re.search(put, text)) == bool(re.search(DURATION, text))


@pytest.mark.parametrize(
    "pattern",
    [decimal_pattern(20, 6), decimal_pattern(28, None), decimal_pattern(None, 0), DURATION],
)
def test_equivalents_compile_in_strict_schema(vocabulary: Vocabulary, pattern: str) -> None:
    """Also beside the format that Zod adds."""
    schema = {"type": "string", "pattern": pattern}
    if pattern == DURATION:
        schema["format"] = "duration"
    compile_grammar(
        Grammar("json_schema", json.dumps(translate_schema(schema, strict=True))), vocabulary
    )


FORMER_PIECE = re.compile(
    r"\\c[A-Za-z]|\\[pPux]\{[^{}]*\}|\\k<|\\.|\[(?:\\.|[^\]\\])*\]"
    r"|\(\?(?:<?[=!]|>|P=)|(?:[*+?]|\{\d*,?\d*\})\+|\{(?!\d*,?\d*\}|,)",
    re.DOTALL,
)
"""The scanner's specification: this expression finds the same pieces, in quadratic time."""


@given(st.text(st.sampled_from("[]\\k<(?=!>P){},+*12ac-^$\n"), max_size=24))
def test_the_scanner_finds_what_its_expression_finds(pattern: str) -> None:
    scanned = list(split_pattern(pattern))

    assert "".join(piece for piece, _ in scanned) == pattern
    assert [piece for piece, is_special in scanned if is_special] == FORMER_PIECE.findall(pattern)


@pytest.mark.parametrize("strict", [False, True])
def test_a_pattern_over_the_bound_is_unsupported(strict: bool) -> None:
    """The grammar engine would compile it for long; the bound is named."""
    schema = {"pattern": "a" * (PATTERN_CHARS_MAX + 1)}
    if not strict:
        assert translate_schema(schema, strict=False) == {}
        return
    with pytest.raises(UnsupportedPattern, match="has 1001 characters; expected at most 1000"):
        translate_schema(schema, strict=True)


def test_patterns_of_one_schema_share_a_bound() -> None:
    """Thousands of short patterns cost as much as a long one."""
    count = PATTERNS_CHARS_MAX // 1_000 + 1
    schema = {"properties": {f"p{n}": {"pattern": f"{n:01000}"} for n in range(count)}}

    kept = translate_schema(schema, strict=False)["properties"]

    assert [bool(one) for one in kept.values()] == [True] * (count - 1) + [False]
    with pytest.raises(UnsupportedPattern, match="longer than 32768 characters together"):
        translate_schema(schema, strict=True)
