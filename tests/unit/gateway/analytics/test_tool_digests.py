"""`digests_of`: tools are the same if they say the same."""

from __future__ import annotations

import json
from typing import Any

from gateway.analytics.tool_digests import digests_of
from gateway.dialects.canonical import Tool
from tests.tables import each_row

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"type": "string", "enum": ["a", "b"]}, "day": {"type": "string"}},
    "required": ["to", "day"],
}


def digest(schema: Any, name: str = "book", text: str = "Book a seat.") -> Any:
    return digests_of([Tool(name, text, json.dumps(schema))])[0]


@each_row(
    ("change", "is_same"),
    [
        ({"properties": dict(reversed(SCHEMA["properties"].items()))}, True),
        ({"required": ["day", "to"]}, True),
        ({"required": ["day"]}, False),
        ({"oneOf": [1, 2]}, False),
    ],
)
def test_order_of_keys_and_of_sets_makes_no_other_tool(
    change: dict[str, Any], is_same: bool
) -> None:
    assert (digest({**SCHEMA, **change}) == digest(SCHEMA)) is is_same


def test_order_of_other_lists_is_kept() -> None:
    assert digest({"prefixItems": [1, 2]}) != digest({"prefixItems": [2, 1]})


def test_name_and_text_are_told_apart() -> None:
    """A tool whose text changes keeps its name."""
    changed = digest(SCHEMA, text="Book a seat today.")

    assert changed.name == digest(SCHEMA).name
    assert changed.content != digest(SCHEMA).content
    assert digest(SCHEMA, name="look").name != changed.name


def test_text_that_is_no_json_is_its_own() -> None:
    assert digests_of([Tool("a", "", "{")]) != digests_of([Tool("a", "", "[")])
