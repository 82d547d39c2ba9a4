"""The state that every handler of a running gateway shares.

`gateway.app` makes it once and passes it explicitly. It holds and counts, and decides nothing.
Handlers and the middleware read it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from engine.api import Clock, EngineInfo
from gateway.analytics.block_churn import BlockChurn
from gateway.analytics.interface import AnalyticsClient
from gateway.analytics.recent_causes import RecentCauses
from gateway.analytics.tenant_usage import TenantCacheUsage
from gateway.analytics.unserved_models import UnservedModels
from gateway.caching import ContractManager
from gateway.caching.namespaces import promised_default
from gateway.caching.promise_store import PromiseStore
from gateway.config import Config
from gateway.config_file import ConfigSource
from gateway.embeddings.embedder import Embedder
from gateway.engines.served_models import ServedModels
from gateway.ledger.attribution import UserAttribution
from gateway.ledger.interface import LedgerClient
from gateway.ledger.progress import ProgressJournal
from gateway.ledger.query_pool import QueryPool
from gateway.ledger.response_writer import ResponseWriter
from gateway.levels.level_history import LevelHistory
from gateway.observability.ended_requests import EndedRequests
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import Tracer
from gateway.preparation_pool import PreparationPool
from tenancy.accounts.authentication import Administrator
from tenancy.accounts.tenants import TenantRecord
from tenancy.limits import Limiter
from tenancy.storage.interface import Store
from tenancy.types import Identity, WallClock

T = TypeVar("T")

Log = Callable[[str, dict[str, object]], None]
"""Logs an event: its name and its fields; never prompts or keys."""


class Authenticator(Protocol):
    """Authenticates API keys: `tenancy.accounts.authentication.KeyAuthenticator`, or a fake."""

    def authenticate(self, key: str) -> Identity:
        """Return the identity of a tenant's key. Raises `tenancy.errors.KeyRefused`."""

    def authenticate_admin(self, key: str) -> Administrator:
        """Return the rights of an administrator's key. Raises `tenancy.errors.KeyRefused`."""

    def refresh_now(self) -> None:
        """Reload tenants and keys before the next call, because they changed."""

    def read_now(self) -> Future[None]:
        """Read tenants and keys as they are now; the result is done when the next call sees
        them."""

    def take_changed(self) -> list[TenantRecord]:
        """Return the tenants that were added or changed since the last call; at first, all."""

    def tenant(self, tenant_id: int) -> TenantRecord | None:
        """Return an existing tenant's record, or None."""

    def floor_blocks(self) -> int:
        """Return the sum of all tenants' floors, in blocks."""

    @property
    def active_tenants(self) -> int:
        """The number of tenants that are not suspended."""


class Obstacle(Struct, frozen=True):
    """Why no request is accepted: a stable word, and a sentence for operators."""

    status: str
    reason: str


@dataclass(slots=True)
class Context:
    """A running gateway."""

    config: Config
    models: ServedModels
    """The served models, each with its engine; a request's `model` selects one."""
    authenticator: Authenticator
    ledger: LedgerClient
    journal: ProgressJournal
    """Progress of the running streams."""
    store: Store
    reports: QueryPool
    """Connections for long queries."""
    contents: QueryPool
    """Connections for what requests name: stored items, kept answers, cached contents."""
    responses: ResponseWriter
    """Writes the stored responses."""
    limiter: Limiter
    metrics: Metrics
    ended_requests: EndedRequests
    """Requests that have ended, until the database has their counts."""
    contracts: ContractManager
    promise_store: PromiseStore
    """The promises in the database."""
    analytics: AnalyticsClient
    clock: Clock
    wall: WallClock
    new_id: Callable[[], str]
    log: Log
    source: ConfigSource
    """Of `config`; reads the file again."""
    attribution: UserAttribution | None = None
    """Set if usage is attributed to users."""
    embeddings: Embedder | None = None
    """Set if an embedding model is configured; closed with the gateway."""
    tracer: Tracer | None = None
    """Set if tracing is on."""
    is_draining: bool = False
    preparations: PreparationPool = field(default_factory=PreparationPool)
    running: Counter[int] = field(default_factory=Counter)
    """Admitted, unfinished requests by tenant id; each prompt is one."""
    limited: Counter[int] = field(default_factory=Counter)
    """Requests that a tenant's limits refused since the start, by tenant id."""
    churn: BlockChurn = field(default_factory=BlockChurn)
    level_history: LevelHistory = field(default_factory=LevelHistory)
    tenant_usage: TenantCacheUsage = field(default_factory=TenantCacheUsage)
    recent_causes: RecentCauses = field(default_factory=RecentCauses)
    """Where prompts of the last hour parted from earlier ones, for headers of the next ones."""
    unserved: UnservedModels = field(default_factory=UnservedModels)
    """Requests for models that are not served, until findings take them."""
    background: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks that must finish even if their caller is cancelled."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    reloading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a configuration is read and applied."""

    def is_ready(self) -> bool:
        """Whether the gateway accepts requests now."""
        return self.obstacle() is None

    def obstacle(self) -> Obstacle | None:
        """Return what keeps the gateway from accepting requests now, or None.

        With several models it is ready when the default one is: the others answer for themselves.
        """
        if self.is_draining:
            return Obstacle("draining", "The server is shutting down.")
        default = self.models.default
        if not default.engine.ready():
            if default.restarts():
                return Obstacle("starting", "The engine was lost and is being restarted.")
            return Obstacle("starting", "The engine is starting.")
        if not self.ledger.is_well:
            return Obstacle("ledger_unavailable", "Usage cannot be recorded at the moment.")
        return None

    def promised_blocks_default(self, info: EngineInfo, model: str, tenant_id: int) -> int | None:
        """Return the bound on the promises of a model's engine to a tenant that sets none; None for
        the engine's own bound. Promises of the last second may not count yet."""
        promised = self.tenant_usage.promised(model, tenant_id)
        active = self.authenticator.active_tenants
        return promised_default(info.promisable_blocks, self.config.caching, active, promised)

    def on_device_default(self, info: EngineInfo, model: str, tenant_id: int) -> int | None:
        """Return the bound on what the promises of such a tenant hold on the device; None for the
        engine's own bound, and where no level below keeps promises."""
        if not info.promisable_on_device:
            return None
        promised = self.tenant_usage.promised_on_device(model, tenant_id)
        active = self.authenticator.active_tenants
        return promised_default(info.promisable_on_device, self.config.caching, active, promised)

    def enter(self, tenant_id: int, requests: int = 1) -> None:
        """Count admitted requests of this tenant."""
        self.running[tenant_id] += requests
        self.idle.clear()

    def leave(self, tenant_id: int, requests: int = 1) -> None:
        """Count finished requests of this tenant."""
        self.running[tenant_id] -= requests
        if not self.running[tenant_id]:
            del self.running[tenant_id]
        if not self.running:
            self.idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no admitted request is left; False if `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await self.idle.wait()
        except TimeoutError:
            return False
        return True

    async def shield(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` to completion; a caller that is cancelled leaves at once, and the work goes on
        (`finish_background` waits for it)."""
        await asyncio.shield(self._start_task(work))

    async def run_to_completion(self, work: Coroutine[None, None, T]) -> T:
        """Run `work` to completion and return its result.

        A cancelled caller waits for the end, however often it is cancelled, and then raises
        CancelledError. Raises what `work` raises.
        """
        task = self._start_task(work)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None and task.exception() is None:
            raise cancelled
        return task.result()

    def _start_task(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def finish_background(self) -> None:
        """Wait until no background task is left."""
        while self.background:
            await asyncio.wait(set(self.background))
