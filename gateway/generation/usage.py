"""What an answer's usage comes to: by contract, or by what the engine found.

`stream` tells it what happens to each prompt; what it says goes to the dialect and to the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from engine.api import LeaseGrant, Usage
from gateway.caching import Contract
from gateway.dialects.canonical import Diagnosis, UsageRecord


class Accounting(Protocol):
    """What one prompt's contract says of its usage: `gateway.retention.Contract`, or `PLAIN`."""

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Where the prompt left an earlier one."""

    def begin(self, cached_tokens: int, grants: Sequence[LeaseGrant]) -> object:
        """The engine has found this much and granted that."""

    def written(self) -> None:
        """The prompt is computed: its first token is out, or it is over."""

    def record(self, usage: Usage) -> UsageRecord:
        """What is reported and billed."""


class _Plain:
    """Plain prefix caching: what was found is what was read."""

    diagnosis = None

    def begin(self, cached_tokens: int, grants: Sequence[LeaseGrant]) -> None:
        pass

    def written(self) -> None:
        pass

    def record(self, usage: Usage) -> UsageRecord:
        cached = usage.cached_tokens
        return UsageRecord(
            total_in=usage.prompt_tokens,
            read={"best_effort": cached} if cached else {},
            fresh=usage.prompt_tokens - cached,
            out=usage.output_tokens,
            physical_cached=cached,
        )


PLAIN = _Plain()

_NO_OUTPUT = Usage()
CACHE_HEADER = "X-Trunkline-Cache"
"""Tokens read and written by contract, computed, and found; and why not more was read."""


def added(records: Sequence[UsageRecord]) -> UsageRecord:
    """The usage of a call with several prompts."""
    if len(records) == 1:
        return records[0]
    read: Counter[str] = Counter()
    write: Counter[str] = Counter()
    for record in records:
        read.update(record.read)
        write.update(record.write)
    return UsageRecord(
        total_in=sum(record.total_in for record in records),
        read=dict(read),
        write=dict(write),
        fresh=sum(record.fresh for record in records),
        out=sum(record.out for record in records),
        physical_cached=sum(record.physical_cached for record in records),
        breached_tokens=sum(record.breached_tokens for record in records),
    )


def cache_header(contracts: Sequence[Contract]) -> str:
    """Tokens read and written by contract, computed, and found; what was promised in part or not at
    all, and what bounds it; why not more was read, and the segment of the first token that was not
    there."""
    record = added([contract.record(_NO_OUTPUT) for contract in contracts])
    text = (
        f"read={record.read_tokens()}; write={record.write_tokens()}; fresh={record.fresh};"
        f" physical={record.physical_cached}"
    )
    grants = (grant for contract in contracts for grant in contract.grants)
    if short := next((grant for grant in grants if grant.outcome != "granted"), None):
        text += f"; lease={short.outcome}" + (f"; bound={short.bound}" if short.bound else "")
    for contract in contracts:
        if missed := contract.why_missed():
            segment = contract.missed_segment
            return (
                f"{text}; miss={missed}; segment={segment}" if segment else f"{text}; miss={missed}"
            )
    return text
