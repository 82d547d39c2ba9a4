"""Requests retried with their `Idempotency-Key`: one execution, one entry, the same bytes."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.background.erasure import ErasureTarget
from gateway.config import IdempotencyConfig
from gateway.generation.delivery import KEY_CHARS_MAX, IdempotentRequest
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import change_tenant, set_status
from tenancy.ledger.idempotency import Claim
from tenancy.types import HOUR_MS, wall_ms
from tests.unit.gateway.gateway_fixture import GatewayFixture, parse_events, read_answer, status_of
from tests.unit.gateway.idempotent_requests import (
    CHAT,
    DIALECTS,
    MESSAGES,
    code_of,
    endings,
    request_for,
    send,
    stored,
)

HELD_STEPS = 12


@pytest.fixture
async def running(
    gateway: GatewayFixture,
) -> AsyncIterator[tuple[GatewayFixture, asyncio.Task[Any]]]:
    """Return a request with the key `n` that is running."""
    gateway.runner.hold_after(HELD_STEPS)
    task = asyncio.create_task(send(gateway, "n", gateway.chat(max_tokens=40)))
    await gateway.until(lambda: stored(gateway) == [("n", False, False)])
    yield gateway, task
    gateway.runner.release()
    await task


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("dialect", [*DIALECTS, "gemini"])
async def test_replays_same_bytes(gateway: GatewayFixture, dialect: str, is_stream: bool) -> None:
    """Byte for byte, with the original id and usage, in every dialect; it is a request in logs and
    metrics, but is not billed again."""
    path, body = request_for(gateway, dialect, is_stream)
    first, one, before = await send(gateway, "a-1", body, path)
    computed = gateway.runner.computed_tokens
    again, two, after = await send(gateway, "a-1", body, path)

    assert (first, again) == (200, 200)
    assert one == two
    assert "Idempotency-Replayed" not in before.headers
    assert after.headers["Idempotency-Replayed"] == "true"
    for name in ("Content-Type", "X-Trunkline-Cache"):
        assert after.headers[name] == before.headers[name]
    assert after.headers["X-Request-Id"] != before.headers["X-Request-Id"]
    assert ("Content-Length" not in after.headers) == is_stream
    assert gateway.runner.computed_tokens == computed
    assert endings(gateway) == ["done"]
    await gateway.check_quiet()
    assert [line["ending"] for line in gateway.lines] == ["done", "replayed"]
    assert b"hello" not in json.dumps(gateway.lines).encode()


async def test_stores_nothing_without_key(gateway: GatewayFixture) -> None:
    for _ in range(2):
        await send(gateway, None, gateway.chat())

    assert stored(gateway) == []
    assert endings(gateway) == ["done", "done"]


@pytest.mark.parametrize(
    ("dialect", "found"),
    [
        ("chat", ("invalid_request_error", "idempotency_in_flight")),
        ("messages", ("conflict_error", "running")),
        ("gemini", ("ABORTED", "running")),
    ],
)
async def test_conflict_while_running(
    gateway: GatewayFixture, dialect: str, found: tuple[str, str]
) -> None:
    """409 in the dialect's shape with retry-after; SDKs retry by themselves."""
    path, body = request_for(gateway, dialect, False)
    gateway.runner.hold_after(2)
    task = asyncio.create_task(send(gateway, "n", body, path))
    await gateway.until(lambda: stored(gateway) == [("n", False, False)])
    status, answer, response = await send(gateway, "n", body, path)
    gateway.runner.release()
    first = await task
    again, same, _ = await send(gateway, "n", body, path)

    assert (status, response.headers["Retry-After"]) == (409, "1")
    assert "X-Should-Retry" not in response.headers
    assert all(word in answer.decode() for word in found), answer
    assert (again, same) == (200, first[1])
    assert endings(gateway) == ["done"]


async def test_one_of_hundred_concurrent_requests_runs(gateway: GatewayFixture) -> None:
    """One execution and one entry; all get the response in the end."""
    tries = [send(gateway, "n", gateway.chat()) for _ in range(100)]
    found = await asyncio.gather(*tries)
    statuses = {status for status, _, _ in found}
    last = await send(gateway, "n", gateway.chat())

    assert statuses <= {200, 409}
    assert {answer for status, answer, _ in found if status == 200} == {last[1]}
    assert endings(gateway) == ["done"]
    await gateway.check_quiet()


