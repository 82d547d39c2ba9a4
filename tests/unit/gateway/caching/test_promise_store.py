"""The database has the running promises after each flush, and few writes for many renewals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Retention
from gateway.caching import promise_store
from gateway.caching.prefix_index import PrefixIndex
from gateway.caching.promise_store import PromiseStore
from gateway.caching.promises import PromiseTally
from tenancy.accounts import written_prefixes
from tenancy.accounts.tenants import create_tenant
from tenancy.accounts.written_prefixes import WrittenPrefix, delete_ended
from tenancy.errors import StoreBusy
from tenancy.storage.interface import Store
from tenancy.storage.postgres import PostgresStore
from tenancy.types import LATEST_MS
from tests.unit.tenancy.conftest import new_store
from tests.unit.tenancy.storage.new_sqlite import new_sqlite
from tests.unit.tenancy.storage.postgres_server import Server

PATIENCE_S = 60.0
HOUR = Retention("1h", 3_600, 3_600, "request_start")
LAST = Retention("12h", 43_200)
ENDLESS = Retention("resource", 0, None, "absolute", renewed_on_read=False, pinned=True)


class World:
    """An index and its saved promises, at times that the test sets. The wall clock is a million
    ahead."""

    def __init__(
        self, store: Store, name: str = "", now_s: float = 0.0, flush_s: float = 3_600.0
    ) -> None:
        self.now_s, self.store = now_s, store
        self.entries = PrefixIndex(8, 4)
        self.tally = PromiseTally(self.entries, lambda epoch: epoch == "new")
        self.entries.on_drop = self.tally.record_given_up
        self.lines: list[str] = []
        self.saved = PromiseStore(
            store,
            name,
            self.entries,
            self.tally,
            lambda: self.now_s,
            lambda: 1_000_000 + round(self.now_s * 1_000),
            lambda event, _: self.lines.append(event),
            flush_s=flush_s,
        )

    def write(self, digest: bytes, terms: Retention = HOUR, *, granted: bool = True) -> None:
        key = (b"space", digest)
        self.entries.write(key, 9, 1, "old", {}, terms, self.now_s, is_granted=granted)

    def promised(self) -> dict[tuple[bytes, str], float]:
        """Return the ends of running promises by digest and class."""
        return {
            (entry.key[1], name): lease.promised_until_s
            for entry in self.entries.owned_by(1)
            for name, lease in entry.leases.items()
            if lease.promised_until_s > self.now_s
        }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(new_sqlite(tmp_path / "t.db")) as store:
        create_tenant(store, lambda: 1, "ada")
        yield store


def rows(store: Store) -> dict[tuple[bytes, str], int]:
    """Return the ends of stored promises by digest and class."""
    sql = "select digest, class, promised_until_ms from written_prefixes"
    return {(bytes(row[0]), row[1]): row[2] for row in store.query(sql)}


async def test_next_gateway_has_the_promises(store: Store) -> None:
    """With their terms, ends, owners and origins, by its own clock."""
    first = World(store, now_s=50.0)
    await first.saved.start()
    first.write(b"a")
    first.write(b"a", LAST)
    first.write(b"b", ENDLESS)
    first.write(b"c", granted=False)
    first.now_s += 100
    await first.saved.close()
    second = World(store, now_s=150.0)
    second.now_s = 150.0
    await second.saved.start()

    assert second.promised() == first.promised()
    assert second.promised()[b"a", "1h"] == 3_650
    assert second.promised()[b"b", "resource"] > 1e11
    assert [one.leases["1h"].retention for one in second.entries.owned_by(1)[:1]] == [HOUR]
    assert second.tally.counts(150.0)[1, "12h"]["running"] == 1
    assert second.lines == ["promises_taken_over"]
    second.entries.check()
    await second.saved.close()


async def test_renewals_are_written_when_they_are_worth_it(store: Store) -> None:
    """A hot prefix is renewed with each read; its end moves a minute before it is written."""
    world = World(store)
    await world.saved.start()
    world.write(b"a")
    await world.saved.flush()
    entry = world.entries.owned_by(1)[0]
    ends = []
    for _ in range(13):
        world.now_s += 10
        world.entries.renew(entry, world.now_s)
        await world.saved.flush()
        ends.append(rows(store)[b"a", "1h"])
    await world.saved.close()

    assert len(set(ends)) == 2
    assert rows(store) == {(b"a", "1h"): 1_000_000 + 3_730_000}


async def test_failed_write_is_repeated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a promise nor an erasure is lost to a full disk."""
    world = World(store)
    await world.saved.start()
    world.write(b"a")
    await world.saved.flush()
    world.write(b"b")
    world.entries.erase((b"space", b"a"))

    def fail(*_: object) -> None:
        raise StoreBusy("not_written", "the disk is full")

    with monkeypatch.context() as full:
        full.setattr(promise_store, "save", fail)
        with pytest.raises(StoreBusy):
            await world.saved.flush()
    before = rows(store)
    await world.saved.flush()

    assert before.keys() == {(b"a", "1h")}
    assert rows(store).keys() == {(b"b", "1h")}
    await world.saved.close()


