"""What the brain asks of the bodies that move KV below the device, and what they answer.

A *level* is where copies of blocks lie: the device's pool, host memory, disk. The brain
(`engine.levels`) decides; a `TransferEngine` copies blocks between the device's pool and slots of
host memory; a `Storage` keeps records on disk and knows all of its index. Values are frozen. Only
the storage process knows the wall clock: all times are durations in seconds from the message.

Nothing here waits: commands are handed over, and outcomes are polled. Each command has one outcome,
and whatever is not *done* has failed; there is no third kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from engine import api
from engine.api import Count, Namespace, Payer, Quota

LevelName = api.LevelName
Fidelity = api.Fidelity
PayerBytes = api.PayerBytes
RecordId = int
"""A record on disk; never used again, and 0 for none."""
ROOT: RecordId = 0


class Move(Struct, frozen=True, gc=False):
    """Copy the device's block `block` to host slot `slot` (`offload`), or back (`load`).

    The caller holds block and slot until the outcome. `check`: for a load, the digest that the
    slot's bytes must have; empty where it need not be checked. `format`: the packed format of the
    copy; empty: the block's own bytes.
    """

    move_id: int
    kind: Literal["offload", "load"]
    block: int
    slot: int
    check: bytes = b""
    format: str = ""


class Moved(Struct, frozen=True, gc=False):
    """The outcome of a `Move`. `check`: the xxh3-128 digest of the slot's bytes after an offload.

    `seconds`: from the start of its copy to its end.
    """

    move_id: int
    is_done: bool
    check: bytes = b""
    seconds: float = 0.0


class TransferEngine(Protocol):
    """Copies between the device's pool and the slots of host memory, beside the steps.

    An offload reads a block whose step has been collected. A load's target is written by no
    launched step, and read by steps launched after the outcome was polled.
    """

    slots: int
    """Slots of host memory."""
    slot_bytes: int
    """Bytes of a slot: a packed or plain copy of one block."""

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin moves, in order. Never blocks."""

    def poll(self) -> list[Moved]:
        """Return the outcomes since the last call. Never blocks."""

    def close(self) -> None:
        """End what is under way and release the memory."""


# -- storage ------------------------------------------------------------------------------------


class RunToStore(Struct, frozen=True):
    """One full run of tokens whose copy lies in `slot`, with the digest `check` of its bytes.

    `limit_s`: not matched after; None: no limit. `promise_s`: not dropped before; 0: no promise.
    """

    tokens: tuple[int, ...]
    slot: int
    check: bytes
    limit_s: float | None = None
    promise_s: float = 0.0


class StoreRuns(Struct, frozen=True, tag="store"):
    """Store consecutive runs below the record `parent`. The outcome is one `Stored`.

    `lease_ids`: the leases that cover them, so that the erasure of a lease finds them. The caller
    holds the slots until the outcome.
    """

    call_id: Count
    namespace: Namespace
    payer: Payer
    parent: RecordId
    runs: tuple[RunToStore, ...]
    lease_ids: tuple[str, ...] = ()
    fidelity: Fidelity = "exact"


class Stored(Struct, frozen=True, tag="stored"):
    """The records of a `StoreRuns`, durable, one a run from the first; fewer where it failed.

    A run that was stored before keeps its record. `code` says why runs are missing: `full`,
    `over_quota`, `write_budget` (the day's is spent), `no_parent`, `write_failed`, `damaged`,
    `erased` (the namespace was erased meanwhile), `closed`.
    """

    call_id: Count
    record_ids: tuple[RecordId, ...]
    code: str = ""


class Look(Struct, frozen=True, tag="look"):
    """Find the longest stored prefix of `tokens`. The outcome is one `Looked`.

    `skip`: full runs at the beginning of which the caller wants no records, since it has them.
    """

    call_id: Count
    namespace: Namespace
    tokens: tuple[int, ...]
    skip: Count = 0


class StoredRun(Struct, frozen=True):
    """A record found by a `Look`, its fidelity and its remaining time."""

    record_id: RecordId
    fidelity: Fidelity
    limit_s: float | None
    promise_s: float


