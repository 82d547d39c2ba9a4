"""`RequestStream` joins waiting tokens; `Wakeup` wakes one reader of several streams."""

from __future__ import annotations

import asyncio

import pytest

from engine.api import (
    Cancel,
    Command,
    Finished,
    PromptLogprobs,
    SampledToken,
    Started,
    Tokens,
    Usage,
)
from engine.client.request_stream import RequestStream, Wakeup


class FakeTransport:
    """A connection that sends nothing."""

    def __init__(self) -> None:
        self.posted: list[Command] = []

    def post(self, command: Command) -> None:
        self.posted.append(command)

    def forget(self, request_id: str) -> None:
        self.posted.append(Cancel(request_id))


def tokens(*ids: int, index: int = 0) -> Tokens:
    return Tokens("a", index, tuple(SampledToken(i) for i in ids))


async def test_joins_waiting_tokens_of_each_sample() -> None:
    """A slow reader gets all tokens, and a stream holds no more than its own output."""
    stream = RequestStream("a", FakeTransport())
    for event in (tokens(1), tokens(7, index=1), tokens(2, 3), tokens(4)):
        stream.push(event)

    assert stream.take() == [tokens(1, 2, 3, 4), tokens(7, index=1)]
    assert stream.take() == []


async def test_tokens_after_a_read_are_a_new_event() -> None:
    stream = RequestStream("a", FakeTransport())
    stream.push(tokens(1))
    first = stream.take()
    stream.push(tokens(2))

    assert [first, stream.take()] == [[tokens(1)], [tokens(2)]]


async def test_joins_the_pieces_of_prompt_logprobs() -> None:
    """The engine sends them slice by slice; the reader gets them once, whole."""
    stream = RequestStream("a", FakeTransport())
    entries = tuple(SampledToken(i) for i in range(5))
    stream.push(Started("a", 5, 0))
    stream.push(PromptLogprobs("a", entries[:3]))
    before = stream.take()
    stream.push(PromptLogprobs("a", entries[3:]))

    assert before == [Started("a", 5, 0)]
    assert stream.take() == [PromptLogprobs("a", entries)]


@pytest.mark.parametrize("lost", ["output", "prompt logprobs"])
async def test_done_stream_that_lost_a_part_fails(lost: str) -> None:
    """An answer with a hole must not look whole."""
    stream = RequestStream("a", FakeTransport())
    stream.push(Started("a", 5, 0))
    if lost == "prompt logprobs":
        stream.push(PromptLogprobs("a", (SampledToken(1),)))
    stream.push(tokens(1, 2))
    count = 3 if lost == "output" else 2
    stream.push(Finished("a", "done", Usage(prompt_tokens=5, output_tokens=count)))

    end = stream.take()[-1]

    assert isinstance(end, Finished)
    assert (end.ending, end.code, end.usage.output_tokens) == ("failed", "answer_lost", 2)


async def test_lost_engine_ends_a_stream_with_the_usage_seen() -> None:
    """Whether the reader has read the events or not."""
    stream = RequestStream("a", FakeTransport())
    stream.push(Started("a", 9, 4))
    stream.push(tokens(1, 2))
    stream.push(tokens(3))
    stream.fail("engine_died", "gone")
    end = stream.take()[-1]

    seen = Usage(prompt_tokens=9, cached_tokens=4, computed_tokens=5, output_tokens=3)
    assert end == Finished("a", "failed", seen, "engine_died", "gone")
    assert stream.is_over


async def test_cancel_waits_for_usage_however_long_a_step_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has counted what it computed: an entry without it would not reconcile."""
    loop, way = asyncio.get_running_loop(), FakeTransport()
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


async def test_one_wakeup_serves_several_streams() -> None:
    """One coroutine reads the answer to several prompts."""
    wakeup = Wakeup()
    streams = [RequestStream(name, FakeTransport()) for name in "ab"]
    for stream in streams:
        stream.wakeup = wakeup
    waiting = asyncio.ensure_future(wakeup.wait())
    await asyncio.sleep(0)
    streams[1].push(tokens(5))

    assert await waiting is True
    assert [stream.take() for stream in streams] == [[], [tokens(5)]]


async def test_wakeup_tells_silence_from_events() -> None:
    """Silence is when keep-alives are due."""
    wakeup = Wakeup(idle_s=0.001)
    silence = await wakeup.wait()
    waiting = asyncio.ensure_future(wakeup.wait())
    await asyncio.sleep(0)
    wakeup.notify()
    wakeup.notify()  # a second one before the reader ran
    news = await waiting
    wakeup.close()

    assert (silence, news) == (False, True)


async def test_wakeup_sets_one_timer_for_many_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A timer per token was a tenth of a stream's processor time."""
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def counted(*arguments: object) -> asyncio.TimerHandle:
        timers.append(arguments)
        return call_later(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_later", counted)
    wakeup = Wakeup(idle_s=60.0)
    for _ in range(20):
        waiting = asyncio.ensure_future(wakeup.wait())
        await asyncio.sleep(0)
        wakeup.notify()
        await waiting
    wakeup.close()

    assert len(timers) < 10, "twenty waits set a timer each"


async def test_wakeup_is_usable_after_a_cancelled_wait() -> None:
    """A reader that leaves early then waits for the end of the cancelled request."""
    wakeup = Wakeup()
    waiting = asyncio.ensure_future(wakeup.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    wakeup.notify()
    again = asyncio.ensure_future(wakeup.wait())
    await asyncio.sleep(0)
    wakeup.notify()

    assert await again is True
