"""Three counts of the same tokens agree, or the difference is shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tenancy.accounting.reconcile import Counts, Epoch, reconcile, reconcile_living
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.engine_counts import CountedRequest, EngineTotals, GatewayDeath, is_settled
from tenancy.ledger.ledger import Hold, Ledger, NamedEntry
from tenancy.ledger.transactions import Item, LedgerTransactions
from tenancy.storage.interface import Store
from tenancy.types import UsageEntry
from tests.examples import examples
from tests.unit.tenancy.conftest import Wall, new_store


def entry(request_id: str, epoch: str, ended_ms: int = 20) -> UsageEntry:
    return UsageEntry(request_id, 1, 1, "m", "done", 10, ended_ms, 9, 4, 0, 5, 3, 4, epoch=epoch)


def totals(epoch: str, times: int, at_ms: int = 20, *, is_ended: bool = False) -> EngineTotals:
    counts = (9 * times, 4 * times, 3 * times)
    return EngineTotals(epoch, at_ms, *counts, *counts, is_ended=is_ended)


@pytest.fixture
def ledger(store: Store, wall: Wall) -> Iterator[Ledger]:
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    for number in range(3):
        ledger.settle(entry(str(number), "e1")).result(60)
    yield ledger
    ledger.close()


def test_equal_counts_do_not_mismatch(store: Store, ledger: Ledger) -> None:
    """They are shown, so that zero is a number and not a claim."""
    ledger.write(totals("e1", 3)).result(60)
    (epoch,) = reconcile(store)

    assert (epoch.state, epoch.has_mismatch, epoch.entries) == ("running", False, 3)
    assert epoch.ledger == epoch.engine == epoch.metrics == Counts(27, 12, 9)


@pytest.mark.parametrize("times", [2, 4])
def test_finds_differences_either_way(store: Store, ledger: Ledger, times: int) -> None:
    """An entry that no engine computed, and tokens without a charge."""
    ledger.write(totals("e1", times, is_ended=True)).result(60)
    (epoch,) = reconcile(store)

    assert epoch.has_mismatch
    assert epoch.ledger.minus(epoch.engine).prompt_tokens == 9 * (3 - times)


def test_running_requests_defer_the_comparison(store: Store, ledger: Ledger) -> None:
    """Also entries that came after the engine's last reading."""
    ledger.write(totals("e1", 4)).result(60)
    ledger.hold(Hold("x", 1, 1, "m", 10, epoch="e1")).result(60)
    running = reconcile(store)[0]
    ledger.settle(entry("x", "e1", 99)).result(60)
    later = reconcile(store)[0]
    ledger.write(totals("e1", 4, 99)).result(60)
    asked = reconcile(store)[0]

    assert [one.state for one in (running, later, asked)] == ["pending", "pending", "running"]
    assert not running.has_mismatch
    assert not asked.has_mismatch


def test_died_epoch_shows_its_difference(store: Store, ledger: Ledger) -> None:
    """It is not a mistake of the books."""
    ledger.write(totals("e1", 2)).result(60)
    ledger.write(totals("e2", 0, 30)).result(60)
    newer, older = reconcile(store)

    assert (newer.epoch, newer.state, older.state) == ("e2", "running", "died")
    assert not older.has_mismatch
    assert older.ledger.minus(older.engine).output_tokens == 3


def test_epochs_of_several_engines_are_compared_while_their_records_are_fresh(
    store: Store, ledger: Ledger
) -> None:
    ledger.write(totals("e1", 4, 20_000)).result(60)
    ledger.write(totals("e2", 0, 30_000)).result(60)
    states = [[one.state for one in reconcile(store, now_ms)] for now_ms in (150_000, 170_001)]
    own = reconcile_living(store, "e1")

    assert states == [["running", "running"], ["running", "died"]]
    assert own is not None
    assert (own.state, own.has_mismatch) == ("running", True)
    assert reconcile_living(store, "e3") is None


