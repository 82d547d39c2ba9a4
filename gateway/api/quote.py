"""`POST /v1/cache/quote`: what a request would find, before it runs.

It goes the request's own way up to admission, refused like it if it could never run, and asks the
engine what is there; nothing runs, is kept, renewed or billed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from engine.api import Peeked, Stats
from gateway.api.routes import find
from gateway.background.erasure import holdings
from gateway.context import Context
from gateway.dialects.canonical import Boundary, UsageRecord
from gateway.errors import Kind, Refusal
from gateway.generation.admission import output_tokens
from gateway.generation.preparation import Prepared, check_model, prepare
from gateway.generation.usage import sum_usage
from gateway.http.middleware import Handler, Route
from gateway.http.request_body import read_body
from gateway.http.request_context import STATE
from gateway.http.response import send
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import RateCards, load_cards
from tenancy.types import Identity

NAMESPACES_ASKED_MAX = 16
"""Of a tenant's other namespaces, to say that what is missing is in one of them."""


class QuoteBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`endpoint`: the path that `request` would be sent to."""

    endpoint: str
    request: msgspec.Raw


def routes(gateway: Context) -> tuple[Route, ...]:
    """The quote."""
    return (Route("POST", "/v1/cache/quote", _quote(gateway), "inference"),)


def _quote(gateway: Context) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        state = request[STATE]
        assert state.identity is not None, "this route asks for a key"
        body = _parse(await read_body(request, gateway.config.server))
        found = find(body.endpoint)
        if found is None:
            message = f"endpoint: no path that answers prompts (it is {body.endpoint[:100]!r})."
            raise Refusal(Kind.BAD, "invalid_value", message, param="endpoint")
        endpoint, asked = found
        call = endpoint.dialect.parse(bytes(body.request), asked)
        check_model(gateway, call)
        made = await prepare(gateway, call, state.identity)
        output_tokens(made.call, made.rendered, state.identity, made.now)
        namespace = made.scope.namespace
        seen = [await gateway.engine.peek(namespace, prompt.token_ids) for prompt in made.rendered]
        is_elsewhere = await _is_elsewhere(gateway, made, seen[0].cached_tokens, state.identity)
        tenant = state.identity.tenant
        card = await gateway.reports.ask(
            lambda store: RateCards(load_cards(store)).in_force(
                gateway.model, tenant.tier, gateway.wall()
            ),
            tenant.tenant_id,
        )
        answer = quote(made, seen, gateway.engine.stats, card, is_elsewhere=is_elsewhere)
        data = msgspec.json.encode(answer)
        return await send(request, 200, data, {"Content-Type": "application/json"})

    return handle


async def _is_elsewhere(
    gateway: Context, made: Prepared, cached_tokens: int, identity: Identity
) -> bool:
    """Has the same tenant more of the first prompt in another namespace of its own? It asks those
    that hold most."""
    tokens = made.rendered[0].token_ids
    if cached_tokens >= len(tokens) - 1:
        return False
    await gateway.engine.get_stats()
    own = [
        one.stats
        for one in holdings(gateway.engine.namespaces, identity.tenant.tenant_id)
        if one.scope_id is None  # what it shares others have written
        and one.stats.namespace != made.scope.namespace
    ]
    own.sort(key=lambda stats: -stats.blocks)
    for stats in own[:NAMESPACES_ASKED_MAX]:
        peeked = await gateway.engine.peek(stats.namespace, tokens)
        if peeked.cached_tokens > cached_tokens:
            return True
    return False


def _parse(body: bytes) -> QuoteBody:
    try:
        return msgspec.json.decode(body, type=QuoteBody)
    except msgspec.ValidationError as error:
        raise Refusal(Kind.BAD, "invalid_value", f"{error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal(Kind.BAD, "invalid_json", "The body is not valid JSON.") from None


def quote(
    made: Prepared,
    seen: Sequence[Peeked],
    stats: Stats,
    card: RateCard,
    *,
    is_elsewhere: bool = False,
) -> dict[str, Any]:
    """The answer. Logical numbers by contract, physical ones as the engine has them now; the price
    is the prompt's. `is_elsewhere`: another namespace of the tenant's has more of it."""
    pairs = list(zip(made.contracts, seen, strict=True))
    record = sum_usage([contract.expect(peek.cached_tokens) for contract, peek in pairs])
    ends = [peek.expires_in_s for peek in seen if peek.expires_in_s is not None]
    contract, first = pairs[0]
    cause = contract.explain(first.cached_tokens)
    if is_elsewhere and cause in ("", "never_written", "unknown"):
        cause = "other_namespace"
    return {
        "object": "cache.quote",
        "model": made.call.model,
        "prompt_tokens": record.total_in,
        "read": record.read,
        "write": record.write,
        "fresh_tokens": record.fresh,
        "physical": {
            "cached_tokens": record.physical_cached,
            "promised_tokens": sum(peek.promised_tokens for peek in seen),
            "tier": "device" if record.physical_cached else None,
            "expires_in_s": min(ends, default=None),
        },
        "miss": _miss(
            made.rendered[0].boundaries,
            first.cached_tokens,
            len(made.rendered[0].token_ids),
            cause,
        ),
        "first_token_s": _first_token_s(record, stats),
        "price": _price(record, card),
    }


def _miss(
    boundaries: Sequence[Boundary], cached_tokens: int, total: int, cause: str
) -> dict[str, Any] | None:
    """Where the prompt leaves what is there: the first token that is not, and its segment."""
    if cached_tokens >= total - 1 and not cause:
        return None
    path = next((mark.path for mark in boundaries if mark.tokens > cached_tokens), None)
    return {"cause": cause or None, "token": cached_tokens, "path": path}


def _price(record: UsageRecord, card: RateCard) -> dict[str, Any]:
    """Pico-dollars by component; what it would be without any cache beside it."""
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


def _first_token_s(record: UsageRecord, stats: Stats) -> float | None:
    """What waits and what is missing, at the rate of late; None before there is one."""
    rate = stats.prefill_tokens_per_s
    if rate <= 0:
        return None
    missing = max(1, record.total_in - record.physical_cached)
    return round((stats.waiting_tokens + missing) / rate, 4)
