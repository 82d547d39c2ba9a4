"""The ledger's process dies, cannot start, is slow: nothing is promised, and what runs goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from gateway.child_process import RestartPolicy
from gateway.ledger import client
from gateway.ledger.client import FRAME_ITEMS, LedgerProcessClient
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger import child_process
from tenancy.ledger.progress import Progress
from tenancy.ledger.transactions import Hold, Item
from tenancy.storage.sqlite import SqliteStore
from tests.unit.tenancy.conftest import used

PATIENCE_S = 60.0
QUICK = RestartPolicy((0.0, 0.05, 0.1, 0.2, 5.0))
DIES_BEFORE_IT_ANSWERS = """
import os, sys
from tenancy.ledger import process as ledger_process
from tenancy.ledger.protocol import BatchResult
send = ledger_process.send
def die(wire, word):
    os._exit(9) if isinstance(word, BatchResult) else send(wire, word)
ledger_process.send = die
sys.exit(ledger_process.main())
"""
OPENS_UNLESS = """
import pathlib, sys
from tenancy.ledger import process as ledger_process
sys.exit(pathlib.Path({away!r}).exists() or ledger_process.main())
"""


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Not here: the tests look into the file, and nobody is served meanwhile."""


class Link:
    """A link over a new file, what it reported, and a look at what was written."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.events: list[tuple[str, dict[str, object]]] = []
        self.link: LedgerProcessClient
        self.restarts = QUICK
        self.when_it_died: Callable[[], None] = lambda: None

    async def open(self, *command: str) -> None:
        path = self.store.path
        self.link = await LedgerProcessClient.open(
            path.name, path.parent, self.report, command or client.COMMAND, self.restarts
        )
        self.events.clear()

    def report(self, event: str, facts: dict[str, object]) -> None:
        self.events.append((event, facts))
        if event == "ledger_died":
            self.when_it_died()

    def kill(self) -> None:
        os.kill(self.link.pid, signal.SIGKILL)

    def endings(self) -> dict[str, tuple[str, int]]:
        """(ending, output tokens) of each entry."""
        rows = self.store.query("select request_id, ending, output_tokens from ledger")
        return {request_id: (ending, tokens) for request_id, ending, tokens in rows}

    def holds(self) -> int:
        return int(self.store.query("select count(*) from holds")[0][0])

    async def until(self, holds: Callable[[], bool]) -> None:
        """Turn the loop until it holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 (whatever it is has no event to wait for)
                await asyncio.sleep(0.005)

    async def until_event(self, event: str, count: int = 1) -> None:
        await self.until(lambda: [name for name, _ in self.events].count(event) >= count)


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Link]:
    """Not opened yet."""
    with closing(SqliteStore(tmp_path / "test.db")) as store:
        create_tenant(store, lambda: 1, "ada")
        link = Link(store)
        yield link
        await link.link.close()


@pytest.fixture
async def one(made: Link) -> Link:
    await made.open()
    return made


def hold(request_id: str) -> Hold:
    return Hold(request_id, 1, 1, "m", 10)


async def code(waiter: asyncio.Future[None]) -> str:
    with pytest.raises(LedgerUnavailable) as caught:
        await waiter
    return caught.value.code


def _watched(patch: pytest.MonkeyPatch) -> list[int]:
    """How many items each frame has that leaves from now on."""
    frames: list[int] = []
    packed = child_process.packed

    def counted(message: list[Item]) -> bytes:
        frames.append(len(message))
        return packed(message)

    patch.setattr(client, "packed", counted)
    return frames


@pytest.mark.parametrize(("count", "sizes"), [(3, [3]), (FRAME_ITEMS + 2, [FRAME_ITEMS, 2])])
async def test_one_turn_of_the_loop_is_few_frames(
    one: Link, monkeypatch: pytest.MonkeyPatch, count: int, sizes: list[int]
) -> None:
    """Each is a system call, and a turn of the other process; one for many would have each of the
    two wait for the other."""
    await asyncio.gather(*[one.link.write(used(name, 10)) for name in "ab"])
    frames = _watched(monkeypatch)
    await asyncio.gather(*[one.link.write(used(str(number), 10)) for number in range(count)])

    assert frames == sizes


