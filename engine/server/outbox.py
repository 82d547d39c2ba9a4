"""A bounded, ordered queue between the engine's thread and the reader of its messages.

The engine waits for the only reader of an engine that is embedded. It waits for none of several
gateways, which would stop the others: one that has no room for `patience_s` is given up. The module
knows no socket and no message. `engine.server.links` and `engine.server.embedded` have an outbox
for each connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from typing import Final

from engine.api import Clock
from engine.protocol import Messages

OUTBOX_STEPS_MAX: Final = 64
"""Steps that a connection may leave unread before it has no room for more."""

StepMessages = tuple[int, Messages]
"""A step's number, and its messages for one connection."""


class Outbox:
    """A bounded queue that the engine's thread fills and a reader empties.

    The reader is woken once when the empty queue gets a message, not once per step: a fast engine
    would otherwise compete with the reader's event loop for the interpreter.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        patience_s: float = inf,
        give_up: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`wake`: called in the engine's thread when the empty outbox gets a message. `patience_s`:
        how long it may have no room; without an end, `put` waits instead. `give_up`: called in the
        engine's thread once it had none for so long; the outbox is closed then."""
        self._wake, self._give_up = wake, give_up
        self._patience_s, self._clock = patience_s, clock
        self._full_since_s = inf
        self._lock = threading.Lock()
        self._pending: list[StepMessages] = []
        self._has_room = threading.Event()
        self._has_room.set()
        self._is_held = False
        self._is_closed = False

    def put(self, messages: StepMessages) -> None:
        """Add one step's messages. Waits while there is no room, if its patience has no end. A
        closed outbox drops them."""
        if self._patience_s == inf:
            self._has_room.wait()
        with self._lock:
            if self._is_closed:
                return
            is_overdue = self._clock() - self._full_since_s >= self._patience_s
            is_first = not self._pending
            self._pending.append(messages)
            if len(self._pending) >= OUTBOX_STEPS_MAX:
                self._mark_full()
        if is_overdue:
            self.close()
            self._give_up()
        elif is_first:
            self._wake()

    def take(self) -> list[StepMessages]:
        """Return all messages, in order; make room unless held."""
        with self._lock:
            messages, self._pending = self._pending, []
            if not self._is_held:
                self._mark_free()
        return messages

    def hold(self) -> None:
        """Have no room until `release`, even if the outbox is empty: the reader's own output is
        full."""
        with self._lock:
            self._is_held = not self._is_closed
            if self._is_held:
                self._mark_full()

    def release(self) -> None:
        """Have room again."""
        with self._lock:
            self._is_held = False
            self._mark_free()

    def close(self) -> None:
        """Drop all messages from now on, and wake a waiting `put`."""
        with self._lock:
            self._is_closed = True
            self._is_held = False
            self._pending.clear()
            self._mark_free()

    def _mark_full(self) -> None:
        if self._has_room.is_set():
            self._has_room.clear()
            self._full_since_s = self._clock()

    def _mark_free(self) -> None:
        self._has_room.set()
        self._full_since_s = inf
