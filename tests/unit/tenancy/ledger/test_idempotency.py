"""A request that is sent twice under one name runs once, and is answered as long as was said."""

from __future__ import annotations

import hashlib
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import Struct

from tenancy.accounting.audit import check_books
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.tenants import create_tenant, set_status
from tenancy.errors import IdempotencyConflict
from tenancy.ledger.idempotency import (
    SWEPT_AT_ONCE,
    Claim,
    ReplayRecord,
    StoredResponse,
    find,
    forget,
    sweep,
)
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.ledger.transactions import Item, LedgerTransactions, NamedEntry
from tenancy.storage.interface import Store
from tenancy.storage.postgres import PostgresStore
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import UsageEntry
from tests.unit.tenancy.conftest import Wall, new_store
from tests.unit.tenancy.storage.postgres_server import Server

PATIENCE_S = 20
KEPT_MS = 100
ROOM = 1_000
ANSWER = StoredResponse("head", b"body")


def claim(name: str = "n", body: str = "one", names_max: int = 50) -> Claim:
    return Claim(name, hashlib.sha256(body.encode()).digest(), names_max)


def hold(
    request_id: str, asked: Claim | None, at_ms: int, tenant_id: int = 1, workspace: str = "default"
) -> Hold:
    return Hold(request_id, tenant_id, 1, "m", at_ms, workspace=workspace, claim=asked)


def entry(request_id: str, ending: str = "done", tenant_id: int = 1) -> UsageEntry:
    return UsageEntry(request_id, tenant_id, 1, "m", ending, 1, 2, 4, 0, 0, 4, 3, 0)


def keeping(
    at_ms: int, answer: StoredResponse | None = ANSWER, bytes_max: int = ROOM
) -> ReplayRecord:
    return ReplayRecord(at_ms + KEPT_MS, bytes_max, answer)


def done(future: Future[None]) -> None:
    future.result(PATIENCE_S)


def refusal(future: Future[None]) -> str:
    with pytest.raises(IdempotencyConflict) as caught:
        done(future)
    return caught.value.code


def found(
    store: Store, asked: Claim, at_ms: int, tenant_id: int = 1
) -> StoredResponse | str | None:
    """What is kept, or why nothing may be."""
    try:
        return find(store, tenant_id, asked, at_ms)
    except IdempotencyConflict as error:
        return error.code


def answered(ledger: Ledger, request_id: str, asked: Claim, at_ms: int) -> None:
    done(ledger.hold(hold(request_id, asked, at_ms)))
    done(ledger.settle(NamedEntry(entry(request_id), keeping(at_ms))))


def names(store: Store) -> list[str]:
    return [row[0] for row in store.query("select name from named_requests order by name")]


def test_an_answer_is_found_until_its_time_is_over(store: Store, ledger: Ledger) -> None:
    """By the same tenant, for the same request; then the name is free."""
    create_tenant(store, lambda: 1, "bob")
    answered(ledger, "a", claim(), 10)

    assert found(store, claim(), 10 + KEPT_MS - 1) == ANSWER
    assert found(store, claim(), 10 + KEPT_MS) is None
    assert found(store, claim("other"), 10) is None
    assert found(store, claim(), 10, tenant_id=2) is None
    assert found(store, claim(body="two"), 10) == "idempotency_key_reused"


def test_what_runs_is_not_run_again(store: Store, ledger: Ledger) -> None:
    """Not by who looks first, and not by who does not."""
    done(ledger.hold(hold("a", claim(), 10)))

    assert found(store, claim(), 10) == "idempotency_in_flight"
    assert found(store, claim(), 10**15) == "idempotency_in_flight"
    assert refusal(ledger.hold(hold("b", claim(), 10))) == "idempotency_in_flight"
    assert refusal(ledger.hold(hold("c", claim(body="two"), 10))) == "idempotency_key_reused"
    assert ledger.open_holds() == 1


@pytest.mark.parametrize("leave", ["suspended", "deleted"])
def test_of_a_tenant_that_left_since_the_request_came_nothing_is_kept(
    store: Store, ledger: Ledger, leave: str
) -> None:
    """What let it in had looked before; its answer would lie there until its time is over. It runs
    to its end, and is charged."""
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


