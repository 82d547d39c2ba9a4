"""Incremental detokenization: token ids to text, with stop strings removed.

Bytes that begin a character wait for the rest of the character. Text that could begin a stop string
waits until it cannot. The result does not depend on how the text is cut into tokens: the stop
string that completes first ends the text (of two that complete together, the longer one). The
module knows no events and no choices; `gateway.generation.output_stream` has one detokenizer per
choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

from gateway.structured_output.tool_call_parser import overlap


class Detokenizer:
    """The text of one choice. `stops`: strings that end the text and are not part of it.

    `decoded` counts the characters decoded so far, `released` the characters returned so far; the
    difference is held back. Cost: O(1) per token, plus the search for stop strings.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: tuple[str, ...] = ()) -> None:
        assert all(stops), "an empty stop string would end every text"
        self._token_bytes = token_bytes
        self._rest = b""
        self._stops = stops
        self._held = ""
        self.decoded = 0
        self.released = 0
        self.stopped_by: str | None = None

    @property
    def is_holding(self) -> bool:
        """Whether some decoded text or part of a character is held back."""
        return self.decoded != self.released or bool(self._rest)

    def push(self, token_id: int) -> str:
        """Return the text that one more token makes certain; "" once a stop string was found."""
        if self.stopped_by is not None:
            return ""
        return self._advance(self._decode(self._token_bytes(token_id)))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Return the text that several tokens make certain; only valid without stop strings."""
        assert not self._stops, "a stop string ends the text at its own token"
        return self._advance(self._decode(b"".join(map(self._token_bytes, token_ids))))

    def finish(self) -> str:
        """Return the text that was held back; no more tokens follow."""
        if self.stopped_by is not None or not (self._rest or self._held):
            return ""
        text = self._advance(self._decode(b"", is_last=True))
        rest, self._held = self._held, ""
        self.released += len(rest)
        return text + rest

    def _decode(self, new: bytes, *, is_last: bool = False) -> str:
        """Decode whole characters; keep the bytes of an incomplete one for the next call."""
        data = self._rest + new if self._rest else new
        text, used = codecs.utf_8_decode(data, "replace", is_last)
        self._rest = data[used:]
        return text

    def _advance(self, new: str) -> str:
        self.decoded += len(new)
        text = self._hold_back_stops(new) if self._stops else new
        self.released += len(text)
        return text

    def _hold_back_stops(self, new: str) -> str:
        text = self._held + new
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
