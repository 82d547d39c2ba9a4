"""The patterns of a JSON Schema that no grammar can hold: those that look around, or back.

JSON Schema takes them from ECMAScript, where they are right and common (`^(?!\\s*$).+`); drawing
tokens by them would need more than an automaton. It knows no grammar; `grammars` leaves them out of
schemas that are not strict.
"""

from __future__ import annotations

import re
from typing import Any

_PIECE = re.compile(r"\\k<|\\.|\[(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)
"""What could be one, and what hides what could be: escapes, and classes of signs."""

_ESCAPES = frozenset({"\\b", "\\B", "\\k", *(f"\\{digit}" for digit in range(1, 10))})

_ONE = ("items", "contains", "not", "if", "then", "else", "propertyNames")
_REST = ("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def can_be_held(pattern: str) -> bool:
    """By an automaton: without looking ahead, behind, at a word's end or at what was matched."""
    return not any(
        piece.startswith("(?") or piece[:2] in _ESCAPES for piece in _PIECE.findall(pattern)
    )


def without_unheld(schema: Any) -> Any:
    """The schema without such patterns; itself where it has none. O(schema), as deep as it is.

    What a pattern named members for is anything then, and so are members that none names.
    """
    if not isinstance(schema, dict):
        return schema
    found = {name: _cleaned(name, value) for name, value in schema.items()}
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str) and not can_be_held(pattern):
        del found["pattern"]
    if isinstance(named, dict) and not all(map(can_be_held, named)):
        kept = found["patternProperties"]
        found["patternProperties"] = {name: kept[name] for name in named if can_be_held(name)}
        found["additionalProperties"] = True
    return schema if found == schema else found


def _cleaned(name: str, value: Any) -> Any:
    """A keyword's value; what is data and no schema stays as it is."""
    if name in _LISTS and isinstance(value, list):
        return [without_unheld(one) for one in value]
    if name in _NAMED and isinstance(value, dict):
        return {one: without_unheld(schema) for one, schema in value.items()}
    return without_unheld(value) if name in (*_ONE, *_REST) else value
