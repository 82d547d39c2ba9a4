"""One tenant fills the queue: others are served, and told nothing of it."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from engine.statistics import Stats
from tests.attacks.attacked_server import Answer, flood
from tests.attacks.conftest import StartServer
from tests.attacks.probe import Probe, check_undisturbed
from tests.unit.gateway.gateway_fixture import GatewayFixture

SETTINGS = """
[limits]
requests_per_tenant_max = 4096

[engine]
device = "cpu"
threads = 1
kv_memory_mib = 64
sequences_max = 8
queue_requests_max = 24
"""


@pytest.mark.slow
def test_a_full_queue_refuses_the_tenant_that_fills_it(start_server: StartServer) -> None:
    """Calls of many prompts count as many; each refusal comes at once and has a retry time."""
    server = start_server(SETTINGS)
    quiet = Probe(server, server.tenant("quiet"))
    key = server.tenant("attacker")
    body = {"model": server.model, "prompt": ["count on"] * 8, "max_tokens": 40, "ignore_eos": True}
    alone = quiet.observe_alone()
    with flood(lambda: server.ask(key, "/v1/completions", body), threads=12) as answers:
        beside = quiet.observe()
    refused = [a for a in answers if isinstance(a, Answer) and a.status == 503]

    assert refused
    assert {a.code for a in refused} == {"overloaded"}
    assert all(int(a.headers["Retry-After"]) >= 1 for a in refused)
    check_undisturbed(alone, beside)


async def test_a_quote_tells_nothing_of_others_waiting_tokens(
    unopened_gateway: GatewayFixture,
) -> None:
    """The quiet tenant's estimate does not depend on the tokens that others have waiting."""
    gateway = unopened_gateway
    gateway.engine_config = replace(gateway.engine_config, heartbeat_s=3_600.0)
    await gateway.open()
    request = {"endpoint": "/v1/chat/completions", "request": gateway.chat()}
    context = gateway.gateway.context
    gateway.engine.stats = Stats(prefill_tokens_per_s=100.0)  # no heartbeat replaces it
    told = []
    for tokens in (1_000, 971_700):
        place = context.models.default.waiting.enter(99, 1.0, [tokens])
        status, found, _ = await gateway.ask("/v1/cache/quote", request)
        assert status == 200, json.dumps(found)
        told.append(found["first_token_s"])
        place.leave()
    await gateway.close()

    assert told[0] == told[1] is not None