@pytest.mark.parametrize("what", ["body", "path", "query", "version", "workspace"])
async def test_key_with_other_request_is_refused(gateway: GatewayFixture, what: str) -> None:
    """A retry does not help, and the client learns nothing of the response."""
    await send(gateway, "n", gateway.chat())
    path, body, headers, who = CHAT, gateway.chat(), {}, "ada"
    match what:
        case "body":
            body["max_tokens"] = 9
        case "path":
            path = "/chat/completions"
        case "query":
            path += "?x=1"
        case "version":
            headers = {"anthropic-beta": "x"}
        case _:
            gateway.keys["lab"] = create_key(gateway.store, wall_ms, 1, workspace="lab")
            gateway.gateway.context.authenticator.refresh_now()
            who = "lab"
    status, answer, response = await send(gateway, "n", body, path, who, **headers)

    assert (status, code_of(answer)) == (409, "idempotency_key_reused")
    assert response.headers["X-Should-Retry"] == "false"
    assert endings(gateway) == ["done"]


async def test_keys_are_separate_by_tenant(gateway: GatewayFixture) -> None:
    """Another API key of the same workspace does share them."""
    gateway.keys["second"] = create_key(gateway.store, wall_ms, 1)
    gateway.gateway.context.authenticator.refresh_now()
    for who in ("ada", "bob", "second"):
        status, _, response = await send(gateway, "1", gateway.chat(), who=who)
        assert status == 200
        assert ("Idempotency-Replayed" in response.headers) == (who == "second")

    assert endings(gateway) == ["done", "done"]


@pytest.mark.parametrize("name", ["", "a" * (KEY_CHARS_MAX + 1), "schl\u00fcssel", "a\tb"])
async def test_refuses_invalid_key(gateway: GatewayFixture, name: str) -> None:
    """Before anything runs, with the valid form."""
    raw = gateway.post(CHAT, json.dumps(gateway.chat()).encode(), f"Idempotency-Key: {name}")
    answer = await gateway.raw(raw)

    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert b"printable ASCII" in answer
    assert endings(gateway) == []


async def test_takes_a_version_header_that_is_no_text(gateway: GatewayFixture) -> None:
    """The digest of a request covers headers that a client may fill with any bytes."""
    lines = ("Idempotency-Key: a-1", "anthropic-beta: \xff", "Connection: close")
    body = msgspec.json.encode(gateway.chat())
    first, again = [
        await gateway.raw(gateway.post("/v1/chat/completions", body, *lines)) for _ in range(2)
    ]

    assert (status_of(first), status_of(again)) == (200, 200)
    assert b"idempotency-replayed: true" in again.lower()


async def test_refuses_two_keys(gateway: GatewayFixture) -> None:
    body = json.dumps(gateway.chat()).encode()
    answer = await gateway.raw(gateway.post(CHAT, body, "Idempotency-Key: a", "Idempotency-Key: b"))

    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert stored(gateway) == []


@pytest.mark.parametrize(("is_stream", "has_begun"), [(False, False), (True, True), (True, False)])
async def test_runs_to_completion_after_disconnect(
    gateway: GatewayFixture, is_stream: bool, has_begun: bool
) -> None:
    """The retry finds the whole response, and nothing is paid twice."""
    gateway.runner.hold_after(HELD_STEPS if has_begun or not is_stream else 0)
    body = json.dumps(gateway.chat(max_tokens=200, stream=is_stream)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, body, "Idempotency-Key: n"))
        if has_begun:
            await reader.readuntil(b"data: ")
        else:
            await gateway.until(lambda: stored(gateway) == [("n", False, False)])
        writer.transport.abort()
    early, _, _ = await send(gateway, "n", body)
    for _ in range(3):  # more than one write finds no client
        wanted = gateway.runner.steps + HELD_STEPS
        gateway.runner.release()
        gateway.runner.hold_after(HELD_STEPS)
        await gateway.until(partial(has_run, gateway, wanted))
        await asyncio.sleep(0)
    gateway.runner.release()
    await gateway.until(lambda: stored(gateway) == [("n", True, True)])
    status, answer, _ = await send(gateway, "n", body)
    _, plain, _ = await send(gateway, None, body)

    assert (early, status) == (409, 200)
    assert said(answer, is_stream) == said(plain, is_stream)
    await gateway.check_quiet()
    assert [entry[:1] + entry[3:] for entry in gateway.entries()] == [("done", 200), ("done", 200)]
    logged = sorted(str(line["ending"]) for line in gateway.lines)
    assert logged == ["cancelled", "done", "refused", "replayed"]


