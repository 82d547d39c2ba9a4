"""Owners of one shared store in any order of stores, fetches, erasures, restarts and faults.

What is fetched is what was stored, to the byte; what was erased comes back nowhere; each run is in
the store once; at rest, manifests list what is there, and rows of owners what they have put.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import xxhash

from engine.moves import StoredErased
from engine.storage.remote import shared_reads
from engine.storage.remote.shared_objects import SharedEntry
from engine.storage.sealing.seals import SharedNamespace
from tests.unit.engine.storage.remote_faults import FaultyObjects
from tests.unit.engine.storage.shared_rig import Owner, owners_of
from tests.unit.engine.storage.storage_rig import RUN, A, B

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 120
OWNERS = 3
FETCH_AGAIN_S = 120.0
"""For so long engines fetch nothing of what was erased."""


class Weather(FaultyObjects):
    """Objects whose puts are lost or late, and whose bytes are damaged, now and then."""

    def __init__(self, chance: random.Random, bad: float) -> None:
        super().__init__()
        self._chance, self.bad = chance, bad
        self.lie = self._damage

    def put_new(self, name: str, data: memoryview) -> bool:
        """See `RemoteStore`. One that fails may have put all the same."""
        self.fails.pop("put", None)
        if self._chance.random() < self.bad:
            if self._chance.random() < 0.5:
                super().put_new(name, data)
            self.fails["put"] = "it was lost"
        return super().put_new(name, data)

    def _damage(self, name: str, data: bytes) -> bytes:
        if self._chance.random() >= self.bad or not data:
            return data
        if self._chance.random() < 0.5:
            folder = name.rsplit("/", 1)[0]
            beside = sorted(one for one in self.objects if one.startswith(folder))
            return self.objects[self._chance.choice(beside)]
        at = self._chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class World:
    """Owners, and what may be found: by namespace, the prefixes that were stored since it was
    erased everywhere."""

    def __init__(self, owners: list[Owner], store: Weather, chance: random.Random) -> None:
        self.owners, self.store, self.chance = owners, store, chance
        self.prefixes = [tuple(chance.randrange(2) for _ in range(6 * RUN)) for _ in range(3)]
        self.stored: dict[bytes, set[tuple[int, ...]]] = {A: set(), B: set()}
        self.fetched = 0
        self.has_lost = store.bad > 0

    def step(self) -> None:
        """Do one thing."""
        owner, namespace = self.chance.choice(self.owners), self.chance.choice((A, B))
        prefix = self.chance.choice(self.prefixes)
        tokens = prefix[: RUN * self.chance.randint(1, 6)]
        act = self.chance.random()
        if act < 0.3:
            owner.store(namespace, tokens)
            self.stored[namespace].update(tokens[:at] for at in range(RUN, len(tokens) + 1, RUN))
        elif act < 0.65:
            self.fetch(owner, namespace, tokens)
        elif act < 0.7:
            self.erase(namespace)
        elif act < 0.75:
            owner.reopen()
        else:
            owner.settle(self.chance.randint(1, 4))

    def fetch(self, owner: Owner, namespace: bytes, tokens: tuple[int, ...]) -> None:
        """Fetch what is offered; `Owner.fetch_runs` compares the bytes."""
        first = len(owner.found(namespace, tokens))
        offered = owner.offered(tokens, namespace)
        if not offered:
            return
        wanted = tokens[: (first + offered) * RUN]
        for number, one in enumerate(owner.fetch_runs(wanted, first, namespace)):
            if not one.why:
                assert wanted[: (first + number + 1) * RUN] in self.stored[namespace]
                self.fetched += 1

    def erase(self, namespace: bytes) -> None:
        """Erase in every owner; what an answer says is gone is gone, whatever is under way."""
        receipts: list[StoredErased] = [owner.erase(namespace) for owner in self.owners]
        self.stored[namespace].clear()
        if all(one.shared is not None and not one.shared.code for one in receipts):
            folder = self.owners[0].shared(namespace).folder
            assert not [name for name in self.store.objects if name.startswith(folder)]
        for owner in self.owners:
            owner.clock.advance(FETCH_AGAIN_S / OWNERS)
            owner.local.turn()

    def rest(self) -> None:
        """Let all that is under way end, in good weather."""
        self.store.bad = 0.0
        self.store.fails.clear()
        for _ in range(3):
            for owner in self.owners:
                owner.settle(40)

    def check(self) -> None:
        """Compare the store with what its owners list. After a put that was lost another owner's
        object may have been deleted: what is listed and missing is computed, and put again."""
        listed = [
            name
            for namespace in (A, B)
            for owner in self.owners
            for name in owner.listed(self.store, namespace)
        ]
        there = {name for name in self.store.objects if "/o/" in name}
        assert there <= set(listed), "an object that no owner lists"
        if not self.has_lost:
            assert sorted(listed) == sorted(there), "a run has two owners, or is not there"
        for owner in self.owners:
            owner.disk.check()


def play(seed: int, folder: Path, bad: float) -> World:
    """Play one life of a store."""
    chance = random.Random(seed)
    store = Weather(chance, bad)
    with owners_of(folder, store, OWNERS) as owners:
        world = World(owners, store, chance)
        for _ in range(STEPS):
            world.step()
        world.rest()
        world.check()
        for namespace in (A, B):
            world.erase(namespace)
        world.rest()
        assert [name for name in store.objects if "/" in name] == []
    return world


@pytest.mark.parametrize("seed", range(16))
def test_what_is_fetched_was_stored_and_what_was_erased_is_gone(seed: int, tmp_path: Path) -> None:
    """In good weather each run has one owner; in bad weather nothing wrong comes either."""
    assert play(seed, tmp_path, 0.1 if seed % 2 else 0.0).fetched > 0


def _play_all(folder: Path) -> None:
    for seed in range(6):
        play(seed, folder / str(seed), 0.1 if seed % 2 else 0.0)


@pytest.mark.parametrize("fault", ["unchecked", "unerased"])
def test_planted_faults_are_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that nobody compares, an erasure that deletes nothing."""
    if fault == "unchecked":
        monkeypatch.setattr(shared_reads, "open_run", _unchecked)
    else:
        monkeypatch.setattr(Weather, "clear", lambda self, prefix, limit: (0, 0))
    with pytest.raises((AssertionError, ExceptionGroup)):
        _play_all(tmp_path)


def _unchecked(
    shared: SharedNamespace, sealed: memoryview, parent: bytes, run: bytes, entry: SharedEntry
) -> tuple[memoryview, bytes]:
    """Open an object of whatever run."""
    _, payload = shared.seal.open(sealed, entry.payload_bytes)
    return payload, xxhash.xxh3_128_digest(payload)
