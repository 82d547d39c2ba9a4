"""Grammars in the course of a request: asked for, begun, followed, and masks made of them.

Core's hand for everything about constrained output; it knows sequences and matchers, and neither
steps nor blocks. A mask is made when a token has arrived, not when the next step is planned: on a
device that is while the step after runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.api import Request
from engine.errors import EngineError, RequestRefused
from engine.grammar import Compiled, MaskFiller, without_end
from engine.grammar_compiler import GrammarSource
from engine.sequence import Sequence

GRAMMAR_FAILURES = {
    "grammar_dead_end": "No token of this model can go on with the text as the grammar wants it.",
    "grammar_too_big": "The grammar became too large while it was followed.",
}


class Constraints:
    """Grammars from a source; without one, requests that bring a grammar are refused."""

    def __init__(
        self, source: GrammarSource | None = None, filler: MaskFiller | None = None
    ) -> None:
        self._source = source
        self._filler = filler or MaskFiller()

    def ask(self, request: Request) -> None:
        """Have the request's grammar compiled, if it has one. Raises EngineError."""
        if request.grammar is None:
            return
        if self._source is None:
            raise RequestRefused("grammar_unsupported", "This model takes no grammar.")
        self._source.ask(request.request_id, request.grant.namespace, request.grammar)

    def forget(self, request: Request) -> None:
        """The request is over."""
        if request.grammar is not None and self._source is not None:
            self._source.forget(request.request_id)

    def close(self) -> None:
        """No request will come any more."""
        if self._source is not None:
            self._source.close()

    def ready(self) -> list[tuple[str, Compiled | EngineError]]:
        """Requests whose grammar is compiled, or refused, since last asked."""
        return [] if self._source is None else self._source.ready()

    def begin(self, sequence: Sequence) -> None:
        """Put a sample at the start of its request's grammar, once that is compiled."""
        compiled = sequence.work.compiled
        if compiled is None:
            return
        sequence.matcher = compiled.matcher.fork()
        sequence.mask = compiled.first_mask
        if sequence.work.request.min_tokens > 1:
            sequence.mask = without_end(compiled.first_mask, sequence.matcher.vocabulary)

    def consume(self, sequence: Sequence, token_id: int) -> str:
        """Follow one token; says with which code the request has failed, if it has."""
        matcher = sequence.matcher
        if matcher is None or matcher.consume(token_id):
            return ""
        self._note_size(sequence, matcher.failure)
        return matcher.failure or "grammar_dead_end"

    def is_complete(self, sequence: Sequence) -> bool:
        """Is its text whole, with nothing left to come?"""
        return sequence.matcher is not None and sequence.matcher.is_complete

    def mask(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, str]]:
        """Say what may follow the tokens just drawn, and for whom nothing may, with the code.

        Tens of microseconds for each that has a grammar. Changes their masks.
        """
        following = [(s, s.matcher) for s in sequences if s.matcher is not None and not s.is_ended]
        if not following:
            return []
        hold_end = [s.output_tokens + 1 < s.work.request.min_tokens for s, _ in following]
        masks = self._filler.fill([matcher for _, matcher in following], hold_end)
        lost: list[tuple[Sequence, str]] = []
        for (sequence, matcher), mask, is_alive in zip(
            following, masks, np.any(masks, axis=1).tolist(), strict=True
        ):
            sequence.mask = mask
            if not is_alive:
                lost.append((sequence, matcher.failure or "grammar_dead_end"))
                self._note_size(sequence, matcher.failure)
        return lost

    def _note_size(self, sequence: Sequence, code: str) -> None:
        request = sequence.work.request
        if code == "grammar_too_big" and self._source is not None and request.grammar is not None:
            self._source.drop(request.grant.namespace, request.grammar)
