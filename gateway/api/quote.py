"""`POST /v1/cache/quote`: cached tokens and price of a request that does not run.

The quoted request passes the same checks as a real one, up to admission, and is refused like it.
The engine is asked for the cached prefix; nothing is run, retained, renewed or billed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from engine.api import CacheGrant, Peeked, Request
from gateway.api.generate import CACHE_HEADERS
from gateway.background.erasure import list_holdings
from gateway.caching.attention import findable, with_attention
from gateway.caching.contract import Contract
from gateway.config import Config
from gateway.dialects.canonical import Boundary, RequestMetadata, UsageRecord, path_behind
from gateway.dialects.families import ENDPOINTS
from gateway.dialects.protocol import Endpoint
from gateway.engines.replicas import Quoted
from gateway.errors import Kind, Refusal
from gateway.generation.admission import output_tokens, quota_now
from gateway.generation.generation import cache_settings
from gateway.generation.preparation import Prepared
from gateway.generation.serving import Serving
from gateway.generation.usage import sum_usage
from gateway.http import json_api
from gateway.http.request_body import BODY_SHARE, read_body
from gateway.http.request_context import identity_of, request_metadata
from gateway.http.response import send_json
from gateway.http.route_table import Route, pattern_of
from gateway.ledger.query_pool import QueryPool
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import RateCards, load_cards
from tenancy.types import Identity, WallClock

NO_ENVELOPE = (
    'request: missing; expected {"endpoint": "/v1/chat/completions", "request": {…}}, with the'
    " request's own body as `request` and the path that it would be sent to as `endpoint`."
)
NAMESPACES_PEEKED_MAX = 16
"""Most other namespaces of a tenant that are searched for the missing prefix."""


class QuoteBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A quote's body. `endpoint`: the path that `request` would be sent to."""

    endpoint: str
    request: msgspec.Raw


class QuoteAnswer(Struct, frozen=True):
    """What a request would read, write and compute now. Prices: pico-dollars."""

    object: Literal["cache.quote"]
    model: str
    prompt_tokens: int
    read: dict[str, int]
    write: dict[str, int]
    fresh_tokens: int
    promise: dict[str, Any] | None
    physical: dict[str, Any]
    miss: dict[str, Any] | None
    first_token_s: float | None
    price: dict[str, Any]