async def test_fault_of_one_round_ends_no_later_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours in one write must not cost all promises at the next restart."""
    world, tried = World(store, flush_s=0.0), asyncio.Event()

    def fail(*_: object) -> None:
        loop.call_soon_threadsafe(tried.set)
        raise ZeroDivisionError

    loop = asyncio.get_running_loop()
    with monkeypatch.context() as faulty:
        faulty.setattr(promise_store, "save", fail)
        await world.saved.start()
        world.write(b"a")
        await tried.wait()
    async with asyncio.timeout(PATIENCE_S):
        while not rows(store):  # noqa: ASYNC110 (the task signals no round)
            await asyncio.sleep(0)
    await world.saved.close()

    assert "background_failed" in world.lines


async def test_unreadable_terms_are_left_out(store: Store) -> None:
    """A row of another version does not stop the start; it goes with the next flush."""
    row = WrittenPrefix(b"space", b"a", "1h", 1, 9, "{", None, 2_000_000, "old", 1, "m", "t", b"")
    written_prefixes.save(store, "", [row], [])
    world = World(store)
    await world.saved.start()
    left = world.promised()
    await world.saved.close()

    assert (left, rows(store)) == ({}, {})


async def test_gateways_of_one_database_have_their_own_books(store: Store) -> None:
    """One gateway's promises are not the other's; those of a moved file go to the first."""
    for name, digest in (("", b"file"), ("one", b"one"), ("two", b"two")):
        world = World(store, name)
        await world.saved.start()
        world.write(digest)
        await world.saved.close()
    third = World(store, "two")
    await third.saved.start()

    assert {digest for digest, _ in third.promised()} == {b"two"}
    assert rows(store).keys() == {(digest, "1h") for digest in (b"file", b"one", b"two")}
    delete_ended(store, 1_000_000 + 3_600_000)
    assert rows(store) == {}
    await third.saved.close()


def test_promises_of_a_gateway_that_died_go_to_one_other(postgres_server: Server) -> None:
    """Of three that look: to the first, when the id was free at two looks. What it has promised
    itself stays; the dead one that comes back has none; one that lives keeps its own."""
    names = ("dead", "lives", "one", "two", "three")
    with ExitStack() as opened:
        first = PostgresStore(postgres_server.address(postgres_server.database()))
        stores = [opened.enter_context(closing(one)) for one in (first, *reopened(first, 4))]
        create_tenant(first, lambda: 1, "ada")
        assert all(own.hold_gateway(name) for name, own in zip(names, stores, strict=True))
        worlds = [World(own, name) for name, own in zip(names, stores, strict=True)]
        early, taken, again = asyncio.run(through_a_death(worlds, first))
        sql = "select gateway, digest, class from written_prefixes"
        held = {(gateway, bytes(digest), name) for gateway, digest, name in stores[1].query(sql)}

    kept = {(b"both", "12h")}
    assert early == [kept, set(), set()]
    assert kept <= taken[0]
    assert [(b"a", "1h") in one for one in taken].count(True) == 1
    assert again == set()
    assert {("lives", b"b", "1h"), ("one", b"both", "12h")} <= held
    assert "dead" not in {gateway for gateway, _, _ in held}


def reopened(store: Store, count: int) -> list[Store]:
    return [store.open_another() for _ in range(count)]


Promised = set[tuple[bytes, str]]


async def through_a_death(
    worlds: list[World], store: Store
) -> tuple[list[Promised], list[Promised], Promised]:
    """Let the gateway of the first world and store die. Return what the last three have promised
    after one look and after two, and what the dead one finds when it is back."""
    dead, lives, *others = worlds
    for world in worlds:
        await world.saved.start()
    dead.write(b"a")
    dead.write(b"both")
    lives.write(b"b")
    others[0].write(b"both", LAST)
    await dead.saved.close()
    await lives.saved.flush()
    await asyncio.to_thread(store.close)
    for world in others:
        await world.saved.take_over_dead()
    early = [set(world.promised()) for world in others]
    await asyncio.gather(*(world.saved.take_over_dead() for world in others))
    taken = [set(world.promised()) for world in others]
    back = World(lives.store, "dead")
    await back.saved.start()
    for world in (lives, *others, back):
        await world.saved.close()
    return early, taken, set(back.promised())


class Act:
    """What may happen between two flushes."""

    DIGESTS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])
    ANY = st.one_of(
        st.tuples(st.just("write"), DIGESTS, st.sampled_from([HOUR, LAST, ENDLESS]), st.booleans()),
        st.tuples(st.just("renew"), DIGESTS),
        st.tuples(st.just("end"), DIGESTS, st.sampled_from(["1h", "12h", "resource"])),
        st.tuples(st.just("erase"), DIGESTS),
        st.tuples(st.just("erase_all")),
        st.tuples(st.just("pass"), st.sampled_from([1, 100, 4_000])),
        st.tuples(st.just("flush")),
    )


async def play(store: Store, acts: list[tuple[object, ...]]) -> World:
    """Run a history on a new store, and close it."""
    world = World(store)
    await world.saved.start()
    for what, *rest in acts:
        match what, rest:
            case "write", [bytes(digest), Retention() as terms, bool(granted)]:
                world.write(digest, terms, granted=granted)
            case "renew", [bytes(digest)]:
                entry = world.entries.find((b"space", digest))
                if entry is not None:
                    world.entries.renew(entry, world.now_s)
            case "end", [bytes(digest), str(name)]:
                world.entries.end_class((b"space", digest), name, world.now_s)
            case "erase", [bytes(digest)]:
                world.entries.erase((b"space", digest))
            case "erase_all", []:
                world.entries.erase_namespace(b"space")
            case "pass", [int(seconds)]:
                world.now_s += seconds
            case _:
                await world.saved.flush()
    await world.saved.close()
    return world


@given(st.lists(Act.ANY, max_size=30))
def test_rows_are_the_running_promises(acts: list[tuple[object, ...]]) -> None:
    """After any history: the last flush leaves exactly the promises, to the millisecond."""
    with new_store() as store:
        create_tenant(store, lambda: 1, "ada")
        world = asyncio.run(play(store, acts))
        now_ms = 1_000_000 + round(world.now_s * 1_000)
        stored = {key: at_ms for key, at_ms in rows(store).items() if at_ms > now_ms}
    wanted = {
        key: LATEST_MS if until_s == math.inf else 1_000_000 + until_s * 1_000
        for key, until_s in world.promised().items()
    }

    assert stored == wanted
