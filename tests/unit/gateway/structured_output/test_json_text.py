"""JSON from clients keeps its order, has limits, and never raises a Python exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Refusal
from gateway.structured_output.json_text import (
    collect_strings,
    count_values,
    nesting_depth,
    parse_arguments,
    parse_schema,
)
from tests.tables import each_row


def test_schema_keeps_member_order() -> None:
    """Models read a schema in its order."""
    assert list(parse_schema('{"z": 1, "a": {"y": 2, "b": 3}}', "tools[0]")) == ["z", "a"]


@each_row(
    ("text", "words"),
    [
        ("", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ('{"a": Infinity}', "expected a JSON object"),
        ('{"a": 1e400}', "expected a JSON object"),
        ('{"a": ' + "9" * 5000 + "}", "expected a JSON object"),
        ('{"a":' * 65 + "1" + "}" * 65, "schema too deep: 65 levels; expected at most 64"),
        ("[" * 200_000, "200000 levels"),
        (json.dumps({"a": "x" * 262_144}), "262153 bytes; expected at most 262144"),
    ],
)
def test_refuses_invalid_schema(text: str, words: str) -> None:
    """With the field, the limit and the value."""
    with pytest.raises(Refusal) as raised:
        parse_schema(text, "tools[3]")

    assert raised.value.param == "tools[3]"
    assert words in raised.value.message


@given(st.text(max_size=30) | st.text('{}[]":,1aen\\.', max_size=30))
def test_parses_any_arguments(text: str) -> None:
    """An object, or the text itself: model output must not stop a conversation."""
    value, written = parse_arguments(text)

    assert json.loads(written) == value
    assert isinstance(value, dict) or value == text


def test_nesting_depth_ignores_strings() -> None:
    assert nesting_depth('{"a": "{{{[", "b\\"{": [1]}') == 2
    assert nesting_depth("plain") == 0


def test_collects_strings_and_names() -> None:
    """A special token may hide in either."""
    assert collect_strings({"a": ["b", {"c": 1}], "d": None}) == ["a", "b", "c", "d"]


JSON_VALUES = st.recursive(
    st.none() | st.integers() | st.text('a"\\,[{', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\,[{'), inner),
    max_leaves=12,
)


def values_in(value: object) -> int:
    """Count the values of a decoded JSON value, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_in, inner))


@given(JSON_VALUES, st.booleans())
def test_counts_every_value_and_no_text(value: object, ascii_only: bool) -> None:
    """An empty container may count twice; characters inside strings never exceed the limit."""
    data, count = json.dumps(value, ensure_ascii=ascii_only).encode(), values_in(value)

    assert count <= count_values(data, 2 * count) <= 2 * count
    assert count_values(data, count - 1) > count - 1


@each_row("text", ['"' * 9_999, "," * 9_999, "[" * 9_999, '"",' * 9_999, "\\" * 99])
def test_counts_a_text_that_is_not_json(text: str) -> None:
    assert count_values(text.encode(), 100) > 100 or text[0] in '\\"'


def test_refuses_a_schema_of_too_many_values() -> None:
    """256 KiB hold 87,000 empty lists."""
    text = '{"enum": [' + ",".join(["[]"] * 60_000) + "]}"
    with pytest.raises(Refusal, match="120002 values; expected at most 50000"):
        parse_schema(text, "tools[0]")


def test_arguments_of_too_many_values_stay_text() -> None:
    """Decoding them would make an object for each."""
    text = '{"a": [' + ",".join(["[]"] * 60_000) + "]}"
    value, written = parse_arguments(text)

    assert value == text
    assert json.loads(written) == text
