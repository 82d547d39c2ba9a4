"""Deferred holds: written late only when they reserve nothing, and before any item that needs
them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from msgspec import structs

from gateway.ledger import deferred_holds
from gateway.ledger.deferred_holds import DEFER_S, TOKENS_MAX, DeferredHolds
from gateway.ledger.interface import InProcessLedger
from tenancy.accounting.audit import check_books
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BudgetExceeded, LedgerUnavailable, TenancyError
from tenancy.ledger.engine_counts import EngineTotals
from tenancy.ledger.idempotency import Claim
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.transactions import Hold, Item, NamedEntry, entry_in
from tenancy.pricing.budget_watch import BudgetWatch
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import TokenCounts, UsageEntry
from tests.examples import examples
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.tenancy.conftest import used
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

TOTALS = EngineTotals("e", 10, *range(1, 7))


class FakeLedger:
    """A `LedgerClient` that records its items, and fails if told so."""

    restarts = 4

    def __init__(self) -> None:
        self.is_well = True
        self.handed: list[str] = []
        self.refusal: TenancyError | None = None

    def write(self, item: Item) -> asyncio.Future[None]:
        self.handed.append(_describe(item))
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.refusal is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(self.refusal)
        return waiter

    def note_progress(self, reached: Mapping[str, TokenCounts]) -> None:
        self.handed.append(f"progress {' '.join(reached)}")

    def holds_first(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def close(self) -> None:
        self.handed.append("close")


def _describe(item: Item) -> str:
    if isinstance(item, Hold):
        return f"hold {item.request_id}{' running' if item.is_running else ''}"
    entry = entry_in(item)
    return "totals" if entry is None else f"entry {entry.request_id}"


class DeferredLedger:
    """Deferred holds over a fake ledger, a file with two tenants, and a manual clock."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.ledger = FakeLedger()
        self.timers: list[Callable[[], None]] = []
        self.client = DeferredHolds(self.ledger, BudgetWatch(store), self._call_later)

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        assert seconds == DEFER_S
        self.timers.append(call)

    def tick(self) -> None:
        """Advance by `DEFER_S`."""
        timers, self.timers = self.timers, []
        for call in timers:
            call()

    async def hold(self, request_id: str, tenant_id: int = 1, **facts: object) -> list[str]:
        """Write a hold; return the items that the ledger received at once."""
        before = len(self.ledger.handed)
        one = Hold(request_id, tenant_id, tenant_id, "m", 10, output_tokens=5)
        await self.client.write(structs.replace(one, **facts))
        return self.ledger.handed[before:]


@pytest.fixture
def deferred(tmp_path: Path) -> object:
    with closing(new_sqlite(tmp_path / "test.db")) as store:
        for name in ("ada", "bob"):
            create_tenant(store, lambda: 1, name)
        yield DeferredLedger(store)


async def test_short_request_writes_only_its_entry(deferred: DeferredLedger) -> None:
    """One commit instead of two."""
    await deferred.hold("a")
    await deferred.hold("b")
    waiting = deferred.client.waiting
    await deferred.client.write(used("a", 10))
    await deferred.client.write(NamedEntry(used("b", 10)))
    deferred.tick()
    deferred.tick()

    assert waiting == 2
    assert deferred.ledger.handed == ["entry a", "entry b"]
    assert (deferred.client.waiting, deferred.timers) == (0, [])


async def test_writes_hold_of_longer_request(deferred: DeferredLedger) -> None:
    """Between one and two times `DEFER_S`; the entry follows."""
    await deferred.hold("a")
    deferred.tick()
    await deferred.hold("b")
    once = list(deferred.ledger.handed)
    deferred.tick()
    twice = list(deferred.ledger.handed)
    deferred.tick()
    await deferred.client.write(used("a", 10))

    assert (once, twice) == ([], ["hold a running"])
    assert deferred.ledger.handed == ["hold a running", "hold b running", "entry a"]


async def test_writes_hold_before_progress_note(deferred: DeferredLedger) -> None:
    """At any age; the holds of other requests stay deferred."""
    await deferred.hold("old")
    deferred.tick()
    await deferred.hold("young")
    await deferred.hold("other")
    deferred.client.note_progress(
        {"old": TokenCounts(), "young": TokenCounts(), "gone": TokenCounts()}
    )

    assert deferred.ledger.handed == [
        "hold old running",
        "hold young running",
        "progress old young gone",
    ]
    assert deferred.client.waiting == 1


