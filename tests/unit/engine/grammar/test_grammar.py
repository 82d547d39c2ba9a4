"""Grammars over a vocabulary: the tokens they allow, their refusals, their bounds.

Property tests walk random grammars and schemas at random and check the resulting text against
judges that use no llguidance: `re`, and a small checker for the schemas drawn here.
"""

from __future__ import annotations

import functools
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Grammar
from engine.errors import RequestRefused
from engine.grammar.grammar import GrammarLimits, MaskFiller, Matcher, Vocabulary, compile_grammar
from tests.examples import examples
from tests.grammars import END, VOCAB, letters, schema_file
from tests.tables import each_row


@functools.cache
def every_byte() -> Vocabulary:
    """Return a vocabulary that can spell any text."""
    with tempfile.TemporaryDirectory() as folder:
        path = schema_file(Path(folder))
        return Vocabulary.load(path, VOCAB, [VOCAB - 1], GrammarLimits())


def allowed(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.nonzero(bits)[0]]


def walk_at_random(grammar: Grammar, seed: int, tokens_max: int = 400) -> tuple[str, bool]:
    """Return a text sampled within the masks, and whether it reached its end."""
    vocabulary = every_byte()
    compiled = compile_grammar(grammar, vocabulary)
    matcher, filler, chance = compiled.matcher.fork(), MaskFiller(), random.Random(seed)
    drawn: list[int] = []
    end = vocabulary.tokenizer.eos_tokens[0]
    while len(drawn) < tokens_max:
        (mask,) = filler.fill([matcher], [False])
        may = allowed(mask)
        token_id = end if end in may and chance.random() < 0.5 else chance.choice(may)
        assert matcher.consume(token_id)
        if token_id != end:
            drawn.append(token_id)
        if matcher.is_complete:
            return vocabulary.tokenizer.decode_bytes(drawn).decode("utf-8", "replace"), True
    return vocabulary.tokenizer.decode_bytes(drawn).decode("utf-8", "replace"), False


def refusal(grammar: Grammar, limits: GrammarLimits | None = None) -> RequestRefused:
    vocabulary = every_byte() if limits is None else letters(limits)
    with pytest.raises(RequestRefused) as caught:
        compile_grammar(grammar, vocabulary)
    return caught.value


# -- what they allow --------------------------------------------------------------------------


def test_a_mask_has_the_tokens_that_may_come_next() -> None:
    """Bit by bit, with the end token only where the text may end."""
    compiled = compile_grammar(Grammar("regex", "(ab)+"), letters())
    matcher, filler = compiled.matcher.fork(), MaskFiller()

    masks = [allowed(compiled.first_mask)]
    for token_id in (0, 1):
        assert matcher.consume(token_id)
        masks.append(allowed(filler.fill([matcher], [False])[0]))

    assert masks == [[0], [1], [0, END]]
    assert matcher.is_accepting
    assert not matcher.is_complete


def test_forks_advance_independently() -> None:
    """Samples of one request share only the compiled grammar."""
    compiled = compile_grammar(Grammar("regex", "a(a|b)b*"), letters())
    first, second = compiled.matcher.fork(), compiled.matcher.fork()

    first.consume(0)
    third = first.fork()
    third.consume(1)
    masks = MaskFiller().fill([first, second, third], [False] * 3)

    assert [allowed(mask) for mask in masks] == [[0, 1], [0], [1, END]]


def test_masks_filled_in_threads_equal_masks_filled_alone() -> None:
    texts = ["[ab]*", "(ab)+", "a{3}", "b|ab*"] * 8
    matchers = [compile_grammar(Grammar("regex", text), letters()).matcher.fork() for text in texts]

    together = MaskFiller(threads=3).fill(matchers, [False] * len(matchers))
    alone = [MaskFiller().fill([matcher], [False])[0] for matcher in matchers]

    assert [allowed(mask) for mask in together] == [allowed(mask) for mask in alone]


def test_suppress_end_keeps_the_end_where_nothing_else_may_come() -> None:
    filler = MaskFiller()
    going = compile_grammar(Grammar("regex", "a*"), letters()).matcher.fork()
    over = compile_grammar(Grammar("regex", "a{0}"), letters()).matcher.fork()

    masks = filler.fill([going, over], [True, True])

    assert [allowed(mask) for mask in masks] == [[0], [END]]


def test_a_forbidden_token_fails_the_matcher_for_good() -> None:
    matcher = compile_grammar(Grammar("regex", "ab"), letters()).matcher.fork()

    assert not matcher.consume(1)

    assert matcher.failure == "grammar_dead_end"
    assert not matcher.is_complete
    assert not MaskFiller().fill([matcher], [False]).any()


regexes = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "x1", "é"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        inner.map(lambda one: f"({one})*"),
        inner.map(lambda one: f"({one}){{1,3}}"),
        inner.map(lambda one: f"({one})?"),
    ),
    max_leaves=8,
)


