r"""Translate grammars in GBNF (`root ::= …`), as llama.cpp, vLLM and SGLang take them, to Lark.

    root ::= "no" | digit+      start: T0
    digit ::= [0-9]             T0: "no" | T1+
                                T1: /[0-9]/

A rule that depends on no recursion becomes a terminal, which Lark matches as one pattern; the rest
become rules. Line ends mean nothing: a name before `::=` begins a rule. Every step is linear in the
text. The module knows no request; `gateway.structured_output.grammars` calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from msgspec import Struct

REPEATS_MAX = 10_000
"""Largest count of a repetition."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    | (?P<define>::=)
    | (?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*")
    | (?P<charset>\[(?:[^\]\\\n]|\\.)*\])
    | (?P<count>\{[ ]*[0-9]{1,6}[ ]*(?:,[ ]*(?:[0-9]{1,6})?[ ]*)?\})
    | (?P<sign>[|()*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|([^\\])")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


class GbnfError(ValueError):
    """The text is no grammar in GBNF; the message says what is wrong."""


class _Rule(Struct):
    """A rule as pieces of Lark, in which a name is kept as it is until all rules are known."""

    name: str
    pieces: list[tuple[str, str]]
    depth: int = 0


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is written in GBNF and not in Lark. O(characters)."""
    return "::=" in text and re.search(r"^[ \t]*start[ \t]*:", text, re.MULTILINE) is None


def translate_gbnf(text: str) -> str:
    """Return the grammar in Lark. O(characters). Raises GbnfError."""
    rules = _rules(text)
    if "root" not in rules:
        raise GbnfError("no rule 'root'")
    for rule in rules.values():
        for kind, piece in rule.pieces:
            if kind == "name" and piece not in rules:
                raise GbnfError(f"the rule {piece[:64]!r} is not defined")
    terminals = _terminals(rules)
    lark = {
        name: f"{'T' if name in terminals else 'r'}{number}" for number, name in enumerate(rules)
    }
    lines = [f"start: {lark['root']}"]
    for name, rule in rules.items():
        pieces = [
            piece if kind == "repeat" else f" {lark[piece] if kind == 'name' else piece}"
            for kind, piece in rule.pieces
        ]
        lines.append(f"{lark[name]}:{''.join(pieces)}")
    return "\n".join((*lines, ""))


def _rules(text: str) -> dict[str, _Rule]:
    """Return the rules by name, in order. Raises GbnfError."""
    rules: dict[str, _Rule] = {}
    tokens = list(_tokens(text))
    current: _Rule | None = None
    for number, (kind, piece) in enumerate(tokens):
        following = tokens[number + 1][0] if number + 1 < len(tokens) else ""
        if kind == "name" and following == "define":
            if current is not None:
                _check_closed(current)
            if piece in rules:
                raise GbnfError(f"the rule {piece[:64]!r} is defined twice")
            current = rules[piece] = _Rule(piece, [])
        elif current is None:
            raise GbnfError(f"text before the first rule: {piece[:32]!r}; expected 'root ::='")
        elif kind == "define":
            if not number or tokens[number - 1][0] != "name":
                raise GbnfError("'::=' without a name before it")
        else:
            _add(current, kind, piece)
    if current is not None:
        _check_closed(current)
    return rules


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise GbnfError(f"unexpected text: {text[at : at + 32]!r}")
        at = found.end()
        kind = found.lastgroup or ""
        if kind != "space":
            yield kind, found.group()


def _add(rule: _Rule, kind: str, piece: str) -> None:
    """Append one token to a rule, as Lark. Raises GbnfError."""
    if kind == "text":
        rule.pieces.append(
            ("text", json.dumps("".join(_characters(piece[1:-1])), ensure_ascii=False))
        )
    elif kind == "charset":
        rule.pieces.append(("text", _charset(piece[1:-1])))
    elif kind == "name":
        rule.pieces.append((kind, piece))
    elif kind == "count" or piece in "*+?":
        if not rule.pieces or rule.pieces[-1][0] == "open":
            raise GbnfError(f"nothing to repeat before {piece!r} in the rule {rule.name[:64]!r}")
        rule.pieces.append(("repeat", _count(piece) if kind == "count" else piece))
    elif piece == ".":
        rule.pieces.append(("text", "/(?s:.)/"))
    elif piece == "|":
        _close_alternative(rule)
        rule.pieces.append(("open", "|"))
    else:
        rule.depth += 1 if piece == "(" else -1
        if piece == ")":
            _close_alternative(rule)
        if rule.depth < 0:
            raise GbnfError(f"')' without '(' in the rule {rule.name[:64]!r}")
        rule.pieces.append(("open", "(") if piece == "(" else ("close", ")"))


def _close_alternative(rule: _Rule) -> None:
    """Give an empty alternative the empty text, which Lark wants to see."""
    if not rule.pieces or rule.pieces[-1][0] == "open":
        rule.pieces.append(("text", '""'))


def _check_closed(rule: _Rule) -> None:
    if rule.depth:
        raise GbnfError(f"'(' without ')' in the rule {rule.name[:64]!r}")
    _close_alternative(rule)


def _count(piece: str) -> str:
    """Return `{m}`, `{m,}` or `{m,n}` as Lark writes it. Raises GbnfError."""
    least, comma, most = piece[1:-1].replace(" ", "").partition(",")
    if max(int(least), int(most or 0)) > REPEATS_MAX:
        raise GbnfError(f"the repetition {piece} is too large; expected at most {REPEATS_MAX}")
    if comma and not most:
        return f"{{{int(least)},}}"
    if int(most or least) < int(least):
        raise GbnfError(f"the repetition {piece} has no count; expected a larger second number")
    return f"{{{int(least)},{int(most or least)}}}"


def _characters(text: str) -> Iterator[str]:
    """Yield the characters of a text or a set, without escapes. Raises GbnfError."""
    for found in _ESCAPE.finditer(text):
        code = found[1] or found[2] or found[3]
        if code is None:
            yield _CONTROLS.get(found[4], found[4]) if found[4] else found[5]
            continue
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise GbnfError(f"\\{found[0][1:]} is no character")
        yield chr(number)


def _charset(text: str) -> str:
    """Return a pattern of one character between brackets. Raises GbnfError."""
    negation = text[:1] == "^"
    body = text[1:] if negation else text
    # An escaped '-' is a character, a bare one between two characters makes a range.
    pieces = [(found.group(), found[5] == "-") for found in _ESCAPE.finditer(body)]
    chars = list(_characters(body))
    parts: list[str] = []
    at = 0
    while at < len(chars):
        if at + 2 < len(chars) and pieces[at + 1][1]:
            if chars[at] > chars[at + 2]:
                raise GbnfError(f"the range [{pieces[at][0]}-{pieces[at + 2][0]}] is reversed")
            parts.append(f"{_escaped(chars[at])}-{_escaped(chars[at + 2])}")
            at += 3
        else:
            parts.append(_escaped(chars[at]))
            at += 1
    if not parts:
        return "/(?s:.)/" if negation else "/[^\\x{0}-\\x{10FFFF}]/"
    return f"/[{'^' if negation else ''}{''.join(parts)}]/"


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Return the rules that depend on no recursion, in O(references)."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    waits: dict[str, int] = {}
    for name, rule in rules.items():
        used = {piece for kind, piece in rule.pieces if kind == "name"}
        waits[name] = len(used)
        for one in used:
            users[one].append(name)
    ready = [name for name, count in waits.items() if not count]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return found