class Town:
    """Gateways on one engine, without the code under test: what each of them and the engine
    counts."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_ms = 100
        self.engine = [0, 0]  # prompt tokens, and those of connections that left
        self.starts = [0, 0]
        self.metrics = [0, 0]
        self.requests = 0
        self.running: list[dict[str, int]] = [{}, {}]  # holds with their tokens, by gateway
        self.finished = [0, 0]  # as the engine has counted it, since the start
        self.ended: list[list[CountedRequest]] = [[], []]
        self.deaths: list[GatewayDeath] = []
        self.unbilled = 0
        self.ledgers = [LedgerTransactions(n, f"g{n}/0") for n in (0, 1)]
        for gateway in (0, 1):
            self.tell(gateway)

    def write(self, gateway: int, *items: Item) -> None:
        with self.store.change() as db:
            assert self.ledgers[gateway].apply(db, items) == [None] * len(items)

    def begin(self, gateway: int, tokens: int) -> None:
        """A request starts: the engine counts its prompt."""
        self.requests += 1
        name = f"{self.requests:032x}"
        self.engine[0] += tokens
        self.running[gateway][name] = tokens
        self.write(gateway, Hold(name, 1, 1, "m", self.now_ms, epoch="e"))

    def finish(self, gateway: int, name: str) -> int:
        """The engine finishes a request, whoever may hear of it."""
        tokens = self.running[gateway].pop(name)
        self.finished[gateway] += tokens
        self.ended[gateway].append(CountedRequest(f"{name}-0", (tokens, 0, 0)))
        return tokens

    def end(self, gateway: int, *, beyond: int = 0) -> None:
        """The oldest request ends and is entered; `beyond`: with fewer tokens than counted."""
        for name in list(self.running[gateway])[:1]:
            tokens = self.finish(gateway, name)
            entered = max(0, tokens - beyond)
            self.metrics[gateway] += entered
            self.now_ms += 1
            entry = self.entry(name, entered)
            self.write(gateway, NamedEntry(entry, uncounted={"e": (entered - tokens, 0, 0)}))

    def leave(self, gateway: int) -> None:
        """The oldest request loses its connection, and ends elsewhere."""
        for name in list(self.running[gateway])[:1]:
            self.engine[1] += self.running[gateway].pop(name)
            self.now_ms += 1
            elsewhere = structs.replace(self.entry(name, 1), epoch="other")
            self.write(gateway, elsewhere)

    def entry(self, name: str, tokens: int) -> UsageEntry:
        counts = {"prompt_tokens": tokens, "cache_read_tokens": 0, "fresh_tokens": tokens}
        given = structs.replace(entry(name, "e", self.now_ms), **counts)
        plain = structs.replace(given, physical_cached_tokens=0, output_tokens=0)
        return structs.replace(plain, cache_write_tokens=0)

    def tell(self, gateway: int, *, is_ended: bool = False) -> None:
        name = f"g{gateway}/{self.starts[gateway]}"
        told = EngineTotals("e", self.now_ms, self.engine[0], 0, 0, self.metrics[gateway], 0, 0)
        uncharged = structs.replace(told, uncharged_prompt_tokens=self.engine[1])
        self.write(gateway, structs.replace(uncharged, gateway=name, is_ended=is_ended))

    def restart(self, gateway: int, *, is_killed: bool) -> None:
        """A killed one has half of its requests running, and the other half finished with nobody
        entering them; its ledger's process closes their holds later."""
        name = f"g{gateway}/{self.starts[gateway]}"
        if is_killed:
            names = list(self.running[gateway])
            for number, one in enumerate(names):
                if number % 2:
                    self.engine[1] += self.running[gateway].pop(one)
                else:
                    self.unbilled += self.finish(gateway, one)
            self.deaths.append(
                GatewayDeath(
                    "e",
                    name,
                    self.now_ms,
                    (self.finished[gateway], 0, 0),
                    tuple(self.ended[gateway]),
                )
            )
        else:
            while self.running[gateway]:
                self.end(gateway)
            self.tell(gateway, is_ended=True)
        self.starts[gateway] += 1
        self.metrics[gateway] = self.finished[gateway] = 0
        self.ended[gateway] = []
        self.ledgers[gateway] = LedgerTransactions(gateway, f"g{gateway}/{self.starts[gateway]}")
        self.tell(gateway)

    def close_holds(self) -> None:
        """Close the holds that no gateway has any more: with the progress that was delivered."""
        self.now_ms += 1
        running = {name for some in self.running for name in some}
        for (name,) in self.store.query("select request_id from holds"):
            if name not in running:
                dead = structs.replace(self.entry(name, 1), ending="interrupted")
                self.write(0, NamedEntry(dead, uncounted={"e": (1, 0, 0)}))

    def settle(self) -> None:
        """Both gateways learn of the deaths, and each tells all of them."""
        for gateway in (0, 1):
            self.write(gateway, *self.deaths)

    def all_told(self, *, are_ended: bool = False) -> Epoch:
        for gateway in (0, 1):
            self.tell(gateway, is_ended=are_ended)
        (found,) = reconcile(self.store, self.now_ms)
        return found


