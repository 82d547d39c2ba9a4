"""A link that keeps nothing, for tests that say what became of a replica's engines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FakeLink:
    """A `gateway.engines.replica.Link`."""

    reason: str = ""
    """Why no engine ever will serve."""
    restarts: int = 0

    def failure(self) -> str:
        return self.reason

    def retry_after_s(self) -> float:
        return 1.0

    def start(self) -> None: ...

    async def wait_ready(self) -> None: ...

    def begin_drain(self) -> None: ...

    async def close(self) -> None: ...
