"""Stores and fetches on their way: decided in the main thread, done by another one.

Plain mutable values. Until a plan has ended, one thread at a time has it: `engine.storage.store`
makes it, an I/O thread fills in what became of it, and the store takes it back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.api import FIDELITIES, Namespace, Payer
from engine.moves import RecordId, RunToStore, StoreRuns
from engine.storage.index.index import RecordRow
from engine.storage.index.namespace_rows import Scope
from engine.storage.sealing.seals import RecordSeal
from engine.storage.slabs.slabs import Place


@dataclass(slots=True)
class PlannedRun:
    """A run of a store on its way. `place` None: a record has it already, or will after commit."""

    run: RunToStore
    record_id: RecordId
    packed: bytes
    limit_ms: int
    promise_ms: int
    place: Place | None = None
    header: bytes = b""
    """The plain one; what is written is sealed by `seal`, if there is one."""
    seal: RecordSeal | None = None
    failure: str = ""


@dataclass(slots=True)
class PlannedStore:
    """A `StoreRuns` on its way."""

    command: StoreRuns
    scope: Scope | None
    runs: list[PlannedRun] = field(default_factory=list)
    code: str = ""
    """Why further runs are missing."""

    @property
    def payer(self) -> Payer:
        """Who pays for its records: the namespace itself where no payer is named."""
        return self.command.payer or self.command.namespace

    @property
    def fidelity(self) -> int:
        """The fidelity of its records, by its index."""
        return FIDELITIES.index(self.command.fidelity)

    @property
    def places(self) -> set[Place]:
        """The places that are written for it."""
        return {run.place for run in self.runs if run.place is not None}


@dataclass(slots=True)
class WriteBatch:
    """Stores that are written and synced together."""

    stores: list[PlannedStore] = field(default_factory=list)
    error: OSError | None = None
    """Of the disk, if it failed."""

    @property
    def is_promised(self) -> bool:
        """Whether a commit of it must survive a power cut."""
        return any(
            one.command.lease_ids or any(run.run.promise_s for run in one.runs)
            for one in self.stores
        )


@dataclass(slots=True)
class PlannedRead:
    """A record on its way into a slot. `verdict` is set by `read`."""

    call_id: int
    namespace: Namespace
    row: RecordRow
    slot: int
    seal: RecordSeal | None = None
    object_name: str = ""
    """Of the object of a record that lies only in the remote store."""
    verdict: Literal["done", "damaged", "failed"] = "failed"
    error: OSError | None = None
    seconds: float = 0.0
