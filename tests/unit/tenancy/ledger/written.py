"""What a ledger has on disk, as tests compare it."""

from __future__ import annotations

from tenancy.storage.interface import Store


def endings(store: Store) -> dict[str, tuple[str, int]]:
    """Return (ending, output tokens) of each entry, by request id."""
    rows = store.query("select request_id, ending, output_tokens from ledger")
    return {request_id: (ending, tokens) for request_id, ending, tokens in rows}


def holds(store: Store) -> int:
    """Return the number of open holds."""
    return int(store.query("select count(*) from holds")[0][0])
