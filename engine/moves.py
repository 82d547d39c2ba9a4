"""Commands to move KV below the device, and their outcomes.

A *level* is where copies of blocks lie: the device's pool, host memory, disk. `engine.levels`
decides; a `TransferEngine` copies blocks between the device's pool and slots of host memory; a
`Storage` keeps records on disk and knows all of its index. Values are frozen. Only the storage
process knows the wall clock: all times are durations in seconds from the message.

Nothing here waits: commands are handed over, and outcomes are polled. Each command has one outcome:
it is *done*, or it has failed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from engine.api import Count, Fidelity, Namespace, Payer, Peer, Quota
from engine.statistics import FidelityBytes, PayerBytes

RecordId = int
"""A record on disk; never used again, and 0 for none."""
ROOT: RecordId = 0
WHOLE = "whole"
"""The format of a copy with a run's blocks of all KV groups, as they are. Followed by a minus and a
packed format: with each of them packed. Another format has the block of group 0 alone."""
ALIGNMENT = 64
"""Bytes: slots begin at multiples, for the vector instructions that pack and unpack them."""


class SlotFormat(Struct, frozen=True):
    """A format of copies: its name, empty for the pool's own bytes; bytes of a copy; fidelity."""

    name: str
    slot_bytes: Count
    fidelity: Fidelity = "exact"


