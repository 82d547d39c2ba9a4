"""The storage process as a whole: faults of the disk, order of what overlaps, its beginning and
end. It runs as a thread here; `test_client` runs the real one."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    Look,
    Looked,
    Recall,
    Recalled,
    Renew,
    Renewed,
    StorageOutcome,
    Stored,
    StoredErased,
    StoreRuns,
)
from engine.storage.folder import FolderLock
from engine.storage.io_threads import IoThreads
from engine.storage.memory.arena import HostArena
from engine.storage.messages import (
    DiskSettings,
    Upward,
    outcome_decoder,
)
from engine.storage.process import serve
from engine.storage.store import DiskStore
from engine.wire import encode_frame
from tests.fakes import FakeClock
from tests.tables import each_row
from tests.unit.engine.storage.failing_calls import FailingCalls, Gates
from tests.unit.engine.storage.storage_rig import (
    LAYOUT,
    LONG,
    RUN,
    SLOT_BYTES,
    A,
    B,
    DiskRig,
    content_of,
)

MakeRig = Callable[..., DiskRig]


def hurried() -> float:
    """Return a clock on which half a minute passes in less than a second."""
    return 60 * time.monotonic()


def unhurried() -> float:
    """Return a clock on which ten seconds do not pass in a test."""
    return time.monotonic() / 10


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRig]:
    """Return a function that starts storages over one folder; they are closed at the end."""
    rigs: list[DiskRig] = []

    def start(**settings: Any) -> DiskRig:
        rigs.append(DiskRig(tmp_path / "levels", FakeClock(1_000.0), **settings))
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_failing_disk_closes_the_level_and_is_tried_again(
    make: MakeRig, call: str, error: int
) -> None:
    """What was stored is there again when the disk is; meanwhile everything is a miss, at once."""
    rig = make(monotonic_s=hurried)
    ids = rig.store(A, LONG[:8])
    rig.faults.fails[call] = error
    failed = rig.send_store(rig.store_command(B, LONG))
    off = rig.await_state("off")

    assert (failed.record_ids, failed.code) == ((), "write_failed")
    assert os.strerror(error) in off.reason
    assert rig.found(A, LONG) == []
    assert rig.fetch(A, ids) == [None, None]
    assert rig.send_store(rig.store_command(A, LONG)).code == "closed"
    assert rig.client.has_records(A), "an erasure must still reach it"
    rig.faults.fails.clear()
    rig.await_state("open")
    assert rig.client.has_records(A)
    assert rig.found(A, LONG) == list(ids)
    assert rig.found(B, LONG) == []
    assert rig.await_stats().records == len(ids)
    assert len(rig.processes) == 1, "the process lives on"


def test_an_erasure_that_came_while_the_disk_was_away_is_made_up_for(make: MakeRig) -> None:
    """The receipt says that it failed; when the disk is back, nothing of it is found."""
    rig = make(monotonic_s=hurried)
    rig.store(A, LONG)
    rig.store(B, LONG)
    rig.faults.fails["write"] = errno.EROFS
    rig.send_store(rig.store_command(b"c", LONG))
    rig.await_state("off")
    assert rig.erase(A).code == "closed"
    rig.faults.fails.clear()
    rig.await_state("open")

    assert rig.found(A, LONG) == []
    assert len(rig.found(B, LONG)) == 5


def test_reads_that_fail_often_close_the_level(make: MakeRig) -> None:
    """Three within ten seconds; a single one is a miss."""
    rig = make(monotonic_s=unhurried)
    ids = rig.store(A, LONG[:4])
    rig.faults.fails["read"] = errno.EIO
    assert rig.fetch(A, ids) == [None]
    assert rig.await_stats().state == "open"
    assert [rig.fetch(A, ids), rig.fetch(A, ids)] == [[None], [None]]

    assert "Input/output error" in rig.await_state("off").reason


def test_an_erasure_reaches_stores_that_wait_and_are_under_way(make: MakeRig) -> None:
    """Neither brings anything; another namespace's does. It is answered when no byte is left that
    was being written."""
    rig = make()
    gate = rig.faults.shut("write")
    under_way = rig.store_command(A, LONG[:8])
    waiting = rig.store_command(A, LONG[:8])
    other = StoreRuns(rig.call_id(), B, b"p", 0, waiting.runs, SLOT_BYTES)
    rig.storage.send(under_way)
    rig.faults.await_call()
    erase = EraseStored(rig.call_id(), A)
    for command in (waiting, other, erase):
        rig.storage.send(command)
    assert rig.answers(waiting.call_id) == [Stored(waiting.call_id, (), "erased")]
    assert rig.found(B, LONG) == []
    assert rig.unclaimed == [], "bytes of it are being written"
    gate.set()

    assert rig.answers(erase.call_id) == [StoredErased(erase.call_id)]
    assert rig.answers(under_way.call_id) == [Stored(under_way.call_id, (), "erased")]
    (third,) = rig.answers(other.call_id)
    assert isinstance(third, Stored)
    assert third.code == ""
    assert rig.found(A, LONG) == []


def slab_bytes(rig: DiskRig) -> bytes:
    """Return all bytes of all slabs."""
    return b"".join(path.read_bytes() for path in Path(rig.settings.dir).glob("*.slab"))


def test_an_erasure_is_answered_after_a_fetch_of_what_it_erases(make: MakeRig) -> None:
    """The bytes lie in their place for as long as they are read."""
    rig = make()
    ids = rig.store(A, LONG[:4])
    gate = rig.faults.shut("read")
    fetch = Fetch(rig.call_id(), A, ids, (0,), SLOT_BYTES)
    rig.storage.send(fetch)
    rig.faults.await_call()
    erase = EraseStored(rig.call_id(), A)
    rig.storage.send(erase)
    assert rig.found(A, LONG) == []
    assert rig.unclaimed == []
    gate.set()

    (receipt,) = rig.answers(erase.call_id)
    assert isinstance(receipt, StoredErased)
    assert (receipt.records, receipt.code) == (1, "")
    assert content_of(A, LONG[:4]) not in slab_bytes(rig)
    assert rig.answers(fetch.call_id) == [Fetched(fetch.call_id, ids[0], False)]


def test_an_erasure_whose_bytes_cannot_be_wiped_says_so(make: MakeRig) -> None:
    """The rows are gone; the bytes are wiped when the disk is back, and then it says so."""
    rig = make(monotonic_s=hurried)
    rig.store(A, LONG[:4])
    rig.faults.fails["erase"] = errno.EIO
    receipt = rig.erase(A)
    assert (receipt.records, receipt.code) == (1, "closed")
    rig.await_state("off")
    rig.faults.fails.clear()
    rig.await_state("open")

    assert rig.erase(A).code == ""
    assert rig.found(A, LONG) == []


@pytest.mark.parametrize("method", ["look", "plan_fetch", "renew", "recall"])
def test_a_command_has_an_outcome_where_the_index_fails(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The engine waits for it, in a request perhaps."""
    rig = make(monotonic_s=hurried)
    ids = rig.store(A, LONG[:8])

    def fail(store: DiskStore, command: object) -> None:
        raise apsw.IOError(f"the index cannot {method} {command}")

    call_id = rig.call_id()
    cases: dict[str, tuple[Look | Fetch | Renew | Recall, list[StorageOutcome]]] = {
        "look": (Look(call_id, A, LONG), [Looked(call_id, ())]),
        "plan_fetch": (
            Fetch(call_id, A, ids, (0, 1), SLOT_BYTES),
            [Fetched(call_id, one, False) for one in ids],
        ),
        "renew": (Renew(call_id, A, ids, promise_s=60.0), [Renewed(call_id, code="closed")]),
        "recall": (Recall(call_id), [Recalled(call_id, code="closed")]),
    }
    command, refused = cases[method]
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, method, fail)
        rig.storage.send(command)
        assert rig.answers(call_id, len(refused)) == refused
        assert "IOError" in rig.await_state("off").reason
    rig.await_state("open")

    assert rig.found(A, LONG) == list(ids)


