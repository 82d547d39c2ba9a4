"""Moves that wait for a transfer engine's workers, and outcomes that wait to be polled.

It copies nothing. One thread submits, polls and closes; the workers take moves and end them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal

from engine.moves import Move, Moved
from kernels.reference_kv import UnpackableError

Kind = Literal["offload", "load"]


class MoveQueue:
    """Moves in the order they were submitted, and each one's outcome.

    A move is taken when all earlier ones that share its slot or its block have ended, on any
    worker, so it sees what they wrote. Each move has one outcome.
    """

    def __init__(self, move_bytes: int, bytes_max: int, *, is_by_kind: bool = False) -> None:
        """`move_bytes`: what a move counts for in each KV group that it copies; `bytes_max`: most
        bytes of moves whose outcome was not polled. `is_by_kind`: offloads and loads have a line
        each, with a worker each.
        """
        self._move_bytes = move_bytes
        self._bytes_max = bytes_max
        self._bytes = 0
        one = deque[Move]()
        self._waiting: dict[Kind, deque[Move]] = {
            "offload": one,
            "load": deque() if is_by_kind else one,
        }
        self._users: dict[int, deque[Move]] = {}
        self._outcomes: deque[tuple[Moved, int]] = deque()
        self._is_closed = False
        lock = threading.Lock()
        self._lock = lock
        own = threading.Condition(lock)
        self._turns: dict[Kind, threading.Condition] = {
            "offload": own,
            "load": threading.Condition(lock) if is_by_kind else own,
        }

    def submit(self, moves: Sequence[Move]) -> None:
        """Queue moves, in order. Those that there is no room for have failed. Never blocks."""
        with self._lock:
            for move in moves:
                size = self._bytes_of(move)
                if self._is_closed or self._bytes + size > self._bytes_max:
                    self._outcomes.append((Moved(move.move_id, is_done=False), 0))
                    continue
                self._bytes += size
                self._waiting[move.kind].append(move)
                for key in _keys(move):
                    self._users.setdefault(key, deque()).append(move)
            self._wake()

    def poll(self) -> list[Moved]:
        """Return the outcomes since the last call. Never blocks."""
        with self._lock:
            found = list(self._outcomes)
            self._outcomes.clear()
            self._bytes -= sum(size for _, size in found)
        return [moved for moved, _ in found]

    def take(self, line: Kind = "offload", *, is_waiting: bool = True) -> Move | None:
        """Return the next move of a line that may begin; None if there is none.

        `line`: the moves of this kind, or all of them where there is one line. `is_waiting`: wait
        for one; None then says that the queue is closed and has no more.
        """
        with self._lock:
            waiting = self._waiting[line]
            while not (waiting and self._may_begin(waiting[0])):
                if not is_waiting or self._is_closed:
                    return None
                self._turns[line].wait()
            return waiting.popleft()

    def end(self, outcomes: Sequence[tuple[Move, Moved]]) -> None:
        """Note the outcomes of moves that were taken."""
        with self._lock:
            for move, moved in outcomes:
                self._outcomes.append((moved, self._bytes_of(move)))
                for key in _keys(move):
                    users = self._users.get(key)
                    if users is not None:
                        users.popleft()  # it was the first when it was taken
                        if not users:
                            del self._users[key]
            self._wake()

    def close(self) -> None:
        """Fail the moves that no worker has taken, and let the workers end. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            for waiting in self._waiting.values():
                for move in waiting:
                    failed = Moved(move.move_id, is_done=False)
                    self._outcomes.append((failed, self._bytes_of(move)))
                waiting.clear()
            self._users.clear()  # of moves under way, too: nothing follows them
            for turn in self._turns.values():
                turn.notify_all()

    def _wake(self) -> None:
        """Wake the workers of lines that have moves: one that has none would take the GIL from the
        others."""
        for kind, waiting in self._waiting.items():
            if waiting:
                self._turns[kind].notify_all()

    def _bytes_of(self, move: Move) -> int:
        return self._move_bytes * (1 + len(move.beside))

    def _may_begin(self, move: Move) -> bool:
        return all(self._users[key][0] is move for key in _keys(move))


def _keys(move: Move) -> tuple[int, ...]:
    """Return what a move uses: its blocks, and its slot, counted down from -1. Slots of two sizes
    that overlap are never in use at once: their slab has one size."""
    slot = -1 - move.slot
    if not move.beside:
        return slot, move.block
    return (slot, move.block, *(block for block in move.beside if block >= 0))


class DamagedSlotError(ValueError):
    """A slot's bytes are not those that were written to it."""


def failure_of(move: Move, error: Exception) -> Moved:
    """Return the outcome of a move that an error has ended."""
    return Moved(
        move.move_id,
        is_done=False,
        is_unpackable=isinstance(error, UnpackableError),
        is_damaged=isinstance(error, DamagedSlotError),
    )


def verify(move: Move, found: bytes) -> None:
    """Raise DamagedSlotError if the digest of a load's slot is not the one that it expects."""
    if move.check and found != move.check:
        raise DamagedSlotError(
            f"slot {move.slot} has digest {found.hex()}; expected {move.check.hex()}"
        )
