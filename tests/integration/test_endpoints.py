"""The endpoints, over the real core: answers, streams, settling, leaving."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.unit.gateway.gateway_fixture import PATIENCE_S, House, parse_events


async def test_a_chat_is_answered_counted_and_settled(house: House) -> None:
    """The main job: one request, one answer, one ledger entry with the same numbers."""
    status, answer, response = await house.ask(body=house.chat())

    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert house.entries() == [("done", usage["prompt_tokens"], 0, 8)]
    assert response.headers["x-request-id"] in answer["id"]
    await house.check_quiet()


async def test_a_stream_folds_to_the_unary_answer(house: House) -> None:
    """Two code paths would drift; a client sees the same text either way."""
    _, unary, _ = await house.ask(body=house.chat())
    events = await house.stream(house.chat(stream_options={"include_usage": True}))

    assert events[-1] == "[DONE]"
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-2])
    assert text == unary["choices"][0]["message"]["content"]
    assert events[-2]["usage"]["completion_tokens"] == 8
    await house.check_quiet()


async def test_the_second_turn_reports_the_first_ones_tokens_as_cached(house: House) -> None:
    """Prompt caching is the product, and usage is where clients see it."""
    first = house.chat("a long enough first question to fill some blocks of the cache")
    _, answer, _ = await house.ask(body=first)
    said = answer["choices"][0]["message"]
    turn = [*first["messages"], {"role": "assistant", "content": said["content"]}]
    second = {**first, "messages": [*turn, {"role": "user", "content": "and now?"}]}

    _, answer, _ = await house.ask(body=second)

    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= house.entries()[0][1] - 4  # the generation prompt may end differently
    assert house.entries()[1][2] == cached


async def test_tenants_never_share_a_prefix(house: House) -> None:
    """The namespace comes from the key: bob's first request finds nothing of ada's."""
    await house.ask(body=house.chat("the same words for both of them, long enough"))
    _, answer, _ = await house.ask(
        body=house.chat("the same words for both of them, long enough"), who="bob"
    )

    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_client_that_leaves_frees_its_blocks_and_is_settled(house: House) -> None:
    """A disconnect is a path: cancelled in the engine, one entry, nothing pinned."""
    house.runner.hold_after(20)
    body = json.dumps(house.chat(max_tokens=400, stream=True)).encode()
    async with house.connection() as (reader, writer):
        writer.write(house.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
    await house.until(lambda: not house.gateway.context.running)
    house.runner.release()

    await house.check_quiet()
    await house.until(lambda: bool(house.lines))
    assert [entry[0] for entry in house.entries()] == ["cancelled"]
    assert house.lines[-1]["ending"] == "cancelled"
    assert house.runner.computed_tokens < 200, "the engine went on for nobody"


async def test_a_client_that_leaves_a_unary_request_is_settled_too(house: House) -> None:
    """Without a stream nobody writes, so only the listener can notice that the client left."""
    house.runner.hold_after(1)
    body = json.dumps(house.chat(max_tokens=400)).encode()
    async with house.connection() as (_, writer):
        writer.write(house.post("/v1/chat/completions", body))
        await house.until(lambda: bool(house.gateway.context.running))
        writer.transport.abort()
    await house.until(lambda: not house.gateway.context.running)
    house.runner.release()

    await house.check_quiet()
    assert [entry[0] for entry in house.entries()] == ["cancelled"]


async def test_an_engine_that_fails_mid_stream_sends_an_error_event_and_settles(
    house: House,
) -> None:
    """A truncated stream is silent in SDKs; an error event raises."""
    house.runner.hold_after(20)
    body = json.dumps(house.chat(max_tokens=400, stream=True)).encode()
    async with house.connection() as (reader, writer):
        writer.write(house.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
        house.runner.fail_launch.update(range(1_000))
        house.runner.release()
        rest = (await reader.read()).decode()

    events = parse_events("data: " + rest.replace("\r\n", "\n"))
    assert not rest.endswith("[DONE]\n\n")
    assert any("error" in event for event in events if isinstance(event, dict)), rest[-300:]
    entries = house.entries()
    assert len(entries) == 1
    assert entries[0][0] not in ("done", "cancelled")


async def test_models_are_listed_and_found_by_name(house: House) -> None:
    """SDKs list models to check a key."""
    _, listed, _ = await house.ask("/v1/models", method="GET")
    found, one, _ = await house.ask(f"/v1/models/{house.model}", method="GET")
    missing, error, _ = await house.ask("/v1/models/gpt-9", method="GET")

    assert [model["id"] for model in listed["data"]] == [house.model]
    assert (found, one["id"]) == (200, house.model)
    assert (missing, error["error"]["code"]) == (404, "model_not_found")


async def test_readiness_follows_the_engine_and_the_drain(house: House) -> None:
    """Load balancers act on it: 503 from the moment no request would be taken."""
    before, _, _ = await house.ask("/readyz", method="GET", who=None)
    await house.gateway.drain(0.0)
    after, body, _ = await house.ask("/readyz", method="GET", who=None)
    alive, _, _ = await house.ask("/healthz", method="GET", who=None)
    refused, error, response = await house.ask(body=house.chat())

    assert (before, after, alive, refused) == (200, 503, 200, 503)
    assert body == {"status": "draining"}
    assert error["error"]["code"] == "shutting_down"
    assert int(response.headers["retry-after"]) >= 1


async def test_metrics_live_on_the_admin_listener_only(house: House) -> None:
    """The public door says nothing about load."""
    await house.ask(body=house.chat())
    public, _, _ = await house.ask("/metrics", method="GET")
    async with house.session.get(house.admin_url + "/metrics") as response:
        text = await response.text()

    assert public == 404
    assert 'trunkline_output_tokens_total{tenant="ada"} 8.0' in text
    assert "trunkline_kv_blocks 256.0" in text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_not_completed_when_its_entry_cannot_be_written(
    house: House, stream: bool
) -> None:
    """Fail closed: what is not recorded is not delivered whole."""
    await house.gateway.ledger.close()
    status, answer, _ = await house.ask(body=house.chat(stream=stream))

    assert status == 503
    assert answer["error"]["code"] == "ledger_unavailable"
    stats = await house.quiet()
    assert stats.pinned_blocks == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_byte_waits_for_the_entry(house: House, stream: bool) -> None:
    """A ledger that fails while the answer runs: a client never holds a whole unrecorded answer."""
    house.runner.hold_after(20)
    body = json.dumps(house.chat(max_tokens=40, stream=stream)).encode()
    async with house.connection() as (reader, writer):
        writer.write(house.post("/v1/chat/completions", body, "Connection: close"))
        await house.until(lambda: house.runner.steps >= 15)
        await house.gateway.ledger.close()
        house.runner.release()
        async with asyncio.timeout(PATIENCE_S):
            answer = (await reader.read()).decode()

    assert "ledger_unavailable" in answer
    assert "[DONE]" not in answer
    assert answer.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
    stats = await house.quiet()
    assert stats.pinned_blocks == 0