@pytest.mark.parametrize("fault", ["", "sync"])
def test_a_renewed_promise_is_told_when_it_is_durable(make: MakeRig, fault: str) -> None:
    """The engine gives its own copy up for it."""
    rig = make()
    ids = rig.store(A, LONG[:4])
    gate = rig.faults.shut("sync")
    renew = Renew(rig.call_id(), A, ids, promise_s=60.0)
    rig.storage.send(renew)
    rig.faults.await_call()
    assert rig.found(A, LONG) == list(ids)
    assert rig.unclaimed == []
    if fault:
        rig.faults.fails[fault] = errno.EIO
    gate.set()

    assert rig.answers(renew.call_id) == [Renewed(renew.call_id, code="write_failed" * bool(fault))]


@pytest.mark.parametrize("call", ["write", "sync", "read", "erase"])
def test_a_look_waits_for_no_slab(make: MakeRig, call: str) -> None:
    """A disk that hangs in a call holds up what needs that call, and nothing else."""
    rig = make()
    ids = rig.store(A, LONG)
    rig.store(b"c", LONG)
    commands: dict[str, Fetch | EraseStored | StoreRuns] = {
        "read": Fetch(rig.call_id(), A, ids[:1], (0,), SLOT_BYTES),
        "erase": EraseStored(rig.call_id(), b"c"),
    }
    command = commands.get(call) or rig.store_command(B, LONG)
    gate = rig.faults.shut(call)
    rig.storage.send(command)
    rig.faults.await_call()

    assert rig.found(A, LONG) == list(ids)
    assert rig.unclaimed == []
    gate.set()
    assert rig.answers(command.call_id)


def test_what_was_given_before_the_end_is_finished(make: MakeRig) -> None:
    """The engine leaves, and the next one finds what it stored last."""
    rig = make()
    gate = rig.faults.shut("sync")
    rig.storage.send(rig.store_command(A, LONG))
    rig.faults.await_call()
    rig.processes[0].wire.shutdown(socket.SHUT_WR)
    gate.set()
    assert rig.processes[0].wait(60.0)

    while len(rig.processes) < 2 or rig.await_stats().state != "open":
        pass
    assert len(rig.found(A, LONG)) == 5


