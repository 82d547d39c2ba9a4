"""Grammars in the course of a request: asked for, begun, followed, and masks made of them.

Core's hand for everything about constrained output; it knows sequences and matchers, and neither
steps nor blocks. Masks are made before a step is planned, which on a device is while the one before
it runs. One that takes long waits for its turn, and its sample with it: such masks together get a
share of the time, so that a grammar made to be slow is slow for its own request.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Final

import numpy as np

from engine.api import Clock, Erase, Request
from engine.errors import EngineError, RequestRefused
from engine.grammar.compiler import GrammarSource
from engine.grammar.grammar import Compiled, MaskFiller, without_end
from engine.scheduler.sequence import Sequence

SLOW_S: Final = 0.002
QUICK_ROW_S: Final = 0.0003
"""A filling that takes longer than the first, and the second for every row, has a slow one."""

SLOW_SHARE: Final = 0.25
CREDIT_S_MAX: Final = 0.05
"""Slow masks get so much of the time that passes, and may have saved up so much."""

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
        self._behind: dict[int, Sequence] = {}
        self._credit_s = CREDIT_S_MAX
        self._filled_at_s = float("inf")

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

    def erase(self, call: Erase) -> None:
        """With a whole namespace goes what was compiled for it: its schemas are its words."""
        if self._source is not None and call.lease_id is None and call.tokens is None:
            self._source.erase(call.namespace)

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
        """Follow one token; says with which code the request has failed, if it has.

        Its sample has no mask from here until the next `fill`.
        """
        matcher = sequence.matcher
        if matcher is None:
            return ""
        sequence.mask = None
        if matcher.consume(token_id):
            self._behind[sequence.sequence_id] = sequence
            return ""
        self._note_size(sequence, matcher.failure)
        return matcher.failure or "grammar_dead_end"

    def is_complete(self, sequence: Sequence) -> bool:
        """Is its text whole, with nothing left to come?"""
        return sequence.matcher is not None and sequence.matcher.is_complete

    @property
    def is_behind(self) -> bool:
        """Does anybody wait for a mask?"""
        return bool(self._behind)

    def fill(self, clock: Clock, *, is_idle: bool) -> list[tuple[Sequence, str]]:
        """Say what may follow the tokens that came, and for whom nothing may, with the code.

        Tens of microseconds for each sample with a new token. Slow ones wait while their share of
        the time is used up, unless the engine `is_idle` without them. Changes masks.
        """
        now_s = clock()
        earned_s = SLOW_SHARE * max(0.0, now_s - self._filled_at_s)
        self._credit_s, self._filled_at_s = min(CREDIT_S_MAX, self._credit_s + earned_s), now_s
        if not self._behind:
            return []
        behind = [sequence for sequence in self._behind.values() if not sequence.is_ended]
        self._behind.clear()
        quick = [sequence for sequence in behind if not sequence.is_slow]
        lost = self._fill(quick, clock)
        is_idle = is_idle and not quick
        for sequence in behind:
            if not sequence.is_slow or sequence.mask is not None:
                continue
            if self._credit_s > 0 or is_idle:
                lost += self._fill([sequence], clock)
                is_idle = False
            else:
                self._behind[sequence.sequence_id] = sequence
        return lost

    def _fill(self, sequences: Several[Sequence], clock: Clock) -> list[tuple[Sequence, str]]:
        following = [(s, s.matcher) for s in sequences if s.matcher is not None]
        if not following:
            return []
        hold_end = [s.output_tokens + 1 < s.work.request.min_tokens for s, _ in following]
        began_s = clock()
        masks = self._filler.fill([matcher for _, matcher in following], hold_end)
        took_s = clock() - began_s
        is_slow = took_s > SLOW_S + QUICK_ROW_S * len(following)
        if following[0][0].is_slow:
            self._credit_s -= took_s
        lost: list[tuple[Sequence, str]] = []
        alive = np.any(masks, axis=1).tolist()
        for (sequence, matcher), mask, is_alive in zip(following, masks, alive, strict=True):
            sequence.mask, sequence.is_slow = mask, is_slow
            if not is_alive:
                lost.append((sequence, matcher.failure or "grammar_dead_end"))
                self._note_size(sequence, matcher.failure)
        return lost

    def _note_size(self, sequence: Sequence, code: str) -> None:
        request = sequence.work.request
        if code == "grammar_too_big" and self._source is not None and request.grammar is not None:
            self._source.drop(request.grant.namespace, request.grammar)
