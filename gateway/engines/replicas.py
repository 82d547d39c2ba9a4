"""The replicas of a model: choose one for a request, ask all of them, add up what they tell.

A model without `replicas` in its settings has one: an engine of this machine under its own keeper.
Requests that were in a step at two deaths, of any replica, are judged here (`CrashSuspects`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from engine.api import (
    Branch,
    CacheGrant,
    Clock,
    EngineInfo,
    Erased,
    Namespace,
    Peeked,
    Peer,
    Quota,
    Request,
    Surveyed,
)
from engine.client.cache_event_totals import BlockMoves
from engine.client.client import Engine, EngineConnection
from engine.client.peer_tickets import KEY_BYTES, sign_ticket
from engine.client.request_stream import RequestStream
from engine.errors import EngineError, EngineUnavailable
from engine.protocol import pack_tokens
from engine.statistics import NamespaceStats, Stats
from gateway.config.fleet import RoutingPolicy
from gateway.engines.apart.prompts_apart import PromptsApart, prompt_request
from gateway.engines.crash_suspects import CrashSuspects
from gateway.engines.replica import Replica
from gateway.engines.replica_choice import ReplicaChooser, ReplicaRoute
from gateway.levels.report import sum_levels
from gateway.processes.child_process import Report

T = TypeVar("T")
_COUNTS = tuple(
    name for name in Stats.__struct_fields__ if name not in ("call_id", "changed", "levels")
)


MOVES_MAX: Final = 8
"""How often a request may go on at another replica."""


RETRY_AFTER_S: Final = 2.0
"""Seconds that a client should wait for an engine that is being started, or is away."""


class Quoted(Struct, frozen=True):
    """What the replica has that a request would go to, and its queue, if it is one of several:
    seconds until the request would begin, and prompt tokens a second from then on."""

    peeked: Peeked
    wait_s: float | None = None
    prefill_tokens_per_s: float = 0.0


class Replicas:
    """The replicas of one model. Belongs to the event loop."""

    def __init__(
        self,
        report: Report = lambda event, facts: None,
        clock: Clock = time.monotonic,
        policy: RoutingPolicy = "time",
        wall_s: Clock = lambda: time.time_ns() / 1e9,
        *,
        prompts_apart: bool = False,
    ) -> None:
        """Begin without replicas; see `add`. `wall_s`: the machine's clock, for tickets.
        `prompts_apart`: one replica may compute the prompt that another one answers."""
        self._members: list[Replica] = []
        self._report = report
        self._clock = clock
        self._suspects = CrashSuspects(clock)
        self.chooser = ReplicaChooser(clock, report, policy, has_roles=prompts_apart)
        self.peer_key = secrets.token_bytes(KEY_BYTES)
        """Signs what engines may fetch from each other; each engine gets it."""
        self._wall_s = wall_s
        self.apart = PromptsApart(clock, is_on=prompts_apart)
        self.moved = 0
        """Number of requests that went on at another replica."""
        self.promise_moves = Counter[str]()
        """How moves of promises between them have ended, by outcome."""
        self.gate: Callable[[Replica], None] | None = None
        """Called when an engine elsewhere is there, before it takes requests."""
        self.drains: Callable[[Replica, EngineConnection], None] = lambda _, engine: engine.let_go()
        """Moves what this gateway has promised away from an engine that drains; see `Replica`."""

    @classmethod
    def of(cls, *engines: Engine) -> Replicas:
        """Return replicas over engines that run already, for tests and embedding."""
        found = cls()
        for number, engine in enumerate(engines):
            found.add(f"e{number}" if len(engines) > 1 else "", engine)
        return found

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(
        self, name: str = "", engine: Engine | None = None, *, is_elsewhere: bool = False
    ) -> Replica:
        """Return a new replica, without a link. `engine`: one that runs already. `is_elsewhere`:
        its engine is, although it has no name until it answers."""
        replica = Replica(name, engine, judge=self._record_death)
        if name or is_elsewhere:
            replica.is_elsewhere, replica.returned = True, self._on_return
            replica.rescue, replica.joined = self._rescue, self.chooser.watch
            replica.drains = self._on_drain
            if isinstance(engine, EngineConnection):
                self.chooser.watch(replica, engine)
        self._members.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Forget a replica whose link is closed."""
        self._members.remove(replica)
        self.chooser.forget(replica)

    # -- as long as the gateway runs ----------------------------------------------------------

    @property
    def restarts(self) -> int:
        """Number of engines that were lost."""
        return sum(one.link.restarts for one in self._members if one.link is not None)

    def failure(self) -> str:
        """Return why none ever will serve; "" while one may."""
        reasons = ["" if one.link is None else one.link.failure() for one in self._members]
        return reasons[0] if reasons and all(reasons) else ""

    def start(self) -> None:
        """Seek an engine for each from now on. Returns at once."""
        for one in self._members:
            if one.link is not None:
                one.link.start()

    async def wait_ready(self) -> None:
        """Wait until one serves. Raises EngineError if none ever will."""
        waits = [asyncio.create_task(one.link.wait_ready()) for one in self._members if one.link]
        try:
            for first in asyncio.as_completed(waits):
                await first
                return
        finally:
            for wait in waits:
                wait.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Accept no new requests; let running ones finish within `timeout_s`."""
        await asyncio.gather(*(one.drain(timeout_s) for one in self._members))

    async def close(self) -> None:
        """End all links; every open stream ends."""
        self.apart.close()
        await asyncio.gather(*(one.close() for one in self._members))

    # -- one of them --------------------------------------------------------------------------

    def _route(
        self, request: Request, *, may_part: bool = False
    ) -> tuple[Replica, ReplicaRoute | None]:
        """Return the replica for a request, the one with the least predicted seconds, and how it
        was chosen where there are several. `may_part`: another one may compute its prompt. Raises
        EngineUnavailable while none is ready."""
        ready = [one for one in self._members if one.ready()]
        if not ready:
            is_draining = self._members and all(one.is_draining for one in self._members)
            code = "draining" if is_draining else "not_ready"
            if not is_draining and (absence := self.absence()):
                raise EngineUnavailable("engine_unavailable", absence, RETRY_AFTER_S)
            for one in self._members:
                one.running(code)
            raise EngineUnavailable(code, "The engine does not accept requests now.")
        route = None
        if len(self._members) > 1:
            route = self.chooser.route(self._members, request, may_part=may_part)
        return (ready[0], None) if route is None else (route.replica, route)

    def _preferred(self, but: Replica | None = None) -> list[Replica]:
        """Return the ready replicas, `but` that one: those that rest only if all do."""
        ready = [one for one in self._members if one is not but and one.ready()]
        if self.apart.is_on:
            ready = [one for one in ready if one.role != "prefill"] or ready
        if len(ready) < 2:
            return ready
        now_s = self._clock()
        return [one for one in ready if not one.rests(now_s)] or ready

    def likely_epoch(self, request: Request) -> str:
        """Return the epoch of the engine that a request would go to now. Raises EngineUnavailable.
        Nothing is sent, and no choice noted."""
        replica, _ = self._route(request)
        info = replica.running().info
        return "" if info is None else info.epoch

    def submit(self, request: Request, *, may_move: bool = True) -> RequestStream:
        """Submit a request to the replica that is chosen. `may_move`: another one may finish it, if
        that one is lost. Raises EngineUnavailable, or RequestRefused if it must not be retried."""
        may_move = len(self._members) > 1 and may_move and _can_move(request)
        isolated = self._suspects.isolate(request)
        may_part = may_move and self.apart.may_part(isolated)
        replica, route = self._route(request, may_part=may_part)
        engine = replica.running()
        if not isinstance(engine, EngineConnection):
            return engine.submit(isolated)
        if engine.done_in_isolation:
            self._suspects.clear(engine.done_in_isolation)
            engine.done_in_isolation.clear()
            isolated = self._suspects.isolate(request)
        if route is None:
            return engine.submit(isolated, may_move=may_move)
        if route.prompt is not None and (parted := self._part(isolated, route, route.prompt)):
            return parted
        return self._send(isolated, engine, route, self._peer_of(route, request), may_move=may_move)

    def _send(
        self,
        request: Request,
        engine: EngineConnection,
        route: ReplicaRoute,
        peer: Peer | None,
        stream: RequestStream | None = None,
        *,
        may_move: bool = True,
    ) -> RequestStream:
        """Submit a request where its route says, and count it there. `stream`: that of a request
        whose prompt was computed apart."""
        known = route.found_tokens if peer is None else peer.tokens
        request = replace(request, expected_cached_tokens=known, peer=peer)
        stream = engine.submit(request, stream, may_move=may_move)
        self.chooser.add_sent(route, request, engine.submitted)
        return stream

    # -- prompts that another replica computes --------------------------------------------------

    def _part(
        self, request: Request, route: ReplicaRoute, there: ReplicaRoute
    ) -> RequestStream | None:
        """Have the prompt of a request computed `there`; return the request's stream, None if that
        replica does not take it."""
        engine, pair = there.replica.engine, route.choice.pair
        if not isinstance(engine, EngineConnection) or pair is None:
            return None
        source = self._named(pair.peer)
        peer = None
        if source is not None:
            peer = self._ticket_at(source, there.replica, request, pair.peer_tokens)
        try:
            wanted = prompt_request(request, there.found_tokens)
            prompt = self._send(wanted, engine, there, peer, may_move=False)
        except EngineError:
            self.apart.outcomes["busy"] += 1
            return None

        def go_on(request: Request, stream: RequestStream, is_there: bool) -> None:
            self._answer(request, stream, route, there.replica if is_there else None)

        return self.apart.begin(request, pair, prompt, engine, go_on)

    def _answer(
        self,
        request: Request,
        stream: RequestStream,
        route: ReplicaRoute,
        source: Replica | None,
    ) -> None:
        """Submit a request to the replica that answers, or to another one if that is gone, or back
        and not admitted. A gateway that drains lets it go on. `source` has computed its prompt, or
        a part of it. Its stream fails if there is none."""
        try:
            engine, peer, is_back = route.replica.engine, None, route.replica.is_held_back
            if not isinstance(engine, EngineConnection) or not engine.ready() or is_back:
                replica, other = self._route(request)
                engine = replica.running()
                assert isinstance(engine, EngineConnection), "those that part are elsewhere"
                if other is None:
                    engine.submit(request, stream)
                    return
                route = other
            if source is not None and source is not route.replica:
                peer = self._ticket_at(source, route.replica, request, len(request.tokens))
            self._send(request, engine, route, peer, stream)
        except EngineError as error:
            stream.fail(error.code, error.message, is_abandoned=True)

    def _named(self, name: str) -> Replica | None:
        return next((one for one in self._members if name and one.name == name), None)

    def _peer_of(self, route: ReplicaRoute, request: Request) -> Peer | None:
        """Return the replica from which the chosen one is to fetch a prefix, with a ticket for it;
        None where computing is faster. O(tokens)."""
        cost = route.choice.cost
        found = None if cost is None else self._named(cost.peer)
        if cost is None or found is None:
            return None
        return self._ticket_at(found, route.replica, request, cost.peer_tokens)

    def _ticket_at(
        self, source: Replica, reader: Replica, request: Request, tokens: int
    ) -> Peer | None:
        """Return a replica as the peer from which another one gets the first tokens of a prompt;
        None if it cannot be reached. O(tokens)."""
        if source.address is None or source.engine is None:
            return None
        packed = pack_tokens(request.tokens[:tokens])
        what = request.grant.namespace, packed, reader.name
        ticket = sign_ticket(self.peer_key, *what, self._wall_s())
        return Peer(source.name, *source.address, tokens, ticket, _is_near(source, reader))

    def homes(self, request: Request, but: Replica | None = None) -> list[Replica]:
        """Return the replicas that may take over the promises that a request asks for, the best
        first, `but` that one."""
        return self.chooser.homes([one for one in self._members if one is not but], request)

    def hand_over(self, request: Request, home: Replica, source: Replica | None) -> RequestStream:
        """Submit a request that adopts promises to the replica that is to keep them. It fetches
        from `source` what it lacks. Raises EngineUnavailable."""
        peer = None
        if source is not None:
            peer = self._ticket_at(source, home, request, len(request.tokens))
        engine = home.running()
        if not home.ready():
            raise EngineUnavailable("not_ready", f"The engine {home.name} takes no requests now.")
        return engine.submit(replace(request, peer=peer))

    def _rescue(self, lost: Replica, request: Request, stream: RequestStream) -> bool:
        """Submit a request that a replica has lost to another one: from its beginning if it had not
        started, else behind the output that was given out. Returns False if it has to fail: it may
        not move, or moved in vain before, or there is no other replica."""
        lost.note_loss(self._clock())
        again = stream.continuation(request)
        if again is None or stream.has_moved_in_vain or stream.moves >= MOVES_MAX:
            return False
        other = min(self._preferred(lost), key=_in_flight, default=None)
        if other is None or not isinstance(other.engine, EngineConnection):
            return False
        try:
            other.engine.submit(self._suspects.isolate(again), stream)
        except EngineError:
            return False
        names = {"request_id": request.request_id, "from": lost.name, "to": other.name}
        self._report("request_moved", {**names, "resumed_tokens": again.resumed_tokens})
        self.moved += 1
        return True

    async def peek(
        self, namespace: Namespace, tokens: tuple[int, ...], quota: Quota | None = None
    ) -> Peeked:
        """Ask the replica that would be chosen; see `Engine.peek`."""
        replica, _ = self._route(Request("", tokens, 0, CacheGrant(namespace)))
        return await replica.running().peek(namespace, tokens, quota)

    async def quote(self, request: Request, tokens: tuple[int, ...]) -> Quoted:
        """Ask the replica that a request would go to now what it has of `tokens`, those of its
        prompt that it may read; see `Engine.peek`. Nothing is sent, and no choice noted."""
        replica, route = self._route(request)
        facts = None if route is None else self.chooser.facts_of(replica)
        load = None if facts is None else (facts.load.wait_s, facts.load.prefill_tokens_per_s)
        grant = request.grant
        peeked = await replica.running().peek(grant.namespace, tokens, grant.quota)
        return Quoted(peeked) if load is None else Quoted(peeked, *load)

    # -- all of them --------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        """The description of a running engine: what replicas of a model have in common is equal in
        all of them. None without one."""
        for one in self._members:
            engine = one.engine
            if engine is not None and engine.info is not None:
                return engine.info
        return None

    @property
    def stats(self) -> Stats:
        """The sums of the latest heartbeats."""
        return sum_stats([one.stats for one in self._members])

    def ready(self) -> bool:
        """Return whether one accepts requests now."""
        return any(one.ready() for one in self._members)

    def absence(self, model: str = "") -> str:
        """Return that none takes requests, with how many are in which state, and without names,
        which are for operators; "" if the engine is this machine's. `model`: to be named."""
        states = Counter(one.condition for one in self._members if one.is_elsewhere)
        if self._members and not states:
            return ""
        found = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        of_model = f" of the model `{model}`" if model else ""
        return f"No engine{of_model} takes requests now: {found or 'none is known'}."

    def is_alive(self, epoch: str) -> bool:
        """Return whether an engine of this epoch still holds what it cached."""
        return any(one.engine is not None and one.engine.is_alive(epoch) for one in self._members)

    def epochs(self) -> set[str]:
        """Return the epochs of the engines that accept requests."""
        return {
            info.epoch for one in self._members if one.ready() and (info := one.info) is not None
        }

    def namespaces(self) -> Iterator[NamespaceStats]:
        """Yield the statistics of the namespaces, replica by replica."""
        for one in self._members:
            yield from one.namespaces

    def losses_of(self, namespace: Namespace) -> dict[str, int]:
        """Return the blocks that a namespace has lost, by cause."""
        if len(self._members) == 1:
            return self._members[0].cache_events.losses_of(namespace)
        sums: Counter[str] = Counter()
        for one in self._members:
            sums.update(one.cache_events.losses_of(namespace))
        return dict(sums)

    def evictions_by_taker(self) -> Counter[tuple[Namespace, Namespace]]:
        """Return evicted blocks by (owner, taker), for pairs of different namespaces."""
        found: Counter[tuple[Namespace, Namespace]] = Counter()
        for one in self._members:
            found.update(one.cache_events.evictions_by_taker())
        return found

    def take_moves(self) -> dict[Namespace, BlockMoves]:
        """Return the moves of blocks since the last call. Has one caller."""
        found: dict[Namespace, BlockMoves] = {}
        for one in self._members:
            for namespace, moves in one.cache_events.take_moves().items():
                if (known := found.setdefault(namespace, moves)) is not moves:
                    known.add(moves)
        return found

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """Set quotas from now on, in all that run."""
        for one in self._members:
            if one.engine is not None:
                one.engine.set_quotas(quotas)

    async def refresh(self) -> None:
        """Ask those that accept requests for fresh statistics. Raises EngineError."""
        engines = [one.running() for one in self._members if one.ready()]
        await asyncio.gather(*(engine.get_stats() for engine in engines))

    async def get_stats(self) -> Stats:
        """Return the sums of fresh statistics. Raises EngineError unless all answer."""
        engines = [one.running() for one in self._members]
        return sum_stats(await asyncio.gather(*(engine.get_stats() for engine in engines)))

    async def refresh_all(self) -> frozenset[str]:
        """Ask all of them for fresh statistics; see `_ask_all`."""
        _, away = await self._ask_all(lambda engine: engine.get_stats())
        return away

    async def erase(
        self, namespace: Namespace, *, lease_id: str | None = None
    ) -> tuple[Erased, frozenset[str]]:
        """Erase cached KV in all of them; see `engine.api.Erase` and `_ask_all`."""
        self.apart.note_erasure(namespace)
        found, away = await self._ask_all(lambda engine: engine.erase(namespace, lease_id=lease_id))
        return found[0] if len(found) == 1 else _sum_erased(found), away

    async def _ask_all(
        self, ask: Callable[[Engine], Awaitable[T]]
    ) -> tuple[list[T], frozenset[str]]:
        """Ask all of them, also those that take no requests. Returns the answers, and the names of
        the engines elsewhere that gave none: `gateway.background.missed_erasures` sees to these.
        Raises EngineError if an engine of this machine gives none: it is back soon, or never."""

        async def one(replica: Replica) -> T | None:
            try:
                return await ask(replica.running())
            except EngineError:
                if not replica.is_elsewhere:
                    raise
                return None

        members = list(self._members)
        answers = await asyncio.gather(*map(one, members))
        pairs = list(zip(members, answers, strict=True))
        away = {one.name for one, answer in pairs if answer is None and one.name}
        return [answer for answer in answers if answer is not None], frozenset(away)

    def _on_drain(self, replica: Replica, engine: EngineConnection) -> None:
        self.drains(replica, engine)

    def _on_return(self, replica: Replica) -> None:
        if self.gate is not None:
            self.gate(replica)

    async def survey(self, namespace: Namespace, branches_max: int) -> Surveyed:
        """Return the largest branches of a namespace's trees."""
        engines = [one.running() for one in self._members if one.ready()]
        engines = engines or [one.running() for one in self._members[:1]]
        found = await asyncio.gather(*(one.survey(namespace, branches_max) for one in engines))
        if len(found) == 1:
            return found[0]
        branches: list[Branch] = []
        for surveyed in found:
            at = len(branches)
            branches += [
                one if one.parent < 0 else replace(one, parent=one.parent + at)
                for one in surveyed.branches
            ]
        return Surveyed(0, tuple(branches))

    # -- requests that may have ended an engine -----------------------------------------------

    def _record_death(self, engine: EngineConnection, in_step: frozenset[str]) -> None:
        """Judge the requests that were in an engine's last step."""
        self._suspects.clear(engine.done_in_isolation)
        lost = [one for one in engine.lost_requests if one.request.request_id in in_step]
        for request_id in self._suspects.record_death(lost):
            self._report("engine_poisoned", {"request_id": request_id})


def _in_flight(replica: Replica) -> int:
    """Return how many requests this gateway has at a replica."""
    return replica.engine.in_flight if isinstance(replica.engine, EngineConnection) else 0


def _is_near(source: Replica, reader: Replica) -> bool:
    """Return whether one replica's engine reads the pool of the other's."""
    one, other = source.info, reader.info
    return one is not None and other is not None and one.pool_domain == other.pool_domain != ""


def _can_move(request: Request) -> bool:
    return request.samples == 1 and request.prompt_logprobs is None


def sum_stats(each: Sequence[Stats]) -> Stats:
    """Return the sums of statistics, rates too: engines run side by side."""
    if len(each) == 1:
        return each[0]
    counts = {name: sum(getattr(one, name) for one in each) for name in _COUNTS}
    return Stats(**counts, levels=sum_levels(one.levels for one in each))


def _sum_erased(each: Sequence[Erased]) -> Erased:
    levels = tuple(level for one in each for level in one.levels)
    return Erased(0, sum(one.blocks for one in each), levels)
