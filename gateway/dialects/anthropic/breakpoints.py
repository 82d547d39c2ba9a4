"""Anthropic's rules of `cache_control`: which breakpoints a Messages request may have.

A request has at most four breakpoints, the automatic one included. In the order tools, system,
messages, every `1h` breakpoint precedes every `5m` one. The automatic breakpoint follows the last
eligible block. This module knows no prompt: `anthropic.prompt` adds each block in API order and
then resolves the breakpoints.
"""

from __future__ import annotations

from gateway.dialects.anthropic.wire import CacheControl
from gateway.dialects.canonical import UNNAMED
from gateway.dialects.validation import invalid_field
from gateway.errors import Kind, Refusal

BREAKPOINTS_MAX = 4
"""Most breakpoints of one request, the automatic one included."""


class Breakpoints:
    """The breakpoints of one request. A position is an index into its tools and segments."""

    def __init__(self) -> None:
        self._requested: list[tuple[str, str]] = []
        self._last: tuple[int, str] | None = None
        self._last_own: str | None = None
        self._retentions: dict[int, str] = {}

    def add(
        self, position: int, path: str, control: CacheControl | None, *, is_eligible: bool = True
    ) -> None:
        """Add a block of the field `path` that ends at `position`. Blocks may share a position."""
        if is_eligible:
            own = self._last_own if self._last == (position, path) else None
            self._last = (position, path)
            self._last_own = control.retention if control is not None else own
        if control is not None:
            self._requested.append((path, control.retention))
            self._mark(position, control.retention)

    def add_automatic(self, control: CacheControl | None) -> None:
        """Add the request's own `cache_control` at the last eligible block, if one exists.

        Raises Refusal if that block has a `cache_control` with another ttl.
        """
        if control is None or self._last is None:
            return
        position, path = self._last
        own = None if self._last_own is None else _ttl(self._last_own)
        if own == _ttl(control.retention):
            return
        if own is not None:
            problem = (
                f"ttl {_ttl(control.retention)!r} differs from ttl {own!r} of the last block"
                f" ({path}); expected equal ttls, or only one cache_control."
            )
            raise invalid_field("cache_control", problem)
        self._requested.append(("cache_control", control.retention))
        self._mark(position, control.retention)

    def resolve(self) -> dict[int, str]:
        """Return the retention class of each position that has a breakpoint.

        Raises Refusal for too many breakpoints, and for `1h` after `5m`.
        """
        if len(self._requested) > BREAKPOINTS_MAX:
            message = (
                f"A maximum of {BREAKPOINTS_MAX} blocks with cache_control may be provided."
                f" Found {len(self._requested)}."
            )
            path = self._requested[BREAKPOINTS_MAX][0]
            raise Refusal(Kind.BAD, "too_many_breakpoints", message, param=path)
        shorter = ""
        for path, retention in self._requested:
            if _ttl(retention) == "5m":
                shorter = shorter or path
            elif shorter:
                field = path if path == "cache_control" else f"{path}.cache_control"
                problem = (
                    "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control"
                    f" block ({shorter}). Blocks are processed in the order `tools`, `system`,"
                    " `messages`."
                )
                raise invalid_field(f"{field}.ttl", problem, "breakpoints_out_of_order")
        return self._retentions

    def _mark(self, position: int, retention: str) -> None:
        if self._retentions.get(position) != "1h":  # the longer class covers the shorter one
            self._retentions[position] = retention


def _ttl(retention: str) -> str:
    """Return the `ttl` that the API gives a breakpoint of this class, named or not."""
    return retention.removesuffix(UNNAMED)
