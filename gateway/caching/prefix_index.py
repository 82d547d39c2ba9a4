"""The index of written prefixes: which prefixes were kept at a breakpoint, in which classes.

The engine's tree knows which blocks are cached; this index knows what was agreed. An entry is found
by its namespace and a digest of its tokens. Several dialects share an entry, each with its own
lease. The index is bounded: a tenant with too many entries loses its least recently used one. The
module knows no dialect and reads no clock.
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
"""Length of a digest, in bytes."""

SAME_CONTENT_MAX = 32
"""Maximum number of entries that `find_same_content` returns."""
ERASED_MAX = 10_000
"""Number of erasures that are remembered."""

PrefixKey = tuple[Namespace, bytes]
T = TypeVar("T")
U = TypeVar("U")


class Lease:
    """A retention class on one entry. `promised_until_s`: -inf if nothing was granted."""

    __slots__ = ("expires_at_s", "promised_until_s", "retention")

    def __init__(self, retention: Retention, started_s: float, *, is_granted: bool) -> None:
        self.retention = retention
        self.expires_at_s = -math.inf
        self.promised_until_s = -math.inf
        self.start(started_s, is_granted=is_granted)

    def start(self, now_s: float, *, is_granted: bool) -> None:
        """Start the clock, possibly again; the end only moves later."""
        limit_s = self.retention.limit_s
        self.expires_at_s = max(
            self.expires_at_s, now_s + (math.inf if limit_s is None else limit_s)
        )
        if is_granted:
            self.promised_until_s = max(self.promised_until_s, now_s + self._promise_s)

    def renew(self, now_s: float) -> None:
        """Extend the lease after a read, if its class allows."""
        if self.retention.renewed_on_read and self.retention.clock != "absolute":
            self.start(now_s, is_granted=self.promised_until_s > now_s)

    def age_s(self, now_s: float) -> float:
        """Return how long ago it began, by what is left of its promise; 0 for one without end."""
        promise_s = self._promise_s
        left_s = self.promised_until_s - now_s
        return 0.0 if promise_s == math.inf else max(0.0, promise_s - left_s)

    @property
    def _promise_s(self) -> float:
        terms = self.retention
        limit_s = math.inf if terms.limit_s is None else terms.limit_s
        return limit_s if terms.pinned else min(terms.promise_s, limit_s)


class PrefixOrigin(Struct, frozen=True):
    """The writer of a prefix, and the digests of the model and template that it used."""

    writer: int = 0
    model: str = ""
    template: str = ""


NO_ORIGIN = PrefixOrigin()


class IndexedPrefix:
    """A prefix of `tokens` tokens that a call wrote. `owner`: the tenant whose bound it counts for.

    `epoch` and `losses`: the engine's epoch and the blocks lost by its namespace, by cause, when
    the prefix was written; they later tell why the prefix is gone. `origin` and `content`: its
    first writer, and a digest of its content.
    """

    __slots__ = ("content", "epoch", "key", "leases", "losses", "origin", "owner", "tokens")

    def __init__(
        self,
        key: PrefixKey,
        tokens: int,
        owner: int,
        epoch: str,
        losses: dict[str, int],
        origin: PrefixOrigin,
        content: bytes,
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.owner = owner
        self.epoch = epoch
        self.losses = losses
        self.origin = origin
        self.content = content
        self.leases: dict[str, Lease] = {}

    def is_live(self, now_s: float) -> bool:
        return any(lease.expires_at_s > now_s for lease in self.leases.values())

    def is_promised(self, now_s: float) -> bool:
        return any(lease.promised_until_s > now_s for lease in self.leases.values())

    def best(self, now_s: float) -> Lease | None:
        """Return the live lease with the longest promise."""
        live = [lease for lease in self.leases.values() if lease.expires_at_s > now_s]
        return max(
            live, key=lambda lease: (lease.promised_until_s, lease.expires_at_s), default=None
        )


class PrefixIndex:
    """All written prefixes of one gateway. Belongs to one thread."""

    def __init__(self, entries_max: int, per_owner_max: int) -> None:
        self._entries_max = entries_max
        self._per_owner_max = per_owner_max
        self._entries: OrderedDict[PrefixKey, IndexedPrefix] = OrderedDict()
        self._by_owner: dict[int, OrderedDict[PrefixKey, None]] = {}
        self._owners_of: dict[int, dict[int, None]] = {}
        """Owners by their number of entries; `_largest_count` is the largest of these numbers."""
        self._largest_count = 0
        self.on_drop: Callable[[IndexedPrefix, Iterable[str]], None] = lambda entry, classes: None
        """Called with each entry that is dropped, and the names of its classes that end."""
        self.on_change: Callable[[PrefixKey], None] = lambda key: None
        """Called with the key of each entry that was written, renewed, dropped, or lost a class."""
        self.erasures = 0
        """Number of erasures so far; see `was_erased`."""
        self._erased: OrderedDict[Namespace | PrefixKey, int] = OrderedDict()
        self._by_content: dict[tuple[int, bytes], dict[PrefixKey, None]] = {}
        self._by_namespace: dict[Namespace, dict[PrefixKey, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: PrefixKey) -> IndexedPrefix | None:
        """Return the entry, live or expired. O(1). Does not count as use."""
        return self._entries.get(key)

    def find_same_content(self, writer: int, content: bytes) -> list[IndexedPrefix]:
        """Return entries of this writer with the same content, in any namespace, live or expired:
        at most SAME_CONTENT_MAX, latest first (a tenant may have many partitions). O(1)."""
        keys = self._by_content.get((writer, content), {})
        return [self._entries[key] for key in islice(reversed(keys), SAME_CONTENT_MAX)]

    def write(
        self,
        key: PrefixKey,
        tokens: int,
        owner: int,
        epoch: str,
        losses: dict[str, int],
        retention: Retention,
        started_s: float,
        *,
        is_granted: bool,
        origin: PrefixOrigin = NO_ORIGIN,
        content: bytes = b"",
    ) -> None:
        """Record that a prefix was written in a class. O(1). `content`: a digest of the content
        before template and tokenizer; b"" if the entry exists or the prompt is raw."""
        entry = self._entries.get(key)
        if entry is None:
            entry = IndexedPrefix(key, tokens, owner, epoch, losses, origin, content)
            self._insert(entry)
        else:
            entry.epoch, entry.losses = epoch, losses
        lease = entry.leases.get(retention.name)
        if lease is None or retention.clock == "absolute":
            entry.leases[retention.name] = Lease(retention, started_s, is_granted=is_granted)
        else:
            lease.start(started_s, is_granted=is_granted)
        self._touch(entry)
        self._trim(owner)

    def restore(self, entry: IndexedPrefix) -> None:
        """Add an entry of an earlier gateway as the latest one, unless its key has one. O(1)."""
        if entry.key not in self._entries:
            self._insert(entry)
            self._touch(entry)
            self._trim(entry.owner)

    def renew(self, entry: IndexedPrefix, now_s: float) -> None:
        """Extend the live leases of an entry that was read at `now_s`."""
        for lease in entry.leases.values():
            if lease.expires_at_s > now_s:
                lease.renew(now_s)
        self._touch(entry)

    def erase_namespace(self, namespace: Namespace) -> int:
        """Drop all entries of an erased namespace; return how many. O(its entries)."""
        self._note_erased(namespace)
        keys = list(self._by_namespace.get(namespace, ()))
        for key in keys:
            self._drop(key)
        return len(keys)

    def erase(self, key: PrefixKey) -> bool:
        """Drop one entry after the erasure of its lease; return whether it existed. O(1)."""
        self._note_erased(key)
        if key not in self._entries:
            return False
        self._drop(key)
        return True

    def end_class(self, key: PrefixKey, name: str, now_s: float) -> bool:
        """End one class of an entry; return whether no other class keeps it. O(classes)."""
        entry = self._entries.get(key)
        if entry is None:
            return True
        if all(
            other == name or lease.expires_at_s <= now_s for other, lease in entry.leases.items()
        ):
            self.erase(key)
            return True
        if entry.leases.pop(name, None) is not None:
            self.on_drop(entry, (name,))
            self.on_change(key)
        return False

    def was_erased(self, since: int, namespace: Namespace, keys: Iterable[PrefixKey]) -> bool:
        """Return whether the namespace or one of these keys was erased after `since` erasures.

        Knows the latest `ERASED_MAX` erasures. The engine keeps no blocks of requests that ran
        during an erasure. O(keys).
        """
        asked: Iterator[Namespace | PrefixKey] = chain((namespace,), keys)
        return any(self._erased.get(one, 0) > since for one in asked)

    def owned_by(self, owner: int) -> list[IndexedPrefix]:
        """Return an owner's entries, live or expired, least recently used first. O(its entries)."""
        return [self._entries[key] for key in self._by_owner.get(owner, ())]

    def promised(self, now_s: float) -> list[IndexedPrefix]:
        """Return the entries that are promised, the latest used first. O(entries)."""
        return [one for one in reversed(self._entries.values()) if one.is_promised(now_s)]

    def check(self) -> None:
        """Check that the indexes agree. O(entries). Raises AssertionError if they do not."""
        owned = [key for keys in self._by_owner.values() for key in keys]
        assert sorted(owned) == sorted(self._entries), "owners and entries disagree"
        for owner, keys in self._by_owner.items():
            assert keys, "an owner has no entries"
            assert len(keys) <= self._per_owner_max, "an owner is above its bound"
            assert all(self._entries[key].owner == owner for key in keys), (
                "an entry has another owner"
            )
        counted = {owner: n for n, owners in self._owners_of.items() for owner in owners}
        assert counted == {owner: len(keys) for owner, keys in self._by_owner.items()}
        assert self._largest_count == max(counted.values(), default=0), "the largest count is wrong"
        assert len(self._entries) <= self._entries_max, "too many entries"
        expected = {
            ((entry.origin.writer, entry.content), key) for key, entry in self._entries.items()
        }
        found = {(one, key) for one, keys in self._by_content.items() for key in keys}
        assert expected == found, "contents and entries disagree"
        spaces = [(space, key) for space, keys in self._by_namespace.items() for key in keys]
        assert sorted(spaces) == sorted((key[0], key) for key in self._entries), (
            "namespaces disagree"
        )

    def _note_erased(self, what: Namespace | PrefixKey) -> None:
        self.erasures += 1
        self._erased[what] = self.erasures
        self._erased.move_to_end(what)
        if len(self._erased) > ERASED_MAX:
            self._erased.popitem(last=False)

    def note_change(self, entry: IndexedPrefix) -> None:
        """Report that a caller renewed a lease of this entry, if the entry is still here. O(1)."""
        if self._entries.get(entry.key) is entry:
            self.on_change(entry.key)

    def _insert(self, entry: IndexedPrefix) -> None:
        key, owner = entry.key, entry.owner
        self._entries[key] = entry
        keys = self._by_owner.setdefault(owner, OrderedDict())
        keys[key] = None
        self._update_count(owner, len(keys) - 1, len(keys))
        self._by_content.setdefault((entry.origin.writer, entry.content), {})[key] = None
        self._by_namespace.setdefault(key[0], {})[key] = None

    def _touch(self, entry: IndexedPrefix) -> None:
        if self._entries.get(entry.key) is entry:
            self.on_change(entry.key)
            self._entries.move_to_end(entry.key)
            self._by_owner[entry.owner].move_to_end(entry.key)

    def _trim(self, owner: int) -> None:
        """Drop the owner's oldest entries above its bound; if the index is full, those of the owner
        with the most entries."""
        while len(self._by_owner.get(owner, ())) > self._per_owner_max:
            self._drop(next(iter(self._by_owner[owner])))
        while len(self._entries) > self._entries_max:
            largest = next(iter(self._owners_of[self._largest_count]))
            self._drop(next(iter(self._by_owner[largest])))

    def _update_count(self, owner: int, before: int, now: int) -> None:
        """Update the count of an owner that gained or lost an entry."""
        if before:
            _discard(self._owners_of, before, owner)
        if now:
            self._owners_of.setdefault(now, {})[owner] = None
        if now > self._largest_count or self._largest_count not in self._owners_of:
            self._largest_count = now

    def _drop(self, key: PrefixKey) -> None:
        entry = self._entries.pop(key)
        keys = self._by_owner[entry.owner]
        del keys[key]
        self._update_count(entry.owner, len(keys) + 1, len(keys))
        if not keys:
            del self._by_owner[entry.owner]
        self.on_drop(entry, entry.leases)
        self.on_change(key)
        _discard(self._by_content, (entry.origin.writer, entry.content), key)
        _discard(self._by_namespace, key[0], key)


def _discard(index: dict[T, dict[U, None]], name: T, key: U) -> None:
    keys = index[name]
    del keys[key]
    if not keys:
        del index[name]


def digest_prefixes(tokens: Sequence[int], ends: Iterable[int]) -> dict[int, bytes]:
    """Return a digest of the first `end` tokens for each of `ends`. O(tokens), about 1 ns a token.

    BLAKE2b makes collisions infeasible; tokens are encoded as four bytes each.
    """
    data = memoryview(array("I", tokens)).cast("B")
    running, at, found = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, {}
    for end in sorted(set(ends)):
        running.update(data[4 * at : 4 * end])
        at = end
        found[end] = running.copy().digest()
    return found
