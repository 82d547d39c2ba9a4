"""Between the engine's thread and whoever carries its answers away: bounded, in order.

It knows no socket and nothing of what is said. `server` and `local` have one for each connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from engine.api import Event, Reply

OUTBOX_STEPS_MAX: Final = 64
"""Steps a connection may have unread before the engine waits for it."""

Answers = tuple[int, tuple[Event | Reply, ...]]
"""A step, and what it had to say to one connection."""


class Outbox:
    """Between the engine's thread, which fills it, and a reader's, which empties it. Bounded.

    The reader is woken once per filling, not once per step: a fast engine would otherwise drown a
    loop that has to fight it for the interpreter.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake`: called in the engine's thread when there is something after nothing."""
        self._wake = wake
        self._lock = threading.Lock()
        self._answers: list[Answers] = []
        self._has_room = threading.Event()
        self._has_room.set()
        self._is_held = False
        self._is_closed = False

    def put(self, answers: Answers) -> None:
        """Add one step's answers; waits while there is no room. Closed: they are nobody's."""
        self._has_room.wait()
        with self._lock:
            if self._is_closed:
                return
            is_first = not self._answers
            self._answers.append(answers)
            if len(self._answers) >= OUTBOX_STEPS_MAX:
                self._has_room.clear()
        if is_first:
            self._wake()

    def take(self) -> list[Answers]:
        """Everything there is, in order; makes room unless held."""
        with self._lock:
            answers, self._answers = self._answers, []
            if not self._is_held:
                self._has_room.set()
        return answers

    def hold(self) -> None:
        """No room until `release`, however empty: whoever reads is behind further on."""
        with self._lock:
            self._is_held = not self._is_closed
            if self._is_held:
                self._has_room.clear()

    def release(self) -> None:
        """There is room again."""
        with self._lock:
            self._is_held = False
            self._has_room.set()

    def close(self) -> None:
        """Nobody reads any more; nobody waits either."""
        with self._lock:
            self._is_closed = True
            self._is_held = False
            self._answers.clear()
            self._has_room.set()
