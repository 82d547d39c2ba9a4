"""Text out of tokens as they come: whole characters, and nothing of a stop string.

Bytes that begin a character wait for its end; text that could be the beginning of a stop string
waits until it cannot. The result is the same however the text is cut into tokens: the stop string
that is complete first ends it (of two that end together, the longer). It knows no events and no
choices; `gateway.generation.output_stream` has one per choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """One choice's text. `stops`: strings that end it and are not part of it.

    `decoded` counts the characters that the tokens spelt so far, `released` those that were given
    out: what lies between them is held back. Cost: O(1) a token, but for the stop strings.
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
        """Is something of the tokens so far held back, or the beginning of a stop string?"""
        return self.decoded != self.released or bool(self._rest)

    def push(self, token_id: int) -> str:
        """The text that is certain after one more token. Nothing more once a stop was found."""
        if self.stopped_by is not None:
            return ""
        return self._advance(self._decode(self._token_bytes(token_id)))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The same for several tokens; where no stop string has to be found among them."""
        assert not self._stops, "a stop string ends the text at its own token"
        return self._advance(self._decode(b"".join(map(self._token_bytes, token_ids))))

    def finish(self) -> str:
        """What was held back: no more tokens come."""
        if self.stopped_by is not None:
            return ""
        text = self._advance(self._decode(b"", is_last=True))
        rest, self._held = self._held, ""
        self.released += len(rest)
        return text + rest

    def _decode(self, new: bytes, *, is_last: bool = False) -> str:
        """Whole characters; the beginning of one waits for its other bytes."""
        data = self._rest + new if self._rest else new
        text, used = codecs.utf_8_decode(data, "replace", is_last)
        self._rest = data[used:]
        return text

    def _advance(self, new: str) -> str:
        self.decoded += len(new)
        text = self._certain(new) if self._stops else new
        self.released += len(text)
        return text

    def _certain(self, new: str) -> str:
        text = self._held + new
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many last characters of `text` are the first of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
