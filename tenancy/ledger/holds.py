"""The holds and entries of the request ids of one transaction.

They are read once, changed in memory as items are applied, and written once, so a request that is
held and settled in one batch never reaches the table. The module knows no prices and no budgets;
`transactions` applies its items to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tenancy.storage.interface import Transaction, Value, pad_to_power_of_two, placeholders

HeldTerms = tuple[str, int, int]
"""Terms of a hold: rate card id, reserved pico-dollars, and the instant it is booked at (ms)."""

IDS_AT_ONCE = 128
"""Request ids that one statement reads."""


class Holds:
    """Open holds and settled ids within a transaction that holds the write lock."""

    def __init__(self, db: Transaction, request_ids: Sequence[str]) -> None:
        """Read the holds and entries of these ids, with one statement for every 128."""
        self._db = db
        self._held: dict[str, HeldTerms] = {}
        self._settled: set[str] = set()
        self._made: dict[str, tuple[Value, ...]] = {}
        self._released: list[tuple[str]] = []
        for first in range(0, len(request_ids), IDS_AT_ONCE):
            asked = pad_to_power_of_two(request_ids[first : first + IDS_AT_ONCE])
            for request_id, card_id, pico, booked_ms in db.rows(_select_ids(len(asked)), asked):
                if card_id is None:
                    self._settled.add(request_id)
                else:
                    self._held[request_id] = card_id, pico, booked_ms

    def is_used(self, request_id: str) -> bool:
        """Return whether a hold or an entry has this id."""
        return request_id in self._held or request_id in self._settled

    def find(self, request_id: str) -> HeldTerms | None:
        """Return the terms of the id's open hold, or None."""
        return self._held.get(request_id)

    def add(self, request_id: str, held: HeldTerms, row: tuple[Value, ...]) -> None:
        """Add a hold on an unused id. `row`: the columns of `HOLD_FIELDS`."""
        self._made[request_id] = row
        self._held[request_id] = held

    def settle(self, request_id: str) -> bool:
        """Release the id's hold, if any. Returns False if the id has an entry already."""
        if self._held.pop(request_id, None) is not None:
            if self._made.pop(request_id, None) is None:
                self._released.append((request_id,))
        elif request_id in self._settled:
            return False
        self._settled.add(request_id)
        return True

    def finish(self) -> None:
        """Write the changes."""
        if self._released:
            self._db.execute_many("delete from holds where request_id = ?", self._released)
        if self._made:
            self._db.execute_many(_INSERT_HOLDS, list(self._made.values()))


@cache
def _select_ids(count: int) -> str:
    which = f"where request_id in ({', '.join(f'?{number}' for number in range(1, count + 1))})"
    return (
        f"select request_id, rate_card_id, reserved_pico, booked_ms from holds {which}"
        f" union all select request_id, null, null, null from ledger {which}"
    )


HOLD_FIELDS = (
    *("request_id", "tenant_id", "key_id", "model", "started_ms", "workspace", "tier", "dialect"),
    *("epoch", "rate_card_id", "reserved_tokens", "reserved_pico", "booked_ms", "writer_id"),
)
"""Columns of an open hold."""

_INSERT_HOLDS = (
    f"insert into holds ({', '.join(HOLD_FIELDS)}) values {placeholders(len(HOLD_FIELDS))}"
)
