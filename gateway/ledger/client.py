"""The ledger's process, seen from the gateway's loop: items are handed in here and durable there.

The items of one turn of the loop leave in few frames, or at once where they come one by one; one
answer wakes the loop for all items of a commit. A process that dies is replaced at once, and items
wait for the next one. An entry that the dead process had not answered is sent again, once, since
settling twice changes nothing, and so is the hold of a running request; all other unanswered items
are refused. Running requests go on: the next process is told of them, and closes the holds of all
others. This module knows no price and no database; `app.serve` opens it. Belongs to one loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from gateway.child_process import ChildProcess, FrameWire, Report, RestartPolicy
from tenancy.errors import LedgerUnavailable, StoreError, TenancyError
from tenancy.ledger.child_process import packed
from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.progress import Progress, ProgressNote
from tenancy.ledger.protocol import BatchResult, NotOpened, Open, Opened, error_of, read_from_writer
from tenancy.ledger.transactions import Hold, Item, NamedEntry, entry_in
from tenancy.ledger.writer import NOT_DURABLE, is_written
from tenancy.types import UsageEntry

COMMAND = (sys.executable, "-m", "tenancy.ledger.process")
RESTARTS = RestartPolicy((0.0, 0.5, 1.0, 2.0, 4.0, 5.0))

CLOSE_S = 30.0
"""For handed-in items to be written, and again for the process to exit: a disk may be slow."""

STALL_S = 0.25
"""A disk that takes longer to answer may have failed."""

FRAME_ITEMS = 16
"""So many leave before the turn ends. If all 32 of a turn left at its end, this process would wait
for the whole commit and the other for the next turn: 12 % fewer answers than without books, not 3.
"""

Waiter = asyncio.Future[None]
Pair = tuple[Item, Waiter | None]


class LedgerProcessClient:
    """A `LedgerClient` of a ledger in a process of its own. `open` makes one."""

    def __init__(
        self,
        place: str,
        folder: Path,
        report: Report,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
    ) -> None:
        """`place`, `folder`: the database, as `backends` names it."""
        self._place, self._folder = place, folder
        self._loop = asyncio.get_running_loop()
        self._child = ChildProcess("ledger", command, restarts, report, self._live, self._pause)
        self._opening: asyncio.Future[Opened] = self._loop.create_future()
        self._lost = asyncio.Event()
        self._was_open = False
        self._writer_id = 0
        self._wire: FrameWire | None = None
        self._handed: list[Pair] = []  # in this turn of the loop, or while there is no process
        self._in_turn = 0  # items handed in during it
        self._is_sparse = True  # the last turn with items had one
        self._in_flight: deque[Pair] = deque()  # sent, and not answered
        self._again: set[tuple[type[Item], str]] = set()  # sent again: kind, request id
        self._held: set[str] = set()  # requests with a hold and no entry
        self._is_taking = True  # there is a process, or will soon be one
        self._is_pausing = False  # before the next start: new requests are refused
        self._is_closing = False
        self._wrote_last = True
        self._heard_s = 0.0  # time of the last answer, or of the first item sent after it
        self.found_epoch: LedgerEpoch | None = None
        self.interrupted = 0

    @classmethod
    async def open(
        cls,
        place: str,
        folder: Path,
        report: Report,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
    ) -> LedgerProcessClient:
        """Start the process, and wait until it takes items. Raises the StoreError of a first
        process that cannot open the database; later ones are tried again."""
        client = cls(place, folder, report, command, restarts)
        client._child.start()
        try:
            await client._child.wait_ready()
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        """The id of the living process; 0 while there is none."""
        return self._child.pid

    @property
    def restarts(self) -> int:
        """How often a lost process was replaced, or is about to be."""
        return self._child.restarts

    @property
    def is_well(self) -> bool:
        """See `LedgerClient`."""
        if not self._wrote_last or self._wire is None or self._is_pausing or not self._is_taking:
            return False
        return not self._in_flight or self._loop.time() - self._heard_s < STALL_S

    def write(self, item: Item) -> Waiter:
        """See `LedgerClient`. Items are refused while no process can be started; entries wait
        for one that is about to be."""
        waiter: Waiter = self._loop.create_future()
        is_taken = self._is_taking
        # Handed in or refused, an entry ends its request's hold.
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
        """See `LedgerClient`."""
        if self._is_taking and not self._is_pausing:
            self._hand_in(ProgressNote(reached), None)

    def holds_first(self) -> AbstractContextManager[None]:
        """See `LedgerClient`: holds are never deferred here."""
        return nullcontext()

    async def close(self) -> None:
        """Write all items handed in, then end the process. Safe to repeat."""
        if self._is_closing:
            return
        self._is_closing, self._is_taking = True, False
        waiters = [waiter for _, waiter in (*self._in_flight, *self._handed) if waiter is not None]
        if waiters:
            await asyncio.wait(waiters, timeout=CLOSE_S)
        await self._child.stop()
        if self._wire is not None:
            self._wire.end()  # The process writes the items it was sent, and exits.
        await self._child.end(CLOSE_S)
        self._lose()
        self._refuse(self._handed)

    # -- items and their answers ----------------------------------------------------------------

    def _hand_in(self, item: Item, waiter: Waiter | None) -> None:
        handed = self._handed
        handed.append((item, waiter))
        if not self._in_turn:
            self._loop.call_soon(self._end_turn)
        self._in_turn += 1
        if len(handed) == FRAME_ITEMS or (self._is_sparse and not self._in_flight):
            self._flush()

    def _end_turn(self) -> None:
        """Send the rest of the turn. After a turn with one item, the next item leaves at once;
        after one with several, a first item that left alone would cost the rest a commit."""
        self._is_sparse = self._in_turn == 1
        self._in_turn = 0
        self._flush()

    def _flush(self) -> None:
        """Send all handed-in items in one frame. Without a process they wait for the next one."""
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
        """Fail the items that cannot be encoded, and return the others and their frames."""
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
            case BatchResult():
                self._land(message)
            case Opened():
                if not self._opening.done():
                    self._opening.set_result(message)
            case NotOpened():
                if not self._opening.done():
                    self._opening.set_exception(error_of(message.failure))
                self._lose()

    def _land(self, answered: BatchResult) -> None:
        """Tell the waiters of one commit, in the order in which items were sent."""
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
        return LedgerUnavailable(NOT_DURABLE, "The ledger's process is not running.")

    # -- one process ----------------------------------------------------------------------------

    async def _live(self) -> str:
        """See `ChildProcess`: from the start until the wire ends."""
        try:
            opened = await self._open_process()
        except StoreError as error:
            if not self._was_open:
                raise
            self._is_taking = False
            self._refuse(self._handed)
            return error.message
        if not self._was_open:
            self._was_open = True
            self.found_epoch, self.interrupted = opened.found_epoch, opened.interrupted
        self._writer_id = opened.writer_id
        self._is_taking, self._is_pausing = not self._is_closing, False
        self._child.set_ready(interrupted=opened.interrupted)
        await self._lost.wait()
        return "connection lost"

    async def _open_process(self) -> Opened:
        """Start a process and tell it of running requests; items that waited follow. Raises
        StoreError where it cannot open the database, or dies before it has."""
        self._opening = self._loop.create_future()
        self._lost.clear()
        try:
            self._wire = FrameWire(await self._child.spawn(), self._hear, self._lose)
        except OSError as error:
            message = f"The ledger's process cannot be started: {error.strerror}."
            raise StoreError("unusable", message) from error
        # An entry that waited belongs to a running request, too.
        waiting = [entry.request_id for item, _ in self._handed if (entry := entry_in(item))]
        living = [*self._held, *waiting]
        self._wire.send(packed(Open(self._place, str(self._folder), living, self._writer_id)))
        self._flush()
        return await self._opening

    def _lose(self) -> None:
        """The wire has ended. Send the items of running requests again and fail the others: they
        are not known to be written. An item in flight at two deaths may be their cause."""
        if self._wire is None:
            return
        self._wire.close()
        self._wire = None
        self._wrote_last = False
        lost, self._in_flight = self._in_flight, deque()
        before, self._again = self._again, set()
        again: list[Pair] = []
        for item, waiter in lost:
            request_id = _running_request(item)
            if request_id and (type(item), request_id) not in before:
                self._again.add((type(item), request_id))
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
        """Before a pause, refuse all items but entries, whose requests are answered already."""
        self._is_pausing = True
        new = [pair for pair in self._handed if entry_in(pair[0]) is None]
        self._handed = [pair for pair in self._handed if entry_in(pair[0]) is not None]
        self._refuse(new)

    def _refuse(self, pairs: list[Pair]) -> None:
        for item, waiter in pairs:
            self._fail(item, waiter, self._away())
        pairs.clear()


def _running_request(item: Item) -> str:
    """The id of the request that goes on without this item, if the item is its entry or the hold
    that its entry will settle; "" for other items."""
    if isinstance(item, Hold):
        return item.request_id if item.is_running else ""
    entry = entry_in(item)
    return "" if entry is None else entry.request_id
