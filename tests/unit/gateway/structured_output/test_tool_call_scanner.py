"""The scanner of one call's object: the name, then arguments as they come, however cut."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.structured_output.tool_call_scanner import ToolCallScanner
from tests.tables import each_row

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def scanned(text: str, size: int = 1) -> tuple[ToolCallScanner, str, int]:
    """Return the scanner, the arguments, and how many characters belonged to the object."""
    scanner, arguments, used = ToolCallScanner(), "", 0
    for start in range(0, len(text), size):
        used += scanner.push(text[start : start + size])
        arguments += scanner.take()
    return scanner, arguments, used


@given(
    arguments=st.dictionaries(st.text(max_size=5), JSON, max_size=4),
    size=st.integers(1, 9),
    name_first=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_scans_name_and_arguments(
    arguments: dict[str, object], size: int, name_first: bool, indent: int | None
) -> None:
    """Any JSON in the arguments, in either order, cut anywhere."""
    members = {"name": "get", "arguments": arguments}
    if not name_first:
        members = dict(reversed(members.items()))
    text = json.dumps(members, ensure_ascii=False, indent=indent)
    scanner, found, used = scanned(text + " and more", size)

    assert (scanner.name, scanner.is_over, scanner.is_broken) == ("get", True, False)
    assert json.loads(found) == arguments
    assert used == len(text)


def test_streams_arguments_before_they_are_complete() -> None:
    scanner = ToolCallScanner()
    scanner.push('{"name": "get", "arguments": {"a": "on')

    assert (scanner.has_begun, scanner.take()) == (True, '{"a": "on')
    scanner.push('e"}')
    assert scanner.take() == 'e"}'


@each_row(
    ("text", "arguments"),
    [
        ('{"name": "get"}', "{}"),
        ('{"name": "get", "arguments": null}', "{}"),
        ('{"name": "get", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"type": "function", "id": 7, "name": "get", "parameters": {"a": 1}}', '{"a": 1}'),
    ],
)
def test_accepts_variants_of_calls(text: str, arguments: str) -> None:
    """No arguments, arguments in a string, Llama's member names."""
    scanner, found, _ = scanned(text)

    assert (scanner.is_over, scanner.name, found) == (True, "get", arguments)


@each_row(
    "text",
    [
        "[1]",
        "{}",
        '{"name": 7, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "a", "name": "b"}',
        '{"answer": 42}',
        '{"name": "get", "age": 3}',
        '{"name": "get" "arguments": {}}',
        '{"name": "get", "arguments": [1]}',
        '{"name": "get", "arguments": "no json"}',
        '{"name": get}',
        '{"arguments": {}}',
        '{"name": "get", }',
        '{"name": , "arguments": {}}',
        "{'name': 'get'}",
    ],
)
def test_rejects_non_calls_before_they_begin(text: str) -> None:
    """All of it can then still be text."""
    scanner, found, _ = scanned(text)

    assert (scanner.is_broken, scanner.has_begun, found) == (True, False, "")
