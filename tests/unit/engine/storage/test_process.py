"""The storage process as a whole: faults of the disk, order of what overlaps, its beginning and
end. It runs as a thread here; `test_client` runs the real one."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
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
    Stored,
    StoredErased,
    StoreRuns,
)
from engine.storage.folder import FolderLock
from engine.storage.io_threads import IoThreads
from engine.storage.memory.arena import HostArena
from engine.storage.messages import DiskSettings, encode_frame, outcome_decoder
from engine.storage.process import serve
from engine.storage.store import DiskStore
from tests.fakes import FakeClock
from tests.unit.engine.storage.failing_calls import FailingCalls
from tests.unit.engine.storage.storage_rig import (
    LAYOUT,
    RUN,
    SLOT_BYTES,
    A,
    B,
    DiskRig,
    content_of,
)

LONG = tuple(range(5 * RUN))
MakeRig = Callable[..., DiskRig]


def hurried() -> float:
    """Return a clock on which half a minute passes in less than a second."""
    return 60 * time.monotonic()


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


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_failing_disk_closes_the_level_and_is_tried_again(make: MakeRig, call: str) -> None:
    """What was stored is there again when the disk is; meanwhile everything is a miss, at once."""
    calls = FailingCalls()
    rig = make(calls=calls, monotonic_s=hurried)
    ids = rig.store(A, LONG[:8])
    calls.fails[call] = errno.EIO
    failed = rig.send_store(rig.store_command(B, LONG))
    off = rig.await_state("off")

    assert (failed.record_ids, failed.code) == ((), "write_failed")
    assert "Input/output error" in off.reason
    assert rig.found(A, LONG) == []
    assert rig.fetch(A, ids) == [None, None]
    assert rig.send_store(rig.store_command(A, LONG)).code == "closed"
    assert rig.client.has_records(A), "an erasure must still reach it"
    calls.fails.clear()
    rig.await_state("open")
    assert rig.client.has_records(A)
    assert rig.found(A, LONG) == list(ids)
    assert len(rig.processes) == 1, "the process lives on"


def test_an_erasure_that_came_while_the_disk_was_away_is_made_up_for(make: MakeRig) -> None:
    """The receipt says that it failed; when the disk is back, nothing of it is found."""
    calls = FailingCalls()
    rig = make(calls=calls, monotonic_s=hurried)
    rig.store(A, LONG)
    rig.store(B, LONG)
    calls.fails["write"] = errno.EROFS
    rig.send_store(rig.store_command(b"c", LONG))
    rig.await_state("off")
    assert rig.erase(A).code == "closed"
    calls.fails.clear()
    rig.await_state("open")

    assert rig.found(A, LONG) == []
    assert len(rig.found(B, LONG)) == 5


def test_reads_that_fail_often_close_the_level(make: MakeRig) -> None:
    """Three within ten seconds; a single one is a miss."""
    calls = FailingCalls()
    rig = make(calls=calls)
    ids = rig.store(A, LONG[:4])
    calls.fails["read"] = errno.EIO
    assert rig.fetch(A, ids) == [None]
    assert rig.await_stats().state == "open"
    assert [rig.fetch(A, ids), rig.fetch(A, ids)] == [[None], [None]]

    assert "Input/output error" in rig.await_state("off").reason


def test_a_full_disk_says_so_and_serves_on(make: MakeRig) -> None:
    """It is no fault of what is there."""
    calls = FailingCalls()
    rig = make(calls=calls, slab_bytes=5 * (SLOT_BYTES + 4_096))
    ids = rig.store(A, LONG, promise_s=60.0)
    calls.fails["lay_out"] = errno.ENOSPC
    assert rig.send_store(rig.store_command(B, LONG)).code == "full"

    assert "No space left" in rig.await_state("full").reason
    assert rig.fetch(A, ids[4:]) == [content_of(A, LONG)]


def test_an_erasure_reaches_stores_that_wait_and_are_under_way(make: MakeRig) -> None:
    """Neither brings anything; another namespace's does. It is answered when no byte is left that
    was being written."""
    calls = FailingCalls()
    rig = make(calls=calls)
    gate = calls.gates["write"] = Event()
    under_way = rig.store_command(A, LONG[:8])
    waiting = rig.store_command(A, LONG[:8])
    other = StoreRuns(rig.call_id(), B, b"p", 0, waiting.runs, SLOT_BYTES)
    rig.storage.send(under_way)
    assert calls.has_come.wait(60.0)
    erase = EraseStored(rig.call_id(), A)
    for command in (waiting, other, erase):
        rig.storage.send(command)
    (second,) = rig.answers(waiting.call_id)
    assert rig.found(B, LONG) == []
    assert rig.unclaimed == [], "bytes of it are being written"
    gate.set()
    (receipt,) = rig.answers(erase.call_id)
    (first,) = rig.answers(under_way.call_id)
    (third,) = rig.answers(other.call_id)

    assert isinstance(receipt, StoredErased)
    assert (receipt.records, receipt.code) == (0, "")
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert isinstance(third, Stored)
    assert [first.code, second.code, third.code] == ["erased", "erased", ""]
    assert rig.found(A, LONG) == []


def slab_bytes(rig: DiskRig) -> bytes:
    """Return all bytes of all slabs."""
    return b"".join(path.read_bytes() for path in Path(rig.settings.dir).glob("*.slab"))


def test_an_erasure_is_answered_after_a_fetch_of_what_it_erases(make: MakeRig) -> None:
    """The bytes lie in their place for as long as they are read."""
    calls = FailingCalls()
    rig = make(calls=calls)
    ids = rig.store(A, LONG[:4])
    gate = calls.gates["read"] = Event()
    calls.has_come.clear()
    fetch = Fetch(rig.call_id(), A, ids, (0,), SLOT_BYTES)
    rig.storage.send(fetch)
    assert calls.has_come.wait(60.0)
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
    calls = FailingCalls()
    rig = make(calls=calls, monotonic_s=hurried)
    rig.store(A, LONG[:4])
    calls.fails["erase"] = errno.EIO
    receipt = rig.erase(A)
    assert (receipt.records, receipt.code) == (1, "closed")
    rig.await_state("off")
    calls.fails.clear()
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

    commands: dict[str, Look | Fetch | Renew | Recall] = {
        "look": Look(rig.call_id(), A, LONG),
        "plan_fetch": Fetch(rig.call_id(), A, ids, (0, 1), SLOT_BYTES),
        "renew": Renew(rig.call_id(), A, ids, promise_s=60.0),
        "recall": Recall(rig.call_id()),
    }
    command = commands[method]
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, method, fail)
        rig.storage.send(command)
        outcomes = rig.answers(command.call_id, 2 if method == "plan_fetch" else 1)
        assert "IOError" in rig.await_state("off").reason
    refused = {
        "look": [Looked(command.call_id, ())],
        "plan_fetch": [Fetched(command.call_id, one, False) for one in ids],
        "renew": [Renewed(command.call_id, code="closed")],
        "recall": [Recalled(command.call_id, code="closed")],
    }
    rig.await_state("open")

    assert outcomes == refused[method]
    assert rig.found(A, LONG) == list(ids)


@pytest.mark.parametrize("fault", ["", "sync"])
def test_a_renewed_promise_is_told_when_it_is_durable(make: MakeRig, fault: str) -> None:
    """The engine gives its own copy up for it."""
    calls = FailingCalls()
    rig = make(calls=calls)
    ids = rig.store(A, LONG[:4])
    gate = calls.gates["sync"] = Event()
    calls.has_come.clear()
    renew = Renew(rig.call_id(), A, ids, promise_s=60.0)
    rig.storage.send(renew)
    assert calls.has_come.wait(60.0)
    assert rig.found(A, LONG) == list(ids)
    assert rig.unclaimed == []
    if fault:
        calls.fails[fault] = errno.EIO
    gate.set()

    assert rig.answers(renew.call_id) == [Renewed(renew.call_id, code="write_failed" * bool(fault))]


@pytest.mark.parametrize("call", ["write", "sync", "read", "erase"])
def test_a_look_waits_for_no_slab(make: MakeRig, call: str) -> None:
    """A disk that hangs in a call holds up what needs that call, and nothing else."""
    calls = FailingCalls()
    rig = make(calls=calls)
    ids = rig.store(A, LONG)
    rig.store(b"c", LONG)
    gate = calls.gates[call] = Event()
    calls.has_come.clear()
    if call == "read":
        fetch = Fetch(rig.call_id(), A, ids[:1], (0,), SLOT_BYTES)
        rig.storage.send(fetch)
        waiting = fetch.call_id
    elif call == "erase":
        erase = EraseStored(rig.call_id(), b"c")
        rig.storage.send(erase)
        waiting = erase.call_id
    else:
        store = rig.store_command(B, LONG)
        rig.storage.send(store)
        waiting = store.call_id
    assert calls.has_come.wait(60.0)

    assert rig.found(A, LONG) == list(ids)
    assert rig.unclaimed == []
    gate.set()
    assert rig.answers(waiting)


def test_what_was_given_before_the_end_is_finished(make: MakeRig) -> None:
    """The engine leaves, and the next one finds what it stored last."""
    calls = FailingCalls()
    rig = make(calls=calls)
    gate = calls.gates["sync"] = Event()
    rig.storage.send(rig.store_command(A, LONG))
    assert calls.has_come.wait(60.0)
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


@pytest.mark.parametrize("frame", [b"\x04\0\0\0nope", b"\xff\xff\xff\xff", b""])
def test_a_first_frame_that_is_none_ends_the_process(frame: bytes) -> None:
    """It serves only an engine of its own version."""
    assert exit_status(frame) == (1 if frame else 0)


def test_another_version_is_refused() -> None:
    """Two installations that were mixed."""
    settings = DiskSettings("/nowhere", 1, 0, LAYOUT, (1,), version=99)

    assert exit_status(encode_frame(settings)) == 1
    assert exit_status(encode_frame(Look(1, A, LONG))) == 1


def exit_status(data: bytes) -> int:
    """Return how a process ends whose engine sends this and leaves."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(data)
        return serve(
            theirs,
            wall_ms=lambda: 0,
            uptime_s=lambda: 0.0,
            monotonic_s=time.monotonic,
            attach=refuse,
            calls=FailingCalls(),
            log=lambda event, **facts: None,
        )


