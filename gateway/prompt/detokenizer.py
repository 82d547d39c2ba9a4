"""Text out of tokens as they come: whole characters, and nothing of a stop string.

Bytes that begin a character wait for its end; text that could be the beginning of a stop string
waits until it cannot. O(1) a token, but for the stop strings' lengths.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """One choice's text. `stops`: strings that end it and are not part of it."""

    def __init__(self, token_bytes: Callable[[int], bytes], stops: tuple[str, ...] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """The text that is certain after one more token. Nothing more once a stop was found."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """What was held back: no more tokens come."""
        if self.stopped_by is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many last signs of `text` are the first of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
