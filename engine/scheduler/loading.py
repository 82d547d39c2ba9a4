"""Sequences that wait for a level below the device: for a look, or for a load.

A look asks the disk what it has of a prompt. The sequence is outside the request queue until the
disk has answered, for at most `look_ms`. A fetch brings what another engine has to host memory, and
its sequence waits in the same way, for as long as computing would take. A load fills blocks from
host memory or disk. Its sequence is in the batch, with its blocks and slots, and computes nothing
meanwhile; it can be cancelled, preempted and timed out like any other. Only the scheduler and core
call this module.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.api import LEVELS_BELOW
from engine.cache import BlockTable, PrefixCache, TreeMatch
from engine.levels.level_use import FetchedTokens, LevelUse
from engine.levels.levels import Levels
from engine.levels.loads import Load, LoadPlan
from engine.levels.places import level_of
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_set import RunningSet
from engine.scheduler.sequence import Sequence
from engine.scheduler.step_cost import StepCost

PROMPT_MIN = 16
"""Fewer uncomputed tokens are those of a stream that decodes, not of a prompt."""


class Loading:
    """The sequences that wait for a look, and those that are being loaded.

    `looking`: by id, with the longest wait in seconds, and the time at which that ends; None until
    the next turn, which sets it.
    """

    def __init__(
        self, levels: Levels, cache: PrefixCache, queue: RequestQueue, step_cost: StepCost
    ) -> None:
        self.levels = levels
        self._cache = cache
        self._queue = queue
        self._step_cost = step_cost
        self.looking: dict[int, tuple[Sequence, float, float | None]] = {}
        self._loading: dict[Load, Sequence] = {}
        self._launched = 0  # the last step launched before the present turn
        self._has_begun = False
        self._now_s = 0.0  # of the present turn
        self._asked: tuple[int, int] | None = None  # whose question `may_load` answered last
        self._has_more = False

    def __len__(self) -> int:
        return len(self.looking) + len(self._loading)

    # -- looks --------------------------------------------------------------------------------

    def look(self, sequence: Sequence, now_s: float) -> bool:
        """Let a new sequence wait for a look or a fetch, if that may help; return whether it waits.
        O(blocks of the prompt).
        """
        request, levels, number = sequence.parent.request, self.levels, sequence.sequence_id
        grant, peer = request.grant, request.peer
        if not grant.read or request.prompt_logprobs is not None:
            return False
        may_know = levels.may_know(grant)
        if peer is None and not may_know:
            return False
        tokens = tuple(sequence.findable_tokens(self._cache.block_size))
        here = self._cache.find(grant.namespace, tokens, now_s).cached_tokens
        wait_s = 0.0
        if peer is not None and peer.tokens - here >= levels.config.host_tokens_min:
            compute_s = self._step_cost.seconds_of_slice(here, peer.tokens - here)
            wait_s = levels.fetch(number, grant, tokens, peer, compute_s)
        if not wait_s and may_know and levels.look(number, grant, tokens, here):
            wait_s = levels.config.look_ms / 1000
        if wait_s:
            self.looking[number] = (sequence, wait_s, None)
        return bool(wait_s)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or lost its blocks."""
        if self.looking.pop(sequence.sequence_id, None) is not None:
            self.levels.leave_fetch(sequence.sequence_id)
        if (load := sequence.load) is not None:
            _use_of(sequence).wait(self._now_s - load.began_s, load.level)
            self._release(sequence)
            del self._loading[load]
            self.levels.loads.give_up(load)

    # -- loads --------------------------------------------------------------------------------

    def plan(
        self, sequence: Sequence, found: TreeMatch | None, running: RunningSet, now_s: float
    ) -> LoadPlan | None:
        """Return what to load for a waiting sequence behind `found`, its prefix on the device; None
        if no level has more, or computing it is faster.

        Computing would come after the unfinished prompts of the payer's running sequences, as a
        load comes after those begun before it. Prompts of other payers do not count: what a request
        finds must not tell of them. O(running + blocks of the prompt).
        """
        if found is None:
            return None
        grant, seconds = sequence.parent.request.grant, self._step_cost.seconds_of_slice
        before_s = 0.0
        for other in running:
            if other.table is not None and other.parent.payer == sequence.parent.payer:
                left = 0 if other.is_halted else other.length - other.table.kv_tokens
                before_s += seconds(other.table.kv_tokens, left) if left >= PROMPT_MIN else 0.0
        plan = self.levels.plan(
            grant,
            sequence.findable_tokens(self._cache.block_size),
            len(self._cache.whole_blocks(found).path),
            lambda start, count: before_s + seconds(start, count),
            now_s,
        )
        if plan is None:
            return None
        use = _use_of(sequence)
        use.know((plan.first + plan.known) * self._cache.block_size)
        if len(plan.copies) < plan.known:
            use.miss("not_worth_loading")
        return plan if plan.copies else None

    def may_load(self, sequence: Sequence, found: TreeMatch | None, now_s: float) -> bool:
        """Return whether levels have more of a waiting sequence than the device.

        O(blocks of the prompt) the first time. The answer holds while the sequence waits on: the
        turns of a wait are many, and would keep the GIL from the copies that it waits for.
        """
        if found is None:
            return False
        here = found.cached_tokens
        if self._asked != (sequence.sequence_id, here):
            self._asked = sequence.sequence_id, here
            namespace = sequence.parent.request.grant.namespace
            more = self.levels.stored_tokens(namespace, sequence.tokens, here, now_s)
            self._has_more = bool(more)
        return self._has_more

    def begin(self, sequence: Sequence, plan: LoadPlan | None, now_s: float) -> None:
        """Tell the levels of a sequence that has just been admitted, and begin its load, if one is
        planned and still fits.
        """
        table = sequence.table
        assert table is not None, "it was admitted"
        active = sequence.parent
        active.loaded_tokens = ()  # an earlier admission's, which found other blocks
        use = active.level_use
        if use is not None and (fetched := use.fetched_tokens(table.kv_tokens)):
            active.loaded_tokens = ((use.fetched.level, fetched),)
        self.levels.used(sequence.parent.request.grant, table, now_s)
        load = None if plan is None else self._begin(plan, table, now_s)
        if load is not None:
            sequence.load, sequence.is_halted = load, True
            self._loading[load] = sequence
            self._has_begun = True
        if plan is not None and (load is None or len(load.pieces) < len(plan.copies)):
            _use_of(sequence).miss("level_failed")
            self.levels.counts.miss(level_of(plan.copies[0]), "no_room")

    def begin_moves(self, *, is_shared: bool) -> None:
        """Begin the moves of the loads that this step has begun, not a step later.

        `is_shared`: several payers have requests.
        """
        self.levels.loads.is_shared = is_shared
        if self._has_begun:
            self._has_begun = False
            self.levels.begin_moves()

    # -- turns --------------------------------------------------------------------------------

    def turn(
        self, now_s: float, launched: int, collected: int, running: RunningSet
    ) -> list[Sequence]:
        """Take what has come from the levels and begin what is next. Return the sequences that have
        ended their load; what it brought is committed.

        `launched`, `collected`: the numbers of the last steps launched and collected.
        """
        # Nothing is copied for running sequences while none can go on: that would have no end.
        tables = _tables(running) if launched != self._launched else ()
        self._launched, self._now_s = launched, now_s
        is_running = len(running) > 0
        self.levels.turn(now_s, tables, collected, launched=launched, is_running=is_running)
        self._end_looks(now_s)
        placed = {load: load.placed for load in self._loading}
        for load in self.levels.loads.take_parts():
            if load in self._loading:
                self._commit(self._loading[load], load, load.placed, placed[load], now_s)
        # The sequence of a load may have ended after an erasure had ended the load.
        ended = [load for load in self.levels.take_ended(now_s) if load in self._loading]
        return [self._end_load(load, now_s) for load in ended]

    # -- internals ----------------------------------------------------------------------------

    def _release(self, sequence: Sequence) -> None:
        """Let a sequence compute again, unless it has ended."""
        sequence.load, sequence.is_halted = None, sequence.is_ended

    def _begin(self, plan: LoadPlan, table: BlockTable, now_s: float) -> Load | None:
        """Begin a load where it still fits; return None if it does not."""
        size = self._cache.block_size
        if table.committed != plan.first or table.kv_tokens != plan.first * size:
            return None
        runs = plan.first + len(plan.copies)
        if table.beside:
            if not self._cache.moves.grow(table, runs, now_s):
                return None
        elif not self._cache.grow(table, runs * size, now_s):
            return None
        load = self.levels.loads.begin(plan, table, self._launched, now_s)
        if load is None:
            self._cache.moves.settle(table, plan.first, 0)
        return load

    def _end_load(self, load: Load, now_s: float) -> Sequence:
        """Commit what a load has brought that has ended; return its sequence."""
        sequence = self._loading.pop(load)
        active, use = sequence.parent, _use_of(sequence)
        use.wait(now_s - load.began_s, load.level)
        if load.miss:
            use.miss(load.miss)
        elif load.loaded < len(load.pieces):  # an erasure has ended it
            use.forget()
        self._release(sequence)
        if sequence.table is not None:
            load.loaded = self._cache.moves.settle(sequence.table, load.first, load.loaded)
        if load.loaded:
            self._commit(sequence, load, load.loaded, load.placed, now_s)
            if active.started_at_s is None:
                counts = load.tokens_by_level(self._cache.block_size, use)
                counts.update(dict(active.loaded_tokens))
                found = ((name, counts[name]) for name in LEVELS_BELOW if counts[name])
                active.loaded_tokens = tuple(found)
        return sequence

    def _end_looks(self, now_s: float) -> None:
        """End the looks that were answered and those whose time is over; set the time of new
        ones.
        """
        for sequence_id in self.levels.take_looked():
            if not self._fetch_shared(sequence_id):
                self._end_look(sequence_id, is_answered=not self.levels.is_disk_lost)
        for sequence_id, fetched in self.levels.take_fetched().items():
            self._end_look(sequence_id, is_answered=True, fetched=fetched)
        for sequence_id, (sequence, wait_s, until_s) in list(self.looking.items()):
            if until_s is None:
                self.looking[sequence_id] = (sequence, wait_s, now_s + wait_s)
            elif now_s >= until_s:
                left = self.levels.leave_fetch(sequence_id)
                self._end_look(sequence_id, is_answered=left is not None, fetched=left)

    def _fetch_shared(self, sequence_id: int) -> bool:
        """Let a sequence whose look has found more in a shared store wait for that; return whether
        it does."""
        there, found = self.levels.take_offer(sequence_id), self.looking.get(sequence_id)
        if not there or found is None:
            return False
        sequence, seconds = found[0], self._step_cost.seconds_of_slice
        tokens = tuple(sequence.findable_tokens(self._cache.block_size))
        grant = sequence.parent.request.grant
        wait_s = self.levels.fetch_shared(sequence_id, grant, tokens, there, seconds)
        if wait_s:
            self.looking[sequence_id] = (sequence, wait_s, None)
        return bool(wait_s)

    def _end_look(
        self, sequence_id: int, *, is_answered: bool, fetched: FetchedTokens | None = None
    ) -> None:
        """Queue a sequence after its look, or fetch. Without an answer the disk may have all."""
        found = self.looking.pop(sequence_id, None)
        if found is None:
            return
        sequence = found[0]
        if fetched is not None and fetched.end:
            _use_of(sequence).fetched = fetched
        if not is_answered:
            use, size = _use_of(sequence), self._cache.block_size
            use.know((len(sequence.findable_tokens(size)) - 1) // size * size)
            use.miss("level_failed")
            self.levels.counts.miss("disk", "failed" if self.levels.is_disk_lost else "late")
        self._queue.add(sequence)

    def _commit(self, sequence: Sequence, load: Load, runs: int, since: int, now_s: float) -> None:
        """Commit the first `runs` runs of a load, as if they had been computed; `since` of them
        were committed before.
        """
        table, size = sequence.table, self._cache.block_size
        assert table is not None, "a sequence that is loaded has its blocks"
        self._cache.commit(table, sequence.tokens, (load.first + runs) * size, now_s)
        sequence.computed = table.kv_tokens
        self.levels.came_back()


def _use_of(sequence: Sequence) -> LevelUse:
    """Return the note of what levels did for a sequence's request; make it if there is none."""
    active = sequence.parent
    if active.level_use is None:
        active.level_use = LevelUse()
    return active.level_use


def _tables(running: RunningSet) -> Iterator[BlockTable]:
    """Yield the tables of running sequences, those first that would be preempted first."""
    for sequence in sorted(running, key=lambda s: s.rank, reverse=True):
        if sequence.table is not None and sequence.load is None:
            yield sequence.table
