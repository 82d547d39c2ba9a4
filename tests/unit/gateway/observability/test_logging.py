"""The log: whole lines in order, few writes, and nobody who waits for its reader."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.observability.logging import PIECE_BYTES, WAITING_BYTES_MAX, LogLines


class Pipe:
    """A log and what its reader has read."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)
        self.log = LogLines(self._writer, lambda: 7)
        self._data = b""

    def read(self) -> bytes:
        """What is there now; b"" if nothing is."""
        try:
            return os.read(self.reader, 2**20)
        except BlockingIOError:
            return b""

    async def read_until(self, what: str) -> list[dict[str, Any]]:
        """All lines up to one that says this."""
        async with asyncio.timeout(30):
            while what.encode() not in self._data or not self._data.endswith(b"\n"):
                self._data += self.read()
                await asyncio.sleep(0)
        return [json.loads(line) for line in self._data.splitlines()]

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


async def test_lines_of_a_moment_are_one_write(pipe: Pipe) -> None:
    """A write costs more than all else that a line does."""
    pipe.log("a", {"n": 1})
    await asyncio.sleep(0)
    pipe.log("b", {"n": 2})
    before = pipe.read()
    events = await pipe.read_until('"b"')

    assert before == b""
    assert events == [{"at_ms": 7, "event": "a", "n": 1}, {"at_ms": 7, "event": "b", "n": 2}]


def test_without_a_loop_a_line_is_written_at_once(pipe: Pipe) -> None:
    """Before there is one, and from threads beside it."""
    pipe.log("a", {})
    thread = threading.Thread(target=pipe.log, args=("b", {}))
    thread.start()
    thread.join()

    assert [json.loads(line)["event"] for line in pipe.read().splitlines()] == ["a", "b"]


async def test_a_slow_reader_holds_nobody_up_and_loses_no_line(pipe: Pipe) -> None:
    """Far more than a pipe holds: it is written as it is read."""
    for number in range(1_000):
        pipe.log("a", {"n": number, "filling": "x" * 100})
        await asyncio.sleep(0)
    pipe.log("last", {})
    events = await pipe.read_until("last")

    assert [event["n"] for event in events[:-1]] == list(range(1_000))


def test_each_write_ends_with_a_line() -> None:
    """The engine and the ledger write to the same place: their lines stand between ours, not in
    them. A line that is longer than a pipe takes at once is the exception."""
    reader, writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)  # one read for each write
    log = LogLines(writer, lambda: 7)

    async def say() -> None:
        for number in range(100):
            log("a", {"n": number, "filling": "x" * 100})
        log("b", {"filling": "x" * 2 * PIECE_BYTES})
        log("c", {})

    asyncio.run(say())
    log.close()
    os.close(writer)
    writes = list(iter(lambda: os.read(reader, 2**16), b""))
    os.close(reader)

    whole = [one for one in writes if one.endswith(b"\n")]
    assert len(writes) == len(whole) + 2 > 4
    assert [json.loads(line)["event"] for line in b"".join(writes).splitlines()][-2:] == ["b", "c"]


async def test_what_does_not_fit_any_more_is_counted(pipe: Pipe) -> None:
    """A reader that stands still costs a bounded room, and is told what it has missed."""
    lines = 2 * WAITING_BYTES_MAX // 1_000
    for number in range(lines):
        pipe.log("a", {"n": number, "filling": "x" * 1_000})
    await pipe.read_until('"n":99,')
    pipe.log("last", {})
    events = await pipe.read_until("last")
    left_out = [event["lines"] for event in events if event["event"] == "log_lines_left_out"]

    assert len(left_out) == 1
    assert len(events) - 2 + left_out[0] == lines


async def test_a_reader_that_is_gone_ends_nothing(pipe: Pipe) -> None:
    """A request is answered whether or not anybody reads that it was."""
    os.close(pipe.reader)
    pipe.log("a", {})
    await asyncio.sleep(0)
    pipe.log.close()
    pipe.reader = os.open("/dev/null", os.O_RDONLY)


async def test_closing_writes_what_waits(pipe: Pipe) -> None:
    """The last lines before the end are those that somebody looks for."""
    pipe.log("a", {})
    pipe.log.close()

    assert json.loads(pipe.read())["event"] == "a"
