"""What other owners have in a shared store: their manifests, and the runs that are fetched.

A look is answered from the manifests of its namespace. Where these were never read, or some seconds
ago, it waits for them, but no longer than its engine says. A fetch gets some objects at a time and
tells them in order; a slot gets bytes only after they have opened as the very run that was wanted,
and only while the fetch goes on. The storage process's main thread uses it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from engine.api import FIDELITIES, Namespace, Payer
from engine.moves import FetchedRun, FetchRuns, Look, Looked, PeerMiss
from engine.storage.index.index_file import FOREVER_MS
from engine.storage.remote.link import LATE, RemoteLink
from engine.storage.remote.objects import ObjectMissing, RemoteStore
from engine.storage.remote.shared_objects import (
    MANIFEST_BYTES_MAX,
    ROOT_NAME,
    Entries,
    SharedEntry,
    chain,
    manifest_path,
    object_path,
    open_manifest,
    open_run,
)
from engine.storage.sealing.seals import Seals, SharedNamespace
from engine.storage.slabs.record import HEADER_BYTES, DamagedRecord, pack_run

READS: Final[Payer] = b"\0shared"
"""What reads, which concern several payers, count as."""
AGE_S: Final = 5.0
"""Manifests that are older are read again at the next look."""
OWNERS_MAX: Final = 256
"""Manifests of a namespace that are read."""
KNOWN_MAX: Final = 2**18
"""Objects that are known, over all namespaces; those least recently asked for are forgotten."""
GETS_MAX: Final = 8
"""Objects of a fetch that are under way at a time."""
FETCHES_MAX: Final = 4
"""Fetches at a time; a further one fails at once."""
SPACES_MAX: Final = 1_024
Answer = Callable[[Looked], None]


class SharedSpaces:
    """The derived keys of namespaces, the latest of them kept."""

    def __init__(self, seals: Seals, model_digest: str) -> None:
        self._seals, self._model_digest = seals, model_digest
        self._spaces: OrderedDict[Namespace, SharedNamespace] = OrderedDict()

    def of(self, namespace: Namespace) -> SharedNamespace:
        """Return a namespace's keys. 50 us the first time."""
        found = self._spaces.get(namespace)
        if found is None:
            found = self._spaces[namespace] = self._seals.shared(self._model_digest, namespace)
            if len(self._spaces) > SPACES_MAX:
                self._spaces.popitem(last=False)
        else:
            self._spaces.move_to_end(namespace)
        return found


@dataclass(slots=True)
class _Known:
    """What is known of a namespace: None until its manifests were read. `missing`: what is listed
    and was not there; `waiting`: looks, with the instants until which they wait."""

    entries: Entries | None = None
    missing: set[bytes] = field(default_factory=set)
    read_at_s: float = 0.0
    is_reading: bool = False
    waiting: list[tuple[float, Look, Looked, Answer]] = field(default_factory=list)


class _Read(NamedTuple):
    """What one reading of manifests has brought."""

    entries: dict[bytes, SharedEntry]
    damaged: list[str]


@dataclass(slots=True)
class _Fetch:
    """A fetch under way. `begun`, `done`: of its runs, the first ones that were asked for, and
    told; `came`: those between that are here, None for one that is not; `why`: of that one."""

    command: FetchRuns
    shared: SharedNamespace
    names: list[bytes]
    until_s: float
    begun: int = 0
    done: int = 0
    came: dict[int, tuple[memoryview, bytes] | None] = field(default_factory=dict)
    whys: dict[int, PeerMiss] = field(default_factory=dict)
    asked_s: dict[int, float] = field(default_factory=dict)


