"""`Outbox`: bounded, held and released."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from engine.server import outbox
from engine.server.outbox import OUTBOX_STEPS_MAX, Outbox
from tests.fakes import FakeClock


class WouldWait(Exception):
    """Raised in place of a wait for room."""


class RaisingEvent(threading.Event):
    """An event for which nothing waits: a wait that would take time raises."""

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            raise WouldWait
        return True


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    without_waits = SimpleNamespace(Event=RaisingEvent, Lock=threading.Lock)
    monkeypatch.setattr(outbox, "threading", without_waits)


def fill(box: Outbox, steps: range) -> None:
    for step in steps:
        box.put((step, ()))


def test_full_outbox_blocks_the_engine_until_it_is_read() -> None:
    """A gateway that does not read costs time, not memory."""
    wakes: list[int] = []
    box = Outbox(lambda: wakes.append(1))

    fill(box, range(OUTBOX_STEPS_MAX))
    with pytest.raises(WouldWait):
        fill(box, range(1))
    first = box.take()
    fill(box, range(OUTBOX_STEPS_MAX, OUTBOX_STEPS_MAX + 1))

    assert [step for step, _ in first + box.take()] == list(range(OUTBOX_STEPS_MAX + 1))
    assert len(wakes) == 2  # once per fill


def test_held_outbox_blocks_until_released() -> None:
    """The peer's socket may be the one that is full."""
    box = Outbox(lambda: None)
    box.hold()
    box.take()

    with pytest.raises(WouldWait):
        fill(box, range(1))
    box.release()
    fill(box, range(1))

    assert box.take() == [(0, ())]


def test_an_outbox_with_patience_never_stops_the_engine() -> None:
    """One of several gateways that does not read is given up after a second, and not before; room
    in between begins the second anew."""
    clock, ends = FakeClock(), list[float]()
    box = Outbox(lambda: None, patience_s=1.0, give_up=lambda: ends.append(clock()), clock=clock)
    for is_read in (True, False):
        fill(box, range(2 * OUTBOX_STEPS_MAX))
        clock.advance(0.9)
        fill(box, range(1))
        if is_read:
            assert len(box.take()) == 2 * OUTBOX_STEPS_MAX + 1
    box.hold()
    clock.advance(0.2)
    fill(box, range(2))

    assert ends == [2.0]
    assert box.take() == []


def test_closed_outbox_drops_messages() -> None:
    """A lost connection must not stop the engine for the others."""
    box = Outbox(lambda: None)
    box.hold()

    box.close()
    fill(box, range(3 * OUTBOX_STEPS_MAX))

    assert box.take() == []
