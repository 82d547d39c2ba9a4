"""Idempotency keys: a repeated request runs once, and its response is replayed until it expires."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    invariant,
    precondition,
    rule,
)
from msgspec import Struct

from tenancy.accounting.audit import check_books
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.tenants import create_tenant, set_status
from tenancy.errors import IdempotencyConflict
from tenancy.ledger.idempotency import (
    Claim,
    ReplayedResponse,
    ReplayRecord,
    find,
    forget,
    sweep,
)
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.ledger.transactions import Item, LedgerTransactions, NamedEntry
from tenancy.storage.interface import Store
from tenancy.storage.pieces import SWEPT_AT_ONCE
from tenancy.storage.postgres import PostgresStore
from tenancy.types import UsageEntry
from tests.examples import examples
from tests.unit.tenancy.book_machine import BookMachine, run_on_server
from tests.unit.tenancy.conftest import new_store
from tests.unit.tenancy.ledger.written import done, holds
from tests.unit.tenancy.storage.postgres_server import Server

KEPT_MS = 100
ROOM = 1_000
ANSWER = ReplayedResponse("head", b"body")


def claim(name: str = "n", body: str = "one", names_max: int = 50) -> Claim:
    return Claim(name, hashlib.sha256(body.encode()).digest(), names_max)


def hold(
    request_id: str, asked: Claim | None, at_ms: int, tenant_id: int = 1, workspace: str = "default"
) -> Hold:
    return Hold(request_id, tenant_id, 1, "m", at_ms, workspace=workspace, claim=asked)


def entry(request_id: str, ending: str = "done", tenant_id: int = 1) -> UsageEntry:
    return UsageEntry(request_id, tenant_id, 1, "m", ending, 1, 2, 4, 0, 0, 4, 3, 0)


def replay_record(
    at_ms: int, answer: ReplayedResponse | None = ANSWER, bytes_max: int = ROOM
) -> ReplayRecord:
    return ReplayRecord(at_ms + KEPT_MS, bytes_max, answer)


def refusal(future: Future[None]) -> str:
    with pytest.raises(IdempotencyConflict) as caught:
        done(future)
    return caught.value.code


def found(
    store: Store, asked: Claim, at_ms: int, tenant_id: int = 1
) -> ReplayedResponse | str | None:
    """Return the stored response, or the refusal's code."""
    try:
        return find(store, tenant_id, asked, at_ms)
    except IdempotencyConflict as error:
        return error.code


def answered(ledger: Ledger, request_id: str, asked: Claim, at_ms: int) -> None:
    done(ledger.hold(hold(request_id, asked, at_ms)))
    done(ledger.settle(NamedEntry(entry(request_id), replay_record(at_ms))))


def names(store: Store) -> list[str]:
    return [row[0] for row in store.query("select name from named_requests order by name")]


@pytest.mark.parametrize("leave", ["suspended", "deleted"])
def test_stores_nothing_for_a_suspended_or_deleted_tenant(
    store: Store, ledger: Ledger, leave: str
) -> None:
    """The tenant left after authentication; its request ends and is charged."""
    answered(ledger, "a", claim("first"), 10)
    if leave == "suspended":
        set_status(store, "ada", "suspended")
    else:
        delete_tenant(store, lambda: 20, "ada")
    answered(ledger, "b", claim("late"), 20)
    kept = names(store)
    if leave == "suspended":
        set_status(store, "ada", "active")
        answered(ledger, "c", claim("again"), 30)

    assert kept == []
    assert names(store) == (["again"] if leave == "suspended" else [])
    assert store.query("select request_id from ledger order by 1")[:2] == [("a",), ("b",)]
    assert check_books(store) == []


