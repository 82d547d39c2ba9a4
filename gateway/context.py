"""What every handler of a running gateway shares: made once by `app`, passed by value of reference.

It holds and counts; it decides nothing. Handlers and the middleware read it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from engine.api import Clock
from engine.client.client import Engine
from gateway.analytics.block_churn import BlockChurn
from gateway.analytics.interface import AnalyticsClient
from gateway.analytics.tenant_usage import Holders
from gateway.caching import Contracts
from gateway.config import Config
from gateway.ledger.interface import LedgerClient
from gateway.ledger.progress import ProgressJournal
from gateway.ledger.query_pool import QueryPool
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import Tracer
from gateway.prompt import Renderer
from tenancy.accounts.tenants import TenantRecord
from tenancy.limits import Limiter
from tenancy.storage.interface import Store
from tenancy.types import Identity, WallClock

T = TypeVar("T")

Log = Callable[[str, dict[str, object]], None]
"""Takes an event's name and its facts; never prompts or keys."""


class Authenticator(Protocol):
    """Who holds a key? `tenancy.accounts.authentication.KeyAuthenticator`, or a test's own."""

    def authenticate(self, key: str) -> Identity:
        """Which tenant? Raises `tenancy.errors.KeyRefused`."""

    def authenticate_admin(self, key: str) -> int:
        """The id of an administrator's key. Raises `tenancy.errors.KeyRefused`."""

    def look_again(self) -> None:
        """Tenants or keys have been changed: the next question sees it."""

    def take_changed(self) -> list[TenantRecord]:
        """Tenants that have come or changed since the last call; at first, all."""

    def tenant(self, tenant_id: int) -> TenantRecord | None:
        """One that there is."""

    def floor_blocks(self) -> int:
        """What all floors together ask for."""


@dataclass(slots=True)
class Context:
    """A running gateway. `running`: requests admitted and not over, by tenant id.
    `read_config`: the settings as their file says them now; raises ConfigError.
    `token_bytes_max`: of the vocabulary's longest token.
    `journal`: how far its streams have come. `tracer`: where tracing is on.
    `background`: work that must end even if whoever began it is cancelled.
    """

    config: Config
    engine: Engine
    registry: Authenticator
    ledger: LedgerClient
    journal: ProgressJournal
    store: Store
    reports: QueryPool
    limiter: Limiter
    telemetry: Metrics
    renderer: Renderer
    contracts: Contracts
    analytics: AnalyticsClient
    model: str
    clock: Clock
    wall: WallClock
    new_id: Callable[[], str]
    log: Log
    token_bytes_max: int
    read_config: Callable[[], Config]
    engine_restarts: Callable[[], int] = lambda: 0
    tracer: Tracer | None = None
    is_draining: bool = False
    running: Counter[int] = field(default_factory=Counter)
    churn: BlockChurn = field(default_factory=BlockChurn)
    holders: Holders = field(default_factory=Holders)
    background: set[asyncio.Task[Any]] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return tuple(dict.fromkeys((self.model, *self.config.model.aliases)))

    def is_ready(self) -> bool:
        """Would a request be taken now?"""
        return not self.is_draining and self.engine.ready()

    def enter(self, tenant_id: int) -> None:
        """A request of this tenant has been admitted."""
        self.running[tenant_id] += 1
        self.idle.clear()

    def leave(self, tenant_id: int) -> None:
        """It is over."""
        self.running[tenant_id] -= 1
        if not self.running[tenant_id]:
            del self.running[tenant_id]
        if not self.running:
            self.idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Until no admitted request is left, or the time is over: was it in time?"""
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await self.idle.wait()
        except TimeoutError:
            return False
        return True

    async def finish(self, work: Coroutine[None, None, None]) -> None:
        """Run to the end, whatever happens to the caller; `finish_background` waits for it too."""
        await asyncio.shield(self._begin(work))

    async def see_through(self, work: Coroutine[None, None, T]) -> T:
        """Run to the end and say what came of it. A caller that is cancelled waits for the end,
        however often he is, and is cancelled then. Raises what the work raises."""
        task = self._begin(work)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None and task.exception() is None:
            raise cancelled
        return task.result()

    def _begin(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def finish_background(self) -> None:
        """Until nothing is left that must end."""
        while self.background:
            await asyncio.wait(set(self.background))
