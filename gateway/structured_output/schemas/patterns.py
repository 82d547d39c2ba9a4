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
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

PATTERN_CHARS_MAX = 1_000
"""Maximum length of one pattern, in characters."""
PATTERNS_CHARS_MAX = 32_768
"""Maximum length of all patterns of one schema together, in characters."""

_GROUPS = ("(?<=", "(?<!", "(?=", "(?!", "(?>", "(?P=")
"""Openings of groups that an automaton cannot match."""

_TRANSLATIONS = {
    r"\Z": r"\z",
    r"\0": r"\x00",
    r"\<": "<",
    r"\>": ">",
    "{": r"\{",
    "[]": r"[^\s\S]",
    "[^]": r"[\s\S]",
}
"""Python's end of text (`\\Z` is the letter Z in ECMAScript), NUL, what the grammar engine reads as
ends of a word, a brace that repeats nothing, and the classes of no character and of all."""

_CONTROL = re.compile(r"\\c[A-Za-z]")
"""An ASCII control character by its letter."""
_BRACED = re.compile(r"\\[pPux]\{[^{}]{0,64}\}")
"""An escape that ends with a brace."""

_IN_CLASS = re.compile(r"\\c[A-Za-z]|\\.|\[|&&|--|~~", re.DOTALL)
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

_GROUP_HEAD = re.compile(r"\(\?(?:P?<[^>]{1,64}>|[a-zA-Z-]{0,8}:)")
_FLAGS = re.compile(r"\(\?[a-zA-Z-]{1,8}\)")
_INNER_ANCHOR = re.compile(r"[^|(^]\({0,64}\^|\$\){0,64}[^|)$]")