def test_claims_apply_in_order_within_a_batch(store: Store) -> None:
    """Taken, refused, freed by a failure, taken again, answered."""
    create_tenant(store, lambda: 1, "ada")
    items: list[Item] = [
        hold("a", claim(), 10),
        hold("b", claim(), 10),
        hold("c", claim(body="two"), 10),
        NamedEntry(entry("a", "failed")),
        hold("d", claim(body="two"), 10),
        NamedEntry(entry("d"), replay_record(10)),
        hold("e", claim(), 10),
        hold("f", claim("other", names_max=1), 10),
    ]
    with store.change() as db:
        answers = LedgerTransactions().apply(db, items)
    codes = [None if one is None else getattr(one, "code", "") for one in answers]

    assert codes == [
        *(None, "idempotency_in_flight", "idempotency_key_reused", None, None, None),
        *("idempotency_key_reused", "idempotency_room_full"),
    ]
    assert found(store, claim(body="two"), 10) == ANSWER
    assert store.query("select * from named_sums") == [(1, 1, 4)]


SENT = st.tuples(st.just("send"), st.sampled_from("xy"), st.sampled_from("pq"), st.integers(1, 2))
ENDED = st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from([None, 0, 500, 501]))


@given(steps=st.lists(st.one_of(SENT, ENDED), max_size=14), step_ms=st.sampled_from([1, 60, 101]))
@settings(max_examples=examples(20))
def test_batches_equal_single_items(steps: list[tuple[Any, ...]], step_ms: int) -> None:
    """The same is refused, stored and counted, however items are batched."""
    items: list[Item] = []
    for number, step in enumerate(steps):
        at_ms = 10 + number * step_ms
        match step:
            case "send", str(name), str(body), int(tenant_id):
                asked = claim(name, body, names_max=2)
                items.append(hold(f"r{number}", asked, at_ms, tenant_id))
            case _, int(which), size:
                holds = [item for item in items if isinstance(item, Hold)] or [hold("no", None, 1)]
                ended = holds[which % len(holds)]
                answer = (
                    None
                    if size is None
                    else replay_record(at_ms, ReplayedResponse("h", b"." * size))
                )
                done_now = entry(ended.request_id, tenant_id=ended.tenant_id)
                items.append(NamedEntry(done_now, answer))
            case _:
                raise AssertionError(step)
    outcomes = []
    for count in (1, 5, 99):
        with new_store() as store:
            for tenant in ("ada", "bob"):
                create_tenant(store, lambda: 1, tenant)
            answers = []
            for first in range(0, len(items), count):
                with store.change() as db:
                    answers += LedgerTransactions().apply(db, items[first : first + count])
            kept = store.query("select * from named_requests order by request_id")
            sums = store.query("select * from named_sums where names > 0 order by tenant_id")
            outcomes.append(([one and str(one) for one in answers], kept, sums))

    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_response_without_room_keeps_its_name_only(store: Store, ledger: Ledger) -> None:
    """A response too large, or beyond the tenant's room: a retry is not charged a second time."""
    done(ledger.hold(hold("a", claim("a"), 10)))
    done(ledger.settle(NamedEntry(entry("a"), replay_record(10, None))))
    done(ledger.hold(hold("b", claim("b"), 10)))
    done(ledger.settle(NamedEntry(entry("b"), replay_record(10, ANSWER, bytes_max=4))))
    done(ledger.hold(hold("c", claim("c"), 10)))
    done(ledger.settle(NamedEntry(entry("c"), replay_record(10, ANSWER, bytes_max=7))))

    assert found(store, claim("a"), 11) == "idempotency_result_gone"
    assert found(store, claim("b"), 11) == ANSWER
    assert found(store, claim("c"), 11) == "idempotency_result_gone"
    assert found(store, claim("c"), 10 + KEPT_MS) is None


def test_names_are_counted_per_tenant(store: Store, ledger: Ledger) -> None:
    """An expired name makes room for its own reuse, others when they are swept."""
    for name in "ab":
        answered(ledger, name, claim(name), 10)
    late = 10 + KEPT_MS
    full = refusal(ledger.hold(hold("c", claim("c", names_max=2), 11)))
    still = refusal(ledger.hold(hold("c", claim("c", names_max=2), late)))
    answered(ledger, "a2", claim("a", names_max=2), late)
    more = sweep(store, late)
    done(ledger.hold(hold("c", claim("c", names_max=2), late)))

    assert (full, still, more) == ("idempotency_room_full", "idempotency_room_full", False)
    assert names(store) == ["a", "c"]
    assert store.query("select * from named_sums") == [(1, 2, len(ANSWER.body))]


