"""Contract terms as arithmetic: no engine, no manager, no clock."""

from __future__ import annotations

import pytest

from engine.api import Retention
from gateway.caching.contract import ContractTerms, PlannedWrite
from gateway.caching.prefix_index import IndexedPrefix, Lease, PrefixOrigin
from gateway.dialects.canonical import UsageRecord
from gateway.retention_classes import CacheProfile, CachingConfig

CLASSES = {name: CachingConfig().retention(name) for name in ("5m", "1h")}


def retention(name: str) -> Retention:
    found = CLASSES[name]
    assert found is not None
    return found


def written(tokens: int, name: str, *, is_granted: bool = True) -> tuple[int, IndexedPrefix]:
    """Return a prefix that an earlier call wrote at time 0."""
    entry = IndexedPrefix((b"ns", bytes([tokens])), tokens, 1, "first", {}, PrefixOrigin(), b"")
    entry.leases[name] = Lease(retention(name), 0.0, is_granted=is_granted)
    return tokens, entry


def terms(*tries: tuple[int, IndexedPrefix], writes: dict[int, str]) -> ContractTerms:
    """Return the terms of a prompt of 40 tokens."""
    asked = tuple(PlannedWrite(tokens, retention(name), b"") for tokens, name in writes.items())
    return ContractTerms(CacheProfile(), "written", 40, tries, asked, False, True)


def parts(record: UsageRecord) -> tuple[int, dict[str, int], int]:
    return record.read_tokens(), dict(record.write), record.fresh


@pytest.mark.parametrize(
    ("there", "now_s", "expected"),
    [
        (39, 1.0, (20, {"1h": 10}, 10)),
        (0, 1.0, (20, {"1h": 10}, 10)),
        (39, 301.0, (0, {"5m": 20, "1h": 10}, 10)),
    ],
    ids=["there", "promised", "over"],
)
def test_writes_each_part_beyond_the_read(
    there: int, now_s: float, expected: tuple[int, dict[str, int], int]
) -> None:
    """A promised prefix is read though nothing is cached; an expired one is not, though all is
    cached."""
    bargain = terms(written(20, "5m"), writes={20: "5m", 30: "1h"})

    record, entry = bargain.split(there, None, now_s)

    assert expected == parts(record)
    assert (entry is not None) == bool(record.read)


def test_unpromised_prefix_is_read_while_cached() -> None:
    """All but the last token, which is always computed."""
    bargain = terms(written(40, "5m", is_granted=False), writes={40: "5m"})

    there, _ = bargain.split(39, None, 1.0)
    gone, _ = bargain.split(38, None, 1.0)

    assert (parts(there), parts(gone)) == ((40, {}, 0), (0, {"5m": 40}, 0))


def test_only_granted_tokens_are_written() -> None:
    bargain = terms(writes={20: "5m", 40: "5m"})

    record, _ = bargain.split(0, {20: 16, 40: 0}, 1.0)

    assert parts(record) == (0, {"5m": 16}, 24)


def test_longer_promise_covers_shorter_one() -> None:
    """A longer prefix that holds the hour covers the breakpoint before it, not the reverse."""
    hour, minutes = written(20, "1h"), written(30, "5m")

    short, entry = terms(minutes, hour, writes={20: "1h", 30: "5m"}).split(39, None, 1.0)
    long, _ = terms(minutes, hour, writes={20: "5m", 30: "1h"}).split(39, None, 1.0)

    assert (parts(short), entry) == ((30, {}, 10), minutes[1])
    assert parts(long) == (20, {"1h": 10}, 10)


def test_requested_tokens_and_longest_prefix() -> None:
    """Either may be missing."""
    some, nothing = terms(written(20, "5m"), writes={20: "5m", 30: "1h"}), terms(writes={})

    assert some.longest() is some.candidates[0][1]
    assert (some.requested_tokens(), nothing.requested_tokens(), nothing.longest()) == (30, 0, None)
    assert (some.retention_s(), nothing.retention_s()) == (3_600.0, 0.0)
