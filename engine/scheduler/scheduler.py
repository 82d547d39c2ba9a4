"""The scheduler: who runs this step, and with how many tokens.

Decoding sequences first, one token each; then prompts in slices, in fair order, under the step's
token budget. It admits, preempts by recompute, and lets a request wait for its twin (`twins`). It
moves blocks through the cache and knows no runner, no event and no clock.

Progress: the running sequence of best rank is never preempted and has room alone, so it always can
be given room; the others run as room allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.api import Payer
from engine.cache import PrefixCache, TreeMatch
from engine.config import EngineConfig
from engine.scheduler.prefix_sharing import PrefixSharing
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_set import Running
from engine.scheduler.sequence import ActiveRequest, Sequence

Lack = Literal["", "places", "blocks", "ceiling"]
"""What keeps a waiting sequence from running: `ceiling`, blocks under its payer's own."""


@dataclass(slots=True)
class Slice:
    """Compute `count` tokens of a sequence from position `start`."""

    sequence: Sequence
    start: int
    count: int


class Scheduler:
    """Running and waiting sequences. `runner_forgets`: ids the runner should be told have ended."""

    def __init__(self, cache: PrefixCache, config: EngineConfig) -> None:
        self.cache = cache
        self.config = config
        self.line = RequestQueue()
        self.running = Running(config.preemptions_max)
        self.twins = PrefixSharing(self.line, cache.block_size)
        self.compiling: dict[int, Sequence] = {}
        self.runner_forgets: list[int] = []
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Sequences not running."""
        return len(self.line) + len(self.twins.held) + len(self.compiling)

    # -- coming and going ---------------------------------------------------------------------

    def enter(self, work: ActiveRequest) -> None:
        """A new request: its first sequence waits, outside the line while its grammar is made."""
        self.line.arrive(work.request.grant.payer)
        sequence = work.sequences[0]
        if work.is_compiling:
            self.compiling[sequence.sequence_id] = sequence
        else:
            self.line.add(sequence)

    def compiled(self, work: ActiveRequest) -> None:
        """Its grammar is there: from now on it waits like any other."""
        self.line.add(self.compiling.pop(work.sequences[0].sequence_id))

    def leave(self, work: ActiveRequest, now_s: float, *, keep: bool = True) -> None:
        """A request has ended: everything it holds goes back."""
        for sequence in work.sequences:
            self.stop(sequence, now_s, keep=keep)
        self.line.depart(work.request.grant.payer)

    def stop(self, sequence: Sequence, now_s: float, *, keep: bool = True) -> None:
        """One sequence has ended, wherever it stands: running, waiting or held for a twin."""
        sequence.is_ended = True
        self.line.remove(sequence)
        self.compiling.pop(sequence.sequence_id, None)
        self.twins.drop(sequence)
        self._release(sequence, now_s, keep=keep)

    def fork(self, sequence: Sequence, forks: list[Sequence]) -> None:
        """Its prompt is being finished: its forks, which have their tables already, run too."""
        sequence.work.is_forked = True
        self.running.forked(sequence)
        for fork in forks:
            self.running.add(fork)

    # -- one step -----------------------------------------------------------------------------

    def schedule(self, now_s: float) -> list[Slice]:
        """The slices of one step; pins, allocates, evicts and preempts as it must."""
        slices: dict[int, Slice] = {}
        budget = self.config.step_tokens_max
        ranked = sorted(self.running, key=lambda s: s.rank)
        prefilling: list[Sequence] = []
        for sequence in ranked:
            if not sequence.wants_row:
                continue
            if not sequence.is_decoding:
                prefilling.append(sequence)
            elif budget > 0:
                budget -= self._decode(sequence, slices, now_s)
        prefilling = [s for s in prefilling if s.table is not None]  # nor preempted meanwhile
        left = len(prefilling)
        full: set[Payer] = set()
        is_full = self._is_house_full(ranked)
        for sequence in self.line.in_order(prefilling, only=is_full):
            if budget <= 0 or (is_full and not left):
                break
            payer = sequence.work.request.grant.payer
            if sequence.table is not None:
                left -= 1
            else:
                if is_full or payer in full or sequence.in_flight:
                    continue
                if not self._may_return(sequence):
                    continue
                found = self._found(sequence, now_s)
                if found is not None and self.twins.holds(sequence, found, self.running):
                    continue
                if lack := self._admit(sequence, found, slices, now_s):
                    is_full = lack != "ceiling"
                    full.add(payer)
                    continue
            budget -= self._prefill(sequence, budget, slices, now_s)
        self.twins.watch(self.running, slices)
        return list(slices.values())

    def preempt(self, sequence: Sequence, now_s: float) -> None:
        """Take a running sequence's blocks; it waits again and recomputes what it must.

        Its blocks stay cached, so what nobody needs meanwhile is found again.
        """
        self._release(sequence, now_s, keep=True)
        sequence.preemptions += 1
        sequence.work.preemptions += 1
        self.preemptions += 1
        self.line.add(sequence)

    # -- slices -------------------------------------------------------------------------------

    def _decode(self, sequence: Sequence, slices: dict[int, Slice], now_s: float) -> int:
        if sequence.sequence_id not in self.running:
            return 0  # preempted for one before it
        if not self._grow(sequence, sequence.computed + 1, slices, now_s):
            return 0
        slices[sequence.sequence_id] = Slice(sequence, sequence.computed, 1)
        self.line.charge(sequence, 1)
        return 1

    def _prefill(
        self, sequence: Sequence, budget: int, slices: dict[int, Slice], now_s: float
    ) -> int:
        """A slice of a prompt: as much as budget, chunk and room allow."""
        table = sequence.table
        if table is None or not sequence.wants_row:
            return 0
        count = min(sequence.missing, self.config.prefill_chunk_tokens_max, budget)
        start = sequence.computed
        if not self.cache.grow(table, start + count, now_s, start=start):
            grant = sequence.work.request.grant
            size = self.cache.block_size
            room = self.cache.available(grant.namespace, grant.quota) * size
            room += len(table.blocks) * size - start
            count = min(count, max(1, room))
            if not self._is_first(sequence):
                if not self.cache.grow(table, start + count, now_s, start=start):
                    return 0  # it keeps what it has and waits for room
            elif not self._grow(sequence, start + count, slices, now_s):
                return 0
        slices[sequence.sequence_id] = Slice(sequence, start, count)
        self.line.charge(sequence, count)
        return count

    def _grow(self, sequence: Sequence, upto: int, slices: dict[int, Slice], now_s: float) -> bool:
        """Room for a running sequence, at the cost of others that rank below it."""
        while sequence.table is not None:
            if self.cache.grow(sequence.table, upto, now_s, start=sequence.computed):
                return True
            victim = self._victim(sequence)
            if victim is None:
                return False
            self._give_up(victim, slices, now_s)
        return False

    def _give_up(self, victim: Sequence, slices: dict[int, Slice], now_s: float) -> None:
        """Preempt it, and take back the slice it had in this step."""
        piece = slices.pop(victim.sequence_id, None)
        if piece is not None:
            self.line.charge(victim, -piece.count)
        self.preempt(victim, now_s)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Whom to preempt so that `sequence` may grow; itself if it ranks last.

        Lowest priority, then furthest over its share, then youngest. Never the best of those whose
        blocks could help; none more than `preemptions_max` times, unless for a higher priority.
        """
        held = 0 if sequence.table is None else len(sequence.table.blocks)
        missing = max(1, self._blocks_of(sequence) - held)
        is_bound = self._rooms(sequence)[1] < missing
        helpful = self._helpful(sequence, "ceiling" if is_bound else "blocks")
        first = min(helpful, key=lambda s: s.rank)
        helpful = [s for s in helpful if s is not first]
        may_go = [s for s in helpful if not self.running.is_pinned(s)] or [
            s for s in helpful if s.work.request.priority < sequence.work.request.priority
        ]
        if not may_go:
            return None

        def claim(s: Sequence) -> tuple[int, float, int, int]:
            request = s.work.request
            over = self.cache.over_share(request.grant.payer)
            return (-request.priority, over, s.work.arrival, s.index)

        return max(may_go, key=claim)

    # -- admission ----------------------------------------------------------------------------

    def _found(self, sequence: Sequence, now_s: float) -> TreeMatch | None:
        """What the cache has of a waiting sequence; None where it does not read."""
        work, grant = sequence.work, sequence.work.request.grant
        if not grant.read or (work.request.prompt_logprobs is not None and not work.is_forked):
            return None
        return self.cache.find(grant.namespace, sequence.tokens, now_s)

    def _admit(
        self, sequence: Sequence, found: TreeMatch | None, slices: dict[int, Slice], now_s: float
    ) -> Lack:
        """Let a waiting sequence begin, or say what it lacks."""
        work, grant = sequence.work, sequence.work.request.grant
        while lack := self._lack(sequence, needed := self._needed(sequence, found)):
            if not self._preempt_for(sequence, lack, needed, slices, now_s):
                return lack
            found = self._found(sequence, now_s)
        sequence.table = self.cache.begin(
            grant.namespace,
            sequence.tokens,
            now_s,
            quota=grant.quota,
            leases=grant.leases,
            read=found is not None,
            write=work.may_write,
            found=found,
        )
        sequence.computed = sequence.table.kv_tokens
        sequence.progress = []
        self.line.remove(sequence)
        self.running.add(sequence)
        return ""

    def _is_house_full(self, ranked: list[Sequence]) -> bool:
        """Is every place taken, and by nobody who would give it up? However many wait, that is
        seen at once."""
        if not ranked or self.running.places < self.config.sequences_max:
            return False
        return self.line.priority_max <= ranked[-1].work.request.priority

    def _needed(self, sequence: Sequence, found: TreeMatch | None) -> int:
        """Blocks that a waiting sequence needs to begin, beyond those that it finds."""
        needed = self._blocks_of(sequence)
        if found is not None:
            # A found block that nobody pins counts as room, and is about to be pinned.
            needed -= len(found.path) - self.cache.count_unpinned(found)
        return needed + sequence.places - 1  # each further sample writes a block of its own

    def _lack(self, sequence: Sequence, needed: int) -> Lack:
        """What it lacks to begin: blocks under its payer's own ceiling, places for all samples it
        will have, or blocks of the pool. Each that runs is left a block to go on with, which is
        under the ceiling of its own payer. For all this nobody waits who would be alone."""
        if not self.running:
            return ""
        (pool, own), beside = self._rooms(sequence), len(self.running)
        if own < needed + beside and own < needed + self._running_of(sequence):
            return "ceiling"
        if self.running.places + sequence.places > self.config.sequences_max:
            return "places"
        return "blocks" if pool < needed + beside else ""

    def _may_return(self, sequence: Sequence) -> bool:
        """May it run beside those that are not preempted any more, and always get on?

        A pinned sequence begins again as the first of all, so that it can have anybody's blocks.
        Whoever then comes and ranks before it cannot have its blocks, nor it theirs: there must be
        room for all of these to their ends. Both wait without keeping others from running.
        """
        is_pinned, running = self.running.is_pinned, self.running
        if is_pinned(sequence) and any(s.rank < sequence.rank for s in running):
            return False
        request = sequence.work.request
        pinned = [s.rank for s in running.pinned if s.work.request.priority >= request.priority]
        if not pinned or sequence.rank > max(pinned):
            return True
        firm = [sequence, *(s for s in running if s.rank <= max(pinned))]
        pool, own = self._rooms(sequence)
        ours = (s for s in firm if s.work.request.grant.payer == request.grant.payer)
        return pool >= sum(map(self._blocks_to_come, firm)) and own >= sum(
            map(self._blocks_to_come, ours)
        )

    def _blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks that it, and the samples it will fork, may still ask for."""
        request, size = sequence.work.request, self.cache.block_size
        whole = -(-(len(request.tokens) + request.max_tokens) // size)
        held = 0 if sequence.table is None else len(sequence.table.blocks)
        copied = 1 if request.samples > 1 else 0
        own = whole - len(request.tokens) // size
        return whole - held + copied + (sequence.places - 1) * own

    def _preempt_for(
        self, sequence: Sequence, lack: Lack, needed: int, slices: dict[int, Slice], now_s: float
    ) -> bool:
        """Preempt one running sequence of lower priority than a waiting one, where all such
        together could give what it lacks."""
        priority = sequence.work.request.priority
        lower = [s for s in self._helpful(sequence, lack) if s.work.request.priority < priority]
        if not lower or not self._could_give(lower, sequence, lack, needed):
            return False
        victim = max(lower, key=lambda s: (not self.running.is_pinned(s), s.rank))
        self._give_up(victim, slices, now_s)
        return True

    def _could_give(
        self, some: list[Sequence], sequence: Sequence, lack: Lack, needed: int
    ) -> bool:
        """Would it have what it lacks, if all their places and blocks were given up?"""
        if lack == "places":
            places = self.running.places - sum(s.places for s in some)
            return places + sequence.places <= self.config.sequences_max
        room = self._rooms(sequence)[lack == "ceiling"]
        return room + sum(len(s.table.blocks) for s in some if s.table is not None) >= needed

    # -- inside -------------------------------------------------------------------------------

    def _is_first(self, sequence: Sequence) -> bool:
        return all(sequence.rank <= s.rank for s in self.running)

    def _helpful(self, sequence: Sequence, lack: Lack) -> list[Sequence]:
        """Who runs and could give what it lacks. Blocks only its own payer's where that one's
        ceiling is in the way, and nobody's who is inside its floor (rule 9)."""
        if lack == "places":
            return list(self.running)
        payer, over_share = sequence.work.request.grant.payer, self.cache.over_share
        return [
            s
            for s in self.running
            if (theirs := s.work.request.grant.payer) == payer
            or (lack == "blocks" and over_share(theirs) > 0)
        ]

    def _running_of(self, sequence: Sequence) -> int:
        """How many run of its payer's."""
        payer = sequence.work.request.grant.payer
        return [s.work.request.grant.payer for s in self.running].count(payer)

    def _rooms(self, sequence: Sequence) -> tuple[int, float]:
        grant = sequence.work.request.grant
        return self.cache.available_blocks(grant.namespace, grant.quota)

    def _blocks_of(self, sequence: Sequence) -> int:
        """For what it has, and its next token."""
        return -(-(len(sequence.tokens) + 1) // self.cache.block_size)

    def _release(self, sequence: Sequence, now_s: float, *, keep: bool) -> None:
        self.running.remove(sequence)
        if sequence.is_known:
            sequence.is_known = False
            self.runner_forgets.append(sequence.sequence_id)
        if sequence.table is not None:
            self.cache.release(sequence.table, sequence.tokens, now_s, keep=keep)
            sequence.table = None
        sequence.computed = 0
        sequence.order_key = b""
        self.twins.let_go(sequence)
