"""The benchmark against scripted endpoints whose timings and hits are known."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.bench.cli import (
    Report,
    add_bench_arguments,
    add_replay_arguments,
    run_bench,
    run_replay,
)
from gateway.bench.client import BenchError, Client, Target
from gateway.bench.memory import MemoryWatch
from gateway.bench.prompts import Prompts, joined
from gateway.bench.report import rows, table
from gateway.bench.trace import Arrival, TracePrompts, read_trace, replay
from gateway.bench.workloads import WORKLOADS, Figure, Sizes, percentile
from tests.fakes import FakeClock
from tests.gateway.house import House

SMALL = Sizes(
    long_prompt=64, question=8, stream_output=6, system=32, own=8, output=4, at_once=4, tenants=2,
    per_tenant=3, chats=2, turns=3,
)  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WatchedClock(FakeClock):
    """Tells when it was read, so that a server can wait until its bytes were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.read = asyncio.Event()

    def __call__(self) -> float:
        self.read.set()
        return super().__call__()


class Endpoint:
    """An OpenAI-compatible endpoint by script. `pauses_s`: virtual seconds before each piece.

    It keeps every prompt it saw, as a perfect cache would, and counts what it finds there.
    """

    def __init__(self, clock: WatchedClock, pauses_s: tuple[float, ...] = (0.05, 0.01)) -> None:
        self.clock = clock
        self.pauses_s = pauses_s
        self.remembers = True
        self.reports_hits = True
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self._seen: list[list[Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        prompt = _prompt_of(body)
        cached = max((_common(prompt, other) for other in self._seen), default=0)
        cached = min(cached, len(prompt) - 1)
        if self.remembers:
            self._seen.append(prompt)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        for number, pause_s in enumerate(self.pauses_s):
            self.clock.advance(pause_s)
            piece = {"delta": {"content": "ö"}} if is_chat else {"text": f"{number}"}
            await self._send(response, {"choices": [{"index": 0, **piece}]})
        usage: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": body["max_tokens"],
        }
        if self.reports_hits:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        self.clock.read.clear()
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await self.clock.read.wait()


def _prompt_of(body: dict[str, Any]) -> list[Any]:
    if "messages" in body:
        return list("".join(f"<{m['role']}>{m['content']}" for m in body["messages"]))
    prompt = body["prompt"]
    return list(prompt)


def _common(a: list[Any], b: list[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    """The handler behind every path, on a loopback port."""
    app = web.Application()
    app.router.add_post("/v1/{path:.*}", handler)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(
    handler: Handler, clock: FakeClock, keys: tuple[str, ...] = ("",)
) -> AsyncIterator[Client]:
    async with served(handler) as url, aiohttp.ClientSession() as session:
        yield Client(session, Target(url, "scripted", keys), clock)


def values(figures: list[Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


# --- one request -------------------------------------------------------------------------------


async def test_times_are_those_at_which_the_bytes_came() -> None:
    """First token and gaps to the millisecond, on a clock that passes when the server says."""
    clock = WatchedClock()
    endpoint = Endpoint(clock, pauses_s=(0.050, 0.010, 0.030))
    async with client_of(endpoint.answer, clock) as client:
        done = await client.complete([1, 2, 3], 7)

    assert done.first_s == pytest.approx(0.050)
    assert done.gaps_s == pytest.approx([0.010, 0.030])
    assert (done.prompt_tokens, done.output_tokens, done.cached_tokens) == (3, 7, 0)
    assert done.text == "012"


async def test_latency_counts_from_when_a_request_was_due() -> None:
    """A client that was kept waiting would otherwise report an idle endpoint."""
    clock = WatchedClock()
    clock.advance(10.0)
    async with client_of(Endpoint(clock, pauses_s=(0.5,)).answer, clock) as client:
        done = await client.complete([1], 1, due_s=7.0)

    assert done.first_s == pytest.approx(3.5)


async def test_outputs_are_asked_for_in_exact_length_and_without_chance() -> None:
    """Throughput of answers that end when they like is no measure."""
    clock = WatchedClock()
    endpoint = Endpoint(clock)
    async with client_of(endpoint.answer, clock, keys=("one", "two")) as client:
        await client.chat([{"role": "user", "content": "hi"}], 5, tenant=1)

    [body] = endpoint.bodies
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert endpoint.keys == ["Bearer two"]


@pytest.mark.parametrize("size", [1, 3, 7])
async def test_events_cut_anywhere_are_read_whole(size: int) -> None:
    """The network cuts where it likes, also inside a character."""
    events = (
        'data: {"choices":[{"text":"aö"}]}\r\n\r\n: alive\n\ndata: {"choices":[{"text":"日"}]}\n\n'
    )
    events += 'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        data = events.encode() + b"data: [DONE]\n\n"
        for at in range(0, len(data), size):
            await response.write(data[at : at + size])
        return response

    async with client_of(drip, FakeClock()) as client:
        done = await client.complete("x", 2)

    assert done.text == "aö日"
    assert done.cached_tokens is None


BROKEN = {
    "no usage": (200, 'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n', "no usage"),
    "an error inside": (200, 'data: {"error":{"message":"full"}}\n\n', "full"),
    "no JSON": (200, "data: {{{\n\n", "not JSON"),
    "an endless line": (200, "data: " + "x" * 2**21, "megabyte"),
    "an unknown field": (400, '{"error":"ignore_eos: unknown"}', "--no-ignore-eos"),
    "no token ids": (422, '{"error":"prompt must be a string"}', "--text"),
    "a wrong key": (401, '{"error":"no such key"}', "401"),
}


@pytest.mark.parametrize(("status", "body", "word"), BROKEN.values(), ids=BROKEN.keys())
async def test_an_endpoint_that_cannot_be_measured_is_told_why(
    status: int, body: str, word: str
) -> None:
    """Whoever points it at a strange server gets a sentence, not zeros in a table."""

    async def broken(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    async with client_of(broken, FakeClock()) as client:
        with pytest.raises(BenchError, match=word):
            await client.complete([1], 1)


async def test_an_endpoint_that_hangs_up_is_an_error() -> None:
    """Half an answer has no usage and must not be counted."""

    async def hang_up(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"text":"a"}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with client_of(hang_up, FakeClock()) as client:
        with pytest.raises(BenchError):
            await client.complete([1], 1)


# --- workloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
async def test_every_workload_brings_figures_that_can_be(name: str) -> None:
    """Each letter runs against a plain endpoint, and names each of its figures once."""
    clock = WatchedClock()
    async with client_of(Endpoint(clock).answer, clock) as client:
        figures = await WORKLOADS[name](client, Prompts(1), SMALL)

    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.value >= 0 for figure in figures)


async def test_a_perfect_cache_computes_each_token_once() -> None:
    """The figure that says whether anything was computed twice, on an endpoint that never does."""
    clock = WatchedClock()
    async with client_of(Endpoint(clock).answer, clock) as client:
        found = values(await WORKLOADS["c"](client, Prompts(1), SMALL))

    assert found["cold computed / unique tokens"] == pytest.approx(1.0)
    assert found["cold hit ratio"] == pytest.approx(100 * 3 * 32 / (4 * 40))


async def test_without_a_cache_every_prompt_is_computed() -> None:
    """The same figure at the other end."""
    clock = WatchedClock()
    endpoint = Endpoint(clock)
    endpoint.remembers = False
    async with client_of(endpoint.answer, clock) as client:
        found = values(await WORKLOADS["c"](client, Prompts(1), SMALL))

    assert found["cold computed / unique tokens"] == pytest.approx(4 * 40 / (32 + 4 * 8))
    assert found["cold hit ratio"] == 0


async def test_an_endpoint_that_hides_its_hits_gets_no_hit_ratio() -> None:
    """Not said is not zero."""
    clock = WatchedClock()
    endpoint = Endpoint(clock)
    endpoint.reports_hits = False
    async with client_of(endpoint.answer, clock) as client:
        found = values(await WORKLOADS["c"](client, Prompts(1), SMALL))

    assert not [name for name in found if "hit" in name or "unique" in name]


async def test_tenants_share_nothing_but_the_endpoint() -> None:
    """Each has its own key and its own system prompt."""
    clock = WatchedClock()
    endpoint = Endpoint(clock)
    async with client_of(endpoint.answer, clock, keys=("one", "two")) as client:
        await WORKLOADS["d"](client, Prompts(1), SMALL)

    systems: dict[str, set[tuple[int, ...]]] = {}
    for key, body in zip(endpoint.keys, endpoint.bodies, strict=True):
        systems.setdefault(key, set()).add(tuple(body["prompt"][: SMALL.system]))
    assert {key: len(prompts) for key, prompts in systems.items()} == {
        "Bearer one": 1,
        "Bearer two": 1,
    }
    assert systems["Bearer one"] != systems["Bearer two"]


async def test_each_turn_of_a_conversation_carries_what_was_answered() -> None:
    """Otherwise no later turn could hit."""
    clock = WatchedClock()
    endpoint = Endpoint(clock)
    async with client_of(endpoint.answer, clock) as client:
        await WORKLOADS["e"](client, Prompts(1), SMALL)

    longest = max((body["messages"] for body in endpoint.bodies), key=len)
    roles = [message["role"] for message in longest]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[2]["content"] == "öö"


def test_prompts_are_those_of_their_seed_and_of_the_length_asked() -> None:
    """Two machines measure the same; two runs of one bench never meet each other's cache."""
    one, two, other = Prompts("0/a/1"), Prompts("0/a/1"), Prompts("0/a/2")

    first = one.make(100)
    assert first == two.make(100)
    assert first != one.make(100)
    assert first != other.make(100)
    assert len(joined(first, one.make(7))) == 107
    assert len(str(Prompts(1, in_text=True).make(50)).split()) == 50


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)]
)
def test_a_percentile_is_a_value_that_was_measured(percent: float, expected: int) -> None:
    """Nearest rank; no value between two streams is made up."""
    assert percentile(list(range(100, 0, -1)), percent) == expected


# --- traces ------------------------------------------------------------------------------------

MOONCAKE = (
    '{"timestamp": 1000, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]}\n'
    '{"timestamp": 1500, "input_length": 520, "output_length": 2, "hash_ids": [7, 9]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_both_kinds_of_traces_begin_at_nought(tmp_path: Path) -> None:
    """Whenever the recording began, the replay begins now."""
    mooncake = read_trace(written(tmp_path, "m.jsonl", MOONCAKE), 10)
    azure = read_trace(written(tmp_path, "a.csv", AZURE), 10)

    assert mooncake == [Arrival(0.0, 700, 3, (7, 8)), Arrival(0.5, 520, 2, (7, 9))]
    assert [(a.prompt_tokens, a.output_tokens) for a in azure] == [(374, 44), (396, 109)]
    assert azure[1].at_s == pytest.approx(4.314579)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    """Traces are long; a damaged line beyond the limit is nobody's trouble."""
    path = written(tmp_path, "m.jsonl", MOONCAKE + "broken")

    assert len(read_trace(path, 2)) == 2


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
def test_a_file_that_is_no_trace_is_refused(name: str, text: str, tmp_path: Path) -> None:
    """By name, before a server is started for it."""
    with pytest.raises(BenchError, match=name):
        read_trace(written(tmp_path, name, text), 10)


def test_a_block_id_is_the_same_tokens_wherever_it_occurs() -> None:
    """What the trace says is shared, is: to the block, and not beyond."""
    prompts = TracePrompts(3, context=4096)
    one = prompts.prompt(0, Arrival(0, 1100, 4, (7, 8, 9)), 4)
    two = prompts.prompt(1, Arrival(0, 1100, 4, (7, 8, 5)), 4)

    assert len(one) == len(two) == 1100
    assert _common(list(one), list(two)) == 1024


def test_prompts_without_blocks_share_nothing_and_fit_the_context() -> None:
    """Azure's trace does not say what was shared; a long prompt is cut, not refused."""
    prompts = TracePrompts(3, context=300)
    one, two = (prompts.prompt(n, Arrival(0, 374, 44), 44) for n in range(2))

    assert len(one) == len(two) == 300 - 44 - 1
    assert _common(list(one), list(two)) < 3


async def test_a_replay_waits_for_no_answer() -> None:
    """Open loop: an endpoint that answers nobody until all have asked is still asked by all. A
    client that waits for answers would hide exactly the time it waited."""
    count, everybody = 4, asyncio.Event()
    endpoint = Endpoint(WatchedClock(), pauses_s=())
    asked = 0

    async def stubborn(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == count:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 2)
        return await endpoint.answer(request)

    arrivals = [Arrival(at_s=float(n), prompt_tokens=5, output_tokens=2) for n in range(count)]
    async with client_of(stubborn, endpoint.clock) as client:
        client.clock = asyncio.get_running_loop().time
        endpoint._send = _plain_send  # type: ignore[method-assign]
        figures = values(
            await replay(
                client, arrivals, TracePrompts(1, context=100), speed=200.0, output_tokens_max=1
            )
        )

    assert (figures["answered"], figures["failed"]) == (count, 0)
    assert [body["max_tokens"] for body in endpoint.bodies] == [1] * count
    assert figures["first token max"] >= 14  # the first was due 15 ms before the last


async def _plain_send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


async def test_a_replay_counts_what_failed() -> None:
    """Refusals under load are a result; only "all of them" is an error."""
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


# --- reports and the command line --------------------------------------------------------------


def test_runs_are_summed_up_by_median_and_extremes() -> None:
    """One odd run must not look like the rule, nor be hidden."""
    runs = [[Figure("cold", "ms", value)] for value in (5.0, 1.0, 2000.0)]

    [row] = rows("a", runs)
    text = table([row])

    assert (row.median, row.least, row.most, row.runs) == (5.0, 1.0, 2000.0, 3)
    assert text.splitlines()[1].split() == ["a", "cold", "5.00", "1.00", "2,000", "ms", "3"]


def test_memory_is_that_of_the_whole_tree(tmp_path: Path) -> None:
    """The engine is a child of the gateway, and holds nearly all of it."""
    for pid, parent, kib in ((10, 1, 100), (11, 10, 1000), (12, 11, 7), (13, 1, 5000)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) S {parent} 0 0")
        (tmp_path / str(pid) / "status").write_text(f"Name: x\nVmRSS:\t {kib} kB\n")
    memory = MemoryWatch(10, tmp_path)

    assert memory.sample() == 1107 * 1024
    (tmp_path / "11" / "status").unlink()
    assert memory.sample() < memory.peak_bytes == 1107 * 1024


def ignore(_: str) -> None:
    """Say nothing."""


def parsed(add: Callable[[argparse.ArgumentParser], None], *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(arguments)


def bench(folder: Path, say: Callable[[str], None], *arguments: str) -> Report:
    """`trunkline bench` as the command line calls it; it blocks."""
    return run_bench(parsed(add_bench_arguments, *arguments), "", folder, say, SMALL)


async def test_the_command_measures_our_own_gateway(house: House, tmp_path: Path) -> None:
    """Every workload over HTTP against the real gateway, with the fake runner underneath: its hits
    are its own."""
    said: list[str] = []
    keys = [f"--key={key}" for key in house.keys.values()]

    report = await asyncio.to_thread(
        bench, tmp_path, said.append, "--url", house.url + "/v1", "--text", "--repeats=2", *keys
    )

    found = {(row.workload, row.figure): row for row in report.rows}
    assert report.model == house.card.name
    assert found["a", "cold"].runs == 2
    assert found["a", "shared + new hit ratio"].median > 50
    assert found["e", "later turns hit ratio"].median > 50
    assert said == [f"{name}: run {n} of 2" for name in "abcde" for n in (1, 2)]
    assert json.loads(report.json())["machine"]["cores"] >= 1


async def test_the_command_replays_a_trace(house: House, tmp_path: Path) -> None:
    """From the file to the table."""

    def command() -> Report:
        path = written(tmp_path, "m.jsonl", MOONCAKE)
        url, key = house.url + "/v1", house.keys["ada"]
        more = ("--text", "--key", key, "--context", "60", "--speed", "50")
        options = parsed(add_replay_arguments, str(path), "--url", url, *more)
        return run_replay(options, "", tmp_path, ignore)

    report = await asyncio.to_thread(command)

    assert {row.workload for row in report.rows} == {"f m.jsonl"}
    assert "answered" in report.text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workloads", "xyz"),
        ("--workloads", ""),
        ("--repeats", "0"),
        ("--repeats", "many"),
        ("--timeout-s", "-1"),
        ("--serve", "--url", "http://127.0.0.1:1/v1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: tuple[str, ...]) -> None:
    """Exit status 2, as everywhere."""
    with pytest.raises(SystemExit) as caught:
        parsed(add_bench_arguments, *arguments)

    assert caught.value.code == 2


async def test_an_endpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The address in the message is the one to correct."""
    arguments = ("--url", "http://127.0.0.1:9/v1")

    with pytest.raises(BenchError, match=r"127\.0\.0\.1:9"):
        await asyncio.to_thread(bench, tmp_path, ignore, *arguments)


async def test_a_bench_ends_in_time(tmp_path: Path) -> None:
    """An endpoint that hangs does not hang whoever measures it."""
    ended = asyncio.Event()

    async def silent(_: web.Request) -> web.StreamResponse:
        await ended.wait()
        return web.Response()

    async with served(silent) as url:
        with pytest.raises(BenchError, match="Not done after"):
            await asyncio.to_thread(bench, tmp_path, ignore, "--url", url, "--timeout-s", "0.2")
        ended.set()