def test_a_second_server_on_the_folder_is_without_a_disk(make: MakeRig) -> None:
    """The first one is not disturbed; the second learns who has it, and takes over later."""
    first = make()
    ids = first.store(A, LONG)
    second = make(monotonic_s=hurried, wait_s=0.1)
    off = second.await_state("off")

    assert f"in use by process {os.getpid()}" in off.reason
    assert second.found(A, LONG) == []
    assert first.found(A, LONG) == list(ids)
    first.close()
    second.await_state("open")
    assert second.found(A, LONG) == list(ids)


def test_a_store_waits_for_the_end_of_the_last_process(tmp_path: Path, make: MakeRig) -> None:
    """The storage process of a dead engine may still be writing."""
    (tmp_path / "levels").mkdir(mode=0o700)
    lock = FolderLock(tmp_path / "levels")
    rig = make()
    waiting = rig.await_state("off")
    lock.close()
    rig.await_state("open")

    assert "last owner" in waiting.reason


@pytest.mark.parametrize("fault", ["file", "mode", "index", "version"])
def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path, make: MakeRig, fault: str) -> None:
    """The engine serves without a disk, and nothing there was changed."""
    folder = tmp_path / "levels"
    if fault == "file":
        folder.touch()
    else:
        folder.mkdir(mode=0o755 if fault == "mode" else 0o700)
    if fault == "index":
        (folder / "index.db").write_bytes(b"not a database" * 1_000)
    if fault == "version":
        (folder / "000012-000001.slab").touch()
    off = make().await_state("off")

    told = {
        "file": "is a file; expected a folder",
        "mode": "expected 0700",
        "index": "NotADBError",
        "version": "index.db is missing beside slabs",
    }
    assert told[fault] in off.reason


VERSION_99 = DiskSettings("/nowhere", 1, 0, LAYOUT, (1,), version=99)


@each_row(
    ("frame", "status"),
    [
        (b"\x04\0\0\0nope", 1),
        (b"\xff\xff\xff\xff", 1),
        (encode_frame(VERSION_99), 1),
        (encode_frame(Look(1, A, LONG)), 1),
        (b"", 0),
    ],
)
def test_a_first_frame_that_is_no_settings_ends_the_process(frame: bytes, status: int) -> None:
    """It serves only an engine of its own version."""

    def attach(settings: DiskSettings) -> HostArena:
        raise AssertionError(f"{settings} must not be served")

    assert served(frame, attach) == (status, [])


def test_commands_that_come_with_the_settings_are_served(tmp_path: Path) -> None:
    """The engine need not wait for an answer between them."""
    arena = HostArena.create(LAYOUT)
    settings = DiskSettings(str(tmp_path / "x"), 2**26, 0, LAYOUT, (SLOT_BYTES,), run_tokens=RUN)
    frames = encode_frame(settings) + encode_frame(Look(7, A, LONG))
    status, outcomes = served(frames, lambda settings: HostArena(os.dup(arena.fd), LAYOUT))
    arena.close()

    assert status == 0
    assert Looked(7, ()) in outcomes


def served(data: bytes, attach: Callable[[DiskSettings], HostArena]) -> tuple[int, list[Upward]]:
    """Return how a process ends whose engine sends this and leaves, and what it answers."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with theirs:
            status = serve(
                theirs,
                wall_ms=lambda: 0,
                uptime_s=lambda: 0.0,
                monotonic_s=time.monotonic,
                attach=attach,
                calls=FailingCalls(),
                log=lambda event, **facts: None,
            )
        return status, list(outcome_decoder().feed(ours.recv(2**20)))


def test_the_threads_say_how_long_the_oldest_work_takes() -> None:
    """A disk that hangs ends the heartbeat, and the engine replaces the process."""
    clock = FakeClock()
    io = IoThreads(1, clock)
    gates, ended = Gates(), list[int]()
    gate = gates.shut("work")
    work = partial(gates.wait_for_gate, "work")
    io.read(work, lambda: ended.append(1))
    gates.await_call()
    clock.advance(30.0)
    io.read(work, lambda: None)

    assert (io.under_way, io.oldest_s) == (2, 30.0), "what waits for a thread does not hang"
    gate.set()
    while io.under_way:
        for then in io.take_ended():
            then()
    assert (ended, io.oldest_s) == ([1], 0.0)
    io.close()


def test_a_work_that_raises_is_not_taken_for_one_that_has_ended() -> None:
    """What follows a write tells that it is durable."""
    io = IoThreads(1, FakeClock())
    ended = list[int]()

    def raise_one() -> None:
        raise ValueError("no error of a disk")

    io.order(raise_one, lambda: ended.append(1))
    assert select.select([io.wake_fd], [], [], 30.0)[0]
    thens = io.take_ended()
    with pytest.raises(RuntimeError, match="a work ended with ValueError"):
        thens[0]()

    assert ended == []
    io.close()
