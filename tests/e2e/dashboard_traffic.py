"""A day of 30 tenants for pictures of the dashboard: through the API, over a fake runner.

The wall clock stands a day back and comes forward with the requests, so that ledger and samples
hold a whole day. `dashboard_picture` uses it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator
from typing import Any

from engine.plan import StepPlan
from tenancy.types import HOUR_MS, wall_ms
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatedRunner, GatewayFixture

TICKS, REQUESTS_MAX = 96, 30
DOWN = 40, 43
"""The ticks between which the server is down: all charts have a gap."""
TICK_S = 1.2
"""Real seconds of a quarter of an hour: the samples of history are taken each second."""
NAMES = (
    "acme-retail",
    "aurora-bank",
    "blueprint-ai",
    "cargo-lane",
    "civic-help",
    "coral-health",
    "delta-legal",
    "drift-games",
    "ember-media",
    "fjord-energy",
    "garnet-insure",
    "harbor-travel",
    "hr-assistant",
    "iris-labs",
    "juniper-hr",
    "kestrel-cyber",
    "lumen-tutor",
    "maple-support",
    "nimbus-crm",
    "onyx-finance",
    "prairie-farm",
    "quartz-search",
    "raven-news",
    "sable-auto",
    "tidal-notes",
    "umbra-sec",
    "vertex-edu",
    "willow-care",
    "xenon-dev",
    "zephyr-air",
)
PRICES = {"input": 150, "output": 600, "cache_read": 15}
"""Dollars per million tokens, high enough for a tiny model's day to cost something."""


class EarlierWall:
    """A wall clock that is some time behind."""

    def __init__(self) -> None:
        self.behind_ms = 0

    def __call__(self) -> int:
        return wall_ms() - self.behind_ms


class PacedRunner(GatedRunner):
    """Takes time for each token that it computes, as a model does."""

    def launch(self, plan: StepPlan) -> None:
        """Wait 0.2 ms for each token of the plan, then launch."""
        time.sleep(0.0002 * sum(row.count for row in plan.rows))
        super().launch(plan)


async def ask(admin: AdminClient, method: str, path: str, body: object) -> Any:
    """Send a change; return the answer."""
    status, told = await admin.ask(method, f"/admin/v1/{path}", body)
    assert status < 300, told
    return told


async def make_tenants(gateway: GatewayFixture, admin: AdminClient) -> None:
    """Make the tenants with their keys, some with limits, floors and budgets."""
    card = {name: dollars * 1_000_000 for name, dollars in PRICES.items()}
    written = {"*": 190_000_000, "1h": 300_000_000}
    await ask(admin, "POST", "rate-cards", {"name": "standard", **card, "cache_write": written})
    for number, name in enumerate(NAMES):
        limits = {"requests_per_minute": 20} if number % 7 == 3 else {}
        floors = {"floor_blocks": 4} if number % 5 == 0 else {}
        await ask(admin, "POST", "tenants", {"name": name, **limits, **floors})
        made = await ask(admin, "POST", f"tenants/{name}/keys", {"label": "production"})
        gateway.keys[name] = made["key"]
        if number % 4 == 1:
            body = {"window": "month", "hard_micros": 20_000_000, "soft_micros": 16_000_000}
            await ask(admin, "PUT", f"tenants/{name}/budgets", body)
    body = {"window": "day", "hard_micros": 400_000, "soft_micros": 300_000}
    await ask(admin, "PUT", "tenants/onyx-finance/budgets", body)
    gateway.gateway.context.authenticator.refresh_now()


async def send(gateway: GatewayFixture, name: str, rng: random.Random) -> None:
    """Send one request of a tenant, in one of two dialects. One tenant's prompt begins with a
    number that changes."""
    begin = f"It is {rng.random()}. " if name == "hr-assistant" else ""
    text = f"{begin}{f'You are the assistant of {name}. ' * 5}"
    asked = [{"role": "user", "content": f"question {rng.randint(1, 40)}"}]
    body: dict[str, Any] = {"model": gateway.model, "max_tokens": rng.randint(4, 24)}
    if rng.random() < 0.4:
        kept = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        body |= {"system": [kept], "messages": asked}
        version = {"anthropic-version": "2023-06-01"}
        await gateway.ask("/v1/messages", body, who=name, headers=version)
    else:
        body["messages"] = [{"role": "system", "content": text}, *asked]
        await gateway.ask(body=body, who=name)


def in_pairs(names: list[str]) -> Iterator[tuple[str, str]]:
    """Return the names two by two; a last one alone is left out."""
    return zip(names[::2], names[1::2], strict=False)


async def play_a_day(gateway: GatewayFixture, wall: EarlierWall, admin: AdminClient) -> None:
    """Send a day's requests; the last hour has refusals. Takes two minutes."""
    rng = random.Random(7)
    weights = [rng.paretovariate(0.9) for _ in NAMES]
    for tick in range(TICKS):
        wall.behind_ms = 24 * HOUR_MS * (TICKS - tick) // TICKS
        began_s = time.monotonic()
        share = 0.35 + 0.65 * (math.sin(tick / TICKS * 2 * math.pi - 1.2) + 1) / 2
        names = rng.choices(NAMES, weights, k=round(REQUESTS_MAX * share))
        if tick == DOWN[0]:
            await gateway.close()
        elif tick == DOWN[1]:
            gateway.runner = PacedRunner(gateway.card.config.vocab)  # the KV of the old one is gone
            await gateway.open()
        if not DOWN[0] <= tick < DOWN[1]:
            for first, second in in_pairs(names):
                await asyncio.gather(send(gateway, first, rng), send(gateway, second, rng))
        await asyncio.sleep(max(0.0, TICK_S - (time.monotonic() - began_s)))
    wall.behind_ms = 0
    await ask(admin, "PATCH", "tenants/prairie-farm", {"status": "suspended"})
    gateway.gateway.context.authenticator.refresh_now()
    for name, count in (("cargo-lane", 45), ("prairie-farm", 12), ("onyx-finance", 6)):
        for _ in range(count):
            await send(gateway, name, rng)
    await gateway.engine.get_stats()
