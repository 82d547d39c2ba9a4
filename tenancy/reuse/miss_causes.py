"""A miss cause: why tokens of a request's prompt were computed, or paid for, again, where, and at
what cost.

`gateway.analytics.prompt_findings` explains each prompt once. All readers use its causes: the table
`request_causes` has those of single requests, `tenancy.reuse.finding_counts` sums them by hour, and
the cache header of a later request names the latest one of its place. A cause has names of fields
and numbers, never text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from tenancy.pricing.charges import RateCard
from tenancy.storage.interface import Row, Store, pad_to_power_of_two, placeholders

FIRST_USE, WRITTEN_NEVER_READ = "first_use", "written_never_read"
OF_SUMS = frozenset({FIRST_USE, WRITTEN_NEVER_READ})
"""Causes that only the sums of several requests show."""
WRITE = "write:"
"""Prefix of the facts that say how many of the wasted tokens were charged as written, by class."""


class MissCause(Struct, frozen=True, array_like=True):
    """What one request adds to a cause."""

    request_id: str
    tenant_id: int
    model: str
    cause: str
    place: str
    """The field of the request, folded, or another place that the cause names."""
    wasted_tokens: int
    facts: dict[str, int] = {}
    """Numbers by name that the words of the cause are made of."""
    at_ms: int = 0
    requests: int = 1


def finding_id(tenant_id: int, model: str, cause: str, place: str) -> str:
    """Return an id that stays the same for the same cause, tenant, model and place."""
    key = f"{tenant_id}\n{model}\n{cause}\n{place}"
    return f"f_{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"


def waste_cost(cause: str, tokens: int, facts: Mapping[str, int], card: RateCard) -> int:
    """Return the cost of wasted tokens in pico-dollars: what was charged for them, as written or as
    input, less the price of the read, or of the input, that they would have been."""
    cured = card.input if cause == WRITTEN_NEVER_READ else card.cache_read
    cost, rest = 0, tokens
    for fact, number in facts.items():
        if fact.startswith(WRITE):
            written = min(rest, number)
            cost += written * max(0, card.write_price(fact.removeprefix(WRITE)) - cured)
            rest -= written
    return cost + rest * max(0, card.input - cured)


_STORED = MissCause.__struct_fields__[:7]
_COLUMNS = ", ".join(_STORED)


def write_causes(store: Store, causes: Iterable[MissCause]) -> None:
    """Write the causes of single requests in one transaction; the first one of a request stays.
    Raises StoreError."""
    rows = [
        (*(getattr(one, name) for name in _STORED[:-1]), msgspec.json.encode(one.facts).decode())
        for one in causes
    ]
    if not rows:
        return
    with store.change() as db:
        known = {row[0] for row in db.rows("select tenant_id from tenants")}
        db.execute_many(
            f"insert into request_causes ({_COLUMNS}) values {placeholders(len(_STORED))}"
            " on conflict (request_id) do nothing",
            [row for row in rows if row[1] in known],
        )


def read_causes(store: Store, request_ids: Sequence[str]) -> dict[str, MissCause]:
    """Return the causes of these requests by id. O(requests). Raises StoreError."""
    if not request_ids:
        return {}
    wanted = pad_to_power_of_two(request_ids)
    rows = store.query(
        f"select {_COLUMNS} from request_causes where request_id in {placeholders(len(wanted))}",
        wanted,
    )
    return {row[0]: _cause(row) for row in rows}


def _cause(row: Row) -> MissCause:
    values = [*row[:-1], msgspec.json.decode(row[-1], type=dict[str, int])]
    return MissCause(*values)