def refuse(settings: DiskSettings) -> HostArena:
    """Map nothing."""
    raise AssertionError(f"{settings} must not be served")


def test_commands_that_come_with_the_settings_are_served(tmp_path: Path) -> None:
    """The engine need not wait for an answer between them."""
    arena = HostArena.create(LAYOUT)
    ours, theirs = socket.socketpair()
    settings = DiskSettings(str(tmp_path / "x"), 2**26, 0, LAYOUT, (SLOT_BYTES,), run_tokens=RUN)
    ours.sendall(encode_frame(settings) + encode_frame(Look(7, A, LONG)))
    ours.shutdown(socket.SHUT_WR)
    with ours, theirs:
        serve(
            theirs,
            wall_ms=lambda: 0,
            uptime_s=lambda: 0.0,
            monotonic_s=time.monotonic,
            attach=lambda settings: HostArena(os.dup(arena.fd), LAYOUT),
            calls=FailingCalls(),
            log=lambda event, **facts: None,
        )
        outcomes = list(outcome_decoder().feed(ours.recv(2**20)))
    arena.close()

    assert Looked(7, ()) in outcomes


def test_the_threads_say_how_long_the_oldest_work_takes() -> None:
    """A disk that hangs ends the heartbeat, and the engine replaces the process."""
    clock = FakeClock()
    io = IoThreads(1, clock)
    gate, ended = Event(), list[int]()

    def wait() -> None:
        gate.wait(60.0)

    has_begun = Event()

    def begin() -> None:
        has_begun.set()
        wait()

    io.read(begin, lambda: ended.append(1))
    assert has_begun.wait(60.0)
    clock.advance(30.0)
    io.read(wait, lambda: None)

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
