"""Scan one tool call's JSON object incrementally: its name, then its arguments as they come.

The scanner buffers the name until it is complete, and arguments only while the name is unknown or
if they are written as a string. The module knows no markers; `tool_call_parser` has one scanner per
call.
"""

from __future__ import annotations

import json
from typing import Any, Literal

_ARGUMENTS = ("arguments", "parameters")
_KNOWN = ("name", "id", "type", *_ARGUMENTS)
_SPACE = " \t\r\n"


class ToolCallScanner:
    """Scans `{"name": ..., "arguments": {...}}`; members may come in either order.

    `has_begun`: the name and the beginning of the arguments are known. `is_over`: the object is
    complete. `is_broken`: the text is not a call or not JSON; scanning stops.
    """

    def __init__(self) -> None:
        self.name = ""
        self.has_begun = False
        self.is_over = False
        self.is_broken = False
        self._place: Literal["start", "first", "key", "colon", "value", "inside", "comma"] = "start"
        self._key: str | None = None
        """The member that is scanned; None while the member's name is scanned."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_streaming = False
        self._kept: list[str] = []
        self._arguments: str | None = None
        self._ready: list[str] = []

    @property
    def name_so_far(self) -> str:
        """The function's name, or what was written of it."""
        if self._key == "name" and self._place == "inside":
            return "".join(self._kept).removeprefix('"')
        return self.name

    def push(self, text: str) -> int:
        """Scan more text; return how many characters belong to the object. O(characters)."""
        at = 0
        while at < len(text) and not (self.is_over or self.is_broken):
            at = (self._scan_value if self._place == "inside" else self._scan_structure)(text, at)
        return at

    def take(self) -> str:
        """Return the arguments that were not taken yet."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _scan_structure(self, text: str, at: int) -> int:
        """Scan one character outside names and values; return the next offset."""
        char = text[at]
        if char in _SPACE:
            return at + 1
        match self._place, char:
            case "start", "{":
                self._place = "first"
            case "first" | "key", '"':
                self._open(None, char)
                return at
            case "colon", ":":
                self._place = "value"
            case "value", _:
                self._open(self._key, char)
                return at
            case "comma", ",":
                self._place = "key"
            case "first" | "comma", "}":
                self._end()
            case _:
                self.is_broken = True
        return at + 1

    def _open(self, key: str | None, char: str) -> None:
        """Begin a name or a value with this character."""
        self._key, self._place = key, "inside"
        self._depth, self._in_string, self._escaped = 0, False, False
        self._kept, self._is_streaming = [], False
        if key in _ARGUMENTS:
            self.is_broken = self.has_begun or self._arguments is not None
            if self.name and char == "{" and not self.is_broken:
                self.has_begun = self._is_streaming = True

    def _scan_value(self, text: str, at: int) -> int:
        """Scan to the end of the name, value or text; return the next offset."""
        start, is_whole = at, False
        while at < len(text) and not is_whole:
            char = text[at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    is_whole = self._depth == 0
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0 and char in ",}] \t\r\n":
                is_whole = True
                break  # a number or a literal has no closing character
            elif char in "}]":
                self._depth -= 1
                is_whole = self._depth == 0
            at += 1
        (self._ready if self._is_streaming else self._kept).append(text[start:at])
        if is_whole:
            self._close()
        return at

    def _close(self) -> None:
        """End the name or value."""
        if self._is_streaming:
            self._place = "comma"
            return
        text = "".join(self._kept)
        value = _parse_json(text)
        if self._key is None:
            self._key, self._place = (value if isinstance(value, str) else ""), "colon"
            self.is_broken = self._key not in _KNOWN
            return
        self._place = "comma"
        self.is_broken = value is _INVALID
        if self._key == "name":
            self.is_broken = not isinstance(value, str) or not value or bool(self.name)
            self.name = value if isinstance(value, str) else ""
        elif self._key in _ARGUMENTS:
            self._arguments = _object_text(text, value)
            self.is_broken = self._arguments is None
        if self.name and self._arguments is not None and not self.has_begun:
            self._begin(self._arguments)

    def _begin(self, arguments: str) -> None:
        self.has_begun = True
        self._ready.append(arguments)

    def _end(self) -> None:
        """End the object. A call may have no arguments."""
        self.is_over = bool(self.name)
        self.is_broken = not self.name
        if self.is_over and not self.has_begun:
            self._begin("{}")


_INVALID = object()


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _INVALID


def _object_text(text: str, value: Any) -> str | None:
    """Return arguments as an object's JSON, also from a string that contains it; else None."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        text, value = value, _parse_json(value)
    return text if isinstance(value, dict) else None
