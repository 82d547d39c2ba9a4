"""Chooses among the replicas of a model with `gateway.routing`, by what their engines tell.

Each replica tells the prefixes that it has, and its queue, over its connection; what was just sent
to it counts, too. Of each request that was sent, what was predicted to be found is compared with
what was found: facts that are wrong too often are asked for anew. With one replica nothing of this
runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from engine.api import Clock, Request, Retention, Started
from engine.client.client import EngineConnection
from engine.protocol import Facts
from engine.statistics import LoadReport
from engine.strides import DIGEST_BYTES, STRIDE_TOKENS, stride_digests
from gateway.caching.namespaces import owner_of
from gateway.config.fleet import RoutingPolicy
from gateway.engines.replica import Replica
from gateway.processes.child_process import Report
from gateway.routing.load import FIRST_RATE, ReplicaLoad
from gateway.routing.prefix_directory import MAX_REPLICAS, Found, PrefixDirectory
from gateway.routing.router import (
    RecentChoices,
    ReplicaState,
    RouteChoice,
    RouteRequest,
    choose,
    rank_homes,
)

OUTPUT_TOKENS_MAX: Final = 256
"""Most output that is expected of a request; `max_tokens` is often the model's context."""
JUDGED_S: Final = 60.0
WRONG_MAX: Final = 0.01
"""The part of the prompt tokens of `JUDGED_S` that may be found missing, before a replica's
prefixes are asked for anew."""
PREDICTIONS_MAX: Final = 10_000
"""Requests whose start is awaited; the oldest are forgotten."""
TENANTS_MAX: Final = 1_000
"""Tenants of a replica whose tokens are counted; those that asked longest ago are forgotten."""


class RoutedTokens(Struct):
    """Prompt tokens of the requests that started at a replica: all, those that were cached, those
    that it was said to have on the device, and the part of these that were not cached after all.
    """

    prompt: int = 0
    cached: int = 0
    predicted: int = 0
    missing: int = 0

    def add(self, started: Started, predicted: int) -> None:
        """Add a request that has started."""
        self.prompt += started.prompt_tokens
        self.cached += started.cached_tokens
        self.predicted += predicted
        self.missing += max(0, predicted - started.cached_tokens)


class ReplicaRoute(Struct, frozen=True):
    """A choice for a request, and what it rests on. `prompt`: where its prompt is computed, if that
    is another replica."""

    choice: RouteChoice
    replica: Replica
    digests: Sequence[bytes]
    found: Found
    found_tokens: int
    """Those that are expected on the device; at least one token is computed."""
    prompt: ReplicaRoute | None = None


