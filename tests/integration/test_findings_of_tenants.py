"""Findings of a whole house: each of its tenants wastes tokens in one way, or in none.

Tenants come one after another, hours apart, so that one has no part in another's finding unless it
is meant to.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.model_store import ModelCard
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import change_tenant, create_tenant
from tenancy.pricing.rate_cards import add_card
from tenancy.types import wall_ms
from tests.integration.test_findings import (
    CARD,
    HANDBOOK,
    SUPPORT,
    Findings,
    Turns,
    body_of,
    push_out,
    tool,
)
from tests.unit.gateway.gateway_fixture import GatewayFixture

WORDS = sorted({*HANDBOOK.split(), *SUPPORT.split()})
BURST = 12
SWAPPED = "model-swap"
TAKER = "bob"


class Ahead:
    """Clocks that are some seconds ahead of the machine's."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        """Return the monotonic seconds."""
        return time.monotonic() + self.seconds

    def wall(self) -> int:
        """Return the Unix time in milliseconds."""
        return wall_ms() + round(1_000 * self.seconds)


class Client:
    """What one tenant sends. `chance`: its texts are of its own."""

    def __init__(self, findings: Findings, ahead: Ahead, chance: random.Random, name: str) -> None:
        self.findings, self.gateway = findings, findings.gateway
        self.ahead, self.chance, self.name = ahead, chance, name
        self.system = self.text(60)
        self.tools = tuple(tool(f"tool_{n}", self.text(9)) for n in range(3))

    def text(self, words: int) -> str:
        """Return new text."""
        return f"{' '.join(self.chance.choices(WORDS, k=words)).capitalize()}."

    def question(self) -> str:
        return self.text(self.chance.randrange(4, 12))

    def turns(self, count: int) -> list[tuple[str, ...]]:
        """Return the turns of a conversation as they are sent, request by request."""
        texts = [self.text(self.chance.randrange(8, 16)) for _ in range(2 * count - 1)]
        return [tuple(texts[: 2 * n + 1]) for n in range(count)]

    async def send(self, *requests: Turns, dialect: Any = "chat") -> None:
        """Send requests one after another."""
        await self.findings.send(dialect, requests, self.name)

    async def heartbeat(self) -> None:
        """Wait until the engine has told of the evictions so far."""
        seen = self.gateway.engine.stats
        await self.gateway.until(lambda: self.gateway.engine.stats is not seen)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a body; return the answer."""
        status, answer, _ = await self.gateway.ask(path, dict(body), who=self.name)
        assert status == 200, answer
        return answer


# --- what wastes tokens ---------------------------------------------------------------------------


async def timestamp(client: Client) -> None:
    for n in range(10):
        now = f"It is 2026-11-28 10:{n:02}:{client.chance.randrange(60):02}."
        await client.send(Turns((client.question(),), f"{now} {client.system}"))


async def shuffled_tools(client: Client) -> None:
    orders = list(permutations(client.tools))
    for tools in client.chance.sample(orders, len(orders)):
        await client.send(Turns((client.question(),), client.system, tools))


async def changed_tools(client: Client) -> None:
    for n in range(10):
        tools = (tool("today", f"Return the day after {n + 10} November."), *client.tools)
        await client.send(Turns((client.question(),), client.system, tools))


async def order_of_keys(client: Client) -> None:
    """A schema that is built from unordered maps."""

    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            names = client.chance.sample(list(value), len(value))
            return {name: shuffled(value[name]) for name in names}
        return value

    fields = {name: {"type": "string", "description": name} for name in ("day", "to", "seat")}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    for _ in range(12):
        tools = tuple({**one, "parameters": shuffled(parameters)} for one in client.tools)
        await client.send(Turns((client.question(),), client.system, tools))


async def edited_history(client: Client) -> None:
    """The first message tells how much is unread."""
    for n, turns in enumerate(client.turns(8)):
        first = f"[{n * 37} messages unread] {turns[0]}"
        await client.send(Turns((first, *turns[1:]), client.system))


async def sliding_window(client: Client) -> None:
    for turns in client.turns(9):
        await client.send(Turns(turns[-5:], client.system))


async def id_before_breakpoint(client: Client) -> None:
    for _ in range(8):
        request_id = f"{client.chance.getrandbits(64):016x}"
        system = f"Request {request_id}. {client.system}"
        await client.send(Turns((client.question(),), system, mark="5m"), dialect="anthropic")


async def salt_per_request(client: Client) -> None:
    for n in range(8):
        _, body = body_of("chat", client.gateway.model, Turns((client.question(),), client.system))
        await client.ask("/v1/chat/completions", {**body, "cache_salt": f"request {n}"})


async def without_breakpoint(client: Client) -> None:
    for _ in range(8):
        await client.send(Turns((client.question(),), client.system), dialect="anthropic")


async def expired(client: Client) -> None:
    """Eleven minutes between two requests."""
    for _ in range(8):
        asked = Turns((client.question(),), client.system, mark="5m")
        await client.send(asked, dialect="anthropic")
        client.ahead.seconds += 660


async def own_ceiling(client: Client) -> None:
    """Three texts in turns, of which the ceiling has room for two."""
    texts = [client.text(60) for _ in range(3)]
    for n in range(15):
        await client.send(Turns((client.question(),), texts[n % 3]))
        await client.heartbeat()


async def evicted(client: Client) -> None:
    """Another tenant's long prompts come between two requests."""
    for n in range(6):
        await client.send(Turns((client.question(),), 2 * client.system))
        await push_out(client.findings, n, client.name)
        await client.gateway.quiet()