async def test_writes_hold_first_if_ledger_may_refuse_it(deferred: DeferredLedger) -> None:
    """An idempotency key, a budget and a price beyond counting may each refuse the request."""
    set_budget(deferred.store, Budget(2, "day", hard_micros=5))
    named = await deferred.hold("named", claim=Claim("n", bytes(32), 10))
    bound = await deferred.hold("bound", tenant_id=2)
    dear = await deferred.hold("dear", input_tokens=TOKENS_MAX - 4)
    free = await deferred.hold("free", input_tokens=TOKENS_MAX - 5)

    assert [named, bound, dear, free] == [["hold named"], ["hold bound"], ["hold dear"], []]


async def test_new_budget_counts_running_requests(deferred: DeferredLedger) -> None:
    """The tenant's earlier requests have their holds first, in order of admission."""
    await deferred.hold("before")
    await asyncio.sleep(0)
    set_budget(deferred.store, Budget(1, "day", hard_micros=5))
    await deferred.hold("after")
    await deferred.hold("bobs", tenant_id=2)

    assert deferred.ledger.handed == ["hold before running", "hold after"]


@pytest.mark.parametrize("fault", ["door", "file"])
async def test_refuses_requests_while_ledger_fails(deferred: DeferredLedger, fault: str) -> None:
    """After a failed write, or while budgets are unknown, the hold is written first and raises."""
    deferred.ledger.refusal = LedgerUnavailable("not_durable", "The disk is full.")
    if fault == "door":
        deferred.ledger.is_well = False
    else:
        deferred.store.close()

    with pytest.raises(LedgerUnavailable):
        await deferred.hold("a")
    assert deferred.client.waiting == 0


async def test_refused_deferred_hold_does_not_end_its_request(deferred: DeferredLedger) -> None:
    """The request runs already, and its entry says everything."""
    await deferred.hold("a")
    deferred.ledger.refusal = LedgerUnavailable("not_durable", "The disk is full.")
    deferred.tick()
    deferred.tick()
    deferred.ledger.refusal = None
    await deferred.client.write(used("a", 10))

    assert deferred.ledger.handed == ["hold a running", "entry a"]


async def test_holds_first_writes_holds_of_all_running_requests(deferred: DeferredLedger) -> None:
    """Earlier holds are written before the context's items; requests admitted inside wait for
    theirs."""
    await deferred.hold("old")
    deferred.tick()
    await deferred.hold("young")
    with deferred.client.holds_first():
        began = list(deferred.ledger.handed)
        await deferred.hold("within")
        await deferred.client.write(TOTALS)
    after = await deferred.hold("after")

    assert began == ["hold old running", "hold young running"]
    assert deferred.ledger.handed[2:] == ["hold within", "totals"]
    assert after == []


async def test_close_writes_holds_of_running_requests(deferred: DeferredLedger) -> None:
    await deferred.hold("a")
    await deferred.client.close()
    deferred.tick()

    assert deferred.ledger.handed == ["hold a running", "close"]


async def test_forwards_other_attributes(deferred: DeferredLedger) -> None:
    assert (deferred.client.restarts, deferred.client.is_well) == (4, True)


# --- over a real ledger --------------------------------------------------------------------------


