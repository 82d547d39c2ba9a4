"""The core: one thread's view of the engine, a step at a time.

Takes requests, asks the scheduler for slices, makes a `StepPlan` of them in tree order, hands it to
the runner, and turns what comes back into committed blocks, events and usage. It knows no tensor,
no socket and no clock but the one it was given. `engine.server.service` owns it; tests drive it by
hand.

With `pipeline_depth` 2, step N+1 is planned and launched before N is collected: planning needs
lengths, never token values. A sequence that turns out to have stopped at N has then one row too
many in N+1, whose result is dropped. Blocks may go back while such a row is in flight: a device
runs steps in order, and whoever gets the block writes it later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.api import (
    Clock,
    Ending,
    Erase,
    Erased,
    Event,
    Finished,
    FinishReason,
    Namespace,
    Peek,
    Peeked,
    PromptLogprobs,
    Request,
    SampledToken,
    SampleEnded,
    Started,
    Stats,
    Tokens,
    Usage,
)
from engine.cache import BlockTable, PrefixCache
from engine.config import EngineConfig
from engine.core.constraints import GRAMMAR_FAILURES, Constraints
from engine.core.maintenance import Housekeeper
from engine.core.planner import InFlightStep, StepPlanner
from engine.core.request_checks import check_request
from engine.core.stats import EngineStats
from engine.core.timeouts import Timeouts
from engine.errors import EngineError, InvariantViolation
from engine.plan import Runner, StepResult
from engine.scheduler.request_table import RequestTable
from engine.scheduler.scheduler import Scheduler, Slice
from engine.scheduler.sequence import ActiveRequest, Sequence

FAILURES = {
    "nan_logits": "The model's output was not a number.",
    "step_failed": "The step that computed this request failed.",
    **GRAMMAR_FAILURES,
}


class Core:
    """The engine without its process, its socket and its device."""

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
    ) -> None:
        self.cache = cache
        self.runner = runner
        self.config = config
        self.clock = clock
        self.vocab_size = vocab_size
        self.context_tokens = context_tokens
        self.pipeline_depth = pipeline_depth
        self.scheduler = Scheduler(cache, config)
        self.constraints = constraints or Constraints()
        self.vitals = EngineStats()
        self.roster = RequestTable()
        self._events: list[Event] = []
        self._flights: deque[InFlightStep] = deque()
        self._patience = Timeouts()
        self._housekeeper = Housekeeper(cache, self.check, config.check_interval_s, clock())
        self._planner = StepPlanner(cache, self.scheduler, self._add_sequence)

    # -- what is asked ------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Take a request in, or refuse it: either way its events come from `step`."""
        try:
            check_request(self, request)
            self.constraints.ask(request)
        except EngineError as refusal:
            self._events.append(
                Finished(request.request_id, "refused", Usage(), refusal.code, refusal.message)
            )
            return
        work = self.roster.enter(request, self.clock())
        self._add_sequence(work)
        self.scheduler.enter(work)

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more: its blocks go back now. Unknown ids are ignored."""
        work = self.roster.get(request_id)
        if work is not None:
            self._finish(work, "cancelled")

    def end_sample(self, request_id: str, index: int, output_tokens: int) -> None:
        """A stop string was found: the sample ends as `stop`, charged `output_tokens`."""
        work = self.roster.get(request_id)
        if work is None or not 0 <= index < len(work.sequences):
            return
        sequence = work.sequences[index]
        sequence.output_tokens = self.vitals.needed(sequence.output_tokens, output_tokens)
        if not sequence.is_ended:
            self._end(sequence, "stop")

    def peek(self, call: Peek) -> Peeked:
        """What would these tokens hit? Changes nothing."""
        now_s = self.clock()
        found = self.cache.peek(call.namespace, call.tokens, now_s)
        expires_in_s = None if found.expires_at_s is None else max(0.0, found.expires_at_s - now_s)
        return Peeked(call.call_id, found.cached_tokens, found.promised_tokens, expires_in_s)

    def erase(self, call: Erase) -> Erased:
        """Forget a namespace, a lease of it, or what lies under a prefix.

        Requests of the namespace that are here now leave nothing in the tree any more, nor when
        they begin later: erased words must not come back. Of a lease, those that asked for it.
        """
        for work in self.roster:
            grant = work.request.grant
            if grant.namespace == call.namespace and (
                call.lease_id is None
                or any(lease.lease_id == call.lease_id for lease in grant.leases)
            ):
                work.may_write = False
        self.constraints.erase(call)
        blocks = self.cache.erase(call.namespace, lease_id=call.lease_id, tokens=call.tokens)
        return Erased(call.call_id, blocks)

    def take_changed(self) -> set[Namespace]:
        """Namespaces whose numbers may have changed since the last call. O(these)."""
        changed = self.cache.take_changed()
        return changed | self.roster.tally.take_moved() | self.scheduler.running.tally.take_moved()

    def namespaces(self) -> set[Namespace]:
        """All that hold something or ask for it. O(these)."""
        return {use.namespace for use in self.cache.namespaces()}.union(self.roster.tally)

    def stats(self, call_id: int = 0, names: Iterable[Namespace] = ()) -> Stats:
        """The heartbeat, with what `names` hold and ask for. O(names)."""
        return self.vitals.stats(call_id, self.cache, self.scheduler, self.roster, names)

    def drain(self, timeout_s: float) -> None:
        """Refuse what comes; finish what is here; what is left at the end ends as `shutdown`."""
        self._patience.drain(self.clock() + timeout_s)

    @property
    def is_draining(self) -> bool:
        return self._patience.is_draining

    def has_work(self) -> bool:
        """Is there anything to compute, collect or say?"""
        return bool(self.roster or self._flights or self._events)

    @property
    def is_recounting(self) -> bool:
        """Has it more of itself to look over now?"""
        return self._housekeeper.is_recounting

    def check(self) -> None:
        """Recount what is kept of requests. Raises InvariantViolation. O(sequences)."""
        self.roster.check()
        self.scheduler.running.check()

    @property
    def only_compiles(self) -> bool:
        """Is all there is to do to wait for grammars?"""
        compiling = len(self.scheduler.compiling)
        return bool(compiling) and compiling == len(self.roster) and not self._flights

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plan, launch, collect, commit: this step's events, in order.

        With nothing to do it keeps house. Raises InvariantViolation alone: everything else that
        goes wrong in a step ends the requests it concerns.
        """
        now_s = self.clock()
        for overdue in list(self._patience.overdue(self.roster, now_s)):
            self._finish(*overdue)
        self._take_compiled()
        self._make_masks()
        slices = self.scheduler.schedule(now_s)
        launched = bool(slices) and self._launch(slices, now_s)
        if self._flights and (len(self._flights) >= self.pipeline_depth or not launched):
            self._collect()
        elif (
            not slices
            and not self.constraints.is_behind
            and (stalled := self._patience.stalled(self.roster))
        ):
            self._finish(*stalled)
        self._housekeeper.keep(now_s, is_busy=bool(self.roster or self._flights))
        events, self._events = self._events, []
        return events

    def _launch(self, slices: list[Slice], now_s: float) -> bool:
        for piece in slices:
            if piece.sequence.work.started_at_s is None:
                self._started(piece.sequence, now_s)
        plan, flight = self._planner.plan(self.vitals.next_step(), slices, now_s)
        self._patience.moved()
        try:
            self.runner.launch(plan)
        except InvariantViolation:
            raise
        except Exception as error:
            self._step_failed(flight, error)
            return False
        self._flights.append(flight)
        self._planner.fork(flight)
        return True

    # -- what comes back ----------------------------------------------------------------------

    def _collect(self) -> None:
        flight = self._flights.popleft()
        try:
            result = self.runner.collect()
        except InvariantViolation:
            raise
        except Exception as error:
            self._step_failed(flight, error)
            return
        now_s = self.clock()
        if result.step != flight.step:
            raise InvariantViolation(f"step {result.step} came back for step {flight.step}")
        for sequence_id, code in result.failed.items():
            if (sequence := self.roster.sequence(sequence_id)) is not None:
                # Nobody knows which block of it is to blame; whoever found that would fail as well.
                beginning = sequence.tokens[: self.cache.block_size]
                self.cache.erase(sequence.work.request.grant.namespace, tokens=beginning)
                self._fail(sequence.work, code)
        computed = 0
        for piece, table in flight.slices:
            computed += piece.count
            if not piece.sequence.work.is_finished:
                self._computed(piece, table, result, now_s)
        drawn = {sampled.sequence_id: sampled.token for sampled in result.sampled}
        for sequence_id, sequence in flight.drawing.items():
            sequence.in_flight -= 1
            if not sequence.is_ended:
                if sequence_id not in drawn:
                    raise InvariantViolation(f"sequence {sequence_id} drew no token")
                self._accept(sequence, drawn[sequence_id], now_s)
        self.vitals.stepped(flight.launched_at_s, now_s, computed - len(flight.drawing))

    def _computed(self, piece: Slice, table: BlockTable, result: StepResult, now_s: float) -> None:
        """The step has put this slice's KV in place: count it, and let others find it.

        Work is counted even where the table is gone meanwhile (preempted while in flight).
        """
        sequence, end = piece.sequence, piece.start + piece.count
        work, prompt = sequence.work, len(sequence.work.request.tokens)
        again = max(0, min(end, sequence.computed_before) - piece.start)
        sequence.computed_before = max(sequence.computed_before, end)
        work.recomputed_tokens += again
        self.vitals.recomputed_tokens += again
        if sequence.table is table:
            self.cache.commit(table, sequence.tokens, end, now_s)
            self.scheduler.twins.reached(sequence)
        if sequence.index == 0 and piece.count and piece.start < prompt:
            fresh = min(end, prompt) - piece.start - again
            self.vitals.computed_tokens += work.count_prompt(fresh, is_whole=end >= prompt)
            self._prompt_logprobs(piece, result)
            if end >= prompt and work.request.max_tokens == 0:
                self._end(sequence, "length")

    def _prompt_logprobs(self, piece: Slice, result: StepResult) -> None:
        sequence = piece.sequence
        work, request = sequence.work, sequence.work.request
        if request.prompt_logprobs is None or work.is_prompt_told:
            return
        if piece.start > len(sequence.progress):
            return  # planned before a preemption: its slices are computed, and told, again
        sequence.progress[piece.start :] = result.prompt_logprobs.get(sequence.sequence_id, ())
        if len(sequence.progress) == len(request.tokens) - 1:
            work.is_prompt_told = True
            first = SampledToken(token_id=request.tokens[0])
            self._events.append(PromptLogprobs(request.request_id, (first, *sequence.progress)))

    def _accept(self, sequence: Sequence, token: SampledToken, now_s: float) -> None:
        """One more output token; it may be the last."""
        work, request = sequence.work, sequence.work.request
        if code := self.constraints.consume(sequence, token.token_id):
            self._fail(work, code)
            return
        sequence.tokens.append(token.token_id)
        sequence.output_tokens += 1
        self.vitals.output_tokens += 1
        if token.logprob is not None:
            sequence.cumulative_logprob += token.logprob
        if work.first_token_at_s is None:
            work.first_token_at_s = now_s
        self._events.append(Tokens(request.request_id, sequence.index, (token,)))
        is_stop = token.token_id in request.stop_token_ids
        is_stop = is_stop and sequence.output_tokens >= request.min_tokens
        if is_stop or self.constraints.is_complete(sequence):
            self._end(sequence, "stop")
        elif sequence.output_tokens >= request.max_tokens:
            self._end(sequence, "length")

    # -- endings ------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.work.request
        self.scheduler.stop(sequence, self.clock())
        logprob = None if request.sampling.logprobs is None else sequence.cumulative_logprob
        self._events.append(
            SampleEnded(request.request_id, sequence.index, reason, sequence.output_tokens, logprob)
        )
        alone = request.samples == 1 or request.max_tokens == 0
        if alone or all(s.is_ended for s in sequence.work.sequences):
            self._finish(sequence.work, "done")

    def _finish(
        self, work: ActiveRequest, ending: Ending, code: str = "", message: str = ""
    ) -> None:
        """The one final event of a request; everything it holds goes back."""
        if work.is_finished:
            raise InvariantViolation("a request was finished twice")
        work.is_finished = True
        now_s = self.clock()
        self.constraints.forget(work.request)
        self.scheduler.leave(work, now_s, keep=ending != "failed")
        usage = work.usage(now_s)
        self.roster.leave(work)
        self._events.append(Finished(work.request.request_id, ending, usage, code, message))

    def _fail(self, work: ActiveRequest, code: str) -> None:
        if not work.is_finished:
            self._finish(work, "failed", code, FAILURES.get(code, FAILURES["step_failed"]))

    def _step_failed(self, flight: InFlightStep, error: Exception) -> None:
        """A step broke and nobody can say for whom: its requests fail, the engine lives on."""
        self.vitals.failed_steps += 1
        for drawer in flight.drawing.values():
            drawer.in_flight -= 1
        message = f"The step that computed this request failed ({type(error).__name__})."
        concerned = [piece.sequence.work for piece, _ in flight.slices]
        concerned += [sequence.work for sequence in flight.bystanders]
        for work in concerned:
            if not work.is_finished:
                self._finish(work, "failed", "step_failed", message)

    # -- inside -------------------------------------------------------------------------------

    def _add_sequence(self, work: ActiveRequest) -> Sequence:
        sequence = self.roster.add_sequence(work)
        self.constraints.begin(sequence)
        return sequence

    def _take_compiled(self) -> None:
        """Requests whose grammar is ready may run; the others have their refusal."""
        for request_id, outcome in self.constraints.ready():
            work = self.roster.get(request_id)
            assert work is not None, "its grammar was asked for, and not forgotten"
            if isinstance(outcome, EngineError):
                self._finish(work, "refused", outcome.code, outcome.message)
            else:
                work.compiled = outcome
                self.constraints.begin(work.sequences[0])
                self.scheduler.compiled(work)

    def _started(self, sequence: Sequence, now_s: float) -> None:
        work, table = sequence.work, sequence.table
        assert table is not None
        self.roster.started(work, now_s)
        work.cached_tokens = table.kv_tokens
        self.vitals.prompt_tokens += len(work.request.tokens)
        self.vitals.cached_tokens += table.kv_tokens
        self._events.append(
            Started(
                work.request.request_id, len(work.request.tokens), table.kv_tokens, table.leases
            )
        )

    def _make_masks(self) -> None:
        """What may follow the tokens that have come; where nothing may, the request fails."""
        if self.constraints.is_behind:
            busy = self._flights or any(s.wants_row for s in self.scheduler.running)
            for sequence, code in self.constraints.fill(self.clock, is_idle=not busy):
                self._fail(sequence.work, code)
