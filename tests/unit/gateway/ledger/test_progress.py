"""Progress notes never exceed what the client's socket took, and hardly lag behind it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.canonical import UsageRecord
from gateway.ledger.progress import (
    PROGRESS_FLUSH_REMOTE_S,
    PROGRESS_FLUSH_S,
    PROGRESS_INTERVAL_S,
    PROGRESS_TOKENS,
    Notes,
    ProgressJournal,
    StreamProgress,
)
from tenancy.types import TokenCounts
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import GatewayFixture

PROMPT = 7
PROMISED_TOKENS, PROMISED_S = 16, 0.25


class FakeConnection:
    """A connection, and the bytes that the kernel has taken."""

    def __init__(self) -> None:
        self.bytes_written = 0
        self.taken = 0
        self.is_closed = False

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0 if self.is_closed else self.bytes_written - self.taken


class FakeSource:
    """A source with a set number of tokens, and of tokens whose text is out."""

    def __init__(self) -> None:
        self.tokens_seen = 0
        self.passed_on = 0

    def delivered_usage(self) -> UsageRecord:
        if not self.passed_on:
            return UsageRecord(0)
        return UsageRecord(PROMPT, fresh=PROMPT, out=self.passed_on)


class JournalWorld:
    """A journal on a manual clock, with streams."""

    def __init__(self, flush_s: float = PROGRESS_FLUSH_S) -> None:
        self.now_s = 0.0
        self.calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.noted: Notes = {}
        self.notes = 0
        self.journal = ProgressJournal(self._note, flush_s, self._call_later)

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.calls, (self.now_s + seconds, next(self._numbers), call))

    def _note(self, notes: Notes) -> None:
        self.noted |= notes
        self.notes += 1

    def advance(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.calls and self.calls[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self.calls)
            call()
        self.now_s = until_s


class JournalStream:
    """A stream of the journal, and its reader."""

    def __init__(self, world: JournalWorld, stack: ExitStack, name: str = "a") -> None:
        self.world = world
        self.name = name
        self.wire, self.engine = FakeConnection(), FakeSource()
        following = world.journal.following(name, self.engine, self.wire)
        self.progress: StreamProgress = stack.enter_context(following)
        self._written: list[tuple[int, int]] = [(0, 0)]
        self.accepted_at: list[tuple[float, int]] = [(0.0, 0)]

    def write(self, tokens: int = 1, *, held: int = 0, taken: bool = True) -> None:
        """Write one engine step: all but `held` of its tokens."""
        self.begin(tokens, held=held)
        self.end(taken=taken)

    def begin(self, tokens: int, *, held: int = 0) -> None:
        self.progress.is_behind = True
        self.engine.tokens_seen += tokens
        self.engine.passed_on = max(self.engine.passed_on, self.engine.tokens_seen - held)

    def end(self, *, taken: bool = True) -> None:
        self.wire.bytes_written += 100
        self._written.append((self.wire.bytes_written, self.engine.passed_on))
        if taken:
            self.take(self.wire.bytes_written)
        self.progress.wrote()

    def take(self, size: int) -> None:
        """Let the kernel take so many bytes more."""
        self.wire.taken = min(self.wire.bytes_written, self.wire.taken + size)
        self.accepted_at.append((self.world.now_s, self.accepted))

    @property
    def accepted(self) -> int:
        """Tokens that the reader has received completely."""
        return max(tokens for at, tokens in self._written if at <= self.wire.taken)

    def accepted_by(self, at_s: float) -> int:
        return max((tokens for then_s, tokens in self.accepted_at if then_s <= at_s), default=0)

    @property
    def noted(self) -> int:
        usage = self.world.noted.get(self.name)
        assert usage is None or usage.total_in == PROMPT
        return 0 if usage is None else usage.out


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 40), st.integers(0, 5)),
        st.tuples(st.just("begin"), st.integers(1, 40), st.integers(0, 5)),
        st.tuples(st.just("take"), st.integers(1, 900), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 9, 10, 11, 120, 200, 251]), st.just(0)),
        st.tuples(st.just("close"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


FLUSH_INTERVALS_S = st.sampled_from([PROGRESS_FLUSH_S, PROGRESS_FLUSH_REMOTE_S])


@given(steps=STEPS, is_read_at_once=st.booleans(), flush_s=FLUSH_INTERVALS_S)
def test_note_never_exceeds_delivered_tokens(
    steps: list[tuple[str, int, int]], is_read_at_once: bool, flush_s: float
) -> None:
    """However tokens come, are held back, written and read. The note lags by at most a quarter of a
    second, and by less than one note's tokens while a write waits for its reader."""
    world = JournalWorld(flush_s)
    with ExitStack() as stack:
        stream = JournalStream(world, stack)
        is_begun = False
        for step, number, held in steps:
            match step:
                case "write" | "begin" if not stream.wire.is_closed:
                    if is_begun:
                        stream.end(taken=is_read_at_once)
                    stream.begin(number, held=held)
                    is_begun = step == "begin"
                    if not is_begun:
                        stream.end(taken=is_read_at_once)
                case "take" if not stream.wire.is_closed:
                    stream.take(number)
                case "wait":
                    world.advance(number / 1000)
                case "close":
                    stream.wire.is_closed = True
                case _:
                    pass  # the transport is closed

            assert stream.noted <= stream.accepted
            if not stream.wire.is_closed:
                due = stream.accepted_by(world.now_s - PROMISED_S)
                assert stream.noted >= due - (PROGRESS_TOKENS - 1 if is_begun else 0)
        end = stream.noted
    world.advance(10)

    assert stream.noted == end, "a closed stream is noted no more"
    assert not world.calls, "a timer is left"


