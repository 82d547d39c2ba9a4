"""The engine's counters, which `Stats` reports together with the cache's.

Counters only grow. This module decides nothing; core updates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.api import EndedCounts, Namespace, Payer, Usage
from engine.cache import NamespaceUse, PrefixCache
from engine.levels.levels import Levels
from engine.scheduler.request_table import RequestTable, RequestTotals
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import ActiveRequest
from engine.scheduler.step_cost import StepCost, StepWork
from engine.statistics import LevelStats, LoadReport, NamespaceStats, Stats

SMOOTHING = 0.1
"""The weight of the latest step in the smoothed rates."""

WAIT_S_MIN = 1.0
"""The shortest wait that is reported, in seconds."""

DECODES_PER_RECORD = 8
"""One in so many steps without a prompt is recorded for the cost of steps."""


class EngineStats:
    """Totals since the start of the epoch, and smoothed rates.

    `levels_off`: reported for levels that are configured and could not be opened.
    """

    def __init__(self, step_cost: StepCost) -> None:
        self.step_cost = step_cost
        self.levels_off: tuple[LevelStats, ...] = ()
        self.step = 0
        self.reset()

    def reset(self) -> None:
        """Forget all steps but for their number.

        The smoke test's tokens belong to no tenant, and the counters must equal the ledger's sums;
        its step is slower than any other.
        """
        self.prompt_tokens = self.cached_tokens = self.device_tokens = 0
        self.computed_tokens = self.output_tokens = self.unneeded_tokens = 0
        self.abandoned = 0, 0, 0
        self._stepped_at_s = float("-inf")
        self._step_s = self._prefill_per_s = 0.0
        self.step_cost.reset()

    def uncount(self, usage: Usage) -> None:
        """Take back what was counted of a repeated smoke test's tokens in this step."""
        self.computed_tokens -= usage.computed_tokens
        self.output_tokens -= usage.output_tokens

    def count_abandoned(self, active: ActiveRequest) -> None:
        """Count the tokens of a request whose connection has left, or that is no client's, if it
        has started.
        """
        if active.started_at_s is None:
            return
        prompt, cached, output = self.abandoned
        output += sum(one.output_tokens for one in active.sequences)
        request = active.request
        self.abandoned = (
            prompt + request.prompt_tokens,
            cached + active.cached_tokens,
            output - request.resumed_tokens,
        )

    def disown(self, ended: EndedCounts) -> None:
        """Count a request that had ended as abandoned: its end did not reach the gateway."""
        prompt, cached, output = self.abandoned
        self.abandoned = (
            prompt + ended.prompt_tokens,
            cached + ended.cached_tokens,
            output + ended.output_tokens,
        )

    def count_unneeded(self, sampled: int, most: int) -> int:
        """Return how many of `sampled` tokens come before the sample's end; count the others as
        unneeded.
        """
        self.unneeded_tokens += max(0, sampled - most)
        return min(sampled, most)

    def next_step(self) -> int:
        """Return the number of the step about to be launched, from 1."""
        self.step += 1
        return self.step

    def record_step(
        self,
        launched_at_s: float,
        now_s: float,
        prefill_tokens: int,
        work: Callable[[], StepWork],
        device_s: float,
    ) -> None:
        """Record a collected step; `prefill_tokens` of its tokens were not the last of a sequence.

        `work`: returns the step's work, if it is to be recorded. `device_s`: see `StepResult`. A
        step's time is the device's where it was measured; otherwise it runs from the launch, or
        from the end of the previous step where they overlap.
        """
        elapsed_s = now_s - max(launched_at_s, self._stepped_at_s)
        self._stepped_at_s = now_s
        if elapsed_s > 0:
            self._step_s = _smooth(self._step_s, elapsed_s)
            if prefill_tokens > 0:
                self._prefill_per_s = _smooth(self._prefill_per_s, prefill_tokens / elapsed_s)
            if prefill_tokens > 0 or self.step % DECODES_PER_RECORD == 0:
                self.step_cost.record(work(), device_s or elapsed_s)

    def wait_s(self, requests: RequestTable, turn: Payer) -> float:
        """Return the seconds until a payer's waiting requests have started, by its share of the
        prefill rate. O(payers that wait).
        """
        waiting = requests.waiting.get(turn)
        if waiting is None or self._prefill_per_s <= 0:
            return WAIT_S_MIN
        share = waiting.weight / sum(other.weight for other in requests.waiting.values())
        own_s = waiting.tokens / (self._prefill_per_s * share)
        return max(WAIT_S_MIN, min(own_s, requests.waiting_tokens / self._prefill_per_s))

    def stats(
        self,
        call_id: int,
        cache: PrefixCache,
        scheduler: Scheduler,
        requests: RequestTable,
        names: Iterable[Namespace],
    ) -> Stats:
        """Return all statistics, and those of the namespaces `names`. O(names)."""
        held = cache.stats()
        live, running = requests.totals, scheduler.running.totals
        loading = scheduler.loading
        levels = None if loading is None else loading.levels
        return Stats(
            call_id=call_id,
            step=self.step,
            blocks=held.blocks,
            free_blocks=held.free,
            cached_blocks=held.cached,
            pinned_blocks=held.pinned,
            waiting=live.requests - running.requests,
            running=running.requests,
            compiling=len(scheduler.compiling),
            waiting_tokens=live.tokens - running.tokens,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            device_tokens_total=self.device_tokens,
            computed_tokens_total=self.computed_tokens,
            output_tokens_total=self.output_tokens,
            unneeded_tokens_total=self.unneeded_tokens,
            abandoned_prompt_tokens_total=self.abandoned[0],
            abandoned_cached_tokens_total=self.abandoned[1],
            abandoned_output_tokens_total=self.abandoned[2],
            evicted_blocks_total=held.evicted_blocks_total,
            expired_blocks_total=held.expired_blocks_total,
            copied_blocks_total=held.copied_blocks_total,
            window_blocks=held.window_blocks,
            resume_gap_tokens_total=held.resume_gap_tokens_total,
            preemptions_total=scheduler.preemptions,
            steps_per_s=1 / self._step_s if self._step_s > 0 else 0.0,
            prefill_tokens_per_s=self._prefill_per_s,
            levels=(*(() if levels is None else levels.stats()), *self.levels_off),
            loading=0 if loading is None else len(loading),
            changed=tuple(
                _namespace_stats(cache.use(name), live, running, levels) for name in names
            ),
        )

    def load(
        self, cache: PrefixCache, scheduler: Scheduler, requests: RequestTable, accepted: int
    ) -> LoadReport:
        """Return the queue and the speed, as one connection sees them. O(running), and as
        `PrefixCache.stats`.
        """
        held, live, running = cache.stats(), requests.totals, scheduler.running.totals
        levels = None if scheduler.loading is None else scheduler.loading.levels
        context = running.tokens / running.requests if running.requests else 0.0
        fetching = None if levels is None else levels.fetching
        near = None if levels is None else levels.near_fetching
        return LoadReport(
            accepted=accepted,
            waiting_tokens=live.missing_tokens
            - running.missing_tokens
            + scheduler.running.prompt_tokens_left,
            rows=running.requests,
            waiting=live.requests - running.requests,
            free_blocks=held.free,
            promisable_blocks=held.promisable,
            prefill_tokens_per_s=self._prefill_per_s,
            step_s=self._step_s,
            row_s=self.step_cost.seconds_of_row(context),
            below_bytes_per_s=0.0 if levels is None else levels.paces["host"].bytes_per_s,
            peer_bytes_per_s=0.0 if fetching is None else fetching.pace.bytes_per_s,
            near_bytes_per_s=0.0 if near is None else near.bytes_per_s,
        )


def _namespace_stats(
    use: NamespaceUse, live: RequestTotals, running: RequestTotals, levels: Levels | None
) -> NamespaceStats:
    runs = running.requests_of(use.namespace)
    return NamespaceStats(
        namespace=use.namespace,
        blocks=use.blocks,
        pinned_blocks=use.pinned,
        running=runs,
        waiting=live.requests_of(use.namespace) - runs,
        promised_by_class=use.promised,
        host_bytes=0 if levels is None else levels.host_bytes(use.namespace),
        is_stored=levels is not None and levels.has_records(use.namespace),
        promised_below=use.below,
        promised_away=use.away,
    )


def _smooth(before: float, latest: float) -> float:
    """Return the smoothed value. The first value counts fully: a mean from zero is wrong for ten
    steps.
    """
    return before + SMOOTHING * (latest - before) if before > 0 else latest
