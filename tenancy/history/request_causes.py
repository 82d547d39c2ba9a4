"""The table `request_causes`: why one request's prompt was computed, or paid for, again.

A row is what findings count of one request (`gateway.analytics.prompt_findings`). It has names of
causes and fields and numbers, never text, and is deleted with the requests' records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from tenancy.storage.interface import Row, Store, pad_to_power_of_two, placeholders


class RequestCause(Struct, frozen=True, array_like=True):
    """A request's cause at a place. `facts`: as of `tenancy.reuse.finding_counts`."""

    request_id: str
    tenant_id: int
    model: str
    cause: str
    place: str
    wasted_tokens: int
    facts: dict[str, int] = {}


_COLUMNS = ", ".join(RequestCause.__struct_fields__)


def write_causes(store: Store, causes: Iterable[RequestCause]) -> None:
    """Write causes in one transaction; the first one of a request stays. Raises StoreError."""
    rows = [
        (*(getattr(one, name) for name in RequestCause.__struct_fields__[:-1]), _json(one.facts))
        for one in causes
    ]
    if not rows:
        return
    with store.change() as db:
        known = {row[0] for row in db.rows("select tenant_id from tenants")}
        db.execute_many(
            f"insert into request_causes ({_COLUMNS}) values {placeholders(7)}"
            " on conflict (request_id) do nothing",
            [row for row in rows if row[1] in known],
        )


def read_causes(store: Store, request_ids: Sequence[str]) -> dict[str, RequestCause]:
    """Return the causes of these requests by id. O(requests). Raises StoreError."""
    if not request_ids:
        return {}
    wanted = pad_to_power_of_two(request_ids)
    rows = store.query(
        f"select {_COLUMNS} from request_causes where request_id in {placeholders(len(wanted))}",
        wanted,
    )
    return {row[0]: _cause(row) for row in rows}


def _cause(row: Row) -> RequestCause:
    *values, facts = row
    values.append(msgspec.json.decode(facts, type=dict[str, int]))
    return RequestCause(*values)


def _json(facts: dict[str, int]) -> str:
    return msgspec.json.encode(facts).decode()
