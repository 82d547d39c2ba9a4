"""The scheduler: which sequences run in a step, and with how many tokens.

All decoding sequences come first, with one token each; then slices of prompts, in fair order, under
the step's token budget. The scheduler admits, preempts by recompute, and lets a request wait for a
leader that computes the same prefix (`prefix_sharing`). It moves blocks through the cache and knows
no runner, no event and no clock.

Progress: the running sequence of best rank is never preempted and fits the pool alone, so it can
always get room; the others run as room allows.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Final, Literal

from msgspec import Struct

from engine.api import Payer
from engine.cache import BlockTable, PrefixCache, TreeMatch
from engine.config import EngineConfig
from engine.levels.levels import Levels
from engine.scheduler.batch_shares import BatchShares
from engine.scheduler.isolation import Isolation, Turn
from engine.scheduler.loading import Loading
from engine.scheduler.prefix_sharing import PrefixSharing
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_set import RunningSet
from engine.scheduler.sequence import ActiveRequest, Sequence
from engine.scheduler.step_cost import PromptBudget, StepCost, StepWork

BlockedBy = Literal["", "batch_slots", "blocks", "ceiling", "others"]
"""What keeps a waiting sequence from running; empty: nothing.

`ceiling`: blocks under its payer's ceiling. `blocks`: blocks of the pool. `others`: sequences that
it waits for, without blocking any other.
"""

STEPS_WITHOUT_STREAMS: Final = 2
"""How many gap targets a step may take in which no sequence decodes and one payer has all requests:
then only a request that arrives meanwhile waits for its end.
"""
ALONE_AFTER_S: Final = 5.0
"""Seconds without a request of another payer after which a payer counts as alone. Between two
requests of a chat others would fill the steps, and the next one would wait for a long one.
"""
DECODES_OF_SHARED_STEP: Final = 3
"""How many times its decodes a step may always take, up to the gap target, where several payers
have requests: in a large batch a short target would leave prompts no time.
"""
DECODES_OF_ONE_PAYER: Final = 6
"""How many times its decodes a step may take where one payer has all requests, if that is longer
than the gap target: its streams wait for its own prompts, and small slices would cost it a sixth of
its throughput on a slow machine.
"""


class Slice(Struct, frozen=True, gc=False):
    """Compute `count` tokens of a sequence from position `start`, on its table.

    `is_plain`: the last output token alone, of a sequence that decodes plainly and samples
    after it.
    """

    sequence: Sequence
    table: BlockTable
    start: int
    count: int
    is_plain: bool = False


def work_of(pieces: Collection[Slice]) -> StepWork:
    """Return the work of a step's slices. O(slices)."""
    contexts = [piece.start for piece in pieces if piece.is_plain]
    others = StepWork.of(
        (piece.sequence.tokens_read(piece.start), piece.count)
        for piece in pieces
        if piece.count and not piece.is_plain
    )
    return others.with_rows(len(contexts), sum(contexts))


