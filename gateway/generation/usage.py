"""Sum the usage of a call's prompts, and write the cache header.

Each prompt's `gateway.caching.Contract` counts its tokens. `gateway.generation` and the quote
handler call it; the sums go to the dialect and to the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.api import LeaseGrant, LevelWait, Usage
from gateway.caching import Contract
from gateway.dialects.canonical import UsageRecord
from tenancy.types import FIDELITIES, Fidelity

_NO_OUTPUT = Usage()
CACHE_HEADER = "X-Trunkline-Cache"
"""Header with the tokens read and written by contract, computed and found, and a miss cause."""
IGNORED_HEADER = "X-Trunkline-Ignored"
"""Names the request's fields that had no effect."""


def sum_usage(records: Sequence[UsageRecord]) -> UsageRecord:
    """Return the total usage of a call with several prompts."""
    if len(records) == 1:
        return records[0]
    read: Counter[str] = Counter()
    write: Counter[str] = Counter()
    loaded: Counter[str] = Counter()
    for record in records:
        read.update(record.read)
        write.update(record.write)
        loaded.update(record.loaded)
    return UsageRecord(
        total_in=sum(record.total_in for record in records),
        read=dict(read),
        write=dict(write),
        fresh=sum(record.fresh for record in records),
        out=sum(record.out for record in records),
        physical_cached=sum(record.physical_cached for record in records),
        recomputed_promised=sum(record.recomputed_promised for record in records),
        loaded=dict(loaded),
        thinking=sum(record.thinking for record in records),
        short_lease=next((record.short_lease for record in records if record.short_lease), None),
    )


def read_fidelity(contracts: Sequence[Contract]) -> Fidelity:
    """Return how far from exact the cached tokens of a call may be."""
    return max((one.read_fidelity for one in contracts), key=FIDELITIES.index, default="exact")


def longest_wait(contracts: Sequence[Contract]) -> LevelWait | None:
    """Return what levels cost the prompt of a call that waited longest for its load; None if none
    had to do with levels."""
    longest: LevelWait | None = None
    for contract in contracts:
        wait = contract.wait
        if wait is not None and (longest is None or wait.load_s > longest.load_s):
            longest = wait
    return longest


def cache_header(contracts: Sequence[Contract]) -> str:
    """Return the value of the cache header.

    It has the tokens read and written by contract, computed and found; of the found ones those on
    each level, if any were loaded, and the time that the call waited for its loads; the fidelity
    that was allowed, if not exact, and how far from exact the found ones may be; the attention
    window, as it was rounded, if the request has one; the first lease that was not fully granted,
    with its bound; and the cause of a miss with the segment of the first token that was not found.
    """
    records: list[UsageRecord] = []
    short: LeaseGrant | None = None
    for contract in contracts:
        records.append(contract.record(_NO_OUTPUT))
        for grant in contract.grants:
            if short is None and grant.outcome != "granted":
                short = grant
    record = sum_usage(records)
    text = (
        f"read={record.read_tokens()}; write={record.write_tokens()}; fresh={record.fresh};"
        f" physical={record.physical_cached}"
    )
    if record.loaded:
        loaded = dict(sorted(record.loaded.items(), reverse=True))  # host before disk
        device = record.physical_cached - sum(loaded.values())
        text += f"; device={device}" + "".join(f"; {name}={n}" for name, n in loaded.items())
    wait = longest_wait(contracts)
    if wait is not None and wait.level is not None:
        text += f"; load_ms={1000 * wait.load_s:.1f}"
    if contracts[0].fidelity != "exact":
        text += f"; fidelity={contracts[0].fidelity}; read_fidelity={read_fidelity(contracts)}"
    if (window := contracts[0].attention) is not None:
        text += f"; attention=window; window={window.tokens}; sinks={window.sink_tokens}"
    if short is not None:
        text += f"; lease={short.outcome}" + (f"; bound={short.bound}" if short.bound else "")
    for contract in contracts:
        if missed := contract.why_missed():
            segment = contract.missed_segment
            return (
                f"{text}; miss={missed}; segment={segment}" if segment else f"{text}; miss={missed}"
            )
    return text