# --- what wastes none -----------------------------------------------------------------------------


async def growing_chat(client: Client) -> None:
    for turns in client.turns(9):
        await client.send(Turns(turns, client.system))


def growing_messages(mark: str, pause_s: float) -> Callable[[Client], Awaitable[None]]:
    """A conversation with breakpoints, and a pause behind each request."""

    async def send(client: Client) -> None:
        for turns in client.turns(7):
            await client.send(Turns(turns, client.system, mark=mark), dialect="anthropic")
            client.ahead.seconds += pause_s

    return send


async def cached_contents(client: Client) -> None:
    model = f"models/{client.gateway.model}"
    contents = [{"role": "user", "parts": [{"text": client.text(60)}]}]
    body = {"model": model, "contents": contents, "ttl": "300s"}
    made = await client.ask("/v1beta/cachedContents", body)
    for _ in range(8):
        path, body = body_of("gemini", client.gateway.model, Turns((client.question(),), ""))
        await client.ask(path, {**body, "cachedContent": made["name"]})


async def bursts(client: Client) -> None:
    """All at once, before the first one is cached."""
    for _ in range(2):
        asked = [Turns((client.question(),), client.system) for _ in range(BURST)]
        await asyncio.gather(*map(client.send, asked))


async def two_applications(client: Client) -> None:
    texts = [client.system, client.text(50)]
    for n in range(14):
        await client.send(Turns((client.question(),), texts[n % 2]))


async def rag(client: Client) -> None:
    """Documents that belong to the question, some of them asked for again."""
    documents = [client.text(30) for _ in range(8)]
    for _ in range(14):
        chosen = " ".join(client.chance.sample(documents, 2))
        await client.send(Turns((f"{chosen} {client.question()}",), client.system))


async def one_shots(client: Client) -> None:
    for _ in range(10):
        await client.send(Turns((client.text(40),), ""))


async def huge_prompts(client: Client) -> None:
    for _ in range(5):
        await client.send(Turns((client.text(280),), ""))


async def disconnects(client: Client) -> None:
    """Half of the readers leave before the first token."""
    gateway = client.gateway
    for n in range(10):
        asked = Turns((client.question(),), client.system)
        if n % 2:
            path, body = body_of("chat", gateway.model, asked)
            sent = gateway.post(
                path, msgspec.json.encode({**body, "stream": True}), who=client.name
            )
            gateway.runner.hold_after(0)
            async with gateway.connection() as (_, writer):
                writer.write(sent)
                await gateway.until(lambda: gateway.runner.is_held)
                writer.transport.abort()
            gateway.runner.release()
            await gateway.quiet()
        else:
            await client.send(asked)


async def retry_storm(client: Client) -> None:
    for _ in range(3):
        asked = Turns((client.question(),), client.system)
        await asyncio.gather(*(client.send(asked) for _ in range(6)))
        await client.send(asked, asked)


async def responses(client: Client) -> None:
    """A conversation that the server keeps."""
    previous: dict[str, str] = {}
    for _ in range(8):
        answer = await client.ask(
            "/v1/responses",
            {
                "model": client.gateway.model,
                "instructions": client.system,
                "input": client.question(),
                "max_output_tokens": 16,
                **previous,
            },
        )
        previous = {"previous_response_id": answer["id"]}