class Scheduler:
    """Running and waiting sequences.

    `compiling`: sequences that wait for a grammar. `loading`: those that wait for a level below the
    device, None without levels. `ended_ids`: ids to report to the runner as ended.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        step_cost: StepCost,
        levels: Levels | None,
    ) -> None:
        self.cache = cache
        self.config = config
        self.step_cost = step_cost
        self.queue = RequestQueue()
        self.running = RunningSet(config.preemptions_max)
        self.shares = BatchShares(
            self.queue, self.running, config.sequences_max, config.preemptions_max
        )
        self.prefix_sharing = PrefixSharing(self.queue, cache.block_size)
        self.isolation = Isolation()
        self.loading: Loading | None = None
        if levels is not None:
            self.loading = Loading(levels, cache, self.queue, self.step_cost)
        self.compiling: dict[int, Sequence] = {}
        self.ended_ids: list[int] = []
        self.preemptions = 0
        self._shared_at_s = float("-inf")
        """When requests of more than one payer were last seen side by side."""

    # -- requests -----------------------------------------------------------------------------

    def add_request(self, active: ActiveRequest) -> None:
        """Queue the first sequence of a new request, or hold it while its grammar is compiled."""
        self.queue.count_arrival(active.turn, active.request.weight)
        self.isolation.add(active)
        if active.request.attention is not None:
            active.attention = active.request.attention.in_blocks(self.cache.block_size)
        sequence = active.sequences[0]
        if active.is_compiling:
            self.compiling[sequence.sequence_id] = sequence
        else:
            self._enqueue(sequence, active.received_at_s)

    def grammar_ready(self, active: ActiveRequest) -> None:
        """Queue a request whose grammar has been compiled."""
        sequence = self.compiling.pop(active.sequences[0].sequence_id)
        self._enqueue(sequence, active.received_at_s)

    def _enqueue(self, sequence: Sequence, now_s: float) -> None:
        """Queue a new sequence, or let it wait for a look first."""
        if self.loading is None or not self.loading.look(sequence, now_s):
            self.queue.add(sequence)

    def remove_request(self, active: ActiveRequest, now_s: float, *, keep: bool) -> None:
        """Release everything that a finished request holds. `keep`: leave its last block to the
        cache.
        """
        for sequence in active.sequences:
            self.stop(sequence, now_s, keep=keep)
        self.isolation.remove(active)
        self.queue.count_departure(active.turn)

    def stop(
        self, sequence: Sequence, now_s: float, *, keep: bool = True, is_complete: bool = False
    ) -> None:
        """End one sequence, whether it runs, waits, or waits for a leader. `is_complete`: by its
        last token, which may come from a step that was in flight when the sequence was preempted.
        """
        sequence.is_ended = sequence.is_halted = True
        self.queue.remove(sequence)
        self.compiling.pop(sequence.sequence_id, None)
        self.prefix_sharing.remove(sequence)
        self._release(sequence, now_s, keep=keep, is_complete=is_complete)

    def fork(self, sequence: Sequence, forks: list[Sequence]) -> None:
        """Start the forks of a sequence whose prompt is being finished; they have their tables
        already.
        """
        sequence.parent.is_forked = True
        self.running.split_slots(sequence)
        for fork in forks:
            self.running.add(fork)

    # -- one step -----------------------------------------------------------------------------

    def schedule(self, now_s: float) -> list[Slice]:
        """Return the slices of one step. Pins, allocates, evicts and preempts as needed."""
        slices: list[Slice] = []
        for turn in self.isolation.turns():
            if slices := self._schedule_turn(turn, now_s):
                self.isolation.took(turn)
                break
        if self.loading is not None:
            self.loading.begin_moves(is_shared=self.is_shared(now_s))
        return slices

    def _schedule_turn(self, turn: Turn, now_s: float) -> list[Slice]:
        slices: dict[int, Slice] = {}
        ranked = self.running.ranked
        in_turn = ranked
        if self.isolation:
            in_turn = [s for s in ranked if self.isolation.allows(s, turn)]
        prefilling = self._decode_all(in_turn, slices, now_s)
        budget = self._prompt_budget(slices, now_s)
        self.shares.refresh()
        left = len(prefilling)
        full: set[Payer] = set()
        is_full = self._batch_is_full(ranked)
        may_claim = not is_full and self.shares.has_quick_claim()
        count_missing = partial(self._count_missing, now_s=now_s)
        for sequence in self.queue.in_order(prefilling, only=is_full, count_missing=count_missing):
            budget.turn_to(sequence.parent.turn)
            if budget.is_spent or (is_full and not left and not may_claim):
                break
            if not self.isolation.allows(sequence, turn):
                continue
            if sequence.table is not None:
                left -= 1
            elif (
                sequence.parent.payer in full
                or sequence.in_flight
                or (is_full and not (may_claim and self._is_quick(sequence, now_s)))
            ):
                continue
            elif blocked_by := self._start(sequence, slices, now_s):
                is_full = is_full or blocked_by in ("batch_slots", "blocks")
                if blocked_by == "ceiling":
                    full.add(sequence.parent.payer)
                continue
            self._prefill(sequence, budget, slices, now_s)
        self.prefix_sharing.release_stalled(self.running, slices)
        return list(slices.values())

    def _start(self, sequence: Sequence, slices: dict[int, Slice], now_s: float) -> BlockedBy:
        """Start a waiting sequence if it may run now; return what blocks it, or ""."""
        slots = self.running.batch_slots + sequence.batch_slots
        if slots > self.config.sequences_max and self._must_yield(sequence):
            return "others"
        if not self._fits_beside_pinned(sequence):
            return "others"
        found = self._find_prefix(sequence, now_s)
        if found is not None and self.prefix_sharing.wait_for_leader(sequence, found, self.running):
            self._mark_for_follower(sequence)
            return "others"
        return self._admit(sequence, found, slices, now_s)

    def _mark_for_follower(self, sequence: Sequence) -> None:
        """Let the leader keep what a sequence that waits for it needs to resume there."""
        leader = sequence.leader
        if leader is not None and leader.table is not None:
            self.cache.mark_resume_point(leader.table, leader.followers[-1][0])

    def _is_quick(self, sequence: Sequence, now_s: float) -> bool:
        """Return whether a waiting sequence may claim a slot of a full batch by how little it has
        left. A long prompt or answer is told without a look-up."""
        answer = sequence.parent.request.max_tokens
        return self.shares.may_claim_quickly(sequence, answer) and self.shares.may_claim_quickly(
            sequence, answer + self._count_missing(sequence, now_s)
        )

    def _count_missing(self, sequence: Sequence, now_s: float) -> int:
        """Return the tokens that a prompt has to compute; a waiting one is looked up once."""
        if sequence.table is not None:
            return sequence.tokens_to_compute
        if sequence.missing_tokens is None:
            found = self._find_prefix(sequence, now_s)
            cached = 0 if found is None else found.cached_tokens
            sequence.missing_tokens = len(sequence.tokens) - cached
        return sequence.missing_tokens

    def preempt(self, sequence: Sequence, now_s: float, *, is_claimed: bool = False) -> None:
        """Release a running sequence's blocks and queue it again; it recomputes the evicted part.

        Its blocks stay cached, so blocks that are not evicted meanwhile are found again. Inside its
        payer's floor its partly filled block is not kept: the sequence would need one more beside
        it, and at a ceiling that is an older block of the payer's, lost for another's priority. The
        room of its promises waits for it.
        `is_claimed`: for another payer's share, which never pins a sequence.
        """
        grant = sequence.parent.request.grant
        is_inside = self.cache.is_inside_floor(grant.namespace, grant.quota, 0)
        self._release(sequence, now_s, keep=not is_inside, is_preempted=True)
        if is_claimed:
            sequence.claims += 1
        else:
            sequence.preemptions += 1
        sequence.parent.preemptions += 1
        sequence.missing_tokens = None  # what it computed may be found again
        self.preemptions += 1
        self.queue.add(sequence)

    # -- slices -------------------------------------------------------------------------------

    def _decode_all(
        self, ranked: list[Sequence], slices: dict[int, Slice], now_s: float
    ) -> list[Sequence]:
        """Schedule one token of each decoding sequence; return the running sequences that have a
        prompt to compute.
        """
        prefilling: list[Sequence] = []
        decoding: list[Sequence] = []
        for sequence in ranked:
            table, start = sequence.table, sequence.computed
            # Without a call, since most sequences of most steps decode plainly.
            is_plain = (
                sequence.plain_from <= start < sequence.plain_until
                and start + 1 == len(sequence.tokens) + sequence.in_flight
            )
            if not is_plain:
                if not sequence.is_schedulable:
                    continue
                if not sequence.is_decoding:
                    prefilling.append(sequence)
                    continue
            elif sequence.is_halted:
                continue
            if table is None:
                continue
            if start >= table.writable_tokens and not self._grow(
                sequence, start + 1, slices, now_s
            ):
                continue
            slices[sequence.sequence_id] = Slice(sequence, table, start, 1, is_plain)
            decoding.append(sequence)
        self.queue.charge_each(decoding)
        return [s for s in prefilling if s.table is not None]  # not preempted by a decode above

    def _prompt_budget(self, decodes: dict[int, Slice], now_s: float) -> PromptBudget:
        """Return the prompt tokens that may be computed beside this step's `decodes` (rule 1)."""
        if len(self.running.slots_of.keys() | self.queue.waiting_slots.keys()) > 1:
            self._shared_at_s = now_s
        target_s = self.config.gap_target_ms / 1000
        shared_s = self.config.gap_target_shared_ms / 1000 or target_s
        tokens = max(1, self.config.step_tokens_max - len(decodes))
        if not self.queue and len(decodes) == len(self.running):
            return PromptBudget(self.step_cost, tokens, target_s)  # no prompt: nothing to predict
        is_shared = self.is_shared(now_s)
        if not decodes and not any(sequence.is_decoding for sequence in self.running):
            longest_s = shared_s if is_shared else target_s * STEPS_WITHOUT_STREAMS
            return PromptBudget(self.step_cost, tokens, longest_s)
        decodes_s = self.step_cost.seconds(work_of(decodes.values()))
        if is_shared:
            target_s = min(target_s, max(shared_s, DECODES_OF_SHARED_STEP * decodes_s))
        else:
            target_s = max(target_s, DECODES_OF_ONE_PAYER * decodes_s)
        return PromptBudget(self.step_cost, tokens, target_s - decodes_s)

    def is_shared(self, now_s: float) -> bool:
        """Return whether several payers have requests, or had within `ALONE_AFTER_S`. O(1)."""
        return now_s - self._shared_at_s <= ALONE_AFTER_S

    def _prefill(
        self, sequence: Sequence, budget: PromptBudget, slices: dict[int, Slice], now_s: float
    ) -> None:
        """Schedule a slice of a prompt as long as budget, chunk and room allow."""
        table, start = sequence.table, sequence.computed
        if table is None or not sequence.is_schedulable:
            return
        longest = self.config.prefill_chunk_tokens_max or sequence.tokens_to_compute
        before = sequence.tokens_read(start)
        count = budget.fit(before, min(sequence.tokens_to_compute, longest))
        if count == 0:
            return
        if not self.cache.grow(table, start + count, now_s, start=start):
            blocks = min(self._available_blocks(sequence))
            room = self.cache.tokens_to_grow(table, int(blocks)) - start
            count = min(count, max(1, room))
            if sequence is not self.running.first:
                if not self.cache.grow(table, start + count, now_s, start=start):
                    return  # it keeps its blocks and waits for room
            elif not self._grow(sequence, start + count, slices, now_s):
                return
        slices[sequence.sequence_id] = Slice(sequence, table, start, count)
        self.queue.charge(sequence, count)
        is_whole = count == sequence.tokens_to_compute and sequence.parent.started_at_s is None
        budget.spend(before, count, guest=sequence.parent.turn if is_whole else None)

    def _grow(self, sequence: Sequence, upto: int, slices: dict[int, Slice], now_s: float) -> bool:
        """Make room for a running sequence, preempting sequences that rank below it; return
        success.
        """
        while sequence.table is not None:
            if self.cache.grow(sequence.table, upto, now_s, start=sequence.computed):
                return True
            victim = self._choose_victim(sequence)
            if victim is None:
                return False
            self._preempt_in_step(victim, slices, now_s)
        return False

    def _preempt_in_step(
        self,
        victim: Sequence,
        slices: dict[int, Slice],
        now_s: float,
        *,
        is_claimed: bool = False,
    ) -> None:
        """Preempt a sequence, and take back its slice of this step."""
        piece = slices.pop(victim.sequence_id, None)
        if piece is not None:
            self.queue.charge(victim, -piece.count)
        self.preempt(victim, now_s, is_claimed=is_claimed)

    def _choose_victim(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence to preempt so that `sequence` may grow, itself if it ranks last; None
        where none may be preempted.

        Lowest priority first, then furthest over its share, then youngest. Never the best-ranked
        sequence whose blocks could help; none more than `preemptions_max` times, unless for a
        higher priority.
        """
        missing = max(1, self.cache.blocks_to_grow(sequence.table, len(sequence.tokens) + 1))
        _, own = self._available_blocks(sequence)
        candidates = self._candidates(sequence, "ceiling" if own < missing else "blocks")
        first = min(candidates, key=lambda s: s.rank)
        candidates = [s for s in candidates if s is not first]
        preemptible = [s for s in candidates if not self.running.is_pinned(s)] or [
            s for s in candidates if s.parent.request.priority < sequence.parent.request.priority
        ]
        if not preemptible:
            return None

        def preemption_order(s: Sequence) -> tuple[int, float, int, int]:
            request = s.parent.request
            over = self.cache.over_share(s.parent.payer)
            return (-request.priority, over, s.parent.arrival, s.index)

        return max(preemptible, key=preemption_order)

    # -- admission ----------------------------------------------------------------------------

    def _find_prefix(self, sequence: Sequence, now_s: float) -> TreeMatch | None:
        """Return the cached prefix of a waiting sequence; None if the request reads no cache."""
        active, grant = sequence.parent, sequence.parent.request.grant
        if not grant.read or (active.request.prompt_logprobs is not None and not active.is_forked):
            return None
        tokens = sequence.findable_tokens(self.cache.block_size)
        return self.cache.find(grant.namespace, tokens, now_s)

    def _admit(
        self, sequence: Sequence, found: TreeMatch | None, slices: dict[int, Slice], now_s: float
    ) -> BlockedBy:
        """Start a waiting sequence, preempting lower priorities if needed; return what blocks it,
        or "".
        """
        active, grant = sequence.parent, sequence.parent.request.grant
        needed = self._blocks_needed(sequence, found)
        while blocked_by := self._blocked_by(sequence, found, needed):
            victims = self._find_lower(sequence, found, blocked_by, needed)
            givers = [] if victims else self._find_givers(sequence, found, blocked_by, needed)
            if not (victims or givers):
                return blocked_by
            for one in victims or givers:
                self._preempt_in_step(one, slices, now_s, is_claimed=bool(givers))
            found = self._find_prefix(sequence, now_s)
            needed = self._blocks_needed(sequence, found)
        if not self.running and self._waits_for_moves(sequence, found, needed, now_s):
            return "blocks"
        plan = None
        if self.loading is not None:
            plan = self.loading.plan(sequence, found, self.running, now_s)
        if plan is not None and found is not None:
            found = self.cache.whole_blocks(found)  # what is loaded comes in whole blocks
        sequence.table = self.cache.begin(
            grant.namespace,
            sequence.tokens,
            now_s,
            quota=grant.quota,
            leases=grant.leases,
            read=found is not None,
            write=active.may_write,
            found=found,
            attention=active.attention,
            suspended=sequence.suspended,
        )
        sequence.suspended = None
        sequence.computed = sequence.table.kv_tokens
        self.queue.remove(sequence)
        self.running.add(sequence)
        if self.loading is not None:
            self.loading.begin(sequence, plan, now_s)
        return ""

    def _batch_is_full(self, ranked: list[Sequence]) -> bool:
        """Return whether every batch slot is taken, no waiting sequence outranks a running one, and
        no payer may claim a slot.

        O(running) for any number of waiting sequences.
        """
        if not ranked or self.running.batch_slots < self.config.sequences_max:
            return False
        if self.queue.priority_max > ranked[-1].parent.request.priority:
            return False
        return not self.shares.has_claim()

    def _must_yield(self, sequence: Sequence) -> bool:
        """Return whether a sequence that finds no slots leaves them to other payers (rule 4): its
        payer is above its share and it outranks no running sequence.
        """
        lowest = min(s.parent.request.priority for s in self.running)
        return lowest >= sequence.parent.request.priority and not self.shares.is_due(sequence)

    def _blocks_needed(self, sequence: Sequence, found: TreeMatch | None) -> int:
        """Return the blocks a waiting sequence needs to start, beyond those it found pinned."""
        grant, longest = sequence.parent.request.grant, self.config.prefill_chunk_tokens_max
        step_tokens = min(self.config.step_tokens_max, longest or self.config.step_tokens_max)
        needed = self.cache.blocks_to_start(
            grant.namespace,
            grant.quota,
            len(sequence.tokens) + 1,
            found,
            step_tokens,
            sequence.parent.attention,
        )
        # Each further sample writes its own block, in each group.
        return needed + (sequence.batch_slots - 1) * self.cache.windows.groups

    def _blocked_by(self, sequence: Sequence, found: TreeMatch | None, needed: int) -> BlockedBy:
        """Return what a waiting sequence lacks to start, or "".

        It may lack blocks under its payer's ceiling, batch slots for all its samples, or blocks of
        the pool. One block is left for each running sequence to continue with, counted under its
        own payer's ceiling. A sequence that would run alone is never blocked.
        """
        if not self.running:
            return ""
        pool, own = self._available_blocks(sequence, found)
        running = len(self.running)
        if own < needed + running and own < needed + self._running_of_payer(sequence):
            return "ceiling"
        if self.running.batch_slots + sequence.batch_slots > self.config.sequences_max:
            return "batch_slots"
        return "blocks" if pool < needed + running else ""

    def _waits_for_moves(
        self, sequence: Sequence, found: TreeMatch | None, needed: int, now_s: float
    ) -> bool:
        """Return whether a sequence that would run alone waits until moves let blocks go: what it
        would load has no room before, and all of it would be computed again.
        """
        if self.loading is None or not self.loading.levels.is_moving:
            return False
        is_short = min(self._available_blocks(sequence, found)) < needed
        return is_short and self.loading.may_load(sequence, found, now_s)

    def _fits_beside_pinned(self, sequence: Sequence) -> bool:
        """Return whether a sequence may run beside the pinned ones so that all of them can finish.

        A pinned sequence starts only as the best-ranked one, so that it can take any other's
        blocks. A sequence that ranks before a pinned one can neither take its blocks nor lose its
        own to it: the pool must have room for all of these to their ends. Both wait without
        blocking other sequences.
        """
        is_pinned, running = self.running.is_pinned, self.running
        if is_pinned(sequence) and any(s.rank < sequence.rank for s in running):
            return False
        request = sequence.parent.request
        pinned = [s.rank for s in running.pinned if s.parent.request.priority >= request.priority]
        if not pinned or sequence.rank > max(pinned):
            return True
        firm = [sequence, *(s for s in running if s.rank <= max(pinned))]
        pool, own = self._available_blocks(sequence)
        own_payer = (s for s in firm if s.parent.payer == request.grant.payer)
        return pool >= sum(map(self._blocks_still_needed, firm)) and own >= sum(
            map(self._blocks_still_needed, own_payer)
        )

    def _blocks_still_needed(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence, and the samples it will fork, may still ask for."""
        request, windows = sequence.parent.request, self.cache.windows
        total = len(request.tokens) + request.max_tokens
        held = 0 if sequence.table is None else sequence.table.held_blocks
        copied = 1 if request.samples > 1 else 0
        own = -(-total // self.cache.block_size) - len(request.tokens) // self.cache.block_size
        attention = sequence.parent.attention
        needed = windows.blocks_of(total, 1, attention)
        if attention is not None:
            own = min(own, attention.blocks_of(own))
        more = (sequence.batch_slots - 1) * own
        return max(0, needed - held) + (copied + more) * windows.groups

    def _find_lower(
        self, sequence: Sequence, found: TreeMatch | None, blocked_by: BlockedBy, needed: int
    ) -> list[Sequence]:
        """Return one running sequence of lower priority to preempt; none if all of them together
        could not unblock `sequence`.
        """
        priority = sequence.parent.request.priority
        lower = [
            s
            for s in self._candidates(sequence, blocked_by)
            if s.parent.request.priority < priority
        ]
        if not lower or not self._would_free_enough(lower, sequence, found, blocked_by, needed):
            return []
        return [max(lower, key=lambda s: (not self.running.is_pinned(s), s.rank))]

    def _find_givers(
        self, sequence: Sequence, found: TreeMatch | None, blocked_by: BlockedBy, needed: int
    ) -> list[Sequence]:
        """Return sequences of payers above their share to preempt for a payer below its own (rules
        4 to 6): those whose slots it may claim, or one whose blocks a payer inside its floor may
        claim. None if all such sequences together would not be enough.
        """
        if blocked_by == "batch_slots":
            left = sequence.tokens_left - (0 if found is None else found.cached_tokens)
            quick = self.shares.find_quick_giver(sequence, left)
            return quick or self.shares.find_givers(sequence)
        grant, priority = sequence.parent.request.grant, sequence.parent.request.priority
        if blocked_by != "blocks" or not self.cache.is_inside_floor(
            grant.namespace, grant.quota, needed
        ):
            return []
        able = [
            s
            for s in self.running
            if s is not self.running.first
            and s.parent.payer != grant.payer
            and s.parent.request.priority <= priority
            and self.cache.over_share(s.parent.payer) > 0
            and self.shares.may_claim_from(s)
        ]
        if not able or not self._would_free_enough(able, sequence, found, "blocks", needed):
            return []
        return [max(able, key=lambda s: (self.cache.over_share(s.parent.payer), s.rank))]

    def _would_free_enough(
        self,
        victims: list[Sequence],
        sequence: Sequence,
        found: TreeMatch | None,
        blocked_by: BlockedBy,
        needed: int,
    ) -> bool:
        """Return whether preempting all `victims` would unblock `sequence`."""
        if blocked_by == "batch_slots":
            slots = self.running.batch_slots - sum(s.batch_slots for s in victims)
            return slots + sequence.batch_slots <= self.config.sequences_max
        grant, others, own = sequence.parent.request.grant, 0, 0
        for victim in victims:
            blocks = 0 if victim.table is None else victim.table.held_blocks
            if victim.parent.payer == grant.payer:
                own += blocks
            else:
                others += blocks
        pool, ceiling = self.cache.available_blocks(
            grant.namespace, grant.quota, found, freed_by_others=others, freed_own=own
        )
        return (ceiling if blocked_by == "ceiling" else pool) >= needed

    # -- internals ----------------------------------------------------------------------------

    def _candidates(self, sequence: Sequence, blocked_by: BlockedBy) -> list[Sequence]:
        """Return the running sequences whose preemption could help `sequence`.

        Where a ceiling blocks it, only its own payer's sequences help. Sequences of a payer inside
        its floor are never candidates for another payer (rule 9 of the cache).
        """
        if blocked_by == "batch_slots":
            return list(self.running)
        payer, over_share = sequence.parent.payer, self.cache.over_share
        return [
            s
            for s in self.running
            if (payer_of := s.parent.payer) == payer
            or (blocked_by == "blocks" and over_share(payer_of) > 0)
        ]

    def _running_of_payer(self, sequence: Sequence) -> int:
        """Return how many sequences of the same payer run."""
        payer = sequence.parent.payer
        return [s.parent.payer for s in self.running].count(payer)

    def _available_blocks(
        self, sequence: Sequence, found: TreeMatch | None = None
    ) -> tuple[int, float]:
        """Return what the pool has and what the payer's ceiling leaves; see `PrefixCache`."""
        grant = sequence.parent.request.grant
        return self.cache.available_blocks(grant.namespace, grant.quota, found)

    def _release(
        self,
        sequence: Sequence,
        now_s: float,
        *,
        keep: bool,
        is_preempted: bool = False,
        is_complete: bool = False,
    ) -> None:
        self.running.remove(sequence)
        if self.loading is not None:
            self.loading.remove(sequence)
        if sequence.is_known_to_runner:
            sequence.is_known_to_runner = False
            self.ended_ids.append(sequence.sequence_id)
        table, sequence.suspended = sequence.table or sequence.suspended, None
        if table is not None:
            tokens = sequence.tokens
            if is_preempted and self.cache.suspend(table, tokens, now_s, keep=keep):
                sequence.suspended = table
            else:
                self.cache.release(table, tokens, now_s, keep=keep, is_complete=is_complete)
            sequence.table = None
        sequence.computed = 0
        sequence.order_key = b""
        self.prefix_sharing.release_followers(sequence)
