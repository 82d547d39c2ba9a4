"""The engine's end of the storage process: deaths, silence, restarts and the real process."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.api import Quota
from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    KeepHere,
    Look,
    Looked,
    SetStoredQuotas,
    StorageOutcome,
    StorageStats,
    StoredErased,
)
from engine.storage.client import StorageClient, StorageProcess
from engine.storage.memory.arena import HostArena
from engine.storage.messages import DiskSettings, HeldNamespaces, command_decoder
from engine.wire import encode_frame
from tests.fakes import FakeClock
from tests.unit.engine.storage.storage_rig import (
    LAYOUT,
    LONG,
    SLOT_BYTES,
    A,
    DiskRig,
    content_of,
)

QUOTA = Quota(floor_blocks=3, payer=b"p")


class ScriptedProcess:
    """A storage process whose frames the test sends."""

    def __init__(self) -> None:
        self.wire, self.theirs = socket.socketpair()
        self.is_killed = False
        self._decoder = command_decoder()

    def beat(self) -> None:
        """Send a heartbeat."""
        self.theirs.sendall(encode_frame(StorageStats("open")))

    def commands(self) -> list[object]:
        """Return the commands that have arrived, at least one."""
        return list(self._decoder.feed(self.theirs.recv(2**20)))

    def kill(self) -> None:
        """Note the kill."""
        self.is_killed = True

    def wait(self, timeout_s: float) -> bool:
        """It ends at once."""
        return True


class Scripts:
    """The processes that a client has started, with a clock set by hand."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.started: list[ScriptedProcess] = []
        self.arena = HostArena.create(LAYOUT)
        self.failure: OSError | None = None
        settings = DiskSettings("/nowhere", 2**30, self.arena.fd, LAYOUT, (SLOT_BYTES,))
        self.client = StorageClient(settings, start=self.start, clock=self.clock, pauses_s=(0.0,))

    def start(self, settings: DiskSettings) -> StorageProcess:
        """Start a process, or fail."""
        if self.failure is not None:
            raise self.failure
        self.started.append(ScriptedProcess())
        return self.started[-1]

    def outcomes(self, is_enough: Callable[[list[StorageOutcome]], bool]) -> list[StorageOutcome]:
        """Poll until there is enough."""
        found: list[StorageOutcome] = []
        while not is_enough(found):
            assert self.client.wait(60.0), f"no further outcome; so far {found}"
            found += self.client.poll()
        return found

    def stats(self, state: str) -> StorageStats:
        """Wait for a heartbeat with this state."""
        while True:
            for one in self.outcomes(bool):
                if isinstance(one, StorageStats) and one.state == state:
                    return one

    def close(self) -> None:
        """Close everything."""
        for process in self.started:
            process.theirs.close()
        self.client.close()
        self.arena.close()


@pytest.fixture
def scripts() -> Iterator[Scripts]:
    """Return a client of scripted processes."""
    made = Scripts()
    yield made
    made.close()


def first_process(scripts: Scripts) -> ScriptedProcess:
    """Return the first process, after its first heartbeat."""
    while not scripts.started:
        os.sched_yield()
    process = scripts.started[0]
    assert isinstance(process.commands()[0], DiskSettings)
    process.beat()
    scripts.stats("open")
    return process


def test_a_dead_process_fails_all_that_is_open_at_once(scripts: Scripts) -> None:
    """Each command has its one outcome; a fetch those of the records without one."""
    process = first_process(scripts)
    scripts.client.send(Look(1, A, LONG))
    scripts.client.send(Fetch(2, A, (7, 8), (0, 1), SLOT_BYTES))
    process.theirs.sendall(encode_frame(Fetched(2, 8, True)))
    (done,) = scripts.outcomes(bool)
    process.theirs.close()
    failed = scripts.outcomes(lambda found: any(isinstance(x, StorageStats) for x in found))

    assert done == Fetched(2, 8, True)
    assert [one for one in failed if isinstance(one, Fetched)] == [Fetched(2, 7, False)]
    assert len(failed) == 3
    assert process.is_killed


def test_a_silent_process_is_killed_and_replaced(scripts: Scripts) -> None:
    """Its slots may be used again only when it can no longer write to them."""
    process = first_process(scripts)
    scripts.client.send(Look(1, A, LONG))
    scripts.clock.advance(5.0)
    off = scripts.stats("off")
    while len(scripts.started) < 2:
        os.sched_yield()

    assert "silent for 2 s" in off.reason
    assert process.is_killed