STEPS = ("begin", "begin", "end", "end", "stop", "leave", "tell", "restart", "kill", "close")


@settings(max_examples=examples(80))
@given(
    st.lists(
        st.tuples(st.sampled_from((*STEPS, "settle")), st.integers(0, 1), st.integers(1, 9)),
        max_size=25,
    )
)
@example([("begin", 0, 5), ("begin", 0, 3), ("end", 0, 1), ("begin", 0, 2), ("kill", 0, 1)])
def test_counts_of_two_gateways_agree_to_the_token(history: list[tuple[str, int, int]]) -> None:
    """At no time do they seem to differ; and once all have told, and deaths are settled, they are
    known and equal. What was finished for a gateway that died is known as unbilled, once. One token
    more in the engine is seen, and so is an entry that is missing."""
    with new_store() as store:
        create_tenant(store, Wall(), "ada")
        town = Town(store)
        for what, gateway, tokens in history:
            match what:
                case "restart" | "kill":
                    town.restart(gateway, is_killed=what == "kill")
                case "begin":
                    town.begin(gateway, tokens)
                case "end" | "stop":
                    town.end(gateway, beyond=tokens if what == "stop" else 0)
                case "leave":
                    town.leave(gateway)
                case "tell":
                    town.tell(gateway)
                case "close":
                    town.close_holds()
                case _:
                    town.settle()
            assert not any(one.has_mismatch for one in reconcile(store, town.now_ms))
        for gateway in (0, 1):
            while town.running[gateway]:
                town.end(gateway)
        town.close_holds()
        town.settle()
        running, final = town.all_told(), town.all_told(are_ended=True)
        town.engine[0] += 1
        apart = town.all_told()

    assert [running.state, final.state, apart.state] == ["running", "final", "final"]
    assert running.ledger == running.engine == running.metrics == final.engine
    assert running.unbilled == Counts(town.unbilled, 0, 0)
    assert not final.has_mismatch
    assert apart.has_mismatch


def test_a_lost_entry_of_a_gateway_that_died_is_found(store: Store, ledger: Ledger) -> None:
    """Unless the engine tells that it has just finished the request: then nobody could enter it."""
    told = structs.replace(totals("e1", 4), gateway="g/1", metric_prompt_tokens=27)
    ledger.write(structs.replace(told, is_ended=True)).result(60)
    death = GatewayDeath("e1", "g/0", 30, (9, 4, 3))
    ledger.write(death).result(60)
    (lost,) = reconcile(store)
    ended = (CountedRequest("3", (9, 4, 3)),)
    ledger.write(structs.replace(death, epoch="e2", ended=ended)).result(60)
    ledger.write(structs.replace(totals("e2", 1), gateway="g/1", is_ended=True)).result(60)
    unbilled = next(one for one in reconcile(store) if one.epoch == "e2")

    assert lost.has_mismatch
    assert lost.ledger.minus(lost.engine) == Counts(-9, -4, -3)
    assert unbilled.unbilled == Counts(9, 4, 3)
    assert unbilled.engine == unbilled.ledger == Counts(0, 0, 0)


def test_a_death_is_settled_when_no_hold_is_open(store: Store, ledger: Ledger) -> None:
    """Its ledger's process may outlive the gateway, and still write the entry."""
    ledger.hold(Hold("x", 1, 1, "m", 10, epoch="e1")).result(60)
    death = GatewayDeath("e1", "g/0", 30, (36, 16, 12), (CountedRequest("x", (9, 4, 3)),))
    ledger.write(death).result(60)
    early = is_settled(store, "e1", "g/0")
    ledger.settle(entry("x", "e1")).result(60)
    ledger.write(structs.replace(totals("e1", 4), gateway="g/0")).result(60)
    ledger.write(death).result(60)
    (epoch,) = reconcile(store)

    assert not early
    assert (epoch.state, epoch.unbilled) == ("final", Counts(0, 0, 0))
    assert epoch.ledger == epoch.engine == epoch.metrics == Counts(36, 16, 12)


def test_no_epochs_give_no_rows(store: Store) -> None:
    assert reconcile(store) == []
