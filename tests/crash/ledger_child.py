"""A process that writes a ledger until it is killed: `python -m tests.crash.ledger_child DATABASE
COUNT [LIE]`.

It prints a request id after its entry is durable. With LIE it prints that id without settling it
and exits, so that a check after a crash can be seen to fail. It exits with status 3 if the ledger
refuses.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tenancy.accounts.tenants import create_tenant, list_tenants
from tenancy.errors import TenancyError
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord
from tenancy.ledger.ledger import Hold, Ledger, NamedEntry, StorageReading, StorageReadings
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import PAYERS, RateCard, is_charged
from tenancy.pricing.rate_cards import add_card, load_cards
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Store
from tenancy.types import TokenCounts, UsageEntry
from tests.actors import TESTER

AT_ONCE = 4
ENDINGS = sorted(set(PAYERS) - {"interrupted"})
"""Every ending but that of a request whose process died."""
CARD = RateCard("std", output=10**6, cache_write={"5m": 3}, breach_credit="write_price")
"""Each entry has one token of a broken promise."""


def output_tokens(request_id: str) -> int:
    """Return a request's output tokens, a function of its id, so that the parent can check it."""
    return 1 + int(request_id.rpartition("-")[2]) % 7


def ending(request_id: str) -> str:
    """Return how a request ends: whole if it has an idempotency key, else in each way in turn."""
    number = int(request_id.rpartition("-")[2])
    return "done" if is_named(request_id) else ENDINGS[number // AT_ONCE % len(ENDINGS)]


def charge_pico(request_id: str) -> int:
    """Return what a settled request costs: nothing where the operator pays."""
    return output_tokens(request_id) * 10**6 if is_charged(ending(request_id)) else 0


def entry(request_id: str) -> UsageEntry:
    """Return the entry that a request id must have."""
    return UsageEntry(
        request_id=request_id,
        tenant_id=1,
        key_id=1,
        model="m",
        ending=ending(request_id),
        started_ms=1,
        ended_ms=2,
        prompt_tokens=5,
        cache_read_tokens=2,
        cache_write_tokens=0,
        fresh_tokens=3,
        output_tokens=output_tokens(request_id),
        physical_cached_tokens=1,
        read={"5m": 2},
        recomputed_promised_tokens=1,
        epoch="e1",
        rate_card_id="std@1",
        charge_pico=charge_pico(request_id),
    )


def claim(request_id: str) -> Claim:
    """Return the request's claim on its id as idempotency key."""
    return Claim(request_id, bytes(32), 10**6)


def noted_tokens(request_id: str) -> int:
    """Return the output tokens noted before settlement."""
    return output_tokens(request_id) // 2


def is_named(request_id: str) -> bool:
    """Return whether the request has an idempotency key: three of four have one.

    The progress of the others is charged if they are interrupted.
    """
    return int(request_id.rpartition("-")[2]) % AT_ONCE != 1


def hold(request_id: str) -> Hold:
    """Return a hold that reserves more than its entry costs."""
    name = claim(request_id) if is_named(request_id) else None
    return Hold(request_id, 1, 1, "m", 1, 5, 9, epoch="e1", claim=name)


def answer(request_id: str) -> ReplayedResponse:
    """Return the response to store."""
    return ReplayedResponse("{}", request_id.encode() * 50)


def named(request_id: str) -> NamedEntry:
    """Return the entry with its response."""
    return NamedEntry(entry(request_id), ReplayRecord(10**6, 10**9, answer(request_id)))


def furnish(store: Store) -> None:
    """Create a tenant with a price and a budget, each once, wherever the previous process died."""
    if not list_tenants(store):
        create_tenant(store, lambda: 1, "ada")
    if not load_cards(store):
        add_card(store, lambda: 1, CARD)
    set_budget(store, Budget(1, "day", hard_micros=10**9))


def main(place: str, count: int, lie: int | None) -> None:
    """Hold, note, settle and print, a few requests at a time, so that some share a commit."""
    store = open_store(place, Path(), {})
    furnish(store)
    ledger = Ledger(store, lambda: 2)
    life = store.query("select count(*) from ledger")[0][0]
    for first in range(0, count, AT_ONCE):
        request_ids = [f"{life}-{number}" for number in range(first, first + AT_ONCE)]
        held = [ledger.hold(hold(request_id)) for request_id in request_ids]
        for future in held:
            future.result()
        if lie is not None and first >= lie:
            os.write(1, f"{request_ids[0]}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        ledger.note_progress(
            {
                one: TokenCounts(fresh_tokens=1, output_tokens=noted_tokens(one))
                for one in request_ids
            }
        )
        settled = [ledger.settle(named(request_id)) for request_id in request_ids]
        for request_id, future in zip(request_ids, settled, strict=True):
            future.result()
            os.write(1, f"{request_id}\n".encode())
        credit = Adjustment(request_ids[0], request_ids[0], -1, "a credit")
        adjust(store, lambda: 2, credit, by=TESTER)
        reading = StorageReading(1, "5m", first + 7)
        ledger.write(StorageReadings(f"life-{life}", 2, (reading,))).result()
    ledger.close()
    store.close()


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
    except TenancyError as error:
        sys.stderr.write(f"{error.code}\n")
        os._exit(3)