@given(text=regexes, seed=st.integers(0, 1000))
@settings(max_examples=examples(40))
def test_text_under_a_regex_matches_it(text: str, seed: int) -> None:
    """Judged by Python's `re`."""
    output, is_whole = walk_at_random(Grammar("regex", text), seed)

    assert not is_whole or re.fullmatch(text, output)


schemas = st.recursive(
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["red", 7, None, "gr\u00fcn"]},
            {"const": {"a": [1]}},
            {"type": "string", "maxLength": 5},
            {"type": "integer", "minimum": -3, "maximum": 12},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.builds(
            lambda one, two, required: {
                "type": "object",
                "properties": {"one": one, "two": two},
                "required": required,
                "additionalProperties": False,
            },
            inner,
            inner,
            st.sampled_from([[], ["one"], ["one", "two"]]),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=6,
)


def satisfies(value: Any, schema: dict[str, Any]) -> bool:
    """Judge a document by the few keywords drawn here."""
    if "anyOf" in schema:
        return any(satisfies(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"] and type(value) in {type(one) for one in schema["enum"]}
    if "const" in schema:
        return bool(value == schema["const"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            bounds = schema.get("minimum", -(10**400)), schema.get("maximum", 10**400)
            return type(value) is int and bounds[0] <= value <= bounds[1]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            return (
                isinstance(value, list)
                and len(value) <= schema["maxItems"]
                and all(satisfies(one, schema["items"]) for one in value)
            )
        case _:
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(schema["properties"])
                and all(satisfies(one, schema["properties"][name]) for name, one in value.items())
            )


@given(schema=schemas, seed=st.integers(0, 1000))
@settings(max_examples=examples(60))
def test_text_under_a_schema_satisfies_it(schema: dict[str, Any], seed: int) -> None:
    """Every text that reaches its end is a document of the schema."""
    output, is_whole = walk_at_random(Grammar("json_schema", json.dumps(schema)), seed)

    assert not is_whole or satisfies(json.loads(output), schema), output


def test_a_json_object_is_any_object_and_nothing_else() -> None:
    """The guarantee of JSON mode."""
    compiled = compile_grammar(Grammar("json_object"), every_byte())
    vocabulary = every_byte()

    begins = {vocabulary.tokenizer.decode_str([token]) for token in allowed(compiled.first_mask)}

    assert begins <= {"{", '{"', " ", "\n", "\t", "\r"}
    assert "{" in begins


@each_row(
    ("text", "is_taken"),
    [
        ('{"a":1}', True),
        ('{"a": 1}', True),
        ('{\n    "a" : 1\r\n}', True),
        ('{\n\t"a": 1}', True),
        ('{  "a": 1}', False),
        ('{\n\n"a": 1}', False),
        ('{"a": 1} ', False),
    ],
)
def test_whitespace_is_bounded(text: str, is_taken: bool) -> None:
    """A model that may write any amount of whitespace writes nothing else."""
    vocabulary = every_byte()
    schema = (
        '{"properties": {"a": {"type": "integer"}}, "x-guidance": {"whitespace_pattern": " *"}}'
    )
    matcher = compile_grammar(Grammar("json_schema", schema), vocabulary).matcher.fork()

    taken = [matcher.consume(token) for token in vocabulary.tokenizer.tokenize_str(text)]

    assert all(taken) is is_taken


# -- what they refuse -------------------------------------------------------------------------


@each_row(
    ("grammar", "says"),
    [
        (Grammar("json_schema", '{"type": '), "EOF while parsing"),
        (Grammar("json_schema", "[]"), "JSON schema cannot be used"),
        (Grammar("json_schema", '{"type": "thing"}'), "JSON schema cannot be used"),
        (Grammar("json_schema", '{"not": {"type": "string"}}'), 'Unimplemented keys: ["not"]'),
        (
            Grammar("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'),
            'Unimplemented keys: ["not"]',
        ),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'), "not present in a registry"),
        (Grammar("json_schema", '{"$ref": "#"}'), "No text satisfies"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", "(?=a)"), "look-around"),
        (Grammar("lark", "start: nowhere"), "nowhere"),
        (Grammar("lark", ""), "grammar cannot be used"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(grammar: Grammar, says: str) -> None:
    refused = refusal(grammar)

    assert refused.code == "grammar_invalid"
    assert says in refused.message
    assert len(refused.message) < 400


@each_row(
    ("schema", "text"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
        ({"type": "string", "format": "color"}, '"red"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
        ({"type": "string", "not": {"minLength": 1}}, '"a"'),
    ],
)
def test_a_lenient_schema_ignores_unsupported_keywords(schema: object, text: str) -> None:
    """The rest of it holds; a text that is no schema is refused all the same."""
    vocabulary, lenient = every_byte(), Grammar("lenient_json_schema", json.dumps(schema))
    matcher = compile_grammar(lenient, vocabulary).matcher.fork()
    other = compile_grammar(lenient, vocabulary).matcher.fork()

    assert all(map(matcher.consume, vocabulary.tokenizer.tokenize_str(text)))
    assert matcher.is_accepting
    assert not all(map(other.consume, vocabulary.tokenizer.tokenize_str('{"a": 1}')))
    assert refusal(Grammar("json_schema", json.dumps(schema))).code == "grammar_invalid"
    assert refusal(Grammar("lenient_json_schema", '{"type": "thing"}')).code == "grammar_invalid"


def test_the_supported_formats_are_those_in_the_documents() -> None:
    """docs/models.md lists them; a new version of llguidance may support more."""
    text = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    listed = re.search(r"any `format` but (.*?)\.\n", text, re.DOTALL)
    assert listed is not None
    documented = set(re.findall(r"`([a-z0-9-]+)`", listed[1]))
    others = {"uri-reference", "iri", "regex", "json-pointer", "idn-email", "byte", "color"}

    for name in documented:
        compile_grammar(
            Grammar("json_schema", json.dumps({"type": "string", "format": name})), every_byte()
        )
    for name in others:
        schema = json.dumps({"type": "string", "format": name})
        assert f"Unknown format: {name}" in refusal(Grammar("json_schema", schema)).message
    assert len(documented) == 10


def test_a_source_that_is_too_long_is_not_parsed() -> None:
    """A megabyte of schema costs its length."""
    refused = refusal(Grammar("json_schema", json.dumps({"enum": ["x" * 1_000_000]})))

    assert refused.code == "grammar_too_big"
    assert "1000014 bytes; limit 131072" in refused.message


@each_row(
    "grammar",
    [
        Grammar("json_schema", '{"properties":{"a":' * 2_000 + "{}" + "}}" * 2_000),
        Grammar("regex", "(" * 5_000 + "a" + ")" * 5_000),
        Grammar("lark", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000),
        Grammar(
            "json_schema",
            json.dumps(
                {
                    "allOf": [
                        {"anyOf": [{"properties": {f"{i}{j}": {}}, "required": [f"{i}{j}"]}
                                   for j in range(6)]}
                        for i in range(8)
                    ]
                }
            ),
        ),
    ],
)  # fmt: skip
def test_a_bomb_is_refused(grammar: Grammar) -> None:
    """Depth and products, each within its fuel."""
    assert refusal(grammar).code in {"grammar_invalid", "grammar_too_big"}


@each_row(
    "grammar",
    [
        Grammar("lark", 'start: e\ne: e e e | "a" | "b"'),
        Grammar("lark", 'start: e\ne: e e | "a" | "b" |'),
        Grammar("regex", "[ab]*a[ab]{60}"),
        Grammar("regex", "(a?){2000}[ab]{2000}"),
    ],
)
def test_a_grammar_that_explodes_later_fails_its_own_matcher(grammar: Grammar) -> None:
    """A grammar that compiles well may still explode; each step has its own bounds."""
    compiled = compile_grammar(grammar, letters(GrammarLimits(lexer_states_max=2_000)))
    matcher, filler, chance = compiled.matcher.fork(), MaskFiller(), random.Random(7)

    for _ in range(3_000):
        (mask,) = filler.fill([matcher], [True])
        if not mask.any() or matcher.is_complete:
            break
        matcher.consume(chance.choice(allowed(mask)))

    assert matcher.failure == "grammar_too_big"


def test_a_matcher_may_move_to_another_thread() -> None:
    """The engine forks matchers of grammars that a thread compiled."""
    compiled = compile_grammar(Grammar("regex", "ab"), letters())

    assert isinstance(compiled.matcher.fork(), Matcher)
    assert not compiled.first_mask.flags.writeable


@pytest.mark.parametrize(("kind", "properties"), [("json_schema", 200), ("lark", 80)])
def test_wide_objects_are_accepted(kind: Any, properties: int) -> None:
    """Tools with a hundred optional arguments exist; each argument may come next."""
    schema = json.dumps(
        {
            "type": "object",
            "properties": {f"field_{number}": {"type": "boolean"} for number in range(properties)},
            "additionalProperties": False,
        }
    )
    source = schema if kind == "json_schema" else f'start: "<call>" %json {schema} "</call>"'
    vocabulary = every_byte()
    matcher = compile_grammar(Grammar(kind, source), vocabulary).matcher.fork()
    text = '{"field_3": true, "field_77": false}'

    taken = [
        matcher.consume(token)
        for token in vocabulary.tokenizer.tokenize_str(text if kind != "lark" else f"<call>{text}")
    ]

    assert all(taken), matcher.failure
