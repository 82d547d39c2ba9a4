"""Measurements of scripted endpoints with known timings and hits."""

from __future__ import annotations

import asyncio
import random
import statistics
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from gateway.bench.client import BenchError
from gateway.bench.figures import Figure, percentile
from gateway.bench.memory import MemoryWatch
from gateway.bench.open_loop import poisson_times
from gateway.bench.prompts import PromptMaker, join_prompts
from gateway.bench.report import rows, table
from gateway.bench.workloads import WORKLOADS, Sizes
from tests.fakes import FakeClock
from tests.tables import each_row
from tests.unit.gateway.bench.scripted_endpoint import (
    SMALL,
    Endpoint,
    WatchedClock,
    client_of,
    values,
)


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(WatchedClock())


async def figures_of(
    endpoint: Endpoint, workload: str, sizes: Sizes = SMALL, keys: tuple[str, ...] = ("",)
) -> list[Figure]:
    """Run a workload at the endpoint."""
    async with client_of(endpoint.answer, endpoint.clock, keys) as client:
        return await WORKLOADS[workload](client, PromptMaker(1), sizes)


# --- one request -------------------------------------------------------------------------------


async def test_measures_arrival_times() -> None:
    """First token and gaps to the millisecond, on a virtual clock."""
    clock = WatchedClock()
    endpoint = Endpoint(clock, pauses_s=(0.050, 0.010, 0.030))
    async with client_of(endpoint.answer, clock) as client:
        done = await client.complete([1, 2, 3], 7)

    assert done.first_s == pytest.approx(0.050)
    assert done.gaps_s == pytest.approx([0.010, 0.030])
    assert (done.prompt_tokens, done.output_tokens, done.cached_tokens) == (3, 7, 0)
    assert done.text == "012"


async def test_latency_counts_from_the_due_time() -> None:
    """A delayed client would otherwise report an idle endpoint."""
    clock = WatchedClock()
    clock.advance(10.0)
    async with client_of(Endpoint(clock, pauses_s=(0.5,)).answer, clock) as client:
        done = await client.complete([1], 1, due_s=7.0)

    assert done.first_s == pytest.approx(3.5)


async def test_requests_exact_lengths_and_greedy_sampling(endpoint: Endpoint) -> None:
    """Throughput with random lengths cannot be compared."""
    async with client_of(endpoint.answer, endpoint.clock, keys=("one", "two")) as client:
        await client.complete("hi", 5, tenant=1)

    [body] = endpoint.bodies
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert endpoint.keys == ["Bearer two"]


@pytest.mark.parametrize("size", [1, 3, 7])
async def test_reads_events_split_at_any_byte(size: int) -> None:
    """The network may split inside a character."""
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
    "an endless line": (200, "data: " + "x" * 2**21, "1 MiB"),
    "an unknown field": (400, '{"error":"ignore_eos: unknown"}', "--no-ignore-eos"),
    "no token ids": (422, '{"error":"prompt must be a string"}', "--text"),
    "a wrong key": (401, '{"error":"no such key"}', "401"),
}


@each_row(("status", "body", "word"), BROKEN.values())
async def test_error_says_why_an_endpoint_cannot_be_measured(
    status: int, body: str, word: str
) -> None:

    async def broken(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    async with client_of(broken, FakeClock()) as client:
        with pytest.raises(BenchError, match=word):
            await client.complete([1], 1)


async def test_truncated_response_is_an_error() -> None:
    """It has no usage and must not be counted."""

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
async def test_every_workload_returns_plausible_figures(endpoint: Endpoint, name: str) -> None:
    """Each figure is named once."""
    figures = await figures_of(endpoint, name)

    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.value >= 0 for figure in figures)


async def test_perfect_cache_has_compute_ratio_one(endpoint: Endpoint) -> None:
    found = values(await figures_of(endpoint, "c"))

    assert found["cold computed / unique tokens"] == pytest.approx(1.0)
    assert found["cold hit ratio"] == pytest.approx(100 * 3 * 32 / (4 * 40))


async def test_endpoint_without_cache_computes_every_prompt(endpoint: Endpoint) -> None:
    endpoint.remembers = False
    found = values(await figures_of(endpoint, "c"))

    assert found["cold computed / unique tokens"] == pytest.approx(4 * 40 / (32 + 4 * 8))
    assert found["cold hit ratio"] == 0


async def test_unreported_hits_give_no_hit_ratio(endpoint: Endpoint) -> None:
    """Unreported is not zero."""
    endpoint.reports_hits = False
    found = values(await figures_of(endpoint, "c"))

    assert not [name for name in found if "hit" in name or "unique" in name]


