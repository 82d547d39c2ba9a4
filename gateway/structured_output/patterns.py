"""Translate the patterns of a JSON Schema to those that the grammar engine supports.

JSON Schema uses ECMAScript patterns, and many come from Python. Syntax that the grammar engine
spells differently is translated (`\\Z`, `[\\b]`, a bracket in a class). Lookaround and
backreferences are valid and common (`^(?!\\s*$).+`) but need more than an automaton. The few that
schema libraries generate have equivalents without lookaround. Other unsupported patterns are
removed from schemas that are not strict and reported for strict ones. The module knows no grammar;
`gateway.structured_output.grammars` calls it.
"""

from __future__ import annotations

import re
from typing import Any

_PIECE = re.compile(
    r"\\k<|\\.|\[(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|>|P=)|(?:[*+?]|\{\d*,?\d*\})\+", re.DOTALL
)
"""Matches unsupported pieces, and pieces that could hide one: escapes and character classes."""

_TRANSLATIONS = {r"\Z": r"\z", r"\0": r"\x00"}
"""Python's end of text (`\\Z` is the letter Z in ECMAScript), and NUL."""

_IN_CLASS = re.compile(r"\\.|\[|&&|--|~~", re.DOTALL)
"""Pieces of a character class that the grammar engine reads differently: a bracket begins a nested
class, and the pairs are set operations."""

_EMAIL = r"^(?!\.)(?!.*\.\.)([{0}0-9_'+\-\.]*)[{0}0-9_+-]@([{0}0-9][{0}0-9\-]*\.)+[{0}]{{2,}}$"
_EMAIL_SUPPORTED = (
    r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
_HOURS = r"(?:\d+H(?:\d+M)?(?:{0})?|\d+M(?:{0})?|{0})".format(r"\d+(?:[.,]\d+)?S")
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_EQUIVALENTS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    _EMAIL.format("A-Za-z"): _EMAIL_SUPPORTED,
    _EMAIL.format("a-zA-Z"): _EMAIL_SUPPORTED,
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": rf"^P(?:\d+W|{_DAYS}(?:T{_HOURS})?|T{_HOURS})$",
}
"""Equivalents of the patterns that Pydantic generates for a Decimal, and Zod for an email address
and a duration, without lookahead."""

_DECIMAL = re.compile(
    re.escape(r"^(?!^[-+.]*$)[+-]?0*")
    + r"(?:\(\?:\\d\{0,(?P<whole>\d{1,2})\}\|\(\?=\[\\d\.\]\{1,(?P<chars>\d{1,2})\}0\*\$\)"
    r"\\d(?:\*\\\.\\d\*|\{0,(?P=whole)\}\\\.\\d\{0,(?P<places>\d{1,2})\})0\*\$\)"
    r"|\\d\*\\\.\?\\d\{0,(?P<only>\d{1,2})\}0\*\$)"
)
"""The pattern that Pydantic generates for a Decimal with limits on digits or decimal places."""

_ESCAPES = frozenset({"\\b", "\\B", "\\k", *(f"\\{digit}" for digit in range(1, 10))})

