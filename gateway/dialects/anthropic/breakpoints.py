"""Where a Messages request may have breakpoints, and which: Anthropic's rules of `cache_control`.

At most four, the automatic one included; longer promises before shorter ones, in the order tools,
system, messages. The automatic one stands at the last block that can have one. It knows no prompt:
`anthropic_prompt` adds what it meets, in order, and asks what was kept.
"""

from __future__ import annotations

from gateway.dialects.anthropic.wire import CacheControl
from gateway.errors import Kind, Refusal

BREAKPOINTS_MAX = 4


class Breakpoints:
    """The places of one request in order, and their breakpoints."""

    def __init__(self) -> None:
        self._asked: list[tuple[str, str]] = []
        self._last: tuple[int, str] | None = None
        self._last_own: str | None = None
        self._kept: dict[int, str] = {}

    def add(
        self, place: int, path: str, control: CacheControl | None, *, is_eligible: bool = True
    ) -> None:
        """A block stands at `path` and ends at `place`, which another may share. O(1)."""
        if is_eligible:
            own = self._last_own if self._last == (place, path) else None
            self._last = (place, path)
            self._last_own = control.retention if control is not None else own
        if control is not None:
            self._asked.append((path, control.retention))
            self._keep(place, control.retention)

    def automatic(self, control: CacheControl | None) -> None:
        """The request's own `cache_control`: at the last eligible block, where there is one."""
        if control is None or self._last is None:
            return
        place, path = self._last
        if self._last_own == control.retention:
            return
        if self._last_own is not None:
            message = (
                f"cache_control: its ttl is {control.retention!r}, but the last block ({path}) has"
                f" a cache_control of its own with ttl {self._last_own!r}. Make them the same."
            )
            raise Refusal(Kind.BAD, "invalid_value", message, param="cache_control")
        self._asked.append(("cache_control", control.retention))
        self._keep(place, control.retention)

    def kept(self) -> dict[int, str]:
        """The class of each place that has a breakpoint. Raises Refusal where a rule is broken."""
        if len(self._asked) > BREAKPOINTS_MAX:
            message = (
                f"A maximum of {BREAKPOINTS_MAX} blocks with cache_control may be provided."
                f" Found {len(self._asked)}."
            )
            path = self._asked[BREAKPOINTS_MAX][0]
            raise Refusal(Kind.BAD, "too_many_breakpoints", message, param=path)
        shorter = ""
        for path, retention in self._asked:
            if retention == "5m":
                shorter = shorter or path
            elif shorter:
                at = path if path == "cache_control" else f"{path}.cache_control"
                message = (
                    f"{at}.ttl: a ttl='1h' cache_control block must not come after a ttl='5m'"
                    f" cache_control block (there is one at {shorter}). Blocks are processed in"
                    " the order `tools`, `system`, `messages`."
                )
                raise Refusal(Kind.BAD, "breakpoints_out_of_order", message, param=f"{at}.ttl")
        return self._kept

    def _keep(self, place: int, retention: str) -> None:
        if self._kept.get(place) != "1h":  # of two at one place the longer promise holds both
            self._kept[place] = retention
