"""Slabs: files of equal places, laid out when they are made, so that a full disk shows then.

A slab's name says the bytes of its places and its number: `372736-000007.slab`. This module writes,
reads, syncs and wipes places and knows which are free; the index says what they hold. A place that
was given back is *dirty* until it was written anew or wiped, and is not free before its last reader
has ended. Only its own thread takes, holds and gives back places; `write`, `read`, `sync` and
`wipe` may run in any thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from engine.errors import InvariantViolation

FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE = 0x01, 0x02, 0x10
UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
ZEROS = bytes(2**20)
_NAME = re.compile(r"([0-9]{4,12})-([0-9]{6,9})\.slab\Z")


class Place(NamedTuple):
    """Where a record lies: the number of its slab, and its position there."""

    slab: int
    position: int


class DiskCalls:
    """The system calls on slabs; tests replace them by a disk that fails."""

    def __init__(self) -> None:
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def lay_out(self, fd: int, length: int) -> None:
        """Give a file its length and its room on the disk. Raises OSError."""
        os.posix_fallocate(fd, 0, length)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        """Write parts at an offset; return how many bytes the system took. Raises OSError."""
        return os.pwritev(fd, parts, offset)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read into a buffer; return how many bytes came. Raises OSError."""
        return os.preadv(fd, [buffer], offset)

    def sync(self, fd: int) -> None:
        """Wait until what was written is durable. Raises OSError."""
        os.fdatasync(fd)

    def erase(self, fd: int, offset: int, length: int) -> None:
        """Make a range read as zeros, by the cheapest way that the file system has. Raises
        OSError."""
        for mode in (FALLOC_ZERO_RANGE, FALLOC_PUNCH_HOLE):
            if self._fallocate(fd, mode | FALLOC_KEEP_SIZE, offset, length) == 0:
                return
            if ctypes.get_errno() not in UNSUPPORTED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for at in range(0, length, len(ZEROS)):
            part = ZEROS[: min(len(ZEROS), length - at)]
            write_all(self, fd, [part], offset + at)


