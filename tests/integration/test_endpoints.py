"""The endpoints over the real core: answers, streams, settlement, disconnects."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture, parse_events


async def test_chat_is_answered_and_settled(gateway: GatewayFixture) -> None:
    """One request, one answer, one ledger entry with the same numbers."""
    status, answer, response = await gateway.ask(body=gateway.chat())

    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert gateway.entries() == [("done", usage["prompt_tokens"], 0, 8)]
    assert response.headers["x-request-id"] in answer["id"]
    await gateway.check_quiet()


async def test_disconnect_frees_blocks_and_settles(
    gateway: GatewayFixture,
) -> None:
    """Cancelled in the engine, one entry, nothing pinned."""
    gateway.runner.hold_after(20)
    body = json.dumps(gateway.chat(max_tokens=400, stream=True)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
    await gateway.until(lambda: not gateway.gateway.context.running)
    gateway.runner.release()

    await gateway.check_quiet()
    await gateway.until(lambda: bool(gateway.lines))
    assert [entry[0] for entry in gateway.entries()] == ["cancelled"]
    assert gateway.lines[-1]["ending"] == "cancelled"
    assert gateway.runner.computed_tokens < 200, "the engine went on after the client had left"


async def test_disconnect_of_unary_request_settles(gateway: GatewayFixture) -> None:
    """Without writes, only the listener can notice the disconnect."""
    gateway.runner.hold_after(1)
    body = json.dumps(gateway.chat(max_tokens=400)).encode()
    async with gateway.connection() as (_, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await gateway.until(lambda: bool(gateway.gateway.context.running))
        writer.transport.abort()
    await gateway.until(lambda: not gateway.gateway.context.running)
    gateway.runner.release()

    await gateway.check_quiet()
    assert [entry[0] for entry in gateway.entries()] == ["cancelled"]


async def test_engine_failure_mid_stream_sends_error_event_and_settles(
    gateway: GatewayFixture,
) -> None:
    """SDKs ignore a truncated stream but raise on an error event."""
    gateway.runner.hold_after(20)
    body = json.dumps(gateway.chat(max_tokens=400, stream=True)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
        gateway.runner.fail_launch.update(range(1_000))
        gateway.runner.release()
        rest = (await reader.read()).decode()

    events = parse_events("data: " + rest.replace("\r\n", "\n"))
    assert not rest.endswith("[DONE]\n\n")
    assert any("error" in event for event in events if isinstance(event, dict)), rest[-300:]
    entries = gateway.entries()
    assert len(entries) == 1
    assert entries[0][0] not in ("done", "cancelled")


async def test_readiness_follows_engine_and_drain(gateway: GatewayFixture) -> None:
    """503 from the moment no request would be accepted."""
    before, _, _ = await gateway.ask("/readyz", method="GET", who=None)
    await gateway.gateway.drain(0.0)
    after, body, _ = await gateway.ask("/readyz", method="GET", who=None)
    alive, _, _ = await gateway.ask("/healthz", method="GET", who=None)
    refused, error, response = await gateway.ask(body=gateway.chat())

    assert (before, after, alive, refused) == (200, 503, 200, 503)
    assert body == {"status": "draining", "reason": "The server is shutting down."}
    assert error["error"]["code"] == "shutting_down"
    assert int(response.headers["retry-after"]) >= 1


async def test_metrics_are_on_admin_listener_only(gateway: GatewayFixture) -> None:
    """The public listener reveals nothing about load."""
    await gateway.ask(body=gateway.chat())
    public, _, _ = await gateway.ask("/metrics", method="GET")
    async with gateway.session.get(gateway.admin_url + "/metrics") as response:
        text = await response.text()

    assert public == 404
    assert 'trunkline_output_tokens_total{tenant="ada"} 8.0' in text
    assert "trunkline_kv_blocks 256.0" in text


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_fails_if_entry_cannot_be_written(
    gateway: GatewayFixture, stream: bool
) -> None:
    """Fail closed: an unrecorded answer is not completed."""
    await gateway.gateway.ledger.close()
    status, answer, _ = await gateway.ask(body=gateway.chat(stream=stream))

    assert status == 503
    assert answer["error"]["code"] == "ledger_unavailable"
    stats = await gateway.quiet()
    assert stats.pinned_blocks == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_last_byte_waits_for_entry(gateway: GatewayFixture, stream: bool) -> None:
    """The ledger fails during the answer: the client never gets a complete unrecorded answer."""
    gateway.runner.hold_after(20)
    body = json.dumps(gateway.chat(max_tokens=40, stream=stream)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body, "Connection: close"))
        await gateway.until(lambda: gateway.runner.steps >= 15)
        await gateway.gateway.ledger.close()
        gateway.runner.release()
        async with asyncio.timeout(PATIENCE_S):
            answer = (await reader.read()).decode()

    assert "ledger_unavailable" in answer
    assert "[DONE]" not in answer
    assert answer.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
    stats = await gateway.quiet()
    assert stats.pinned_blocks == 0
