"""`LedgerProcessClient` while its process dies, cannot start, or is slow: no item is lost
silently.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from resource import RLIMIT_FSIZE, prlimit

import pytest
from msgspec import structs

from engine import wire
from gateway.ledger import client
from gateway.ledger.client import COMMAND, FRAME_ITEMS, LedgerProcessClient
from gateway.processes.child_process import RestartPolicy
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.transactions import Hold, Item
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import TokenCounts
from tests.unit.tenancy.conftest import used
from tests.unit.tenancy.ledger.written import endings, holds
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

PATIENCE_S = 60.0
QUICK = RestartPolicy((0.0, 0.05, 0.1, 0.2, 5.0))
DIES_BEFORE_ANSWERING = """
import os, sys
from gateway.ledger import process as ledger_process
from gateway.ledger.protocol import BatchResult
send = ledger_process.send
def die(wire, message):
    os._exit(9) if isinstance(message, BatchResult) else send(wire, message)
ledger_process.send = die
sys.exit(ledger_process.main())
"""
OPENS_UNLESS_FILE_EXISTS = """
import pathlib, sys
from gateway.ledger import process as ledger_process
sys.exit(pathlib.Path({away!r}).exists() or ledger_process.main())
"""
IMPATIENT = """
import sys
from gateway.ledger import process as ledger_process
ledger_process.CLAIM_TIMEOUT_S = 0.1
sys.exit(ledger_process.main())
"""
"""Waits for another writer for a tenth of a second, not for five."""


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: the tests read the file in the event loop."""


class LedgerUnderTest:
    """A ledger client over a new file, its reported events, and what was written."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.events: list[tuple[str, dict[str, object]]] = []
        self.client: LedgerProcessClient
        self.restarts = QUICK
        self.on_death: Callable[[], None] = lambda: None

    async def open(self, *command: str) -> None:
        path = self.store.path
        self.client = LedgerProcessClient(
            path.name, path.parent, self.report, command or COMMAND, self.restarts
        )
        await self.client.open()
        self.events.clear()

    def report(self, event: str, facts: dict[str, object]) -> None:
        self.events.append((event, facts))
        if event == "ledger_died":
            self.on_death()

    def kill(self) -> None:
        os.kill(self.client.pid, signal.SIGKILL)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Run the loop until `condition` is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 (a condition has no event to wait for)
                await asyncio.sleep(0.005)

    async def until_event(self, event: str, count: int = 1) -> None:
        await self.until(lambda: [name for name, _ in self.events].count(event) >= count)


@pytest.fixture
async def unopened_ledger(tmp_path: Path) -> AsyncIterator[LedgerUnderTest]:
    """A ledger client that is not open yet."""
    with closing(new_sqlite(tmp_path / "test.db")) as store:
        create_tenant(store, lambda: 1, "ada")
        ledger = LedgerUnderTest(store)
        yield ledger
        await ledger.client.close()


@pytest.fixture
async def ledger(unopened_ledger: LedgerUnderTest) -> LedgerUnderTest:
    await unopened_ledger.open()
    return unopened_ledger


def hold(request_id: str) -> Hold:
    return Hold(request_id, 1, 1, "m", 10)


async def code(waiter: asyncio.Future[None]) -> str:
    with pytest.raises(LedgerUnavailable) as caught:
        await waiter
    return caught.value.code


def _record_frame_sizes(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of items of each frame sent from now on."""
    frames: list[int] = []
    encode_frame = wire.encode_frame

    def counted(message: list[Item]) -> bytes:
        frames.append(len(message))
        return encode_frame(message)

    patch.setattr(client, "encode_frame", counted)
    return frames


@pytest.mark.parametrize(("count", "sizes"), [(3, [3]), (FRAME_ITEMS + 2, [FRAME_ITEMS, 2])])
async def test_sends_items_of_one_turn_in_few_frames(
    ledger: LedgerUnderTest, monkeypatch: pytest.MonkeyPatch, count: int, sizes: list[int]
) -> None:
    """Each frame is a system call, and a turn of the other process. A single frame for many items
    would make each process wait for the other."""
    await asyncio.gather(*[ledger.client.write(used(name, 10)) for name in "ab"])
    frames = _record_frame_sizes(monkeypatch)
    await asyncio.gather(*[ledger.client.write(used(str(number), 10)) for number in range(count)])

    assert frames == sizes