def routes(
    serving: Serving, reports: QueryPool, config: Config, wall: WallClock
) -> tuple[Route, ...]:
    """Return the route of quotes."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        identity, preparation = identity_of(request), serving.preparation
        tenant, share = identity.tenant, request[BODY_SHARE]
        fidelity, attention = cache_settings(request, identity)
        body = await preparation.parse(tenant.tenant_id, _parse, await read_body(request))
        found = _find_endpoint(body.endpoint)
        if found is None:
            message = (
                f"endpoint: unknown path {body.endpoint[:100]!r}; expected one that generates."
            )
            raise Refusal(Kind.BAD, "invalid_value", message, param="endpoint")
        dialect, metadata = found[0].dialect, found[1]
        modes = request_metadata(request, config)
        metadata = replace(
            metadata, tolerance=modes.tolerance, separates_cache_key=modes.separates_cache_key
        )
        sent = bytes(body.request)
        call = await preparation.parse(tenant.tenant_id, dialect.parse, sent, metadata)
        model = preparation.check_model(call.model, identity)
        if call.thread.is_pending:
            stored = serving.stored
            call = await stored.continue_call(dialect, sent, metadata, call, identity, share)
        call = with_attention(replace(call, fidelity=fidelity), attention)
        made = await preparation.prepare(model, call, identity, share=share)
        quoted = await _ask_replicas(made, identity)
        cached_tokens = quoted[0].peeked.cached_tokens
        is_in_other_namespace = await _is_in_other_namespace(made, cached_tokens, identity)
        card = await reports.ask(
            lambda store: RateCards(load_cards(store)).in_force(model.name, tenant.tier, wall()),
            tenant.tenant_id,
        )
        answer = quote(made, quoted, identity, card, is_in_other_namespace=is_in_other_namespace)
        return await send_json(request, answer)

    return (
        Route(
            *("POST", "/v1/cache/quote", handle, "inference"),
            summary="Tell what a request would read from the cache and cost, without running it.",
            body=QuoteBody,
            answer=QuoteAnswer,
            headers=CACHE_HEADERS,
            family=json_api.FAMILY,
        ),
    )


async def _ask_replicas(made: Prepared, identity: Identity) -> list[Quoted]:
    """Return what is there of each prompt, where it would go. Raises Refusal for a call that can
    never run, and EngineError."""
    budgets = output_tokens(made.call, made.rendered, identity, made.now)
    namespace, shared = made.scope.namespace, made.scope.shared_tokens
    quota, call = quota_now(identity, made.now), made.call
    return [
        await made.model.replicas.quote(
            Request(
                request_id="",
                tokens=prompt.token_ids,
                max_tokens=budget,
                grant=CacheGrant(namespace, quota, contract.leases),
                samples=call.generation.samples,
                attention=call.attention,
            ),
            findable(prompt.token_ids, shared),
        )
        for prompt, budget, contract in zip(made.rendered, budgets, made.contracts, strict=True)
    ]


async def _is_in_other_namespace(made: Prepared, cached_tokens: int, identity: Identity) -> bool:
    """Return whether another namespace of the tenant and this model has more of the first prompt
    cached.

    Peeks into the tenant's largest namespaces, at most `NAMESPACES_PEEKED_MAX`.
    """
    tokens = made.rendered[0].token_ids
    if cached_tokens >= len(tokens) - 1:
        return False
    replicas = made.model.replicas
    await replicas.refresh()
    own = [
        one.stats
        for one in list_holdings(replicas.namespaces(), identity.tenant.tenant_id)
        if one.scope_id is None  # other tenants may have written to a shared scope
        and one.stats.namespace != made.scope.namespace
    ]
    own.sort(key=lambda stats: -stats.blocks)
    for stats in own[:NAMESPACES_PEEKED_MAX]:
        peeked = await replicas.peek(stats.namespace, tokens)
        if peeked.cached_tokens > cached_tokens:
            return True
    return False


def _find_endpoint(path: str) -> tuple[Endpoint, RequestMetadata] | None:
    """Return the endpoint of a client's path, and the model and action that the path names."""
    for endpoint in ENDPOINTS:
        match = pattern_of(endpoint.path).fullmatch(path)
        if match is not None:
            model, _, action = (match.groupdict().get("target") or "").rpartition(":")
            return endpoint, RequestMetadata(model=model, action=action)
    return None