def write_all(calls: DiskCalls, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all bytes, however few each call takes. Raises OSError."""
    total = sum(len(part) for part in parts)
    done = calls.write(fd, parts, offset)
    while done < total:
        rest = memoryview(b"".join(parts))[done:]  # rare: a call cut short
        wrote = calls.write(fd, [rest], offset + done)
        if wrote <= 0:
            raise OSError(errno.EIO, "the disk accepted no bytes of a write")
        done += wrote


class _Slab:
    """An open slab file."""

    __slots__ = ("dirty", "fd", "free", "number", "path", "place_bytes", "places", "retired")

    def __init__(self, path: Path, fd: int, number: int, place_bytes: int, length: int) -> None:
        self.path, self.fd, self.number = path, fd, number
        self.place_bytes = place_bytes
        self.places = length // place_bytes
        self.free: list[int] = []  # a heap: a slab is filled from its beginning
        self.retired: set[int] = set()  # neither free nor used any more
        self.dirty: set[int] = set()  # free or retired, and their old bytes are still there


class SlabFiles:
    """The slabs of a folder, in each of which all places have one size."""

    def __init__(self, folder: Path, slab_bytes: int, calls: DiskCalls) -> None:
        """Open what is there; every place counts as taken until `set_used`. Raises OSError.

        `slab_bytes`: most bytes of a new slab of more than one place.
        """
        self._folder, self._calls = folder, calls
        self._slab_bytes = slab_bytes
        self._slabs: dict[int, _Slab] = {}
        self._reading: Counter[Place] = Counter()
        self._deferred: set[Place] = set()  # given back while they are read
        self._bad: set[Place] = set()  # to be retired when they are given back
        self._wiping: set[Place] = set()
        self._made, self._listed = 0, -1  # slabs made, and of those that the folder names for good
        self._listing = threading.Lock()
        try:
            for path in sorted(folder.glob("*.slab")):
                if (match := _NAME.match(path.name)) is not None and path.is_file():
                    size, number = int(match[1]), int(match[2])
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    self._slabs[number] = _Slab(path, fd, number, size, os.fstat(fd).st_size)
        except BaseException:
            self.close()
            raise

    # -- places ---------------------------------------------------------------------------------

    @property
    def sizes(self) -> dict[int, int]:
        """The number of places of each slab."""
        return {number: slab.places for number, slab in self._slabs.items()}

    def set_used(self, number: int, used: Iterable[int]) -> None:
        """Make every place of a slab but `used` free, and dirty: its bytes may be of anyone."""
        slab = self._slabs[number]
        is_used = bytearray(slab.places)
        for position in used:
            is_used[position] = 1
        slab.free = [at for at, taken in enumerate(is_used) if not taken]  # sorted, so a heap
        slab.dirty = set(slab.free)

    def has(self, place: Place, place_bytes: int) -> bool:
        """Return whether this place exists, with this size."""
        slab = self._slabs.get(place.slab)
        return (
            slab is not None
            and slab.place_bytes == place_bytes
            and 0 <= place.position < slab.places
        )

    def all_places(self) -> Iterator[tuple[Place, int]]:
        """Yield every place with its size, in order."""
        for number, slab in sorted(self._slabs.items()):
            for position in range(slab.places):
                yield Place(number, position), slab.place_bytes

    def take(self, place_bytes: int) -> Place | None:
        """Take a free place of a size; None if there is none. O(slabs)."""
        for slab in self._slabs.values():
            if slab.free and slab.place_bytes == place_bytes:
                position = heappop(slab.free)
                slab.dirty.discard(position)
                return Place(slab.number, position)
        return None

    def hold(self, place: Place) -> None:
        """Note one more reader of a place."""
        self._reading[place] += 1

    def release(self, place: Place) -> None:
        """Note that a reader has ended; give the place back if that was wanted meanwhile."""
        self._reading[place] -= 1
        if not self._reading[place]:
            del self._reading[place]
            if place in self._deferred:
                self._deferred.discard(place)
                self.give_back(place)

    def mark_bad(self, place: Place) -> None:
        """Leave a place out of use once it is given back, for as long as its slab is there: it
        returned other bytes than it was given."""
        self._bad.add(place)

    def give_back(self, place: Place) -> None:
        """Make a place free, at once or when its last reader has ended. Its bytes stay until it is
        written anew or wiped."""
        if place in self._reading:
            self._deferred.add(place)
            return
        is_bad = place in self._bad
        self._bad.discard(place)
        slab = self._slabs.get(place.slab)
        if slab is None:
            return
        if is_bad:
            slab.retired.add(place.position)
        else:
            heappush(slab.free, place.position)
        slab.dirty.add(place.position)

    def places(self, place_bytes: int) -> int:
        """Number of places of a size, free or not."""
        return sum(slab.places for slab in self._slabs.values() if slab.place_bytes == place_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs, of any size of places."""
        return sum(slab.places * slab.place_bytes for slab in self._slabs.values())

    def new_slab_bytes(self, place_bytes: int) -> int:
        """Bytes of the next slab of a size."""
        return max(1, self._slab_bytes // place_bytes) * place_bytes

    def place_sizes(self) -> dict[int, int]:
        """Return the size of the places of each slab. O(slabs)."""
        return {number: slab.place_bytes for number, slab in self._slabs.items()}

    def check(self, used: Set[Place]) -> None:
        """Compare the free places with those of records. Raises InvariantViolation. O(places)."""
        slabs = self._slabs.values()
        free = {Place(slab.number, at) for slab in slabs for at in slab.free}
        retired = {Place(slab.number, at) for slab in slabs for at in slab.retired}
        if free & used:
            raise InvariantViolation(f"places {free & used} are free and used")
        known = free | used | self._deferred | self._bad | retired
        if lost := sum(self.sizes.values()) - len(known):
            raise InvariantViolation(f"{lost} places are neither free nor used")

    # -- files ----------------------------------------------------------------------------------

    def make_slab(self, place_bytes: int, bytes_max: int) -> None:
        """Lay out one more slab, of at most so many bytes, which is durable after `sync`. Raises
        OSError, with nothing made."""
        length = min(self.new_slab_bytes(place_bytes), bytes_max // place_bytes * place_bytes)
        number = max(self._slabs, default=0) + 1
        path = self._folder / f"{place_bytes:04d}-{number:06d}.slab"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            self._calls.lay_out(fd, length)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                path.unlink()
            raise
        slab = _Slab(path, fd, number, place_bytes, length)
        slab.free = list(range(slab.places))
        self._slabs[number] = slab
        self._made += 1

    def remove_if_empty(self, number: int) -> bool:
        """Delete a slab after all its places are free or retired. Raises OSError."""
        slab = self._slabs[number]
        is_wiped = any(place.slab == number for place in self._wiping)
        if is_wiped or len(slab.free) + len(slab.retired) < slab.places:
            return False
        slab.path.unlink()
        os.close(slab.fd)
        del self._slabs[number]
        return True

    def close(self) -> None:
        """Close the files. Safe to repeat."""
        for slab in self._slabs.values():
            os.close(slab.fd)
        self._slabs.clear()

    # -- bytes: any thread ----------------------------------------------------------------------

    def write(self, place: Place, header: bytes, payload: memoryview) -> None:
        """Write a record; it is durable after `sync`. Raises OSError."""
        slab = self._slabs[place.slab]
        offset = place.position * slab.place_bytes
        write_all(self._calls, slab.fd, (header, payload), offset)

    def read(self, place: Place, buffer: memoryview) -> int:
        """Read a place from its beginning; return the bytes that came. Raises OSError."""
        slab = self._slabs[place.slab]
        offset, done = place.position * slab.place_bytes, 0
        while done < len(buffer):
            came = self._calls.read(slab.fd, buffer[done:], offset + done)
            if came <= 0:
                break
            done += came
        return done

    def sync(self, numbers: Iterable[int]) -> None:
        """Make what was written to these slabs durable, and that they are there. Raises OSError."""
        for number in sorted(set(numbers)):
            self._calls.sync(self._slabs[number].fd)
        with self._listing:
            if self._listed != (made := self._made):
                sync_folder(self._folder)
                self._listed = made

    def take_dirty(self) -> list[Place]:
        """Return dirty places of one slab for `wipe`, and keep them from use meanwhile.

        At most half of its free places: a store that comes meanwhile finds one, and need not grow
        the disk or drop records for it. Call again until there are none.
        """
        slab = next((one for one in self._slabs.values() if one.dirty), None)
        if slab is None:
            return []
        most = max(1, len(slab.free) // 2)
        taken = set(sorted(slab.dirty)[-most:])  # `take` begins at the other end
        slab.dirty -= taken
        slab.free = sorted(at for at in slab.free if at not in taken)
        places = [Place(slab.number, at) for at in sorted(taken)]
        self._wiping.update(places)
        return places

    @property
    def is_wiping(self) -> bool:
        """Whether places will be free as soon as they are wiped."""
        return bool(self._wiping)

    def is_unwiped(self, place: Place) -> bool:
        """Return whether a place that was given back is still read, or has its old bytes. O(1)."""
        slab = self._slabs.get(place.slab)
        is_dirty = slab is not None and place.position in slab.dirty
        return is_dirty or place in self._wiping or place in self._deferred

    def wipe(self, places: Sequence[Place]) -> None:
        """Make the bytes of places read as zeros, durably. Raises OSError.

        Neighbours cost one call.
        """
        for first, count in _ranges(places):
            slab = self._slabs.get(first.slab)
            if slab is not None:
                size = slab.place_bytes
                self._calls.erase(slab.fd, first.position * size, count * size)
        self.sync(place.slab for place in places if place.slab in self._slabs)

    def put_wiped(self, places: Sequence[Place], *, is_wiped: bool) -> None:
        """Make places free again after `wipe`; they stay dirty if it failed."""
        self._wiping.difference_update(places)
        for place in places:
            if (slab := self._slabs.get(place.slab)) is not None:
                if place.position not in slab.retired:
                    heappush(slab.free, place.position)
                if not is_wiped:
                    slab.dirty.add(place.position)


def _ranges(places: Sequence[Place]) -> Iterator[tuple[Place, int]]:
    """Yield the first place and the length of each run of neighbours, in order."""
    ordered = sorted(places)
    if not ordered:
        return
    first, count = ordered[0], 1
    for before, place in pairwise(ordered):
        if place == Place(before.slab, before.position + 1):
            count += 1
        else:
            yield first, count
            first, count = place, 1
    yield first, count


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
