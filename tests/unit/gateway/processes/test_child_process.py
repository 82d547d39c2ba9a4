"""`FrameWire` sends frames in order without blocking; `ChildProcess` restarts by its policy."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine.client.frame_wire import FrameWire
from engine.errors import ModelError
from engine.wire import FrameReader, encode_frame
from gateway.processes.child_process import ChildProcess, RestartPolicy, StartLimit
from tenancy.ledger.transactions import Item
from tests.unit.tenancy.conftest import used


class WireEnds:
    """A wire, and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.heard: list[bytes] = []
        self.wire_ends = 0
        self._over = asyncio.Event()
        self.wire = FrameWire(ours, self.heard.append, self._ended)

    def _ended(self) -> None:
        self.wire_ends += 1
        self._over.set()

    async def until_ended(self) -> None:
        async with asyncio.timeout(30):
            await self._over.wait()


@pytest.fixture
async def wire_ends() -> object:
    wire_ends = WireEnds()
    yield wire_ends
    wire_ends.wire.close()
    wire_ends.theirs.close()


async def test_sends_the_rest_when_the_socket_has_room(wire_ends: WireEnds) -> None:
    """In order, though the peer does not read at first."""
    items: list[list[Item]] = [[used(str(number) * 1_000, 10)] for number in range(2_000)]
    for one in items:
        wire_ends.wire.send(encode_frame(one))
    reader = FrameReader()
    frames: list[bytes] = []
    loop = asyncio.get_running_loop()
    while len(frames) < len(items):
        frames.extend(reader.feed(await loop.sock_recv(wire_ends.theirs, 2**16)))

    assert frames == [encode_frame(one)[4:] for one in items]


async def test_splits_stream_into_frames(wire_ends: WireEnds) -> None:
    """Cut anywhere, or many at once."""
    first, second = encode_frame([used("a", 10)]), encode_frame([used("b", 10)])
    data = first + second + first
    for at in range(0, len(data), 7):
        wire_ends.theirs.send(data[at : at + 7])
        await asyncio.sleep(0)
    wire_ends.theirs.send(second + first)
    wire_ends.theirs.close()
    await wire_ends.until_ended()

    assert wire_ends.heard == [frame[4:] for frame in (first, second, first, second, first)]
    assert wire_ends.wire_ends == 1


async def test_reports_a_closed_peer_once(wire_ends: WireEnds) -> None:
    """A writer learns it in the same way as a reader."""
    wire_ends.theirs.close()
    wire_ends.wire.send(encode_frame([used("a", 10)]))
    await wire_ends.until_ended()
    wire_ends.wire.end()
    wire_ends.wire.close()
    wire_ends.wire.close()

    assert (wire_ends.heard, wire_ends.wire_ends) == ([], 1)


async def test_end_tells_the_peer_that_no_more_frames_come(wire_ends: WireEnds) -> None:
    """The peer may still answer what it was sent."""
    wire_ends.wire.send(encode_frame([used("a", 10)]))
    wire_ends.wire.end()
    loop = asyncio.get_running_loop()
    data = b""
    while piece := await loop.sock_recv(wire_ends.theirs, 2**16):
        data += piece
    wire_ends.theirs.send(encode_frame([used("b", 10)]))
    wire_ends.theirs.close()
    await wire_ends.until_ended()

    assert data == encode_frame([used("a", 10)])
    assert wire_ends.heard == [encode_frame([used("b", 10)])[4:]]


class ScriptedChild:
    """A child whose runs the test plays, and its reported events."""

    def __init__(self, policy: RestartPolicy, *lives: bool | Exception) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []
        self.pauses = 0
        self.paused = asyncio.Event()
        self._lives = list(lives)
        self._played = asyncio.Event()
        self.child = ChildProcess(
            "it", ("true",), policy, self.report, self.run_process, self.on_pause
        )

    def report(self, event: str, facts: dict[str, object]) -> None:
        self.events.append((event, facts))

    async def run_process(self) -> str:
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

    def on_pause(self) -> None:
        self.pauses += 1
        asyncio.get_running_loop().call_soon(self.paused.set)  # the pause has begun by then

    async def until_played(self) -> None:
        async with asyncio.timeout(30):
            await self._played.wait()
        await self.child.stop()

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


async def test_replaces_lost_process_after_a_pause() -> None:
    """The first one at once, if the policy says so; a failed start counts, too."""
    lives = ScriptedChild(RestartPolicy((0.0, 0.001)), True, False, True)
    lives.child.start()
    await lives.child.wait_ready()
    await lives.until_played()

    assert lives.names() == ["it_started", "it_died", "it_not_started", "it_started", "it_died"]
    assert (lives.child.restarts, lives.pauses) == (3, 2)


async def test_gives_up_a_process_that_never_served() -> None:
    """`wait_ready` raises StartLimit, to a waiting caller and to later ones."""
    lives = ScriptedChild(RestartPolicy((0.001,), first_starts_max=3), *[False] * 3, True)
    lives.child.start()
    with pytest.raises(StartLimit, match="The it did not start in 3 attempts: lost"):
        await lives.child.wait_ready()
    with pytest.raises(StartLimit):
        await lives.child.wait_ready()

    assert lives.names() == ["it_not_started"] * 4


async def test_process_that_has_served_is_never_given_up() -> None:
    """Neither after many deaths nor after an error that stops a first start: memory, a device or a
    file may be missing for a while."""
    missing = ModelError("not_found", "no such model")
    deaths: list[bool | Exception] = [*[False] * 20, missing, ValueError("secret"), *[True] * 20]
    policy = RestartPolicy((0.0, 0.0001), first_starts_max=2)
    lives = ScriptedChild(policy, True, *deaths)
    lives.child.start()
    await lives.child.wait_ready()
    await lives.until_played()

    assert lives.child.failure is None
    assert lives.child.restarts == 1 + len(deaths)
    reasons = [facts.get("reason") for name, facts in lives.events if name == "it_not_started"]
    assert reasons == ["lost"] * 20 + ["no such model", "ValueError"]


async def test_pause_left_is_the_time_to_the_next_start() -> None:
    """Clients are told when to try again."""
    lives = ScriptedChild(RestartPolicy((60.0,)), True)
    lives.child.start()
    async with asyncio.timeout(30):
        await lives.paused.wait()
    left_s = lives.child.pause_left_s
    await lives.child.stop()

    assert 0 < left_s <= 60.0


async def test_steady_process_resets_the_pauses() -> None:
    lives = ScriptedChild(RestartPolicy((0.0, 0.001), steady_s=-1.0), *[True] * 4)
    lives.child.start()
    await lives.until_played()

    assert lives.pauses == 0


async def test_permanent_error_is_raised_and_quoted_only_if_ours() -> None:
    """An error of another library may quote a client's text."""
    failures: list[Exception] = [ModelError("not_found", "no such model"), ValueError("secret")]
    facts = []
    for failure in failures:
        lives = ScriptedChild(RestartPolicy((0.001,)), failure)
        lives.child.start()
        with pytest.raises(type(failure)):
            await lives.child.wait_ready()
        facts += lives.events

    assert facts == [
        ("it_not_started", {"reason": "no such model"}),
        ("it_not_started", {"reason": "ValueError"}),
    ]
