"""The patterns of a JSON Schema, as a grammar can hold them.

JSON Schema takes them from ECMAScript, and many come from Python. What is said in other words here
is put so (`\\Z`, `[\\b]`, a bracket in a class). Those that look around, or back, are right and
common (`^(?!\\s*$).+`), but drawing tokens by them would need more than an automaton: the few that
schema writers make by themselves have an equal that does not look, the others are left out of
schemas that are not strict. It knows no grammar; `grammars` calls it.
"""

from __future__ import annotations

import re
from typing import Any

_PIECE = re.compile(r"\\k<|\\.|\[(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|>|P=)", re.DOTALL)
"""What could be one, and what hides what could be: escapes, and classes of signs."""

_SIGNS = {r"\Z": r"\z", r"\0": r"\x00"}
"""Python's end of the text, which is no more than a letter to nobody, and a NUL."""

_IN_CLASS = re.compile(r"\\.|\[|&&|--|~~", re.DOTALL)
"""What a class of signs says otherwise: to a grammar a bracket begins a class in it, and the pairs
take one from another."""

_EMAIL = r"^(?!\.)(?!.*\.\.)([{0}0-9_'+\-\.]*)[{0}0-9_+-]@([{0}0-9][{0}0-9\-]*\.)+[{0}]{{2,}}$"
_EMAIL_HELD = (
    r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
_EQUALS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    _EMAIL.format("A-Za-z"): _EMAIL_HELD,
    _EMAIL.format("a-zA-Z"): _EMAIL_HELD,
}
"""What Pydantic says of a Decimal, and Zod of an email address, without looking ahead."""

_ESCAPES = frozenset({"\\b", "\\B", "\\k", *(f"\\{digit}" for digit in range(1, 10))})

_ONE = ("items", "contains", "not", "if", "then", "else", "propertyNames")
_REST = ("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def can_be_held(pattern: str) -> bool:
    """By an automaton: without looking ahead, behind, at a word's end or at what was matched, and
    without giving up other ways to match (`(?>`)."""
    return not any(
        piece.startswith("(?") or piece[:2] in _ESCAPES for piece in _PIECE.findall(pattern)
    )


def in_other_words(pattern: str) -> str:
    """An equal pattern that grammars understand; itself where it is one, or has none. O(signs)."""
    return _EQUALS.get(pattern) or _PIECE.sub(_reworded, pattern)


def _reworded(found: re.Match[str]) -> str:
    piece = found[0]
    if piece == r"\0" and found.string[found.end() :][:1].isdigit():
        return piece  # an octal number to some, and to others none
    if piece.startswith("["):
        start = 2 if piece.startswith("[^") else 1
        return piece[:start] + _IN_CLASS.sub(_in_class, piece[start:-1]) + "]"
    return _SIGNS.get(piece, piece)


def _in_class(found: re.Match[str]) -> str:
    piece = found[0]
    if piece == r"\b":
        return r"\x08"
    if piece == "--":  # a range up to a hyphen, or from one
        return r"-\-" if found.start() else r"\--"
    return piece if piece.startswith("\\") else "".join(f"\\{sign}" for sign in piece)


def as_held(schema: Any, *, strict: bool) -> Any:
    """The schema with its patterns as grammars understand them; itself where nothing changes. Not
    strict, those that cannot be held are left out. O(schema), as deep as it is.

    What a pattern named members for that is left out is anything then, and so are members that none
    names.
    """
    if not isinstance(schema, dict):
        return schema
    found = {name: _cleaned(name, value, strict) for name, value in schema.items()}
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        found["pattern"] = in_other_words(pattern)
        if not strict and not can_be_held(found["pattern"]):
            del found["pattern"]
    if isinstance(named, dict):
        kept = {in_other_words(name): value for name, value in found["patternProperties"].items()}
        found["patternProperties"] = kept
        if not strict and not all(map(can_be_held, kept)):
            found["patternProperties"] = {n: one for n, one in kept.items() if can_be_held(n)}
            found["additionalProperties"] = True
    return schema if found == schema else found


def _cleaned(name: str, value: Any, strict: bool) -> Any:
    """A keyword's value; what is data and no schema stays as it is."""
    if name in _LISTS and isinstance(value, list):
        return [as_held(one, strict=strict) for one in value]
    if name in _NAMED and isinstance(value, dict):
        return {one: as_held(schema, strict=strict) for one, schema in value.items()}
    return as_held(value, strict=strict) if name in (*_ONE, *_REST) else value
