"""Records of ended requests: what the ledger does not hold of them, for a bounded time.

A record has counts, times and codes, never text. The newest `RECORDS_MAX` of at most a week are
kept. `list_requests` joins them with the ledger's entries: request ids begin with the millisecond
at which a request was received, so both are ordered by time. `gateway.background.history_sampling`
writes records; the admin API reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from tenancy.ledger.entries import ROW_FIELDS, entry_of
from tenancy.storage.interface import Row, Store, Value
from tenancy.types import DAY_MS, HOUR_MS, UsageEntry

RECORDS_MAX = 50_000
KEPT_MS = 7 * DAY_MS
DELETED_AT_ONCE = 2_000
"""Records that one transaction deletes, so that other writers wait only briefly."""
CAUSE_ALONE_MS = HOUR_MS
"""How long a request's cause may be kept without its record, which may be written later."""
_TIME_DIGITS, _ID_DIGITS = 12, 32
_LAST_ID = "g"
"""A text above every request id, which is hexadecimal."""
_ENTRIES = ", ".join(f"ledger.{name}" for name in ROW_FIELDS)


class RequestRecord(Struct, frozen=True, array_like=True, gc=False):
    """One ended request. Times are seconds after it was received; None if not reached.

    `tenant_id` 0: no valid key.
    """

    request_id: str
    tenant_id: int
    key_id: int
    endpoint: str
    """The declared route."""
    dialect: str
    model: str
    """As it is served; where it is not, as the client asked for it, if that could be a name."""
    is_stream: bool
    status: int
    ending: str
    code: str
    total_s: float
    submitted_s: float | None = None
    """The engine accepted the request."""
    started_s: float | None = None
    """Its first step began."""
    first_token_s: float | None = None
    settled_s: float | None = None
    """The ledger entry was durable."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    missed: str = ""
    """The cause of the first miss."""
    missed_tokens: int = 0
    """Prompt tokens written before and not read."""
    segments: tuple[tuple[str, int], ...] = ()
    """Parts of the prompt as (path in the request, token at which it ends), in order of their ends;
    of many, the first and the last."""
    loaded_tokens: dict[str, int] = {}
    """Of the cached tokens, those that were loaded for the request, by level."""
    fidelity: str = "exact"
    """How far from exact their copies might be."""
    read_fidelity: str = "exact"
    """How far the cached tokens may have been."""
    load_s: float | None = None
    """The part of the time before `started_s` that it waited for that; None without a load."""
    attention: str = ""
    """The attention window that it ran under, as "window=W;sinks=S"; "" for all tokens."""
    part_tokens: dict[str, int] = {}
    """By tier of the prompt."""
    choice: bytes = b""
    """Why it went to its engine, as the gateway's router packs it; empty: not chosen, or several
    prompts."""


class RequestFilter(Struct, frozen=True):
    """Conditions that all have to hold: a tenant, a code or an ending, and a time of receipt in
    [since_ms, until_ms)."""

    since_ms: int
    until_ms: int
    tenant_id: int | None = None
    code: str | None = None
    before_id: str | None = None
    """Only requests before this one."""


class EndedRequest(Struct, frozen=True):
    """An ended request as far as it is known: its ledger entry, its record, or both."""

    request_id: str
    entry: UsageEntry | None
    record: RequestRecord | None
    entry_id: int = 0


def received_ms(request_id: str) -> int | None:
    """Return when a request was received, by its id; None for an id of another form."""
    try:
        return int(request_id[:_TIME_DIGITS], 16) if len(request_id) == _ID_DIGITS else None
    except ValueError:
        return None


def received_between(store: Store, since_ms: int, until_ms: int) -> tuple[int, int] | None:
    """Return when the first and the last settled request of all tenants in [since, until) were
    received; None if none is known. O(1). Raises StoreError."""
    bounds = (_first_id(since_ms), _first_id(until_ms))
    found = store.query(
        "select min(request_id), max(request_id) from ledger"
        " where request_id >= ? and request_id < ?",
        bounds,
    )[0]
    first, last = (None if one is None else received_ms(one) for one in found)
    return None if first is None or last is None else (first, last)


def write_records(store: Store, records: Sequence[RequestRecord]) -> None:
    """Write records in one transaction. Raises StoreError."""
    with store.change() as db:
        db.execute_many(
            "insert into request_records (request_id, tenant_id, code, record)"
            " values (?, ?, ?, ?) on conflict (request_id) do nothing",
            [
                (one.request_id, one.tenant_id, _code(one), msgspec.msgpack.encode(one))
                for one in records
            ],
        )


def delete_old_records(store: Store, now_ms: int) -> bool:
    """Delete records older than a week or beyond `RECORDS_MAX`, up to `DELETED_AT_ONCE`: of those
    beyond, the oldest of the tenant that has the most.

    Returns whether more are left. O(records). Raises StoreError.
    """
    oldest_id = _first_id(now_ms - KEPT_MS)
    (old,) = store.query("select count(*) from request_records where request_id < ?", (oldest_id,))[
        0
    ]
    held = store.query(
        "select count(*), tenant_id from request_records group by tenant_id order by 1 desc"
    )
    surplus = sum(row[0] for row in held) - RECORDS_MAX
    if old > 0:
        where, count = "request_id < ?", min(old, DELETED_AT_ONCE)
        bound: Value = oldest_id
    elif surplus > 0:
        most, bound = held[0]
        # Down to the next tenant's count: no tenant gives more than its excess, or an equal part.
        excess = max(most - (held[1][0] if len(held) > 1 else 0), -(-surplus // len(held)))
        where, count = "tenant_id = ?", min(surplus, DELETED_AT_ONCE, excess)
    else:
        return False
    with store.change() as db:
        db.execute(
            "delete from request_records where request_id in (select request_id from"
            f" request_records where {where} order by request_id limit ?)",
            (bound, count),
        )
        db.execute(
            "delete from request_causes where request_id < ? and request_id not in"
            " (select request_id from request_records)",
            (_first_id(now_ms - CAUSE_ALONE_MS),),
        )
    return bool(max(old, surplus) > count)


def list_requests(store: Store, wanted: RequestFilter, limit: int) -> list[EndedRequest]:
    """Return ended requests, the last received first.

    O(limit); with a code, of a tenant, O(entries of the period that have the code), and with the
    code `done` O(the tenant's). Records without an entry are few. Raises StoreError.
    """
    before = min(wanted.before_id or _LAST_ID, _first_id(wanted.until_ms))
    values: list[Value] = [_first_id(wanted.since_ms), before]
    settled = store.query(
        f"select entry_id, record, {_ENTRIES} from ledger left join request_records using"
        f" (request_id) where {_conditions(wanted, 'ledger', 'ending')}"
        f" order by ledger.request_id desc limit {limit:d}",
        (*values, *_filters(wanted)),
    )
    others = store.query(
        "select record from request_records as r where not exists (select 1 from ledger where"
        f" ledger.request_id = r.request_id) and {_conditions(wanted, 'r', 'code')}"
        f" order by r.request_id desc limit {limit:d}",
        (*values, *_filters(wanted)),
    )
    found = [*map(_settled, settled), *map(_unsettled, others)]
    return sorted(found, key=lambda one: one.request_id, reverse=True)[:limit]


def _filters(wanted: RequestFilter) -> list[Value]:
    """Return the values of the conditions behind the period's."""
    return [one for one in (wanted.tenant_id, wanted.code) if one is not None]


def _conditions(wanted: RequestFilter, table: str, code: str) -> str:
    """Return the conditions of a query: only those that are given, so that an index serves them."""
    found = f"{table}.request_id >= ? and {table}.request_id < ?"
    if wanted.tenant_id is not None:
        found += f" and {table}.tenant_id = ?"
    if wanted.code is not None:
        found += f" and {table}.{code} = ?"
        if wanted.code != "done":
            found += f" and {table}.{code} <> 'done'"  # the index has no others
    return found


def find_request(store: Store, request_id: str) -> EndedRequest | None:
    """Return one ended request, or None. O(1). Raises StoreError."""
    settled = store.query(
        f"select entry_id, record, {_ENTRIES} from ledger left join request_records using"
        " (request_id) where ledger.request_id = ?",
        (request_id,),
    )
    if settled:
        return _settled(settled[0])
    rows = store.query("select record from request_records where request_id = ?", (request_id,))
    return _unsettled(rows[0]) if rows else None


def last_request_ms(store: Store, tenant_id: int) -> int | None:
    """Return when the tenant's last recorded or settled request was received; None if none was.
    O(1). Raises StoreError."""
    (booked_ms,) = store.query(
        "select max(booked_ms) from ledger where tenant_id = ?", (tenant_id,)
    )[0]
    (last_id,) = store.query(
        "select max(request_id) from request_records where tenant_id = ?", (tenant_id,)
    )[0]
    known = (booked_ms, None if last_id is None else received_ms(last_id))
    return max((at_ms for at_ms in known if at_ms is not None), default=None)


def _first_id(at_ms: int) -> str:
    """Return the lowest id of a request received at an instant or later."""
    return f"{max(0, at_ms):0{_TIME_DIGITS}x}"


def _code(record: RequestRecord) -> str:
    """Return the code of a refusal or failure, or else the ending."""
    return record.code or record.ending


_RECORD = msgspec.msgpack.Decoder(RequestRecord).decode


def _settled(row: Row) -> EndedRequest:
    entry_id, record, *fields = row
    entry = entry_of(fields)
    known = None if record is None else _RECORD(bytes(record))
    return EndedRequest(entry.request_id, entry, known, entry_id)


def _unsettled(row: Row) -> EndedRequest:
    record = _RECORD(bytes(row[0]))
    return EndedRequest(record.request_id, None, record)
