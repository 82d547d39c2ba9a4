"""The gateway's part of a simulation: our router, its directory and what it knows of each queue."""

from __future__ import annotations

from collections.abc import Sequence

from engine.statistics import LoadReport
from engine.strides import PrefixChanges
from gateway.bench.simulation.policies import ReplicaView, RouteView, RoutingPolicy
from gateway.bench.simulation.simulated_engine import SimulatedEngine
from gateway.routing.load import ReplicaLoad
from gateway.routing.prefix_directory import Found, PrefixDirectory
from gateway.routing.router import ReplicaState, RouteRequest

EXPECTED_ANSWER_TOKENS = 256
"""The answer that the router expects of each request: nobody knows how long one will be."""


class SimulatedGateway:
    """Chooses a replica for each request, by a policy and by what it was told."""

    def __init__(self, policy: RoutingPolicy, engines: Sequence[SimulatedEngine]) -> None:
        self._policy = policy
        self._engines = engines
        """The present life of each replica, which its owner replaces in place."""
        self._directory = PrefixDirectory()
        self._sent = PrefixDirectory()
        self._sent_strides: list[set[bytes]] = [set() for _ in engines]
        self._turn = 0
        self._views = [self._view(number) for number in range(len(engines))]

    def choose(
        self, request_id: str, prompt_tokens: int, digests: Sequence[bytes], now_s: float
    ) -> tuple[int, int] | None:
        """Return the number of the replica that takes a request, and the tokens that it is thought
        to have; None if no replica is ready. The request counts as sent there."""
        ready = [view for view in self._views if view.state.is_ready]
        if not ready:
            return None
        policy, found, sent = self._policy, dict[int, Found](), dict[int, Found]()
        everywhere = sum(1 << view.state.number for view in ready)
        if policy.knows_prefixes:
            self._directory.expire_sent(now_s)
            found = self._directory.find(digests, everywhere)
        if policy.knows_sent:
            sent = self._sent.find(digests, everywhere)
        if policy.knows_loads:
            for view in ready:
                self._look_at(view)
        answer = min(EXPECTED_ANSWER_TOKENS, ready[0].pool_tokens - prompt_tokens)
        request = RouteRequest(request_id, prompt_tokens, answer, digests)
        chosen = policy.rule(RouteView(request, ready, found, sent, self._turn))
        self._turn += 1
        number = chosen.state.number
        if policy.knows_prefixes:
            self._directory.add_sent(request_id, number, digests, now_s)
        if policy.knows_sent:
            self._sent.change(number, "device", b"".join(digests), b"")
            self._sent_strides[number].update(digests)
        hit = min(found.get(number, Found()).device, prompt_tokens - 1)
        chosen.state.load.add_sent(self._engines[number].accepted + 1, prompt_tokens - hit)
        return number, hit

    def take_started(self, request_id: str) -> None:
        """Note that a request has begun: what it found is known by facts from now on."""
        self._directory.end_sent(request_id)

    def take_changes(self, number: int, changes: PrefixChanges) -> None:
        """Take what a replica tells of its prefixes."""
        if changes.is_first:
            self._directory.clear(number)
        self._directory.change(number, "device", changes.device_added, changes.device_removed)

    def take_load(self, number: int, told: LoadReport) -> None:
        """Take what a replica tells of its queue."""
        self._views[number].state.load.take(told)

    def set_ready(self, number: int, *, is_ready: bool) -> None:
        """Send requests to a replica, or none."""
        self._views[number].state.is_ready = is_ready

    def begin_life(self, number: int) -> None:
        """Forget what a replica had: another life of it has begun."""
        self._directory.clear(number)
        self._sent.clear(number)
        self._sent_strides[number].clear()
        self._views[number] = self._view(number)

    def _view(self, number: int) -> ReplicaView:
        engine = self._engines[number]
        size, pool = engine.cache.block_size, engine.cache.blocks * engine.cache.block_size
        load = ReplicaLoad(engine.load())
        state = ReplicaState(f"r{number}", number, True, False, pool, size, 1, load)
        return ReplicaView(state, pool)

    def _look_at(self, view: ReplicaView) -> None:
        engine = self._engines[view.state.number]
        view.queued, view.sequences = engine.queued, engine.sequences
        view.waiting_tokens, view.pinned_tokens = engine.waiting_tokens, engine.pinned_tokens
        view.sent_strides = len(self._sent_strides[view.state.number])
