"""Where each part of a prompt lies in what the template made of it.

The template is run with marks in place of what clients sent; the text between the marks is the
template's own, and held against a rendering of the real thing it shows what became of each part:
itself, trimmed, written as JSON, or left out. `render` turns the pieces into tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence

from msgspec import Struct

from gateway.prompt.messages import TemplatePart
from gateway.prompt.opaque_text import TRIMMED

MARK_SIGNS = ("\ue0f0", "\ue0f1")
_MARK = re.compile("\ue0f0(\\d+)\ue0f1")
_OPAQUE = re.compile(f"\ue0f0(\\d+)({TRIMMED}?)\ue0f1")
LAST = "\ue0f0\ue0f1"
"""A mark of nothing, for asking where something ends."""


class Piece(Struct, frozen=True):
    """Text in order of rendering. `part`: which part it is, None for the template's own; that one
    begins at `start` of the marked rendering."""

    text: str
    part: int | None
    start: int = 0


def mark(part: int) -> str:
    """What stands for a part's text."""
    return f"\ue0f0{part}\ue0f1"


def lay_out(marked: str, whole: str, parts: Sequence[TemplatePart]) -> tuple[Piece, ...] | None:
    """The pieces of `whole`; None if a part has become something else, or stands there twice.

    Cost: O(text).
    """
    pieces: list[Piece] = []
    at, seen = 0, set()
    rows = list(_split(marked, parts))
    for number, (own, start, part) in enumerate(rows):
        if not whole.startswith(own, at):
            return None
        at += len(own)
        pieces.append(Piece(own, None, start))
        if part is None:
            break
        if part in seen:
            return None
        seen.add(part)
        after = rows[number + 1][0]
        for variant in _variants(parts[part]):
            end = at + len(variant)
            if whole.startswith(variant, at) and whole.startswith(after, end):
                break
        else:
            return None
        pieces.append(Piece(variant, part))
        at = end
    return tuple(pieces) if at == len(whole) else None


class Step(Struct, frozen=True):
    """One piece of any chat of a shape: the template's own `text`, or all of a part, or that
    trimmed."""

    text: str
    part: int | None = None
    is_trimmed: bool = False


def steps_of(marked: str, parts: int) -> tuple[Step, ...] | None:
    """What becomes of each part, from a rendering of opaque texts; None if one stands there twice.

    Cost: O(text).
    """
    steps: list[Step] = []
    start, seen = 0, set()
    for match in _OPAQUE.finditer(marked):
        part = int(match[1])
        if part in seen or part >= parts:
            return None
        seen.add(part)
        steps.append(Step(marked[start : match.start()]))
        steps.append(Step("", part, bool(match[2])))
        start = match.end()
    return (*steps, Step(marked[start:]))


def _split(marked: str, parts: Sequence[TemplatePart]) -> Iterator[tuple[str, int, int | None]]:
    """(the template's text, where it begins, the part behind it)."""
    start = 0
    for match in _MARK.finditer(marked):
        part, end, after = int(match[1]), match.start(), match.end()
        if parts[part].is_call and marked[start:end].endswith('"') and marked[after:][:1] == '"':
            # An object of arguments stands for itself; a mark in its place is a quoted string.
            end, after = end - 1, after + 1
        yield marked[start:end], start, part
        start = after
    yield marked[start:], start, None


def _variants(part: TemplatePart) -> Iterator[str]:
    """The likeliest first."""
    text = part.text or ""
    yield text
    if not part.is_call:
        yield from (text.strip(), text.rstrip(), text.lstrip())
        yield json.dumps(text, ensure_ascii=False)[1:-1]


def common(first: str, second: str) -> int:
    """How many characters two texts begin with in common. O(log) comparisons."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def outside_words(text: str, at: int, words: Collection[str]) -> int:
    """`at`, or the beginning of the word that it lies within."""
    for word in words:
        found = text.find(word, max(0, at - len(word) + 1), at + len(word) - 1)
        if 0 <= found < at < found + len(word):
            at = found
    return at