class SharedReads:
    """What one engine reads of a shared store."""

    def __init__(
        self,
        link: RemoteLink,
        spaces: SharedSpaces,
        owner: str,
        run_tokens: int,
        view: Callable[[int, int], memoryview],
        now_ms: Callable[[], int],
        monotonic_s: Callable[[], float],
    ) -> None:
        """`owner`: this one, whose manifests are not read; `view`: a slot's bytes, of a size."""
        self._link, self._spaces, self._owner = link, spaces, owner
        self._run_tokens, self._view = run_tokens, view
        self._now_ms, self._monotonic_s = now_ms, monotonic_s
        self._known: OrderedDict[Namespace, _Known] = OrderedDict()
        self._fetches: dict[int, _Fetch] = {}
        self._told: list[FetchedRun] = []
        self.fetched_total = self.damaged_total = 0
        self.fetched_bytes, self.fetched_s = 0, 0.0
        self.misses = Counter[PeerMiss]()

    # -- manifests ------------------------------------------------------------------------------

    def entries(self, namespace: Namespace) -> Entries | None:
        """Return what other owners list; None where that is not known yet, but asked for."""
        known = self._known_of(namespace)
        is_old = self._monotonic_s() - known.read_at_s >= AGE_S
        if (known.entries is None or is_old) and not known.is_reading and self._link.is_open:
            known.is_reading = True
            shared, read = self._spaces.of(namespace), _Read({}, [])
            work = partial(_read_manifests, shared, self._owner, read)
            self._link.run(READS, work, partial(self._read, namespace, known, read))
        return known.entries

    def is_listed(self, namespace: Namespace, name: bytes) -> bool:
        """Return whether another owner lists a run that was not found missing. O(1)."""
        known = self._known_of(namespace)
        return name in (known.entries or ()) and name not in known.missing

    def _known_of(self, namespace: Namespace) -> _Known:
        known = self._known.setdefault(namespace, _Known())
        self._known.move_to_end(namespace)
        return known

    def _read(self, namespace: Namespace, known: _Known, read: _Read, failure: str) -> None:
        known.is_reading = False
        self.damaged_total += len(read.damaged)
        if self._known.get(namespace) is known:  # not forgotten meanwhile
            known.read_at_s = self._monotonic_s()
            if not failure:
                known.entries = read.entries
            self._forget_some()
        self._answer(known, lambda until_s: True)

    def _forget_some(self) -> None:
        total = sum(len(one.entries or ()) for one in self._known.values())
        while len(self._known) > SPACES_MAX or (total > KNOWN_MAX and len(self._known) > 1):
            _, gone = self._known.popitem(last=False)
            total -= len(gone.entries or ())
            self._answer(gone, lambda until_s: True)

    def forget(self, namespace: Namespace) -> None:
        """Forget what is known of a namespace that is erased."""
        if (known := self._known.pop(namespace, None)) is not None:
            self._answer(known, lambda until_s: True)

    # -- looks ----------------------------------------------------------------------------------

    def look(self, command: Look, here: Looked, answer: Answer) -> None:
        """Add to the answer of a look how many more runs the store has behind those `here`."""
        is_whole = len(here.runs) == len(command.tokens) // self._run_tokens
        if command.shared is None or is_whole or not self._link.is_open:
            answer(here)
            return
        entries = self.entries(command.namespace)
        known = self._known_of(command.namespace)
        if known.is_reading and command.shared_s > 0:
            until_s = self._monotonic_s() + command.shared_s
            known.waiting.append((until_s, command, here, answer))
        else:
            answer(self._counted(entries, command, here))

    def _counted(self, entries: Entries | None, command: Look, here: Looked) -> Looked:
        if not entries or command.shared is None:
            return here
        names = chain(self._spaces.of(command.namespace), command.tokens, self._run_tokens)
        wanted = command.shared.slot_bytes, FIDELITIES.index(command.shared.fidelity)
        now_ms, more = self._now_ms(), 0
        known = self._known_of(command.namespace)
        for name in names[len(here.runs) :]:
            one = None if name in known.missing else entries.get(name)
            if one is None or (one.payload_bytes, one.fidelity) != wanted:
                break
            if one.limit_ms <= now_ms:
                break
            more += 1
        return replace(here, shared_runs=more)

    def _answer(self, known: _Known, is_due: Callable[[float], bool]) -> None:
        due = [one for one in known.waiting if is_due(one[0])]
        known.waiting = [one for one in known.waiting if not is_due(one[0])]
        for _, command, here, answer in due:
            answer(self._counted(known.entries, command, here))

    @property
    def next_s(self) -> float | None:
        """Return the instant at which something is late; None without one. O(what waits)."""
        waits = [one[0] for known in self._known.values() for one in known.waiting]
        return min([*waits, *(one.until_s for one in self._fetches.values())], default=None)

    # -- fetches --------------------------------------------------------------------------------

    def fetch(self, command: FetchRuns) -> None:
        """Begin a fetch; its outcomes are `take_told`."""
        tokens = command.tokens[: (command.first + len(command.slots)) * self._run_tokens]
        shared = self._spaces.of(command.namespace)
        names = chain(shared, tokens, self._run_tokens)
        until_s = self._monotonic_s() + command.timeout_s
        one = _Fetch(command, shared, names, until_s)
        self._fetches[command.call_id] = one
        if len(self._fetches) > FETCHES_MAX:
            self._fail(one, "busy")
        elif len(names) < command.first + len(command.slots) or not self._link.is_open:
            self._fail(one, "lost" if len(names) else "lacking")
        else:
            self._go_on(one)

    def stop(self, call_id: int) -> None:
        """Have a fetch fail now."""
        if (one := self._fetches.get(call_id)) is not None:
            self._fail(one, "stopped")

    def _go_on(self, one: _Fetch) -> None:
        """Ask for the next runs of a fetch."""
        command = one.command
        entries = self.entries(command.namespace) or {}
        most = min(len(command.slots), one.done + GETS_MAX)
        while one.begun < most and not one.whys:
            number, one.begun = one.begun, one.begun + 1
            at = command.first + number
            entry = entries.get(one.names[at])
            wanted = command.form.slot_bytes, FIDELITIES.index(command.form.fidelity)
            if entry is None or (entry.payload_bytes, entry.fidelity) != wanted:
                one.came[number], one.whys[number] = None, "lacking"
                continue
            tokens = command.tokens[at * self._run_tokens : (at + 1) * self._run_tokens]
            parent = one.names[at - 1] if at else ROOT_NAME
            found: list[tuple[memoryview, bytes]] = []
            whys: list[PeerMiss] = []
            what = one.shared, one.names[at], parent, pack_run(tokens), entry
            one.asked_s[number] = self._monotonic_s()
            self._link.run(
                READS,
                partial(_get, *what, found, whys),
                partial(self._got, one, number, entry, found, whys),
            )
            if command.call_id not in self._fetches:
                return  # the link has failed it at once
        self._tell(one)

    def _got(
        self,
        one: _Fetch,
        number: int,
        entry: SharedEntry,
        found: list[tuple[memoryview, bytes]],
        whys: list[PeerMiss],
        failure: str,
    ) -> None:
        """Take a run that has come, or has not. After the fetch's end nothing more counts."""
        if self._fetches.get(one.command.call_id) is not one:
            return
        if failure or not found:
            why: PeerMiss = "late" if failure == LATE else "lost"
            one.came[number], one.whys[number] = None, whys[0] if whys and not failure else why
            if one.whys[number] == "lacking":
                name = one.names[one.command.first + number]
                self._known_of(one.command.namespace).missing.add(name)
        else:
            one.came[number] = found[0]
            now_s = self._monotonic_s()
            self.fetched_s += (now_s - one.asked_s[number]) / GETS_MAX
        self._tell(one)
        if self._fetches.get(one.command.call_id) is one:
            self._go_on(one)

    def _tell(self, one: _Fetch) -> None:
        """Fill the slots of the next runs that are here, in order, and tell them."""
        command, size = one.command, one.command.form.slot_bytes
        while one.done in one.came:
            came = one.came.pop(one.done)
            if came is None:
                self._fail(one, one.whys[one.done])
                return
            payload, check = came
            try:
                self._view(command.slots[one.done], size)[:] = payload
            except IndexError:  # no such slot
                self._fail(one, "lost")
                return
            took_s = self._monotonic_s() - one.asked_s[one.done]
            limit_s = self._limit_s(one, one.done)
            if limit_s is not None and limit_s <= 0:
                self._fail(one, "lacking")
                return
            self._told.append(FetchedRun(command.call_id, "", check, limit_s, took_s))
            self.fetched_total += 1
            self.fetched_bytes += size
            one.done += 1
        if one.done == len(command.slots):
            del self._fetches[command.call_id]

    def _limit_s(self, one: _Fetch, number: int) -> float | None:
        """Return the seconds until a run's limit, as its owner says now; 0 if it is not there."""
        known = self._known.get(one.command.namespace)
        entries = None if known is None else known.entries
        entry = None if entries is None else entries.get(one.names[one.command.first + number])
        if entry is None:
            return 0.0
        return None if entry.limit_ms >= FOREVER_MS else (entry.limit_ms - self._now_ms()) / 1_000

    def _fail(self, one: _Fetch, why: PeerMiss) -> None:
        """End a fetch: what it has not told fails."""
        del self._fetches[one.command.call_id]
        self.misses[why] += 1
        self.damaged_total += why == "damaged"
        left = len(one.command.slots) - one.done
        self._told += [FetchedRun(one.command.call_id, why)] * left

    def tick(self) -> None:
        """End what is late."""
        now_s = self._monotonic_s()
        for known in list(self._known.values()):
            self._answer(known, lambda until_s: now_s >= until_s)
        for one in [one for one in self._fetches.values() if now_s >= one.until_s]:
            self._fail(one, "late")

    def fail_all(self) -> None:
        """End all fetches, and answer all looks with what is known: the disk is lost."""
        for known in self._known.values():
            self._answer(known, lambda until_s: True)
        for one in list(self._fetches.values()):
            self._fail(one, "lost")

    def take_told(self) -> list[FetchedRun]:
        """Return the outcomes of fetches since the last call."""
        told, self._told = self._told, []
        return told


