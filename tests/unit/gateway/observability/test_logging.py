"""`LogLines`: complete lines in order, few writes, and no request that waits for the reader."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from gateway.observability.logging import (
    PENDING_BYTES_MAX,
    WRITE_BYTES_MAX,
    LogLines,
    RefusalLines,
)
from tests.fakes import FakeClock


class LogPipe:
    """A log, and what its reader has read."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)
        self.log = LogLines(self._writer, lambda: 7)
        self._data = b""

    def read(self) -> bytes:
        """Return what is in the pipe now; b"" if nothing."""
        try:
            return os.read(self.reader, 2**20)
        except BlockingIOError:
            return b""

    async def read_until(self, what: str) -> list[dict[str, Any]]:
        """Return all lines up to the one that contains `what`."""
        async with asyncio.timeout(30):
            while what.encode() not in self._data or not self._data.endswith(b"\n"):
                self._data += self.read()
                await asyncio.sleep(0)
        return [json.loads(line) for line in self._data.splitlines()]

    def fill(self) -> None:
        """Fill the pipe, as other processes may."""
        line = json.dumps({"event": "filling"}).encode() + b"\n"
        with suppress(BlockingIOError):
            while True:
                os.write(self._writer, line)

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)


@pytest.fixture
def pipe() -> Iterator[LogPipe]:
    made = LogPipe()
    yield made
    made.close()


async def test_batches_lines_into_one_write(pipe: LogPipe) -> None:
    """A write costs more than the rest of logging a line."""
    pipe.log("a", {"n": 1})
    await asyncio.sleep(0)
    pipe.log("b", {"n": 2})
    before = pipe.read()
    events = await pipe.read_until('"b"')

    assert before == b""
    at = "1970-01-01T00:00:00.007Z"
    assert events == [{"at": at, "event": "a", "n": 1}, {"at": at, "event": "b", "n": 2}]


def test_writes_at_once_outside_an_event_loop(pipe: LogPipe) -> None:
    """At startup, and in worker threads."""
    pipe.log("a", {})
    thread = threading.Thread(target=pipe.log, args=("b", {}))
    thread.start()
    thread.join()

    assert [json.loads(line)["event"] for line in pipe.read().splitlines()] == ["a", "b"]


async def test_slow_reader_delays_no_caller_and_loses_no_line(pipe: LogPipe) -> None:
    """Far more than a pipe holds is written as the reader reads it."""
    for number in range(1_000):
        pipe.log("a", {"n": number, "filling": "x" * 100})
        await asyncio.sleep(0)
    pipe.log("last", {})
    events = await pipe.read_until("last")

    assert [event["n"] for event in events[:-1]] == list(range(1_000))


def test_writes_only_complete_lines() -> None:
    """The engine and the ledger write to the same pipe: their lines must stand between these, not
    inside. A line that is longer than the pipe's atomic size is the exception."""
    reader, writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)  # one read per write
    log = LogLines(writer, lambda: 7)

    async def say() -> None:
        for number in range(100):
            log("a", {"n": number, "filling": "x" * 100})
        log("b", {"filling": "x" * 2 * WRITE_BYTES_MAX})
        log("c", {})

    asyncio.run(say())
    log.close()
    os.close(writer)
    writes = list(iter(lambda: os.read(reader, 2**16), b""))
    os.close(reader)

    whole = [one for one in writes if one.endswith(b"\n")]
    assert 0 < len(writes) - len(whole) < 4, "only the long line is cut"
    assert len(whole) < 50, "lines are written together"
    assert [json.loads(line)["event"] for line in b"".join(writes).splitlines()][-2:] == ["b", "c"]


async def test_counts_lines_dropped_for_a_stuck_reader(pipe: LogPipe) -> None:
    """A stuck reader costs bounded memory, and is told how many lines it has missed."""
    lines = 2 * PENDING_BYTES_MAX // 1_000
    for number in range(lines):
        pipe.log("a", {"n": number, "filling": "x" * 1_000})
    await pipe.read_until('"n":99,')
    pipe.log("last", {})
    events = await pipe.read_until("last")
    left_out = [event["lines"] for event in events if event["event"] == "log_lines_dropped"]

    assert len(left_out) == 1
    assert len(events) - 2 + left_out[0] == lines


async def test_closed_pipe_raises_nothing(pipe: LogPipe) -> None:
    """Requests are served whether or not the log is read."""
    os.close(pipe.reader)
    pipe.log("a", {})
    await asyncio.sleep(0)
    pipe.log.close()
    pipe.reader = os.open("/dev/null", os.O_RDONLY)


async def test_close_writes_pending_lines(pipe: LogPipe) -> None:
    """The last lines before an exit matter most."""
    pipe.log("a", {})
    pipe.log.close()

    assert json.loads(pipe.read())["event"] == "a"


def test_refusal_lines_are_bounded_by_owner_and_second() -> None:
    """What was left out is counted in a line, once, in a later second."""
    clock, lines = FakeClock(), list[tuple[str, dict[str, object]]]()
    refusals = RefusalLines(lambda event, facts: lines.append((event, facts)), clock)
    clock.advance(10.0)
    strangers = sum(refusals.admit(None) for _ in range(1_000))
    tenant = sum(refusals.admit("ada") for _ in range(3))
    during = list(lines)
    clock.advance(1.0)
    later = [refusals.admit(None) for _ in range(2)]

    assert (strangers, tenant, later) == (20, 3, [True, True])
    assert during == []
    assert lines == [("log_lines_dropped", {"lines": 980, "of": "refused requests"})]


async def test_a_thread_that_waits_for_the_reader_holds_up_no_event_loop(
    pipe: LogPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exporters log from threads of their own."""
    monkeypatch.setattr("gateway.observability.logging.FINAL_WAIT_S", 30.0)
    pipe.fill()
    waiting = threading.Thread(target=pipe.log, args=("of a thread", {}))
    waiting.start()
    for _ in range(3):
        await asyncio.to_thread(bool)  # the thread's turn
    pipe.log("of the loop", {})
    is_waiting = waiting.is_alive()
    lines = await pipe.read_until("of the loop")
    await asyncio.to_thread(waiting.join)

    assert is_waiting
    assert {line["event"] for line in lines} >= {"of a thread", "of the loop"}
