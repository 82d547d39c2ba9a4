"""A gateway's books of promises, and what moves them, over the replicas of one model."""

from __future__ import annotations

import asyncio
from collections import Counter

from engine.api import (
    AtRest,
    CacheGrant,
    Clock,
    Finished,
    LeaseRequest,
    Quota,
    Request,
    Retention,
    Started,
)
from engine.client.client import EngineConnection
from gateway.caching.contract import ContractManager
from gateway.caching.namespaces import namespace_of
from gateway.caching.prefix_index import IndexedPrefix, digest_prefixes
from gateway.engines.elsewhere.promise_moves import Outcome, PromiseMoves
from gateway.engines.replica import Replica
from gateway.engines.replicas import Replicas
from gateway.engines.served_models import ServedModel, ServedModels
from gateway.prompt import Renderer
from gateway.retention_classes import CachingConfig
from tenancy.types import CachePolicy, Identity, Tenant

PATIENCE_S = 60.0
IDENTITY = Identity(Tenant(1, "ada", "active", 0), "", 1, 1, CachePolicy())
HOUR = Retention("1h", promise_s=3_600, limit_s=3_600)


class PromiseBooks:
    """What one gateway has promised to tenant 1. `quota`: that tenant's."""

    def __init__(self, renderer: Renderer, replicas: Replicas, clock: Clock) -> None:
        self.replicas, self.clock = replicas, clock
        self.models = ServedModels([ServedModel("m", replicas, renderer)])
        self.contracts = ContractManager(
            *(CachingConfig(), clock, lambda _: {}, self.models.epoch_of), self.models.is_alive
        )
        self.ends = Counter[Outcome]()
        self.told: dict[str, object] = {}
        """What the log says of an engine that was emptied."""
        self.quota = Quota(payer=b"1")
        self.is_emptied = asyncio.Event()
        self._ids = iter(range(1_000_000))
        self.moves = PromiseMoves(
            *(self.models, self.contracts, self._terms, self._new_id, self._count, clock),
            self._log,
            grace_s=0.0,
        )
        self.moves.open()

    @property
    def namespace(self) -> bytes:
        """The tenant's namespace under the model of the replicas."""
        info = self.replicas.info
        assert info is not None
        return namespace_of(IDENTITY, info.model_digest, "template", "")

    async def write(self, replica: Replica, prompt: tuple[int, ...], tokens: int) -> IndexedPrefix:
        """Have an engine promise the first tokens of a prompt for an hour; return the entry."""
        space, digest = self.namespace, digest_prefixes(prompt, [tokens])[tokens]
        grant = CacheGrant(space, self.quota, (LeaseRequest(tokens, HOUR, digest.hex()),))
        engine, info = replica.engine, replica.info
        assert isinstance(engine, EngineConnection)
        assert info is not None
        await finished(engine, Request(self._new_id(), prompt, 1, grant))
        key = (space, digest)
        self.contracts.entries.write(
            *(key, tokens, 1, info.epoch, {}, HOUR, self.clock()), is_granted=True
        )
        self.contracts.promises.record_write(1, key, HOUR.name, self.clock())
        entry = self.contracts.entries.find(key)
        assert entry is not None
        return entry

    def outcomes(self) -> dict[str, int]:
        """Return what became of all promises."""
        return self.contracts.promises.by_class(self.clock())[HOUR.name]

    async def emptied(self) -> None:
        """Wait until an engine that drains is let go."""
        async with asyncio.timeout(PATIENCE_S):
            await self.is_emptied.wait()

    def _terms(self, model: ServedModel, tenant_id: int, writer_id: int) -> tuple[Quota, AtRest]:
        return self.quota, "remote"

    def _new_id(self) -> str:
        return f"r{next(self._ids)}"

    def _count(self, model: str, outcome: Outcome) -> None:
        self.ends[outcome] += 1

    def _log(self, event: str, facts: dict[str, object]) -> None:
        if event == "promises_moved":
            self.told = facts
            self.is_emptied.set()


async def finished(engine: EngineConnection, request: Request) -> Started:
    """Return how a request began, which must end well."""
    async with asyncio.timeout(PATIENCE_S):
        events = [event async for event in engine.submit(request)]
    assert isinstance(events[-1], Finished)
    assert events[-1].ending == "done", events[-1]
    (started,) = [event for event in events if isinstance(event, Started)]
    return started