class Looked(Struct, frozen=True, tag="looked"):
    """The records of consecutive runs from run `skip` on. Tokens were compared from the root."""

    call_id: Count
    runs: tuple[StoredRun, ...]


class Fetch(Struct, frozen=True, tag="fetch"):
    """Read records into slots. Outcomes: a `Fetched` for each record, in any order.

    The namespace is compared with the records'. Bytes are checked before the outcome.
    """

    call_id: Count
    namespace: Namespace
    record_ids: tuple[RecordId, ...]
    slots: tuple[int, ...]


class Fetched(Struct, frozen=True, tag="fetched"):
    """The outcome for one record of a `Fetch`. Not done: its bytes were damaged, or are gone."""

    call_id: Count
    record_id: RecordId
    is_done: bool
    seconds: float = 0.0


class Renew(Struct, frozen=True, tag="renew"):
    """Note a use of records, and lengthen their limits and promises. The outcome is one `Renewed`.

    `limit_s` None: limits stay as they are. `lease_ids`: leases that cover these records, too.
    """

    call_id: Count
    namespace: Namespace
    record_ids: tuple[RecordId, ...]
    limit_s: float | None = None
    promise_s: float = 0.0
    lease_ids: tuple[str, ...] = ()


class Renewed(Struct, frozen=True, tag="renewed"):
    """The outcome of a `Renew`: the records in `gone` are not there any more. `code` is not empty
    where nothing is known of them, since the storage is away."""

    call_id: Count
    gone: tuple[RecordId, ...] = ()
    code: str = ""


class EraseStored(Struct, frozen=True, tag="erase_stored"):
    """Erase a namespace, one lease of it, or everything under a prefix. The outcome is one
    `StoredErased`, sent when no later start of the storage can find what was named."""

    call_id: Count
    namespace: Namespace
    lease_id: str | None = None
    tokens: tuple[int, ...] | None = None


class StoredErased(Struct, frozen=True, tag="stored_erased"):
    """What an erasure took from the disk. `code` is not empty where it failed."""

    call_id: Count
    records: Count = 0
    bytes: Count = 0
    code: str = ""


class SetStoredQuotas(Struct, frozen=True, tag="set_stored_quotas"):
    """Floors, ceilings and weights of payers on disk, in blocks. No outcome."""

    quotas: tuple[Quota, ...]


class StorageStats(Struct, frozen=True, tag="storage_stats"):
    """The storage's heartbeat. `state`: `open`, `full` (it stores nothing new) or `off`; `reason`
    says why it is not open. Totals count from the start of the process."""

    state: Literal["open", "full", "off"]
    reason: str = ""
    capacity_bytes: Count = 0
    used_bytes: Count = 0
    promised_bytes: Count = 0
    records: Count = 0
    stored_total: Count = 0
    fetched_total: Count = 0
    dropped_total: Count = 0
    expired_total: Count = 0
    damaged_total: Count = 0
    written_bytes_total: Count = 0
    written_bytes_today: Count = 0
    read_bytes_per_s: float = 0.0
    namespaces: Count = 0
    payers: tuple[PayerBytes, ...] = ()


StorageCommand = StoreRuns | Look | Fetch | Renew | EraseStored | SetStoredQuotas
StorageOutcome = Stored | Looked | Fetched | Renewed | StoredErased | StorageStats


class Storage(Protocol):
    """The brain's end of the storage process."""

    def send(self, command: StorageCommand) -> None:
        """Hand over a command. Never blocks; while the process is away, commands fail."""

    def poll(self) -> list[StorageOutcome]:
        """Return the outcomes since the last call. Never blocks."""

    def has_records(self, namespace: Namespace) -> bool:
        """Return whether a `Look` in this namespace may find anything. O(1)."""

    def namespaces(self) -> set[Namespace]:
        """Return the namespaces that have records. O(these)."""

    def take_changed(self) -> set[Namespace]:
        """Return the namespaces that got their first record, or lost their last one, since the last
        call. A process that dies loses none."""

    def close(self) -> None:
        """Let the process finish what it was given, and leave it."""
