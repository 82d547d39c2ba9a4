"""What was written to a ledger, as tests wait for it and compare it."""

from __future__ import annotations

from concurrent.futures import Future

from tenancy.accounting.usage import entries_of
from tenancy.storage.interface import Store
from tenancy.types import UsageEntry

PATIENCE_S = 60


def done(future: Future[None]) -> None:
    """Wait until an item is durable; raise its refusal."""
    future.result(PATIENCE_S)


def entries(store: Store) -> dict[str, UsageEntry]:
    """Return the entries by request id, in ledger order."""
    rows = entries_of(store, None, 0, None, 0, 100_000)
    found = {entry.request_id: entry for _, _, _, entry in rows}
    assert len(found) == len(rows)
    return found


def endings(store: Store) -> dict[str, tuple[str, int]]:
    """Return (ending, output tokens) of each entry, by request id."""
    rows = store.query("select request_id, ending, output_tokens from ledger")
    return {request_id: (ending, tokens) for request_id, ending, tokens in rows}


def holds(store: Store) -> int:
    """Return the number of open holds."""
    return int(store.query("select count(*) from holds")[0][0])
