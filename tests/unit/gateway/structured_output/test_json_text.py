"""JSON from clients keeps its order, has limits, and never raises a Python exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Refusal
from gateway.structured_output.json_text import (
    collect_strings,
    nesting_depth,
    parse_arguments,
    parse_schema,
)


def test_schema_keeps_member_order() -> None:
    """Models read a schema in its order."""
    assert list(parse_schema('{"z": 1, "a": {"y": 2, "b": 3}}', "tools[0]")) == ["z", "a"]


@pytest.mark.parametrize(
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