def test_sweep_is_bounded(store: Store, ledger: Ledger) -> None:
    """A million expired names must not block a commit."""
    futures = []
    for number in range(SWEPT_AT_ONCE + 1):
        futures.append(ledger.hold(hold(f"r{number}", claim(f"n{number}", names_max=999), 10)))
        futures.append(ledger.settle(NamedEntry(entry(f"r{number}"), replay_record(10))))
    for future in futures:
        done(future)
    asked = [claim(f"n{number}", names_max=999) for number in range(SWEPT_AT_ONCE + 1)]
    again = [hold(f"s{number}", one, 11) for number, one in enumerate(asked)]
    with store.change() as db:
        assert None not in LedgerTransactions().apply(db, again), "each name is looked up"

    assert sweep(store, 10 + KEPT_MS)
    assert len(names(store)) == 1
    assert not sweep(store, 10 + KEPT_MS)
    assert names(store) == []


def test_erasure_covers_running_requests(store: Store, ledger: Ledger) -> None:
    """Other workspaces keep their responses."""
    done(ledger.hold(hold("a", claim("a"), 10)))
    done(ledger.hold(hold("b", claim("b"), 10, workspace="lab")))
    with store.change() as db:
        forget(db, 1, "default")
    for request_id in "ab":
        done(ledger.settle(NamedEntry(entry(request_id), replay_record(10))))

    assert names(store) == ["b"]
    assert found(store, claim("a"), 10) is None
    assert found(store, claim("b"), 10) == ANSWER


def test_suspension_deletes_stored_responses(store: Store, ledger: Ledger) -> None:
    """They are content, and the tenant cannot request them."""
    answered(ledger, "a", claim(), 10)
    set_status(store, "ada", "suspended")
    set_status(store, "ada", "active")

    assert found(store, claim(), 10) is None


def test_refused_hold_claims_no_name(store: Store, ledger: Ledger) -> None:
    """Such as one with a duplicate request id."""
    done(ledger.hold(hold("a", claim("a"), 10)))
    with pytest.raises(Exception, match="Duplicate request id"):
        done(ledger.hold(hold("a", claim("b"), 10)))

    assert names(store) == ["a"]


class Named(Struct):
    """The model's state of a name."""

    digest: bytes
    request_id: str
    until_ms: int | None = None
    answer: ReplayedResponse | None = None