async def test_tenants_have_separate_keys_and_prompts(endpoint: Endpoint) -> None:
    await figures_of(endpoint, "d", keys=("one", "two"))

    systems: dict[str, set[tuple[int, ...]]] = {}
    for key, body in zip(endpoint.keys, endpoint.bodies, strict=True):
        systems.setdefault(key, set()).add(tuple(body["prompt"][: SMALL.system]))
    assert {key: len(prompts) for key, prompts in systems.items()} == {
        "Bearer one": 1,
        "Bearer two": 1,
    }
    assert systems["Bearer one"] != systems["Bearer two"]


@pytest.mark.parametrize(("name", "most"), [("c", 4), ("d", 2)])
async def test_so_many_requests_are_in_flight(endpoint: Endpoint, name: str, most: int) -> None:
    """A place that an answer frees is taken at once, so that all requests arrive."""
    sizes = msgspec.structs.replace(SMALL, at_once=most)
    arrived: list[web.Request] = []
    in_flight, full = [0], asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        arrived.append(request)
        in_flight.append(in_flight[-1] + 1)
        if in_flight[-1] == most:
            full.set()
        async with asyncio.timeout(30):
            await full.wait()
        response = await endpoint.answer(request)
        in_flight.append(in_flight[-1] - 1)
        return response

    async with client_of(hold, endpoint.clock) as client:
        await WORKLOADS[name](client, PromptMaker(1), sizes)

    assert max(in_flight) == most
    each = sizes.at_once if name == "c" else sizes.tenants * sizes.per_tenant
    assert len(arrived) == 2 * each


async def test_random_arrivals_find_their_system_prompts(endpoint: Endpoint) -> None:
    """They measure an endpoint under load, not a cold cache."""
    sizes = msgspec.structs.replace(SMALL, rates=(100.0, 200.0))
    found = values(await figures_of(endpoint, "g", sizes))

    assert found["100/s hit ratio"] == pytest.approx(100 * 32 / 40, abs=3)
    sent = found["100/s answered"] + found["200/s answered"]
    assert len(endpoint.bodies) == sizes.tenants + sent


async def test_rate_without_an_arrival_is_an_error(endpoint: Endpoint) -> None:
    sizes = msgspec.structs.replace(SMALL, rates=(0.001,))
    with pytest.raises(BenchError, match="raise --seconds"):
        await figures_of(endpoint, "g", sizes)


def test_poisson_arrivals_follow_seed_and_rate() -> None:
    """Gaps have the mean of the rate and, as an exponential's, a deviation as large."""
    times = poisson_times(random.Random(1), 50.0, 200.0)
    gaps = [b - a for a, b in pairwise([0.0, *times])]

    assert times == sorted(times) == poisson_times(random.Random(1), 50.0, 200.0)
    assert times[-1] < 200.0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert poisson_times(random.Random(2), 50.0, 200.0) != times


async def test_each_turn_carries_earlier_answers(endpoint: Endpoint) -> None:
    """Otherwise no later turn could hit."""
    await figures_of(endpoint, "e")

    longest = max((body["messages"] for body in endpoint.bodies), key=len)
    roles = [message["role"] for message in longest]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[2]["content"] == "öö"


def test_prompts_follow_seed_and_length() -> None:
    """Two machines send the same prompts; two runs of one bench share none."""
    one, two, other = PromptMaker("0/a/1"), PromptMaker("0/a/1"), PromptMaker("0/a/2")

    first = one.make(100)
    assert first == two.make(100)
    assert first != one.make(100)
    assert first != other.make(100)
    assert len(join_prompts(first, one.make(7))) == 107
    assert len(str(PromptMaker(1, in_text=True).make(50)).split()) == 50


@each_row(("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_percentile_is_a_measured_value(percent: float, expected: int) -> None:
    """Nearest rank; no value between two measurements is invented."""
    assert percentile(list(range(100, 0, -1)), percent) == expected


# --- reports


def test_report_has_median_and_extremes() -> None:
    """An outlier must neither dominate nor be hidden."""
    runs = [[Figure("cold", "ms", value)] for value in (5.0, 1.0, 2000.0)]

    [row] = rows("a", runs)
    text = table([row])

    assert (row.median, row.least, row.most, row.runs) == (5.0, 1.0, 2000.0, 3)
    assert text.splitlines()[1].split() == ["a", "cold", "5.00", "1.00", "2,000", "ms", "3"]


def test_memory_includes_child_processes(tmp_path: Path) -> None:
    """The engine is a child of the gateway, and holds most of the memory."""
    for pid, parent, kib in ((10, 1, 100), (11, 10, 1000), (12, 11, 7), (13, 1, 5000)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) S {parent} 0 0")
        (tmp_path / str(pid) / "status").write_text(f"Name: x\nVmRSS:\t {kib} kB\n")
    memory = MemoryWatch(10, tmp_path)

    assert memory.sample() == 1107 * 1024
    (tmp_path / "11" / "status").unlink()
    assert memory.sample() < memory.peak_bytes == 1107 * 1024
