"""Traces: reading, prompts, and replay against scripted endpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from gateway.bench.client import BenchError
from gateway.bench.trace import Arrival, BadTrace, TracePrompts, read_trace, replay
from tests.unit.gateway.bench.scripted_endpoint import (
    MOONCAKE,
    Endpoint,
    WatchedClock,
    client_of,
    common_prefix,
    values,
    write_trace,
)

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


def test_both_formats_start_at_zero(tmp_path: Path) -> None:
    mooncake = read_trace(write_trace(tmp_path, "m.jsonl", MOONCAKE), 10)
    azure = read_trace(write_trace(tmp_path, "a.csv", AZURE), 10)

    assert mooncake == [Arrival(0.0, 700, 3, (7, 8)), Arrival(0.5, 520, 2, (7, 9))]
    assert [(a.prompt_tokens, a.output_tokens) for a in azure] == [(374, 44), (396, 109)]
    assert azure[1].at_s == pytest.approx(4.314579)


def test_reads_no_further_than_the_limit(tmp_path: Path) -> None:
    """A damaged line beyond the limit does not matter."""
    path = write_trace(tmp_path, "m.jsonl", MOONCAKE + "broken")

    assert len(read_trace(path, 2)) == 2


@pytest.mark.parametrize(
    ("name", "text", "line", "found"),
    [
        ("m.jsonl", MOONCAKE + "{}", 3, "{}"),
        ("m.jsonl", MOONCAKE + "\n" + '{"timestamp": 1, "input_length": 600, "output_length": 1,'
         ' "hash_ids": [3]}', 4, "600"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,-4,1\n", 4, "2023-11-16 18:15:51,-4,1"),
        ("a.csv", AZURE + "later,4,1\n", 4, "later,4,1"),
        ("a.csv", "TIME,TOKENS\n1,2\n", 1, "TIME,TOKENS"),
        ("l.csv", "entry_id,tenant,started\n", 1, "physical_cached_tokens"),
        ("l.csv", "entry_id,tenant,started,prompt_tokens,output_tokens,physical_cached_tokens\n"
         "1,ada,2026-01-02T10:00:00.000Z,5,x,0\n", 2, "5,x,0"),
    ],
)  # fmt: skip
def test_names_the_line_that_is_none(
    name: str, text: str, line: int, found: str, tmp_path: Path
) -> None:
    """With its number, what it has, and what would be right."""
    path = write_trace(tmp_path, name, text)

    with pytest.raises(BenchError, match="expected") as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.jsonl", ""),
        ("m.jsonl", "not json"),
        ("m.jsonl", '{"timestamp": 1}'),
        ("m.jsonl", '{"timestamp": 1, "input_length": 0, "output_length": 1}'),
        ("a.csv", "TIME,TOKENS\n1,2\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,1\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46\n"),
    ],
)
def test_refuses_a_file_that_is_not_a_trace(name: str, text: str, tmp_path: Path) -> None:
    """Before a server is started for it."""
    with pytest.raises(BadTrace, match=name):
        read_trace(write_trace(tmp_path, name, text), 10)


def test_equal_block_ids_give_equal_tokens() -> None:
    """Prompts share exactly the blocks that the trace says."""
    prompts = TracePrompts(3, context=4096)
    one = prompts.prompt(0, Arrival(0, 1100, 4, (7, 8, 9)), 4)
    two = prompts.prompt(1, Arrival(0, 1100, 4, (7, 8, 5)), 4)

    assert len(one) == len(two) == 1100
    assert common_prefix(list(one), list(two)) == 1024


def test_prompts_without_blocks_are_unique_and_fit_the_context() -> None:
    """Azure's trace has no blocks; a long prompt is cut, not refused."""
    prompts = TracePrompts(3, context=300)
    one, two = (prompts.prompt(n, Arrival(0, 374, 44), 44) for n in range(2))

    assert len(one) == len(two) == 300 - 44 - 1
    assert common_prefix(list(one), list(two)) < 3


async def test_replay_is_open_loop() -> None:
    """An endpoint that answers after the last request still receives all. A client that waits
    for responses would hide the time it waited."""
    count, everybody = 4, asyncio.Event()
    endpoint = Endpoint(WatchedClock(), pauses_s=())
    endpoint.waits_for_reads = False
    asked = 0

    async def stubborn(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == count:
            everybody.set()
        async with asyncio.timeout(30):
            await everybody.wait()
        return await endpoint.answer(request)

    arrivals = [Arrival(at_s=float(n), prompt_tokens=5, output_tokens=2) for n in range(count)]
    async with client_of(stubborn, endpoint.clock) as client:
        client.clock = asyncio.get_running_loop().time
        figures = values(
            await replay(
                client, arrivals, TracePrompts(1, context=100), speed=200.0, output_tokens_max=1
            )
        )

    assert (figures["answered"], figures["failed"]) == (count, 0)
    assert [body["max_tokens"] for body in endpoint.bodies] == [1] * count
    assert figures["first token max"] >= 14  # the first was due 15 ms before the last


async def test_replay_counts_failed_requests() -> None:
    """Refusals under load are a result; only "all failed" is an error."""
    clock = WatchedClock()
    endpoint = Endpoint(clock)
    asked = 0

    async def moody(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.Response(status=429) if asked % 2 else await endpoint.answer(request)

    arrivals = [Arrival(0.0, 5, 2)] * 4
    prompts = TracePrompts(1, context=100)
    async with client_of(moody, clock) as client:
        figures = values(await replay(client, arrivals, prompts, speed=1.0, output_tokens_max=9))
        asked = 0
        with pytest.raises(BenchError, match="All 1"):
            await replay(client, arrivals[:1], prompts, speed=1.0, output_tokens_max=9)

    assert (figures["answered"], figures["failed"]) == (2, 2)
