"""One request's events: joined while they wait, and one reader woken for them."""

from __future__ import annotations

import asyncio

import pytest

from engine.api import Cancel, Command, Finished, SampledToken, Started, Tokens, Usage
from engine.client.client import RequestStream, Wakeup


class Way:
    """A connection that goes nowhere."""

    def __init__(self) -> None:
        self.posted: list[Command] = []

    def post(self, command: Command) -> None:
        self.posted.append(command)

    def forget(self, request_id: str) -> None:
        self.posted.append(Cancel(request_id))


def tokens(*ids: int, index: int = 0) -> Tokens:
    return Tokens("a", index, tuple(SampledToken(i) for i in ids))


async def test_tokens_that_wait_are_one_event_and_samples_keep_apart() -> None:
    """A slow reader gets all of them, and a stream holds no more than its own output."""
    stream = RequestStream("a", Way())
    for event in (tokens(1), tokens(7, index=1), tokens(2, 3), tokens(4)):
        stream.push(event)

    assert stream.take() == [tokens(1, 2, 3, 4), tokens(7, index=1)]
    assert stream.take() == []


async def test_what_was_read_is_not_joined_to() -> None:
    """Tokens that came after a read are a new event, whole as they came."""
    stream = RequestStream("a", Way())
    stream.push(tokens(1))
    first = stream.take()
    stream.push(tokens(2))

    assert [first, stream.take()] == [[tokens(1)], [tokens(2)]]


async def test_a_lost_engine_ends_a_stream_with_what_was_seen() -> None:
    """Usage of an answer that broke off is what came of it, whoever has read it."""
    stream = RequestStream("a", Way())
    stream.push(Started("a", 9, 4))
    stream.push(tokens(1, 2))
    stream.push(tokens(3))
    stream.fail("engine_died", "gone")
    end = stream.take()[-1]

    seen = Usage(prompt_tokens=9, cached_tokens=4, computed_tokens=5, output_tokens=3)
    assert end == Finished("a", "failed", seen, "engine_died", "gone")
    assert stream.is_over


async def test_whoever_cancels_hears_the_end_however_long_a_step_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has counted what it computed: an entry without it would be apart from that."""
    loop, way = asyncio.get_running_loop(), Way()
    stream = RequestStream("a", way)
    stream.push(Started("a", 9, 4))
    cancelling = asyncio.create_task(stream.cancel())
    await asyncio.sleep(0)
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + 50.0)
    for _ in range(5):
        await asyncio.sleep(0)
    end = Finished("a", "cancelled", Usage(prompt_tokens=9, cached_tokens=4, computed_tokens=5))
    stream.push(end)

    assert await cancelling == end
    assert way.posted == [Cancel("a")]


async def test_one_bell_wakes_a_reader_of_several_streams() -> None:
    """An answer to several prompts is read by one coroutine, whichever of them has something."""
    bell = Wakeup()
    streams = [RequestStream(name, Way()) for name in "ab"]
    for stream in streams:
        stream.bell = bell
    waiting = asyncio.ensure_future(bell.wait())
    await asyncio.sleep(0)
    streams[1].push(tokens(5))

    assert await waiting is True
    assert [stream.take() for stream in streams] == [[], [tokens(5)]]


async def test_a_bell_tells_silence_from_news() -> None:
    """Silence is when keep-alives are due."""
    bell = Wakeup(idle_s=0.001)
    silence = await bell.wait()
    waiting = asyncio.ensure_future(bell.wait())
    await asyncio.sleep(0)
    bell.ring()
    bell.ring()  # a second one while the first is on its way
    news = await waiting
    bell.close()

    assert (silence, news) == (False, True)


async def test_a_bell_has_one_timer_however_often_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A timer per token was a tenth of what a stream took."""
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def counted(*arguments: object) -> asyncio.TimerHandle:
        timers.append(arguments)
        return call_later(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_later", counted)
    bell = Wakeup(idle_s=60.0)
    for _ in range(20):
        waiting = asyncio.ensure_future(bell.wait())
        await asyncio.sleep(0)
        bell.ring()
        await waiting
    bell.close()

    assert len(timers) == 1


async def test_a_cancelled_wait_leaves_the_bell_usable() -> None:
    """Leaving early and then waiting for the cancelled request's end is the usual way out."""
    bell = Wakeup()
    waiting = asyncio.ensure_future(bell.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    bell.ring()
    again = asyncio.ensure_future(bell.wait())
    await asyncio.sleep(0)
    bell.ring()

    assert await again is True
