"""The source that drafts from recent answers of a sequence's namespace, and keeps its answer."""

from __future__ import annotations

from collections.abc import Iterable

from engine.api import Namespace
from engine.drafts.suffix_index import CONTEXT_TOKENS, SuffixIndex
from engine.scheduler.sequence import Sequence


class SuffixSource:
    """Drafts for sequences whose request may both read and write the cache; others neither draft
    from recent answers nor become one.
    """

    name = "suffix"

    def __init__(self, index: SuffixIndex | None = None) -> None:
        self.index = index or SuffixIndex()
        self._live: dict[int, Sequence] = {}

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence. O(1)."""
        if sequence.parent.may_write and sequence.parent.request.grant.read:
            self._live[sequence.sequence_id] = sequence

    def extend(self, sequence_id: int, token_ids: Iterable[int]) -> None:
        """Do nothing: the sequence has its tokens."""

    def propose(self, sequence_id: int, limit: int) -> list[int]:
        """Return at most `limit` drafts for a sequence."""
        sequence = self._live.get(sequence_id)
        if sequence is None or not sequence.parent.may_write:
            return []
        namespace = sequence.parent.request.grant.namespace
        return self.index.propose(namespace, sequence.tokens[-CONTEXT_TOKENS:], limit)

    def end(self, sequence_id: int) -> None:
        """Keep a sequence's answer, unless an erasure has forbidden it since. O(answer)."""
        sequence = self._live.pop(sequence_id, None)
        if sequence is None or not sequence.parent.may_write or not sequence.output_tokens:
            return
        start, tokens = sequence.prompt_tokens, sequence.tokens
        answer = tokens[start : start + sequence.output_tokens]
        context = tokens[max(0, start - CONTEXT_TOKENS) : start]
        self.index.add(sequence.parent.request.grant.namespace, context, answer)

    def erase(self, namespace: Namespace) -> None:
        """Forget the namespace's answers: what was erased may be a part of any of them. O(1)."""
        self.index.erase(namespace)
