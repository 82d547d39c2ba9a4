"""A remote store in memory that is slow, away, full, forgetful or lying, as a test wishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.storage.remote.objects import ObjectMissing, RemoteFailed
from tests.unit.engine.storage.failing_calls import Gates


class FaultyObjects(Gates):
    """Implements `RemoteStore`.

    `fails`: calls by name that fail, with their reason. `lie`: what a `get` returns instead of an
    object's bytes, by its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.fails: dict[str, str] = {}
        self.lie: Callable[[str, bytes], bytes] = lambda name, data: data
        self.calls: list[str] = []

    def _check(self, call: str) -> None:
        self.calls.append(call)
        self.wait_for_gate(call)
        if call in self.fails:
            raise RemoteFailed(self.fails[call])

    def put(self, name: str, data: memoryview) -> None:
        """See `RemoteStore`."""
        self._check("put")
        self.objects[name] = bytes(data)

    def put_new(self, name: str, data: memoryview) -> bool:
        """See `RemoteStore`."""
        self._check("put")
        if name in self.objects:
            return False
        self.objects[name] = bytes(data)
        return True

    def get(self, name: str, bytes_max: int) -> memoryview:
        """See `RemoteStore`."""
        self._check("get")
        if name not in self.objects:
            raise ObjectMissing("no such object")
        return memoryview(self.lie(name, self.objects[name])[:bytes_max])

    def delete(self, names: Sequence[str]) -> None:
        """See `RemoteStore`."""
        self._check("delete")
        for name in names:
            self.objects.pop(name, None)

    def clear(self, prefix: str, limit: int) -> tuple[int, int]:
        """See `RemoteStore`."""
        self._check("clear")
        found = [name for name in self.objects if name.startswith(prefix)][:limit]
        return len(found), sum(len(self.objects.pop(name)) for name in found)

    def names(self, prefix: str, limit: int) -> list[str]:
        """See `RemoteStore`."""
        self._check("names")
        return [name for name in sorted(self.objects) if name.startswith(prefix)][:limit]
