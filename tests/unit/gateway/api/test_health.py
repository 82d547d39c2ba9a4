"""The probes: ready only while requests are answered and billed, and a reason in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.background import reconciliation
from gateway.engines.replica import ReplicaState
from gateway.engines.replicas import Replicas
from gateway.ledger.interface import InProcessLedger
from tests.unit.gateway.engines.fake_link import FakeLink
from tests.unit.gateway.engines.test_replica_choice import RecordedEngine
from tests.unit.gateway.gateway_fixture import GatewayFixture

TURNS = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/messages": {"messages": TURNS, "max_tokens": 4},
    "/v1beta/models/tiny:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}
"""A request of each dialect."""


async def ask_for_error(gateway: GatewayFixture, path: str) -> tuple[int, str, bool]:
    """Return the status and the message of a request that is refused, and whether its code is that
    of engines elsewhere."""
    body = REQUESTS[path] if "v1beta" in path else {"model": "tiny", **REQUESTS[path]}
    status, answer, _ = await gateway.ask(path, body)
    return status, answer["error"]["message"], "engine_unavailable" in json.dumps(answer).lower()


async def probe(gateway: GatewayFixture, path: str) -> tuple[int, Any]:
    status, body, _ = await gateway.ask(path, method="GET", who=None)
    return status, body


async def test_not_ready_while_nothing_can_be_billed(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request would be refused as `ledger_unavailable`: other servers should get them."""
    is_well = False
    monkeypatch.setattr(InProcessLedger, "is_well", property(lambda _: is_well))
    broken = await probe(gateway, "/readyz")
    alive = await probe(gateway, "/healthz")
    is_well = True
    mended = await probe(gateway, "/readyz")

    reason = "Usage cannot be recorded at the moment."
    assert broken == (503, {"status": "ledger_unavailable", "reason": reason})
    assert alive == (200, {"status": "ok"})
    assert mended == (200, {"status": "ready"})


async def test_says_why_there_is_no_engine(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is alive, since the engine is restarted until it serves."""
    context = gateway.gateway.context
    monkeypatch.setattr(gateway.engine, "ready", lambda: False)
    first = await probe(gateway, "/readyz")
    (replica,) = context.models.default.replicas
    replica.link = FakeLink(restarts=3)
    later = await probe(gateway, "/readyz")
    alive = await probe(gateway, "/healthz")
    other_name = await probe(gateway, "/health")

    assert alive == other_name
    assert first == (503, {"status": "starting", "reason": "The engine is starting."})
    reason = "The engine was lost and is being restarted."
    assert later == (503, {"status": "starting", "reason": reason})
    assert alive == (200, {"status": "ok", "engine": "not ready"})


async def test_says_how_many_engines_elsewhere_are_away(gateway: GatewayFixture) -> None:
    """Without their names and reasons, which are for administrators."""
    model = gateway.gateway.context.models.default
    own, model.replicas = model.replicas, Replicas()
    states: dict[str, ReplicaState] = {"e0": "lost", "e1": "drained", "e2": "lost", "e3": "wrong"}
    for name, state in states.items():
        model.replicas.add(name).state = state
    drains = RecordedEngine("e4")
    drains.ready = lambda: False  # type: ignore[method-assign]
    model.replicas.add("e4", drains).state = "draining"
    status, answer = await probe(gateway, "/readyz")
    told = [await ask_for_error(gateway, path) for path in REQUESTS]
    model.replicas = Replicas()
    _, nobody = await probe(gateway, "/readyz")
    model.replicas = own

    reason = "No engine takes requests now: 1 drained, 1 draining, 2 lost, 1 wrong."
    assert (status, answer) == (503, {"status": "engine_unavailable", "reason": reason})
    assert told == [(503, reason, True), (529, reason, True), (503, reason, True)]
    assert nobody["reason"] == "No engine takes requests now: none is known."


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a gateway that is opened from now on look for the ledger's state all the time."""
    monkeypatch.setattr(reconciliation, "POLL_INTERVAL_S", 0.001)


@pytest.mark.usefixtures("quick_polls")
async def test_a_gateway_without_requests_notices_that_the_ledger_is_well_again(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no request while it is not ready, so no other write would show it."""
    written: list[object] = []
    write = InProcessLedger.write

    def watch(ledger: InProcessLedger, item: Any) -> Any:
        written.append(item)
        return write(ledger, item)

    monkeypatch.setattr(InProcessLedger, "write", watch)
    monkeypatch.setattr(InProcessLedger, "is_well", property(lambda _: len(written) > 3))

    await gateway.until(lambda: gateway.gateway.context.is_ready())

    assert len(written) > 3
