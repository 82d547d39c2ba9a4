"""The engine's own counters: what `Stats` reports beside the cache's.

Counters only grow. It decides nothing; core feeds it.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.api import Namespace, NamespaceStats, Stats
from engine.cache import NamespaceUse, PrefixCache
from engine.scheduler.request_table import RequestTable, RequestTotals
from engine.scheduler.scheduler import Scheduler

SMOOTHING = 0.1
"""How much the latest step counts in the rates."""


class EngineStats:
    """Totals since the start of the epoch, and smoothed rates."""

    def __init__(self) -> None:
        self.step = 0
        self.failed_steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.output_tokens = 0
        self.unneeded_tokens = 0
        self._stepped_at_s = float("-inf")
        self._step_s = 0.0
        self._prefill_per_s = 0.0

    def forget_tokens(self) -> None:
        """Count tokens from zero: what proved the engine alive was nobody's, and whoever compares
        these counts with a ledger must find the same."""
        self.prompt_tokens = self.cached_tokens = 0
        self.computed_tokens = self.recomputed_tokens = self.output_tokens = 0
        self.unneeded_tokens = 0

    def needed(self, drawn: int, most: int) -> int:
        """Of the tokens that a sample has drawn, those before its end; the others are counted."""
        self.unneeded_tokens += max(0, drawn - most)
        return min(drawn, most)

    def next_step(self) -> int:
        """The number of the step about to be launched, from 1."""
        self.step += 1
        return self.step

    def stepped(self, launched_at_s: float, now_s: float, prefill_tokens: int) -> None:
        """A step has been collected; `prefill_tokens` of it were not the last of a sequence.

        A step's time runs from its launch, or from the end of the one before where they overlap.
        """
        elapsed_s = now_s - max(launched_at_s, self._stepped_at_s)
        self._stepped_at_s = now_s
        if elapsed_s > 0:
            self._step_s = _smooth(self._step_s, elapsed_s)
            if prefill_tokens > 0:
                self._prefill_per_s = _smooth(self._prefill_per_s, prefill_tokens / elapsed_s)

    def stats(
        self,
        call_id: int,
        cache: PrefixCache,
        scheduler: Scheduler,
        roster: RequestTable,
        names: Iterable[Namespace],
    ) -> Stats:
        """Everything known now, of these namespaces alone. O(names)."""
        held = cache.stats()
        here, running = roster.tally, scheduler.running.tally
        return Stats(
            call_id=call_id,
            step=self.step,
            blocks=held.blocks,
            free_blocks=held.free,
            cached_blocks=held.cached,
            pinned_blocks=held.pinned,
            waiting=here.requests - running.requests,
            running=running.requests,
            waiting_tokens=here.tokens - running.tokens,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            computed_tokens_total=self.computed_tokens,
            output_tokens_total=self.output_tokens,
            unneeded_tokens_total=self.unneeded_tokens,
            evicted_blocks_total=held.evicted_blocks_total,
            expired_blocks_total=held.expired_blocks_total,
            copied_blocks_total=held.copied_blocks_total,
            preemptions_total=scheduler.preemptions,
            steps_per_s=1 / self._step_s if self._step_s > 0 else 0.0,
            prefill_tokens_per_s=self._prefill_per_s,
            changed=tuple(_told(cache.use(name), here, running) for name in names),
        )


def _told(use: NamespaceUse, here: RequestTotals, running: RequestTotals) -> NamespaceStats:
    runs = running.of(use.namespace)
    return NamespaceStats(
        namespace=use.namespace,
        blocks=use.blocks,
        pinned_blocks=use.pinned,
        running=runs,
        waiting=here.of(use.namespace) - runs,
        promised_by_class=use.promised,
    )


def _smooth(before: float, latest: float) -> float:
    """The first value counts whole: an average that starts at nothing lies for ten steps."""
    return before + SMOOTHING * (latest - before) if before > 0 else latest
