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
from typing import Final

from msgspec import Struct

from engine.api import Payer
from engine.cache import BlockTable, PrefixCache, TreeMatch
from engine.config import EngineConfig
from engine.levels.levels import Levels
from engine.plan import Mask, StateCopy
from engine.scheduler.admission import Admission, BatchRoom, BlockedBy
from engine.scheduler.batch_shares import BatchShares
from engine.scheduler.isolation import Isolation, Turn
from engine.scheduler.loading import Loading
from engine.scheduler.prefix_sharing import PrefixSharing
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_set import RunningSet
from engine.scheduler.sequence import ActiveRequest, Sequence
from engine.scheduler.step_cost import PromptBudget, StepCost, StepWork, attended

STEPS_WITHOUT_STREAMS: Final = 2
"""How many gap targets a step may take in which no sequence decodes and one payer has all requests:
then only a request that arrives meanwhile waits for its end.
"""
ALONE_AFTER_S: Final = 5.0
"""Seconds without a request of another payer after which a payer counts as alone. Between two
requests of a chat others would fill the steps, and the next one would wait for a long one.
"""
DECODES_OF_SHARED_STEP: Final = 3
"""How many times its decodes a step may always take, up to the gap target, if several payers
have requests: in a large batch a short target would leave prompts no time.
"""
DECODES_OF_ONE_PAYER: Final = 6
"""How many times its decodes a step may take where one payer has all requests, if that is longer
than the gap target: its streams wait for its own prompts, and small slices would cost it a sixth of
its throughput on a slow machine.
"""


class Slice(Struct, frozen=True, gc=False):
    """Compute `count` tokens of a sequence from position `start`, on its table, behind `silent`
    ones (`engine.plan.Row`); then copy its state to the blocks `keeps`, if there are any. Behind
    them compute the `drafts`, which may turn out not to be the sequence's tokens."""

    sequence: Sequence
    table: BlockTable
    start: int
    count: int
    silent: int = 0
    keeps: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    draft_masks: tuple[Mask, ...] = ()


def work_of(pieces: Collection[Slice]) -> StepWork:
    """Return the work of a step's slices. O(slices)."""
    rows = prompt_tokens = row_context = prompt_context = 0
    for piece in pieces:
        start = piece.start - piece.silent
        count = piece.count + piece.silent + len(piece.drafts)
        if piece.table.attention is not None:
            start = piece.sequence.tokens_read(start)
        if count == 1:
            rows += 1
            row_context += start
        elif count:
            rows += 1
            prompt_tokens += count
            prompt_context += attended(start, count)
    return StepWork(rows, prompt_tokens, row_context, prompt_context)


