"""Grammar constraints of live requests: submitted, attached to samples, advanced, turned into
masks.

Core uses this module for everything about constrained output. It knows sequences and matchers, and
neither steps nor blocks. Masks are computed before a step is planned; on a device the previous step
runs meanwhile. A slow mask waits for its turn, and its sample with it: slow masks together get a
bounded share of the time, so a grammar made to be slow slows only its own request.
"""

from __future__ import annotations

from collections import abc
from typing import Final

import numpy as np

from engine.api import Clock, Erase, Request
from engine.errors import EngineError, RequestRefused
from engine.grammar.compiler import GrammarSource
from engine.grammar.grammar import CompiledGrammar, MaskFiller, without_end_tokens
from engine.plan import Mask
from engine.scheduler.sequence import Sequence

SLOW_S: Final = 0.002
"""Seconds that a mask computation may always take."""
QUICK_ROW_S: Final = 0.0003
"""Further seconds per mask. A computation that takes longer than both together has a slow mask."""

SLOW_SHARE: Final = 0.25
"""The fraction of the elapsed time that slow masks may use."""
CREDIT_S_MAX: Final = 0.05
"""The most unused time, in seconds, that slow masks may save up."""

GRAMMAR_FAILURES = {
    "grammar_dead_end": "No token of this model can continue the text under the grammar.",
    "grammar_too_big": "The grammar became too large during generation.",
}


