"""Ended requests are counted by minute and tenant, within bounds."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.dialects.canonical import Boundary
from gateway.observability import ended_requests
from gateway.observability.ended_requests import EndedRequests
from gateway.observability.metrics import Metrics
from tenancy.history.request_records import RequestRecord
from tenancy.history.samples import ALL_TENANTS, Sample, SampleDetails
from tenancy.reuse.miss_ratio_curve import bucket_of
from tenancy.types import MINUTE_MS

START_MS = 30_000_000 * MINUTE_MS


class Wall:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.ms = START_MS

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(1)


@pytest.fixture
def ended(wall: Wall, metrics: Metrics) -> EndedRequests:
    return EndedRequests(wall, metrics)


def refused(wall: Wall, tenant_id: int, code: str = "overloaded") -> RequestRecord:
    """Return the record of a request that was refused 250 ms after its receipt."""
    request_id = f"{wall():012x}{'0' * 20}"
    return RequestRecord(
        request_id, tenant_id, 1, "/r", "openai", "m", False, 503, "refused", code, 0.25
    )


def answered(wall: Wall, cached_tokens: int) -> RequestRecord:
    """Return the record of an answer of five tokens: queued for 20 ms, 100 ms to the first."""
    return RequestRecord(
        *(f"{wall():012x}{'1' * 20}", 7, 1, "/r", "openai", "m", True, 200, "done", "", 0.5),
        submitted_s=0.01,
        started_s=0.03,
        first_token_s=0.1,
        settled_s=0.3,
        prompt_tokens=100,
        cached_tokens=cached_tokens,
        output_tokens=5,
    )


def test_counts_refusals_by_tenant_and_code(ended: EndedRequests, wall: Wall) -> None:
    for tenant_id in (7, 7, 8, 0):
        ended.add((refused(wall, tenant_id), ()))
    ended.add((answered(wall, 0), ()))
    before = ended.refusals_last_hour()
    ended.count()

    assert before == {}
    assert ended.refusals_last_hour() == {
        ALL_TENANTS: {"overloaded": 4},
        7: {"overloaded": 2},
        8: {"overloaded": 1},
    }
    ((_, counts),) = ended.minutes()
    assert counts[7].last_refused_ms == {"overloaded": START_MS + 250}


def test_a_minute_ends_with_the_clocks(ended: EndedRequests, wall: Wall) -> None:
    """And is counted until the database has it."""
    ended.add((refused(wall, 7), ()))
    wall.ms += MINUTE_MS
    ended.count()
    ended.add((refused(wall, 7), ()))
    ended.count()
    ((at_ms, counts),) = ended.ended_minutes
    unwritten = [at_ms for at_ms, counts in ended.minutes() if 7 in counts]
    ended.wrote_minutes(1, [Sample(7, START_MS, SampleDetails({"overloaded": 1}))])

    assert (at_ms, set(counts)) == (START_MS, {ALL_TENANTS, 7})
    assert unwritten == [START_MS, START_MS + MINUTE_MS]
    assert len(ended.minutes()) == 1
    assert ended.refusals_last_hour()[7] == {"overloaded": 2}
    wall.ms = START_MS + 60 * MINUTE_MS
    assert ended.refusals_last_hour()[7] == {"overloaded": 1}


def test_the_queue_is_without_the_load(ended: EndedRequests, wall: Wall, metrics: Metrics) -> None:
    """Both are a part of the time before the first step, and have a histogram each."""
    ended.add((replace(answered(wall, 50), load_s=0.015), ()))
    ended.count()

    assert metrics.registry.get_sample_value("trunkline_queue_seconds_sum") == pytest.approx(0.005)


def test_times_to_first_token_are_hits_from_half_of_the_prompt_on(
    ended: EndedRequests, wall: Wall
) -> None:
    for cached_tokens in (49, 50, 100):
        ended.add((answered(wall, cached_tokens), ()))
    ended.count()
    ((_, counts),) = ended.minutes()

    assert counts[7].details.hits == {bucket_of(100): 2}
    assert counts[7].details.misses == {bucket_of(100): 1}


def test_measures_queue_and_time_per_output_token(
    ended: EndedRequests, wall: Wall, metrics: Metrics
) -> None:
    ended.add((answered(wall, 0), ()))
    ended.count()
    text = metrics.exposition().decode()

    assert "trunkline_queue_seconds_sum 0.01" in text
    assert 'trunkline_time_per_output_token_seconds_bucket{le="0.05"} 1.0' in text
    assert 'trunkline_time_per_output_token_seconds_bucket{le="0.03"} 0.0' in text


def test_records_of_one_write_are_bounded(
    ended: EndedRequests, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant's flood of refusals leaves room for the others'."""
    monkeypatch.setattr(ended_requests, "RECORDS_PER_WRITE_MAX", 2)
    monkeypatch.setattr(ended_requests, "REFUSED_PER_TENANT_MAX", 3)
    for _ in range(9):
        ended.add((refused(wall, 7), ()))
        ended.add((answered(wall, 0), ()))
    ended.add((refused(wall, 8), ()))
    ended.count()
    first = [(one.tenant_id, one.ending) for one in ended.take_records()]
    ended.add((refused(wall, 7), ()))
    ended.count()

    assert first == [(7, "done")] * 2 + [(7, "refused")] * 3 + [(8, "refused")]
    assert len(ended.take_records()) == 1
    assert ended.take_records() == []


def test_a_flood_is_counted_piece_by_piece(
    ended: EndedRequests, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests get their turn in between."""
    monkeypatch.setattr(ended_requests, "COUNTED_AT_ONCE", 2)
    for _ in range(3):
        ended.add((refused(wall, 7), ()))
    first = ended.count(), ended.refusals_last_hour()[7]

    assert first == (True, {"overloaded": 2})
    assert not ended.count()
    assert ended.refusals_last_hour()[7] == {"overloaded": 3}


@pytest.mark.parametrize("count", [0, 3, 16, 17, 100])
def test_a_record_names_the_first_and_last_parts_of_a_prompt(
    ended: EndedRequests, wall: Wall, count: int
) -> None:
    """A long conversation has hundreds."""
    boundaries = [Boundary(10 * number, f"messages[{number}]") for number in range(count)]
    ended.add((answered(wall, 0), boundaries))
    ended.count()
    (record,) = ended.take_records()
    ends = [end // 10 for _, end in record.segments]

    assert ends == [number for number in range(count) if number < 8 or number >= count - 8]