def test_a_process_gets_no_command_before_its_first_heartbeat(scripts: Scripts) -> None:
    """It may wait for a lock, and a request does not."""
    while not scripts.started:
        os.sched_yield()
    scripts.client.send(Look(1, A, LONG))

    assert scripts.client.poll() == [Looked(1, ())]
    assert not scripts.client.has_records(A)


@pytest.mark.parametrize("command", [SetStoredQuotas((QUOTA,)), KeepHere((A,))])
def test_what_holds_without_an_end_is_told_to_each_new_process(
    scripts: Scripts, command: SetStoredQuotas | KeepHere
) -> None:
    """Once, whenever it was said; what is said later at once. It has no outcome."""
    for _ in range(2):
        scripts.client.send(command)
    process = first_process(scripts)
    again = KeepHere((b"b",))
    scripts.client.send(again)

    assert process.commands() == [command, again]
    assert scripts.client.poll() == []


def test_a_process_without_its_disk_gets_erasures_alone(scripts: Scripts) -> None:
    """Everything fails at once; an erasure is made up for, and quotas are told anew."""
    scripts.client.send(SetStoredQuotas((QUOTA,)))
    process = first_process(scripts)
    process.commands()
    process.theirs.sendall(encode_frame(StorageStats("off", "the disk failed")))
    scripts.stats("off")
    erase = EraseStored(5, A)
    scripts.client.send(Look(4, A, LONG))
    scripts.client.send(erase)

    assert scripts.client.poll() == [Looked(4, ()), StoredErased(5, code="closed")]
    assert process.commands() == [erase]
    process.theirs.sendall(encode_frame(StoredErased(5, code="closed")))
    process.beat()
    scripts.stats("open")
    assert process.commands() == [SetStoredQuotas((QUOTA,))]


def test_namespaces_with_records_are_known_without_a_question(scripts: Scripts) -> None:
    """A request of another namespace does not wait for a look."""
    process = first_process(scripts)
    process.theirs.sendall(encode_frame(HeldNamespaces((A, b"b"))))
    process.theirs.sendall(encode_frame(HeldNamespaces((), (b"b",))))
    process.beat()
    scripts.stats("open")

    assert scripts.client.has_records(A)
    assert not scripts.client.has_records(b"b")
    process.theirs.close()
    scripts.stats("off")
    assert not scripts.client.has_records(A)


def test_after_five_deaths_in_a_minute_it_stays_away(scripts: Scripts) -> None:
    """A process that cannot live takes no more of the engine's time."""
    scripts.failure = OSError(12, "no memory")
    first_process(scripts).theirs.close()
    while "not started again" not in scripts.stats("off").reason:
        pass
    scripts.client.send(Look(9, A, LONG))

    assert len(scripts.started) == 1
    assert any(getattr(one, "call_id", 0) == 9 for one in scripts.client.poll())


def test_an_answer_without_a_command_is_dropped(scripts: Scripts) -> None:
    """One outcome for each command, also if the process sends more."""
    process = first_process(scripts)
    process.theirs.sendall(encode_frame(Fetched(77, 1, True)))
    process.beat()
    scripts.stats("open")

    assert scripts.client.poll() == []


def test_frames_that_are_none_end_the_process(scripts: Scripts) -> None:
    """A process that answers nonsense is replaced."""
    process = first_process(scripts)
    process.theirs.sendall(b"\x03\0\0\0abc")

    assert "middle of a frame" in scripts.stats("off").reason


def test_a_process_that_ends_is_started_anew_with_its_records(tmp_path: Path) -> None:
    """Here the process is a thread; the next one opens the same folder."""
    rig = DiskRig(tmp_path / "levels", FakeClock(1_000.0))
    ids = rig.store(A, LONG)
    rig.processes[0].wire.shutdown(socket.SHUT_RDWR)
    while rig.await_stats().state != "open" or len(rig.processes) < 2:
        pass

    assert rig.found(A, LONG) == list(ids)
    assert rig.client.has_records(A)
    rig.close()


@pytest.mark.slow
def test_a_killed_process_comes_back_with_all_it_has_said(tmp_path: Path) -> None:
    """The real process: SIGKILL, then the same records under the same ids."""
    rig = DiskRig(tmp_path / "levels", FakeClock(), is_real=True)
    rig.await_state("open")
    ids = rig.store(A, LONG, promise_s=60.0)
    os.kill(int((tmp_path / "levels" / "lock").read_text()), signal.SIGKILL)
    while len(rig.processes) < 2 or rig.await_stats().state != "open":
        pass

    assert rig.found(A, LONG) == list(ids)
    assert rig.fetch(A, ids[-1:]) == [content_of(A, LONG)]
    rig.close()
