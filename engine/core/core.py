"""The core: one thread's view of the engine, a step at a time.

It takes requests, asks the scheduler for slices, makes a `StepPlan` of them in tree order, launches
it on the runner, and turns the results into committed blocks, events and usage. It knows no tensor,
no socket and no clock but the one it is given. `engine.server.service` owns it; tests call it
directly.

With `pipeline_depth` 2, step N+1 is planned and launched before N is collected: planning needs
lengths, never token values. A sequence that turns out to have stopped at N then has one extra row
in N+1, whose result is dropped. Blocks may be released while such a row is in flight: a device runs
steps in order, so the next owner of a block writes it later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from engine.api import (
    Clock,
    Ending,
    Erase,
    Erased,
    Event,
    Fidelity,
    Finished,
    FinishReason,
    LevelName,
    Namespace,
    Payer,
    Peek,
    Peeked,
    PromptLogprobs,
    Quota,
    Request,
    SampledToken,
    SampleEnded,
    Started,
    Tokens,
    Usage,
)
from engine.cache import BlockTable, PrefixCache
from engine.config import EngineConfig
from engine.core.constraints import GRAMMAR_FAILURES, Constraints
from engine.core.erasures import Erasures
from engine.core.launch_pacing import ROWS_MAX, LaunchPacing
from engine.core.maintenance import Maintenance
from engine.core.planner import InFlightStep, StepPlanner
from engine.core.request_checks import check_request
from engine.core.smoke_test import BARREN_STEPS_MAX, SMOKE_TEST_ID, smoke_test_request
from engine.core.stats import EngineStats
from engine.core.step_drafts import EXPOSED_S, StepDrafts
from engine.core.timeouts import Timeouts
from engine.drafts.drafter import Draft, Drafter
from engine.drafts.model import ModelSource
from engine.errors import EngineError, EngineUnavailable, InvariantViolation
from engine.levels.copy_formats import laxest
from engine.levels.levels import Levels
from engine.plan import Runner, StepResult
from engine.scheduler.loading import Loading
from engine.scheduler.request_table import RequestTable
from engine.scheduler.scheduler import Scheduler, Slice, work_of
from engine.scheduler.sequence import ActiveRequest, Sequence
from engine.scheduler.step_cost import StepCost
from engine.statistics import Stats

FAILURES = {
    "nan_logits": "The model produced logits that are not numbers.",
    "step_failed": "The step that computed this request failed.",
    **GRAMMAR_FAILURES,
}


class Core:
    """The engine without its process, its socket and its device.

    `on_step_failed` is called with the number of a step that failed and its error.
    """

    def __init__(
        self,
        cache: PrefixCache,
        runner: Runner,
        config: EngineConfig,
        clock: Clock,
        *,
        vocab_size: int,
        context_tokens: int,
        pipeline_depth: int = 1,
        constraints: Constraints | None = None,
        levels: Levels | None = None,
        kv_fidelity: Fidelity = "exact",
        attention_lacks: str = "",
        run_up: int = 0,
        draft_step_s: tuple[float, ...] = (),
        draft_model: ModelSource | None = None,
    ) -> None:
        """`kv_fidelity`: of KV that was never below the device. `attention_lacks`: why the runner
        computes no attention windows, empty if it does. `run_up`: `Architecture.run_up`.
        `draft_step_s`: see `Drafter`; empty if the runner verifies no drafts. `draft_model`: a
        source of drafts beside those that need no model.
        """
        self.cache = cache
        self.runner = runner
        self.config = config
        self.clock = clock
        self.vocab_size = vocab_size
        self.context_tokens = context_tokens
        self.attention_lacks = attention_lacks
        self.pipeline_depth = pipeline_depth
        step_cost = StepCost()
        self.scheduler = Scheduler(cache, config, step_cost, levels, run_up)
        self.levels = levels
        self._kv_fidelity = kv_fidelity
        self._erasures = Erasures(cache, levels)
        self.constraints = constraints or Constraints()
        self.engine_stats = EngineStats(step_cost)
        self.requests = RequestTable()
        self.on_step_failed: Callable[[int, Exception], None] = lambda step, error: None
        self._barren_steps = 0  # in a row
        self._smoke_test: ActiveRequest | None = None
        drafter = None
        if len(draft_step_s) > 1 and config.speculation == "auto":
            exposed_s = EXPOSED_S if pipeline_depth > 1 else 0.0
            drafter = Drafter(
                draft_step_s, exposed_s=exposed_s, model=draft_model,
                computes_twice=self.scheduler.has_states,
            )  # fmt: skip
        self.drafts = StepDrafts(
            drafter, self.scheduler, self.constraints, cache, config.step_tokens_max
        )
        self._events: list[Event] = []
        self._in_flight: deque[InFlightStep] = deque()
        self._pacing = LaunchPacing()
        self._timeouts = Timeouts()
        self._maintenance = Maintenance(cache, self.check, config.check_interval_s, clock())
        self._planner = StepPlanner(cache, self.scheduler, self._add_sequence)

    # -- calls --------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Accept or refuse a request; in both cases its events come from `step`."""
        try:
            check_request(self, request)
            refused = self.requests.choose_refused(
                request, self.config.queue_requests_max, self.config.queue_tokens_max
            )
            if refused is None:
                raise EngineUnavailable("queue_full", *self._queue_full(request.turn_payer))
            self.constraints.submit(request)
        except EngineError as refusal:
            code, message, wait_s = refusal.code, refusal.message, _retry_after_s(refusal)
            self._events.append(
                Finished(request.request_id, "refused", Usage(), code, message, wait_s)
            )
            return
        for other in refused:
            message, wait_s = self._queue_full(other.turn)
            self._finish(other, "refused", "queue_full", message, retry_after_s=wait_s)
        active = self.requests.add(request, self.clock())
        active.may_write &= not (request.adopts and self._erasures.covers(request, self.clock()))
        self._add_sequence(active)
        self.scheduler.add_request(active)
        if request.resumed_tokens and not active.is_compiling:
            self._end_resumed(active)

    def _end_resumed(self, active: ActiveRequest) -> None:
        """End a request whose output was whole when it was resumed: its end was lost."""
        sequence, request = active.sequences[0], active.request
        count, last = sequence.output_tokens, sequence.tokens[-1]
        is_stop = last in request.stop_token_ids and count >= request.min_tokens
        if is_stop or self.constraints.is_complete(sequence):
            self._finish_sample(sequence, "stop")
        elif count >= request.max_tokens:
            self._finish_sample(sequence, "length")

    def abandon(self, request_id: str) -> None:
        """End a request whose connection has left. Nobody enters what it has used: it is counted
        apart. Unknown ids are ignored."""
        active = self.requests.get(request_id)
        if active is not None and not active.request.adopts:  # `_finish` counts these
            self.engine_stats.count_abandoned(active)
        self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """End a request as `cancelled` and release its blocks now. Unknown ids are ignored."""
        active = self.requests.get(request_id)
        if active is not None:
            self._finish(active, "cancelled")

    def end_sample(self, request_id: str, index: int, output_tokens: int) -> None:
        """End a sample as `stop` at a stop string, charged `output_tokens`. Unknown ids are
        ignored.
        """
        active = self.requests.get(request_id)
        if active is None or not 0 <= index < len(active.sequences):
            return
        sequence = active.sequences[index]
        sequence.output_tokens = self.engine_stats.count_unneeded(
            sequence.output_tokens, output_tokens
        )
        if not sequence.is_ended:
            self._finish_sample(sequence, "stop")

    def peek(self, call: Peek) -> Peeked:
        """Return what these tokens would match. Pins and renews nothing."""
        now_s = self.clock()
        found = self.cache.peek(call.namespace, call.tokens, now_s)
        expires_in_s = None if found.expires_at_s is None else max(0.0, found.expires_at_s - now_s)
        promised_tokens = found.promised_tokens
        stored_tokens: tuple[tuple[LevelName, int], ...] = ()
        if self.levels is not None:
            further = call.namespace, call.tokens, found.cached_tokens, now_s
            promised_tokens += self.levels.promised_tokens(*further)
            stored_tokens = self.levels.stored_tokens(*further)
        promisable = None
        if call.quota is not None:
            promisable = self.cache.promisable(call.namespace, call.tokens, call.quota, now_s)
        return Peeked(
            call_id=call.call_id,
            cached_tokens=found.cached_tokens,
            promised_tokens=promised_tokens,
            expires_in_s=expires_in_s,
            resume_gap_tokens=found.resume_gap_tokens,
            stored_tokens=stored_tokens,
            promisable_tokens=None if promisable is None else promisable[0],
            bound="" if promisable is None else promisable[1],
        )

    def erase(self, call: Erase, answer: Callable[[Erased], None] = lambda erased: None) -> None:
        """Erase a namespace, a lease of it, or everything under a token prefix, on every level.

        `answer` is called once with what was erased: now, or by a later `step` where the disk has
        to confirm it.

        Live requests of the namespace commit nothing more, not even if they start later: erased
        tokens must not return. For a lease, this holds for the requests that asked for it.
        """
        for active in self.requests:
            grant = active.request.grant
            if grant.namespace == call.namespace and (
                call.lease_id is None
                or any(lease.lease_id == call.lease_id for lease in grant.leases)
            ):
                active.may_write = False
        self.constraints.erase(call)
        self.drafts.erase(call.namespace)
        self._erasures.erase(call, answer, self.clock())

    def take_changed(self) -> set[Namespace]:
        """Return the namespaces whose numbers may have changed since the last call. O(changed)."""
        changed = self.cache.take_changed()
        if self.levels is not None:
            changed |= self.levels.take_changed()
        return (
            changed
            | self.requests.totals.take_changed()
            | self.scheduler.running.totals.take_changed()
        )

    def namespaces(self) -> set[Namespace]:
        """Return all namespaces that hold blocks or promises, or have live requests. O(these)."""
        below = () if self.levels is None else self.levels.namespaces()
        held = {use.namespace for use in self.cache.namespaces() if use.blocks or use.below}
        return held.union(self.requests.totals, below)

    def stats(self, call_id: int = 0, names: Iterable[Namespace] = ()) -> Stats:
        """Return the engine's statistics and those of the namespaces `names`. O(names)."""
        return self.engine_stats.stats(call_id, self.cache, self.scheduler, self.requests, names)

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests and finish live ones; after `timeout_s` end the rest as
        `shutdown`.
        """
        self._timeouts.drain(self.clock() + timeout_s)

    @property
    def is_draining(self) -> bool:
        """Return whether `drain` has been called."""
        return self._timeouts.is_draining

    def has_work(self) -> bool:
        """Return whether there is anything to compute, collect or report."""
        return bool(self.requests or self._in_flight or self._events)

    @property
    def is_recounting(self) -> bool:
        """Return whether a recount has more pieces to do now."""
        return self._maintenance.is_recounting

    def check(self) -> None:
        """Recount requests, waiting and running sequences. Raises InvariantViolation.
        O(sequences).
        """
        self.requests.check()
        self._pacing.check()
        self.scheduler.queue.check()
        self.scheduler.running.check()
        self.drafts.check([s.sequence_id for active in self.requests for s in active.sequences])
        if self.levels is not None:
            self.levels.check()

    @property
    def is_waiting_for_grammars(self) -> bool:
        """Return whether every live request waits for its grammar and no step is in flight."""
        compiling = len(self.scheduler.compiling)
        return bool(compiling) and compiling == len(self.requests) and not self._in_flight

    @property
    def is_waiting_for_levels(self) -> bool:
        """Return whether outcomes of levels are awaited and there is nothing to compute: no step is
        in flight, no sequence is queued, and every running one is being loaded.
        """
        loading = self.scheduler.loading
        return (
            loading is not None
            and loading.levels.is_busy
            and not (self._in_flight or self._events or self.scheduler.queue)
            and all(sequence.load is not None for sequence in self.scheduler.running)
        )

    def set_quota(self, quota: Quota) -> None:
        """Apply a payer's changed quota on every level."""
        self.cache.set_quota(quota)
        if self.levels is not None:
            self.levels.set_quota(quota)

    def disown_copies(self) -> None:
        """Hand no copy on to the next engine; see `Levels.disown`."""
        if self.levels is not None:
            self.levels.disown()

    def close(self) -> None:
        """End what works beside the core: grammars and levels."""
        self.constraints.close()
        if self.levels is not None:
            self.levels.close()

    def launch_hold_s(self) -> float:
        """Return the seconds for which the next `step` should wait, so that requests that arrive
        meanwhile are part of it; 0 if there is something to report or to compute. O(1).
        """
        must_step = self._events or self.constraints.has_pending_masks or self.scheduler.isolation
        return 0.0 if must_step else self._pacing.hold_s(self.clock())

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Launch the next step, then collect the oldest one if `pipeline_depth` are in flight or
        nothing was launched; before drafts, collect first. Return the events, in order.

        Without work it does maintenance. A failure of a step ends the requests it concerns. Raises
        InvariantViolation, and EngineUnavailable if a repeated smoke test fails.
        """
        if self.drafts.must_collect(self._in_flight):
            while self._in_flight:
                self._collect()
            self.drafts.drained()
        now_s = self.clock()
        self._prepare(now_s)
        # A step of an isolated request, and the step after it, must not overlap with others.
        must_collect = self._in_flight and self.scheduler.isolation
        slices = [] if must_collect else self.scheduler.schedule(now_s)
        is_launched = bool(slices) and self._launch(slices, now_s)
        if self._in_flight and (len(self._in_flight) == self.pipeline_depth or not is_launched):
            self._collect()
        elif not slices:
            self._give_up_stalled(now_s)
        self._pace()
        self._maintenance.run(now_s, is_busy=bool(self.requests or self._in_flight))
        events, self._events = self._events, []
        return events

    def _prepare(self, now_s: float) -> None:
        """End what is overdue, and take what the next step may use: grammars, loads and masks."""
        if self.requests.waiting_requests or self._timeouts.is_draining:
            for overdue in list(self._timeouts.overdue(self.requests, now_s)):
                self._finish(*overdue)
        self._take_compiled()
        if self.scheduler.loading is not None:
            self._take_loaded(self.scheduler.loading, now_s)
        self._make_masks()

    def _launch(self, slices: list[Slice], now_s: float) -> bool:
        """Plan and launch a step; return whether it is in flight."""
        for piece in slices:
            sequence = piece.sequence
            if not sequence.is_known_to_runner and sequence.parent.started_at_s is None:
                self._mark_started(sequence, now_s)
        if self._in_flight:
            drafts: dict[int, Draft] = {}  # the step in flight may sample what they follow
        else:
            slices, drafts = self.drafts.add(slices, now_s)
        plan, in_flight = self._planner.plan(self.engine_stats.next_step(), slices, now_s)
        in_flight.drafts = drafts
        self._timeouts.record_progress()
        try:
            self.runner.launch(plan)
        except InvariantViolation:
            raise
        except Exception as error:
            self._fail_step(in_flight, error)
            return False
        self.drafts.launched(in_flight)
        self._in_flight.append(in_flight)
        self._planner.fork(in_flight)
        return True

    def _pace(self) -> None:
        """Let the next launch wait for requests, where exactly one step is in flight.

        If the batch is large, the next step is long to launch; where prompts of one payer are
        not finished or wait, it has work enough. It is then launched at once. If several payers
        have prompts, the turn of a request that arrives may come before all of these.
        """
        cost = self.engine_stats.step_cost
        if len(self._in_flight) != 1 or not cost.is_measured:
            return
        in_flight = self._in_flight[0]
        if in_flight.rows > ROWS_MAX:
            return
        now_s = self.clock()
        has_prompts = len(self.requests) > self.scheduler.running.totals.requests or any(
            piece.start + piece.count < piece.sequence.prompt_tokens for piece in in_flight.slices
        )
        if has_prompts and not self.scheduler.is_shared(now_s):
            return
        self._pacing.running_alone(now_s, cost.seconds(work_of(in_flight.slices)))

    # -- results ------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Wait for the oldest step in flight, and take its results."""
        in_flight = self._in_flight.popleft()
        began_s = self.clock()
        try:
            result = self.runner.collect()
        except InvariantViolation:
            raise
        except Exception as error:
            self._pacing.forget_step()
            self._fail_step(in_flight, error)
            return
        now_s = self.clock()
        self._pacing.collected(now_s - began_s)
        if result.step != in_flight.step:
            raise InvariantViolation(
                f"the runner returned step {result.step}; expected step {in_flight.step}"
            )
        for sequence_id, code in result.failed.items():
            if (sequence := self.requests.sequence(sequence_id)) is not None:
                if code == "nan_logits":
                    self._erase_prefix(sequence)
                self._fail(sequence.parent, code)
        if result.sampled:
            self._barren_steps = 0
        elif "nan_logits" in result.failed.values():
            self._count_barren_step()
        computed = self._commit_slices(in_flight, result, now_s)
        self._accept_tokens(in_flight, result, now_s)
        self.drafts.record(in_flight, result)
        self.engine_stats.record_step(
            in_flight.launched_at_s,
            now_s,
            computed - len(in_flight.sampling),
            lambda: work_of(in_flight.slices),
            result.elapsed_s,
        )

    def _erase_prefix(self, sequence: Sequence) -> None:
        """Erase what a sequence has read, from its first block: the block that gave it no logits is
        unknown, and later requests that match it would fail too.

        Only the model's own logits lead here, never a request's settings: those would let a client
        erase promises, its own or those of a shared scope.
        """
        beginning = sequence.tokens[: self.cache.block_size]
        call = Erase(0, sequence.parent.request.grant.namespace, tokens=tuple(beginning))
        self._erasures.erase(call, lambda erased: None, self.clock())

    def _commit_slices(self, in_flight: InFlightStep, result: StepResult, now_s: float) -> int:
        """Commit what a step has computed: count it and make its blocks findable. Return how many
        tokens that is.

        The work is counted even if the table is gone (preempted while in flight).
        """
        size, computed = self.cache.block_size, 0
        grown: list[BlockTable] = []
        for piece in in_flight.slices:
            sequence, table, start = piece.sequence, piece.table, piece.start
            end, before = start + piece.count, sequence.computed_before
            computed += piece.count
            if before <= start:
                sequence.computed_before = end
            else:
                sequence.parent.recomputed_tokens += min(end, before) - start
                sequence.computed_before = max(end, before)
            if sequence.table is table:  # not preempted, and not ended
                if end % size and start + 1 == end and table.attention is None and not table.beside:
                    grown.append(table)
                else:
                    self.cache.commit(table, sequence.tokens, end, now_s)
                    self.scheduler.prefix_sharing.resume_reached(sequence)
            if start < sequence.prompt_tokens and not sequence.parent.is_finished:
                self._commit_prompt(piece, max(start, before), result)
        self.cache.commit_tokens(grown)
        return computed

    def _commit_prompt(self, piece: Slice, fresh_from: int, result: StepResult) -> None:
        """Count a slice of a prompt, of which what precedes `fresh_from` was computed before."""
        sequence, end = piece.sequence, piece.start + piece.count
        active, prompt = sequence.parent, sequence.prompt_tokens
        if sequence.index or not piece.count:
            return
        fresh = min(end, prompt) - min(end, fresh_from)
        self.engine_stats.computed_tokens += active.count_prompt(fresh, is_whole=end >= prompt)
        self._prompt_logprobs(piece, result)
        if end >= prompt and active.request.max_tokens == 0 and sequence.table is piece.table:
            self._finish_sample(sequence, "length")  # a preempted one has kept nothing yet

    def _prompt_logprobs(self, piece: Slice, result: StepResult) -> None:
        """Send the entries of a slice that have not been sent: a prompt's logprobs may be larger
        than a frame, and recomputed slices report theirs again.
        """
        sequence = piece.sequence
        active, request = sequence.parent, sequence.parent.request
        sent = active.prompt_logprobs_sent
        if request.prompt_logprobs is None or sent == len(request.tokens):
            return
        next_position = max(0, sent - 1)  # the entry of position p is about token p + 1
        if piece.start > next_position:
            return  # planned before a preemption: the slices are computed and reported again
        entries = result.prompt_logprobs.get(sequence.sequence_id, ())
        fresh = entries[next_position - piece.start :]
        if not sent:
            fresh = (SampledToken(token_id=request.tokens[0]), *fresh)
        if fresh:
            active.prompt_logprobs_sent = sent + len(fresh)
            self._events.append(PromptLogprobs(request.request_id, fresh))

    def _accept_tokens(self, in_flight: InFlightStep, result: StepResult, now_s: float) -> None:
        """Append the output tokens of a step, and end each sample at its last one; tokens after
        that are dropped. First tokens go first: the gateway takes milliseconds for the tokens of a
        large batch.
        """
        sampled, accepted = result.sampled, 0
        sampling = list(in_flight.sampling.values())
        if first := [sequence for sequence in sampling if not sequence.output_tokens]:
            sampling = first + [sequence for sequence in sampling if sequence.output_tokens]
        for sequence in sampling:
            sequence.in_flight -= 1
            if sequence.is_ended:
                continue
            tokens = sampled.get(sequence.sequence_id, ())
            draft = in_flight.drafts.get(sequence.sequence_id)
            most = 1 if draft is None else 1 + len(draft.token_ids)
            if not 1 <= len(tokens) <= most or (len(tokens) > 1 and sequence.in_flight):
                found = f"sequence {sequence.sequence_id} sampled {len(tokens)} tokens"
                wanted = "1" if most == 1 else f"1 to {most}"
                raise InvariantViolation(f"{found}; expected {wanted}")
            accepted += self._accept_sampled(sequence, tokens, draft, now_s)
        self.engine_stats.output_tokens += accepted

    def _accept_sampled(
        self,
        sequence: Sequence,
        tokens: tuple[SampledToken, ...],
        draft: Draft | None,
        now_s: float,
    ) -> int:
        """Append a sequence's output tokens up to its last one; return how many those are."""
        active = sequence.parent
        request, known = active.request, len(sequence.tokens)
        is_constrained = sequence.matcher is not None
        reason: FinishReason | None = None
        code = ""
        for token in tokens:
            token_id = token.token_id
            if is_constrained and (code := self.constraints.consume(sequence, token_id)):
                break
            sequence.tokens.append(token_id)
            sequence.output_tokens = count = sequence.output_tokens + 1
            if token.logprob is not None:
                sequence.cumulative_logprob += token.logprob
            is_stop = token_id in request.stop_token_ids and count >= request.min_tokens
            if is_stop or (is_constrained and self.constraints.is_complete(sequence)):
                reason = "stop"
            elif count >= request.max_tokens:
                reason = "length"
            if reason is not None:
                break
        kept = len(sequence.tokens) - known
        if kept:
            if active.first_token_at_s is None:
                active.first_token_at_s = now_s
            self._events.append(Tokens(request.request_id, sequence.index, tokens[:kept]))
        self.drafts.note(sequence, draft, sequence.tokens[known:], now_s)
        if code:
            self._fail(active, code)
        elif reason is not None:
            self._finish_sample(sequence, reason)
        return kept

    # -- endings ------------------------------------------------------------------------------

    def _finish_sample(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.parent.request
        self.drafts.end(sequence)
        self.scheduler.stop(sequence, self.clock(), is_complete=True)
        logprob = None if request.sampling.logprobs is None else sequence.cumulative_logprob
        self._events.append(
            SampleEnded(request.request_id, sequence.index, reason, sequence.output_tokens, logprob)
        )
        alone = request.samples == 1 or request.max_tokens == 0
        if alone or all(s.is_ended for s in sequence.parent.sequences):
            self._finish(sequence.parent, "done")

    def _finish(
        self,
        active: ActiveRequest,
        ending: Ending,
        code: str = "",
        message: str = "",
        *,
        retry_after_s: float | None = None,
    ) -> None:
        """Emit the one final event of a request and release everything it holds."""
        if active.is_finished:
            raise InvariantViolation("a request was finished twice")
        active.is_finished = True
        for sequence in active.sequences:
            self.drafts.end(sequence)
        now_s = self.clock()
        self.constraints.release(active.request)
        self.scheduler.remove_request(active, now_s, keep=ending != "failed")
        usage = active.usage(now_s)
        self.requests.remove(active)
        if active.request.adopts:
            self.engine_stats.count_abandoned(active)
        if active is self._smoke_test:
            self._end_smoke_test(usage, ending, code)
            return
        self._events.append(
            Finished(active.request.request_id, ending, usage, code, message, retry_after_s)
        )

    def _is_inside_floor(self, active: ActiveRequest) -> bool:
        grant = active.request.grant
        return self.cache.is_inside_floor(grant.namespace, grant.quota, 1)

    def _give_up_stalled(self, now_s: float) -> None:
        """End a request for which promises have left no room for several steps; it may return when
        the first of them ends.
        """
        loading = self.scheduler.loading
        is_moving = loading is not None and (len(loading) > 0 or loading.levels.is_moving)
        if is_moving or self.constraints.has_pending_masks:
            return
        stalled = self._timeouts.find_stalled(self.requests, self._is_inside_floor)
        if stalled is not None:
            lapse_s = self.cache.promises.next_lapse_s()
            wait_s = None if lapse_s is None else max(0.0, lapse_s - now_s)
            self._finish(*stalled, retry_after_s=wait_s)

    def _fail(self, active: ActiveRequest, code: str) -> None:
        if not active.is_finished:
            self._finish(active, "failed", code, FAILURES.get(code, FAILURES["step_failed"]))

    def _fail_step(self, in_flight: InFlightStep, error: Exception) -> None:
        """Fail all requests of a broken step, since the request at fault is unknown; the engine
        continues.
        """
        self.on_step_failed(in_flight.step, error)
        for sequence in in_flight.sampling.values():
            sequence.in_flight -= 1
        message = f"The step that computed this request failed ({type(error).__name__})."
        concerned = [piece.sequence.parent for piece in in_flight.slices]
        concerned += [target.parent for target in in_flight.copy_targets]
        for active in concerned:
            if not active.is_finished:
                self._finish(active, "failed", "step_failed", message)
        self._count_barren_step()

    def _count_barren_step(self) -> None:
        """Count a step that failed, or all of whose sequences did; after several in a row repeat
        the smoke test: only that tells a broken device from the requests of a tenant.
        """
        self._barren_steps += 1
        if self._barren_steps % BARREN_STEPS_MAX == 0 and self._smoke_test is None:
            active = self.requests.add(smoke_test_request(), self.clock())
            self._smoke_test = active
            self._add_sequence(active)
            self.scheduler.add_request(active)

    def _end_smoke_test(self, usage: Usage, ending: Ending, code: str) -> None:
        """Leave no trace of a repeated smoke test. Raises EngineUnavailable if its step failed:
        only a new process gets a working device.
        """
        self._smoke_test = None
        self.engine_stats.uncount(usage)
        self._events[:] = [one for one in self._events if one.request_id != SMOKE_TEST_ID]
        if ending == "failed" and code in FAILURES:
            raise EngineUnavailable(
                code, f"{self._barren_steps} steps failed in a row, and then the smoke test."
            )

    def _queue_full(self, turn: Payer) -> tuple[str, float]:
        """Return the message and the retry time for a payer if its request finds no room.

        Both say something only of the payer's own requests.
        """
        waiting = self.requests.waiting.get(turn)
        requests, tokens = (len(waiting.requests), waiting.tokens) if waiting else (0, 0)
        message = (
            f"The queue is full; {requests} requests of this tenant with {tokens} prompt tokens"
            " are waiting."
        )
        return message, self.engine_stats.wait_s(self.requests, turn)

    # -- internals ----------------------------------------------------------------------------

    def _take_loaded(self, loading: Loading, now_s: float) -> None:
        """Take what has come from the levels: sequences go on, followers are released."""
        launched = self.engine_stats.step
        collected = self._in_flight[0].step - 1 if self._in_flight else launched
        for sequence in loading.turn(now_s, launched, collected, self.scheduler.running):
            self.scheduler.prefix_sharing.resume_reached(sequence)

    def _add_sequence(self, active: ActiveRequest) -> Sequence:
        sequence = self.requests.add_sequence(active)
        self.constraints.attach_matcher(sequence)
        return sequence

    def _take_compiled(self) -> None:
        """Queue the requests whose grammar is ready; refuse those whose grammar is not usable."""
        for request_id, outcome in self.constraints.take_ready():
            active = self.requests.get(request_id)
            assert active is not None, "a request that waits for a grammar is live"
            if isinstance(outcome, EngineError):
                wait_s = _retry_after_s(outcome)
                self._finish(active, "refused", outcome.code, outcome.message, retry_after_s=wait_s)
            else:
                active.compiled = outcome
                code = self.constraints.attach_matcher(active.sequences[0])
                self.scheduler.grammar_ready(active)
                if code:
                    self._fail(active, code)
                elif active.request.resumed_tokens:
                    self._end_resumed(active)

    def _mark_started(self, sequence: Sequence, now_s: float) -> None:
        active, table = sequence.parent, sequence.table
        assert table is not None
        self.requests.mark_started(active, now_s)
        if active is self._smoke_test:
            return
        prompt = active.request.prompt_tokens
        active.cached_tokens = cached = min(table.kv_tokens, prompt)
        use = active.level_use
        self.engine_stats.prompt_tokens += prompt
        self.engine_stats.cached_tokens += cached
        loaded = sum(tokens for _, tokens in active.loaded_tokens)
        self.engine_stats.device_tokens += max(0, cached - loaded)
        if self.levels is not None:
            self.levels.counts.started(active.loaded_tokens)
        self._events.append(
            Started(
                request_id=active.request.request_id,
                prompt_tokens=prompt,
                cached_tokens=cached,
                leases=table.leases,
                resume_gap_tokens=table.resume_gap_tokens,
                loaded_tokens=active.loaded_tokens,
                fidelity=self._fidelity_of(table),
                wait=None if use is None else use.told(table.kv_tokens),
            )
        )

    def _fidelity_of(self, table: BlockTable) -> Fidelity:
        """Return how far from exact the cached tokens of a table may be."""
        if self.levels is None or not table.kv_tokens:
            return self._kv_fidelity
        return laxest(self._kv_fidelity, self.levels.read_fidelity(table.namespace))

    def _make_masks(self) -> None:
        """Compute masks after new tokens; a request with an empty mask fails."""
        if self.constraints.has_pending_masks:
            busy = self._in_flight or any(s.is_schedulable for s in self.scheduler.running)
            for sequence, code in self.constraints.fill_masks(self.clock, is_idle=not busy):
                self._fail(sequence.parent, code)


def _retry_after_s(refusal: EngineError) -> float | None:
    """Return when to try again; None for what can never run."""
    return refusal.retry_after_s if isinstance(refusal, EngineUnavailable) else None