class BudgetMachine(RuleBasedStateMachine):
    """Requests of two keys of one tenant, with budgets that change while they run, against sums.

    A request is admitted exactly if every budget has room for it beside all running requests,
    whether their holds were written or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = new_sqlite(Path(self.folder.name) / "test.db")
        create_tenant(self.store, self.wall, "ada")
        for _ in range(2):
            create_key(self.store, self.wall, 1)
        add_card(self.store, self.wall, RateCard("std", input=1_000_000))
        self.runner = asyncio.Runner()
        self.ticks: list[Callable[[], None]] = []
        self.ledger = Ledger(self.store, self.wall)
        self.client = self.runner.run(self.open_ledger())
        self.hard: dict[int, int] = {}
        self.running: dict[str, tuple[int, int]] = {}
        self.spent = [0, 0, 0]
        self.count = 0

    def wall(self) -> int:
        return 1_000

    async def open_ledger(self) -> DeferredHolds:
        watch = BudgetWatch(self.store)
        return DeferredHolds(
            InProcessLedger(self.ledger), watch, lambda _, call: self.ticks.append(call)
        )

    def used(self, key: int) -> int:
        """Return what is used of a key's budget; key 0: of the tenant's."""
        held = [cost for whose, cost in self.running.values() if key in (0, whose)]
        return sum(held) + (self.spent[key] if key else sum(self.spent))

    @rule(key=st.integers(0, 2), hard=st.none() | st.integers(0, 60))
    def budget(self, key: int, hard: int | None) -> None:
        set_budget(self.store, Budget(1, "day", hard_micros=hard, key_id=key))
        self.hard.pop(key, None)
        if hard is not None:
            self.hard[key] = hard

    @rule(key=st.integers(1, 2), tokens=st.integers(0, 20))
    def admit(self, key: int, tokens: int) -> None:
        self.count += 1
        request_id = str(self.count)
        fits = all(
            self.used(whose) + tokens <= hard
            for whose, hard in self.hard.items()
            if whose in (0, key)
        )
        one = Hold(request_id, 1, key, "m", self.wall(), tokens)
        assert self.runner.run(self.try_admit(one)) == fits
        if fits:
            self.running[request_id] = key, tokens

    async def try_admit(self, one: Hold) -> bool:
        try:
            await self.client.write(one)
        except BudgetExceeded:
            return False
        return True

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if not self.running:
            return
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        key, cost = self.running.pop(request_id)
        tokens = data.draw(st.integers(0, cost))
        self.runner.run(self.write_entry(request_id, key, tokens))
        self.spent[key] += tokens

    async def write_entry(self, request_id: str, key: int, tokens: int) -> None:
        ms = self.wall()
        counts = tokens, 0, 0, tokens, 0, 0
        await self.client.write(UsageEntry(request_id, 1, key, "m", "done", ms, ms + 1, *counts))

    @rule()
    def tick(self) -> None:
        self.runner.run(self.run_timers())

    async def run_timers(self) -> None:
        ticks, self.ticks = self.ticks, []
        for call in ticks:
            call()

    def teardown(self) -> None:
        for request_id, (key, cost) in self.running.items():
            self.runner.run(self.write_entry(request_id, key, cost))
        self.runner.run(self.client.close())
        self.runner.close()
        holds = self.store.query("select count(*) from holds")
        faults = check_books(self.store)
        self.store.close()
        self.folder.cleanup()
        assert (holds, faults) == ([(0,)], [])


BudgetMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=30)
TestBudgetMachine = BudgetMachine.TestCase


# --- in a complete gateway -----------------------------------------------------------------------


@pytest.mark.usefixtures("no_periodic_tasks")
async def test_gateway_writes_no_hold_for_short_request(
    unopened_gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item for the ledger. On a busy host no answer is short: here everything is."""
    monkeypatch.setattr(deferred_holds, "DEFER_S", 3_600.0)
    await unopened_gateway.open()
    handed = _record_items(unopened_gateway)
    await unopened_gateway.ask(body=unopened_gateway.chat("one two"))
    await unopened_gateway.close()

    assert [_describe(item).split()[0] for item in handed] == ["entry"]


async def test_gateway_writes_hold_first_under_budget(gateway: GatewayFixture) -> None:
    """L4: the maximum price is reserved before a request is admitted."""
    set_budget(gateway.store, Budget(1, "day", hard_micros=10**9))
    handed = _record_items(gateway)
    await gateway.ask(body=gateway.chat("one two"))

    assert [_describe(item).split()[0] for item in handed] == ["hold", "entry"]


def _record_items(gateway: GatewayFixture) -> list[Item]:
    """Return a list that grows by each hold and entry that reaches the ledger from now on."""
    holds = gateway.gateway.ledger
    assert isinstance(holds, DeferredHolds)
    handed: list[Item] = []
    write = holds._ledger.write

    def watched(item: Item) -> asyncio.Future[None]:
        if isinstance(item, Hold) or entry_in(item):
            handed.append(item)
        return write(item)

    holds._ledger.write = watched  # type: ignore[method-assign]
    return handed
