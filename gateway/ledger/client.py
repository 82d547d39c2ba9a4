"""The ledger's process, seen from the gateway's loop: handed in here, durable there.

What is handed in during one turn of the loop leaves in few frames, and at once where things come
one by one; one answer wakes the loop for all that a commit made durable. A process that dies is
replaced at once, and what is handed in meanwhile waits for the next one. An entry that the dead one
had not answered is sent again, once, since settling twice changes nothing, and so is the hold of
what runs already; all else of it was not written as far as anybody is told. Requests that run go
on: the next process is told of them, and closes the holds of all others. It knows no price and no
database; `app.serve` opens it. Belongs to one loop.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from gateway.child_process import ChildWire, reaped, spawned
from tenancy.errors import LedgerUnavailable, StoreError, TenancyError
from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.progress import Progress, ProgressNote
from tenancy.ledger.protocol import (
    Answered,
    NotOpened,
    Open,
    Opened,
    error_of,
    packed,
    read_from_writer,
)
from tenancy.ledger.transactions import Hold, Item, NamedEntry, entry_in
from tenancy.ledger.writer import NOT_DURABLE, is_written
from tenancy.types import UsageEntry

COMMAND = (sys.executable, "-m", "tenancy.ledger.process")
PAUSE_FIRST_S, PAUSE_LAST_S = 0.5, 5.0
STEADY_S = 10.0
"""A process that lived so long is replaced without a pause when it dies."""

CLOSE_S = 30.0
"""For what was handed in, and again for the process to end: a disk may be slow, not dead."""

STALL_S = 0.25
"""A disk that keeps us waiting so long may not come back."""

FRAME_ITEMS = 16
"""So many leave before the turn ends. If all 32 of a turn left at its end, this process would wait
for the whole commit and the other for the next turn: 12 % fewer answers than without books, not 3.
"""

Report = Callable[[str, dict[str, object]], None]
"""Told of what happens to the process, for the log: an event's name and its facts."""

Waiter = asyncio.Future[None]
Pair = tuple[Item, Waiter | None]


