"""`Outbox`: bounded, held and released."""

from __future__ import annotations

import threading

from engine.server.outbox import OUTBOX_STEPS_MAX, Outbox

DEADLINE_S = 60.0


class FillingThread:
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
        """Wait until that many more steps were put."""
        for _ in range(steps):
            assert self.put.acquire(timeout=DEADLINE_S)


def test_full_outbox_blocks_the_engine_until_it_is_read() -> None:
    """A gateway that does not read costs time, not memory."""
    wakes: list[int] = []
    outbox = Outbox(lambda: wakes.append(1))

    filler = FillingThread(outbox, OUTBOX_STEPS_MAX + 1)
    filler.wait_for(OUTBOX_STEPS_MAX)
    was_held = not filler.done.wait(0.05)
    first = outbox.take()
    filled = filler.done.wait(DEADLINE_S)

    assert was_held
    assert filled
    assert [step for step, _ in first + outbox.take()] == list(range(OUTBOX_STEPS_MAX + 1))
    assert len(wakes) == 2  # once per fill


def test_held_outbox_blocks_until_released() -> None:
    """The peer's socket may be the one that is full."""
    outbox = Outbox(lambda: None)
    outbox.hold()
    outbox.take()

    filler = FillingThread(outbox, 1)
    was_held = not filler.done.wait(0.05)
    outbox.release()

    assert was_held
    assert filler.done.wait(DEADLINE_S)


def test_closed_outbox_drops_messages() -> None:
    """A lost connection must not stop the engine for the others."""
    outbox = Outbox(lambda: None)
    outbox.hold()
    filler = FillingThread(outbox, 3 * OUTBOX_STEPS_MAX)

    outbox.close()

    assert filler.done.wait(DEADLINE_S)
    assert outbox.take() == []
