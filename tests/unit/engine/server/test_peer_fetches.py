"""What an engine makes of another one that breaks its word: a slot counts only with right bytes."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
import xxhash

from engine.api import Peer
from engine.client.tls_files import tls_context
from engine.moves import FetchBlocks, FetchedBlocks, FetchedRun, FetchRuns, SlotFormat
from engine.protocol import PeerEnd, PeerLent, PeerRun, Rejected, encode, read_peer
from engine.server.links.peer_fetches import FETCHES_MAX, PeerFetches
from tests.unit.engine.server.fleet_certificates import certificate

BYTES, SLOTS = 64, (2, 5, 7)
TOKENS = tuple(range(64))
DEADLINE_S = 30.0

Serve = Callable[[ssl.SSLSocket], None]


def run(number: int, *, is_damaged: bool = False) -> bytes:
    """Return the frame of a run, and its bytes."""
    content = bytes([number]) * BYTES
    sent = content[:-1] + b"x" if is_damaged else content
    return encode(PeerRun(xxhash.xxh3_128_digest(content), None)) + sent


class Source:
    """Another engine, which reads what is wanted and then does as it is told."""

    def __init__(self, serve: Serve, holder: str = "engine/e0") -> None:
        self._end = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._end.getsockname()[1]
        self._serve, self._context = serve, tls_context(certificate(holder), is_server=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                end, _ = self._end.accept()
            except OSError:
                return
            with (
                suppress(OSError, struct.error),
                self._context.wrap_socket(end, server_side=True) as wire,
            ):
                (size,) = struct.unpack("<I", wire.recv(4))
                while size > 0:
                    size -= len(wire.recv(size)) or size
                self._serve(wire)

    def close(self) -> None:
        self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
        self._thread.join(DEADLINE_S)


class Pools:
    """`NearPools` that notes what is read. `error`: raised by each read."""

    domain, handle, bytes_per_s = "host", b"own", 1e9
    error: Exception | None = None

    def __init__(self) -> None:
        self.reads: list[tuple[bytes, list[int], list[int]]] = []

    def read(self, handle: bytes, theirs: Sequence[int], ours: Sequence[int]) -> None:
        if self.error is not None:
            raise self.error
        self.reads.append((handle, list(theirs), list(ours)))

    def let_go_ended(self) -> None: ...

    def close(self) -> None: ...


class Reader:
    """Fetches into slots of plain memory, and into blocks that are only noted."""

    def __init__(self) -> None:
        self.pools = Pools()
        self.memory = bytearray(10 * BYTES)
        view = memoryview(self.memory)
        self.fetches = PeerFetches(
            *("e1", certificate("engine/e1"), "digest"),
            lambda slot, size: view[slot * BYTES : slot * BYTES + size],
            self.pools,
        )

    def fetch(self, port: int, call_id: int = 1, timeout_s: float = DEADLINE_S) -> None:
        peer = Peer("e0", "127.0.0.1", port, len(TOKENS), b"ticket")
        form = SlotFormat("", BYTES)
        self.fetches.fetch(FetchRuns(call_id, peer, b"n", TOKENS, 1, SLOTS, form, timeout_s))

    def outcomes(self, count: int = len(SLOTS)) -> list[FetchedRun]:
        """Return so many outcomes, once they have come."""
        found: list[FetchedRun] = []
        while len(found) < count:
            found += self.fetches.poll()
        return found

    def fetch_blocks(self, port: int, call_id: int = 1) -> None:
        peer = Peer("e0", "127.0.0.1", port, len(TOKENS), b"ticket", is_near=True)
        what = call_id, peer, b"n", TOKENS, 1, (4, 5, 6), DEADLINE_S
        self.fetches.fetch_blocks(FetchBlocks(*what))

    def copied(self, count: int = 1) -> list[FetchedBlocks]:
        """Return so many outcomes of blocks, once they have come."""
        found: list[FetchedBlocks] = []
        while len(found) < count:
            found += self.fetches.poll_blocks()
        return found

    def slot(self, slot: int) -> bytes:
        return bytes(self.memory[slot * BYTES : (slot + 1) * BYTES])


@pytest.fixture
def source_of() -> Iterator[Callable[..., Source]]:
    sources: list[Source] = []

    def make(serve: Serve, holder: str = "engine/e0") -> Source:
        sources.append(Source(serve, holder))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


def sends(*frames: bytes) -> Serve:
    return lambda wire: wire.sendall(b"".join(frames))


def test_copies_come_into_their_slots(source_of: Callable[..., Source]) -> None:
    """In order, each with its digest."""
    reader = Reader()
    reader.fetch(source_of(sends(run(1), run(2), run(3))).port)
    assert [one.why for one in reader.outcomes()] == ["", "", ""]
    assert [reader.slot(slot)[0] for slot in SLOTS] == [1, 2, 3]


@pytest.mark.parametrize(
    ("frames", "whys"),
    [
        ((run(1), run(2, is_damaged=True), run(3)), ["", "damaged", "damaged"]),
        ((run(1), encode(PeerEnd("lacking"))), ["", "lacking", "lacking"]),
        ((encode(PeerEnd("busy")),), ["busy"] * 3),
        ((encode(Rejected("unauthorized", "no")),), ["refused"] * 3),
        ((run(1), run(2)[:-5]), ["", "lost", "lost"]),
        ((run(1), b"\xff\xff\xff\xff"), ["", "lost", "lost"]),
        ((struct.pack("<I", 3) + b"abc",), ["lost"] * 3),
        ((), ["lost"] * 3),
    ],
    ids=["damaged", "lacking", "busy", "refused", "half", "too long", "no message", "nothing"],
)
def test_what_is_wrong_ends_a_fetch(
    source_of: Callable[..., Source], frames: tuple[bytes, ...], whys: list[str]
) -> None:
    """What came before it counts; each slot has its outcome."""
    reader = Reader()
    reader.fetch(source_of(sends(*frames)).port)
    assert [one.why for one in reader.outcomes()] == whys


def test_another_engine_at_the_address_gets_no_prompt(source_of: Callable[..., Source]) -> None:
    """Its certificate is not that of the peer: it is sent nothing."""
    got: list[bytes] = []
    reader = Reader()
    reader.fetch(source_of(lambda wire: got.append(wire.recv(1)), "engine/e2").port)
    assert [one.why for one in reader.outcomes()] == ["lost"] * 3
    assert not any(got)


def test_a_silent_source_is_late_and_a_stopped_fetch_ends(source_of: Callable[..., Source]) -> None:
    """No thread waits for ever for what does not come."""
    reader, silent = Reader(), source_of(lambda wire: wire.recv(1) and None)
    reader.fetch(silent.port, timeout_s=0.2)
    assert [one.why for one in reader.outcomes()] == ["late"] * 3
    entered = threading.Event()

    def wait(wire: ssl.SSLSocket) -> None:
        entered.set()
        wire.recv(1)

    reader.fetch(source_of(wait).port, call_id=2)
    assert entered.wait(DEADLINE_S)
    reader.fetches.stop(2)
    assert [one.why for one in reader.outcomes()] == ["stopped"] * 3


def test_only_so_many_fetches_run_at_a_time(source_of: Callable[..., Source]) -> None:
    """A further one fails at once, and its request computes."""
    reader, source = Reader(), source_of(lambda wire: wire.recv(1) and None)
    for call_id in range(FETCHES_MAX + 1):
        reader.fetch(source.port, call_id)
    assert {(one.call_id, one.why) for one in reader.outcomes()} == {(FETCHES_MAX, "busy")}
    reader.fetches.close()
    assert len(reader.outcomes(FETCHES_MAX * len(SLOTS))) == FETCHES_MAX * len(SLOTS)


LENT = encode(PeerLent(b"theirs", (9, 8, 7), (None, 2.0, 1.0), "rough"))


def lends(end: bytes, lent: bytes = LENT, heard: list[object] | None = None) -> Serve:
    """Lend blocks, and say so much when the reader has returned them."""

    def serve(wire: ssl.SSLSocket) -> None:
        wire.sendall(lent)
        (size,) = struct.unpack("<I", wire.recv(4))
        message = read_peer(wire.recv(size))
        if heard is not None:
            heard.append(message)
        wire.sendall(end)

    return serve


def test_blocks_count_once_the_source_has_said_that_it_held_them(
    source_of: Callable[..., Source],
) -> None:
    """It is told when they were read; each has its limit. Fewer are a part."""
    reader, heard = Reader(), list[object]()
    reader.fetch_blocks(source_of(lends(encode(PeerEnd("")), heard=heard)).port)
    (whole,) = reader.copied()
    (none, *limits) = whole.limits_s
    assert (whole.why, whole.fidelity, none, heard) == ("", "rough", None, [PeerEnd("")])
    assert all(0 < got <= told for got, told in zip(limits, (2.0, 1.0), strict=True) if got)
    assert reader.pools.reads == [(b"theirs", [9, 8, 7], [4, 5, 6])]
    one = encode(PeerLent(b"theirs", (3,), (None,)))
    reader.fetch_blocks(source_of(lends(encode(PeerEnd("")), one)).port)
    (part,) = reader.copied()
    assert (part.why, part.limits_s) == ("lacking", (None,))


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (lends(encode(PeerEnd("late"))), "lacking"),
        (lends(b""), "lost"),
        (sends(encode(PeerEnd("lacking"))), "lacking"),
        (sends(encode(PeerEnd("busy"))), "busy"),
        (sends(encode(Rejected("unauthorized", "no"))), "refused"),
        (sends(run(1)), "lost"),
        (sends(), "lost"),
    ],
    ids=["not held", "dies", "lacking", "busy", "refused", "a copy", "nothing"],
)
def test_no_block_counts_that_was_not_held(
    source_of: Callable[..., Source], serve: Serve, why: str
) -> None:
    """Whatever else the source does; nor where the device fails."""
    reader = Reader()
    reader.fetch_blocks(source_of(serve).port)
    (outcome,) = reader.copied()
    assert (outcome.why, outcome.limits_s) == (why, ())
    reader.pools.error = RuntimeError("a device's")
    reader.fetch_blocks(source_of(lends(encode(PeerEnd("")))).port)
    (outcome,) = reader.copied()
    assert (outcome.why, outcome.limits_s) == ("unreadable", ())


def test_fetches_of_blocks_wait_for_each_other(source_of: Callable[..., Source]) -> None:
    """Each is short: none fails since too many come at once, and one that waits can be stopped."""
    reader, gate = Reader(), threading.Event()

    def serve(wire: ssl.SSLSocket) -> None:
        gate.wait(DEADLINE_S)
        lends(encode(PeerEnd("")))(wire)

    sources = [source_of(serve) for _ in range(FETCHES_MAX + 2)]
    for call_id, source in enumerate(sources):
        reader.fetch_blocks(source.port, call_id)
    reader.fetches.stop(FETCHES_MAX)
    gate.set()
    whys = {one.call_id: one.why for one in reader.copied(FETCHES_MAX + 2)}
    assert whys == {n: "stopped" if n == FETCHES_MAX else "" for n in range(FETCHES_MAX + 2)}