_ONE = ("items", "contains", "not", "if", "then", "else", "propertyNames")
_REST = ("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class UnsupportedPattern(Exception):
    """A strict schema contains an unsupported `pattern`. `why`: the reason and a remedy."""

    def __init__(self, pattern: str, why: str) -> None:
        self.pattern = pattern
        self.why = f"the pattern '{pattern[:200]}' {why}"
        super().__init__(self.why)


def split_pattern(pattern: str) -> Iterator[tuple[str, bool]]:
    """Split a pattern: (piece, whether the piece is unsupported or could hide such a piece).

    Escapes, character classes, openings of groups and possessive quantifiers are pieces of their
    own. Clients choose the pattern, so this scanner never goes back. O(characters).
    """
    at, plain, length = 0, 0, len(pattern)
    has_classes = True
    while at < length:
        char, end = pattern[at], at
        if char == "\\" and at + 1 < length:
            whole = _CONTROL.match(pattern, at) or _BRACED.match(pattern, at)
            is_long = pattern.startswith("k<", at + 1)
            end = whole.end() if whole else at + (3 if is_long else 2)
        elif char == "[" and has_classes:
            end = _end_of_class(pattern, at)
            # A class that never closes leaves no later bracket that does.
            has_classes = end > at
        elif char == "(":
            end = at + next((len(group) for group in _GROUPS if pattern.startswith(group, at)), 0)
        elif char in "*+?{":
            end = _end_of_possessive(pattern, at)
        if end == at:
            at += 1
            continue
        if plain < at:
            yield pattern[plain:at], False
        yield pattern[at:end], True
        at = plain = end
    if plain < length:
        yield pattern[plain:], False


def _end_of_class(pattern: str, start: int) -> int:
    """Return the offset after the class that begins at `start`; `start` if it never closes."""
    at = start + 1
    while at < len(pattern):
        if pattern[at] == "]":
            return at + 1
        at += 2 if pattern[at] == "\\" else 1
    return start


def _end_of_possessive(pattern: str, start: int) -> int:
    """Return the offset after the possessive quantifier, or the brace that is a character, that
    begins at `start`; `start` if none does. `{,3}` repeats in Python alone and stays."""
    at = start + 1
    if pattern[start] == "{":
        at = _skip_digits(pattern, at)
        if pattern.startswith(",", at):
            at = _skip_digits(pattern, at + 1)
        if not pattern.startswith("}", at):
            return start + (not pattern.startswith(",", start + 1))
        at += 1
    return at + 1 if pattern.startswith("+", at) else start


def _skip_digits(pattern: str, at: int) -> int:
    while at < len(pattern) and pattern[at].isdecimal():
        at += 1
    return at


def first_unsupported(pattern: str) -> str | None:
    """Return the first piece of a pattern that no automaton can match: lookaround, a word boundary,
    a backreference, an atomic group (`(?>`) or a possessive quantifier (`a++`). None if there is
    none. O(characters)."""
    for piece, is_special in split_pattern(pattern):
        if is_special and (
            piece.startswith("(?") or piece[:2] in _ESCAPES or _is_possessive(piece)
        ):
            return piece
    return None


def has_inner_anchor(pattern: str) -> bool:
    """Return whether `^` stands behind something, or `$` before something: the grammar engine takes
    them only at the ends. One that is repeated or stands in one alternative only may be missed.
    O(characters)."""
    text = "".join("x" if is_special else piece for piece, is_special in split_pattern(pattern))
    return _INNER_ANCHOR.search(_GROUP_HEAD.sub("(", _FLAGS.sub("", text))) is not None


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
    if (equivalent := _EQUIVALENTS.get(pattern)) is not None:
        return equivalent
    pieces = [*split_pattern(pattern), ("", False)]
    return "".join(
        _translate_piece(piece, after[:1]) if is_special else piece
        for (piece, is_special), (after, _) in pairwise(pieces)
    )


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


def _translate_piece(piece: str, next_char: str) -> str:
    if piece == r"\0" and next_char.isdigit():
        return piece  # an octal escape in some dialects only
    if _CONTROL.fullmatch(piece):
        return _translate_control(piece)
    if piece.startswith("[") and piece not in _TRANSLATIONS:
        start = 2 if piece.startswith("[^") else 1
        return piece[:start] + _IN_CLASS.sub(_translate_class_piece, piece[start:-1]) + "]"
    return _TRANSLATIONS.get(piece, piece)


def _translate_control(piece: str) -> str:
    return f"\\x{ord(piece[-1]) % 32:02x}"


def _translate_class_piece(found: re.Match[str]) -> str:
    piece = found[0]
    if len(piece) == 3:
        return _translate_control(piece)
    if piece == r"\b":
        return r"\x08"
    if piece == "--":  # a range that ends or begins with a hyphen
        return r"-\-" if found.start() else r"\--"
    return piece if piece.startswith("\\") else "".join(f"\\{char}" for char in piece)


def find_patterns(
    schema: Any, steps: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the patterns of a schema, with the steps to the keyword of each. O(schema), recursion
    as deep as the schema."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name == "pattern" and isinstance(value, str):
                yield (*steps, name), value
            elif name == "patternProperties" and isinstance(value, dict):
                yield from (((*steps, name), pattern) for pattern in value)
            yield from find_patterns(value, (*steps, name))
    elif isinstance(schema, list):
        for at, one in enumerate(schema):
            yield from find_patterns(one, (*steps, str(at)))


def translate_schema(schema: Any, *, strict: bool) -> Any:
    """Return the schema with translated patterns; the same object if nothing changes.

    If not `strict`, patterns that are unsupported, longer than `PATTERN_CHARS_MAX` or beyond
    `PATTERNS_CHARS_MAX` are removed; if strict, UnsupportedPattern is raised. Members that a
    removed `patternProperties` pattern named may have any value, as may members that no keyword
    names. O(schema), recursion as deep as the schema.
    """
    return _Translation(strict=strict).schema(schema)


class _Translation:
    """Translates one schema and counts the characters of its patterns."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._chars = 0

    def schema(self, schema: Any) -> Any:
        """Translate a schema; the same object if nothing changes."""
        if not isinstance(schema, dict):
            return schema
        found = {name: self._value(name, value) for name, value in schema.items()}
        pattern, named = schema.get("pattern"), found.get("patternProperties")
        if isinstance(pattern, str):
            translated = self._pattern(pattern)
            if translated is None:
                del found["pattern"]
            elif translated != pattern:
                found["pattern"] = translated
        if isinstance(named, dict):
            self._named(found, named)
        is_same = len(found) == len(schema) and all(
            value is schema.get(name) for name, value in found.items()
        )
        return schema if is_same else found

    def _named(self, found: dict[str, Any], named: dict[str, Any]) -> None:
        """Translate the names of `patternProperties` in the translated schema `found`."""
        translated = [(name, self._pattern(name)) for name in named]
        if all(name == pattern for name, pattern in translated):
            return
        found["patternProperties"] = {
            pattern: named[name] for name, pattern in translated if pattern is not None
        }
        if any(pattern is None for _, pattern in translated):
            found["additionalProperties"] = True

    def _pattern(self, pattern: str) -> str | None:
        """Translate a pattern; None if the grammar engine cannot take it."""
        self._chars += min(len(pattern), PATTERN_CHARS_MAX)
        if len(pattern) > PATTERN_CHARS_MAX or self._chars > PATTERNS_CHARS_MAX:
            if self._strict:
                raise UnsupportedPattern(pattern, self._too_long(pattern))
            return None
        translated = translate_pattern(pattern)
        piece = first_unsupported(translated)
        if piece is not None and self._strict:
            raise UnsupportedPattern(pattern, _why(piece))
        is_refused = piece is not None or (not self._strict and has_inner_anchor(translated))
        return None if is_refused else translated

    def _too_long(self, pattern: str) -> str:
        if len(pattern) > PATTERN_CHARS_MAX:
            return f"has {len(pattern)} characters; expected at most {PATTERN_CHARS_MAX}"
        return (
            f"makes the patterns of this schema longer than {PATTERNS_CHARS_MAX} characters"
            " together; write fewer or shorter patterns"
        )

    def _value(self, name: str, value: Any) -> Any:
        """Translate the subschemas of a keyword's value; data that is not a schema is unchanged."""
        if name in _LISTS and isinstance(value, list):
            items = [self.schema(one) for one in value]
            is_same = all(new is old for new, old in zip(items, value, strict=True))
            return value if is_same else items
        if name in _NAMED and isinstance(value, dict):
            named = {one: self.schema(schema) for one, schema in value.items()}
            return value if all(new is value[one] for one, new in named.items()) else named
        return self.schema(value) if name in (*_ONE, *_REST) else value