class SlotLayout(Struct, frozen=True):
    """How host memory is cut into slots: slabs of `slab_bytes`, in each of which all have one size.

    The last slab may be shorter. A slot's number is that of its slab times `slots_per_slab`, which
    is what a slab holds of the least size `slot_bytes_min`, plus its position: numbers are dense,
    below `slots`, and say nothing of the size. So a slot is always named together with its bytes.
    """

    memory_bytes: Count
    slab_bytes: Count
    slot_bytes_min: Count

    @classmethod
    def uniform(cls, slots: int, slot_bytes: int) -> SlotLayout:
        """Return the layout of slots of one size: each is a slab."""
        stride = stride_of(slot_bytes)
        return cls(slots * stride, stride, slot_bytes)

    @property
    def slabs(self) -> int:
        """Return the number of slabs."""
        return -(-self.memory_bytes // self.slab_bytes)

    @property
    def slots_per_slab(self) -> int:
        """Return the most slots of a slab."""
        return self.slab_bytes // stride_of(self.slot_bytes_min)

    @property
    def slots(self) -> int:
        """Return the bound of slot numbers."""
        return self.slabs * self.slots_per_slab

    def slots_in(self, slab: int, slot_bytes: int) -> int:
        """Return how many slots of this size a slab holds."""
        left = min(self.slab_bytes, self.memory_bytes - slab * self.slab_bytes)
        return min(self.slots_per_slab, left // stride_of(slot_bytes))

    def capacity(self, slot_bytes: int) -> int:
        """Return how many slots of this size there would be if all had it."""
        whole, rest = divmod(self.memory_bytes, self.slab_bytes)
        last = min(self.slots_per_slab, rest // stride_of(slot_bytes))
        return last + (whole * self.slots_in(0, slot_bytes) if whole else 0)

    def offset(self, slot: int, slot_bytes: int) -> int:
        """Return where a slot of this size begins. Raises IndexError if there is none."""
        stride, per_slab = stride_of(slot_bytes), self.slots_per_slab
        slab, position = divmod(slot, per_slab) if per_slab else (-1, 0)
        start = slab * self.slab_bytes
        left = min(self.slab_bytes, self.memory_bytes - start)  # `slots_in`, at every move
        if slab < 0 or position >= min(per_slab, left // stride):
            raise IndexError(f"slot {slot} of {slot_bytes} bytes; expected one of {self.slots}")
        return start + position * stride


def stride_of(slot_bytes: int) -> int:
    """Return the bytes from one slot of this size to the next."""
    return -(-slot_bytes // ALIGNMENT) * ALIGNMENT


def whole_format(packed: str) -> str:
    """Return the format of a copy of all KV groups, each of whose blocks is in a packed format."""
    return f"{WHOLE}-{packed}"


def packed_part(name: str) -> str:
    """Return the packed format of each block of a copy; empty where blocks are as they are."""
    return "" if name == WHOLE else name.removeprefix(f"{WHOLE}-")


def is_whole_format(name: str) -> bool:
    """Return whether copies of a format have the blocks of all KV groups."""
    return name == WHOLE or name.startswith(f"{WHOLE}-")


class Move(Struct, frozen=True, gc=False):
    """Copy the device's block `block` to host slot `slot` (`offload`), or back (`load`).

    The caller holds blocks and slot until the outcome. `check`: for a load, the digest that the
    slot's bytes must have; empty where it need not be checked. `format`: the packed format of the
    copy, or one of all groups; empty: the block's own bytes. `beside`: for a copy of all groups the
    blocks of the window groups in their order; below 0 for one that a load does not fill.
    """

    move_id: int
    kind: Literal["offload", "load"]
    block: int
    slot: int
    check: bytes = b""
    format: str = ""
    beside: tuple[int, ...] = ()


class Moved(Struct, frozen=True, gc=False):
    """The outcome of a `Move`. `check`: the xxh3-128 digest of the slot's bytes after an offload.

    `seconds`: from the start of its copy to its end. `is_unpackable`: the block has values that its
    format cannot hold; a copy of its own bytes may still be made. `is_damaged`: not done, since the
    slot's bytes differ from the digest.
    """

    move_id: int
    is_done: bool
    check: bytes = b""
    seconds: float = 0.0
    is_unpackable: bool = False
    is_damaged: bool = False


LOADS_MAX = 64
"""Loads of one block under way at a time, where the steps' memory is the host's too."""
OFFLOADS_MAX = 64
"""The same for offloads."""


class TransferEngine(Protocol):
    """Copies between the device's pool and the slots of host memory, beside the steps.

    An offload reads a block whose step has been collected. A load's target is written by no
    launched step, and read by steps launched after the outcome was polled.
    """

    bytes_per_s: float
    """The rate of loads to expect until it is measured."""
    loads_max: int
    """Most loads of one block that are under way at a time: what is urgent waits behind them."""
    offloads_max: int
    """The same for offloads. More are begun once a step, so that these are what a step leaves."""

    @property
    def unusable_bytes(self) -> int:
        """Return the bytes of host memory to which nothing can be copied: moves there fail."""

    layout: SlotLayout
    """Host memory."""
    formats: tuple[SlotFormat, ...]
    """The formats of copies, the pool's own first. A copy fills its slot."""

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin moves, in order. Never blocks."""

    def poll(self) -> list[Moved]:
        """Return the outcomes since the last call. Never blocks."""

    def close(self) -> None:
        """End what is under way and release the memory."""


# -- storage ------------------------------------------------------------------------------------


class PromiseTerms(Struct, frozen=True):
    """How a promise is counted and renewed, for the engine that takes it over.

    `name`: the retention class that it is counted under. A read moves its end to `renew_promise_s`
    and its limit to `renew_limit_s` after the read, the end of a use to `use_*_s` after that, under
    the class `renew_name` or `use_name`; minus infinity where nothing does. `window_groups`: those
    whose blocks are promised with the run.
    """

    name: str
    renew_name: str = ""
    use_name: str = ""
    renew_limit_s: float = -math.inf
    renew_promise_s: float = -math.inf
    use_limit_s: float = -math.inf
    use_promise_s: float = -math.inf
    window_groups: tuple[Count, ...] = ()


class RunToStore(Struct, frozen=True):
    """One full run of tokens whose copy lies in `slot`, with the digest `check` of its bytes.

    `limit_s`: not matched after; None: no limit. `promise_s`: not dropped before; 0: no promise.
    `terms`: of that promise.
    """

    tokens: tuple[int, ...]
    slot: int
    check: bytes
    limit_s: float | None = None
    promise_s: float = 0.0
    terms: PromiseTerms | None = None


class StoreRuns(Struct, frozen=True, tag="store"):
    """Store consecutive runs below the record `parent`. The outcome is one `Stored`.

    `slot_bytes`: of each slot; `fidelity`: of the copies in them. `lease_ids`: the leases that
    cover them, so that the erasure of a lease finds them. `may_leave`: records of this namespace
    may go on to a remote store. The caller holds the slots until the outcome.
    """

    call_id: Count
    namespace: Namespace
    payer: Payer
    parent: RecordId
    runs: tuple[RunToStore, ...]
    slot_bytes: Count
    lease_ids: tuple[str, ...] = ()
    fidelity: Fidelity = "exact"
    may_leave: bool = False


class Stored(Struct, frozen=True, tag="stored"):
    """The records of a `StoreRuns`, durable, one a run from the first; fewer where it failed.

    A run that was stored before keeps its record, unless that is of another size or fidelity: it is
    replaced, and what hangs on it goes. `code` says why runs are missing: `full`,
    `over_quota`, `write_budget` (the day's is spent), `no_parent`, `write_failed`, `damaged`,
    `erased` (the namespace was erased meanwhile), `closed`.
    """

    call_id: Count
    record_ids: tuple[RecordId, ...]
    code: str = ""


class Look(Struct, frozen=True, tag="look"):
    """Find the longest stored prefix of `tokens`. The outcome is one `Looked`.

    `shared`: a store that replicas share is asked, too, for copies in this format; where it must be
    read first, the answer waits `shared_s` for that at most.
    """

    call_id: Count
    namespace: Namespace
    tokens: tuple[int, ...]
    shared: SlotFormat | None = None
    shared_s: float = 0.0


class StoredRun(Struct, frozen=True):
    """A record found by a `Look`: its fidelity, remaining time, bytes, and where it is."""

    record_id: RecordId
    fidelity: Fidelity
    limit_s: float | None
    promise_s: float
    slot_bytes: Count
    level: Literal["disk", "remote"] = "disk"


class Looked(Struct, frozen=True, tag="looked"):
    """The records of consecutive runs from the first. Tokens were compared from the root.

    `shared_runs`: how many runs behind them a shared store is known to have.
    """

    call_id: Count
    runs: tuple[StoredRun, ...]
    shared_runs: Count = 0


class Fetch(Struct, frozen=True, tag="fetch"):
    """Read records into slots. Outcomes: a `Fetched` for each record, in any order.

    The namespace is compared with the records'; a record that has not the `slot_bytes` of the slots
    has failed. Bytes are checked before the outcome.
    """

    call_id: Count
    namespace: Namespace
    record_ids: tuple[RecordId, ...]
    slots: tuple[int, ...]
    slot_bytes: Count


class Fetched(Struct, frozen=True, tag="fetched"):
    """The outcome for one record of a `Fetch`. Not done: its bytes were damaged (`is_damaged`), or
    are gone. `level`: where it was. `check`: the xxh3-128 digest of the slot's bytes, if done.
    """

    call_id: Count
    record_id: RecordId
    is_done: bool
    seconds: float = 0.0
    level: Literal["disk", "remote"] = "disk"
    is_damaged: bool = False
    check: bytes = b""


class Renew(Struct, frozen=True, tag="renew"):
    """Note a use of records, and lengthen their limits and promises. The outcome is one `Renewed`.

    `limit_s` None: limits stay as they are. `lease_ids`: leases that cover these records, too.
    `terms`: of the promise, None where they stay as they are.
    """

    call_id: Count
    namespace: Namespace
    record_ids: tuple[RecordId, ...]
    limit_s: float | None = None
    promise_s: float = 0.0
    lease_ids: tuple[str, ...] = ()
    terms: PromiseTerms | None = None


class Renewed(Struct, frozen=True, tag="renewed"):
    """The outcome of a `Renew`: the records in `gone` are not there any more. `code` is not empty
    where nothing is known of them, since the storage is away."""

    call_id: Count
    gone: tuple[RecordId, ...] = ()
    code: str = ""


class Recall(Struct, frozen=True, tag="recall"):
    """Tell the next `most` promised records behind the record `after`, with those that they hang
    on, the first ones where it is `ROOT`. The outcome is one `Recalled`."""

    call_id: Count
    after: RecordId = ROOT
    most: Count = 128


class RecalledRun(Struct, frozen=True):
    """A record that is promised, or that a promised one hangs on; parents come before children.

    `promise_s`: 0 for one that is not promised itself. `terms`: None where they are not known.
    `lease_ids`: the leases that cover it. Otherwise as `StoredRun`.
    """

    record_id: RecordId
    parent: RecordId
    namespace: Namespace
    payer: Payer
    tokens: tuple[int, ...]
    fidelity: Fidelity
    slot_bytes: Count
    limit_s: float | None = None
    promise_s: float = 0.0
    terms: PromiseTerms | None = None
    lease_ids: tuple[str, ...] = ()
    level: Literal["disk", "remote"] = "disk"


class Recalled(Struct, frozen=True, tag="recalled"):
    """The outcome of a `Recall`. `last`: the record to go on behind; `ROOT` where there are no
    more. `code` is not empty where nothing is known, since the storage is away."""

    call_id: Count
    runs: tuple[RecalledRun, ...] = ()
    last: RecordId = ROOT
    code: str = ""


class EraseStored(Struct, frozen=True, tag="erase_stored"):
    """Erase a namespace, one lease of it, or everything under a prefix. The outcome is one
    `StoredErased`, sent when no later start of the storage can find what was named."""

    call_id: Count
    namespace: Namespace
    lease_id: str | None = None
    tokens: tuple[int, ...] | None = None


class SharedErased(Struct, frozen=True):
    """What an erasure has deleted in a shared store. `code`: why not all, in words; empty if all is
    gone."""

    objects: Count = 0
    bytes: Count = 0
    code: str = ""


class StoredErased(Struct, frozen=True, tag="stored_erased"):
    """What an erasure took from the disk. `code` is not empty where it failed. `is_shredded`: the
    key of what was named is destroyed, so that no copy of it opens again, wherever it is. `shared`:
    what a shared store has deleted, whose keys are not destroyed; None without one."""

    call_id: Count
    records: Count = 0
    bytes: Count = 0
    code: str = ""
    is_shredded: bool = False
    shared: SharedErased | None = None


class SetStoredQuotas(Struct, frozen=True, tag="set_stored_quotas"):
    """Floors, ceilings and weights of payers on disk, in blocks. No outcome."""

    quotas: tuple[Quota, ...]


class KeepHere(Struct, frozen=True, tag="keep_here"):
    """Put no record of these namespaces into the remote store from now on, also where a `StoreRuns`
    allows it. What is there stays until it is erased or dropped. No outcome."""

    namespaces: tuple[Namespace, ...]


class RemoteStats(Struct, frozen=True):
    """The remote store in the storage's heartbeat. `capacity_bytes`: 0 without a bound.
    `pending_erasures`: objects whose records are gone, and which it has not deleted yet.
    `written_bytes_total`: of what was put into a shared store."""

    state: Literal["open", "full", "off"]
    reason: str = ""
    capacity_bytes: Count = 0
    used_bytes: Count = 0
    records: Count = 0
    stored_total: Count = 0
    fetched_total: Count = 0
    failed_total: Count = 0
    damaged_total: Count = 0
    dropped_total: Count = 0
    pending_erasures: Count = 0
    read_bytes_per_s: float = 0.0
    written_bytes_total: Count = 0


class StorageStats(Struct, frozen=True, tag="storage_stats"):
    """The storage's heartbeat. `state`: `open`, `full` (it stores nothing new) or `off`; `reason`
    says why it is not open. Totals count from the start of the process. `remote`: the remote store,
    None where there is none."""

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
    copies: tuple[FidelityBytes, ...] = ()
    remote: RemoteStats | None = None


# -- peers ---------------------------------------------------------------------------------------

PeerMiss = Literal[
    "", "busy", "refused", "lacking", "late", "lost", "damaged", "stopped", "unreadable"
]
"""Why a run was not fetched from another engine: too many fetches at a time; it refuses; it has not
all; not before the deadline; the connection ended; other bytes than were sent; it was stopped; its
pool is out of reach."""


class FetchRuns(Struct, frozen=True, tag="fetch_runs"):
    """Fetch copies of the last runs of `tokens`, from run `first` on, from another engine into
    slots of one format; `peer` None: from a shared store. The outcomes are a `FetchedRun` for each,
    in order, after `timeout_s` at the latest; with the first that fails all behind it do. The
    caller holds the slots till then.
    """

    call_id: Count
    peer: Peer | None
    namespace: Namespace
    tokens: tuple[int, ...]
    first: Count
    slots: tuple[int, ...]
    form: SlotFormat
    timeout_s: float


class FetchedRun(Struct, frozen=True, tag="fetched_run"):
    """The outcome for the next run of a `FetchRuns`: its slot is full of verified bytes with the
    digest `check`, or `why` not. `limit_s`: as in `StoredRun`; `seconds`: that it took.
    """

    call_id: Count
    why: PeerMiss = ""
    check: bytes = b""
    limit_s: float | None = None
    seconds: float = 0.0


class FetchBlocks(Struct, frozen=True):
    """Copy blocks of the runs of `tokens`, from run `first` on, from the pool of an engine whose
    pool this one reads into the blocks `blocks` of this one's. The outcome is one `FetchedBlocks`,
    soon after `timeout_s` at the latest. The caller holds the blocks till then, and no launched
    step writes to them.
    """

    call_id: Count
    peer: Peer
    namespace: Namespace
    tokens: tuple[int, ...]
    first: Count
    blocks: tuple[int, ...]
    timeout_s: float


class FetchedBlocks(Struct, frozen=True):
    """The outcome of a `FetchBlocks`: the first blocks are in place, one for each of `limits_s`,
    and were held there until they were; `why` not all. `limits_s`: as `limit_s` in `StoredRun`;
    `seconds`: that the copy took; `fidelity`: of the least exact block.
    """

    call_id: Count
    why: PeerMiss = ""
    limits_s: tuple[float | None, ...] = ()
    seconds: float = 0.0
    fidelity: Fidelity = "exact"


class LentBlocks(Struct, frozen=True):
    """The blocks that have the next runs, in the pool of this handle, and are held there.
    `limits_s`: as `limit_s` in `StoredRun`; `fidelity`: of the least exact one."""

    pool: bytes
    blocks: tuple[Count, ...]
    limits_s: tuple[float | None, ...]
    fidelity: Fidelity = "exact"


class StopFetch(Struct, frozen=True, tag="stop_fetch"):
    """Have a `FetchRuns` fail soon. No outcome of its own."""

    call_id: Count


# -- the ports of both ---------------------------------------------------------------------------

StorageCommand = (
    StoreRuns
    | Look
    | Fetch
    | FetchRuns
    | StopFetch
    | Renew
    | Recall
    | EraseStored
    | SetStoredQuotas
    | KeepHere
)
StorageOutcome = (
    Stored | Looked | Fetched | FetchedRun | Renewed | Recalled | StoredErased | StorageStats
)


class Storage(Protocol):
    """The storage process, as `engine.levels` sees it."""

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


class Peers(Protocol):
    """The other engines of the model, as `engine.levels` sees them."""

    def fetch(self, command: FetchRuns) -> None:
        """Begin a fetch. Never blocks."""

    def stop(self, call_id: int) -> None:
        """Have a fetch fail soon; it still has all its outcomes."""

    def poll(self) -> list[FetchedRun]:
        """Return the outcomes since the last call. Never blocks."""

    def close(self) -> None:
        """End what is under way: no slot is written any more."""


class NearPools(Protocol):
    """The device pools of one host: this engine's, and those of others that it reads."""

    domain: str
    """`EngineInfo.pool_domain`: engines with the same one read each other's pools."""
    handle: bytes
    """With which another engine finds this one's pool."""
    bytes_per_s: float
    """The rate of copies to expect until it is measured."""

    def read(self, handle: bytes, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Copy blocks of another engine's pool to blocks of this one's, and wait for that. Any
        thread calls it. Raises OSError, ValueError or RuntimeError: it is out of reach, or of
        another size.
        """

    def let_go_ended(self) -> None:
        """Let go the pools of engines that have ended, whose memory stays as long as anybody has
        it open. Never blocks."""

    def close(self) -> None:
        """Let go the other pools: nothing reads them any more."""


class NearPeers(Protocol):
    """Engines whose pools this one reads, as `engine.levels` sees them."""

    def fetch_blocks(self, command: FetchBlocks) -> None:
        """Begin a fetch. Never blocks."""

    def stop(self, call_id: int) -> None:
        """Have a fetch fail soon; it still has its outcome."""

    def poll_blocks(self) -> list[FetchedBlocks]:
        """Return the outcomes since the last call. Never blocks."""


class ShareRuns(Struct, frozen=True):
    """Another engine asks for copies of the runs of `tokens` from run `first` on. Its gateway's
    ticket was valid. Copies in another format than the one of this name are not wanted. `is_near`:
    it reads this engine's pool, and wants the numbers of blocks.
    """

    namespace: Namespace
    tokens: tuple[int, ...]
    first: Count
    format: str
    is_near: bool = False


class RunReader(Protocol):
    """Sends what another engine has asked for."""

    def take(self, check: bytes, limit_s: float | None, content: memoryview) -> None:
        """Send the next run, whose slot is held until this is told as sent. Never blocks."""

    def lend(self, lent: LentBlocks) -> None:
        """Send which blocks are held until the reader has returned them, or leaves. Never
        blocks."""

    def end(self, why: str) -> None:
        """Send that there is no more, and `why` not all. Never blocks."""
