"""`/admin/v1/fleet` and `/admin/v1/fleet/choices/{request_id}`: engines elsewhere, and why requests
went where they went. Ids and predicted seconds, no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import Struct

from gateway.api.admin.audit import ChangeLog
from gateway.background.missed_erasures import MissedErasures
from gateway.caching.namespaces import owner_of
from gateway.config.fleet import is_fleet_name
from gateway.engines.replica import Replica
from gateway.engines.replicas import Replicas
from gateway.engines.served_models import ServedModel, ServedModels
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from gateway.ledger.query_pool import QueryPool
from gateway.routing.pairs import PairCost
from gateway.routing.router import EXPLAINED, Cost, RouteChoice, unpack_choice
from tenancy.history.request_records import find_request

CHOICES = 100
"""Choices that a list has of each model."""
COSTS = 4
"""Costs that a choice of a list has: the least, and that of the chosen replica."""
TENANTS = 200
"""Tenants of each model: those with most tokens."""
NameOf = Callable[[int], str | None]
"""Returns the name of a tenant that exists."""


class CostAnswer(Struct, frozen=True):
    """The predicted seconds of a request on a replica, by term, and the tokens found there;
    `peer_tokens` of the prompt would be fetched from the replica `peer`, "" for none."""

    replica: str
    total_s: float
    wait_s: float
    fill_s: float
    displaced_s: float
    decode_s: float
    device_tokens: int
    below_tokens: int
    peer: str
    peer_tokens: int


class PairAnswer(Struct, frozen=True):
    """The predicted seconds of a request whose prompt is computed at `prompt_at`: until that is
    done, of the fetch, until the answer begins, of the answer, and what answers there lose to the
    prompt."""

    prompt_at: str
    total_s: float
    prompt_s: float
    fetch_s: float
    start_s: float
    decode_s: float
    held_s: float


class ChoiceAnswer(Struct, frozen=True):
    """Where a request went. `refused`: replicas that could not take it, with why."""

    request_id: str
    model: str
    policy: str
    replica: str | None
    costs: list[CostAnswer]
    refused: dict[str, str]
    pair: PairAnswer | None = None
    """Set where another replica computes the prompt."""


class TenantThere(Struct):
    """What a tenant has on a replica now, in tokens; and of its requests that started there since
    the gateway did, the prompt's tokens and those that were cached."""

    tokens: int = 0
    promised_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class FleetTenant(Struct):
    """A tenant over the replicas, by name. `tenant`: null once it is deleted."""

    tenant: str | None
    tokens: int
    replicas: dict[str, TenantThere]


class FleetModel(Struct, frozen=True):
    """A model with engines elsewhere: their states, the tenants with most tokens, and the latest
    choices, newest first, each with the costs that were least."""

    model: str
    replicas: list[dict[str, Any]]
    moved_requests: int
    prefixes_asked_anew: int
    prompts_apart: dict[str, int]
    """Prompts that another engine was to compute than the one that answers, by outcome."""
    promise_moves: dict[str, int]
    """How moves of promises off engines that drain, or are gone, have ended, by outcome."""
    tenants: list[FleetTenant]
    has_more_tenants: bool
    choices: list[ChoiceAnswer]


class FleetAnswer(Struct, frozen=True):
    """The models that have engines elsewhere. `broken_promises`: those of this gateway that were
    broken since its start, in all models."""

    models: list[FleetModel]
    broken_promises: int


class EngineForgotten(Struct, frozen=True):
    """An engine elsewhere that no erasure waits for any more, and how many receipts did."""

    engine: str
    receipts: int


def routes(
    models: ServedModels,
    name_of: NameOf,
    count_broken: Callable[[], int],
    missed: MissedErasures,
    changes: ChangeLog,
    reports: QueryPool,
) -> tuple[Route, ...]:
    """Return the routes of engines elsewhere. `count_broken`: the promises that were broken."""

    async def fleet(request: web.BaseRequest) -> object:
        found = [one for one in models if any(replica.name for replica in one.replicas)]
        return FleetAnswer([await _model(one, name_of) for one in found], count_broken())

    async def choice(request: web.BaseRequest) -> object:
        request_id = request[STATE].parameters["request_id"]
        for one in models:
            if (found := one.replicas.chooser.recent.get(request_id)) is not None:
                return _choice(one.name, found)
        ended = await reports.ask(partial(find_request, request_id=request_id))
        record = None if ended is None else ended.record
        if record is not None and record.choice:
            return _choice(record.model, unpack_choice(record.choice))
        message = (
            f"No choice of {request_id[:80]!r} is known; expected one of the last {EXPLAINED:,}"
            " requests here of a model with several engines, or one of another gateway that has"
            " ended, some seconds ago, and has a record."
        )
        raise Refusal(Kind.NOT_FOUND, "request_unknown", message, param="request_id")

    async def forget(request: web.BaseRequest) -> object:
        name = request[STATE].parameters["name"]
        if not is_fleet_name(name):
            message = f"{name[:80]!r} is no engine's name; expected letters, digits, dots, hyphens."
            raise Refusal(Kind.BAD, "bad_name", message, param="name")
        try:
            receipts = await missed.forget(name, changes.actor(request))
        except ValueError as error:
            message = f"{error}; expected one that never comes back: take it off the list first."
            raise Refusal(Kind.CONFLICT, "engine_connected", message, param="name") from error
        return EngineForgotten(name, receipts)

    route, path = json_api.route, "/admin/v1/fleet"
    gone, forgets = f"DELETE {path}/engines/{{name}}", "Forget an engine that never comes back."
    what, text = f"GET {path}/choices/{{request_id}}", "Say why a request went to its engine."
    return (
        route(
            *(f"GET {path}", "admin:read", "Show engines elsewhere and the latest choices.", fleet),
            answer=FleetAnswer,
        ),
        route(what, "admin:read", text, choice, answer=ChoiceAnswer),
        route(gone, "admin:tenants", forgets, forget, answer=EngineForgotten),
    )


