"""Traffic of simulations: traces, ledgers and drawn tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.strides import stride_digests
from gateway.bench.simulation.stretch_strides import StretchStrides
from gateway.bench.simulation.traffic import (
    SimulatedRequest,
    TenantTraffic,
    draw_tenants,
    endless_hits,
    tokens_of,
    trace_requests,
)
from gateway.bench.trace import Arrival, read_trace

SMALL = TenantTraffic(
    requests=200, per_s=10.0, tenants=5, system_tokens=300, question_tokens=40, answer_tokens=10
)


def common(one: SimulatedRequest, other: SimulatedRequest) -> int:
    """The leading tokens that two prompts share."""
    a, b = tokens_of(one.prompt), tokens_of(other.prompt)
    return next((n for n in range(min(len(a), len(b))) if a[n] != b[n]), min(len(a), len(b)))


def test_blocks_of_a_trace_are_shared_prefixes() -> None:
    arrivals = [Arrival(0.0, 1100, 3, (7, 8, 9)), Arrival(1.0, 1500, 2, (7, 8, 5))]
    one, two = trace_requests(arrivals, speed=2.0, seed=0)

    assert [len(tokens_of(request.prompt)) for request in (one, two)] == [1100, 1500]
    assert common(one, two) == 1024
    assert (one.at_s, two.at_s) == (0.0, 0.5)


def test_requests_of_one_stamp_are_spread_up_to_the_next() -> None:
    """A stamp every three seconds would be a burst that nobody sent."""
    arrivals = [Arrival(at_s, 10, 1) for at_s in (0.0, 0.0, 0.0, 3.0, 3.0)]
    times = [one.at_s for one in trace_requests(arrivals, speed=1.0, seed=1)]

    assert times == sorted(times)
    assert len(set(times[:3])) == 3
    assert max(times[:3]) < 3.0
    assert times != [one.at_s for one in trace_requests(arrivals, speed=1.0, seed=2)]


def test_prompts_without_blocks_share_nothing() -> None:
    one, two = trace_requests([Arrival(0.0, 50, 1), Arrival(1.0, 50, 1)], speed=1.0, seed=0)

    assert common(one, two) == 0


LEDGER = (
    "entry_id,tenant,started,prompt_tokens,output_tokens,physical_cached_tokens\r\n"
    "2,ada,2026-01-02T10:00:05.000Z,70,5,52\r\n"
    "1,ada,2026-01-02T10:00:00.000Z,50,7,0\r\n"
    "3,bob,2026-01-02T10:00:06.000Z,60,4,30\r\n"
    "4,bob,2026-01-02T10:00:07.000Z,0,0,0\r\n"
)


def test_a_ledgers_hits_come_from_the_tenants_own_prompts(tmp_path: Path) -> None:
    """Entries are written as requests end; one without a prompt was refused."""
    path = tmp_path / "ledger.csv"
    path.write_bytes(LEDGER.encode())
    first, second, other = trace_requests(read_trace(path), speed=1.0, seed=0)

    assert [one.at_s for one in (first, second, other)] == [0.0, 5.0, 6.0]
    answered = [*tokens_of(first.prompt), *tokens_of([first.answer])]
    assert tokens_of(second.prompt)[:52] == answered[:52]
    assert common(first, second) == 50
    assert tokens_of(second.prompt)[52] not in answered
    assert other.namespace != first.namespace
    assert other.prompt_tokens == 60


def test_a_conversation_repeats_its_answers() -> None:
    requests = draw_tenants(SMALL, 3)
    longest = max(requests, key=lambda one: one.prompt_tokens)
    turns = [one for one in requests if common(one, longest) == one.prompt_tokens]

    assert len(requests) == 200
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    assert len(turns) == SMALL.turns
    assert tokens_of(longest.prompt)[340:350] == tokens_of([turns[0].answer])
    assert draw_tenants(SMALL, 3) == requests != draw_tenants(SMALL, 4)


def test_endless_hits_are_what_one_cache_without_bounds_finds() -> None:
    """Counted by hand: 512 and 1,023 of three prompts, the last token always computed."""
    arrivals = [Arrival(0.0, 600, 1, (1, 2)), Arrival(1.0, 1024, 1, (1, 3))]
    arrivals.append(Arrival(2.0, 1024, 1, (1, 3)))
    requests = trace_requests(arrivals, speed=1.0, seed=0)

    assert endless_hits(requests) == pytest.approx((512 + 1023) / (600 + 1024 + 1024))


def test_strides_of_stretches_are_those_of_their_tokens() -> None:
    """Whatever the lengths of the stretches."""
    memory = StretchStrides()
    for prompt in ([(1, 100), (2, 300)], [(1, 100), (2, 300), (3, 29)], [(1, 128)], [(1, 100)]):
        for namespace in (b"a", b"b"):
            assert memory.digests(namespace, prompt) == stride_digests(namespace, tokens_of(prompt))