def _read_manifests(shared: SharedNamespace, owner: str, read: _Read, store: RemoteStore) -> None:
    """Read all other owners' manifests. For another thread."""
    prefix = manifest_path(shared.folder, "")
    for path in store.names(prefix, OWNERS_MAX):
        whose = path.removeprefix(prefix)
        if whose == owner:
            continue
        try:
            data = store.get(path, MANIFEST_BYTES_MAX + 1)
            listed = open_manifest(shared, whose, data)
        except ObjectMissing:
            continue  # it was erased meanwhile
        except DamagedRecord:
            read.damaged.append(whose)
            continue
        for name, one in listed.items():
            other = read.entries.get(name)
            if other is None or other.limit_ms < one.limit_ms:
                read.entries[name] = one


def _get(
    shared: SharedNamespace,
    name: bytes,
    parent: bytes,
    run: bytes,
    entry: SharedEntry,
    found: list[tuple[memoryview, bytes]],
    whys: list[PeerMiss],
    store: RemoteStore,
) -> None:
    """Get and open an object. For another thread."""
    try:
        sealed = store.get(object_path(shared.folder, name), HEADER_BYTES + entry.payload_bytes + 1)
        payload, check = open_run(shared, sealed, parent, run, entry)
    except ObjectMissing:
        whys.append("lacking")
        return
    except DamagedRecord:
        whys.append("damaged")
        return
    found.append((memoryview(bytes(payload)), check))  # this thread's next one uses the buffer
