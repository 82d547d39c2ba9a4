"""Parse tool calls out of an answer's text, incrementally.

A call's arguments are passed on while the model still writes them. Text that only resembles a call
(broken JSON, a function that was not offered) is returned as text; text that may become a call
waits until it cannot. Where a limit ends the output inside a call, what was read of the call before
its arguments is dropped: it is markup, not text. The result does not depend on how the text is cut
into pieces. The module knows no events and no tokens; `gateway.generation.output_stream` has one
parser per choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from msgspec import Struct

from gateway.structured_output.tool_call_scanner import ToolCallScanner
from gateway.structured_output.tool_styles import ToolStyle

CALL_HEAD_CHARS_MAX = 65_536
"""Maximum length of a call before its arguments begin, in characters."""

PUSHED_CHARS_MAX = 4_096
"""Longer texts are parsed in parts: each step copies the rest of its part."""

_SPACE = " \t\r\n"


class ParsedCall(Struct, frozen=True):
    """A piece of call number `call`; the first piece has the id and the name."""

    call: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


ParsedPiece = str | ParsedCall
"""A piece of text, or of a call."""

Cut = Literal["", "limit", "stop_string"]
"""What ended an output before its model did: a limit of tokens, a stop string, or nothing."""


class ToolCallParser:
    """Parses the text of one choice. `names`: the functions that may be called.

    Cost: O(1) per character. `finish` ends the parser. `calls`: calls that have begun. `is_full`:
    the single call that was requested (`parallel` false) is complete.
    """

    def __init__(
        self,
        style: ToolStyle,
        names: Collection[str],
        make_id: Callable[[], str],
        *,
        parallel: bool = True,
    ) -> None:
        self._style = style
        self._names = frozenset(names)
        self._make_id = make_id
        self._parallel = parallel
        self._opening = style.opening.strip()
        self._closing = style.closing.strip()
        self._state: Callable[[], bool] = self._at_start if style.bare else self._in_text
        self._text = ""
        """Text that has not been parsed yet."""
        self._held: list[str] = []
        self._held_chars = 0
        """Text that was parsed and is not yet known to be text or a call, and its length."""
        self._found: list[ParsedPiece] = []
        self._scanner: ToolCallScanner | None = None
        self._in_list = False
        self._is_finishing = False
        self.calls = 0
        self.is_full = False

    def push(self, text: str) -> list[ParsedPiece]:
        """Return the pieces that are certain after more text."""
        for at in range(0, len(text) or 1, PUSHED_CHARS_MAX):
            self._text += text[at : at + PUSHED_CHARS_MAX]
            while not self.is_full and self._state():
                pass
        return self._drain()

    @property
    def is_idle(self) -> bool:
        """Whether everything was returned and no call is incomplete."""
        is_between = self._state in (self._in_text, self._after_call)
        return is_between and not self._text and not self._held

    def finish(self, cut: Cut = "") -> list[ParsedPiece]:
        """Return the pieces that were held back; no more text follows.

        In an output that was cut off, the beginning of a call is dropped; a part of the opening
        marker only at a limit, because before a stop string it was text.
        """
        found = self.push("")
        if (self.calls and self._is_cut_off()) or (cut and self._is_in_call(cut)):
            return found
        self._is_finishing = True
        found += self.push("")
        if not self.is_full:
            self._emit_held()
            self._emit_text(self._text)
            self._consume(len(self._text))
        return found + self._drain()

    # -- states: each returns whether it has more to parse ----------------------------------------

    def _at_start(self) -> bool:
        """Only white space so far: an object here may be a call without a marker."""
        self._skip_space()
        if not self._text:
            return False
        if self._text[0] == "{":
            return self._begin_call()
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        self._emit_held()
        at = self._text.find(self._opening)
        if at < 0:
            keep = 0 if self._is_finishing else overlap(self._text, self._opening)
            if len(self._text) > keep:
                text = self._text[: len(self._text) - keep]
                self._emit_text(text)
                self._consume(len(text))
            return False
        if at:
            self._emit_text(self._text[:at])
            self._consume(at)
        self._hold(len(self._opening))
        self._state = self._before_list if self._style.listed else self._before_object
        return True

    def _before_list(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        if self._text[0] != "[":
            return self._reject_call()
        self._hold(1)
        self._in_list = True
        self._state = self._before_object
        return True

    def _before_object(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        return self._begin_call() if self._text[0] == "{" else self._reject_call()

    def _begin_call(self) -> bool:
        self._scanner = ToolCallScanner()
        self._state = self._in_object
        return True

    def _in_object(self) -> bool:
        scanner = self._scanner
        assert scanner is not None, "an object is read by a scanner"
        had_begun = scanner.has_begun
        used = scanner.push(self._text)
        self._hold(used)
        if not had_begun:
            if scanner.is_broken or self._held_chars > CALL_HEAD_CHARS_MAX:
                return self._reject_call()
            if scanner.has_begun:
                if scanner.name not in self._names:
                    return self._reject_call()
                self._found.append(ParsedCall(self.calls, self._make_id(), scanner.name))
                self.calls += 1
        if scanner.has_begun:
            self._drop_held()
            arguments = scanner.take()
            if arguments:
                self._found.append(ParsedCall(self.calls - 1, arguments=arguments))
        if not (scanner.is_over or scanner.is_broken):
            return False
        self._scanner = None
        self._state = self._after_object
        self.is_full = not self._parallel
        return True

    def _after_object(self) -> bool:
        """After an object: the closing marker, the list's next object, or other text."""
        self._skip_space()
        if not self._text:
            return False
        if self._in_list:
            if self._text[0] == ",":
                self._hold(1)
                self._state = self._before_object
                return True
            self._in_list = False
            if self._text[0] == "]":
                self._drop_held()
                self._consume(1)
        elif self._closing:
            if self._text.startswith(self._closing):
                return self._close()
            if not self._is_finishing and self._closing.startswith(self._text):
                return False
        self._state = self._after_call
        return True

    def _is_cut_off(self) -> bool:
        """Whether the held text after a call begins a marker or another call."""
        if self._state == self._after_object:
            return self._closing.startswith(self._text)
        if self._state == self._after_call:
            return self._opening.startswith(self._text)
        return self._state != self._in_text

    def _is_in_call(self, cut: Cut) -> bool:
        """Whether the held text is the beginning of a call that was cut off."""
        if self._state == self._in_text:
            return cut == "limit"
        if self._state == self._in_object and not self._has_opening():
            scanner = self._scanner
            assert scanner is not None, "an object is read by a scanner"
            return any(name.startswith(scanner.name_so_far) for name in self._names)
        return self._state in (self._before_list, self._before_object, self._in_object)

    def _has_opening(self) -> bool:
        return "".join(self._held[:2]).lstrip(_SPACE).startswith(self._opening)

    def _close(self) -> bool:
        self._drop_held()
        self._consume(len(self._closing))
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        """Between calls: white space or a separator may follow; anything else is text."""
        self._skip_space()
        if self._style.bare and self._text[:1] in (";", ","):
            self._hold(1)
            self._skip_space()
        if not self._text:
            return False
        if self._style.bare and self._text[0] == "{":
            return self._begin_call()
        if not self._is_finishing and len(self._text) < len(self._opening):
            if self._opening.startswith(self._text):
                return False
        elif self._text.startswith(self._opening):
            self._drop_held()
        self._state = self._in_text
        return True

    # -- pieces ---------------------------------------------------------------------------------

    def _reject_call(self) -> bool:
        """Return the held text as text, and parse the rest afresh."""
        self._scanner, self._in_list = None, False
        self._emit_held()
        self._state = self._in_text
        return True

    def _skip_space(self) -> None:
        self._hold(len(self._text) - len(self._text.lstrip(_SPACE)))

    def _hold(self, chars: int) -> None:
        if chars:
            self._held.append(self._text[:chars])
            self._held_chars += chars
            self._consume(chars)

    def _consume(self, chars: int) -> None:
        self._text = self._text[chars:]

    def _emit_text(self, text: str) -> None:
        if text:
            self._found.append(text)

    def _emit_held(self) -> None:
        if self._held:
            self._found.append("".join(self._held))
            self._drop_held()

    def _drop_held(self) -> None:
        self._held, self._held_chars = [], 0

    def _drain(self) -> list[ParsedPiece]:
        found, self._found = self._found, []
        return found


def overlap(text: str, marker: str) -> int:
    """Return how many last characters of `text` are the first characters of `marker`."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0
