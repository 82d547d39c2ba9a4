"""The way to the remote store: its threads, its deadlines, and the pause after failures.

One thread, the storage process's main one, gives works and runs what follows them. Each work has
exactly one outcome, at the latest at its deadline; what its thread does after that is dropped.
After failures in a row the store counts as off: works fail at once, and after a pause one call
tries whether it is back. This module knows no record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.errors import EngineError
from engine.storage.io_threads import IoThreads
from engine.storage.remote.objects import ObjectMissing, RemoteFailed, RemoteStore

FAILURES_MAX = 3
PAUSE_S = 30.0
THREADS = 4
LATE = "it did not answer in time"
Work = Callable[[RemoteStore], None]
Then = Callable[[str], None]
"""Told why a work has failed; "" if it has not."""


class RemoteLink:
    """The remote store as the storage process sees it."""

    def __init__(
        self,
        open_store: Callable[[], RemoteStore],
        monotonic_s: Callable[[], float],
        timeout_s: float,
        log: Callable[..., None] = lambda event, **facts: None,
    ) -> None:
        """`open_store` may raise EngineError and RemoteFailed; it is called in a thread."""
        self._open_store, self._monotonic_s, self._log = open_store, monotonic_s, log
        self._timeout_s = timeout_s
        self._io = IoThreads(THREADS, monotonic_s)
        self._store: RemoteStore | None = None
        self._serial = 0
        self._under_way: dict[int, tuple[float, Then]] = {}
        self._failures = 0
        self._retry_at_s = monotonic_s()
        self.is_open = False
        self.reason = "it has not been asked yet"
        self.failed_total = 0

    @property
    def wake_fd(self) -> int:
        """Becomes readable when a work has ended."""
        return self._io.wake_fd

    @property
    def under_way(self) -> int:
        """Works without an outcome."""
        return len(self._under_way)

    def run(self, work: Work, then: Then) -> None:
        """Run `work` in a thread, and `then` in `take_ended`, or in `tick` at its deadline.

        While the store is off, `then` is called at once. `work` may raise RemoteFailed.
        """
        if not self.is_open:
            then(self.reason)
            return
        self._begin(work, then)

    def _begin(self, work: Work, then: Then) -> None:
        self._serial += 1
        self._under_way[self._serial] = self._monotonic_s() + self._timeout_s, then
        told: list[str] = []
        self._io.read(partial(self._work, work, told), partial(self._ended, self._serial, told))

    def _work(self, work: Work, told: list[str]) -> None:
        failure = ""
        try:
            if self._store is None:
                self._store = self._open_store()
            work(self._store)
        except ObjectMissing:
            pass  # the store works; `work` has noted what is missing
        except (RemoteFailed, EngineError) as error:
            failure = str(error) or type(error).__name__
        except Exception as error:  # of a package of others
            failure = f"a call ended with {type(error).__name__}"
        told.append(failure)

    def _ended(self, serial: int, told: list[str]) -> None:
        found = self._under_way.pop(serial, None)
        if found is not None:
            self._note(told[0])
            found[1](told[0])

    def _note(self, failure: str) -> None:
        if not failure:
            self._failures = 0
            if not self.is_open:
                self.is_open, self.reason = True, ""
                self._log("remote_opened")
            return
        self.failed_total += 1
        self._failures += 1
        if not self.is_open or self._failures >= FAILURES_MAX:
            if self.is_open or self.reason != failure:
                self._log("remote_lost", reason=failure)
            self.is_open, self.reason, self._failures = False, failure, 0
            self._retry_at_s = self._monotonic_s() + PAUSE_S

    def take_ended(self) -> list[Callable[[], None]]:
        """Return what is to be run for works that have ended."""
        return self._io.take_ended()

    def tick(self) -> None:
        """Fail works past their deadline, and ask a store that was off whether it is back."""
        now_s = self._monotonic_s()
        late = [serial for serial, (at_s, _) in self._under_way.items() if now_s >= at_s]
        for serial in late:
            _, then = self._under_way.pop(serial)
            self._note(LATE)
            then(LATE)
        if not self.is_open and now_s >= self._retry_at_s and not self._under_way:
            self._retry_at_s = now_s + PAUSE_S
            self._begin(_probe, lambda failure: None)

    def close(self) -> None:
        """End the threads; works that hang are left."""
        self._io.close()


def _probe(store: RemoteStore) -> None:
    store.names("probe/", 1)
