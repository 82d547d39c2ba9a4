"""JSON from clients: in its order, within its bounds, and never an exception of Python's."""

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


def test_a_schema_keeps_its_order() -> None:
    """Models read it in the order in which it was written."""
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
def test_a_schema_that_cannot_be_taken_is_refused(text: str, words: str) -> None:
    """With the field, the limit and what came."""
    with pytest.raises(Refusal) as raised:
        parse_schema(text, "tools[3]")

    assert raised.value.param == "tools[3]"
    assert words in raised.value.message


@given(st.text(max_size=30) | st.text('{}[]":,1aen\\.', max_size=30))
def test_any_arguments_are_some_arguments(text: str) -> None:
    """An object, or the text itself: nothing a model wrote can stop a conversation."""
    value, written = parse_arguments(text)

    assert json.loads(written) == value
    assert isinstance(value, dict) or value == text


def test_strings_are_no_structure() -> None:
    """Braces in them nest nothing."""
    assert nesting_depth('{"a": "{{{[", "b\\"{": [1]}') == 2
    assert nesting_depth("plain") == 0


def test_every_string_is_found() -> None:
    """Names, too: a special token may hide in either."""
    assert collect_strings({"a": ["b", {"c": 1}], "d": None}) == ["a", "b", "c", "d"]
