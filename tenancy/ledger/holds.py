"""Holds of open requests: what each reserves, and how far it has come.

A transaction reads the holds and entries of its request ids once, changes them in memory as items
are applied, and writes them once, so a request that is held and settled in one batch never reaches
the table. Progress is stored in the hold, so settlement deletes it in the same transaction; it is
the usage that a hold is settled to if its server dies. The gateway counts only what the engine
computed and the client's socket accepted. The module knows no prices and no budgets. `transactions`
applies its items to `Holds` and writes progress; `writer` closes dead holds by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache

import msgspec
from msgspec import Struct

from tenancy.storage.interface import Row, Transaction, Value, pad_to_power_of_two, placeholders
from tenancy.types import TokenCounts, UsageEntry

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

OPEN_HOLDS = (
    "select request_id, writer_id, tenant_id, key_id, model, started_ms, workspace, tier, dialect,"
    " epoch, case when request_id in (select request_id from named_requests) then null"
    " else progress end from holds"
)
"""The columns of open holds that `interrupted` needs.

The progress of a named request is left out: its client sends it again and pays then, never twice
under one name.
"""


class ProgressNote(Struct, frozen=True, tag="progress"):
    """Progress of requests since the last note, by request id."""

    reached: Mapping[str, TokenCounts]


def write_progress(db: Transaction, reached: Mapping[str, TokenCounts]) -> None:
    """Store progress in the requests' holds, all in one statement; ids without a hold are
    ignored."""
    rows = [(msgspec.msgpack.encode(one), request_id) for request_id, one in reached.items()]
    db.execute_many("update holds set progress = ? where request_id = ?", rows)


def interrupted(hold: Row, now_ms: int) -> UsageEntry:
    """Return the entry of a hold after its server's death, from a row of `OPEN_HOLDS`.

    Its usage is the noted progress, or nothing. It ends when it is closed, as the engine's counts
    were queried before that.
    """
    request_id, _, tenant_id, key_id, model, started_ms, workspace, tier, dialect, epoch = hold[:-1]
    return UsageEntry(
        request_id=request_id,
        tenant_id=tenant_id,
        key_id=key_id,
        model=model,
        ending="interrupted",
        started_ms=started_ms,
        ended_ms=now_ms,
        workspace=workspace,
        tier=tier,
        dialect=dialect,
        epoch=epoch,
        **_decode(hold[-1]).fields(),
    )


def _decode(blob: bytes | None) -> TokenCounts:
    """Decode progress; an unreadable blob is no progress, so a start does not fail."""
    if blob is not None:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(bytes(blob), type=TokenCounts)
    return TokenCounts()
