"""A hold comes late only where nothing hangs on it, and before anything that would."""

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

from gateway.background import reconciliation
from gateway.ledger import deferred_holds
from gateway.ledger.deferred_holds import LATE_S, TOKENS_MAX, DeferredHolds
from gateway.ledger.interface import InProcessLedger
from tenancy.accounting.audit import check_books
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BudgetExceeded, LedgerUnavailable, TenancyError
from tenancy.ledger.idempotency import Claim
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.progress import Progress
from tenancy.ledger.transactions import EngineTotals, Hold, Item, NamedEntry, entry_in
from tenancy.pricing.budget_watch import BudgetWatch
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import UsageEntry
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.tenancy.conftest import used

TOTALS = EngineTotals("e", 10, *range(1, 7))


class Door:
    """A `LedgerClient` that remembers what was handed in, and answers when it is told to."""

    found_epoch, interrupted, restarts = None, 3, 4

    def __init__(self) -> None:
        self.is_well = True
        self.handed: list[str] = []
        self.refusal: TenancyError | None = None

    def write(self, item: Item) -> asyncio.Future[None]:
        self.handed.append(_said(item))
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.refusal is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(self.refusal)
        return waiter

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        self.handed.append(f"progress {' '.join(reached)}")

    def holds_first(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def close(self) -> None:
        self.handed.append("close")


def _said(item: Item) -> str:
    if isinstance(item, Hold):
        return f"hold {item.request_id}{' running' if item.is_running else ''}"
    entry = entry_in(item)
    return "totals" if entry is None else f"entry {entry.request_id}"


class Made:
    """Late holds over a door, a file with two tenants, and a clock that stands."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.door = Door()
        self.timers: list[Callable[[], None]] = []
        self.late = DeferredHolds(self.door, BudgetWatch(store), self._call_later)

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        assert seconds == LATE_S
        self.timers.append(call)

    def tick(self) -> None:
        """`LATE_S` later."""
        timers, self.timers = self.timers, []
        for call in timers:
            call()

    async def hold(self, request_id: str, tenant_id: int = 1, **facts: object) -> list[str]:
        """What was handed in for it at once."""
        before = len(self.door.handed)
        one = Hold(request_id, tenant_id, tenant_id, "m", 10, output_tokens=5)
        await self.late.write(structs.replace(one, **facts))
        return self.door.handed[before:]


@pytest.fixture
def early(tmp_path: Path) -> object:
    with closing(SqliteStore(tmp_path / "test.db")) as store:
        for name in ("ada", "bob"):
            create_tenant(store, lambda: 1, name)
        yield Made(store)


async def test_an_answer_that_ends_soon_is_one_item(early: Made) -> None:
    """One commit, where two would say the same."""
    await early.hold("a")
    await early.hold("b")
    waiting = early.late.waiting
    await early.late.write(used("a", 10))
    await early.late.write(NamedEntry(used("b", 10)))
    early.tick()
    early.tick()

    assert waiting == 2
    assert early.door.handed == ["entry a", "entry b"]
    assert (early.late.waiting, early.timers) == (0, [])


async def test_what_lasts_longer_has_its_hold(early: Made) -> None:
    """Between once and twice the time; its entry follows it."""
    await early.hold("a")
    early.tick()
    await early.hold("b")
    once = list(early.door.handed)
    early.tick()
    twice = list(early.door.handed)
    early.tick()
    await early.late.write(used("a", 10))

    assert (once, twice) == ([], ["hold a running"])
    assert early.door.handed == ["hold a running", "hold b running", "entry a"]


async def test_progress_is_noted_in_a_hold(early: Made) -> None:
    """Young or old; others go on waiting."""
    await early.hold("old")
    early.tick()
    await early.hold("young")
    await early.hold("other")
    early.late.note_progress({"old": Progress(), "young": Progress(), "gone": Progress()})

    assert early.door.handed == [
        "hold old running",
        "hold young running",
        "progress old young gone",
    ]
    assert early.late.waiting == 1


async def test_a_name_a_budget_and_a_sum_beyond_counting_wait_for_their_hold(early: Made) -> None:
    """Each may refuse the request."""
    set_budget(early.store, Budget(2, "day", hard_micros=5))
    named = await early.hold("named", claim=Claim("n", bytes(32), 10))
    bound = await early.hold("bound", tenant_id=2)
    dear = await early.hold("dear", input_tokens=TOKENS_MAX - 4)
    free = await early.hold("free", input_tokens=TOKENS_MAX - 5)

    assert [named, bound, dear, free] == [["hold named"], ["hold bound"], ["hold dear"], []]


async def test_a_budget_counts_what_ran_before_it_was_set(early: Made) -> None:
    """What comes after it finds its tenant's holds already there, in the order in which they were
    admitted."""
    await early.hold("before")
    await asyncio.sleep(0)
    set_budget(early.store, Budget(1, "day", hard_micros=5))
    await early.hold("after")
    await early.hold("bobs", tenant_id=2)

    assert early.door.handed == ["hold before running", "hold after"]


@pytest.mark.parametrize("fault", ["door", "file"])
async def test_what_cannot_be_billed_does_not_run(early: Made, fault: str) -> None:
    """When writing has failed, or nobody can say who has a budget, the hold comes first and says
    so."""
    early.door.refusal = LedgerUnavailable("not_durable", "The disk is full.")
    if fault == "door":
        early.door.is_well = False
    else:
        early.store.close()

    with pytest.raises(LedgerUnavailable):
        await early.hold("a")
    assert early.late.waiting == 0


async def test_a_late_hold_that_is_refused_ends_nothing(early: Made) -> None:
    """It runs already, and its entry says all of it; nobody is left who was not told."""
    await early.hold("a")
    early.door.refusal = LedgerUnavailable("not_durable", "The disk is full.")
    early.tick()
    early.tick()
    early.door.refusal = None
    await early.late.write(used("a", 10))

    assert early.door.handed == ["hold a running", "entry a"]


async def test_who_counts_finds_a_hold_for_all_that_runs(early: Made) -> None:
    """What runs by then is handed in before, and what begins meanwhile has its own first."""
    await early.hold("old")
    early.tick()
    await early.hold("young")
    with early.late.holds_first():
        began = list(early.door.handed)
        await early.hold("within")
        await early.late.write(TOTALS)
    after = await early.hold("after")

    assert began == ["hold old running", "hold young running"]
    assert early.door.handed[2:] == ["hold within", "totals"]
    assert after == []


async def test_closing_leaves_nothing_unsaid(early: Made) -> None:
    """What still runs then is known to have run."""
    await early.hold("a")
    await early.late.close()
    early.tick()

    assert early.door.handed == ["hold a running", "close"]


async def test_all_else_passes_through(early: Made) -> None:
    """Who asks it asks the ledger."""
    door = early.late

    assert (door.found_epoch, door.interrupted, door.restarts, door.is_well) == (None, 3, 4, True)


# --- over a real ledger --------------------------------------------------------------------------


class Admitting(RuleBasedStateMachine):
    """Requests of two keys of one tenant, with budgets that come and go while they run, against
    sums: what is admitted under a budget always finds room beside all that runs, held or not."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = SqliteStore(Path(self.folder.name) / "test.db")
        create_tenant(self.store, self.wall, "ada")
        for _ in range(2):
            create_key(self.store, self.wall, 1)
        add_card(self.store, self.wall, RateCard("std", input=1_000_000))
        self.runner = asyncio.Runner()
        self.ticks: list[Callable[[], None]] = []
        self.ledger = Ledger(self.store, self.wall)
        self.late = self.runner.run(self.opened())
        self.hard: dict[int, int] = {}
        self.running: dict[str, tuple[int, int]] = {}
        self.spent = [0, 0, 0]
        self.count = 0

    def wall(self) -> int:
        return 1_000

    async def opened(self) -> DeferredHolds:
        watch = BudgetWatch(self.store)
        return DeferredHolds(
            InProcessLedger(self.ledger), watch, lambda _, call: self.ticks.append(call)
        )

    def used(self, key: int) -> int:
        """Of the budget of a key, or of the tenant's: 0."""
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
        assert self.runner.run(self.is_admitted(one)) == fits
        if fits:
            self.running[request_id] = key, tokens

    async def is_admitted(self, one: Hold) -> bool:
        try:
            await self.late.write(one)
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
        self.runner.run(self.settled(request_id, key, tokens))
        self.spent[key] += tokens

    async def settled(self, request_id: str, key: int, tokens: int) -> None:
        ms = self.wall()
        counts = tokens, 0, 0, tokens, 0, 0
        await self.late.write(UsageEntry(request_id, 1, key, "m", "done", ms, ms + 1, *counts))

    @rule()
    def tick(self) -> None:
        self.runner.run(self.ticked())

    async def ticked(self) -> None:
        ticks, self.ticks = self.ticks, []
        for call in ticks:
            call()

    def teardown(self) -> None:
        for request_id, (key, cost) in self.running.items():
            self.runner.run(self.settled(request_id, key, cost))
        self.runner.run(self.late.close())
        self.runner.close()
        holds = self.store.query("select count(*) from holds")
        faults = check_books(self.store)
        self.store.close()
        self.folder.cleanup()
        assert (holds, faults) == ([(0,)], [])


Admitting.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestAdmitting = Admitting.TestCase


# --- in a whole gateway -------------------------------------------------------------------------


async def test_a_short_answer_never_has_a_hold(
    unopened_gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item for the ledger. On a busy host no answer is short: here everything is."""
    monkeypatch.setattr(deferred_holds, "LATE_S", 3_600.0)
    monkeypatch.setattr(reconciliation, "LOOK_EVERY_S", 3_600.0)
    await unopened_gateway.open()
    handed = _watched(unopened_gateway)
    await unopened_gateway.ask(body=unopened_gateway.chat("one two"))
    await unopened_gateway.close()

    assert [_said(item).split()[0] for item in handed] == ["entry"]


async def test_an_answer_under_a_budget_has_its_hold_first(gateway: GatewayFixture) -> None:
    """L4: what it may cost is reserved before it is admitted."""
    set_budget(gateway.store, Budget(1, "day", hard_micros=10**9))
    handed = _watched(gateway)
    await gateway.ask(body=gateway.chat("one two"))

    assert [_said(item).split()[0] for item in handed] == ["hold", "entry"]


def _watched(gateway: GatewayFixture) -> list[Item]:
    """Holds and entries that reach the ledger from now on."""
    late = gateway.gateway.ledger
    assert isinstance(late, DeferredHolds)
    handed: list[Item] = []
    write = late._door.write

    def watched(item: Item) -> asyncio.Future[None]:
        if isinstance(item, Hold) or entry_in(item):
            handed.append(item)
        return write(item)

    late._door.write = watched  # type: ignore[method-assign]
    return handed
