"""The gateway's part of a simulation: our router, its directory and what it knows of each queue."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from engine.api import EngineRole
from engine.statistics import LoadReport
from engine.strides import PrefixChanges
from gateway.bench.simulation.policies import ReplicaView, RouteView, RoutingPolicy, named
from gateway.bench.simulation.simulated_engine import SimulatedEngine
from gateway.routing.load import ReplicaLoad
from gateway.routing.prefix_directory import Found, PrefixDirectory
from gateway.routing.router import ReplicaState, RouteChoice, RouteRequest

EXPECTED_ANSWER_TOKENS = 256
"""The answer that the router expects of each request: nobody knows how long one will be."""


class SimulatedRoute(Struct, frozen=True):
    """Where a request goes: the number of its replica, and the tokens that this is thought to have.
    `fetched_tokens` of the prompt come from another replica. `prompt`: where the prompt is computed
    first, if that is another one."""

    number: int
    expected_tokens: int
    fetched_tokens: int = 0
    prompt: SimulatedRoute | None = None


class SimulatedGateway:
    """Chooses a replica for each request, by a policy and by what it was told."""

    def __init__(
        self,
        policy: RoutingPolicy,
        engines: Sequence[SimulatedEngine],
        roles: Sequence[EngineRole],
        fetch_bytes_per_s: float,
    ) -> None:
        """`fetch_bytes_per_s`: at which prefixes are fetched from another replica; 0: none are."""
        self._policy, self._roles, self._fetch_bytes_per_s = policy, roles, fetch_bytes_per_s
        self._engines = engines
        """The present life of each replica, which its owner replaces in place."""
        self._directory = PrefixDirectory()
        self._sent = PrefixDirectory()
        self._sent_strides: list[set[bytes]] = [set() for _ in engines]
        self._turn = 0
        self._views = [self._view(number) for number in range(len(engines))]

    def choose(
        self, request_id: str, prompt_tokens: int, digests: Sequence[bytes], now_s: float
    ) -> SimulatedRoute | None:
        """Return where a request goes; None if no replica is ready. It counts as sent there, or
        where its prompt goes."""
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
        ruled = policy.rule(RouteView(request, ready, found, sent, self._turn))
        self._turn += 1
        choice = ruled if isinstance(ruled, RouteChoice) else None
        chosen = named(ready, ruled.replica) if isinstance(ruled, RouteChoice) else ruled
        hits = {one.state.name: self._hit(one, found, prompt_tokens) for one in ready}
        name, number = chosen.state.name, chosen.state.number
        route = SimulatedRoute(number, hits[name])
        if choice is not None and (pair := choice.pair) is not None:
            first = named(ready, pair.prompt_at)
            of_prompt = SimulatedRoute(first.state.number, hits[first.state.name], pair.peer_tokens)
            self.add_sent(of_prompt, f"{request_id}/prompt", prompt_tokens, digests, now_s)
            return SimulatedRoute(number, hits[name], prompt_tokens - 1, of_prompt)
        if choice is not None and (cost := choice.cost) is not None:
            route = SimulatedRoute(number, hits[name], cost.peer_tokens)
        self.add_sent(route, request_id, prompt_tokens, digests, now_s)
        return route

    def add_sent(
        self,
        route: SimulatedRoute,
        request_id: str,
        prompt_tokens: int,
        digests: Sequence[bytes],
        now_s: float,
    ) -> None:
        """Count a request as sent where its route says."""
        number, policy = route.number, self._policy
        if policy.knows_prefixes:
            self._directory.add_sent(request_id, number, digests, now_s)
        if policy.knows_sent:
            self._sent.change(number, "device", b"".join(digests), b"")
            self._sent_strides[number].update(digests)
        known = max(route.expected_tokens, route.fetched_tokens)
        load = self._views[number].state.load
        load.add_sent(self._engines[number].accepted + 1, prompt_tokens - known)

    def _hit(self, view: ReplicaView, found: dict[int, Found], prompt_tokens: int) -> int:
        return min(found.get(view.state.number, Found()).device, prompt_tokens - 1)

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
        told = replace(told, peer_bytes_per_s=self._fetch_bytes_per_s)
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
        load = ReplicaLoad(replace(engine.load(), peer_bytes_per_s=self._fetch_bytes_per_s))
        per_token = engine.shape.kv_bytes_per_token
        state = ReplicaState(f"r{number}", number, True, False, pool, size, per_token, load)
        if self._policy.has_roles:
            state.role = self._roles[number]
        return ReplicaView(state, pool)

    def _look_at(self, view: ReplicaView) -> None:
        engine = self._engines[view.state.number]
        view.queued, view.sequences = engine.queued, engine.sequences
        view.waiting_tokens, view.pinned_tokens = engine.waiting_tokens, engine.pinned_tokens
        view.sent_strides = len(self._sent_strides[view.state.number])
