"""What the engine has counted for each start of a gateway, for the books of one that died.

A gateway that is killed cannot tell its last counts. So the engine keeps them for each start that a
gateway names in its Hello: the tokens of the requests that have ended, and the requests of the last
minute one by one, since their entries may be missing. Another gateway asks for the starts that have
left, and names those that the ledger knows by now. It knows no ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from engine.api import DepartedGateway, EndedCounts, Finished, Request, Started

KEPT_S: Final = 60.0
"""Seconds for which an ended request is told by itself: its entry is durable long before."""
REQUESTS_MAX: Final = 8_192
"""The most ended requests of one start that are kept, the latest."""
STARTS_MAX: Final = 64
"""The most starts that have left and are kept, the latest."""


Counts = tuple[int, int, int]
"""Prompt tokens, cached ones among them, and output tokens."""


class _Start:
    """One start of a gateway, and how many connections it has now."""

    def __init__(self) -> None:
        self.connections = 0
        self.counted: Counts = (0, 0, 0)
        self.ended: deque[tuple[float, EndedCounts]] = deque(maxlen=REQUESTS_MAX)


class DepartedGateways:
    """Starts of gateways, connected or gone. Belongs to the service's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._starts: dict[str, _Start] = {}
        self._running: dict[str, tuple[_Start, int]] = {}
        """By request: its start, and the output tokens that it was resumed with."""
        self._begun: dict[str, tuple[int, int]] = {}
        """By request: prompt and cached tokens."""

    def join(self, start: str) -> None:
        """Note a connection of a start."""
        self._starts.setdefault(start, _Start()).connections += 1

    def leave(self, start: str) -> None:
        """Note that a connection of a start has ended."""
        left = self._starts.pop(start)
        left.connections -= 1
        self._starts[start] = left  # the latest
        gone = [name for name, one in self._starts.items() if not one.connections]
        for name in gone[:-STARTS_MAX]:
            del self._starts[name]

    def submit(self, start: str, request: Request) -> None:
        """Note that a request of a start was accepted."""
        self._running[request.request_id] = self._starts[start], request.resumed_tokens

    def abandon(self, request_id: str) -> None:
        """Forget a request whose connection has left: the engine counts it apart."""
        self._running.pop(request_id, None)
        self._begun.pop(request_id, None)

    def note_start(self, event: Started) -> None:
        """Note the prompt of a request that has started. O(1)."""
        if event.request_id in self._running:
            self._begun[event.request_id] = event.prompt_tokens, event.cached_tokens

    def note_end(self, event: Finished) -> None:
        """Note what a request has used that has ended. O(1)."""
        start, resumed = self._running.pop(event.request_id, (None, 0))
        begun = self._begun.pop(event.request_id, (0, 0))
        if start is None or event.ending == "refused":
            return
        counts = *begun, event.usage.output_tokens - resumed
        start.counted = _add(start.counted, counts)
        start.ended.append((self._clock(), EndedCounts(event.request_id, *counts)))
        self._forget_old(start)

    def read(self, settled: Iterable[str]) -> tuple[DepartedGateway, ...]:
        """Forget the starts that are `settled`; return the others that have left, with the requests
        that ended less than `KEPT_S` before their last one."""
        for name in settled:
            if name in self._starts and not self._starts[name].connections:
                del self._starts[name]
        return tuple(
            DepartedGateway(name, *one.counted, tuple(ended for _, ended in one.ended))
            for name, one in self._starts.items()
            if not one.connections
        )

    def disown(self, start: str, request_ids: Iterable[str]) -> list[EndedCounts]:
        """Take back and return what was counted for requests whose end the gateway did not get.
        O(requests that ended lately)."""
        one, ids = self._starts.get(start), frozenset(request_ids)
        if one is None or not ids:
            return []
        gone = [ended for _, ended in one.ended if ended.request_id in ids]
        kept = [pair for pair in one.ended if pair[1].request_id not in ids]
        one.ended = deque(kept, maxlen=REQUESTS_MAX)
        for ended in gone:
            counts = ended.prompt_tokens, ended.cached_tokens, ended.output_tokens
            one.counted = _add(one.counted, counts, -1)
        return gone

    def check(self) -> None:
        """Raise AssertionError if a running request has no start."""
        known = {id(one) for one in self._starts.values() if one.connections}
        assert all(id(start) in known for start, _ in self._running.values())
        assert self._begun.keys() <= self._running.keys()

    def _forget_old(self, start: _Start) -> None:
        before_s = self._clock() - KEPT_S
        while start.ended[0][0] < before_s:
            start.ended.popleft()


def _add(counts: Counts, more: Counts, sign: int = 1) -> Counts:
    return counts[0] + sign * more[0], counts[1] + sign * more[1], counts[2] + sign * more[2]
