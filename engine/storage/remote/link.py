"""The way to the remote store: its threads, its deadlines, and the pause after failures.

One thread, the storage process's main one, gives works and runs what follows them. Each work has
exactly one outcome, at the latest at its deadline; what its thread does after that is dropped.
After failures in a row of one payer's works the store counts as off for that payer, whose works
then fail at once, and after a pause the next one tries again. It counts as off for all once that
holds for a second payer and no work of any payer has succeeded in between: then one call tries
after a pause whether it is back. This module knows no record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.api import Payer
from engine.errors import EngineError
from engine.statistics import NOT_ANSWERED
from engine.storage.io_threads import IoThreads
from engine.storage.remote.objects import ObjectMissing, RemoteFailed, RemoteStore

FAILURES_MAX = 3
PAYERS_MIN = 2
"""Payers with so many failures in a row from which on the store counts as off for all."""
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
        self._under_way: dict[int, tuple[float, Payer | None, Then]] = {}
        self._begun: set[int] = set()  # works that have had a thread
        # By payer: failures in a row, and from when on one who has too many may try again.
        self._failures: dict[Payer, int] = {}
        self._off_until_s: dict[Payer, float] = {}
        self._lost_by: set[Payer] = set()  # since the last success of any payer
        self._retry_at_s = monotonic_s()
        self.is_open = False
        self.reason = NOT_ANSWERED
        self.failed_total = 0

    @property
    def wake_fd(self) -> int:
        """Becomes readable when a work has ended."""
        return self._io.wake_fd

    @property
    def under_way(self) -> int:
        """Works without an outcome."""
        return len(self._under_way)

    def is_open_for(self, payer: Payer) -> bool:
        """Return whether a payer's works are begun. O(1)."""
        return self.is_open and self._monotonic_s() >= self._off_until_s.get(payer, 0.0)

    def run(self, payer: Payer, work: Work, then: Then) -> None:
        """Run `work` in a thread, and `then` in `take_ended`, or in `tick` at its deadline.

        While the store is off for the payer, `then` is called at once. `work` may raise
        RemoteFailed.
        """
        if not self.is_open_for(payer):
            then(self.reason)
            return
        self._begin(payer, work, then)

    def _begin(self, payer: Payer | None, work: Work, then: Then) -> None:
        """`payer`: None for a call that asks whether the store is there."""
        self._serial += 1
        self._under_way[self._serial] = self._monotonic_s() + self._timeout_s, payer, then
        told: list[str] = []
        begin = partial(self._begun.add, self._serial)
        ended = partial(self._ended, self._serial, told)
        self._io.read(partial(self._work, begin, work, told), ended)

    def _work(self, begin: Callable[[], None], work: Work, told: list[str]) -> None:
        begin()
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
        self._begun.discard(serial)
        found = self._under_way.pop(serial, None)
        if found is not None:
            _, payer, then = found
            self._note(payer, told[0])
            then(told[0])

    def _note(self, payer: Payer | None, failure: str) -> None:
        if not failure:
            self._worked(payer)
            return
        self.failed_total += 1
        if payer is not None and self.is_open:
            failures = self._failures[payer] = self._failures.get(payer, 0) + 1
            if failures < FAILURES_MAX:
                return
            if payer not in self._lost_by:
                self._log("remote_lost_for_payer", reason=failure)
            self._off_until_s[payer] = self._monotonic_s() + PAUSE_S
            self._lost_by.add(payer)
            self.reason = failure
            if len(self._lost_by) < PAYERS_MIN:
                return
        if self.is_open or self.reason != failure:
            self._log("remote_lost", reason=failure)
        self.is_open, self.reason = False, failure
        self._retry_at_s = self._monotonic_s() + PAUSE_S

    def _worked(self, payer: Payer | None) -> None:
        """Note a success. What another payer's works met is that payer's own again."""
        self._lost_by.clear()
        if payer is not None:
            self._failures.pop(payer, None)
            self._off_until_s.pop(payer, None)
        if not self.is_open:
            self._failures.clear()
            self._off_until_s.clear()
            self.is_open = True
            self._log("remote_opened")
        if not self._off_until_s:
            self.reason = ""

    def take_ended(self) -> list[Callable[[], None]]:
        """Return what is to be run for works that have ended."""
        return self._io.take_ended()

    def tick(self) -> None:
        """Fail works past their deadline, and ask a store that was off whether it is back.

        A work that had no thread until then says nothing of its payer: others' hang.
        """
        now_s = self._monotonic_s()
        late = [serial for serial, (at_s, *_) in self._under_way.items() if now_s >= at_s]
        for serial in late:
            _, payer, then = self._under_way.pop(serial)
            if serial in self._begun:
                self._note(payer, LATE)
            else:
                self.failed_total += 1
            then(LATE)
        for one in [one for one, until_s in self._off_until_s.items() if now_s >= until_s]:
            del self._off_until_s[one]
        if self.is_open and not self._off_until_s:
            self.reason = ""
        if not self.is_open and now_s >= self._retry_at_s and not self._under_way:
            self._retry_at_s = now_s + PAUSE_S
            self._begin(None, _probe, lambda failure: None)

    def close(self) -> None:
        """End the threads; works that hang are left."""
        self._io.close()


def _probe(store: RemoteStore) -> None:
    store.names("probe/", 1)
