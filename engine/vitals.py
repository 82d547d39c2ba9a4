"""The engine's own counters: what `Stats` reports beside the cache's.

Counters only grow. It decides nothing; core feeds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.api import Namespace, NamespaceStats, Stats
from engine.cache import NamespaceUse, PrefixCache
from engine.scheduler import Scheduler
from engine.sequence import Work

SMOOTHING = 0.1
"""How much the latest step counts in the rates."""


Demand = tuple[int, int]
"""Requests of a namespace that run, and that wait."""

IDLE: Demand = (0, 0)


class Vitals:
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
        self._demand: dict[Namespace, Demand] = {}
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

    def take_changed(self, cache: PrefixCache, works: Iterable[Work]) -> set[Namespace]:
        """Namespaces of which other numbers are to be told than at the last call. O(changed +
        requests)."""
        before, self._demand = self._demand, _demand(works)[0]
        changed = {name for name, demand in self._demand.items() if before.get(name) != demand}
        return changed | (before.keys() - self._demand.keys()) | cache.take_changed()

    def stats(
        self,
        call_id: int,
        cache: PrefixCache,
        scheduler: Scheduler,
        works: Iterable[Work],
        names: Iterable[Namespace],
    ) -> Stats:
        """Everything known now, of these namespaces alone. O(names + requests)."""
        held = cache.stats()
        demands, waiting_tokens = _demand(works)
        return Stats(
            call_id=call_id,
            step=self.step,
            blocks=held.blocks,
            free_blocks=held.free,
            cached_blocks=held.cached,
            pinned_blocks=held.pinned,
            waiting=sum(waiting for _, waiting in demands.values()),
            running=sum(running for running, _ in demands.values()),
            waiting_tokens=waiting_tokens,
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
            changed=tuple(_told(cache.use(name), demands.get(name, IDLE)) for name in names),
        )


def _demand(works: Iterable[Work]) -> tuple[dict[Namespace, Demand], int]:
    """Requests by namespace, and the prompt tokens of those that wait."""
    running: Counter[Namespace] = Counter()
    waiting: Counter[Namespace] = Counter()
    waiting_tokens = 0
    for work in works:
        namespace = work.request.grant.namespace
        if any(sequence.table is not None for sequence in work.sequences):
            running[namespace] += 1
        else:
            waiting[namespace] += 1
            waiting_tokens += len(work.request.tokens)
    names = running.keys() | waiting.keys()
    return {name: (running[name], waiting[name]) for name in names}, waiting_tokens


def _told(use: NamespaceUse, demand: Demand) -> NamespaceStats:
    running, waiting = demand
    return NamespaceStats(
        namespace=use.namespace,
        blocks=use.blocks,
        pinned_blocks=use.pinned,
        running=running,
        waiting=waiting,
        promised_by_class=use.promised,
    )


def _smooth(before: float, latest: float) -> float:
    """The first value counts whole: an average that starts at nothing lies for ten steps."""
    return before + SMOOTHING * (latest - before) if before > 0 else latest
