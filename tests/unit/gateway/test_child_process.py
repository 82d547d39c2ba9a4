"""Frames cross whole and in order without waiting; lost processes are replaced by the policy."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine.api import Cancel
from engine.errors import ModelError
from engine.protocol import Upward, encode, upward_decoder
from gateway.child_process import ChildProcess, FrameWire, RestartLimit, RestartPolicy
from tenancy.ledger.child_process import FrameReader, packed
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
        self.wire = FrameWire(ours, self.heard.append, self._ended)

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


class Lives:
    """A child whose lives are played by the test, and what was reported."""

    def __init__(self, policy: RestartPolicy, *lives: bool | Exception) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []
        self.pauses = 0
        self._lives = list(lives)
        self._played = asyncio.Event()
        self.child = ChildProcess("it", ("true",), policy, self.report, self.live, self.pausing)

    def report(self, event: str, facts: dict[str, object]) -> None:
        self.events.append((event, facts))

    async def live(self) -> str:
        """One life: does the process serve before it is lost? After the last one it lives on."""
        if not self._lives:
            self._played.set()
            await asyncio.Event().wait()
        life = self._lives.pop(0)
        if isinstance(life, Exception):
            raise life
        if life:
            self.child.set_ready()
        return "lost"

    def pausing(self) -> None:
        self.pauses += 1

    async def until_played(self) -> None:
        async with asyncio.timeout(30):
            await self._played.wait()
        await self.child.stop()

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


async def test_a_lost_process_is_replaced_after_a_pause() -> None:
    """The first one at once, where the policy says so; each start that fails counts, too."""
    lives = Lives(RestartPolicy((0.0, 0.001)), True, False, True)
    lives.child.start()
    await lives.child.wait_ready()
    await lives.until_played()

    assert lives.names() == ["it_started", "it_died", "it_not_started", "it_started", "it_died"]
    assert (lives.child.restarts, lives.pauses) == (3, 2)


async def test_too_many_deaths_in_a_short_time_end_the_restarts() -> None:
    """`wait_ready` says so, to a caller that waits and to later ones."""
    lives = Lives(RestartPolicy((0.001,), deaths_max=3), False, False, False, True)
    lives.child.start()
    with pytest.raises(RestartLimit, match="The it died 3 times in 0 s"):
        await lives.child.wait_ready()
    with pytest.raises(RestartLimit):
        await lives.child.wait_ready()

    assert lives.names() == ["it_not_started"] * 3 + ["it_restart_limit"]


async def test_deaths_far_apart_are_no_crash_loop() -> None:
    """Only those within the window count."""
    policy = RestartPolicy((0.01,), deaths_max=2, deaths_window_s=0.001)
    lives = Lives(policy, *[True] * 4)
    lives.child.start()
    await lives.until_played()

    assert lives.child.failure is None


async def test_a_process_that_served_for_long_is_replaced_at_once() -> None:
    """It starts the row of pauses anew."""
    lives = Lives(RestartPolicy((0.0, 0.001), steady_s=-1.0), *[True] * 4)
    lives.child.start()
    await lives.until_played()

    assert lives.pauses == 0


async def test_what_another_start_would_not_mend_is_raised_and_quoted_only_if_it_is_ours() -> None:
    """An error of another library may hold a client's words."""
    failures: list[Exception] = [ModelError("not_found", "no such model"), ValueError("secret")]
    facts = []
    for failure in failures:
        lives = Lives(RestartPolicy((0.001,)), failure)
        lives.child.start()
        with pytest.raises(type(failure)):
            await lives.child.wait_ready()
        facts += lives.events

    assert facts == [
        ("it_not_started", {"reason": "no such model"}),
        ("it_not_started", {"reason": "ValueError"}),
    ]


def test_both_codecs_cut_the_same_frames() -> None:
    """The engine and tenancy may not know each other, so each has a reader of the same frames."""
    messages: list[Upward] = [Cancel("a"), Cancel("b" * 300)]
    data = b"".join(map(packed, messages))

    assert data == b"".join(map(encode, messages))
    assert list(upward_decoder().feed(data)) == messages