class Constraints:
    """The grammars of live requests. Without a `source`, requests that have a grammar are
    refused.
    """

    def __init__(
        self, source: GrammarSource | None = None, filler: MaskFiller | None = None
    ) -> None:
        self._source = source
        self._filler = filler or MaskFiller()
        self._pending: dict[int, Sequence] = {}
        self._credit_s = CREDIT_S_MAX
        self._filled_at_s = float("inf")

    def submit(self, request: Request) -> None:
        """Submit the request's grammar for compilation, if it has one. Raises EngineError."""
        if request.grammar is None:
            return
        if self._source is None:
            raise RequestRefused("grammar_unsupported", "This model does not support grammars.")
        namespace = request.grant.namespace
        self._source.submit(request.request_id, request.turn_payer, namespace, request.grammar)

    def release(self, request: Request) -> None:
        """Release the grammar of a request that has ended."""
        if request.grammar is not None and self._source is not None:
            self._source.cancel(request.request_id)

    def erase(self, call: Erase) -> None:
        """Forget the grammars compiled for an erased namespace: their text is the
        namespace's data.
        """
        if self._source is not None and call.lease_id is None and call.tokens is None:
            self._source.erase(call.namespace)

    def close(self) -> None:
        """Stop compiling; no request follows."""
        if self._source is not None:
            self._source.close()

    def take_ready(self) -> list[tuple[str, CompiledGrammar | EngineError]]:
        """Return the requests with a grammar that was compiled, or refused, since the last call."""
        return [] if self._source is None else self._source.take_ready()

    def attach_matcher(self, sequence: Sequence) -> str:
        """Put a sample at the start of its request's compiled grammar, or behind the output that it
        resumes; return the error code of a request that fails there, or ""."""
        compiled = sequence.parent.compiled
        if compiled is None:
            return ""
        sequence.matcher = compiled.matcher.fork()
        sequence.mask = compiled.first_mask
        if sequence.parent.request.min_tokens > 1:
            sequence.mask = without_end_tokens(compiled.first_mask, sequence.matcher.vocabulary)
        for token_id in sequence.tokens[sequence.prompt_tokens :]:
            if code := self.consume(sequence, token_id):
                return code
        return ""

    def consume(self, sequence: Sequence, token_id: int) -> str:
        """Advance a sample's matcher by one token; return the error code of a failed request, or
        "".

        The sample has no mask from here until the next `fill_masks`.
        """
        matcher = sequence.matcher
        if matcher is None:
            return ""
        sequence.mask = None
        if matcher.consume(token_id):
            self._pending[sequence.sequence_id] = sequence
            return ""
        self._note_size(sequence, matcher.failure)
        return matcher.failure or "grammar_dead_end"

    def follow(
        self, sequence: Sequence, drafts: abc.Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[Mask, ...]]:
        """Return the drafts up to the first that the sample's grammar forbids, and the mask behind
        each; without a grammar, all of them. Tens of microseconds a draft; none for slow masks.
        """
        if sequence.matcher is None:
            return tuple(drafts), ()
        if sequence.has_slow_mask:
            return (), ()
        matcher, masks = sequence.matcher.fork(), list[Mask]()
        for number, token_id in enumerate(drafts, 1):
            if not matcher.consume(token_id) or matcher.is_complete:
                break
            outputs = sequence.output_tokens + number
            suppress = [outputs + 1 < sequence.parent.request.min_tokens]
            (mask,) = self._filler.fill([matcher], suppress)
            if not mask.any():
                break
            masks.append(mask)
        return tuple(drafts[: len(masks)]), tuple(masks)

    def is_complete(self, sequence: Sequence) -> bool:
        """Return whether the sample's text is complete, so that nothing can follow."""
        return sequence.matcher is not None and sequence.matcher.is_complete

    @property
    def has_pending_masks(self) -> bool:
        """Return whether a sample waits for a mask."""
        return bool(self._pending)

    def fill_masks(self, clock: Clock, *, is_idle: bool) -> list[tuple[Sequence, str]]:
        """Compute the masks after new tokens; return the samples that cannot continue, with error
        codes.

        Tens of microseconds per sample with a new token. Slow masks wait while their share of the
        time is used up, unless the engine `is_idle` without them. Changes the sequences' masks.
        """
        now_s = clock()
        earned_s = SLOW_SHARE * max(0.0, now_s - self._filled_at_s)
        self._credit_s, self._filled_at_s = min(CREDIT_S_MAX, self._credit_s + earned_s), now_s
        if not self._pending:
            return []
        pending = [sequence for sequence in self._pending.values() if not sequence.is_ended]
        self._pending.clear()
        quick = [sequence for sequence in pending if not sequence.has_slow_mask]
        lost = self._fill_rows(quick, clock)
        is_idle = is_idle and not quick
        for sequence in pending:
            if not sequence.has_slow_mask or sequence.mask is not None:
                continue
            if self._credit_s > 0 or is_idle:
                lost += self._fill_rows([sequence], clock)
                is_idle = False
            else:
                self._pending[sequence.sequence_id] = sequence
        return lost

    def _fill_rows(
        self, sequences: abc.Sequence[Sequence], clock: Clock
    ) -> list[tuple[Sequence, str]]:
        following = [(s, s.matcher) for s in sequences if s.matcher is not None]
        if not following:
            return []
        suppress_end = [s.output_tokens + 1 < s.parent.request.min_tokens for s, _ in following]
        began_s = clock()
        masks = self._filler.fill([matcher for _, matcher in following], suppress_end)
        took_s = clock() - began_s
        is_slow = took_s > SLOW_S + QUICK_ROW_S * len(following)
        if following[0][0].has_slow_mask:
            self._credit_s -= took_s
        lost: list[tuple[Sequence, str]] = []
        alive = np.any(masks, axis=1).tolist()
        for (sequence, matcher), mask, is_alive in zip(following, masks, alive, strict=True):
            sequence.mask, sequence.has_slow_mask = mask, is_slow
            if not is_alive:
                lost.append((sequence, matcher.failure or "grammar_dead_end"))
                self._note_size(sequence, matcher.failure)
        return lost

    def _note_size(self, sequence: Sequence, code: str) -> None:
        request = sequence.parent.request
        if code == "grammar_too_big" and self._source is not None and request.grammar is not None:
            self._source.mark_too_big(request.grant.namespace, request.grammar)
