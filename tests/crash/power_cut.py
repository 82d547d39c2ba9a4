"""A disk whose power can be cut: SQLite's files on a VFS that remembers writes since the last sync.

At the cut each write since its file's last sync is kept, undone, or kept in part, at random. A
`lying` disk reports syncs that did not happen: the control that every check must detect. A disk
fails or returns wrong data for as long as it is `sick`, and keeps its content.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import apsw

SECTOR = 512


class PowerCut(apsw.IOError):
    """The power is off: no write succeeds any more."""


@dataclass
class Disk:
    """A disk that counts calls. From call `cut_at` on every write and sync fails.

    `fail_sync_at`: the calls at which a sync fails although the power stays on.
    """

    cut_at: int | None = None
    is_lying: bool = False
    fail_sync_at: frozenset[int] = frozenset()
    sick: Literal["", "no_reads", "wrong_reads", "no_writes", "no_syncs", "full"] = ""
    calls: int = 0
    syncs: int = 0
    pending: list[tuple[str, int, bytes, bytes]] = field(default_factory=list)

    @property
    def is_cut(self) -> bool:
        """Return whether the power is off."""
        return self.cut_at is not None and self.calls >= self.cut_at

    def tick(self) -> None:
        """Count a call."""
        self.calls += 1
        if self.is_cut:
            raise PowerCut("the power is cut")
        if self.sick == "no_writes":
            raise apsw.IOError("the disk could not write")
        if self.sick == "full":
            raise apsw.FullError("the disk is full")

    def synced(self, name: str) -> None:
        """Mark the writes to this file as durable."""
        self.syncs += 1
        if self.syncs in self.fail_sync_at or self.sick == "no_syncs":
            raise apsw.IOError("the disk could not sync")
        if not self.is_lying:
            self.pending = [write for write in self.pending if write[0] != name]

    def image(self, source: Path, target: Path, rng: random.Random) -> Path:
        """Write the files as they are found after the power returns."""
        target.mkdir()
        for suffix in ("", "-wal", "-journal"):
            if (file := Path(f"{source}{suffix}")).exists():
                shutil.copy(file, target / file.name)
        for name, offset, new, old in reversed(self.pending):
            fate = rng.random()
            copy = target / Path(name).name
            if fate < 0.4 or not copy.exists():
                continue
            kept = 0 if fate < 0.8 else rng.randrange(0, len(new) + 1, SECTOR)
            with copy.open("r+b") as there:
                there.seek(offset + kept)
                there.write(old.ljust(len(new), b"\0")[kept:])
        return target / source.name


@contextmanager
def disk_of(disk: Disk) -> Iterator[None]:
    """Put every database opened in this context on the disk."""

    base = apsw.vfs_names()[0]

    class File(apsw.VFSFile):
        def __init__(self, name: Any, flags: list[int]) -> None:
            self.path = name if isinstance(name, str) else name.filename() if name else ""
            super().__init__(base, name, flags)

        def xRead(self, count: int, offset: int) -> bytes:
            data = super().xRead(count, offset)
            if disk.sick == "no_reads":
                raise apsw.IOError("the disk could not read")
            return bytes(len(data)) if disk.sick == "wrong_reads" else data

        def xWrite(self, data: bytes, offset: int) -> None:
            disk.tick()
            size = super().xFileSize()
            old = super().xRead(min(len(data), size - offset), offset) if offset < size else b""
            disk.pending.append((self.path, offset, bytes(data), bytes(old)))
            super().xWrite(data, offset)

        def xTruncate(self, size: int) -> None:
            disk.tick()
            super().xTruncate(size)

        def xSync(self, flags: int) -> None:
            disk.tick()
            disk.synced(self.path)

    class Vfs(apsw.VFS):
        def __init__(self) -> None:
            super().__init__("power_cut", base)

        def xOpen(self, name: Any, flags: list[int]) -> File:
            return File(name, flags)

    vfs = Vfs()
    apsw.set_default_vfs("power_cut")
    try:
        yield
    finally:
        apsw.set_default_vfs(base)
        vfs.unregister()
