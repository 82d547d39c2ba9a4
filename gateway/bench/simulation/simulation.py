"""A fleet in simulated time: requests, engines, a gateway between them, and faults.

One event loop, in which nothing is left to the machine: the same requests, policy and faults give
the same figures. Events of one time happen in this order: steps end, words of engines arrive,
faults begin and end, requests arrive, idle engines begin a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from msgspec import Struct

from engine.api import EngineRole
from gateway.bench.simulation.engine_shape import EngineShape, fit_step_cost
from gateway.bench.simulation.faults import Fault
from gateway.bench.simulation.figures import GapCounts, RequestOutcome
from gateway.bench.simulation.policies import RoutingPolicy
from gateway.bench.simulation.simulated_engine import (
    SimulatedEngine,
    SimulatedSequence,
    StepEvents,
)
from gateway.bench.simulation.simulated_gateway import SimulatedGateway, SimulatedRoute
from gateway.bench.simulation.stretch_strides import StretchStrides
from gateway.bench.simulation.traffic import SimulatedRequest
from gateway.routing.router import PEER_S

NODES_TOLD_MAX = 1 << 30
"""An engine tells all that a step has changed at once."""
STEP_ENDS, WORD_ARRIVES, FAULT_TURNS, REQUEST_ARRIVES, STEP_BEGINS = range(5)
Action = Callable[[], None]


class SimulatedFleet(Struct, frozen=True):
    """The engines, all of one shape, and how often they tell of their queues."""

    replicas: int
    shape: EngineShape
    block_tokens: int
    report_s: float = 0.0
    """The least time between two reports of an engine; 0: one after each step."""
    prefill: int = 0
    """So many of them, the first ones, compute long prompts for the others, by policies that know
    of roles; 0: each does all."""
    fetch_bytes_per_s: float = 0.0
    """At which each of them fetches prefixes of others, one after the other; 0: none does."""

    @property
    def roles(self) -> list[EngineRole]:
        """What each of them is for."""
        first: list[EngineRole] = ["prefill"] * self.prefill
        rest: EngineRole = "decode" if first else "any"
        return [*first, *[rest] * (self.replicas - self.prefill)]


class Simulation:
    """One run of requests through a fleet by one policy."""

    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        fleet: SimulatedFleet,
        policy: RoutingPolicy,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.outcomes = [RequestOutcome(request) for request in requests]
        self.gaps = GapCounts()
        self.busy_s = [0.0] * fleet.replicas
        """Seconds in which each replica ran steps, over its lives."""
        self.computed_tokens = 0
        """Prompt tokens that engines have computed, also for requests that then were lost."""
        self.now_s = 0.0
        self._requests = requests
        self._fleet, self._policy = fleet, policy
        self._events: list[tuple[float, int, int, Action]] = []
        self._serials = count()
        self._strides = StretchStrides()
        self._cost = fit_step_cost(fleet.shape)
        numbers = range(fleet.replicas)
        self._engines = [self._new_engine() for _ in numbers]
        self._gateway = SimulatedGateway(
            policy, self._engines, fleet.roles, fleet.fetch_bytes_per_s
        )
        self._fetched_s = [0.0] * fleet.replicas
        """When the last fetch of each replica ends."""
        self.apart = 0
        """Requests whose prompt was computed on another replica."""
        self._turns = [0] * fleet.replicas
        """Of each replica, the number of its last event: a step's end or begin. Earlier ones count
        no more: the step was shortened, or the replica has died."""
        self._reported_s = [-math.inf] * fleet.replicas
        self._is_due = [False] * fleet.replicas
        """A report waits until the last one is old enough."""
        self._late_s = [0.0] * fleet.replicas
        self._last_word_s = [0.0] * fleet.replicas
        self._draining = [0] * fleet.replicas
        self._dead = [False] * fleet.replicas
        self._waiting: list[SimulatedSequence] = []
        """Requests for which no replica is ready."""
        for fault in faults:
            self._add(fault.begins_s, FAULT_TURNS, partial(self._begin_fault, fault))
            if fault.ends_s < math.inf:
                self._add(fault.ends_s, FAULT_TURNS, partial(self._end_fault, fault))

    def run(self, show: Callable[[int], None] = lambda done: None) -> None:
        """Run all requests to their ends. `show` is called with the number of those that came."""
        events = self._events
        for request in self._requests:
            while events and events[0][:2] < (request.at_s, REQUEST_ARRIVES):
                self._happen()
            self.now_s = max(self.now_s, request.at_s)
            if not self._engines[0].fits(request):
                self.outcomes[request.number].end("too_long", self.now_s)
                continue
            self._route(SimulatedSequence(request, 0))
            if request.number % 1000 == 0:
                show(request.number)
        while events:
            self._happen()
        for sequence in self._waiting:
            self.outcomes[sequence.request.number].end("no_replica", self.now_s)
        for number in range(self._fleet.replicas):
            self._count(number)
        show(len(self._requests))

    def check(self) -> None:
        """Check engines and outcomes. O(requests)."""
        for engine in self._engines:
            engine.check()
        for outcome in self.outcomes:
            outcome.check()

    # -- events -------------------------------------------------------------------------------

    def _add(self, at_s: float, kind: int, action: Action) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._serials), action))

    def _happen(self) -> None:
        at_s, _, _, action = heapq.heappop(self._events)
        self.now_s = max(self.now_s, at_s)
        action()

    def _tell(self, number: int, word: Action) -> None:
        """Let a word of a replica reach the gateway: at once, or late, in their order."""
        at_s = max(self.now_s + self._late_s[number], self._last_word_s[number])
        if at_s <= self.now_s:
            word()
            return
        self._last_word_s[number] = at_s
        engine = self._engines[number]

        def arrive() -> None:
            if self._engines[number] is engine:
                word()

        self._add(at_s, WORD_ARRIVES, arrive)

    # -- requests -----------------------------------------------------------------------------

    def _route(self, sequence: SimulatedSequence) -> None:
        request, policy = sequence.request, self._policy
        digests: list[bytes] = []
        if policy.knows_prefixes or policy.knows_sent:
            digests = self._strides.digests(request.namespace, sequence.stretches)
        name, tokens = str(request.number), len(sequence.tokens)
        chosen = self._gateway.choose(name, tokens, digests, self.now_s)
        if chosen is None:
            self._waiting.append(sequence)
        elif chosen.prompt is None:
            self.outcomes[request.number].send(chosen.number)
            self._send_or_fetch(sequence, chosen)
        else:
            self._part(sequence, chosen, chosen.prompt, digests)

    def _part(
        self,
        sequence: SimulatedSequence,
        route: SimulatedRoute,
        prompt: SimulatedRoute,
        digests: list[bytes],
    ) -> None:
        """Have a prompt computed on one replica, then fetched and answered on another."""
        first = SimulatedSequence(sequence.request, sequence.answered)
        first.answer_tokens = sequence.answered + 1  # its last token, which nobody gets
        self.apart += 1

        def go_on() -> None:
            if not self._is_ready(route.number):
                self._route(sequence)
                return
            self.outcomes[sequence.request.number].send(route.number)
            sequence.is_parted, name = True, str(sequence.request.number)
            self._gateway.add_sent(route, name, len(sequence.tokens), digests, self.now_s)
            self._send_or_fetch(sequence, route)

        first.then = go_on
        self._send_or_fetch(first, prompt)

    def _send_or_fetch(self, sequence: SimulatedSequence, route: SimulatedRoute) -> None:
        """Send a sequence to its replica, when that has fetched what it is to fetch."""
        number, lacking = route.number, route.fetched_tokens - route.expected_tokens
        if lacking <= 0:
            self._send(sequence, number, route.expected_tokens)
            return
        begins_s = max(self.now_s, self._fetched_s[number])
        size = lacking * self._fleet.shape.kv_bytes_per_token
        self._fetched_s[number] = begins_s + size / self._fleet.fetch_bytes_per_s
        sequence.fetched = route.fetched_tokens
        engine = self._engines[number]

        def arrive() -> None:
            if self._engines[number] is engine and self._is_ready(number):
                self._send(sequence, number, route.fetched_tokens)
            else:  # it died meanwhile, and what it had fetched
                self._route(SimulatedSequence(sequence.request, sequence.answered))

        self._add(self._fetched_s[number] + PEER_S, REQUEST_ARRIVES, arrive)

    def _send(self, sequence: SimulatedSequence, number: int, expected_tokens: int) -> None:
        engine = self._engines[number]
        engine.submit(sequence, expected_tokens, self.now_s)
        if engine.is_idle:
            self._turns[number] += 1
            turn = self._turns[number]
            self._add(self.now_s, STEP_BEGINS, lambda: self._begin_idle(number, turn))
        elif (sooner_s := engine.interrupt(self.now_s)) is not None:
            self._await_step(number, sooner_s)

    def _begin_idle(self, number: int, turn: int) -> None:
        """Begin a step for all that has come at this time; the last one's event counts."""
        if turn == self._turns[number]:
            self._begin_step(number)

    def _begin_step(self, number: int) -> None:
        engine, events = self._engines[number], StepEvents()
        ends_s = engine.begin_step(self.now_s, events)
        for sequence in events.begun:
            name = str(sequence.request.number)
            if sequence.then is not None:
                name += "/prompt"
            if not sequence.is_parted:
                self.outcomes[sequence.request.number].begin(sequence.cached_tokens)
            self._tell(number, partial(self._gateway.take_started, name))
        if ends_s is not None:
            self._await_step(number, ends_s)

    def _await_step(self, number: int, ends_s: float) -> None:
        self._turns[number] += 1
        turn = self._turns[number]
        self._add(ends_s, STEP_ENDS, lambda: self._end_step(number, turn))

    def _end_step(self, number: int, turn: int) -> None:
        if turn != self._turns[number]:
            return
        engine, events = self._engines[number], StepEvents()
        engine.end_step(self.now_s, events)
        for sequence in events.first:
            if sequence.then is not None:
                continue
            gap_s = self.outcomes[sequence.request.number].answer(self.now_s)
            if gap_s is not None:
                self.gaps.add(gap_s, 1)
        for sequence in events.ended:
            if sequence.then is not None:
                self._add(self.now_s, REQUEST_ARRIVES, sequence.then)
                continue
            self.outcomes[sequence.request.number].end("done", self.now_s)
        if self._policy.knows_prefixes:
            watch = engine.cache.strides
            if watch.has_more:
                changes = watch.take(NODES_TOLD_MAX)
                self._tell(number, partial(self._gateway.take_changes, number, changes))
            self._report(number)
        self._begin_step(number)

    def _report(self, number: int) -> None:
        """Tell the load of an engine: now, or when the last report is old enough."""
        due_s = self._reported_s[number] + self._fleet.report_s
        if self.now_s >= due_s:
            self._reported_s[number] = self.now_s
            load = self._engines[number].load()
            self._tell(number, partial(self._gateway.take_load, number, load))
        elif not self._is_due[number]:
            self._is_due[number] = True
            self._add(due_s, WORD_ARRIVES, partial(self._report_late, number))

    def _report_late(self, number: int) -> None:
        self._is_due[number] = False
        self._report(number)

    # -- faults -------------------------------------------------------------------------------

    def _new_engine(self) -> SimulatedEngine:
        fleet = self._fleet
        engine = SimulatedEngine(fleet.shape, self._cost, fleet.block_tokens, self.gaps)
        if self._policy.knows_prefixes:
            engine.cache.strides.start()
        return engine

    def _begin_fault(self, fault: Fault) -> None:
        for number in fault.replicas:
            match fault.kind:
                case "kill":
                    self._kill(number)
                case "slow":
                    self._engines[number].slowness = fault.amount
                case "late":
                    self._late_s[number] = fault.amount
                case "drain":
                    self._draining[number] += 1
                    self._set_ready(number)

    def _end_fault(self, fault: Fault) -> None:
        for number in fault.replicas:
            match fault.kind:
                case "kill":
                    self._revive(number)
                case "slow":
                    self._engines[number].slowness = 1.0
                case "late":
                    self._late_s[number] = 0.0
                case "drain":
                    self._draining[number] -= 1
                    self._set_ready(number)

    def _kill(self, number: int) -> None:
        if self._dead[number]:
            return
        self._dead[number] = True
        self._set_ready(number)
        self._turns[number] += 1
        lost = self._engines[number].lose(self.now_s)
        self._count(number)
        self._engines[number] = self._new_engine()
        self._gateway.begin_life(number)
        self._set_ready(number)
        for sequence in lost:
            self.outcomes[sequence.request.number].lose(self.now_s, sequence.answered)
            self._route(sequence)

    def _revive(self, number: int) -> None:
        self._dead[number] = False
        self._set_ready(number)

    def _is_ready(self, number: int) -> bool:
        return not self._dead[number] and not self._draining[number]

    def _set_ready(self, number: int) -> None:
        is_ready = self._is_ready(number)
        self._gateway.set_ready(number, is_ready=is_ready)
        if is_ready:
            waiting, self._waiting = self._waiting, []
            for sequence in waiting:
                self._route(sequence)

    def _count(self, number: int) -> None:
        engine = self._engines[number]
        self.busy_s[number] += engine.busy_s
        self.computed_tokens += engine.computed_tokens