def has_run(gateway: GatewayFixture, steps: int) -> bool:
    """Return whether the runner has run this far."""
    return gateway.runner.steps >= steps


def said(answer: bytes, is_stream: bool) -> str:
    """Return the text of a chat's answer."""
    if not is_stream:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    choices = [event["choices"] for event in parse_events(answer.decode())[:-1]]
    return "".join(choice["delta"].get("content", "") for (choice,) in choices)


async def test_drain_ends_request_and_frees_key(
    running: tuple[GatewayFixture, asyncio.Task[Any]],
) -> None:
    """The retry runs on another server."""
    gateway, task = running
    await gateway.gateway.drain(0.0)
    gateway.runner.release()
    status, _, _ = await task

    assert status == 503
    assert stored(gateway) == []
    assert "done" not in endings(gateway)


async def test_failed_request_frees_key(
    running: tuple[GatewayFixture, asyncio.Task[Any]],
) -> None:
    """An error is not stored: the retry runs under the same key."""
    gateway, task = running
    gateway.runner.fail_launch.update(range(1_000))
    gateway.runner.release()
    failed, _, _ = await task

    assert failed >= 500
    assert stored(gateway) == []


async def test_erasure_during_run_prevents_storage(
    running: tuple[GatewayFixture, asyncio.Task[Any]],
) -> None:
    """A client that erases its cache erases its responses, also running ones."""
    gateway, task = running
    erasing = asyncio.create_task(gateway.gateway.erasure.erase(ErasureTarget(1, 7)))
    gateway.runner.release()
    await erasing
    status, _, _ = await task

    assert status == 200
    assert stored(gateway) == []


async def test_erasure_deletes_stored_responses(gateway: GatewayFixture) -> None:
    """Responses are content, like the cache; other workspaces keep theirs."""
    await send(gateway, "n", gateway.chat())
    await gateway.gateway.erasure.erase(ErasureTarget(1, 7, "lab"))
    before = stored(gateway)
    await gateway.gateway.erasure.erase(ErasureTarget(1, 7))

    assert before == [("n", True, True)]
    assert stored(gateway) == []


async def test_replay_requires_valid_key_and_active_tenant(gateway: GatewayFixture) -> None:
    """A suspension also deletes stored responses."""
    await send(gateway, "n", gateway.chat())
    await asyncio.to_thread(set_status, gateway.store, "ada", "suspended")
    gateway.gateway.context.authenticator.refresh_now()
    status, _, _ = await send(gateway, "n", gateway.chat())

    assert status == 403
    assert stored(gateway) == []


@asynccontextmanager
async def opened(gateway: GatewayFixture, **settings: int) -> AsyncIterator[None]:
    """Run a gateway with these settings of idempotency."""
    idempotency = IdempotencyConfig(**settings)
    gateway.config = msgspec.structs.replace(gateway.config, idempotency=idempotency)
    await gateway.open()
    yield
    await gateway.close()


async def test_too_large_response_is_not_run_again(
    unopened_gateway: GatewayFixture,
) -> None:
    """Only its key is stored: the client is told, and does not pay again."""
    gateway = unopened_gateway
    async with opened(gateway, result_bytes_max=100):
        first, _, _ = await send(gateway, "n", gateway.chat())
        status, answer, response = await send(gateway, "n", gateway.chat())
        there = stored(gateway)

    assert (first, status, code_of(answer)) == (200, 409, "idempotency_result_gone")
    assert response.headers["X-Should-Retry"] == "false"
    assert there == [("n", True, False)]


async def test_number_of_keys_is_bounded(unopened_gateway: GatewayFixture) -> None:
    """A tenant above the limit is told before anything runs."""
    gateway = unopened_gateway
    async with opened(gateway, keys_per_tenant_max=1):
        await send(gateway, "a", gateway.chat())
        status, answer, response = await send(gateway, "b", gateway.chat())
        others, _, _ = await send(gateway, "b", gateway.chat(), who="bob")
        await gateway.check_quiet()

    assert (status, code_of(answer), others) == (429, "idempotency_room_full", 200)
    assert response.headers["Retry-After"] == "60"


async def test_refuses_key_if_server_stores_no_responses(unopened_gateway: GatewayFixture) -> None:
    """To accept it silently would promise a replay."""
    async with opened(unopened_gateway, keep_hours=0):
        status, answer, _ = await send(unopened_gateway, "n", unopened_gateway.chat())

    assert (status, code_of(answer)) == (400, "idempotency_unavailable")


