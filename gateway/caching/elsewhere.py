"""Was the same said where this call may not read? Then a miss has a cause of its own.

What a tenant wrote is found again by its words, before any template or tokenizer: in another
workspace or partition, under another template or model. A tenant is told of its own writings and
of nobody else's. Digests alone, kept on the entries. `contract` calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec
from msgspec import Struct

from engine.api import Namespace
from gateway.caching.prefix_index import DIGEST_BYTES, Entry, EntryBook, Origin
from gateway.dialects.canonical import Boundary, Cause, Prompt, Segment, Tool

NEAREST: tuple[Cause, ...] = ("other_namespace", "template", "model")
"""Of several causes the first is told."""


class Words:
    """What a prompt says up to each boundary, as digests that are made when they are asked for.

    `places`: token counts of the boundaries at which a written prefix would be found.
    """

    def __init__(
        self, prompt: Prompt, boundaries: Sequence[Boundary], places: Sequence[int]
    ) -> None:
        self._prompt = prompt
        self._boundaries = boundaries
        self.places = places

    def upto(self, tokens: int) -> bytes:
        """All that the first `tokens` tokens say; b"" of a raw prompt. O(characters) once."""
        return self._digests.get(tokens, b"")

    def segment_behind(self, tokens: int) -> str:
        """Where in the request that stands which the first `tokens` tokens do not say in full."""
        return next((mark.path for mark in self._boundaries if mark.tokens > tokens), "")

    @cached_property
    def _digests(self) -> dict[int, bytes]:
        parts: tuple[Tool | Segment, ...] = (*self._prompt.tools, *self._prompt.segments)
        if len(parts) != len(self._boundaries):
            return {}
        running, found = hashlib.blake2b(digest_size=DIGEST_BYTES), {}
        for part, mark in zip(parts, self._boundaries, strict=True):
            running.update(msgspec.msgpack.encode(_said(part)))
            found[mark.tokens] = running.digest()
        return found


class Standing(Struct, frozen=True):
    """Who asks, and how things stand when a miss is explained."""

    namespace: Namespace
    origin: Origin
    now_s: float
    epoch: str
    honours_promises: bool
    losses: Callable[[Namespace], dict[str, int]]

    def cause(self, words: Words, entries: EntryBook, read: int) -> Cause | None:
        """Why what is said beyond `read` tokens cannot be read from here, if its writer asks."""
        said = [digest for at in words.places if at > read and (digest := words.upto(at))]
        same = (one for digest in said for one in entries.saying(self.origin.writer, digest))
        causes = {self._cause_of(entry) for entry in same if entry.is_live(self.now_s)}
        return next((cause for cause in NEAREST if cause in causes), None)

    def _cause_of(self, entry: Entry) -> Cause | None:
        if entry.key[0] == self.namespace:
            return None
        if entry.origin.model != self.origin.model:
            return "model"
        if entry.origin.template != self.origin.template:
            return "template"
        return "other_namespace" if self._is_there(entry) else None

    def _is_there(self, entry: Entry) -> bool:
        """For certain: promised, or nothing of its namespace has been lost since it was written."""
        if self.honours_promises and entry.is_promised(self.now_s):
            return True
        return entry.epoch == self.epoch and entry.losses == self.losses(entry.key[0])


def _said(part: Tool | Segment) -> tuple[object, ...]:
    if isinstance(part, Tool):
        return ("", part.name, part.description, part.parameters)
    return (part.role, part.message, part.name, part.text, part.call, part.answers)
