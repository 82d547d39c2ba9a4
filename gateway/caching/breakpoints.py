"""Compute where a call's breakpoints look up written prefixes, and where they write.

Pure arithmetic on boundaries in API order: the positions that each breakpoint looks back to (a run
of tool calls, or of their results, counts as one), the message ends that are kept implicitly, and
the marks at which an engine keeps states. `gateway.caching.contract` and admission call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from engine.api import Retention
from gateway.dialects.canonical import Boundary, CacheDirectives

FIRST_BREAKPOINTS, LATEST_BREAKPOINTS = 2, 50
"""The first and the latest breakpoints of a request that are looked up at their own position."""


class WritePosition(Struct, frozen=True):
    """A prefix to write: its length, in tokens, and its class."""

    tokens: int
    retention: Retention


class BreakpointPlan(Struct, frozen=True):
    """The positions of one call."""

    candidates: tuple[int, ...]
    """Prefix lengths to look up, ascending."""
    writes: tuple[WritePosition, ...] = ()
    """Ascending."""
    is_below: bool = False
    """The call has breakpoints, and all are shorter than the minimum."""


def plan_breakpoints(
    boundaries: Sequence[Boundary],
    ask: CacheDirectives,
    classes: Mapping[str, Retention],
    min_tokens: int,
) -> BreakpointPlan:
    """Compute all lookups and writes. O(boundaries + written breakpoints * lookback)."""
    marked = [place for place, mark in enumerate(boundaries) if mark.retention is not None]
    written = marked if ask.writes_max is None else marked[-ask.writes_max :]
    writes = {boundaries[place].tokens: boundaries[place].retention for place in written}
    checked = (*marked[:FIRST_BREAKPOINTS], *marked[-LATEST_BREAKPOINTS:])
    # An earlier, shorter request may have written at a breakpoint that this call does not write.
    candidates = {boundaries[place].tokens for place in checked}
    for place in written:
        candidates |= _look_back(boundaries, place, ask.lookback)
    if ask.implicit is not None:
        ends = _message_ends(boundaries)
        if ends:
            writes.setdefault(boundaries[ends[-1]].tokens, ask.implicit)
            candidates |= {boundaries[place].tokens for place in ends[-ask.lookback :]}
            candidates.add(boundaries[ends[0]].tokens)
    return BreakpointPlan(
        is_below=bool(writes) and max(writes) < min_tokens,
        candidates=tuple(tokens for tokens in sorted(candidates) if tokens >= min_tokens),
        writes=tuple(
            WritePosition(tokens, classes[name])
            for tokens, name in sorted(writes.items())
            if name is not None and tokens >= min_tokens
        ),
    )


def marks_of(boundaries: Sequence[Boundary]) -> tuple[int, ...]:
    """Return the lengths at which the client may come back (`engine.api.Request.marks`).

    The end of the last message, where an answer is asked for again and the next turn goes on even
    if the template leaves a thought out; the ends of the system text and of the tools, where other
    conversations part. O(boundaries).
    """
    ends = {mark.tier: mark.tokens for mark in boundaries if mark.ends_message}
    found = [ends[tier] for tier in ("messages", "system", "tools") if tier in ends]
    return tuple(dict.fromkeys(tokens for tokens in found if tokens))


def _look_back(boundaries: Sequence[Boundary], place: int, lookback: int) -> set[int]:
    """Return the token counts of the `lookback` positions that end with this one."""
    found: set[int] = set()
    seen = 0
    for at in range(place, -1, -1):
        mark = boundaries[at]
        after = boundaries[at + 1] if at < place else None
        if after is None or not mark.run or mark.run != after.run:
            seen += 1
            if seen > lookback:
                break
        found.add(mark.tokens)
    return found


def _message_ends(boundaries: Sequence[Boundary]) -> list[int]:
    """Return the boundaries that are kept if a call names no breakpoint: ends of user messages, of
    the last of a run of tool results, and of the leading developer and system messages."""
    found = []
    for at, mark in enumerate(boundaries):
        after = boundaries[at + 1] if at + 1 < len(boundaries) else None
        if not mark.ends_message or mark.tier == "tools":
            continue
        if mark.role == "user":
            found.append(at)
        elif mark.role == "tool":
            if after is None or after.run != "result":
                found.append(at)
        elif mark.tier == "system" and (after is None or after.tier != "system"):
            found.append(at)
    return found