async def test_replays_for_a_day_then_runs_again(gateway: GatewayFixture) -> None:
    """By the ledger's clock; a job deletes it within a minute."""
    await send(gateway, "n", gateway.chat())
    gateway.wall = lambda: wall_ms() + 24 * HOUR_MS - 60_000
    _, _, late = await send(gateway, "n", gateway.chat())
    gateway.wall = lambda: wall_ms() + 24 * HOUR_MS + 60_000
    _, _, after = await send(gateway, "n", gateway.chat())

    assert "Idempotency-Replayed" in late.headers
    assert "Idempotency-Replayed" not in after.headers
    assert endings(gateway) == ["done", "done"]


async def test_stored_responses_survive_restart(unopened_gateway: GatewayFixture) -> None:
    """They are in the database, beside their ledger entry."""
    await unopened_gateway.open()
    _, one, _ = await send(unopened_gateway, "n", unopened_gateway.chat())
    await unopened_gateway.close()
    await unopened_gateway.open()
    _, two, response = await send(unopened_gateway, "n", unopened_gateway.chat())
    await unopened_gateway.close()

    assert "Idempotency-Replayed" in response.headers
    assert one == two


async def test_expired_responses_are_deleted(unopened_gateway: GatewayFixture) -> None:
    """A job runs every minute and at shutdown: content is kept no longer than promised."""
    await unopened_gateway.open()
    await send(unopened_gateway, "n", unopened_gateway.chat())
    unopened_gateway.wall = lambda: wall_ms() + 25 * HOUR_MS
    await unopened_gateway.close()

    assert stored(unopened_gateway) == []


async def test_replay_counts_as_one_request_without_tokens(gateway: GatewayFixture) -> None:
    """It must not bypass the request limit."""
    limits = {"requests_per_minute": 2, "output_tokens_per_minute": 8}
    change_tenant(gateway.store, "ada", limits)
    gateway.gateway.context.authenticator.refresh_now()
    found = [await send(gateway, "n", gateway.chat()) for _ in range(3)]
    left = [response.headers["x-ratelimit-remaining-requests"] for _, _, response in found]

    assert [status for status, _, _ in found] == [200, 200, 429]
    assert left == ["1", "0", "0"]
    assert gateway.gateway.limits.limiter.running_of(1) == 0


async def test_token_count_ignores_key(gateway: GatewayFixture) -> None:
    """It generates nothing and is free to repeat."""
    body = {"model": gateway.model, "messages": MESSAGES}
    for _ in range(2):
        status, _, response = await send(gateway, "n", body, "/v1/messages/count_tokens")
        assert (status, "Idempotency-Replayed" in response.headers) == (200, False)

    assert stored(gateway) == []


async def test_replays_long_response_in_chunks(gateway: GatewayFixture) -> None:
    """More than one write, over a connection that stays open."""
    body = json.dumps(gateway.chat(max_tokens=300, n=4, logprobs=True, stream=True)).encode()
    raw = gateway.post(CHAT, body, "Idempotency-Key: n", "Connection: close")
    answers = [await gateway.raw(raw) for _ in range(2)]
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers]
    texts = [b"".join(body.split(b"\r\n")[1::2]) for body in bodies]

    assert len(texts[0]) > 2**16
    assert texts[0] == texts[1]


def test_recording_response_uses_little_memory(unopened_gateway: GatewayFixture) -> None:
    """Thousands of streams may be open, each with its own compressor."""
    chunks = [
        f'data: {{"choices":[{{"delta":{{"content":"{n * n}"}}}}]}}\n\n'.encode() * 4
        for n in range(200)
    ]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        open_ones = [
            IdempotentRequest(1, Claim("n", b"", 9), unopened_gateway.config.idempotency)
            for _ in range(10)
        ]
        for one in open_ones:
            for chunk in chunks:
                one.record(chunk)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    answer = open_ones[0].to_store({}, 0).answer

    assert held < 10 * 48_000
    assert answer is not None
    assert zlib.decompress(answer.body) == b"".join(chunks)
    assert len(answer.body) < sum(map(len, chunks)) / 8


async def test_client_may_disconnect_during_replay(gateway: GatewayFixture) -> None:
    """The next retry reads all of it."""
    body = json.dumps(gateway.chat(max_tokens=300, stream=True)).encode()
    await send(gateway, "n", body)
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, body, "Idempotency-Key: n"))
        await reader.read(10)
        writer.transport.abort()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, body, "Idempotency-Key: n", "Connection: close"))
        answer = await read_answer(reader)

    assert b"[DONE]" in answer
    assert endings(gateway) == ["done"]
