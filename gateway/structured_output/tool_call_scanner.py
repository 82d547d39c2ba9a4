"""One tool call's JSON object, character by character: its name, then its arguments as they come.

It keeps the name until that is whole, and arguments only while the name is unknown or where they
are written as a string. It knows no markers; `call_reader` has one per call.
"""

from __future__ import annotations

import json
from typing import Any, Literal

_ARGUMENTS = ("arguments", "parameters")
_KNOWN = ("name", "id", "type", *_ARGUMENTS)
_SPACE = " \t\r\n"


class ToolCallScanner:
    """Reads `{"name": ..., "arguments": {...}}`; members may come in either order.

    `has_begun`: the name and the beginning of the arguments are known. `is_over`: the object is
    whole. `is_broken`: it is no call, or no JSON; nothing more is read then.
    """

    def __init__(self) -> None:
        self.name = ""
        self.has_begun = False
        self.is_over = False
        self.is_broken = False
        self._place: Literal["start", "first", "key", "colon", "value", "inside", "comma"] = "start"
        self._key: str | None = None
        """Whose value is read; None while it is read itself."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._streams = False
        self._kept: list[str] = []
        self._arguments: str | None = None
        self._ready: list[str] = []

    def push(self, text: str) -> int:
        """Read on; how many characters belong to the object. O(characters)."""
        at = 0
        while at < len(text) and not (self.is_over or self.is_broken):
            at = (self._inside if self._place == "inside" else self._between)(text, at)
        return at

    def take(self) -> str:
        """Arguments that were not taken yet."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _between(self, text: str, at: int) -> int:
        """One character outside names and values; where the next stands."""
        sign = text[at]
        if sign in _SPACE:
            return at + 1
        match self._place, sign:
            case "start", "{":
                self._place = "first"
            case "first" | "key", '"':
                self._open(None, sign)
                return at
            case "colon", ":":
                self._place = "value"
            case "value", _:
                self._open(self._key, sign)
                return at
            case "comma", ",":
                self._place = "key"
            case "first" | "comma", "}":
                self._end()
            case _:
                self.is_broken = True
        return at + 1

    def _open(self, key: str | None, sign: str) -> None:
        """A name or a value begins with this character."""
        self._key, self._place = key, "inside"
        self._depth, self._in_string, self._escaped = 0, False, False
        self._kept, self._streams = [], False
        if key in _ARGUMENTS:
            self.is_broken = self.has_begun or self._arguments is not None
            if self.name and sign == "{" and not self.is_broken:
                self.has_begun = self._streams = True

    def _inside(self, text: str, at: int) -> int:
        """Up to the end of the name or value, or of the text; where the next character stands."""
        start, is_whole = at, False
        while at < len(text) and not is_whole:
            sign = text[at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif sign == "\\":
                    self._escaped = True
                elif sign == '"':
                    self._in_string = False
                    is_whole = self._depth == 0
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif self._depth == 0 and sign in ",}] \t\r\n":
                is_whole = True
                break  # a number or a word has no end of its own
            elif sign in "}]":
                self._depth -= 1
                is_whole = self._depth == 0
            at += 1
        (self._ready if self._streams else self._kept).append(text[start:at])
        if is_whole:
            self._close()
        return at

    def _close(self) -> None:
        """The name or value is whole."""
        if self._streams:
            self._place = "comma"
            return
        text = "".join(self._kept)
        value = _parsed(text)
        if self._key is None:
            self._key, self._place = (value if isinstance(value, str) else ""), "colon"
            self.is_broken = self._key not in _KNOWN
            return
        self._place = "comma"
        self.is_broken = value is _BROKEN
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
        """The object's last brace. A call may have no arguments."""
        self.is_over = bool(self.name)
        self.is_broken = not self.name
        if self.is_over and not self.has_begun:
            self._begin("{}")


_BROKEN = object()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BROKEN


def _object_text(text: str, value: Any) -> str | None:
    """Arguments as an object's JSON; None if they are none. Some models write it as a string."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        text, value = value, _parsed(value)
    return text if isinstance(value, dict) else None
