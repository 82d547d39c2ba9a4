"""Host memory that outlives its engine: who takes over what, and when slots may be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat

import pytest

from engine.client.host_memory import SHORT_LIVES_MAX, STEADY_S, HostMemoryFiles
from engine.moves import SlotLayout
from engine.storage.memory import kept_memory
from engine.storage.memory.kept_memory import KeptMemory
from engine.storage.memory.slot_table import SlotEntry

SLOTS, SLOT_BYTES = 4, 3 * 4096 + 100
ENTRY = SlotEntry(7, 0, b"namespace", b"payer", (1, 2), b"sixteen bytes it")
HOLDER = """
import sys
from engine.storage.memory.arena import HostArena
from engine.moves import SlotLayout
layout = SlotLayout.uniform(int(sys.argv[2]), int(sys.argv[3]))
arena = HostArena(int(sys.argv[1]), layout)
arena.lock_until_exit(int(sys.argv[4]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def files() -> Iterator[HostMemoryFiles]:
    """Return the gateway's files."""
    made = HostMemoryFiles()
    yield made
    made.close()


@contextmanager
def engine(files: HostMemoryFiles, shape: str = "m", slots: int = SLOTS) -> Iterator[KeptMemory]:
    """Have the memory as the next engine does, until it dies."""
    arena_fd, table_fd = map(os.dup, files.begin_life())
    kept = KeptMemory(arena_fd, table_fd, SlotLayout.uniform(slots, SLOT_BYTES), shape)
    yield kept
    kept.close()


def test_the_next_engine_finds_entries_and_bytes(files: HostMemoryFiles) -> None:
    """The first one finds nothing, and is the first."""
    with engine(files) as first:
        assert (first.is_new, first.generation) == (True, 1)
        first.table.write(2, ENTRY)
        first.arena.view(2, SLOT_BYTES)[:] = b"k" * SLOT_BYTES
    with engine(files) as second:
        assert (second.is_new, second.generation) == (False, 2)
        assert second.table.read(2) == ENTRY
        assert bytes(second.arena.view(2, SLOT_BYTES)) == b"k" * SLOT_BYTES


@pytest.mark.parametrize(("shape", "slots"), [("another model", SLOTS), ("m", 3)])
def test_an_engine_of_another_shape_finds_nothing(
    files: HostMemoryFiles, shape: str, slots: int
) -> None:
    """Neither entry nor byte; engines are counted on, since their processes may still live."""
    with engine(files) as first:
        first.table.write(2, ENTRY)
        first.arena.view(2, SLOT_BYTES)[:] = b"k" * SLOT_BYTES
    with engine(files, shape, slots) as second:
        assert (second.is_new, second.generation) == (True, 2)
        assert second.table.state(2) == "free"
        assert not any(second.arena.view(2, SLOT_BYTES))


def test_slots_wait_for_the_process_of_the_engine_before(files: HostMemoryFiles) -> None:
    """A storage process that outlives its engine may still read a record into a slot."""
    with engine(files) as first:
        pass
    with engine(files) as second:
        command = (sys.executable, "-c", HOLDER, str(second.arena.fd), str(SLOTS), str(SLOT_BYTES))
        with subprocess.Popen(
            (*command, str(first.generation)),
            pass_fds=(second.arena.fd,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            assert not second.is_alone()
            second.generation, own = 1, second.generation
            assert second.is_alone(), "its own processes do not count"
            second.generation = own
            holder.send_signal(signal.SIGKILL)
        assert second.is_alone()


def test_wiping_leaves_the_neighbours(files: HostMemoryFiles) -> None:
    """Slots need not begin with a page."""
    with engine(files) as kept:
        for slot in range(SLOTS):
            kept.arena.view(slot, SLOT_BYTES)[:] = bytes([slot + 1]) * SLOT_BYTES
        kept.arena.wipe(1, SLOT_BYTES)

        assert not any(kept.arena.view(1, SLOT_BYTES))
        for slot in (0, 2, 3):
            assert bytes(kept.arena.view(slot, SLOT_BYTES)) == bytes([slot + 1]) * SLOT_BYTES
        with pytest.raises(IndexError):
            kept.arena.wipe(SLOTS, SLOT_BYTES)


def test_engines_that_end_soon_cost_the_files(files: HostMemoryFiles) -> None:
    """What lies there may be why; one that served for a while begins the count anew."""
    with engine(files) as first:
        first.table.write(2, ENTRY)
    files.end_life(STEADY_S)
    for _ in range(SHORT_LIVES_MAX):
        with engine(files) as kept:
            assert kept.table.read(2) == ENTRY
        files.end_life(STEADY_S / 2)
    with engine(files) as fresh:
        assert fresh.is_new
        assert fresh.generation == 1


def test_memory_that_cannot_be_had_closes_both_files(files: HostMemoryFiles) -> None:
    """The engine then serves without levels."""
    arena_fd, table_fd = map(os.dup, files.fds)
    with pytest.raises(ValueError, match="room for a slot"):
        KeptMemory(arena_fd, table_fd, SlotLayout.uniform(0, SLOT_BYTES), "m")
    for fd in (arena_fd, table_fd):
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


class PausingTime:
    """The clocks of a machine on which reading one takes as long as `pauses` says."""

    CLOCK_BOOTTIME = 7
    AHEAD_S = 500.0

    def __init__(self, pauses: Iterator[float]) -> None:
        self._pauses, self._now_s = pauses, 100.0

    def monotonic(self) -> float:
        self._now_s += next(self._pauses)
        return self._now_s

    def clock_gettime(self, clock: int) -> float:
        return self.monotonic() + self.AHEAD_S


def test_the_boot_clock_is_read_beside_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause between two readings is no time by which one is ahead: notes would seem too long."""
    pauses = chain((0.0, 0.25, 0.0, 0.0, 0.0, 0.5), repeat(0.0))
    monkeypatch.setattr(kept_memory, "time", PausingTime(pauses))
    assert kept_memory.boot_later_s() == PausingTime.AHEAD_S
