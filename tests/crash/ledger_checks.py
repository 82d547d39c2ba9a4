"""What must hold of a ledger after any death of `ledger_child` or a similar process."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from tenancy.accounting.audit import check_books
from tenancy.accounting.usage import usage
from tenancy.ledger.idempotency import find
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.budgets import budget_states
from tenancy.pricing.charges import is_charged
from tenancy.storage.backends import open_store
from tests.crash.ledger_child import (
    answer,
    charge_pico,
    claim,
    ending,
    entry,
    furnish,
    is_named,
    noted_tokens,
    output_tokens,
)
from tests.unit.tenancy.ledger.written import holds


def check_ledger(place: Path | str, confirmed: set[str], unheld: Set[str] = frozenset()) -> int:
    """Open the ledger and assert its invariants. Returns the number of entries.

    `confirmed`: request ids whose entries were confirmed. `unheld`: ids whose holds were refused,
    though they may be stored.
    """
    store = open_store(str(place), Path(), {})
    ledger = Ledger(store, lambda: 3)
    try:
        if store.is_local:
            assert store.query("pragma integrity_check") == [("ok",)]
        rows = store.query("select request_id, ending, output_tokens, charge_pico from ledger")
        found = {row[0]: row[1:] for row in rows}
        assert len(found) == len(rows), "an entry is there twice"
        assert confirmed <= set(found), "a confirmed entry is lost"
        for request_id, (how, tokens, charge) in found.items():
            right, cost = {output_tokens(request_id)}, charge_pico(request_id)
            if how == "interrupted":
                right = {0} if is_named(request_id) else {0, noted_tokens(request_id)}
                cost = tokens * 10**6
            else:
                assert how == ending(request_id), "an entry has another ending"
            assert tokens in right, "an entry is not what was sent, or noted"
            assert charge == cost, "an entry is not charged what it costs"
        assert all(found[request_id][0] == ending(request_id) for request_id in confirmed)
        assert holds(store) == 0, "a hold was left open"
        names = {row[0] for row in store.query("select name from named_requests")}
        whole = {one for one in found if found[one][0] == "done" and is_named(one)}
        assert names <= whole, "a name is kept without its entry"
        assert whole - unheld <= names, "an entry is there without its answer"
        for name in names:
            assert find(store, 1, claim(name), 3) == answer(name), "an answer is not what was sent"
        furnish(store)
        for again in [ledger.settle(entry(request_id)) for request_id in confirmed]:
            again.result(60)
        assert sum(row[2] for row in rows) == sum(t.output_tokens for t in usage(store))
        (state,) = budget_states(store, lambda: 3)
        assert state.reserved_pico == 0, "a reservation has no hold"
        assert state.spent_pico == sum(row[3] for row in rows), "a budget is not its charges"
        charged = sum(how != "interrupted" and is_charged(how) for how, _, _ in found.values())
        breaches = store.query(
            "select sum(amount_pico) from adjustments where reason like '%lost%'"
        )
        assert breaches == [(-3 * charged or None,)], "a broken promise is not credited once"
        assert check_books(store) == []
        return len(rows)
    finally:
        ledger.close()
        store.close()