def _parse(body: bytes) -> QuoteBody:
    try:
        return msgspec.json.decode(body, type=QuoteBody)
    except msgspec.ValidationError as error:
        message, param = f"{error}.", None
        with suppress(msgspec.ValidationError):
            given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            if "request" not in given and len(given.keys() - {"endpoint"}) > 0:
                message, param = NO_ENVELOPE, "request"
        raise Refusal(Kind.BAD, "invalid_value", message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal(Kind.BAD, "invalid_json", "The body is not valid JSON.") from None


def quote(
    made: Prepared,
    quoted: Sequence[Quoted],
    identity: Identity,
    card: RateCard,
    *,
    is_in_other_namespace: bool,
) -> dict[str, Any]:
    """Return the body of a quote: logical counts by contract, physical counts by the engine now.

    The price is that of the prompt. `is_in_other_namespace`: another namespace of the tenant has
    more of the prompt cached.
    """
    peeks = [one.peeked for one in quoted]
    pairs = list(zip(made.contracts, peeks, strict=True))
    record = sum_usage([contract.expect(peek.cached_tokens) for contract, peek in pairs])
    ends = [peek.expires_in_s for peek in peeks if peek.expires_in_s is not None]
    contract, first = pairs[0]
    cause = contract.explain(first.cached_tokens, first.resume_gap_tokens)
    if is_in_other_namespace and cause in ("", "never_written", "unknown"):
        cause = "other_namespace"
    return {
        "object": "cache.quote",
        "model": made.call.model,
        "prompt_tokens": record.total_in,
        "read": record.read,
        "write": record.write,
        "fresh_tokens": record.fresh,
        "promise": _promise(pairs),
        "physical": {
            "cached_tokens": record.physical_cached,
            "promised_tokens": sum(peek.promised_tokens for peek in peeks),
            "tier": "device" if record.physical_cached else None,
            "stored_tokens": _stored(peeks),
            "expires_in_s": min(ends, default=None),
        },
        "miss": _miss(
            made.rendered[0].boundaries,
            first.cached_tokens,
            len(made.rendered[0].token_ids),
            cause,
        ),
        "first_token_s": _first_token_s(made, quoted, identity),
        "price": _price(record, card),
    }


def _stored(peeks: Sequence[Peeked]) -> dict[str, int]:
    """Return the further tokens that levels below the device are known to have, by level."""
    found: Counter[str] = Counter()
    for peek in peeks:
        found.update(dict(peek.stored_tokens))
    return dict(found)


def _promise(pairs: Sequence[tuple[Contract, Peeked]]) -> dict[str, Any] | None:
    """Return what would be granted now of the promises that the request asks for, in the words of a
    lease; None if it asks for none, or the engine cannot tell.
    """
    requested = granted = 0
    bound = ""
    for contract, peek in pairs:
        kinds = ((one.tokens, one.retention) for one in contract.leases)
        asked = [n for n, kind in kinds if kind.promise_s > 0 or kind.pinned]
        tokens = max(asked, default=0)
        if peek.promisable_tokens is None:
            return None
        requested += tokens
        if contract.shared_tokens is not None and tokens > contract.shared_tokens:
            tokens = max((n for n in asked if n <= contract.shared_tokens), default=0)
            bound = bound or "attention"
        granted += min(tokens, peek.promisable_tokens)
        bound = bound or (peek.bound if tokens > peek.promisable_tokens else "")
    if not requested:
        return None
    outcome = "granted" if granted == requested else ("clipped" if granted else "refused")
    return {
        "lease": outcome,
        "bound": bound or None,
        "requested_tokens": requested,
        "granted_tokens": granted,
    }


def _miss(
    boundaries: Sequence[Boundary], cached_tokens: int, total: int, cause: str
) -> dict[str, Any] | None:
    """Return the first token that is not cached, its segment's path and the cause."""
    if cached_tokens >= total - 1 and not cause:
        return None
    path = path_behind(boundaries, cached_tokens) or None
    return {"cause": cause or None, "token": cached_tokens, "path": path}


def _price(record: UsageRecord, card: RateCard) -> dict[str, Any]:
    """Return the price by component, in pico-dollars, and the price without any cache."""
    write = sum(tokens * card.write_price(name) for name, tokens in record.write.items())
    read, fresh = record.read_tokens() * card.cache_read, record.fresh * card.input
    return {
        "rate_card": card.rate_card_id,
        "currency": card.currency,
        "read_pico": read,
        "write_pico": write,
        "fresh_pico": fresh,
        "prompt_pico": read + write + fresh,
        "uncached_pico": record.total_in * card.input,
        "output_pico_per_token": card.output,
    }


def _first_token_s(made: Prepared, quoted: Sequence[Quoted], identity: Identity) -> float | None:
    """Estimate the time to first token from the tenant's waiting tokens and the missing ones, by
    its own place in the queue; of several engines, from what waits at the one that would be chosen.

    Two digits: more of them would tell how many tokens others have waiting. None before the engine
    has measured a rate.
    """
    tenant_id, weight = identity.tenant.tenant_id, identity.policy.weight
    waiting, rate = made.model.waiting, made.model.replicas.stats.prefill_tokens_per_s
    lacks = [
        max(1, len(prompt.token_ids) - one.peeked.cached_tokens)
        for prompt, one in zip(made.rendered, quoted, strict=True)
    ]
    elsewhere = [
        one.wait_s + missing / one.prefill_tokens_per_s
        for missing, one in zip(lacks, quoted, strict=True)
        if one.wait_s is not None
    ]
    estimate = max(elsewhere, default=0.0) or waiting.wait_s(tenant_id, weight, rate, sum(lacks))
    return float(f"{estimate:.1e}") if estimate > 0 else None