class Scheduler:
    """Running and waiting sequences.

    `compiling`: sequences that wait for a grammar. `loading`: those that wait for a level below the
    device, None without levels. `ended_ids`: ids to report to the runner as ended. `run_up`:
    `Architecture.run_up`; `has_states`: sequences have recurrent states. `last_keeps`: the states
    that these leave.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        step_cost: StepCost,
        levels: Levels | None,
        run_up: int = 0,
    ) -> None:
        self.cache = cache
        self.run_up = run_up
        self.has_states = bool(run_up or cache.states.blocks)
        self.config = config
        self.step_cost = step_cost
        self.queue = RequestQueue()
        self.running = RunningSet(config.preemptions_max)
        self.shares = BatchShares(
            self.queue, self.running, config.sequences_max, config.preemptions_max
        )
        self.room = BatchRoom(cache, config, self.running, self.shares)
        self.prefix_sharing = PrefixSharing(self.queue, cache.block_size)
        self.isolation = Isolation()
        self.loading: Loading | None = None
        if levels is not None:
            self.loading = Loading(levels, cache, self.queue, self.step_cost)
        self.compiling: dict[int, Sequence] = {}
        self.ended_ids: list[int] = []
        self.last_keeps: list[StateCopy] = []
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
                if self.cache.states.blocks and sequence.table is None:
                    self._mark_for_next(sequence)
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
        if not self.room.lets_in(sequence):
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

    def _mark_for_next(self, sequence: Sequence) -> None:
        """Let the one that computes what the next waiting sequence begins with keep a state where
        they part: it cannot resume elsewhere. O(running)."""
        if sequence.parent.request.grant.read:
            leader, tokens = self.prefix_sharing.leader_of(sequence, None, self.running)
            if leader is not None and leader.table is not None and leader.computed < tokens:
                self.cache.mark_resume_point(leader.table, tokens)

    def _is_quick(self, sequence: Sequence, now_s: float) -> bool:
        """Return whether a waiting sequence may claim a slot of a full batch by how little it has
        left. A long prompt or answer is known without a look-up."""
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
            # `is_decoding` and `is_schedulable` without two calls for each row of each step.
            table, start = sequence.table, sequence.computed
            length = len(sequence.tokens) + sequence.in_flight
            if start + 1 != length or start < sequence.prompt_tokens:
                if sequence.is_schedulable:
                    prefilling.append(sequence)
                continue
            if sequence.is_halted or length == sequence.length_max or table is None:
                continue
            if sequence.matcher is not None and not sequence.is_schedulable:
                continue
            if start >= table.writable_tokens and not self._grow(
                sequence, start + 1, slices, now_s
            ):
                continue
            slices[sequence.sequence_id] = self._slice(sequence, table, start, 1, now_s)
            decoding.append(sequence)
        self.queue.charge_each(decoding)
        return [s for s in prefilling if s.table is not None]  # not preempted by a decode above

    def _slice(
        self, sequence: Sequence, table: BlockTable, start: int, count: int, now_s: float
    ) -> Slice:
        """Return a slice. A sequence that resumes, or whose drafts were accepted, brings its
        recurrent states up to it first; where one is wanted at its end, it is kept if there is
        room.
        """
        is_known = sequence.is_known_to_runner
        silent = sequence.state_lag if is_known else min(self.run_up, start)
        keeps = self.cache.states.keep(table, start + count, now_s) if table.marks else ()
        return Slice(sequence, table, start, count, silent, keeps)

    def _prompt_budget(self, decodes: dict[int, Slice], now_s: float) -> PromptBudget:
        """Return the prompt tokens that may be computed beside this step's `decodes` (rule 1)."""
        if len(self.running.slots_of.keys() | self.queue.waiting_slots.keys()) > 1:
            self._shared_at_s = now_s
        target_s = self.config.gap_target_ms / 1000
        shared_s = self.config.gap_target_shared_ms / 1000 or target_s
        tokens = self.config.step_tokens_max - len(decodes)
        if self.has_states:
            tokens -= sum(piece.silent for piece in decodes.values())
        tokens = max(1, tokens)
        if not self.queue and len(decodes) == len(self.running):
            return PromptBudget(self.step_cost, tokens, target_s, shared_s)  # no prompt
        is_shared = self.is_shared(now_s)
        if not decodes and not any(sequence.is_decoding for sequence in self.running):
            longest_s = shared_s if is_shared else target_s * STEPS_WITHOUT_STREAMS
            return PromptBudget(self.step_cost, tokens, longest_s, shared_s)
        decodes_s = self.step_cost.seconds(work_of(decodes.values()))
        if is_shared:
            target_s = min(target_s, max(shared_s, DECODES_OF_SHARED_STEP * decodes_s))
        else:
            target_s = max(target_s, DECODES_OF_ONE_PAYER * decodes_s)
        return PromptBudget(self.step_cost, tokens, target_s - decodes_s, shared_s)

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
        if (mark := self.cache.states.next_mark(table, start)) is not None:
            longest = min(longest, mark - start)
        count = budget.fit(before, min(sequence.tokens_to_compute, longest))
        if count == 0:
            return
        if not self.cache.grow(table, start + count, now_s, start=start):
            blocks = min(self.room.available_blocks(sequence))
            room = self.cache.tokens_to_grow(table, int(blocks)) - start
            count = min(count, max(1, room))
            if sequence is not self.running.first:
                if not self.cache.grow(table, start + count, now_s, start=start):
                    return  # it keeps its blocks and waits for room
            elif not self._grow(sequence, start + count, slices, now_s):
                return
        slices[sequence.sequence_id] = piece = self._slice(sequence, table, start, count, now_s)
        self.queue.charge(sequence, count)
        is_whole = count == sequence.tokens_to_compute and sequence.parent.started_at_s is None
        budget.spend(before, count + piece.silent, guest=sequence.parent.turn if is_whole else None)

    def _grow(self, sequence: Sequence, upto: int, slices: dict[int, Slice], now_s: float) -> bool:
        """Make room for a running sequence, preempting sequences that rank below it; return
        success.
        """
        while sequence.table is not None:
            if self.cache.grow(sequence.table, upto, now_s, start=sequence.computed):
                return True
            victim = self.room.choose_victim(sequence)
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
        admission = Admission(self.room, sequence, found)
        while admission.blocked_by:
            lower = admission.find_lower()
            victims = lower or admission.find_givers()
            if not victims:
                return admission.blocked_by
            for one in victims:
                self._preempt_in_step(one, slices, now_s, is_claimed=not lower)
            found = self._find_prefix(sequence, now_s)
            admission = Admission(self.room, sequence, found)
        if not self.running and self._waits_for_moves(sequence, admission, now_s):
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
            marks=active.request.marks,
            renews=not active.request.adopts,
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

    def _waits_for_moves(self, sequence: Sequence, admission: Admission, now_s: float) -> bool:
        """Return whether a sequence that would run alone waits until moves release blocks: what it
        would load has no room before, and all of it would be computed again.
        """
        if self.loading is None or not self.loading.levels.is_moving:
            return False
        return admission.is_short_of_blocks and self.loading.may_load(
            sequence, admission.found, now_s
        )

    # -- internals ----------------------------------------------------------------------------

    def _keep_state(self, sequence: Sequence, table: BlockTable, now_s: float) -> None:
        """Keep the state of a sequence that ends, unless a launched step has taken it further."""
        position = table.kv_tokens - sequence.state_lag
        if sequence.computed == table.kv_tokens and (
            blocks := self.cache.states.keep_last(table, position, now_s)
        ):
            self.last_keeps.append(StateCopy(sequence.sequence_id, blocks))

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
            if keep and not is_preempted and sequence.table is not None:
                self._keep_state(sequence, sequence.table, now_s)
        table, sequence.suspended = sequence.table or sequence.suspended, None
        if table is not None:
            tokens = sequence.tokens
            if is_preempted and self.cache.suspend(table, tokens, now_s, keep=keep):
                sequence.suspended = table
            else:
                self.cache.release(table, tokens, now_s, keep=keep, is_complete=is_complete)
            sequence.table = None
        sequence.computed = sequence.state_lag = 0
        sequence.order_key = b""
        self.prefix_sharing.release_followers(sequence)
