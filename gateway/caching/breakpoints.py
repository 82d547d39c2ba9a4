"""Where a call's breakpoints look for written prefixes, and where they write.

Pure arithmetic on boundaries in API order: which positions each breakpoint looks back to (runs of
tool calls, and of their results, count as one), and which ends of messages are kept without being
asked. `contract` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from engine.api import Retention
from gateway.dialects.canonical import Boundary, CacheDirectives

FIRST, LATEST = 2, 50
"""Of a request's breakpoints these are looked up where they stand."""


class Place(Struct, frozen=True):
    """A length at which an entry may be found, or is to be written."""

    tokens: int


class WritePlace(Struct, frozen=True):
    tokens: int
    retention: Retention


class Look(Struct, frozen=True):
    """`tries`: where entries may be, in no order. `writes`: ascending. `is_below`: there were
    breakpoints, and all of them too near the beginning."""

    tries: tuple[Place, ...]
    writes: tuple[WritePlace, ...] = ()
    is_below: bool = False


def positions(
    boundaries: Sequence[Boundary],
    ask: CacheDirectives,
    classes: Mapping[str, Retention],
    min_tokens: int,
) -> Look:
    """All of it. O(boundaries + written breakpoints * lookback)."""
    marked = [place for place, mark in enumerate(boundaries) if mark.retention is not None]
    written = marked if ask.writes_max is None else marked[-ask.writes_max :]
    writes = {boundaries[place].tokens: boundaries[place].retention for place in written}
    # What an earlier, shorter request wrote may stand at a breakpoint that is not written now.
    tries = {boundaries[place].tokens for place in (*marked[:FIRST], *marked[-LATEST:])}
    for place in written:
        tries |= _back(boundaries, place, ask.lookback)
    if ask.implicit is not None:
        ends = _message_ends(boundaries)
        if ends:
            writes.setdefault(boundaries[ends[-1]].tokens, ask.implicit)
            tries |= {boundaries[place].tokens for place in ends[-ask.lookback :]}
            tries.add(boundaries[ends[0]].tokens)
    return Look(
        is_below=bool(writes) and max(writes) < min_tokens,
        tries=tuple(Place(tokens) for tokens in sorted(tries) if tokens >= min_tokens),
        writes=tuple(
            WritePlace(tokens, classes[name])
            for tokens, name in sorted(writes.items())
            if name is not None and tokens >= min_tokens
        ),
    )


def _back(boundaries: Sequence[Boundary], place: int, lookback: int) -> set[int]:
    """The `lookback` positions that end with this one."""
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
    """Ends of user messages, of the last of a run of tool results, and of the developer or system
    messages that a conversation begins with: what is kept of a call that names no breakpoint."""
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
