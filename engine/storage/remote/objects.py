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

from engine.errors import EngineError
from engine.storage.slabs.slabs import sync_folder

PART_SUFFIX = ".part"
PROOF_NAME, PROOF_BYTES_MAX = "proof", 4_096
"""The object of a shared store that says which master key it is of."""


class RemoteFailed(Exception):
    """A remote store did not do what was asked. The text says why, and quotes no content."""


class ObjectMissing(RemoteFailed):
    """There is no object of this name."""


class RemoteRefused(EngineError):
    """An address of a remote store that cannot be used, or a store that is not for this engine. The
    message quotes no secret."""

    def __init__(self, message: str) -> None:
        super().__init__("storage", message)


class RemoteStore(Protocol):
    """A place for objects, by name. Any thread may call; every call may raise RemoteFailed."""

    def put(self, name: str, data: memoryview) -> None:
        """Keep an object; it lasts when this returns."""

    def put_new(self, name: str, data: memoryview) -> bool:
        """Keep an object unless there is one of this name; return whether there was none."""

    def get(self, name: str, bytes_max: int) -> memoryview:
        """Return at most so many bytes from an object's beginning. Raises ObjectMissing."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there are no error."""

    def clear(self, prefix: str, limit: int) -> tuple[int, int]:
        """Delete what lies below a prefix, which ends at a slash, half written objects included: at
        most `limit`. Return how many objects that were, and their bytes; none once all are gone."""

    def names(self, prefix: str, limit: int) -> list[str]:
        """Return the names below a prefix, which ends at a slash; at most `limit`."""


def check_proof(store: RemoteStore, proof: bytes, *, may_make: bool = True) -> bool:
    """Compare the master key that a shared store is of with what this engine's proves; return
    whether the store said one. `may_make`: let a store say this one that has said none.

    Raises RemoteRefused for another key, RemoteFailed.
    """
    if may_make and store.put_new(PROOF_NAME, memoryview(proof)):
        return True
    try:
        found = bytes(store.get(PROOF_NAME, PROOF_BYTES_MAX))
    except ObjectMissing:
        return False
    if found != proof:
        theirs, ours = (_fingerprint(one) for one in (found, proof))
        raise RemoteRefused(
            f"the shared store is of the master key {theirs}, this engine has {ours}; expected the"
            " same, or another engine.levels.remote.url"
        )
    return True


def _fingerprint(proof: bytes) -> str:
    lines = proof.decode("ascii", "replace").split("\n")
    return lines[1][:8] if len(lines) > 1 else "of an unknown form"


class FolderObjects:
    """Objects as files in a folder that belongs only to this user."""

    def __init__(self, folder: Path) -> None:
        """The first object makes the folder, if it is missing."""
        self._folder = folder

    def put(self, name: str, data: memoryview) -> None:
        """See `RemoteStore`."""
        path = self._path(name)
        with _failures(), self._written(path, _part_of(path), data) as part:
            part.replace(path)
            sync_folder(path.parent)

    def put_new(self, name: str, data: memoryview) -> bool:
        """See `RemoteStore`."""
        path = self._path(name)
        own = path.with_name(f"{path.name}.{os.urandom(8).hex()}{PART_SUFFIX}")  # of several owners
        with _failures(), self._written(path, own, data) as part:
            try:
                os.link(part, path)
            except FileExistsError:
                return False
            sync_folder(path.parent)
        return True

    @contextmanager
    def _written(self, path: Path, part: Path, data: memoryview) -> Iterator[Path]:
        """Write a part beside an object, durably; what is left of it goes."""
        self._make(path.parent)
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield part
        finally:
            part.unlink(missing_ok=True)

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

    def clear(self, prefix: str, limit: int) -> tuple[int, int]:
        """See `RemoteStore`. The emptied folders go, too."""
        found, size = 0, 0
        with _failures():
            for at, _, names in os.walk(self._path(prefix), topdown=False):
                folder = Path(at)
                for path in map(folder.joinpath, names[: limit - found]):
                    try:
                        size += path.stat().st_size
                        path.unlink()
                    except FileNotFoundError:
                        continue  # another owner clears, too
                    found += 1
                with suppress(OSError):  # others write there
                    folder.rmdir()
                if folder.is_dir():
                    sync_folder(folder)
            if found and self._folder.is_dir():
                sync_folder(self._folder)
        return found, size

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
