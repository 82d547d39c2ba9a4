"""A bounded, ordered queue between the engine's thread and the reader of its messages.

It knows no socket and no message. `engine.server.server` and `engine.server.embedded` have one for
each connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from engine.protocol import Messages

OUTBOX_STEPS_MAX: Final = 64
"""Steps that a connection may leave unread before the engine waits for it."""

StepMessages = tuple[int, Messages]
"""A step's number, and its messages for one connection."""


class Outbox:
    """A bounded queue that the engine's thread fills and a reader empties.

    The reader is woken once when the empty queue gets a message, not once per step: a fast engine
    would otherwise compete with the reader's event loop for the interpreter.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake`: called in the engine's thread when the empty outbox gets a message."""
        self._wake = wake
        self._lock = threading.Lock()
        self._pending: list[StepMessages] = []
        self._has_room = threading.Event()
        self._has_room.set()
        self._is_held = False
        self._is_closed = False

    def put(self, messages: StepMessages) -> None:
        """Add one step's messages. Waits while there is no room. A closed outbox drops them."""
        self._has_room.wait()
        with self._lock:
            if self._is_closed:
                return
            is_first = not self._pending
            self._pending.append(messages)
            if len(self._pending) >= OUTBOX_STEPS_MAX:
                self._has_room.clear()
        if is_first:
            self._wake()

    def take(self) -> list[StepMessages]:
        """Return all messages, in order; make room unless held."""
        with self._lock:
            messages, self._pending = self._pending, []
            if not self._is_held:
                self._has_room.set()
        return messages

    def hold(self) -> None:
        """Make `put` wait until `release`, even if the outbox is empty: the reader's own output is
        full."""
        with self._lock:
            self._is_held = not self._is_closed
            if self._is_held:
                self._has_room.clear()

    def release(self) -> None:
        """Allow `put` again."""
        with self._lock:
            self._is_held = False
            self._has_room.set()

    def close(self) -> None:
        """Drop all messages from now on, and wake a waiting `put`."""
        with self._lock:
            self._is_closed = True
            self._is_held = False
            self._pending.clear()
            self._has_room.set()
