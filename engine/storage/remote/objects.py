"""Objects in a remote store: the protocol, and a folder that keeps them as files.

An object is written whole or not at all, and never changed. Each call ends within the timeout that
the store was opened with, or raises. What a store returns is not trusted: sealed records prove
themselves. The folder serves a mounted file system and tests; `cloud_objects` has the stores of
clouds, for which an optional package is needed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from engine.storage.slabs.slabs import sync_folder

PART_SUFFIX = ".part"


class RemoteFailed(Exception):
    """A remote store did not do what was asked. The text says why, and quotes no content."""


class ObjectMissing(RemoteFailed):
    """There is no object of this name."""


class RemoteStore(Protocol):
    """A place for objects, by name. Any thread may call; every call may raise RemoteFailed."""

    def put(self, name: str, data: memoryview) -> None:
        """Keep an object; it lasts when this returns."""

    def get(self, name: str, bytes_max: int) -> memoryview:
        """Return at most so many bytes from an object's beginning. Raises ObjectMissing."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there are no error."""

    def names(self, prefix: str, limit: int) -> list[str]:
        """Return the names below a prefix, which ends at a slash; at most `limit`."""


class FolderObjects:
    """Objects as files in a folder that belongs only to this user."""

    def __init__(self, folder: Path) -> None:
        """The first object makes the folder, if it is missing."""
        self._folder = folder

    def put(self, name: str, data: memoryview) -> None:
        """See `RemoteStore`."""
        path = self._path(name)
        part = _part_of(path)
        with _failures():
            self._make(path.parent)
            try:
                with part.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
                sync_folder(path.parent)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise

    def _make(self, folder: Path) -> None:
        """Make a folder and those above it up to the store's own, durably."""
        if folder.is_dir():
            return
        if folder != self._folder:
            self._make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)

    def get(self, name: str, bytes_max: int) -> memoryview:
        """See `RemoteStore`."""
        with _failures(), self._path(name).open("rb") as file:
            return memoryview(file.read(bytes_max))

    def delete(self, names: Sequence[str]) -> None:
        """See `RemoteStore`."""
        with _failures():
            for path in map(self._path, names):
                for one in (path, _part_of(path)):  # a death in `put` leaves a part
                    one.unlink(missing_ok=True)
            for folder in {self._path(name).parent for name in names}:
                if folder.is_dir():
                    sync_folder(folder)

    def names(self, prefix: str, limit: int) -> list[str]:
        """See `RemoteStore`."""
        with _failures():
            if not self._folder.parent.is_dir():
                raise RemoteFailed(f"the folder {self._folder.parent} does not exist")
            found = sorted(self._path(prefix).rglob("*"))
            files = [path for path in found if path.is_file() and path.suffix != PART_SUFFIX]
        return [path.relative_to(self._folder).as_posix() for path in files[:limit]]

    def _path(self, name: str) -> Path:
        assert ".." not in name.split("/"), name
        assert not name.startswith("/"), name
        return self._folder / name


def _part_of(path: Path) -> Path:
    """Return the file that an object is written to before it has its name."""
    return path.with_name(f"{path.name}{PART_SUFFIX}")


@contextmanager
def _failures() -> Iterator[None]:
    """Turn errors of the system into `RemoteFailed`."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing("no such object") from error
    except OSError as error:
        raise RemoteFailed(os.strerror(error.errno or errno.EIO)) from error
