"""Frames cross whole and in order, and nobody waits for a reader that is slow."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.child_process import ChildWire
from tenancy.ledger.protocol import FrameReader, packed
from tenancy.ledger.transactions import Item
from tests.unit.tenancy.conftest import used


class Ends:
    """A wire, and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.heard: list[bytes] = []
        self.ends = 0
        self._over = asyncio.Event()
        self.wire = ChildWire(ours, self.heard.append, self._ended)

    def _ended(self) -> None:
        self.ends += 1
        self._over.set()

    async def until_ended(self) -> None:
        async with asyncio.timeout(30):
            await self._over.wait()


@pytest.fixture
async def ends() -> object:
    ends = Ends()
    yield ends
    ends.wire.close()
    ends.theirs.close()


async def test_what_a_socket_does_not_take_leaves_later(ends: Ends) -> None:
    """In order, though nobody reads at first."""
    items: list[list[Item]] = [[used(str(number) * 1_000, 10)] for number in range(2_000)]
    for one in items:
        ends.wire.send(packed(one))
    reader = FrameReader()
    frames: list[bytes] = []
    loop = asyncio.get_running_loop()
    while len(frames) < len(items):
        frames.extend(reader.feed(await loop.sock_recv(ends.theirs, 2**16)))

    assert frames == [packed(one)[4:] for one in items]


async def test_frames_are_heard_one_by_one_however_they_arrive(ends: Ends) -> None:
    """Cut anywhere, or many at once."""
    first, second = packed([used("a", 10)]), packed([used("b", 10)])
    data = first + second + first
    for at in range(0, len(data), 7):
        ends.theirs.send(data[at : at + 7])
        await asyncio.sleep(0)
    ends.theirs.send(second + first)
    ends.theirs.close()
    await ends.until_ended()

    assert ends.heard == [frame[4:] for frame in (first, second, first, second, first)]
    assert ends.ends == 1


async def test_an_end_that_is_gone_is_told_once(ends: Ends) -> None:
    """Whoever writes to it hears of it in the same way as whoever waits."""
    ends.theirs.close()
    ends.wire.send(packed([used("a", 10)]))
    await ends.until_ended()
    ends.wire.end()
    ends.wire.close()
    ends.wire.close()

    assert (ends.heard, ends.ends) == ([], 1)


async def test_the_other_end_is_told_that_nothing_more_comes(ends: Ends) -> None:
    """And may still answer what it was sent."""
    ends.wire.send(packed([used("a", 10)]))
    ends.wire.end()
    loop = asyncio.get_running_loop()
    data = b""
    while piece := await loop.sock_recv(ends.theirs, 2**16):
        data += piece
    ends.theirs.send(packed([used("b", 10)]))
    ends.theirs.close()
    await ends.until_ended()

    assert data == packed([used("a", 10)])
    assert ends.heard == [packed([used("b", 10)])[4:]]