class ReplicaFacts:
    """What a replica has told. `number`: its bit in the directory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.load = ReplicaLoad(LoadReport())
        self.received = 0
        """Messages so far."""
        self.received_at_s = 0.0
        """When the last one came."""
        self.device_strides = self.below_strides = 0
        self.routed = RoutedTokens()
        self.routed_by_tenant = OrderedDict[int, RoutedTokens]()
        """By tenant id, the one that asked last at the end."""
        self.judged, self.judged_at_s = RoutedTokens(), 0.0

    def add_routed(self, started: Started, predicted: int, tenant_id: int | None) -> None:
        """Count a request that has started; None: of no tenant that is known."""
        self.routed.add(started, predicted)
        self.judged.add(started, predicted)
        if tenant_id is None:
            return
        self.routed_by_tenant.setdefault(tenant_id, RoutedTokens()).add(started, predicted)
        self.routed_by_tenant.move_to_end(tenant_id)
        if len(self.routed_by_tenant) > TENANTS_MAX:
            self.routed_by_tenant.popitem(last=False)


class ReplicaChooser:
    """The directory and the loads of one model's replicas. Belongs to the event loop."""

    def __init__(
        self,
        clock: Clock,
        report: Report = lambda event, facts: None,
        policy: RoutingPolicy = "time",
        *,
        has_roles: bool = False,
    ) -> None:
        """`has_roles`: replicas are what their keepers say; else each does all."""
        self.recent = RecentChoices()
        self.asked_anew = 0
        """How often a replica was asked for its prefixes anew, since too many were wrong."""
        self._clock, self._report, self._policy = clock, report, policy
        self._has_roles = has_roles
        self._directory = PrefixDirectory()
        self._facts: dict[Replica, ReplicaFacts] = {}
        self._predicted: dict[str, tuple[ReplicaFacts, int, int | None]] = {}
        self._sent = 0
        self._digested: tuple[Request, Sequence[bytes]] | None = None
        """The digests of the request that was routed last, until it is sent: its hold asks first
        where it would go."""

    def watch(self, replica: Replica, engine: EngineConnection) -> None:
        """Follow what a replica's engine tells, from nothing. The 65th replica is not followed, and
        gets no request."""
        facts = self._facts_of(replica)
        if facts is None:
            self._report("replica_not_followed", {"replica": replica.name})
            return
        self._directory.clear(facts.number)
        blocks = 0 if engine.info is None else engine.info.blocks
        facts.load = ReplicaLoad(LoadReport(free_blocks=blocks))
        facts.judged, facts.judged_at_s = RoutedTokens(), self._clock()
        engine.watch_prefixes(partial(self._take, replica, facts))

    def forget(self, replica: Replica) -> None:
        """Drop what is known of a replica that is removed."""
        facts = self._facts.pop(replica, None)
        if facts is not None:
            self._directory.clear(facts.number)

    def route(
        self, replicas: Sequence[Replica], request: Request, *, may_part: bool = False
    ) -> ReplicaRoute | None:
        """Return the best of `replicas` for a request; None if none of them may take it. It changes
        nothing. `may_part`: another one may compute its prompt. Cost: that of the prompt's digests,
        and see `gateway.routing`."""
        asked = self._ask(replicas, request)
        if asked is None:
            return None
        wanted, states, found = asked
        wanted = replace(wanted, may_part=may_part)
        choice = choose(wanted, states, found, self._policy, self._sent)

        def at(name: str | None, prompt: ReplicaRoute | None = None) -> ReplicaRoute | None:
            chosen = next((one for one in replicas if one.name == name), None)
            if chosen is None:
                return None
            hit = found.get(self._facts[chosen].number, Found())
            known = min(hit.device, len(request.tokens) - 1)
            return ReplicaRoute(choice, chosen, wanted.digests, hit, known, prompt)

        return at(choice.replica, None if choice.pair is None else at(choice.pair.prompt_at))

    def homes(self, replicas: Sequence[Replica], request: Request) -> list[Replica]:
        """Return those of `replicas` that may take over the promises that a request asks for, the
        best first. It changes nothing. Cost: as `route`."""
        asked = self._ask(replicas, request)
        names = [] if asked is None else rank_homes(*asked)
        return [one for name in names for one in replicas if one.name == name]

    def add_sent(self, route: ReplicaRoute, request: Request, number: int) -> None:
        """Count a request that has just been sent as the connection's Submit of this number: it
        waits there, and what it writes is present there soon."""
        facts = self._facts[route.replica]
        self._sent += 1
        self._digested = None
        self.recent.add(route.choice)
        device = route.found_tokens
        facts.load.add_sent(number, len(request.tokens) - device)
        if request.grant.write:
            self._directory.add_sent(request.request_id, facts.number, route.digests, self._clock())
        self._predicted[request.request_id] = facts, device, owner_of(request.grant.namespace)
        if len(self._predicted) > PREDICTIONS_MAX:
            del self._predicted[next(iter(self._predicted))]

    def facts_of(self, replica: Replica) -> ReplicaFacts | None:
        """Return what a replica has told, None if it was never followed."""
        return self._facts.get(replica)

    def routed_by_tenant(self, replica: Replica) -> Mapping[int, RoutedTokens]:
        """Return the tokens of the requests that started at a replica, by tenant id: of the last
        `TENANTS_MAX` tenants that asked."""
        facts = self._facts.get(replica)
        return {} if facts is None else facts.routed_by_tenant

    def describe(self, replica: Replica) -> dict[str, object]:
        """Return what is known of a replica, for operators."""
        facts = self._facts.get(replica)
        if facts is None:
            return {}
        age_s = round(self._clock() - facts.received_at_s, 1) if facts.received else None
        return {
            "wait_s": round(facts.load.wait_s, 3),
            "rows": facts.load.rows,
            "facts": facts.received,
            "report_age_s": age_s,
            "device_prefix_tokens": facts.device_strides * STRIDE_TOKENS,
            "below_prefix_tokens": facts.below_strides * STRIDE_TOKENS,
            "promisable_blocks": facts.load.report.promisable_blocks,
            "routed_tokens": asdict(facts.routed),
        }

    # -- internals ----------------------------------------------------------------------------

    def _ask(
        self, replicas: Sequence[Replica], request: Request
    ) -> tuple[RouteRequest, list[ReplicaState], dict[int, Found]] | None:
        """Return what the router is asked; None while no engine is there."""
        states = [self._state_of(one, facts) for one in replicas if (facts := self._facts_of(one))]
        info = next((one.info for one in replicas if one.info is not None), None)
        if info is None:
            return None
        fastest = max((one.load.report.prefill_tokens_per_s for one in states), default=0.0)
        for one in states:  # a new one is taken for as fast as the fastest that is known
            one.load.first_rate = fastest or FIRST_RATE
        grant = request.grant
        digests = self._digests_of(request)
        if request.attention is not None:
            digests = digests[: request.attention.shared_tokens(info.block_size) // STRIDE_TOKENS]
        leased = [one.tokens for one in grant.leases if _promises(one.retention)]
        wanted = RouteRequest(
            id=request.request_id,
            prompt_tokens=len(request.tokens),
            output_tokens=min(request.max_tokens * request.samples, OUTPUT_TOKENS_MAX),
            digests=digests,
            lease_blocks=-(-max(leased, default=0) // info.block_size),
            lease_id=next((one.lease_id for one in grant.leases), ""),
        )
        self._directory.expire_sent(self._clock())
        numbers = sum(1 << state.number for state in states)
        found = self._directory.find(digests, numbers) if grant.read else {}
        return wanted, states, found

    def _digests_of(self, request: Request) -> Sequence[bytes]:
        if self._digested is None or self._digested[0] is not request:
            self._digested = request, stride_digests(request.grant.namespace, request.tokens)
        return self._digested[1]

    def _facts_of(self, replica: Replica) -> ReplicaFacts | None:
        """Return what is known of a replica, None if no bit is left for it."""
        facts = self._facts.get(replica)
        if facts is None:
            taken = {known.number for known in self._facts.values()}
            number = next((one for one in range(MAX_REPLICAS) if one not in taken), None)
            if number is not None:
                facts = self._facts[replica] = ReplicaFacts(number)
        return facts

    def _state_of(self, replica: Replica, facts: ReplicaFacts) -> ReplicaState:
        info = replica.info
        size, blocks, kv_bytes = 1, 0, 0
        if info is not None:
            size, blocks, kv_bytes = info.block_size, info.blocks, info.kv_bytes_per_block
        return ReplicaState(
            name=replica.name,
            number=facts.number,
            is_ready=replica.ready(),
            is_resting=replica.rests(self._clock()),
            max_sequence_tokens=blocks * size,
            block_tokens=size,
            bytes_per_token=kv_bytes // size,
            load=facts.load,
            may_send=replica.state == "draining" and replica.engine is not None,
            is_stuck=replica.is_stuck,
            role=replica.role if self._has_roles else "any",
            pool_domain="" if info is None else info.pool_domain,
        )

    def _take(self, replica: Replica, facts: ReplicaFacts, message: Facts | Started) -> None:
        """Take what a replica's engine tells."""
        if isinstance(message, Started):
            self._note_start(replica, facts, message)
            return
        facts.received += 1
        facts.received_at_s = self._clock()
        if isinstance(message, LoadReport):
            facts.load.take(message)
            return
        if message.is_first:
            self._directory.clear(facts.number)
            facts.device_strides = facts.below_strides = 0
        device = len(message.device_added) - len(message.device_removed)
        below = len(message.below_added) - len(message.below_removed)
        facts.device_strides += device // DIGEST_BYTES
        facts.below_strides += below // DIGEST_BYTES
        change = self._directory.change
        change(facts.number, "device", message.device_added, message.device_removed)
        change(facts.number, "below", message.below_added, message.below_removed)

    def _note_start(self, replica: Replica, facts: ReplicaFacts, started: Started) -> None:
        """Compare what a request has found with what was predicted."""
        self._directory.end_sent(started.request_id)
        sent_to, predicted, tenant_id = self._predicted.pop(started.request_id, (None, 0, None))
        if sent_to is not facts:
            return  # it has moved here
        facts.add_routed(started, predicted, tenant_id)
        now_s, judged = self._clock(), facts.judged
        if now_s - facts.judged_at_s < JUDGED_S:
            return
        facts.judged, facts.judged_at_s = RoutedTokens(), now_s
        engine = replica.engine
        if judged.missing > WRONG_MAX * judged.prompt and isinstance(engine, EngineConnection):
            self.asked_anew += 1
            counts = {"prompt_tokens": judged.prompt, "missing_tokens": judged.missing}
            self._report("prefixes_wrong", {"replica": replica.name, **counts})
            engine.watch_prefixes(partial(self._take, replica, facts))


def _promises(kept: Retention) -> bool:
    return kept.pinned or kept.promise_s > 0