async def test_what_comes_alone_leaves_at_once(one: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the turn need not be waited for; behind others of a turn it is, or the first
    would cost the rest a commit."""
    frames = _watched(monkeypatch)
    first = one.link.write(used("a", 10))
    alone = list(frames)
    await first
    await asyncio.gather(*[one.link.write(used(name, 10)) for name in "bcd"])
    last = one.link.write(used("e", 10))
    behind_others = list(frames)
    await last

    assert alone == [1]
    assert behind_others == [1, 1, 2]
    assert frames == [1, 1, 2, 1]


async def test_whether_it_is_well_is_known_before_anything_is_admitted(one: Link) -> None:
    """Not while its process is away, after a death until something was written, and not while a
    disk keeps us waiting."""
    seen = [one.link.is_well]
    os.kill(one.link.pid, signal.SIGSTOP)
    slow = one.link.write(used("a", 10))
    seen.append(one.link.is_well)
    await asyncio.sleep(0)
    await one.until(lambda: not one.link.is_well)
    os.kill(one.link.pid, signal.SIGCONT)
    await slow
    seen.append(one.link.is_well)
    one.kill()
    await one.until_event("ledger_started")
    seen.append(one.link.is_well)
    await one.link.write(hold("b"))
    seen.append(one.link.is_well)

    assert seen == [True, True, True, False, True]


async def test_what_runs_is_settled_by_the_next_process(one: Link) -> None:
    """A death in the middle of an answer costs a pause, and not the answer: its entry is true, and
    those of others too."""
    await one.link.write(hold("runs"))
    one.link.note_progress({"runs": Progress(output_tokens=1)})
    one.kill()
    await one.until_event("ledger_started")
    held = one.holds()
    await one.link.write(hold("next"))
    await asyncio.gather(*[one.link.write(used(name, 10)) for name in ("runs", "next")])

    assert held == 1
    assert one.endings() == {"runs": ("done", 4), "next": ("done", 4)}
    assert one.link.restarts == 1
    (died, started) = one.events
    lost = {"reason": "connection lost", "status": -signal.SIGKILL, "restarts": 1}
    assert died == ("ledger_died", lost)
    assert started == ("ledger_started", {"pid": one.link.pid, "interrupted": 0})


async def test_of_what_it_had_not_answered_entries_are_sent_again(one: Link) -> None:
    """Fail closed: a hold that may be there is nobody's any more. An answer that is complete need
    not be lost: an entry that is there already is not written twice."""
    await one.link.write(hold("runs"))
    os.kill(one.link.pid, signal.SIGSTOP)
    refused, written = one.link.write(hold("new")), one.link.write(used("runs", 10))
    await asyncio.sleep(0)
    one.kill()
    refusal = await code(refused)
    await written

    assert refusal == "not_durable"
    assert (one.holds(), one.endings()) == (0, {"runs": ("done", 4)})


async def test_a_hold_of_what_runs_already_is_sent_again(made: Link) -> None:
    """Its request is not refused any more: a hold that was written and not answered must not be
    closed, or its entry would find the request settled."""
    await made.open(sys.executable, "-c", DIES_BEFORE_IT_ANSWERS)
    refused = await code(made.link.write(structs.replace(hold("a"), is_running=True)))
    await made.until_event("ledger_died", 2)
    held = made.holds()
    made.link.write(used("a", 10)).add_done_callback(lambda told: told.exception())
    await made.until(lambda: bool(made.endings()))

    assert (refused, held) == ("not_durable", 1)
    assert made.endings() == {"a": ("done", 4)}


async def test_an_entry_that_was_there_at_two_deaths_is_refused(made: Link) -> None:
    """It may be their cause. Others are not kept from the books by it, and here it was written."""
    await made.open(sys.executable, "-c", DIES_BEFORE_IT_ANSWERS)
    refused = await code(made.link.write(used("a", 10)))

    await made.until_event("ledger_died", 2)

    assert refused == "not_durable"
    assert made.endings() == {"a": ("done", 4)}


async def test_a_hold_that_was_written_and_not_answered_is_closed(made: Link) -> None:
    """It is durable, its request was refused: nobody will settle it."""
    await made.open(sys.executable, "-c", DIES_BEFORE_IT_ANSWERS)
    refused = await code(made.link.write(hold("a")))
    await made.until_event("ledger_started")

    assert refused == "not_durable"
    assert (made.holds(), made.endings()) == (0, {"a": ("interrupted", 0)})


async def test_an_entry_that_waits_for_the_next_process_is_written_as_it_is(one: Link) -> None:
    """Its hold is open when that process starts, and must not be closed as a dead one's."""
    await one.link.write(hold("runs"))
    waiters: list[asyncio.Future[None]] = []
    one.when_it_died = lambda: waiters.append(one.link.write(used("runs", 10)))
    one.kill()
    await one.until_event("ledger_started")
    await waiters[0]

    assert one.endings() == {"runs": ("done", 4)}


async def test_one_that_dies_again_and_again_is_given_time(one: Link) -> None:
    """Meanwhile nothing new is begun, and what ends waits; it comes back by itself."""
    await one.link.write(hold("runs"))
    one.kill()
    await one.until_event("ledger_started")
    one.kill()
    await one.until_event("ledger_died", 2)
    early = await code(one.link.write(hold("early")))
    await one.link.write(used("runs", 10))
    await one.link.write(hold("late"))

    assert early == "not_durable"
    assert (one.holds(), one.endings()) == (1, {"runs": ("done", 4)})


async def test_while_it_cannot_be_opened_all_is_refused(made: Link, tmp_path: Path) -> None:
    """Its database is away: nobody waits, and it goes on by itself. Whose entry was refused has a
    hold that must not be open for ever: the next process closes it."""
    away = tmp_path / "away"
    await made.open(sys.executable, "-c", OPENS_UNLESS.format(away=str(away)))
    await made.link.write(hold("runs"))
    await made.link.write(hold("lasts"))
    away.touch()
    made.kill()
    await made.until_event("ledger_not_started", 2)
    codes = [
        await code(made.link.write(hold("new"))),
        await code(made.link.write(used("runs", 10))),
    ]
    away.unlink()
    await made.until_event("ledger_started")
    await made.link.write(used("lasts", 10))

    assert codes == ["not_durable"] * 2
    assert made.endings() == {"runs": ("interrupted", 0), "lasts": ("done", 4)}
    assert made.holds() == 0


async def test_a_first_start_that_fails_says_why(made: Link, tmp_path: Path) -> None:
    """As if the gateway had opened the database itself; no process is left."""
    await made.open()
    second = Link(made.store)
    with pytest.raises(StoreError, match="in use by another server"):
        await second.open()
    gone = LedgerProcessClient.open("x.db", tmp_path, second.report, (sys.executable, "-c", "pass"))
    with pytest.raises(StoreError, match="died before it had opened"):
        await gone
    nothing = LedgerProcessClient.open("x.db", tmp_path, second.report, (str(tmp_path / "none"),))
    with pytest.raises(StoreError, match="cannot be started: No such file"):
        await nothing

    assert [name for name, _ in second.events] == ["ledger_not_started"] * 3


async def test_closing_while_it_is_away_ends(made: Link) -> None:
    """A shutdown never waits for a disk that does not come back."""
    made.restarts = RestartPolicy((0.0, 1_000.0))
    await made.open()
    made.kill()
    await made.until_event("ledger_started")
    made.kill()
    await made.until_event("ledger_died", 2)
    async with asyncio.timeout(PATIENCE_S):
        await made.link.close()

    assert await code(made.link.write(hold("late"))) == "closed"
    assert made.link.pid == 0


async def test_one_that_hangs_is_killed_at_the_end(
    one: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is told that nothing was promised."""
    monkeypatch.setattr(client, "CLOSE_S", 0.05)
    pid = one.link.pid
    os.kill(pid, signal.SIGSTOP)
    waiter = one.link.write(hold("a"))
    async with asyncio.timeout(PATIENCE_S):
        await one.link.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

    assert await code(waiter) == "not_durable"


async def test_what_the_socket_does_not_take_waits_in_order(one: Link) -> None:
    """A disk that is slow fills it; nothing is lost, and nothing passes anything."""
    os.kill(one.link.pid, signal.SIGSTOP)
    waiters = []
    for number in range(2_000):
        waiters += [one.link.write(hold(str(number))), one.link.write(used(str(number), 10))]
        if number % 100 == 0:
            await asyncio.sleep(0)
    os.kill(one.link.pid, signal.SIGCONT)
    await asyncio.gather(*waiters)

    assert (len(one.endings()), one.holds()) == (2_000, 0)