async def test_sends_a_single_item_at_once(
    ledger: LedgerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single item need not wait for the end of the turn. After a turn with several items it
    waits: sent alone, the first would cost the others a commit."""
    frames = _record_frame_sizes(monkeypatch)
    first = ledger.client.write(used("a", 10))
    alone = list(frames)
    await first
    await asyncio.gather(*[ledger.client.write(used(name, 10)) for name in "bcd"])
    last = ledger.client.write(used("e", 10))
    behind_others = list(frames)
    await last

    assert alone == [1]
    assert behind_others == [1, 1, 2]
    assert frames == [1, 1, 2, 1]


async def test_is_unwell_while_writes_stall_or_process_is_gone(ledger: LedgerUnderTest) -> None:
    """Admission asks `is_well`: false without a process, after a death until an item was written,
    and while the disk stalls."""
    seen = [ledger.client.is_well]
    os.kill(ledger.client.pid, signal.SIGSTOP)
    slow = ledger.client.write(used("a", 10))
    seen.append(ledger.client.is_well)
    await asyncio.sleep(0)
    await ledger.until(lambda: not ledger.client.is_well)
    os.kill(ledger.client.pid, signal.SIGCONT)
    await slow
    seen.append(ledger.client.is_well)
    ledger.kill()
    await ledger.until_event("ledger_started")
    seen.append(ledger.client.is_well)
    await ledger.client.write(hold("b"))
    seen.append(ledger.client.is_well)

    assert seen == [True, True, True, False, True]


async def test_a_database_that_refuses_writes_is_told_once_and_so_is_its_end(
    ledger: LedgerUnderTest,
) -> None:
    """A full disk, say: clients only read that usage cannot be recorded."""
    await ledger.client.write(hold("a"))
    _, most = prlimit(ledger.client.pid, RLIMIT_FSIZE)
    prlimit(ledger.client.pid, RLIMIT_FSIZE, (0, most))
    codes = [await code(ledger.client.write(hold(name))) for name in ("b", "c")]
    well_then = ledger.client.is_well
    prlimit(ledger.client.pid, RLIMIT_FSIZE, (most, most))
    await ledger.client.write(hold("d"))

    assert (codes, well_then, ledger.client.is_well) == (["not_durable"] * 2, False, True)
    (refused, again) = ledger.events
    assert refused[0] == "ledger_unwritable"
    assert str(ledger.store.path) in str(refused[1]["reason"])
    assert again == ("ledger_writable", {})


async def test_next_process_settles_running_requests(ledger: LedgerUnderTest) -> None:
    """A death during a request costs a pause, and neither the request nor its true entry."""
    await ledger.client.write(hold("runs"))
    ledger.client.note_progress({"runs": TokenCounts(output_tokens=1)})
    ledger.kill()
    await ledger.until_event("ledger_started")
    held = holds(ledger.store)
    await ledger.client.write(hold("next"))
    await asyncio.gather(*[ledger.client.write(used(name, 10)) for name in ("runs", "next")])

    assert held == 1
    assert endings(ledger.store) == {"runs": ("done", 4), "next": ("done", 4)}
    assert ledger.client.restarts == 1
    (died, started) = ledger.events
    lost = {"reason": "connection lost", "status": -signal.SIGKILL, "restarts": 1}
    assert died == ("ledger_died", lost)
    assert started == ("ledger_started", {"pid": ledger.client.pid, "interrupted": 0})


async def test_resends_unanswered_entries_and_refuses_unanswered_holds(
    ledger: LedgerUnderTest,
) -> None:
    """Fail closed: an unanswered hold is refused. A complete response need not be lost, and an
    entry that was written already is not written twice."""
    await ledger.client.write(hold("runs"))
    os.kill(ledger.client.pid, signal.SIGSTOP)
    refused, written = ledger.client.write(hold("new")), ledger.client.write(used("runs", 10))
    await asyncio.sleep(0)
    ledger.kill()
    refusal = await code(refused)
    await written

    assert refusal == "not_durable"
    assert (holds(ledger.store), endings(ledger.store)) == (0, {"runs": ("done", 4)})


async def test_resends_unanswered_hold_of_running_request(unopened_ledger: LedgerUnderTest) -> None:
    """Its request is not refused: a hold that was written and not answered must stay open, or its
    entry would find the request settled."""
    await unopened_ledger.open(sys.executable, "-c", DIES_BEFORE_ANSWERING)
    refused = await code(unopened_ledger.client.write(structs.replace(hold("a"), is_running=True)))
    await unopened_ledger.until_event("ledger_died", 2)
    held = holds(unopened_ledger.store)
    unopened_ledger.client.write(used("a", 10)).add_done_callback(lambda told: told.exception())
    await unopened_ledger.until(lambda: bool(endings(unopened_ledger.store)))

    assert (refused, held) == ("not_durable", 1)
    assert endings(unopened_ledger.store) == {"a": ("done", 4)}


async def test_refuses_entry_in_flight_at_two_deaths(unopened_ledger: LedgerUnderTest) -> None:
    """It may be their cause, and must not keep other entries from the ledger. Here it was
    written."""
    await unopened_ledger.open(sys.executable, "-c", DIES_BEFORE_ANSWERING)
    refused = await code(unopened_ledger.client.write(used("a", 10)))

    await unopened_ledger.until_event("ledger_died", 2)

    assert refused == "not_durable"
    assert endings(unopened_ledger.store) == {"a": ("done", 4)}


async def test_closes_written_hold_of_refused_request(unopened_ledger: LedgerUnderTest) -> None:
    """The hold is durable and its request was refused, so no entry will settle it."""
    await unopened_ledger.open(sys.executable, "-c", DIES_BEFORE_ANSWERING)
    refused = await code(unopened_ledger.client.write(hold("a")))
    await unopened_ledger.until_event("ledger_started")

    assert refused == "not_durable"
    assert (holds(unopened_ledger.store), endings(unopened_ledger.store)) == (
        0,
        {"a": ("interrupted", 0)},
    )


async def test_next_process_writes_entry_queued_during_restart(ledger: LedgerUnderTest) -> None:
    """Its hold is open when the next process starts, and must not be closed as abandoned."""
    await ledger.client.write(hold("runs"))
    waiters: list[asyncio.Future[None]] = []
    ledger.on_death = lambda: waiters.append(ledger.client.write(used("runs", 10)))
    ledger.kill()
    await ledger.until_event("ledger_started")
    await waiters[0]

    assert endings(ledger.store) == {"runs": ("done", 4)}


async def test_pauses_restarts_after_repeated_deaths(
    unopened_ledger: LedgerUnderTest, forward: Callable[[float], None]
) -> None:
    """During the pause new requests are refused and entries wait; the process comes back by
    itself."""
    unopened_ledger.restarts = RestartPolicy((0.0, 1_000.0))
    await unopened_ledger.open()
    client = unopened_ledger.client
    await client.write(hold("runs"))
    unopened_ledger.kill()
    await unopened_ledger.until_event("ledger_started")
    unopened_ledger.kill()
    await unopened_ledger.until_event("ledger_died", 2)
    early, waits = await code(client.write(hold("early"))), client.write(used("runs", 10))
    forward(1_000.0)
    await waits
    await client.write(hold("late"))

    assert early == "not_durable"
    assert (holds(unopened_ledger.store), endings(unopened_ledger.store)) == (
        1,
        {"runs": ("done", 4)},
    )


async def test_refuses_all_items_while_database_cannot_be_opened(
    unopened_ledger: LedgerUnderTest, tmp_path: Path
) -> None:
    """No item waits, and the client recovers by itself. A request whose entry was refused has an
    open hold, which the next process closes."""
    away = tmp_path / "away"
    await unopened_ledger.open(
        sys.executable, "-c", OPENS_UNLESS_FILE_EXISTS.format(away=str(away))
    )
    await unopened_ledger.client.write(hold("runs"))
    await unopened_ledger.client.write(hold("lasts"))
    away.touch()
    unopened_ledger.kill()
    await unopened_ledger.until_event("ledger_not_started", 2)
    codes = [
        await code(unopened_ledger.client.write(hold("new"))),
        await code(unopened_ledger.client.write(used("runs", 10))),
    ]
    away.unlink()
    await unopened_ledger.until_event("ledger_started")
    await unopened_ledger.client.write(used("lasts", 10))

    assert codes == ["not_durable"] * 2
    assert endings(unopened_ledger.store) == {"runs": ("interrupted", 0), "lasts": ("done", 4)}
    assert holds(unopened_ledger.store) == 0


@pytest.mark.slow
async def test_failed_first_start_raises_its_reason(
    unopened_ledger: LedgerUnderTest, tmp_path: Path
) -> None:
    """The error is the same as if the gateway had opened the database itself; no process is
    left."""
    await unopened_ledger.open()
    second = LedgerUnderTest(unopened_ledger.store)
    with pytest.raises(StoreError, match="in use by another server"):
        await second.open(sys.executable, "-c", IMPATIENT)
    gone = LedgerProcessClient("x.db", tmp_path, second.report, (sys.executable, "-c", "pass"))
    with pytest.raises(StoreError, match="died before it opened the database"):
        await gone.open()
    nothing = LedgerProcessClient("x.db", tmp_path, second.report, (str(tmp_path / "none"),))
    with pytest.raises(StoreError, match="cannot be started: No such file"):
        await nothing.open()

    assert [name for name, _ in second.events] == ["ledger_not_started"] * 3


async def test_close_ends_during_restart_pause(unopened_ledger: LedgerUnderTest) -> None:
    """A shutdown never waits for a disk that does not come back."""
    unopened_ledger.restarts = RestartPolicy((0.0, 1_000.0))
    await unopened_ledger.open()
    unopened_ledger.kill()
    await unopened_ledger.until_event("ledger_started")
    unopened_ledger.kill()
    await unopened_ledger.until_event("ledger_died", 2)
    async with asyncio.timeout(PATIENCE_S):
        await unopened_ledger.client.close()

    assert await code(unopened_ledger.client.write(hold("late"))) == "closed"
    assert unopened_ledger.client.pid == 0


async def test_close_kills_hanging_process(
    ledger: LedgerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers learn that their items are not durable."""
    monkeypatch.setattr(client, "CLOSE_S", 0.05)
    pid = ledger.client.pid
    os.kill(pid, signal.SIGSTOP)
    waiter = ledger.client.write(hold("a"))
    async with asyncio.timeout(PATIENCE_S):
        await ledger.client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

    assert await code(waiter) == "not_durable"
