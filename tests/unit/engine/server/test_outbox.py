"""What waits between the engine's thread and whoever reads: bounded, held, and let go."""

from __future__ import annotations

import threading

from engine.server.outbox import OUTBOX_STEPS_MAX, Outbox

DEADLINE_S = 60.0


class Filler:
    """A thread that puts so many steps into an outbox."""

    def __init__(self, outbox: Outbox, steps: int) -> None:
        self.done = threading.Event()
        self.put = threading.Semaphore(0)

        def fill() -> None:
            for step in range(steps):
                outbox.put((step, ()))
                self.put.release()
            self.done.set()

        threading.Thread(target=fill, daemon=True).start()

    def wait_for(self, steps: int) -> None:
        """Until that many more have found room."""
        for _ in range(steps):
            assert self.put.acquire(timeout=DEADLINE_S)


def test_a_full_outbox_holds_the_engine_until_it_is_read() -> None:
    """A gateway that does not read costs patience, not memory."""
    wakes: list[int] = []
    outbox = Outbox(lambda: wakes.append(1))

    filler = Filler(outbox, OUTBOX_STEPS_MAX + 1)
    filler.wait_for(OUTBOX_STEPS_MAX)
    was_held = not filler.done.wait(0.05)
    first = outbox.take()
    filled = filler.done.wait(DEADLINE_S)

    assert was_held
    assert filled
    assert [step for step, _ in first + outbox.take()] == list(range(OUTBOX_STEPS_MAX + 1))
    assert len(wakes) == 2  # once per filling


def test_a_held_outbox_stays_full_until_released() -> None:
    """The peer's socket may be the one that is behind."""
    outbox = Outbox(lambda: None)
    outbox.hold()
    outbox.take()

    filler = Filler(outbox, 1)
    was_held = not filler.done.wait(0.05)
    outbox.release()

    assert was_held
    assert filler.done.wait(DEADLINE_S)


def test_a_closed_outbox_takes_everything_and_keeps_nothing() -> None:
    """A connection that is gone must not stop the engine for the others."""
    outbox = Outbox(lambda: None)
    outbox.hold()
    filler = Filler(outbox, 3 * OUTBOX_STEPS_MAX)

    outbox.close()

    assert filler.done.wait(DEADLINE_S)
    assert outbox.take() == []
