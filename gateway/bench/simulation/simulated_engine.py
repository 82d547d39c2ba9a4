"""An engine in simulated time: the real prefix cache, a queue, and steps that take predicted time.

It computes nothing. A request that is admitted pins its prefix in the cache and allocates its
blocks; each step commits what it would have computed, so what later requests find, and what is
evicted for them, is the cache's own doing. First come, first served: prompts go one after the
other, and one whose prefix another one is computing waits for it. Unlike the real scheduler, a
sequence takes the blocks of its whole answer when it begins, so none is preempted.

While nothing but decodes runs, many steps are taken at once; `interrupt` ends them after the one
that is under way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import chain

from engine.api import Namespace, Quota
from engine.cache import BlockTable, PrefixCache, TreeMatch
from engine.scheduler.scheduler import ALONE_AFTER_S
from engine.scheduler.step_cost import StepCost, StepWork, attended
from engine.statistics import LoadReport
from gateway.bench.simulation.engine_shape import EngineShape, step_budget
from gateway.bench.simulation.figures import GapCounts
from gateway.bench.simulation.traffic import SimulatedRequest, Stretch, tokens_of

QUOTA = Quota()
DECODES_AT_ONCE = 256
"""The most decode steps that are taken as one, with the context of their rows in the middle."""
SMOOTHING = 0.1
"""The weight of the newest step in the rate of prefills, as in the engine's own statistics."""


class SimulatedSequence:
    """A request at an engine. `tokens`: its prompt and what an engine that was lost had answered.

    `computed`: tokens whose KV is in place. `answered`: tokens of the answer so far. `waiting`:
    what it counts in the engine's waiting tokens. `followers`: those that wait for its prefix, each
    with the tokens it waits for. `fetched`: tokens of its prompt that have come from another
    engine. `answer_tokens`: of its answer here; `then`: what follows a prompt that is computed for
    another engine; `is_parted`: it is the answer to such a one.
    """

    __slots__ = (
        "answer_tokens",
        "answered",
        "cached_tokens",
        "computed",
        "fetched",
        "followers",
        "is_parted",
        "order",
        "request",
        "stretches",
        "table",
        "then",
        "tokens",
        "waiting",
    )

    def __init__(self, request: SimulatedRequest, answered: int) -> None:
        self.request = request
        self.answered = answered
        answer: tuple[Stretch, ...] = ((request.answer[0], answered),) if answered else ()
        self.stretches = (*request.prompt, *answer)
        self.tokens = tokens_of(self.stretches)
        self.order = 0
        self.computed = 0
        self.cached_tokens = 0
        self.waiting = 0
        self.fetched = 0
        self.is_parted = False
        self.answer_tokens = request.answer_tokens
        self.then: Callable[[], None] | None = None
        self.table: BlockTable | None = None
        self.followers: list[tuple[int, SimulatedSequence]] = []

    @property
    def kv_tokens(self) -> int:
        """Return the tokens whose KV is there at its end: the last one is never read."""
        return self.request.prompt_tokens + self.answer_tokens - 1


class StepEvents:
    """What a step brought: sequences that began, that have their first token here, that ended."""

    __slots__ = ("begun", "ended", "first")

    def __init__(self) -> None:
        self.begun: list[SimulatedSequence] = []
        self.first: list[SimulatedSequence] = []
        self.ended: list[SimulatedSequence] = []