async def _model(model: ServedModel, name_of: NameOf) -> FleetModel:
    replicas = model.replicas
    tenants = await _tenants(replicas)
    largest = sorted(tenants.items(), key=lambda item: (-_tokens(item[1]), item[0]))
    return FleetModel(
        model=model.name,
        replicas=[
            {
                **one.describe(),
                "promised_tokens": sum(
                    there[one.name].promised_tokens
                    for there in tenants.values()
                    if one.name in there
                ),
                **replicas.chooser.describe(one),
            }
            for one in replicas
        ],
        moved_requests=replicas.moved,
        prefixes_asked_anew=replicas.chooser.asked_anew,
        prompts_apart={str(name): count for name, count in replicas.apart.outcomes.items()},
        promise_moves=dict(replicas.promise_moves),
        tenants=[
            FleetTenant(name_of(tenant_id), _tokens(there), there)
            for tenant_id, there in largest[:TENANTS]
        ],
        has_more_tenants=len(largest) > TENANTS,
        choices=[
            _choice(model.name, choice, COSTS) for choice in replicas.chooser.recent.newest(CHOICES)
        ],
    )


async def _tenants(replicas: Replicas) -> dict[int, dict[str, TenantThere]]:
    """Return what each tenant has, by its id and the replica's name; the owner of a shared scope
    has what the scope has. O(namespaces of all replicas), about 1 us each, in a turn of the event
    loop for each replica."""
    found: dict[int, dict[str, TenantThere]] = {}

    def at(tenant_id: int, replica: Replica) -> TenantThere:
        return found.setdefault(tenant_id, {}).setdefault(replica.name, TenantThere())

    for replica in list(replicas):
        size = 0 if replica.info is None else replica.info.block_size
        for stats in replica.namespaces:
            if (tenant_id := owner_of(stats.namespace)) is not None:
                there = at(tenant_id, replica)
                there.tokens += stats.blocks * size
                there.promised_tokens += stats.promised_blocks * size
        for tenant_id, routed in replicas.chooser.routed_by_tenant(replica).items():
            there = at(tenant_id, replica)
            there.prompt_tokens, there.cached_tokens = routed.prompt, routed.cached
        await asyncio.sleep(0)
    return found


def _tokens(there: dict[str, TenantThere]) -> int:
    return sum(one.tokens for one in there.values())


def _choice(model: str, choice: RouteChoice, most: int | None = None) -> ChoiceAnswer:
    """Return a choice as answers show it; `most`: only so many costs, the chosen one among them."""
    kept = choice.least(len(choice.costs) if most is None else most).costs
    refused = {name: str(why) for name, why in choice.refused.items()}
    return ChoiceAnswer(
        *(choice.request_id, model, choice.policy, choice.replica, [*map(_cost, kept)], refused),
        pair=None if choice.pair is None else _pair(choice.pair),
    )


def _pair(pair: PairCost) -> PairAnswer:
    seconds = pair.prompt_s, pair.fetch_s, pair.start_s, pair.decode_s, pair.held_s
    return PairAnswer(pair.prompt_at, round(pair.total_s, 6), *(round(one, 6) for one in seconds))


def _cost(cost: Cost) -> CostAnswer:
    return CostAnswer(
        replica=cost.replica,
        total_s=round(cost.total_s, 6),
        wait_s=round(cost.wait_s, 6),
        fill_s=round(cost.fill_s, 6),
        displaced_s=round(cost.displaced_s, 6),
        decode_s=round(cost.decode_s, 6),
        device_tokens=cost.found.device,
        below_tokens=cost.found.below,
        peer=cost.peer,
        peer_tokens=cost.peer_tokens,
    )
