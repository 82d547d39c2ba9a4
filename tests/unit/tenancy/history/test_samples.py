"""Samples of minutes add up, become hours after two days and are gone after 35."""

from __future__ import annotations

from tenancy.history.samples import (
    ALL_TENANTS,
    KEPT_MS,
    MINUTES_KEPT_MS,
    Sample,
    SampleDetails,
    combine,
    fold_samples,
    read_samples,
    refused_since,
    write_samples,
)
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS, MINUTE_MS

AT_MS = 500_000 * HOUR_MS
DETAILS = SampleDetails({"overloaded": 2}, {20: 1, 24: 3}, {30: 1})


def minute(number: int, tenant_id: int = ALL_TENANTS, blocks: int | None = None) -> Sample:
    """Return a sample of the minute of this number."""
    return Sample(
        tenant_id, AT_MS + number * MINUTE_MS, DETAILS, blocks_cached=blocks, blocks_free=blocks
    )


def test_samples_are_read_as_they_were_written(store: Store) -> None:
    written = [minute(0), minute(0, 7, blocks=3)]
    write_samples(store, written)

    assert read_samples(store, ALL_TENANTS, AT_MS, AT_MS + 1) == written[:1]
    assert read_samples(store, 7, AT_MS, AT_MS + 1) == written[1:]
    assert read_samples(store, 7, AT_MS + 1, AT_MS + HOUR_MS) == []


def test_a_minute_that_is_written_in_parts_adds_up(store: Store) -> None:
    """One minute, with the blocks of its latest part; a part without an engine knows none."""
    for blocks in (3, 7, None):
        write_samples(store, [minute(0, blocks=blocks)])
    (found,) = read_samples(store, ALL_TENANTS, AT_MS, AT_MS + 1)

    assert (found.refused, found.details.hits) == (6, {20: 3, 24: 9})
    assert (found.blocks_cached, found.blocks_free, found.minutes) == (7, 7, 1)


def test_gateways_of_one_database_write_apart(store: Store) -> None:
    for gateway in ("a", "b"):
        write_samples(store, [Sample(ALL_TENANTS, AT_MS, DETAILS, gateway=gateway)])

    assert len(read_samples(store, ALL_TENANTS, AT_MS, AT_MS + 1)) == 2


def test_blocks_are_means_of_the_minutes_that_know_them() -> None:
    found = combine([minute(0, blocks=10), minute(1), minute(2, blocks=20)])

    assert (found.blocks_cached, found.blocks_promised, found.minutes) == (15, None, 3)


def test_old_minutes_become_hours(store: Store) -> None:
    """Sums stay the same; minutes of the last two days stay minutes."""
    for number in range(0, 125, 5):
        write_samples(store, [minute(number), minute(number, 7, blocks=number)])
    now_ms = AT_MS + HOUR_MS + MINUTES_KEPT_MS
    while fold_samples(store, now_ms):
        pass
    first, *rest = read_samples(store, 7, AT_MS, AT_MS + 3 * HOUR_MS)

    assert (first.at_ms, first.span_ms, first.minutes) == (AT_MS, HOUR_MS, 12)
    assert (first.refused, first.blocks_cached) == (24, 28)
    assert first.details == SampleDetails({"overloaded": 24}, {20: 12, 24: 36}, {30: 12})
    assert [one.at_ms for one in rest] == [AT_MS + n * MINUTE_MS for n in range(60, 125, 5)]


def test_folding_ends_and_old_hours_are_deleted(store: Store) -> None:
    for number in (0, 60):
        write_samples(store, [minute(number)])
    assert not fold_samples(store, AT_MS + KEPT_MS)
    kept = read_samples(store, ALL_TENANTS, 0, 2**60)
    fold_samples(store, AT_MS + KEPT_MS + 1)

    assert [one.span_ms for one in kept] == [HOUR_MS, HOUR_MS]
    assert read_samples(store, ALL_TENANTS, 0, 2**60) == kept[1:]


def test_finds_the_minutes_with_refusals(store: Store) -> None:
    quiet = Sample(7, AT_MS)
    write_samples(store, [minute(0), quiet, minute(0, 8)])

    assert {one.tenant_id for one in refused_since(store, AT_MS)} == {ALL_TENANTS, 8}
    assert refused_since(store, AT_MS + 1) == []