class LedgerLink:
    """A `LedgerDoor` to a process. `open` makes one."""

    def __init__(
        self, place: str, folder: Path, report: Report, command: tuple[str, ...] = COMMAND
    ) -> None:
        """`place`, `folder`: the database, as `backends` names it."""
        self._place, self._folder = place, folder
        self._report = report
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._opening: asyncio.Future[Opened] = self._loop.create_future()
        self._lost = asyncio.Event()
        self._writer_id = 0
        self._wire: ChildWire | None = None
        self._handed: list[Pair] = []  # in this turn of the loop, or while no process is there
        self._in_turn = 0  # handed in during it
        self._is_sparse = True  # that was one thing, the last time there was any
        self._in_flight: deque[Pair] = deque()  # sent, and not answered
        self._again: set[tuple[type[Item], str]] = set()  # what was sent again, and whose
        self._held: set[str] = set()  # requests whose holds nobody has settled
        self._is_taking = True  # there is a process, or will soon be one
        self._is_pausing = False  # not so soon: nothing new is begun
        self._is_closing = False
        self._wrote_last = True
        self._heard_s = 0.0  # when it last answered, or got something to answer
        self.found_epoch: LedgerEpoch | None = None
        self.interrupted = 0
        self.restarts = 0

    @classmethod
    async def open(
        cls, place: str, folder: Path, report: Report, command: tuple[str, ...] = COMMAND
    ) -> LedgerLink:
        """Start the process, and wait until it takes items. Raises its StoreError."""
        link = cls(place, folder, report, command)
        try:
            opened = await link._start()
        except BaseException:
            await link._end_process()
            raise
        link.found_epoch, link.interrupted = opened.found_epoch, opened.interrupted
        link._task = asyncio.create_task(link._keep())
        return link

    @property
    def pid(self) -> int:
        """Of the process that lives now; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_well(self) -> bool:
        """See `LedgerDoor`."""
        if not self._wrote_last or self._wire is None or self._is_pausing or not self._is_taking:
            return False
        return not self._in_flight or self._loop.time() - self._heard_s < STALL_S

    def write(self, item: Item) -> Waiter:
        """See `gateway.ledger.interface.LedgerDoor`. While no process can be started it is refused;
        while one will be, entries wait for it."""
        waiter: Waiter = self._loop.create_future()
        is_taken = self._is_taking
        # Handed in or refused, an entry is the last that is heard of a request.
        if isinstance(item, UsageEntry):
            self._held.discard(item.request_id)
        elif isinstance(item, NamedEntry):
            self._held.discard(item.entry.request_id)
        elif self._is_pausing:
            is_taken = False
        elif is_taken and isinstance(item, Hold):
            self._held.add(item.request_id)
        if is_taken:
            self._hand_in(item, waiter)
        else:
            waiter.set_exception(self._away())
        return waiter

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        """See `gateway.ledger.interface.LedgerDoor`."""
        if self._is_taking and not self._is_pausing:
            self._hand_in(ProgressNote(reached), None)

    def holds_first(self) -> AbstractContextManager[None]:
        """See `LedgerDoor`: they always are."""
        return nullcontext()

    async def close(self) -> None:
        """Write what has been handed in, then end the process. Safe to call twice."""
        if self._is_closing:
            return
        self._is_closing, self._is_taking = True, False
        waiters = [waiter for _, waiter in (*self._in_flight, *self._handed) if waiter is not None]
        if waiters:
            await asyncio.wait(waiters, timeout=CLOSE_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._end_process()
        self._refuse(self._handed)

    # -- what is handed in, and what became of it ---------------------------------------------

    def _hand_in(self, item: Item, waiter: Waiter | None) -> None:
        handed = self._handed
        handed.append((item, waiter))
        if not self._in_turn:
            self._loop.call_soon(self._end_turn)
        self._in_turn += 1
        if len(handed) == FRAME_ITEMS or (self._is_sparse and not self._in_flight):
            self._flush()

    def _end_turn(self) -> None:
        """Where one thing comes at a time, the next need not wait for others of its turn; where
        many do, the first alone would cost the rest a commit."""
        self._is_sparse = self._in_turn == 1
        self._in_turn = 0
        self._flush()

    def _flush(self) -> None:
        """All that is there in one frame; while there is no socket it waits for the next one."""
        if self._wire is None or not self._handed:
            return
        handed, self._handed = self._handed, []
        try:
            frame = packed([item for item, _ in handed])
        except (ValueError, OverflowError):
            handed, frame = self._sifted(handed)
        if not self._in_flight:
            self._heard_s = self._loop.time()
        self._in_flight.extend(handed)
        self._wire.send(frame)

    def _sifted(self, handed: list[Pair]) -> tuple[list[Pair], bytes]:
        """What can be said at all: one impossible item must not take the others with it."""
        good, frames = [], []
        for item, waiter in handed:
            try:
                frames.append(packed([item]))
            except (ValueError, OverflowError) as error:
                what = f"The ledger could not be written ({type(error).__name__})."
                self._fail(item, waiter, LedgerUnavailable("impossible_entry", what))
            else:
                good.append((item, waiter))
        return good, b"".join(frames)

    def _hear(self, frame: bytes) -> None:
        match message := read_from_writer(frame):
            case Answered():
                self._land(message)
            case Opened():
                if not self._opening.done():
                    self._opening.set_result(message)
            case NotOpened():
                if not self._opening.done():
                    self._opening.set_exception(error_of(message.failure))
                self._lose()

    def _land(self, answered: Answered) -> None:
        """One commit's answers, in the order of what was handed in."""
        refused, take = answered.refused, self._in_flight.popleft
        self._heard_s, self._wrote_last = self._loop.time(), True
        for at in range(answered.count):
            item, waiter = take()
            if refused and at in refused:
                error = error_of(refused[at])
                self._wrote_last &= is_written(error)
                self._fail(item, waiter, error)
            elif waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _fail(self, item: Item, waiter: Waiter | None, error: TenancyError) -> None:
        if isinstance(item, Hold) and not item.is_running:
            self._held.discard(item.request_id)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _away(self) -> LedgerUnavailable:
        if self._is_closing:
            return LedgerUnavailable("closed", "The ledger is closed.")
        return LedgerUnavailable(NOT_DURABLE, "The ledger's process is not there.")

    # -- one process after another ------------------------------------------------------------

    async def _start(self) -> Opened:
        """A new process, which is told who lives. Raises StoreError where it cannot open the
        database, or dies before it has."""
        ours, theirs = socket.socketpair()
        self._opening = self._loop.create_future()
        self._lost.clear()
        with theirs:
            self._connect(ours)
            try:
                self._process = await spawned(self._command, theirs)
            except OSError as error:
                message = f"The ledger's process cannot be started: {error.strerror}."
                if not self._opening.done():
                    self._opening.set_exception(StoreError("unusable", message))
        opened = await self._opening
        self._writer_id = opened.writer_id
        self._is_taking, self._is_pausing = not self._is_closing, False
        return opened

    def _connect(self, ours: socket.socket) -> None:
        """What waits for a process goes to this one, behind the word of who lives: an entry among
        it is that of a request which does."""
        self._wire = ChildWire(ours, self._hear, self._lose)
        waiting = [entry.request_id for item, _ in self._handed if (entry := entry_in(item))]
        living = [*self._held, *waiting]
        opening = Open(self._place, str(self._folder), living, self._writer_id)
        self._wire.send(packed(opening))
        self._flush()

    def _lose(self) -> None:
        """Its end has come: what it had not answered is not known to be written. An entry that was
        in flight at two ends may be their cause."""
        if self._wire is None:
            return  # it has been taken for lost
        self._wire.close()
        self._wire = None
        self._wrote_last = False
        lost, self._in_flight = self._in_flight, deque()
        before, self._again = self._again, set()
        again: list[Pair] = []
        for item, waiter in lost:
            whose = _of_what_runs(item)
            if whose and (type(item), whose) not in before:
                self._again.add((type(item), whose))
                again.append((item, waiter))
            else:
                message = "The ledger's process died before it had answered."
                self._fail(item, waiter, LedgerUnavailable(NOT_DURABLE, message))
        self._handed[:0] = again
        if not self._opening.done():
            message = "The ledger's process died before it had opened the database."
            self._opening.set_exception(StoreError("unusable", message))
        self._lost.set()

    def _pause(self) -> None:
        """Until there is a process again, only those wait who have an answer to complete."""
        self._is_pausing = True
        entries = [pair for pair in self._handed if entry_in(pair[0]) is not None]
        new = [pair for pair in self._handed if entry_in(pair[0]) is None]
        self._handed = entries
        self._refuse(new)

    def _refuse(self, pairs: list[Pair]) -> None:
        for item, waiter in pairs:
            self._fail(item, waiter, self._away())
        pairs.clear()

    async def _keep(self) -> None:
        """One process after another; the first is there."""
        pause_s = 0.0
        while True:
            began_s = self._loop.time()
            await self._lost.wait()
            if self._loop.time() - began_s > STEADY_S:
                pause_s = 0.0
            self.restarts += 1
            status = await self._reap()
            self._report("ledger_died", {"status": status, "restarts": self.restarts})
            pause_s = await self._replace(pause_s)

    async def _replace(self, pause_s: float) -> float:
        """Try until one is there. Returns how long to pause should it die soon."""
        while True:
            if pause_s:
                self._pause()
                await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, PAUSE_FIRST_S), PAUSE_LAST_S)
            try:
                opened = await self._start()
            except StoreError as error:
                self._is_taking = False
                self._refuse(self._handed)
                await self._reap()
                facts: dict[str, object] = {"code": error.code, "message": error.message}
                self._report("ledger_not_started", facts)
            else:
                facts = {"pid": self.pid, "interrupted": opened.interrupted}
                self._report("ledger_started", facts)
                return pause_s

    async def _reap(self, patience_s: float = 1.0) -> int | None:
        if self._process is None:
            return None
        status = await reaped(self._process, patience_s)
        self._process = None
        return status

    async def _end_process(self) -> None:
        """It finishes what it was sent, and goes."""
        self._opening.cancel()
        if self._wire is not None:
            self._wire.end()
        await self._reap(CLOSE_S)
        self._lose()


def _of_what_runs(item: Item) -> str:
    """The request that goes on whatever becomes of this, and whose entry it is or will settle; ""
    where there is none."""
    if isinstance(item, Hold):
        return item.request_id if item.is_running else ""
    entry = entry_in(item)
    return "" if entry is None else entry.request_id