def test_of_many_at_once_one_runs(ledger: Ledger) -> None:
    """They may share a transaction, too."""
    futures = [ledger.hold(hold(f"r{number}", claim(), 10)) for number in range(100)]
    errors = [future.exception(PATIENCE_S) for future in futures]

    assert [error is None for error in errors].count(True) == 1
    assert ledger.open_holds() == 1


def test_in_one_batch_a_name_goes_from_hand_to_hand(store: Store) -> None:
    """Taken, refused to the next, freed by a failure, taken again, answered: as one by one."""
    create_tenant(store, lambda: 1, "ada")
    items: list[Item] = [
        hold("a", claim(), 10),
        hold("b", claim(), 10),
        hold("c", claim(body="two"), 10),
        NamedEntry(entry("a", "failed")),
        hold("d", claim(body="two"), 10),
        NamedEntry(entry("d"), keeping(10)),
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
@settings(max_examples=20)
def test_many_at_once_are_as_one_by_one(steps: list[tuple[Any, ...]], step_ms: int) -> None:
    """Whatever the batches, the same is refused, kept and counted."""
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
                answer = None if size is None else keeping(at_ms, StoredResponse("h", b"." * size))
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


def test_what_was_not_answered_may_be_sent_again(store: Store, ledger: Ledger) -> None:
    """A failure is no answer: the name is free."""
    done(ledger.hold(hold("a", claim(), 10)))
    done(ledger.settle(NamedEntry(entry("a", "failed"))))

    assert found(store, claim(), 10) is None
    answered(ledger, "b", claim(), 10)
    assert found(store, claim(), 10) == ANSWER


def test_a_dead_server_leaves_no_name_behind(store: Store, wall: Wall, ledger: Ledger) -> None:
    """What it ran is closed, and may be sent again; what it answered is still there."""
    answered(ledger, "a", claim("kept"), 10)
    done(ledger.hold(hold("b", claim("lost"), 10)))
    ledger.close()
    again = Ledger(store, wall)
    again.close()

    assert again.interrupted == 1
    assert found(store, claim("kept"), 10) == ANSWER
    assert found(store, claim("lost"), 10) is None


def test_an_answer_without_room_is_not_run_twice_either(store: Store, ledger: Ledger) -> None:
    """One too large of itself, and one that finds its tenant's room taken, keep their names only:
    who was charged once is not charged again without having said so."""
    done(ledger.hold(hold("a", claim("a"), 10)))
    done(ledger.settle(NamedEntry(entry("a"), keeping(10, None))))
    done(ledger.hold(hold("b", claim("b"), 10)))
    done(ledger.settle(NamedEntry(entry("b"), keeping(10, ANSWER, bytes_max=4))))
    done(ledger.hold(hold("c", claim("c"), 10)))
    done(ledger.settle(NamedEntry(entry("c"), keeping(10, ANSWER, bytes_max=7))))

    assert found(store, claim("a"), 11) == "idempotency_result_gone"
    assert found(store, claim("b"), 11) == ANSWER
    assert found(store, claim("c"), 11) == "idempotency_result_gone"
    assert found(store, claim("c"), 10 + KEPT_MS) is None


def test_names_are_counted(store: Store, ledger: Ledger) -> None:
    """One that has expired makes room for itself, others when they are swept."""
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


def test_a_sweep_takes_a_few_at_a_time(store: Store, ledger: Ledger) -> None:
    """Nobody's commit waits for a million of them."""
    futures = []
    for number in range(SWEPT_AT_ONCE + 1):
        futures.append(ledger.hold(hold(f"r{number}", claim(f"n{number}", names_max=999), 10)))
        futures.append(ledger.settle(NamedEntry(entry(f"r{number}"), keeping(10))))
    for future in futures:
        done(future)

    assert sweep(store, 10 + KEPT_MS)
    assert len(names(store)) == 1
    assert not sweep(store, 10 + KEPT_MS)
    assert names(store) == []


def test_what_is_forgotten_while_it_runs_is_not_kept(store: Store, ledger: Ledger) -> None:
    """An erasure holds for what comes after it, and leaves other workspaces alone."""
    done(ledger.hold(hold("a", claim("a"), 10)))
    done(ledger.hold(hold("b", claim("b"), 10, workspace="lab")))
    with store.change() as db:
        forget(db, 1, "default")
    for request_id in "ab":
        done(ledger.settle(NamedEntry(entry(request_id), keeping(10))))

    assert names(store) == ["b"]
    assert found(store, claim("a"), 10) is None
    assert found(store, claim("b"), 10) == ANSWER


def test_suspending_a_tenant_forgets_its_answers(store: Store, ledger: Ledger) -> None:
    """They are content, and nobody may ask for them while it is."""
    answered(ledger, "a", claim(), 10)
    set_status(store, "ada", "suspended")
    set_status(store, "ada", "active")

    assert found(store, claim(), 10) is None


def test_a_hold_that_is_refused_claims_nothing(store: Store, ledger: Ledger) -> None:
    """The same request id twice is somebody's mistake, and takes no name."""
    done(ledger.hold(hold("a", claim("a"), 10)))
    with pytest.raises(Exception, match="used before"):
        done(ledger.hold(hold("a", claim("b"), 10)))

    assert names(store) == ["a"]


class Named(Struct):
    """What a model remembers of a name."""

    digest: bytes
    request_id: str
    until_ms: int | None = None
    answer: StoredResponse | None = None


class Clients(RuleBasedStateMachine):
    """Two tenants' clients that send, send again, wait, fail and see servers die, against a
    dictionary: whatever happens, a name's request is charged once while its name is known."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.wall = Wall()
        self.store = store or SqliteStore(Path(self.folder.name) / "test.db")
        for tenant in ("ada", "bob"):
            create_tenant(self.store, self.wall, tenant)
        self.ledger = Ledger(self.store, self.wall)
        self.model: dict[tuple[int, str], Named] = {}
        self.running: dict[str, tuple[int, str]] = {}
        self.charged: set[str] = set()
        self.count = 0

    def expected(self, tenant_id: int, asked: Claim) -> StoredResponse | str | None:
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
        answer = None if size is None else StoredResponse("h", request_id.encode() + b"." * size)
        item = NamedEntry(entry(request_id, tenant_id=tenant_id), keeping(self.wall(), answer))
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
        self.ledger.close()
        self.ledger = Ledger(self.store, self.wall)
        for request_id in list(self.running):
            self.free(request_id)

    @invariant()
    def the_books_are_right(self) -> None:
        rows = self.store.query("select request_id from ledger where ending = 'done'")
        sums = self.store.query(
            "select tenant_id, count(*), sum(coalesce(length(body), 0)) from named_requests"
            " group by tenant_id order by tenant_id"
        )

        assert sorted(row[0] for row in rows) == sorted(self.charged)
        assert self.ledger.open_holds() == len(self.running)
        assert sums == self.store.query(
            "select tenant_id, names, bytes from named_sums where names > 0 order by tenant_id"
        )

    def teardown(self) -> None:
        self.ledger.close()
        self.store.close()
        self.folder.cleanup()


Clients.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestClients = Clients.TestCase


def test_names_on_a_server_are_the_model_too(postgres_server: Server) -> None:
    """The same clients, with round trips between."""

    class OnServer(Clients):
        def __init__(self) -> None:
            address = postgres_server.address(postgres_server.database())
            super().__init__(PostgresStore(address, is_ready=True))

    few = settings(max_examples=6, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(OnServer, settings=few)


def test_two_servers_over_one_database_run_it_once(postgres: PostgresStore) -> None:
    """Whoever is asked second finds the claim of the first, and then its answer."""
    create_tenant(postgres, lambda: 1, "ada")
    other = postgres.another()
    one, two = Ledger(postgres, lambda: 10), Ledger(other, lambda: 10)
    try:
        done(one.hold(hold("a", claim(), 10)))
        running = refusal(two.hold(hold("b", claim(), 10)))
        done(one.settle(NamedEntry(entry("a"), keeping(10))))

        assert running == "idempotency_in_flight"
        assert found(other, claim(), 10) == ANSWER
        assert refusal(two.hold(hold("b", claim(), 10))) == "idempotency_in_flight"
    finally:
        one.close()
        two.close()
        other.close()
