"""The parts of a running gateway, and the small ports that its rooms have in common.

`gateway.app` makes each part once. A room takes what it needs; only those that need nearly all of
them take the `Context`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from engine.api import Clock
from gateway.analytics.interface import AnalyticsClient
from gateway.analytics.recent_causes import RecentCauses
from gateway.analytics.unserved_models import UnservedModels
from gateway.caching import ContractManager
from gateway.caching.promise_store import PromiseStore
from gateway.config import Config
from gateway.embeddings.embedder import Embedder
from gateway.engines.cache_usage import CacheUsage
from gateway.engines.served_models import ServedModels
from gateway.ledger.attribution import UserAttribution
from gateway.ledger.interface import LedgerClient
from gateway.ledger.progress import ProgressJournal
from gateway.ledger.query_pool import QueryPool
from gateway.ledger.response_writer import ResponseWriter
from gateway.observability.ended_requests import EndedRequests
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import Tracer
from gateway.preparation_pool import PreparationPool
from gateway.unfinished_work import BackgroundWork, RunningRequests
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.storage.interface import Store
from tenancy.types import WallClock

Log = Callable[[str, dict[str, object]], None]
"""Logs an event: its name and its fields; never prompts or keys."""


class Obstacle(Struct, frozen=True):
    """Why no request is accepted: a stable word, and a sentence for operators."""

    status: str
    reason: str


@dataclass(slots=True)
class Context:
    """The parts of a running gateway, which `gateway.app` makes and hands to the rooms that need
    them. Few rooms need them all."""

    config: Config
    models: ServedModels
    """The served models, each with its engine; a request's `model` selects one."""
    authenticator: KeyAuthenticator
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
    metrics: Metrics
    ended_requests: EndedRequests
    """Requests that have ended, until the database has their counts."""
    contracts: ContractManager
    promise_store: PromiseStore
    """The promises in the database."""
    analytics: AnalyticsClient
    usage: CacheUsage
    clock: Clock
    wall: WallClock
    new_id: Callable[[], str]
    log: Log
    attribution: UserAttribution | None = None
    """Set if usage is attributed to users."""
    embeddings: Embedder | None = None
    """Set if an embedding model is configured; closed with the gateway."""
    tracer: Tracer | None = None
    """Set if tracing is on."""
    preparations: PreparationPool = field(default_factory=PreparationPool)
    running: RunningRequests = field(default_factory=RunningRequests)
    work: BackgroundWork = field(default_factory=BackgroundWork)
    recent_causes: RecentCauses = field(default_factory=RecentCauses)
    """Where prompts of the last hour parted from earlier ones, for headers of the next ones."""
    unserved: UnservedModels = field(default_factory=UnservedModels)
    """Requests for models that are not served, until findings take them."""

    def is_ready(self) -> bool:
        """Whether the gateway accepts requests now."""
        return self.obstacle() is None

    def count_broken_promises(self) -> int:
        """Return the promises that were broken since its start. O(promises)."""
        counts = self.contracts.promises.by_class(self.clock())
        return sum(one["broken"] for one in counts.values())

    def obstacle(self) -> Obstacle | None:
        """Return what keeps the gateway from accepting requests now, or None.

        With several models it is ready when the default one is: the others answer for themselves.
        """
        if self.running.is_draining:
            return Obstacle("draining", "The server is shutting down.")
        default = self.models.default
        if not default.replicas.ready():
            if absence := default.replicas.absence():
                return Obstacle("engine_unavailable", absence)
            if default.replicas.restarts:
                return Obstacle("starting", "The engine was lost and is being restarted.")
            return Obstacle("starting", "The engine is starting.")
        if not self.ledger.is_well:
            return Obstacle("ledger_unavailable", "Usage cannot be recorded at the moment.")
        return None
