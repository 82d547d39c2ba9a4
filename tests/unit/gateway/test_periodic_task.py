"""A periodic task survives its work's failures, wakes early and ends when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.periodic_task import FAILED_AGAIN_S, PeriodicTask
from tests.fakes import FakeClock

NEVER_S = 3_600.0


class Work:
    """Work that counts its rounds, fails where told, and says when a round has ended."""

    def __init__(self, fails: Callable[[int], bool] = lambda round_: False) -> None:
        self.rounds = 0
        self.has_ended = asyncio.Event()
        self._fails = fails

    async def __call__(self) -> None:
        self.rounds += 1
        self.has_ended.set()
        if self._fails(self.rounds):
            raise ZeroDivisionError("the planted prompt")

    async def next_round(self) -> None:
        """Wait for the end of a round."""
        await self.has_ended.wait()
        self.has_ended.clear()


class Log:
    """Log lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def __call__(self, event: str, facts: dict[str, object]) -> None:
        self.lines.append((event, facts))


def made(
    work: Work, log: Log, *, pause_s: float = NEVER_S, at_once: bool = True
) -> tuple[PeriodicTask, FakeClock]:
    """Return a task and its clock."""
    clock = FakeClock()
    return PeriodicTask("t", work, pause_s, log, clock, begins_at_once=at_once), clock


async def test_rounds_follow_each_other_after_the_pause() -> None:
    """The pause of no time yields to the loop."""
    work = Work()
    task, _ = made(work, Log(), pause_s=0.0, at_once=False)
    task.start()
    for _ in range(3):
        await work.next_round()
    await task.close()
    ended = work.rounds
    await asyncio.sleep(0)

    assert work.rounds == ended >= 3


async def test_a_failed_round_is_logged_with_its_place_and_tried_again() -> None:
    """Without the error's message, which may quote a prompt; once a minute while it lasts."""
    log = Log()
    work = Work(lambda round_: round_ != 5)
    task, clock = made(work, log)
    task.start()
    told = []
    for advance_s in (0.0, FAILED_AGAIN_S - 1, 1.0, 0.0, 0.0, 0.0):
        await work.next_round()
        told.append(len(log.lines))
        clock.advance(advance_s)
        task.wake()
    await task.close()

    assert told == [1, 1, 1, 2, 2, 3]
    event, facts = log.lines[0]
    assert (event, facts["task"], facts["error"]) == ("background_failed", "t", "ZeroDivisionError")
    assert "test_periodic_task.py" in str(facts["frames"])
    assert "planted" not in str(log.lines)


async def test_wake_ends_the_pause_and_is_not_lost_during_a_round() -> None:
    """A wake that comes while the work runs begins another round."""
    log, begun, go = Log(), asyncio.Event(), asyncio.Event()
    rounds = 0

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        begun.set()
        await go.wait()

    task = PeriodicTask("t", work, NEVER_S, log, FakeClock(), begins_at_once=True)
    task.start()
    await begun.wait()
    begun.clear()
    task.wake()
    go.set()
    await begun.wait()
    await task.close()

    assert rounds == 2


async def test_close_waits_for_the_round_that_runs() -> None:
    """Its thread could not be cancelled; no further round begins."""
    begun, go, ended = asyncio.Event(), asyncio.Event(), 0

    async def work() -> None:
        nonlocal ended
        begun.set()
        await go.wait()
        ended += 1

    task = PeriodicTask("t", work, 0.0, Log(), FakeClock(), begins_at_once=True)
    task.start()
    await begun.wait()
    closing = asyncio.create_task(task.close())
    for _ in range(5):
        await asyncio.sleep(0)
    was_done = closing.done()
    go.set()
    await closing

    assert (was_done, ended) == (False, 1)


async def test_close_without_a_wait_cancels_the_round_and_may_be_repeated() -> None:
    """Also before the start."""
    begun, cancelled = asyncio.Event(), False

    async def work() -> None:
        nonlocal cancelled
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled = True

    task = PeriodicTask("t", work, NEVER_S, Log(), FakeClock(), begins_at_once=True)
    await task.close()
    task.start()
    await begun.wait()
    await task.close(0)
    await task.close()

    assert cancelled
