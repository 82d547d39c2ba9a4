"""The store's clock: wall-clock milliseconds that never go back, also over restarts.

Instants on disk must outlive the process, so they are of the wall clock. Where that went back, the
store's own time goes on with the monotonic clock from the latest instant that it has seen: a clock
that went back lengthens no limit. Only the storage process has one.
"""

from __future__ import annotations

from collections.abc import Callable


class StoreClock:
    """`wall_ms` and `monotonic_s` are read at each call; `last_ms`: the latest instant on disk.

    `went_back_ms`: how far the wall clock was behind that instant when the store was opened.
    """

    def __init__(
        self, wall_ms: Callable[[], int], monotonic_s: Callable[[], float], last_ms: int
    ) -> None:
        self._wall_ms, self._monotonic_s = wall_ms, monotonic_s
        self.went_back_ms = max(0, last_ms - wall_ms())
        self._base_ms = max(last_ms, wall_ms())
        self._base_s = monotonic_s()

    def now_ms(self) -> int:
        """Return the present instant: the greater of the wall clock and the time that passed."""
        now_s, wall_ms = self._monotonic_s(), self._wall_ms()
        passed_ms = self._base_ms + int((now_s - self._base_s) * 1_000)
        if wall_ms > passed_ms:
            self._base_ms, self._base_s = wall_ms, now_s
            return wall_ms
        return passed_ms
