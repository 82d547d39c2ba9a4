"""Tool calls out of an answer's text, as it comes.

A call's arguments are passed on while the model still writes them. What only looks like a call
(broken JSON, a function that was not offered) comes out as the text that it is; text that may yet
become a call waits until it cannot. However the text is cut into pieces, the same is found. It
knows no events and no tokens; `gateway.generation.choice` has one per choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec import Struct

from gateway.structured_output.tool_call_scanner import ToolCallScanner
from gateway.structured_output.tool_styles import ToolStyle

ATTEMPT_SIGNS_MAX = 65_536
"""No call is this long before its arguments begin."""

_SPACE = " \t\r\n"


class ParsedText(Struct, frozen=True):
    """Text; `start`: where it stood in what was pushed."""

    text: str
    start: int


class ParsedCall(Struct, frozen=True):
    """More of call number `call`; its first piece has the id and the name."""

    call: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


Found = ParsedText | ParsedCall


class ToolCallParser:
    """One choice's text. `names`: of the functions that may be called.

    Cost: O(1) a character. After `finish` it is used up. `calls`: how many began. `is_full`: the
    one call that was wanted (`parallel` false) is whole.
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
        """Not looked at yet."""
        self._raw = ""
        """Looked at, and neither given out nor a call for certain."""
        self._at = 0
        """Where `_text` begins, counted from the first character ever pushed."""
        self._found: list[Found] = []
        self._scanner: ToolCallScanner | None = None
        self._in_list = False
        self._ends = False
        self.calls = 0
        self.is_full = False

    def push(self, text: str) -> list[Found]:
        """What is certain now."""
        self._text += text
        while not self.is_full and self._state():
            pass
        found, self._found = self._found, []
        return found

    @property
    def is_idle(self) -> bool:
        """Has all been given out, with no call half read?"""
        is_between = self._state in (self._in_text, self._after_call)
        return is_between and not self._text and not self._raw

    def finish(self) -> list[Found]:
        """What was held back: no more text comes."""
        found = self.push("")
        if self.calls and self._is_cut_off():
            return found
        self._ends = True
        found += self.push("")
        if not self.is_full:
            self._say_raw()
            self._say(self._text)
            self._take(len(self._text))
        return found + self._drain()

    # -- states: each says whether there is more to look at ---------------------------------------

    def _at_start(self) -> bool:
        """Nothing but space has come: an object here may be a call without a marker."""
        self._skip_space()
        if not self._text:
            return False
        if self._text[0] == "{":
            return self._begin_call()
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        self._say_raw()
        at = self._text.find(self._opening)
        if at < 0:
            keep = 0 if self._ends else _overlap(self._text, self._opening)
            if len(self._text) > keep:
                text = self._text[: len(self._text) - keep]
                self._say(text)
                self._take(len(text))
            return False
        if at:
            self._say(self._text[:at])
            self._take(at)
        self._hold(len(self._opening))
        self._state = self._before_list if self._style.listed else self._before_object
        return True

    def _before_list(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        if self._text[0] != "[":
            return self._no_call()
        self._hold(1)
        self._in_list = True
        self._state = self._before_object
        return True

    def _before_object(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        return self._begin_call() if self._text[0] == "{" else self._no_call()

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
            if scanner.is_broken or len(self._raw) > ATTEMPT_SIGNS_MAX:
                return self._no_call()
            if scanner.has_begun:
                if scanner.name not in self._names:
                    return self._no_call()
                self._found.append(ParsedCall(self.calls, self._make_id(), scanner.name))
                self.calls += 1
        if scanner.has_begun:
            self._raw = ""
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
        """Up to the closing marker, the list's next object, or what else there is."""
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
                self._raw = ""
                self._take(1)
        elif self._closing:
            if self._text.startswith(self._closing):
                return self._close()
            if not self._ends and self._closing.startswith(self._text):
                return False
        self._state = self._after_call
        return True

    def _is_cut_off(self) -> bool:
        """Behind a call: is what was held the beginning of a marker, or of one call more?"""
        if self._state == self._after_object:
            return self._closing.startswith(self._text)
        if self._state == self._after_call:
            return self._opening.startswith(self._text)
        return self._state != self._in_text

    def _close(self) -> bool:
        self._raw = ""
        self._take(len(self._closing))
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        """Between calls there may be space or a separator; anything else is text."""
        self._skip_space()
        if self._style.bare and self._text[:1] in (";", ","):
            self._hold(1)
            self._skip_space()
        if not self._text:
            return False
        if self._style.bare and self._text[0] == "{":
            return self._begin_call()
        if not self._ends and len(self._text) < len(self._opening):
            if self._opening.startswith(self._text):
                return False
        elif self._text.startswith(self._opening):
            self._raw = ""
        self._state = self._in_text
        return True

    # -- pieces ---------------------------------------------------------------------------------

    def _no_call(self) -> bool:
        """It was text after all; what stands behind it is looked at afresh."""
        self._scanner, self._in_list = None, False
        self._say_raw()
        self._state = self._in_text
        return True

    def _skip_space(self) -> None:
        self._hold(len(self._text) - len(self._text.lstrip(_SPACE)))

    def _hold(self, signs: int) -> None:
        self._raw += self._text[:signs]
        self._take(signs)

    def _take(self, signs: int) -> None:
        self._text = self._text[signs:]
        self._at += signs

    def _say(self, text: str) -> None:
        if text:
            self._found.append(ParsedText(text, self._at))

    def _say_raw(self) -> None:
        if self._raw:
            self._found.append(ParsedText(self._raw, self._at - len(self._raw)))
            self._raw = ""

    def _drain(self) -> list[Found]:
        found, self._found = self._found, []
        return found


def _overlap(text: str, marker: str) -> int:
    """How many last characters of `text` are the first of `marker`."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0