class SimulatedEngine:
    """One life of an engine."""

    def __init__(
        self, shape: EngineShape, cost: StepCost, block_tokens: int, gaps: GapCounts
    ) -> None:
        """`cost`: the prices of the shape's steps. `gaps`: counts those of all answers."""
        self.shape = shape
        self.cache = PrefixCache(
            blocks=max(1, shape.kv_tokens // block_tokens), block_size=block_tokens
        )
        self.slowness = 1.0
        """By how much longer its steps take."""
        self.busy_s = 0.0
        self.computed_tokens = 0
        """Tokens of prompts that it has computed, those of lost engines' answers too."""
        self.accepted = 0
        self._cost = cost
        self._gaps = gaps
        self._queue: list[tuple[int, SimulatedSequence]] = []
        self._following = 0
        self._prefilling: list[SimulatedSequence] = []
        self._decoding: list[tuple[int, int, SimulatedSequence]] = []
        """By the step of their last token."""
        self._step = 0
        self._context = 0
        """Tokens that the decoding sequences read in a step."""
        self._pinned_tokens = 0
        self._waiting_tokens = 0
        self._prefill_per_s = 0.0
        self._shared_at_s = -math.inf
        self._namespace: Namespace | None = None
        # The step under way.
        self._slices: list[tuple[SimulatedSequence, int]] = []
        self._began_s = 0.0
        self._one_s = 0.0
        self._steps = 0

    # -- what a router may know ---------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Return whether no step is under way."""
        return not self._steps

    @property
    def sequences(self) -> int:
        """Return how many requests it has."""
        return len(self._queue) + self._following + self._running

    @property
    def _running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def queued(self) -> int:
        """Return how many requests wait to begin."""
        return len(self._queue) + self._following

    @property
    def waiting_tokens(self) -> int:
        """Return the tokens of prompts still to be computed, as far as they are known."""
        return self._waiting_tokens

    @property
    def pinned_tokens(self) -> int:
        """Return the tokens of KV that its sequences take."""
        return self._pinned_tokens

    def fits(self, request: SimulatedRequest) -> bool:
        """Return whether a request would fit if it ran alone."""
        tokens = request.prompt_tokens + request.answer_tokens
        return tokens <= self.cache.blocks * self.cache.block_size

    def load(self) -> LoadReport:
        """Return what the engine tells of its queue: as `EngineStats.load`, with what waiting
        prompts are expected to lack and what is left of those that have begun."""
        rows, free = len(self._decoding), self.cache.stats().free
        context = self._context / rows if rows else 0
        return LoadReport(
            accepted=self.accepted,
            waiting_tokens=self._waiting_tokens,
            rows=self._running,
            waiting=self.queued,
            free_blocks=free,
            prefill_tokens_per_s=self._prefill_per_s,
            row_s=self.slowness * self._cost.seconds_of_row(context),
        )

    # -- requests -----------------------------------------------------------------------------

    def submit(self, sequence: SimulatedSequence, expected_tokens: int, now_s: float) -> None:
        """Queue a sequence that fits. `expected_tokens`: what it is expected to find cached; until
        it begins, the others count as waiting.
        """
        self.accepted += 1
        sequence.order = self.accepted
        self._note_payer(sequence.request.namespace, now_s)
        self._count_waiting(sequence, len(sequence.tokens) - expected_tokens)
        heapq.heappush(self._queue, (sequence.order, sequence))

    def interrupt(self, now_s: float) -> float | None:
        """Let decodes that were taken at once end with the step that is under way; return when that
        is. None if there is nothing to shorten.
        """
        if self._slices or self._steps <= 1:
            return None
        done = math.ceil((now_s - self._began_s) / self._one_s)
        self._steps = min(self._steps, max(1, done))
        return self._began_s + self._steps * self._one_s

    def lose(self, now_s: float) -> list[SimulatedSequence]:
        """Return fresh sequences for all that it had, with what they were answered: it has died."""
        if not self._slices and self._steps:
            whole = min(self._steps - 1, int((now_s - self._began_s) / self._one_s))
            self._gaps.add(self._one_s, whole * len(self._decoding))
            self._step += whole
        lost = [
            *(sequence for _, _, sequence in self._decoding),
            *self._prefilling,
            *(sequence for _, sequence in self._queue),
        ]
        for last, _, sequence in self._decoding:
            sequence.answered = sequence.answer_tokens - (last - self._step)
        lost += [follower for one in self._prefilling for _, follower in one.followers]
        lost.sort(key=lambda sequence: sequence.order)
        return [SimulatedSequence(sequence.request, sequence.answered) for sequence in lost]

    # -- steps --------------------------------------------------------------------------------

    def begin_step(self, now_s: float, events: StepEvents) -> float | None:
        """Begin the next step, or many decodes at once; return when it ends, None without work."""
        rows = len(self._decoding)
        self._slices = []
        if self._prefilling or self._queue:
            self._take_slices(now_s, events)
        slices = self._slices
        if slices:
            work = StepWork(
                rows + len(slices),
                sum(count for _, count in slices),
                self._context,
                sum(attended(one.computed, count) for one, count in slices),
            )
            self._steps = 1
        elif rows:
            self._steps = max(1, min(self._decoding[0][0] - self._step, DECODES_AT_ONCE))
            work = StepWork(rows, 0, self._context + rows * (self._steps - 1) // 2)
        else:
            self._steps = 0
            return None
        self._began_s, self._one_s = now_s, self._cost.seconds(work) * self.slowness
        return now_s + self._steps * self._one_s

    def end_step(self, now_s: float, events: StepEvents) -> None:
        """Commit what the step under way has computed."""
        rows, steps = len(self._decoding), self._steps
        self._steps = 0
        self.busy_s += steps * self._one_s
        self._gaps.add(self._one_s, rows * steps)
        self._step += steps
        self._context += rows * steps
        prompt_tokens = 0
        for sequence, count in self._slices:
            prompt_tokens += count
            self._compute(sequence, count, now_s, events)
        if prompt_tokens:
            rate = prompt_tokens / self._one_s
            before = self._prefill_per_s
            self._prefill_per_s = before + SMOOTHING * (rate - before) if before else rate
        while self._decoding and self._decoding[0][0] <= self._step:
            self._end(heapq.heappop(self._decoding)[2], now_s, events)

    def check(self) -> None:
        """Recount queue, rows and pool; at rest nothing is pinned. O(sequences)."""
        live = [*self._prefilling, *(sequence for _, _, sequence in self._decoding)]
        assert self._pinned_tokens == sum(one.kv_tokens for one in live)
        assert self._following == sum(len(one.followers) for one in live)
        assert self._context == sum(
            one.request.prompt_tokens + one.answer_tokens - (last - self._step)
            for last, _, one in self._decoding
        )
        waiting = [*self._prefilling, *(sequence for _, sequence in self._queue)]
        waiting += [follower for one in live for _, follower in one.followers]
        assert self._waiting_tokens == sum(one.waiting for one in waiting)
        held = self.cache.stats()
        assert bool(live) == bool(held.pinned), held

    # -- internals ----------------------------------------------------------------------------

    def _take_slices(self, now_s: float, events: StepEvents) -> None:
        """Choose the prompt tokens of a step: begun prompts first, then waiting ones."""
        rows = len(self._decoding)
        is_shared = now_s - self._shared_at_s <= ALONE_AFTER_S
        decodes = StepWork(rows, 0, self._context)
        budget = step_budget(self._cost, self.shape, decodes, is_shared=is_shared)
        for sequence in chain(tuple(self._prefilling), self._admitted(now_s, events)):
            start = sequence.computed
            count = budget.fit(start, len(sequence.tokens) - start)
            if not count:
                return
            budget.spend(start, count)
            self._slices.append((sequence, count))
            if budget.is_spent:
                return

    def _admitted(self, now_s: float, events: StepEvents) -> Iterator[SimulatedSequence]:
        """Begin waiting sequences one after another, while there are slots and blocks."""
        while self._queue and self._running < self.shape.sequences_max:
            sequence = self._queue[0][1]
            found = self.cache.find(sequence.request.namespace, sequence.tokens, now_s)
            if self._follow(sequence, found):
                heapq.heappop(self._queue)
                continue
            if not self._begin(sequence, found, now_s):
                return
            heapq.heappop(self._queue)
            self._prefilling.append(sequence)
            events.begun.append(sequence)
            yield sequence

    def _begin(self, sequence: SimulatedSequence, found: TreeMatch, now_s: float) -> bool:
        """Pin a sequence's prefix and allocate its blocks; return whether there was room."""
        cache, namespace = self.cache, sequence.request.namespace
        needed = cache.blocks_to_start(namespace, QUOTA, sequence.kv_tokens, found, 0)
        if cache.available_blocks(namespace, QUOTA, found)[0] < needed and (
            self._prefilling or self._decoding
        ):
            return False
        table = cache.begin(namespace, sequence.tokens, now_s, quota=QUOTA, found=found)
        cache.take_copies()
        if not cache.grow(table, sequence.kv_tokens, now_s):
            cache.release(table, sequence.tokens, now_s, keep=False)
            assert self._prefilling or self._decoding, "a sequence that fits runs alone"
            return False
        sequence.table, sequence.computed = table, table.kv_tokens
        fetched = sequence.fetched // cache.block_size * cache.block_size
        if fetched > sequence.computed:
            sequence.computed = fetched
            cache.commit(table, sequence.tokens, fetched, now_s)
        sequence.cached_tokens = min(sequence.computed, sequence.request.prompt_tokens)
        self._count_waiting(sequence, len(sequence.tokens) - sequence.computed)
        self._pinned_tokens += sequence.kv_tokens
        return True

    def _follow(self, sequence: SimulatedSequence, found: TreeMatch) -> bool:
        """Let a sequence wait for one that computes more of its prefix than is cached, in whole
        blocks (rule *Single computation* of the cache); return whether it waits.
        """
        size, best, target = self.cache.block_size, None, found.cached_tokens
        for other in self._prefilling:
            if other.request.namespace != sequence.request.namespace:
                continue
            common = _common_blocks(sequence.tokens, other.tokens, target // size * size, size)
            if common > max(target, other.computed):
                best, target = other, common
        if best is None:
            return False
        best.followers.append((target, sequence))
        self._following += 1
        return True

    def _compute(
        self, sequence: SimulatedSequence, count: int, now_s: float, events: StepEvents
    ) -> None:
        table = sequence.table
        assert table is not None, "only a sequence that has begun has a slice"
        sequence.computed += count
        self.computed_tokens += count
        self._count_waiting(sequence, sequence.waiting - count)
        self.cache.commit(table, sequence.tokens, sequence.computed, now_s)
        is_whole = sequence.computed == len(sequence.tokens)
        if sequence.followers:
            reached = math.inf if is_whole else sequence.computed
            ready = [pair for pair in sequence.followers if pair[0] <= reached]
            sequence.followers = [pair for pair in sequence.followers if pair[0] > reached]
            self._following -= len(ready)
            for _, follower in ready:
                heapq.heappush(self._queue, (follower.order, follower))
        if not is_whole:
            return
        self._prefilling.remove(sequence)
        sequence.answered += 1
        events.first.append(sequence)
        left = sequence.answer_tokens - sequence.answered
        self._context += len(sequence.tokens) + 1
        heapq.heappush(self._decoding, (self._step + left, sequence.order, sequence))

    def _end(self, sequence: SimulatedSequence, now_s: float, events: StepEvents) -> None:
        table, request = sequence.table, sequence.request
        assert table is not None, "only a sequence that has begun ends"
        missing = request.prompt_tokens + sequence.answer_tokens - len(sequence.tokens)
        sequence.tokens += [request.answer[0]] * missing
        self._context -= len(sequence.tokens)
        self._pinned_tokens -= sequence.kv_tokens
        self.cache.commit(table, sequence.tokens, sequence.kv_tokens, now_s)
        self.cache.release(table, sequence.tokens, now_s)
        sequence.table = None
        events.ended.append(sequence)

    def _count_waiting(self, sequence: SimulatedSequence, tokens: int) -> None:
        self._waiting_tokens += tokens - sequence.waiting
        sequence.waiting = tokens

    def _note_payer(self, namespace: Namespace, now_s: float) -> None:
        """Note when requests of more than one payer were last seen side by side."""
        if self._namespace not in (None, namespace) and self.sequences:
            self._shared_at_s = now_s
        self._namespace = namespace


def _common_blocks(one: list[int], other: list[int], start: int, size: int) -> int:
    """Return the leading tokens that two prompts share, in whole blocks, without the last token of
    either. They share the first `start`."""
    end = (min(len(one), len(other)) - 1) // size * size
    while start < end and one[start : start + size] == other[start : start + size]:
        start += size
    return start