class Clients(BookMachine):
    """A state machine of two tenants' clients: send, retry, wait, fail, and server deaths.

    A request is charged once for as long as its name is known.
    """

    def __init__(self) -> None:
        super().__init__()
        create_tenant(self.store, self.wall, "bob")
        self.model: dict[tuple[int, str], Named] = {}
        self.running: dict[str, tuple[int, str]] = {}
        self.charged: set[str] = set()
        self.count = 0

    def expected(self, tenant_id: int, asked: Claim) -> ReplayedResponse | str | None:
        named = self.model.get((tenant_id, asked.name))
        if named is None or (named.until_ms is not None and named.until_ms <= self.wall()):
            return None
        if named.digest != asked.digest:
            return "idempotency_key_reused"
        if named.until_ms is None:
            return "idempotency_in_flight"
        return named.answer or "idempotency_result_gone"

    @rule(tenant_id=st.sampled_from([1, 2]), name=st.sampled_from("xy"), body=st.sampled_from("pq"))
    def send(self, tenant_id: int, name: str, body: str) -> None:
        asked, self.count = claim(name, body), self.count + 1
        request_id = f"r{self.count}"
        expected = self.expected(tenant_id, asked)

        assert found(self.store, asked, self.wall(), tenant_id) == expected
        held = self.ledger.hold(hold(request_id, asked, self.wall(), tenant_id))
        if expected is not None:
            is_other = expected == "idempotency_key_reused"
            assert refusal(held) == (expected if is_other else "idempotency_in_flight")
            return
        done(held)
        self.model[tenant_id, name] = Named(asked.digest, request_id)
        self.running[request_id] = (tenant_id, name)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), size=st.sampled_from([0, 3, 400, None]), twice=st.booleans())
    def answer(self, which: int, size: int | None, twice: bool) -> None:
        request_id = sorted(self.running)[which % len(self.running)]
        tenant_id, name = self.running.pop(request_id)
        answer = None if size is None else ReplayedResponse("h", request_id.encode() + b"." * size)
        item = NamedEntry(
            entry(request_id, tenant_id=tenant_id), replay_record(self.wall(), answer)
        )
        for _ in range(1 + twice):
            done(self.ledger.settle(item))
        self.charged.add(request_id)
        named = self.model.get((tenant_id, name))
        if named is not None and named.request_id == request_id:
            mine = [self.model[key] for key in self.model if key[0] == tenant_id]
            used = sum(len(other.answer.body) for other in mine if other.answer is not None)
            fits = answer is not None and used + len(answer.body) <= ROOM
            named.until_ms, named.answer = self.wall() + KEPT_MS, answer if fits else None

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def fail(self, which: int) -> None:
        request_id = sorted(self.running)[which % len(self.running)]
        tenant_id, _ = self.running[request_id]
        done(self.ledger.settle(NamedEntry(entry(request_id, "failed", tenant_id))))
        self.free(request_id)

    def free(self, request_id: str) -> None:
        at = self.running.pop(request_id)
        if at in self.model and self.model[at].request_id == request_id:
            del self.model[at]

    @rule(ms=st.sampled_from([1, KEPT_MS // 2, KEPT_MS]))
    def wait(self, ms: int) -> None:
        self.wall.ms += ms

    @rule()
    def sweep(self) -> None:
        sweep(self.store, self.wall())
        for at, named in list(self.model.items()):
            if named.until_ms is not None and named.until_ms <= self.wall():
                del self.model[at]

    @rule(tenant_id=st.sampled_from([1, 2]))
    def erase(self, tenant_id: int) -> None:
        with self.store.change() as db:
            forget(db, tenant_id)
        self.model = {at: named for at, named in self.model.items() if at[0] != tenant_id}

    @rule()
    def die(self) -> None:
        self.restart_ledger()
        for request_id in list(self.running):
            self.free(request_id)

    @invariant()
    def books_are_right(self) -> None:
        rows = self.store.query("select request_id from ledger where ending = 'done'")
        sums = self.store.query(
            "select tenant_id, count(*), sum(coalesce(length(body), 0)) from named_requests"
            " group by tenant_id order by tenant_id"
        )

        assert sorted(row[0] for row in rows) == sorted(self.charged)
        assert holds(self.store) == len(self.running)
        assert sums == self.store.query(
            "select tenant_id, names, bytes from named_sums where names > 0 order by tenant_id"
        )


Clients.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None
)
TestClients = Clients.TestCase


@pytest.mark.slow
def test_names_on_a_server_match_the_model(postgres_server: Server) -> None:
    """With round trips between."""
    run_on_server(Clients, postgres_server)


def test_two_gateways_over_one_database_run_it_once(postgres: PostgresStore) -> None:
    """The second finds the first one's claim, and then its response."""
    create_tenant(postgres, lambda: 1, "ada")
    other = postgres.open_another()
    one, two = Ledger(postgres, lambda: 10), Ledger(other, lambda: 10)
    try:
        done(one.hold(hold("a", claim(), 10)))
        running = refusal(two.hold(hold("b", claim(), 10)))
        done(one.settle(NamedEntry(entry("a"), replay_record(10))))

        assert running == "idempotency_in_flight"
        assert found(other, claim(), 10) == ANSWER
        assert refusal(two.hold(hold("b", claim(), 10))) == "idempotency_in_flight"
    finally:
        one.close()
        two.close()
        other.close()