@given(
    pauses_ms=st.lists(st.sampled_from([3, 5, 10, 19, 21, 100, 260]), max_size=200),
    flush_s=FLUSH_INTERVALS_S,
)
def test_note_lags_by_less_than_sixteen_tokens(pauses_ms: list[int], flush_s: float) -> None:
    """One token at a time, to a reader that keeps up (notes to a server take twice as long, for
    streams half as fast): noted before the sixteenth token and within a quarter of a second, which
    leaves time for the disk."""
    world = JournalWorld(flush_s)
    with ExitStack() as stack:
        stream = JournalStream(world, stack)
        for pause_ms in pauses_ms:
            stream.write()
            missing = stream.accepted - stream.noted
            world.advance(pause_ms / 1000 * (flush_s / PROGRESS_FLUSH_S))

            assert 0 <= missing < PROMISED_TOKENS
            assert stream.noted >= stream.accepted_by(world.now_s - PROMISED_S)


def test_bytes_in_transport_are_not_noted() -> None:
    """They die with the process. A timer notes them once they have left, if no write follows."""
    world = JournalWorld()
    with ExitStack() as stack:
        stream = JournalStream(world, stack)
        for _ in range(PROGRESS_TOKENS + 3):
            stream.write(taken=False)
        world.advance(1)
        before = stream.noted
        stream.take(100 * PROGRESS_TOKENS)
        world.advance(PROGRESS_INTERVAL_S)

    assert (before, stream.noted) == (0, PROGRESS_TOKENS)


def test_closing_transport_notes_nothing() -> None:
    """It drops its buffer, which then looks as if all bytes had left."""
    world = JournalWorld()
    with ExitStack() as stack:
        stream = JournalStream(world, stack)
        for _ in range(20):
            stream.write(taken=False)
        stream.wire.is_closed = True
        world.advance(1)

    assert stream.noted == 0


def test_unwritten_deltas_are_not_noted() -> None:
    """The last deltas wait for the ledger before they are written."""
    world = JournalWorld()
    with ExitStack() as stack:
        stream = JournalStream(world, stack)
        stream.write(3)
        world.advance(PROGRESS_INTERVAL_S)
        stream.begin(9)
        world.advance(1)

    assert stream.noted == 3


@each_row("flush_s", [PROGRESS_FLUSH_S, PROGRESS_FLUSH_REMOTE_S])
@each_row("streams", [1, 50])
def test_notes_of_many_streams_share_one_commit(streams: int, flush_s: float) -> None:
    world = JournalWorld(flush_s)
    with ExitStack() as stack:
        many = [JournalStream(world, stack, str(number)) for number in range(streams)]
        for _ in range(PROGRESS_TOKENS):
            for stream in many:
                stream.write()
        world.advance(flush_s - 0.001)
        before = world.notes
        world.advance(0.001)

    assert (before, world.notes) == (0, 1)
    assert [stream.noted for stream in many] == [PROGRESS_TOKENS] * streams


STREAMS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True},
    "/v1/completions": {"prompt": "hi", "ignore_eos": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_notes_running_streams_of_every_dialect(gateway: GatewayFixture, path: str) -> None:
    """In the hold, which goes with the entry."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": gateway.model, "stream": True, limit: 40, **STREAMS[path]}

    def noted() -> TokenCounts:
        rows = gateway.store.query("select progress from holds")
        blob = rows[0][0] if rows else None
        return msgspec.msgpack.decode(blob, type=TokenCounts) if blob else TokenCounts()

    gateway.runner.hold_after(20)
    async with gateway.session.post(
        gateway.url + path, json=body, headers=gateway.headers()
    ) as answer:
        await gateway.until(lambda: noted().output_tokens >= 2 * PROGRESS_TOKENS)
        found = noted()
        gateway.runner.release()
        text = await answer.text()

    assert answer.status == 200, text
    assert found.output_tokens <= 20
    assert found.fresh_tokens + sum(found.read.values()) + sum(found.write.values()) > 0
    await gateway.check_quiet()
