"""The patterns of a JSON Schema, as a grammar can hold them.

JSON Schema takes them from ECMAScript, and many come from Python. What is said in other words here
is put so (`\\Z`, `[\\b]`, a bracket in a class). Those that look around, or back, are right and
common (`^(?!\\s*$).+`), but drawing tokens by them would need more than an automaton: the few that
schema writers make by themselves have an equal that does not look, the others are left out of
schemas that are not strict, and named in those that are. It knows no grammar; `grammars` calls it.
"""

from __future__ import annotations

import re
from typing import Any

_PIECE = re.compile(
    r"\\k<|\\.|\[(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|>|P=)|(?:[*+?]|\{\d*,?\d*\})\+", re.DOTALL
)
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
_HOURS = r"(?:\d+H(?:\d+M)?(?:{0})?|\d+M(?:{0})?|{0})".format(r"\d+(?:[.,]\d+)?S")
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_EQUALS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    _EMAIL.format("A-Za-z"): _EMAIL_HELD,
    _EMAIL.format("a-zA-Z"): _EMAIL_HELD,
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": rf"^P(?:\d+W|{_DAYS}(?:T{_HOURS})?|T{_HOURS})$",
}
"""What Pydantic says of a Decimal, and Zod of an email address and a duration, without looking
ahead."""

_DECIMAL = re.compile(
    re.escape(r"^(?!^[-+.]*$)[+-]?0*")
    + r"(?:\(\?:\\d\{0,(?P<whole>\d{1,2})\}\|\(\?=\[\\d\.\]\{1,(?P<signs>\d{1,2})\}0\*\$\)"
    r"\\d(?:\*\\\.\\d\*|\{0,(?P=whole)\}\\\.\\d\{0,(?P<places>\d{1,2})\})0\*\$\)"
    r"|\\d\*\\\.\?\\d\{0,(?P<only>\d{1,2})\}0\*\$)"
)
"""What Pydantic says of a Decimal with so many digits, or places, or both."""

_ESCAPES = frozenset({"\\b", "\\B", "\\k", *(f"\\{digit}" for digit in range(1, 10))})

_ONE = ("items", "contains", "not", "if", "then", "else", "propertyNames")
_REST = ("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class UnsupportedPattern(Exception):
    """A strict schema has such a pattern. `why`: a sentence, with what to write instead."""

    def __init__(self, pattern: str, piece: str) -> None:
        self.why = f"the pattern '{pattern[:200]}' {_why(piece)}"
        super().__init__(self.why)


def can_be_held(pattern: str) -> bool:
    """By an automaton: without looking ahead, behind, at a word's end or at what was matched, and
    without giving up other ways to match (`(?>`, `a++`)."""
    return _unheld(pattern) is None


def _unheld(pattern: str) -> str | None:
    """The first piece that cannot be."""
    for piece in _PIECE.findall(pattern):
        if piece.startswith("(?") or piece[:2] in _ESCAPES or _is_possessive(piece):
            return str(piece)
    return None


def _is_possessive(piece: str) -> bool:
    return piece[0] in "*+?{" and piece.endswith("+")


def _why(piece: str) -> str:
    if _is_possessive(piece):
        return f"gives no match back ({piece}); write {piece[:-1]}"
    if piece == "(?>":
        return "gives no match back ((?>); write (?:"
    if piece in (r"\b", r"\B"):
        return f"looks for a word's end ({piece}); write the signs that may stand there"
    if piece.startswith("(?") and piece != "(?P=":
        return f"looks around ({piece}); write what may stand there, as alternatives"
    return f"looks back at what was matched ({piece}); write it again, or its alternatives"


def in_other_words(pattern: str) -> str:
    """An equal pattern that grammars understand; itself where it is one, or has none. O(signs)."""
    if decimal := _DECIMAL.fullmatch(pattern):
        return _decimal(decimal)
    return _EQUALS.get(pattern) or _PIECE.sub(_reworded, pattern)


def _decimal(found: re.Match[str]) -> str:
    """What is meant by it, which is nothing that it does not allow; some of it ends nowhere, and so
    allows what no decimal is."""
    if found["only"]:
        places = int(found["only"])
        forms = [rf"\d+(?:\.\d{{0,{places}}}0*)?", rf"\d*\.{_fraction(places)}"]
    elif found["places"]:
        whole = int(found["whole"])
        places = min(int(found["places"]), int(found["signs"]) - 1 - whole)
        head = rf"0*\d{{1,{whole}}}" if whole else "0+"
        forms = [rf"{head}(?:\.\d{{0,{places}}}0*)?", rf"0*\.{_fraction(places)}"]
    else:
        digits = int(found["whole"])
        forms = [rf"0*\d{{1,{digits}}}" if digits else "0+", rf"0*\.{_fraction(digits)}"]
        forms += [rf"0*\d{{{n}}}\.\d{{0,{digits - n}}}0*" for n in range(1, digits + 1)]
    return f"^[+-]?(?:{'|'.join(forms)})$"


def _fraction(places: int) -> str:
    return rf"\d{{1,{places}}}0*" if places else "0+"


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
    strict, those that cannot be held are left out; strict, NotHeld is raised. O(schema), as deep as
    it is.

    What a pattern named members for that is left out is anything then, and so are members that none
    names.
    """
    if not isinstance(schema, dict):
        return schema
    found = {name: _cleaned(name, value, strict) for name, value in schema.items()}
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        found["pattern"] = in_other_words(pattern)
        if not _is_taken(found["pattern"], strict=strict):
            del found["pattern"]
    if isinstance(named, dict):
        kept = {in_other_words(name): value for name, value in found["patternProperties"].items()}
        taken = {name: one for name, one in kept.items() if _is_taken(name, strict=strict)}
        found["patternProperties"] = taken
        if len(taken) < len(kept):
            found["additionalProperties"] = True
    return schema if found == schema else found


def _is_taken(pattern: str, *, strict: bool) -> bool:
    piece = _unheld(pattern)
    if piece is not None and strict:
        raise UnsupportedPattern(pattern, piece)
    return piece is None


def _cleaned(name: str, value: Any, strict: bool) -> Any:
    """A keyword's value; what is data and no schema stays as it is."""
    if name in _LISTS and isinstance(value, list):
        return [as_held(one, strict=strict) for one in value]
    if name in _NAMED and isinstance(value, dict):
        return {one: as_held(schema, strict=strict) for one, schema in value.items()}
    return as_held(value, strict=strict) if name in (*_ONE, *_REST) else value