_ONE = ("items", "contains", "not", "if", "then", "else", "propertyNames")
_REST = ("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class UnsupportedPattern(Exception):
    """A strict schema contains an unsupported pattern. `why`: the reason and a remedy."""

    def __init__(self, pattern: str, piece: str) -> None:
        self.why = f"the pattern '{pattern[:200]}' {_why(piece)}"
        super().__init__(self.why)


def is_supported(pattern: str) -> bool:
    """Return whether an automaton can match the pattern: no lookaround, word boundaries,
    backreferences, atomic groups (`(?>`) or possessive quantifiers (`a++`)."""
    return _first_unsupported(pattern) is None


def _first_unsupported(pattern: str) -> str | None:
    """Return the first unsupported piece of a pattern, or None."""
    for piece in _PIECE.findall(pattern):
        if piece.startswith("(?") or piece[:2] in _ESCAPES or _is_possessive(piece):
            return str(piece)
    return None


def _is_possessive(piece: str) -> bool:
    return piece[0] in "*+?{" and piece.endswith("+")


def _why(piece: str) -> str:
    if _is_possessive(piece):
        return f"uses a possessive quantifier ({piece}); write {piece[:-1]}"
    if piece == "(?>":
        return "uses an atomic group ((?>); write (?:"
    if piece in (r"\b", r"\B"):
        return f"uses a word boundary ({piece}); write the characters that may stand there"
    if piece.startswith("(?") and piece != "(?P=":
        return f"uses lookaround ({piece}); write the allowed text as alternatives"
    return f"uses a backreference ({piece}); repeat the group's pattern"


def translate_pattern(pattern: str) -> str:
    """Return an equivalent pattern for the grammar engine, unchanged if none is needed or known.
    O(characters)."""
    if decimal := _DECIMAL.fullmatch(pattern):
        return _translate_decimal(decimal)
    return _EQUIVALENTS.get(pattern) or _PIECE.sub(_translate_piece, pattern)


def _translate_decimal(found: re.Match[str]) -> str:
    """Return the pattern that Pydantic's Decimal pattern intends: it allows nothing more, and drops
    branches that are not anchored and so match text that is not a decimal."""
    if found["only"]:
        places = int(found["only"])
        forms = [rf"\d+(?:\.\d{{0,{places}}}0*)?", rf"\d*\.{_fraction(places)}"]
    elif found["places"]:
        whole = int(found["whole"])
        places = min(int(found["places"]), int(found["chars"]) - 1 - whole)
        head = rf"0*\d{{1,{whole}}}" if whole else "0+"
        forms = [rf"{head}(?:\.\d{{0,{places}}}0*)?", rf"0*\.{_fraction(places)}"]
    else:
        digits = int(found["whole"])
        forms = [rf"0*\d{{1,{digits}}}" if digits else "0+", rf"0*\.{_fraction(digits)}"]
        forms += [rf"0*\d{{{n}}}\.\d{{0,{digits - n}}}0*" for n in range(1, digits + 1)]
    return f"^[+-]?(?:{'|'.join(forms)})$"


def _fraction(places: int) -> str:
    return rf"\d{{1,{places}}}0*" if places else "0+"


def _translate_piece(found: re.Match[str]) -> str:
    piece = found[0]
    if piece == r"\0" and found.string[found.end() :][:1].isdigit():
        return piece  # an octal escape in some dialects only
    if piece.startswith("["):
        start = 2 if piece.startswith("[^") else 1
        return piece[:start] + _IN_CLASS.sub(_translate_class_piece, piece[start:-1]) + "]"
    return _TRANSLATIONS.get(piece, piece)


def _translate_class_piece(found: re.Match[str]) -> str:
    piece = found[0]
    if piece == r"\b":
        return r"\x08"
    if piece == "--":  # a range that ends or begins with a hyphen
        return r"-\-" if found.start() else r"\--"
    return piece if piece.startswith("\\") else "".join(f"\\{char}" for char in piece)


def translate_schema(schema: Any, *, strict: bool) -> Any:
    """Return the schema with translated patterns; the same object if nothing changes.

    If not `strict`, unsupported patterns are removed; if strict, UnsupportedPattern is raised.
    Members that a removed `patternProperties` pattern named may have any value, as may members that
    no keyword names. O(schema), recursion as deep as the schema.
    """
    if not isinstance(schema, dict):
        return schema
    found = {name: _translate_value(name, value, strict) for name, value in schema.items()}
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        found["pattern"] = translate_pattern(pattern)
        if not _is_kept(found["pattern"], strict=strict):
            del found["pattern"]
    if isinstance(named, dict):
        kept = {
            translate_pattern(name): value for name, value in found["patternProperties"].items()
        }
        taken = {name: one for name, one in kept.items() if _is_kept(name, strict=strict)}
        found["patternProperties"] = taken
        if len(taken) < len(kept):
            found["additionalProperties"] = True
    return schema if found == schema else found


def _is_kept(pattern: str, *, strict: bool) -> bool:
    piece = _first_unsupported(pattern)
    if piece is not None and strict:
        raise UnsupportedPattern(pattern, piece)
    return piece is None


def _translate_value(name: str, value: Any, strict: bool) -> Any:
    """Translate the subschemas of a keyword's value; data that is not a schema is unchanged."""
    if name in _LISTS and isinstance(value, list):
        return [translate_schema(one, strict=strict) for one in value]
    if name in _NAMED and isinstance(value, dict):
        return {one: translate_schema(schema, strict=strict) for one, schema in value.items()}
    return translate_schema(value, strict=strict) if name in (*_ONE, *_REST) else value