WASTEFUL: dict[str, tuple[Callable[[Client], Awaitable[None]], str, str]] = {
    "timestamp": (timestamp, "system_changes", "messages[0].content"),
    "shuffled-tools": (shuffled_tools, "tools_reordered", "tools"),
    "changed-tools": (changed_tools, "tools_changed", "tools"),
    "order-of-keys": (order_of_keys, "tools_reordered", "tools"),
    "edited-history": (edited_history, "history_edited", "messages[1].content"),
    "sliding-window": (sliding_window, "history_edited", "messages[1].content"),
    "id-before-breakpoint": (id_before_breakpoint, "system_changes", "system[0]"),
    "salt-per-request": (salt_per_request, "cache_key_changes", ""),
    "without-breakpoint": (without_breakpoint, "unmarked", ""),
    "expired": (expired, "expired", "5m"),
    "own-ceiling": (own_ceiling, "evicted", ""),
    "evicted": (evicted, "evicted", ""),
}
"""What each tenant sends, and the cause and the place of its finding; and the model swap."""
HEALTHY: dict[str, Callable[[Client], Awaitable[None]]] = {
    "growing-chat": growing_chat,
    "anthropic-chat": growing_messages("5m", 20),
    "kept-5m": growing_messages("5m", 240),
    "kept-1h": growing_messages("1h", 3_000),
    "cached-contents": cached_contents,
    "bursts": bursts,
    "two-applications": two_applications,
    "rag": rag,
    "one-shots": one_shots,
    "huge-prompts": huge_prompts,
    "disconnects": disconnects,
    "retry-storm": retry_storm,
    "responses": responses,
}


@asynccontextmanager
async def house(
    card: ModelCard, folder: Path, keys: dict[str, str], ahead: Ahead, epoch: str
) -> AsyncIterator[Findings]:
    """Open a gateway over the folder's database, on clocks that can be set forward."""
    gateway = await asyncio.to_thread(GatewayFixture, card, folder)
    if not keys:
        await asyncio.to_thread(furnish, gateway)
    gateway.keys, gateway.epoch = keys or gateway.keys, epoch
    keys |= gateway.keys
    gateway.clock, gateway.wall, gateway.context_tokens = ahead.monotonic, ahead.wall, 2_048
    await gateway.open()
    try:
        yield await asyncio.to_thread(Findings, gateway)
    finally:
        await gateway.close()
        await asyncio.to_thread(gateway.discard)


def furnish(gateway: GatewayFixture) -> None:
    """Add the tenants, with a key each, and prices."""
    add_card(gateway.store, wall_ms, CARD)
    for name in (SWAPPED, *WASTEFUL, *HEALTHY):
        tenant = create_tenant(gateway.store, wall_ms, name)
        gateway.keys[name] = create_key(gateway.store, wall_ms, tenant.tenant_id)
    change_tenant(gateway.store, "own-ceiling", {"ceiling_blocks": 60})


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_each_waste_is_named_and_no_other(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Cause and place of all 13, and nothing about a tenant without waste, although the model was
    changed before most of them began."""
    chance, ahead = random.Random(seed), Ahead()
    sends = {**{name: one[0] for name, one in WASTEFUL.items()}, **HEALTHY}
    keys: dict[str, str] = {}
    async with house(card, tmp_path, keys, ahead, "1") as findings:
        swapped = Client(findings, ahead, chance, SWAPPED)
        asked = [Turns((swapped.question(),), swapped.system) for _ in range(8)]
        await swapped.send(*asked)
    async with house(card, tmp_path, keys, ahead, "2") as findings:
        info = findings.gateway.engine.info
        assert info is not None
        info = msgspec.structs.replace(info, model_digest="another")
        monkeypatch.setattr(findings.gateway.engine, "info", info)
        await findings.send("chat", asked, SWAPPED)
        for name in chance.sample(list(sends), len(sends)):
            await sends[name](Client(findings, ahead, chance, name))
            for owner in (name, TAKER):  # the pool is small
                status, _ = await findings.admin.ask("POST", "/admin/v1/erase", {"tenant": owner})
                assert status == 200
            ahead.seconds += 7_200
        found = [one for one in await findings.read() if not one["legitimate"]]

    wanted = {name: (cause, place) for name, (_, cause, place) in WASTEFUL.items()}
    named = sorted((one["tenant"], one["cause"], one["place"]) for one in found)
    wanted[SWAPPED] = "model_changed", ""
    assert named == sorted((name, *of) for name, of in wanted.items())
    sentences = {one["tenant"]: one["sentence"] for one in found}
    assert f"evicted for {TAKER} in" in sentences["evicted"]
    assert "at the tenant's own ceiling" in sentences["own-ceiling"]
