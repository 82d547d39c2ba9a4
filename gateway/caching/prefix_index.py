"""The book of written prefixes: which were kept at a breakpoint, in which classes, until when.

Entries are bookkeeping beside the engine's tree: the tree knows what is there, the book what was
agreed. An entry is found by its namespace and a digest of its tokens; several dialects share one,
each with its own lease. Bounded: the least recently used entry of the tenant with too many goes.
It knows no dialect and reads no clock; `contract` calls it.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from msgspec import Struct

from engine.api import Namespace, Retention

DIGEST_BYTES = 16

SAYING_MAX = 32
ERASED_MAX = 10_000

Key = tuple[Namespace, bytes]
T = TypeVar("T")
U = TypeVar("U")


class Lease:
    """One class on one entry. `promised_until_s`: -inf where nothing was granted."""

    __slots__ = ("expires_at_s", "promised_until_s", "retention")

    def __init__(self, retention: Retention, started_s: float, *, is_granted: bool) -> None:
        self.retention = retention
        self.expires_at_s = -math.inf
        self.promised_until_s = -math.inf
        self.start(started_s, is_granted=is_granted)

    def start(self, now_s: float, *, is_granted: bool) -> None:
        """The clock starts, again perhaps: only ever later."""
        terms = self.retention
        limit_s = math.inf if terms.limit_s is None else terms.limit_s
        promise_s = limit_s if terms.pinned else min(terms.promise_s, limit_s)
        self.expires_at_s = max(self.expires_at_s, now_s + limit_s)
        if is_granted:
            self.promised_until_s = max(self.promised_until_s, now_s + promise_s)

    def renew(self, now_s: float) -> None:
        """It was read."""
        if self.retention.renewed_on_read and self.retention.clock != "absolute":
            self.start(now_s, is_granted=self.promised_until_s > now_s)


class Origin(Struct, frozen=True):
    """Who writes, and with what tokens are made of words: which model and which template."""

    writer: int = 0
    model: str = ""
    template: str = ""


NOBODY = Origin()


class IndexedPrefix:
    """A prefix of `tokens` tokens that some call wrote. `owner`: whose bound it counts against.

    `epoch` and `losses` say how the engine stood then: which start of it, and how many blocks the
    namespace had lost by each cause; later they tell why the prefix is gone. `origin` and `words`:
    who wrote it first, with what, and a digest of what it says.
    """

    __slots__ = ("epoch", "key", "leases", "losses", "origin", "owner", "tokens", "words")

    def __init__(
        self,
        key: Key,
        tokens: int,
        owner: int,
        epoch: str,
        losses: dict[str, int],
        origin: Origin,
        words: bytes,
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.owner = owner
        self.epoch = epoch
        self.losses = losses
        self.origin = origin
        self.words = words
        self.leases: dict[str, Lease] = {}

    def is_live(self, now_s: float) -> bool:
        return any(lease.expires_at_s > now_s for lease in self.leases.values())

    def is_promised(self, now_s: float) -> bool:
        return any(lease.promised_until_s > now_s for lease in self.leases.values())

    def best(self, now_s: float) -> Lease | None:
        """The live lease that promises longest."""
        live = [lease for lease in self.leases.values() if lease.expires_at_s > now_s]
        return max(
            live, key=lambda lease: (lease.promised_until_s, lease.expires_at_s), default=None
        )


class PrefixIndex:
    """All entries of one gateway. Belongs to one thread."""

    def __init__(self, entries_max: int, per_owner_max: int) -> None:
        self._entries_max = entries_max
        self._per_owner_max = per_owner_max
        self._entries: OrderedDict[Key, IndexedPrefix] = OrderedDict()
        self._by_owner: dict[int, OrderedDict[Key, None]] = {}
        self._owners_of: dict[int, dict[int, None]] = {}
        """Owners by how many entries they have; `_most` is the largest of these numbers."""
        self._most = 0
        self.on_drop: Callable[[IndexedPrefix, Iterable[str]], None] = lambda entry, classes: None
        """Told of each entry that goes, or of what of its classes does."""
        self.erasures = 0
        """How many there were: see `was_erased`."""
        self._erased: OrderedDict[Namespace | Key, int] = OrderedDict()
        self._by_words: dict[tuple[int, bytes], dict[Key, None]] = {}
        self._by_namespace: dict[Namespace, dict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key) -> IndexedPrefix | None:
        """The entry, live or not. O(1). Does not count as use."""
        return self._entries.get(key)

    def saying(self, writer: int, words: bytes) -> list[IndexedPrefix]:
        """What this writer wrote that says the same, in any namespace, live or not: the latest few,
        for who has a partition for each of its users has as many. O(1)."""
        keys = self._by_words.get((writer, words), {})
        return [self._entries[key] for key in islice(reversed(keys), SAYING_MAX)]

    def write(
        self,
        key: Key,
        tokens: int,
        owner: int,
        epoch: str,
        losses: dict[str, int],
        retention: Retention,
        started_s: float,
        *,
        is_granted: bool,
        origin: Origin = NOBODY,
        words: bytes = b"",
    ) -> None:
        """Note that a prefix has been written in a class. O(1). `words`: a digest of what it says
        before template and tokenizer, b"" for one that is known already or has none."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = IndexedPrefix(
                key, tokens, owner, epoch, losses, origin, words
            )
            keys = self._by_owner.setdefault(owner, OrderedDict())
            keys[key] = None
            self._count(owner, len(keys) - 1, len(keys))
            self._by_words.setdefault((origin.writer, words), {})[key] = None
            self._by_namespace.setdefault(key[0], {})[key] = None
        else:
            entry.epoch, entry.losses = epoch, losses
        lease = entry.leases.get(retention.name)
        if lease is None or retention.clock == "absolute":
            entry.leases[retention.name] = Lease(retention, started_s, is_granted=is_granted)
        else:
            lease.start(started_s, is_granted=is_granted)
        self._touch(entry)
        self._trim(owner)

    def renew(self, entry: IndexedPrefix, now_s: float) -> None:
        """It was read at `now_s`."""
        for lease in entry.leases.values():
            if lease.expires_at_s > now_s:
                lease.renew(now_s)
        self._touch(entry)

    def forget(self, namespace: Namespace) -> int:
        """Drop a namespace's entries (it was erased). O(its entries)."""
        self._note_erased(namespace)
        gone = list(self._by_namespace.get(namespace, ()))
        for key in gone:
            self._drop(key)
        return len(gone)

    def drop(self, key: Key) -> bool:
        """Drop one entry (its lease was erased): was it there? O(1)."""
        self._note_erased(key)
        if key not in self._entries:
            return False
        self._drop(key)
        return True

    def give_up(self, key: Key, name: str, now_s: float) -> bool:
        """Its owner keeps a prefix in this class no more: is it kept in no other? O(classes)."""
        entry = self._entries.get(key)
        if entry is None:
            return True
        if all(
            other == name or lease.expires_at_s <= now_s for other, lease in entry.leases.items()
        ):
            self.drop(key)
            return True
        if entry.leases.pop(name, None) is not None:
            self.on_drop(entry, (name,))
        return False

    def was_erased(self, since: int, namespace: Namespace, keys: Iterable[Key]) -> bool:
        """Has the namespace, or one of these, been erased after so many erasures? Of the latest
        `ERASED_MAX`. The engine keeps nothing then of what ran at the time. O(keys)."""
        asked: Iterator[Namespace | Key] = chain((namespace,), keys)
        return any(self._erased.get(one, 0) > since for one in asked)

    def owned(self, owner: int) -> list[IndexedPrefix]:
        """An owner's entries, live or not, longest unused first. O(its entries)."""
        return [self._entries[key] for key in self._by_owner.get(owner, ())]

    def check(self) -> None:
        """Raises AssertionError if the indexes disagree. O(entries)."""
        owned = [key for keys in self._by_owner.values() for key in keys]
        assert sorted(owned) == sorted(self._entries), "an entry without an owner, or the reverse"
        for owner, keys in self._by_owner.items():
            assert keys, "an owner without entries"
            assert len(keys) <= self._per_owner_max, "an owner above its bound"
            assert all(self._entries[key].owner == owner for key in keys), "in the wrong hands"
        counted = {owner: n for n, owners in self._owners_of.items() for owner in owners}
        assert counted == {owner: len(keys) for owner, keys in self._by_owner.items()}
        assert self._most == max(counted.values(), default=0), "the richest owner"
        assert len(self._entries) <= self._entries_max, "too many entries"
        said = {((entry.origin.writer, entry.words), key) for key, entry in self._entries.items()}
        found = {(one, key) for one, keys in self._by_words.items() for key in keys}
        assert said == found, "words without their entry, or the reverse"
        spaces = [(space, key) for space, keys in self._by_namespace.items() for key in keys]
        assert sorted(spaces) == sorted((key[0], key) for key in self._entries), "in no namespace"

    def _note_erased(self, what: Namespace | Key) -> None:
        self.erasures += 1
        self._erased[what] = self.erasures
        self._erased.move_to_end(what)
        if len(self._erased) > ERASED_MAX:
            self._erased.popitem(last=False)

    def _touch(self, entry: IndexedPrefix) -> None:
        if self._entries.get(entry.key) is entry:
            self._entries.move_to_end(entry.key)
            self._by_owner[entry.owner].move_to_end(entry.key)

    def _trim(self, owner: int) -> None:
        """Whoever has too many loses its own; when all have too many, the owner with most does."""
        while len(self._by_owner.get(owner, ())) > self._per_owner_max:
            self._drop(next(iter(self._by_owner[owner])))
        while len(self._entries) > self._entries_max:
            richest = next(iter(self._owners_of[self._most]))
            self._drop(next(iter(self._by_owner[richest])))

    def _count(self, owner: int, before: int, now: int) -> None:
        """An owner has one entry more, or one fewer."""
        if before:
            _discard(self._owners_of, before, owner)
        if now:
            self._owners_of.setdefault(now, {})[owner] = None
        if now > self._most or self._most not in self._owners_of:
            self._most = now

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        keys = self._by_owner[entry.owner]
        del keys[key]
        self._count(entry.owner, len(keys) + 1, len(keys))
        if not keys:
            del self._by_owner[entry.owner]
        self.on_drop(entry, entry.leases)
        _discard(self._by_words, (entry.origin.writer, entry.words), key)
        _discard(self._by_namespace, key[0], key)


def _discard(index: dict[T, dict[U, None]], name: T, key: U) -> None:
    keys = index[name]
    del keys[key]
    if not keys:
        del index[name]


def digests(tokens: Sequence[int], ends: Iterable[int]) -> dict[int, bytes]:
    """A digest of the first `end` tokens for each of `ends`. O(tokens), about 1 ns a token.

    BLAKE2b, so that nobody can make two prefixes meet; the tokens are four bytes each.
    """
    data = memoryview(array("I", tokens)).cast("B")
    running, at, found = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, {}
    for end in sorted(set(ends)):
        running.update(data[4 * at : 4 * end])
        at = end
        found[end] = running.copy().digest()
    return found
